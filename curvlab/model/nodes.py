"""Non-linear nodes of a forward: where a layer's Hessian has more than the Gauss-Newton matrix.

With u_n the inputs of the network's non-linear nodes f_n and M_n = Σ_k (∂ξ/∂f_n)_k ∇²f_{n,k} their local
Hessians, the Hessian at a layer's output z is

    ∂²ξ/∂z² = Jᵀ ∇²ξ J + Σ_n J_nᵀ M_n J_n         J = ∂logits/∂z,  J_n = ∂u_n/∂z

Element-wise functions have M = diag(σ''(u) ⊙ ∂ξ/∂h). Of a normalisation y = c/s over d units (c centred where
it centres, Π = I - 11ᵀ/d; else Π = I), with g = Π (weight ⊙ ∂ξ/∂out),

    M = -[g yᵀ + y gᵀ + (gᵀy)(Π - 3 yyᵀ/d)] / (d s²)

A `NodeFinder` looks at every function that a forward calls on data of the batch: it knows those that are
linear or piecewise linear, takes element-wise functions and normalisations as nodes, and names all others,
whose own curvature is left out (softmax, products of two of the batch's tensors). Nothing of the forward is
changed: a hook at u_n adds a cotangent to what a backward pass brings there, and a hook at f_n hears ∂ξ/∂f_n.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlab.activations import Activation, Elementwise, activation_of_call
from curvlab.exceptions import ProblemError
from curvlab.linalg.execution import eigh, in_pieces

__all__ = [
    "Cotangent",
    "CurvatureRoot",
    "ElementwiseNode",
    "NodeFinder",
    "NodeInput",
    "NodeRows",
    "NonlinearNode",
    "NormNode",
    "base_name",
    "formed",
    "is_linear",
    "norm_node",
    "overwritten",
    "starting_at_nodes",
    "weak_hook",
]

ROUNDING = 1e-12  # of the largest eigenvalue of M̄: what is below is zero, along 1 for instance
LARGEST_NORM = 2048  # units: M̄ is a matrix, and its eigenvectors are needed
PIECE = 1 << 18  # entries whose second derivative is taken at a time, on the CPU


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _words(
    """tanh sigmoid gelu silu softplus elu selu celu mish logsigmoid softsign tanhshrink hardswish exp exp2
    expm1 log log2 log10 log1p sqrt rsqrt square pow reciprocal sin cos tan sinh cosh asinh atan erf erfc sinc
    arctan arcsinh"""
)
NORMS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "instance_norm": (
        "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
    ),
}  # fmt: skip
# Linear in each argument: a node only where two of the batch's tensors meet.
PRODUCTS = _words(
    """mul rmul imul multiply div rdiv truediv rtruediv itruediv divide matmul rmatmul mm bmm mv dot vdot
    einsum outer ger linear bilinear addmm baddbmm addbmm addmv addcmul addcdiv tensordot lerp conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding embedding_bag batch_norm"""
)
DIVISIONS = _words("div rdiv truediv rtruediv itruediv divide addcdiv")
# Linear, or piecewise linear, in all of the batch's tensors together.
LINEAR = _words(
    """add radd iadd sub rsub isub subtract neg pos positive cat concat concatenate stack hstack vstack dstack
    sum mean nanmean cumsum trace diagonal diag diag_embed reshape view view_as reshape_as flatten unflatten
    ravel squeeze unsqueeze permute transpose swapaxes swapdims movedim moveaxis t adjoint expand expand_as
    repeat repeat_interleave tile broadcast_to broadcast_tensors chunk split tensor_split unbind select narrow
    getitem setitem index_select gather take take_along_dim index_add index_copy index_put scatter scatter_add
    masked_fill masked_select masked_scatter where roll flip fliplr flipud rot90 tril triu pad constant_pad_nd
    unfold fold pixel_shuffle pixel_unshuffle interpolate upsample channel_shuffle clone contiguous to type
    type_as float double half bfloat16 cpu cuda detach requires_grad register_hook retain_grad as_strided
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d
    max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices max_unpool1d max_unpool2d max_unpool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    boolean_dispatch fn relu relu6 leaky_relu rrelu prelu hardtanh hardsigmoid hardshrink softshrink threshold
    clamp clip clamp_min clamp_max abs absolute max min amax amin maximum minimum fmax fmin topk sort sign
    copy fill zero zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full argmax
    argmin eq ne lt le gt ge isnan isinf isfinite isneginf isposinf isclose all any logical_not logical_and
    logical_or floor ceil round trunc bool long int item tolist"""
)
# Which dimension holds channels is read off the functions behind a tensor.
CHANNELS_FIRST = ("Convolution", "Pool", "BatchNorm", "GroupNorm", "Upsample", "Unfold")
CHANNELS_LAST = (
    "Addmm", "MmBackward", "Bmm", "Linear", "LayerNorm", "Embedding", "Permute", "Transpose", "View",
    "Reshape", "TBackward", "Softmax", "Stack", "Unflatten", "Baddbmm", "RmsNorm", "Squeeze",
)  # fmt: skip


@dataclass(frozen=True)
class NodeRows:
    """How a node's input lies: rows (m, P, G, n) of m examples, P positions and G groups of n units.

    `batch_dim` holds the examples, perhaps folded with positions; `channels_first`: units are dimension 1.

    >>> rows = NodeRows((2, 3, 4, 4), examples=2, channels_first=True)
    >>> rows.of(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 16, 1, 3])
    """

    shape: tuple[int, ...]
    examples: int
    batch_dim: int = 0
    channels_first: bool = False
    units: int | None = None
    groups: int = 1

    @property
    def counts(self) -> tuple[int, int, int]:
        """P, G and n."""
        last = self.shape[-1] if len(self.shape) > 1 else 1
        units = self.units or (self.shape[1] if self.channels_first else last)
        return prod(self.shape) // (self.examples * units * self.groups), self.groups, units

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor in the input's shape."""
        whole = tensor.movedim(self.batch_dim, 0)
        if self.channels_first and self.units is None:
            whole = whole.flatten(2).transpose(1, 2)
        return whole.reshape(self.examples, *self.counts)

    def back(self, rows: Tensor) -> Tensor:
        """A tensor in the input's shape, from its rows."""
        moved = list(self.shape)
        moved.insert(0, moved.pop(self.batch_dim))
        if self.channels_first and self.units is None:
            whole = rows.reshape(moved[0], -1, moved[1]).transpose(1, 2).reshape(moved)
        else:
            whole = rows.reshape(moved)
        return whole.movedim(0, self.batch_dim)

    def only(self, tensor: Tensor, example: int) -> Tensor:
        """The tensor with zeros for all examples but one."""
        rows = self.of(tensor)
        alone = torch.zeros_like(rows)
        alone[example] = rows[example]
        return self.back(alone)


