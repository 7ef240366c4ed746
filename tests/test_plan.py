"""Plans: bytes and operations predicted on fake tensors equal the measured ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import curvlab
from curvlab.exceptions import SpecError
from curvlab.studies.compare.costs import Pair, usage
from curvlab.studies.setup import Setup
from curvlab.studies.small.fake_problem import fake_problem
from curvlab.studies.small.plan import bytes_of, plan

# Without values nothing converges: with tol=0 and few iterations the measured run does not either.
SOLVERS = ["kfi", "sm-kfi", "cg[max_iter=3,tol=0]", "ea-cg[max_iter=3,tol=0]", "exact"]
DIGITS = Setup(data="digits", batch=60, dtype="float64")
WIDE = Setup(arch="90-7-3", data="synthetic[features=90,classes=3,examples=40]", batch=12, dtype="float64")


def explicit(solver: str) -> str:
    body = f"{solver[:-1]}," if solver.endswith("]") else f"{solver}["
    return f"{body}formulation=explicit]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "providers"),
    [(DIGITS, ["fisher"]), (WIDE, ["pch-2"])],
    ids=["narrow", "wide"],
)
def test_planned_and_measured_numbers_agree_exactly(setup, providers):
    problem = setup.build_problem()
    frame = plan(setup, providers, SOLVERS)
    assert len(frame) == len(providers) * (2 * len(SOLVERS) - 1)
    for row in frame.to_dict("records"):
        solver = explicit(row["solver"]) if row["form"] == "textbook" else row["solver"]
        used = usage(Pair(row["provider"], solver, 0.05), problem)
        assert row["status"] == "ok", row["message"]
        measured = [used.peak_bytes, used.held_bytes, used.flops]
        assert [row[name] for name in ("peak_bytes", "held_bytes", "flops")] == measured, row


@pytest.mark.slow
def test_a_matrix_free_curvature_is_planned_as_it_is_measured():
    problem = WIDE.build_problem()
    for provider in ("hessian", "gauss-newton[kind=exact]"):
        solver = "cg[max_iter=2,tol=0]"
        row = plan(WIDE, [provider], [solver], forms=["sample-space"]).iloc[0]
        assert row["peak_bytes"] == usage(Pair(provider, solver, 0.05), problem).peak_bytes


@pytest.mark.slow
def test_a_problem_of_real_tensors_is_planned_like_its_setup():
    problem = DIGITS.build_problem()
    by_problem, by_setup = (plan(subject, ["pch-1"], ["kfi"]) for subject in (problem, DIGITS))
    assert by_problem.equals(by_setup)
    assert problem.model[0].weight.grad is None


@pytest.mark.slow
def test_kfi_at_imagenet_width_fits_a_small_card_in_the_sample_space_only():
    setup = Setup(arch="imagenet10-fcnn", data="imagenet10", batch=100)
    frame = plan(setup, ["fisher"], ["kfi"], memory="11GB")
    assert frame[["form", "fits"]].values.tolist() == [["sample-space", True], ["textbook", False]]
    textbook = frame[frame["form"] == "textbook"].iloc[0]
    assert textbook["largest"].startswith("150528×150528")
    assert textbook["peak_bytes"] > 2 * 150528**2 * 4


def test_nothing_of_the_size_of_the_plan_is_allocated():
    with fake_problem(Setup(arch="150528-1024-10", batch=100)) as problem:
        weight = next(iter(problem.model.parameters()))
        assert weight.shape == (1024, 150528)
        assert isinstance(weight, torch._subclasses.FakeTensor)


def test_regression_targets_follow_the_criterion():
    setup = Setup(arch="6-4-2", data="synthetic-regression[features=6,outputs=2]", criterion="mse", batch=10)
    assert plan(setup, ["fisher"], ["kfi"], forms=["sample-space"])["status"].tolist() == ["ok"]


def test_a_pair_that_does_not_exist_is_skipped_with_the_reason():
    frame = plan(DIGITS, ["hessian"], ["kfi"], memory="1GB", forms=["sample-space"])
    assert frame["status"].tolist() == ["skipped"]
    assert "matrix-free" in frame["message"][0]
    assert frame["fits"][0] is None


def test_a_stream_has_no_size_to_plan_for():
    problem = DIGITS.build_problem()
    batch = next(problem.batches())
    streamed = curvlab.Problem(problem.model, "cross-entropy", [(batch.inputs, batch.targets)])
    assert "no size to plan for" in plan(streamed, ["fisher"], ["kfi"])["message"][0]


@pytest.mark.parametrize(
    ("text", "count"),
    [("11GB", 11 * 10**9), ("16GiB", 16 * 2**30), ("1.5 kb", 1500), ("12", 12), (7, 7), ("2T", 2 * 10**12)],
)
def test_sizes_read_as_people_write_them(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "GB", "11 gigs", "-3GB", "1e9"])
def test_other_sizes_are_refused_with_an_example(text):
    with pytest.raises(SpecError, match="11GB"):
        bytes_of(text)


def _tokens() -> curvlab.Problem:
    """A loss for each token, some of which are left out: weights that differ between positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5))
    targets = torch.randint(5, (4, 3))
    targets[0, 1:] = -100
    return curvlab.Problem(model, "cross-entropy", torch.randint(7, (4, 3)), targets)


def _images() -> curvlab.Problem:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Tanh()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * 16, 3))
    return curvlab.Problem(model, "cross-entropy", torch.randn(5, 2, 6, 6), torch.randint(3, (5,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "solvers"),
    [
        ("fisher", ["kfi", "sm-kfi", "cg[max_iter=2,tol=0]", "ea-cg[max_iter=2,tol=0]", "exact"]),
        ("fisher[kind=mc,positions=2]", ["kfi"]),
        ("gauss-newton[kind=rows,samples=1]", ["kfi"]),
        ("pch[kind=rows]", ["kfi"]),
        ("pch[kind=rows,poseig=last]", ["ea-cg[max_iter=2,tol=0]"]),
        ("pch[kind=exact]", ["cg[max_iter=2,tol=0]"]),
        ("hessian", ["cg[max_iter=2,tol=0]"]),
        ("gauss-newton[kind=exact]", ["cg[max_iter=2,tol=0]"]),
        ("fisher[structure=ekfac]", ["exact"]),
        ("fisher[structure=layer]", ["exact"]),
    ],
)
@pytest.mark.parametrize("made", [_images, pytest.param(_tokens, marks=pytest.mark.long)])
def test_pairs_on_networks_that_are_no_chains_are_planned_as_they_are_measured(made, provider, solvers):
    problem = made()
    frame = plan(problem, [provider], solvers, forms=["sample-space"])
    assert frame["status"].tolist() == ["ok"] * len(solvers), frame["message"].tolist()
    for row in frame.to_dict("records"):
        measured = usage(Pair(provider, row["solver"], 0.05), problem).peak_bytes
        assert row["peak_bytes"] == pytest.approx(measured, rel=0.15), row["solver"]
