"""What solving and stepping cost, against the paper's equations and against SGD, each a ratio in one run.

    python -m benchmarks.solver_cost [--networks C I] [--tables solves steps memory routes]
                                     [--gradients tensors factors] [--repetitions 7] [--threads 1]
                                     [--keep-memory]

C is 3072-1024-…-10 with batch 500, I is 150528-1024-…-10 with batch 100, on random data. Times are
medians (and interquartile ranges) of repetitions that take turns; nothing is remembered between solves.
Ratios are given by the clock and by processor time, which other programs on the machine change little; the
verdict is on the latter. The textbook forms make many matrices of the weight's size, and on Linux up to half
of their time is page faults, as the heap happens to lie; `--keep-memory` spares both forms most of them (see
`curvlab.measure.device.keep_freed_memory`).

The tables: `solves`, default against `formulation="explicit"`, from the curvature to the direction: of
tensors, the gradient that the paper's equations start from, and of factors, where the textbook form (and the
default, where its route is dense) multiplies them first; `steps`, pass, curvature, solve and update against
a torch.optim.SGD(momentum=0.9) step; `memory`, their peak tensor bytes, network included; `routes`, what the
cost model chose against every forced route (see `benchmarks.route_cost`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch

import curvlab
from benchmarks import route_cost
from benchmarks.workload import Case, SGDStep, cold, problem_of, second_order_step
from curvlab import Problem
from curvlab.measure.device import keep_freed_memory
from curvlab.measure.memory import peak_bytes
from curvlab.measure.stopwatch import Ratio, Timing, interleaved, ratio
from curvlab.solvers import CG, EACG, KFI, Solver

NETWORKS = {"C": Case("cifar10-fcnn", batch=500), "I": Case("imagenet10-fcnn", batch=100)}
TABLES = ("solves", "steps", "memory", "routes")
GRADIENTS = ("tensors", "factors")
METHODS = (("pch-1", "ea-cg"), ("pch-1", "kfi"), ("fisher", "kfi"))


@dataclass(frozen=True)
class Speedup:
    """A solver, its damping, and how much faster than its textbook form it is to be for such a gradient."""

    label: str
    solver: CG | KFI
    alpha: float
    least: float
    given: str


# EA-CG's damping is so small that no block is solved to the last digit before the 20th iteration, in either
# form (the table says how many were made): what an iteration costs does not depend on it. An exact KFI is
# held to its limit with the gradient of the batch, which is what it is for. On I, the E[hhᵀ] of a textbook
# KFI alone would take 91 GB.
TWENTY = EACG(max_iter=20, tol=0.0)
SPEEDUPS = {
    "C": (Speedup("ea-cg", TWENTY, 1e-7, 30, "tensors"), Speedup("kfi", KFI(), 0.05, 8, "factors")),
    "I": (Speedup("ea-cg", TWENTY, 1e-7, 80, "tensors"),),
}
MOST_OF_SGD = {
    ("C", "pch-1 + ea-cg"): 1.8,
    ("I", "pch-1 + ea-cg"): 0.85,
    ("C", "pch-1 + kfi"): 2.8,
    ("I", "pch-1 + kfi"): 0.85,
    ("C", "fisher + kfi"): 2.0,
}
# A solve that takes milliseconds is called several times a round: one call sees every hiccup of the machine.
ROUND_SECONDS = 0.05
COPIES = 32
Row = dict[str, object]


def milliseconds(timing: Timing) -> str:
    """Median and interquartile range."""
    return f"{timing.median * 1e3:.1f} ({timing.iqr * 1e3:.1f})"


def solve_rows(network: str, problem: Problem, repetitions: int, gradients: Sequence[str]) -> list[Row]:
    """Sample space against textbook, with the gradient in factors (the textbook forms it) or as tensors."""
    gradient, curvature = problem.gradient(), curvlab.estimate("pch-1", problem)
    formed = dict(gradient.items())
    # Made ahead, so that the copying is not timed.
    copies = [cold(curvature, gradient) for _ in range(COPIES * (repetitions + 4))]

    def copy() -> tuple[curvlab.Curvature, curvlab.Gradient]:
        return copies.pop() if copies else cold(curvature, gradient)

    def in_factors(solver: Solver, alpha: float) -> curvlab.Solution:
        return curvlab.solve(solver, *copy(), alpha=alpha)

    def as_tensors(solver: Solver, alpha: float) -> curvlab.Solution:
        return curvlab.solve(solver, copy()[0], formed, alpha=alpha)

    ways = {"tensors": as_tensors, "factors": in_factors}
    return [
        {"network": network, "gradient": given, **_speedup(wanted, given, ways[given], repetitions)}
        for wanted in SPEEDUPS[network]
        for given in gradients
    ]


def _speedup(
    wanted: Speedup, given: str, solve: Callable[[Solver, float], curvlab.Solution], repetitions: int
) -> Row:
    default = partial(solve, wanted.solver, wanted.alpha)
    explicit = partial(solve, replace(wanted.solver, formulation="explicit"), wanted.alpha)
    made = "/".join(str(_iterations(form())) for form in (default, explicit))
    timings = interleaved({"default": default, "explicit": explicit}, repetitions, min_seconds=ROUND_SECONDS)
    found, processor = ratios(timings["explicit"], timings["default"])
    row: Row = {
        "solver": wanted.label,
        "iterations": made,
        "default, ms": milliseconds(timings["default"]),
        "explicit, ms": milliseconds(timings["explicit"]),
        "times as fast": f"{found.median:.1f} ({found.iqr:.1f})",
        "by CPU": f"{processor.median:.1f} ({processor.iqr:.1f})",
    }
    if given == wanted.given:
        row |= {"at least": wanted.least, "verdict": "ok" if processor.median >= wanted.least else "BELOW"}
    return row


def _iterations(solution: curvlab.Solution) -> int:
    """The fewest that any block took."""
    return min(block.iterations for block in solution.blocks.values())


def ratios(numerator: Timing, denominator: Timing) -> tuple[Ratio, Ratio]:
    """How many times as long, by the clock and by processor time."""
    return ratio(numerator, denominator), ratio(numerator.processor, denominator.processor)


def contestants(problem: Problem) -> tuple[SGDStep, Mapping[str, Callable[[], object]]]:
    """The SGD step and every second-order one, all on the same network."""
    steps = {f"{p} + {s}": second_order_step(problem, p, s) for p, s in METHODS}
    return SGDStep.of(problem), steps


def step_rows(network: str, problem: Problem, repetitions: int) -> list[Row]:
    """Whole steps against SGD's, how many times as long."""
    sgd, steps = contestants(problem)
    timings = interleaved({"sgd": sgd, **steps}, repetitions, warmup=2)
    sgd.clear()
    rows: list[Row] = []
    for name in steps:
        found, processor = ratios(timings[name], timings["sgd"])
        limit = MOST_OF_SGD.get((network, name))
        rows.append(
            {
                "network": network,
                "step": name,
                "step, ms": milliseconds(timings[name]),
                "SGD, ms": milliseconds(timings["sgd"]),
                "times SGD": f"{found.median:.2f} ({found.iqr:.2f})",
                "by CPU": f"{processor.median:.2f} ({processor.iqr:.2f})",
                "at most": "" if limit is None else limit,
                "verdict": "" if limit is None else "ok" if processor.median <= limit else "ABOVE",
            }
        )
    return rows


