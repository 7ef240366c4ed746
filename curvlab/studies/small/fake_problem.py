"""Problems of fake tensors: shapes, dtypes and devices of a real one, without its memory.

A named architecture is made from its settings alone, so that no data set need be there; a user's own model or
data is built as it is, and its tensors are then replaced by fake ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from curvlab import imports
from curvlab.architectures import InputKind, architecture
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
        inputs = pytree.tree_map_only(Tensor, lambda tensor: _fake(tensor, mode), batch.inputs)
        targets = _fake(batch.targets, mode)
        return Problem(
            model,
            problem.criterion,
            inputs,
            targets,
            layers=list(problem.network.parameters),
            l2=problem.l2,
            output=problem.network.call.output,
        )


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
    kind, shape, outputs = _sizes(setup)
    criterion = setup.build_criterion()
    with mode:
        model = setup.build_model().eval()
        terms = shape if kind == "tokens" else ()  # a prediction for every token
        labels = torch.zeros(setup.batch, *terms, dtype=torch.int64, device=setup.device)
        real = torch.empty(setup.batch, *terms, outputs, dtype=setup.torch_dtype, device=setup.device)
        inputs = labels if kind == "tokens" else real.new_empty(setup.batch, *shape)
        try:
            return Problem(model, criterion, inputs, labels)
        except ProblemError:
            return Problem(model, criterion, inputs, real)


def _sizes(setup: Setup) -> tuple[InputKind, tuple[int, ...], int]:
    """Kind and shape of the inputs, and outputs: of the architecture, or else of the data."""
    if setup.arch is not None:
        chosen = architecture(setup.arch)
        return chosen.input_kind, *chosen.sizes
    data = setup.load_data()
    kind = data.kind if data.train.shaped or data.kind == "tokens" else "rows"
    return kind, (data.shape if kind != "rows" else (data.features,)), data.outputs
