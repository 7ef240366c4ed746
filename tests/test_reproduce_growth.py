"""Table 1 as a study: the fits, the paper's orders, what a point counts, and the 11 GB card."""

from __future__ import annotations

import pickle
from math import isnan, sqrt

import numpy as np
import pandas as pd
import pytest
import torch

from curvlab.exceptions import SolveError, SpecError
from curvlab.reproduce.growth_orders import curvlab_order, exponent_table, fit_exponent, fits, paper_order
from curvlab.reproduce.growth_points import GrowthTask, card_frame, growth_tasks, run_growth_task
from curvlab.reproduce.growth_sweeps import SCALES, VARIABLES, Sizes
from curvlab.reproduce.growth_table import growth_figure

LADDER = [100, 150, 225, 338, 506, 759]
T_975_OF_4 = 2.7764451051977987  # Student's t, 4 degrees of freedom: a printed table's value


def operations(subject: str, formulation: str, quantity: str = "solve", **sizes: int) -> int:
    return point(subject, formulation, quantity, **sizes)["operations"]


def point(subject: str, formulation: str, quantity: str = "solve", **sizes: int) -> dict:
    variable = "inputs"
    return run_growth_task(GrowthTask(quantity, subject, formulation, variable, Sizes(**sizes), 1))


def made_up(subject: str, variable: str, seconds, formulation: str = "textbook") -> pd.DataFrame:
    """Rows of one ladder whose seconds, operations and bytes are a function of its value."""
    sizes = {"outputs": 64, "inputs": 128, "batch": 32, "iterations": 20}
    quantity = "solve" if subject in ("kfi", "sm-kfi", "ea-cg", "cg") else "curvature"
    head = {"quantity": quantity, "subject": subject, "formulation": formulation, "variable": variable}
    return pd.DataFrame(
        [
            head
            | sizes
            | {variable: value, "value": value}
            | dict.fromkeys(("seconds", "operations", "peak_bytes"), seconds(value))
            for value in LADDER
        ]
    )


@pytest.mark.parametrize("exponent", [-1.5, 0.0, 0.37, 1.0, 3.0])
def test_an_exact_power_is_recovered_with_an_interval_of_no_width(exponent):
    found = fit_exponent(LADDER, [2e-7 * n**exponent for n in LADDER])
    assert found.exponent == pytest.approx(exponent, abs=1e-12)
    assert found.constant == pytest.approx(2e-7, rel=1e-10)
    assert found.high - found.low < 1e-6
    assert found.points == len(LADDER)


