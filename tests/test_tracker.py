"""A tracker measures along training and leaves it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import curvlab
from curvlab.exceptions import SpecError
from curvlab.studies.small.tracker import log_to_tensorboard

MEASURES = ["top-eigenvalue", "trace", "density", "errors"]


def train(tracked: bool, steps: int = 6) -> tuple[nn.Module, curvlab.Tracker | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    inputs, targets = torch.randn(40, 5), torch.randint(0, 3, (40,))
    model.eval()
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    model.train()
    tracker = curvlab.Tracker(problem, every=2, measures=MEASURES, providers=["fisher"]) if tracked else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        if tracker is not None:
            tracker(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, tracker


def test_the_trained_weights_are_bit_equal_with_and_without_a_tracker() -> None:
    plain, _ = train(tracked=False)
    model, tracker = train(tracked=True)
    assert tracker is not None
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert all(module.training for module in model.modules())
    frame = tracker.frame()
    assert list(frame) == ["step", "measure", "of", "value", "standard_error"]
    assert sorted(frame["step"].unique()) == [0, 2, 4]
    assert list(frame["measure"].unique()) == MEASURES
    assert list(tracker.densities) == [0, 2, 4]
    assert len(tracker.plot().axes) == 4


def test_the_numbers_are_those_of_the_parameters_at_that_step() -> None:
    _, tracker = train(tracked=True, steps=1)
    assert tracker is not None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)).eval()
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(40, 5), torch.randint(0, 3, (40,)))
    dense = curvlab.estimate("hessian[full=true]", problem).to_dense()
    frame = tracker.frame().set_index(["measure", "of"])
    top = float(torch.linalg.eigvalsh(dense)[-1])
    assert frame.loc[("top-eigenvalue", ""), "value"] == pytest.approx(top, rel=1e-4)
    trace = frame.loc[("trace", "")]
    assert abs(trace["value"] - float(dense.trace())) < 5 * trace["standard_error"]
    errors = curvlab.errors(problem, ["fisher"])
    assert frame.loc[("errors", "fisher, layer Total"), "value"] == pytest.approx(errors["error"].iloc[-1])


def test_every_number_is_told_to_the_log() -> None:
    told: list[tuple[str, float, int]] = []
    problem = curvlab.Problem(nn.Linear(3, 2), "mse", torch.randn(8, 3), torch.randn(8, 2))
    tracker = curvlab.Tracker(problem, every=5, measures=["trace"], log=lambda *given: told.append(given))
    for step in range(11):
        tracker(step)
    assert [(name, step) for name, _, step in told] == [("trace", 0), ("trace", 5), ("trace", 10)]


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    problem = curvlab.Problem(nn.Linear(3, 2), "mse", torch.randn(8, 3), torch.randn(8, 2))
    with SummaryWriter(str(tmp_path)) as writer:
        tracker = curvlab.Tracker(problem, every=1, measures=["trace"], log=log_to_tensorboard(writer))
        tracker(3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Scalars("curvature/trace")
    assert event.step == 3
    assert event.value == pytest.approx(tracker.frame()["value"].iloc[0], rel=1e-6)


def test_unknown_measures_are_refused_with_the_known_ones() -> None:
    problem = curvlab.Problem(nn.Linear(3, 2), "mse", torch.randn(8, 3), torch.randn(8, 2))
    with pytest.raises(SpecError, match="top-eigenvalue, trace, density, errors"):
        curvlab.Tracker(problem, measures=["sharpness"])
    with pytest.raises(SpecError, match="at least 1"):
        curvlab.Tracker(problem, every=0)


def test_products_of_a_hessian_from_before_a_measurement_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs, targets = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 3
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    hessian = curvlab.estimate("hessian", problem)
    columns = torch.randn(hessian.numel, 2, dtype=torch.float64)
    before = hessian.flat_product(columns)
    curvlab.Tracker(problem, every=1, measures=["trace"])(0)
    torch.testing.assert_close(hessian.flat_product(columns), before, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(before, hessian.to_dense() @ columns, rtol=1e-10, atol=1e-12)
