"""Figures and pages: one look throughout, nothing global touched, all text from users shown as text."""

from __future__ import annotations

import io
import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from matplotlib import colors
from matplotlib.axes import Axes

from curvlab.exceptions import StoreError
from curvlab.report import (
    DARK,
    LIGHT,
    Look,
    Theme,
    convergence_curves,
    cost_bars,
    eigenvalue_points,
    error_heatmap,
    memory_bars,
    pareto_scatter,
    residual_curves,
    write_report,
)
from curvlab.report.content import spectrum_section
from curvlab.report.drawing import PAGE, svg
from curvlab.studies.compare.frames import Comparison

pytestmark = pytest.mark.slow

EVIL = "<script>alert(1)</script>|`x`_y_ $\\frac{$ [a](http://evil.invalid)"
PROVIDERS, SOLVERS = ("fisher", "pch-1", EVIL), ("kfi", "ea-cg")


def cells() -> pd.DataFrame:
    frame = pd.DataFrame([(p, s) for p in PROVIDERS for s in SOLVERS], columns=["provider", "solver"])
    frame = frame.assign(
        status="ok", message="", newton_reason=EVIL, route=EVIL, cosine=math.nan, distance=math.nan
    )
    frame["estimate_seconds"], frame["prepare_seconds"], frame["apply_seconds"] = 0.002, 0.001, 0.003
    frame["total_seconds"] = [0.006, 0.007, 0.008, 0.009, 0.010, 0.0123456]
    for column in ("estimate_iqr", "prepare_iqr", "apply_iqr", "total_iqr"):
        frame[column] = 0.0002
    frame["peak_bytes"], frame["planned_bytes"], frame["held_bytes"], frame["flops"] = 3e6, 3e6, 1e6, 5e7
    frame["error_total"], frame["error_relative"] = 0.4, [0.9, 0.9, 0.1, 0.1, 0.5, 0.5]
    frame["iterations"], frame["residual"], frame["residual_full"] = 20, 1e-8, 0.3
    frame.loc[1, ["status", "message", "total_seconds"]] = ["failed", f"no memory {EVIL}", math.nan]
    return frame


def errors() -> pd.DataFrame:
    rows = [(layer, provider) for provider in PROVIDERS for layer in (1, 2, "Total")]
    frame = pd.DataFrame(rows, columns=["layer", "provider"])
    return frame.assign(
        layer_name=EVIL, relative=0.25, error=[0.5, 0.0, 0.5, 0.123456, 1e-17, 0.1, math.nan, 0.2, 0.2]
    )


def traces() -> pd.DataFrame:
    steps = pd.DataFrame({"iteration": range(3), "residual": [1.0, 0.1, 0.01]})
    return pd.concat([steps.assign(provider=name, solver="ea-cg", block="0.weight") for name in PROVIDERS])


def convergence() -> pd.DataFrame:
    epochs = pd.DataFrame({"epoch": range(3), "seconds": [0.0, 1.0, 2.0], "train_loss": [2.3, 1.0, 0.5]})
    epochs = epochs.assign(test_loss=[2.3, 1.1, 0.7], test_accuracy=math.nan, status="ok")
    runs = [(f"{name} + ea-cg", name, "ea-cg") for name in PROVIDERS] + [("sgd", "", ""), ("adam", "", "")]
    return pd.concat(
        [epochs.assign(optimizer=run, provider=provider, solver=solver) for run, provider, solver in runs]
    )


