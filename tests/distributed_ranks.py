"""The side of the ranks: run as a script by `test_distributed.py`, once for each rank.

    python distributed_ranks.py RANK RANKS FOLDER

Each job is a function of the process group that returns tensors; all are saved for the test to compare
with what one process computes on the joined batch.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvlab
from curvlab import Additive
from curvlab import curvature as curvature_module
from curvlab.distributed import shard
from curvlab.distributed import solve as sharing
from curvlab.distributed.agreement import InitialWeightsWarning
from curvlab.distributed.communicator import ProcessGroupCommunicator, communicator_of
from curvlab.exceptions import CurvlabError
from curvlab.linalg.flat import flatten
from curvlab.optim import SecondOrder
from curvlab.providers.base import Chosen, estimate_jointly

ROWS = 11
# Of 11 rows, where rank 0 ends: uneven, and nothing for one of the two.
CUTS = {"uneven": 7, "first empty": 0, "last empty": ROWS}
PROVIDERS = (
    "fisher",
    "fisher[kind=mc,samples=2,seed=3]",
    "fisher[kind=exact]",
    "gauss-newton",
    "gauss-newton[kind=exact]",
    "pch-1",
    "pch-2",
    "hessian",
    "hessian[full=true]",
)
STREAMED = ("fisher[kind=mc,samples=2,seed=3]", "gauss-newton[kind=exact]", "pch-1", "hessian")
ON_GRAPHS = (
    "hessian",
    "fisher",
    "gauss-newton[kind=exact]",
    "pch[kind=exact]",
    "pch[kind=rows,samples=2]",
    "hessian[kind=rows,samples=2]",
    "fisher[structure=layer]",
    "gauss-newton[kind=rows,structure=full]",
    "pch[kind=rows,structure=ekfac]",
)
SOLVERS = ("kfi", "sm-kfi", "cg[max_iter=8]", "ea-cg[max_iter=8]", "exact")
MATRIX_FREE = ("gauss-newton[kind=exact]", "hessian", "hessian[full=true]")
STEPS = 50
Results = dict[str, Any]


def chain() -> nn.Module:
    """Wide at first (14 > 11 rows: gathered), then narrow (6 and 4 < 11: dense)."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(14, 6), nn.Tanh(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3)).double()


class Residual(nn.Module):
    """No chain: the exact Hessian goes by torch.func here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = nn.Linear(14, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h + torch.tanh(self.b(h)))


def batch(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 14, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (rows,), generator=generator)


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.3, 2.5], dtype=torch.float64), ignore_index=2)


def part(rows: slice, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    """A rank's part of a batch, as `Problem` takes it: `[]` where it has no rows."""
    return (inputs[rows], targets[rows]) if len(inputs[rows]) else ([], None)


def cut(name: str, rank: int) -> slice:
    return slice(0, CUTS[name]) if rank == 0 else slice(CUTS[name], ROWS)


def facts(curvature: curvlab.Curvature) -> Results:
    return {
        "dense": curvature.to_dense(),
        "trace": curvature.trace(),
        "diagonal": torch.cat([d.flatten() for d in curvature.diagonal().values()]),
        "norm": curvature.frobenius_norm(),
        "psd": curvature.psd,
    }


def pairs() -> list[tuple[str, str]]:
    return [(p, s) for p in PROVIDERS for s in SOLVERS if p not in MATRIX_FREE or s.startswith("cg")]


def solve(pair: tuple[str, str], curvature: Any, gradient: Any, **options: Any) -> Results:
    solution = curvlab.solve(pair[1], curvature, gradient, alpha=0.1, **options)
    found: Results = {f"d {name}": solution.direction[name] for name in solution.direction}
    found["residuals"] = torch.tensor([block.residual for block in solution.blocks.values()])
    found["iterations"] = [block.iterations for block in solution.blocks.values()]
    return found


def curvatures(group: Any) -> Results:
    """Every provider and every solver, on every cut."""
    found: Results = {}
    for name in CUTS:
        problem = curvlab.Problem(chain(), "cross-entropy", *part(cut(name, group.rank()), *batch()))
        gradient = problem.gradient(process_group=group)
        found[name, "loss"] = problem.loss(process_group=group)
        found[name, "gradient"] = {entry: gradient[entry] for entry in gradient}
        found[name, "norm"] = gradient.norm()
        estimated = curvlab.estimate(PROVIDERS, problem, process_group=group)
        by_name = dict(zip(PROVIDERS, estimated, strict=True))
        for provider, curvature in by_name.items():
            found[name, provider] = facts(curvature)
        for pair in pairs():
            found[name, *pair] = solve(pair, by_name[pair[0]], gradient)
        first = by_name["fisher"].layers[0]
        found[name, "in the sample space"] = (
            first.inputs.full.rows is gradient.factored("0.weight").inputs.rows
            and first.output.rows is gradient.factored("0.weight").gradients.rows
            and isinstance(gradient.factored("2.weight"), Tensor)
        )
    return found


