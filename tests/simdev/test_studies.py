"""Measuring and the products on the simulated device, and devices that lack something."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab.exceptions import CurvlabError
from curvlab.linalg import execution
from curvlab.linalg.inverse import cholesky_shifted
from curvlab.measure import device as devices
from curvlab.measure.stopwatch import interleaved, timed
from curvlab.optim import SecondOrder
from curvlab.studies.compare.costs import Pair, Stopwatch, fresh, memory, usage
from curvlab.studies.setup import Setup
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.run import train
from tests.simdev.cases import problem, seeded
from tests.simdev.device import Sim

pytestmark = pytest.mark.device

SETUP = Setup(data="digits[train=120]", arch="64-12-10", batch=60)
EIGEN = ["_linalg_eigh"]


def setup_on(device: str) -> Setup:
    return Setup(**(SETUP.fields() | {"device": device}))


@pytest.mark.parametrize("pair", [("pch-1", "kfi"), ("gauss-newton", "exact")])
def test_operations_equal_the_cpu_s_and_bytes_are_the_allocator_s(sim: Sim, pair: tuple[str, str]) -> None:
    """Of solvers that do not iterate: CG goes on until the device is next asked whether it has converged."""
    made = seeded("chain")
    ours, theirs = (usage(Pair(*pair, 0.1), problem(made, device)) for device in ("sim", "cpu"))
    assert ours.flops == theirs.flops > 0
    assert ours.held_bytes == theirs.held_bytes
    assert ours.peak_bytes > theirs.peak_bytes  # blocks of 512 bytes
    assert memory(Pair(*pair, 0.1), problem(made, "sim")).peak_bytes == ours.peak_bytes


def test_without_allocator_statistics_tensor_bytes_are_counted(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, pair = seeded("chain"), Pair("fisher", "kfi", 0.1)
    expected = usage(pair, problem(made, "cpu")).peak_bytes

    def fails(device: object) -> int:
        raise RuntimeError("Allocator for sim is not a DeviceAllocator.")

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "memory_allocated", fails)
        assert not devices.has_allocator_statistics("sim")
        assert usage(pair, problem(made, "sim")).peak_bytes == pytest.approx(
            expected, rel=0.01
        )  # checks wait
    with monkeypatch.context() as patch:
        patch.delattr(torch.accelerator, "memory_allocated")  # torch before 2.9
        assert not devices.has_allocator_statistics("sim")


def test_the_stopwatch_waits_for_the_device_before_and_after(sim: Sim) -> None:
    """Without the first wait an earlier queue is counted, without the last the launches alone are."""
    sim.set_costs(launch=1.0, sync=0.0, kernel=100.0, byte=0.0, flop=0.0)
    x = torch.ones(4, device="sim")
    x * 2  # still in the queue
    seconds, _ = timed(lambda: x * 3, "sim", clock=sim.clock)
    assert seconds == pytest.approx(101.0)
    timings = interleaved(
        {"one": lambda: x * 3, "three": lambda: x * 3 * 3 * 3}, 2, "sim", clock=sim.clock, min_seconds=0.0
    )
    assert timings["one"].seconds == pytest.approx((101.0, 101.0))
    assert timings["three"].seconds == pytest.approx((303.0, 303.0), abs=3)


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopwatch_that_does_not_wait_is_found_out(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The fault that the test above is for, on purpose: one of the two waits is left out."""
    sim.set_costs(launch=1.0, sync=0.0, kernel=100.0, byte=0.0, flop=0.0)
    x, calls, wait = torch.ones(4, device="sim"), [0], devices.synchronize

    def forgetful(device: torch.device | str) -> None:
        calls[0] += 1
        if calls[0] != which + 1:
            wait(device)

    monkeypatch.setattr(devices, "synchronize", forgetful)
    x * 2
    seconds, _ = timed(lambda: x * 3, "sim", clock=sim.clock)
    assert seconds != pytest.approx(101.0)


