"""Settings that every test shares: one thread, one seed, no display."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch and matplotlib read them: workers share the cores, and nobody looks at a window.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.adversarial.outcomes import PROPERTY, count_lines

if TYPE_CHECKING:
    from curvlab.report.content import Content

torch.set_num_threads(1)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=25, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the order of slow tests where the others are shuffled: those of a file share a study's run."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.random_order(disabled=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what is there by now out of garbage collections.

    Tests that count bytes collect several times each, and would visit half a million objects each time.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what became of the adversarial suite's attacks, wherever its tests ran."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    calls = [report.user_properties for report in reports if getattr(report, "when", "") == "call"]
    recorded = [value for properties in calls for name, value in properties if name == PROPERTY]
    for line in count_lines(recorded):
        terminalreporter.write_line(line)


@pytest.fixture
def plain_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, whose drawing takes most of a small study's time: for tests of anything else."""
    from curvlab.report import pages

    whole = pages.write_pages

    def without_figures(content: Content, folder: str | Path, name: str = "report") -> Path:
        sections = tuple(replace(section, drawings=()) for section in content.sections)
        return whole(replace(content, sections=sections), folder, name)

    monkeypatch.setattr(pages, "write_pages", without_figures)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch, so that a test draws the same numbers alone, in the suite and in any worker."""
    torch.manual_seed(0)
