"""What steps and Hessian products cost on networks that are no chains, against SGD and curvlinops in one run.

    python -m benchmarks.any_model_cost [--tables steps memory hessian chain] [--rounds 9] [--threads 1]
                                        [--before TREE]

The network is a residual one (`resnet8`: 16, 32 and 64 channels, SiLU, no normalisation) on 128 random images
of 3 × 32 × 32; the Fisher is of one drawn label, `sharing=expand`. Contestants take turns in every round;
medians (interquartile ranges) by the clock and by processor time. The verdicts are on the latter, which other
programs on the machine change little.

The tables: `steps`, whole steps (pass, curvature, solve, update) over a torch.optim.SGD(momentum=0.9) step,
and how many times as long curvlinops takes for the same (a pass for the gradient, KFAC, its inverse with the
same damping, update); `memory`, peak tensor bytes, network and momentum included; `hessian`, one product with
the whole Hessian over a forward and backward pass, on that network, on the same with tanh (curvlinops has no
forward-mode rule for SiLU) and on a transformer of 4 blocks of width 64 (curvlinops makes its passes anew at
every product; curvlab may keep them from one to the next, so a product with a new estimate is shown too);
`chain`, steps on a chain of Linear layers in this tree and in TREE, an older checkout (`git worktree add TREE
COMMIT`), by turns. curvlinops' rows are left out where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvlab
from curvlab.measure.memory import peak_bytes
from curvlab.measure.stopwatch import Ratio, Timing, interleaved, ratio
from curvlab.optim import SecondOrder

TABLES = ("steps", "memory", "hessian", "chain")
BATCH = 128
RATE = 1e-4
ALPHA = 0.05
PEER = "curvlinops"
FISHER = "fisher[kind=mc,sharing=expand]"
SAMPLED = "fisher[kind=mc,sharing=expand,positions=4]"
MEMORY_LIMIT = 1.6
HESSIAN_LIMIT = 3.0
ROOT = Path(__file__).parent.parent
Row = dict[str, object]
Work = Callable[[], object]


@dataclass(frozen=True)
class Method:
    """A provider with a solver, the most SGD steps that it may take, and its least speedup over the peer."""

    name: str
    provider: str
    solver: str
    most: float
    faster: float | None = None


METHODS = (
    Method("fisher + ea-cg", FISHER, "ea-cg", 1.9, 3.4),
    Method("fisher + kfi", FISHER, "kfi", 3.5, 1.8),
    Method("fisher[positions=4] + kfi", SAMPLED, "kfi", 2.6),
)


class Residual(nn.Module):
    """σ(x + W₂σ(W₁x)), the shortcut a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)
        self.inner, self.outer = activation(), activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.shortcut(x) + self.second(self.inner(self.first(x))))


def resnet8(activation: type[nn.Module]) -> nn.Module:
    """Eight layers in three residual blocks, from a seed."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        activation(),
        Residual(16, 16, 1, activation),
        Residual(16, 32, 2, activation),
        Residual(32, 64, 2, activation),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Block(nn.Module):
    """Attention and a perceptron, each on normalised inputs and added to them; attention written in full."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        m, positions, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(m, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(m, positions, width))
        return x + self.perceptron(self.norm2(x))


