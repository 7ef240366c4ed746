"""Checks on the way in and on the way out of a solve, with one read back to the host each.

A formed gradient of a weight is looked at on the way out only, where a step is not finite: to look at it
costs a pass over it, which is a good part of an EA-CG solve, and NaN and infinity do not get lost in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import SolveError
from curvlab.gradient import RowGradient
from curvlab.linalg.cg import Outcome
from curvlab.measure import device
from curvlab.solvers.by_layers import entry_of
from curvlab.solvers.solution import Solution

__all__ = ["check_gradient", "check_solution"]


def check_gradient(curvature: Curvature, gradient: Mapping[str, Tensor]) -> None:
    """Refuse a gradient with a missing, misshapen or (bias, factors) non-finite entry, by its name."""
    blocks = curvature.blocks
    missing = [name for name in blocks if name not in gradient]
    if missing:
        raise SolveError(f"the gradient has no entry for {missing}; expected {list(blocks)}")
    held = {}
    for name, block in blocks.items():
        entry = entry_of(gradient, name)
        if not isinstance(entry, Tensor | RowGradient):
            raise SolveError(f"the gradient of `{name}` is {type(entry).__name__}; expected a tensor")
        if tuple(entry.shape) != block.shape:
            raise SolveError(
                f"the gradient of `{name}` has shape {tuple(entry.shape)}; expected {block.shape}"
            )
        if isinstance(entry, Tensor):
            _check_kind(name, entry, block.example)
        # In factors: the inputs were checked when they were recorded, and the mean is the bias's gradient.
        if isinstance(entry, RowGradient):
            held[name] = entry.gradients.mean
        elif entry.ndim == 1:
            held[name] = entry
    sums = {name: tensor.sum() for name, tensor in held.items()}
    _refuse([name for name in _not_finite(sums) if not _finite([held[name]])])


def _check_kind(name: str, entry: Tensor, example: Tensor) -> None:
    """Refuse a tensor of another dtype or device than the curvature's."""
    if (entry.dtype, entry.device) != (example.dtype, example.device):
        raise SolveError(
            f"the gradient of `{name}` is {entry.dtype} on {entry.device}; the curvature is {example.dtype} "
            f"on {example.device}. Use gradient.to(…) or curvature.to(…)"
        )


def _refuse(bad: list[str]) -> None:
    if bad:
        raise SolveError(f"the gradient of {bad} holds NaN or infinity: has training diverged?")


def check_solution(solution: Solution, curvature: Curvature, gradient: Mapping[str, Tensor]) -> None:
    """Raise where a step is not finite, or a breakdown comes from a gradient or a curvature that is not."""
    signs = solution.direction.sums()
    for name, block in solution.blocks.items():
        if block.outcome is not None:
            broken = block.outcome == Outcome.BREAKDOWN
            signs[name] = torch.where(broken, torch.full_like(signs[name], torch.nan), signs[name])
    spoiled = _not_finite(signs)
    held = {name: entry_of(gradient, name) for name in spoiled}
    _refuse([name for name, entry in held.items() if isinstance(entry, Tensor) and not _finite([entry])])
    for name in spoiled:
        layer = next(layer for layer in curvature.layers if name in layer.blocks)
        tensors = _tensors(layer)
        if layer.weight_operator is not None or layer.bias_operator is not None:
            tensors.append(solution.blocks[name].measures.quadratic())
        if not _finite(tensors):
            raise SolveError(
                f"the curvature of layer `{layer.name}` by `{curvature.provider}` holds NaN or infinity"
            )
        if not _finite([solution.direction[name]]):
            raise SolveError(
                f"layer `{layer.name}`: the direction of `{name}` by `{solution.solver}` on "
                f"`{curvature.provider}` is not finite: the curvature or the solve overflows. "
                f"Increase the damping, or use float64"
            )


def _not_finite(sums: Mapping[str, Tensor]) -> list[str]:
    """The names whose sum is not finite: a single read where all are."""
    if not sums:
        return []
    flags = torch.isfinite(torch.stack(list(sums.values())))
    if not device.readable(flags) or bool(flags.all()):
        return []
    return [name for name, finite in zip(sums, flags.tolist(), strict=True) if not finite]


def _tensors(layer: LayerCurvature) -> list[Tensor]:
    outputs = {} if layer.output is None else layer.output.tensors()
    inputs = {} if layer.inputs is None else layer.inputs.tensors()
    return [*outputs.values(), *inputs.values()]


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
