"""An activation is added from this file alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab import activations
from curvlab.activations import register_activation


class Arctan(nn.Module):
    """The inverse tangent."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.arctan(z)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "NAMED", dict(activations.NAMED))
    monkeypatch.setattr(activations, "MODULES", dict(activations.MODULES))


@pytest.mark.slow
def test_a_registered_activation_is_used_by_its_name(compare: Any) -> None:
    register_activation("arctan", Arctan)
    shown = compare("-p", "pch-1", "-s", "kfi", "--activation", "arctan")
    assert "activation=arctan" in shown.config["arch"]
    assert "activation=arctan" in shown.compared.command
    assert shown.compared.cells["status"].tolist() == ["ok"]
    assert "activation=arctan" in shown.page


def test_its_second_derivative_is_that_of_the_exact_hessian() -> None:
    register_activation("arctan", Arctan)
    model = nn.Sequential(nn.Linear(3, 3), Arctan(), nn.Linear(3, 2)).double()
    inputs, targets = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0, 1])
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    block = curvlab.estimate("hessian", problem).blocks["0.bias"].to_dense()

    def loss(bias: Tensor) -> Tensor:
        hidden = torch.arctan(inputs @ model[0].weight.T + bias)
        return nn.functional.cross_entropy(hidden @ model[2].weight.T + model[2].bias, targets)

    torch.testing.assert_close(block, torch.func.hessian(loss)(model[0].bias.detach()))
