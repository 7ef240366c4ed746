"""Loss and accuracy of a model over examples.

loss = Σ c_i ξ_i / Σ c_i,    accuracy = the share of examples whose largest logit is their class
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import torch
from torch import nn

from curvlab.criteria import Criterion
from curvlab.data import Examples
from curvlab.data.dataset import Batches
from curvlab.distributed.group import Group
from curvlab.distributed.shards import shard

__all__ = ["Score", "evaluate"]

CHUNK = 1000


@dataclass(frozen=True)
class Score:
    """Loss and accuracy; the accuracy is NaN where targets are not classes."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, criterion: Criterion, examples: Examples, group: Group | None = None) -> Score:
    """The score over all `examples`, a chunk at a time; sums in float64. The ranks of a group share them."""
    total = weight = correct = 0.0
    for inputs, targets in _chunks(examples, group):
        logits = model(inputs)
        weights = criterion.weights(logits, targets)
        weights = logits.new_ones(len(logits)) if weights is None else weights
        total += float((weights * criterion.losses(logits, targets)).double().sum())
        weight += float(weights.double().sum())
        if examples.labels is not None:
            correct += float((logits.argmax(1) == targets).double().sum())
    if group is not None:
        device = next(model.parameters()).device
        sums = torch.tensor([total, weight, correct], dtype=torch.float64, device=device)
        total, weight, correct = group.sum(sums).tolist()
    accuracy = correct / len(examples) if examples.labels is not None else nan
    return Score(total / weight if weight else nan, accuracy)


def _chunks(examples: Examples, group: Group | None) -> Batches:
    rows = slice(None) if group is None else shard(len(examples), group.rank, group.size)
    return Batches(examples, torch.arange(len(examples))[rows], CHUNK)
