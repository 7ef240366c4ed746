"""What a reader of a comparison should know of its problem before the numbers."""

from __future__ import annotations

from curvlab.problem import Problem

__all__ = ["facts"]


def facts(problem: Problem) -> list[str]:
    """Sentences on what the problem itself makes equal or impossible.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> facts(Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1])))[0][:37]
    'PCH and Gauss-Newton are the same her'
    """
    chain, criterion = problem.network.chain, problem.criterion
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
    return found
