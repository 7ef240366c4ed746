"""What a solver is, the damping that it is given, and the damped systems that it solves.

A solver is frozen configuration with two phases, timed apart:

    prepare(layer, damping, gradient)   all that needs only the matrix: factorisations, bases
    apply(state, gradient)              the direction; for all layers at once where that is cheaper

`prepare` sees the gradient's form (not its values) to choose the coordinates it prepares for. The layer it is
given is a *unit*: a Kronecker layer with at most one weight matrix and one bias vector, whatever the layer of
the curvature is (see `curvature_layers`). Where the weight is many small matrices of one shape and the solver
says that it `solves_stacks`, the unit is all of them at once.

Damping is how the identity is mixed into a curvature before it is inverted:

    Mixed(α)      (1-α) C + α I     the paper's; what `alpha=` means
    Additive(τ)   C + τ I

    damped system      s B D A + τ D = -G                (s, τ) from the damping, A the input factor
    factored system    (B + β I) D (A + γ I) = -G        what the factored inverse solves

Conjugate gradients and the exact reference solve the damped system. The factored inverse splits the
identity's share over its two factors instead, (B + √α/π I)⁻¹ ⊗ (A + π√α I)⁻¹, so it reads `shift` only:

    π_t = sqrt((tr A / n_{t-1}) / (tr B / n_t))

Where the curvature is C + λI with an l2 term (`l2`, which `solve` sets), A, B and π are of the data part C:

    s (C + λI) + τI = s C + (τ + sλ) I      what `shift` gives conjugate gradients and the exact reference
    τ + λ                                   `factored_shift`, in the place of α in the factored inverse

The paper leaves π undefined; this is KFAC's, with A the input factor in use, and clamped to [1e-6, 1e6]:
tr B = 0 gives 1e6 (the limit is -G/τ), tr A = 0 gives 1e-6, both 0 give 1. Whether the clamp binds is part of
the result, as a tensor: the solve itself reads nothing.

Residuals, gᵀd and dᵀCd are computed when they are asked for, from the direction alone; residuals are the true
ones, relative to ‖G‖. They share nothing with the solvers but the factors and stay in the sample space when
the direction and the gradient do.
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
from curvlab.linalg import Factor, GramFactor, Matrix, RowProduct
from curvlab.linalg.execution import FullPrecision
from curvlab.linalg.factors import InputFactors, InputKind, binary_scale
from curvlab.linalg.steps import RowGradient, as_step
from curvlab.measure import device
from curvlab.solvers.input_coordinates import (
    Route,
    WeightGradient,
    form_gradient,
    input_factors,
    output_factor,
)
from curvlab.specs import INTERFACE, check_choices, check_number
from curvlab.staleness import Versions

__all__ = [
    "NOTHING_READ",
    "PI_LIMITS",
    "Additive",
    "BiasMeasures",
    "DampedSystem",
    "Damping",
    "DampingSplit",
    "FactoredSystem",
    "Formulation",
    "Guidance",
    "KroneckerSystem",
    "LayerDirection",
    "LayerGradient",
    "Measures",
    "Mixed",
    "Preconditioner",
    "Solver",
    "System",
    "WeightMeasures",
    "check_mean_above",
    "damping_from",
    "relative_norm",
    "scale_to_gradient",
    "split_damping",
]


@dataclass(frozen=True)
class Mixed:
    """(1-α) C + α I, 0 < α ≤ 1.

    >>> Mixed(0.05).scale, Mixed(0.05).shift
    (0.95, 0.05)
    """

    alpha: float
    l2: float = field(default=0.0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        expected = "the identity's share, a number in (0, 1]; the paper uses 0.01 to 0.1"
        check_number("alpha", self.alpha, expected, lambda x: 0 < x <= 1)

    @property
    def scale(self) -> float:
        """What C is multiplied by."""
        return 1 - self.alpha

    @property
    def shift(self) -> float:
        """What I is multiplied by, beside s times the data part of C."""
        return self.alpha + self.scale * self.l2

    @property
    def factored_shift(self) -> float:
        """What the factored inverse splits over its factors."""
        return self.alpha + self.l2

    def __str__(self) -> str:
        return f"mixed({self.alpha:g})"


@dataclass(frozen=True)
class Additive:
    """C + τ I, τ > 0.

    >>> Additive(0.1).scale, Additive(0.1).shift
    (1.0, 0.1)
    """

    tau: float
    l2: float = field(default=0.0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        expected = "the added multiple of the identity, a positive and finite number"
        check_number("tau", self.tau, expected, lambda x: 0 < x < float("inf"))

    @property
    def scale(self) -> float:
        """What C is multiplied by."""
        return 1.0

    @property
    def shift(self) -> float:
        """What I is multiplied by, beside the data part of C."""
        return self.tau + self.l2

    @property
    def factored_shift(self) -> float:
        """What the factored inverse splits over its factors."""
        return self.tau + self.l2

    def __str__(self) -> str:
        return f"additive({self.tau:g})"


Damping = Mixed | Additive


def damping_from(alpha: float | None, damping: Damping | None) -> Damping:
    """The damping given as `alpha=` or as a value; exactly one of them."""
    if (alpha is None) == (damping is None):
        raise SpecError(
            "give the damping once: alpha=0.05 (the paper's (1-α)C + αI) or damping=Additive(0.1)"
        )
    if alpha is not None:
        return Mixed(check_number("alpha", alpha, "a number in (0, 1]", lambda _: True))
    if not isinstance(damping, Mixed | Additive):
        raise SpecError(f"damping={damping!r}: expected Mixed(alpha) or Additive(tau), or alpha={damping}")
    return damping


PI_LIMITS = (1e-6, 1e6)


@dataclass(frozen=True, eq=False)
class DampingSplit:
    """π, and whether it would lie outside of `PI_LIMITS` (both scalar tensors; of a stack one for each)."""

    pi: Tensor
    clamped: Tensor

    @classmethod
    def from_value(cls, pi: float, like: Tensor, count: int = 1) -> DampingSplit:
        """A π that was given, not computed; the same for all systems of a stack of `count`."""
        one = torch.ones(() if count == 1 else (count,), dtype=like.dtype, device=like.device)
        return cls(pi * one, torch.zeros_like(one, dtype=torch.bool))


def split_damping(trace_a: Tensor, n_a: int, trace_b: Tensor, n_b: int) -> DampingSplit:
    """π from the average traces of the factors.

    >>> split_damping(torch.tensor(8.0), 2, torch.tensor(3.0), 3).pi.item()
    2.0
    """
    # Two roots, because the ratio of the traces overflows where that of their roots does not.
    ratio = (trace_a / n_a).clamp(min=0).sqrt() / (trace_b / n_b).clamp(min=0).sqrt()
    raw = ratio.nan_to_num(nan=1.0, posinf=float("inf"))
    pi = raw.clamp(*PI_LIMITS)
    return DampingSplit(pi, pi != raw)


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """The gradient of one layer's parameters (None: the parameter has no block)."""

    weight: WeightGradient | None
    bias: Tensor | None


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


