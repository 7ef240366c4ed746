"""What every provider promises, checked on small problems: one check per promise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from curvlab.curvature import Curvature, StaleWarning
from curvlab.exceptions import ProblemError, StaleError
from curvlab.linalg import Block
from curvlab.problem import Problem
from curvlab.providers import Provider, estimate
from curvlab.providers.registry import providers
from curvlab.specs import check_interface
from curvlab.testing.cases import Case, provider_cases
from curvlab.testing.checking import (
    Check,
    check_exempt,
    check_frozen,
    check_text,
    hold_all,
    require,
    run_all,
)
from curvlab.testing.traces import differences, mark, state_of

__all__ = ["PROMISES", "check_provider", "provider_checks"]

EXACT = 1e-10
SINGLE = 1e-4


@dataclass(frozen=True, eq=False)
class Subject:
    """A provider on a case; what it says of the case is computed once."""

    provider: Provider
    case: Case

    @cached_property
    def refusal(self) -> str | None:
        """Why the provider refuses the case, if it does."""
        try:
            _ = self.curvature
        except ProblemError as error:
            return str(error)
        return None

    @cached_property
    def problem(self) -> Problem:
        """The case on one batch, in float64."""
        return self.case.problem()

    @cached_property
    def curvature(self) -> Curvature:
        """The provider's curvature of `problem`."""
        return estimate(self.provider, self.problem)

    @cached_property
    def dense(self) -> dict[str, Tensor]:
        """The blocks of `curvature` as matrices."""
        return {name: block.to_dense() for name, block in self.curvature.blocks.items()}


def check_configuration(provider: Provider) -> None:
    """A frozen dataclass, equal by value, whose constructor does no work."""
    require(isinstance(provider, Provider), "it does not derive from curvlab.providers.Provider")
    check_frozen(provider)


def check_version(provider: Provider) -> None:
    """The interface it was written for is one that this curvlab has."""
    check_interface(type(provider))


def check_spec(provider: Provider) -> None:
    """A registered provider is what its own text says."""
    check_text(providers, provider)


def check_side_effects(subject: Subject) -> None:
    """All is as before after an estimate and its use, also where the problem is refused."""
    problem = subject.case.problem()
    mark(problem.model)
    before = state_of(problem)
    with suppress(Exception):  # what went wrong is for other checks to say, not what it left behind
        curvature = estimate(subject.provider, problem)
        _ = curvature @ {name: _vectors(block)[0] for name, block in curvature.blocks.items()}
    changed = differences(before, state_of(problem))
    require(not changed, f"it changes {', '.join(changed[:3])}")


def check_refusal(subject: Subject) -> None:
    """A problem that cannot be analysed is refused by a ProblemError that says why."""
    try:
        reason = subject.refusal
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise AssertionError(f"estimate raises {what}; expected a Curvature, or a ProblemError") from error
    require(reason is None or len(reason.split()) > 3, f"its ProblemError does not say why: {reason!r}")


def check_blocks(subject: Subject) -> None:
    """One finite block a parameter, of its name, shape and dtype."""
    curvature, problem = subject.curvature, subject.problem
    names = [name for layer in problem.layers for name in layer.names]
    require(list(curvature.blocks) == names, f"its blocks are {list(curvature.blocks)}; expected {names}")
    for name, block in curvature.blocks.items():
        parameter = problem.model.get_parameter(name)
        shape, expected = tuple(block.shape), tuple(parameter.shape)
        require(shape == expected, f"block `{name}` has shape {shape}; the parameter has {expected}")
        product = block @ torch.ones_like(parameter)
        require(tuple(product.shape) == expected, f"block `{name}` gives products of shape {product.shape}")
        same = product.dtype == parameter.dtype and product.device == parameter.device
        require(same, f"block `{name}` gives {product.dtype} on {product.device}")
        require(not product.requires_grad, f"block `{name}` gives products that require gradients")
        require(bool(torch.isfinite(subject.dense[name]).all()), f"block `{name}` is not finite")


def check_symmetric(subject: Subject) -> None:
    """xᵀ(Cy) = yᵀ(Cx)."""
    for name, block in subject.curvature.blocks.items():
        x, y = _vectors(block)
        left, right = (x * (block @ y)).sum(), (y * (block @ x)).sum()
        size = x.norm() * y.norm() * subject.dense[name].norm()
        require(abs(float(left - right)) <= EXACT * float(size), f"block `{name}` is not symmetric")


def check_linear(subject: Subject) -> None:
    """C(ax + by) = a Cx + b Cy."""
    for name, block in subject.curvature.blocks.items():
        x, y = _vectors(block)
        _close(
            block @ (2 * x - 3 * y), 2 * (block @ x) - 3 * (block @ y), EXACT, f"block `{name}` is not linear"
        )