def test_exponent_and_interval_are_those_of_the_normal_equations():
    costs = [n**2 * factor for n, factor in zip(LADDER, [1.1, 0.95, 1.0, 1.2, 0.9, 1.05], strict=True)]
    x, y = np.log(LADDER), np.log(costs)
    xc, yc = x - x.mean(), y - y.mean()
    slope = (xc @ yc) / (xc @ xc)
    rest = yc - slope * xc
    margin = T_975_OF_4 * sqrt((rest @ rest) / 4 / (xc @ xc))
    found = fit_exponent(LADDER, costs)
    assert found.exponent == pytest.approx(slope, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((slope - margin, slope + margin), rel=1e-12)
    assert found.r2 == pytest.approx(1 - (rest @ rest) / (yc @ yc), rel=1e-12)


def test_the_interval_covers_the_exponent_as_often_as_it_says():
    draws = np.random.default_rng(0)
    noisy = np.array(LADDER) ** 2.5 * np.exp(0.1 * draws.standard_normal((1000, len(LADDER))))
    found = [fit_exponent(LADDER, costs) for costs in noisy]
    covered = np.mean([fit.low <= 2.5 <= fit.high for fit in found])
    assert covered == pytest.approx(0.95, abs=4 * sqrt(0.95 * 0.05 / 1000))


def test_what_costs_nothing_has_no_exponent_and_what_never_changes_has_nought():
    assert isnan(fit_exponent(LADDER, [0] * 6).exponent)
    assert isnan(fit_exponent([1, 2], [1, 2]).exponent)
    constant = fit_exponent(LADDER, [7] * 6)
    assert (constant.exponent, constant.low, constant.high) == (0, 0, 0)
    assert isnan(constant.r2)


@pytest.mark.parametrize(
    ("resource", "quantity", "subject", "value", "degrees"),
    [  # at n_t = 2, n_{t-1} = 3, |Batch| = 7, |CG| = 5, worked out by hand from Table 1
        ("time", "curvature", "fisher", 7 * 4, (2, 0, 1, 0)),
        ("time", "curvature", "gauss-newton", 9 * 2, (1, 2, 0, 0)),
        ("time", "curvature", "pch-1", 9 * 2, (1, 2, 0, 0)),
        ("time", "solve", "kfi", 8 + 27 + 18 + 12, (3, 3, 0, 0)),
        ("space", "solve", "kfi", 9 + 4, (2, 2, 0, 0)),
        ("time", "solve", "ea-cg", 5 * (4 + 2 * 6), (2, 1, 0, 1)),
        ("space", "solve", "ea-cg", 3 + 4, (2, 1, 0, 0)),
    ],
)
def test_the_papers_orders_are_those_of_its_table(resource, quantity, subject, value, degrees):
    order = paper_order(resource, quantity, subject)
    assert order({"outputs": 2, "inputs": 3, "batch": 7, "iterations": 5}) == value
    assert tuple(order.degree(variable) for variable in VARIABLES) == degrees


def test_the_exponent_over_the_ladder_is_that_of_the_formula_at_the_measured_sizes():
    fitted = fits(made_up("kfi", "inputs", lambda n: 1e-9 * n**2.5))
    row = fitted[fitted["measure"] == "seconds"].iloc[0]
    o = 64
    values = [o**3 + n**3 + n**2 * o + n * o**2 for n in LADDER]
    assert row["exponent"] == pytest.approx(2.5)
    assert row["paper_exponent"] == 3
    assert row["paper_ladder"] == pytest.approx(np.polyfit(np.log(LADDER), np.log(values), 1)[0], rel=1e-10)
    assert row["paper_ladder"] < 3
    assert row["fixed"] == "n_t = 64, m = 32"


def test_nothing_is_said_of_what_the_paper_leaves_out():
    fitted = fits(made_up("cg", "outputs", float))
    assert fitted["paper"].eq("").all()
    assert fitted["paper_exponent"].isna().all()
    table = exponent_table(fitted, "time")
    assert table["paper"].tolist() == ["–"]
    assert table["textbook: seconds"].tolist() == ["1.00 [1.00, 1.00]"]


def test_the_table_has_both_formulations_in_one_row():
    rows = [made_up("ea-cg", "inputs", lambda n: n**2.0, form) for form in ("textbook", "sample space")]
    table = exponent_table(fits(pd.concat(rows)), "space")
    assert len(table) == 1
    row = table.iloc[0]
    assert row["paper"] == "n_{t-1} + n_t²"
    assert row["textbook: peak_bytes"] == row["sample space: peak_bytes"] == "2.00 [2.00, 2.00]"
    assert row["textbook: order"] != row["sample space: order"]


def test_textbook_kfi_grows_with_the_inputs_as_the_paper_says():
    ladder = [96, 144, 216, 324]
    rows = pd.DataFrame([point("kfi", "textbook", outputs=24, inputs=n, batch=16) for n in ladder])
    fitted = fits(rows).set_index("measure")
    for measure in ("operations", "peak_bytes"):
        assert fitted.loc[measure, "exponent"] == pytest.approx(fitted.loc[measure, "paper_ladder"], abs=0.1)


@pytest.mark.parametrize("subject", ["kfi", "ea-cg"])
def test_sample_space_operations_grow_with_the_inputs_by_the_gram_matrix_alone(subject):
    m = 16
    at = {n: operations(subject, "sample space", outputs=24, inputs=n, batch=m) for n in (64, 128, 256)}
    a_column = (at[256] - at[128]) / 128
    assert (at[128] - at[64]) / 64 == a_column
    assert 2 * m**2 <= a_column <= 2 * m**2 + 8 * m + 16  # K, and a few products with a vector


def test_an_iteration_of_ea_cg_in_the_sample_space_costs_the_same_whatever_the_inputs():
    def of_five(formulation: str, inputs: int) -> int:
        at = [
            operations("ea-cg", formulation, outputs=24, inputs=inputs, batch=16, iterations=i)
            for i in (5, 10)
        ]
        return at[1] - at[0]

    assert of_five("sample space", 64) == of_five("sample space", 256)
    assert of_five("textbook", 256) - of_five("textbook", 64) == 5 * 2 * 24 * (256 - 64)


def test_sample_space_kfi_holds_nothing_of_the_inputs_width():
    narrow, wide = (
        point("kfi", "sample space", outputs=24, inputs=n, batch=16)["peak_bytes"] for n in (64, 512)
    )
    assert narrow == wide
    assert point("kfi", "textbook", outputs=24, inputs=512, batch=16)["peak_bytes"] > 2 * 4 * 512**2


def test_fisher_costs_its_product_in_the_textbook_and_no_product_in_the_sample_space():
    sizes = {"outputs": 48, "inputs": 20, "batch": 32}
    assert operations("fisher", "textbook", "curvature", **sizes) == 2 * 32 * 48**2
    assert operations("fisher", "sample space", "curvature", **sizes) == 0


@pytest.mark.parametrize("subject", ["gauss-newton", "pch-1"])
def test_the_recursion_has_the_term_that_table_1_leaves_out(subject):
    o, n, m = 40, 24, 16
    counted = operations(subject, "textbook", "curvature", outputs=o, inputs=n, batch=m)
    products = 2 * o**2 * n + 2 * n**2 * o  # B W, then Wᵀ (B W)
    moments = 2 * m * n**2 + 2 * m * o**2  # E[σ'σ'ᵀ] and E[∇²ξ]
    assert products + moments <= counted <= products + moments + 8 * m * (n + o)
    assert "n_{t-1} n_t²" in str(curvlab_order("time", "curvature", subject, "textbook"))


def test_a_point_is_a_row_that_says_what_it_measured():
    threads = torch.get_num_threads()
    row = run_growth_task(GrowthTask("solve", "ea-cg", "textbook", "batch", Sizes(8, 12, 10, 3), 2))
    assert row["kind"] == "growth"
    assert [row[name] for name in ("subject", "formulation", "variable", "value")] == [
        "ea-cg",
        "textbook",
        "batch",
        10,
    ]
    assert [row[name] for name in VARIABLES] == [8, 12, 10, 3]
    assert row["seconds"] > 0
    assert torch.get_num_threads() == threads


def test_a_point_whose_iterations_were_not_all_run_is_refused():
    with pytest.raises(SolveError, match="ended after"):
        point("ea-cg", "textbook", outputs=3, inputs=4, batch=4, iterations=200)


@pytest.mark.parametrize("scale", SCALES)
def test_tasks_cover_every_subject_and_variable_and_travel_between_processes(scale):
    tasks = growth_tasks(scale)
    assert len({task.key for task in tasks}) == len(tasks)
    assert pickle.loads(pickle.dumps(tasks)) == tasks
    ladders = {(t.subject, t.formulation, t.variable) for t in tasks}
    for solver in ("kfi", "sm-kfi", "ea-cg", "cg"):
        for formulation in ("textbook", "sample space"):
            iterations = {"iterations"} if "cg" in solver else set()
            grown = {variable for s, f, variable in ladders if (s, f) == (solver, formulation)}
            assert grown == {"outputs", "inputs", "batch"} | iterations
    assert len(tasks) == SCALES[scale].points * len(ladders)
    assert all(
        t.sizes.batch < t.sizes.inputs
        for t in tasks
        if t.quantity == "solve" and t.formulation == "sample space"
    )


def test_an_unknown_scale_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match="smoke, laptop, paper"):
        growth_tasks("huge")


