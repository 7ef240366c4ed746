"""Functions of a curvature: inverse, powers, log-determinant and samples, of the damped matrix D.

    D = sC + τI          Additive(τ): s = 1;  Mixed(α): s = 1-α, τ = α;  without damping D = C
    logdet D = Σ log λ   D⁻¹ v,  Dᵖ v        x = D^(-½) ε has covariance D⁻¹, for ε standard normal

Where the eigenvectors of all blocks are known (Kronecker factors, or a small matrix) each is exact, from
them. Any other matrix is known by its products: D⁻¹ v by conjugate gradients, Dᵖ v by Lanczos, logdet D by
stochastic Lanczos quadrature, n · mean over probes of Σ w log θ, with a standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from operator import index
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from curvlab.exceptions import (
    ArgumentError,
    DenseSizeError,
    IndefiniteError,
    SolveError,
    SpecError,
    describe_argument,
)
from curvlab.linalg.blocks import Block
from curvlab.linalg.cg import FunctionOperator, Outcome, conjugate_gradients
from curvlab.linalg.eigenbases import Eigenbasis
from curvlab.linalg.estimators import (
    FEWEST_PROBES,
    Estimate,
    Estimator,
    estimate_diagonal,
    estimate_frobenius_norm,
    estimate_trace,
    gaussian_rows,
    mean_with_error,
    random_signs,
)
from curvlab.linalg.execution import FullPrecision
from curvlab.linalg.flat import flatten, unflatten
from curvlab.linalg.inverse import NotPositiveDefiniteError
from curvlab.linalg.krylov import eigenpairs, function_times, lanczos, quadrature
from curvlab.measure.device import memory_bytes
from curvlab.specs import check_number

__all__ = [
    "Damping",
    "MatrixFunction",
    "SymmetricMatrix",
    "check_rows",
    "check_seed",
    "check_whole",
    "draw_samples",
    "estimate_measure",
    "kind_of",
    "log_determinant",
    "matrix_inverse",
    "matrix_power",
    "runs_at_once",
]

LANCZOS_BYTES = 2 * 1024**3
SIDE_BY_SIDE_BYTES = 256 * 1024**2
MOST_STEPS = 400
MOST_ITERATIONS = 2000
LOGDET_PROBES, LOGDET_STEPS = 20, 80
MEASURE_PROBES = 30
ROUNDING = 32  # relative to the largest: of two factors' eigenvalues, and of their product
Measure = Literal["trace", "diagonal", "frobenius_norm"]


@runtime_checkable
class Damping(Protocol):
    """What makes a matrix definite: `Additive(τ)` or `Mixed(α)`."""

    @property
    def scale(self) -> float:
        """What C is multiplied by."""

    @property
    def shift(self) -> float:
        """What I is multiplied by."""


def check_damping(damping: object) -> tuple[float, float]:
    """s and τ of sC + τI; 1 and 0 without damping."""
    if damping is None:
        return 1.0, 0.0
    if not isinstance(damping, Damping):
        raise SpecError(
            f"damping={damping!r}: expected Additive({damping}) for C + τI, or Mixed({damping}) for "
            f"(1-α)C + αI; got a {describe_argument(damping)}"
        )
    return damping.scale, damping.shift


def check_whole(name: str, value: Any, least: int = 1, most: int = 2**63 - 1) -> int:
    """`value` as an int, or a `SpecError` where it is no whole number from `least` on.

    >>> check_whole("k", 3)
    3
    >>> check_whole("k", 2.5)
    Traceback (most recent call last):
    curvlab.exceptions.SpecError: k=2.5: expected a whole number of at least 1
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except (TypeError, RuntimeError):  # the latter of a tensor of several numbers
        number = None
    if number is None or number < least:
        raise SpecError(f"{name}={value!r}: expected a whole number of at least {least:,}")
    if number > most:
        raise SpecError(f"{name}={number:.3g}: expected a whole number of at most 64 bits")
    return number


def check_seed(seed: Any) -> int:
    """`seed` as an int of 64 bits, or a `SpecError`."""
    return check_whole("seed", seed, -(2**63))


def kind_of(block: Block) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """What two blocks must have in common to be added or compared: shape, dtype and device."""
    return tuple(block.shape), block.example.dtype, block.example.device


