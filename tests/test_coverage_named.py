"""Trainable parameters without a block are named wherever a result describes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import curvlab
from curvlab.optim import SecondOrder

LEFT_OUT = ("0.weight", "0.bias", "3.weight", "3.bias")


def some(layers: list[str] | None) -> curvlab.Problem:
    torch.manual_seed(0)
    modules = (nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    inputs, targets = torch.randn(5, 1, 6), torch.tensor([0, 1, 0, 1, 1])
    return curvlab.Problem(nn.Sequential(*modules), "cross-entropy", inputs, targets, layers=layers)


@pytest.mark.parametrize("provider", ["fisher", "fisher[structure=diagonal]", "gauss-newton", "hessian"])
def test_parameters_without_a_block_are_named_in_repr_frame_and_notes(provider: str) -> None:
    problem = some(["2", "4"])
    curvature = curvlab.estimate(provider, problem)
    for text in (repr(problem), repr(curvature), " ".join(curvature.notes), curvature._repr_html_()):
        for name in LEFT_OUT:
            assert name in text
    frame = curvature.frame().set_index("block")
    assert tuple(frame.index[-4:]) == LEFT_OUT
    assert set(frame.loc[list(LEFT_OUT), "form"]) == {"no block"}
    assert frame.loc["0.weight", "shape"] == "2×1×3"
    assert set(frame.index) == {n for n, _ in problem.model.named_parameters()}


def test_a_curvature_of_all_parameters_leaves_nothing_out() -> None:
    curvature = curvlab.estimate("fisher", some(None))
    assert "no block" not in repr(curvature)
    assert not curvature.left_out
    assert "no block" not in set(curvature.frame()["form"])


def test_solutions_and_saved_curvatures_know_it_too(tmp_path: Path) -> None:
    problem = some(["2", "4"])
    curvature = curvlab.estimate("fisher", problem)
    solution = curvlab.solve("kfi", curvature, problem.gradient(), alpha=0.1)
    told = (*solution.notes, *solution.frame().attrs["notes"])
    assert sum("no block for `0.weight`, `0.bias`" in note for note in told) == 2
    curvature.save(tmp_path / "some.safetensors")
    loaded = curvlab.Curvature.load(tmp_path / "some.safetensors")
    assert loaded.left_out == {"0.weight": (2, 1, 3), "0.bias": (2,), "3.weight": (3,), "3.bias": (3,)}
    assert "`3.bias`" in repr(loaded)


def test_of_many_the_first_are_named_and_the_rest_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)))
    problem = curvlab.Problem(
        model, "cross-entropy", torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), layers=["8"]
    )
    assert "`0.weight`" in repr(problem)
    assert "`2.bias` and 10 more" in repr(problem)


def test_an_optimizer_of_some_parameters_says_so_in_its_solutions() -> None:
    model, notes = some(None).model, []
    optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi", params=list(model[4].parameters()))
    optimizer.on_solution = lambda solution: notes.append(solution.notes)
    optimizer.step(torch.randn(5, 1, 6), torch.tensor([0, 1, 0, 1, 1]))
    assert any("no block for `0.weight`" in note for note in notes[0])
