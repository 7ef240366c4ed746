"""Which code measured a row: the hash of the source, commits read as files, and what is measured again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

import curvlab
from curvlab.cli import main
from curvlab.exceptions import ExecutorError
from curvlab.measure import environment as sources
from curvlab.measure.environment import environment
from curvlab.report.tables import mapping_table
from curvlab.reproduce.findings import write_findings
from curvlab.reproduce.grid_study import GridStudy
from curvlab.reproduce.run import reproduce
from curvlab.reproduce.subjects import Options
from curvlab.studies.compare import measurements
from curvlab.studies.compare.run import compare, load_comparison
from curvlab.studies.compare.settings import Settings
from curvlab.studies.compare.tasks import first_tasks
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from curvlab.studies.train.run import TrainPlan, train
from tests.cases import ONE_SCENE

pytestmark = pytest.mark.usefixtures("plain_pages")

ROOT = Path(__file__).parent.parent
TINY = Setup(arch="6-4-3", data="synthetic[features=6,classes=3,examples=50]", batch=20, dtype="float64")
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="makes repositories with git")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *IDENTITY, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "topic/one")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


@pytest.fixture
def as_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let curvlab's source have another hash from now on."""

    def change(found: str) -> None:
        monkeypatch.setattr(sources, "tree_hash", lambda folder: found)
        sources.source_hash.cache_clear()

    yield change
    sources.source_hash.cache_clear()


# Commits


@needs_git
def test_reading_the_environment_runs_nothing_of_the_working_folder(repository, tmp_path, monkeypatch):
    trace = tmp_path / "ran"
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\necho ran >> '{trace}'\n")
    hook.chmod(0o755)
    for name in ("core.fsmonitor", "core.pager", "core.sshCommand"):
        git(repository, "config", name, str(hook))
    git(repository, "config", "core.hooksPath", str(tmp_path))
    monkeypatch.chdir(repository)
    found = environment()
    assert not trace.exists()
    monkeypatch.delenv("PATH")  # no git to be found, nor needed
    assert environment() == found
    subprocess.run([shutil.which("git", path=os.defpath) or "/usr/bin/git", "status"], capture_output=True)
    assert trace.exists(), "the trap does not work: git itself did not run it"


@needs_git
def test_the_commit_is_that_of_git_in_every_kind_of_checkout(repository, tmp_path):
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "a" / "b").mkdir(parents=True)
    assert sources.commit_of(repository) == commit
    assert sources.commit_of(repository / "a" / "b") == commit
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "second")
    second = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert sources.commit_of(tmp_path / "tree") == second != commit
    git(repository, "pack-refs", "--all")
    assert not list((repository / ".git" / "refs" / "heads").rglob("other"))
    assert sources.commit_of(repository) == commit
    assert sources.commit_of(tmp_path / "tree") == second
    git(repository, "checkout", "-q", "--detach", second)
    assert sources.commit_of(repository) == second
    git(repository, "checkout", "-q", "--orphan", "empty")
    assert sources.commit_of(repository) is None


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"HEAD": "ref: refs/heads/gone"},
        {"HEAD": "ref: refs/../../secret", "../secret": "a" * 40},
        {"HEAD": "ref: ../secret", "../secret": "a" * 40},
        {"HEAD": "no commit"},
        {"HEAD": "ref: refs/heads/loop", "refs/heads/loop": "ref: refs/heads/loop"},
        {"HEAD": b"\xff\xfe\x00"},
        {"HEAD": "ref: refs/heads/a\0b"},
        {"commondir": "\0", "HEAD": "ref: refs/heads/main"},
    ],
)
def test_what_is_no_commit_is_none(files, tmp_path):
    for name, content in files.items():
        path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / ".git").mkdir(exist_ok=True)
    assert sources.commit_of(tmp_path) is None