def comparison(**changes: object) -> Comparison:
    fields = {
        "config": {"data": EVIL, "setup": {"criterion": "cross-entropy"}, "providers": list(PROVIDERS)},
        "environment": {"versions": {"torch": EVIL}},
        "command": f"curvlab compare --data '{EVIL}' ``` </code>",
        "cells": cells(),
        "errors": errors(),
        "traces": traces(),
        "repetitions": pd.DataFrame(),
        "blocks": pd.DataFrame(),
        "convergence": convergence(),
        "warnings": [EVIL],
        "failures": [f"sgd: {EVIL}"],
    }
    return Comparison(**fields | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = dict(mpl.rcParams)
    page = write_report(comparison(), tmp_path_factory.mktemp("report"))
    assert dict(mpl.rcParams) == before
    return page.parent


class Parsed(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_user_text_as_text(folder: Path) -> None:
    page = Parsed((folder / "report.html").read_text())
    assert page.tags.count("script") == 1
    assert "<script>alert(1)</script>" in page.text
    links = [value for name, value in page.attributes if name in ("href", "src", "xlink:href")]
    assert all(str(value).startswith(("#", "data:")) for value in links)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_identifiers_are_unique_and_references_resolve(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    names = [value for name, value in Parsed(text).attributes if name == "id"]
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(names)


def test_no_placeholder_colour_is_left(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert "#0102" not in text
    assert "#0103" not in text
    assert "var(--series-0)" in text


def test_markdown_shows_user_text_as_text_and_has_the_same_content(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    markdown = Parsed(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert not {"script", "a"} & set(markdown.tags)
    assert "<script>alert(1)</script>" in markdown.text
    page = Parsed((folder / "report.html").read_text())
    heads = ["Cost against error", "Error by layer", "Time", "Memory", "Convergence", "Residual by iteration"]
    for shown in [
        *heads,
        "All numbers",
        "Warnings",
        "Failed and skipped",
        "Run it again",
        "12.3 (0.20)",
        "0.123",
    ]:
        assert shown in page.text
        assert shown in markdown.text
    # A bar in user text opens no new cell: every column of every table is as long as in the page.
    assert markdown.tags.count("td") == page.tags.count("td")
    images = [value for name, value in markdown.attributes if name == "src"]
    assert len(images) == page.tags.count("figure")
    assert all((folder / str(image)).read_bytes().startswith(b"\x89PNG") for image in images)


def test_every_error_is_said_to_be_of_bias_blocks_and_from_the_absolute_hessian(folder: Path) -> None:
    page = Parsed((folder / "report.html").read_text()).text
    markdown = Parsed(
        MarkdownIt("commonmark").enable("table").render((folder / "report.md").read_text())
    ).text
    for text in (page, markdown):
        numbers = text[text.rindex("All numbers") :]
        assert "‖B̃ − |B|‖ / ‖|B|‖ in the Frobenius norm, how far the provider's bias blocks B̃ are" in numbers
        assert "relative error (bias blocks, from |H|)" in numbers
        assert "its bias blocks are" in text
        assert "from the exact Hessian" not in text
    assert pareto_scatter(cells()).get_ylabel() == "bias blocks: distance from |H| (%)"
    drawn = error_heatmap(errors()).get_xlabel()
    assert drawn.startswith("bias blocks: distance from the absolute Hessian |H|")


def test_the_section_on_training_states_the_settings_of_each_curve(tmp_path: Path) -> None:
    ran = convergence().assign(lr=0.125, alpha=0.07, momentum=0.9)
    text = Parsed(write_report(comparison(convergence=ran), tmp_path).read_text()).text
    shown = text[text.rindex("Convergence") : text.rindex("Residual by iteration")]
    assert "which curvlab did not tune" in shown
    for words in ("learning rate", "0.125", "0.07", "momentum"):
        assert words in shown[shown.index("Where training ended") :]


def test_the_figure_that_the_answer_goes_by_comes_first(tmp_path: Path) -> None:
    known = cells().assign(distance=[0.5, 0.4, 0.3, 0.2, 0.6, 0.7])
    page = write_report(comparison(cells=known, convergence=convergence().iloc[:0]), tmp_path)
    text = page.with_suffix(".md").read_text()
    assert 0 < text.index("figures/newton.png") < text.index("figures/pareto.png")
    assert "by time and distance to the Newton step" in text
    assert "which the answer above goes by" in text


def test_tables_hold_the_numbers_of_the_frames(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    values = [float(value) for value in re.findall(r'data-value="([^"]+)"', text)]
    for column in (
        "total_seconds",
        "peak_bytes",
        "planned_bytes",
        "flops",
        "error_relative",
        "residual_full",
    ):
        assert set(cells()[column].dropna()) <= set(values)
    assert set(errors()["error"].dropna()) <= set(values)


def test_rendering_again_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = write_report(comparison(), tmp_path)
    assert again.read_bytes() == (folder / "report.html").read_bytes()


def test_the_spectrum_stands_by_layer_beside_the_damping_that_rules_in_some() -> None:
    rows = [
        ("fisher", "0", 0.03, 1e-4),
        ("fisher", "2", 0.4, 1e-3),
        ("pch-1", "0", 0.2, 0.0),
        ("pch-1", "2", 0.5, 0.1),
    ]
    spectra = pd.DataFrame(rows, columns=["provider", "layer", "largest", "median"]).assign(exact=True)
    axes = eigenvalue_points(spectra, alpha=0.05)
    values = {tuple(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata()) == 2}
    assert (0.03, 0.4) in values  # the largest of fisher, in the order of the layers
    assert (0.2, 0.5) in values
    assert (0.05 / 0.95, 0.05 / 0.95) in values
    page = spectrum_section(spectra, alpha=0.05)
    assert page.drawings[0].answer.endswith("fisher in 1 of 2; pch-1 in 0 of 2.")
    assert "fisher 0.400 and 0.000550; pch-1 0.500 and 0.0500" in page.text


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    nothing = {
        "errors": errors().iloc[:0],
        "traces": traces().iloc[:0],
        "convergence": convergence().iloc[:0],
    }
    failed = cells().assign(status="failed", total_seconds=math.nan, peak_bytes=math.nan)
    page = write_report(comparison(cells=failed, warnings=[], **nothing), tmp_path)
    text = Parsed(page.read_text()).text
    assert "Nothing can be recommended: no pair finished." in text
    assert "no pair finished with a known error" in text
    for title in ("Error by layer", "Memory", "Convergence", "Residual by iteration", "Warnings"):
        assert title not in text


def test_an_unwritable_folder_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match=r"cannot write .*figures.*What was stored before is unchanged"):
        write_report(comparison(), tmp_path)


def _styles(ax: Axes) -> set[str]:
    return {colors.to_hex(line.get_color()) for line in ax.lines} | {
        colors.to_hex(patch.get_facecolor()) for patch in ax.patches
    }


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_a_provider_has_one_colour_in_every_figure(theme: Theme) -> None:
    look = Look.of_frames(cells(), theme=theme)
    figures = [
        cost_bars(cells(), look=look),
        memory_bars(cells(), look=look),
        pareto_scatter(cells(), look=look),
        residual_curves(traces(), look=look),
        convergence_curves(convergence(), look=look),
    ]
    for ax in figures:
        assert {look.colour(name) for name in PROVIDERS} <= _styles(ax)
        assert colors.to_hex(ax.get_facecolor()) == theme.paper


def test_a_look_does_not_depend_on_order_or_on_who_else_is_there() -> None:
    forwards = Look.of(["zeta", "pch-1", "alpha"], ["mine", "kfi"])
    assert forwards == Look.of(["alpha", "zeta", "pch-1"], ["kfi", "mine"])
    assert forwards.colour("pch-1") == Look.of(["pch-1"]).colour("pch-1")
    assert len({forwards.colour(name) for name in ("zeta", "pch-1", "alpha")}) == 3
    assert forwards.line("mine") != forwards.line("kfi")
    assert forwards.marker("mine") != forwards.marker("kfi")


def test_more_names_than_colours_still_have_a_look() -> None:
    names = [f"provider-{index}" for index in range(30)]
    look = Look.of(names, names)
    assert all(look.colour(name) and look.marker(name) and look.line(name) for name in names)


def test_figures_draw_on_the_axes_given_and_leave_settings_alone() -> None:
    from matplotlib.figure import Figure

    before = dict(mpl.rcParams)
    for draw, frame in [(cost_bars, cells()), (error_heatmap, errors()), (pareto_scatter, cells())]:
        ax = Figure().add_subplot()
        assert draw(frame, ax) is ax
    assert dict(mpl.rcParams) == before


LONG = ["gauss-newton[kind=rows,samples=1]", "pch[gamma=-0.5,kind=rows,poseig=last]", "fisher[kind=mc]"]


def test_a_legend_of_long_names_stands_within_its_figure_and_leaves_the_axes_their_width() -> None:
    frame = pd.concat([cells().assign(provider=name, status="ok", total_seconds=0.01) for name in LONG])
    spectra = pd.DataFrame({"provider": LONG, "layer": "0", "largest": 1.0, "median": 0.1})
    for ax in (pareto_scatter(frame), eigenvalue_points(spectra, alpha=0.1)):
        figure, legend = ax.get_figure(root=True), ax.get_legend()
        assert figure is not None
        assert legend is not None
        figure.draw_without_rendering()
        assert legend.get_window_extent().x1 <= figure.bbox.x1
        assert legend.get_window_extent().y0 >= figure.bbox.y0
        assert ax.get_window_extent().width > 0.75 * figure.bbox.width
        assert ax.get_window_extent().height > 0.5 * figure.bbox.height


def test_a_pair_with_a_long_name_keeps_its_solver() -> None:
    frame = cells().assign(provider="gauss-newton[kind=rows,samples=1,positions=4]", status="ok")
    assert all(
        label.get_text().endswith((" + kfi", " + ea-cg")) for label in cost_bars(frame).get_yticklabels()
    )
    assert all(text.get_text().endswith((" + kfi", " + ea-cg")) for text in pareto_scatter(frame).texts)


def test_errors_that_differ_little_are_told_apart() -> None:
    frame = cells().assign(status="ok", total_seconds=[1, 2, 3, 4, 5, 6])
    frame["error_relative"] = [0.84, 0.83, 0.82, 0.81, 0.80, 0.79]
    low, high = pareto_scatter(frame).get_ylim()
    assert 75 < low < 79
    assert 84 < high < 90


def test_bars_of_one_repetition_have_no_whiskers() -> None:
    def entries(frame: pd.DataFrame) -> list[str]:
        legend = cost_bars(frame).get_legend()
        return [text.get_text().replace("\n", " ") for text in legend.get_texts()]

    assert "interquartile range" in entries(cells())
    assert "interquartile range" not in entries(cells().assign(total_iqr=math.nan))


def test_the_heat_map_has_layers_down_providers_across_and_every_number() -> None:
    ax = error_heatmap(errors())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2", "Total"]
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == ["fisher", "pch-1"]
    shown = {text.get_text() for text in ax.texts}
    assert {"0.500", "0.123", "0", "–", "1.00e-17"} <= shown


def test_the_residual_shown_is_the_largest_over_blocks_with_finished_ones_kept() -> None:
    rows = [("a", 0, 1.0), ("a", 1, 0.2), ("a", 2, 0.01), ("b", 0, 0.5), ("b", 1, 0.3)]
    frame = pd.DataFrame(rows, columns=["block", "iteration", "residual"]).assign(provider="p", solver="s")
    assert residual_curves(frame).lines[0].get_ydata().tolist() == [1.0, 0.3, 0.3]


# Machado, Oliveira and Fernandes (2009), severity 1: what protan, deutan and tritan eyes make of linear RGB.
VISION = {
    "normal": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def _linear(colour: str) -> np.ndarray:
    value = np.array(colors.to_rgb(colour))
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_of_providers_stay_apart_for_every_vision(theme: Theme, vision: str) -> None:
    seen = [_lab(np.array(VISION[vision]) @ _linear(colour)) for colour in theme.series]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out_from_the_paper(theme: Theme) -> None:
    def contrast(colour: str) -> float:
        light = sorted(_linear(each) @ [0.2126, 0.7152, 0.0722] for each in (colour, theme.paper))
        return (light[1] + 0.05) / (light[0] + 0.05)

    assert min(contrast(colour) for colour in theme.series) > 2.7
    assert min(contrast(theme.ink), contrast(theme.muted)) > 4.5


def test_a_drawing_keeps_every_letter_and_every_line_in_half_the_size() -> None:
    look = Look.of_frames(cells(), theme=PAGE)
    axes = cost_bars(cells(), look=look)
    axes.set_title('font-family: serif; #010203 version="1" <b>', parse_math=False)
    raw = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        axes.get_figure().savefig(raw, format="svg", transparent=True)
    page, own = ElementTree.fromstring(svg(axes, "time", "Time")), ElementTree.fromstring(raw.getvalue())

    def texts(root: ElementTree.Element) -> list[str]:
        return ["".join(e.itertext()) for e in root.iter() if e.tag.rpartition("}")[2] == "text"]

    def strokes(root: ElementTree.Element) -> int:
        return sum("stroke:" in e.get("style", "") for e in root.iter())

    assert texts(page) == texts(own)
    assert strokes(page) == strokes(own)
    assert len(ElementTree.tostring(page)) < 0.55 * len(raw.getvalue())


def test_the_page_has_each_figure_once_and_the_markdown_file_names_its_file(folder: Path) -> None:
    page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    figures = sorted(file.name for file in (folder / "figures").iterdir())
    assert page.count("<svg ") == len(figures)
    assert sorted(re.findall(r"\(figures/([^)]+)\)", text)) == figures
    assert "data:image" not in text
    assert "<svg" not in text
