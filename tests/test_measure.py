"""Measures agree with counts made by hand, and the same on fake tensors as on real ones."""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from curvlab.curvature import Curvature, LayerCurvature
from curvlab.measure import stopwatch
from curvlab.measure.environment import environment
from curvlab.measure.memory import held_bytes, peak_bytes, track
from curvlab.measure.operations import count, counting
from curvlab.measure.stopwatch import Elapsed, Timing, frame, interleaved, ratio
from curvlab.problem import Problem
from curvlab.providers import Context, Fisher
from curvlab.solvers import KFI, LayerDirection, LayerGradient
from curvlab.solvers.base import Damping
from curvlab.studies.compare import costs
from curvlab.studies.compare.costs import (
    IN_VAIN,
    Pair,
    Patience,
    Phases,
    Stopwatch,
    Usage,
    disturbance_words,
    usage,
)

linalg = torch.linalg


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def definite(n: int) -> Tensor:
    a = normal(n, n)
    return a @ a.T + n * torch.eye(n, dtype=torch.float64)


# Memory


def test_peak_and_current_are_the_bytes_counted_by_hand():
    with track() as tracker:
        a = normal(10, 10)  # 800
        b = a + 1  # 1600
        del a  # 800
        c = b.sum()  # 808
    assert (tracker.peak_bytes, tracker.current_bytes) == (1600, 808)
    del b, c
    assert tracker.current_bytes == 808, "the numbers stand still after the exit"


def test_views_and_in_place_operations_add_nothing():
    with track() as tracker:
        a = normal(10, 10)
        view = a[2:].view(-1)[3:]
        a.mul_(2).add_(1)
        del a
        assert tracker.current_bytes == 800, "the view keeps the storage alive"
        del view
        assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 800


def test_what_existed_before_counts_only_as_baseline():
    x = normal(100)
    with track() as without:
        x.mul_(2)
        x[1:]
    with track(baseline=[x, x[3:]]) as tracker:
        y = x + 1
    assert without.peak_bytes == 0
    assert (tracker.starting_bytes, tracker.peak_bytes, tracker.current_bytes) == (800, 1600, 1600)
    assert y.shape == x.shape


def test_a_baseline_that_dies_inside_is_given_back():
    x = normal(100)
    with track(baseline=[x]) as tracker:
        x = x.sum()
    assert (tracker.peak_bytes, tracker.current_bytes) == (808, 8)


def test_out_arguments_and_resizing_count_what_they_grow_by():
    before = torch.empty(10, dtype=torch.float64)
    with track() as tracker:
        torch.mul(normal(10), 2.0, out=before)
        assert tracker.peak_bytes == 80
        before.resize_(30)
        assert tracker.current_bytes == 160
        inside = torch.empty(5, dtype=torch.float64)
        inside.resize_(50)
        assert tracker.current_bytes == 160 + 400


def test_a_literal_tensor_counts():
    with track() as tracker:
        x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert tracker.current_bytes == x.nbytes == 24


def test_saved_activations_live_until_the_backward_pass():
    weight = normal(20, 20).requires_grad_()
    with track() as tracker:
        loss = torch.tanh(weight).sum()
        assert tracker.current_bytes == 3200 + 8, "tanh keeps its result for the backward pass"
        loss.backward()
        del loss
        assert tracker.current_bytes == 3200
    assert weight.grad is not None


def test_allocations_name_the_operation_and_the_shape():
    with track(record=True) as tracker:
        small, large = normal(3), normal(5, 7) @ normal(7, 6)
        del small, large
    first = tracker.largest(2)
    assert [a.shape for a in first] == [(7, 6), (5, 7)]
    assert {(a.operation, a.elements, a.bytes) for a in tracker.allocations} >= {("aten.mm.default", 30, 240)}