Cotangent = Tensor | Callable[[], Tensor]
"""A tensor, or what makes it once a backward pass has come to where it starts: then it is never held."""


class NodeInput:
    """What a non-linear function is given, u: `cotangent` is added to what a backward pass brings there."""

    rows: NodeRows
    cotangent: Cotangent | None

    def __init__(self, rows: NodeRows) -> None:
        self.rows, self.cotangent = rows, None

    def inject(self, gradient: Tensor) -> Tensor | None:
        """The hook at u."""
        return None if self.cotangent is None else gradient + formed(self.cotangent)


@dataclass(eq=False)
class NonlinearNode(NodeInput, ABC):
    """One call of a non-linear function; `inputs` is u, without a graph, of which nothing else is held.

    `receive` is told ∂ξ/∂f during a backward pass.
    """

    name: str
    rows: NodeRows
    inputs: Tensor
    version: int = field(init=False)
    receive: Callable[[Tensor], None] | None = field(default=None, init=False)
    cotangent: Cotangent | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.version = -1 if self.inputs.is_meta else self.inputs._version

    def hear(self, gradient: Tensor) -> None:
        """The hook at f."""
        if self.receive is not None:
            self.receive(gradient)

    def check_unwritten(self) -> None:
        """Refuse to go on where the forward has overwritten u since."""
        if self.version >= 0 and self.inputs._version != self.version:
            raise overwritten(self.name)

    def no_curvature(self) -> Tensor:
        """M̄ of a node that the loss does not depend on."""
        _, groups, units = self.rows.counts
        return self.inputs.new_zeros(groups, units)

    @abstractmethod
    def mean_curvature(self, gradient: Tensor, weights: Tensor) -> Tensor:
        """Σ_i w_i mean_p M_ip from ∂ξ_i/∂f: (G, n) where M is diagonal, (G, n, n) where not."""


