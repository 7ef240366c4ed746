"""When does a deep sigmoid network leave its plateau? Updates until the running loss is below 2.25.

    python -m benchmarks.plateau noise control defaults digits [-o FOLDER] [--data-dir DIR] [--minutes 35]

A deep sigmoid network begins by predicting the class frequencies whatever it is shown; with ten equally
frequent classes that costs log 10 = 2.303. A run has left when the mean of its last 20 batch losses is below
2.25. The studies:

    noise      the paper's CIFAR-10 network with PCH-1 + EA-CG: batch and learning rate varied, class-balanced
               batches beside shuffled ones, and KFI
    control    SGD with momentum on the same network
    defaults   the same network with candidates for the optimizer's default learning rate and damping
    digits     such candidates on digits, all of them to the last update, with other pairs too

A shuffled batch of m has a multinomial number of examples of each class, with deviation √(m·9)/10; in a
class-balanced batch (m a multiple of the classes) every class has m/10.

One row per trial goes to results.jsonl in the folder as it is done, with the command and the commit; trials
that the folder has are not run again. The data are standardised by channel, the weights Xavier uniform, the
biases zero, all in float32. `--minutes` begins no trial after so much processor time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from curvlab.data.base import Batches, Dataset, permutation
from curvlab.measure.environment import environment
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store, key_of, write_text_atomic
from curvlab.studies.train.evaluate import evaluate
from curvlab.studies.train.optimizers import optimizers

LEFT = 2.25
WINDOW = 20
FOLDER = Path("reports/plateau")


@dataclass(frozen=True)
class Trial:
    """One run: it ends when it has left the plateau, or at the `limit` (always there if `whole`)."""

    optimizer: str
    batch: int
    seed: int
    limit: int
    data: str = "cifar10"
    balanced: bool = False
    whole: bool = False

    @property
    def key(self) -> str:
        """The hash of the trial."""
        return key_of(asdict(self))


def second_order(lr: float, alpha: float, solver: str = "ea-cg", provider: str = "pch-1") -> str:
    """A spec with all that matters written out, so that a row does not depend on defaults."""
    return f"second-order[provider={provider},solver={solver},lr={lr},alpha={alpha}]"


FIVE, THREE = range(5), range(3)
NOISE = (
    *(Trial(second_order(0.2, 0.01), 500, seed, 1500) for seed in FIVE),
    *(Trial(second_order(0.2, 0.01), 100, seed, 1500, balanced=True) for seed in FIVE),
    *(Trial(second_order(0.05, 0.01), 100, seed, 1500) for seed in FIVE),
    *(Trial(second_order(0.2, 0.01), 100, seed, 800) for seed in FIVE),
    *(Trial(second_order(0.2, 0.01, "kfi"), 100, seed, 800) for seed in THREE),
)
CONTROL = tuple(Trial(f"sgd[lr={lr},momentum=0.9]", 500, 0, 400) for lr in (0.01, 0.05, 0.1, 0.5))
CANDIDATES = ((0.1, 0.05), (0.1, 0.01), (0.05, 0.01), (0.05, 0.05), (0.02, 0.01))
DEFAULTS = (
    *(Trial(second_order(0.1, 0.01), 100, seed, 600) for seed in FIVE),
    *(Trial(second_order(0.1, 0.01), 500, seed, 300) for seed in THREE),
    *(Trial(second_order(0.05, 0.01), 500, seed, 300) for seed in THREE),  # with batch 100: in `noise`
    *(Trial(second_order(0.1, 0.05), 100, seed, 600) for seed in THREE),
    *(Trial(second_order(0.1, 0.05), 500, seed, 300) for seed in THREE),
)
DIGITS = tuple(
    Trial(second_order(lr, alpha, solver, provider), batch, seed, limit, data="digits", whole=True)
    for provider, solver in (("pch-1", "ea-cg"), ("pch-1", "kfi"), ("fisher", "kfi"))
    for lr, alpha in CANDIDATES
    for batch, limit in ((100, 150), (500, 30), (500, 150))
    for seed in THREE
)
STUDIES = {"noise": NOISE, "control": CONTROL, "defaults": DEFAULTS, "digits": DIGITS}


def balanced_order(labels: Tensor, seed: int, epoch: int) -> Tensor:
    """An order in which each run of as many examples as there are classes has one of every class.

    Each class is shuffled by itself and cut to the length of the shortest.
    """
    members = [(labels == label).nonzero().flatten() for label in labels.unique().tolist()]
    shortest = min(len(rows) for rows in members)
    shuffled = [
        rows[permutation(len(rows), seed, "balanced", index, epoch)][:shortest]
        for index, rows in enumerate(members)
    ]
    return torch.stack(shuffled, dim=1).flatten()


def batches(data: Dataset, trial: Trial) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end, epoch after epoch."""
    labels = data.train.labels
    if labels is None:
        raise SystemExit(f"{trial.data}: class-balanced batches need classes")
    for epoch in count():
        if trial.balanced:
            order = balanced_order(labels, trial.seed, epoch)
            yield from Batches(data.train, order, trial.batch, drop_last=True)
        else:
            yield from data.batches(trial.batch, trial.seed, epoch)


