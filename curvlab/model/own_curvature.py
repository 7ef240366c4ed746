"""The local Hessians of every example at every non-linear node, in factors: M_{i,n} = N⁺N⁺ᵀ - N⁻N⁻ᵀ.

`curvlab.model.nodes` has the nodes whose *mean* curvature is of use. Here are all others too, and for each
node the signed factors of every example's own local Hessian, with ḡ = ∂ξ_i/∂f:

    element-wise         diag(σ'' ⊙ ḡ)
    normalisation        λ₀ on the complement of span{1, g, y}, and a 2 × 2 problem inside it
    softmax              Cᵀ diag(w) C with C = I - 1pᵀ, w = p ⊙ (ḡ - pᵀḡ); log-softmax: w = -(Σḡ) p;
                         logsumexp: w = ḡ p
    a ⊙ b, a / b         for each entry a 2 × 2 matrix of second derivatives times ḡ
    A B                  Σ_k A_:kᵀ Ḡ B_k:ᵀ, split by the singular vectors of Ḡ: σ/2 [(α + β)² - (α - β)²]

A function that is none of these is named in `unknown`: the Hessian of rows is refused with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg.execution import eigh
from curvlab.model.nodes import (
    DIVISIONS,
    NORMS,
    ElementwiseNode,
    NodeFinder,
    NodeInput,
    NonlinearNode,
    NormNode,
    norm_node,
    overwritten,
    weak_hook,
)

__all__ = ["FurtherFinder", "FurtherNode", "OwnCurvature", "SoftmaxNode", "own_curvature"]

SOFTMAX = frozenset({"softmax", "log_softmax", "logsumexp"})
PAIRS = frozenset({"mul", "rmul", "imul", "multiply", *DIVISIONS} - {"addcdiv"})
MATRIX_PRODUCTS = frozenset({"matmul", "rmatmul", "bmm"})


class OwnCurvature(ABC):
    """The factors N⁺ and N⁻ of a node's local Hessians on one batch."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """How many columns N has for one example."""

    @abstractmethod
    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        """N ε for ε of shape (examples, columns), at each input of the node."""


# ------------------------------------------------------------------------------------------- further nodes


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor of the forward, without its graph, and the version it had."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> HeldTensor:
        """The tensor as it is now."""
        return cls(tensor.detach(), -1 if tensor.is_meta else tensor._version)

    def unwritten(self, name: str) -> Tensor:
        """The tensor; refused where the forward has overwritten it since."""
        if self.version >= 0 and self.tensor._version != self.version:
            raise overwritten(name)
        return self.tensor


@dataclass(eq=False)
class FurtherNode(ABC):
    """A call of a function whose mean curvature is left out; `places` are its inputs that vary."""

    name: str
    places: tuple[NodeInput, ...]
    receive: Callable[[Tensor], None] | None = field(default=None, init=False)

    def hear(self, gradient: Tensor) -> None:
        """The hook at f."""
        if self.receive is not None:
            self.receive(gradient)

    @abstractmethod
    def own_curvature(self, gradient: Tensor) -> OwnCurvature:
        """The local Hessians, from ∂ξ_i/∂f of every example."""


@dataclass(eq=False)
class SoftmaxNode(FurtherNode):
    """Softmax, log-softmax or logsumexp over one dimension of u; what autograd keeps of it is held."""

    held: HeldTensor
    dim: int

    def returned(self, output: Tensor) -> None:
        """Take note of what the call gave."""
        if self.name != "logsumexp":
            self.held = HeldTensor.of(output)

    def own_curvature(self, gradient: Tensor) -> OwnCurvature:
        held = self.held.unwritten(self.name)
        if self.name == "softmax":
            p = held
            weights = p * (gradient - (p * gradient).sum(self.dim, keepdim=True))
        elif self.name == "log_softmax":
            p = held.exp()
            weights = -gradient.sum(self.dim, keepdim=True) * p
        else:
            p = held.softmax(self.dim)
            weights = p * (gradient if gradient.ndim == p.ndim else gradient.unsqueeze(self.dim))
        return _SoftmaxCurvature(self.places[0], self.dim, p, weights)


@dataclass(frozen=True, eq=False)
class _SoftmaxCurvature(OwnCurvature):
    place: NodeInput
    dim: int
    p: Tensor
    weights: Tensor

    @property
    def columns(self) -> int:
        return self.p.numel() // self.place.rows.examples

    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        rows = self.place.rows
        signs = rows.back(coordinates.reshape(rows.examples, *rows.counts))
        x = _root(self.weights, negative) * signs
        return [(self.place, x - self.p * x.sum(self.dim, keepdim=True))]