@dataclass(eq=False)
class ElementwiseNode(NonlinearNode):
    """h = σ(u), entry by entry: M = diag(σ'' ⊙ ∂ξ/∂h)."""

    function: Callable[[Tensor], Tensor]
    divisible: bool = True  # whether the function may be given a part of u, along its first dimension
    activation: Activation | None = None  # its closed form, where there is one

    def own_terms(self, gradient: Tensor) -> Tensor:
        """σ''(u) ⊙ ∂ξ/∂h, the diagonal of M, in the shape of u.

        Differentiating twice holds about ten tensors of the size of u, a closed form three: on the CPU it is
        done in pieces, which stay in the cache, so that at the widest node of a convolutional network it is
        not what takes the most memory of a step.
        """
        self.check_unwritten()
        if not self.divisible or not in_pieces(self.inputs) or self.inputs.numel() <= PIECE:
            return self._second_derivative(self.inputs) * gradient
        found = torch.empty_like(self.inputs)
        length = max(1, PIECE * len(found) // found.numel())
        for piece, u, g in zip(*(x.split(length) for x in (found, self.inputs, gradient)), strict=True):
            torch.mul(self._second_derivative(u), g, out=piece)
        return found

    def _second_derivative(self, u: Tensor) -> Tensor:
        """σ''(u), a new tensor: in closed form, or by differentiating twice."""
        known = None if self.activation is None else self.activation.second(u)
        return self._twice_differentiated(u) if known is None else known

    def _twice_differentiated(self, u: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            at = u.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.function(at).sum(), at, create_graph=True)
            if not slope.requires_grad:
                return torch.zeros_like(u)
            (second,) = torch.autograd.grad(slope.sum(), at, allow_unused=True)
        return torch.zeros_like(u) if second is None else second.detach()

    def mean_curvature(self, gradient: Tensor, weights: Tensor) -> Tensor:
        return torch.tensordot(weights, self.rows.of(self.own_terms(gradient)).mean(1), 1)


@dataclass(eq=False)
class NormNode(NonlinearNode):
    """y = c/s over groups of n units, with s² = c·c/n + eps; `scale` is what y is multiplied by, per unit."""

    centred: bool
    eps: float
    scale: Tensor | None

    def no_curvature(self) -> Tensor:
        _, groups, units = self.rows.counts
        return self.inputs.new_zeros(groups, units, units)

    def normalised(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows y, g = Π (weight ⊙ ∂ξ/∂out), and s²."""
        self.check_unwritten()
        u = self.rows.of(self.inputs)
        g = self.rows.of(gradient if self.scale is None else gradient * self.scale)
        if self.centred:
            u, g = u - u.mean(-1, keepdim=True), g - g.mean(-1, keepdim=True)
        square = u.square().mean(-1) + self.eps
        return u * square.rsqrt()[..., None], g, square

    def mean_curvature(self, gradient: Tensor, weights: Tensor) -> Tensor:
        y, g, square = self.normalised(gradient)
        positions, _, units = self.rows.counts
        along = (g * y).sum(-1)
        factor = weights[:, None, None] / (positions * units * square)
        # One product for g yᵀ + y gᵀ - 3 (gᵀy) yyᵀ/d: half of the last goes with each of the first two.
        half = torch.addcmul(g, y, along[..., None], value=-1.5 / units)
        cross = torch.einsum("ipga,ipgb->gab", half, factor[..., None] * y)
        identity = torch.eye(units, dtype=y.dtype, device=y.device)
        projection = identity - 1 / units if self.centred else identity
        total = (factor * along).sum((0, 1))
        return -(cross + cross.mT + total[:, None, None] * projection)


@dataclass(frozen=True, eq=False)
class CurvatureRoot:
    """N = Nᵀ with N² the part of one sign of a node's mean curvature: √|λ|, (G, n), and the eigenvectors.

    The symmetric root does not depend on which eigenvectors stand for an eigenvalue: draws are the same
    however the mean was summed up.

    >>> plus, minus = CurvatureRoot.split(torch.tensor([[4.0, -9.0]]))
    >>> plus.times(torch.ones(1, 1, 1, 2)).flatten(), minus.times(torch.ones(1, 1, 1, 2)).flatten()
    (tensor([2., 0.]), tensor([0., 3.]))
    """

    values: Tensor
    vectors: Tensor | None

    @cached_property
    def _matrix(self) -> Tensor | None:
        """N itself, (G, n, n); None where it is diagonal."""
        return None if self.vectors is None else (self.vectors * self.values[:, None]) @ self.vectors.mT

    @classmethod
    def split(cls, mean: Tensor) -> tuple[CurvatureRoot, CurvatureRoot]:
        """N⁺ and N⁻ of M̄ = N⁺N⁺ᵀ - N⁻N⁻ᵀ; `mean` is (G, n) for a diagonal, (G, n, n) for matrices."""
        values, vectors = (mean, None) if mean.ndim == 2 else eigh(mean)
        if vectors is not None:
            largest = values.abs().amax(1, keepdim=True)
            values = torch.where(values.abs() > ROUNDING * largest, values, 0)
        return cls(values.clamp(min=0).sqrt(), vectors), cls((-values).clamp(min=0).sqrt(), vectors)

    @classmethod
    def positive(cls, mean: Tensor, gamma: float) -> CurvatureRoot:
        """N of PosEig_γ(M̄) = N²: the root of both parts, which share no direction, N⁻ scaled by √|γ|."""
        return cls.joined(*cls.split(mean), gamma)

    @classmethod
    def joined(cls, plus: CurvatureRoot, minus: CurvatureRoot, gamma: float) -> CurvatureRoot:
        """That of N⁺ and N⁻."""
        return replace(plus, values=plus.values + abs(gamma) ** 0.5 * minus.values)

    def scaled(self, factor: float) -> CurvatureRoot:
        """The root times a number."""
        return replace(self, values=self.values * factor)

    def column(self, group: int, index: int) -> Tensor:
        """√|λ| q for one eigenvector q of a group, (n,): with these in the place of N, N Nᵀ is the same."""
        if self.vectors is None:
            unit = torch.zeros_like(self.values[group])
            unit[index] = self.values[group, index]
            return unit
        return self.vectors[group, :, index] * self.values[group, index]

    def times(self, coordinates: Tensor) -> Tensor:
        """N ε for ε of shape (m, P, G, n)."""
        if self._matrix is None:
            return coordinates * self.values
        return torch.einsum("ipga,gab->ipgb", coordinates, self._matrix)


def overwritten(name: str) -> ProblemError:
    """The error for a function of which something is needed that the forward has overwritten."""
    return ProblemError(
        f"the forward overwrites in place what `{name}` was given, so that its second derivative cannot be "
        f"computed. Take the in-place operation out"
    )


def base_name(func: Callable[..., Any]) -> str:
    """What a function of torch is called, whether it overwrites its argument or is an operator's."""
    return getattr(func, "__name__", str(func)).strip("_")


def is_linear(base: str, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Sequence[Tensor]) -> bool:
    """Whether a call is known to be linear, or piecewise linear, in all tensors of `varying` together."""
    if not varying or base in LINEAR:
        return True
    if base == "instance_norm":
        given = dict(zip(NORMS[base], args, strict=False)) | kwargs
        return not given.get("use_input_stats", True)
    numerator = args[1 if base.startswith("r") else 0] if len(args) > 1 else None  # `c / x` is x.__rdiv__(c)
    denominator = base in DIVISIONS and varying[0] is not numerator
    return base in PRODUCTS and len(varying) == 1 and not denominator


class NodeFinder:
    """Finds the non-linear nodes of a batch of so many `examples` among the calls of a forward."""

    def __init__(self, examples: int, sequences_first: bool = False) -> None:
        self.examples, self.sequences_first = examples, sequences_first
        self.nodes: list[NonlinearNode] = []
        self.left_out: dict[str, None] = {}
        self.omitted: str | None = None

    def before(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        varying: Sequence[Tensor],
    ) -> NonlinearNode | None:
        """The node that a call is, before it is made; `varying` are its differentiable data of the batch.

        `omitted` is the call's name where its own curvature is left out, else None.
        """
        base = base_name(func)
        self.omitted = None
        if is_linear(base, args, kwargs, varying):
            return None
        if base in PRODUCTS:
            self._leave_out(base)
            return None
        u = args[0] if args else kwargs.get("input")
        rows = self.rows_of(u) if len(varying) == 1 and u is varying[0] and isinstance(u, Tensor) else None
        node: NonlinearNode | None = None
        if rows is not None and isinstance(u, Tensor) and base in ELEMENTWISE:
            node = _elementwise(base, u, rows, func, args, kwargs)
        elif rows is not None and isinstance(u, Tensor) and base in NORMS:
            node = norm_node(base, u, rows, args, kwargs, LARGEST_NORM)
        if node is None:
            self._leave_out(base)
            return None
        assert isinstance(u, Tensor)
        u.register_hook(weak_hook(node.inject))
        self.nodes.append(node)
        return node

    def _leave_out(self, base: str) -> None:
        self.omitted = base
        self.left_out[base] = None

    def rows_of(self, u: Tensor) -> NodeRows | None:
        """How the examples lie in u; None where they do not lie in order in one of its first dimensions."""
        shape = tuple(u.shape)
        first = bool(shape) and shape[0] % self.examples == 0
        second = len(shape) > 1 and shape[1] == self.examples
        if second and (not first or self.sequences_first):
            return NodeRows(shape, self.examples, 1)
        return NodeRows(shape, self.examples, 0, len(shape) > 2 and _channels_first(u)) if first else None


def formed(cotangent: Cotangent) -> Tensor:
    """The cotangent itself."""
    return cotangent if isinstance(cotangent, Tensor) else cotangent()


@contextmanager
def starting_at_nodes(cotangents: Mapping[NodeInput, Cotangent]) -> Iterator[None]:
    """Let the backward passes inside start at the inputs of non-linear nodes, too."""
    for node, value in cotangents.items():
        node.cotangent = value
    try:
        yield
    finally:
        for node in cotangents:
            node.cotangent = None


def weak_hook(method: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """A hook that keeps nothing alive.

    A node holds u, which holds the graph, even without one of its own: a graph that held the node in turn
    would never be freed.
    """
    held = weakref.WeakMethod(method)

    def hook(gradient: Tensor) -> Tensor | None:
        found = held()
        return None if found is None else found(gradient)

    return hook


def _elementwise(
    base: str,
    u: Tensor,
    rows: NodeRows,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ElementwiseNode:
    settings = {key: value for key, value in kwargs.items() if key != "input"}
    overwrites = getattr(func, "__name__", "").endswith("_") or bool(kwargs.get("inplace", False))
    held = u.detach().clone() if overwrites or any(a is True for a in args[1:]) else u.detach()
    tensors = [value for value in (*args[1:], *settings.values()) if isinstance(value, Tensor)]
    divisible = u.ndim > 0 and all(value.ndim < u.ndim or value.shape[0] == 1 for value in tensors)
    activation = activation_of_call(func, args, kwargs)
    if isinstance(activation, Elementwise):
        activation = None  # no closed form either

    def function(x: Tensor) -> Tensor:
        # A copy goes in, so that a function that overwrites its argument may be differentiated, too.
        return func(x.clone(), *args[1:], **settings)

    return ElementwiseNode(base, rows, held, function, divisible, activation)


def norm_node(
    base: str,
    u: Tensor,
    rows: NodeRows,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    largest: int | None,
) -> NormNode | None:
    """The node of a normalisation; None where it has more than `largest` units."""
    given = dict(zip(NORMS[base], args, strict=False)) | kwargs
    scale, eps = given.get("weight"), given.get("eps")
    eps = eps if eps is not None else torch.finfo(u.dtype).eps if base == "rms_norm" else 1e-5
    if base in ("layer_norm", "rms_norm"):
        units, groups = prod(given["normalized_shape"]), 1
    else:
        groups = given["num_groups"] if base == "group_norm" else u.shape[1]
        units = prod(u.shape[1:]) // groups
        scale = None if scale is None else scale.reshape(-1, *[1] * (u.ndim - 2))
    if largest is not None and units > largest:
        return None
    placed = replace(rows, channels_first=False, units=units, groups=groups)
    return NormNode(
        base, placed, u.detach(), base != "rms_norm", eps, None if scale is None else scale.detach()
    )


def _channels_first(u: Tensor) -> bool:
    """Whether a convolution or a pool gave u its layout, not a matrix product or a change of shape."""
    functions, seen = [u.grad_fn], set()
    while functions:
        function = functions.pop(0)
        if function is None or function in seen:
            continue
        seen.add(function)
        kind = function.name()
        if any(word in kind for word in CHANNELS_FIRST):
            return True
        if not any(word in kind for word in CHANNELS_LAST):
            functions += [parent for parent, _ in function.next_functions]
    return False
