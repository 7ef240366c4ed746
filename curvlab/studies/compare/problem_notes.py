"""What a reader of a comparison should know of its problem before the numbers."""

from __future__ import annotations

from torch import nn

from curvlab.exceptions import named_briefly
from curvlab.model.network import DROPOUTS
from curvlab.problem import Problem

__all__ = ["problem_notes"]


def problem_notes(problem: Problem) -> list[str]:
    """Sentences on what the problem itself makes equal or impossible.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> problem_notes(Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1])))[0][:37]
    'PCH and Gauss-Newton are the same her'
    """
    chain, criterion = problem.chain, problem.criterion
    found = []
    straight = chain is not None and all(activation.piecewise_linear for activation in chain.activations)
    if straight and criterion.convex:
        found.append(
            "PCH and Gauss-Newton are the same here: the activations are piecewise linear (σ'' = 0) and the "
            f"criterion `{criterion.name}` is convex, so nothing is left for PCH to correct."
        )
    if criterion.convex is False:
        found.append(
            f"Criterion `{criterion.name}` is not convex: Gauss-Newton may be indefinite, and solvers that "
            "need a positive semi-definite matrix then refuse it."
        )
    if chain is None:
        found.append("The model is no chain of Linear layers: providers that recur over layers are left out.")
    return [*found, *_outside(problem), *_modes(problem)]


def _outside(problem: Problem) -> list[str]:
    """That some trainable parameters have no block."""
    trainable = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
    left = problem.network.left_out
    if not left:
        return []
    share = sum(trainable[name].numel() for name in left) / sum(p.numel() for p in trainable.values())
    return [
        f"{len(left)} of {len(trainable)} trainable parameters ({share:.0%} of the entries: "
        f"{named_briefly(left)}) have no "
        "curvature here, because layers=[…] leaves them out: errors, times and memory are of the rest."
    ]


def _modes(problem: Problem) -> list[str]:
    """That layers which behave otherwise in training are measured as in evaluation."""
    kinds = (*DROPOUTS, nn.modules.batchnorm._BatchNorm)
    found = sorted({type(module).__name__ for module in problem.model.modules() if isinstance(module, kinds)})
    if not found:
        return []
    return [
        f"{' and '.join(found)} are in evaluation mode: in training mode the loss of an example would depend "
        "on chance or on the rest of its batch, and would have no curvature of its own."
    ]