NOTHING_READ = Versions(())
SIGNIFICANT = 1e3  # times its rounding: the least square norm that counts as accurate


class Measures(FullPrecision, ABC):
    """What can be asked of a solved block, as tensors; `reads` are the tensors it is computed from."""

    reads: Versions

    @abstractmethod
    def residual(self) -> Tensor:
        """Relative residual of the solver's own system."""

    @abstractmethod
    def residual_full(self) -> Tensor:
        """Relative residual of (s E[hhᵀ] ⊗ B + τI) d = -g, which compares across solvers."""

    @abstractmethod
    def slope(self) -> Tensor:
        """gᵀd."""

    @abstractmethod
    def quadratic(self) -> Tensor:
        """dᵀCd with the undamped curvature, its λI included."""


class System(ABC):
    """The linear system that the direction of one layer solves."""

    @abstractmethod
    def measures(
        self,
        layer: LayerCurvature,
        gradient: LayerGradient,
        weight: Matrix | None,
        bias: Tensor | None,
        damping: Damping,
    ) -> dict[str, Measures]:
        """The measures of the steps `weight` and `bias`, by parameter name."""

    @abstractmethod
    def bias_rank(self, layer: LayerCurvature) -> int:
        """What the rank of the bias's block cannot exceed."""


class KroneckerSystem(System):
    """A system made of the Kronecker factors of a layer."""

    kind: InputKind

    @abstractmethod
    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        """The system's matrix times D, given D A."""

    @abstractmethod
    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        """The same for a bias."""

    def measures(
        self,
        layer: LayerCurvature,
        gradient: LayerGradient,
        weight: Matrix | None,
        bias: Tensor | None,
        damping: Damping,
    ) -> dict[str, Measures]:
        found: dict[str, Measures] = {}
        reads = _gradient_versions(layer, gradient)
        if layer.weight_name is not None and weight is not None and gradient.weight is not None:
            found[layer.weight_name] = WeightMeasures(self, layer, weight, gradient.weight, damping, reads)
        if layer.bias_name is not None and bias is not None and gradient.bias is not None:
            found[layer.bias_name] = BiasMeasures(self, layer, bias, gradient.bias, damping, reads)
        return found

    def bias_rank(self, layer: LayerCurvature) -> int:
        return output_factor(layer).rank_bound


