"""One run per folder: a second one stops at once and names the first, and a killed one is in nobody's way."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from curvlab.cli import main
from curvlab.exceptions import FolderInUseError, ResultsFolderError
from curvlab.studies.compare.run import compare, load_comparison
from curvlab.studies.setup import Setup
from curvlab.studies.store import run_lock
from tests.cases import ONE_SCENE

TINY = Setup(arch="5-4-3", data="synthetic[features=5,classes=3,examples=30]", batch=10, device="cpu")
SMALL = ["--arch", TINY.arch, "--data", TINY.data, "--batch", "10", "--device", "cpu", "--quiet"]
COMMANDS = {
    "compare": ["compare", *SMALL, "-p", "fisher", "-s", "kfi", "-r", "1", "--fresh"],
    "train": ["train", *SMALL, "--epochs", "1", "--fresh"],
    "reproduce": ["reproduce", "table1", "--scale", "smoke", "--quiet", "--fresh"],
}
fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this platform cannot fork a process"
)

# A training run that tells of its first step, and makes the second when it is allowed to.
TRAINING = """
import sys
import curvlab.cli
from curvlab.studies.train.run import TrainRun
advance = TrainRun.advance
def slow(self):
    advance(self)
    print(self.steps, flush=True)
    sys.stdin.readline()
TrainRun.advance = slow
curvlab.cli.main()
"""


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def hold(folder: Path, told: int) -> None:
    with run_lock(folder, "compare"):
        os.write(told, b"held")
        time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds `tmp_path / "run"`."""
    reader, told = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "run", told))
    process.start()
    os.close(told)
    assert os.read(reader, 4) == b"held"
    os.close(reader)
    yield process
    process.kill()
    process.join()


@pytest.mark.slow
@fork
@pytest.mark.parametrize("command", [*COMMANDS, "merge"])
def test_a_second_process_stops_at_once_and_names_the_one_that_holds_the_folder(command, holder, tmp_path):
    words = COMMANDS.get(command)
    if words is None:
        compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path / "other")
        words = ["merge", str(tmp_path / "other")]
    before = contents(tmp_path / "run")
    started = time.monotonic()
    found = call(*words, "-o", tmp_path / "run")
    assert time.monotonic() - started < 10
    assert found.exit_code == 1
    assert f"{tmp_path / 'run'} is in use by process {holder.pid} (curvlab compare), since" in found.stderr
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\. Wait", found.stderr)
    assert contents(tmp_path / "run") == before


@fork
def test_a_killed_holder_leaves_the_folder_usable(holder, tmp_path):
    with pytest.raises(FolderInUseError), run_lock(tmp_path / "run", "train"):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with run_lock(tmp_path / "run", "train"):
        assert json.loads((tmp_path / "run" / ".run.json").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "run" / ".run.json").exists()


@pytest.mark.slow
def test_train_beside_a_running_train_touches_nothing_and_works_again_when_that_was_killed(tmp_path):
    words = ["train", *SMALL, "--epochs", "3"]
    assert call("train", *SMALL, "--epochs", "1", "-o", tmp_path).exit_code == 0
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, *words, "-o", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ,
    )
    try:
        assert process.stdout.readline().strip() == b"4"
        before = contents(tmp_path)
        for option in ([], ["--fresh"]):
            found = call(*words, *option, "-o", tmp_path)
            assert found.exit_code == 1
            assert f"in use by process {process.pid} (curvlab train), since" in found.stderr
            assert contents(tmp_path) == before
    finally:
        process.kill()
        process.communicate()
    assert call(*words, "-o", tmp_path).exit_code == 0


def test_the_lock_holds_between_threads_and_one_thread_may_take_it_again(tmp_path):
    outcomes: list[object] = []

    def other() -> None:
        try:
            with run_lock(tmp_path, "compare"):
                outcomes.append("taken")
        except FolderInUseError as error:
            outcomes.append(error)

    def run_other() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with run_lock(tmp_path, "train"):
        with run_lock(tmp_path / ".." / tmp_path.name, "train"):
            run_other()
        run_other()
    run_other()
    assert [isinstance(outcome, FolderInUseError) for outcome in outcomes] == [True, True, False]
    assert f"process {os.getpid()} (curvlab train)" in str(outcomes[1])


@pytest.mark.slow
@fork
def test_reading_a_folder_needs_no_lock(tmp_path):
    compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path / "run")
    reader, told = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "run", told))
    process.start()
    try:
        assert os.read(reader, 4) == b"held"
        assert len(load_comparison(tmp_path / "run").cells) == 1
        assert call("report", tmp_path / "run", "--quiet").exit_code == 0
    finally:
        process.kill()
        process.join()


def test_a_folder_that_cannot_be_written_to_is_a_results_folder_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / ".run.lock").mkdir()
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "lock"):
        with pytest.raises(ResultsFolderError, match="cannot write to the folder"), run_lock(folder, "train"):
            pass
