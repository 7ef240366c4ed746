"""Known phenomena of Hessian spectra, checked by number on CIFAR-10 along training.

    python -m benchmarks.known_spectra outliers edge [-o FOLDER] [--data-dir DIR] [--minutes 35] [--tables]

`outliers`: a convolutional network (tanh, 11,162 parameters for ten classes) on 1,000 images of the first K
classes, trained by SGD with momentum. At some epochs the 15 largest eigenvalues of the whole Hessian H and of
the whole exact Gauss-Newton matrix G (the first summand of H = G + R), how far their leading eigenspaces
agree, the largest |λ| of R, and the spectral density. Controls: the untrained network (epoch 0), labels drawn
at random, and other numbers of classes. The number of outliers is that of the values before the widest
relative gap (λ_i - λ_{i+1})/λ_i, i = 2..14.

`edge`: full-batch gradient descent, mse on one-hot targets, a tanh network 3072-64-64-10 on 1,000 images. The
largest eigenvalue is measured along the way: with learning rate η the iteration on a quadratic is unstable
above 2/η. Every rate runs for the same time η · steps. The control is a rate so small that 2/η lies above
what the other runs' start sharpens to in that time.

One row per measurement goes to results.jsonl in the study's folder as it is made, with command and commit;
runs whose last row is there are not made again. Float32, one thread. `--minutes` begins no run after so much
processor time; `--tables` makes none and prints the report's tables from the rows that are there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvlab
from curvlab.data import dataset
from curvlab.data.base import Dataset
from curvlab.measure.environment import environment
from curvlab.studies.store import Store, key_of, write_text_atomic

FOLDER = Path("reports/spectra")
IMAGES = 1000
LEADING = 15
TOL = 1e-3
TIME = 100.0  # learning rate times steps of every run of `edge`
MEASUREMENTS = 20
NEAR_ZERO = 0.01  # of the largest eigenvalue
Row = dict[str, Any]


@dataclass(frozen=True)
class Outliers:
    """A network trained on K classes, measured at these epochs."""

    classes: int
    seed: int
    labels: str = "true"
    epochs: tuple[int, ...] = (0, 60)
    density: bool = False
    kind: str = "outliers"

    @property
    def last(self) -> int:
        """Where the last measurement is made."""
        return self.epochs[-1]


@dataclass(frozen=True)
class Edge:
    """Full-batch gradient descent at one learning rate."""

    rate: float
    seed: int
    kind: str = "edge"

    @property
    def last(self) -> int:
        """Where the last measurement is made."""
        return round(TIME / self.rate)


Run = Outliers | Edge
SEEDS = range(3)
STUDIES: dict[str, tuple[Run, ...]] = {
    "outliers": (
        *(Outliers(10, seed, epochs=(0, 2, 10, 60), density=True) for seed in SEEDS),
        *(Outliers(classes, seed) for classes in (3, 5) for seed in SEEDS),
        *(Outliers(10, seed, labels="random", epochs=(60,), density=seed == 0) for seed in SEEDS),
    ),
    "edge": tuple(Edge(rate, seed) for rate in (0.1, 0.2, 0.05, 0.02) for seed in SEEDS),
}


# The two networks and their data.


def images_of(data: Dataset, run: Outliers) -> tuple[Tensor, Tensor]:
    """1,000 images of the first classes with their labels, or with labels drawn at random."""
    labels = data.train.labels
    assert labels is not None
    chosen = data.train.select((labels < run.classes).nonzero().flatten()).subset(IMAGES, run.seed)
    inputs, targets = chosen.all()
    if run.labels == "random":
        targets = targets[torch.randperm(IMAGES, generator=torch.Generator().manual_seed(run.seed))]
    return inputs, targets


def convolutions(classes: int) -> nn.Module:
    """Three convolutions of stride 2, 32 × 32 to 4 × 4, and a Linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


