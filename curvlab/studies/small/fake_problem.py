"""Problems of fake tensors: shapes, dtypes and devices of a real one, without its memory.

A named architecture is made from its widths alone, so that no data set need be there; a user's own model or
data is built as it is, and its tensors are then replaced by fake ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from curvlab import imports
from curvlab.architectures import architecture
from curvlab.exceptions import ProblemError
from curvlab.problem import Problem
from curvlab.studies.setup import Setup

__all__ = ["fake_problem"]


@contextmanager
def fake_problem(subject: Problem | Setup) -> Iterator[Problem]:
    """A problem of fake tensors, for as long as the context lasts.

    >>> with fake_problem(Setup(arch="150528-1024-10", batch=100)) as problem:
    ...     problem.gradient().norm().shape
    torch.Size([])
    """
    mode = FakeTensorMode()
    if isinstance(subject, Problem):
        made = _of_problem(subject, mode)
    elif imports.is_address(subject.data):
        made = _of_problem(subject.build_problem(), mode)
    else:
        made = _of_setup(subject, mode)
    with mode:
        yield made


def _of_problem(problem: Problem, mode: FakeTensorMode) -> Problem:
    if problem.streamed:
        raise ProblemError(
            "a stream of batches has no size to plan for; plan with one of its batches: "
            "problem.with_data(inputs, targets)"
        )
    model, batch = _fake_model(problem.model, mode), next(problem.batches())
    with mode:
        inputs, targets = _fake(batch.inputs, mode), _fake(batch.targets, mode)
        return Problem(model, problem.criterion, inputs, targets, layers=_layers(problem))


def _layers(problem: Problem) -> list[str]:
    return [layer.name for layer in problem.network.selected]


def _fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers are fake: `deepcopy` takes them from its memo."""
    memo: dict[int, Any] = {id(tensor): _fake(tensor, mode) for tensor in _tensors(model)}
    return copy.deepcopy(model, memo)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return mode.from_tensor(tensor)


def _of_setup(setup: Setup, mode: FakeTensorMode) -> Problem:
    setup = setup.resolve()
    features, outputs = _sizes(setup)
    criterion = setup.build_criterion()
    with mode:
        model = setup.build_model().eval()
        inputs = torch.empty(setup.batch, features, dtype=setup.torch_dtype, device=setup.device)
        labels = torch.empty(setup.batch, dtype=torch.int64, device=setup.device)
        real = inputs.new_empty(setup.batch, outputs)
        try:
            return Problem(model, criterion, inputs, labels)
        except ProblemError:
            return Problem(model, criterion, inputs, real)


def _sizes(setup: Setup) -> tuple[int, int]:
    """Inputs and outputs: of the architecture, or of the data where the model is the user's own."""
    if setup.arch is not None:
        widths = architecture(setup.arch).widths
        return widths[0], widths[-1]
    data = replace(setup, arch=None).load_data()
    return data.features, data.outputs
