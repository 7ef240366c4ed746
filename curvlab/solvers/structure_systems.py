"""Damped systems of blocks that are no Kronecker product, and their solvers.

Second moments of examples, `block`, `layer` and `full`, are solved by `exact` among their rows e:

    (s F + τI) d = -g,   F = eᵀ e:             d = -(g - eᵀ (e eᵀ + τ/s I)⁻¹ e g) / τ

by a k × k kernel for k rows (n × n where there are no fewer), with the direction a re-weighted sum of the
examples' gradients. A group of parameters (one, those of a layer, or all) is one system, whose residual each
of them reports. A block that is diagonal in a basis of its own, `ekfac`, is solved there:

    (s C + τI) d = -g,   C = U diag(λ) Uᵀ:     d = -U [(Uᵀ g) / (s λ + τ)]

Any block is solved by `cg` through its products C v: matrix-free and tied layers, a start vector, a
preconditioner. Blocks are solved one by one or, where the curvature has cross-layer blocks, as one system
over all parameters: with the exact Hessian this is Hessian-free optimisation (truncated Newton), which
negative curvature ends.

    block system       s C d + τ d = -g                  C by its products, of one block or of several

keeps C d from the time of the solve, for its residual and dᵀCd: a matrix-free curvature reads the model,
whose parameters the step is about to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, PlainLayer
from curvlab.curvature_structures import JointLayer
from curvlab.exceptions import PairError, SolveError
from curvlab.linalg import Block, EigenBlock, Factor, FactorBlock, Matrix
from curvlab.linalg.cg import CGResult, Iterating, SymmetricOperator, iterate_together
from curvlab.linalg.factors import binary_scale
from curvlab.linalg.flat import flatten, unflatten
from curvlab.linalg.inverse import ShiftedInverse, require_positive, shifted_inverse
from curvlab.measure import device
from curvlab.solvers.base import (
    NOTHING_READ,
    Damping,
    LayerDirection,
    LayerGradient,
    Measures,
    Preconditioner,
    Solver,
    System,
    relative_norm,
)
from curvlab.solvers.input_coordinates import form_gradient
from curvlab.staleness import Versions

__all__ = [
    "BlockCG",
    "BlockMeasures",
    "BlockSystem",
    "DampedBlocks",
    "EigenExact",
    "ExampleExact",
    "SolvedBlock",
    "check_start",
    "jacobi",
]


@dataclass(frozen=True, eq=False)
class SolvedBlock:
    """g, d and C d of one block; C d may be made when it is first read, where the solve has no use for it."""

    gradient: Tensor
    direction: Tensor
    product: Tensor | Callable[[], Tensor]

    @cached_property
    def image(self) -> Tensor:
        """C d."""
        return self.product if isinstance(self.product, Tensor) else self.product()


@dataclass(frozen=True, eq=False)
class BlockSystem(System):
    """(s C + τI) d = -g, with C known by its products.

    `systems` has, for each parameter of the layer, all blocks of the system that it is a part of: its own, or
    those of the whole network where the curvature has cross-layer blocks.
    """

    systems: Mapping[str, Mapping[str, SolvedBlock]]

    def measures(
        self,
        layer: LayerCurvature,
        gradient: LayerGradient,
        weight: Matrix | None,
        bias: Tensor | None,
        damping: Damping,
    ) -> dict[str, Measures]:
        found: dict[str, Measures] = {}
        for name, system in self.systems.items():
            reads = Versions.of({f"the gradient of `{n}`": block.gradient for n, block in system.items()})
            found[name] = BlockMeasures(name, damping, system, reads)
        return found

    def bias_rank(self, layer: LayerCurvature) -> int:
        return 0 if layer.bias_name is None else layer.blocks[layer.bias_name].numel


@dataclass(frozen=True, eq=False)
class BlockMeasures(Measures):
    """Measures of a block solved through its products, by itself or as part of a system of several.

    `system` holds every block of the system; the residual is that of the whole system, the one that the
    iteration stopped by.
    """

    name: str
    damping: Damping
    system: Mapping[str, SolvedBlock]
    reads: Versions = NOTHING_READ

    def residual(self) -> Tensor:
        squares, references = [], []
        # Relative to the gradient's size: squares then neither under- nor overflow.
        size = torch.stack([binary_scale(block.gradient) for block in self.system.values()]).max()
        for block in self.system.values():
            rest = self.damping.scale * block.image + self.damping.shift * block.direction + block.gradient
            squares.append((rest / size).square().sum())
            references.append((block.gradient / size).square().sum())
        return relative_norm(torch.stack(squares).sum(), torch.stack(references).sum())

    def residual_full(self) -> Tensor:
        return self.residual()

    def slope(self) -> Tensor:
        block = self.system[self.name]
        return (block.direction * block.gradient).sum()

    def quadratic(self) -> Tensor:
        block = self.system[self.name]
        data = (block.direction * block.image).sum()
        return data + self.damping.l2 * block.direction.square().sum() if self.damping.l2 else data


@dataclass(frozen=True, eq=False)
class _DampedInverse:
    """g ↦ (s F + τI)⁻¹ g for a vector g."""

    damping: Damping
    shifted: ShiftedInverse | None

    @classmethod
    def of(cls, factor: Factor, damping: Damping) -> _DampedInverse:
        """By the inverse of F + τ/s I; where s is zero there is nothing to invert."""
        if not damping.scale:
            return cls(damping, None)
        shift = damping.shift / damping.scale
        return cls(damping, shifted_inverse(factor, shift, ("exact", shift), device.readable(factor.example)))

    def __call__(self, given: Tensor) -> Tensor:
        if self.shifted is None:
            return given / self.damping.shift
        return self.shifted(given[:, None])[:, 0] / self.damping.scale


@dataclass(frozen=True)
class _ByParameter(Solver):
    """A solver whose units are parameters, with blocks that act on tensors of the parameter's own shape."""

    # One system may go over all layers, and a product over the rows of all ranks needs every rank.
    layers_apart: ClassVar[bool] = False

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """One for each parameter."""
        return [
            OperatorLayer(layer.name, {name: block}, weight_name=name) for name, block in layer.blocks.items()
        ]


