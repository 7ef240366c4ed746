"""What the ranks of a process group know of their rows together, kept with each rank's problem.

Gathered rows are kept, so that the curvature and the gradient of the same data share them: that is what
the solvers tell the sample space by. Whether what is kept may be used again is agreed on by all ranks in
the call itself: a rank that has new data makes all of them start anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor
from torch.distributed import ProcessGroup

from curvlab.distributed.exchange import exchange
from curvlab.distributed.group import Group
from curvlab.distributed.items import GRADIENT, LOSS, Held, Item, Slot, held_by, owner_names
from curvlab.distributed.part import Part, part_of
from curvlab.exceptions import NoRowsError, RankError
from curvlab.gradient import Gradient, RowGradient
from curvlab.linalg import GramFactor
from curvlab.problem import Problem
from curvlab.providers.statistics import Statistic, Values
from curvlab.staleness import Versions

__all__ = ["Joint", "joined"]


@dataclass(eq=False)
class Joint:
    """Means over the rows of all ranks, as far as they were asked for."""

    process_group: ProcessGroup
    versions: Versions
    share: float | None = None
    rows: dict[Slot, GramFactor] = field(default_factory=dict)
    values: dict[Statistic, Values] = field(default_factory=dict)
    found_gradient: Gradient | None = None
    found_loss: Tensor | None = None

    @property
    def gradient(self) -> Gradient:
        """E[∇ξ], in factors where the rows were gathered."""
        assert self.found_gradient is not None
        return self.found_gradient

    @property
    def loss(self) -> Tensor:
        """E[ξ]."""
        assert self.found_loss is not None
        return self.found_loss


@dataclass(frozen=True)
class _Wanted:
    """What one call asks for, or the part of it that is not there yet."""

    statistics: tuple[Statistic, ...]
    gradient: bool
    loss: bool
    share: bool = True

    def lacking(self, joint: Joint) -> _Wanted:
        statistics = tuple(s for s in self.statistics if s not in joint.values)
        gradient, loss = joint.found_gradient is None, joint.found_loss is None
        return _Wanted(statistics, self.gradient and gradient, self.loss and loss, joint.share is None)

    @property
    def nothing(self) -> bool:
        return not (self.statistics or self.gradient or self.loss or self.share)


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others: what it lacks and keeps, and how its own part looks."""

    lacks: tuple[object, ...]
    keeps: tuple[Slot, ...]
    weight: float
    items: tuple[Item, ...] | None


def joined(
    problem: Problem,
    process_group: ProcessGroup,
    statistics: Sequence[Statistic] = (),
    *,
    gradient: bool = False,
    loss: bool = False,
) -> Joint:
    """The means over the rows of all ranks; every rank must call this with the same wishes."""
    group = Group(process_group)
    wanted = _Wanted(tuple(statistics), gradient, loss)
    first_row = 0
    if any(statistic.keyed_by_row for statistic in statistics):
        first_row = sum(group.collect(problem.examples)[: group.rank])
    joint = problem.joint
    if joint is None or joint.process_group is not process_group or joint.versions.differing(problem.tensors):
        joint = Joint(process_group, problem.versions)
    call = _Call(problem, group, wanted, first_row, joint)
    reports = call.reports()
    if len({(report.lacks, report.keeps) for report in reports}) > 1:
        # Some rank has other data than before: nothing that was kept is of the same rows.
        call = _Call(problem, group, wanted, first_row, Joint(process_group, problem.versions))
        reports = call.reports()
    call.finish(reports)
    problem.joint = call.joint
    return call.joint


class _Call:
    """One call of `joined`, from this rank's side."""

    def __init__(self, problem: Problem, group: Group, wanted: _Wanted, first_row: int, joint: Joint) -> None:
        self.problem, self.group, self.joint = problem, group, joint
        self.first_row = first_row
        self.lacking = wanted.lacking(joint)
        self.owners = owner_names(wanted.statistics)
        self.weights = [str(layer.weight_name) for layer in problem.network.selected]
        self.part: Part | None = None
        self.held: list[Held] | None = None

    def reports(self) -> list[_Report]:
        """The reports of all ranks; where a rank fails in its own part, all raise."""
        return self.group.collect(self._report)

    def _report(self) -> _Report:
        todo = self.lacking
        lacks = (*(self.owners[s] for s in todo.statistics), todo.gradient, todo.loss, todo.share)
        items: tuple[Item, ...] | None = None
        if not todo.nothing:
            self.part = part_of(self.problem, todo.statistics, todo.gradient, todo.loss, self.first_row)
        if self.part is not None:
            pairs = list(held_by(self.part, self.owners, self.weights))
            items, self.held = tuple(item for item, _ in pairs), [held for _, held in pairs]
        weight = 0.0 if self.part is None else self.part.weight
        return _Report(lacks, tuple(self.joint.rows), weight, items)

    def finish(self, reports: Sequence[_Report]) -> None:
        """Exchange what is lacking, and keep it."""
        if self.lacking.nothing:
            return
        total = sum(report.weight for report in reports)
        if not total:
            raise NoRowsError("no rank of the process group has a row that counts: no mean exists")
        _check_alike(reports)
        shares = [report.weight / total for report in reports]
        self.joint.share = shares[self.group.rank]
        template = next(report.items for report in reports if report.items is not None)
        device = self.problem.network.layers[0].weight.device
        described = [report.items for report in reports]
        values: list[Held] = []
        if template:
            values = exchange(self.group, described, shares, self.held, self.joint.rows, device)
        self._keep(template, values)

    def _keep(self, template: Sequence[Item], values: Sequence[Held]) -> None:
        by_owner: dict[str, list[tuple[int, Held]]] = {}
        for item, value in zip(template, values, strict=True):
            by_owner.setdefault(item.owner, []).append((item.place, value))
        for statistic in self.lacking.statistics:
            found = by_owner.get(self.owners[statistic], [])
            self.joint.values[statistic] = cast(Values, tuple(value for _, value in found))
        if self.lacking.gradient:
            self.joint.found_gradient = self._gradient(dict(by_owner[GRADIENT]))
        if self.lacking.loss:
            self.joint.found_loss = cast(Tensor, by_owner[LOSS][0][1])

    def _gradient(self, by_place: dict[int, Held]) -> Gradient:
        entries: dict[str, Tensor | RowGradient] = {}
        biases = len(self.weights)
        for place, layer in enumerate(self.problem.network.selected):
            if layer.weight_name is not None:
                entries[layer.weight_name] = cast(Tensor | RowGradient, by_place[place])
            if layer.bias_name is not None:
                entries[layer.bias_name] = cast(Tensor, by_place[biases])
                biases += 1
        return Gradient(entries)


def _check_alike(reports: Sequence[_Report]) -> None:
    """Refuse ranks that came with different models or wishes, before their numbers are mixed."""
    items = {rank: report.items for rank, report in enumerate(reports) if report.items is not None}
    described = {rank: [item.alike for item in found] for rank, found in items.items()}
    (first, expected), *others = described.items()
    for rank, found in others:
        if found != expected:
            raise RankError(
                f"ranks {first} and {rank} of the process group came with different models, providers or "
                f"dtypes: every rank must make the same calls with the same model"
            )
