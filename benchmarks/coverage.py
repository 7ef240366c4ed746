"""Which parameters have which curvature, as the tables of docs/coverage.md.

    python -m benchmarks.coverage [--models resnet50 convnext-tiny vit-b16 gpt2] [--no-models] [--batch 4]
                                  [--output docs/coverage.md]

The first table is made from one small model per module kind (`benchmarks.coverage_cases`): every provider is
asked for its curvature, and each parameter's block says what it is. The second is of whole models with random
weights, each in a process of its own: the share of parameters with a block, the peak bytes that `plan`
predicts and that a run has (network, batch, `fisher` and an EA-CG solve), how much memory `plan` itself took,
and the seconds of one `estimate("fisher")`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

import curvlab
from benchmarks.coverage_cases import CASES, Case
from curvlab.exceptions import CurvlabError
from curvlab.linalg import Block
from curvlab.studies.compare.costs import Pair, memory

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
PROVIDERS = (
    "fisher",
    "fisher[structure=diagonal]",
    "gauss-newton[kind=rows]",
    "gauss-newton[kind=exact]",
    "hessian",
    "pch-1",
)
SHARE, WITHIN, MOST = 0.99, 0.15, 20 * 2**30
WORDS = {"kronecker": "A ⊗ B", "viewed": "A ⊗ B", "sum": "sum of A ⊗ B", "operator": "operator"}


def structure(block: Block) -> str:
    """What a block is, in the words of the table.

    >>> from curvlab.linalg import DenseFactor, FactorBlock
    >>> structure(FactorBlock(DenseFactor(torch.eye(2))))
    'dense'
    """
    if block.kind == "factor":
        return "diagonal" if block.form == "diagonal" else "dense"
    word = WORDS.get(block.kind, block.kind)
    if block.kind == "viewed":
        several, times, _ = block.form.partition(" × ")
        word = f"{several} × ({word})" if times else word
    return f"{word}, one side diagonal" if "diagonal" in block.form and word != "diagonal" else word


@dataclass(frozen=True)
class Covered:
    """A parameter of a module kind, with what each provider has for it, or why it has nothing."""

    module: str
    parameter: str
    found: dict[str, str]


def covered(case: Case, providers: Sequence[str] = PROVIDERS) -> list[Covered]:
    """One entry per trainable parameter of the case's body."""
    model, x, y = case.build()
    names = [name for name, p in model.named_parameters() if p.requires_grad and name.startswith("body.")]
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for provider in providers:
        for name, word in _structures(model, x, y, provider, names).items():
            found[name][provider] = word
    return [Covered(case.name, name.removeprefix("body."), words) for name, words in found.items()]


def _structures(model: nn.Module, x: Any, y: Tensor, provider: str, names: Iterable[str]) -> dict[str, str]:
    try:
        blocks = curvlab.estimate(provider, curvlab.Problem(model, "cross-entropy", x, y)).blocks
    except CurvlabError:
        return dict.fromkeys(names, "refused")
    return {name: structure(blocks[name]) if name in blocks else "none" for name in names}


def module_table(entries: Sequence[Covered]) -> str:
    """The table of module kinds; parameters of a module with equal structures share a line."""
    lines = ["| module | parameters | " + " | ".join(f"`{name}`" for name in PROVIDERS) + " |"]
    lines.append("| --- " * (len(PROVIDERS) + 2) + "|")
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for entry in entries:
        words = tuple(entry.found[name] for name in PROVIDERS)
        merged.setdefault((entry.module, words), []).append(f"`{entry.parameter}`")
    shown: set[str] = set()
    for (module, words), parameters in merged.items():
        lines.append(
            f"| {'' if module in shown else module} | {', '.join(parameters)} | {' | '.join(words)} |"
        )
        shown.add(module)
    return "\n".join(lines)


