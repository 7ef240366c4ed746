"""The expectation approximation's error at one layer, and the bound the paper gives for it.

One step of the Gauss-Newton and PCH recursions replaces E[(Wᵀ H_i W) ⊙ σ'σ'ᵀ] by E[Wᵀ H_i W] ⊙ E[σ'σ'ᵀ]. With
the exact H_i of layer t and X_i = Wᵀ H_i W, the step down to layer t-1 is wrong by an entry-wise covariance:

    ‖Ele-Cov(X_i, σ'σ'ᵀ)‖_F²  ≤  L⁴ Σ_μν Var([X_i]_μν)         L = sup |σ'|

by Cauchy-Schwarz and Var(σ'_μ σ'_ν) ≤ L⁴ (supplement D of the paper). Covariance and variance are means over
the rows without correction, c_i included. Moments are kept centred and merged from chunk to chunk:

    S(A ∪ B) = S(A) + S(B) + w_A w_B / (w_A + w_B) (x̄_A - x̄_B)(ȳ_A - ȳ_B)

so nothing cancels, and neither the batch nor a stream of them is ever held as matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.linalg.execution import full_precision
from curvlab.model.layers import Chain
from curvlab.model.recording import ChainRecording
from curvlab.problem import Problem
from curvlab.providers.hessian import chunks, layer_hessians

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["bounds"]

COLUMNS = ["layer", "layer_name", "activation", "lipschitz", "left", "right", "holds"]


@full_precision
def bounds(problem: Problem) -> pd.DataFrame:
    """Both sides of the expectation-approximation bound, one row for each hidden layer that has blocks.

    `left` = ‖Ele-Cov(Wᵀ H_i W, σ'σ'ᵀ)‖_F² is the squared error of the step down to that layer, `right` =
    L⁴ Σ Var([Wᵀ H_i W]_μν) its bound, `lipschitz` is L = sup |σ'| (sigmoid ¼, tanh and ReLU 1; for a module
    curvlab has no closed form of, the largest |σ'| it measures). `holds` allows for rounding.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.eye(4), torch.tensor([0, 1, 0, 1]))
    >>> frame = bounds(problem)
    >>> frame[["layer", "lipschitz", "holds"]].values.tolist()
    [[1, 0.25, True]]
    """
    import pandas as pd

    chain = problem.require_chain("bounds")
    hidden = [index for index, layer in enumerate(chain.layers[:-1]) if layer.selected]
    moments: dict[int, _Moments] = {}
    for recording in problem.recordings() if hidden else ():
        assert isinstance(recording, ChainRecording)
        _add_batch(recording, hidden, moments)
    frame = pd.DataFrame([_row(chain, index, moments[index]) for index in hidden], columns=COLUMNS)
    frame.attrs = {"criterion": problem.criterion.name}
    return frame


@dataclass(frozen=True, eq=False)
class _Moments:
    """Sums over some rows, entry by entry: X̄, Ȳ, Σ c (X - X̄)(Y - Ȳ), and the total of Σ c (X - X̄)².

    X is Wᵀ H_i W and Y is σ'σ'ᵀ.
    """

    weight: float
    first: Tensor
    second: Tensor
    products: Tensor
    squares: float

    @classmethod
    def of(cls, matrices: Tensor, slopes: Tensor, weights: Tensor) -> _Moments:
        """The moments of X_i = `matrices` (overwritten) and Y_i = σ'σ'ᵀ with σ' the rows of `slopes`."""
        weight = float(weights.sum())
        share = weights / weight if weight else weights
        first = torch.einsum("i,iab->ab", share, matrices)
        second = (slopes * share[:, None]).T @ slopes
        matrices.sub_(first)
        squares = weight * float(share @ matrices.flatten(1).square().sum(1))
        # With X centred, Y need not be.
        matrices.mul_(slopes[:, :, None]).mul_(slopes[:, None, :])
        products = weight * torch.einsum("i,iab->ab", share, matrices)
        return cls(weight, first, second, products, squares)

    def merge(self, other: _Moments) -> _Moments:
        """The moments of the rows of both."""
        weight = self.weight + other.weight
        if weight == 0:
            return self
        step_first, step_second = other.first - self.first, other.second - self.second
        between, share = self.weight * other.weight / weight, other.weight / weight
        return _Moments(
            weight,
            self.first + share * step_first,
            self.second + share * step_second,
            self.products + other.products + between * step_first * step_second,
            self.squares + other.squares + between * float(step_first.square().sum()),
        )


def _add_batch(recording: ChainRecording, hidden: list[int], moments: dict[int, _Moments]) -> None:
    """Walk down the exact recursion with a chunk of examples at a time."""
    lowest = min(hidden)
    for rows in chunks(recording, lowest):
        for index, hessians in layer_hessians(recording, rows, lowest + 1):
            below = index - 1
            if below in hidden:
                weight, slopes = (
                    recording.chain.layers[index].weight,
                    recording.activation_slopes[below][rows],
                )
                new = _Moments.of(weight.T @ (hessians @ weight), slopes, recording.weights[rows])
                moments[below] = moments[below].merge(new) if below in moments else new


def _row(chain: Chain, index: int, moments: _Moments) -> dict[str, object]:
    activation = chain.activations[index]
    left = float((moments.products / moments.weight).square().sum())
    right = activation.lipschitz**4 * moments.squares / moments.weight
    # Where X_i is the same for every example both sides are rounding, and may be the same rounding.
    slack = 1 + 64 * torch.finfo(moments.first.dtype).eps
    return {
        "layer": index + 1,
        "layer_name": chain.layers[index].name,
        "activation": activation.name,
        "lipschitz": float(activation.lipschitz),
        "left": left,
        "right": right,
        "holds": left <= slack * right,
    }
