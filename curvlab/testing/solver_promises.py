"""What every solver promises, checked on small problems: one check per promise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import PairError
from curvlab.linalg.steps import Gradient, as_step
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.solvers import LayerGradient, Mixed, Solution, Solver, Status, solve, solvers
from curvlab.specs import check_interface
from curvlab.testing.cases import Case, solver_cases
from curvlab.testing.checking import (
    Check,
    check_exempt,
    check_frozen,
    check_text,
    hold_all,
    require,
    run_all,
)
from curvlab.testing.traces import differences, state_of

__all__ = ["PROMISES", "check_solver", "solver_checks"]

PROVIDERS = ("fisher", "pch-1")
ALPHA = 0.1
SAME = 1e-8
SINGLE = 1e-2
FACTOR = 1024.0


@dataclass(frozen=True, eq=False)
class SolverSubject:
    """A solver on the curvature of a case; what it makes of it is computed once."""

    solver: Solver
    case: Case
    provider: str

    @cached_property
    def problem(self) -> Problem:
        """The case in float64."""
        return self.case.problem()

    @cached_property
    def curvature(self) -> Curvature:
        """The provider's curvature of `problem`."""
        return estimate(self.provider, self.problem)

    @cached_property
    def gradient(self) -> Gradient:
        """The gradient of `problem`, in factors."""
        return self.problem.gradient()

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        """The same gradient as plain tensors, which could come from anywhere."""
        return dict(self.gradient)

    @cached_property
    def solution(self) -> Solution:
        """What the solver makes of the curvature and its own gradient."""
        return self.solve(self.gradient)

    def solve(self, gradient: Mapping[str, Tensor], curvature: Curvature | None = None) -> Solution:
        """Solve with this gradient."""
        return solve(self.solver, self.curvature if curvature is None else curvature, gradient, alpha=ALPHA)


def check_configuration(solver: Solver) -> None:
    """A frozen dataclass, equal by value, whose constructor does no work."""
    require(isinstance(solver, Solver), "it does not derive from curvlab.solvers.Solver")
    check_frozen(solver)


def check_version(solver: Solver) -> None:
    """The interface it was written for is one that this curvlab has."""
    check_interface(type(solver))


def check_spec(solver: Solver) -> None:
    """A registered solver is what its own text says."""
    check_text(solvers, solver)


def check_blocks(subject: SolverSubject) -> None:
    """One finite step per parameter, of its name, shape and dtype."""
    direction, blocks = subject.solution.direction, subject.curvature.blocks
    require(list(direction) == list(blocks), f"it gives steps for {list(direction)}; expected {list(blocks)}")
    for name, step in direction.items():
        expected = subject.plain[name]
        require(step.shape == expected.shape, f"the step of `{name}` has shape {tuple(step.shape)}")
        require(step.dtype == expected.dtype, f"the step of `{name}` is {step.dtype}, not {expected.dtype}")
        require(bool(torch.isfinite(step).all()), f"the step of `{name}` is not finite")


def check_residual(subject: SolverSubject) -> None:
    """A step that is reported as converged solves the system that the solver documents."""
    for name, block in subject.solution.blocks.items():
        claimed = block.outcome is None or block.status is not Status.ITERATION_LIMIT
        solved = block.residual <= max(block.tolerance, SAME)
        sentence = f"the step of `{name}` does not solve its own system (residual {block.residual:.3g})"
        require(not claimed or solved, sentence)


def check_descent(subject: SolverSubject) -> None:
    """gᵀd < 0 wherever g is not zero, for a curvature that is positive semi-definite."""
    for name, block in subject.solution.blocks.items():
        size = float(subject.plain[name].norm() * subject.solution.direction[name].norm())
        descends = block.slope < 0 if size > 0 else block.slope == 0
        require(descends, f"the step of `{name}` does not descend (gᵀd = {block.slope:.3g})")


def check_zero(subject: SolverSubject) -> None:
    """No gradient, no step."""
    solution = subject.solve({name: torch.zeros_like(value) for name, value in subject.plain.items()})
    for name, step in solution.direction.items():
        require(not bool(step.any()), f"the step of `{name}` is not zero though the gradient is")


def check_homogeneous(subject: SolverSubject) -> None:
    """A gradient of another size gives a step of another size."""
    scaled = subject.solve({name: FACTOR * value for name, value in subject.plain.items()})
    once = subject.solve(subject.plain)
    for name, step in once.direction.items():
        _close(scaled.direction[name], FACTOR * step, SAME, f"the step of `{name}` does not scale with g")


def check_origin(subject: SolverSubject) -> None:
    """A gradient in factors and the same as plain tensors give the same step."""
    plain = subject.solve(subject.plain)
    for name, step in subject.solution.direction.items():
        sentence = f"the step of `{name}` is another for the same gradient as plain tensors"
        _close(plain.direction[name], step, SAME, sentence)


def check_phases(subject: SolverSubject) -> None:
    """`prepare` reads the gradient's form only: its state serves another gradient."""
    for layer in subject.curvature.layers:
        names = (layer.weight_name, layer.bias_name)
        given = LayerGradient(*(None if name is None else subject.plain[name] for name in names))
        other = LayerGradient(*(None if name is None else subject.plain[name].cos() for name in names))
        damping = Mixed(ALPHA)
        reused = subject.solver.apply(subject.solver.prepare(layer, damping, given), other)
        fresh = subject.solver.apply(subject.solver.prepare(layer, damping, other), other)
        for what in ("weight", "bias"):
            value, expected = getattr(reused, what), getattr(fresh, what)
            if value is not None:
                found, wanted = as_step(value).form(), as_step(expected).form()
                _close(found, wanted, SAME, f"prepare reads the values of the {what}'s gradient")


