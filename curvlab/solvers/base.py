"""What a solver is: frozen configuration with two phases, timed apart.

    prepare(layer, damping, gradient)   all that needs only the matrix: factorisations, bases
    apply(state, gradient)              the direction; for all layers at once where that is cheaper

`prepare` sees the gradient's form (not its values) to choose the coordinates it prepares for. The layer it is
given is a *unit*: a Kronecker layer with at most one weight matrix and one bias vector, whatever the layer of
the curvature is (see `curvature_layers`). Where the weight is many small matrices of one shape and the solver
says that it `solves_stacks`, the unit is all of them at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.curvature import Curvature
from curvlab.curvature_layers import KroneckerLayer, LayerCurvature
from curvlab.exceptions import PairError, SpecError
from curvlab.linalg import Matrix
from curvlab.linalg.factors import InputKind
from curvlab.solvers.cost_model import Route
from curvlab.solvers.damping import Damping, DampingSplit
from curvlab.solvers.systems import LayerGradient, System
from curvlab.specs import INTERFACE, check_choices

__all__ = [
    "Formulation",
    "Guidance",
    "LayerDirection",
    "LayerGradient",
    "Preconditioner",
    "Solver",
    "check_mean_above",
]

Formulation = Literal["reduced", "explicit"]
"""`reduced` is the sample-space form, `explicit` the textbook form: the paper's equations to the letter."""

Preconditioner = Callable[[str, Tensor], Tensor]
"""x ↦ M⁻¹ x for the parameter of this name."""


@dataclass(frozen=True, eq=False)
class Guidance:
    """What a caller gives an iteration beside the system: a first guess, a preconditioner."""

    start: Mapping[str, Tensor] | None = None
    preconditioner: Preconditioner | None = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.start is not None or self.preconditioner is not None


@dataclass(frozen=True, eq=False)
class LayerDirection:
    """What `apply` returns: the steps of one layer and how they were found.

    `outcomes`, `iterations` and `history` have one column per system: the weight's, then the bias's;
    None for a direct method. `split` is how the damping of the weight's system was split, where it was.
    """

    weight: Matrix | None
    bias: Tensor | None
    system: System
    route: str
    rank: int
    outcomes: Tensor | None = None
    iterations: Tensor | None = None
    history: Tensor | None = None
    split: DampingSplit | None = None


@dataclass(frozen=True)
class Solver(ABC):
    """A rule that turns a curvature and a gradient into a direction.

    `interface` numbers what is described here; a plugin repeats the number that it was written for, so that
    another curvlab can tell.
    """

    interface: ClassVar[int] = INTERFACE
    input_factor: ClassVar[InputKind] = "full"
    needs_psd: ClassVar[bool] = True
    needs_kronecker: ClassVar[bool] = True
    layers_apart: ClassVar[bool] = True
    """Whether a rank can solve one layer without the others taking part."""
    structures: ClassVar[tuple[str, ...]] = ("kronecker",)
    """The structures of curvatures that it solves."""

    route: Route = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a field that is none of the choices it has; a subclass with its own calls this one."""
        check_choices(self)

    def adapt(self, curvature: Curvature, name: str, guidance: Guidance) -> Solver:
        """The solver that does the work on this curvature: itself, layer by layer on Kronecker factors.

        `name` is what messages call it. A solver that can do without the factors returns another one here.
        """
        if guidance.given:
            raise self._takes_no_guidance(name)
        for layer in curvature.layers:
            incomplete = isinstance(layer, KroneckerLayer) and not layer.complete
            if layer.matrix_free or incomplete:
                raise PairError(
                    f"layer `{layer.name}` of `{curvature.provider}` has no Kronecker factors to solve by: "
                    f"use `cg`, which needs products only"
                )
        return self

    def for_layer(self, layer: LayerCurvature, curvature: Curvature) -> Solver:
        """The solver of one layer: itself, where it does not treat some layers in another way."""
        return self

    @property
    def solves_stacks(self) -> bool:
        """Whether its phases take a stack of equal systems as they take one (see `linalg.stacks`)."""
        return False

    def units(self, layer: LayerCurvature) -> Sequence[LayerCurvature]:
        """What of a layer the solver prepares and applies, one after the other."""
        return layer.units(self.input_factor, stacked=self.solves_stacks)

    @staticmethod
    def _takes_no_guidance(name: str) -> PairError:
        return PairError(f"`{name}` takes no start vector and no preconditioner; `cg` does")

    @abstractmethod
    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> object:
        """All that needs only the matrix."""

    @abstractmethod
    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        """The direction d, to be added to the parameters."""

    def apply_jointly(
        self, states: Sequence[object], gradients: Sequence[LayerGradient]
    ) -> list[LayerDirection] | None:
        """What `apply` gives for each layer, for less than one after the other; None: no such way."""
        return None

    def tolerance(self, dtype: torch.dtype) -> float:
        """The relative residual up to which the true residual counts as converged.

        By default that of a direct method: the root of the rounding unit.
        """
        return float(torch.finfo(dtype).eps ** 0.5)

    def check(self, curvature: Curvature, name: str) -> None:
        """Refuse a curvature the solver cannot work with, in a sentence."""
        if self.needs_kronecker and curvature.matrix_free:
            raise PairError(
                f"`{name}` works on Kronecker factors; `{curvature.provider}` is matrix-free. "
                f"Use `cg`, or one of `fisher`, `gauss-newton`, `pch-1`, `pch-2`"
            )
        if curvature.structure not in self.structures:
            raise PairError(
                f"`{name}` is for curvatures of structure {' or '.join(f'`{s}`' for s in self.structures)}; "
                f"that of `{curvature.provider}` is `{curvature.structure}`. Use `exact` or `cg`"
            )
        if self.needs_psd and not curvature.psd:
            raise PairError(
                f"`{name}` needs a positive semi-definite curvature; `{curvature.provider}` with criterion "
                f"`{curvature.criterion}` is indefinite here ({curvature.definiteness.why}). "
                f"Use `pch-1`, `pch-2` or `fisher`, or solver `cg`, which stops at negative curvature"
            )


def check_mean_above(mean_above: int | None, kind: InputKind) -> None:
    """Refuse a limit that is no number of inputs, or that a solver with the mean input factor is given."""
    if mean_above is None:
        return
    if kind == "mean":
        raise SpecError(
            "mean_above is a field of `kfi` and `cg`: this solver takes the mean factor everywhere"
        )
    if mean_above < 0:
        raise SpecError(f"mean_above={mean_above}: expected a number of inputs, 0 or more")
