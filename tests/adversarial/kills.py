"""One study killed again and again, and resumed until it is finished: what is then different, or lost.

    python -m tests.adversarial.kills STUDY KILLS SEED FOLDER

Torch is imported once; every attempt is a fork in a process group of its own, which is sent SIGKILL or
SIGTERM at a random moment within the time that an uninterrupted run takes. Prints counts as JSON:

    kills        attempts that a signal ended
    lost         rows that were whole before an attempt and are not there after it
    different    rows that an uninterrupted run has otherwise, in what is not a time
    hangs        resumed attempts that were not over after 150 seconds
    failed       attempts that ended otherwise, or left workers behind that were there 60 seconds later

Nothing heavy is imported at the top: a worker imports the main module of its parent before it can look after
that, and one whose parent is killed meanwhile would first import torch for nobody.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["STUDIES", "main"]

DATA = "synthetic[features=5,classes=3,examples=60]"
ORPHAN_SECONDS = 60  # the import of torch lets no other thread run, and takes long on a busy machine
HANG_SECONDS = 150  # importing torch in new workers takes long on a busy machine


def setup() -> Any:
    from curvlab.studies.setup import Setup

    return Setup(arch="5-4-3", data=DATA, batch=10, device="cpu")


def run_compare(folder: Path, executor: str = "serial") -> None:
    from curvlab.studies.compare.run import compare
    from tests.cases import ONE_SCENE

    chosen = {**ONE_SCENE, "batches": 2, "repetitions": 2}
    compare(setup(), ["fisher", "pch-1"], ["kfi", "cg"], **chosen, output=folder, executor=executor)


def run_train(folder: Path) -> None:
    from curvlab.studies.train.run import TrainPlan, train

    train(TrainPlan(setup(), epochs=5), folder, checkpoint_steps=2)


def run_reproduce(folder: Path, executor: str = "serial") -> None:
    from curvlab.reproduce.grid_study import GridStudy
    from curvlab.reproduce.run import reproduce
    from curvlab.reproduce.subjects import Options

    grid = GridStudy(data=DATA, arch="5-4-3", epochs=3, pairs=("sgd",), lr=(0.1, 0.2), batch=(10,))
    reproduce("grid", Options("smoke", device="cpu", study=grid), folder, executor=executor)


STUDIES: dict[str, Callable[[Path], None]] = {
    "compare": run_compare,
    "compare in processes": lambda folder: run_compare(folder, "process[workers=2]"),
    "train": run_train,
    "reproduce": run_reproduce,
    "reproduce in processes": lambda folder: run_reproduce(folder, "process[workers=2]"),
}


def stores(folder: Path) -> list[Path]:
    return sorted(folder.rglob("results.jsonl"))


def whole_lines(folder: Path) -> list[bytes]:
    lines = [line for path in stores(folder) for line in path.read_bytes().splitlines(keepends=True)]
    return [line for line in lines if line.endswith(b"\n")]


def is_time(name: str) -> bool:
    """Whether it is one, or says in which run it was measured and how other programs disturbed that."""
    return "seconds" in name or name in ("waited", "load", "attempts", "run")


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if not is_time(name)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def measured(folder: Path) -> dict[str, str]:
    """The rows by what they are about, times aside; the last of several counts."""
    rows = [json.loads(line) for line in whole_lines(folder)]
    named = {
        json.dumps([row.get(n) for n in ("kind", "key", "repetition", "plan", "epoch")]): row for row in rows
    }
    return {name: json.dumps(without_times(row), sort_keys=True) for name, row in named.items()}


def attempt(study: Callable[[Path], None], folder: Path, seconds: float, number: signal.Signals) -> str:
    """Run in a fork; "finished", "killed", or why it ended otherwise."""
    child = os.fork()
    if child == 0:
        os.setsid()
        study(folder)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "finished" if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.002)
    os.kill(child, number)
    status = os.waitpid(child, 0)[1]
    if orphans(child):
        return "left workers behind"
    return "finished" if status == 0 else "killed"


def orphans(leader_group: int) -> bool:
    """Whether a process group has members, after some time to end by themselves; they are then ended."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(leader_group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    os.killpg(leader_group, signal.SIGKILL)
    return True


def main(name: str, kills: int, seed: int, base: Path) -> dict[str, Any]:
    """Kill the study that many times, in as many folders as that takes."""
    study, draw = STUDIES[name], random.Random(seed)
    # The first run in this process imports everything that the forks then have.
    begun = time.monotonic()
    study(base / "reference")
    usual = time.monotonic() - begun
    reference = measured(base / "reference")
    counts: dict[str, Any] = {"kills": 0, "lost": [], "different": [], "hangs": 0, "failed": []}
    folders = 0
    while counts["kills"] < kills:
        folder, finished = base / str(folders), False
        folders += 1
        while not finished:
            before = whole_lines(folder)
            last = counts["kills"] >= kills
            number = draw.choice([signal.SIGKILL, signal.SIGTERM])
            ended = attempt(study, folder, HANG_SECONDS if last else draw.uniform(0.02, usual), number)
            after = whole_lines(folder)
            counts["lost"] += [line.decode() for line in before if line not in after]
            finished = ended == "finished"
            if ended == "killed":
                counts["hangs" if last else "kills"] += 1
            elif not finished:
                counts["failed"].append(ended)
            finished = finished or last or bool(counts["failed"])
            print(f"folder {folder.name}: {ended}", file=sys.stderr, flush=True)  # for whoever cuts this off
        found = measured(folder)
        counts["different"] += [key for key in reference if found.get(key) != reference[key]]
        counts["different"] += [key for key in found if key not in reference]
    counts["rows"] = len(reference)
    return counts


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
