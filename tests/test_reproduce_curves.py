"""The figures, the grid search, the findings and the command: what is run, ranked, judged and written."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from curvlab.cli import main
from curvlab.exceptions import SpecError
from curvlab.reproduce import curve_figures as curve_figure
from curvlab.reproduce import error_tables as error_table
from curvlab.reproduce.curve_claims import (
    best_claim,
    level_claim,
    no_dearer_claim,
    run_table,
    same_time_claim,
    solver_claim,
)
from curvlab.reproduce.curve_figures import Extent
from curvlab.reproduce.error_tables import Length
from curvlab.reproduce.error_trajectory import Sampling
from curvlab.reproduce.experiments import claims, experiment_named, experiments
from curvlab.reproduce.findings import write_findings
from curvlab.reproduce.grid_search import embedded_study, ranked_frame
from curvlab.reproduce.grid_study import GridStudy, parse_only
from curvlab.reproduce.run import reproduce
from curvlab.reproduce.subjects import Options, subject
from curvlab.studies.store import Store

SMOKE = Options("smoke")
TINY = GridStudy(
    data="digits[train=60,test=30]",
    arch="64-8-10",
    epochs=1,
    evaluate_examples=30,
    pairs=("fisher + kfi", "sgd"),
    lr=(0.05, 0.2),
    batch=(30,),
    alpha=(0.1,),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every experiment in its smallest form."""
    for role in ("cifar10", "imagenet10"):
        monkeypatch.setitem(error_table.LENGTHS, ("smoke", role), Length(4, (Sampling(20, 2),), (0, 1)))
        monkeypatch.setitem(curve_figure.EXTENTS, ("smoke", role), Extent(1, (0,), evaluated=50))


