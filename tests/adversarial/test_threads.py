"""Threads that share a model, memory and file handles over many calls: nothing wrong, nothing that grows."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.optim import SecondOrder
from curvlab.studies.compare.run import compare, load_comparison
from curvlab.studies.store import Store
from curvlab.studies.train.run import TrainPlan, train
from tests.adversarial.outcomes import Judge
from tests.adversarial.workshop import TINY
from tests.cases import ONE_SCENE

THREADS, ROUNDS = 4, 6
HANDLES = Path("/proc/self/fd")


class Residual(nn.Module):
    """No chain: its rows are recorded by hooks and modes, which threads could see of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h + torch.tanh(self.b(h)))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (8,), generator=generator)


def expected(model: nn.Module, seed: int) -> Tensor:
    """The gradient by torch alone."""
    inputs, targets = batch(seed)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


def gradient(model: nn.Module, seed: int) -> Tensor:
    found = curvlab.Problem(model, "cross-entropy", *batch(seed)).gradient()
    return torch.cat([found[name].flatten() for name, _ in model.named_parameters()])


def step(model: nn.Module, seed: int) -> Tensor:
    problem = curvlab.Problem(model, "cross-entropy", *batch(seed))
    solution = curvlab.solve("kfi", curvlab.estimate("fisher", problem), problem.gradient(), alpha=0.1)
    return torch.cat([solution.direction[name].flatten() for name, _ in model.named_parameters()])


