"""Tuning by successive halving: planted optima, budgets, edges, divergence, and going on after a stop."""

from __future__ import annotations

import math
from functools import partial

import pytest

from curvlab.exceptions import SpecError
from curvlab.studies.setup import Setup
from curvlab.studies.train.optimizers import optimizers
from curvlab.studies.tuning import GRIDS, Result, Trial, Tuning, run_trial, tune

RATES = GRIDS["other"]["lr"]


def bowl(lr: float, alpha: float | None = None) -> partial[Result]:
    """A training whose loss is lowest at the planted values, falls with the epochs, and diverges beyond."""

    def run(lr: float, alpha: float | None, trial: Trial) -> Result:
        made = optimizers.make(trial.spec)
        if made.lr > 10 * lr:
            return Result(math.inf, 1.0)
        loss = math.log(made.lr / lr) ** 2 + 1 / trial.epochs
        if alpha is not None:
            loss += math.log(made.alpha / alpha) ** 2  # type: ignore[attr-defined]
        return Result(loss, cpu_seconds=trial.epochs)

    return partial(run, lr, alpha)


@pytest.mark.parametrize("lr", RATES)
def test_a_planted_learning_rate_is_found_wherever_it_lies(lr: float) -> None:
    (found,) = tune([Tuning.of("adam", epochs=5)], bowl(lr))
    assert found.values == {"lr": lr}
    assert found.spec == optimizers.canonical(f"adam[lr={lr}]")
    assert found.at_edge == (("lr",) if lr in (RATES[0], RATES[-1]) else ())


@pytest.mark.parametrize("lr", GRIDS["second-order"]["lr"])
@pytest.mark.parametrize("alpha", GRIDS["second-order"]["alpha"])
def test_a_planted_damping_is_found_beside_the_learning_rate(lr: float, alpha: float) -> None:
    (found,) = tune([Tuning.of("second-order[provider=fisher,solver=kfi]", epochs=5)], bowl(lr, alpha))
    assert found.values == {"lr": lr, "alpha": alpha}


@pytest.mark.parametrize(
    ("epochs", "rungs", "sizes"),
    [(1, (1,), [15]), (2, (1, 2), [15, 5]), (5, (1, 2, 5), [15, 5, 2]), (9, (1, 3, 9), [15, 5, 2])],
)
def test_every_contestant_has_the_same_budget_of_epochs(
    epochs: int, rungs: tuple[int, ...], sizes: list[int]
) -> None:
    tunings = [Tuning.of(spec, epochs) for spec in ("sgd", "rmsprop", "second-order")]
    assert {(tuning.rungs, tuple(tuning.sizes)) for tuning in tunings} == {(rungs, tuple(sizes))}
    for tuning, found in zip(tunings, tune(tunings, bowl(0.1)), strict=True):
        assert found.trials == sum(sizes)
        assert found.epochs == tuning.epochs == sum(a * b for a, b in zip(rungs, sizes, strict=True))
        assert found.cpu_seconds == pytest.approx(found.epochs, rel=1), "what diverged took a second"


def test_a_tuning_goes_on_from_the_results_it_has() -> None:
    tuning, kept, ran = Tuning.of("sgd", epochs=9), {}, []

    def run(trial: Trial) -> Result:
        if len(ran) == 17:
            raise KeyboardInterrupt
        ran.append(trial)
        return bowl(0.5)(trial)

    with pytest.raises(KeyboardInterrupt):
        tune([tuning], run, on_result=kept.__setitem__)
    again: list[Trial] = []

    def counted(trial: Trial) -> Result:
        again.append(trial)
        return bowl(0.5)(trial)

    assert tune([tuning], counted, results=kept) == tune([tuning], bowl(0.5))
    assert not set(again) & set(ran)
    assert len(again) + len(ran) == 15 + 5 + 2


def test_fields_that_the_spec_names_are_not_tuned() -> None:
    tuning = Tuning.of("second-order[lr=0.3]", epochs=3)
    assert {name for name, _ in tuning.grid} == {"alpha"}
    fixed = Tuning.of("sgd[lr=0.3]", epochs=3)
    (found,) = tune([fixed], bowl(1.0))
    assert (found.spec, found.values, found.at_edge) == (optimizers.canonical("sgd[lr=0.3]"), {}, ())
    assert (found.epochs, found.epoch_seconds) == (1, 1.0), "one short training, for its pace"


def test_where_every_point_diverges_that_is_told_by_the_loss() -> None:
    (found,) = tune([Tuning.of("sgd", epochs=3)], lambda trial: Result(math.inf))
    assert found.loss == math.inf


def test_an_outcome_before_the_end_and_fields_that_are_not_there_are_refused() -> None:
    with pytest.raises(SpecError, match="not complete"):
        Tuning.of("sgd", epochs=1).outcome({})
    with pytest.raises(SpecError, match="no field `alpha`"):
        Tuning.of("sgd", epochs=1, grid={"alpha": (0.1,)})
    with pytest.raises(SpecError, match="is empty"):
        Tuning.of("sgd", epochs=1, grid={"lr": ()})
    with pytest.raises(SpecError, match="1 or more"):
        Tuning.of("sgd", epochs=0)


def test_a_trial_is_validated_on_examples_that_it_does_not_train_on() -> None:
    setup = Setup(data="digits[train=200]", batch=50)
    good, bad = (run_trial(setup, Trial(f"sgd[lr={lr}]", 2)) for lr in (0.2, 1e-4))
    assert good.loss < bad.loss < 3
    assert good.cpu_seconds > 0
    assert run_trial(setup, Trial("sgd[lr=3e38]", 2)).loss == math.inf
