"""Operators of other packages as curvatures: a scipy LinearOperator, one of curvlinops, a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlab.curvature import Curvature, Definiteness
from curvlab.curvature_layers import OperatorLayer
from curvlab.exceptions import ArgumentError, describe_argument
from curvlab.linalg import OperatorBlock
from curvlab.linalg.estimators import gaussian_rows
from curvlab.linalg.flat import flatten, unflatten
from curvlab.problem import Problem

__all__ = ["curvature_from"]

ASYMMETRY = 1e-3  # of uᵀAv: far above the rounding of any dtype
ROWS_AT_ONCE = 256  # vectors that a matrix is multiplied with in one pass


def curvature_from(
    operator: Any,
    like: nn.Module | Problem | Mapping[str, Tensor] | None = None,
    *,
    name: str | None = None,
) -> Curvature:
    """Any symmetric linear operator as a curvature, known by its products.

    Args:
        operator: a scipy LinearOperator, a curvlinops operator, a matrix, or whatever multiplies a flat
            vector with `@`.
        like: names the blocks and gives their shapes, in the operator's order: a model (its trainable
            parameters), a problem, or {name: tensor}. Without it there is one block, `operator`.
        name: what the curvature is called; by default the operator's class.

    >>> import numpy as np, curvlab
    >>> from scipy.sparse.linalg import aslinearoperator
    >>> curvature = curvlab.curvature_from(aslinearoperator(np.diag([1.0, 3.0])))
    >>> curvlab.spectrum(curvature, k=1).eigenvalues.tolist()
    [3.0]
    """
    size = _size_of(operator)
    example, product = _product_of(operator)
    tensors = _tensors_like(like)
    shapes = {key: tuple(t.shape) for key, t in tensors.items()} if tensors else {"operator": (size,)}
    expected = sum(int(torch.Size(shape).numel()) for shape in shapes.values())
    if size == 0:
        raise ArgumentError("curvature_from: the operator is 0 × 0; expected at least one entry")
    if expected != size:
        raise ArgumentError(
            f"curvature_from: the operator is {size} × {size}, and `like` has {expected} entries in "
            f"{len(shapes)} parameters; expected as many. Give the parameters that the operator is of"
        )
    example = next(iter(tensors.values())).detach() if tensors else example
    _check_symmetric(product, size, example)

    def full_product(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        image = product(flatten(vectors, list(shapes)))
        return unflatten(image.to(example), shapes)

    layers = tuple(OperatorLayer(key, {key: _block(key, shapes, full_product, example)}) for key in shapes)
    return Curvature(
        type(operator).__name__ if name is None else name,
        "of the operator",
        layers,
        Definiteness(False, "not known of an operator from elsewhere"),
        full_product=full_product,
        structure="full",
        products_at_once=ROWS_AT_ONCE if isinstance(operator, Tensor) else 1,
    )


def _check_symmetric(product: Callable[[Tensor], Tensor], size: int, example: Tensor) -> None:
    """Two products tell apart what is no real symmetric matrix: uᵀ A v = vᵀ A u."""
    vectors = gaussian_rows(2, size, example, seed=0)
    images = [product(one) for one in vectors]
    for image in images:
        if tuple(image.shape) != (size,) or image.is_complex():
            raise ArgumentError(
                f"curvature_from: a product with a vector of {size} entries gives {image.dtype} of shape "
                f"{tuple(image.shape)}; expected as many real numbers"
            )
        if not bool(torch.isfinite(image).all()):
            raise ArgumentError("curvature_from: a product with the operator is not finite")
    left, right = (
        float(u.double() @ image.double()) for u, image in zip(vectors.flip(0), images, strict=True)
    )
    largest = max(float(torch.linalg.vector_norm(image.double())) for image in images) * size**0.5
    if abs(left - right) > ASYMMETRY * largest:
        raise ArgumentError(
            f"curvature_from: the operator is not symmetric: uᵀAv = {left:.6g} and vᵀAu = {right:.6g} for "
            f"two random vectors. Give (A + Aᵀ)/2, or AᵀA"
        )


def _block(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    full_product: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    example: Tensor,
) -> OperatorBlock:
    """The diagonal block of one parameter."""

    def product(x: Tensor) -> Tensor:
        zeros = {key: x.new_zeros(shape) for key, shape in shapes.items() if key != name}
        ordered = {key: x if key == name else zeros[key] for key in shapes}
        return full_product(ordered)[name]

    return OperatorBlock(shapes[name], product, example.new_zeros(()))


def _size_of(operator: Any) -> int:
    shape = getattr(operator, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != shape[1] or not hasattr(operator, "__matmul__"):
        raise ArgumentError(
            f"curvature_from takes a square operator with `shape` and `@`, such as a scipy LinearOperator or "
            f"a curvlinops operator; got a {describe_argument(operator)}"
        )
    return int(shape[0])


def _product_of(operator: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A tensor of the operator's dtype and device, and its product with one."""
    dtype = getattr(operator, "dtype", None)
    if isinstance(dtype, torch.dtype):
        device = getattr(operator, "device", None)
        if isinstance(operator, Tensor) and not dtype.is_floating_point and not dtype.is_complex:
            operator = operator.double()
            dtype = operator.dtype
        # A copy: an operator may write every image into one buffer.
        return torch.empty(0, dtype=dtype, device=device), lambda x: (operator @ x.to(dtype)).clone()
    kind = np.dtype(np.float64 if dtype is None else dtype)
    if kind.kind not in "fc":  # vectors have fractions where a matrix of integers has none
        kind = np.dtype(np.float64)
    example = torch.from_numpy(np.zeros(0, dtype=kind if kind.kind == "f" else np.float64))

    def product(x: Tensor) -> Tensor:
        image = np.array(operator @ x.numpy(force=True).astype(kind, copy=False))
        return torch.as_tensor(image, device=x.device)

    return example, product


def _tensors_like(like: nn.Module | Problem | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if like is None:
        return {}
    if isinstance(like, Problem):
        return {n: like.network.parameters[n] for layer in like.layers for n in layer.names}
    if isinstance(like, nn.Module):
        return {name: p for name, p in like.named_parameters() if p.requires_grad}
    if isinstance(like, Mapping):
        return dict(like)
    raise ArgumentError(
        f"curvature_from: `like` is a model, a problem or a mapping of names to tensors; got a "
        f"{describe_argument(like)}"
    )