def perceptron() -> nn.Module:
    """3072-64-64-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


# What is measured.


def count_outliers(values: Tensor) -> int:
    """How many values, in falling order, stand before the widest relative gap behind the second.

    >>> count_outliers(torch.tensor([9.0, 8.0, 7.0, 1.0, 0.9, 0.8]))
    3
    """
    positive = values[values > 0]
    gaps = (positive[1:-1] - positive[2:]) / positive[1:-1]
    return 2 + int(gaps.argmax())


def overlap(left: Tensor, right: Tensor) -> float:
    """1/k ‖U Vᵀ‖² of orthonormal rows: 1 where they span the same space."""
    return float((left @ right.T).square().sum()) / len(left)


def spectra(model: nn.Module, inputs: Tensor, targets: Tensor, run: Outliers) -> Row:
    """The leading eigenvalues of H, G and R = H - G, and the density of H."""
    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    hessian = curvlab.estimate("hessian[structure=full]", problem)
    gauss_newton = curvlab.estimate("gauss-newton[kind=exact,structure=full]", problem)
    h, g = (curvlab.spectrum(one, k=LEADING, tol=TOL) for one in (hessian, gauss_newton))
    rest = curvlab.spectrum(hessian + (-1.0) * gauss_newton, k=1, which="magnitude", tol=1e-2)
    row: Row = {
        "hessian": h.eigenvalues.tolist(),
        "hessian_residual": float(h.residuals.max()),
        "gauss_newton": g.eigenvalues.tolist(),
        "gauss_newton_residual": float(g.residuals.max()),
        "remainder": float(rest.eigenvalues[0]),
        "overlap": overlap(h.vectors[: run.classes - 1], g.vectors[: run.classes - 1]),
        "outliers_hessian": count_outliers(h.eigenvalues),
        "outliers_gauss_newton": count_outliers(g.eigenvalues),
    }
    if run.density:
        found = curvlab.density(hessian, probes=3, steps=60, points=400)
        top = found.ends[1]
        row |= {
            "near_zero": float(found.weights[found.nodes.abs() < NEAR_ZERO * top].sum()),
            "negative": float(found.weights[found.nodes < -NEAR_ZERO * top].sum()),
            "ends": found.ends,
            "grid": [round(x, 5) for x in found.grid.tolist()],
            "density_on_grid": [float(f"{x:.4g}") for x in found.density.tolist()],
        }
    return row


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """The share of training images in the right class."""
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).double().mean())


def train_outliers(run: Outliers, data: Dataset) -> Iterator[Row]:
    """SGD with momentum, with a row at every epoch that is asked for."""
    inputs, targets = images_of(data, run)
    torch.manual_seed(run.seed)
    model = convolutions(run.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    draws = torch.Generator().manual_seed(run.seed)
    for epoch in range(run.last + 1):
        if epoch in run.epochs:
            with torch.no_grad():
                loss = float(F.cross_entropy(model(inputs), targets))
            yield {
                "at": epoch,
                "loss": loss,
                "accuracy": accuracy(model, inputs, targets),
                **spectra(model, inputs, targets, run),
            }
        for rows in torch.randperm(IMAGES, generator=draws).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()


def train_edge(run: Edge, data: Dataset) -> Iterator[Row]:
    """Gradient descent on all images at once, with the sharpness at even distances."""
    inputs, labels = data.train.subset(IMAGES, 0).all()
    targets = F.one_hot(labels, 10).float()
    torch.manual_seed(run.seed)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.rate)
    every = run.last // MEASUREMENTS
    for step in range(run.last + 1):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        if step % every == 0:
            found = curvlab.spectrum(curvlab.Problem(model, "mse", inputs, targets), k=1, tol=TOL)
            yield {"at": step, "loss": loss.item(), "sharpness": float(found.eigenvalues[0])}
        loss.backward()
        optimizer.step()


def measure(run: Run, data: Dataset) -> Iterator[Row]:
    """The rows of one run."""
    return train_outliers(run, data) if isinstance(run, Outliers) else train_edge(run, data)


# The tables of the report, from the rows.


def table_of_outliers(rows: list[Row]) -> list[str]:
    """One line for each network, labels and epoch, with its seeds side by side."""

    def gap(row: Row) -> float:
        pairs = zip(row["hessian"][: row["classes"]], row["gauss_newton"], strict=False)
        return median(abs(h - g) / abs(h) for h, g in pairs)

    lines = []
    for (classes, labels, at), cells in _by_seed(rows, "classes", "labels", "at"):
        first, second = ([c[f"outliers_{m}"] for c in cells] for m in ("hessian", "gauss_newton"))
        rest = [abs(c["remainder"]) / c["hessian"][0] for c in cells]
        shares = [
            f"{100 * c['near_zero']:.1f} ({100 * c['negative']:.1f})" if "near_zero" in c else "–"
            for c in cells
        ]
        lines.append(
            f"| {classes}, {labels} | {at} | {mean(c['loss'] for c in cells):.2f} | {_texts(first, 'd')} | "
            f"{_texts(second, 'd')} | {_texts([c['overlap'] for c in cells])} | {_texts(rest)} | "
            f"{_texts([gap(c) for c in cells])} | {' '.join(shares)} |"
        )
    return lines


def table_of_edge(rows: list[Row]) -> list[str]:
    """One line for each learning rate, sharpness in units of 2/η."""
    lines = []
    for (rate,), cells in sorted(_by_seed([r for r in rows if r["at"] == 0], "rate")):
        runs = [sorted(_run_of(rows, rate, cell["seed"]), key=lambda row: row["at"]) for cell in cells]
        relative = [[row["sharpness"] * rate / 2 for row in run] for run in runs]
        late = [
            [x for row, x in zip(run, xs, strict=True) if row["at"] > 2 * TIME / rate / 3]
            for run, xs in zip(runs, relative, strict=True)
        ]
        above = [
            next((str(row["at"]) for row, x in zip(run, xs, strict=True) if x > 1), "never")
            for run, xs in zip(runs, relative, strict=True)
        ]
        lines.append(
            f"| {rate} | {2 / rate:g} | {_texts([xs[0] for xs in relative])} | "
            f"{_texts([median(xs) if xs else nan for xs in late])} | {' '.join(above)} | "
            f"{_texts([run[-1]['sharpness'] for run in runs], '.1f')} |"
        )
    return lines


TABLES = {"outliers": table_of_outliers, "edge": table_of_edge}


def _by_seed(rows: list[Row], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """The rows with equal values of these columns, in the order of their seeds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return iter(groups.items())


