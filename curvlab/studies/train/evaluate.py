"""Loss and accuracy of a model over examples.

loss = Σ c_i ξ_i / Σ c_i,    accuracy = the share of examples whose largest logit is their class

Where the model gives several predictions per example, (examples, length, outputs), each counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import nan

import torch
from torch import Tensor, nn

from curvlab.criteria import Criterion
from curvlab.criteria.base import LossTerms
from curvlab.data import Examples
from curvlab.data.base import Batches
from curvlab.distributed.agreement import agree
from curvlab.distributed.communicator import LOCAL, Communicator, shard
from curvlab.linalg.execution import collected

__all__ = ["Score", "evaluate"]

CHUNK = 1000


@dataclass(frozen=True)
class Score:
    """Loss and accuracy; the accuracy is NaN where targets are not classes."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(
    model: nn.Module, criterion: Criterion, examples: Examples, communicator: Communicator = LOCAL
) -> Score:
    """The score over all `examples`, a chunk at a time. Several ranks share the examples.

    Sums are in float64, and on the host: not every device has it.
    """
    device = next(model.parameters()).device
    sums = agree(communicator, lambda: _sums(model, criterion, examples, communicator), on=device)
    if communicator.size > 1:
        sums = communicator.sum(torch.tensor(sums, dtype=torch.float64, device=device)).tolist()
    total, weight, correct = sums
    accuracy = correct / examples.labels.numel() if examples.labels is not None else nan
    return Score(total / weight if weight else nan, accuracy)


def _sums(
    model: nn.Module, criterion: Criterion, examples: Examples, communicator: Communicator
) -> list[float]:
    """Σ c_i ξ_i, Σ c_i and the number of right answers of this rank's examples."""
    found: list[Tensor] = []  # of every chunk, to be read together
    with collected() as checks:
        for inputs, targets in _chunks(examples, communicator):
            logits = model(inputs)
            if logits.ndim > 2:
                terms = LossTerms.of(criterion, logits, targets)
                logits, targets = terms.logits, terms.targets
            criterion.check_targets(logits, targets)
            weights = criterion.weights(logits, targets)
            weights = logits.new_ones(len(logits)) if weights is None else weights
            right = weights if examples.labels is None else (logits.argmax(1) == targets).to(weights)
            found.append(torch.stack([weights * criterion.losses(logits, targets), weights, right]))
        if checks is not None:
            checks.read()
    total = weight = correct = 0.0
    ends = accumulate(chunk.shape[1] for chunk in found)
    for chunk in torch.cat(found, 1).cpu().double().tensor_split(list(ends), 1)[:-1] if found else ():
        losses, weights, right = (row.sum() for row in chunk)
        total, weight, correct = total + float(losses), weight + float(weights), correct + float(right)
    return [total, weight, correct]


def _chunks(examples: Examples, communicator: Communicator) -> Batches:
    rows = shard(len(examples), communicator.rank, communicator.size)
    return Batches(examples, torch.arange(len(examples))[rows], CHUNK)
