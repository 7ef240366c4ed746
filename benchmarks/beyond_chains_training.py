"""Training a residual network on images of CIFAR-10 with PCH and its rivals, in equal processor time.

    python -m benchmarks.beyond_chains_training ROWS.jsonl [--train 1000] [--budget 10] [--seeds 0 1 2]
                                                [--epochs 2] [--seconds N] [--only NAME ...]
    python -m benchmarks.beyond_chains_training ROWS.jsonl --table

Every contestant is tuned alike (`curvlab.studies.tuning`: 15 points, successive halving up to `--epochs`, a
fifth of the training images held out), and then trained from each seed until it has had `--budget` seconds of
the processor. The table has each at the last whole epoch that all of its seeds finished within the budget:
the training and test loss there, accuracy, and how many epochs that were. Rows are appended for every trial
and run; what has one is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

from curvlab.studies.setup import Setup
from curvlab.studies.train.plan import TrainPlan
from curvlab.studies.train.run import train
from curvlab.studies.tuning import Result, Trial, Tuned, Tuning, run_trial

Row = dict[str, Any]

NETWORK, BATCH, MARGIN, LONGEST = "resnet[widths=8-16-32,norm=group]", 100, 1.3, 200


def step(provider: str, solver: str, more: str = "") -> str:
    """A second-order optimizer by name."""
    return f"second-order[provider={provider},solver={solver}{more}]"


def rows(fields: str) -> str:
    """PCH by rows, a draw, four positions of every example."""
    return f"pch[kind=rows,{fields}]"


CONTESTANTS = {
    "sgd": "sgd",
    "adamw": "adamw",
    "muon": "muon",
    "fisher + kfi": step("fisher[positions=4]", "kfi"),
    "gauss-newton + kfi": step("gauss-newton[kind=rows,samples=1,positions=4]", "kfi"),
    "node + kfi": step(rows("poseig=node,positions=4"), "kfi"),
    "last + kfi": step(rows("poseig=last,positions=4"), "kfi"),
    "node + ea-cg": step(rows("poseig=node"), "ea-cg"),
    "last + ea-cg": step(rows("poseig=last"), "ea-cg"),
    "gauss-newton, layer, spring": step(
        "gauss-newton[kind=rows,samples=1,structure=layer]", "exact", ",spring=0.9"
    ),
    "node, layer, spring": step(rows("poseig=node,structure=layer"), "exact", ",spring=0.9"),
    "last, layer, spring": step(rows("poseig=last,structure=layer"), "exact", ",spring=0.9"),
}
GRID = {"lr": (0.02, 0.05, 0.1, 0.2, 0.5), "alpha": (0.003, 0.03, 0.3)}


class Race:
    """The rows of a file, and what they say is still to be done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path = options, options.rows
        data = f"cifar10[train={options.train},test={options.test}]"
        self.setup = Setup(arch=NETWORK, data=data, batch=BATCH, data_dir=options.data_dir)
        self.rows: list[Row] = read_rows(self.path)

    def trials(self) -> dict[Trial, Result]:
        """The trials so far."""
        found = [r for r in self.rows if r["kind"] == "trial"]
        return {
            Trial(r["spec"], r["epochs"]): Result(
                math.inf if r["loss"] is None else r["loss"], r["cpu_seconds"]
            )
            for r in found
        }

    def append(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def tuned(self, name: str) -> Tuned | None:
        """What is chosen of a contestant, after the trials that are missing; None where the time is over."""
        grid = GRID if CONTESTANTS[name].startswith("second-order") else None
        tuning = Tuning.of(CONTESTANTS[name], self.options.epochs, grid)
        while trials := tuning.next_trials(self.trials()):
            for trial in trials:
                if process_time() > self.options.seconds:
                    return None
                result = run_trial(self.setup, trial)
                loss = result.loss if math.isfinite(result.loss) else None
                kept = {"loss": loss, "cpu_seconds": result.cpu_seconds, "message": result.message}
                self.append({"kind": "trial", "name": name, **asdict(trial), **kept})
        return tuning.outcome(self.trials())

    def run(self, name: str, seed: int, chosen: Tuned) -> None:
        """One training of as many epochs as the budget buys, with some to spare."""
        epochs = min(LONGEST, math.ceil(MARGIN * self.options.budget / chosen.epoch_seconds))
        plan = TrainPlan(self.setup, chosen.spec, epochs, run_seed=seed, evaluate_examples=1000)
        frame = train(plan, count_memory=False)
        columns = ["epoch", "train_loss", "test_loss", "test_accuracy", "cpu_seconds", "status"]
        values = asdict(chosen)
        named = {"kind": "run", "name": name, "seed": seed, "spec": chosen.spec, "tuning": values}
        found = json.loads(frame[columns].round(5).to_json(orient="records"))
        self.append({**named, "train": self.options.train, "epochs": found})

    def measure(self) -> None:
        """All that is missing, until the time is over."""
        for name in self.options.only or CONTESTANTS:
            chosen = self.tuned(name)
            if chosen is None:
                return
            for seed in self.options.seeds:
                known = any((r["kind"], r["name"], r.get("seed")) == ("run", name, seed) for r in self.rows)
                if known or not math.isfinite(chosen.loss):
                    continue
                if process_time() > self.options.seconds:
                    return
                self.run(name, seed, chosen)


def read_rows(path: Path) -> list[Row]:
    """The rows so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(found: list[Row], budget: float) -> str:
    """Every contestant after the processor seconds of the budget, in Markdown: means (ranges) over seeds."""
    lines = [
        "| optimizer | chosen | seeds | epochs | training loss | test loss | accuracy | diverged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in CONTESTANTS:
        runs = [r for r in found if r["kind"] == "run" and r["name"] == name]
        if not runs:
            continue
        fine = [r for r in runs if all(e["status"] == "ok" for e in r["epochs"])]
        made = min(
            (max(e["epoch"] for e in r["epochs"] if (e["cpu_seconds"] or 0) <= budget) for r in fine),
            default=0,
        )
        ends = [next(e for e in r["epochs"] if e["epoch"] == made) for r in fine]
        columns = [_spread([e[key] for e in ends]) for key in ("train_loss", "test_loss", "test_accuracy")]
        tuning = runs[0]["tuning"]
        values = ", ".join(f"{key} {value:g}" for key, value in tuning["values"].items())
        edges = f" (edge: {', '.join(tuning['at_edge'])})" if tuning["at_edge"] else ""
        cells = [name, values + edges, str(len(runs)), str(made), *columns, str(len(runs) - len(fine))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})" if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--train", type=int, default=1000, help="training images")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--budget", type=float, default=10.0, help="processor seconds of a run")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of the last rung of the tuning")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the processor")
    parser.add_argument("--data-dir")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        # Every trial asks for the same images: decoded once, they cost less than the trainings.
        Setup.load_data = lru_cache(Setup.load_data)  # type: ignore[method-assign]
        Race(options).measure()
    print(table(read_rows(options.rows), options.budget))


if __name__ == "__main__":
    main()