def _run_of(rows: list[Row], rate: float, seed: int) -> list[Row]:
    return [row for row in rows if (row["rate"], row["seed"]) == (rate, seed)]


def _texts(values: list[Any], form: str = ".2f") -> str:
    return " ".join(format(value, form) for value in values)


def print_tables(folder: Path, study: str) -> None:
    """The lines of one study, and how many rows of which commits they are from."""
    rows = [json.loads(line) for line in (folder / study / "results.jsonl").read_text().splitlines()]
    print(f"{study}: {len(rows)} rows of {', '.join(sorted({str(row['commit'])[:7] for row in rows}))}")
    print("\n".join(TABLES[study](rows)))


def main() -> None:
    """Make the runs that the folder does not have yet, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="+", choices=list(STUDIES))
    parser.add_argument("-o", "--output", type=Path, default=FOLDER)
    parser.add_argument("--data-dir", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--minutes", type=float, default=35.0, help="begin no run after these")
    parser.add_argument("--tables", action="store_true", help="print the report's tables and make no run")
    options = parser.parse_args()
    if options.tables:
        for study in options.studies:
            print_tables(options.output, study)
        return
    torch.set_num_threads(1)
    described = environment()
    data = dataset("cifar10").load(0, options.data_dir).given_as("images")
    command = shlex.join(["python", "-m", "benchmarks.known_spectra", *options.studies])
    origin = {"command": command, "commit": (described["git"] or {}).get("commit")}
    for study in options.studies:
        store = Store(options.output / study)
        write_text_atomic(options.output / study / "environment.json", json.dumps(described, indent=2) + "\n")
        for run in STUDIES[study]:
            if store.has(key_of({**asdict(run), "at": run.last})):
                continue
            if process_time() > 60 * options.minutes:
                sys.exit(f"Stopped after {options.minutes:g} minutes; the same command goes on.")
            began = process_time()
            for found in measure(run, data):
                key = key_of({**asdict(run), "at": found["at"]})
                seconds = process_time() - began
                if not store.has(key):
                    store.append({"key": key, **asdict(run), **found, "cpu_seconds": seconds, **origin})
                print(run, found["at"], f"{found['loss']:.4f}", f"{seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
