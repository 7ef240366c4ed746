"""Comparisons: what their frames hold, what the store keeps, and what runs again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import curvlab
from curvlab.exceptions import SpecError
from curvlab.providers import Provider
from curvlab.providers.base import resolved_choice
from curvlab.providers.registry import providers
from curvlab.studies.compare import directions, measurements, run
from curvlab.studies.compare.columns import CELLS, CONVERGENCE, ERRORS, REPETITIONS, TRACES
from curvlab.studies.compare.costs import Pair, usage
from curvlab.studies.compare.directions import newton
from curvlab.studies.compare.run import Comparison, compare, load_comparison, merge_comparisons
from curvlab.studies.compare.settings import Settings, build
from curvlab.studies.compare.spectra import Krylov
from curvlab.studies.compare.tasks import Task
from curvlab.studies.setup import Setup
from curvlab.studies.small.plan import plan
from curvlab.studies.store import Store
from tests.cases import ONE_SCENE

TINY = Setup(arch="6-4-3", data="synthetic[features=6,classes=3,examples=50]", batch=20, dtype="float64")
PROVIDERS = ["fisher", "pch-1", "hessian"]
SHORT = "cg[max_iter=3,tol=0]"
ALPHA = 0.5  # large enough for the damped Hessian of the tiny network to be definite


@pytest.mark.slow
def test_off_the_chain_rows_and_their_keys_name_what_auto_means(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    )
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(6, 1, 3, 3), torch.arange(6) % 3)
    asked = ["pch-1", "pch[kind=rows,poseig=last]", "gauss-newton", "fisher"]
    assert resolved_choice("pch-1", problem) == asked[1] == curvlab.estimate("pch-1", problem).provider
    compared = compare(problem, asked, ["kfi"], repetitions=1, output=tmp_path)
    named = ["pch[kind=rows,poseig=last]", "gauss-newton[kind=rows]", "fisher"]
    assert compared.cells["provider"].tolist() == named
    assert compared.config["providers"] == named
    measured = len(Store(tmp_path).rows())
    compare(problem, named, ["kfi"], repetitions=1, output=tmp_path)
    assert len(Store(tmp_path).rows()) == measured  # under their full names they are the same rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def compared(folder) -> Comparison:
    return compare(TINY, PROVIDERS, ["kfi", SHORT], alpha=ALPHA, **ONE_SCENE, repetitions=2, output=folder)


def cell(compared: Comparison, provider: str, solver: str) -> dict:
    frame = compared.cells
    return frame[(frame["provider"] == provider) & (frame["solver"] == solver)].iloc[0].to_dict()


def tiny_problem(activation: type[torch.nn.Module] = torch.nn.Tanh) -> curvlab.Problem:
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), activation(), torch.nn.Linear(4, 3)).double()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return curvlab.Problem(model, "cross-entropy", inputs, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))


@pytest.mark.slow
def test_every_pair_has_a_cell_and_frames_have_the_columns_reports_read(compared):
    assert compared.cells[["provider", "solver"]].values.tolist() == [
        [provider, solver] for provider in PROVIDERS for solver in ("kfi", "cg[max_iter=3,tol=0.0]")
    ]
    assert list(compared.cells) == [column.name for column in CELLS]
    assert list(compared.repetitions) == [column.name for column in REPETITIONS]
    assert list(compared.errors) == [column.name for column in ERRORS]
    assert list(compared.traces) == [column.name for column in TRACES]
    assert list(compared.convergence) == [column.name for column in CONVERGENCE]
    assert set(compared.repetitions["repetition"]) == {0, 1}


def test_a_pair_that_does_not_exist_is_skipped_with_the_reason_and_is_no_failure(compared):
    skipped = cell(compared, "hessian", "kfi")
    assert skipped["status"] == "skipped"
    assert "matrix-free" in skipped["message"]
    assert math.isnan(skipped["total_seconds"])
    assert compared.ok
    assert any("matrix-free" in warning for warning in compared.warnings)


def test_errors_in_the_store_equal_those_of_the_python_api(compared, folder):
    expected = curvlab.errors(TINY.build_problem(), ["fisher", "pch-1", "hessian"])
    for frame in (compared.errors, load_comparison(folder).errors):
        assert frame["error"].tolist() == expected["error"].tolist()
        assert frame["relative"].tolist() == expected["relative"].tolist()
        assert frame["layer"].tolist() == expected["layer"].tolist()
    total = expected[(expected["layer"] == "Total") & (expected["provider"] == "fisher")].iloc[0]
    assert cell(compared, "fisher", "kfi")["error_relative"] == total["relative"]


def test_a_second_comparison_in_one_process_has_the_errors_of_its_own_providers():
    settings = {"alpha": ALPHA, **ONE_SCENE, "repetitions": 1}
    first = compare(TINY, ["fisher"], ["kfi"], **settings)
    second = compare(TINY, ["fisher", "pch-1"], ["kfi"], **settings)
    assert set(first.errors["provider"]) == {"fisher"}
    assert set(second.errors["provider"]) == {"fisher", "pch-1"}
    assert second.errors["error"].notna().all()


@pytest.mark.slow
def test_bytes_and_operations_equal_those_of_usage_and_of_the_plan(compared):
    problem = TINY.build_problem()
    planned = plan(TINY, ["fisher", "pch-1"], ["kfi", SHORT], alpha=ALPHA, forms=["sample-space"])
    for row in planned.to_dict("records"):
        found = cell(compared, row["provider"], row["solver"])
        used = usage(Pair(row["provider"], row["solver"], ALPHA), problem)
        assert found["peak_bytes"] == found["planned_bytes"] == row["peak_bytes"] == used.peak_bytes
        assert found["held_bytes"] == row["held_bytes"] == used.held_bytes
        assert found["flops"] == row["flops"] == used.flops


def test_closeness_to_newton_equals_the_dense_solution_by_autograd(compared):
    problem = TINY.build_problem()
    solution = curvlab.solve("kfi", curvlab.estimate("pch-1", problem), problem.gradient(), alpha=ALPHA)
    ours, exact = dense_directions(problem, solution.direction, ALPHA)
    found = cell(compared, "pch-1", "kfi")
    cosine = float(ours @ exact / (ours.norm() * exact.norm()))
    assert found["cosine"] == pytest.approx(cosine, abs=1e-7)
    assert found["distance"] == pytest.approx(float((ours - exact).norm() / exact.norm()), abs=1e-6)
    assert cell(compared, "hessian", "cg[max_iter=3,tol=0.0]")["distance"] < found["distance"]


def dense_directions(problem, direction, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The given direction, and Newton's from a dense Hessian of each block by torch's autograd."""
    batch = next(problem.batches())
    parameters = dict(problem.model.named_parameters())
    ours, exact = [], []
    for name, parameter in parameters.items():

        def loss(value, name=name):
            called = torch.func.functional_call(problem.model, parameters | {name: value}, (batch.inputs,))
            return torch.nn.functional.cross_entropy(called, batch.targets)

        start = parameter.detach()
        size = start.numel()
        hessian = torch.autograd.functional.hessian(loss, start).reshape(size, size)
        gradient = torch.func.grad(loss)(start).reshape(size)
        damped = (1 - alpha) * hessian + alpha * torch.eye(size, dtype=hessian.dtype)
        exact.append(torch.linalg.solve(damped, -gradient))
        ours.append(direction[name].reshape(size))
    return torch.cat(ours).detach(), torch.cat(exact).detach()


