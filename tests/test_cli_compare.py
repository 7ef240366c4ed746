"""The commands that compare, plan, list, report and merge: output, exit codes, and what mistakes say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

from curvlab.cli import COMMANDS, main
from curvlab.cli.compare import WRITTEN
from curvlab.cli.console import table
from curvlab.cli.list_ import KINDS
from curvlab.exceptions import SpecError
from curvlab.studies.compare import run as run_module

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_pages")]

TINY = ["--arch", "6-4-3", "--data", "synthetic[features=6,classes=3,examples=50]", "--batch", "20"]
ONE_SCENE = ["--at", "init", "--batches", "1"]
CELLS = ["-p", "fisher", "-p", "pch-1", "-s", "kfi", "-s", "ea-cg[max_iter=2]", "-r", "1"]


def call(*arguments: str | Path, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def first(folder) -> Result:
    return call("compare", *TINY, *CELLS, "-o", folder / "run")


def test_compare_prints_a_table_within_80_columns_and_where_the_report_is(first, folder):
    assert first.exit_code == 0, first.output
    assert f"Report: {folder / 'run' / 'report.html'}" in first.stdout
    table = [line for line in first.stdout.splitlines() if "Report:" not in line]
    assert max(len(line) for line in table) <= 80
    for word in ("fisher", "pch-1", "ea-cg[max_iter=2]", "kfi", " ms", "kB"):
        assert word in first.stdout
    for name in (
        "results.jsonl",
        "results.csv",
        "config.toml",
        "environment.json",
        "report.html",
        "report.md",
    ):
        assert (folder / "run" / name).is_file()
    assert list((folder / "run" / "figures").iterdir())


def test_the_table_says_what_its_errors_are(first):
    said = " ".join(first.stdout.split())
    assert "vs |H|: how far the provider's bias blocks are from those of the absolute Hessian" in said
    assert "Step: how far the pair's step is from the exact damped Newton step" in said
    assert "from the exact Hessian" not in said


def test_progress_is_not_written_where_there_is_no_terminal(first):
    assert first.stderr == ""


def test_json_is_one_document_on_standard_output_and_holds_the_store_s_numbers(first, folder):
    found = call("compare", *TINY, *CELLS, "-o", folder / "run", "--json")
    document = json.loads(found.stdout)
    rows = [json.loads(line) for line in (folder / "run" / "results.jsonl").read_text().splitlines()]
    # The first row of a pair is that of the first batch at the deciding point, which is the one measured.
    solved = {(row["provider"], row["solver"]): row for row in rows[::-1] if row["kind"] == "solve"}
    assert document["ok"]
    assert len(document["cells"]) == len(solved) == 4
    for cell in document["cells"]:
        for name in ("peak_bytes", "planned_bytes", "flops", "residual"):
            assert cell[name] == solved[cell["provider"], cell["solver"]][name]


def test_the_written_configuration_runs_again_to_the_same_cells(first, folder):
    again = call("compare", "--config", folder / "run" / "config.toml", "-o", folder / "run", "--json")
    rows = (folder / "run" / "results.jsonl").read_text().splitlines()
    assert again.exit_code == 0, again.output
    kinds = Counter(json.loads(line)["kind"] for line in rows)
    points, scenes, pairs = 2, 2 * 3, 4
    assert kinds == {
        "study": 1,
        "scene": scenes,
        "error": 2 * scenes,
        "solve": pairs * scenes,
        "control": 2 * scenes + 1,  # identity and newton in each, and what a step of sgd takes
        "cost": (pairs + 2) * points,
    }


def test_the_command_in_the_report_is_one_that_finds_every_row_again(first, folder):
    import shlex

    command = json.loads(call("report", folder / "run", "--json").stdout)["command"]
    before = (folder / "run" / "results.jsonl").read_text()
    again = call(*shlex.split(command)[1:], "-o", folder / "run", "--quiet")
    assert again.exit_code == 0
    assert (folder / "run" / "results.jsonl").read_text() == before


def test_quiet_prints_nothing(first, folder):
    found = call("compare", *TINY, *CELLS, "-o", folder / "run", "--quiet")
    assert (found.exit_code, found.output) == (0, "")


def test_report_renders_again_what_was_deleted(first, folder):
    (folder / "run" / "report.html").unlink()
    found = call("report", folder / "run")
    assert found.exit_code == 0
    assert (folder / "run" / "report.html").is_file()


def test_merge_joins_folders_and_report_shows_both(first, folder):
    other = call(
        "compare", *TINY, "-p", "gauss-newton", "-s", "kfi", "-r", "1", "-o", folder / "other", "--quiet"
    )
    assert other.exit_code == 0
    merged = call("merge", folder / "run", folder / "other", "-o", folder / "both")
    assert merged.exit_code == 0, merged.output
    assert "82 rows added, 19 were there already, 0 in conflict" in merged.stdout
    assert merged.stderr == ""
    document = json.loads(call("report", folder / "both", "--json").stdout)
    assert {cell["provider"] for cell in document["cells"]} == {"fisher", "pch-1", "gauss-newton"}


def test_a_skipped_pair_is_no_failure(folder):
    pairs = ["-p", "hessian", "-s", "kfi", "-s", "cg", "-r", "1"]
    found = call("compare", *TINY, *ONE_SCENE, *pairs, "-o", folder / "skipped")
    assert found.exit_code == 0, found.output
    assert "skipped" in found.stdout
    assert "matrix-free" in " ".join(found.stdout.split())


def test_a_comparison_of_which_every_pair_was_skipped_says_so_and_exits_with_1(folder):
    found = call("compare", *TINY, *ONE_SCENE, "-p", "hessian", "-s", "kfi", "-o", folder / "all-skipped")
    assert found.exit_code == 1
    assert "No pair was measured: every one was skipped or failed." in found.stderr
    reason = "matrix-free"
    assert reason in " ".join(found.stderr.split())
    assert reason not in found.stdout  # said once: a terminal shows both
    quiet = call("report", folder / "all-skipped", "--quiet")
    assert reason in " ".join(quiet.stderr.split())
    document = json.loads(call("report", folder / "all-skipped", "--json").stdout)
    assert not document["ok"]


def test_one_repetition_shows_no_spread(first):
    assert " ms" in first.stdout
    assert "±" not in first.stdout


def test_a_finished_comparison_says_that_nothing_was_measured_anew(first, folder):
    again = call("compare", *TINY, *CELLS, "-o", folder / "run")
    assert "Nothing was measured anew" in again.stderr
    assert "Nothing was measured anew" not in first.stderr
    more = call("compare", *TINY, *CELLS[:-1], "2", "-o", folder / "run")
    assert "Nothing was measured anew" not in more.stderr


def test_a_refused_provider_is_told_of_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("residual_study.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        x = torch.tanh(self.a(x))\n"
        "        return self.c(x + torch.tanh(self.b(x)))\n"
        "def batches():\n    return torch.ones(6, 4).cumsum(0), torch.tensor([0, 1, 0, 1, 0, 1])\n"
    )
    own = ["--model", "residual_study:Net", "--data", "residual_study:batches"]
    pairs = ["-p", "fisher", "-p", "pch[kind=recursive]", "-s", "kfi", "-s", "sm-kfi"]
    found = call("compare", *own, *ONE_SCENE, *pairs, "-r", "1", "-o", "out")
    assert found.exit_code == 0, found.output
    assert found.stdout.count("Left out") == 1


def test_a_failed_cell_gives_exit_code_1_and_its_reason(folder, monkeypatch):
    from curvlab.studies.compare import measurements

    def broken(*arguments: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(measurements, "usage", broken)
    found = call(
        "compare", *TINY, *ONE_SCENE, "-p", "fisher", "-s", "kfi", "-r", "1", "-o", folder / "failed"
    )
    assert found.exit_code == 1
    assert "fisher + kfi: RuntimeError: no such luck" in found.stderr
    assert "failed" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-p", "phc-1"], "Did you mean `pch-1`"),
        (["-s", "ea-cg[max_itr=3]"], "Did you mean `max_iter`"),
        (["-s", "cg[max_iter=-1]"], "must not be negative"),
        (["--arch", "20-10-3"], "20"),
        (["--arch", "digits-fcn"], "Did you mean `digits-fcnn`"),
        (["--arch", "64-foo-10"], "Widths joined by dashes, such as 64-32-10, are an architecture too"),
        (["--data", "digit"], "Did you mean `digits`"),
        (["--criterion", "crossentropy"], "Did you mean `cross-entropy`"),
        (["--alpha", "0"], "alpha=0.0: expected the identity's share, a number in (0, 1]"),
        (["--batch", "0"], "x>=1"),
        (["--device", "quantum"], "not a torch device"),
        (["-r", "0"], "x>=1"),
        (["--executor", "proces"], "Did you mean `process`"),
        (["--model", "nowhere.to:be"], "arch=`6-4-3` would change nothing: the model is your own"),
        (["--model", "nowhere.to:be", "--activation", "relu"], "and activation=`relu` would change nothing"),
        (["--criterion", "robust[delta=-1]"], "delta=-1.0 of `robust`: expected a finite number above 0"),
        (["--lr", "-1"], "lr=-1.0: a learning rate is a finite number above 0"),
        (["--lr", "0", "--epochs", "1"], "lr=0.0: a learning rate"),
        (["--lr", "nan", "--epochs", "1"], "lr=nan: a learning rate"),
        (["--lr", "inf", "--epochs", "1"], "lr=inf: a learning rate"),
        (["--baseline", "sdg", "--epochs", "1"], "Did you mean `sgd`"),
        (["--baseline", "sgd[lr=-1]", "--epochs", "1"], "lr=-1.0: a learning rate"),
        (["--baseline", "second-order[provider=phc-1]"], "Did you mean `pch-1`"),
        (["--config", "missing.toml"], "cannot read missing.toml"),
    ],
)
def test_usage_errors_are_a_sentence_and_exit_code_2(arguments, sentence, tmp_path):
    found = call("compare", *TINY, *arguments, "-o", tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert sentence in found.stderr
    assert "Traceback" not in found.output


def test_a_model_that_is_not_there_is_named(tmp_path):
    found = call("compare", "--model", "nowhere.to:be", "-o", tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert "nowhere" in found.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('provider = ["pch-1"]', "Did you mean `providers`"),
        ("alpha = 'much'", "`alpha` is 'much'; expected a number"),
        ("providers = [1]", "expected a list of names"),
        ("batch = true", "expected an integer"),
        ("alpha = ", "is not a TOML file"),
        ("[data]\nname = 'digits'", "is a table"),
    ],
)
def test_mistakes_in_a_configuration_file_are_sentences(text, sentence, tmp_path):
    (tmp_path / "study.toml").write_text(text)
    found = call("compare", "--config", tmp_path / "study.toml", "-o", tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert sentence in found.stderr


def test_options_win_over_the_configuration_file(tmp_path):
    (tmp_path / "study.toml").write_text(
        'providers = ["fisher"]\nsolvers = "kfi"\nbatch = 7\nrepetitions = 1'
    )
    found = call(
        "compare", *TINY, *ONE_SCENE, "--config", tmp_path / "study.toml", "-o", tmp_path / "out", "--json"
    )
    config = json.loads(found.stdout)["config"]
    assert (config["batch"], config["providers"], config["repetitions"]) == (20, ["fisher"], 1)


def test_an_unwritable_folder_is_said_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    found = call("compare", *TINY, "-o", tmp_path / "file" / "out")
    assert found.exit_code == 2
    assert "cannot write to the folder" in found.stderr


def test_a_folder_without_results_is_a_usage_error(tmp_path):
    for arguments in (["report", tmp_path], ["merge", tmp_path, "-o", tmp_path / "out"]):
        found = call(*arguments)
        assert found.exit_code == 2
        assert f"no results at {tmp_path}" in found.stderr


def test_a_training_run_is_no_comparison_to_report_which_is_a_usage_error(tmp_path):
    call("train", *TINY, "--epochs", "0", "--quiet", "-o", tmp_path)
    found = call("report", tmp_path)
    assert found.exit_code == 2
    assert "holds no comparison; name a folder that `curvlab compare` has written" in found.stderr


@pytest.mark.parametrize("command", ["compare", "train"])
def test_a_data_folder_that_is_not_there_is_a_usage_error(command, tmp_path):
    data = ["--data", "image-folder", "--data-dir", tmp_path / "no"]
    found = call(command, "--arch", "6-3", *data, "-o", tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert f"{tmp_path / 'no'}: no such folder; --data-dir names an existing folder" in found.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("compare", "--model"),
        ("train", "--model"),
        ("plan", "--model"),
        ("compare", "--data"),
        ("plan", "--data"),
    ],
)
def test_a_function_of_the_user_s_that_raises_is_a_sentence_and_exit_code_1(
    command, option, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "broken_study", raising=False)
    Path("broken_study.py").write_text("def build():\n    raise KeyError('width')\n")
    place = [] if command == "plan" else ["-o", "out"]
    rest = ["--data", TINY[3]] if option == "--model" else ["--arch", TINY[1]]
    found = call(command, *rest, option, "broken_study:build", *place)
    assert found.exit_code == 1, found.output
    assert "Traceback" not in found.output
    assert found.stderr.count("raised KeyError: 'width'. Correct it;") == 1
    assert f"{option.strip('-')} `broken_study:build`" in found.stderr
    assert 'python -c "import broken_study; broken_study.build()"' in found.stderr


def test_a_damaged_line_of_a_store_is_one_plain_line_on_standard_error(first, folder, tmp_path):
    lines = (folder / "run" / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(lines + '{"torn')
    found = call("report", tmp_path)
    assert found.exit_code == 0, found.output
    path = tmp_path / "results.jsonl"
    number = lines.count("\n") + 1
    assert found.stderr == f"Warning: {path}, line {number}: torn, it has no end; set aside\n"


def test_merge_names_the_folder_whose_rows_are_not_in_the_report(first, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("train", *TINY, "--epochs", "1", "--quiet", "-o", "trained")
    call("compare", *TINY, "--seed", "7", "-p", "fisher", "-s", "kfi", "-r", "1", "-o", "seven", "--quiet")
    found = call("merge", "trained", folder / "run", "seven", "-o", "all")
    assert found.exit_code == 0, found.output
    assert "2 rows of trained belong to no comparison" in found.stdout
    assert "38 rows of seven are of another problem or environment than" in found.stdout
    assert f"the comparison that {folder / 'run'} shows" in found.stdout
    assert "See them with: curvlab report seven" in found.stdout
    assert f"rows of {folder / 'run'}" not in found.stdout
    assert call("report", "all", "--quiet").exit_code == 0
    alone = call("merge", "trained", "-o", "none")
    assert "Render it with" not in alone.stdout


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from curvlab.cli import main
main(sys.argv[1:])
"""


