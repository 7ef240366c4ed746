"""Conjugate gradients on (s C + τI) d = -g: CG (full input factor, or products alone) and EA-CG (mean one).

Whatever the curvature is, the damped system is an operator that `linalg.cg` is given:

    StackedSystems   Kronecker layers, in the coordinates of their input sides
    EqualSystems     the many small matrices of one weight, all of one shape
    DampedBlocks     blocks by their products (see `structure_systems`)
    textbook         n_t × n_{t-1} matrices with the factors formed, for `formulation=explicit`

In coordinates the iteration is, iterate for iterate, the textbook's: with the mean input factor on n_t + 1
unknowns per layer, all layers in one iteration; with the full one on n_t × m, whatever n_{t-1}. The stacked
systems of several layers lie one above the other:

    P = [ Xᵀ  0  uᵀ ]     X the weight's coordinates, u = (c‖G⊥‖, 0, …) its part outside the input factor
        [ bᵀ  0  0  ]     b the bias; then the rows of the next layer, filled up with zeros

    operator  [ Xᵀ ] ↦ s [ Ã Xᵀ ] B + τ [ Xᵀ ],   u ↦ τ u
              [ bᵀ ]     [ bᵀ   ]       [ bᵀ ]

The input factor annihilates G⊥, so D⊥ = c G⊥ with one unknown c. The coordinates are orthonormal, so the
inner products are sums over rows. A vector is a row because a product of few contiguous rows with a matrix
takes as long as reading the matrix; of as many columns it takes several times that.

A stack of equal systems (`linalg.stacks`) has three dimensions instead: P = [ X  u ] for each matrix.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, TiedLayer
from curvlab.curvature_structures import EigenLayer
from curvlab.exceptions import PairError, SpecError
from curvlab.linalg import DenseFactor, DiagonalFactor, Factor, GramFactor, Matrix
from curvlab.linalg.cg import (
    CGResult,
    Iterating,
    StackOperator,
    SymmetricOperator,
    iterate,
    iterate_together,
)
from curvlab.linalg.execution import LEAST, Limits, deferring, in_pieces, require, would_read
from curvlab.linalg.factors import InputKind, nonzero_or_one
from curvlab.measure import device
from curvlab.solvers.base import (
    DampedSystem,
    Damping,
    Formulation,
    Guidance,
    LayerDirection,
    LayerGradient,
    Solver,
    check_mean_above,
)
from curvlab.solvers.input_coordinates import (
    GradientCoordinates,
    InputCoordinates,
    Iteration,
    Scalar,
    WeightGradient,
    choose_coordinates,
    form_gradient,
    input_rank,
    output_factor,
)
from curvlab.solvers.structure_systems import BlockCG, check_start
from curvlab.solvers.textbook import bias_operator, weight_operator

__all__ = ["CG", "EACG", "EqualSystems", "LayerSystems", "StackedSystems", "stack_systems"]


POSITIVE = Limits("a damped diagonal is not positive", low=LEAST)
STACKED_UP_TO = 4096  # outputs of a layer that shares an iteration with others
LAUNCHES = 20  # of an iteration, about
MOST_READS = 4  # of the limit on iterations, where a read waits for a device


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
    definite: ClassVar[bool] = False
    """Whether the damped curvature is known to be positive definite."""
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
        chosen = self.route != "auto" or self.formulation != "reduced" or self.mean_above is not None
        if chosen and (whole or curvature.matrix_free):
            raise PairError(
                f"`{name}`: `mean_above`, `route` and `formulation` choose how Kronecker factors are used, "
                f"and on `{curvature.provider}` (or with a start or a preconditioner) `cg` uses products "
                f"only. Leave them out"
            )
        if not whole:
            return self
        start = None if guidance.start is None else check_start(curvature.blocks, guidance.start)
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
            plain = type(self) is CG and curvature.psd
            return DefiniteCG(**{f.name: getattr(self, f.name) for f in fields(self)}) if plain else self
        return EACG(self.max_iter, self.tol, route=self.route, formulation=self.formulation)

    def run(
        self,
        operator: SymmetricOperator,
        rhs: Tensor,
        start: Tensor | None = None,
        precondition: Callable[[Tensor], Tensor] | None = None,
    ) -> CGResult:
        """Iterate on A x = b, with this solver's limits."""
        return iterate_together([self.begin(operator, rhs, start, precondition)])[0]

    def begin(
        self,
        operator: SymmetricOperator,
        rhs: Tensor,
        start: Tensor | None = None,
        precondition: Callable[[Tensor], Tensor] | None = None,
        beside: int = 1,
    ) -> Iterating:
        """`run` for `iterate_together`, of so many systems that are read together."""
        interval = self._read_interval(rhs, LAUNCHES * beside)
        return iterate(operator, rhs, self.max_iter, self.tol, interval, start, precondition, self.definite)

    def _read_interval(self, rhs: Tensor, launches: int) -> int:
        """Iterations between two reads: by the device's costs, with at most `MOST_READS` in all."""
        interval = device.read_interval(rhs, launches, self.max_iter)
        if interval == 0 or device.in_pieces(rhs):
            if not device.in_pieces(rhs) and not deferring():
                would_read(MOST_READS - 1)
            return interval
        return max(interval, -(-self.max_iter // MOST_READS))

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> PreparedLayer:
        output = output_factor(layer)
        coordinates = None
        if gradient.weight is not None:
            work = Iteration(self.max_iter, output.example.element_size())
            coordinates = choose_coordinates(layer, gradient.weight, self.input_factor, self.route, work)
        columns = 1 if coordinates is None else coordinates.size + 1
        return PreparedLayer(layer, _cheapest_form(output, self.max_iter * columns), damping, coordinates)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, PreparedLayer)
        if self.formulation == "explicit":
            return self._apply_textbook(state, gradient)
        found = self._apply_equal(state, gradient) or self._divide(state, gradient)
        return found or self._apply_stacked([state], [gradient])[0]

    @property
    def solves_stacks(self) -> bool:
        own = type(self).prepare is CG.prepare and type(self).apply is CG.apply
        return own and self.route in ("auto", "dense")

    def _apply_equal(self, state: PreparedLayer, gradient: LayerGradient) -> LayerDirection | None:
        """All systems of a stack of weights in one iteration; None where it is none."""
        if state.output.count == 1 or state.coordinates is None or gradient.weight is None:
            return None
        systems = EqualSystems(state.output, state.coordinates, gradient.weight, state.damping)
        result = self.run(systems, systems.right_hand_side())
        weight = systems.step(result.x)
        return self._direction(state, weight, None, state.coordinates.route, result, slice(None))

    def _divide(self, state: PreparedLayer, gradient: LayerGradient) -> LayerDirection | None:
        """The solution of a diagonal system, with no iteration; None where it is none, or indefinite."""
        output, damping = state.output, state.damping
        if not isinstance(output, DiagonalFactor) or state.coordinates is not None or gradient.bias is None:
            return None
        divisor = damping.scale * output.values + damping.shift
        if deferring():
            require([divisor.amin()], lambda _: None, POSITIVE)
        elif device.readable(divisor) and not bool(divisor.amin() > 0):
            return None
        system = DampedSystem(self.input_factor, damping.scale, damping.shift)
        return LayerDirection(None, -gradient.bias / divisor, system, "bias", output.rank_bound)

    def _apply_stacked(
        self, states: Sequence[PreparedLayer], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection]:
        """All systems of the layers in one iteration."""
        layers = [LayerSystems.of(state, gradient) for state, gradient in zip(states, gradients, strict=True)]
        stack = stack_systems(layers, states[0].damping)
        result = self.run(stack, stack.right_hand_side())
        return self._directions(states, layers, stack, result)

    def _directions(
        self,
        states: Sequence[PreparedLayer],
        layers: Sequence[LayerSystems],
        stack: StackedSystems,
        result: CGResult,
    ) -> list[LayerDirection]:
        return [
            self._direction(state, *stack.split(result.x, index), layer.route, result, stack.systems(index))
            for index, (state, layer) in enumerate(zip(states, layers, strict=True))
        ]

    def _apply_textbook(self, state: PreparedLayer, gradient: LayerGradient) -> LayerDirection:
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
        state: PreparedLayer,
        weight: Matrix | None,
        bias: Tensor | None,
        route: str,
        result: CGResult,
        systems: slice,
    ) -> LayerDirection:
        layer, damping = state.layer, state.damping
        rank = output_factor(layer).rank_bound
        if state.coordinates is not None:
            rank = input_rank(layer, self.input_factor)
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
class DefiniteCG(CG):
    """The same on layers of a curvature that is known to be positive semi-definite."""

    definite: ClassVar[bool] = True

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """Where reads are not free: the iterations of all layers side by side, with one read for all."""
        own = [state for state in states if isinstance(state, PreparedLayer)]
        if self.formulation == "explicit" or len(own) < 2 or device.in_pieces(own[0].output.example):
            return None
        found: dict[int, LayerDirection] = {}
        runs, stacks = [], {}
        for index, (state, gradient) in enumerate(zip(own, gradients, strict=True)):
            equal = self._apply_equal(state, gradient)
            if equal is not None:
                found[index] = equal
                continue
            stack = stack_systems([LayerSystems.of(state, gradient)], state.damping)
            stacks[index] = stack
            runs.append(self.begin(stack, stack.right_hand_side(), beside=len(own)))
        for index, result in zip(stacks, iterate_together(runs), strict=True):
            stack = stacks[index]
            (found[index],) = self._directions([own[index]], stack.layers, stack, result)
        return [found[index] for index in range(len(own))]


