"""What providers read of a recording: each statistic is a mean over rows.

A statistic is a value, so two providers that need the same one share it, and a pass over a stream
computes it once a batch. Nothing non-linear happens here: PosEig and the recursions come after the
mean over all batches (and workers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.linalg import Factor, GramFactor, gram
from curvlab.linalg.inputs import InputFactors
from curvlab.model.recording import ChainRecording, Recording
from curvlab.providers.draws import uniforms

__all__ = [
    "Bends",
    "ExpectedGradientProducts",
    "GaussNewtonBlocks",
    "GradientProducts",
    "Inputs",
    "OutputHessian",
    "OutputSpectrum",
    "SampledGradientProducts",
    "SlopeProducts",
    "Statistic",
    "Values",
]

Values = tuple[Tensor | Factor | InputFactors, ...]


class Statistic(ABC):
    """A mean over the rows of a batch: one value a layer, or one for the output.

    A value is a tensor, which is averaged over batches, a `GramFactor`, whose rows are joined, or a
    layer's `InputFactors`, which are both. `keyed_by_row` is whether it reads the rows' numbers, which
    then must be those of the whole data, also on a worker that has a part of it.
    """

    keyed_by_row: ClassVar[bool] = False

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
    """E[σ'' ⊙ (Wᵀg)] for each hidden layer."""

    def of(self, recording: Recording) -> Values:
        recording = _chain(recording)
        share = recording.share
        return tuple(
            share.new_zeros(slope.shape[1]) if bend is None else share @ bend
            for slope, bend in zip(recording.slopes, recording.bends, strict=True)
        )


@dataclass(frozen=True)
class GradientProducts(Statistic):
    """E[g gᵀ] for each layer with blocks, as Gram factors, with the given labels."""

    def of(self, recording: Recording) -> Values:
        return tuple(record.gradients for record in recording.layers)


@dataclass(frozen=True)
class SampledGradientProducts(Statistic):
    """E[g gᵀ] with labels drawn from the model's own prediction."""

    keyed_by_row: ClassVar[bool] = True
    samples: int
    seed: int

    def of(self, recording: Recording) -> Values:
        criterion, logits = recording.criterion, recording.logits
        draws = [
            criterion.sample(logits, uniforms(self.seed, draw, recording.first_row, logits))
            for draw in range(self.samples)
        ]
        gradients = torch.stack([criterion.gradients(logits, labels) for labels in draws])
        return _products(recording, gradients, self.samples)


@dataclass(frozen=True)
class ExpectedGradientProducts(Statistic):
    """E[g gᵀ] in expectation over the model's own labels."""

    def of(self, recording: Recording) -> Values:
        return _products(recording, recording.criterion.label_factor(recording.logits), 1)


def _products(recording: Recording, cotangents: Tensor, draws: int) -> Values:
    """E[Σ_r (Jᵀv_r)(Jᵀv_r)ᵀ] / draws for cotangents v (r, m, K), as Gram factors of r·m rows."""
    root = (recording.root / draws**0.5).repeat(len(cotangents))
    return tuple(GramFactor(rows.flatten(0, 1), root) for rows in recording.pullback(cotangents))


@dataclass(frozen=True)
class GaussNewtonBlocks(Statistic):
    """E[Jᵀ ∇²ξ J] for each layer with blocks, J the Jacobian of the logits."""

    def of(self, recording: Recording) -> Values:
        return tuple(_gauss_newton(recording, jacobian) for jacobian in recording.jacobians)


def _gauss_newton(recording: Recording, jacobian: Tensor) -> Tensor:
    curved = recording.curved(jacobian).mul_(recording.share[:, None])
    block = jacobian.flatten(0, 1).T @ curved.flatten(0, 1)
    return (block + block.T) / 2


@dataclass(frozen=True)
class OutputSpectrum(Statistic):
    """E[Σ|λ|] over the negative eigenvalues of each example's ∇²ξ, and over all of them."""

    def of(self, recording: Recording) -> Values:
        hessians = recording.criterion.hessians(recording.logits, recording.targets)
        eigenvalues = torch.linalg.eigvalsh(hessians)
        return (
            recording.share @ eigenvalues.clamp(max=0).abs().sum(1),
            recording.share @ eigenvalues.abs().sum(1),
        )