@pytest.mark.slow
def test_the_phases_of_a_pair_are_the_device_s_time(sim: Sim) -> None:
    """Kernels so slow that the host is always ahead: a phase lasts what its launches do."""
    sim.set_costs(launch=0.0, sync=0.0, kernel=1.0, byte=0.0, flop=0.0)
    own = problem(seeded("chain"), "sim")
    phases = Stopwatch(Pair("fisher", "kfi", 0.1), own, clock=sim.clock).measure().phases
    again = fresh(own)
    with sim.counted() as counting:
        curvature, gradient = curvlab.estimate("fisher", again), again.gradient()
    assert phases.estimate == pytest.approx(counting.counts.launches)
    with sim.counted() as counting:
        curvlab.solve("kfi", curvature, gradient, alpha=0.1)
    assert 0 < phases.prepare + phases.apply <= counting.counts.launches + 0.5


@pytest.mark.slow
def test_a_comparison_on_the_device_has_the_cpu_s_numbers(sim: Sim) -> None:
    options = {"providers": ["fisher", "pch-1"], "solvers": ["kfi", "ea-cg"], "epochs": 1, "repetitions": 1}
    with sim.counted(0) as elsewhere:
        ours, theirs = (curvlab.compare(setup_on(device), **options) for device in ("sim:1", "cpu"))
    assert elsewhere.counts.allocations == 0
    assert set(ours.cells["status"]) == {"ok"}
    for column in ("iterations", "residual"):
        assert ours.cells[column].notna().all()
        assert ours.cells[column].tolist() == theirs.cells[column].tolist(), column


@pytest.mark.slow
def test_a_training_on_the_second_device_equals_the_cpu_s(sim: Sim) -> None:
    """It puts nothing on the first, and leaves the caller's generators as they were."""
    plan = TrainPlan(setup_on("sim:1"), epochs=2)
    before = [torch.sim.get_rng_state(d) for d in range(2)]
    with sim.counted(0) as elsewhere:
        ours = train(plan)
    assert elsewhere.counts.allocations == 0
    assert all(map(torch.equal, before, [torch.sim.get_rng_state(d) for d in range(2)]))
    theirs = train(TrainPlan(setup_on("cpu"), epochs=2))
    assert ours["train_loss"].tolist() == theirs["train_loss"].tolist()


def test_the_random_state_of_a_device_is_its_own(sim: Sim) -> None:
    torch.rand(1, device="sim:1")
    kept = devices.random_state("sim:1")
    assert kept is not None
    assert not torch.equal(kept, torch.sim.get_rng_state(0))
    drawn = torch.rand(3, device="sim:1").tolist()
    devices.set_random_state("sim:1", kept)
    assert torch.rand(3, device="sim:1").tolist() == drawn


@pytest.mark.slow
def test_without_float64_training_and_an_adapted_damping_run(sim: Sim) -> None:
    model, inputs, targets = seeded("chain")
    expected = train(TrainPlan(setup_on("cpu"), epochs=1))
    with sim.without_float64():
        frame = train(TrainPlan(setup_on("sim"), epochs=1))
        optimizer = SecondOrder(copy.deepcopy(model).to("sim"), "cross-entropy", alpha=0.1, adapt=True)
        for _ in range(2):
            optimizer.step(inputs.to("sim"), targets.to("sim"))
        curvlab.estimate("hessian", problem((model, inputs, targets), "sim")).blocks["0.bias"].to_dense()
    assert frame["train_loss"].tolist() == expected["train_loss"].tolist()


def test_without_float64_a_failed_factorisation_is_tried_again_on_the_host(sim: Sim) -> None:
    matrix = torch.ones(2, 2)  # in float32 the shift is lost
    expected = cholesky_shifted(matrix, 1e-9)
    with sim.without_float64():
        factor = cholesky_shifted(matrix.to("sim"), 1e-9)
    assert factor.device.type == "sim"
    assert torch.equal(factor.cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["fisher", "pch-1", "gauss-newton", "hessian"])