def test_newton_says_why_where_the_damped_hessian_is_indefinite():
    problem = tiny_problem()
    exact = newton(problem, alpha=1e-6)
    gradient = problem.gradient()
    close = exact.joint({name: -gradient[name] for name in gradient})
    assert math.isnan(close.cosine)
    assert "indefinite" in close.reason


def test_newton_s_direction_leaves_a_residual_below_1e_8_whatever_the_damping():
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -3, 60, dtype=torch.float64)
    inputs = torch.randn(100, 60, generator=generator, dtype=torch.float64) * scales
    problem = curvlab.Problem(
        torch.nn.Linear(60, 1, bias=False).double(), "mse", inputs, inputs.sum(dim=1, keepdim=True) + 1
    )
    hessian, gradient = 2 * inputs.T @ inputs / 100, problem.gradient()["weight"].flatten()
    for alpha in (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4):
        direction = newton(problem, alpha).direction["weight"].flatten()
        residual = (1 - alpha) * hessian @ direction + alpha * direction + gradient
        assert residual.norm() <= 1.01e-8 * gradient.norm()


def test_a_damped_hessian_with_an_eigenvalue_of_zero_has_no_newton_direction():
    space = Krylov(lambda vector: -vector, torch.ones(1, dtype=torch.float64))
    space.grow(1)
    assert directions._indefinite(space, 0.5)  # 0.5 · (-1) + 0.5
    assert not directions._indefinite(space, 0.5 + 1e-12)


