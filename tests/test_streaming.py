"""A stream of batches gives what one batch gives, in memory that does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlab
from curvlab.exceptions import ProblemError, StaleError
from curvlab.linalg import DenseFactor, GramFactor
from curvlab.measure.memory import track
from curvlab.providers import statistics
from tests.cases import LOSSES, Case

PROVIDERS = [
    "fisher",
    "fisher[kind=mc,samples=2]",
    "fisher[kind=exact]",
    "gauss-newton",
    "pch-1",
    "pch-2",
    "hessian",
    "gauss-newton[kind=exact]",
]


def tensors(problem: curvlab.Problem) -> tuple[Tensor, Tensor]:
    (batch,) = problem.batches()
    return batch.inputs, batch.targets


def split(problem: curvlab.Problem, sizes: list[int]) -> curvlab.Problem:
    inputs, targets = tensors(problem)
    return problem.with_data(list(zip(inputs.split(sizes), targets.split(sizes), strict=True)))


def assert_same(one: curvlab.Curvature, other: curvlab.Curvature, tolerance: float = 1e-12) -> None:
    assert list(one.blocks) == list(other.blocks)
    assert str(one.definiteness)[:12] == str(other.definiteness)[:12]
    for name, block in one.blocks.items():
        expected, found = block.to_dense(), other.blocks[name].to_dense()
        assert (found - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["weighted", "ignored", "robust", "convex function"])
@pytest.mark.parametrize("sizes", [[1, 5, 2], pytest.param([3, 1, 1, 1, 2], marks=pytest.mark.long)])
def test_uneven_batches_give_the_curvature_of_one_batch(loss: str, sizes: list[int]) -> None:
    labelled = loss != "convex function"
    names = (
        PROVIDERS if labelled else [p for p in PROVIDERS if "mc" not in p and "fisher[kind=exact]" not in p]
    )
    problem, _ = Case(loss=loss, examples=8).build()
    whole = curvlab.estimate(names, problem)
    for one, other in zip(whole, curvlab.estimate(names, split(problem, sizes)), strict=True):
        assert_same(one, other)


@given(
    st.sampled_from(sorted(LOSSES)), st.lists(st.integers(2, 4), min_size=1, max_size=5), st.integers(0, 999)
)
@settings(max_examples=15)
def test_uneven_batches_give_the_gradient_and_loss_of_one_batch(
    loss: str, sizes: list[int], seed: int
) -> None:
    problem, _ = Case(loss=loss, examples=sum(sizes), seed=seed).build()
    stream = split(problem, sizes)
    gradient = problem.gradient()
    for name, value in stream.gradient().items():
        assert (value - gradient[name]).norm() <= 1e-12 * gradient[name].norm() + 1e-16
    torch.testing.assert_close(stream.loss(), problem.loss(), rtol=1e-12, atol=0)


@pytest.mark.slow
def test_summaries_of_streamed_operators_are_those_of_one_batch() -> None:
    problem, _ = Case(loss="weighted", examples=7).build()
    stream = split(problem, [2, 4, 1])
    for name in ("hessian", "gauss-newton[kind=exact]", "hessian[full=true]"):
        one, other = curvlab.estimate(name, problem), curvlab.estimate(name, stream)
        for block, streamed in zip(one.blocks.values(), other.blocks.values(), strict=True):
            torch.testing.assert_close(streamed.trace(), block.trace(), rtol=1e-11, atol=1e-14)
            torch.testing.assert_close(streamed.diagonal(), block.diagonal(), rtol=1e-11, atol=1e-14)
            torch.testing.assert_close(streamed.frobenius_norm(), block.frobenius_norm(), rtol=1e-11, atol=0)
        torch.testing.assert_close(other.to_dense(), one.to_dense(), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("width", "factor"), [(20, GramFactor), (4, DenseFactor)])
def test_the_input_factor_keeps_rows_until_the_dense_form_is_smaller(width: int, factor: type) -> None:
    problem, _ = Case(widths=(width, 3, 2), loss="weighted", examples=10).build()
    stream = split(problem, [3, 3, 4])
    one, other = curvlab.estimate("pch-1", problem), curvlab.estimate("pch-1", stream)
    layer = other.layers[0]
    assert layer.inputs is not None
    assert isinstance(layer.inputs.full, factor)
    assert_same(one, other)
    expected = one.layers[0].inputs
    assert expected is not None
    torch.testing.assert_close(layer.inputs.mean, expected.mean, rtol=1e-12, atol=1e-15)


def test_rows_of_a_wide_layer_are_refused_beyond_the_byte_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = Case(widths=(50, 3, 2), examples=9).build()
    monkeypatch.setattr(statistics, "ROW_BYTES", 6 * 50 * 8)
    curvlab.estimate(
        "pch-1",
        split(problem, [3, 3, 3]).with_data(
            list(zip(*(t.split(3) for t in _first(problem, 6)), strict=True))
        ),
    )
    with pytest.raises(ProblemError, match=r"50 inputs has seen 9 rows.*leave the layer out"):
        curvlab.estimate("pch-1", split(problem, [3, 3, 3]))


def _first(problem: curvlab.Problem, n: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tensors(problem)
    return inputs[:n], targets[:n]


class Random:
    """A re-iterable that makes its batches anew, so that only curvlab can hold on to them."""

    def __init__(self, batches: int, width: int) -> None:
        self.batches, self.width = batches, width

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for seed in range(self.batches):
            generator = torch.Generator().manual_seed(seed)
            inputs = torch.randn(16, self.width, generator=generator, dtype=torch.float64)
            yield inputs, torch.randint(0, 3, (16,), generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_memory_does_not_grow_with_the_number_of_batches(provider: str) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Sigmoid(), nn.Linear(8, 3)).double()
    peaks = []
    for batches in (4, 16):
        problem = curvlab.Problem(model, "cross-entropy", Random(batches, 12))
        with track() as tracker:
            curvature = curvlab.estimate(provider, problem)
            curvature @ problem.gradient()
        peaks.append(tracker.peak_bytes)
    assert peaks[1] <= peaks[0]


class Counting:
    """A list of batches that counts the passes over it."""

    def __init__(self, batches: list[Any]) -> None:
        self.items, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.items)


def test_one_pass_serves_a_list_of_providers() -> None:
    problem, _ = Case().build()
    inputs, targets = tensors(problem)
    data = Counting(list(zip(inputs.split(2), targets.split(2), strict=True)))
    stream = problem.with_data(data)
    assert data.passes == 0
    curvlab.estimate(PROVIDERS, stream)
    assert data.passes == 1


def test_a_one_shot_generator_is_refused() -> None:
    problem, _ = Case().build()
    with pytest.raises(ProblemError, match=r"one-shot generator.*several passes.*DataLoader"):
        problem.with_data(pair for pair in [tensors(problem)])


def test_an_iterable_over_one_generator_is_noticed_in_its_second_pass() -> None:
    problem, _ = Case().build()
    generator = iter([tensors(problem)])

    class Once:
        def __iter__(self) -> Iterator[Any]:
            return generator

    stream = problem.with_data(Once())
    stream.gradient()
    with pytest.raises(ProblemError, match="no batch"):
        stream.gradient()


def test_a_shuffled_loader_of_the_same_examples_is_accepted() -> None:
    problem, _ = Case(examples=9).build()
    data = TensorDataset(*tensors(problem))
    stream = problem.with_data(DataLoader(data, batch_size=4, shuffle=True))
    hessian = curvlab.estimate("hessian", stream)
    expected = curvlab.estimate("hessian", problem)
    assert_same(expected, hessian, 1e-11)
    norms = [curvature.blocks["0.weight"].frobenius_norm() for curvature in (expected, hessian)]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-11, atol=0)


def _changed(kind: str, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "one entry":
        inputs = inputs.clone()
        inputs[2, 1] += 1e-9
    if kind == "flipped":
        inputs = inputs.flip(1)
    if kind == "other labels":
        targets = targets.roll(1)
    if kind == "an example less":
        inputs, targets = inputs[1:], targets[1:]
    return inputs, targets


@pytest.mark.parametrize("kind", ["one entry", "flipped", "other labels", "an example less"])
def test_a_loader_that_changes_between_passes_is_detected(kind: str) -> None:
    problem, _ = Case(examples=8, seed=3).build()
    inputs, targets = tensors(problem)
    targets[0], targets[-1] = 0, 1

    class Changing:
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            pair = (inputs, targets) if self.passes == 1 else _changed(kind, inputs, targets)
            return zip(*(t.split(3) for t in pair), strict=True)

    stream = problem.with_data(Changing())
    stream.gradient()
    with pytest.raises(StaleError, match="changed between two passes"):
        stream.gradient()


def test_a_loader_that_refills_one_buffer_is_detected() -> None:
    problem, _ = Case(widths=(30, 3, 2), examples=6).build()
    inputs, targets = tensors(problem)
    buffer = torch.empty_like(inputs[:3])

    class Refilling:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in zip(inputs.split(3), targets.split(3), strict=True):
                yield buffer.copy_(x), y

    wide = nn.Sequential(nn.Unflatten(1, (1, 5, 6)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(24, 2))
    for case in (problem, curvlab.Problem(wide.double(), "cross-entropy", inputs, targets)):
        with pytest.raises(StaleError, match="new tensor for every batch"):
            curvlab.estimate("fisher", case.with_data(Refilling()))
    gradient, expected = problem.with_data(Refilling()).gradient(), problem.gradient()
    torch.testing.assert_close(gradient["0.weight"], expected["0.weight"])


def test_data_of_which_no_example_counts_are_refused() -> None:
    problem, _ = Case(loss="ignored", examples=6).build()
    inputs, targets = tensors(problem)
    ignored = torch.full_like(targets, -1)
    for data in (
        problem.with_data(inputs, ignored),
        problem.with_data([(inputs, ignored), (inputs, ignored)]),
    ):
        with pytest.raises(ProblemError, match="weight 0"):
            data.gradient()


class Augmented:
    """A loader whose inputs get other noise in every pass; `reuse`: in one buffer, filled again and again.

    The noise is not drawn from torch's own random state, with which curvlab begins every pass alike.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, reuse: bool = False) -> None:
        self.inputs, self.targets, self.reuse = inputs, targets, reuse
        self.buffer = torch.empty_like(inputs[:4])
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.inputs), 4):
            part = self.inputs[start : start + 4]
            self.buffer.copy_(part + 0.1 * torch.randn(part.shape, generator=self.generator))
            yield self.buffer if self.reuse else self.buffer.clone(), self.targets[start : start + 4]


