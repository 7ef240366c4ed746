"""A damaged run folder is resumed, or refused with a sentence; no row that was whole is lost."""

from __future__ import annotations

import json
import os
import shutil
import traceback
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from curvlab.cli import compare as compare_command
from curvlab.cli import main
from curvlab.cli import train as train_command
from curvlab.reproduce import findings
from curvlab.reproduce import run as reproduction
from tests.adversarial.damage import DAMAGE, store_of
from tests.adversarial.outcomes import HangError, Judge, time_limit

SUITE = "damaged folders"
pytestmark = pytest.mark.slow  # short each, long together
DATA = "synthetic[features=5,classes=3,examples=30]"
SMALL = ["--arch", "5-4-3", "--data", DATA, "--batch", "10", "--device", "cpu", "--quiet"]
ONE_SCENE = ["--at", "init", "--batches", "1"]
STUDY = f'data = "{DATA}"\narch = "5-4-3"\nepochs = 1\npairs = ["sgd"]\nlr = [0.1, 0.2]\nbatch = [10]\n'
COMMANDS = {
    "compare": ["compare", *SMALL, *ONE_SCENE, "-p", "fisher", "-s", "kfi", "-s", "cg", "-r", "2"],
    "train": ["train", *SMALL, "--epochs", "2"],
    "reproduce": ["reproduce", "grid", "--study", "study.toml", "--device", "cpu", "--quiet"],
}
ITEMS = [(study, name) for study, table in DAMAGE.items() for name in table]


def call(*words: str) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(main, [*words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each study, and what the study reads."""
    base = tmp_path_factory.mktemp("finished")
    (base / "study.toml").write_text(STUDY)
    here = Path.cwd()
    os.chdir(base)
    try:
        for study, words in COMMANDS.items():
            done = call(*words, "-o", study)
            assert done.exit_code == 0, done.output
    finally:
        os.chdir(here)
    return base


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a store; none where it cannot be read as a file."""
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def parsed(text: bytes) -> dict[str, object]:
    """The row of a line; empty where it is none."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("key"), str) else {}


def measured(folder: Path) -> dict[str, set[str]]:
    """What the run has measured, times aside: the identities of its rows, and the losses of its epochs."""
    rows = [row for text in whole_lines(store_of(folder)) if (row := parsed(text))]
    own = [row for row in rows if row.get("kind") not in ("scale", "environment")]
    identities = {json.dumps([row.get(n) for n in ("kind", "key", "repetition")]) for row in own}
    losses = {json.dumps([row["key"], row.get("test_loss")]) for row in rows if row.get("kind") == "epoch"}
    return {"rows": identities, "losses": losses}


def judged(result: Result, before: Path, after: Path, valid: list[bytes]) -> tuple[str, str]:
    """The outcome: `before` is the run as it was, `valid` its rows that the damage left whole."""
    if not isinstance(result.exception, SystemExit | None):
        return "traceback", "".join(traceback.format_exception(result.exception)[-6:])
    kept = whole_lines(store_of(after))
    lost = [text for text in valid if text not in kept]
    if lost:
        return "lost", f"{lost[0]!r} of {len(lost)}; {result.output[-400:]}"
    if (after.parent / "unpickled").exists():
        return "silent", "a pickle was run"
    if result.exit_code in (1, 2):
        said = "Error: " in result.stderr and str(after.name) in result.stderr
        return ("refused", "") if said else ("silent", f"no sentence that names the folder: {result.output}")
    if result.exit_code:
        return "silent", f"exit code {result.exit_code}: {result.output}"
    wanted, found = measured(before), measured(after)
    missing = [name for name in wanted if not wanted[name] <= found[name]]
    return ("silent", f"{missing} are not as they were") if missing else ("held", "")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pages and figures out: drawing them takes seconds, and they are made from the frames."""
    monkeypatch.setattr(compare_command, "_write_report", lambda compared, folder: folder / "report.html")
    monkeypatch.setattr(train_command, "_learning_curve", lambda frame, title: b"")
    for module in (reproduction, findings):
        monkeypatch.setattr(module, "write_pages", lambda content, folder, *name: folder / "report.html")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("study", "name"), ITEMS, ids=[f"{study}: {name}" for study, name in ITEMS])
def test_a_damaged_folder_is_resumed_or_refused(
    study: str, name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Judge
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    commands = [[*COMMANDS[study], "-o"]] + ([["report", "--quiet"]] if study == "compare" else [])
    for words in commands:
        folder = tmp_path / f"{words[0]}-of-{study}"
        shutil.copytree(finished / study, folder)
        before = whole_lines(store_of(folder))
        DAMAGE[study][name](folder)
        valid = [text for text in whole_lines(store_of(folder)) if text in before]
        damaged = tmp_path / f"{words[0]}-as-damaged"
        damaged.mkdir()
        (damaged / "results.jsonl").write_bytes(b"".join(whole_lines(store_of(folder))))
        try:
            with time_limit():
                result = call(*words, str(folder))
        except HangError as error:
            judge(SUITE, "hang", f"{words[0]}: {error}")
        held = damaged if words[0] == "report" else finished / study  # a report only reads
        outcome, why = judged(result, held, folder, valid)
        judge(SUITE, outcome, f"{words[0]}: {why}")


def test_there_are_as_many_as_promised() -> None:
    assert len(ITEMS) >= 37
