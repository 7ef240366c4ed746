"""What a solver is: frozen configuration with two phases, timed apart.

    prepare(layer, damping, gradient)   all that needs only the matrix: factorisations, bases
    apply(state, gradient)              the direction; for all layers at once where that is cheaper

`prepare` sees the gradient's form (not its values) to choose the coordinates it prepares for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.exceptions import PairError
from curvlab.linalg import Matrix
from curvlab.linalg.inputs import InputKind
from curvlab.registry import INTERFACE
from curvlab.solvers.damping import Damping
from curvlab.solvers.pi import Split
from curvlab.solvers.residual import System
from curvlab.solvers.routes import Route
from curvlab.solvers.sides import WeightGradient

__all__ = ["Formulation", "LayerDirection", "LayerGradient", "Solver"]

Formulation = Literal["reduced", "explicit"]


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """The gradient of one layer's parameters (None: the parameter has no block)."""

    weight: WeightGradient | None
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class LayerDirection:
    """What `apply` returns: the steps of one layer and how they were found.

    `outcomes`, `iterations` and `history` have one column a system: the weight's, then the bias's;
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
    split: Split | None = None


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
    route: Route = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a field that is none of the choices it has; a subclass with its own calls this one."""
        for name, hint in get_type_hints(type(self)).items():
            choices, value = get_args(hint), getattr(self, name)
            if get_origin(hint) is Literal and value not in choices:
                nearest = get_close_matches(str(value), map(str, choices), n=1)
                meant = f"; did you mean `{nearest[0]}`?" if nearest else ""
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, choices))}{meant}")

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
        if self.needs_psd and not curvature.psd:
            raise PairError(
                f"`{name}` needs a positive semi-definite curvature; `{curvature.provider}` with criterion "
                f"`{curvature.criterion}` is indefinite here ({curvature.definiteness.why}). "
                f"Use `pch-1`, `pch-2` or `fisher`, or solver `cg`, which stops at negative curvature"
            )
