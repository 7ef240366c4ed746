"""Which providers go with which solvers: asked of the solvers themselves, on a toy problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from curvlab.curvature import Curvature, Definiteness
from curvlab.exceptions import CurvlabError, PairError
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.providers.registry import providers
from curvlab.solvers.registry import solvers

__all__ = ["existing_pairs"]

INDEFINITE = "gauss-newton, where indefinite"
KINDS = (
    "fisher[structure=diagonal]",
    "fisher[structure=ekfac]",
    "fisher[structure=layer]",
    "gauss-newton[kind=exact]",
    "hessian[kind=rows]",
    "pch[kind=exact]",
)


def existing_pairs() -> dict[str, dict[str, bool]]:
    """For each provider, and kind of it that matters, whether each solver takes its curvature.

    >>> pairs = existing_pairs()
    >>> pairs["pch-1"]["kfi"], pairs["hessian"]["kfi"], pairs["hessian"]["cg"]
    (True, False, True)
    """
    return {name: _takers(curvature) for name, curvature in _curvatures()}


def _curvatures() -> Iterator[tuple[str, Curvature]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    problem = Problem(
        model, "cross-entropy", torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 0, 1])
    )
    for name in sorted([*providers.names(), *KINDS]):
        try:
            yield name, estimate(name, problem)
        except CurvlabError:
            continue  # another package's provider may ask for fields, or for another problem
    curvature = estimate("gauss-newton", problem)
    yield INDEFINITE, replace(curvature, definiteness=Definiteness(False, "a criterion that is not convex"))


def _takers(curvature: Curvature) -> dict[str, bool]:
    found = {}
    for name in solvers.names():
        try:
            solvers.make(name).check(curvature, name)
            found[name] = True
        except PairError:
            found[name] = False
        except CurvlabError:
            continue
    return found
