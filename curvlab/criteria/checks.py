"""Checks and conversions that several criteria share: each error names the argument.

Values are read only where a tensor has some (`curvlab.measure.device.readable`); shapes always.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from curvlab.exceptions import ProblemError, SpecError
from curvlab.linalg.pending import require
from curvlab.measure.device import readable

__all__ = ["as_weights", "check_labels", "check_logits", "check_positive", "check_real_targets"]


def as_weights(value: Tensor | Iterable[float] | float | None, argument: str) -> tuple[float, ...] | None:
    """Weights as a plain tuple, which compares, hashes and belongs to no device.

    >>> as_weights(torch.tensor([1.0, 0.5]), "weight")
    (1.0, 0.5)
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = _values(value, argument)
    weights = (float(value),) if isinstance(value, int | float) else tuple(float(entry) for entry in value)
    if not all(math.isfinite(entry) and entry >= 0 for entry in weights):
        raise ProblemError(f"`{argument}` is {weights}; expected finite, non-negative weights")
    return weights


def check_positive(criterion: str, **fields: float) -> None:
    """Raise `SpecError` unless every field is a finite number above zero.

    >>> check_positive("robust", delta=5.0)
    """
    for name, value in fields.items():
        if not 0 < value < math.inf:
            raise SpecError(f"{name}={value} of `{criterion}`: expected a finite number above 0")


def _values(weights: Tensor, argument: str) -> list[float]:
    if weights.numel() != (weights.shape[-1] if weights.ndim else 1):
        raise ProblemError(
            f"`{argument}` has shape {tuple(weights.shape)}; expected one weight for each output. "
            "Weights that differ between examples are not supported: they depend on the batch"
        )
    if not readable(weights):
        raise ProblemError(f"`{argument}` is a meta or fake tensor, without values; give numbers")
    return [float(entry) for entry in weights.detach().flatten().tolist()]


def check_logits(logits: Tensor, targets: Tensor) -> None:
    """Logits are (m, K) and floating; targets have a row for each and live on the same device."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ProblemError(
            f"the model's output has shape {tuple(logits.shape)} and dtype {logits.dtype}; "
            "expected floating-point logits of shape (examples, outputs)"
        )
    if not isinstance(targets, Tensor):
        raise ProblemError(f"`targets` is a {type(targets).__name__}; expected a tensor")
    if targets.device != logits.device:
        raise ProblemError(f"`targets` is on {targets.device}, the logits on {logits.device}; move one")
    if targets.ndim == 0 or targets.shape[0] != logits.shape[0]:
        raise ProblemError(
            f"`targets` has shape {tuple(targets.shape)}; expected one target for each of the "
            f"{logits.shape[0]} examples"
        )


def check_labels(logits: Tensor, targets: Tensor, ignore_index: int | None = None) -> None:
    """Targets are (m,) class indices below K, or `ignore_index`."""
    m, k = logits.shape
    if targets.shape != (m,):
        advice = "; use `targets.squeeze(1)`" if targets.shape == (m, 1) else ""
        raise ProblemError(
            f"`targets` has shape {tuple(targets.shape)}; expected class indices of shape ({m},){advice}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ProblemError(
            f"`targets` has dtype {targets.dtype}; expected integer class indices (use `targets.long()`)"
        )
    if not readable(targets):
        return
    labels = targets.long()  # in a narrow dtype a comparison would wrap K or ignore_index
    outside = (labels < 0) | (labels >= k)
    if ignore_index is not None:
        outside &= labels != ignore_index

    def judge(found: list[float]) -> None:
        if not any(found):
            return
        row = int(outside.nonzero()[0])
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ProblemError(
            f"`targets` has label {int(labels[row])} at example {row}; expected 0 to {k - 1}{ignored}, "
            f"as the model has {k} outputs"
        )

    require([outside.any()], judge)


def check_real_targets(logits: Tensor, targets: Tensor) -> None:
    """Targets are finite floating-point numbers in the logits' own shape."""
    m, k = logits.shape
    if targets.shape != (m, k):
        advice = "; use `targets.unsqueeze(1)`" if targets.shape == (m,) and k == 1 else ""
        raise ProblemError(
            f"`targets` has shape {tuple(targets.shape)}; expected ({m}, {k}), one number an output{advice}"
        )
    if not targets.is_floating_point():
        raise ProblemError(
            f"`targets` has dtype {targets.dtype}; expected floating-point numbers "
            f"(use `targets.to({logits.dtype})` if they are meant as numbers)"
        )
    if readable(targets) and not torch.isfinite(targets).all():
        row = int((~torch.isfinite(targets)).any(1).nonzero()[0])
        raise ProblemError(f"`targets` is not finite at example {row}; expected finite numbers")