def shared_solves(group: Any) -> Results:
    """Layers shared out over the ranks, because it is made to look cheap."""
    problem = curvlab.Problem(chain(), "cross-entropy", *part(cut("uneven", group.rank()), *batch()))
    gradient = problem.gradient(process_group=group)
    found: Results = {}
    sharing.FLOPS_PER_BYTE, sharing.LATENCY = 0.0, 0.0
    for provider in ("fisher", "pch-1"):
        curvature = curvlab.estimate(provider, problem, process_group=group)
        costs = [sharing.layer_cost(layer, "full") for layer in curvature.layers]
        found["owners"] = sharing.choose_owners(costs, group.size())
        for solver in SOLVERS:
            found[provider, solver] = solve((provider, solver), curvature, gradient, process_group=group)
    return found


def graphs_and_streams(group: Any) -> Results:
    found: Results = {}
    rows = cut("uneven", group.rank())
    inputs, targets = batch()
    model = Residual()
    for name in ("uneven", "last empty"):
        problem = curvlab.Problem(model, "cross-entropy", *part(cut(name, group.rank()), inputs, targets))
        for provider in ON_GRAPHS:
            found[name, provider] = facts(curvlab.estimate(provider, problem, process_group=group))
    batches = list(zip(inputs[rows].split(3), targets[rows].split(3), strict=True))
    streamed = curvlab.Problem(chain(), weighted(), batches)
    # A stream beside a single batch: what one rank holds as sums the other sends as sums, too.
    mixed = curvlab.Problem(
        chain(), weighted(), *((batches, None) if group.rank() else (inputs[rows], targets[rows]))
    )
    for name, problem in {"streamed": streamed, "mixed": mixed}.items():
        gradient = problem.gradient(process_group=group)
        found[name, "gradient"] = {entry: gradient[entry] for entry in gradient}
        for provider in STREAMED:
            found[name, provider] = facts(curvlab.estimate(provider, problem, process_group=group))
    ignored = torch.full_like(targets[rows], 2) if group.rank() else targets[rows]
    problem = curvlab.Problem(chain(), weighted(), inputs[rows], ignored)
    found["weightless", "gauss-newton[kind=exact]"] = facts(
        curvlab.estimate("gauss-newton[kind=exact]", problem, process_group=group)
    )
    return found


def traffic(group: Any) -> Results:
    """Elements that the exchange sends for PCH with the gradient, of 10 rows over all ranks."""
    counted = {"gathered": 0, "reduced": 0}
    gather, sums = ProcessGroupCommunicator.gather_rows, ProcessGroupCommunicator.sums

    def counted_rows(self: ProcessGroupCommunicator, tensor: Tensor, counts: Any) -> Tensor:
        joined = gather(self, tensor, counts)
        counted["gathered"] += joined.numel()
        return joined

    def counted_sums(self: ProcessGroupCommunicator, tensors: Any) -> list[Tensor]:
        # Whole numbers are no payload: by a few of them the ranks see that they agree.
        counted["reduced"] += sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        return sums(self, tensors)

    inputs, targets = batch(10)
    problem = curvlab.Problem(chain(), "cross-entropy", *part(shard(10, group.rank(), 2), inputs, targets))
    ProcessGroupCommunicator.gather_rows, ProcessGroupCommunicator.sums = counted_rows, counted_sums
    try:
        estimate_jointly(Chosen.of(["pch-1"], problem), problem, communicator_of(group), gradient=True)
    finally:
        ProcessGroupCommunicator.gather_rows, ProcessGroupCommunicator.sums = gather, sums
    return counted


def refusals(group: Any) -> Results:
    """Errors reach every rank, and data that change on one rank make all start anew."""
    found: Results = {}
    inputs, targets = batch()
    rows = cut("uneven", group.rank())

    def message(function: Callable[[], object]) -> str:
        try:
            function()
        except CurvlabError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    bad = inputs.clone()
    bad[-1] = float("nan")
    # A problem looks at its batch when it is made; with_data when it is used, which all ranks do together.
    broken = curvlab.Problem(chain(), "cross-entropy", []).with_data(bad[rows], targets[rows])
    found["not finite"] = message(lambda: curvlab.estimate("pch-1", broken, process_group=group))
    nobody = curvlab.Problem(chain(), "cross-entropy", [])
    found["no rows"] = message(lambda: nobody.loss(process_group=group))
    other = nn.Sequential(nn.Linear(14, 4 + group.rank()), nn.Linear(4 + group.rank(), 3)).double()
    apart = curvlab.Problem(other, "cross-entropy", inputs[rows], targets[rows])
    found["apart"] = message(lambda: curvlab.estimate("fisher", apart, process_group=group))
    own_weights = chain()
    with torch.no_grad():
        own_weights[0].weight.add_(0.1 * group.rank())
    different = curvlab.Problem(own_weights, "cross-entropy", inputs[rows], targets[rows])
    found["other weights"] = message(lambda: different.loss(process_group=group))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = SecondOrder(own_weights, "cross-entropy", process_group=group)
    found["told of"] = [str(one.message) for one in caught if one.category is InitialWeightsWarning]
    found["started with"] = own_weights[0].weight.detach().clone()
    labels = targets[rows] + 9 * group.rank()
    found["bad label"] = message(lambda: optimizer.step(inputs[rows], labels))
    optimizer.alpha = 0.1 + 0.1 * group.rank()
    found["other alpha"] = message(lambda: optimizer.step(inputs[rows], targets[rows]))
    own = inputs[rows].clone()
    problem = curvlab.Problem(chain(), "cross-entropy", own, targets[rows])
    before = problem.gradient(process_group=group)
    if group.rank() == 1:
        own.mul_(2)
    after = problem.gradient(process_group=group)
    curvature = curvlab.estimate("pch-1", problem, process_group=group)
    found["changed"] = {name: after[name] for name in after}
    found["both anew"] = after is not before
    rows = curvature.layers[0].inputs.full.rows
    found["still shared"] = rows is after.factored("0.weight").inputs.rows
    return found