@dataclass(frozen=True, eq=False)
class SymmetricMatrix:
    """A symmetric matrix over named parameters, flattened and joined.

    `product` maps rows (r, n) to rows; `like` has its dtype and device, `label` its name for messages.
    `decompose` gives its eigenvectors where they are known, and is called when they are first asked for.
    `agree_on` is that of a `Curvature`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    product: Callable[[Tensor], Tensor]
    like: Tensor
    label: str
    decompose: Callable[[], Eigenbasis | None]
    agree_on: Callable[[object], None] | None = None

    def begin(self, *asked: object) -> None:
        """Hold that all ranks begin the same iteration, where the products are sums over ranks."""
        if self.agree_on is not None:
            self.agree_on(asked)

    @cached_property
    def basis(self) -> Eigenbasis | None:
        """The eigenvectors, where they are known."""
        return self.decompose()

    @property
    def size(self) -> int:
        """n, the number of parameters."""
        return sum(int(torch.Size(shape).numel()) for shape in self.shapes.values())

    def flatten(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors as one vector; refused where one is missing or of another shape."""
        if not isinstance(vectors, Mapping):
            raise ArgumentError(
                f"`… @ x` takes a mapping of parameter names to tensors, such as problem.gradient(); got a "
                f"{describe_argument(vectors)}. For one vector of all parameters use .flat_product(x)"
            )
        for name, shape in self.shapes.items():
            if name not in vectors or tuple(vectors[name].shape) != tuple(shape):
                given = "nothing" if name not in vectors else f"shape {tuple(vectors[name].shape)}"
                raise ArgumentError(f"the operand has {given} for `{name}`; expected shape {tuple(shape)}")
        return flatten({name: vectors[name].to(self.like) for name in self.shapes}, list(self.shapes))

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector as named tensors."""
        return unflatten(vector, self.shapes)

    def smallest_eigenvalue(self) -> float:
        """Exact where the basis is known, else by Lanczos."""
        if self.basis is not None:
            return self.basis.ends()[0]
        found = eigenpairs(
            self.product, self.size, 1, "smallest", like=self.like, tol=1e-4, max_products=MOST_STEPS
        )
        return float(found.values[0])

    def default_tolerance(self) -> float:
        """What iterations end at: near the rounding of the dtype."""
        return 1e-12 if self.like.dtype == torch.float64 else 1e-6


@dataclass(frozen=True, eq=False)
class DampedMatrix:
    """D = sC + τI."""

    matrix: SymmetricMatrix
    scale: float
    shift: float

    @classmethod
    def of(cls, matrix: SymmetricMatrix, damping: object) -> DampedMatrix:
        """The matrix with its damping, which is checked here."""
        return cls(matrix, *check_damping(damping))

    def values(self, eigenvalues: Tensor) -> Tensor:
        """The eigenvalues of D from those of C."""
        return self.scale * eigenvalues + self.shift

    def product(self, rows: Tensor) -> Tensor:
        """D x for each row x."""
        return self.scale * self.matrix.product(rows) + self.shift * rows

    def require_definite(self, what: str, *, semi: bool = False) -> None:
        """Refuse a matrix whose eigenvectors are known and of which an eigenvalue is not positive."""
        if self.matrix.basis is None:
            return
        low, high = (float(self.values(torch.tensor(end))) for end in self.matrix.basis.ends())
        rounding = ROUNDING * torch.finfo(self.matrix.like.dtype).eps * max(abs(low), abs(high))
        # Without damping what lies within rounding stands for zero: its logarithm is one of noise.
        if low < -rounding if semi else low <= (rounding if self.shift == 0 else 0):
            raise self.refusal(what, low)

    def refusal(self, what: str, smallest: float | None = None) -> IndefiniteError:
        """The error that says why `what` does not exist."""
        if smallest is None:
            smallest = self.scale * self.matrix.smallest_eigenvalue() + self.shift
        damped = "as it is" if self.shift == 0 else f"with damping ({self.scale:g} C + {self.shift:g} I)"
        return IndefiniteError(
            f"{what} needs a positive definite matrix, and `{self.matrix.label}` {damped} has the smallest "
            f"eigenvalue {smallest:.4g}. Use a larger damping, such as "
            f"Additive({max(self.shift, 1e-3) + 1.1 * max(-smallest, 0):.2g}), or a curvature that is "
            f"positive semi-definite"
        )


def _positive_power(exponent: float) -> Callable[[Tensor], Tensor]:
    """λ ↦ λᵖ for eigenvalues that must be positive."""

    def power(values: Tensor) -> Tensor:
        if bool((values <= 0).any()):
            raise NotPositiveDefiniteError(float(values.min()))
        return values**exponent

    return power


@dataclass(frozen=True, eq=False)
class MatrixFunction(FullPrecision):
    """Dᵖ as a matrix of its own: `@` takes and gives mappings of parameter names to tensors.

    >>> import curvlab
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> inverse = curvlab.estimate("fisher", problem).inverse(damping=curvlab.Additive(0.1))
    >>> {name: tuple(x.shape) for name, x in (inverse @ problem.gradient()).items()}["2.weight"]
    (2, 3)
    """

    damped: DampedMatrix
    exponent: float

    def __repr__(self) -> str:
        matrix = self.damped.matrix
        return (
            f"MatrixFunction(({self.damped.scale:g} C + {self.damped.shift:g} I) ** {self.exponent:g}, "
            f"C = {matrix.label}, {matrix.size:,} parameters)"
        )

    def __matmul__(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        matrix = self.damped.matrix
        return matrix.unflatten(self.flat_product(matrix.flatten(vectors)))

    def flat_product(self, vector: Tensor) -> Tensor:
        """The product with one vector of all parameters, or with the columns of a matrix (n, columns)."""
        if vector.ndim == 1:
            return self.rows_product(vector[None])[0]
        return self.rows_product(vector.T).T

    def rows_product(self, rows: Tensor) -> Tensor:
        """The product with each row, (r, n)."""
        damped, matrix = self.damped, self.damped.matrix
        matrix.begin("a power", self.exponent, damped.scale, damped.shift, tuple(rows.shape))
        if matrix.basis is not None:
            # A semi-definite matrix may have eigenvalues below zero by rounding, which have no roots.
            least = 0.0 if self.exponent >= 0 and self.exponent % 1 else -inf
            return matrix.basis.apply(lambda v: damped.values(v).clamp(min=least) ** self.exponent, rows)
        if self.exponent == -1:
            return torch.stack([self._solve(row) for row in rows])
        return self._by_lanczos(rows, _positive_power(self.exponent))

    def _solve(self, row: Tensor) -> Tensor:
        damped, tol = self.damped, self.damped.matrix.default_tolerance()
        operator = FunctionOperator(lambda x: damped.product(x[None])[0])
        found = conjugate_gradients(operator, row, max_iter=MOST_ITERATIONS, tol=tol)
        outcome, residual = int(found.outcomes[0]), float(found.residuals[-1, 0])
        if outcome == Outcome.CONVERGED:
            return found.x
        if outcome == Outcome.NEGATIVE_CURVATURE:
            # Conjugate gradients end there; the Lanczos solution exists for an indefinite matrix, too.
            return self._by_lanczos(row[None], torch.reciprocal)[0]
        raise SolveError(
            f"`{damped.matrix.label}`: conjugate gradients reached a residual of {residual:.2g} instead of "
            f"{tol:.2g} in {int(found.iterations[0])} iterations. Use a larger damping"
        )

    def _by_lanczos(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        damped = self.damped
        matrix, tol = damped.matrix, damped.matrix.default_tolerance()
        steps = min(MOST_STEPS, LANCZOS_BYTES // (matrix.size * rows.element_size()))
        try:
            images, change = function_times(damped.product, rows, function, tol=tol, max_steps=steps)
        except NotPositiveDefiniteError as error:
            raise damped.refusal("a power") from error
        if change > 1e3 * tol:
            raise SolveError(
                f"`{matrix.label}`: {steps} Lanczos steps left a change of {change:.2g} instead of "
                f"{tol:.2g}. Use a larger damping, with which fewer steps are enough"
            )
        return images


def matrix_power(matrix: SymmetricMatrix, exponent: float, damping: object) -> MatrixFunction:
    """Dᵖ; refused where D has a negative eigenvalue, or a zero one and p < 0."""
    exponent = check_number("exponent", exponent, "a finite number", isfinite)
    damped = DampedMatrix.of(matrix, damping)
    damped.require_definite("a power", semi=exponent >= 0)
    return MatrixFunction(damped, float(exponent))


def matrix_inverse(matrix: SymmetricMatrix, damping: object) -> MatrixFunction:
    """D⁻¹, of an indefinite matrix too; refused where D is singular."""
    damped = DampedMatrix.of(matrix, damping)
    if matrix.basis is not None:
        ends = damped.values(torch.tensor(matrix.basis.ends(), dtype=matrix.like.dtype))
        rounding = ROUNDING * torch.finfo(matrix.like.dtype).eps * float(ends.abs().max())

        def vanishing(values: Tensor) -> Tensor:
            """Of C ≥ 0 no eigenvalue comes to nothing where τ is added, however wide the spectrum is."""
            near = damped.values(values).abs() <= rounding
            return (near if damped.shift == 0 else near & (values < 0)).to(values)

        if bool(matrix.basis.sum(vanishing) > 0):
            raise damped.refusal("an inverse", 0.0)
    return MatrixFunction(damped, -1.0)


def log_determinant(
    matrix: SymmetricMatrix, damping: object, probes: int | None, steps: int, seed: int
) -> Tensor | Estimate:
    """log det D: a scalar tensor where it is exact, else an estimate (also where `probes` asks for one)."""
    damped = DampedMatrix.of(matrix, damping)
    steps, seed = check_whole("steps", steps), check_seed(seed)
    if probes is not None:
        check_rows(matrix, check_whole("probes", probes, 2), f"logdet(probes={probes:,})")
    matrix.begin("a log-determinant", damped.scale, damped.shift, probes, steps, seed)
    damped.require_definite("a log-determinant")
    if matrix.basis is not None:
        value = matrix.basis.sum(lambda values: damped.values(values).log())
        return value if probes is None else Estimate(float(value), 0.0, 0)
    count = LOGDET_PROBES if probes is None else probes
    totals = []
    runs, keep = runs_at_once(matrix, steps)
    for part in random_signs(count, matrix.size, matrix.like, seed).split(runs):
        nodes, weights = quadrature(lanczos(damped.product, part, steps, keep=keep))
        # A run that ended early has zeros behind it, which have no weight.
        counted = weights > torch.finfo(weights.dtype).eps ** 2
        if bool((nodes[counted] <= 0).any()):
            raise damped.refusal("a log-determinant")
        logs = torch.where(counted, nodes, 1).log()
        totals.append(matrix.size * (weights * logs).sum(1))
    mean, error = mean_with_error(torch.cat(totals))
    return Estimate(float(mean), float(error), count)


def check_rows(matrix: SymmetricMatrix, rows: int, what: str) -> None:
    """Refuse vectors of all parameters, as many as `rows`, that the device has no memory for."""
    needed, held = rows * matrix.size * matrix.like.element_size(), memory_bytes(matrix.like.device)
    if held is not None and needed > held:
        raise DenseSizeError(
            f"{what} of `{matrix.label}` needs {rows:,} vectors of {matrix.size:,} parameters: {needed:,} "
            f"bytes, and {matrix.like.device} has {held:,}. Ask for fewer, or look at some layers: "
            f"curvature.select([…])"
        )


def runs_at_once(matrix: SymmetricMatrix, steps: int) -> tuple[int, bool]:
    """How many runs of Lanczos go side by side, and whether each can keep its vectors."""
    bytes_of_run = matrix.size * min(steps, matrix.size) * matrix.like.element_size()
    return max(1, SIDE_BY_SIDE_BYTES // bytes_of_run), bytes_of_run <= LANCZOS_BYTES


def draw_samples(matrix: SymmetricMatrix, count: int, damping: object, seed: int) -> dict[str, Tensor]:
    """`count` draws from N(0, D⁻¹), {name: (count, *shape)}."""
    count, seed = check_whole("sample", count), check_seed(seed)
    check_rows(matrix, count, f"sample({count:,})")
    matrix.begin("samples", count, seed)
    root = matrix_power(matrix, -0.5, damping)
    rows = root.rows_product(gaussian_rows(count, matrix.size, matrix.like, seed))
    sizes = [int(torch.Size(shape).numel()) for shape in matrix.shapes.values()]
    parts = rows.split(sizes, dim=1)
    return {
        name: part.reshape(count, *shape)
        for (name, shape), part in zip(matrix.shapes.items(), parts, strict=True)
    }


def estimate_measure(
    measure: Measure, matrix: SymmetricMatrix, estimator: Estimator | None, probes: int | None, seed: int
) -> Estimate:
    """Trace, diagonal or Frobenius norm from `probes` products; Hutchinson's unless Hutch++ is asked for."""
    chosen = "hutchinson" if estimator is None else estimator
    count = MEASURE_PROBES if probes is None else probes
    if chosen not in FEWEST_PROBES:
        raise SpecError(f"estimator={estimator!r}: expected {' or '.join(map(repr, FEWEST_PROBES))}")
    if check_whole("probes", count, 0) < FEWEST_PROBES[chosen]:
        raise SpecError(
            f"probes={probes}: `{chosen}` needs at least {FEWEST_PROBES[chosen]} for a standard error"
        )
    check_rows(matrix, 2 * count, f"{measure}(probes={count:,})")  # of each its signs and its image
    seed = check_seed(seed)
    matrix.begin(measure, chosen, count, seed)
    if measure == "diagonal":
        value, error = estimate_diagonal(
            matrix.product, matrix.size, like=matrix.like, probes=count, estimator=chosen, seed=seed
        )
        return Estimate(matrix.unflatten(value), matrix.unflatten(error), count)
    function = estimate_trace if measure == "trace" else estimate_frobenius_norm
    return function(matrix.product, matrix.size, like=matrix.like, probes=count, estimator=chosen, seed=seed)
