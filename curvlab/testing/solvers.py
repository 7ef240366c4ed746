"""`check_solver`: what every solver promises, checked on small problems."""

from __future__ import annotations

from collections.abc import Collection

from curvlab.solvers import Solver, solvers
from curvlab.testing.checking import check_exempt, run
from curvlab.testing.solver_cases import solvable_cases
from curvlab.testing.solver_checks import ON_A_CURVATURE, ON_THE_SOLVER, SolverSubject

__all__ = ["check_solver"]

PROVIDERS = ("fisher", "pch-1")


def check_solver(solver: str | Solver, *, exempt: Collection[str] = ()) -> None:
    """Raise AssertionError, with a sentence, unless the solver keeps the promises of curvlab's own.

    Runs on small problems (layers wider and narrower than the batch, missing biases, a subset of the layers,
    one example, repeated and zero inputs, rows of weight zero), with a Gram and with a dense output factor.

    The checks, by the names that `exempt` leaves out:

    - `configuration`: a frozen dataclass, equal by value, whose constructor does no work;
    - `spec`: what `name[key=value]` says, if it is registered, is the solver itself;
    - `blocks`: one finite step a parameter, of its name, shape and dtype;
    - `residual`: a step that is said to be converged solves the system the solver documents;
    - `descent`: gᵀd < 0 wherever g is not zero;
    - `zero`: no gradient, no step;
    - `homogeneous`: a gradient of another size gives a step of another size;
    - `origin`: a gradient in factors and the same as plain tensors give the same step;
    - `phases`: what `prepare` made for one gradient serves another;
    - `side-effects`: the model, the batch, the random state and the gradient are as before;
    - `repeatable`: a second call gives the same;
    - `precision`: float32 agrees with float64 to 1e-2;
    - `refusal`: an indefinite or matrix-free curvature is solved, or refused with a `PairError` in words.

    >>> check_solver("ea-cg[max_iter=30]")
    """
    check_exempt(exempt, [*ON_THE_SOLVER, *ON_A_CURVATURE])
    instance = solvers.make(solver)
    run(ON_THE_SOLVER, instance, exempt, f"`{solver}`")
    for case in solvable_cases():
        for provider in PROVIDERS:
            where = f"`{solver}` on `{provider}` with {case.label}"
            run(ON_A_CURVATURE, SolverSubject(instance, case, provider), exempt, where)
