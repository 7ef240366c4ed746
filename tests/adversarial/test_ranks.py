"""Ranks that disagree are found and named, and a rank that raises ends all of them, within seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.adversarial.outcomes import Judge
from tests.adversarial.ranks import AGREEING, DIFFERENCES, RAISING

SUITE = "ranks that disagree"
PROCESS_SECONDS = 300  # a busy machine takes long to import torch twice
JOB_SECONDS = 60
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every job came to on each rank; both are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.adversarial.ranks"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            env=environment,
            cwd=Path(__file__).parents[2],
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    try:
        for process in started:
            process.wait(timeout=PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        pass  # the jobs that were not over are missing below
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def judged(name: str, found: list[dict[str, Any]], judge: Judge, word: str) -> None:
    """Refused on both ranks with a sentence that has the word, within the time."""
    if any(name not in results for results in found):
        judge(SUITE, "hang", "not over")
    outcomes = [results[name] for results in found]
    if max(seconds for _, _, seconds in outcomes) > JOB_SECONDS:
        judge(SUITE, "hang", outcomes)
    if any(outcome == "traceback" for outcome, _, _ in outcomes):
        judge(SUITE, "traceback", outcomes)
    refused = all(outcome == "refused" and word in message for outcome, message, _ in outcomes)
    judge(SUITE, "refused" if refused else "silent", outcomes)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_refused_and_named(
    name: str, found: list[dict[str, Any]], judge: Judge
) -> None:
    judged(name, found, judge, "rank")


@pytest.mark.parametrize("name", RAISING)
def test_a_rank_that_raises_ends_all_with_its_message(
    name: str, found: list[dict[str, Any]], judge: Judge
) -> None:
    judged(name, found, judge, "")
    assert "rank 1" in found[0][name][1]


@pytest.mark.parametrize("name", AGREEING)
def test_ranks_that_agree_are_answered(name: str, found: list[dict[str, Any]], judge: Judge) -> None:
    outcomes = [results.get(name, ("hang", "", 0)) for results in found]
    judge(SUITE, "held" if {outcome for outcome, _, _ in outcomes} == {"answered"} else "silent", outcomes)
