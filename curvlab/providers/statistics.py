"""What providers read of a recording: each statistic is a mean over rows.

A statistic is a value, so two providers that need the same one share it, and a pass over a stream
computes it once a batch. Nothing non-linear happens here: PosEig and the recursions come after the
mean over all batches (and workers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvlab.linalg import GramFactor, gram
from curvlab.linalg.inputs import InputFactors
from curvlab.providers.draws import uniforms
from curvlab.recording import ChainRecording, Recording

__all__ = [
    "Bends",
    "GaussNewtonBlocks",
    "GradientProducts",
    "Inputs",
    "OutputHessian",
    "SlopeProducts",
    "Statistic",
    "Values",
]

Values = tuple[Tensor | GramFactor | InputFactors, ...]


class Statistic(ABC):
    """A mean over the rows of a batch: one value a layer, or one for the output."""

    @abstractmethod
    def of(self, recording: Recording) -> Values:
        """The means over one batch."""


def _chain(recording: Recording) -> ChainRecording:
    assert isinstance(recording, ChainRecording)
    return recording


@dataclass(frozen=True)
class Inputs(Statistic):
    """E[hhᵀ] and E[h] for each layer with blocks."""

    def of(self, recording: Recording) -> Values:
        return tuple(InputFactors(record.inputs) for record in recording.layers)


@dataclass(frozen=True)
class OutputHessian(Statistic):
    """E[∇²ξ(h^k)]."""

    def of(self, recording: Recording) -> Values:
        return (recording.output_hessian,)


@dataclass(frozen=True)
class SlopeProducts(Statistic):
    """E[σ'σ'ᵀ] for each hidden layer."""

    def of(self, recording: Recording) -> Values:
        recording = _chain(recording)
        return tuple(gram((slope * recording.root[:, None]).T) for slope in recording.slopes)


@dataclass(frozen=True)
class Bends(Statistic):
    """E[σ'' ⊙ (Wᵀg)] for each hidden layer; zero where σ is piecewise linear."""

    def of(self, recording: Recording) -> Values:
        recording = _chain(recording)
        zero = recording.root.new_zeros(())
        return tuple(zero if bend is None else recording.share @ bend for bend in recording.bends)


@dataclass(frozen=True)
class GradientProducts(Statistic):
    """E[g gᵀ] for each layer with blocks, as Gram factors, with labels of one of three kinds."""

    kind: Literal["empirical", "mc", "exact"]
    samples: int = 1
    seed: int = 0

    def of(self, recording: Recording) -> Values:
        if self.kind == "empirical":
            return tuple(record.gradients for record in recording.layers)
        cotangents = self._sampled(recording) if self.kind == "mc" else recording.criterion.label_factor(recording.logits)
        draws = self.samples if self.kind == "mc" else 1
        root = (recording.root / draws**0.5).repeat(len(cotangents))
        return tuple(GramFactor(rows.flatten(0, 1), root) for rows in recording.pullback(cotangents))

    def _sampled(self, recording: Recording) -> Tensor:
        criterion, logits = recording.criterion, recording.logits
        gradients = []
        for draw in range(self.samples):
            u = uniforms(self.seed, draw, recording.first_row, logits)
            gradients.append(criterion.gradients(logits, criterion.sample(logits, u)))
        return torch.stack(gradients)


@dataclass(frozen=True)
class GaussNewtonBlocks(Statistic):
    """E[Jᵀ ∇²ξ J] for each layer with blocks, J the Jacobian of the logits."""

    def of(self, recording: Recording) -> Values:
        outputs = recording.logits.shape[1]
        basis = torch.eye(outputs, dtype=recording.logits.dtype, device=recording.logits.device)
        cotangents = basis[:, None, :].expand(outputs, recording.examples, outputs)
        curved = recording.criterion.hessian_products(recording.logits, recording.targets, cotangents)
        blocks = []
        for rows, weighted in zip(recording.pullback(cotangents), recording.pullback(curved), strict=True):
            block = rows.flatten(0, 1).T @ (weighted * recording.share[:, None]).flatten(0, 1)
            blocks.append((block + block.T) / 2)
        return tuple(blocks)
