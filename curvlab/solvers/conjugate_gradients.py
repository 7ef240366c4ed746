"""Conjugate gradients on (s C + τI) d = -g: CG (full input factor, or products alone) and EA-CG (mean one).

Whatever the curvature is, the damped system is an operator that `linalg.cg` is given:

    StackedSystems   Kronecker layers, in the coordinates of their input sides (see `input_coordinates`)
    DampedBlocks     blocks by their products: matrix-free and tied layers, a start vector, a preconditioner
    textbook         n_t × n_{t-1} matrices with the factors formed, for `formulation=explicit`

In coordinates the iteration is, iterate for iterate, the textbook's: with the mean input factor on n_t + 1
unknowns per layer, all layers in one iteration; with the full one on n_t × m, whatever n_{t-1}. Blocks are
solved one by one or, where the curvature has cross-layer blocks, as one system over all parameters: with the
exact Hessian this is Hessian-free optimisation (truncated Newton), which negative curvature ends.

The stacked systems of several layers, one above the other:

    P = [ Xᵀ  0  uᵀ ]     X the weight's coordinates, u = (c‖G⊥‖, 0, …) its part outside the input factor
        [ bᵀ  0  0  ]     b the bias; then the rows of the next layer, filled up with zeros

    operator  [ Xᵀ ] ↦ s [ Ã Xᵀ ] B + τ [ Xᵀ ],   u ↦ τ u
              [ bᵀ ]     [ bᵀ   ]       [ bᵀ ]

The input factor annihilates G⊥, so D⊥ = c G⊥ with one unknown c. The coordinates are orthonormal, so the
inner products are sums over rows. A vector is a row because a product of few contiguous rows with a matrix
takes as long as reading the matrix; of as many columns it takes several times that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, TiedLayer
from curvlab.curvature_structures import EigenLayer
from curvlab.exceptions import PairError, SolveError, SpecError
from curvlab.linalg import Block, DenseFactor, DiagonalFactor, Factor, GramFactor, Matrix
from curvlab.linalg.cg import CGResult, SymmetricOperator, conjugate_gradients
from curvlab.linalg.factors import InputKind, nonzero_or_one
from curvlab.linalg.flat import flatten, unflatten
from curvlab.measure import device
from curvlab.solvers.base import (
    Formulation,
    Guidance,
    LayerDirection,
    LayerGradient,
    Preconditioner,
    Solver,
    check_mean_above,
)
from curvlab.solvers.cost_model import Iteration, choose_coordinates
from curvlab.solvers.damping import Damping
from curvlab.solvers.input_coordinates import GradientCoordinates, InputCoordinates, Scalar, form_gradient
from curvlab.solvers.systems import (
    BlockSystem,
    DampedSystem,
    SolvedBlock,
    input_factors,
    output_factor,
)
from curvlab.solvers.textbook import bias_operator, weight_operator

__all__ = ["CG", "EACG", "BlockCG", "DampedBlocks", "StackedSystems", "jacobi"]


STACKED_UP_TO = 4096  # outputs of a layer that shares an iteration with others


@dataclass(frozen=True, eq=False)
class _State:
    """A layer, its output factor in the form that is cheapest to multiply with, and its coordinates."""

    layer: LayerCurvature
    output: Factor
    damping: Damping
    coordinates: InputCoordinates | None


@dataclass(frozen=True)
class CG(Solver):
    """Conjugate gradients with the full input factor E[hhᵀ], or by products on layers without factors.

    Layers with more than `mean_above` inputs go by `ea-cg`.

    >>> CG(max_iter=50)
    CG(route='auto', max_iter=50, tol=1e-10, formulation='reduced', preconditioner='none', mean_above=None)
    """

    input_factor: ClassVar[InputKind] = "full"
    needs_psd: ClassVar[bool] = False
    needs_kronecker: ClassVar[bool] = False
    structures: ClassVar[tuple[str, ...]] = ("kronecker", "ekfac", "diagonal", "block", "layer", "full")
    max_iter: int = 20
    tol: float = 1e-10
    formulation: Formulation = field(default="reduced", kw_only=True)
    preconditioner: Literal["none", "jacobi"] = field(default="none", kw_only=True)
    mean_above: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mean_above(self.mean_above, self.input_factor)
        if self.max_iter < 0:
            raise SpecError(f"max_iter={self.max_iter} must not be negative")
        if not self.tol >= 0:
            raise SpecError(f"tol={self.tol} must not be negative (it is relative to the right-hand side)")

    def tolerance(self, dtype: torch.dtype) -> float:
        """Its own, doubled: the true residual is not the recursive one."""
        return 2 * self.tol

    def adapt(self, curvature: Curvature, name: str, guidance: Guidance) -> Solver:
        """Itself; by products alone where blocks are coupled, or where the iteration is guided."""
        guided = guidance.given or self.preconditioner != "none"
        if self.input_factor != "full":
            if guided:
                raise self._takes_no_guidance(name)
            return super().adapt(curvature, name, guidance)
        whole = guided or curvature.full_product is not None
        fields = self.route != "auto" or self.formulation != "reduced" or self.mean_above is not None
        if fields and (whole or curvature.matrix_free):
            raise PairError(
                f"`{name}`: `mean_above`, `route` and `formulation` choose how Kronecker factors are used, "
                f"and on `{curvature.provider}` (or with a start or a preconditioner) `cg` uses products "
                f"only. Leave them out"
            )
        if not whole:
            return self
        start = None if guidance.start is None else _check_start(curvature.blocks, guidance.start)
        return BlockCG(
            cg=self, curvature=curvature, start=start, given_preconditioner=guidance.preconditioner
        )

    def for_layer(self, layer: LayerCurvature, curvature: Curvature) -> Solver:
        """Itself on Kronecker factors, of more than `mean_above` inputs `ea-cg`; by products elsewhere."""
        if self.input_factor != "full":
            return self
        if isinstance(layer, TiedLayer | OperatorLayer | EigenLayer) or curvature.structure == "block":
            return BlockCG(cg=self, curvature=curvature, start=None, given_preconditioner=None)
        if self.mean_above is None or layer.input_size <= self.mean_above:
            return self
        return EACG(self.max_iter, self.tol, route=self.route, formulation=self.formulation)

    def run(
        self,
        operator: SymmetricOperator,
        rhs: Tensor,
        start: Tensor | None = None,
        precondition: Callable[[Tensor], Tensor] | None = None,
    ) -> CGResult:
        """Iterate on A x = b, with this solver's limits."""
        return conjugate_gradients(
            operator,
            rhs,
            max_iter=self.max_iter,
            tol=self.tol,
            read_interval=device.read_interval(rhs),
            start=start,
            precondition=precondition,
        )

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _State:
        output = output_factor(layer)
        coordinates = None
        if gradient.weight is not None:
            work = Iteration(self.max_iter, output.example.element_size())
            coordinates = choose_coordinates(layer, gradient.weight, self.input_factor, self.route, work)
        columns = 1 if coordinates is None else coordinates.size + 1
        return _State(layer, _cheapest_form(output, self.max_iter * columns), damping, coordinates)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _State)
        if self.formulation == "explicit":
            return self._apply_textbook(state, gradient)
        return self._divide(state, gradient) or self._apply_stacked([state], [gradient])[0]

    def _divide(self, state: _State, gradient: LayerGradient) -> LayerDirection | None:
        """The solution of a diagonal system, with no iteration; None where it is none, or indefinite."""
        output, damping = state.output, state.damping
        if not isinstance(output, DiagonalFactor) or state.coordinates is not None or gradient.bias is None:
            return None
        divisor = damping.scale * output.values + damping.shift
        if device.readable(divisor) and not bool(divisor.amin() > 0):
            return None
        system = DampedSystem(self.input_factor, damping.scale, damping.shift)
        return LayerDirection(None, -gradient.bias / divisor, system, "bias", output.rank_bound)

    def _apply_stacked(
        self, states: Sequence[_State], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection]:
        """All systems of the layers in one iteration."""
        layers = [LayerSystems.of(state, gradient) for state, gradient in zip(states, gradients, strict=True)]
        stack = stack_systems(layers, states[0].damping)
        result = self.run(stack, stack.right_hand_side())
        return [
            self._direction(state, *stack.split(result.x, index), layer.route, result, stack.systems(index))
            for index, (state, layer) in enumerate(zip(states, layers, strict=True))
        ]

    def _apply_textbook(self, state: _State, gradient: LayerGradient) -> LayerDirection:
        """The weight's and the bias's system, one after the other."""
        results, weight, bias = [], None, None
        if gradient.weight is not None:
            operator = weight_operator(state.layer, state.damping, self.input_factor)
            results.append(self.run(operator, -form_gradient(gradient.weight)))
            weight = results[-1].x
        if gradient.bias is not None:
            results.append(self.run(bias_operator(state.layer, state.damping), -gradient.bias))
            bias = results[-1].x
        return self._direction(state, weight, bias, "explicit", _join_reports(results), slice(None))

    def _direction(
        self,
        state: _State,
        weight: Matrix | None,
        bias: Tensor | None,
        route: str,
        result: CGResult,
        systems: slice,
    ) -> LayerDirection:
        layer, damping = state.layer, state.damping
        rank = output_factor(layer).rank_bound
        if state.coordinates is not None:
            rank = input_factors(layer).factor(self.input_factor).rank_bound
        return LayerDirection(
            weight,
            bias,
            DampedSystem(self.input_factor, damping.scale, damping.shift),
            route,
            rank,
            result.outcomes[systems],
            result.iterations[systems],
            result.residuals[:, systems],
        )


