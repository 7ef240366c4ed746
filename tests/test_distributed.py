"""Two ranks on gloo against one process on the joined batch, in float64.

The ranks are started once, as two processes on this machine; every test compares what they saved.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvlab
from curvlab.distributed import layer_traffic
from tests import distributed_ranks as ranks

SECONDS = 900  # a busy machine may take long; the ranks give up by themselves when one is lost
EXACT = {"rtol": 1e-10, "atol": 1e-11}
pytestmark = pytest.mark.slow


def run_ranks(count: int, folder: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    script = [sys.executable, str(Path(ranks.__file__))]
    started = [
        subprocess.Popen(
            [*script, str(rank), str(count), str(folder)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=SECONDS)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = run_ranks(2, tmp_path_factory.mktemp("ranks"))
    for result in results:
        assert "failed" not in result, "\n".join(result["failed"].values())
    return results


def check(expected: dict[str, Any], actual: dict[str, Any], where: object, **tolerance: float) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        label = f"{where}: {name}"
        if isinstance(value, Tensor):
            torch.testing.assert_close(
                actual[name], value, **(EXACT | tolerance), msg=lambda m, at=label: f"{at}: {m}"
            )
        else:
            assert actual[name] == value, label


@pytest.fixture(scope="module")
def problem() -> curvlab.Problem:
    return curvlab.Problem(ranks.chain(), "cross-entropy", *ranks.batch())


@pytest.mark.parametrize("cut", ranks.CUTS)
def test_loss_and_gradient_are_those_of_the_joined_batch(found: Any, problem: Any, cut: str) -> None:
    gradient = problem.gradient()
    for result in (rank["curvatures"] for rank in found):
        torch.testing.assert_close(result[cut, "loss"], problem.loss(), **EXACT)
        torch.testing.assert_close(result[cut, "norm"], gradient.norm(), **EXACT)
        check({name: gradient[name] for name in gradient}, result[cut, "gradient"], cut)


@pytest.mark.parametrize("cut", ranks.CUTS)
@pytest.mark.parametrize("provider", ranks.PROVIDERS)
def test_every_provider_gives_the_curvature_of_the_joined_batch(
    found: Any, problem: Any, cut: str, provider: str
) -> None:
    expected = ranks.facts(curvlab.estimate(provider, problem))
    for result in found:
        check(expected, result["curvatures"][cut, provider], (cut, provider))


@pytest.mark.parametrize("cut", ranks.CUTS)
@pytest.mark.parametrize("pair", ranks.pairs(), ids=" ".join)
def test_every_solver_gives_the_direction_of_the_joined_batch(
    found: Any, problem: Any, cut: str, pair: tuple[str, str]
) -> None:
    expected = ranks.solve(pair, curvlab.estimate(pair[0], problem), problem.gradient())
    residuals = expected.pop("residuals")
    for result in found:
        actual = dict(result["curvatures"][cut, *pair])
        torch.testing.assert_close(actual.pop("residuals"), residuals, rtol=1e-6, atol=1e-9)
        check(expected, actual, (cut, pair))


@pytest.mark.parametrize("cut", ranks.CUTS)
def test_gathered_rows_are_shared_and_narrow_layers_are_summed(found: Any, cut: str) -> None:
    assert all(rank["curvatures"][cut, "in the sample space"] for rank in found)


def test_ranks_end_with_the_same_bits(found: Any) -> None:
    first, second = (rank["training"] for rank in found)
    assert all(torch.equal(first[name], second[name]) for name in ranks.OPTIMIZERS)


@pytest.mark.parametrize("provider", ["fisher", "pch-1"])
@pytest.mark.parametrize("solver", ranks.SOLVERS)
def test_solves_shared_out_over_ranks_are_those_of_one(
    found: Any, problem: Any, provider: str, solver: str
) -> None:
    expected = ranks.solve((provider, solver), curvlab.estimate(provider, problem), problem.gradient())
    residuals = expected.pop("residuals")
    for result in (rank["shared_solves"] for rank in found):
        assert set(result["owners"]) == {0, 1}
        actual = dict(result[provider, solver])
        torch.testing.assert_close(actual.pop("residuals"), residuals, rtol=1e-6, atol=1e-9)
        check(expected, actual, (provider, solver))


@pytest.mark.parametrize("cut", ["uneven", "last empty"])
@pytest.mark.parametrize("provider", ranks.ON_GRAPHS)
def test_models_that_are_no_chain_are_joined_too(found: Any, cut: str, provider: str) -> None:
    whole = curvlab.Problem(ranks.Residual(), "cross-entropy", *ranks.batch())
    expected = ranks.facts(curvlab.estimate(provider, whole))
    for result in found:
        check(expected, result["graphs_and_streams"][cut, provider], (cut, provider))


@pytest.mark.parametrize("form", ["streamed", "mixed"])
def test_streams_and_weighted_rows_are_joined_by_their_weight(found: Any, form: str) -> None:
    whole = curvlab.Problem(ranks.chain(), ranks.weighted(), *ranks.batch())
    gradient = whole.gradient()
    for result in (rank["graphs_and_streams"] for rank in found):
        check({name: gradient[name] for name in gradient}, result[form, "gradient"], form)
        for provider in ranks.STREAMED:
            check(ranks.facts(curvlab.estimate(provider, whole)), result[form, provider], (form, provider))


@pytest.mark.parametrize("form", ["", ", streamed"])
@pytest.mark.parametrize("name", ranks.ANALYSED)
def test_spectra_estimates_and_samples_are_those_of_the_joined_batch(
    found: Any, name: str, form: str
) -> None:
    whole = curvlab.Problem(ranks.ANALYSED[name](), "cross-entropy", *ranks.batch())
    expected = ranks.analysed(whole)
    for result in found:
        check(expected, result["analysis"][name + form], name + form, rtol=1e-7, atol=1e-8)


def test_a_rank_whose_rows_all_have_weight_zero_takes_part(found: Any) -> None:
    inputs, targets = (part[: ranks.CUTS["uneven"]] for part in ranks.batch())
    whole = curvlab.Problem(ranks.chain(), ranks.weighted(), inputs, targets)
    expected = ranks.facts(curvlab.estimate("gauss-newton[kind=exact]", whole))
    for result in found:
        check(expected, result["graphs_and_streams"]["weightless", "gauss-newton[kind=exact]"], "weightless")


def test_what_is_sent_is_what_the_traffic_model_says(found: Any) -> None:
    sizes = [(14, 6, True), (6, 4, True), (4, 3, False)]
    layers = [layer_traffic(10, n, o, hidden=hidden) for n, o, hidden in sizes]
    expected = {"gathered": sum(t.gathered for t in layers), "reduced": sum(t.reduced for t in layers)}
    assert all(rank["traffic"] == expected for rank in found)


def test_an_error_on_one_rank_is_raised_on_all(found: Any) -> None:
    first, second = (rank["refusals"]["not finite"] for rank in found)
    assert second.startswith("ProblemError: inputs are not finite")
    assert first.startswith("ProblemError: rank 1: inputs are not finite")
    assert all("no rank of the process group" in rank["refusals"]["no rows"] for rank in found)
    assert all("every rank must make the same calls" in rank["refusals"]["apart"] for rank in found)


def test_ranks_that_disagree_are_refused_and_start_with_the_weights_of_the_first(found: Any) -> None:
    for rank, result in enumerate(one["refusals"] for one in found):
        assert result["other weights"].startswith("RankError: rank 1 of the process group came with other")
        assert "the weights (`0.weight`)" in result["other weights"]
        assert torch.equal(result["started with"], ranks.chain()[0].weight)
        assert len(result["told of"]) == rank
        assert "has label" in result["bad label"]
        assert "alpha" in result["other alpha"]
        assert result["other alpha"].startswith("RankError: rank 1")


def test_data_that_change_on_one_rank_make_all_start_anew(found: Any) -> None:
    inputs, targets = ranks.batch()
    inputs[ranks.CUTS["uneven"] :] *= 2
    gradient = curvlab.Problem(ranks.chain(), "cross-entropy", inputs, targets).gradient()
    for result in (rank["refusals"] for rank in found):
        assert result["both anew"]
        assert result["still shared"]
        check({name: gradient[name] for name in gradient}, result["changed"], "changed")


@pytest.mark.parametrize("name", ranks.OPTIMIZERS)
def test_fifty_steps_on_two_ranks_end_where_one_process_does(found: Any, name: str) -> None:
    expected = ranks.train(ranks.chain(), name)
    for result in found:
        torch.testing.assert_close(result["training"][name], expected, rtol=0, atol=1e-8)