def test_newton_s_direction_is_solved_up_to_its_limit_of_parameters_and_not_beyond():
    problem = tiny_problem()
    gradient = problem.gradient()
    at_the_limit = newton(problem, alpha=0.5, parameters=39)
    assert at_the_limit.reasons == {}
    assert at_the_limit.joint(at_the_limit.direction).cosine == pytest.approx(1.0, abs=1e-12)
    beyond = newton(problem, alpha=0.5, parameters=38)
    assert beyond.direction == {}
    why = "left out: 39 parameters, more than the limit of 38"
    assert beyond.block(gradient, "0.weight").reason == f"0.weight: {why}"
    assert beyond.joint(gradient).reason == f"0.weight (and 3 more): {why}"


@pytest.mark.slow
def test_a_step_of_zero_is_called_one_and_not_a_gradient_of_zero():
    found = compare(tiny_problem(), ["fisher"], ["ea-cg[max_iter=0]", "ea-cg"], alpha=ALPHA, repetitions=1)
    still, moving = found.cells.to_dict("records")
    assert (still["zero_step"], moving["zero_step"]) == (True, False)
    assert math.isclose(still["distance"], 1.0)
    assert math.isnan(still["cosine"])
    assert "gradient is zero" not in " ".join([*found.warnings, still["newton_reason"]])
    assert "fisher + ea-cg[max_iter=0]: its step is zero, so it would change nothing." in found.warnings


def test_a_step_of_zero_is_known_where_newton_s_direction_is_not():
    found = compare(tiny_problem(), ["fisher"], ["ea-cg[max_iter=0]"], repetitions=1, newton_limit=1)
    assert found.cells["zero_step"].tolist() == [True]
    assert found.cells["distance"].isna().all()


def test_one_repetition_has_no_spread(tmp_path):
    once = compare(tiny_problem(), ["fisher"], ["kfi"], repetitions=1, output=tmp_path)
    twice = compare(tiny_problem(), ["fisher"], ["kfi"], repetitions=2, output=tmp_path)
    assert once.cells["total_iqr"].isna().all()
    assert twice.cells["total_iqr"].notna().all()


def test_seconds_are_medians_of_the_repetitions(compared):
    times = compared.repetitions
    own = times[(times["provider"] == "fisher") & (times["solver"] == "kfi")]
    total = own[["estimate_seconds", "prepare_seconds", "apply_seconds"]].sum(axis=1)
    found = cell(compared, "fisher", "kfi")
    assert found["total_seconds"] == pytest.approx(total.median())
    assert found["total_iqr"] == pytest.approx(total.quantile(0.75) - total.quantile(0.25))


def test_repetitions_are_interleaved_and_rotate(folder, compared):
    rows = Store(folder, read_only=True).rows("cost")
    timed = [(row.get("control"), row.get("provider"), row.get("solver")) for row in rows]
    assert len(set(timed[:7])) == 7  # two controls and five pairs
    assert timed[7:] == timed[1:7] + timed[:1]