@dataclass(frozen=True)
class EACG(CG):
    """Conjugate gradients with the mean input factor E[h]E[h]ᵀ: the paper's EA-CG.

    >>> EACG(max_iter=20).input_factor
    'mean'
    """

    input_factor: ClassVar[InputKind] = "mean"
    needs_psd: ClassVar[bool] = True
    needs_kronecker: ClassVar[bool] = True
    structures: ClassVar[tuple[str, ...]] = ("kronecker",)

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """One iteration for all layers: its small operations are most of the time of narrow ones.

        Of more than `STACKED_UP_TO` outputs each is iterated by itself: every row of a stack is as long as
        the longest, and there the products are most of the time.
        """
        own = type(self).apply is CG.apply  # a subclass with an `apply` of its own is asked for every layer
        kinds = {(s.output.example.device, s.output.example.dtype) for s in states if isinstance(s, _State)}
        if self.formulation == "explicit" or not own or len(kinds) != 1:
            return None
        own_states = [state for state in states if isinstance(state, _State)]
        divided = (
            (i, self._divide(s, g)) for i, (s, g) in enumerate(zip(own_states, gradients, strict=True))
        )
        found = {index: direction for index, direction in divided if direction is not None}
        left = [index for index in range(len(own_states)) if index not in found]
        narrow = [index for index in left if own_states[index].output.size <= STACKED_UP_TO]
        stacks = [narrow] if narrow else []
        stacks += [[index] for index in left if index not in set(narrow)]
        for stack in stacks:
            solved = self._apply_stacked([own_states[i] for i in stack], [gradients[i] for i in stack])
            found |= dict(zip(stack, solved, strict=True))
        return [found[index] for index in range(len(own_states))]


