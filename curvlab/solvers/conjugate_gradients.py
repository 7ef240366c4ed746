"""Conjugate gradients on (s C + τI) d = -g: CG (full input factor, or products alone) and EA-CG (mean one).

Whatever the curvature is, the damped system is an operator that `linalg.cg` is given:

    StackedSystems   Kronecker layers, in the coordinates of their input sides (see `layer_systems`)
    EqualSystems     the many small matrices of one weight, all of one shape
    DampedBlocks     blocks by their products: matrix-free and tied layers, a start vector, a preconditioner
    textbook         n_t × n_{t-1} matrices with the factors formed, for `formulation=explicit`

In coordinates the iteration is, iterate for iterate, the textbook's: with the mean input factor on n_t + 1
unknowns per layer, all layers in one iteration; with the full one on n_t × m, whatever n_{t-1}. Blocks are
solved one by one or, where the curvature has cross-layer blocks, as one system over all parameters: with the
exact Hessian this is Hessian-free optimisation (truncated Newton), which negative curvature ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, TiedLayer
from curvlab.curvature_structures import EigenLayer
from curvlab.exceptions import PairError, SolveError, SpecError
from curvlab.linalg import Block, DenseFactor, DiagonalFactor, Factor, GramFactor, Matrix
from curvlab.linalg.cg import CGResult, SymmetricOperator, conjugate_gradients, iterate, iterate_together
from curvlab.linalg.factors import InputKind
from curvlab.linalg.flat import flatten, unflatten
from curvlab.linalg.pending import LEAST, Limits, deferring, require, would_read
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
from curvlab.solvers.input_coordinates import InputCoordinates, form_gradient
from curvlab.solvers.layer_systems import EqualSystems, LayerSystems, StackedSystems, stack_systems
from curvlab.solvers.systems import (
    BlockSystem,
    DampedSystem,
    SolvedBlock,
    input_rank,
    output_factor,
)
from curvlab.solvers.textbook import bias_operator, weight_operator

__all__ = ["CG", "EACG", "BlockCG", "DampedBlocks", "jacobi"]


POSITIVE = Limits("a damped diagonal is not positive", low=LEAST)
STACKED_UP_TO = 4096  # outputs of a layer that shares an iteration with others
LAUNCHES = 20  # of an iteration, about
MOST_READS = 4  # of the limit on iterations, where a read waits for a device


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
        return conjugate_gradients(
            operator,
            rhs,
            max_iter=self.max_iter,
            tol=self.tol,
            read_interval=self._read_interval(rhs, LAUNCHES),
            start=start,
            precondition=precondition,
            definite=self.definite,
        )

    def _read_interval(self, rhs: Tensor, launches: int) -> int:
        """Iterations between two reads: by the device's costs, with at most `MOST_READS` in all."""
        interval = device.read_interval(rhs, launches, self.max_iter)
        if interval == 0 or device.in_pieces(rhs):
            if not device.in_pieces(rhs) and not deferring():
                would_read(MOST_READS - 1)
            return interval
        return max(interval, -(-self.max_iter // MOST_READS))

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
        if state.output.count > 1:
            return self._apply_equal(state, gradient)
        return self._divide(state, gradient) or self._apply_stacked([state], [gradient])[0]

    @property
    def solves_stacks(self) -> bool:
        own = type(self).prepare is CG.prepare and type(self).apply is CG.apply
        return own and self.route in ("auto", "dense")

    def _apply_equal(self, state: _State, gradient: LayerGradient) -> LayerDirection:
        """All systems of a stack in one iteration."""
        assert state.coordinates is not None
        assert gradient.weight is not None
        systems = EqualSystems(state.output, state.coordinates, gradient.weight, state.damping)
        result = self.run(systems, systems.right_hand_side())
        weight = systems.step(result.x)
        return self._direction(state, weight, None, state.coordinates.route, result, slice(None))

    def _divide(self, state: _State, gradient: LayerGradient) -> LayerDirection | None:
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
        self, states: Sequence[_State], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection]:
        """All systems of the layers in one iteration."""
        layers = [LayerSystems.of(state, gradient) for state, gradient in zip(states, gradients, strict=True)]
        stack = stack_systems(layers, states[0].damping)
        result = self.run(stack, stack.right_hand_side())
        return self._directions(states, layers, stack, result)

    def _directions(
        self,
        states: Sequence[_State],
        layers: Sequence[LayerSystems],
        stack: StackedSystems,
        result: CGResult,
    ) -> list[LayerDirection]:
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
        own = [state for state in states if isinstance(state, _State)]
        if self.formulation == "explicit" or len(own) < 2 or device.in_pieces(own[0].output.example):
            return None
        found: dict[int, LayerDirection] = {}
        runs, stacks = [], {}
        for index, (state, gradient) in enumerate(zip(own, gradients, strict=True)):
            if state.output.count > 1:
                found[index] = self._apply_equal(state, gradient)
                continue
            stack = stack_systems([LayerSystems.of(state, gradient)], state.damping)
            rhs, stacks[index] = stack.right_hand_side(), stack
            runs.append(
                iterate(
                    stack,
                    rhs,
                    max_iter=self.max_iter,
                    tol=self.tol,
                    read_interval=self._read_interval(rhs, LAUNCHES * len(own)),
                    definite=True,
                )
            )
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
        kinds = {(s.output.example.device, s.output.example.dtype) for s in states if isinstance(s, _State)}
        if self.formulation == "explicit" or not own or len(kinds) != 1:
            return None
        own_states = [state for state in states if isinstance(state, _State)]
        alone = (
            (i, self._apply_equal(s, g) if s.output.count > 1 else self._divide(s, g))
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
