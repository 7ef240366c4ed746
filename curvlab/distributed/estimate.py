"""Curvatures over the rows of all ranks, and with them the gradient and the loss in one exchange."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from curvlab.curvature import Curvature
from curvlab.distributed.group import Group
from curvlab.distributed.joint import Joint, joined
from curvlab.distributed.operators import join_operators
from curvlab.problem import Problem
from curvlab.providers.base import Context
from curvlab.providers.estimate import Chosen

__all__ = ["Estimates", "estimate_jointly"]


@dataclass(frozen=True, eq=False)
class Estimates:
    """The curvatures, and the means that came with them."""

    curvatures: list[Curvature]
    joint: Joint


def estimate_jointly(
    chosen: Chosen,
    problem: Problem,
    process_group: ProcessGroup,
    *,
    gradient: bool = False,
    loss: bool = False,
) -> Estimates:
    """What the providers make of all ranks' rows; every rank must make this call."""
    versions = problem.versions
    joint = joined(problem, process_group, chosen.statistics, gradient=gradient, loss=loss)
    assert joint.share is not None
    own = problem if joint.share else problem.without_rows()
    curvatures = chosen.curvatures(Context(own, joint.values), versions)
    group = Group(process_group)
    return Estimates([join_operators(curvature, group, joint.share) for curvature in curvatures], joint)