def counted(*arguments, **options) -> tuple[int, Comparison]:
    """How many cells were measured, and the comparison."""
    seen: list[int] = []
    chosen = ONE_SCENE | {"on_progress": lambda progress: seen.append(progress.done)} | options
    found = compare(*arguments, **chosen)
    return seen[-1], found


@pytest.mark.slow
def test_a_finished_comparison_is_not_run_again_and_more_repetitions_run_only_those(tmp_path):
    ask = (TINY, ["fisher"], ["kfi"])
    # The scene, three controls, an error and a solve; and a round of timing is two controls and the pair.
    assert counted(*ask, repetitions=2, output=tmp_path)[0] == 6 + 2 * 3
    assert counted(*ask, repetitions=2, output=tmp_path)[0] == 0
    assert counted(*ask, repetitions=3, output=tmp_path)[0] == 3
    assert counted(TINY, ["fisher[kind=empirical]"], ["kfi"], repetitions=3, output=tmp_path)[0] == 0
    assert counted(*ask, repetitions=1, alpha=0.1, output=tmp_path)[0] == 6 + 3
    assert counted(*ask, repetitions=1, output=tmp_path, fresh=True)[0] == 6 + 3


@pytest.mark.slow
def test_a_finished_comparison_is_shown_without_building_its_problem(tmp_path, monkeypatch):
    image = Setup(
        arch="lenet[image=1-8-8]", data="synthetic-images[image=1-8-8,classes=3,examples=40]", batch=4
    )
    asked = {"solvers": ["kfi"], "repetitions": 1, "at": ["init"], "batches": 1, "output": tmp_path}
    first = compare(image, ["pch-1", "fisher"], **asked)
    built = []
    monkeypatch.setattr(run, "build", lambda subject: built.append(subject) or build(subject))
    again = compare(image, ["pch-1", "fisher"], **asked)
    assert built == []
    assert again.cells.equals(first.cells)
    assert again.config == first.config
    assert again.cells["provider"].tolist() == ["pch[kind=rows,poseig=last]", "fisher"]
    # Of a provider that was not asked for before it is not known what it is on this problem.
    more = compare(image, ["pch-2", "fisher"], **asked)
    assert len(built) == 1
    assert more.cells["provider"].tolist() == ["pch-2[kind=rows,poseig=last]", "fisher"]


def test_the_store_says_what_was_compared_and_loads_as_the_same_comparison(compared, folder):
    loaded = load_comparison(folder)
    for name in ("cells", "repetitions", "errors", "traces", "blocks"):
        assert getattr(loaded, name).equals(getattr(compared, name)), name
    assert loaded.config == compared.config
    assert loaded.command == compared.command
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    assert len((folder / "results.csv").read_text().splitlines()) == 1 + len(compared.cells)


def test_one_torn_and_one_corrupted_line_cost_their_own_cells_only(tmp_path):
    ask = (TINY, ["fisher"], ["kfi"])
    counted(*ask, repetitions=2, output=tmp_path)
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = "{corrupted\n"
    path.write_text("".join(lines)[:-10])
    with pytest.warns(UserWarning, match=r"line (2|13)"):
        assert counted(*ask, repetitions=2, output=tmp_path)[0] == 2
    assert (tmp_path / "results.rejected.jsonl").exists()


@dataclass(frozen=True)
class Broken(Provider):
    """Raises when it is estimated."""

    needs_chain = False

    def statistics(self, problem):
        return ()

    def curvature(self, context, name):
        raise switch()


def switch() -> Exception:
    return RuntimeError("a defect of mine")