@dataclass(frozen=True)
class EACG(CG):
    """Conjugate gradients with the mean input factor E[h]E[h]ᵀ: the paper's EA-CG.

    >>> EACG(max_iter=20).input_factor
    'mean'
    """

    input_factor: ClassVar[InputKind] = "mean"
    needs_psd: ClassVar[bool] = True
    needs_kronecker: ClassVar[bool] = True
    definite: ClassVar[bool] = True
    structures: ClassVar[tuple[str, ...]] = ("kronecker",)

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """One iteration for all layers: its small operations are most of the time of narrow ones.

        Of more than `STACKED_UP_TO` outputs each is iterated by itself: every row of a stack is as long as
        the longest, and there the products are most of the time.
        """
        own = type(self).apply is CG.apply  # a subclass with an `apply` of its own is asked for every layer
        own_states = [state for state in states if isinstance(state, PreparedLayer)]
        examples = [state.output.example for state in own_states]
        kinds = {(example.device, example.dtype) for example in examples}
        if self.formulation == "explicit" or not own or len(kinds) != 1:
            return None
        alone = (
            (i, self._apply_equal(s, g) or self._divide(s, g))
            for i, (s, g) in enumerate(zip(own_states, gradients, strict=True))
        )
        found = {index: direction for index, direction in alone if direction is not None}
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
    if len(results) == 1:  # of one system, or of a stack of them
        return results[0]
    return CGResult(
        results[0].x,
        torch.cat([result.outcomes for result in results]),
        torch.cat([result.iterations for result in results]),
        torch.nn.utils.rnn.pad_sequence([r.residuals[:, 0] for r in results], padding_value=float("nan")),
    )


