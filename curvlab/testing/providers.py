"""`check_provider`: what every provider promises, checked on small problems."""

from __future__ import annotations

from collections.abc import Collection

from curvlab.problem import Problem
from curvlab.providers import Provider
from curvlab.providers.registry import providers
from curvlab.testing.cases import Case, small_cases
from curvlab.testing.checking import check_exempt, run
from curvlab.testing.provider_checks import ON_A_CURVATURE, ON_A_PROBLEM, ON_THE_PROVIDER, Subject

__all__ = ["check_provider"]


def check_provider(
    provider: str | Provider, problem: Problem | None = None, *, exempt: Collection[str] = ()
) -> None:
    """Raise AssertionError, with a sentence, unless the provider keeps the promises of curvlab's own.

    Runs on a set of small problems (activations times criteria, class weights, frozen and missing
    parameters, a subset of layers, no chain), or on `problem` alone where one is given: it should be
    small, as its matrix is formed. Of the set a provider may refuse some, with a `ProblemError`; a given
    problem it must accept.

    The checks, by the names that `exempt` leaves out:

    - `configuration`: a frozen dataclass, equal by value, whose constructor does no work;
    - `spec`: what `name[key=value]` says, if it is registered, is the provider itself;
    - `side-effects`: gradients, hooks, modes, random state and tensors are as before, also after a refusal;
    - `refusal`: the error for a problem it cannot analyse is a `ProblemError` that says why;
    - `blocks`: a `Curvature` with one finite block a parameter, of its name, shape and dtype;
    - `linear`, `symmetric`: C(ax + by) = aCx + bCy, xᵀ(Cy) = yᵀ(Cx);
    - `dense`: `@` is what `to_dense` says, block by block and as a whole;
    - `summaries`: diagonal, trace, Frobenius norm and eigenvalues are those of the dense form;
    - `psd`: where it is claimed, no eigenvalue is negative beyond rounding;
    - `repeatable`: a second call gives the same;
    - `batches`: a stream of uneven batches gives the same as one batch, to 1e-10;
    - `precision`: float32 agrees with float64 to 1e-4;
    - `fresh`: use after a parameter has changed is told by a warning or a `StaleError`.

    >>> check_provider("pch[gamma=-0.5]")
    """
    known = [*ON_THE_PROVIDER, *ON_A_PROBLEM, *ON_A_CURVATURE]
    check_exempt(exempt, known)
    instance = providers.make(provider)
    run(ON_THE_PROVIDER, instance, exempt, f"`{provider}`")
    cases = small_cases() if problem is None else [Case.of(problem)]
    refusals = [_check_case(provider, Subject(instance, case), exempt) for case in cases]
    if all(refusals):
        raise AssertionError(
            f"`{provider}` refuses every problem it was checked on, the last because {refusals[-1]}"
        )


def _check_case(provider: str | Provider, subject: Subject, exempt: Collection[str]) -> str | None:
    """Run the checks on one case; why the provider refuses it, if it does."""
    where = f"`{provider}` on {subject.case.label}"
    run(ON_A_PROBLEM, subject, exempt, where)
    if subject.refusal is None:
        run(ON_A_CURVATURE, subject, exempt, where)
    return subject.refusal