def _gradient_versions(layer: LayerCurvature, gradient: LayerGradient) -> Versions:
    """What measures are computed from that others can change: the gradient, in factors or formed."""
    weight, bias = gradient.weight, gradient.bias
    named: dict[str, Tensor | None] = {f"the gradient of `{layer.bias_name}`": bias}
    if isinstance(weight, RowGradient):
        named["the batch"] = weight.inputs.rows
    else:
        named[f"the gradient of `{layer.weight_name}`"] = weight
    return Versions.of({name: tensor for name, tensor in named.items() if tensor is not None})


@dataclass(frozen=True, eq=False)
class DampedSystem(KroneckerSystem):
    """(s A ⊗ B + τ I) d = -g, for a bias (s B + τ I) d = -g."""

    kind: InputKind
    scale: float
    shift: float

    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        return self.scale * output.matmul(d_times_input) + self.shift * d

    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        return self.scale * output.matmul(d[:, None])[:, 0] + self.shift * d


@dataclass(frozen=True, eq=False)
class FactoredSystem(KroneckerSystem):
    """(B + β I) D (A + γ I) = -G, for a bias (B + τ I) d = -g."""

    kind: InputKind
    beta: Tensor
    gamma: Tensor
    shift: float

    def times_weight(self, output: Factor, d: Tensor, d_times_input: Tensor) -> Tensor:
        right = d_times_input + self.gamma * d
        return output.matmul(right) + self.beta * right

    def times_bias(self, output: Factor, d: Tensor) -> Tensor:
        return output.matmul(d[:, None])[:, 0] + self.shift * d


class _RowSpace:
    """Matrices M H' by their coefficients M."""

    def __init__(self, gram: GramFactor) -> None:
        self.gram = gram

    def times_input(self, x: Tensor, kind: InputKind) -> Tensor:
        """X A: M ↦ M K, or M K √c √cᵀ because E[h] = H'ᵀ√c."""
        image = x @ self.gram.gram
        return image if kind == "full" else torch.outer(image @ self.gram.root, self.gram.root)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * (y @ self.gram.gram)).sum()

    def square_norm(self, x: Tensor) -> Tensor:
        """‖XH'‖² by the Gram matrix, or by the product itself where rounding could be a part of it."""
        square = self.dot(x, x)
        rounding = torch.finfo(x.dtype).eps * x.square().sum() * self.gram.gram.trace()
        if not device.readable(square):
            return square
        if not device.in_pieces(square):  # to ask would be to wait
            return torch.where(
                square > SIGNIFICANT * rounding, square, RowProduct(x, self.gram).square_norm()
            )
        return square if bool(square > SIGNIFICANT * rounding) else RowProduct(x, self.gram).square_norm()