def check_dense(subject: Subject) -> None:
    """`@` is what `to_dense` says, block by block and as a whole."""
    curvature = subject.curvature
    vectors = {name: _vectors(block)[0] for name, block in curvature.blocks.items()}
    for name, block in curvature.blocks.items():
        expected = (subject.dense[name] @ vectors[name].flatten()).reshape(block.shape)
        _close(block @ vectors[name], expected, EXACT, f"block `{name}`: `@` and to_dense() disagree")
    joined = torch.cat([vector.flatten() for vector in vectors.values()])
    products = curvature @ vectors
    whole = torch.cat([products[name].flatten() for name in vectors])
    _close(whole, curvature.to_dense() @ joined, EXACT, "the curvature's `@` and to_dense() disagree")


def check_summaries(subject: Subject) -> None:
    """Diagonal, trace, Frobenius norm and eigenvalues are those of the dense form."""
    for name, block in subject.curvature.blocks.items():
        dense = subject.dense[name]
        summaries = {
            "diagonal()": (block.diagonal().flatten(), dense.diagonal()),
            "trace()": (block.trace(), dense.trace()),
            "frobenius_norm()": (block.frobenius_norm(), dense.norm()),
            "eigvalsh()": (block.eigvalsh(), torch.linalg.eigvalsh((dense + dense.T) / 2)),
        }
        for what, (value, expected) in summaries.items():
            sentence = f"block `{name}`: {what} is not that of to_dense()"
            _close(value, expected, EXACT, sentence, scale=float(dense.norm()))


def check_psd(subject: Subject) -> None:
    """Where it is claimed, no eigenvalue is negative beyond rounding."""
    curvature = subject.curvature
    if not curvature.psd:
        return
    blocks = list(subject.dense.values()) if curvature.full_product is None else [curvature.to_dense()]
    spectra = [torch.linalg.eigvalsh((block + block.T) / 2) for block in blocks]
    smallest, largest = min(float(v[0]) for v in spectra), max(float(v.abs().max()) for v in spectra)
    sentence = f"it is said to be {curvature.definiteness}; its smallest eigenvalue is {smallest:.3g}"
    require(smallest >= -EXACT * largest, sentence)


def check_repeatable(subject: Subject) -> None:
    """A second call gives the same."""
    _same_blocks(subject, subject.case.problem(), EXACT, "a second call")


def check_batches(subject: Subject) -> None:
    """A stream of uneven batches gives the same as one batch."""
    _same_blocks(subject, subject.case.stream(), EXACT, "a stream of uneven batches")


def check_precision(subject: Subject) -> None:
    """float32 agrees with float64."""
    _same_blocks(subject, subject.case.problem(torch.float32), SINGLE, "float32")