def curves(**losses: list[float]) -> pd.DataFrame:
    """One run per optimizer, one epoch per second; accuracy falls with the loss."""
    rows = []
    for name, values in losses.items():
        provider, _, solver = name.partition("__")
        for epoch, loss in enumerate(values):
            rows.append(
                {"criterion": "cross-entropy", "seed": 0, "optimizer": name, "epoch": epoch, "status": "ok",
                 "provider": provider.replace("_", "-") if solver else "", "solver": solver.replace("_", "-"),
                 "train_loss": loss, "test_accuracy": 1 - loss / 4, "cpu_seconds": float(epoch)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def test_equal_time_is_that_of_the_quickest_run() -> None:
    frame = curves(a__kfi=[2.0, 1.0, 0.5], b__kfi=[2.0, 1.6])
    assert run_table(frame)["loss_at_time"].tolist() == [1.0, 1.6]


def test_a_run_that_did_not_finish_wins_nothing() -> None:
    frame = curves(a__kfi=[2.0, 0.1], a__ea_cg=[2.0, 1.0])
    frame.loc[1, ["status", "train_loss", "test_accuracy"]] = ["diverged", float("nan"), float("nan")]
    claim = solver_claim("KFI is lower.", "loss", "kfi", "ea-cg")
    assert claim.judge({"curves": frame}).verdict == "does not hold"


@pytest.mark.parametrize(
    ("fisher", "pch", "verdict"),
    [(1.0, 1.0, "holds"), (1.0, 2.5, "mixed"), (2.5, 2.5, "does not hold"), (1.96, 1.96, "does not hold")],
)
def test_a_solver_is_better_with_all_some_or_no_curvatures(fisher: float, pch: float, verdict: str) -> None:
    frame = curves(fisher__ea_cg=[3.0, fisher], fisher__kfi=[3.0, 2.0], pch_1__ea_cg=[3.0, pch],
                   pch_1__kfi=[3.0, 2.0])  # fmt: skip
    claim = solver_claim("EA-CG is lower.", "loss", "ea-cg", "kfi")
    assert claim.judge({"curves": frame}).verdict == verdict


def test_the_best_may_be_level_with_what_the_paper_names() -> None:
    def verdict(loss: float) -> str:
        frame = curves(fisher__ea_cg=[3.0, loss], pch_1__kfi=[3.0, 1.0])
        claim = best_claim("Fisher with EA-CG.", "loss", ["fisher__ea_cg"], lambda table: table)
        return claim.judge({"curves": frame}).verdict

    assert [verdict(0.9), verdict(1.03), verdict(1.2)] == ["holds", "mixed", "does not hold"]


def test_runs_that_stay_on_the_plateau_say_nothing_of_each_other() -> None:
    stuck = curves(a__kfi=[2.5, 2.3], a__ea_cg=[2.5, 2.29])
    for claim in (
        solver_claim("KFI is lower.", "loss", "kfi", "ea-cg"),
        best_claim("a.", "accuracy", ["a__kfi"], lambda table: table),
        level_claim("Alike.", "loss", lambda table: table),
    ):
        assert claim.judge({"curves": stuck}).verdict == "not measured"
    one_left = curves(a__kfi=[2.5, 2.3], a__ea_cg=[2.5, 2.0])
    assert (
        solver_claim("EA-CG is lower.", "loss", "ea-cg", "kfi").judge({"curves": one_left}).verdict == "holds"
    )


def test_times_are_compared_with_the_same_curvature_and_with_the_baseline() -> None:
    frame = curves(
        sgd=[2.0, 2.0], a__kfi=[2.0, 1.0], a__ea_cg=[2.0, 1.0], b__kfi=[2.0, 1.0, 1.0], b__ea_cg=[2.0, 1.0]
    )
    assert same_time_claim("Alike.", "ea-cg", "kfi").judge({"curves": frame}).verdict == "mixed"
    assert no_dearer_claim("As fast.", "sgd").judge({"curves": frame}).verdict == "mixed"
    assert (
        no_dearer_claim("As fast.", "sgd").judge({"curves": frame[frame["provider"] != "b"]}).verdict
        == "holds"
    )


def test_accuracies_within_a_point_are_level() -> None:
    def verdict(loss: float) -> str:
        frame = curves(a__kfi=[3.0, 1.0], b__kfi=[3.0, loss])
        return level_claim("Alike.", "accuracy", lambda table: table).judge({"curves": frame}).verdict

    assert [verdict(1.03), verdict(1.05)] == ["holds", "does not hold"]


@pytest.mark.slow
def test_the_papers_grid_is_whole() -> None:
    study = embedded_study("paper")
    counts = pd.Series(
        [plan.labels()["optimizer"].partition("[")[0] for plan in study.plans()]
    ).value_counts()
    assert counts.to_dict() == {
        "fisher + ea-cg": 576, "gauss-newton + ea-cg": 576, "pch-1 + ea-cg": 576,
        "fisher + kfi": 36, "gauss-newton + kfi": 36, "pch-1 + kfi": 36, "sgd": 9,
    }  # fmt: skip
    assert len({plan.key for plan in study.plans()}) == len(study.plans())


def test_any_part_of_a_grid_can_be_asked_for() -> None:
    study = embedded_study("paper").only(parse_only(["lr=0.1,0.2", "batch=100", "tol=1e-10"]))
    assert (study.lr, study.batch, study.tol) == ((0.1, 0.2), (100,), (1e-10,))
    with pytest.raises(SpecError, match=r"lr=0.3 is not in the study, which has 0.1, 0.2"):
        study.only({"lr": [0.3]})
    for text in ("lr", "rate=1", "lr=a"):
        with pytest.raises(SpecError, match="--only"):
            parse_only([text])


def test_a_study_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('data = "digits"\nlearning_rate = [0.1]\n')
    with pytest.raises(SpecError, match="learning_rate"):
        GridStudy.read(path)
    path.write_text("lr = 0.1\n")
    with pytest.raises(SpecError, match=r"`lr` is 0.1; expected a list"):
        GridStudy.read(path)
    path.write_text('data = "digits"\npairs = ["sgd"]\nlr = [0.1]\nbatch = [50]\nepochs = 1\n')
    assert len(GridStudy.read(path).plans()) == 1


@pytest.mark.slow
def test_a_grid_runs_in_any_executor_resumes_and_is_ranked_by_training_loss(tmp_path: Path) -> None:
    options = Options("smoke", study=TINY)
    with ThreadPoolExecutor(2) as executor:
        page = reproduce("grid", options, tmp_path, executor=executor)
    frame = pd.read_csv(page.parent / "grid.csv")
    assert frame.groupby("pair").size().to_dict() == {"fisher + kfi": 2, "sgd": 2}
    for _, group in frame.groupby("pair"):
        assert group.sort_values("rank")["train_loss"].is_monotonic_increasing
    before = (page.parent / "work" / "results.jsonl").read_bytes()
    reproduce("grid", options, tmp_path)
    assert (page.parent / "work" / "results.jsonl").read_bytes() == before


def test_runs_that_failed_are_ranked_last() -> None:
    rows = [
        {"spec": f"sgd[lr={lr}]", "batch": 10, "seed": 0, "data": "d", "criterion": "c", "epoch": 1,
         "train_loss": loss, "test_accuracy": 0.1, "cpu_seconds": 1.0, "status": status}
        for lr, loss, status in ((0.1, 1.0, "ok"), (0.2, 0.1, "diverged"), (0.3, 0.5, "ok"))
    ]  # fmt: skip
    assert ranked_frame(pd.DataFrame(rows))["lr"].tolist() == [0.3, 0.1, 0.2]


@pytest.mark.slow
def test_experiments_share_the_runs_they_have_in_common(tiny: None, tmp_path: Path) -> None:
    reproduce("pch1-vs-pch2", SMOKE, tmp_path)
    runs = sorted((tmp_path / "work" / "runs").iterdir())
    before = {path: (path / "results.jsonl").stat().st_mtime_ns for path in runs}
    reproduce("fig-nonconvex-cifar10", SMOKE, tmp_path)
    shared = experiment_named("fig-nonconvex-cifar10").tasks(SMOKE)
    keys = {task.plan.key for task in shared}
    common = [path for path in runs if path.name in keys]
    assert len(common) == 1
    assert (common[0] / "results.jsonl").stat().st_mtime_ns == before[common[0]]


@pytest.mark.long
def test_other_processes_measure_the_same(tmp_path: Path) -> None:
    options = Options("smoke", study=TINY)
    here = reproduce("grid", options, tmp_path / "here")
    there = reproduce("grid", options, tmp_path / "there", executor="process[workers=2]")
    columns = ["pair", "lr", "train_loss", "test_accuracy"]
    frames = [pd.read_csv(page.parent / "grid.csv")[columns] for page in (here, there)]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.slow
def test_the_findings_link_to_frames_that_exist(tiny: None, tmp_path: Path) -> None:
    reproduce("table4", SMOKE, tmp_path)
    reproduce("fig-nonconvex-cifar10", SMOKE, tmp_path)
    page = write_findings(tmp_path, SMOKE)
    links = re.findall(r"\]\(([^)]+)\)", page.with_suffix(".md").read_text())
    assert {"table4/errors.csv", "fig-nonconvex-cifar10/curves.csv"} <= set(links)
    assert all((tmp_path / link).is_file() for link in links)
    assert "not measured" in page.read_text()


@pytest.mark.slow
def test_findings_at_smoke_scale_name_their_data_and_are_marked_as_no_evidence(
    tiny: None, tmp_path: Path
) -> None:
    table = reproduce("table2", SMOKE, tmp_path).with_suffix(".md").read_text()
    findings = write_findings(tmp_path, SMOKE).with_suffix(".md").read_text()
    for text in (table, findings):
        assert "nothing here is evidence for or against the paper" in text[: text.index("\n## ")]
    assert "**No evidence, only a trial at smoke scale: of " in findings
    sections = dict(section.split("\n\n", 1) for section in findings.split("\n## ")[1:])
    section = sections["Table 2: errors on CIFAR-10, cross-entropy (here on digits, smoke scale)"]
    assert section.startswith("Measured on digits, smoke scale. The paper's data were not used: no evidence.")
    verdicts = re.findall(r"\| ([^|]+) \|$", section.split("###")[1], flags=re.M)[2:]
    assert len(verdicts) == 5
    assert all(verdict.endswith("(no evidence)") for verdict in verdicts)
    assert sections["Table 4: errors on CIFAR-10, robust loss"].startswith("Not measured.")


@pytest.mark.slow
def test_findings_say_the_scale_that_was_measured_at_not_the_one_asked_for_last(
    tiny: None, tmp_path: Path
) -> None:
    reproduce("table2", SMOKE, tmp_path)
    findings = write_findings(tmp_path, Options("laptop")).with_suffix(".md").read_text()
    assert "scale: smoke" in findings
    assert "nothing here is evidence" in findings


@pytest.mark.slow
def test_findings_on_the_papers_data_are_not_marked(tiny: None, tmp_path: Path) -> None:
    reproduce("table2", SMOKE, tmp_path)
    store = tmp_path / "table2" / "work" / "results.jsonl"
    kept = store.read_text().replace('"smoke"', '"laptop"').replace('"data": "digits"', '"data": "cifar10"')
    store.write_text(kept)
    findings = write_findings(tmp_path, Options("laptop")).with_suffix(".md").read_text()
    assert (
        "\n## Table 2: errors on CIFAR-10, cross-entropy\n\nMeasured on cifar10, laptop scale.\n" in findings
    )
    assert "evidence" not in findings


@pytest.mark.long
def test_a_figure_s_page_states_the_settings_of_every_run(tiny: None, tmp_path: Path) -> None:
    text = reproduce("pch1-vs-pch2", SMOKE, tmp_path).with_suffix(".md").read_text()
    assert "| optimizer | learning rate | α | momentum |" in text
    assert "| pch-1 + ea-cg | 0.2 | 0.01 | 0 |" in text
    assert "None of this was tuned here." in text


def test_every_claim_belongs_to_an_experiment_and_says_when_it_is_not_measured() -> None:
    assert set(claims()) <= set(experiments())
    for found in claims().values():
        for claim in found:
            assert claim.judge({}).verdict == "not measured"
            assert claim.rule


def test_a_stand_in_for_imagenet_is_named() -> None:
    setup, note = subject("imagenet10", "robust", 0, Options("laptop"))
    assert (setup.data, "stands in" in note) == ("cifar10-224", True)
    setup, note = subject("imagenet10", "robust", 0, Options("laptop", imagenet="pictures"))
    assert (setup.data, setup.data_dir) == ("imagenet10", "pictures")
    assert subject("cifar10", "robust", 0, Options("paper"))[1] == ""


@pytest.mark.slow
def test_the_command_reproduces_and_says_where_the_pages_are(tiny: None, tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        main, ["reproduce", "table2", "--scale", "smoke", "-o", str(tmp_path), "--seed", "5", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    page = Path(document["pages"]["table2"])
    assert page.is_file()
    assert Path(document["findings"]).is_file()
    assert {row["seed"] for row in Store(page.parent / "work").rows("errors")} == {5}
    text = page.with_suffix(".md").read_text()
    assert "curvlab reproduce table2 --scale smoke --seed 5" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["table9"], "Did you mean"),
        ([], "name an experiment"),
        (["table2", "--scale", "huge"], "--scale"),
        (["grid", "--only", "lr=7", "--scale", "smoke"], "lr=7 is not in the study"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["reproduce", *words, "-o", str(tmp_path)])
    assert ran.exit_code == 2
    assert said in ran.output
    assert "Traceback" not in ran.output


def test_the_list_names_every_experiment() -> None:
    ran = CliRunner().invoke(main, ["reproduce", "--list"])
    assert ran.exit_code == 0
    assert all(name in ran.output for name in experiments())
    assert max(map(len, ran.output.splitlines())) <= 80


@pytest.mark.slow
def test_an_interruption_keeps_what_was_measured(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from curvlab.reproduce.error_trajectory import Trajectory

    whole = Trajectory.run

    def interrupted(self: Trajectory, *args: object) -> None:
        whole(self, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Trajectory, "run", interrupted)
    words = ["reproduce", "table2", "--scale", "smoke", "-o", str(tmp_path)]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 130
    assert "goes on from there" in ran.output
    assert len(Store(tmp_path / "table2" / "work").rows("trajectory")) == 1
    monkeypatch.setattr(Trajectory, "run", whole)
    assert CliRunner().invoke(main, words).exit_code == 0
    assert len(Store(tmp_path / "table2" / "work").rows("trajectory")) == 2