def _cheapest_form(factor: Factor, columns: int) -> Factor:
    """A Gram factor as it is, or formed once where products with `columns` columns are dearer than that."""
    if not isinstance(factor, GramFactor):
        return factor
    m, n = factor.rows.shape
    as_gram = 4.0 * m * n * columns
    as_dense = 1.3 * m * n * n + 2.0 * n * n * columns
    return factor if as_gram <= as_dense else DenseFactor(factor.to_dense())


def _join_reports(results: Sequence[CGResult]) -> CGResult:
    """The reports of several runs, one column per run; a shorter one is filled up with NaN."""
    return CGResult(
        results[0].x,
        torch.cat([result.outcomes for result in results]),
        torch.cat([result.iterations for result in results]),
        torch.nn.utils.rnn.pad_sequence([r.residuals[:, 0] for r in results], padding_value=float("nan")),
    )


# Kronecker layers in coordinates.


@dataclass(frozen=True, eq=False)
class _WeightSystem:
    coordinates: InputCoordinates
    gradient: GradientCoordinates


@dataclass(frozen=True, eq=False)
class LayerSystems:
    """The systems of one layer: its weight's in coordinates, and its bias's."""

    output: Factor
    weight: _WeightSystem | None
    bias: Tensor | None

    @classmethod
    def of(cls, state: _State, gradient: LayerGradient) -> LayerSystems:
        """The systems of a prepared layer for a gradient."""
        weight = None
        if state.coordinates is not None and gradient.weight is not None:
            weight = _WeightSystem(state.coordinates, state.coordinates.of(gradient.weight))
        return cls(state.output, weight, gradient.bias)

    @cached_property
    def rank(self) -> int:
        """Rows of Xᵀ."""
        return 0 if self.weight is None else self.weight.gradient.x.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the stack that belong to the layer."""
        return self.rank + (self.bias is not None)

    @property
    def route(self) -> str:
        """What the coordinates are called in a solution."""
        return "bias" if self.weight is None else self.weight.coordinates.route

    @property
    def perp_norm(self) -> Tensor | None:
        """‖G⊥‖; None: zero."""
        return None if self.weight is None else self.weight.gradient.perp_norm

    def diagonal(self) -> Tensor:
        """What each row is multiplied by: the diagonal of Ã, and 1 for the bias."""
        entries = []
        if self.weight is not None:
            given = self.weight.coordinates.diagonal
            entries.append(self.weight.coordinates.matrix.diagonal() if given is None else given)
        if self.bias is not None:
            entries.append(torch.ones_like(self.bias[:1]))
        return torch.cat(entries)


def stack_systems(layers: Sequence[LayerSystems], damping: Damping) -> StackedSystems:
    """The damped systems of several layers, each of one row, or those of one layer, of any rank."""
    if all(layer.rank <= 1 for layer in layers):
        return _OneRowEach(layers, damping)
    if len(layers) > 1:
        raise ValueError("several layers are solved in one iteration only where each system is one row")
    return _OneLayer(layers, damping)


class StackedSystems(SymmetricOperator):
    """The damped systems of Kronecker layers, one above the other, as the module's text draws them."""

    def __init__(self, layers: Sequence[LayerSystems], damping: Damping) -> None:
        self.layers, self.damping = layers, damping
        self.width = max(layer.output.size for layer in layers)
        self.firsts = list(accumulate((layer.rows for layer in layers), initial=0))[:-1]
        example = layers[0].output.example
        outside = any(layer.perp_norm is not None for layer in layers)
        shape = (sum(layer.rows for layer in layers), self.width + outside)
        # Scalars as tensors: a number would be made one in every iteration.
        self._shift = example.new_full((), damping.shift)
        self._image, self._scaled = example.new_empty(shape), example.new_empty(shape)
        self._products = [
            (layer.output, self._part(self._image, index), self._part(self._scaled, index))
            for index, layer in enumerate(layers)
        ]

    def _part(self, p: Tensor, index: int) -> Tensor:
        """The rows and columns of one layer."""
        layer, first = self.layers[index], self.firsts[index]
        return p[first : first + layer.rows, : layer.output.size]

    def right_hand_side(self) -> Tensor:
        """-G and -g."""
        p = torch.zeros_like(self._image)
        for index, layer in enumerate(self.layers):
            part = self._part(p, index)
            if layer.weight is not None:
                part[: layer.rank] = -layer.weight.gradient.x.detach().T
            if layer.perp_norm is not None:
                p[self.firsts[index], self.width] = -layer.perp_norm.detach()
            if layer.bias is not None:
                part[-1] = -layer.bias.detach()
        return p

    @abstractmethod
    def _times_input(self, p: Tensor) -> None:
        """[ Ã Xᵀ; bᵀ ], into `_scaled`."""

    def matmul(self, x: Tensor) -> Tensor:
        self._times_input(x)
        torch.mul(x, self._shift, out=self._image)
        for output, image, scaled in self._products:
            output.add_product_(image, scaled, self.damping.scale)
        return self._image

    @abstractmethod
    def systems(self, index: int) -> slice:
        """Which of the stack's systems are those of a layer: the weight's, then the bias's."""

    def split(self, p: Tensor, index: int) -> tuple[Matrix | None, Tensor | None]:
        """The steps of the weight and the bias of one layer."""
        layer, part = self.layers[index], self._part(p, index)
        bias = None if layer.bias is None else part[-1]
        if layer.weight is None:
            return None, bias
        scale = torch.zeros_like(p[0, 0])
        if layer.perp_norm is not None:
            # Where the norm is zero, so is its row's entry: there is no G⊥ and c is zero.
            scale = p[self.firsts[index], self.width] / nonzero_or_one(layer.perp_norm)
        return layer.weight.gradient.assemble(part[: layer.rank].T, Scalar(scale)), bias


