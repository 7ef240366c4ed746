"""Conjugate gradients on blocks as they are: matrix-free curvatures, a start vector, a preconditioner.

A curvature with cross-layer blocks is one system over all parameters; any other is one system a block.
With the exact Hessian this is Hessian-free optimisation (truncated Newton).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.exceptions import SolveError
from curvlab.linalg.cg import CGResult, OneSystem, conjugate_gradients
from curvlab.linalg.flat import flatten, unflatten
from curvlab.measure import device
from curvlab.solvers.damping import Damping

__all__ = ["BlockResult", "Preconditioner", "jacobi", "solve_blocks"]

Preconditioner = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class BlockResult:
    """The direction of one parameter and the CG run it comes from (shared where the system is)."""

    direction: Tensor
    result: CGResult


def jacobi(curvature: Curvature, damping: Damping) -> Preconditioner:
    """x ↦ x / (s diag(C) + τ), with negative diagonal entries taken as zero."""
    inverse = {
        name: 1 / (damping.scale * diagonal.clamp(min=0) + damping.shift)
        for name, diagonal in curvature.diagonal().items()
    }
    return lambda name, x: inverse[name] * x


def solve_blocks(
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    *,
    max_iter: int,
    tol: float,
    start: Mapping[str, Tensor] | None = None,
    preconditioner: Preconditioner | None = None,
) -> dict[str, BlockResult]:
    """(s C + τI) d = -g, one system a block or, for a full Hessian, one for all."""
    names = list(curvature.blocks)
    groups = [names] if curvature.full_product is not None else [[name] for name in names]
    results: dict[str, BlockResult] = {}
    for group in groups:
        results |= _solve_group(curvature, gradient, damping, group, max_iter, tol, start, preconditioner)
    return results


def _solve_group(
    curvature: Curvature,
    gradient: Mapping[str, Tensor],
    damping: Damping,
    names: list[str],
    max_iter: int,
    tol: float,
    start: Mapping[str, Tensor] | None,
    preconditioner: Preconditioner | None,
) -> dict[str, BlockResult]:
    shapes = {name: curvature.blocks[name].shape for name in names}
    g = flatten({name: gradient[name] for name in names}, names)

    def product(x: Tensor) -> Tensor:
        parts = unflatten(x, shapes)
        if curvature.full_product is not None:
            return flatten(curvature.full_product(parts), names)
        return flatten({name: curvature.blocks[name].matmul(part) for name, part in parts.items()}, names)

    def precondition(x: Tensor) -> Tensor:
        assert preconditioner is not None
        images = {name: preconditioner(name, part) for name, part in unflatten(x, shapes).items()}
        for name, image in images.items():
            if not isinstance(image, Tensor) or tuple(image.shape) != shapes[name]:
                given = f"shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
                raise SolveError(
                    f"the preconditioner gives {given} for `{name}`; expected a tensor of shape "
                    f"{shapes[name]}"
                )
        return flatten(images, names)

    result = conjugate_gradients(
        lambda x: damping.scale * product(x) + damping.shift * x,
        -g,
        OneSystem(),
        max_iter=max_iter,
        tol=tol,
        read_interval=device.read_interval(g),
        start=None if start is None else flatten({name: start[name] for name in names}, names),
        precondition=None if preconditioner is None else precondition,
    )
    return {name: BlockResult(part, result) for name, part in unflatten(result.x, shapes).items()}
