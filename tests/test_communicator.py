"""The communicator and what is decided from descriptions alone: which form is sent, and who solves a layer.

Here the ranks are threads of one process with a communicator of their own; `test_distributed.py` has real
process groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.curvature import LayerCurvature
from curvlab.distributed import LayerTraffic, layer_traffic
from curvlab.distributed import solve as sharing
from curvlab.distributed.communicator import LOCAL, Communicator, communicator_of
from curvlab.distributed.solve import Cost, choose_owners, layer_cost, share_out
from curvlab.distributed.statistics import PayloadEntry, _goes_by_rows, gathers_rows
from curvlab.exceptions import NoRowsError, ProblemError, RankError
from curvlab.linalg import DenseFactor, GramFactor
from curvlab.linalg.factors import InputFactors
from curvlab.linalg.steps import RowGradient
from curvlab.providers.base import Chosen, estimate_jointly

T = TypeVar("T")


@dataclass
class Meeting:
    """Where the threads put what they have, and wait for one another."""

    size: int
    held: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.held[rank] = value
        self.barrier.wait()
        values = list(self.held)
        self.barrier.wait()
        return values


@dataclass(frozen=True)
class ThreadCommunicator(Communicator):
    """A rank that is a thread."""

    meeting: Meeting
    number: int

    process_group = None

    @property
    def rank(self) -> int:
        return self.number

    @property
    def size(self) -> int:
        return self.meeting.size

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [sum(column) for column in zip(*self.gather_objects(list(tensors)), strict=True)]  # type: ignore[misc]

    def gather_rows(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        parts = self.gather_objects(tensor)
        assert [len(part) for part in parts] == list(counts)
        return torch.cat(parts)

    def gather_objects(self, value: T) -> list[T]:
        return self.meeting.exchange(self.number, value)

    def broadcast(self, tensors: Sequence[Tensor], like: Any, source: int, device: Any) -> list[Tensor]:
        return self.gather_objects(list(tensors))[source]

    def first_rank(self, function: Callable[[], T]) -> T:
        return self.gather_objects(function() if self.number == 0 else None)[0]  # type: ignore[return-value]


def on_ranks(size: int, work: Callable[[Communicator], T]) -> list[T]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        started = [pool.submit(work, ThreadCommunicator(meeting, rank)) for rank in range(size)]
        return [future.result(timeout=60) for future in started]


def model() -> nn.Module:
    """The same weights whenever it is called: threads share torch's own random state."""
    made = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return made


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return x, torch.arange(rows) % 3


def rank_problem(rows: int, cut: int, rank: int) -> curvlab.Problem:
    x, y = data(rows)
    part = slice(0, cut) if rank == 0 else slice(cut, rows)
    if len(x[part]) == 0:
        return curvlab.Problem(model(), "cross-entropy", [])
    return curvlab.Problem(model(), "cross-entropy", x[part], y[part])


@pytest.mark.parametrize("provider", ["pch-1", "fisher", "fisher[kind=mc,samples=2]", "hessian"])
@pytest.mark.parametrize("cut", [0, 3])
def test_any_communicator_gives_the_curvature_loss_and_gradient_of_all_rows(provider: str, cut: int) -> None:
    whole = curvlab.Problem(model(), "cross-entropy", *data(7))
    expected = curvlab.estimate(provider, whole)

    def work(communicator: Communicator) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        problem = rank_problem(7, cut, communicator.rank)
        chosen = Chosen.of([provider], problem)
        found = estimate_jointly(chosen, problem, communicator, gradient=True, loss=True)
        return found.joined.loss, dict(found.joined.gradient), found.curvatures[0] @ dict(whole.gradient())

    for loss, gradient, product in on_ranks(2, work):
        torch.testing.assert_close(loss, whole.loss(), rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, dict(whole.gradient()), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(product, expected @ dict(whole.gradient()), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("rows", "gathered"), [(7, True), (8, False), (9, False)])
def test_rows_are_gathered_while_they_are_fewer_than_the_inputs(rows: int, gathered: bool) -> None:
    def work(communicator: Communicator) -> object:
        problem = rank_problem(rows, 4, communicator.rank)
        return problem.join(communicator, gradient=True).gradient.factored("0.weight")

    for entry in on_ranks(2, work):
        assert isinstance(entry, RowGradient) is gathered


def test_what_was_joined_is_joined_again_once_a_rank_has_other_data() -> None:
    def work(communicator: Communicator) -> tuple[bool, bool]:
        x, y = data(6)
        mine = x[communicator.rank * 3 :][:3].clone()
        problem = curvlab.Problem(model(), "cross-entropy", mine, y[communicator.rank * 3 :][:3])
        first = problem.join(communicator, gradient=True).gradient
        again = problem.join(communicator, gradient=True).gradient
        if communicator.rank == 1:
            mine.mul_(2)
        anew = problem.join(communicator, gradient=True).gradient
        return again is first, anew is first

    assert on_ranks(2, work) == [(True, False), (True, False)]


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    def fail(communicator: Communicator) -> str:
        def function() -> int:
            if communicator.rank == 1:
                raise ProblemError("no such thing")
            return 0

        try:
            communicator.collect(function)
        except ProblemError as error:
            return str(error)
        return "nothing"

    assert on_ranks(2, fail) == ["rank 1: no such thing", "no such thing"]


def test_ranks_without_a_row_that_counts_or_with_other_models_are_refused() -> None:
    def nobody(communicator: Communicator) -> bool:
        with pytest.raises(NoRowsError, match="no rank of the process group has a row that counts"):
            curvlab.Problem(model(), "cross-entropy", []).join(communicator, loss=True)
        return True

    def apart(communicator: Communicator) -> bool:
        width = 4 + communicator.rank
        other = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3)).double()
        problem = curvlab.Problem(other, "cross-entropy", *data(3))
        with pytest.raises(RankError, match="every rank must make the same calls with the same model"):
            problem.join(communicator, gradient=True)
        return True

    assert on_ranks(2, nobody) == on_ranks(2, apart) == [True, True]


