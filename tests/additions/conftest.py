"""What the tests of additions share: a thing brought by another package, and a comparison that shows it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from curvlab import specs as registry_module
from curvlab.cli import main
from curvlab.specs import Registry
from curvlab.studies import schema
from curvlab.studies.compare.frames import Comparison
from curvlab.studies.compare.run import load_comparison

TINY = (
    "--arch",
    "6-4-3",
    "--data",
    "synthetic[features=6,classes=3,examples=50]",
    "--batch",
    "20",
    "-r",
    "1",
    "--at",
    "init",
    "--batches",
    "1",
    "--alphas",
    "0.5",
)


@dataclass(frozen=True)
class Shown:
    """Where an addition must appear: the command's output, config.toml, the frames and the pages."""

    result: Result
    config: dict[str, Any]
    compared: Comparison
    page: str
    markdown: str


@pytest.fixture
def compare(tmp_path: Path, plain_pages: None) -> Callable[..., Shown]:
    """Run `curvlab compare` on a small problem with more options, and collect what it wrote."""

    def run(*options: str) -> Shown:
        # Options that are given again win: the last of two counts.
        words = ["compare", *TINY, *options, "-o", str(tmp_path / "out")]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(main, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        folder = tmp_path / "out"
        return Shown(
            result,
            tomllib.loads((folder / "config.toml").read_text()),
            load_comparison(folder),
            (folder / "report.html").read_text(),
            (folder / "report.md").read_text(),
        )

    return run


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Registry[Any], str, type], None]:
    """Let a registry find a class through the entry points of another package, as if that were installed."""

    def put(registry: Registry[Any], name: str, factory: type) -> None:
        point = EntryPoint(name, f"{factory.__module__}:{factory.__name__}", registry.group or "")
        monkeypatch.setattr(
            registry_module, "entry_points", lambda group: [point] if group == registry.group else []
        )
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_loaded", False)

    return put


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after a test, the settings and columns that it registers."""
    monkeypatch.setattr(schema._settings, "held", dict(schema._settings.held))
    monkeypatch.setattr(schema._columns, "held", dict(schema._columns.held))