def check_fresh(subject: Subject) -> None:
    """Use after a parameter has changed is told by a warning or a StaleError."""
    problem = subject.case.problem()
    curvature = estimate(subject.provider, problem)
    vectors = {name: block.example.new_ones(block.shape) for name, block in curvature.blocks.items()}
    with torch.no_grad():
        problem.model.get_parameter(next(iter(vectors))).mul_(1.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _ = curvature @ vectors
        except StaleError:
            return
    told = any(issubclass(warning.category, StaleWarning) for warning in caught)
    require(told, "its curvature is used after a parameter has changed, and gives no warning of it")


def _vectors(block: Block) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    pair = torch.randn(2, *block.shape, dtype=torch.float64, generator=generator).to(block.example)
    return pair[0], pair[1]


def _same_blocks(subject: Subject, problem: Problem, tolerance: float, what: str) -> None:
    """Compare products with random vectors: a matrix-free block of a stream is dear to form."""
    other = estimate(subject.provider, problem)
    names = list(subject.curvature.blocks)
    require(list(other.blocks) == names, f"{what} gives the blocks {list(other.blocks)}; expected {names}")
    for name, block in subject.curvature.blocks.items():
        for x in _vectors(block):
            value = other.blocks[name] @ x.to(other.blocks[name].example)
            scale = float(subject.dense[name].norm() * x.norm())
            _close(value, block @ x, tolerance, f"{what} gives another block `{name}`", scale)


def _close(
    value: Tensor, expected: Tensor, tolerance: float, sentence: str, scale: float | None = None
) -> None:
    size = float(expected.norm()) if scale is None else scale
    error = float((value.to(expected) - expected).norm())
    # A difference that is NaN is not close.
    require(error <= tolerance * size, f"{sentence} (they differ by {error:.3g}, the size is {size:.3g})")


def check_accepts(subjects: Mapping[str, Subject]) -> None:
    """It analyses some problem."""
    refusals = [subject.refusal for subject in subjects.values()]
    require(None in refusals, f"it refuses every problem it was checked on, the last because {refusals[-1]}")


ON_THE_PROVIDER: dict[str, Callable[[Provider], None]] = {
    "configuration": check_configuration,
    "interface": check_version,
    "spec": check_spec,
}
ON_A_PROBLEM: dict[str, Callable[[Subject], None]] = {
    "side-effects": check_side_effects,
    "refusal": check_refusal,
}
ON_A_CURVATURE: dict[str, Callable[[Subject], None]] = {
    "blocks": check_blocks,
    "linear": check_linear,
    "symmetric": check_symmetric,
    "dense": check_dense,
    "summaries": check_summaries,
    "psd": check_psd,
    "repeatable": check_repeatable,
    "batches": check_batches,
    "precision": check_precision,
    "fresh": check_fresh,
}
PROMISES = (*ON_THE_PROVIDER, *ON_A_PROBLEM, "accepts", *ON_A_CURVATURE)
"""The names of the checks, in the order in which they run."""


class _Subjects:
    """A provider on all its cases, which are made when the first check needs them."""

    def __init__(self, provider: Provider, problem: Problem | None) -> None:
        self.provider, self.problem = provider, problem

    @cached_property
    def by_label(self) -> dict[str, Subject]:
        cases = provider_cases() if self.problem is None else [Case.of(self.problem)]
        return {case.label: Subject(self.provider, case) for case in cases}

    def hold(self, promise: Callable[[Subject], None]) -> None:
        """Hold the provider to a promise on every problem."""
        hold_all(promise, self.by_label)

    def hold_where_accepted(self, promise: Callable[[Subject], None]) -> None:
        """The same on the problems that it does not refuse."""
        hold_all(promise, {label: s for label, s in self.by_label.items() if not _is_refused(s)})

    def accept(self) -> None:
        check_accepts(self.by_label)


def _is_refused(subject: Subject) -> bool:
    """Whether the provider refuses the case; an estimate that raises something else is none."""
    try:
        return subject.refusal is not None
    except Exception:
        return False


def provider_checks(
    provider: str | Provider, problem: Problem | None = None, *, exempt: Collection[str] = ()
) -> list[Check]:
    """The checks of a provider, one per promise, for `pytest.mark.parametrize`.

    They run on a set of small problems (activations times criteria, class weights, frozen and missing
    parameters, a subset of layers, no chain), or on `problem` alone where one is given: it should be
    small, as its matrix is formed. Of the set a provider may refuse some, with a `ProblemError`; a given
    problem it must accept.

    The checks, by the names that `exempt` leaves out:

    - `configuration`: a frozen dataclass, equal by value, whose constructor does no work;
    - `interface`: it is written for an interface that this curvlab has;
    - `spec`: what `name[key=value]` says, if it is registered, is the provider itself;
    - `side-effects`: gradients, hooks, modes, random state and tensors are as before, also after a refusal;
    - `refusal`: the error for a problem it cannot analyse is a `ProblemError` that says why;
    - `accepts`: it analyses at least one of the problems;
    - `blocks`: a `Curvature` with one finite block per parameter, of its name, shape and dtype;
    - `linear`, `symmetric`: C(ax + by) = aCx + bCy, xᵀ(Cy) = yᵀ(Cx);
    - `dense`: `@` is what `to_dense` says, block by block and as a whole;
    - `summaries`: diagonal, trace, Frobenius norm and eigenvalues are those of the dense form;
    - `psd`: where it is claimed, no eigenvalue is negative beyond rounding;
    - `repeatable`: a second call gives the same;
    - `batches`: a stream of uneven batches gives the same as one batch, to 1e-10;
    - `precision`: float32 agrees with float64 to 1e-4;
    - `fresh`: use after a parameter has changed is told by a warning or a `StaleError`.

    >>> checks = provider_checks("pch[gamma=-0.5]", exempt=["precision"])
    >>> [str(check) for check in checks][:3]
    ['configuration', 'interface', 'spec']
    >>> checks[0]()
    """
    check_exempt(exempt, PROMISES)
    instance = providers.make(provider)
    subjects = _Subjects(instance, problem)
    bodies: dict[str, Callable[[], None]] = {
        **{name: partial(promise, instance) for name, promise in ON_THE_PROVIDER.items()},
        **{name: partial(subjects.hold, promise) for name, promise in ON_A_PROBLEM.items()},
        "accepts": subjects.accept,
        **{name: partial(subjects.hold_where_accepted, promise) for name, promise in ON_A_CURVATURE.items()},
    }
    return [Check(name, str(provider), bodies[name]) for name in PROMISES if name not in exempt]


def check_provider(
    provider: str | Provider, problem: Problem | None = None, *, exempt: Collection[str] = ()
) -> None:
    """Run all of `provider_checks`; raise one AssertionError with the sentences of those that fail.

    >>> check_provider("pch[gamma=-0.5]")
    """
    run_all(provider_checks(provider, problem, exempt=exempt))
