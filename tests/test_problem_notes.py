"""What a comparison says of its problem before the numbers."""

from __future__ import annotations

import torch
from torch import nn

from curvlab import Problem
from curvlab.studies.compare.run import problem_notes


def problem(*modules: nn.Module, layers: list[str] | None = None) -> Problem:
    model = nn.Sequential(*modules).eval()
    return Problem(model, "cross-entropy", torch.randn(4, 1, 6), torch.tensor([0, 1, 0, 1]), layers=layers)


def test_parameters_without_curvature_are_named_with_their_share() -> None:
    modules = [nn.Conv1d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(8, 3), nn.Sigmoid(), nn.Linear(3, 2)]
    assert not any("no curvature" in fact for fact in problem_notes(problem(*modules)))
    said = problem_notes(problem(*modules, layers=["2", "4"]))
    (sentence,) = [fact for fact in said if "no curvature" in fact]
    assert sentence.startswith("1 of 5 trainable parameters (15% of the entries: `0.weight`)")


def test_layers_left_out_by_the_user_are_named_too() -> None:
    said = problem_notes(problem(nn.Flatten(), nn.Linear(6, 3), nn.Sigmoid(), nn.Linear(3, 2), layers=["1"]))
    assert any("2 of 4 trainable parameters" in fact and "`3.weight`, `3.bias`" in fact for fact in said)


def test_dropout_and_batch_norm_are_said_to_be_in_evaluation_mode() -> None:
    modules = [nn.Flatten(), nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2)]
    assert any(
        fact.startswith("BatchNorm1d and Dropout are in evaluation mode")
        for fact in problem_notes(problem(*modules))
    )


def test_a_plain_chain_has_nothing_left_out() -> None:
    said = problem_notes(problem(nn.Flatten(), nn.Linear(6, 3), nn.Sigmoid(), nn.Linear(3, 2)))
    assert said == []