@pytest.mark.parametrize("text", ["gitdir: nowhere", "gitdir: ", "", "\0", "gitdir: a\0b"])
def test_a_git_file_that_leads_nowhere_is_none(text, tmp_path):
    (tmp_path / ".git").write_text(text)
    assert sources.commit_of(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    assert sources.commit_of(tmp_path) is None


@needs_git
def test_the_commit_of_the_source_is_not_that_of_a_repository_around_an_installed_copy(
    repository, monkeypatch
):
    package = repository / ".venv" / "curvlab"
    package.mkdir(parents=True)
    monkeypatch.setattr(sources, "PACKAGE", package)
    assert sources.source_commit.__wrapped__() is None
    monkeypatch.setattr(sources, "PACKAGE", repository / "curvlab")
    (repository / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    assert sources.source_commit.__wrapped__() is None
    (repository / "pyproject.toml").write_text('[project]\nname = "curvlab"\n')
    assert sources.source_commit.__wrapped__() == git(repository, "rev-parse", "HEAD")


@needs_git
def test_the_environment_tells_curvlabs_source_from_the_working_folder(repository, monkeypatch):
    monkeypatch.chdir(repository)
    found = json.loads(json.dumps(environment()))
    assert found["git"] == {"commit": git(repository, "rev-parse", "HEAD")}
    assert found["source_commit"] != found["git"]["commit"]
    assert found["source"] == sources.source_hash()
    assert found["versions"]["curvlab"] == curvlab.__version__


@pytest.mark.parametrize("state", [None, {"commit": "a" * 40}, {"commit": "a" * 40, "dirty": True}])
def test_pages_show_the_git_state_of_old_and_new_files(state):
    shown = {row[0].text: row[1].text for row in mapping_table("", {"python": "3", "git": state}).rows}
    expected = {} if state is None else {"git.commit": "a" * 40}
    expected |= {"git.dirty": "yes"} if state and "dirty" in state else {}
    assert shown == {"python": "3"} | expected


# The hash


def test_the_hash_depends_on_names_and_contents_of_source_files_alone(tmp_path):
    def tree(name: str, files: dict[str, str]) -> str:
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(content.encode())
        return sources.tree_hash(tmp_path / name)

    files = {"a.py": "x = 1\n", "b/c.py": "", "b/page.j2": "{{ x }}", "t.csv": "1,2\n"}
    first = tree("first", files)
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert tree("again", dict(reversed(files.items()))) == first
    assert tree("windows", {**files, "a.py": "x = 1\r\n"}) == first
    junk = {"__pycache__/a.cpython-311.pyc": "x", ".a.py": "x", "b/notes.txt": "x", "a.py~": "x"}
    assert tree("junk", files | junk) == first
    changed = [
        {**files, "a.py": "x = 2\n"},
        {**files, "t.csv": "1,3\n"},
        {**files, "b/page.j2": "{{ y }}"},
        {**files, "b/d.py": ""},
        {"a.py": "", "b/c.py": "x = 1\n", "b/page.j2": "{{ x }}", "t.csv": "1,2\n"},
        {name: content for name, content in files.items() if name != "b/c.py"},
    ]
    hashes = [tree(f"changed{number}", version) for number, version in enumerate(changed)]
    assert len({first, *hashes}) == len(changed) + 1


def test_the_hash_covers_what_a_wheel_holds():
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = described["tool"]["setuptools"]["package-data"]["curvlab"]
    assert {Path(pattern).suffix for pattern in patterns} | {".py"} == sources.SUFFIXES


@pytest.mark.slow
def test_the_hash_is_not_computed_on_import_and_once_in_a_process():
    check = (
        "import curvlab, curvlab.studies.compare.run, curvlab.studies.train.run\n"
        "from curvlab.measure import environment\n"
        "assert environment.source_hash.cache_info().currsize == 0\n"
        "environment.source_hash(); environment.source_hash()\n"
        "assert environment.source_hash.cache_info().misses == 1\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_the_command_prints_the_version_of_the_source():
    assert CliRunner().invoke(main, ["--version"]).stdout.split()[-1] == curvlab.__version__
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# What a change of the code repeats


def measured(folder: Path) -> pd.DataFrame:
    return Store(folder, read_only=True).frame()


@pytest.mark.slow
def test_compare_measures_again_what_another_source_measured(tmp_path, as_source):
    as_source("a" * 16)
    ask = ONE_SCENE | {"repetitions": 1, "epochs": 1, "tune": False, "train_seeds": 1}
    compare(TINY, ["fisher"], ["kfi"], output=tmp_path, **ask)
    first = measured(tmp_path)
    assert set(first["source"]) == {"a" * 16}
    assert set(first["kind"]) >= {"study", "error", "solve", "cost", "tuning", "convergence"}
    compare(TINY, ["fisher"], ["kfi"], output=tmp_path, **ask)
    assert len(measured(tmp_path)) == len(first)
    as_source("b" * 16)
    counts: list[int] = []
    follow = {"on_progress": lambda progress: counts.append(progress.total)}
    compare(TINY, ["fisher"], ["kfi"], output=tmp_path, **ask, **follow)
    assert set(counts) == {len(first) - 1}
    rows = measured(tmp_path)
    assert rows["source"].tolist() == ["a" * 16] * len(first) + ["b" * 16] * len(first)
    shown = load_comparison(tmp_path)
    assert shown.environment["source"] == "b" * 16
    assert (shown.repetitions["solver"] == "kfi").sum() == 1


@pytest.mark.slow
def test_compare_measures_again_what_does_not_say_its_source(tmp_path):
    """The rows of a curvlab that knew of no hash."""
    compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path)
    old = write_old_rows(tmp_path)
    assert CliRunner().invoke(main, ["report", str(tmp_path), "--quiet"]).exit_code == 0
    assert load_comparison(tmp_path).cells["status"].tolist() == ["ok"]
    page = (tmp_path / "report.md").read_text()
    assert "| git.dirty | yes |" in page
    compare(TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path)
    assert len(measured(tmp_path)) == 2 * len(old)


def write_old_rows(folder: Path) -> list[str]:
    path = folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    study = rows[0]["study"]
    lines = []
    for row in rows:
        row.pop("source")
        row["key"] = row["key"] if row["kind"] == "study" else row["key"][::-1]
        if row["kind"] == "study":
            row["environment"] |= {"git": {"commit": "a" * 40, "dirty": True}}
            row["environment"].pop("source")
            row["environment"].pop("source_commit")
        lines.append(json.dumps(row).replace(study, "0123456789abcdef"))
    path.write_text("".join(f"{line}\n" for line in lines))
    described = (folder / "environment.json").read_text().replace(study, "0123456789abcdef")
    (folder / "environment.json").write_text(described)
    return lines


def test_a_worker_with_another_source_measures_nothing(as_source):
    (task, *_) = first_tasks(Settings.of(TINY, providers=("fisher",), solvers=("kfi",)))
    as_source("b" * 16)
    row = measurements.run_task(task)
    assert row["status"] == "failed"
    assert f"another curvlab (source {'b' * 16})" in row["message"]
    assert f"than the study (source {task.head['source']})" in row["message"]
    with pytest.raises(ExecutorError):
        measurements._check_source(task)


@pytest.mark.slow
def test_train_goes_on_after_a_change_of_the_source_and_names_both(tmp_path, as_source):
    words = ["train", "--data", "digits[train=100,test=50]", "--batch", "50", "-o", str(tmp_path)]
    as_source("a" * 16)
    first = CliRunner().invoke(main, [*words, "--epochs", "1"])
    assert first.exit_code == 0, first.output
    assert "states of curvlab's source" not in first.stderr
    kept = (tmp_path / "results.jsonl").read_text()
    as_source("b" * 16)
    again = CliRunner().invoke(main, [*words, "--epochs", "2"])
    assert again.exit_code == 0, again.output
    assert f"2 states of curvlab's source: {'a' * 16}, {'b' * 16}." in again.stderr
    assert (tmp_path / "results.jsonl").read_text().startswith(kept)
    assert measured(tmp_path)["source"].tolist() == ["a" * 16] * 2 + ["b" * 16]
    assert pd.read_csv(tmp_path / "metrics.csv")["source"].tolist() == ["a" * 16] * 2 + ["b" * 16]


@pytest.mark.slow
def test_a_run_whose_first_rows_name_no_source_goes_on(tmp_path, as_source, monkeypatch):
    from curvlab.studies.train.run import TrainRun

    plan = TrainPlan(Setup(data="digits[train=100,test=50]", batch=50), epochs=1)
    close = TrainRun._close

    def close_as_before(run: TrainRun, *arguments: object) -> None:
        close(run, *arguments)
        run.rows[-1].pop("source")

    with monkeypatch.context() as patch:
        patch.setattr(TrainRun, "_close", close_as_before)
        train(plan, tmp_path)
    as_source("b" * 16)
    words = ["train", "--data", "digits[train=100,test=50]", "--batch", "50", "-o", str(tmp_path)]
    again = CliRunner().invoke(main, [*words, "--epochs", "2"])
    assert again.exit_code == 0, again.output
    assert f"2 states of curvlab's source: not recorded, {'b' * 16}." in again.stderr


def test_reproduce_goes_on_after_a_change_of_the_source_and_its_pages_name_both(tmp_path, as_source):
    study = GridStudy(data="digits[train=60,test=30]", arch="64-8-10", epochs=1, evaluate_examples=30,
                      pairs=("sgd",), lr=(0.05, 0.2), batch=(30,), alpha=(0.1,))  # fmt: skip
    as_source("a" * 16)
    part = reproduce("grid", Options("smoke", study=study.only({"lr": (0.05,)})), tmp_path)
    assert "states of curvlab's source" not in part.read_text()
    store = tmp_path / "grid" / "work"
    kept = (store / "results.jsonl").read_text()
    as_source("b" * 16)
    page = reproduce("grid", Options("smoke", study=study), tmp_path)
    for text in (page.read_text(), page.with_suffix(".md").read_text()):
        assert f"2 states of curvlab{'&#39;' if '<html' in text else chr(39)}s source: " in text
        assert "a" * 16 in text
        assert "b" * 16 in text
    assert (store / "results.jsonl").read_text().startswith(kept)
    epochs = Store(store, read_only=True).frame("epoch")
    assert epochs["source"].tolist() == ["a" * 16] * 2 + ["b" * 16] * 2


@pytest.mark.long
def test_every_kind_of_row_that_reproduce_measures_names_its_source(tmp_path, monkeypatch, as_source):
    from curvlab.reproduce import error_tables as error_table
    from curvlab.reproduce import growth_table
    from curvlab.reproduce.error_tables import Length
    from curvlab.reproduce.error_trajectory import Sampling
    from curvlab.reproduce.growth_points import GrowthTask
    from curvlab.reproduce.growth_sweeps import Sizes

    monkeypatch.setitem(error_table.LENGTHS, ("smoke", "cifar10"), Length(2, (Sampling(20, 2),), (0,)))
    tasks = [GrowthTask("solve", "kfi", "textbook", "inputs", Sizes(8, n, 16), 1) for n in (16, 32, 64)]
    monkeypatch.setattr(growth_table, "growth_tasks", lambda scale: tasks)
    as_source("a" * 16)
    for name in ("table2", "table1"):
        reproduce(name, Options("smoke"), tmp_path)
        rows = Store(tmp_path / name / "work", read_only=True).rows()
        found = [row for row in rows if row["kind"] not in ("scale", "environment")]
        assert found
        assert {row.get("source") for row in found} == {"a" * 16}
    as_source("b" * 16)
    monkeypatch.setitem(error_table.LENGTHS, ("smoke", "cifar10"), Length(4, (Sampling(20, 2),), (0,)))
    reproduce("table2", Options("smoke"), tmp_path)
    findings = write_findings(tmp_path, Options("smoke")).with_suffix(".md").read_text()
    assert f"2 states of curvlab's source: {'a' * 16}, {'b' * 16}." in findings
