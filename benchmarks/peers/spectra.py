"""Top eigenvalues, densities and traces of whole Hessians beside PyHessian's and curvlinops', in one run.

    python -m benchmarks.peers.spectra [--networks mlp resnet8] [--rounds 3] [-o FILE]

`mlp` is 64-128-64-10 (tanh) on 256 random rows, `resnet8` that of benchmarks.any_model_cost with tanh (a
curvlinops Hessian has no forward-mode rule for SiLU) on 8 random images; cross-entropy, float32, one thread.

    top-5     the five largest |λ|, to relative residuals of 1e-3. PyHessian: power iteration, tol=1e-6
              between two iterations, at most 100 each; curvlinops: scipy's eigsh of its operator
    density   Lanczos quadrature of `probes` starts and `steps` products each. PyHessian orthogonalises each
              run, curvlab and curvlinops do not
    trace     Hutchinson with as many products

Building the operator is part of every time. Numbers agree where the eigenvalues differ by at most 1e-2 of the
largest (PyHessian's stop rule is on the values, not on residuals), and where means and mean squares of the
densities, and the traces, differ by at most 4 standard errors over the probes. PyHessian calls torch.eig,
which torch no longer has: the same function is put in its place by `eigh`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import curvlab
from benchmarks.any_model_cost import resnet8
from curvlab.measure.environment import environment
from curvlab.measure.stopwatch import interleaved, ratio

TOP = 5
TOL = 1e-3
EIGENVALUES_AGREE = 1e-2
STANDARD_ERRORS = 4
LIMITS = {"mlp": 4.0, "resnet8": 1.5}
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network with its data, and how many probes and steps a density takes."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    probes: int
    steps: int


def mlp() -> Case:
    """64-128-64-10 with tanh on 256 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10))
    return Case(model, torch.randn(256, 64), torch.randint(0, 10, (256,)), 10, 80)


def residual() -> Case:
    """The residual network with tanh on 8 images."""
    model = resnet8(nn.Tanh)
    return Case(model, torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)), 3, 20)


CASES: dict[str, Callable[[], Case]] = {"mlp": mlp, "resnet8": residual}


class Curvlab:
    """curvlab's own."""

    def __init__(self, case: Case) -> None:
        self.case = case
        problem = curvlab.Problem(case.model, "cross-entropy", case.inputs, case.targets)
        self.hessian = curvlab.estimate("hessian[structure=full]", problem)

    def top(self) -> list[float]:
        """The five eigenvalues of largest magnitude."""
        return curvlab.spectrum(self.hessian, TOP, which="magnitude", tol=TOL).eigenvalues.tolist()

    def density(self) -> Tensor:
        """Mean and mean square of the eigenvalues; one estimate."""
        found = curvlab.density(self.hessian, self.case.probes, self.case.steps)
        return torch.stack([found.weights @ found.nodes**power for power in (1, 2)])[None]

    def trace(self) -> Tensor:
        """The trace; one estimate."""
        return torch.tensor([float(self.hessian.trace(probes=30))])


class PyHessian:
    """PyHessian, one batch, its gradients kept as it does."""

    def __init__(self, case: Case) -> None:
        from pyhessian import hessian

        torch.manual_seed(1)
        torch.eig = eig_by_eigh  # type: ignore[attr-defined]
        self.case = case
        self.hessian = hessian(
            case.model, nn.CrossEntropyLoss(), data=(case.inputs, case.targets), cuda=False
        )
        case.model.zero_grad()

    def top(self) -> list[float]:
        """The five eigenvalues of largest magnitude."""
        return list(self.hessian.eigenvalues(maxIter=100, tol=1e-6, top_n=TOP)[0])

    def density(self) -> Tensor:
        """Mean and mean square of the eigenvalues for each probe."""
        nodes, weights = (
            torch.tensor(np.array(one)) for one in self.hessian.density(self.case.steps, self.case.probes)
        )
        return torch.stack([(weights * nodes**power).sum(1) for power in (1, 2)], 1)

    def trace(self) -> Tensor:
        """zᵀHz of 30 probes; its stop rule ends early at any finite `tol` where the mean is negative."""
        return torch.tensor(self.hessian.trace(maxIter=30, tol=-np.inf))


