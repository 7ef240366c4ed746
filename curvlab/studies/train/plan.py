"""What a training run is: a setup, an optimizer, epochs and a schedule, as one value; and what it is told by.

A schedule is the factor of the learning rate as a function of the progress of a run. It has no state, so a
resumed run needs none of it restored. Two curves compare methods only as far as learning rate, damping and
momentum are fair, so these stand beside every curve (`RATES`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import cos, pi
from typing import TYPE_CHECKING, Any, ClassVar

from curvlab import specs
from curvlab.exceptions import SpecError
from curvlab.specs import Registry
from curvlab.studies.schema import Column, check_epochs, setting
from curvlab.studies.setup import Setup
from curvlab.studies.store import key_of
from curvlab.studies.train.optimizers import OptimizerSpec, optimizers

if TYPE_CHECKING:
    from torch import nn

    from curvlab.data import Dataset

__all__ = [
    "EPOCH",
    "PEAK",
    "RATES",
    "TRAIN_BATCH",
    "Constant",
    "Cosine",
    "Schedule",
    "Steps",
    "TrainPlan",
    "rate_words",
    "rates_of",
    "schedules",
]


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor of the learning rate, after `epoch` epochs (fractions count) of `epochs`."""

    needs_total: ClassVar[bool] = False

    @abstractmethod
    def factor(self, epoch: float, epochs: int) -> float:
        """What the learning rate is multiplied by."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The learning rate as it is.

    >>> Constant().factor(3.0, 10)
    1.0
    """

    def factor(self, epoch: float, epochs: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `floor` over the whole run.

    >>> Cosine().factor(5.0, 10)
    0.5
    """

    needs_total: ClassVar[bool] = True
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise SpecError(f"floor={self.floor}: expected a number from 0 to 1, the factor at the end")

    def factor(self, epoch: float, epochs: int) -> float:
        return self.floor + (1 - self.floor) * (1 + cos(pi * epoch / epochs)) / 2


@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplied by `gamma` after every `every` epochs.

    >>> Steps(every=2, gamma=0.5).factor(4.5, 10)
    0.25
    """

    every: int = 10
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise SpecError(f"every={self.every}: expected 1 or more epochs")
        if not 0 < self.gamma <= 1:
            raise SpecError(f"gamma={self.gamma}: expected a number above 0, at most 1, such as 0.1")

    def factor(self, epoch: float, epochs: int) -> float:
        return float(self.gamma ** (int(epoch) // self.every))


schedules: Registry[Schedule] = Registry("schedule")
schedules.register("constant", Constant)
schedules.register("cosine", Cosine)
schedules.register("steps", Steps)


TRAIN_BATCH = 100
"""Examples in a batch of `curvlab train`."""


@dataclass(frozen=True)
class TrainPlan:
    """One training run; equal plans give equal runs, to the bit on the CPU.

    Args:
        setup: model, data, criterion, batch size, seed, device and dtype.
        optimizer: `second-order[…]`, `sgd[…]`, `adam[…]`, `lbfgs[…]`, `muon[…]`, another of torch's by its
            name in lower case, or `package.module:function[…]`; see `curvlab.studies.train.optimizers`.
        epochs: passes over the training set.
        schedule: `constant`, `cosine` or `steps[every=…,gamma=…]`.
        evaluate_examples: at most this many training examples, drawn by the seed, for the training loss.
        run_seed: of the first weights and of the order of examples; None is the setup's seed, which fixes the
            data in any case, so that runs of several seeds are of the same data.
        holdout: this share of the training set, drawn by the setup's seed, is not trained on, and stands in
            for the test set: what hyperparameters are chosen by.

    >>> TrainPlan(Setup(batch=100), "second-order[lr=0.2]", epochs=3).labels()["optimizer"]
    'pch-1 + ea-cg'
    """

    setup: Setup = field(default_factory=lambda: Setup(batch=TRAIN_BATCH))
    optimizer: str = setting(
        "second-order",
        "second-order, sgd, adam, lbfgs, muon, another of torch's, or MODULE:NAME; with fields: "
        "sgd[lr=0.05,momentum=0.9].",
    )
    epochs: int = setting(
        10, "Passes over the training set; a larger number continues a finished run.", least=0
    )
    schedule: str = setting(
        "constant", "constant, cosine or steps[every=10,gamma=0.1].", flags=("--lr-schedule",)
    )
    evaluate_examples: int = 10_000
    run_seed: int | None = None
    holdout: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise SpecError(f"epochs={self.epochs}: expected 0 (only evaluate) or more")
        check_epochs(self.epochs)
        if self.evaluate_examples < 1:
            raise SpecError(f"evaluate_examples={self.evaluate_examples}: expected 1 or more")
        if not 0 <= self.holdout < 1:
            raise SpecError(
                f"holdout={self.holdout}: expected a share of the training set, from 0 to below 1"
            )

    @cached_property
    def spec(self) -> OptimizerSpec:
        """The optimizer's configuration."""
        return optimizers.make(self.optimizer)

    @cached_property
    def schedule_value(self) -> Schedule:
        """The schedule."""
        return schedules.make(self.schedule)

    @property
    def start_seed(self) -> int:
        """The seed of the first weights and of the order of the examples."""
        return self.setup.seed if self.run_seed is None else self.run_seed

    def load_data(self) -> Dataset:
        """The data set; with a `holdout` that part of the training set in place of the test set."""
        data = self.setup.load_data()
        if not self.holdout:
            return data
        import torch

        from curvlab.data.base import stratified_subset

        count, labels = len(data.train), data.train.labels
        kinds = labels if labels is not None and labels.ndim == 1 else None
        share = min(max(round(self.holdout * count), 1), count - 1)
        held = torch.zeros(count, dtype=torch.bool)
        held[stratified_subset(kinds, count, share, self.setup.seed)] = True
        train, test = (data.train.select(part.nonzero().flatten()) for part in (~held, held))
        return replace(data, train=train, test=test)

    def build_model(self) -> nn.Module:
        """The model with its first weights."""
        return replace(self.setup, seed=self.start_seed).build_model()

    def resolve(self) -> TrainPlan:
        """The same plan with every open choice of the setup made."""
        return replace(self, setup=self.setup.resolve())

    def labels(self) -> dict[str, str]:
        """How result rows name the optimizer, its provider and its solver."""
        return self.spec.labels(specs.parse(self.optimizer).name)

    def canonical(self) -> dict[str, Any]:
        """The plan as plain values in their one text form: what configuration files hold."""
        return {
            "study": "train",
            "optimizer": optimizers.canonical(self.spec.resolve()),
            "epochs": self.epochs,
            "schedule": schedules.canonical(self.schedule_value),
            "evaluate_examples": self.evaluate_examples,
            # Left out where they change nothing: run folders from before they existed stay what they are.
            **({} if self.run_seed is None else {"run_seed": self.run_seed}),
            **({"holdout": self.holdout} if self.holdout else {}),
            "setup": self.setup.resolve().fields(),
        }

    def identity(self) -> dict[str, Any]:
        """The canonical form without what does not change a run so far: how many epochs are to come."""
        fields = self.canonical()
        return (
            fields if self.schedule_value.needs_total else {k: v for k, v in fields.items() if k != "epochs"}
        )

    @cached_property
    def key(self) -> str:
        """The hash of the plan's identity."""
        return key_of(self.identity())

    def row_key(self, epoch: int) -> str:
        """The key of an epoch's row."""
        return key_of({"plan": self.key, "epoch": epoch})


RATES = (
    Column("lr", "plain", "learning rate", short="lr"),
    Column("alpha", "plain", "α"),
    Column("momentum", "plain", "momentum"),
)
"""What decides an optimizer's curve besides its method."""

EPOCH = (
    Column("epoch", "count", "epochs", short="Epoch"),
    Column("seconds", "number", "seconds", short="Seconds"),
    Column("train_loss", "loss", "training loss", short="Train loss"),
    Column("test_loss", "loss", "test loss", short="Test loss"),
    Column("test_accuracy", "percent", "test accuracy", short="Accuracy"),
    Column("status", "text", "status", short="Status"),
)
"""What every table of a run shows of an epoch."""

PEAK = Column("peak_bytes", "bytes", "peak", short="Peak")
"""The most memory that a step of the epoch took."""


def rates_of(spec: str) -> dict[str, float]:
    """Those settings of `RATES` that an optimizer has, by its spec; none where it names no optimizer.

    α is the damping of a second-order step: what another optimizer calls `alpha` is something else.

    >>> rates_of("sgd[lr=0.05]"), rates_of("adam")
    ({'lr': 0.05, 'momentum': 0.9}, {'lr': 0.001})
    """
    from curvlab.studies.train.optimizers import SecondOrderSpec, optimizers

    try:
        made = optimizers.make(spec)
    except SpecError:
        return {}
    names = ("lr", "alpha", "momentum") if isinstance(made, SecondOrderSpec) else ("lr", "momentum")
    return {name: float(getattr(made, name)) for name in names if hasattr(made, name)}


def rate_words(rates: Mapping[str, float]) -> str:
    """The settings that are known, as a list in words; empty where none is.

    >>> rate_words({"lr": 0.1, "alpha": 0.05, "momentum": float("nan")})
    'learning rate 0.1, α 0.05'
    """
    known = [one for one in RATES if not math.isnan(rates.get(one.name, math.nan))]
    return ", ".join(f"{one.heading} {rates[one.name]:g}" for one in known)