class _OneRowEach(StackedSystems):
    """Every system is one row, as with the mean input factor."""

    @cached_property
    def _diagonal(self) -> Tensor:
        return torch.cat([layer.diagonal() for layer in self.layers])[:, None]

    def _times_input(self, p: Tensor) -> None:
        torch.mul(p, self._diagonal, out=self._scaled)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(1, keepdim=True)

    def max_abs(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x, dim=1, keepdim=True)
        return torch.maximum(high, -low)

    def spread(self, scalars: Tensor) -> Tensor:
        return scalars

    def systems(self, index: int) -> slice:
        return slice(self.firsts[index], self.firsts[index] + self.layers[index].rows)


class _OneLayer(StackedSystems):
    """One layer, whose weight takes the first `rank` rows together and whose bias takes the last one."""

    def __init__(self, layers: Sequence[LayerSystems], damping: Damping) -> None:
        super().__init__(layers, damping)
        (layer,) = layers
        self.rank = layer.rank
        self._diagonal: Tensor | None = None
        self._matrix: Tensor | None = None
        if layer.weight is not None and layer.weight.coordinates.diagonal is None:
            self._matrix = layer.weight.coordinates.matrix
        else:
            self._diagonal = layer.diagonal()[:, None]

    def _times_input(self, p: Tensor) -> None:
        if self._diagonal is not None:
            torch.mul(p, self._diagonal, out=self._scaled)
        if self._matrix is not None:
            r, n = self.rank, self.width
            self._scaled[r:].copy_(p[r:])
            self._scaled[:r, :n] = self._matrix @ p[:r, :n]

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        sums = (x * y).sum(1, keepdim=True)
        return torch.cat([sums[: self.rank].sum(0, keepdim=True), sums[self.rank :]])

    def max_abs(self, x: Tensor) -> Tensor:
        low, high = torch.aminmax(x, dim=1, keepdim=True)
        peaks = torch.maximum(high, -low)
        return torch.cat([peaks[: self.rank].amax(0, keepdim=True), peaks[self.rank :]])

    def spread(self, scalars: Tensor) -> Tensor:
        return torch.cat([scalars[:1].expand(self.rank, 1), scalars[1:]])

    def systems(self, index: int) -> slice:
        return slice(None)


