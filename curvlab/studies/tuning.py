"""Learning rate and damping of an optimizer, chosen on a validation set by successive halving.

A training curve tells of a method only where its learning rate (and α) suits it. All contestants
are therefore tuned alike: each has a grid of as many points, and training is spent on them in *rungs*. On the
first rung every point is trained for a few epochs; the best third goes on to the next rung, which is longer;
on the last rung the lowest validation loss decides:

    rungs of N epochs     N/9, N/3, N (rounded, at least 1; equal ones count once)
    points on them        G, ⌈G/3⌉, ⌈G/9⌉         every training begins anew, with weights of its own seed
    cost                  Σ points × epochs       the same number of epochs for every contestant

The validation set is a fifth of the training set, drawn by the seed; the test set is not looked at. A point
whose training diverges is the last of its rung. Where the best point is at the end of its grid,
`Tuned.at_edge` names the field: a better one may lie beyond.

Everything is a function of the results so far: `Tuning.next_trials` says what to train next, and nothing once
all is known, so that a study which keeps its results goes on where it was. `tune` does all of it in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from curvlab import specs
from curvlab.exceptions import SpecError
from curvlab.studies.setup import Setup
from curvlab.studies.store import Row
from curvlab.studies.train.optimizers import SecondOrderSpec, optimizers
from curvlab.studies.train.plan import TrainPlan

__all__ = ["GRIDS", "HOLDOUT", "Result", "Trial", "Tuned", "Tuning", "run_trial", "trial_of", "tune"]

HOLDOUT = 0.2
"""Share of the training set that is validated on."""
EVALUATED = 200
"""Training examples whose loss a trial looks at: the validation set decides, so that more would be waste."""
KEPT = 3
"""One of so many points goes on to the next rung."""
SEED = 1000
"""Added to the setup's seed for the first weights: other ones than those of the runs that are compared."""
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "second-order": {"lr": (0.02, 0.05, 0.1, 0.2, 0.5), "alpha": (0.003, 0.03, 0.3)},
    "other": {"lr": tuple(float(f"{mantissa}e{power}") for power in range(-4, 1) for mantissa in (1, 2, 5))},
}
"""What is tried of each field: 15 points for a second-order step, and as many for any other optimizer.

On a convolutional network 0.03 and 0.3 were best for α, with learning rates from 0.02 to 0.5: five of six
pairs ended at an end of this grid (reports/compare-cifar10).
"""

Values = dict[str, float]


@dataclass(frozen=True)
class Trial:
    """One training of a tuning: an optimizer with its values filled in, for the epochs of a rung."""

    spec: str
    epochs: int


@dataclass(frozen=True)
class Result:
    """What came of a trial: the validation loss, infinite where it diverged, and the processor's seconds."""

    loss: float
    cpu_seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Tuned:
    """What was chosen, and what that took.

    `spec` is the optimizer with the values in `values`; `at_edge` names those that are first or last of their
    grid. `loss` is the validation loss on the last rung, infinite where every point diverged, and
    `epoch_seconds` what an epoch there took of the processor.
    """

    spec: str
    values: Values
    loss: float
    at_edge: tuple[str, ...]
    trials: int
    epochs: int
    cpu_seconds: float
    epoch_seconds: float


