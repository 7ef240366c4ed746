"""Two ranks, the second of which differs in one thing: run by `test_ranks.py`, once for each rank.

    python -m tests.adversarial.ranks RANK FOLDER

Writes what each job came to on this rank, as JSON: {"job": [outcome, message, seconds]}, the outcome being
`refused` (an error of curvlab's own), `answered` or `traceback`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvlab
from curvlab.criteria.registry import criterion_named
from curvlab.data import Examples
from curvlab.data.inputs import TensorInputs
from curvlab.distributed.communicator import communicator_of
from curvlab.exceptions import CurvlabError
from curvlab.optim import SecondOrder
from curvlab.studies.setup import Setup
from curvlab.studies.train.evaluate import evaluate
from curvlab.studies.train.optimizers import optimizers
from curvlab.studies.train.run import TrainPlan, train

__all__ = ["AGREEING", "DIFFERENCES", "RAISING", "main"]

OWN = "a hook of the user's own"
TIMEOUT = timedelta(seconds=60)
Job = Callable[[Any, bool], object]


def batch(rank: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (rows,), generator=generator)


def network(activation: nn.Module | None = None, buffer: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), activation or nn.Tanh(), nn.Linear(4, 3)).double()
    model.register_buffer("scale", torch.full((2,), buffer, dtype=torch.float64))
    return model


def solved(
    group: Any,
    model: nn.Module | None = None,
    criterion: Any = "cross-entropy",
    provider: str = "fisher",
    solver: str = "kfi",
    **damping: Any,
) -> object:
    """A joint gradient, curvature and step."""
    problem = curvlab.Problem(model or network(), criterion, *batch(group.rank()))
    slope = problem.gradient(process_group=group)
    matrix = curvlab.estimate(provider, problem, process_group=group)
    options = damping or {"alpha": 0.1}
    return curvlab.solve(solver, matrix, slope, process_group=group, **options).direction["0.weight"]


def optimized(group: Any, **options: Any) -> object:
    """Two steps of an optimizer that is built with these options."""
    optimizer = SecondOrder(network(), "cross-entropy", process_group=group, **options)
    optimizer.step(*batch(group.rank()))
    return optimizer.step(*batch(group.rank()))


def other_weights(group: Any, differs: bool) -> object:
    model = network()
    if differs:
        with torch.no_grad():
            model[0].weight[0, 0] += 0.5
    return solved(group, model)


def problem(group: Any, model: nn.Module | None = None, **options: Any) -> curvlab.Problem:
    return curvlab.Problem(model or network(), "cross-entropy", *batch(group.rank()), **options)


def joint(group: Any, provider: str = "gauss-newton[kind=exact]", **options: Any) -> curvlab.Curvature:
    """A curvature over the rows of both ranks; by default one whose every product is a sum over them."""
    return curvlab.estimate(provider, problem(group, **options), process_group=group)


def slope(group: Any, scale: float = 1.0) -> dict[str, Tensor]:
    found = problem(group).gradient(process_group=group)
    return {name: scale * found[name] for name in found}


def other_precision(group: Any, differs: bool) -> object:
    dtype = torch.float32 if differs else torch.float64
    inputs, targets = batch(group.rank())
    made = curvlab.Problem(network().to(dtype), "cross-entropy", inputs.to(dtype), targets)
    return made.gradient(process_group=group)


def frozen(group: Any, differs: bool) -> object:
    model = network()
    model[2].weight.requires_grad_(not differs)
    return solved(group, model)


def by_columns(group: Any, columns: int) -> Tensor:
    matrix = joint(group)
    return matrix.flat_product(torch.eye(matrix.numel, dtype=torch.float64)[:, :columns])


def powered(group: Any, exponent: float) -> object:
    return joint(group).power(exponent, damping=curvlab.Additive(0.1)) @ slope(group)


def inverted(group: Any, shift: float) -> object:
    return joint(group).inverse(damping=curvlab.Additive(shift)) @ slope(group)


def solved_alone(group: Any, solver: str, alpha: float) -> object:
    """A solve of a joint matrix without the group: its products are sums over the ranks all the same."""
    return curvlab.solve(solver, joint(group), slope(group), alpha=alpha).direction["0.weight"]


def by_mapping(group: Any, differs: bool) -> object:
    solvers = {"0*": "kfi", "*": "cg" if differs else "kfi"}
    return curvlab.solve(solvers, joint(group, "fisher"), slope(group), alpha=0.1, process_group=group)


# What differs in a call on a matrix that both ranks have: nothing is mixed, and nobody waits for the other.
ASKED: dict[str, Job] = {
    "the operand of a product": lambda group, differs: joint(group) @ slope(group, 2.0 if differs else 1.0),
    "the number of columns of an operand": lambda group, differs: by_columns(group, 3 if differs else 2),
    "the measure of a matrix": lambda group, differs: (
        joint(group).trace() if differs else joint(group).diagonal()
    ),
    "an estimator": lambda group, differs: joint(group).trace(
        estimator="hutch++" if differs else "hutchinson", probes=8
    ),
    "a seed of probes": lambda group, differs: joint(group).diagonal(
        estimator="hutchinson", probes=4, seed=int(differs)
    ),
    "a number of probes": lambda group, differs: joint(group).trace(probes=5 if differs else 4),
    "a number of eigenvalues": lambda group, differs: curvlab.spectrum(joint(group), k=3 if differs else 2),
    "an end of a spectrum": lambda group, differs: curvlab.spectrum(
        joint(group), k=2, which="smallest" if differs else "largest"
    ),
    "a tolerance of a spectrum": lambda group, differs: curvlab.spectrum(
        joint(group), k=2, tol=1e-2 if differs else 1e-8
    ),
    "a damping of a determinant": lambda group, differs: joint(group).logdet(
        damping=curvlab.Additive(0.2 if differs else 0.1)
    ),
    "an exponent": lambda group, differs: powered(group, -0.5 if differs else 0.5),
    "a damping of an inverse": lambda group, differs: inverted(group, 0.2 if differs else 0.1),
    "a seed of samples": lambda group, differs: joint(group).sample(
        2, damping=curvlab.Additive(0.1), seed=int(differs)
    ),
    "a solver without the group": lambda group, differs: solved_alone(
        group, f"cg[max_iter={3 if differs else 2}]", 0.1
    ),
    "a damping without the group": lambda group, differs: solved_alone(group, "cg", 0.2 if differs else 0.1),
    "the gradient of a solve": lambda group, differs: curvlab.solve(
        "kfi", joint(group, "fisher"), slope(group, 2.0 if differs else 1.0), alpha=0.1, process_group=group
    ),
}

DIFFERENCES: dict[str, Job] = ASKED | {
    "l2": lambda group, differs: problem(group, l2=0.2 if differs else 0.1).gradient(process_group=group),
    "an output": lambda group, differs: problem(
        group, output=(lambda z: 2 * z) if differs else (lambda z: 3 * z)
    ).gradient(process_group=group),
    "a choice of layers": lambda group, differs: problem(
        group, layers=["0.weight" if differs else "2.weight"]
    ).gradient(process_group=group),
    "a precision": other_precision,
    "a mode": lambda group, differs: solved(group, network().train(not differs)),
    "a frozen layer": frozen,
    "solvers by layer": by_mapping,
    "a sharing": lambda group, differs: joint(group, f"fisher[sharing={'reduce' if differs else 'expand'}]"),
    "a limit of factors": lambda group, differs: joint(group, f"fisher[max_factor={2 if differs else 9}]"),
    "a number of draws": lambda group, differs: joint(group, f"gauss-newton[samples={2 if differs else 3}]"),
    "a place of PosEig": lambda group, differs: joint(group, f"pch[poseig={'last' if differs else 'node'}]"),
    "an average": lambda group, differs: optimized(group, ema=0.5 if differs else 0.9),
    "an interval of estimates": lambda group, differs: optimized(group, refresh_every=2 if differs else 1),
    "a clipping": lambda group, differs: optimized(group, max_grad_norm=0.5 if differs else 0.9),
    "an adaptation": lambda group, differs: optimized(group, adapt=differs),
    "weights": other_weights,
    "a buffer": lambda group, differs: solved(group, network(buffer=float(differs))),
    "an activation": lambda group, differs: solved(group, network(nn.Sigmoid() if differs else nn.Tanh())),
    "a setting of an activation": lambda group, differs: solved(
        group, network(nn.LeakyReLU(0.3 if differs else 0.1))
    ),
    "a criterion": lambda group, differs: solved(group, criterion="robust" if differs else "cross-entropy"),
    "a setting of a criterion": lambda group, differs: solved(
        group, criterion=nn.CrossEntropyLoss(label_smoothing=0.1 if differs else 0.0)
    ),
    "a provider": lambda group, differs: solved(group, provider="gauss-newton" if differs else "fisher"),
    "gamma": lambda group, differs: solved(group, provider=f"pch[gamma={-0.5 if differs else -1}]"),
    "alpha": lambda group, differs: solved(group, alpha=0.2 if differs else 0.1),
    "a kind of damping": lambda group, differs: solved(
        group, damping=curvlab.Additive(0.1) if differs else curvlab.Mixed(0.1)
    ),
    "a solver": lambda group, differs: solved(group, solver="cg" if differs else "kfi"),
    "a structure": lambda group, differs: solved(
        group, provider=f"fisher[structure={'layer' if differs else 'block'}]", solver="exact"
    ),
    "a seed of draws": lambda group, differs: solved(group, provider=f"fisher[kind=mc,seed={int(differs)}]"),
    "a weight decay": lambda group, differs: optimized(group, weight_decay=0.1 if differs else 0.0),
    "a learning rate": lambda group, differs: optimized(group, lr=0.2 if differs else 0.1),
    "a momentum": lambda group, differs: optimized(group, momentum=0.5 if differs else 0.9),
    "a setting of SPRING": lambda group, differs: optimized(
        group,
        provider="fisher[structure=full]",
        solver="exact",
        spring=0.5 if differs else 0.9,
    ),
    "a setting of a solver": lambda group, differs: solved(
        group, solver=f"cg[max_iter={3 if differs else 9}]"
    ),
}


def stepped(group: Any, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> object:
    model = network()
    optimizer = SecondOrder(model, "cross-entropy", lr=0.1, process_group=group)
    inputs, targets = batch(group.rank())
    optimizer.step(inputs, targets)
    return optimizer.step(*change(inputs, targets))


def hook_raises(group: Any, raises: bool) -> object:
    model = network()
    optimizer = SecondOrder(model, "cross-entropy", lr=0.1, process_group=group)
    optimizer.step(*batch(group.rank()))

    def fail(*given: Any) -> None:
        raise KeyError(OWN)

    if raises:
        model[0].register_forward_hook(fail)
    return optimizer.step(*batch(group.rank()))


def baseline_hook_raises(group: Any, raises: bool, optimizer: str, backwards: bool = False) -> object:
    """The same of a baseline, whose hook raises in the forward or in the backward pass."""
    model, criterion = network(), criterion_named("cross-entropy")
    stepper = optimizers.make(optimizer).build(model, criterion, communicator_of(group))
    stepper.step(*batch(group.rank()))

    def fail(*given: Any) -> None:
        raise KeyError(OWN)

    if raises and backwards:
        model[0].register_full_backward_hook(fail)
    elif raises:
        model[0].register_forward_hook(fail)
    return stepper.step(*batch(group.rank()))


def bad_label_of_baseline(group: Any, raises: bool) -> object:
    inputs, labels = batch(group.rank())
    stepper = optimizers.make("sgd").build(
        network(), criterion_named("cross-entropy"), communicator_of(group)
    )
    return stepper.step(inputs, labels + 7 if raises else labels)


def evaluation_raises(group: Any, raises: bool) -> object:
    inputs, labels = batch(0)
    examples = Examples(TensorInputs(inputs), labels + 7 if raises else labels)
    return evaluate(network(), criterion_named("cross-entropy"), examples, communicator_of(group))


def data_missing(group: Any, missing: bool) -> object:
    """A training of which one rank cannot load the data."""
    setup = Setup(data=f"digits[train={999_999 if missing else 50}]", batch=20, device="cpu")
    return train(TrainPlan(setup, "sgd", epochs=1), process_group=group)


def watched_training(group: Any, raises: bool, what: str) -> object:
    """A training of which one rank's own callback raises between two steps."""

    def fail(*given: Any) -> bool:
        if raises:
            raise KeyError(OWN)
        return False

    plan = TrainPlan(Setup(data="digits[train=40,test=20]", batch=20, device="cpu"), "sgd", epochs=1)
    return train(plan, process_group=group, count_memory=False, **{what: fail})