# Blocks by their products.


class DampedBlocks(SymmetricOperator):
    """s C + τI on the flattened and joined parameters of some blocks, by the product of C."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        product: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        damping: Damping,
    ) -> None:
        self.shapes, self.product, self.damping = shapes, product, damping
        self.names = list(shapes)

    def matmul(self, x: Tensor) -> Tensor:
        image = flatten(self.product(self.split(x)), self.names)
        return self.damping.scale * image + self.damping.shift * x

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The blocks' entries of `vectors` as one vector."""
        return flatten(vectors, self.names)

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """A vector by parameter name."""
        return unflatten(x, self.shapes)

    def precondition(self, preconditioner: Preconditioner, x: Tensor) -> Tensor:
        """M⁻¹ x; refused where M⁻¹ gives something that is no vector of the system."""
        images = {name: preconditioner(name, part) for name, part in self.split(x).items()}
        for name, image in images.items():
            expected = tuple(self.shapes[name])
            if not isinstance(image, Tensor) or tuple(image.shape) != expected:
                given = f"shape {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
                raise SolveError(
                    f"the preconditioner gives {given} for `{name}`; expected a tensor of shape {expected}"
                )
        return flatten(images, self.names)


def jacobi(blocks: Mapping[str, Block], damping: Damping) -> Preconditioner:
    """x ↦ x / (s diag(C) + τ), with negative diagonal entries taken as zero."""
    inverse = {
        name: 1 / (damping.scale * block.diagonal().clamp(min=0) + damping.shift)
        for name, block in blocks.items()
    }
    return lambda name, x: inverse[name] * x


