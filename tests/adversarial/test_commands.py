"""Mistaken commands end with a sentence, the promised exit code and nothing changed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from curvlab.cli import main
from curvlab.studies import dask_executor
from tests.adversarial.commands import FAILED, USAGE
from tests.adversarial.outcomes import HangError, Judge, time_limit
from tests.adversarial.workshop import make_workshop

SUITE = "mistaken commands"
pytestmark = pytest.mark.slow  # short each, long together
MISTAKES = [(2, words, needles) for words, needles in USAGE.items()] + [
    (1, words, needles) for words, needles in FAILED.items()
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    make_workshop(folder)
    return folder


@pytest.fixture
def here(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workshop as working folder, which an address is looked up in."""
    monkeypatch.chdir(workshop)
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    monkeypatch.setattr(dask_executor, "CONNECT_SECONDS", 1)
    shutil.rmtree(workshop / "runs", ignore_errors=True)  # the default folder of the command before
    return workshop


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but locks and compiled code, which say nothing."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".lock", ".pyc"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def outcome_of(result: Result, code: int, needles: tuple[str, ...]) -> tuple[str, str]:
    """The outcome of a command by its exit code and by what it said; the oracle knows nothing of curvlab."""
    if not isinstance(result.exception, SystemExit | None):
        return "traceback", "".join(traceback.format_exception(result.exception)[-6:])
    if "Traceback" in result.output:
        return "traceback", result.output
    if result.exit_code != code:
        return "silent", f"exit code {result.exit_code} instead of {code}: {result.output[-600:]}"
    missing = [word for word in needles if word not in " ".join(result.stderr.split())]
    if missing:
        return "silent", f"{missing} not in: {result.stderr[-600:]}"
    return "refused", ""


@pytest.mark.parametrize(("code", "words", "needles"), MISTAKES, ids=[words for _, words, _ in MISTAKES])
def test_a_mistaken_command_is_answered_with_a_sentence(
    code: int, words: str, needles: tuple[str, ...], here: Path, judge: Judge
) -> None:
    before = contents(here)
    try:
        with time_limit():
            result = CliRunner().invoke(main, shlex.split(words))
    except HangError as error:
        judge(SUITE, "hang", error)
    outcome, why = outcome_of(result, code, needles)
    after = contents(here)
    if (here / "unpickled").exists():
        judge(SUITE, "silent", "a pickle was run")
    gone = [name for name, data in before.items() if after.get(name) != data]
    judge(SUITE, "lost" if gone else outcome, gone or why)


@dataclass(frozen=True)
class Surroundings:
    """What a process runs in: its variables, its shell line (`{curvlab}` stands for the command), its end."""

    line: str
    code: int
    needle: str = ""
    variables: tuple[tuple[str, str], ...] = ()


TRAIN = "train --data digits[train=50,test=20] --batch 20 --epochs 1"
COMPARE = (
    "compare --arch 64-8-10 --data digits[train=50,test=20] --batch 20 -p fisher -s kfi -r 1 --batches 1 "
    "--at init"
)
SURROUNDINGS = {
    "standard output in cp1252": Surroundings(
        "{curvlab} list", 0, variables=(("PYTHONIOENCODING", "cp1252"),)
    ),
    "both streams in ASCII": Surroundings(
        f"{{curvlab}} {TRAIN} -o run", 0, "The run is in", (("PYTHONIOENCODING", "ascii"),)
    ),
    "a comparison in cp1252": Surroundings(
        f"{{curvlab}} {COMPARE} -o run", 0, variables=(("PYTHONIOENCODING", "cp1252"),)
    ),
    "a comparison in ASCII": Surroundings(
        f"{{curvlab}} {COMPARE} -o run", 0, variables=(("PYTHONIOENCODING", "ascii"),)
    ),
    "a reader that leaves": Surroundings("set -o pipefail; {curvlab} list | head -1", 1),
    "a full device": Surroundings("{curvlab} list >/dev/full", 1, "No space left"),
    "standard output closed": Surroundings("{curvlab} list solvers >&-", 0),
    "a working folder that is gone": Surroundings(
        "mkdir gone && cd gone && rmdir ../gone && {curvlab} list", 2, "working folder has been removed"
    ),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full and /proc")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_command_in_hostile_surroundings_ends_with_a_sentence(
    name: str, tmp_path: Path, judge: Judge
) -> None:
    around = SURROUNDINGS[name]
    line = around.line.format(curvlab=f"{shlex.quote(sys.executable)} -m curvlab")
    root = str(Path(__file__).parents[2])
    variables = {**os.environ, "PYTHONPATH": root, "PYTHONUTF8": "0", **dict(around.variables)}
    try:
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, cwd=tmp_path, env=variables, timeout=60, check=False
        )
    except subprocess.TimeoutExpired as error:
        judge(SUITE, "hang", error)
    said = done.stderr.decode(errors="replace")
    if "Traceback" in said or "Exception ignored" in said:
        judge(SUITE, "traceback", said[-800:])
    right = done.returncode == around.code and around.needle in said
    judge(
        SUITE, ("refused" if around.code else "held") if right else "silent", (done.returncode, said[-600:])
    )


def test_the_table_is_as_large_as_promised() -> None:
    assert len(MISTAKES) >= 130
    commands = {words.split()[0] for _, words, _ in MISTAKES}
    assert {"compare", "plan", "train", "reproduce", "list", "report", "merge", "spectrum"} <= commands
