"""The two input factors of a layer: full, E[hhᵀ], and mean, E[h]E[h]ᵀ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from curvlab.linalg.factors import Factor, GramFactor, RankOneFactor

__all__ = ["InputFactors", "InputKind"]

InputKind = Literal["full", "mean"]


@dataclass(frozen=True, eq=False)
class InputFactors:
    """E[hhᵀ] as a factor and E[h] as a vector; a Gram factor brings its own mean.

    >>> import torch
    >>> from curvlab.linalg import GramFactor
    >>> h = GramFactor(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.5, 0.5]).sqrt())
    >>> [round(x, 4) for x in InputFactors(h).mean.tolist()]
    [0.5, 0.5]
    """

    full: Factor
    given_mean: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        """E[h]."""
        if self.given_mean is not None:
            return self.given_mean
        if isinstance(self.full, GramFactor):
            return self.full.mean
        raise ValueError(f"{self.full} does not hold the rows whose mean E[h] is: give the mean beside it")

    @cached_property
    def mean_factor(self) -> RankOneFactor:
        """E[h] E[h]ᵀ."""
        return RankOneFactor(self.mean)

    def factor(self, kind: InputKind) -> Factor:
        """The full or the mean input factor."""
        return self.full if kind == "full" else self.mean_factor

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define both."""
        mean = {} if self.given_mean is None else {"mean": self.given_mean}
        return self.full.tensors() | mean

    def map(self, function: Callable[[Tensor], Tensor]) -> InputFactors:
        """The same with `function` applied to each tensor."""
        mean = None if self.given_mean is None else function(self.given_mean)
        return InputFactors(self.full.map(function), mean)