def test_tracking_restores_the_garbage_collector_after_an_exception():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), track():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_meta_tensors_hold_nothing():
    with track() as tracker:
        torch.empty(1000, device="meta") + 1
    assert tracker.peak_bytes == 0


def test_implicit_zeros_hold_nothing_and_may_be_scaled():
    """torch dies of `mul.Scalar` on them under a dispatch mode that does not take care."""
    scale = torch.ops.aten.mul.Scalar
    with track() as tracker:
        zeros = scale(torch._efficientzerotensor([3, 4], dtype=torch.float32), 2.0)
    assert tracker.peak_bytes == 0
    assert zeros._is_zerotensor()
    assert (zeros.shape, zeros.dtype) == ((3, 4), torch.float32)
    assert count(lambda: scale(zeros, 2)) == 0


def test_peak_of_vmap_is_that_of_the_batched_operations():
    x = normal(6, 4)
    with track() as tracker:
        y = torch.func.vmap(lambda row: torch.outer(row, row))(x)
    assert tracker.current_bytes == y.nbytes == 6 * 4 * 4 * 8


def test_peak_bytes_and_held_bytes_agree_on_the_result():
    x = normal(8, 8)
    assert peak_bytes(lambda: x @ x, device="cpu") == 512
    assert peak_bytes(lambda: x @ x, device="cpu", baseline=[x]) == 1024
    assert held_bytes({"a": x, "b": [x.T, x[0]]}) == 512


def elementwise() -> Tensor:
    a = normal(9, 4)
    return torch.where(a > 0, a.exp(), 0.0).softmax(1).clamp(min=0.1) + torch.tensor(2.0)


def products() -> Tensor:
    a, b = normal(5, 7), normal(7, 5)
    c = (a @ b).addmm_(a, b) @ normal(5)
    return c + torch.einsum("bi,bj,b->ij", normal(9, 5), normal(9, 5), normal(9)) @ c


def factorisations() -> list[Tensor]:
    a = definite(9)
    factor = linalg.cholesky_ex(a)[0]
    values, vectors = linalg.eigh(a)
    q, r = linalg.qr(normal(9, 4))
    wide, _ = linalg.qr(normal(4, 9))
    solved = torch.cholesky_solve(normal(9, 2), factor) + linalg.solve_triangular(
        factor, normal(9, 2), upper=False
    )
    return [
        vectors * values,
        q @ r,
        wide,
        solved,
        linalg.inv(a),
        linalg.solve(a, normal(9)),
        linalg.svdvals(a),
    ]


def indexing() -> list[Tensor]:
    a = normal(9, 4)
    rows = torch.tensor([1, 2])
    a.index_add_(0, rows, normal(2, 4))
    parts = torch.cat([a[rows], a.index_select(0, rows), torch.stack([a[0], a[1]])])
    return [parts, a.gather(1, torch.zeros(9, 1, dtype=torch.long)), torch.block_diag(a, a), a.T.contiguous()]