@dataclass(frozen=True, eq=False)
class _Parameter:
    """One parameter of a group, and the inverse of the group's system."""

    name: str
    group: LayerCurvature
    factor: Factor
    inverse: _DampedInverse


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleExact(_ByParameter):
    """`exact` on the groups of parameters of one curvature."""

    curvature: Curvature

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _Parameter:
        (name,) = layer.blocks
        group = next(one for one in self.curvature.layers if name in one.blocks)
        if not isinstance(group, JointLayer | PlainLayer):
            raise PairError(f"layer `{group.name}` is not made of the rows of examples: use `cg`")
        return _Parameter(name, group, group.factor, _DampedInverse.of(group.factor, damping))

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        """The system of a parameter that is a group by itself."""
        return self.apply_jointly([state], [gradient])[0]

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection]:
        """Every group's system, for all of its parameters."""
        own = [state for state in states if isinstance(state, _Parameter)]
        named = {
            state.name: form_gradient(given.weight)
            for state, given in zip(own, gradients, strict=True)
            if given.weight is not None
        }
        groups = {id(state.group): state for state in own}
        solved = {key: _solve(state, named) for key, state in groups.items()}
        return [_direction(state, solved[id(state.group)]) for state in own]


def _solve(state: _Parameter, gradient: Mapping[str, Tensor]) -> dict[str, SolvedBlock]:
    """g, d and F d of every parameter of a group; F d, a forward and a backward pass, when it is read."""
    names = list(state.group.blocks)
    step = -state.inverse(torch.cat([gradient[name].reshape(-1) for name in names]))
    shapes = {name: gradient[name].shape for name in names}
    image = _Image(state.factor, step, shapes)
    pieces = zip(names, step.split([shape.numel() for shape in shapes.values()]), strict=True)
    return {
        name: SolvedBlock(gradient[name], d.reshape(shapes[name]), partial(image.of, name))
        for name, d in pieces
    }