def memory_rows(network: str, problem: Problem, repetitions: int) -> list[Row]:
    """Peak tensor bytes of a step, with the network, the batch and (SGD's) momentum."""
    sgd, steps = contestants(problem)
    held = list(problem.tensors.values())
    sgd()
    sgd.optimizer.zero_grad()
    rival = peak_bytes(sgd, device="cpu", baseline=[*held, *sgd.buffers])
    sgd.clear()
    rows: list[Row] = [{"network": network, "step": "sgd", "peak, MB": f"{rival / 1e6:.1f}"}]
    for name, step in steps.items():
        step()
        peak = peak_bytes(step, device="cpu", baseline=held)
        row: Row = {"peak, MB": f"{peak / 1e6:.1f}", "times SGD": f"{peak / rival:.3f}"}
        if network == "I":  # where the weights outweigh all else; on C the blocks B are as large as they are
            row |= {"below": 1, "verdict": "ok" if peak < rival else "ABOVE"}
        rows.append({"network": network, "step": name, **row})
    return rows


def main() -> None:
    """Measure and print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--gradients", nargs="+", choices=GRADIENTS, default=list(GRADIENTS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep-memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.keep_memory:
        keep_freed_memory("cpu")
    print(f"{options.threads} threads, {options.repetitions} repetitions; medians (interquartile ranges)")
    solves = partial(solve_rows, gradients=options.gradients)
    measured = {"solves": solves, "steps": step_rows, "memory": memory_rows}
    for network in options.networks:
        problem = problem_of(NETWORKS[network])
        for table in (name for name in options.tables if name in measured):
            show(f"{network}: {table}", measured[table](network, problem, options.repetitions))
    if "routes" in options.tables:
        show("routes", route_cost.rows(options.repetitions))


def show(title: str, rows: list[Row]) -> None:
    """Print a table."""
    print(f"\n{title}\n{pd.DataFrame(rows).to_string(index=False, na_rep='')}", flush=True)


if __name__ == "__main__":
    main()