@dataclass(frozen=True)
class Tuning:
    """What is tuned of one optimizer: the values to try of each field, and the epochs of each rung.

    >>> tuning = Tuning.of("sgd[momentum=0.8]", epochs=9)
    >>> len(tuning.points), tuning.rungs, tuning.epochs
    (15, (1, 3, 9), 48)
    >>> tuning.points[0]
    {'lr': 0.0001}
    """

    spec: str
    grid: tuple[tuple[str, tuple[float, ...]], ...]
    rungs: tuple[int, ...]

    @classmethod
    def of(cls, spec: str, epochs: int, grid: Mapping[str, tuple[float, ...]] | None = None) -> Tuning:
        """The tuning of an optimizer for runs of so many epochs; a field that the spec names is as given.

        `grid` replaces the values of `GRIDS`.
        """
        if epochs < 1:
            raise SpecError(f"epochs={epochs}: a tuning needs 1 or more")
        made = optimizers.make(spec)
        usual = GRIDS["second-order" if isinstance(made, SecondOrderSpec) else "other"]
        named = specs.parse(spec).fields
        chosen = {name: tuple(values) for name, values in (usual if grid is None else grid).items()}
        for name, values in chosen.items():
            if not hasattr(made, name):
                raise SpecError(f"`{spec}` has no field `{name}` to tune; leave it out of the grid")
            if not values:
                raise SpecError(f"the grid of `{name}` is empty; give at least one value")
        free = tuple((name, values) for name, values in chosen.items() if name not in named)
        lengths = {max(1, round(epochs / KEPT**step)) for step in range(3)}
        # Where nothing is free, one short training still tells how long an epoch takes.
        return cls(spec, free, tuple(sorted(lengths)) if free else (1,))

    @property
    def points(self) -> list[Values]:
        """Every combination of values."""
        names = [name for name, _ in self.grid]
        return [dict(zip(names, values, strict=True)) for values in product(*(v for _, v in self.grid))]

    @property
    def sizes(self) -> list[int]:
        """How many points are on each rung."""
        return [math.ceil(len(self.points) / KEPT**rung) for rung in range(len(self.rungs))]

    @property
    def epochs(self) -> int:
        """Epochs that the whole tuning takes."""
        return sum(size * epochs for size, epochs in zip(self.sizes, self.rungs, strict=True))

    def filled(self, values: Values) -> str:
        """The spec with these values, in its canonical form.

        >>> Tuning.of("sgd", 1).filled({"lr": 0.5})
        'sgd[lr=0.5,momentum=0.9,nesterov=false,weight_decay=0.0]'
        """
        made: Any = optimizers.make(self.spec)
        return optimizers.canonical(replace(made, **values))

    def next_trials(self, results: Mapping[Trial, Result]) -> list[Trial]:
        """The trials to run now: those of the first rung that is not complete; none at the end."""
        for rung in range(len(self.rungs)):
            missing = [trial for _, trial in self._rung(rung, results) if trial not in results]
            if missing:
                return missing
        return []

    def _rung(self, rung: int, results: Mapping[Trial, Result]) -> list[tuple[Values, Trial]]:
        """The points of a rung with their trials, in the order of the grid; the rungs before are complete."""
        kept = self.points
        for past in range(rung):
            losses = {i: results[self._trial(point, past)].loss for i, point in enumerate(kept)}
            best = sorted(sorted(losses, key=lambda i: losses[i])[: self.sizes[past + 1]])
            kept = [kept[i] for i in best]
        return [(point, self._trial(point, rung)) for point in kept]

    def _trial(self, point: Values, rung: int) -> Trial:
        return Trial(self.filled(point), self.rungs[rung])

    def trials(self, results: Mapping[Trial, Result]) -> list[tuple[Values, Trial]]:
        """All trials with the values that they try, rung by rung, once `next_trials` gives none."""
        return [one for rung in range(len(self.rungs)) for one in self._rung(rung, results)]

    def outcome(self, results: Mapping[Trial, Result]) -> Tuned:
        """What is chosen, from the results of all trials."""
        if self.next_trials(results):
            raise SpecError(
                f"the tuning of `{self.spec}` is not complete; run what `next_trials` gives first"
            )
        last = self._rung(len(self.rungs) - 1, results)
        values, best = min(last, key=lambda one: results[one[1]].loss)
        ran = [trial for _, trial in self.trials(results)]
        return Tuned(
            spec=best.spec,
            values=values,
            loss=results[best].loss,
            at_edge=tuple(n for n, v in self.grid if len(v) > 1 and values[n] in (min(v), max(v))),
            trials=len(ran),
            epochs=sum(trial.epochs for trial in ran),
            cpu_seconds=sum(results[trial].cpu_seconds for trial in ran),
            epoch_seconds=results[best].cpu_seconds / best.epochs,
        )


def run_trial(setup: Setup, trial: Trial) -> Result:
    """Train as a trial says, with a part of the training set held out, and validate on that."""
    from curvlab.studies.train.run import OK, train

    plan = TrainPlan(
        setup,
        trial.spec,
        trial.epochs,
        evaluate_examples=EVALUATED,
        run_seed=setup.seed + SEED,
        holdout=HOLDOUT,
    )
    last = train(plan, count_memory=False).iloc[-1]
    loss = float(last["test_loss"])
    fine = last["status"] == OK and math.isfinite(loss)
    return Result(
        loss if fine else math.inf, float(last["cpu_seconds"]), "" if fine else str(last["message"])
    )


def tune(
    tunings: Iterable[Tuning],
    run: Callable[[Trial], Result],
    *,
    results: Mapping[Trial, Result] | None = None,
    on_result: Callable[[Trial, Result], None] | None = None,
) -> list[Tuned]:
    """Tune each, one after the other; `results` that are known already are not run again.

    `run` trains one trial (`functools.partial(run_trial, setup)`), and `on_result` keeps what came of it.

    >>> def parabola(trial: Trial) -> Result:
    ...     return Result((math.log(optimizers.make(trial.spec).lr) - math.log(0.2)) ** 2 + 1 / trial.epochs)
    >>> tune([Tuning.of("sgd", epochs=9)], parabola)[0].values
    {'lr': 0.2}
    """
    known = dict(results or {})
    found = []
    for tuning in tunings:
        while trials := tuning.next_trials(known):
            for trial in trials:
                known[trial] = run(trial)
                if on_result is not None:
                    on_result(trial, known[trial])
        found.append(tuning.outcome(known))
    return found


def trial_of(row: Row) -> tuple[Trial, Result]:
    """The trial and its result that a row of a store holds; a loss that is missing there was not finite."""
    loss, message = row.get("loss"), row.get("message", "")
    result = Result(math.inf if loss is None else loss, row.get("cpu_seconds") or 0.0, message)
    return Trial(row["spec"], row["epochs_asked"]), result
