"""A comparison killed at any moment loses at most the cell under way, and resumes to the same store."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KILLS = 8

# Torch is imported once; each attempt at the comparison is a fork of that process, killed by its parent.
SCRIPT = f"""
import json, os, random, signal, sys, time
from pathlib import Path
from curvlab.studies.compare.run import compare
from curvlab.studies.setup import Setup
from tests.cases import ONE_SCENE

SETUP = Setup(arch="5-4-3", data="synthetic[features=5,classes=3,examples=30]", batch=10)
base, draw = Path(sys.argv[1]), random.Random(7)

def rows(folder):
    path = folder / "results.jsonl"
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []

def attempt(folder, seconds):
    child = os.fork()
    if child == 0:
        compare(SETUP, ["fisher", "pch-1"], ["kfi", "sm-kfi"], **ONE_SCENE, repetitions=3, output=folder)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0

kills = studies = 0
lost = []
while kills < {KILLS} or not finished:
    folder = base / str(studies)
    before = [line for line in rows(folder) if line.endswith(b"\\n")]
    finished = attempt(folder, draw.uniform(0.02, 1.0) * (1 + kills / 2))
    after = rows(folder)
    lost += [line.decode() for line in before if line not in after]
    kills += not finished
    studies += finished
print(json.dumps({{"kills": kills, "studies": studies, "lost": lost}}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start many processes quickly")
def test_nothing_is_lost_and_nothing_is_there_twice_after_kills_at_random_moments(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] >= KILLS
    assert found["lost"] == []
    for folder in range(found["studies"]):
        lines = (tmp_path / str(folder) / "results.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        identities = [(row["kind"], row["key"], row.get("repetition")) for row in rows]
        # The study and its scene, 3 controls, 2 providers, 4 pairs; and 3 rounds of 2 controls and the pairs.
        assert len(identities) == len(set(identities)) == 2 + 3 + 2 + 4 + 3 * (2 + 4)
        assert all(row.get("status", "ok") == "ok" for row in rows)