@dataclass(frozen=True, eq=False)
class PreparedLayer:
    """A layer, its output factor in the form that is cheapest to multiply with, and its coordinates."""

    layer: LayerCurvature
    output: Factor
    damping: Damping
    coordinates: InputCoordinates | None


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
    def of(cls, state: PreparedLayer, gradient: LayerGradient) -> LayerSystems:
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

    def diagonal(self, one: Tensor) -> list[Tensor]:
        """What each row is multiplied by: the diagonal of Ã, and `one`, of one entry, for the bias."""
        entries = []
        if self.weight is not None:
            given = self.weight.coordinates.diagonal
            entries.append(self.weight.coordinates.matrix.diagonal() if given is None else given)
        if self.bias is not None:
            entries.append(one)
        return entries


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
        self._sizes = [layer.output.size for layer in layers]
        self.width = max(self._sizes)
        self.firsts = list(accumulate((layer.rows for layer in layers), initial=0))[:-1]
        example = layers[0].output.example
        outside = any(layer.perp_norm is not None for layer in layers)
        shape = (sum(layer.rows for layer in layers), self.width + outside)
        # Scalars as tensors: a number would be made one in every iteration.
        self._scale, self._shift = damping.scale, example.new_full((), damping.shift)
        self._image, self._scaled = example.new_empty(shape), example.new_empty(shape)
        self._products = [
            (
                layer.output,
                self._part(self._image, index),
                self._part(self._scaled, index),
                self.systems(index),
            )
            for index, layer in enumerate(layers)
        ]

    def _part(self, p: Tensor, index: int) -> Tensor:
        """The rows and columns of one layer."""
        layer, first = self.layers[index], self.firsts[index]
        return p[first : first + layer.rows, : self._sizes[index]]

    def right_hand_side(self) -> Tensor:
        """-G and -g."""
        p = torch.zeros_like(self._image)
        for index, layer in enumerate(self.layers):
            part = self._part(p, index)
            if layer.weight is not None:
                torch.neg(layer.weight.gradient.x.detach().T, out=part[: layer.rank])
            if layer.perp_norm is not None:
                torch.neg(layer.perp_norm.detach(), out=p[self.firsts[index], self.width])
            if layer.bias is not None:
                torch.neg(layer.bias.detach(), out=part[-1])
        return p

    def _joined_diagonal(self) -> Tensor:
        """What each row of the stack is multiplied by, as a column."""
        one = self._image.new_ones(1)
        return torch.cat([entry for layer in self.layers for entry in layer.diagonal(one)])[:, None]

    @abstractmethod
    def _times_input(self, p: Tensor) -> None:
        """[ Ã Xᵀ; bᵀ ], into `_scaled`."""

    def matmul(self, x: Tensor) -> Tensor:
        self._times_input(x)
        torch.mul(x, self._shift, out=self._image)
        for output, image, scaled, _ in self._products:
            output.add_product_(image, scaled, self._scale)
        return self._image

    def rest(self, done: Tensor) -> None:
        """Leave out the products with B of layers whose systems have all ended: of these τx is given."""
        ended = done.flatten().tolist()
        if any(ended):
            self._products = [part for part in self._products if not all(ended[part[-1]])]

    @abstractmethod
    def systems(self, index: int) -> slice:
        """Which of the stack's systems are those of a layer: the weight's, then the bias's."""

    def split(self, p: Tensor, index: int) -> tuple[Matrix | None, Tensor | None]:
        """The steps of the weight and the bias of one layer."""
        layer, part = self.layers[index], self._part(p, index)
        bias = None if layer.bias is None else part[-1]
        if layer.weight is None:
            return None, bias
        if layer.perp_norm is None:
            scale = torch.zeros_like(p[0, 0])
        else:  # where the norm is zero, so is its row's entry: there is no G⊥ and c is zero
            scale = p[self.firsts[index], self.width] / nonzero_or_one(layer.perp_norm)
        return layer.weight.gradient.assemble(part[: layer.rank].T, Scalar(scale)), bias


