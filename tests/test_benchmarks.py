"""The asv suites as asv finds them, and the numbers they give."""

from __future__ import annotations

import inspect
import time
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import curvlab
from benchmarks import base, errors, launches, networks, plateau, providers, solvers, spectra, steps, workload
from curvlab.measure import device, stopwatch
from curvlab.solvers import EACG

MODULES = (errors, launches, networks, providers, solvers, spectra, steps)
SUITES = [
    suite
    for module in MODULES
    for suite in vars(module).values()
    if inspect.isclass(suite) and issubclass(suite, base.Suite)
]
PREFIXES = ("time_", "peakmem_", "track_")


def measured(suite: type[base.Suite]) -> list[str]:
    return [name for name in dir(suite) if name.startswith(PREFIXES)]


def narrow(suite: type[base.Suite]) -> tuple[object, ...]:
    """The first set of parameters on the narrow network and the CPU."""
    wanted = {"architecture": "narrow", "device": "cpu"}
    for values in product(*suite.params):
        given = dict(zip(suite.param_names, values, strict=True))
        if all(given.get(name, value) == value for name, value in wanted.items()):
            return values
    pytest.skip("not measured on the narrow network")


@pytest.fixture(autouse=True)
def own_networks():
    workload.problem_of.cache_clear()
    yield
    workload.problem_of.cache_clear()


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(device, "available", lambda: ["cpu"])


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_measures_something_and_names_its_parameters(suite):
    assert measured(suite)
    assert len(suite.param_names) == len(suite.params)
    known = {field.name for field in fields(workload.Case)} | {"provider", "solver", "optimizer"}
    assert set(suite.param_names) <= known


def test_asv_finds_each_benchmark_once_and_none_of_the_base_classes():
    discovery = pytest.importorskip("asv_runner.discovery")
    found = [b.name for b in discovery.disc_benchmarks(str(Path(base.__file__).parent))]
    modules = {suite: suite.__module__.rpartition(".")[2] for suite in SUITES}
    expected = [f"{modules[s]}.{s.__name__}.{name}" for s in SUITES for name in measured(s)]
    assert sorted(found) == sorted(expected)


def test_missing_hardware_skips_and_leaves_the_parameters_alone(no_accelerator):
    before = [list(values) for values in steps.Step.params]
    values = [*narrow(steps.Step)[:-1], "accelerator"]
    with pytest.raises(NotImplementedError, match="no accelerator"):
        steps.Step().setup(*values)
    assert steps.Step.params == before
    assert "accelerator" in steps.Step.params[steps.Step.param_names.index("device")]


@pytest.mark.parametrize("suite", [s for s in SUITES if issubclass(s, base.Cost)])
def test_costs_are_measured_on_the_narrow_network(suite):
    instance, values = suite(), narrow(suite)
    instance.setup(*values)
    instance.time_run(*values)
    instance.setup(*values)
    assert instance.track_peak_bytes(*values) > 0


@pytest.mark.parametrize("suite", [s for s in SUITES if issubclass(s, base.Ratio)])
def test_ratios_are_measured_on_the_narrow_network(suite, monkeypatch):
    monkeypatch.setattr(suite, "repetitions", 1)
    monkeypatch.setattr(suite, "min_seconds", 0.0)
    instance, values = suite(), narrow(suite)
    instance.setup(*values)
    assert instance.track_ratio(*values) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "criterion"),
    [
        ("fcnn", "cross-entropy"),
        ("cnn", "robust"),
        ("resnet8", "cross-entropy"),
        ("gpt-nano", "mse"),
        pytest.param("cnn", "cross-entropy", marks=pytest.mark.long),
        pytest.param("vit-tiny", "cross-entropy", marks=pytest.mark.long),
        pytest.param("gpt-nano", "cross-entropy", marks=pytest.mark.long),
    ],
)
def test_networks_of_every_kind_are_measured(architecture, criterion, monkeypatch):
    monkeypatch.setattr(networks, "STEPS", 2)
    where = (architecture, criterion, 4, "cpu")
    step, error, loss = networks.Step(), networks.Error(), networks.Loss()
    step.setup("fisher", "ea-cg", *where)
    assert step.track_peak_bytes() > 0
    error.setup("fisher", *where)
    assert 0 < error.track_relative_error() < float("inf")
    loss.setup("fisher", "kfi", *where)
    start = float(loss.problem.loss())
    assert loss.track_loss() not in (start, float("inf"))


def test_a_pair_that_does_not_exist_is_skipped_with_its_reason():
    with pytest.raises(NotImplementedError, match=r"hessian.*cg"):
        networks.Step().setup("hessian", "kfi", "fcnn", "cross-entropy", 4, "cpu")
    with pytest.raises(NotImplementedError, match="chain"):
        networks.Step().setup("pch[kind=recursive]", "ea-cg", "cnn", "cross-entropy", 4, "cpu")