class Curvlinops:
    """curvlinops, with scipy's eigsh."""

    def __init__(self, case: Case) -> None:
        from curvlinops import HessianLinearOperator

        torch.manual_seed(1)
        self.case = case
        self.hessian = HessianLinearOperator(
            case.model,
            nn.CrossEntropyLoss(),
            list(case.model.parameters()),
            [(case.inputs, case.targets)],
            check_deterministic=False,
        )

    def top(self) -> list[float]:
        """The five eigenvalues of largest magnitude."""
        values = eigsh(self.hessian.to_scipy(), TOP, which="LM", tol=TOL, return_eigenvectors=False)
        return sorted(values.tolist(), key=lambda value: -abs(value))

    def density(self) -> Tensor:
        """Mean and mean square of the eigenvalues for each probe."""
        from curvlinops.papyan2020traces.spectrum import fast_lanczos

        found = []
        for _ in range(self.case.probes):
            nodes, vectors = fast_lanczos(self.hessian, self.case.steps)
            found.append(torch.stack([vectors[0].square() @ nodes**power for power in (1, 2)]))
        return torch.stack(found)

    def trace(self) -> Tensor:
        """The mean of 30 probes; one estimate."""
        from curvlinops import hutchinson_trace

        return hutchinson_trace(self.hessian, 30).reshape(1)


CONTESTANTS = {"curvlab": Curvlab, "PyHessian": PyHessian, "curvlinops": Curvlinops}
MODULES = {"PyHessian": "pyhessian", "curvlinops": "curvlinops"}


def eig_by_eigh(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
    """What torch.eig gave for a symmetric matrix: (real, imaginary) parts, and vectors as columns."""
    values, vectors = torch.linalg.eigh(matrix)
    return torch.stack([values, torch.zeros_like(values)], 1), vectors


def installed() -> list[str]:
    """curvlab and the peers that are there."""
    return [name for name in CONTESTANTS if name not in MODULES or find_spec(MODULES[name]) is not None]


def exact_moments(case: Case, probes: int = 200) -> tuple[Tensor, Tensor]:
    """Mean and mean square of the eigenvalues with the standard error of ONE normal probe, by many probes."""
    hessian = Curvlab(case).hessian
    size = hessian.numel
    signs = torch.randn(probes, size, generator=torch.Generator().manual_seed(7))
    signs = signs / signs.norm(dim=1, keepdim=True)
    images = torch.cat([hessian.rows_product(part) for part in signs.split(20)])
    each = torch.stack([(signs * images).sum(1), images.square().sum(1)], 1)
    return each.mean(0), each.std(0)


def agreement(case: Case, names: list[str]) -> Found:
    """How far every contestant's numbers are from curvlab's, in what they are allowed to differ by."""
    own = Curvlab(case)
    top = own.top()
    mean, spread = exact_moments(case)
    found: Found = {"curvlab top-5": [round(value, 5) for value in top]}
    for name in names:
        other = CONTESTANTS[name](case)
        gaps = [abs(a - b) / abs(top[0]) for a, b in zip(other.top(), top, strict=True)]
        moments = other.density().mean(0)
        trace = float(other.trace().double().mean()) / own.hessian.numel
        found[name] = {
            "top-5, largest difference over |λ₁|": max(gaps),
            "density's mean, standard errors": float(
                (moments[0] - mean[0]).abs() / (spread[0] / case.probes**0.5)
            ),
            "density's mean square, standard errors": float(
                (moments[1] - mean[1]).abs() / (spread[1] / case.probes**0.5)
            ),
            "trace, standard errors": float(abs(trace - mean[0]) / (spread[0] / 30**0.5)),
        }
        values = list(found[name].values())
        found[name]["agrees"] = values[0] <= EIGENVALUES_AGREE and max(values[1:]) <= STANDARD_ERRORS
    return found


def times(case: Case, names: list[str], rounds: int) -> list[Found]:
    """Seconds of processor time of each contestant and how many times curvlab's each takes."""
    rows = []
    for task in ("top", "density", "trace"):
        work = {name: (lambda n=name, t=task: getattr(CONTESTANTS[n](case), t)()) for name in names}
        timings = {n: t.processor for n, t in interleaved(work, rounds).items()}
        for name in names:
            relative = ratio(timings[name], timings["curvlab"])
            rows.append(
                {
                    "task": task,
                    "by": name,
                    "seconds": round(timings[name].median, 4),
                    "over curvlab's": round(relative.median, 2),
                    "interquartile range": round(relative.iqr, 2),
                }
            )
    return rows


def main() -> None:
    """Compare numbers and times of all that is installed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, results = installed(), {}
    for network in options.networks:
        case = CASES[network]()
        found = agreement(case, names)
        rows = times(case, names, options.rounds)
        results[network] = {"numbers": found, "times": rows}
        print(network, json.dumps(found, indent=1, ensure_ascii=False))
        print(pd.DataFrame(rows).to_string(index=False), flush=True)
        if options.output is not None:
            text = json.dumps({"environment": environment(), **results}, indent=1, ensure_ascii=False)
            options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