class _MatrixSpace:
    """Matrices as they are; of a stack the measures are those of all of it together."""

    def __init__(self, inputs: InputFactors) -> None:
        self.inputs = inputs

    def times_input(self, x: Tensor, kind: InputKind) -> Tensor:
        if kind == "full":
            return self.inputs.full.matmul(x.mT).mT
        mean = self.inputs.mean[..., None]
        return (x @ mean) * mean.mT

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    def square_norm(self, x: Tensor) -> Tensor:
        return x.square().sum()


@dataclass(frozen=True, eq=False)
class WeightMeasures(Measures):
    """Measures of the weight block of a Kronecker layer, in the sample space where all of it is there."""

    system: KroneckerSystem
    layer: LayerCurvature
    direction: Matrix
    gradient: WeightGradient
    damping: Damping
    reads: Versions = NOTHING_READ

    def _represent(self) -> tuple[_RowSpace | _MatrixSpace, Tensor, Tensor]:
        """Direction and gradient in the same representation."""
        inputs, direction, gradient = input_factors(self.layer), as_step(self.direction), self.gradient
        if (
            isinstance(direction, RowProduct)
            and isinstance(gradient, RowGradient)
            and direction.gram.shares_rows_with(gradient.inputs)
            and gradient.inputs.shares_rows_with(inputs.full)
        ):
            return _RowSpace(direction.gram), direction.coefficients, gradient.gradients.scaled_rows().T
        return _MatrixSpace(inputs), direction.form(), form_gradient(gradient)

    def _residual(self, system: KroneckerSystem) -> Tensor:
        """‖system applied to D, plus G‖ / ‖G‖ (zero where G is zero)."""
        space, d, g = self._represent()
        d, g = scale_to_gradient(d, g)
        rest = system.times_weight(output_factor(self.layer), d, space.times_input(d, system.kind)) + g
        return relative_norm(space.square_norm(rest), space.square_norm(g))

    def residual(self) -> Tensor:
        return self._residual(self.system)

    def residual_full(self) -> Tensor:
        return self._residual(DampedSystem("full", self.damping.scale, self.damping.shift))

    def slope(self) -> Tensor:
        """⟨G, D⟩."""
        space, d, g = self._represent()
        return space.dot(d, g)

    def quadratic(self) -> Tensor:
        """⟨D, B D E[hhᵀ]⟩ + λ‖D‖²."""
        space, d, _ = self._represent()
        data = space.dot(d, output_factor(self.layer).matmul(space.times_input(d, "full")))
        return data + self.damping.l2 * space.square_norm(d) if self.damping.l2 else data


@dataclass(frozen=True, eq=False)
class BiasMeasures(Measures):
    """Measures of the bias block of a layer with an output factor."""

    system: KroneckerSystem
    layer: LayerCurvature
    direction: Tensor
    gradient: Tensor
    damping: Damping
    reads: Versions = NOTHING_READ

    def _residual(self, system: KroneckerSystem) -> Tensor:
        d, g = scale_to_gradient(self.direction, self.gradient)
        rest = system.times_bias(output_factor(self.layer), d) + g
        return relative_norm(rest @ rest, g @ g)

    def residual(self) -> Tensor:
        return self._residual(self.system)

    def residual_full(self) -> Tensor:
        return self._residual(DampedSystem("full", self.damping.scale, self.damping.shift))

    def slope(self) -> Tensor:
        return self.direction @ self.gradient

    def quadratic(self) -> Tensor:
        data = self.direction @ output_factor(self.layer).matmul(self.direction[:, None])[:, 0]
        return data + self.damping.l2 * self.direction.square().sum() if self.damping.l2 else data


def scale_to_gradient(direction: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the gradient's size: squares of what is relative to it do not under- or overflow."""
    size = binary_scale(gradient)
    return direction / size, gradient / size


def relative_norm(square: Tensor, reference: Tensor) -> Tensor:
    """√(square / reference), or √square where the reference is zero."""
    square, reference = square.clamp(min=0), reference.clamp(min=0)
    return torch.where(
        reference > 0, (square / torch.where(reference > 0, reference, 1)).sqrt(), square.sqrt()
    )