def check_side_effects(subject: SolverSubject) -> None:
    """The model, the batch, the random state and the gradient are as before."""
    before = state_of(subject.problem) | {
        f"the gradient of `{n}`": g.clone() for n, g in subject.plain.items()
    }
    subject.solve(subject.plain)
    subject.solve(subject.gradient)
    after = state_of(subject.problem) | {f"the gradient of `{n}`": g for n, g in subject.plain.items()}
    changed = differences(before, after)
    require(not changed, f"it changes {', '.join(changed[:3])}")


def check_repeatable(subject: SolverSubject) -> None:
    """A second call gives the same."""
    again = subject.solve(subject.gradient)
    for name, step in subject.solution.direction.items():
        _close(again.direction[name], step, SAME, f"a second call gives another step of `{name}`")


def check_precision(subject: SolverSubject) -> None:
    """float32 agrees with float64."""
    problem = subject.case.problem(torch.float32)
    single = subject.solve(problem.gradient(), estimate(subject.provider, problem))
    for name, step in subject.solution.direction.items():
        size = float(subject.plain[name].norm())
        if size > SINGLE * SINGLE:
            value = single.direction[name].to(step.dtype)
            _close(value, step, SINGLE, f"float32 gives another step of `{name}`")


def check_refusal(subject: SolverSubject) -> None:
    """An indefinite or matrix-free curvature is solved, or refused with a PairError that says why."""
    indefinite = replace(subject.curvature, definiteness=Definiteness(False, "said so for this check"))
    for curvature in (indefinite, estimate("hessian", subject.problem)):
        try:
            solution = subject.solve(subject.gradient, curvature)
        except PairError as error:
            require(curvature.provider in str(error), "its PairError does not name the provider")
            continue
        for name, step in solution.direction.items():
            require(bool(torch.isfinite(step).all()), f"the step of `{name}` is not finite")


def _close(value: Tensor, expected: Tensor, tolerance: float, sentence: str) -> None:
    size, error = float(expected.norm()), float((value - expected).norm())
    # A difference that is NaN is not close.
    require(error <= tolerance * size, f"{sentence} (they differ by {error:.3g}, the size is {size:.3g})")


ON_THE_SOLVER: dict[str, Callable[[Solver], None]] = {
    "configuration": check_configuration,
    "interface": check_version,
    "spec": check_spec,
}
ON_A_CURVATURE: dict[str, Callable[[SolverSubject], None]] = {
    "blocks": check_blocks,
    "residual": check_residual,
    "descent": check_descent,
    "zero": check_zero,
    "homogeneous": check_homogeneous,
    "origin": check_origin,
    "phases": check_phases,
    "side-effects": check_side_effects,
    "repeatable": check_repeatable,
    "precision": check_precision,
    "refusal": check_refusal,
}
PROMISES = (*ON_THE_SOLVER, *ON_A_CURVATURE)
"""The names of the checks, in the order in which they run."""


class _Subjects:
    """A solver on all its cases, which are made when the first check needs them."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver

    @cached_property
    def by_label(self) -> dict[str, SolverSubject]:
        return {
            f"`{provider}` with {case.label}": SolverSubject(self.solver, case, provider)
            for case in solver_cases()
            for provider in PROVIDERS
        }

    def hold(self, promise: Callable[[SolverSubject], None]) -> None:
        """Hold the solver to a promise on every problem."""
        hold_all(promise, self.by_label)


def solver_checks(solver: str | Solver, *, exempt: Collection[str] = ()) -> list[Check]:
    """The checks of a solver, one per promise, for `pytest.mark.parametrize`.

    They run on small problems (layers wider and narrower than the batch, missing biases, a subset of the
    layers, one example, repeated and zero inputs, rows of weight zero), with a Gram and with a dense output
    factor.

    The checks, by the names that `exempt` leaves out:

    - `configuration`: a frozen dataclass, equal by value, whose constructor does no work;
    - `interface`: it is written for an interface that this curvlab has;
    - `spec`: what `name[key=value]` says, if it is registered, is the solver itself;
    - `blocks`: one finite step per parameter, of its name, shape and dtype;
    - `residual`: a step that is reported as converged solves the system the solver documents;
    - `descent`: gᵀd < 0 wherever g is not zero;
    - `zero`: no gradient, no step;
    - `homogeneous`: a gradient of another size gives a step of another size;
    - `origin`: a gradient in factors and the same as plain tensors give the same step;
    - `phases`: what `prepare` made for one gradient serves another;
    - `side-effects`: the model, the batch, the random state and the gradient are as before;
    - `repeatable`: a second call gives the same;
    - `precision`: float32 agrees with float64 to 1e-2;
    - `refusal`: an indefinite or matrix-free curvature is solved, or refused with a `PairError` in words.

    >>> [str(check) for check in solver_checks("ea-cg")][-2:]
    ['precision', 'refusal']
    """
    check_exempt(exempt, PROMISES)
    instance = solvers.make(solver)
    subjects = _Subjects(instance)
    bodies: dict[str, Callable[[], None]] = {
        **{name: partial(promise, instance) for name, promise in ON_THE_SOLVER.items()},
        **{name: partial(subjects.hold, promise) for name, promise in ON_A_CURVATURE.items()},
    }
    return [Check(name, str(solver), bodies[name]) for name in PROMISES if name not in exempt]


def check_solver(solver: str | Solver, *, exempt: Collection[str] = ()) -> None:
    """Run all of `solver_checks`; raise one AssertionError with the sentences of those that fail.

    >>> check_solver("ea-cg[max_iter=30]")
    """
    run_all(solver_checks(solver, exempt=exempt))