@dataclass(eq=False)
class PairNode(FurtherNode):
    """A product or quotient of two tensors, entry by entry (with broadcasting); one of them may be constant.

    `inputs` are both, and `varying` says which of them the `places` belong to.
    """

    inputs: tuple[HeldTensor, HeldTensor]
    varying: tuple[int, ...]
    quotient: bool

    def own_curvature(self, gradient: Tensor) -> OwnCurvature:
        given = [one.unwritten(self.name) for one in self.inputs]
        a, b = (one.expand(gradient.shape) for one in given)
        if self.quotient:
            entries = {(0, 0): torch.zeros_like(gradient), (0, 1): -gradient / b**2}
            entries[1, 1] = 2 * gradient * a / b**3
        else:
            zero = torch.zeros_like(gradient)
            entries = {(0, 0): zero, (0, 1): gradient, (1, 1): zero}
        rows = [[entries[min(i, j), max(i, j)] for j in self.varying] for i in self.varying]
        matrices = torch.stack([torch.stack(row, -1) for row in rows], -1)
        shapes = tuple(tuple(given[i].shape) for i in self.varying)
        return _PairCurvature(self.places, shapes, matrices)


@dataclass(frozen=True, eq=False)
class _PairCurvature(OwnCurvature):
    """`matrices` are (*output, k, k): for every entry that of its k varying arguments."""

    places: tuple[NodeInput, ...]
    shapes: tuple[tuple[int, ...], ...]
    matrices: Tensor

    @property
    def columns(self) -> int:
        return self.matrices[..., 0].numel() // self.places[0].rows.examples

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        return eigh(self.matrices)

    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        values, vectors = self._split
        batch_dim = self.places[0].rows.batch_dim
        shape = list(values.shape)
        shape.insert(0, shape.pop(batch_dim))
        signs = coordinates.reshape(shape).movedim(0, batch_dim)
        found = torch.einsum("...ab,...b->...a", vectors, _root(values, negative) * signs)
        pieces = zip(self.places, self.shapes, found.unbind(-1), strict=True)
        return [(place, piece.sum_to_size(shape)) for place, shape, piece in pieces]


@dataclass(eq=False)
class MatrixProductNode(FurtherNode):
    """A B for batches of matrices, both of which vary."""

    inner: int

    def own_curvature(self, gradient: Tensor) -> OwnCurvature:
        return _MatrixProductCurvature(self.places, self.inner, gradient)


@dataclass(frozen=True, eq=False)
class _MatrixProductCurvature(OwnCurvature):
    places: tuple[NodeInput, ...]
    inner: int
    gradient: Tensor

    @property
    def columns(self) -> int:
        *batch, rows, columns = self.gradient.shape
        return prod(batch) * min(rows, columns) * self.inner // self.places[0].rows.examples

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        left, values, right = torch.linalg.svd(self.gradient, full_matrices=False)
        return left, (values / 2).sqrt(), right.mT

    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        left, roots, right = self._split
        signs = coordinates.reshape(*roots.shape, self.inner) * roots[..., None]
        second = right @ signs
        return [(self.places[0], left @ signs), (self.places[1], (-second if negative else second).mT)]


# --------------------------------------------------------------- nodes whose mean curvature is of use as well


@dataclass(frozen=True, eq=False)
class _DiagonalCurvature(OwnCurvature):
    place: NodeInput
    values: Tensor

    @property
    def columns(self) -> int:
        return self.values.numel() // self.place.rows.examples

    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        rows = self.place.rows
        signs = rows.back(coordinates.reshape(rows.examples, *rows.counts))
        return [(self.place, _root(self.values, negative) * signs)]


@dataclass(frozen=True, eq=False)
class _NormCurvature(OwnCurvature):
    """N ε = √λ₀ Π_⊥ ε + Σ_j √μ_j q_j (q_jᵀ ε), with μ and q of the part inside span{y, g}."""

    place: NodeInput
    centred: bool
    y: Tensor
    g: Tensor
    factor: Tensor  # 1 / (n s²)

    @property
    def columns(self) -> int:
        return prod(self.y.shape[1:])

    @property
    def _along(self) -> Tensor:
        return (self.g * self.y).sum(-1, keepdim=True)

    def _product(self, x: Tensor) -> Tensor:
        """M x for rows x without a mean."""
        units, inner = x.shape[-1], lambda left: (left * x).sum(-1, keepdim=True)
        bent = x - 3 * self.y * inner(self.y) / units
        return -self.factor * (self.g * inner(self.y) + self.y * inner(self.g) + self._along * bent)

    @cached_property
    def _inside(self) -> tuple[Tensor, Tensor]:
        """μ, (…, 2), and q, (…, n, 2)."""
        first = _unit(self.y)
        rest = self.g - first * (first * self.g).sum(-1, keepdim=True)
        rest = rest - first * (first * rest).sum(-1, keepdim=True)
        small = rest.norm(dim=-1, keepdim=True) <= 1e-12 * self.g.norm(dim=-1, keepdim=True)
        second = torch.where(small, 0, _unit(rest))
        basis = torch.stack([first, second], -1)
        images = torch.stack([self._product(first), self._product(second)], -1)
        inside = basis.mT @ images
        values, turn = eigh((inside + inside.mT) / 2)
        return values, basis @ turn

    def times(self, coordinates: Tensor, negative: bool) -> list[tuple[NodeInput, Tensor]]:
        values, vectors = self._inside
        signs = coordinates.reshape(self.y.shape)
        centred = signs - signs.mean(-1, keepdim=True) if self.centred else signs
        inner = torch.einsum("...na,...n->...a", vectors, centred)
        outside = centred - torch.einsum("...na,...a->...n", vectors, inner)
        x = _root(-self.factor * self._along, negative) * outside
        x = x + torch.einsum("...na,...a->...n", vectors, _root(values, negative) * inner)
        return [(self.place, self.place.rows.back(x))]