def test_a_cell_that_fails_is_a_row_with_its_message_and_the_others_go_on(tmp_path):
    found = compare(TINY, [Broken(), "fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path)
    assert found.cells["status"].tolist() == ["failed", "ok"]
    assert "a defect of mine" in found.cells["message"][0]
    assert not found.ok
    assert any("a defect of mine" in failure for failure in found.failures)
    ask = (TINY, [Broken(), "fisher"], ["kfi"])
    assert counted(*ask, repetitions=1, output=tmp_path)[0] == 0
    assert counted(*ask, repetitions=1, output=tmp_path, retry=True)[0] == 2


@pytest.mark.slow
def test_a_problem_is_compared_in_memory_and_told_apart_by_its_values(tmp_path):
    problem = tiny_problem()
    assert compare(problem, ["fisher"], ["kfi"], repetitions=1).ok
    # The scene, three controls, an error and a solve, and a round of timing: two controls and the pair.
    once = {"at": (), "repetitions": 1, "output": tmp_path}
    measured, found = counted(problem, ["fisher"], ["kfi"], **once)
    assert measured == 6 + 3
    assert found.scenes[["point", "draw"]].values.tolist() == [["given", 0]]
    assert counted(problem, ["fisher"], ["kfi"], **once)[0] == 0
    with torch.no_grad():
        next(problem.model.parameters()).add_(1)
    assert counted(problem, ["fisher"], ["kfi"], **once)[0] == 6 + 3


def test_what_the_problem_makes_equal_is_said():
    relu = compare(tiny_problem(torch.nn.ReLU), ["pch-1"], ["kfi"], repetitions=1)
    assert any("PCH and Gauss-Newton are the same" in warning for warning in relu.warnings)


@pytest.mark.slow
def test_training_rows_are_there_for_pairs_and_baselines():
    setup = Setup(data="digits[train=100,test=50]", batch=50)
    found = compare(
        setup, ["pch-1"], ["ea-cg"], **ONE_SCENE, repetitions=1, epochs=1, tune=False, train_seeds=1
    )
    assert found.convergence["optimizer"].unique().tolist() == ["pch-1 + ea-cg", "sgd", "adam"]
    assert found.convergence["epoch"].tolist() == [0, 1] * 3
    assert found.ok


@pytest.mark.slow
def test_training_rows_say_what_each_optimizer_was_run_with(tmp_path):
    setup = Setup(data="digits[train=100,test=50]", batch=50)
    ask = {"alpha": 0.1, "lr": 0.3, "baselines": ["sgd[lr=0.05]", "adam"], "epochs": 1, "repetitions": 1}
    compare(setup, ["pch-1"], ["ea-cg"], output=tmp_path, tune=False, train_seeds=1, **ONE_SCENE, **ask)
    ends = load_comparison(tmp_path).convergence.query("epoch == 1").set_index("optimizer")
    assert ends["lr"].to_dict() == {"pch-1 + ea-cg": 0.3, "sgd[lr=0.05]": 0.05, "adam": 0.001}
    assert ends["alpha"].dropna().to_dict() == {"pch-1 + ea-cg": 0.1}
    assert ends["momentum"].dropna().to_dict() == {"pch-1 + ea-cg": 0.0, "sgd[lr=0.05]": 0.9}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda: compare(TINY, ["phc-1"]), "Did you mean `pch-1`"),
        (lambda: compare(TINY, ["pch[gama=1]"]), "Did you mean `gamma`"),
        (lambda: compare(TINY, []), "no provider was given"),
        (lambda: compare(TINY, alpha=0.0), "alpha=0.0"),
        (lambda: compare(TINY, **ONE_SCENE, repetitions=0), "repetitions=0"),
        (lambda: compare(TINY, lr=-1.0), "lr=-1.0: a learning rate is a finite number above 0"),
        (lambda: compare(TINY, baselines=["sdg"]), "Did you mean `sgd`"),
        (lambda: compare(replace(TINY, model="mine:net")), "would change nothing: the model is your own"),
        (lambda: compare(tiny_problem(), epochs=1), "training and a test part"),
        (lambda: compare(tiny_problem(), at=("init",)), "trained again; give a Setup"),
        (lambda: compare(tiny_problem(), executor="process"), "give a Setup"),
        (lambda: compare(TINY, executor="proces"), "Did you mean `process`"),
    ],
)
def test_mistakes_are_sentences(change: Callable[[], object], sentence: str):
    with pytest.raises(SpecError) as raised:
        change()
    assert sentence in str(raised.value)


