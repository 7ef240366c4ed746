"""Lookups: the input row of a token is one-hot, so the input factor Σ w h hᵀ is diagonal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from curvlab.linalg.views import Layout
from curvlab.model.uses.base import WeightUse

__all__ = ["EmbeddingBagUse", "EmbeddingUse"]


@dataclass(frozen=True, eq=False)
class EmbeddingUse(WeightUse):
    """A lookup, z_ip = weight[token]: h_ip is one-hot and is formed by `input_rows` and `sampled_rows` only.

    `inputs` are the tokens, `dtype` that of the weight. A token equal to `padding` (negative ones count from
    the end, as in torch) is a row with h = 0.

    >>> tokens = torch.tensor([[1, 0, 2], [2, 2, 0]])
    >>> use = EmbeddingUse(tokens, 2, vocabulary=3, dtype=torch.float32, padding=0)
    >>> use.frequencies(torch.ones(2, 3))
    tensor([0., 1., 3.])
    """

    kind: ClassVar[str] = "embedding"
    works_on_rows: ClassVar[bool] = True
    lookup: ClassVar[bool] = True
    vocabulary: int
    dtype: torch.dtype
    padding: int | None = None

    @property
    def parts(self) -> int:
        return 1

    @property
    def layout(self) -> Layout:
        return "transposed"

    @cached_property
    def positions(self) -> int:
        return self.inputs.numel() // self.examples

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return tuple(self.inputs.shape[1:]) if self.folds == 1 else None

    @property
    def input_size(self) -> int:
        return self.vocabulary

    @cached_property
    def tokens(self) -> Tensor:
        """The tokens, (examples, S)."""
        return self.inputs.reshape(self.examples, self.positions).long()

    @cached_property
    def present(self) -> Tensor:
        """1 for every token, 0 where it is padding: (examples, S)."""
        if self.padding is None:
            return torch.ones_like(self.tokens, dtype=self.dtype)
        padding = self.padding + self.vocabulary if self.padding < 0 else self.padding
        return (self.tokens != padding).to(self.dtype)

    def frequencies(self, weights: Tensor) -> Tensor:
        """f = Σ_ip w_ip h_ip, (n,): weighted frequencies of the tokens. Σ_ip w_ip h_ip h_ipᵀ is diag(f)."""
        result = weights.new_zeros(self.vocabulary)
        return result.index_add_(0, self._indices.flatten(), (weights * self.present).flatten())

    @property
    def _indices(self) -> Tensor:
        """The tokens as rows of the weight; padding may lie beyond the last one, but is in no sum."""
        return self.tokens.clamp(max=self.vocabulary - 1)

    def _one_hot(self, indices: Tensor, present: Tensor) -> Tensor:
        return (F.one_hot(indices, self.vocabulary) * present[..., None])[:, :, None]

    def input_rows(self, first: int = 0, last: int | None = None) -> Tensor:
        return self._one_hot(self._indices[first:last], self.present[first:last])

    def sampled_rows(self, index: Tensor) -> Tensor:
        return self._one_hot(self._indices.take_along_dim(index, 1), self.present.take_along_dim(index, 1))

    def mean_input(self, weights: Tensor) -> Tensor:
        return self.frequencies(weights)[None]

    def input_second_moment(self, weights: Tensor) -> Tensor:
        """diag(f), (1, n, n); `frequencies` gives the diagonal alone, for vocabularies that are not tiny."""
        return self.frequencies(weights).diag_embed()[None]

    def image(self, parameter: Tensor) -> Tensor:
        return (parameter[self._indices] * self.present[..., None].to(parameter))[:, :, None]

    def output_rows(self, gradient: Tensor) -> Tensor:
        draws = gradient.shape[: gradient.ndim - self.inputs.ndim - 1]
        return gradient.reshape(*draws, self.examples, self.positions, 1, gradient.shape[-1])

    def gradient(self, rows: Tensor, shape: tuple[int, ...], weights: Tensor | None = None) -> Tensor:
        factors = self.present if weights is None else self.present * weights[:, None]
        scaled = rows * factors[..., None, None]
        return rows.new_zeros(shape).index_add_(0, self._indices.flatten(), scaled.reshape(-1, shape[1]))

    def example_gradients(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows = (self.output_rows(gradient) * self.present[..., None, None]).squeeze(-2)
        index = self._indices[..., None].expand(rows.shape)
        return rows.new_zeros(*rows.shape[:-2], *shape).scatter_add_(-2, index, rows)

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter.mT.unsqueeze(-3)

    def from_matrix(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        return matrix.squeeze(-3).mT


@dataclass(frozen=True, eq=False)
class EmbeddingBagUse(EmbeddingUse):
    """The sum or mean of the embeddings of a bag; each token of it is a position.

    z_ip is the embedding of token p, so g_ip is the bag's gradient, divided by the bag's size (padding does
    not count) for a mean and times the token's coefficient where there are `coefficients`, (bags, length),
    torch's `per_sample_weights`. `inputs` are (bags, length); `from_offsets` takes bags of unequal lengths.

    >>> use = EmbeddingBagUse(torch.tensor([[1, 0], [2, 2]]), 2, vocabulary=3, dtype=torch.float32, mean=True)
    >>> use.example_gradients(torch.ones(2, 1), shape=(3, 1)).squeeze(-1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 1.0000]])
    """

    kind: ClassVar[str] = "embedding bag"
    works_on_rows: ClassVar[bool] = False
    mean: bool = True
    coefficients: Tensor | None = None

    @classmethod
    def from_offsets(
        cls,
        tokens: Tensor,
        offsets: Tensor,
        examples: int,
        vocabulary: int,
        dtype: torch.dtype,
        padding: int | None = None,
        mean: bool = True,
        coefficients: Tensor | None = None,
    ) -> Self:
        """Bags that follow each other in one vector of tokens, bag b from `offsets[b]` on.

        Short bags are filled up with padding (an index beyond the vocabulary where there is none).

        >>> tokens, offsets = torch.tensor([1, 0, 2]), torch.tensor([0, 1])
        >>> use = EmbeddingBagUse.from_offsets(tokens, offsets, 2, vocabulary=3, dtype=torch.float32)
        >>> use.frequencies(torch.ones(2, 2))
        tensor([1., 1., 1.])
        """
        ends = torch.cat([offsets[1:], offsets.new_tensor([len(tokens)])])
        length = int((ends - offsets).max())
        places = offsets[:, None] + torch.arange(length, device=tokens.device)
        inside = places < ends[:, None]
        places = places.clamp(max=len(tokens) - 1)
        filler = vocabulary if padding is None else padding % vocabulary
        bags = torch.where(inside, tokens[places], filler)
        factors = None if coefficients is None else torch.where(inside, coefficients[places], 0)
        return cls(bags, examples, vocabulary, dtype, filler, mean, factors)

    def narrow(self, first: int, last: int) -> Self:
        rows = slice(first * self.folds, last * self.folds)
        coefficients = None if self.coefficients is None else self.coefficients[rows]
        return replace(super().narrow(first, last), coefficients=coefficients)

    @property
    def positions_shape(self) -> tuple[int, ...] | None:
        return None  # the output has one row per bag, whatever its length

    def output_rows(self, gradient: Tensor) -> Tensor:
        bags, length = self.inputs.shape
        factors = torch.ones_like(self.inputs, dtype=gradient.dtype)
        if self.coefficients is not None:
            factors = factors * self.coefficients
        if self.mean:
            factors = factors / self.present.reshape(bags, length).sum(1, keepdim=True).clamp(min=1)
        rows = gradient[..., None, :] * factors[..., None]
        return rows.reshape(*gradient.shape[:-2], self.examples, self.positions, 1, gradient.shape[-1])