class Transformer(nn.Module):
    """Patches of 4 × 4 pixels through 4 blocks of width 64, averaged."""

    def __init__(self, width: int = 64, blocks: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(48, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.head(self.blocks(self.patches(tiles)).mean(1))


def transformer() -> nn.Module:
    """The transformer, from a seed."""
    torch.manual_seed(0)
    return Transformer()


def batch() -> tuple[Tensor, Tensor]:
    """128 random images with their classes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(
        10, (BATCH,), generator=generator
    )


def has_peer() -> bool:
    """Whether curvlinops is installed."""
    return find_spec("curvlinops") is not None


def sgd_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Work, torch.optim.SGD]:
    """A torch.optim.SGD step with momentum, from the forward pass to the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, optimizer


def second_order_step(model: nn.Module, method: Method, x: Tensor, y: Tensor) -> Work:
    """curvlab's step: pass, curvature, solve and update."""
    optimizer = SecondOrder(model, "cross-entropy", method.provider, method.solver, lr=RATE, alpha=ALPHA)
    return lambda: optimizer.step(x, y)


def peer_step(model: nn.Module, x: Tensor, y: Tensor) -> Work:
    """The step as curvlinops' documentation puts it together: gradient, KFAC, damped inverse, update."""
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    criterion, parameters = nn.CrossEntropyLoss(), list(model.parameters())

    def step() -> None:
        gradient = torch.autograd.grad(criterion(model(x), y), parameters)
        kfac = KFACLinearOperator(
            model,
            criterion,
            parameters,
            [(x, y)],
            fisher_type="mc",
            mc_samples=1,
            kfac_approx="expand",
            check_deterministic=False,
            num_per_example_loss_terms=1,
            num_data=len(x),
        )
        inverse = KFACInverseLinearOperator(kfac, damping=ALPHA, use_heuristic_damping=True)
        direction = inverse @ list(gradient)
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter.sub_(d, alpha=RATE)

    return step


def contestants() -> dict[str, Work]:
    """SGD's step, curvlab's and the peer's, each on its own copy of one network."""
    model, (x, y) = resnet8(nn.SiLU), batch()
    steps: dict[str, Work] = {"sgd": sgd_step(deepcopy(model), x, y)[0]}
    steps |= {method.name: second_order_step(deepcopy(model), method, x, y) for method in METHODS}
    if has_peer():
        steps[PEER] = peer_step(deepcopy(model), x, y)
    return steps


def milliseconds(timing: Timing) -> str:
    """Median and interquartile range."""
    return f"{timing.median * 1e3:.1f} ({timing.iqr * 1e3:.1f})"


def spread(found: Ratio) -> str:
    """Median and interquartile range of a ratio."""
    return f"{found.median:.2f} ({found.iqr:.2f})"


def times(numerator: Timing, denominator: Timing) -> tuple[Row, float]:
    """How many times as long, by the clock and by processor time; the latter's median decides."""
    processor = ratio(numerator.processor, denominator.processor)
    row: Row = {"times": spread(ratio(numerator, denominator)), "by CPU": spread(processor)}
    return row, processor.median


def timed_rows(steps: Mapping[str, Work], rounds: int) -> list[Row]:
    """Every step against SGD's and, where a limit says so, the peer's against it."""
    timings = interleaved(steps, rounds, warmup=2)
    limits = {method.name: method for method in METHODS}
    rows: list[Row] = []
    for name, timing in timings.items():
        found, value = times(timing, timings["sgd"])
        row: Row = {
            "step": name,
            "ms": milliseconds(timing),
            "CPU ms": milliseconds(timing.processor),
            **found,
        }
        limit = limits.get(name)
        if limit is not None:
            kept = value <= limit.most
            row["at most"] = limit.most
            if limit.faster is not None and PEER in timings:
                _, speedup = times(timings[PEER], timing)
                row |= {"peer takes": f"{speedup:.2f}", "at least": limit.faster}
                kept = kept and speedup >= limit.faster
            row["verdict"] = "ok" if kept else "MISSED"
        rows.append(row)
    return rows


def first_step_row(rounds: int) -> Row:
    """A fresh optimizer's first step, where the probe compares all gradients, over its later ones."""
    model, (x, y) = resnet8(nn.SiLU), batch()
    used = second_order_step(deepcopy(model), METHODS[0], x, y)
    fresh = [second_order_step(deepcopy(model), METHODS[0], x, y) for _ in range(rounds + 2)]
    # Only one call per entry: a second one would not be the first step.
    timings = interleaved({"later": used, "first": lambda: fresh.pop()()}, rounds, warmup=1, min_seconds=0.0)
    found, _ = times(timings["first"], timings["later"])
    name = f"{METHODS[0].name}, first over later"
    return {"step": name, "ms": milliseconds(timings["first"]), **found}


def step_rows(rounds: int) -> list[Row]:
    """Whole steps, and what the first one costs."""
    return [*timed_rows(contestants(), rounds), first_step_row(rounds)]


def memory_rows(rounds: int) -> list[Row]:
    """Peak tensor bytes of a step, with the network, the batch and SGD's momentum."""
    model, (x, y) = resnet8(nn.SiLU), batch()
    step, optimizer = sgd_step(model, x, y)
    step()
    optimizer.zero_grad()
    held = [*model.parameters(), x, y]
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    sgd = peak_bytes(step, device="cpu", baseline=[*held, *momentum])
    rows: list[Row] = [{"step": "sgd", "peak, MB": f"{sgd / 1e6:.1f}"}]
    optimizer.zero_grad()
    optimizer.state.clear()
    works = {method.name: second_order_step(model, method, x, y) for method in METHODS}
    if has_peer():
        works[PEER] = peer_step(model, x, y)
    for name, work in works.items():
        work()
        peak = peak_bytes(work, device="cpu", baseline=held)
        row: Row = {"step": name, "peak, MB": f"{peak / 1e6:.1f}", "times SGD": f"{peak / sgd:.2f}"}
        if name != PEER:
            row |= {"at most": MEMORY_LIMIT, "verdict": "ok" if peak <= MEMORY_LIMIT * sgd else "MISSED"}
        rows.append(row)
    return rows


def peer_product(model: nn.Module, x: Tensor, y: Tensor, vector: Mapping[str, Tensor]) -> Work | None:
    """curvlinops' product with the whole Hessian; None where it is not installed or refuses the model."""
    if not has_peer():
        return None
    from curvlinops import HessianLinearOperator

    operator = HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, y)],
        check_deterministic=False,
        num_data=len(x),
    )
    operands = list(vector.values())

    def product() -> object:
        return operator @ operands

    try:
        product()
    except NotImplementedError:
        return None
    return product


