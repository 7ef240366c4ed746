"""`estimate`: one pass over the data serves any number of providers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, overload

from curvlab.curvature import Curvature
from curvlab.distributed.agreement import agree
from curvlab.distributed.communicator import Communicator, communicator_of
from curvlab.distributed.operators import join_operators
from curvlab.distributed.statistics import JoinedStatistics
from curvlab.exceptions import SpecError
from curvlab.linalg.execution import autocast_switched_off, full_precision
from curvlab.linalg.steps import Gradient
from curvlab.measure import device as devices
from curvlab.problem import Problem
from curvlab.providers.base import Context, Provider
from curvlab.providers.registry import providers
from curvlab.providers.statistics import Means, Statistic, Values
from curvlab.specs import Spec, parse
from curvlab.staleness import Versions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Chosen", "Estimates", "estimate", "estimate_jointly", "estimate_with_gradient"]


@overload
def estimate(  # type: ignore[overload-overlap]
    provider: str | Provider, problem: Problem, *, process_group: ProcessGroup | None = None
) -> Curvature: ...
@overload
def estimate(
    provider: Sequence[str | Provider], problem: Problem, *, process_group: ProcessGroup | None = None
) -> list[Curvature]: ...
def estimate(
    provider: str | Provider | Sequence[str | Provider],
    problem: Problem,
    *,
    process_group: ProcessGroup | None = None,
) -> Curvature | list[Curvature]:
    """The curvature of `problem` by one provider, or by several in a single pass.

    With a `process_group` it is the curvature over the rows of all its ranks, each of which must make this
    call; products with a matrix-free one (`hessian`, `gauss-newton[kind=exact]`) are then calls that all
    ranks must make, too. Without the argument nothing communicates.

    >>> import torch, curvlab
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> [c.provider for c in estimate(["fisher", "pch-1"], problem)]
    ['fisher', 'pch-1']
    """
    if isinstance(provider, str) or not isinstance(provider, Sequence):
        return _estimate([provider], problem, process_group)[0]
    return _estimate(provider, problem, process_group)


@full_precision
def _estimate(
    provider: Sequence[str | Provider], problem: Problem, process_group: ProcessGroup | None
) -> list[Curvature]:
    if process_group is not None:
        communicator = communicator_of(process_group)
        chosen = Chosen.jointly(provider, problem, communicator)
        return estimate_jointly(chosen, problem, communicator).curvatures
    chosen = Chosen.of(provider, problem)
    return _curvatures(chosen, problem, _stages(chosen.statistics))


def _curvatures(chosen: Chosen, problem: Problem, stages: _Stages) -> list[Curvature]:
    versions = problem.versions
    return chosen.curvatures(Context(problem, _means(problem, stages)), versions)


@full_precision
def estimate_with_gradient(provider: str | Provider, problem: Problem) -> tuple[Curvature, Gradient]:
    """The curvature and the gradient of one batch, whose backward pass has its share in the curvature's.

    >>> import torch
    >>> problem = Problem(torch.nn.Linear(2, 2), "cross-entropy", torch.eye(2), torch.tensor([0, 1]))
    >>> curvature, gradient = estimate_with_gradient("pch[kind=rows]", problem)
    >>> curvature.provider, sorted(gradient)
    ('pch[kind=rows,poseig=last]', ['bias', 'weight'])
    """
    chosen = Chosen.of([provider], problem)
    stages = _stages(chosen.statistics)
    if not problem.streamed:
        for statistic in (statistic for stage in stages for statistic in stage):
            statistic.hear_with_gradient(problem.recording())
    gradient = problem.gradient()
    return _curvatures(chosen, problem, stages)[0], gradient


@dataclass(frozen=True)
class Chosen:
    """Providers that were found fit for a problem, under their names, and all statistics they need."""

    named: tuple[tuple[str, Provider], ...]
    statistics: tuple[Statistic, ...]

    @classmethod
    def of(cls, chosen: Sequence[str | Provider], problem: Problem) -> Chosen:
        """Look the providers up and let them check the problem, before any work is done."""
        asked = [_named(spec) for spec in chosen]
        for name, provider in asked:
            provider.check(problem, name)
        labels = [_label(spec, *given, problem) for spec, given in zip(chosen, asked, strict=True)]
        named = tuple((label, provider) for label, (_, provider) in zip(labels, asked, strict=True))
        wanted = {statistic: None for _, provider in named for statistic in provider.statistics(problem)}
        return cls(named, tuple(wanted))

    @classmethod
    def jointly(
        cls, chosen: Sequence[str | Provider], problem: Problem, communicator: Communicator
    ) -> Chosen:
        """The same on each rank, before `estimate_jointly`: an error on one is raised on all."""
        try:
            return cls.of(chosen, problem)
        except Exception as error:
            communicator.raise_on_all(error)

    def curvatures(self, context: Context, versions: Versions) -> list[Curvature]:
        """What the providers make of the statistics, dated as of `versions`."""
        context = context.unfactorised()
        made = [provider.curvature(context, name) for name, provider in self.named]
        problem = context.problem
        said = problem.notes
        left_out: dict[str, tuple[int, ...]] = {}
        if problem.network.left_out:
            shapes = {name: tuple(p.shape) for name, p in problem.model.named_parameters()}
            left_out = {name: shapes[name] for name in problem.network.left_out}
        if autocast_switched_off():
            dtype = str(problem.network.example.dtype).removeprefix("torch.")
            said = (*said, f"autocast is switched off inside: this is the curvature of the {dtype} function")
        example = problem.network.example
        if not devices.has_eigh(example):
            kind = example.device.type
            said = (*said, f"`{kind}` has no eigendecompositions: those that are needed run on the CPU")
        return [
            replace(
                one,
                versions=versions if one.versions is None else one.versions,
                shift=problem.l2,
                notes=(*one.notes, *said),
                left_out=left_out,
            )
            for one in made
        ]


def _named(spec: str | Provider) -> tuple[str, Provider]:
    """A provider under the text that asked for it, or its own text, or its class's name if unregistered."""
    instance = providers.make(spec)
    if not isinstance(instance, Provider):
        raise SpecError(
            f"provider: got an instance of `{type(instance).__name__}`; expected a name or a Provider"
        )
    if isinstance(spec, str):
        return spec, instance
    try:
        return providers.canonical(instance), instance
    except SpecError:
        return type(instance).__name__, instance


