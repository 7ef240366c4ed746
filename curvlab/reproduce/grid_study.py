"""A grid search as a study file: every combination of settings, each a training run of its own.

data, arch, criterion, seed, epochs, evaluate_examples     what is trained, as in `curvlab train`
pairs                          "provider + solver", or a baseline: "sgd", "adam", …
lr, batch                      for all of them
alpha                          for pairs
max_iter, tol                  for pairs with `cg` or `ea-cg`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from curvlab.exceptions import SpecError
from curvlab.files import read_settings
from curvlab.reproduce.paper import GRID
from curvlab.studies.setup import Setup
from curvlab.studies.train.plan import TrainPlan

__all__ = ["AXES", "GridStudy", "parse_only"]

AXES = tuple(GRID)
ITERATIVE = ("cg", "ea-cg")
TEXT, INTEGER, NUMBER = (str, "text"), (int, "an integer"), ((int, float), "a number")
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("data", "arch", "criterion", "pairs"), TEXT),
    **dict.fromkeys(("seed", "epochs", "evaluate_examples", "batch", "max_iter"), INTEGER),
    **dict.fromkeys(("lr", "alpha", "tol"), NUMBER),
}


@dataclass(frozen=True)
class GridStudy:
    """The settings of a search; the defaults are the paper's.

    >>> study = GridStudy(pairs=("fisher + kfi", "sgd"), lr=(0.1,), batch=(100, 500), alpha=(0.01,))
    >>> [plan.optimizer for plan in study.plans()][0]
    'second-order[provider=fisher,solver=kfi,lr=0.1,alpha=0.01]'
    >>> len(study.plans())
    4
    """

    data: str = "cifar10"
    arch: str | None = None
    criterion: str = "cross-entropy"
    seed: int = 0
    epochs: int = 200
    evaluate_examples: int = 10_000
    pairs: tuple[str, ...] = ("pch-1 + ea-cg",)
    lr: tuple[float, ...] = GRID["lr"]
    batch: tuple[float, ...] = GRID["batch"]
    alpha: tuple[float, ...] = GRID["alpha"]
    max_iter: tuple[float, ...] = GRID["max_iter"]
    tol: tuple[float, ...] = GRID["tol"]

    @classmethod
    def read(cls, path: str | Path) -> GridStudy:
        """The study of a TOML file; a key it does not know is an error that names the nearest."""
        found = read_settings(path, [field.name for field in fields(cls)])
        for name, value in found.items():
            listed = name in (*AXES, "pairs")
            if listed != isinstance(value, list) or value == []:
                expected = "a list that is not empty" if listed else "one value"
                raise SpecError(f"{path}: `{name}` is {value!r}; expected {expected}")
            kinds, words = KINDS[name]
            for one in value if listed else [value]:
                if not isinstance(one, kinds) or isinstance(one, bool):
                    raise SpecError(f"{path}: `{name}` has {one!r}; expected {words}")
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
        return cls(**values)

    def only(self, kept: Mapping[str, Sequence[float]]) -> GridStudy:
        """The subset with these values; each must be in the study."""
        for name, values in kept.items():
            unknown = [value for value in values if value not in getattr(self, name)]
            if unknown:
                raise SpecError(
                    f"{name}={unknown[0]:g} is not in the study, which has "
                    f"{', '.join(f'{value:g}' for value in getattr(self, name))}"
                )
        return replace(self, **{name: tuple(values) for name, values in kept.items()})  # type: ignore[arg-type]

    def plans(self, *, device: str = "auto", data_dir: str | None = None) -> list[TrainPlan]:
        """One training plan for each combination, its optimizer's names and fields checked."""
        plans = [
            TrainPlan(
                Setup(
                    data=self.data,
                    arch=self.arch,
                    criterion=self.criterion,
                    batch=int(batch),
                    seed=self.seed,
                    device=device,
                    data_dir=data_dir,
                ),
                optimizer,
                self.epochs,
                evaluate_examples=self.evaluate_examples,
            )
            for pair in self.pairs
            for batch in self.batch
            for optimizer in self._optimizers(pair)
        ]
        for plan in plans:
            plan.spec.resolve()
        return plans

    def _optimizers(self, pair: str) -> list[str]:
        provider, plus, solver = (part.strip() for part in pair.partition("+"))
        if not plus:
            return [f"{provider}[lr={lr:g}]" for lr in self.lr]
        solvers = [solver]
        if solver in ITERATIVE:
            solvers = [
                f"{solver}[max_iter={int(limit)},tol={tol:g}]"
                for limit, tol in product(self.max_iter, self.tol)
            ]
        return [
            f"second-order[provider={provider},solver={text},lr={lr:g},alpha={alpha:g}]"
            for text, lr, alpha in product(solvers, self.lr, self.alpha)
        ]


def parse_only(texts: Sequence[str]) -> dict[str, list[float]]:
    """`lr=0.1,0.2` as {"lr": [0.1, 0.2]}.

    >>> parse_only(["lr=0.1,0.2", "batch=100"])
    {'lr': [0.1, 0.2], 'batch': [100.0]}
    """
    kept: dict[str, list[float]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or name not in AXES:
            raise SpecError(f"--only is `{text}`; expected NAME=VALUE,… with one of {', '.join(AXES)}")
        try:
            kept[name] = [float(value) for value in values.split(",")]
        except ValueError as error:
            raise SpecError(f"--only is `{text}`; `{values}` is not a list of numbers") from error
    return kept
