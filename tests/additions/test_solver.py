"""A solver is added from this file alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from curvlab.solvers import KFI
from curvlab.solvers.registry import solvers


@dataclass(frozen=True)
class HalfDampedKFI(KFI):
    """KFI with its damping halved."""

    share: float = 0.5

    def prepare(self, layer: Any, damping: Any, gradient: Any) -> Any:
        return super().prepare(layer, type(damping)(damping.alpha * self.share), gradient)


@pytest.mark.slow
def test_a_solver_of_another_package_is_compared_by_its_name(install: Any, compare: Any) -> None:
    install(solvers, "half-damped-kfi", HalfDampedKFI)
    shown = compare(
        "-p",
        "fisher",
        "-s",
        "half-damped-kfi",
        "-s",
        "half-damped-kfi[share=1]",
        "-s",
        "kfi",
        "--alpha",
        "0.9",
    )
    assert shown.config["solvers"] == ["half-damped-kfi", "half-damped-kfi[share=1.0]", "kfi"]
    cells = shown.compared.cells.set_index("solver")
    assert set(cells["status"]) == {"ok"}
    assert cells.loc["half-damped-kfi[share=1.0]", "cosine"] == cells.loc["kfi", "cosine"]
    assert cells.loc["half-damped-kfi", "cosine"] != cells.loc["kfi", "cosine"]
    assert "-s half-damped-kfi" in shown.compared.command
    for text in (shown.result.stdout, shown.page, shown.markdown):
        assert "half-damped-kfi" in text
