"""What a recording and its curvature cost, against a plain forward and backward pass in the same run.

    python -m benchmarks.recording_cost [--threads 1 2] [--rounds 15]

Two limits are printed with the numbers, on random data: on the paper's CIFAR-10 network, batch 500, a
recording with PCH takes at most 1.5 × a plain pass and with Fisher at most 1.1 ×; on its ImageNet network,
batch 100, the peak of a recording with PCH stays under 1.3 × the bytes of the weights, these included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import curvlab
from curvlab.architectures import FCNN
from curvlab.measure.memory import peak_bytes
from curvlab.measure.stopwatch import interleaved, ratio

HIDDEN = (1024, 512, 256, 128, 64, 32, 16, 10)
LIMITS = {"pch-1": 1.5, "pch-2": 1.5, "fisher": 1.1}
MEMORY_LIMIT = 1.3


def setting(inputs: int, examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = FCNN(widths=(inputs, *HIDDEN), activation="sigmoid").build(seed=0)
    return model, torch.randn(examples, inputs), torch.randint(0, 10, (examples,))


def plain_pass(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward and backward as a training step does them, gradients of the weights included."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()

    return run


def times(threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    model, x, y = setting(3072, 500)
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    functions: dict[str, Callable[[], object]] = {"plain": plain_pass(model, x, y)}
    for name in LIMITS:
        functions[name] = lambda name=name: curvlab.estimate(name, problem.with_data(x, y))
    timings = interleaved(functions, rounds, warmup=2)
    print(f"3072-…-10, batch 500, {threads} threads: plain pass {timings['plain'].median * 1e3:.1f} ms")
    for name, limit in LIMITS.items():
        found = ratio(timings[name], timings["plain"])
        verdict = "ok" if found.median <= limit else "ABOVE THE LIMIT"
        print(
            f"  recording + {name:7s} {found.median:.2f} × (quartiles {found.lower:.2f} to "
            f"{found.upper:.2f}, limit {limit} ×)  {verdict}"
        )


def memory() -> None:
    model, x, y = setting(150528, 100)
    weights = sum(p.nbytes for p in model.parameters())
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    baseline = [*model.parameters(), x, y]
    peak = peak_bytes(lambda: curvlab.estimate("pch-1", problem), device="cpu", baseline=baseline)
    verdict = "ok" if peak <= MEMORY_LIMIT * weights else "ABOVE THE LIMIT"
    print(
        f"150528-…-10, batch 100: peak of recording + pch-1 {peak:,} bytes, {peak / weights:.3f} × the "
        f"weights (weights and batch included, limit {MEMORY_LIMIT} ×)  {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for threads in arguments.threads:
        times(threads, arguments.rounds)
    memory()


if __name__ == "__main__":
    main()