def _images() -> Callable[[int], tuple[Any, Tensor]]:
    return lambda batch: (torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


def _tokens(vocabulary: int, length: int) -> Callable[[int], tuple[Any, Tensor]]:
    def make(batch: int) -> tuple[Any, Tensor]:
        tokens = torch.randint(vocabulary, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


@dataclass(frozen=True)
class Large:
    """A whole model, at its address, and a batch for it."""

    address: str
    data: Callable[[int], tuple[Any, Tensor]]

    def problem(self, batch: int) -> curvlab.Problem:
        """The model with random weights, in eval mode, and a random batch."""
        torch.manual_seed(0)
        module, _, name = self.address.partition(":")
        model: nn.Module = getattr(import_module(module), name)().eval()
        return curvlab.Problem(model, "cross-entropy", *self.data(batch))


LARGE = {
    "resnet50": Large("tests.models:ResNet50", _images()),
    "convnext-tiny": Large("tests.models:ConvNeXtT", _images()),
    "vit-b16": Large("tests.models:ViTB16", _images()),
    "gpt2": Large("tests.models:GPT2", _tokens(50_257, 128)),
}


@dataclass(frozen=True)
class Measured:
    """What one whole model took."""

    model: str
    batch: int
    parameters: int
    share: float
    planned: float
    planning: float
    measured: float
    seconds: float
    processor_seconds: float

    @property
    def verdict(self) -> str:
        """Whether the limits hold: coverage, the plan, and the memory."""
        missed = {
            "coverage": self.share < SHARE,
            "plan": abs(self.planned - self.measured) > WITHIN * self.measured,
            "memory": self.measured > MOST,
        }
        return ", ".join(name.upper() for name, is_so in missed.items() if is_so) or "ok"


def peak_resident_bytes() -> int:
    """The most memory that this process has had so far."""
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _small() -> tuple[nn.Module, str, Tensor, Tensor]:
    return nn.Linear(2, 2), "cross-entropy", torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)


def measure(name: str, batch: int) -> Measured:
    """Plan, estimate and solve one model; the plan comes first, while the process has not grown."""
    pair = Pair("fisher", "ea-cg", 0.05)
    planned = partial(curvlab.plan, providers=[pair.provider], solvers=[pair.solver], forms=["sample-space"])
    planned(curvlab.Problem(*_small()))  # what a plan imports is no part of its memory
    problem = LARGE[name].problem(batch)
    before = peak_resident_bytes()
    plan = planned(problem)
    planning = peak_resident_bytes() - before
    start, worked = perf_counter(), process_time()
    curvature = curvlab.estimate(pair.provider, problem)
    seconds, processor = perf_counter() - start, process_time() - worked
    parameters = dict(problem.model.named_parameters())
    share = sum(parameters[one].numel() for one in curvature.blocks) / sum(
        p.numel() for p in parameters.values()
    )
    del curvature
    return Measured(
        model=name,
        batch=batch,
        parameters=sum(p.numel() for p in parameters.values()),
        share=share,
        planned=float(plan["peak_bytes"].iloc[0]),
        planning=planning,
        measured=memory(pair, problem).peak_bytes,
        seconds=seconds,
        processor_seconds=processor,
    )


def measure_apart(name: str, batch: int) -> Measured:
    """The same in a process of its own, so that one model's memory is not the next one's."""
    command = [sys.executable, "-m", "benchmarks.coverage", "--worker", name, "--batch", str(batch)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def model_table(rows: Sequence[Measured]) -> str:
    """The table of whole models."""
    lines = [
        "| model | parameters | batch | with a block | peak planned | peak measured | `plan` itself "
        "| `estimate`, s (CPU s) | verdict |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.parameters:,} | {row.batch} | {row.share:.2%} "
            f"| {row.planned / 2**30:.2f} GiB | {row.measured / 2**30:.2f} GiB "
            f"| {row.planning / 2**20:.0f} MiB | {row.seconds:.1f} ({row.processor_seconds:.1f}) "
            f"| {row.verdict} |"
        )
    return "\n".join(lines)


HEAD = """# Which parameters have which curvature

Made by `python -m benchmarks.coverage`; do not edit by hand.

## By module

`A ⊗ B`: Kronecker factors (with a number: one product per group or part). dense: a block of its own, kept as
a matrix or as its rows. diagonal: its diagonal only. operator: matrix-free, for products and `cg`. refused:
the provider says why, and what to use instead. Sizes beyond `max_factor` make a side diagonal.
"""
MODELS = f"""
## Whole models

Random weights, random data, `fisher` and an EA-CG solve. Limits: {SHARE:.0%} of the parameters with a block,
the plan within {WITHIN:.0%} of the measured peak, a peak under {MOST // 2**30} GiB. `plan` itself: growth of
the peak memory of the process.
"""


def page(rows: Sequence[Measured]) -> str:
    """The whole page."""
    entries = [entry for case in CASES for entry in covered(case)]
    parts = [HEAD, module_table(entries)]
    if rows:
        parts += [MODELS, model_table(rows)]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page, or measure one model for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=LARGE, default=list(LARGE))
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--worker", choices=LARGE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(asdict(measure(options.worker, options.batch))))
        return
    names = [] if options.no_models else options.models
    options.output.write_text(page([measure_apart(name, options.batch) for name in names]), encoding="utf-8")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