@pytest.mark.parametrize(
    "second",
    [
        lambda problem: problem.gradient(),
        lambda problem: curvlab.estimate("fisher", problem),
        lambda problem: problem.loss(),
    ],
    ids=["gradient", "estimate", "loss"],
)
def test_a_second_pass_with_other_augmentation_names_it_and_the_remedy(second: Any) -> None:
    problem, _ = Case(examples=8).build()
    stream = problem.with_data(Augmented(*tensors(problem)))
    stream.gradient()
    with pytest.raises(StaleError, match=r"augmentation.*curvlab\.keep_batches\(loader\)"):
        second(stream)


@pytest.mark.parametrize("provider", ["fisher", "hessian", "pch-1"])
def test_kept_batches_are_those_of_one_pass_with_copies_of_their_own(provider: str) -> None:
    problem, _ = Case(examples=8).build()
    inputs, targets = tensors(problem)
    batches = curvlab.keep_batches(Augmented(inputs, targets, reuse=True))
    generator = torch.Generator().manual_seed(3)
    noisy = [part + 0.1 * torch.randn(part.shape, generator=generator) for part in inputs.split(4)]
    whole, stream = problem.with_data(torch.cat(noisy), targets), problem.with_data(batches)
    for name, value in stream.gradient().items():
        torch.testing.assert_close(value, whole.gradient()[name], rtol=1e-12, atol=1e-14)
    assert_same(curvlab.estimate(provider, whole), curvlab.estimate(provider, stream))


def test_each_call_of_keep_batches_draws_anew_and_keeps_dictionaries() -> None:
    loader = [{"ids": torch.zeros(2, 3), "labels": torch.zeros(2)}]
    first = curvlab.keep_batches(loader)
    loader[0]["ids"].add_(1)
    assert float(first[0]["ids"].sum()) == 0
    noisy = Augmented(torch.zeros(4, 2), torch.zeros(4))
    assert not torch.equal(curvlab.keep_batches(noisy)[0][0], curvlab.keep_batches(noisy)[0][0])