def _row_peaks(x: Tensor) -> Tensor:
    """max|x| of every row, as a column."""
    if not in_pieces(x):
        return torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    return torch.maximum(high, -low)


class _OneRowEach(StackedSystems):
    """Every system is one row, as with the mean input factor."""

    @cached_property
    def _diagonal(self) -> Tensor:
        return self._joined_diagonal()

    def _times_input(self, p: Tensor) -> None:
        torch.mul(p, self._diagonal, out=self._scaled)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(1, keepdim=True)

    def max_abs(self, x: Tensor) -> Tensor:
        return _row_peaks(x)

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
            self._diagonal = self._joined_diagonal()

    def _times_input(self, p: Tensor) -> None:
        if self._diagonal is not None:
            torch.mul(p, self._diagonal, out=self._scaled)
        if self._matrix is not None:
            r, n = self.rank, self.width
            self._scaled[r:].copy_(p[r:])
            torch.mm(self._matrix, p[:r, :n], out=self._scaled[:r, :n])

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        sums = (x * y).sum(1, keepdim=True)
        if self._selector is not None:
            return self._selector @ sums
        return torch.cat([sums[: self.rank].sum(0, keepdim=True), sums[self.rank :]])

    def max_abs(self, x: Tensor) -> Tensor:
        peaks = _row_peaks(x)
        return torch.cat([peaks[: self.rank].amax(0, keepdim=True), peaks[self.rank :]])

    def spread(self, scalars: Tensor) -> Tensor:
        return torch.cat([scalars[:1].expand(self.rank, 1), scalars[1:]])

    @cached_property
    def _selector(self) -> Tensor | None:
        """Which rows belong to which system, (2, rows), where one product is less than a sum and a copy.

        NaN or infinity in one of the two systems of a layer then reaches the other: both are breakdowns.
        """
        rows = len(self._image)
        if in_pieces(self._image) or rows != self.rank + 1 or not self.rank:
            return None
        selector = self._image.new_zeros(2, rows)
        selector[0, : self.rank] = 1
        selector[1, self.rank] = 1
        return selector

    def systems(self, index: int) -> slice:
        return slice(None)


class EqualSystems(StackOperator):
    """The damped systems of a stack of equal matrices: P = [ X  u ], (G, o, r) and one column for G⊥.

    X ↦ s B X Ã + τX for every matrix, and u ↦ τu, of which the first entry is c‖G⊥‖.
    """

    def __init__(
        self, output: Factor, coordinates: InputCoordinates, gradient: WeightGradient, damping: Damping
    ) -> None:
        self.output, self.damping = output, damping
        self.gradient = coordinates.of(gradient)
        self.rank, self._matrix = self.gradient.x.shape[-1], coordinates.matrix

    def right_hand_side(self) -> Tensor:
        """-G."""
        x, norm = self.gradient.x.detach(), self.gradient.perp_norm
        if norm is None:
            return -x
        outside = torch.zeros_like(x[..., :1])
        outside[:, 0, 0] = norm
        return -torch.cat([x, outside], dim=-1)

    def matmul(self, x: Tensor) -> Tensor:
        image = self.damping.shift * x
        inside = self.output.matmul(x[..., : self.rank] @ self._matrix)
        image[..., : self.rank].add_(inside, alpha=self.damping.scale)
        return image

    def step(self, p: Tensor) -> Matrix:
        """The steps of all matrices."""
        scale = torch.zeros_like(p[:, :1, :1])
        if self.gradient.perp_norm is not None:
            # Where the norm is zero, so is its entry: there is no G⊥ and c is zero.
            scale = p[:, :1, self.rank :] / nonzero_or_one(self.gradient.perp_norm)[:, None, None]
        return self.gradient.assemble(p[..., : self.rank], Scalar(scale))
