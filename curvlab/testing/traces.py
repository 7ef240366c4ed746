"""Traces: everything about a model, a batch and the process that an analysis must leave as it was."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlab.model.network import tensors_of
from curvlab.problem import Problem

__all__ = ["differences", "mark", "state_of"]

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def state_of(problem: Problem) -> dict[str, Any]:
    """What is observed, by the words that name it in a sentence."""
    state: dict[str, Any] = {}
    for name, module in problem.model.named_modules():
        label = f"`{name}`" if name else "the model"
        state[f"the training mode of {label}"] = module.training
        state[f"the hooks of {label}"] = [list(getattr(module, hooks)) for hooks in HOOKS]
        state[f"the attributes of {label}"] = sorted(vars(module))
    tensors = dict(problem.model.named_parameters()) | dict(problem.model.named_buffers())
    for name, tensor in tensors.items():
        state |= _tensor(f"`{name}`", tensor)
    for batch in problem.batches():
        for index, tensor in enumerate(tensors_of(batch.inputs)):
            state |= _tensor(f"the inputs ({index + 1})" if index else "the inputs", tensor)
        state |= _tensor("the targets", batch.targets)
    return state | _process()


def _tensor(label: str, tensor: Tensor) -> dict[str, Any]:
    gradient = tensor.grad if tensor.is_leaf else None
    return {
        f"the values of {label}": tensor.detach().clone(),
        f"the version of {label}": tensor._version,
        f"requires_grad of {label}": tensor.requires_grad,
        f"the gradient of {label}": None if gradient is None else gradient.clone(),
        f"the hooks of {label}": list(tensor._backward_hooks or ()),
    }


def _process() -> dict[str, Any]:
    return {
        "torch's random state": torch.get_rng_state(),
        "Python's random state": random.getstate(),
        "numpy's random state": _numpy_state(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
    }


def _numpy_state() -> tuple[object, ...]:
    parts: tuple[Any, ...] = tuple(np.random.get_state())
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in parts)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names under which the two differ.

    >>> differences({"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2})
    ['b']
    """
    return [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


def mark(model: nn.Module) -> None:
    """Give the model gradients and mixed modes, so that there is something to disturb."""
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5) if index % 2 == 0 else None
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0