RAISING: dict[str, Job] = {
    "an observer that raises": lambda group, raises: watched_training(group, raises, "observe"),
    "a progress bar that raises": lambda group, raises: watched_training(group, raises, "on_progress"),
    "a request to stop that raises": lambda group, raises: watched_training(group, raises, "should_stop"),
    "a bad label in a step": lambda group, raises: stepped(group, lambda x, y: (x, y + 7 if raises else y)),
    "inputs that are not finite in a step": lambda group, raises: stepped(
        group, lambda x, y: (x / 0 if raises else x, y)
    ),
    "a batch of another width in a step": lambda group, raises: stepped(
        group, lambda x, y: (x[:, :3] if raises else x, y)
    ),
    "a hook that raises": hook_raises,
    "a hook that raises in a step of sgd": lambda group, raises: baseline_hook_raises(group, raises, "sgd"),
    "a hook that raises in a backward pass of adam": lambda group, raises: baseline_hook_raises(
        group, raises, "adam", backwards=True
    ),
    "a bad label in a step of sgd": bad_label_of_baseline,
    "an evaluation that raises": evaluation_raises,
    "data that one rank lacks": data_missing,
    "a capture that one rank asks for": lambda group, raises: optimized(group, capture=raises),
}

AGREEING: dict[str, Job] = {"nothing at all": lambda group, differs: solved(group)}


def outcome_of(job: Job, group: Any) -> tuple[str, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job(group, group.rank() == 1)
    except CurvlabError as error:
        return "refused", str(error)
    except Exception as error:
        # What the user's own code raises may come back to them as it is, on the rank that it was raised on.
        return "refused" if OWN in str(error) else "traceback", f"{type(error).__name__}: {error}"
    return "answered", ""


def main(rank: int, folder: Path) -> None:
    """Every job in turn; the ranks meet between two of them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=TIMEOUT
    )
    found = {}
    for name, job in (DIFFERENCES | RAISING | AGREEING).items():
        begun = time.monotonic()
        found[name] = (*outcome_of(job, dist.group.WORLD), time.monotonic() - begun)
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
