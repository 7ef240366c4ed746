"""Studies killed at any moment lose no row, and are resumed to what an uninterrupted run measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adversarial.outcomes import Judge

SUITE = "kills"
# `tests/test_compare_kills.py` kills comparisons in one process and compares their frames.
IN_CI = {"train": 2, "reproduce": 2}
LONG = {
    "compare": 12,
    "compare in processes": 10,
    "train": 12,
    "reproduce": 10,
    "reproduce in processes": 6,
}
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start many processes quickly")


def killed(study: str, kills: int, seed: int, folder: Path, judge: Judge) -> None:
    command = [sys.executable, "-m", "tests.adversarial.kills", study, str(kills), str(seed), str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode:
        judge(SUITE, "traceback", done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    if found["lost"]:
        judge(SUITE, "lost", found["lost"][:3])
    if found["hangs"]:
        judge(SUITE, "hang", found)
    if found["failed"]:
        judge(SUITE, "traceback", (found["failed"], done.stderr[-2000:]))
    if found["different"]:
        judge(SUITE, "silent", found["different"][:3])
    for _ in range(found["kills"]):
        judge(SUITE, "held")
    assert found["kills"] >= kills
    assert found["rows"] > 0


@forks
@pytest.mark.slow
@pytest.mark.parametrize("study", IN_CI)
def test_a_killed_study_resumes_to_the_rows_of_an_uninterrupted_one(
    study: str, tmp_path: Path, judge: Judge
) -> None:
    killed(study, IN_CI[study], 7, tmp_path, judge)


@forks
@pytest.mark.long
@pytest.mark.parametrize("study", LONG)
def test_a_study_killed_many_times_resumes_to_the_rows_of_an_uninterrupted_one(
    study: str, tmp_path: Path, judge: Judge
) -> None:
    killed(study, LONG[study], 11, tmp_path, judge)


def test_there_are_as_many_kills_as_promised() -> None:
    assert sum(LONG.values()) >= 40