def test_the_figure_has_a_panel_a_variable_and_writes_the_exponents():
    rows = pd.concat(
        [made_up("fisher", variable, lambda n: n**2.0) for variable in ("outputs", "inputs", "batch")]
        + [made_up("ea-cg", variable, lambda n: n**1.5) for variable in VARIABLES]
    )
    figure = growth_figure(rows, fits(rows), measure="operations")
    drawn = [ax for ax in figure.axes if ax.has_data()]
    symbols = ["n_t", "n_{t-1}", "m"]
    assert [ax.get_xlabel().split()[-1] for ax in drawn] == [*symbols, *symbols, "|CG|"]
    assert [ax.texts[0].get_text() for ax in drawn] == ["2.0"] * 3 + ["1.5"] * 4


@pytest.mark.slow
def test_textbook_kfi_does_not_fit_the_card_and_sample_space_kfi_does():
    frame = card_frame(solvers=["kfi"]).set_index("form")
    assert frame["fits"].to_dict() == {"textbook": False, "sample-space": True, "momentum 0.9": True}
    assert frame.loc["textbook", "largest"] == "150528×150528"
    assert frame.loc["textbook", "largest_gb"] == pytest.approx(4 * 150528**2 / 1e9)
    assert frame.loc["textbook", "peak_gb"] > frame.loc["textbook", "largest_gb"] > 90
    parameters = 150528 * 1024 * 4 / 1e9
    assert (
        frame.loc["sample-space", "peak_gb"]
        < 1.3 * parameters
        < 3 * parameters
        < frame.loc["momentum 0.9", "peak_gb"]
    )