def training() -> list[Tensor | None]:
    layers = [torch.nn.Linear(7, 5, dtype=torch.float64), torch.nn.Linear(5, 3, dtype=torch.float64)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    inputs, targets = normal(11, 7), torch.zeros(11, dtype=torch.long)
    for _ in range(2):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        torch.nn.functional.mse_loss(model(inputs), torch.zeros(11, 3, dtype=torch.float64)).backward()
    return [parameter.grad for parameter in model.parameters()]


def hessian_vector() -> Tensor:
    inputs, first, second = normal(11, 7), normal(7, 5), normal(5, 3)

    def loss(weight: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(inputs @ first) @ weight).pow(2).mul(2.0).mean()

    result: Tensor = torch.func.jvp(torch.func.grad(loss), (second,), (normal(5, 3),))[1]
    return result


def jacobians() -> Tensor:
    rows = normal(6, 4)
    forward: Tensor = torch.func.vmap(torch.func.jacfwd(lambda x: torch.sigmoid(x) * x.sum()))(rows)
    backward: Tensor = torch.func.vmap(torch.func.jacrev(lambda x: torch.tanh(x) * x.sum()))(rows)
    return forward + backward


WORK = [elementwise, products, factorisations, indexing, training, hessian_vector, jacobians]


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_fake_tensors_give_exactly_the_bytes_and_operations_of_real_ones(work: Callable[[], object]):
    results = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode, track(record=True) as tracker:
            held = work()
        flops = 0
        with mode:
            flops = count(work)
        results.append((tracker.peak_bytes, tracker.current_bytes, flops, tracker.allocations))
        assert held is not None
        assert tracker.current_bytes >= held_bytes(held) > 0
    assert results[0] == results[1]


def test_the_order_of_tracker_and_fake_mode_does_not_matter():
    with FakeTensorMode(), track() as inside:
        factorisations()
    with track() as outside, FakeTensorMode():
        factorisations()
    assert inside.peak_bytes == outside.peak_bytes > 0


def test_fake_tensors_of_an_accelerator_are_counted_without_one():
    with FakeTensorMode():
        x = torch.empty(100, 100, dtype=torch.float32, device="cuda")
        assert peak_bytes(lambda: x @ x, device="cuda", baseline=[x]) == 80_000


class Onlooker:
    """Another thread that holds the frames of this one, as a profiler does while it reads source files."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.frames: list[object] = []

    def look(self) -> None:
        identifier = threading.get_ident()
        self.pool.submit(lambda: self.frames.append(sys._current_frames()[identifier])).result()

    def let_go(self) -> None:
        self.pool.submit(self.frames.clear).result()


@dataclass(frozen=True)
class Watched(Pair):
    """A pair whose first `looks` runs are looked at, until their end or, if `briefly`, for a part of it."""

    onlooker: Onlooker
    looks: int
    briefly: bool
    runs: list[None]

    def run(self, problem: Problem):
        self.onlooker.let_go()
        self.runs.append(None)
        self.scratch()
        beside = normal(500)
        if self.briefly:
            self.onlooker.let_go()
        result = super().run(problem)
        del beside
        return result

    def scratch(self) -> None:
        _ = normal(1000)  # dies with this frame, unless the frame is held
        if len(self.runs) <= self.looks:
            self.onlooker.look()


@pytest.fixture
def onlooker():
    made = Onlooker()
    yield made
    made.let_go()
    made.pool.shutdown()


def used_by(onlooker: Onlooker, looks: int, briefly: bool = False) -> tuple[Usage, int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2)).double()
    problem = Problem(model, "cross-entropy", normal(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    pair = Watched("fisher", "ea-cg", 0.05, onlooker, looks, briefly, [])
    return usage(pair, problem), len(pair.runs)


@pytest.mark.parametrize("briefly", [False, True], ids=["until the end", "briefly"])
def test_bytes_do_not_depend_on_a_thread_that_looks_at_the_stack(onlooker: Onlooker, briefly: bool):
    expected, once = used_by(onlooker, looks=0)
    assert once == 1
    found, runs = used_by(onlooker, looks=2, briefly=briefly)
    assert (found, runs) == (expected, 3)


def test_a_run_that_is_always_disturbed_is_not_repeated_for_ever(onlooker: Onlooker):
    found, runs = used_by(onlooker, looks=99)
    assert runs == costs.ATTEMPTS
    assert found.held_bytes == used_by(onlooker, looks=0)[0].held_bytes + 8000


def test_a_tracker_tells_that_another_thread_let_go_of_a_tensor():
    with track() as alone:
        x = normal(10)
        del x
    with track() as disturbed, ThreadPoolExecutor(1) as pool:
        held = [normal(10)]
        pool.submit(held.clear).result()
    assert (alone.disturbed, disturbed.disturbed) == (False, True)


# Floating-point operations

M, N, K = 12, 9, 4
FLOPS = {
    "mm": (lambda: normal(M, N) @ normal(N, K), 2 * M * N * K),
    "mv": (lambda: normal(M, N) @ normal(N), 2 * M * N),
    "addmv": (lambda: torch.addmv(normal(M), normal(M, N), normal(N)), 2 * M * N),
    "dot": (lambda: normal(N) @ normal(N), 2 * N),
    "addr": (lambda: torch.addr(normal(M, N), normal(M), normal(N)), 2 * M * N),
    "addmm_": (lambda: normal(M, K).addmm_(normal(M, N), normal(N, K)), 2 * M * N * K),
    "baddbmm_": (lambda: normal(2, M, K).baddbmm_(normal(2, M, N), normal(2, N, K)), 4 * M * N * K),
    "cholesky": (lambda: linalg.cholesky(torch.eye(N)), N**3 // 3),
    "cholesky batch": (lambda: linalg.cholesky(torch.eye(N).expand(2, N, N)), 2 * N**3 // 3),
    "cholesky_solve": (lambda: torch.cholesky_solve(torch.ones(N, K), torch.eye(N)), 2 * N**2 * K),
    "cholesky_solve broadcast": (
        lambda: torch.cholesky_solve(torch.ones(N, K), torch.eye(N).expand(5, N, N)),
        5 * 2 * N**2 * K,
    ),
    "cholesky_inverse": (lambda: torch.cholesky_inverse(torch.eye(N)), 2 * N**3 // 3),
    "solve_triangular": (
        lambda: linalg.solve_triangular(torch.eye(N), torch.ones(N, K), upper=False),
        N**2 * K,
    ),
    "solve_triangular right": (
        lambda: linalg.solve_triangular(torch.eye(N), torch.ones(K, N), upper=False, left=False),
        N**2 * K,
    ),
    "lu_factor": (lambda: linalg.lu_factor(torch.eye(N)), 2 * N**3 // 3),
    "solve": (lambda: linalg.solve(torch.eye(N), torch.ones(N, K)), 2 * N**3 // 3 + 2 * N**2 * K),
    "solve vector": (lambda: linalg.solve(torch.eye(N), torch.ones(N)), 2 * N**3 // 3 + 2 * N**2),
    "inv": (lambda: linalg.inv(torch.eye(N)), 2 * N**3),
    "qr": (lambda: linalg.qr(normal(M, N)), 2 * (2 * M * N**2 - 2 * N**3 // 3)),
    "qr r": (lambda: linalg.qr(normal(M, N), mode="r"), 2 * M * N**2 - 2 * N**3 // 3),
    "eigh": (lambda: linalg.eigh(torch.eye(N)), 9 * N**3),
    "eigenvalues alone": (lambda: torch.ops.aten._linalg_eigh(torch.eye(N), "L", False), 4 * N**3 // 3),
    "svd": (lambda: linalg.svd(normal(M, N), full_matrices=False), 6 * M * N**2 + 20 * N**3),
    "elementwise": (lambda: normal(M, N).exp().sum(), 0),
}


@pytest.mark.parametrize("name", FLOPS)
def test_operations_follow_the_stated_formula_on_real_and_fake_tensors(name):
    function, expected = FLOPS[name]
    assert count(function) == expected
    with FakeTensorMode():
        assert count(function) == expected


def test_counting_names_the_operations_and_leaves_torchs_own_formulas_alone():
    from torch.utils.flop_counter import flop_registry

    with counting() as flops:
        linalg.cholesky(torch.eye(6) @ torch.eye(6))
    assert flops.by_operation == {"aten.mm": 432, "aten.linalg_cholesky_ex": 72}
    assert flops.total == 504
    assert torch.ops.aten.mv not in flop_registry


def test_operations_under_vmap_count_the_whole_batch():
    matrices, vectors = normal(5, 3, 4), normal(5, 4)
    assert count(lambda: torch.func.vmap(torch.mv)(matrices, vectors)) == 5 * 2 * 3 * 4


# Time


def test_rounds_are_interleaved_and_rotated():
    order: list[str] = []
    functions = {name: (lambda name=name: (order.append(name), sleep(0.003))) for name in "abc"}
    timings = interleaved(functions, repetitions=3, warmup=2)
    # Two warm-up calls and one to find the number of calls, for each; then the rounds.
    assert "".join(order) == "aaabbbccc" + "abc" + "bca" + "cab"
    assert all(len(t.seconds) == 3 and t.calls == 1 and t.median >= 0.003 for t in timings.values())


def test_quick_functions_are_called_often_enough_to_be_measured():
    timing = interleaved({"quick": lambda: None}, repetitions=2, min_seconds=0.002)["quick"]
    assert timing.calls > 100


TICK = 2.0**-14  # seconds; a power of two, so that sums and means of ticks are exact


class FakeClock:
    """Time that passes only where the work says that it takes some; reading the clock takes none."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_ticks(self, ticks: int) -> None:
        self.now += ticks * TICK


@pytest.mark.parametrize(("ticks", "calls"), [(1, 64), (32, 2), (33, 1), (1000, 1)])
def test_seconds_are_those_of_one_call_however_many_are_averaged(ticks: int, calls: int):
    clock = FakeClock()
    functions = {"work": lambda: clock.pass_ticks(ticks), "twice": lambda: clock.pass_ticks(2 * ticks)}
    timings = interleaved(functions, repetitions=3, min_seconds=33 * TICK, clock=clock)
    assert timings["work"].calls == calls
    assert timings["work"].seconds == (ticks * TICK,) * 3
    assert timings["twice"].seconds == (2 * ticks * TICK,) * 3


CLOCK = FakeClock()


@dataclass(frozen=True)
class SlowFisher(Fisher):
    """Takes `ticks` to make the curvature."""

    ticks: int = 0

    def curvature(self, context: Context, name: str) -> Curvature:
        CLOCK.pass_ticks(self.ticks)
        return super().curvature(context, name)


@dataclass(frozen=True)
class SlowKFI(KFI):
    """Takes ticks to prepare and to apply each layer."""

    preparing: int = 0
    applying: int = 0

    def prepare(self, layer: LayerCurvature, damping: Damping, gradient: LayerGradient) -> object:
        CLOCK.pass_ticks(self.preparing)
        return super().prepare(layer, damping, gradient)

    def apply(self, state: object, gradient: LayerGradient) -> LayerDirection:
        CLOCK.pass_ticks(self.applying)
        return super().apply(state, gradient)


@pytest.mark.parametrize("faster", [1, 10, 100])
def test_a_comparison_s_seconds_are_those_of_one_estimate_and_one_solve(faster: int):
    """Calls too short to be timed alone are averaged: their sum would be up to hundreds of times too long."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2)).double()
    problem = Problem(model, "cross-entropy", normal(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    a, b, c = 500 // faster, 300 // faster, 200 // faster
    watch = Stopwatch(Pair(SlowFisher(ticks=a), SlowKFI(preparing=b, applying=c), 0.05), problem, CLOCK)
    for _ in range(2):
        # Two layers are prepared and applied.
        assert watch.measure().phases == Phases(a * TICK, 2 * b * TICK, 2 * c * TICK)


def tiny_problem() -> Problem:
    model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid(), nn.Linear(2, 2)).double()
    return Problem(model, "cross-entropy", normal(4, 3), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("waits", "attempts", "share"),
    [((0.0,), 1, 0.0), ((0.5, 0.02), 2, 0.02), ((0.5, 0.3, 0.4), 3, 0.3)],
    ids=["quiet", "disturbed once", "disturbed always"],
)
def test_a_disturbed_measurement_is_made_again_and_the_least_disturbed_counts(
    monkeypatch: pytest.MonkeyPatch, waits: tuple[float, ...], attempts: int, share: float
):
    watch = Stopwatch(Pair("fisher", "kfi", 0.05), tiny_problem())
    seen = iter(waits)

    def total(calls: int) -> tuple[Phases, Elapsed]:
        waited = next(seen)
        return Phases(estimate=1 - waited), Elapsed(wall=1.0, processor=0.9, waited=waited)

    watch.measure()
    monkeypatch.setattr(watch, "_total", total)
    found = watch.measure()
    assert (found.attempts, found.waited) == (attempts, share)
    assert found.row()["wall_seconds"] == 1.0 / found.calls, "of one call, with what was waited"
    assert found.phases.estimate == (1 - share) / found.calls, "without"


def test_where_the_machine_stays_busy_nothing_is_made_again_until_a_measurement_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
):
    watch = Stopwatch(Pair("fisher", "kfi", 0.05), tiny_problem())
    watch.measure()
    waits = [0.5] * (3 * IN_VAIN + 1) + [0.0, 0.5, 0.5, 0.5]
    seen = iter(waits)
    monkeypatch.setattr(watch, "_patience", Patience())
    monkeypatch.setattr(
        watch, "_total", lambda calls: (Phases(), Elapsed(wall=1.0, processor=0.5, waited=next(seen)))
    )
    attempts = [watch.measure().attempts for _ in range(IN_VAIN + 3)]
    assert attempts == [3] * IN_VAIN + [1, 1, 3]
    assert next(seen, None) is None


def test_what_is_waited_for_a_processor_is_told_apart_from_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(stopwatch, "THREAD", tmp_path / "schedstat")
    monkeypatch.setattr(stopwatch, "MACHINE", tmp_path / "stat")
    assert stopwatch.waited_seconds() == 0, "nothing tells"
    assert math.isnan(stopwatch.busy_seconds())
    (tmp_path / "schedstat").write_text("100 2000000000 3\n")
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 9 10\ncpu0 …\n")
    assert stopwatch.busy_seconds() * os.sysconf("SC_CLK_TCK") == 100 + 20 + 30 + 6 + 7 + 8

    def work() -> None:
        sleep(0.002)
        (tmp_path / "schedstat").write_text("100 2001000000 4\n")

    took, _ = stopwatch.elapsed(work)
    assert took.waited == pytest.approx(0.001, rel=1e-6)
    assert took.own == pytest.approx(took.wall - 0.001, rel=1e-6)


def test_times_are_not_trusted_where_more_than_a_fifth_of_the_rows_is_disturbed():
    rows = pd.DataFrame({"waited": [0.2, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "load": math.nan})
    assert disturbance_words(rows) == ""
    rows.loc[2, "waited"] = 0.11
    assert disturbance_words(rows).startswith("The times are not trusted: other programs disturbed 3 of 10")
    assert disturbance_words(pd.DataFrame({"estimate_seconds": [1.0]})) == "", "a folder of an older curvlab"


def test_median_range_and_ratio_are_those_of_paired_rounds():
    a = Timing("a", (1.0, 2.0, 3.0, 4.0, 50.0), 1)
    b = Timing("b", (1.0, 1.0, 1.0, 1.0, 10.0), 1)
    assert (a.median, a.iqr) == (3.0, 2.0)
    paired = ratio(a, b)
    assert (paired.lower, paired.median, paired.upper, paired.iqr) == (2.0, 3.0, 4.0, 2.0)
    with pytest.raises(ValueError, match="rounds"):
        ratio(a, Timing("c", (1.0,), 1))
    assert frame({"a": a})["median"].tolist() == [3.0]


def test_no_repetition_is_refused():
    with pytest.raises(ValueError, match="repetitions"):
        interleaved({"a": lambda: None}, repetitions=0)


# Environment


def test_environment_is_json_and_names_neither_host_nor_path():
    text = json.dumps(environment())
    facts = json.loads(text)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text
    assert socket.gethostname() not in text
