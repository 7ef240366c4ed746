"""Steps in a comparison: Krylov spaces, descents, controls, points, and the answers to planted questions."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import rich.progress
import torch
from safetensors.torch import save_file
from torch import nn

import curvlab
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.report.comparison import shown
from curvlab.report.content import content_of
from curvlab.report.controls import Against, Beside, against_gradient
from curvlab.report.pages import markdown_page
from curvlab.report.tables import share_table
from curvlab.studies.compare import directions
from curvlab.studies.compare.directions import DescentBench, NewtonReference, predicted_decrease
from curvlab.studies.compare.run import compare
from curvlab.studies.compare.settings import Settings, damping_of
from curvlab.studies.compare.spectra import Krylov, largest_of_hessian, layer_spectra
from curvlab.studies.compare.tasks import SceneProblems, scenes_of
from curvlab.studies.setup import Setup, load_weights
from tests.cases import ONE_SCENE

TINY = Setup(arch="6-4-3", data="synthetic[features=6,classes=3,examples=50]", batch=20, dtype="float64")


def problem(seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return Problem(model, "cross-entropy", inputs, torch.arange(8) % 3)


def test_one_krylov_space_solves_every_damping_and_shows_the_spectrum() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    matrix, right = root + root.T, torch.randn(12, generator=generator, dtype=torch.float64)
    space = Krylov(lambda x: matrix @ x, right)
    space.grow(50)
    assert space.exhausted
    assert space.steps <= 12
    torch.testing.assert_close(space.ritz()[0], torch.linalg.eigvalsh(matrix), rtol=1e-9, atol=1e-9)
    for scale, shift in ((0.9, 20.0), (0.5, 40.0)):
        expected = torch.linalg.solve(scale * matrix + shift * torch.eye(12, dtype=torch.float64), right)
        torch.testing.assert_close(space.solve(scale, shift)[0], expected, rtol=1e-9, atol=1e-12)


def test_newton_s_direction_is_left_out_before_anything_is_copied_or_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directions, "_in_float64", lambda problem: pytest.fail("it was copied"))
    # Four blocks of ten products: of a chain each is charged 1e7 operations at the least.
    assert "4.0e+08 operations" in NewtonReference(problem(), operations=1e8).at(0.05).reasons["0.weight"]


def test_newton_s_direction_is_left_out_where_it_costs_more_than_the_limit() -> None:
    reference = NewtonReference(problem(), operations=4e8)  # what the products are charged besides
    [reason] = set(reference.at(0.5).reasons.values())
    assert "operations, more than the limit of 4.0e+08" in reason
    assert 0 < reference.spent < 2e7  # a single product of one block told


def test_the_spectra_are_those_of_the_dense_blocks() -> None:
    subject = problem()
    for provider in ("gauss-newton", "hessian"):
        curvature = curvlab.estimate(provider, subject)
        for layer, found in zip(curvature.layers, layer_spectra(curvature), strict=True):
            values = torch.cat([curvature.blocks[name].eigvalsh() for name in layer.blocks])
            assert found.largest == pytest.approx(float(values.max()), rel=1e-6)
            assert found.exact == (provider == "gauss-newton")
            if found.exact:
                assert found.median == pytest.approx(float(values.sort().values[(len(values) - 1) // 2]))
    whole = curvlab.estimate("hessian[structure=full]", subject).to_dense()
    assert largest_of_hessian(subject) == pytest.approx(float(torch.linalg.eigvalsh(whole)[-1]), rel=1e-3)


def test_the_decrease_along_newton_s_step_of_a_quadratic_is_the_whole_way_at_step_size_one() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    subject = Problem(nn.Linear(3, 2, bias=False).double(), "mse", inputs, inputs @ torch.ones(3, 2).double())
    hessian, gradient = curvlab.estimate("hessian", subject), subject.gradient()
    step = torch.linalg.solve(hessian.to_dense(), -gradient["weight"].flatten()).reshape(2, 3)
    bench = DescentBench(subject)
    before = {name: p.clone() for name, p in subject.model.named_parameters()}
    found = bench.along({"weight": step})
    assert found.full == pytest.approx(1.0, abs=1e-12)
    assert found.rate == pytest.approx(1.0)
    assert math.isnan(found.other)
    assert predicted_decrease(hessian, gradient, {"weight": step}, bench.loss) == pytest.approx(1.0)
    quarter = bench.along({"weight": 4 * step})
    assert quarter.best == pytest.approx(1.0, abs=0.01)
    assert quarter.rate == pytest.approx(0.25, rel=0.1)
    for name, parameter in subject.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_share_of_the_largest_eigenvalue_is_a_damping_of_the_same_ratio() -> None:
    alpha = damping_of("10%", 2.0)
    assert alpha / (1 - alpha) == pytest.approx(0.2)
    for wrong in ("much", "1.5", "0", "-3%"):
        with pytest.raises(SpecError, match="neither a damping"):
            damping_of(wrong, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": "epoch:0"}, "point `epoch:0` is not known"),
        ({"at": "checkpoint"}, "needs a file: --checkpoint"),
        ({"checkpoint": "/nowhere/x.pt"}, "is no file"),
        ({"at": "given"}, "is that of a Problem"),
    ],
)
def test_points_that_do_not_exist_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Settings.of(TINY, **options)


def test_a_problem_is_measured_where_it_is_and_refuses_points() -> None:
    assert Settings.of(problem()).at == ("given",)
    with pytest.raises(SpecError, match="give a Setup"):
        Settings.of(problem(), at="init")


@pytest.mark.slow
def test_points_are_those_of_one_training_by_adam_whichever_is_asked_for_first() -> None:
    settings = Settings.of(TINY, at="init,step:2,epoch:1", batches=1)
    states = {}
    for scene in scenes_of(settings):
        states[scene.point] = SceneProblems(settings).problem(scene).model.state_dict()
    model, data = TINY.build_model(), TINY.load_data().to("cpu", torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.at_lr)
    batches = list(data.batches(20, 0, 0))
    expected = {"init": {name: value.clone() for name, value in model.state_dict().items()}}
    for inputs, targets in batches[:2]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    expected["step:2"] = model.state_dict()
    assert len(batches) == 2  # so that an epoch is two steps
    expected["epoch:1"] = model.state_dict()
    for point, state in expected.items():
        for name, value in state.items():
            torch.testing.assert_close(states[point][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_checkpoint_is_loaded_from_either_kind_of_file(tmp_path: Path, suffix: str) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    path = tmp_path / f"state.{suffix}"
    if suffix == "pt":
        torch.save({"state_dict": source.state_dict()}, path)
    else:
        save_file(source.state_dict(), path)
    load_weights(target, path)
    assert torch.equal(target.weight, source.weight)
    with pytest.raises(SpecError, match="not the state of this model"):
        load_weights(nn.Linear(4, 2), path)


@pytest.mark.parametrize(
    ("angle", "loss", "other", "beats"),
    [
        (Beside(0.1, 0.5, 1.0, True), Beside(0.4, 0.2, 1.0, True), Beside(0.3, 0.2), True),
        (Beside(0.1, 0.5, 1.0, False), Beside(0.4, 0.2, 1.0, True), Beside(0.3, 0.2), False),  # noise
        (Beside(0.1, 0.5, 1.0, True), Beside(0.205, 0.2, 1.0, True), Beside(0.3, 0.2), False),  # hardly lower
        (
            Beside(0.1, 0.5, 1.0, True),
            Beside(0.4, 0.2, 1.0, True),
            Beside(0.1, 0.2),
            False,
        ),  # worse elsewhere
        (Beside(0.001, 0.009, 1.0, True), Beside(0.4, 0.2, 1.0, True), Beside(0.3, 0.2), False),  # both close
        (Beside(), Beside(0.4, 0.2, 1.0, True), Beside(), True),  # no Newton step: the loss decides
        (Beside(), Beside(), Beside(), False),
    ],
)
def test_a_pair_beats_the_gradient_in_all_that_is_known_or_not_at_all(
    angle: Beside, loss: Beside, other: Beside, beats: bool
) -> None:
    assert Against(angle, loss, other, draws=3).beats == beats


def test_pairs_are_told_from_the_gradient_by_their_draws() -> None:
    angles = {"identity": [0.30, 0.32, 0.28], "better": [0.10, 0.12, 0.09], "equal": [0.29, 0.33, 0.27]}
    decreases = {"identity": [0.20, 0.15, 0.22], "better": [0.5, 0.45, 0.5], "equal": [0.25, 0.14, 0.21]}
    draws = pd.DataFrame(
        [
            {"provider": name, "solver": "" if name == "identity" else "kfi", "point": "init", "seed": 0,
             "draw": draw, "sine": sine, "decrease": decrease, "decrease_other": decrease}
            for name in angles
            for draw, (sine, decrease) in enumerate(zip(angles[name], decreases[name], strict=True))
        ]
    )  # fmt: skip
    found = against_gradient(draws, "init")
    assert found["better", "kfi"].angle == Beside(0.10, 0.30, 1.0, True, 1.0)
    assert found["equal", "kfi"].loss == Beside(0.21, 0.20, pytest.approx(1 / 3), False, 0.0)
    assert [pair[0] for pair, one in found.items() if one.beats] == ["better"]
    table = share_table(found)
    assert table.heads == (
        "provider",
        "solver",
        "draws",
        "closer to Newton than the gradient",
        "lower loss than the gradient",
        "on another batch",
        "closest of all pairs",
        "lowest loss of all pairs",
    )
    shown = {row[0].text: [entry.text for entry in row[2:]] for row in table.rows}
    assert shown == {
        "better": ["3", "100 %", "100 %", "100 %", "100 %", "100 %"],
        "equal": ["3", "66.7 %", "33.3 %", "33.3 %", "0 %", "0 %"],
    }


def test_of_draws_in_which_two_are_equally_good_each_has_half() -> None:
    draws = pd.DataFrame(
        {"provider": ["identity", "a", "b"], "solver": ["", "s", "s"], "point": "init", "seed": 0, "draw": 0}
        | {"sine": [0.5, 0.2, 0.2], "decrease": [0.1, 0.3, 0.4], "decrease_other": math.nan}
    )
    found = against_gradient(draws, "init")
    assert [one.angle.first for one in found.values()] == [0.5, 0.5]
    assert [one.loss.first for one in found.values()] == [0.0, 1.0]
    # What is not known of anybody has no column.
    assert "on another batch" not in share_table(found).heads


@pytest.mark.slow
def test_where_the_damping_rules_the_answer_is_the_gradient() -> None:
    """Digits after 300 steps of Adam at α = 0.05: every eigenvalue is below α."""
    found = compare(
        Setup(data="digits"),
        ["fisher", "gauss-newton", "pch-2"],
        ["kfi", "ea-cg", "exact"],
        at="step:300",
        at_lr=0.01,
        train_batch=500,
        batches=1,
        alphas=(),
        repetitions=1,
    )
    [largest] = found.scenes["largest_eigenvalue"]
    assert largest < 0.05 / 0.95
    answer = shown(found).recommendation
    assert answer.headline.startswith("None of them: use the gradient. The damping rules")
    assert answer.best is None
    assert "no pair beats the scaled gradient" in answer.headline


QUADRATIC = ("gauss-newton", "pch-1", "pch-2", "fisher[kind=exact]")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_on_a_quadratic_the_exact_providers_are_one_group_and_the_empirical_fisher_is_never_named(
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(60, 6, generator=generator, dtype=torch.float64) * torch.logspace(0, -1, 6).double()
    targets = inputs @ torch.randn(6, 4, generator=generator, dtype=torch.float64)
    targets = targets + 0.3 * torch.randn(60, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 4).double()
    nn.init.normal_(model.weight, generator=generator)
    found = compare(
        Problem(model, "mse", inputs, targets), ["fisher", *QUADRATIC], ["cg", "kfi"], alpha=0.01, alphas=(),
        repetitions=3,
    )  # fmt: skip
    answer = shown(found).recommendation
    assert answer.best is not None
    assert answer.best[0] in QUADRATIC
    assert "fisher +" not in answer.headline
    [group] = [text for text in answer.paragraphs if "are one group here" in text]
    assert all(name in group for name in QUADRATIC)
    cells = found.cells[(found.cells["solver"] == answer.best[1]) & found.cells["provider"].isin(QUADRATIC)]
    cheapest = cells.loc[cells["total_seconds"].idxmin(), "provider"]
    assert cheapest in answer.headline


@pytest.mark.slow
def test_a_residual_network_is_compared_end_to_end_and_the_recursion_is_skipped_once(
    tmp_path: Path,
) -> None:
    found = compare(
        Setup(arch="resnet8", data="synthetic-images", batch=2),
        ["fisher", "pch-1", "pch[kind=recursive]"],
        ["ea-cg"],
        repetitions=1,
        output=tmp_path,
        reference_limit=2e9,
        **ONE_SCENE,
    )
    assert found.failures == []
    assert found.cells["status"].tolist() == ["ok", "ok", "skipped"]
    assert sum("needs Linear layers in a chain" in warning for warning in found.warnings) == 1
    assert (found.cells["decrease"][:2] > 0).all()
    assert found.cells["newton_reason"][:2].str.contains("(--reference-limit)", regex=False).all()
    assert found.controls["provider"].tolist() == ["identity", "sgd", "newton"]
    assert found.scenes["covered_parameters"].tolist() == found.scenes["parameters"].tolist()
    page = shown(found).report(tmp_path / "page")
    assert "parameters with curvature" in page.read_text()


def test_a_comparison_shows_itself() -> None:
    found = curvlab.compare(problem(), ["fisher"], ["kfi"], repetitions=1, alphas=("0.5",))
    assert found.answer.splitlines()[0] == found.recommendation.headline
    assert {"cells", "controls", "draws", "dampings", "spectra", "scenes"} <= set(found.frames)
    assert isinstance(found.frames["cells"], pd.DataFrame)
    assert found.figure("time").get_xlabel().startswith("median time")
    with pytest.raises(Exception, match="Did you mean `pareto`"):
        found.figure("paretto")
    assert "srcdoc=" in found._repr_html_()


def test_a_notebook_shows_how_far_a_comparison_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_so_far: list[tuple[int, int]] = []

    class Bar:
        """Stands for the bar of rich, which a notebook would draw."""

        def __init__(self, *, transient: bool) -> None:
            assert transient

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *ended: object) -> None:
            pass

        def add_task(self, words: str, total: int | None) -> str:
            assert total is None
            return words

        def update(self, task: str, *, completed: int, total: int) -> None:
            assert task == "curvlab compare"
            shown_so_far.append((completed, total))

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    curvlab.compare(problem(), ["fisher"], ["kfi"], repetitions=1, alphas=())
    assert shown_so_far == []  # a script has its own output
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    curvlab.compare(problem(), ["fisher"], ["kfi"], repetitions=1, alphas=())
    done, totals = zip(*shown_so_far, strict=True)
    assert done == tuple(range(totals[0] + 1))
    assert len(set(totals)) == 1


@pytest.mark.slow
def test_a_comparison_whose_deciding_point_diverged_has_its_page() -> None:
    setup = Setup(arch="6-4-3", activation="relu", data=TINY.data, batch=20)
    found = compare(setup, ["fisher"], ["kfi"], at=("step:9",), at_lr=1e30, batches=1, repetitions=1)
    assert set(found.cells["status"]) == {"failed"}
    assert found.scenes.empty
    assert any("diverged" in text for text in found.failures)
    assert "diverged" in markdown_page(content_of(found))
