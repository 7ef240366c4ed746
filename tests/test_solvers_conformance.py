"""check_solver accepts curvlab's own solvers, and sees each way in which one can be broken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch

import curvlab
from curvlab import specs
from curvlab.exceptions import PairError, SpecError
from curvlab.linalg.steps import as_step
from curvlab.solvers import EACG, KFI, LayerDirection, LayerGradient, Solver, solvers
from curvlab.testing import Check, check_solver, solver_checks
from curvlab.testing.solver_promises import PROMISES
from tests.solver_cases import SOLVERS, problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{solver}-{check}")
        for solver in [*SOLVERS, "kfi[formulation=explicit]", "cg[max_iter=3]"]
        for check in solver_checks(solver)
    ],
)
def test_the_solvers_of_curvlab_keep_each_promise(check: Check) -> None:
    check()


class Unfrozen(KFI):
    """A plain class: its marks are those of its base."""


@dataclass(frozen=True)
class Busy(KFI):
    def __post_init__(self) -> None:
        torch.ones(3).sum()


@dataclass(frozen=True)
class FromTheFuture(KFI):
    """Written for an interface that is not there yet."""

    interface: ClassVar[int] = Solver.interface + 1


@dataclass(frozen=True)
class Changed(KFI):
    """A KFI whose directions `change` spoils."""

    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        raise NotImplementedError

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        return self.change(super().apply(state, gradient), gradient)


def times(found: LayerDirection, factor: float) -> LayerDirection:
    weight = None if found.weight is None else as_step(found.weight).form() * factor
    return replace(found, weight=weight, bias=None if found.bias is None else found.bias * factor)


@dataclass(frozen=True)
class Misshapen(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        return replace(found, weight=None if found.weight is None else as_step(found.weight).form().T)


@dataclass(frozen=True)
class Forgetful(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        return replace(found, bias=None)


@dataclass(frozen=True)
class Wrong(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        return times(found, 1.01)


@dataclass(frozen=True)
class Ascending(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        return times(found, -1.0)


@dataclass(frozen=True)
class Restless(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        return replace(found, weight=None if found.weight is None else as_step(found.weight).form() - 1e-9)


@dataclass(frozen=True)
class Normalised(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        bias = None if found.bias is None else found.bias / found.bias.norm().clamp(min=1e-30)
        return replace(found, bias=bias)


@dataclass(frozen=True)
class Partial(Changed):
    """Takes plain tensors for another gradient."""

    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        return times(found, 1.5) if isinstance(gradient.weight, torch.Tensor) else found


@dataclass(frozen=True)
class Remembering(KFI):
    """Solves for the gradient that it was prepared with."""

    def prepare(self, layer: Any, damping: Any, gradient: LayerGradient) -> Any:
        return super().prepare(layer, damping, gradient), gradient

    def apply(self, state: Any, gradient: LayerGradient) -> LayerDirection:
        return super().apply(*state)


@dataclass(frozen=True)
class HalfRemembering(EACG):
    """The same with the weight's gradient only, to which its step, not formed, refers."""

    def prepare(self, layer: Any, damping: Any, gradient: LayerGradient) -> Any:
        return super().prepare(layer, damping, gradient), gradient

    def apply(self, state: Any, gradient: LayerGradient) -> LayerDirection:
        own, given = state
        return super().apply(own, replace(gradient, weight=given.weight))