def test_the_error_from_signs_is_that_of_the_matrices_in_the_mean(monkeypatch):
    monkeypatch.setattr(networks, "PROBES", 400)
    suite = networks.Error()
    suite.setup("fisher", "fcnn", "cross-entropy", 4, "cpu")
    wanted = ["2.bias", "4.weight", "4.bias"]
    problem = curvlab.Problem(
        suite.problem.model, "cross-entropy", *vars(next(suite.problem.batches())).values(), layers=wanted
    )
    suite.problem = problem
    ours, exact = (curvlab.estimate(name, problem).to_dense() for name in ("fisher", "hessian"))
    assert suite.track_relative_error() == pytest.approx(float((ours - exact).norm() / exact.norm()), rel=0.1)


def test_iterations_and_loss_are_numbers_and_the_loss_falls():
    iterations, values = solvers.Iterations(), narrow(solvers.Iterations)
    iterations.setup(*values)
    assert 0 < iterations.track_iterations(*values) < 500
    loss, values = steps.Loss(), narrow(steps.Loss)
    loss.setup(*values)
    start = float(loss.problem.loss())
    assert loss.track_loss(*values) < start


def test_training_starts_from_the_same_network_every_time():
    values, losses = narrow(steps.Loss), []
    for _ in range(2):
        suite = steps.Loss()
        suite.setup(*values)
        losses.append(suite.track_loss(*values))
    assert losses[0] == losses[1]


def test_errors_come_from_one_cache_for_every_set_of_parameters(monkeypatch):
    monkeypatch.setattr(errors, "CRITERIA", ("robust",))
    monkeypatch.setattr(errors, "ACTIVATIONS", ("tanh",))
    suite = errors.Error()
    totals = suite.setup_cache()
    case = workload.Case(criterion="robust", activation="tanh", batch=500, dtype="float64")
    frame = curvlab.errors(workload.problem_of(case), "pch-2")
    expected = float(frame[frame["layer"] == "Total"]["error"].iloc[0])
    assert suite.track_error(totals, "pch-2", "narrow", "robust", "tanh") == pytest.approx(expected, rel=1e-9)


def test_a_version_follows_what_a_suite_measures():
    class Other(providers.Estimate):
        def run(self) -> object:
            return None

    class Same(providers.Estimate):
        axes: ClassVar = {"provider": ("fisher",)}

    assert Other().version != providers.Estimate().version
    assert Same().version == providers.Estimate().version


def test_a_cold_system_shares_tensors_and_remembers_nothing():
    problem = workload.problem_of(workload.Case(dtype="float64"))
    curvature, gradient = curvlab.estimate("fisher", problem), problem.gradient()
    warm = curvlab.solve("kfi", curvature, gradient, alpha=0.05)
    again, given = workload.cold(curvature, gradient)
    for layer, renewed in zip(curvature.layers, again.layers, strict=True):
        assert layer.output._memo
        assert not renewed.output._memo
        assert renewed.inputs.full.rows is layer.inputs.full.rows
        assert given.factored(layer.weight_name).inputs is renewed.inputs.full
        shared = gradient.factored(layer.weight_name).gradients.shares_rows_with(layer.output)
        assert (given.factored(layer.weight_name).gradients is renewed.output) == shared
    solved = curvlab.solve("kfi", again, given, alpha=0.05)
    for name, step in warm.direction.items():
        torch.testing.assert_close(solved.direction[name], step, rtol=1e-12, atol=0)


def test_a_slowed_solver_shows_in_the_ratio(monkeypatch):
    """The clock is replaced by one that only sleeping moves, so that no machine is too busy for this."""
    now = [0.0]
    monkeypatch.setattr(steps.SGDRatio, "min_seconds", 0.0)
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: now.__setitem__(0, now[0] + 1e-3) or now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    values = (*narrow(steps.SGDRatio)[:1], "ea-cg", *narrow(steps.SGDRatio)[2:])

    def measure() -> float:
        suite = steps.SGDRatio()
        suite.setup(*values)
        return suite.track_ratio(*values)

    before, original = measure(), EACG.apply

    def slowed(self, state, gradient):
        time.sleep(0.01)
        return original(self, state, gradient)

    monkeypatch.setattr(EACG, "apply", slowed)
    assert measure() > 2 * before


def test_class_balanced_batches_have_every_class_equally_often_and_no_example_twice():
    labels = torch.arange(230) % 10  # 23 of each class
    order = plateau.balanced_order(labels, seed=0, epoch=0)
    assert labels[order].reshape(-1, 10).sort(dim=1).values.unique(dim=0).tolist() == [list(range(10))]
    assert order.sort().values.tolist() == list(range(230))
    assert not torch.equal(order, plateau.balanced_order(labels, seed=0, epoch=1))


def test_a_plateau_trial_says_after_how_many_updates_the_running_loss_fell():
    trial = plateau.Trial("second-order[lr=0.1,alpha=0.01]", 100, seed=0, limit=60, data="digits")
    found = plateau.run(trial, None)
    assert plateau.WINDOW <= found["left"] == found["updates"] < 60
    assert found["running_loss"] < plateau.LEFT
    stuck = plateau.run(plateau.Trial("sgd[lr=1e-6]", 100, seed=0, limit=21, data="digits"), None)
    assert (stuck["left"], stuck["updates"]) == (None, 21)