def plain(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad():
        return model(batch(seed)[0]).flatten()


WORK: dict[str, Callable[[nn.Module, int], Tensor]] = {
    "gradient": gradient,
    "step": step,
    "plain call": plain,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", [chain, Residual], ids=["chain", "graph"])
def test_threads_that_share_a_model_get_what_one_thread_gets(
    make: Callable[[], nn.Module], judge: Judge
) -> None:
    model = make().double()
    alone = {(name, seed): work(model, seed) for name, work in WORK.items() for seed in range(THREADS)}
    for seed in range(THREADS):
        torch.testing.assert_close(alone["gradient", seed], expected(model, seed), rtol=1e-10, atol=1e-12)
    begin = threading.Barrier(THREADS)

    def run(seed: int) -> list[str]:
        wrong = []
        begin.wait()
        for _ in range(ROUNDS):
            for name, work in WORK.items():
                try:
                    if not torch.allclose(work(model, seed), alone[name, seed], rtol=1e-9, atol=1e-12):
                        wrong.append("silent")
                except Exception as error:
                    wrong.append(f"traceback of {name}: {type(error).__name__}: {error}")
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        wrong = [text for found in pool.map(run, range(THREADS)) for text in found]
    judge("threads", wrong[0].partition(" ")[0] if wrong else "held", wrong[:3])


def resident() -> int:
    """Bytes that this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def operations() -> dict[str, Callable[[], Any]]:
    """Everything that takes under 20 ms, on one problem that is kept."""
    model = chain().double()
    problem = curvlab.Problem(model, "cross-entropy", *batch(0))
    branched = Residual().double()
    graph = curvlab.Problem(branched, "cross-entropy", *batch(0))
    fisher = curvlab.estimate("fisher", problem)
    hessian = curvlab.estimate("hessian", problem)
    slope = problem.gradient()
    optimizer = SecondOrder(chain().double(), "cross-entropy", lr=1e-6)
    alphas = iter(0.01 + index * 1e-7 for index in range(10**9))
    found: dict[str, Callable[[], Any]] = {
        "Problem": lambda: curvlab.Problem(model, "cross-entropy", *batch(0)),
        "loss": problem.loss,
        "gradient": problem.gradient,
        "product": lambda: fisher @ slope,
        "hessian product": lambda: hessian @ slope,
        "to_dense": fisher.to_dense,
        "trace": fisher.trace,
        "diagonal": fisher.diagonal,
        "eigvalsh": fisher.eigvalsh,
        "per-example gradients": problem.per_example_gradients,
        "logdet, a new damping each time": lambda: fisher.logdet(damping=curvlab.Additive(next(alphas))),
        "inverse, a new damping each time": lambda: (
            fisher.inverse(damping=curvlab.Additive(next(alphas))) @ slope
        ),
        "samples, a new damping each time": lambda: fisher.sample(2, damping=curvlab.Mixed(next(alphas))),
        "copy": lambda: fisher.to(torch.float64),
        "frame of a solution": lambda: curvlab.solve("kfi", fisher, slope, alpha=next(alphas)).frame(),
        "step of the optimizer": lambda: optimizer.step(*batch(0)),
        "spectrum": lambda: curvlab.spectrum(fisher, k=3),
        "spectrum by layer": lambda: curvlab.spectrum(fisher, k=1, by="layer").frame(),
        "density": lambda: curvlab.density(fisher, 2, 4, points=50),
        "density of the hessian": lambda: curvlab.density(hessian, 2, 4, points=50),
        "similarity": lambda: curvlab.similarity(fisher, fisher + 2 * fisher),
        "power, a new damping each time": lambda: (
            fisher.power(-0.5, damping=curvlab.Additive(next(alphas))) @ slope
        ),
        "estimated trace": lambda: hessian.trace(estimator="hutch++", probes=8),
        "estimated diagonal": lambda: hessian.diagonal(estimator="hutchinson", probes=4),
        "from an operator": lambda: curvlab.curvature_from(fisher.to_scipy(), like=model) @ slope,
        "batches that are kept": lambda: curvlab.Problem(
            model, "cross-entropy", curvlab.keep_batches([batch(0), batch(1)])
        ).gradient(),
        "bounds": lambda: curvlab.bounds(problem),
        "errors": lambda: curvlab.errors(problem, providers=["fisher"]),
        "landscape": lambda: curvlab.landscape(problem, [dict(slope)], points=3),
        "tracker": lambda: curvlab.Tracker(problem, 1, ["trace"])(0),
        "frobenius norm": fisher.frobenius_norm,
        "frame of a curvature": fisher.frame,
        "choice of layers": lambda: fisher.select(["0"]) @ slope,
        "columns": lambda: hessian.flat_product(torch.eye(hessian.numel, dtype=torch.float64)[:, :2]),
        "save and load": lambda: saved_and_loaded(fisher),
        "copy of the optimizer": lambda: copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict()),
        "a step added": lambda: curvlab.solve("kfi", fisher, slope, alpha=next(alphas)).add_to(model, 0.0),
        "Problem of a graph": lambda: curvlab.Problem(branched, "cross-entropy", *batch(0)),
        "gradient of a graph": lambda: curvlab.Problem(branched, "cross-entropy", *batch(0)).gradient(),
        "Problem with an output and l2": lambda: curvlab.Problem(
            branched, "cross-entropy", *batch(0), output=lambda z: 2 * z, l2=0.1
        ).gradient(),
    }
    ways: dict[str, dict[str, Any]] = {
        "spring": {"spring": 0.9, "provider": "fisher[structure=layer]", "solver": "exact"},
        "capture": {"capture": True},
        "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": 1.0},
        "an average and an adaptation": {"ema": 0.9, "adapt": True},
    }
    for way, options in ways.items():
        stepper = SecondOrder(chain().double(), "cross-entropy", lr=1e-6, **options)
        found[f"step with {way}"] = lambda stepper=stepper: stepper.step(*batch(0))
    of_graph = SecondOrder(Residual().double(), "cross-entropy", lr=1e-6)
    found["step of a graph"] = lambda: of_graph.step(*batch(0))
    for provider in ("fisher", "gauss-newton", "pch-1", "hessian[kind=rows]"):
        found[f"estimate {provider} of a graph"] = lambda provider=provider: curvlab.estimate(provider, graph)
    branches = graph.gradient()
    graph_hessian = curvlab.estimate("hessian[full=true]", graph)
    found["hessian product of a graph"] = lambda: graph_hessian @ branches
    exact = ("fisher[kind=exact]", "gauss-newton[kind=exact]", "pch[kind=exact]", "hessian")
    rows = ("gauss-newton[kind=rows]", "pch[kind=rows]", "hessian[kind=rows]")
    structures = [f"fisher[structure={one}]" for one in ("ekfac", "diagonal", "block", "layer", "full")]
    for provider in ("fisher", "fisher[kind=mc]", "gauss-newton", "pch-1", *exact, *rows, *structures):
        found[f"estimate {provider}"] = lambda provider=provider: curvlab.estimate(provider, problem)
    for provider in ("pch[kind=exact]", *rows, *structures):
        curvature = cache(lambda provider=provider: curvlab.estimate(provider, problem))
        found[f"product {provider}"] = lambda kept=curvature: kept() @ slope
        found[f"spectrum {provider}"] = lambda kept=curvature: curvlab.spectrum(kept(), k=2)
    for structure in structures:
        found[f"solve exact {structure}, a new alpha each time"] = lambda structure=structure: curvlab.solve(
            "exact", curvlab.estimate(structure, problem), slope, alpha=next(alphas)
        )
    for solver in ("kfi", "sm-kfi", "cg", "ea-cg", "exact"):
        found[f"solve {solver}, a new alpha each time"] = lambda solver=solver: curvlab.solve(
            solver, curvlab.estimate("fisher", problem), problem.gradient(), alpha=next(alphas)
        )
    return found


def saved_and_loaded(curvature: curvlab.Curvature) -> curvlab.Curvature:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curvature.safetensors"
        curvature.save(path)
        return curvlab.Curvature.load(path)


SLOWER = {"compare", "load_comparison", "plan"}  # of a study: `studies` below, or over 20 ms


def test_every_public_function_is_among_the_operations() -> None:
    functions = {name for name in curvlab.__all__ if inspect.isfunction(getattr(curvlab, name))} - SLOWER
    called = inspect.getsource(operations)
    assert {name for name in functions if f"curvlab.{name}(" not in called} == set()


def growth(call: Callable[[], Any], calls: int) -> int:
    """Bytes by which the process has grown over the second half of the calls."""
    for _ in range(calls // 2):
        call()
    gc.collect()
    before = resident()
    for _ in range(calls - calls // 2):
        call()
    gc.collect()
    return resident() - before


@pytest.mark.long
@pytest.mark.skipif(not HANDLES.exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", operations())
def test_memory_is_flat_over_two_thousand_calls(name: str, judge: Judge) -> None:
    model_calls = operations()[name]
    grown = growth(model_calls, 2000)
    if grown >= 4 << 20:  # the heap takes a step now and then; what is leaked grows again and again
        grown = min(grown, growth(model_calls, 2000))
    judge("operations 2,000 times", "held" if grown < 4 << 20 else "hang", f"{grown:,} bytes in 1,000 calls")


def studies(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "compare": lambda: compare(
            TINY, ["fisher"], ["kfi"], **ONE_SCENE, repetitions=1, output=folder / "c", fresh=True
        ),
        "load": lambda: load_comparison(folder / "c"),
        "train": lambda: train(TrainPlan(TINY, epochs=1), folder / "t", fresh=True),
        "store": lambda: Store(folder / "c").rows(),
    }


@pytest.mark.slow
@pytest.mark.skipif(not HANDLES.exists(), reason="needs Linux's /proc")
def test_studies_leave_no_file_open(tmp_path: Path, judge: Judge) -> None:
    for call in studies(tmp_path).values():
        call()
    gc.collect()
    before = len(os.listdir(HANDLES))
    for call in studies(tmp_path).values():
        call()
    gc.collect()
    opened = len(os.listdir(HANDLES)) - before
    judge("file handles", "held" if opened <= 0 else "hang", f"{opened} more files are open")


@pytest.mark.long
@pytest.mark.skipif(not HANDLES.exists(), reason="needs Linux's /proc")
def test_memory_and_file_handles_are_flat_over_twenty_studies(tmp_path: Path, judge: Judge) -> None:
    for name, call in studies(tmp_path).items():
        grown = growth(call, 20)
        judge(
            "studies 20 times", "held" if grown < 8 << 20 else "hang", f"{name}: {grown:,} bytes in 10 runs"
        )
