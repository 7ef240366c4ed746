"""A place to run cells is added from this file alone."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from curvlab.cli import main
from curvlab.studies.executor import SerialExecutor, executors

CALLS: list[str] = []


class CountingExecutor(SerialExecutor):
    """Runs each call at once and counts it."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(fn.__name__)
        return super().submit(fn, *args, **kwargs)


@dataclass(frozen=True)
class Counting:
    """One cell at a time, counted."""

    in_process: ClassVar[bool] = True
    window: ClassVar[int | None] = 1
    label: str = "x"

    def start(self) -> Executor:
        return CountingExecutor()


@pytest.mark.slow
def test_an_executor_of_another_package_runs_the_cells(install: Any, compare: Any) -> None:
    install(executors, "counting", Counting)
    CALLS.clear()
    shown = compare("-p", "fisher", "-s", "kfi", "--executor", "counting[label=y]")
    # The scene, three controls, an error and a solve; and one repetition of two controls and the pair.
    assert CALLS == ["run_task"] * (6 + 3)
    assert shown.compared.cells["status"].tolist() == ["ok"]
    assert "fisher" in shown.page


def test_an_executor_of_another_package_is_listed(install: Any) -> None:
    install(executors, "counting", Counting)
    assert "One cell at a time, counted." in CliRunner().invoke(main, ["list", "executors"]).output