def test_without_an_eigendecomposition_pairs_run_and_say_so(sim: Sim, provider: str) -> None:
    made = seeded("chain")
    execution._has_eigh.cache_clear()
    try:
        with sim.without(EIGEN):
            for solver in ("exact", "cg", "kfi"):
                ours, theirs = (_direction(provider, solver, problem(made, d)) for d in ("sim", "cpu"))
                assert _equal(ours, theirs, 1e-5 if solver == "cg" else 0.0)
            notes = curvlab.estimate(provider, problem(made, "sim")).notes
    finally:
        execution._has_eigh.cache_clear()
    assert any("`sim` has no eigendecompositions" in note for note in notes)
    usual = curvlab.estimate(provider, problem(made, "sim")).notes
    assert not any("eigendecompositions" in note for note in usual)


def _direction(provider: str, solver: str, own: curvlab.Problem) -> dict[str, Tensor] | str:
    try:
        solution = curvlab.solve(solver, curvlab.estimate(provider, own), own.gradient(), alpha=0.1)
    except CurvlabError as error:
        return str(error)
    return {name: value.cpu() for name, value in solution.direction.items()}


def _equal(ours: dict[str, Tensor] | str, theirs: dict[str, Tensor] | str, tolerance: float) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return ours == theirs
    return all(
        float((ours[name] - theirs[name]).abs().max()) <= tolerance * float(theirs[name].abs().max())
        for name in theirs
    )


@pytest.mark.slow
def test_a_problem_that_does_not_fit_gives_rows_that_say_so(sim: Sim) -> None:
    with sim.limited(2048):
        compared = curvlab.compare(setup_on("sim"), providers=["fisher"], solvers=["kfi"])
    assert compared.cells["status"].tolist() == ["failed"]
    assert "out of memory" in compared.cells["message"][0]


@pytest.mark.slow
def test_a_plan_needs_no_device(sim: Sim) -> None:
    """For one that is not here it is the CPU's."""
    options = {"providers": ["fisher"], "solvers": ["kfi"], "forms": ["sample-space"]}
    frames = {d: curvlab.plan(setup_on(d), **options) for d in ("cpu", "cuda", "mps", "sim")}
    for frame in frames.values():
        assert frame["status"].tolist() == ["ok"]
        assert frame["flops"].tolist() == frames["cpu"]["flops"].tolist()


PROVIDERS = ["fisher", "pch-1", "gauss-newton", "hessian"]
KINDS = ["pch[kind=rows]", "pch[kind=exact]", "hessian[kind=rows]", "pch[kind=rows,structure=layer]"]
STRUCTURES = ["fisher[structure=full]", "fisher[structure=ekfac]", "gauss-newton[kind=rows,structure=block]"]
SOLVERS = ["kfi", "sm-kfi", "cg", "ea-cg", "exact"]
QUICK = {"solvers": SOLVERS, "epochs": 0, "repetitions": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacking", "providers"),
    [
        ("float64", PROVIDERS[:2]),
        ("float64", KINDS[:2]),
        ("eigendecompositions", PROVIDERS),
        ("eigendecompositions", KINDS),
        ("eigendecompositions", STRUCTURES),
    ],
)
def test_every_pair_of_a_comparison_gives_a_row_where_the_device_lacks(
    sim: Sim, lacking: str, providers: list[str]
) -> None:
    """A row that is measured, or refused as on the CPU; never a traceback."""
    execution._has_eigh.cache_clear()
    try:
        with sim.without(EIGEN) if lacking == "eigendecompositions" else sim.without_float64():
            ours = curvlab.compare(setup_on("sim"), providers=providers, **QUICK).cells
    finally:
        execution._has_eigh.cache_clear()
    theirs = curvlab.compare(setup_on("cpu"), providers=providers, **QUICK).cells
    assert len(ours) == len(providers) * len(SOLVERS)
    for mine, other in zip(ours.to_dict("records"), theirs.to_dict("records"), strict=True):
        assert mine["status"] == other["status"] != "failed", mine["message"]