@dataclass(frozen=True, eq=False)
class _BlockState:
    layer: LayerCurvature
    damping: Damping
    preconditioner: Preconditioner | None


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCG(Solver):
    """CG on the blocks of one curvature as they are; `cg` has the limits and the kind of preconditioner."""

    needs_psd: ClassVar[bool] = False
    needs_kronecker: ClassVar[bool] = False
    # A product over the rows of all ranks is a sum in which every rank takes part.
    layers_apart: ClassVar[bool] = False
    cg: CG
    curvature: Curvature
    start: Mapping[str, Tensor] | None
    given_preconditioner: Preconditioner | None

    def tolerance(self, dtype: torch.dtype) -> float:
        """That of `cg`."""
        return self.cg.tolerance(dtype)

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """One for each parameter, whose block acts on tensors of the parameter's own shape."""
        return [
            OperatorLayer(layer.name, {name: block}, weight_name=name) for name, block in layer.blocks.items()
        ]

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _BlockState:
        preconditioner = self.given_preconditioner
        if preconditioner is None and self.cg.preconditioner == "jacobi":
            preconditioner = jacobi(layer.blocks, damping)
        return _BlockState(layer, damping, preconditioner)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        """The system of one block."""
        assert isinstance(state, _BlockState)
        named = _gradient_by_name(state.layer, gradient)
        product = partial(_block_product, state.layer.blocks)
        result, system = self._solve(named, product, state.damping, state.preconditioner)
        return _block_direction(state.layer, system, result)

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """One system over all layers, where the curvature has blocks between them."""
        full, prepared = self.curvature.full_product, [s for s in states if isinstance(s, _BlockState)]
        if full is None:
            return None
        named = [
            _gradient_by_name(state.layer, given) for state, given in zip(prepared, gradients, strict=True)
        ]
        by_name = {
            name: state.preconditioner
            for state, given in zip(prepared, named, strict=True)
            for name in given
            if state.preconditioner is not None
        }
        preconditioner = (lambda name, x: by_name[name](name, x)) if by_name else None
        whole = {name: value for given in named for name, value in given.items()}
        result, system = self._solve(whole, full, prepared[0].damping, preconditioner)
        return [_block_direction(state.layer, system, result) for state in prepared]

    def _solve(
        self,
        gradient: Mapping[str, Tensor],
        product: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        damping: Damping,
        preconditioner: Preconditioner | None,
    ) -> tuple[CGResult, dict[str, SolvedBlock]]:
        """One run of CG, and g, d and C d of every block of the system."""
        operator = DampedBlocks({name: value.shape for name, value in gradient.items()}, product, damping)
        result = self.cg.run(
            operator,
            -operator.flatten(gradient),
            None if self.start is None else operator.flatten(self.start),
            None if preconditioner is None else partial(operator.precondition, preconditioner),
        )
        steps = operator.split(result.x)
        images = product(steps)
        return result, {name: SolvedBlock(gradient[name], steps[name], images[name]) for name in steps}


def _block_product(blocks: Mapping[str, Block], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: block.matmul(vectors[name]) for name, block in blocks.items()}


def _gradient_by_name(unit: LayerCurvature, gradient: LayerGradient) -> dict[str, Tensor]:
    """The gradient of the unit's one parameter, formed."""
    assert gradient.weight is not None
    (name,) = unit.blocks
    return {name: form_gradient(gradient.weight)}


def _block_direction(
    unit: LayerCurvature, system: Mapping[str, SolvedBlock], result: CGResult
) -> LayerDirection:
    """The step of one parameter, in the system that it was solved in."""
    (name,) = unit.blocks
    step = system[name].direction
    return LayerDirection(
        step,
        None,
        BlockSystem({name: system}),
        "operator",
        step.numel(),
        result.outcomes,
        result.iterations,
        result.residuals,
    )


def _check_start(blocks: Mapping[str, Block], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The start in the dtype of the blocks; refused where it does not fit them or is not finite."""
    converted = {}
    for name, block in blocks.items():
        value = torch.as_tensor(start[name]).to(block.example) if name in start else None
        if value is None or tuple(value.shape) != block.shape:
            given = "has no entry" if value is None else f"has shape {tuple(value.shape)}"
            raise SolveError(f"the start {given} for `{name}`; expected shape {block.shape}")
        if device.readable(value) and not bool(torch.isfinite(value).all()):
            raise SolveError(f"the start for `{name}` holds NaN or infinity; expected finite numbers")
        converted[name] = value
    return converted
