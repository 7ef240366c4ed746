"""A criterion is added from this file alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

from curvlab.criteria import MSE
from curvlab.criteria.registry import criteria

REGRESSION = ("--data", "synthetic-regression[features=6,outputs=3,examples=50]", "--dtype", "float64")


@dataclass(frozen=True)
class TripleSquares(MSE):
    """Three times the mean squared error."""

    name: ClassVar[str] = "triple-squares"

    def output_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 3 * super().output_losses(logits, targets)

    def output_slopes(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 3 * super().output_slopes(logits, targets)

    def output_curvatures(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 3 * super().output_curvatures(logits, targets)


@pytest.mark.slow
def test_a_criterion_of_another_package_is_used_by_its_name(install: Any, compare: Any) -> None:
    install(criteria, "triple-squares", TripleSquares)
    plain = compare(*REGRESSION, "-p", "gauss-newton", "-s", "kfi", "--criterion", "mse")
    shown = compare(*REGRESSION, "-p", "gauss-newton", "-s", "kfi", "--criterion", "triple-squares")
    assert shown.config["criterion"] == "triple-squares"
    assert "--criterion triple-squares" in shown.compared.command
    for text in (shown.page, shown.markdown):
        assert "triple-squares" in text
    # Every block of the absolute Hessian and of Gauss-Newton is three times as large: so is their distance.
    thrice = 3 * plain.compared.cells["error_total"].item()
    assert shown.compared.cells["error_total"].item() == pytest.approx(thrice, rel=1e-12)