def test_a_full_disk_is_a_sentence_and_leaves_a_store_that_resumes(tmp_path):
    arguments = ["compare", *TINY, *ONE_SCENE, *CELLS, "-o", str(tmp_path)]
    full = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True, check=False
    )
    assert full.returncode == 1, full.stderr
    assert "What was stored before is unchanged" in full.stderr
    assert "Traceback" not in full.stderr
    kept = (tmp_path / "results.jsonl").read_bytes()
    assert 0 < len(kept) <= 4096
    assert kept.endswith(b"\n")
    again = call(*arguments)
    assert again.exit_code == 0, again.output
    assert (tmp_path / "results.jsonl").read_bytes().startswith(kept)


def test_ctrl_c_says_how_to_go_on_and_the_rest_resumes(folder):
    arguments = ["compare", *TINY, *ONE_SCENE, "-p", "fisher", "-s", "kfi", "-o", str(folder / "stopped")]
    running = subprocess.Popen(
        [sys.executable, "-m", "curvlab", *arguments, "-r", "4000"], stderr=subprocess.PIPE, text=True
    )
    store = folder / "stopped" / "results.jsonl"
    while running.poll() is None and (not store.exists() or '"solve"' not in store.read_text()):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "the same command goes on from there" in said
    kept = store.read_text()
    assert call(*arguments, "-r", "1", "--quiet").exit_code == 0
    assert store.read_text().startswith(kept)


