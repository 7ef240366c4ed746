"""A provider is added from this file alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from curvlab.providers import Fisher, Provider
from curvlab.providers.registry import providers


@dataclass(frozen=True)
class ScaledFisher(Provider):
    """The empirical Fisher matrix, times a factor."""

    needs_chain: ClassVar[bool] = False
    scale: float = 2.0

    def statistics(self, problem: Any) -> Any:
        return Fisher().statistics(problem)

    def curvature(self, context: Any, name: str) -> Any:
        return replace(Fisher().curvature(context, name), notes=(f"toy, scaled by {self.scale:g}",))


@pytest.mark.slow
def test_a_provider_of_another_package_is_compared_by_its_name(install: Any, compare: Any) -> None:
    install(providers, "scaled-fisher", ScaledFisher)
    shown = compare("-p", "scaled-fisher[scale=3]", "-p", "fisher", "-s", "kfi")
    assert shown.config["providers"] == ["scaled-fisher[scale=3.0]", "fisher"]
    assert shown.compared.cells["provider"].tolist() == ["scaled-fisher[scale=3.0]", "fisher"]
    assert shown.compared.cells["status"].tolist() == ["ok", "ok"]
    assert "-p 'scaled-fisher[scale=3.0]'" in shown.compared.command
    for text in (shown.result.stdout, shown.page):
        assert "scaled-fisher" in text