@dataclass(frozen=True, eq=False)
class _Image:
    """F d of a group's parameters, made once for all of them."""

    factor: Factor
    step: Tensor
    shapes: Mapping[str, torch.Size]

    @cached_property
    def _pieces(self) -> dict[str, Tensor]:
        image = self.factor.matmul(self.step[:, None])[:, 0]
        pieces = image.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: piece.reshape(shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def of(self, name: str) -> Tensor:
        """That of one parameter."""
        return self._pieces[name]


def _direction(state: _Parameter, system: Mapping[str, SolvedBlock]) -> LayerDirection:
    route = "sample" if getattr(state.factor, "narrow", False) else "dense"
    step = system[state.name].direction
    return LayerDirection(step, None, BlockSystem({state.name: system}), route, state.factor.rank_bound)


@dataclass(frozen=True, eq=False)
class _OwnBasis:
    """A block in its own basis, or the factor of a bias with its inverse."""

    name: str
    block: EigenBlock | FactorBlock
    damping: Damping
    inverse: _DampedInverse | None


@dataclass(frozen=True)
class EigenExact(_ByParameter):
    """`exact` on an `EigenLayer`: the weight in its own basis, the bias by its factor."""

    structures: ClassVar[tuple[str, ...]] = ("ekfac",)

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> _OwnBasis:
        ((name, block),) = layer.blocks.items()
        if isinstance(block, FactorBlock):
            return _OwnBasis(name, block, damping, _DampedInverse.of(block.factor, damping))
        assert isinstance(block, EigenBlock)
        require_positive(damping.scale * block.smallest() + damping.shift)
        return _OwnBasis(name, block, damping, None)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        assert isinstance(state, _OwnBasis)
        assert gradient.weight is not None
        given, block, damping = form_gradient(gradient.weight), state.block, state.damping
        if isinstance(block, EigenBlock):
            step, rank = -block.solve(given, damping.scale, damping.shift), block.numel
        else:
            assert state.inverse is not None
            step, rank = -state.inverse(given.reshape(-1)).reshape(given.shape), block.factor.rank_bound
        system = {state.name: SolvedBlock(given, step, partial(block.matmul, step))}
        return LayerDirection(step, None, BlockSystem({state.name: system}), "eigen", rank)


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


class Iterative(Protocol):
    """What solves blocks by their products: `cg`, with its limits."""

    @property
    def preconditioner(self) -> Literal["none", "jacobi"]:
        """The one of its own."""

    def tolerance(self, dtype: torch.dtype) -> float:
        """The residual that counts as converged."""

    def begin(
        self,
        operator: SymmetricOperator,
        rhs: Tensor,
        start: Tensor | None = None,
        precondition: Callable[[Tensor], Tensor] | None = None,
        beside: int = 1,
    ) -> Iterating:
        """Iterate on A x = b, one of so many systems that are read together."""


@dataclass(frozen=True, eq=False)
class _BlockState:
    layer: LayerCurvature
    damping: Damping
    preconditioner: Preconditioner | None


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCG(_ByParameter):
    """CG on the blocks of one curvature as they are; `cg` has the limits and the kind of preconditioner."""

    needs_psd: ClassVar[bool] = False
    needs_kronecker: ClassVar[bool] = False
    cg: Iterative
    curvature: Curvature
    start: Mapping[str, Tensor] | None
    given_preconditioner: Preconditioner | None

    def __eq__(self, other: object) -> bool:
        """Whether the two solve together: the same limits, on the blocks of the same curvature."""
        return (
            isinstance(other, BlockCG)
            and self.cg == other.cg
            and self.curvature is other.curvature
            and self.start is other.start
            and self.given_preconditioner is other.given_preconditioner
        )

    def __hash__(self) -> int:
        return hash((BlockCG, self.cg, id(self.curvature)))

    def tolerance(self, dtype: torch.dtype) -> float:
        """That of `cg`."""
        return self.cg.tolerance(dtype)

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
        system = self._system(named, product, state.damping, state.preconditioner)
        return _block_direction(state.layer, *_solved([system])[0])

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """One system over all layers, where the curvature has blocks between them.

        Elsewhere those of the blocks, side by side where reads are not free: one tells of all which have
        converged.
        """
        full, prepared = self.curvature.full_product, [s for s in states if isinstance(s, _BlockState)]
        named = [
            _gradient_by_name(state.layer, given) for state, given in zip(prepared, gradients, strict=True)
        ]
        if full is None:
            (first, *_) = named[0].values()
            if len(named) < 2 or device.in_pieces(first):
                return None
            systems = [
                self._system(
                    given,
                    partial(_block_product, state.layer.blocks),
                    state.damping,
                    state.preconditioner,
                    len(named),
                )
                for state, given in zip(prepared, named, strict=True)
            ]
            found = zip(prepared, _solved(systems), strict=True)
            return [_block_direction(state.layer, *solved) for state, solved in found]
        by_name = {
            name: state.preconditioner
            for state, given in zip(prepared, named, strict=True)
            for name in given
            if state.preconditioner is not None
        }
        preconditioner = (lambda name, x: by_name[name](name, x)) if by_name else None
        whole = {name: value for given in named for name, value in given.items()}
        (solved,) = _solved([self._system(whole, full, prepared[0].damping, preconditioner)])
        return [_block_direction(state.layer, *solved) for state in prepared]

    def _system(
        self,
        gradient: Mapping[str, Tensor],
        product: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        damping: Damping,
        preconditioner: Preconditioner | None,
        beside: int = 1,
    ) -> _BlocksBegun:
        """One run of CG that has begun."""
        operator = DampedBlocks({name: value.shape for name, value in gradient.items()}, product, damping)
        run = self.cg.begin(
            operator,
            -operator.flatten(gradient),
            None if self.start is None else operator.flatten(self.start),
            None if preconditioner is None else partial(operator.precondition, preconditioner),
            beside,
        )
        return _BlocksBegun(operator, gradient, run)


@dataclass(frozen=True, eq=False)
class _BlocksBegun:
    """The system of some blocks, and the iteration that solves it."""

    operator: DampedBlocks
    gradient: Mapping[str, Tensor]
    run: Iterating


def _solved(systems: Sequence[_BlocksBegun]) -> list[tuple[dict[str, SolvedBlock], CGResult]]:
    """The systems solved side by side: g, d and C d of every block of each, and how it ended."""
    found = []
    for one, result in zip(systems, iterate_together([one.run for one in systems]), strict=True):
        steps = one.operator.split(result.x)
        images = one.operator.product(steps)
        blocks = {name: SolvedBlock(one.gradient[name], steps[name], images[name]) for name in steps}
        found.append((blocks, result))
    return found


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


def check_start(blocks: Mapping[str, Block], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