def _unit(x: Tensor) -> Tensor:
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1)


def _root(values: Tensor, negative: bool) -> Tensor:
    """√max(±λ, 0)."""
    return (-values if negative else values).clamp(min=0).sqrt()


def own_curvature(node: NonlinearNode | FurtherNode, gradient: Tensor) -> OwnCurvature:
    """The local Hessians of a node for every example, from ∂ξ_i/∂f."""
    if isinstance(node, FurtherNode):
        return node.own_curvature(gradient)
    if isinstance(node, ElementwiseNode):
        return _DiagonalCurvature(node, node.own_terms(gradient))
    assert isinstance(node, NormNode)
    y, g, square = node.normalised(gradient)
    return _NormCurvature(node, node.centred, y, g, 1 / (y.shape[-1] * square[..., None]))


# ------------------------------------------------------------------------------------------ finding them


@dataclass(eq=False)
class FurtherFinder:
    """Finds further nodes among the calls whose own curvature a `NodeFinder` leaves out."""

    finder: NodeFinder
    nodes: list[FurtherNode | NonlinearNode] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)

    def before(
        self, base: str, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Sequence[Tensor]
    ) -> FurtherNode | NonlinearNode | None:
        """The node that a call is, before it is made; None, with its name in `unknown`, where it is none."""
        node = self._node(base, args, kwargs, varying)
        if node is None:
            self.unknown[base] = None
            return None
        places = node.places if isinstance(node, FurtherNode) else (node,)
        for place, tensor in zip(places, varying, strict=True):
            tensor.register_hook(weak_hook(place.inject))
        self.nodes.append(node)
        return node

    def _node(
        self, base: str, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Sequence[Tensor]
    ) -> FurtherNode | NonlinearNode | None:
        rows = [self.finder.rows_of(tensor) for tensor in varying]
        known = [one for one in rows if one is not None]
        if len(known) < len(rows):
            return None
        places = tuple(NodeInput(one) for one in known)
        if base in SOFTMAX and len(places) == 1:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            held = HeldTensor.of(varying[0])
            return SoftmaxNode(base, places, held, dim) if isinstance(dim, int) else None
        if base in NORMS and len(places) == 1:
            return norm_node(base, varying[0], known[0], args, kwargs, None)
        if base in PAIRS:
            return _pair(base, places, args, varying)
        if base in MATRIX_PRODUCTS and len(varying) == 2:
            return _matrix_product(base, places, varying)
        return None


def _pair(
    base: str, places: tuple[NodeInput, ...], args: tuple[Any, ...], varying: Sequence[Tensor]
) -> PairNode | None:
    if len(args) != 2 or len({place.rows.batch_dim for place in places}) > 1:
        return None
    given = [torch.as_tensor(one, dtype=varying[0].dtype, device=varying[0].device) for one in args]
    if base.startswith(("rdiv", "rtruediv")):
        given.reverse()
        args = args[::-1]
    held = tuple(HeldTensor.of(one.clone() if base.startswith("i") else one) for one in given)
    which = tuple(i for i, one in enumerate(args) if any(one is tensor for tensor in varying))
    dims = {one.ndim for one in varying}
    aligned = len(dims) == 1 or (all(place.rows.batch_dim == 0 for place in places) and len(varying) == 1)
    if len(which) != len(varying) or not aligned:
        return None
    return PairNode(base, places, (held[0], held[1]), which, base in DIVISIONS)


def _matrix_product(
    base: str, places: tuple[NodeInput, ...], varying: Sequence[Tensor]
) -> MatrixProductNode | None:
    a, b = varying if base != "rmatmul" else (varying[1], varying[0])
    ordered = places if base != "rmatmul" else (places[1], places[0])
    batched = a.ndim >= 3 and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not batched or any(place.rows.batch_dim for place in ordered):
        return None
    return MatrixProductNode(base, ordered, a.shape[-1])