def run(trial: Trial, data_dir: str | None) -> dict[str, Any]:
    """Train until the plateau is left: `left` is after how many updates, None where it was not."""
    setup = Setup(data=trial.data, data_dir=data_dir, batch=trial.batch, seed=trial.seed, device="cpu")
    data, model, criterion = setup.load_data(), setup.build_model().eval(), setup.build_criterion()
    stepper = optimizers.make(trial.optimizer).build(model, criterion)
    losses: deque[float] = deque(maxlen=WINDOW)
    left, began = None, process_time()
    for updates, (inputs, targets) in enumerate(batches(data, trial)):
        if updates == trial.limit or (left is not None and not trial.whole):
            break
        losses.append(float(stepper.step(inputs, targets)))
        if left is None and len(losses) == WINDOW and fmean(losses) < LEFT:
            left = updates + 1
    seconds = process_time() - began
    test = evaluate(model, criterion, data.test)
    return {
        "left": left,
        "updates": updates,
        "running_loss": fmean(losses),
        "test_accuracy": test.accuracy,
        "cpu_seconds": seconds,
    }


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per setting: the updates of each seed until it left, and the mean of what it ended with."""

    def line(part: pd.DataFrame) -> pd.Series[Any]:
        ordered = part.sort_values("seed")
        left = ["–" if pd.isna(value) else f"{value:.0f}" for value in ordered["left"]]
        return pd.Series(
            {
                "seeds": " ".join(str(seed) for seed in ordered["seed"]),
                "left after": " ".join(left),
                "running loss": f"{ordered['running_loss'].mean():.3f}",
                "test accuracy": f"{ordered['test_accuracy'].mean():.1%}",
            }
        )

    setting = ["data", "optimizer", "batch", "balanced", "limit", "whole"]
    return pd.DataFrame(
        [
            {**dict(zip(setting, values, strict=True)), **line(part)}
            for values, part in rows.groupby(setting, sort=False)
        ]
    )


def main() -> None:
    """Run the trials that the folder does not have yet, and print the table of all it has."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("-o", "--output", type=Path, default=FOLDER)
    parser.add_argument("--data-dir", help="folder of CIFAR-10")
    parser.add_argument("--minutes", type=float, default=35.0, help="begin no trial after these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(options.output)
    described = environment()
    write_text_atomic(options.output / "environment.json", json.dumps(described, indent=2) + "\n")
    command = shlex.join(["python", "-m", "benchmarks.plateau", *options.studies])
    origin = {"command": command, "commit": (described["git"] or {}).get("commit")}
    for study in options.studies:
        for trial in STUDIES[study]:
            if store.has(trial.key):
                continue
            if process_time() > 60 * options.minutes:
                sys.exit(f"Stopped after {options.minutes:g} minutes; the same command goes on.")
            row = {"key": trial.key, "kind": study, **asdict(trial), **run(trial, options.data_dir), **origin}
            store.append(row)
            print(trial, row["left"], f"{row['running_loss']:.4f}", f"{row['cpu_seconds']:.0f} s", flush=True)
    print(table(store.frame()).to_string(index=False))


if __name__ == "__main__":
    main()