def test_plan_says_what_fits_within_80_columns():
    found = call(
        "plan", "--arch", "20000-8-3", "--batch", "10", "-p", "fisher", "-s", "kfi", "--memory", "100MB"
    )
    assert found.exit_code == 0, found.output
    assert max(len(line) for line in found.stdout.splitlines()) <= 80
    rows = [line.split() for line in found.stdout.splitlines() if line.split()[:2] == ["fisher", "kfi"]]
    assert [row[-1] for row in rows] == ["yes", "no"]
    assert "Does not fit 100 MB: fisher + kfi (textbook)" in found.stdout
    assert "20000×20000" in found.stdout


def test_plan_breaks_no_name_at_80_columns():
    found = call("plan", *TINY, "-p", "gauss-newton", "-s", "sm-kfi", "-s", "ea-cg", "--memory", "1GB")
    heads = [line.split() for line in found.stdout.splitlines() if "Provider" in line]
    assert heads == [["Provider", "Solver", "Peak", "Held", "Operations", "Fits"]] * 2
    names = [line.split()[:2] for line in found.stdout.splitlines() if "gauss-newton" in line]
    assert names == [["gauss-newton", "sm-kfi"], ["gauss-newton", "ea-cg"]] * 2


def test_a_long_name_goes_on_in_the_next_line_and_numbers_stay_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "44")
    table({"Solver": "name", "Seconds": "right"}, [["ea-cg[max_iter=20,tol=1e-10]", "12.3 ± 0.4 ms"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert " ea-cg[max_iter=20,   12.3 ± 0.4 ms" in lines
    assert " tol=1e-10]" in lines
    monkeypatch.setenv("COLUMNS", "20")
    table({"Solver": "name", "Seconds": "right"}, [["ea-cg[max_iter=20,tol=1e-10]", "12.3 ± 0.4 ms"]])
    assert "12.3 ± 0.4 ms" in capsys.readouterr().out


def test_plan_prints_json(tmp_path):
    document = json.loads(call("plan", *TINY, "-p", "fisher", "-s", "kfi", "--json").stdout)
    assert [cell["form"] for cell in document["cells"]] == ["sample-space", "textbook"]
    assert call("plan", *TINY, "--memory", "lots").exit_code == 2


def test_list_shows_every_registry_and_the_pairs_within_80_columns():
    found = call("list")
    assert found.exit_code == 0
    assert max(len(line) for line in found.stdout.splitlines()) <= 80
    for word in (
        "pch-1",
        "ea-cg",
        "max_iter=20",
        "tukey",
        "imagenet10-fcnn",
        "cifar10",
        "Pairs that exist",
        "process",
    ):
        assert word in found.stdout
    document = json.loads(call("list", "--json").stdout)
    assert document["pairs"]["hessian"] == {
        "cg": True,
        "ea-cg": False,
        "exact": False,
        "kfi": False,
        "sm-kfi": False,
    }
    assert call("list", "solvers").stdout.count("Name") == 1


def test_help_of_curvlab_itself_keeps_its_lines_within_80_columns():
    found = call("--help")
    assert "\\b" not in found.stdout
    assert "  Start with:\n    curvlab compare\n" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_each_example_on_a_line_of_its_own_within_80_columns(command):
    found = call(command, "--help")
    assert found.exit_code == 0
    assert "\\b" not in found.stdout
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    examples = lines[lines.index("  Examples:") + 1 :]
    examples = examples[: examples.index("")]
    assert any(line.startswith(f"    curvlab {command}") for line in examples)
    assert all(line.count("curvlab ") <= 1 for line in examples)


def test_the_help_of_list_names_every_kind_that_it_takes():
    words = call("list", "--help").stdout.replace(",", " ").split()
    assert set(KINDS) <= set(words)


def test_models_data_and_criteria_of_the_user_s_own_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("own_study.py").write_text(
        "import torch\n"
        "from torch.nn import Linear, Sequential, Tanh\n"
        "def build():\n    return Sequential(Linear(4, 3), Tanh(), Linear(3, 2))\n"
        "def batches():\n    return torch.ones(6, 4).cumsum(0), torch.tensor([0, 1, 0, 1, 0, 1])\n"
        "huber = torch.nn.CrossEntropyLoss(label_smoothing=0.1)\n"
    )
    own = ["--model", "own_study:build", "--data", "own_study:batches", "--criterion", "own_study:huber"]
    arguments = ["compare", *own, *ONE_SCENE, "-p", "fisher", "-s", "kfi", "-r", "1", "-o", "out"]
    found = call(*arguments)
    assert found.exit_code == 0, found.output
    rows = Path("out/results.jsonl").read_text()
    assert call(*arguments, "--quiet").exit_code == 0
    assert Path("out/results.jsonl").read_text() == rows
    assert call(*arguments, "--epochs", "1").exit_code == 2
    assert "\nbatch =" not in Path("out/config.toml").read_text()
    again = call("compare", "--config", "out/config.toml", "-o", "out", "--quiet")
    assert (again.exit_code, Path("out/results.jsonl").read_text()) == (0, rows)
    ignored = call(*arguments, "--batch", "3", "--data-dir", "here")
    assert ignored.exit_code == 2
    assert "--batch 3 and --data-dir here would change nothing: the batches are your own" in ignored.stderr


def test_a_loss_class_of_torch_is_a_criterion_by_its_address(tmp_path):
    data = ["--arch", "6-4-2", "--data", "synthetic-regression[features=6,outputs=2,examples=50]"]
    few = ["--at", "init", "--batches", "1", "--alphas", "0.5", "-p", "gauss-newton", "-s", "kfi", "-r", "1"]
    found = call("compare", *data, *few, "--criterion", "torch.nn:HuberLoss", "-o", tmp_path / "run")
    assert found.exit_code == 0, found.output
    assert "--criterion torch.nn:HuberLoss" in (tmp_path / "run" / "report.md").read_text()


def test_a_folder_with_other_files_is_told_what_comes_beside_them(tmp_path, monkeypatch):
    stopped = SpecError("stopped here")
    monkeypatch.setattr(run_module, "run_comparison", Mock(side_effect=stopped))
    (tmp_path / "train.py").write_text("")
    found = call("compare", *TINY, "-o", tmp_path)
    assert f"{tmp_path} has other files (train.py)" in found.stderr
    assert all(name in found.stderr for name in WRITTEN)
    assert f"-o {tmp_path / 'compare'}" in found.stderr
    (tmp_path / "results.jsonl").write_text("")
    assert "other files" not in call("compare", *TINY, "-o", tmp_path).stderr
    assert "other files" not in call("compare", *TINY, "-o", tmp_path / "new").stderr


def test_what_is_said_to_be_written_is_what_is_written(first, folder):
    held = {path.name + "/" * path.is_dir() for path in (folder / "run").iterdir() if path.name[0] != "."}
    assert held == set(WRITTEN)


def test_a_conflict_of_a_merge_is_named_by_its_optimizer_too(tmp_path):
    for seconds, name in enumerate(("one", "two")):
        told = {"study": "s", "provider": "", "solver": "", "status": "ok", "message": ""}
        row = {"key": "k", "kind": "convergence", "optimizer": "adam", "seconds": seconds, **told}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text(json.dumps(row) + "\n")
    found = call("merge", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "both", "--quiet")
    assert found.stderr == "conflict: convergence adam was measured twice; the first is kept\n"