def _label(spec: str | Provider, name: str, provider: Provider, problem: Problem) -> str:
    """The name with the values that fields which say `auto` have on this problem."""
    resolved = provider.resolved(problem)
    if resolved == provider:
        return name
    if not isinstance(spec, str):
        return _named(resolved)[0]
    parsed = parse(spec)
    own = {field.name: getattr(resolved, field.name) for field in fields(resolved)}
    found = {key: str(value) for key, value in own.items() if value != getattr(provider, key)}
    return str(Spec(parsed.name, parsed.fields | found))


def resolved_choice(spec: str | Provider, problem: Problem) -> str | Provider:
    """What was asked for, with the values that fields which say `auto` have on this problem.

    >>> import torch
    >>> image = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten(), torch.nn.Linear(2, 2))
    >>> problem = Problem(image, "cross-entropy", torch.ones(3, 1, 1, 1), torch.tensor([0, 1, 0]))
    >>> resolved_choice("pch-1", problem), resolved_choice("fisher", problem)
    ('pch-1[kind=rows,poseig=last]', 'fisher')
    """
    name, provider = _named(spec)
    return _label(spec, name, provider, problem) if isinstance(spec, str) else provider.resolved(problem)


_Stages = Sequence[tuple[Statistic, ...]]


def _means(problem: Problem, stages: _Stages) -> dict[Statistic, Values]:
    """The means of all statistics over all rows, from one pass for each stage."""
    values: dict[Statistic, Values] = {}
    for stage in stages:
        means = Means([statistic.bound(values) for statistic in stage])
        for recording in problem.recordings():
            means.add(recording)
        values |= means.values()
    return values


def _stages(wanted: Sequence[Statistic]) -> list[tuple[Statistic, ...]]:
    """What is needed first, by how many passes come before it, and all that nothing needs with the last."""
    depths: dict[Statistic, int] = {}

    def depth(statistic: Statistic) -> int:
        depths[statistic] = max((depth(needed) + 1 for needed in statistic.needs), default=0)
        return depths[statistic]

    last = max((depth(statistic) for statistic in wanted), default=0)
    needed = {one for statistic in depths for one in statistic.needs}
    places = {s: place if s in needed else last for s, place in depths.items()}
    stages = [tuple(s for s, place in places.items() if place == stage) for stage in range(last + 1)]
    return [stage for stage in stages if stage]


@dataclass(frozen=True, eq=False)
class Estimates:
    """The curvatures over the rows of all ranks, and what was joined with them."""

    curvatures: list[Curvature]
    joined: JoinedStatistics


def estimate_jointly(
    chosen: Chosen,
    problem: Problem,
    communicator: Communicator,
    *,
    gradient: bool = False,
    loss: bool = False,
    settings: Mapping[str, object] | None = None,
) -> Estimates:
    """What the providers make of all ranks' rows, with the gradient and the loss if asked for.

    It takes one exchange, and others before it where statistics need the means of others. Every rank must
    make this call, with the same providers and `settings`.
    """
    versions = problem.versions
    agreed = {"the providers": [provider for _, provider in chosen.named], **(settings or {})}
    *before, last = _stages(chosen.statistics) or [()]
    means: dict[Statistic, Values] = {}
    for stage in before:
        needed = [statistic.bound(means) for statistic in stage]
        found = problem.join(communicator, needed, Means, settings=agreed)
        means |= {statistic: found.values[statistic] for statistic in stage}
    bound = [statistic.bound(means) for statistic in last]
    joined = problem.join(communicator, bound, Means, gradient=gradient, loss=loss, settings=agreed)
    assert joined.share is not None
    own = problem if joined.share else problem.empty_like()
    means |= {statistic: joined.values[statistic] for statistic in last}
    # What is made of one rank's own rows (matrix-free blocks) may fail there alone.
    made = agree(
        communicator,
        lambda: chosen.curvatures(Context(own, means), versions),
        on=problem.network.example.device,
    )
    return Estimates([join_operators(one, communicator, joined.share) for one in made], joined)
