"""The paper's Tables 2 and 4 beside PCH kept signed and PCH by rows, along a run that trains.

    python -m benchmarks.beyond_chains_paper FOLDER [--seeds 0 1 2] [--updates 400] [--every 50] [--seconds N]
                                               [--criteria cross-entropy robust] [--batch 500]
    python -m benchmarks.beyond_chains_paper FOLDER --table

PCH-1 with KFI (lr 0.2, α 0.01) trains the paper's CIFAR-10 network, sigmoid, in batches of 500; at every
`--every`th update the error ‖B̃ - |B|‖_F of every layer's bias block is measured on 500 training images that
are drawn by the seed. The averages over those points, and the Total, stand beside what the paper printed,
whose own trajectory is not known. Points are kept in FOLDER, and so is the run: it goes on where it was.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from time import process_time

import pandas as pd

from curvlab.reproduce.error_statistics import averages
from curvlab.reproduce.error_trajectory import Sampling, Trajectory, errors_frame
from curvlab.reproduce.experiment import Places
from curvlab.reproduce.paper import paper_errors
from curvlab.studies.setup import Setup
from curvlab.studies.store import Store
from curvlab.studies.train.plan import TrainPlan

TABLES = {"cross-entropy": "table2", "robust": "table4"}
OPTIMIZER = "second-order[provider=pch-1,solver=kfi,lr=0.2,alpha=0.01]"
BATCH = 500
PROVIDERS = (
    "fisher",
    "gauss-newton",
    "gauss-newton[kind=rows]",
    "pch-1",
    "pch-2",
    "pch[poseig=last]",
    "pch[kind=rows,poseig=node]",
    "pch[kind=rows]",
    "pch[kind=rows,samples=4]",
)


def trajectory(criterion: str, seed: int, options: argparse.Namespace) -> Trajectory:
    """One run, and where it is measured."""
    data = f"cifar10[train={options.train}]" if options.train else "cifar10"
    setup = Setup(data=data, criterion=criterion, batch=BATCH, seed=seed, data_dir=options.data_dir)
    plan = TrainPlan(setup.resolve(), OPTIMIZER, evaluate_examples=BATCH)
    return Trajectory(plan, options.updates, (Sampling(options.batch, options.every),), PROVIDERS)


def measure(options: argparse.Namespace) -> None:
    """Run what is missing; stops after a trajectory once the time is over."""
    for seed in options.seeds:
        for criterion in options.criteria:
            task = trajectory(criterion, seed, options)
            places = Places(options.folder / TABLES[criterion], options.runs or options.folder / "runs")
            if not task.finished(Store(places.store)):
                if process_time() > options.seconds:
                    return
                task.run(places, lambda share, words: None)


def table(folder: Path, criterion: str) -> str:
    """The averages of one criterion in Markdown, beside the paper's."""
    store = folder / TABLES[criterion]
    if not store.exists():
        return ""
    frame = errors_frame(Store(store))
    means = averages(frame).set_index(["provider", "layer"])
    printed = paper_errors(TABLES[criterion]).set_index(["provider", "layer"])["error"]
    layers = list(dict.fromkeys(frame["layer"]))
    lines = [
        f"{TABLES[criterion]}, {criterion}: {frame['seed'].nunique()} seeds, "
        f"{len(frame[['seed', 'step']].drop_duplicates())} points, updates 0 to {frame['step'].max()}, loss "
        f"{frame['loss'].max():.3f} to {frame['loss'].min():.3f}",
        "",
        f"| provider | {' | '.join(map(str, layers))} | relative Total |",
        f"| --- |{' --- |' * (len(layers) + 1)}",
    ]
    for provider in dict.fromkeys(frame["provider"]):
        cells = [_cell(means.loc[(provider, layer)]) for layer in layers]
        relative = float(means.loc[(provider, "Total"), "relative"])  # type: ignore[arg-type]
        lines.append(f"| {provider} | {' | '.join(cells)} | {relative:.2f} |")
        if (provider, "Total") in printed.index:
            paper = [f"{float(printed[provider, layer]):.4f}" for layer in layers]
            lines.append(f"| … the paper | {' | '.join(paper)} | |")
    return "\n".join(lines)


def _cell(row: pd.Series) -> str:
    spread = "" if math.isnan(row["error_deviation"]) else f" ± {row['error_deviation']:.4f}"
    return f"{row['error']:.4f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--criteria", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--batch", type=int, default=BATCH, help="images that errors are measured on")
    parser.add_argument("--train", type=int, default=0, help="training images; 0 takes all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the processor")
    parser.add_argument("--runs", type=Path, help="where checkpoints of the runs go")
    parser.add_argument("--data-dir")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        measure(options)
    print("\n\n".join(filter(None, (table(options.folder, criterion) for criterion in TABLES))))


if __name__ == "__main__":
    main()