def test_a_process_alone_communicates_nothing() -> None:
    x = torch.randn(3, 2)
    cpu = torch.device("cpu")
    assert communicator_of(None) is LOCAL
    assert (LOCAL.rank, LOCAL.size, LOCAL.process_group) == (0, 1, None)
    assert LOCAL.sums([x])[0] is LOCAL.sum(x) is LOCAL.gather_rows(x, [3]) is x
    assert LOCAL.broadcast([x], [((3, 2), x.dtype)], 0, cpu)[0] is x
    assert LOCAL.collect(lambda: 5) == LOCAL.gather_objects(5) == [5]
    assert LOCAL.first_rank(lambda: 7) == 7
    assert LOCAL.any(True, cpu)
    assert not LOCAL.any(False, cpu)
    with pytest.raises(ProblemError, match=r"^as it is$"):
        LOCAL.collect(_raise)


def _raise() -> None:
    raise ProblemError("as it is")


# Which form is sent: rows are gathered while M < n, strictly.


@pytest.mark.parametrize(
    ("rows", "columns", "gathered"), [(9, 10, True), (10, 10, False), (11, 10, False), (0, 1, True)]
)
def test_rows_go_as_they_are_where_they_are_fewer_than_their_entries(
    rows: int, columns: int, gathered: bool
) -> None:
    assert gathers_rows(rows, columns) is gathered
    halves = [rows // 2, rows - rows // 2]
    entries = [PayloadEntry("inputs", 0, "inputs", (columns, columns), torch.float64, n) for n in halves]
    assert _goes_by_rows(entries) is gathered
    # A rank that holds a sum has no rows to send: then all send sums.
    summed = PayloadEntry("inputs", 0, "inputs", (columns, columns), torch.float64)
    assert not _goes_by_rows([*entries, summed])


@pytest.mark.parametrize(
    ("rows", "hidden", "bend", "expected"),
    [
        # gathered M(n + o + 2); reduced o² (+ o for σ'') + o for the bias
        (3, True, True, LayerTraffic(3 * (4 + 2 + 2), 4 + 2 + 2, 10)),
        (3, True, False, LayerTraffic(3 * (4 + 2 + 2), 4 + 2, 10)),
        (3, False, True, LayerTraffic(3 * (4 + 2 + 2), 4 + 2, 10)),
        # as many rows as inputs: n² + n + o·n are reduced as well, and nothing is gathered
        (4, True, True, LayerTraffic(0, 4 + 2 + 2 + 16 + 4 + 8, 10)),
        (5, True, True, LayerTraffic(0, 4 + 2 + 2 + 16 + 4 + 8, 10)),
    ],
)
def test_the_traffic_of_a_layer_with_four_inputs_and_two_outputs(
    rows: int, hidden: bool, bend: bool, expected: LayerTraffic
) -> None:
    assert layer_traffic(rows, 4, 2, hidden=hidden, bend=bend) == expected


def test_a_ring_brings_a_gathered_payload_once_and_a_reduced_one_twice() -> None:
    traffic = LayerTraffic(gathered=100, reduced=10, data_parallel=60)
    assert traffic.received(4) == (100 + 20) * 3 / 4
    assert traffic.received_data_parallel(4) == 120 * 3 / 4


# Who solves a layer: with λ = 2e6 operations per message and β = 100 per byte.


@pytest.mark.parametrize(
    ("flops", "sizes", "ranks", "owners"),
    [
        # The latency decides: two equal layers on two ranks save f and cost 2λ = 4e6.
        ((4.1e6, 4.1e6), (0, 0), 2, [0, 1]),
        ((4e6, 4e6), (0, 0), 2, None),
        ((3.9e6, 3.9e6), (0, 0), 2, None),
        # Every rank more starts one message more: Nλ.
        ((7.9e6, 7.9e6), (0, 0), 4, None),
        ((8.1e6, 8.1e6), (0, 0), 4, [0, 1]),
        # The bytes decide: 6e6 operations are saved after the latency, which is 6e4 bytes.
        ((1e7, 1e7), (2.9e4, 2.9e4), 2, [0, 1]),
        ((1e7, 1e7), (3.1e4, 3.1e4), 2, None),
        # The longest first, each to the rank that has least; the first of equals.
        ((1e9, 5e9, 4e9, 3e9), (0, 0, 0, 0), 3, [2, 0, 1, 2]),
        ((3e9, 3e9, 2e9, 2e9, 2e9), (0,) * 5, 2, [0, 1, 0, 1, 0]),
        # One layer that outweighs the rest is not worth a message; one rank has nobody to share with.
        ((1e9, 1e6), (0, 0), 2, None),
        ((1e9, 1e9), (0, 0), 1, None),
    ],
)
def test_layers_are_shared_out_where_that_saves_more_than_it_sends(
    flops: Sequence[float], sizes: Sequence[float], ranks: int, owners: list[int] | None
) -> None:
    costs = [Cost(*cost) for cost in zip(flops, sizes, strict=True)]
    assert choose_owners(costs, ranks) == owners


def layer(inputs: InputFactors | None, weight: str | None = "0.weight") -> LayerCurvature:
    return LayerCurvature("0", weight, "0.bias", DenseFactor(torch.eye(3, dtype=torch.float64)), inputs)


GRAM = InputFactors(GramFactor(torch.ones(4, 10, dtype=torch.float64), torch.full((4,), 0.5).double()))
DENSE = InputFactors(DenseFactor(torch.eye(10, dtype=torch.float64)), torch.ones(10, dtype=torch.float64))


@pytest.mark.parametrize(
    ("inputs", "reads", "iterations", "flops", "entries"),
    [
        # 2o³ + 2m²n + m³ + 2(om² + o²m) with o = 3, m = 4 rows, n = 10
        (GRAM, "full", 0, 54 + 320 + 64 + 2 * (48 + 36), 15),
        # 2o² an iteration, and 2(om² + o²m) an iteration
        (GRAM, "full", 5, 90 + 320 + 5 * 2 * (48 + 36), 15),
        (GRAM, "mean", 0, 54 + 320 + 24, 15),
        (GRAM, "mean", 5, 90 + 320 + 24, 15),
        # no rows: m = n, and no Gram matrix to form
        (DENSE, "full", 0, 54 + 1000 + 2 * (300 + 90), 33),
        (DENSE, "full", 5, 90 + 5 * 2 * (300 + 90), 33),
        (None, "full", 0, 54, 3),
        (None, "full", 5, 90, 3),
    ],
)
def test_the_cost_of_a_layers_solve(
    inputs: InputFactors | None, reads: Any, iterations: int, flops: float, entries: int
) -> None:
    assert layer_cost(layer(inputs), reads, iterations) == Cost(flops, 8 * entries)


def test_a_layer_without_a_trained_weight_costs_its_bias_alone() -> None:
    assert layer_cost(layer(GRAM, weight=None), "full") == Cost(54, 24)


def test_each_layer_is_solved_by_its_owner_and_known_to_all() -> None:
    layers = [layer(GRAM), layer(DENSE)]

    def work(communicator: Communicator) -> tuple[list[int], list[Any]]:
        asked: list[int] = []

        def solve(one: LayerCurvature) -> dict[str, Any]:
            asked.append(layers.index(one))
            return {"by": communicator.rank, "step": torch.full((2,), float(layers.index(one))), "of": one}

        found = share_out(solve, layers, [1, 0], lambda one: {"layer": one}, communicator)
        return asked, found

    (first, at_first), (second, at_second) = on_ranks(2, work)
    assert (first, second) == ([1], [0])
    for found in (at_first, at_second):
        assert [one["by"] for one in found] == [1, 0]
        assert [one["step"].tolist() for one in found] == [[0.0, 0.0], [1.0, 1.0]]
        # What all ranks hold is not sent: each has its own.
        assert all(one["of"] is own for one, own in zip(found, layers, strict=True))


def test_the_cost_model_is_read_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [Cost(4.1e6, 0), Cost(4.1e6, 0)]
    monkeypatch.setattr(sharing, "LATENCY", sharing.LATENCY * 2)
    assert choose_owners(costs, 2) is None