def hessian_works(model: nn.Module) -> dict[str, Work]:
    """A pass, and the product of both packages with one random vector."""
    x, y = batch()
    parameters = dict(model.named_parameters())
    vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def hessian() -> curvlab.Curvature:
        return curvlab.estimate("hessian[full=true]", curvlab.Problem(model, "cross-entropy", x, y))

    estimated = hessian()
    works: dict[str, Work] = {
        "pass": lambda: torch.autograd.grad(F.cross_entropy(model(x), y), list(parameters.values())),
        "curvlab": lambda: estimated @ vector,
        "curvlab, with a new estimate": lambda: hessian() @ vector,
    }
    peer = peer_product(model, x, y, vector)
    return works if peer is None else {**works, PEER: peer}


def hessian_rows(rounds: int) -> list[Row]:
    """Hessian products over a forward and backward pass, and curvlab's over curvlinops'."""
    networks = {
        "resnet8, SiLU": (resnet8(nn.SiLU), HESSIAN_LIMIT),
        "resnet8, tanh": (resnet8(nn.Tanh), None),
        "transformer": (transformer(), None),
    }
    rows: list[Row] = []
    for name, (model, most) in networks.items():
        timings = interleaved(hessian_works(model), rounds, warmup=2)
        for product in [key for key in timings if key != "pass"]:
            found, value = times(timings[product], timings["pass"])
            row: Row = {"network": name, "product": product, "ms": milliseconds(timings[product]), **found}
            if product == "curvlab":
                row |= _product_verdict(value, most, timings)
            rows.append(row)
    return rows


def _product_verdict(value: float, most: float | None, timings: Mapping[str, Timing]) -> Row:
    row, kept = {}, []
    if most is not None:
        row["at most"] = most
        kept.append(value <= most)
    if PEER in timings:
        found, of_peer = times(timings["curvlab"], timings[PEER])
        row |= {"of the peer's, CPU": found["by CPU"], "no more than": 1.0}
        kept.append(of_peer <= 1.0)
    return {**row, "verdict": "ok" if all(kept) else "MISSED"} if kept else row


def chain_rows(rounds: int, before: Path | None, threads: int) -> list[Row]:
    """Steps on a chain of Linear layers, over SGD's, in this tree and in an older one, by turns."""
    trees = {"now": ROOT} if before is None else {"now": ROOT, "before": before}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            found[name].append(_chain_seconds(tree, threads))
    rows: list[Row] = []
    for step in found["now"][0]:
        if step == "sgd":
            continue
        ratios = {name: [one[step] / one["sgd"] for one in runs] for name, runs in found.items()}
        row: Row = {
            "step": step,
            **{f"times SGD, {name}": f"{median(all_):.2f}" for name, all_ in ratios.items()},
        }
        if "before" in ratios:
            paired = [new / old for new, old in zip(ratios["now"], ratios["before"], strict=True)]
            row["now over before"] = f"{median(paired):.3f}"
        rows.append(row)
    return rows


def _chain_seconds(tree: Path, threads: int) -> dict[str, float]:
    worker = [sys.executable, "-P", str(ROOT / "benchmarks" / "chain_step.py"), "--threads", str(threads)]
    done = subprocess.run(
        worker, env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True, check=True
    )
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def show(title: str, rows: list[Row]) -> None:
    """Print a table."""
    print(f"\n{title}\n{pd.DataFrame(rows).to_string(index=False, na_rep='')}", flush=True)


def main() -> None:
    """Measure and print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--before", type=Path, help="an older checkout, for the table `chain`")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peer = "" if has_peer() else "; curvlinops is not installed: pip install curvlinops-for-pytorch"
    print(f"{options.threads} threads, {options.rounds} rounds; medians (interquartile ranges){peer}")
    measured = {
        "steps": step_rows,
        "memory": memory_rows,
        "hessian": hessian_rows,
        "chain": lambda rounds: chain_rows(rounds, options.before, options.threads),
    }
    for table in options.tables:
        show(table, measured[table](options.rounds))


if __name__ == "__main__":
    main()