def test_labels_are_short_and_canonical_texts_complete():
    assert providers.label("pch[gamma=-1]") == providers.label("pch-1") == "pch-1"
    assert providers.label("pch-2[gamma=-0.5]") == "pch[gamma=-0.5]"
    assert providers.identity("pch-1") == (
        "pch[gamma=-1.0,kind=auto,max_factor=8192,output_gamma=-1.0,poseig=auto,positions=all,samples=1,seed=0,"
        "sharing=expand,structure=kronecker]"
    )
    assert providers.label(Broken()) == "Broken()"


def test_folders_merge_into_one_comparison(tmp_path):
    for name, provider in (("a", "fisher"), ("b", "pch-1")):
        compare(TINY, [provider], ["kfi"], **ONE_SCENE, repetitions=1, output=tmp_path / name)
    done = merge_comparisons([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    joined = load_comparison(tmp_path / "c")
    assert joined.cells["provider"].tolist() == ["fisher", "pch-1"]
    # Each has the study, its scene, three controls, a provider, a pair, and the times of two controls and the
    # pair: all but what is of the provider is in both.
    assert len(Store(tmp_path / "a")) == len(Store(tmp_path / "b")) == 10
    assert (done.merged.added, done.others, done.apart) == (10 + 3, {}, {})
    assert joined.controls["provider"].tolist() == ["identity", "sgd", "newton"]


def test_a_cell_that_was_measured_with_other_limits_too_counts_once(tmp_path):
    ask = (TINY, ["fisher"], ["kfi"])
    counted(*ask, alpha=ALPHA, repetitions=1, newton_limit=0, output=tmp_path)
    measured, found = counted(*ask, alpha=ALPHA, repetitions=1, output=tmp_path)
    assert measured == 6  # no time depends on the limit
    assert found.cells["draws"].tolist() == [1]
    assert found.cells["distance"].notna().all()
    assert (len(found.scenes), len(found.draws)) == (1, 4)  # of the controls and of the pair


@pytest.mark.slow
def test_a_row_does_not_depend_on_what_was_measured_before_it(monkeypatch):
    """Whatever a process has factorised for other pairs: a worker of a cluster takes them as they come."""
    wide = Setup(data="digits[train=64]", arch="64-6-10", batch=16, device="cpu", dtype="float64")
    settings = Settings.of(wide, threads=1, newton_limit=0)

    def rows(*solvers: str) -> list[dict]:
        monkeypatch.setattr(measurements, "_bench", None)
        return [measurements.run_task(Task("solve", settings, {}, "fisher", solver)) for solver in solvers]

    (alone,) = rows("kfi")
    assert alone["status"] == "ok"
    assert rows("ea-cg", "kfi")[-1] == alone


@pytest.mark.long
def test_processes_store_the_rows_that_serial_stores(tmp_path):
    ask = (TINY, ["fisher", "pch-1"], ["kfi"])
    serial = compare(*ask, **ONE_SCENE, repetitions=1, output=tmp_path / "serial")
    parallel = compare(
        *ask, **ONE_SCENE, repetitions=1, output=tmp_path / "parallel", executor="process[workers=2]"
    )
    keys = [
        {(row["kind"], row["key"]) for row in Store(tmp_path / name).rows()}
        for name in ("serial", "parallel")
    ]
    assert keys[0] == keys[1]
    same = [name for name in (column.name for column in CELLS) if not name.endswith(("_seconds", "_iqr"))]
    assert serial.cells[same].equals(parallel.cells[same])
    assert serial.errors.equals(parallel.errors)
    assert counted(*ask, repetitions=1, output=tmp_path / "parallel")[0] == 0
