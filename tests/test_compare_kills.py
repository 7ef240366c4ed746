"""A comparison killed at any moment loses at most the cell under way, and resumes to the same frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from curvlab.studies.compare.columns import PHASES
from curvlab.studies.compare.run import load_comparison

# Torch is imported once; each attempt at the comparison is a fork of that process, killed by its parent. Each
# study is killed at moments of its own, drawn over all that an uninterrupted one takes, and then let end.
SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
from curvlab.studies.compare.run import compare
from curvlab.studies.setup import Setup

SETUP = Setup(arch="5-4-3", data="synthetic[features=5,classes=3,examples=30]", batch=10)
base, wanted, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(7)

def rows(folder):
    path = folder / "results.jsonl"
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []

def attempt(folder, seconds):
    child = os.fork()
    if child == 0:
        compare(SETUP, ["fisher", "pch-1"], ["kfi"], at=("init", "step:3"), batches=1,
                alphas=("0.5",), repetitions=2, threads=1, output=folder)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0

began = time.monotonic()
assert attempt(base / "whole", 600)
whole = time.monotonic() - began
kills, studies, lost = [], 0, []
while len(kills) < wanted:
    folder, done = base / str(studies), False
    while not done and len(kills) < wanted:
        before = [line for line in rows(folder) if line.endswith(b"\\n")]
        done = attempt(folder, draw.uniform(0.02, 0.9) * whole)
        after = rows(folder)
        lost += [line.decode() for line in before if line not in after]
        kills += [] if done else [len(after)]
    assert done or attempt(folder, 600)
    studies += 1
print(json.dumps({"kills": kills, "studies": studies, "lost": lost}))
"""
TIMES = ("run", "waited", "load", "attempts", *(f"{phase}_iqr" for phase in ("total", *PHASES)))


def frames_without_times(folder: Path) -> dict[str, pd.DataFrame]:
    found = {}
    for name, frame in load_comparison(folder).frames.items():
        timed = [one for one in frame if one.endswith("_seconds") or one in TIMES]
        found[name] = frame.drop(columns=timed)
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start many processes quickly")
@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)]
)
def test_a_comparison_killed_at_random_moments_resumes_to_the_same_frames(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["kills"]) == kills
    assert found["lost"] == []
    expected = frames_without_times(tmp_path / "whole")
    assert all(len(expected[name]) for name in ("cells", "controls", "draws", "dampings", "errors", "blocks"))
    for study in range(found["studies"]):
        rows = [
            json.loads(line) for line in (tmp_path / str(study) / "results.jsonl").read_text().splitlines()
        ]
        identities = [(row["kind"], row["key"], row.get("repetition")) for row in rows]
        assert len(identities) == len(set(identities)), "nothing is there twice"
        for name, frame in frames_without_times(tmp_path / str(study)).items():
            pd.testing.assert_frame_equal(frame, expected[name], check_exact=True, obj=f"{name} of {study}")
