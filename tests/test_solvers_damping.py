"""Damping values, and π: how the factored inverse splits them, given, computed and clamped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import curvlab
from curvlab import Additive, Mixed
from curvlab.solvers.base import split_damping
from tests.solver_cases import WIDE, assert_close, dense_solve, pi_of, problem, written_out

ALPHA = 0.05


def test_mixed_and_additive_are_the_documented_mixtures() -> None:
    assert (Mixed(0.2).scale, Mixed(0.2).shift) == (0.8, 0.2)
    assert (Additive(0.2).scale, Additive(0.2).shift) == (1.0, 0.2)
    assert (str(Mixed(0.05)), str(Additive(3))) == ("mixed(0.05)", "additive(3)")


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.5, float("nan")])
def test_an_alpha_outside_of_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha=.* a number in \(0, 1\]"):
        Mixed(alpha)


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf"), float("nan")])
def test_a_tau_that_is_not_positive_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match=r"tau=.* a positive and finite number"):
        Additive(tau)


def test_the_damping_is_given_exactly_once() -> None:
    p = problem()
    curvature = curvlab.estimate("fisher", p)
    for given in ({}, {"alpha": 0.1, "damping": Additive(0.1)}):
        with pytest.raises(ValueError, match="give the damping once"):
            curvlab.solve("kfi", curvature, p.gradient(), **given)


def test_alpha_means_mixed_and_is_carried_into_every_row() -> None:
    p = problem()
    solution = curvlab.solve("cg", curvlab.estimate("fisher", p), p.gradient(), alpha=0.1)
    assert solution.damping == Mixed(0.1)
    assert set(solution.frame()["damping"]) == {"mixed(0.1)"}


def test_the_factored_inverse_reads_only_the_share_of_the_identity() -> None:
    p = problem()
    curvature = curvlab.estimate("pch-1", p)
    mixed = curvlab.solve("kfi", curvature, p.gradient(), damping=Mixed(0.1)).direction
    additive = curvlab.solve("kfi", curvature, p.gradient(), damping=Additive(0.1)).direction
    assert all(torch.equal(mixed[name], additive[name]) for name in mixed)


@pytest.mark.parametrize("pi", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pi_that_is_not_positive_is_refused(pi: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        curvlab.solvers.KFI(pi=pi)


@pytest.mark.parametrize(
    ("traces", "expected"),
    [((0.0, 1.0), (1e-6, True)), ((1.0, 0.0), (1e6, True)), ((0.0, 0.0), (1.0, False))],
)
def test_pi_is_at_the_end_of_its_range_where_a_trace_is_zero(
    traces: tuple[float, float], expected: tuple[float, bool]
) -> None:
    chosen = split_damping(torch.tensor(traces[0]).double(), 3, torch.tensor(traces[1]).double(), 2)
    assert (float(chosen.pi), bool(chosen.clamped)) == expected


@pytest.mark.parametrize("zero", ["output", "inputs"])
@pytest.mark.parametrize("solver", ["kfi", "sm-kfi"])
def test_without_curvature_the_step_is_that_of_the_damping_alone(solver: str, zero: str) -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    layer = curvature.layers[0]
    given = getattr(layer, zero)
    flat = replace(curvature, layers=(replace(layer, **{zero: given.map(torch.zeros_like)}),))
    gradient = {name: p.gradient()[name] for name in flat.blocks}
    step = curvlab.solve(solver, flat, gradient, alpha=ALPHA).direction["0.weight"]
    assert_close(step, -gradient["0.weight"] / ALPHA, 1e-4)


def test_pi_survives_traces_whose_ratio_overflows() -> None:
    chosen = split_damping(torch.tensor(1e30), 1, torch.tensor(1e-30), 1)
    assert (float(chosen.pi), bool(chosen.clamped)) == (1e6, True)


@pytest.mark.parametrize("solver", ["kfi", "sm-kfi"])
def test_a_given_pi_overrides_the_traces(solver: str) -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    solution = curvlab.solve(f"{solver}[pi=0.3]", curvature, p.gradient(), alpha=ALPHA)
    for layer, dense in zip(curvature.layers, written_out(p, curvature), strict=True):
        weight, bias = dense_solve(solver, dense, Mixed(ALPHA), pi=0.3)
        assert_close(solution.direction[f"{layer.name}.weight"], weight, 1e-9)
        assert bias is not None
        assert_close(solution.direction[f"{layer.name}.bias"], bias, 1e-9)
    weights = solution.frame().set_index("block").filter(like="weight", axis=0)
    assert weights["pi"].tolist() == pytest.approx([0.3] * len(weights))
    assert not weights["pi_clamped"].any()


@pytest.mark.parametrize("solver", ["kfi", "sm-kfi"])
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_a_pi_beyond_its_range_is_clamped_and_said_so(solver: str, scale: float) -> None:
    p = problem(**WIDE)
    curvature = curvlab.estimate("pch-1", p)
    scaled = curvature.layers[0].map(lambda t: t)
    output = scaled.output.map(lambda t: t * scale)  # type: ignore[union-attr]
    changed = replace(curvature, layers=(replace(scaled, output=output), *curvature.layers[1:]))
    frame = curvlab.solve(solver, changed, p.gradient(), alpha=ALPHA).frame().set_index("block")
    assert frame.loc["0.weight", "pi"] == pytest.approx(1e6 if scale < 1 else 1e-6)
    assert frame["pi_clamped"].tolist() == [name == "0.weight" for name in frame.index]
    dense = written_out(p, changed)[1]
    assert frame.loc["2.weight", "pi"] == pytest.approx(pi_of(dense.input_factor(solver), dense.b))
    assert frame["pi"].isna().tolist() == [name.endswith("bias") for name in frame.index]


def test_conjugate_gradients_have_no_pi() -> None:
    p = problem(**WIDE)
    frame = curvlab.solve("ea-cg", curvlab.estimate("pch-1", p), p.gradient(), alpha=ALPHA).frame()
    assert frame["pi"].isna().all()
    assert not frame["pi_clamped"].any()