ANALYSED: dict[str, Callable[[], nn.Module]] = {"chain": chain, "residual": Residual}


def analysed(problem: curvlab.Problem, group: Any = None) -> Results:
    """What the analysis says of a whole Hessian and of a Fisher, by products however small they are."""
    joined = {} if group is None else {"process_group": group}
    hessian, fisher = curvlab.estimate(["hessian[full=true]", "fisher"], problem, **joined)
    mixed, damping = hessian + fisher, Additive(2.0)
    found: Results = {}
    held, curvature_module.DENSE_OPERATOR_UP_TO = curvature_module.DENSE_OPERATOR_UP_TO, 0
    try:
        for name, one in {"hessian": hessian, "fisher": fisher, "sum": mixed}.items():
            found[f"{name} spectrum"] = curvlab.spectrum(one, k=5).eigenvalues
            density = curvlab.density(one, probes=3, steps=9)
            found[f"{name} outliers"] = density.outliers
            found[f"{name} moments"] = torch.stack([density.weights @ density.nodes**p for p in (1, 2)])
            for measure in ("trace", "frobenius_norm"):
                estimate = getattr(one, measure)(probes=12, estimator="hutch++")
                found[f"{name} {measure}"] = torch.tensor([float(estimate), estimate.standard_error])
            found[f"{name} diagonal"] = flatten(one.diagonal(probes=12).value, list(one.blocks))
            found[f"{name} logdet"] = torch.tensor(float(one.logdet(damping=damping, probes=6, steps=20)))
            found[f"{name} sample"] = flatten(one.sample(2, damping=damping), list(one.blocks))
        similarity = curvlab.similarity(hessian, fisher, k=3)
        found["similarity"] = torch.tensor(
            [float(similarity.distance), float(similarity.cosine), similarity.overlap]
        )
    finally:
        curvature_module.DENSE_OPERATOR_UP_TO = held
    return found


def analysis(group: Any) -> Results:
    """The analysis of a chain, of a network that is none and of streams."""
    rows = cut("uneven", group.rank())
    inputs, targets = (part[rows] for part in batch())
    batches = list(zip(inputs.split(3), targets.split(3), strict=True))
    found: Results = {}
    for name, model in ANALYSED.items():
        found[name] = analysed(curvlab.Problem(model(), "cross-entropy", inputs, targets), group)
        found[f"{name}, streamed"] = analysed(curvlab.Problem(model(), "cross-entropy", batches), group)
    return found


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {"provider": "pch-1", "solver": "ea-cg[max_iter=10]"},
    "kfi": {"provider": "fisher", "solver": "kfi", "momentum": 0.5, "max_grad_norm": 0.5, "ema": 0.8},
    "newton": {"provider": "gauss-newton[kind=exact]", "solver": "cg[max_iter=5]", "adapt": True},
}


def steps() -> list[tuple[Tensor, Tensor]]:
    """Batches of 11, 4 and 1 rows in turns: with two ranks the last has one empty shard."""
    return [batch((ROWS, 4, 1)[step % 3], seed=step) for step in range(STEPS)]


def train(model: nn.Module, name: str, group: Any = None) -> Tensor:
    options = {} if group is None else {"process_group": group}
    optimizer = SecondOrder(model, "cross-entropy", lr=0.2, alpha=0.1, **OPTIMIZERS[name], **options)
    for inputs, targets in steps():
        rows = slice(None) if group is None else shard(len(inputs), group.rank(), group.size())
        optimizer.step(inputs[rows], targets[rows])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def training(group: Any) -> Results:
    return {name: train(chain(), name, group) for name in OPTIMIZERS}


JOBS: tuple[Callable[[Any], Results], ...] = (
    curvatures,
    shared_solves,
    graphs_and_streams,
    traffic,
    refusals,
    analysis,
    training,
)


def main(rank: int, ranks: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    results: dict[str, Results] = {}
    for job in JOBS:
        try:
            results[job.__name__] = job(dist.group.WORLD)
        except Exception:
            results["failed"] = {job.__name__: traceback.format_exc()}
            break
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