@dataclass(frozen=True)
class Destructive(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        if gradient.bias is not None:
            gradient.bias.mul_(1.0)
            gradient.bias[0] += 1e-3
        return found


@dataclass(frozen=True)
class Drawing(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        torch.rand(1)
        return found


@dataclass(frozen=True)
class Random(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        generator = torch.Generator()
        generator.seed()
        return times(found, 1 + 1e-4 * float(torch.rand(1, generator=generator)))


@dataclass(frozen=True)
class Coarse(Changed):
    def change(self, found: LayerDirection, gradient: LayerGradient) -> LayerDirection:
        single = found.bias is not None and found.bias.dtype == torch.float32
        return times(found, 1.1) if single else found


@dataclass(frozen=True)
class Curt(KFI):
    def check(self, curvature: curvlab.Curvature, name: str) -> None:
        if curvature.matrix_free or not curvature.psd:
            raise PairError("no")


@dataclass(frozen=True)
class Reckless(KFI):
    def check(self, curvature: curvlab.Curvature, name: str) -> None:
        return


BROKEN: dict[type[Solver], tuple[str, str]] = {
    Unfrozen: ("configuration", "no frozen dataclass"),
    Busy: ("configuration", "constructor does work"),
    FromTheFuture: ("interface", "written for interface 2 of curvlab and this curvlab has interface 1"),
    Misshapen: ("blocks", "has shape"),
    Forgetful: ("blocks", "it gives steps for"),
    Wrong: ("residual", "does not solve its own system"),
    Ascending: ("descent", "does not descend"),
    Restless: ("zero", "is not zero though the gradient is"),
    Normalised: ("homogeneous", "does not scale"),
    Partial: ("origin", "as plain tensors"),
    Remembering: ("phases", "prepare reads the values"),
    HalfRemembering: ("phases", "prepare reads the values of the weight's gradient"),
    Destructive: ("side-effects", "it changes the gradient"),
    Drawing: ("side-effects", "torch's random state"),
    Random: ("repeatable", "a second call"),
    Coarse: ("precision", "float32 gives another"),
    Curt: ("refusal", "does not name the provider"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_solver_fails_the_check_that_is_for_it(broken: type[Solver]) -> None:
    check, sentence = BROKEN[broken]
    (only,) = solver_checks(broken(), exempt=set(PROMISES) - {check})
    with pytest.raises(AssertionError, match=rf"fails the check `{check}`: .*{sentence}"):
        only()


def test_check_solver_tells_every_broken_promise_at_once() -> None:
    with pytest.raises(AssertionError, match=r"check `configuration`: .*\n.*check `interface`: "):
        check_solver(Outdated(), exempt=set(PROMISES) - {"configuration", "interface", "spec"})


class Outdated(FromTheFuture):
    """Two flaws: no dataclass of its own, and an interface that is not there."""


def test_a_solver_that_refuses_nothing_is_refused_a_curvature_without_factors() -> None:
    p = problem()
    with pytest.raises(PairError, match=r"layer `0` of `hessian` has no Kronecker factors .* use `cg`"):
        curvlab.solve(Reckless(), curvlab.estimate("hessian", p), p.gradient(), alpha=0.1)


def test_every_check_but_the_text_has_a_solver_that_fails_it() -> None:
    assert {check for check, _ in BROKEN.values()} == set(PROMISES) - {"spec"}


def test_an_exemption_from_no_check_is_refused() -> None:
    with pytest.raises(SpecError, match="there is no such check"):
        check_solver("kfi", exempt=["residuals"])


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a test bring solvers as another package would."""
    monkeypatch.setattr(solvers, "_entries", dict(solvers._entries))
    monkeypatch.setattr(solvers, "_loaded", False)

    def bring(name: str, value: str) -> None:
        point = EntryPoint(name, value, "curvlab.solvers")
        monkeypatch.setattr(specs, "entry_points", lambda group: [point] if group == point.group else [])

    return bring


@dataclass(frozen=True)
class Damped(KFI):
    """KFI with twice its damping, as another package might write it."""

    def prepare(self, layer: Any, damping: Any, gradient: LayerGradient) -> Any:
        return super().prepare(layer, curvlab.Additive(2 * damping.shift), gradient)


def test_a_third_partys_solver_is_used_by_its_name(entry_point: Any) -> None:
    entry_point("damped-kfi", f"{__name__}:Damped")
    p = problem()
    solution = curvlab.solve("damped-kfi[pi=2]", curvlab.estimate("fisher", p), p.gradient(), alpha=0.1)
    expected = curvlab.solve("kfi[pi=2]", curvlab.estimate("fisher", p), p.gradient(), alpha=0.2)
    assert torch.equal(solution.direction["0.weight"], expected.direction["0.weight"])
    assert "damped-kfi" in solvers.names()
    assert set(solution.frame()["status"]) == {"converged"}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("kfi", "curvlab.solvers:CG", "has that name"),
        ("absent", "no_such_module:Solver", "does not load"),
        ("unfrozen", "curvlab.solvers:solve", "is not a frozen dataclass"),
        ("future", f"{__name__}:FromTheFuture", "written for interface 2 of curvlab"),
    ],
)
def test_a_third_partys_solver_that_does_not_load_is_left_out_with_a_warning(
    entry_point: Any, name: str, value: str, reason: str
) -> None:
    entry_point(name, value)
    with pytest.warns(RuntimeWarning, match=f"solver `{name}` of .* is left out: .*{reason}"):
        solvers.names()
    assert isinstance(solvers.make("kfi"), KFI)
