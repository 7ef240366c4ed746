"""A study on a real Dask scheduler with two worker processes on loopback, which are killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from curvlab.exceptions import ExecutorError, SpecError
from curvlab.studies import dask_executor
from curvlab.studies.compare.run import Progress, compare
from curvlab.studies.executor import place_of
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from tests.cases import ONE_SCENE

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

SECONDS = 900
SETUP = Setup(data="digits[train=64]", arch="64-6-10", batch=16, device="cpu", dtype="float64")
# A scene, 3 controls, 4 errors and 12 pairs, and only then 28 timings, those of 2 controls among them: a
# scheduler lost before these cannot be too late.
CELLS, FIRST_STAGE = 48, 20
STUDY: dict[str, Any] = {
    "providers": ("fisher", "gauss-newton", "pch-1", "pch-2"),
    "solvers": ("kfi", "cg[max_iter=2]", "ea-cg[max_iter=2]"),
    "repetitions": 2,
    "threads": 1,
    "newton_limit": 0,
    **ONE_SCENE,
}
PHASES = ("estimate_seconds", "prepare_seconds", "apply_seconds")
MEASURED = (*PHASES, "wall_seconds", "cpu_seconds", "waited", "load", "attempts", "run")


@pytest.fixture(autouse=True)
def no_test_waits_for_ever() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@dataclass
class Cluster:
    """A scheduler and its workers as processes of their own; `kill` is SIGKILL."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *words: str) -> None:
        # Dask's profiler stays on: the bytes of a cell must not depend on who looks at its stack.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        log = (self.folder / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "dask", *words, "--host", "127.0.0.1", "--no-dashboard"]
        self.processes[name] = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=self.folder
        )

    @property
    def address(self) -> str:
        path = self.folder / "scheduler.json"
        while True:
            try:
                return json.loads(path.read_text())["address"]
            except (OSError, ValueError, KeyError):
                assert self.processes["scheduler"].poll() is None, "the scheduler did not start"
                time.sleep(0.1)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    file = str(made.folder / "scheduler.json")
    made.start("scheduler", "scheduler", "--port", "0", "--scheduler-file", file)
    for worker in ("first", "second"):
        made.start(worker, "worker", made.address, "--nthreads", "1", "--no-nanny")
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in Store(folder, read_only=True).rows() if row["kind"] != "study"]


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["key"], row.get("repetition", -1)


def contents(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by what they are of, without what a clock has measured; no row may be there twice."""
    rows = rows_of(folder)
    found = {identity(row): {k: v for k, v in row.items() if k not in MEASURED} for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("serial")
    compare(SETUP, output=folder, **STUDY)
    found = contents(folder)
    assert len(found) == CELLS
    # The limit of 0 parameters leaves out the exact Newton step, and nothing else.
    assert [row.get("control") for row in found.values() if row["status"] != "ok"] == ["newton"]
    return found


def test_a_study_on_a_cluster_gives_the_rows_of_a_serial_one(
    cluster: Cluster, serial: dict[Any, Any], tmp_path: Path
) -> None:
    compare(SETUP, output=tmp_path, executor=f"dask[address={cluster.address}]", **STUDY)
    assert contents(tmp_path) == serial
    timed = [row for row in rows_of(tmp_path) if row["kind"] == "cost"]
    assert all(row["estimate_seconds"] > 0 for row in timed)
    assert all(row["prepare_seconds"] > 0 for row in timed if "control" not in row)


def test_a_killed_worker_and_a_lost_scheduler_cost_no_row_and_double_none(
    cluster: Cluster, serial: dict[Any, Any], tmp_path: Path
) -> None:
    def disturb(progress: Progress) -> None:
        if progress.done == FIRST_STAGE // 2:
            cluster.kill("first")
        if progress.done == FIRST_STAGE - 2:
            cluster.kill("scheduler")

    executor = f"dask[address={cluster.address}]"
    with pytest.raises(ExecutorError, match=r"run the study again|no Dask scheduler answers"):
        compare(SETUP, output=tmp_path, executor=executor, on_progress=disturb, **STUDY)
    kept = contents(tmp_path)
    assert FIRST_STAGE - 2 <= len(kept) <= FIRST_STAGE
    compare(SETUP, output=tmp_path, **STUDY)
    assert contents(tmp_path) == serial


def test_a_scheduler_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_executor, "CONNECT_SECONDS", 0.2)
    with pytest.raises(ExecutorError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        place_of("dask[address=tcp://127.0.0.1:9]").start()
    with pytest.raises(SpecError, match="needs the address of a scheduler"):
        place_of("dask")


def test_workers_with_several_threads_are_refused_unless_a_resource_limits_them() -> None:
    with pytest.raises(SpecError, match="--nthreads 1"):
        place_of("dask[address=tcp://host:1]")._check_workers({"tcp://host:2": 4})
    place_of("dask[address=tcp://host:1,resource=GPU]")._check_workers({"tcp://host:2": 4})
