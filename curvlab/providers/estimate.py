"""`estimate`: one pass over the data serves any number of providers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from curvlab.curvature import Curvature
from curvlab.exceptions import SpecError
from curvlab.problem import Problem
from curvlab.providers.accumulate import Mean, mean_of
from curvlab.providers.base import Context, Provider
from curvlab.providers.registry import providers
from curvlab.providers.statistics import Statistic, Values

__all__ = ["estimate"]


@overload
def estimate(provider: str | Provider, problem: Problem) -> Curvature: ...  # type: ignore[overload-overlap]
@overload
def estimate(provider: Sequence[str | Provider], problem: Problem) -> list[Curvature]: ...
def estimate(
    provider: str | Provider | Sequence[str | Provider], problem: Problem
) -> Curvature | list[Curvature]:
    """The curvature of `problem` by one provider, or by several in a single pass.

    >>> import torch, curvlab
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> [c.provider for c in estimate(["fisher", "pch-1"], problem)]
    ['fisher', 'pch-1']
    """
    if isinstance(provider, str) or not isinstance(provider, Sequence):
        return estimate([provider], problem)[0]
    named = [_named(spec) for spec in provider]
    for name, instance in named:
        instance.check(problem, name)
    versions = problem.versions
    wanted = {s: None for _, instance in named for s in instance.statistics(problem)}
    context = Context(problem, _means(problem, list(wanted)))
    curvatures = [instance.curvature(context, name) for name, instance in named]
    return [c if c.versions is not None else replace(c, versions=versions) for c in curvatures]


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


def _means(problem: Problem, wanted: list[Statistic]) -> dict[Statistic, Values]:
    """The means of all `wanted` statistics over all rows, from one pass."""
    if not wanted:
        return {}
    means: dict[Statistic, list[Mean]] = {}
    for recording in problem.recordings():
        for statistic in wanted:
            values = statistic.of(recording)
            held = means.setdefault(statistic, [mean_of(value) for value in values])
            for mean, value in zip(held, values, strict=True):
                mean.add(value, recording.total_weight)  # type: ignore[arg-type]
    return {statistic: tuple(mean.value() for mean in held) for statistic, held in means.items()}
