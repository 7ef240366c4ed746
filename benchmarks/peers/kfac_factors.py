"""curvlab's Fisher beside curvlinops' KFAC: the same factors, up to scales that are written down beforehand.

    python -m benchmarks.peers.kfac_factors

curvlinops (3.0.1; `KFACLinearOperator`, source and docstrings) has, for m examples in one batch, S positions,
T loss terms of K outputs per example and `reduction="mean"`:

    A  Σ_ip h hᵀ / (m S)   (expand),    Σ_i h̄ h̄ᵀ / m   (reduce)         `_hook_accumulate_input_covariance`
    B  (mT)²/(mT) Σ g̃ g̃ᵀ,  g̃ the gradient of the batch's mean loss      `_accumulate_gradient_covariance`

so A is curvlab's, scale 1. The batch's mean loss is 1/m Σ_i ξ_i, so g̃ = g/m, and with ξ_i's gradients g
(mT) Σ g̃ g̃ᵀ = T · (1/m Σ g gᵀ):

| kind (curvlinops' name) | scale of B: curvlinops' = scale × curvlab's |
| --- | --- |
| `empirical` (`empirical`), cross-entropy | T |
| `empirical`, mse and BCE: its loss is multiplied by √K first (`_maybe_adjust_loss_scale`) | T K |
| `exact` (`type-2`), cross-entropy and mse: 1/(mT) Σ g gᵀ over columns; curvlab's carry 1/√T | 1 |
| `exact`, BCE: Gauss-Newton; curvlab's is the covariance of the averaged loss's gradient, 1/K of it | K |
| `mc` (`mc`): as `exact`, in the mean over the draws | 1, 1, K |

Where they are not the same matrix, by documented choices (`differs`; each is held to its own definition):

- `type-2` sends one column of *all* terms of an example back in one pass; curvlab one per term and column.
  The cross products of terms vanish in `expand` where positions do not mix, so that none sees two terms.
- bias blocks: curvlinops takes `expand`'s B, curvlab that of ḡ in both settings: the same in `reduce` only.
- grouped convolutions (curvlinops averages the groups' channels) and `padding_mode` (it pads with zeros) are
  left out.
- `forward-only` (B = I) is not a Fisher and has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import pandas as pd
import torch
from torch import Tensor, nn

import curvlab
from benchmarks.peers import rows
from benchmarks.peers.rows import Factors

KINDS = {"empirical": "empirical", "exact": "type-2"}
SHARINGS = ("expand", "reduce")
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross-entropy": nn.CrossEntropyLoss,
    "mse": nn.MSELoss,
    "bce": nn.BCEWithLogitsLoss,
}
TOLERANCE = 1e-10


class MeanOverPositions(nn.Module):
    """(m, S, n) to (m, n)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class MeanOfThePast(nn.Module):
    """Every position sees those before it: (m, S, n), so a position's gradient has several loss terms."""

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).reshape(1, -1, 1)
        return x.cumsum(1) / counts


class ClassesSecond(nn.Module):
    """(m, T, K) to (m, K, T), torch's own layout of cross-entropy."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@dataclass(frozen=True)
class Case:
    """A small network in float64, its layers with their S, T and K; several terms with cross-entropy only."""

    name: str
    modules: Callable[[], tuple[nn.Module, ...]]
    shape: tuple[int, ...]
    positions: dict[str, int]
    terms: int = 1
    outputs: int = 3
    criterion: str = "cross-entropy"
    mixes: bool = False
    examples: int = 6

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, inputs and targets, always the same ones."""
        torch.manual_seed(0)
        model = nn.Sequential(*self.modules()).double()
        x = torch.randn(self.examples, *self.shape, dtype=torch.float64)
        if self.criterion == "cross-entropy":
            terms = (self.terms,) if self.terms > 1 else ()
            return model, x, torch.randint(self.outputs, (self.examples, *terms))
        targets = torch.rand(self.examples, self.outputs, dtype=torch.float64)
        return model, x, targets.round() if self.criterion == "bce" else targets

    def scale(self, kind: str) -> float:
        """What curvlinops' B is, in units of curvlab's: the table above."""
        if kind == "empirical":
            return self.terms * (1 if self.criterion == "cross-entropy" else self.outputs)
        return self.outputs if self.criterion == "bce" else 1

    def same(self, kind: str, sharing: str) -> bool:
        """Whether both mean the same weight block."""
        return kind == "empirical" or self.terms == 1 or (sharing == "expand" and not self.mixes)


def _chain() -> tuple[nn.Module, ...]:
    return nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)


def _convolutions() -> tuple[nn.Module, ...]:
    first = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    second = nn.Conv2d(3, 4, (2, 3), padding=(0, 1), dilation=(1, 2), bias=False)
    return first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)


def _pooled() -> tuple[nn.Module, ...]:
    return nn.Linear(4, 5), nn.Tanh(), MeanOverPositions(), nn.Linear(5, 3)


def _token_by_token() -> tuple[nn.Module, ...]:
    return nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), ClassesSecond()


def _mixing_tokens() -> tuple[nn.Module, ...]:
    return nn.Linear(4, 5), nn.Tanh(), MeanOfThePast(), nn.Linear(5, 3), ClassesSecond()


CASES = (
    Case("chain", _chain, (4,), {"0": 1, "2": 1}),
    Case("chain, mse", _chain, (4,), {"0": 1, "2": 1}, criterion="mse"),
    Case("chain, bce", _chain, (4,), {"0": 1, "2": 1}, criterion="bce"),
    Case("convolutions", _convolutions, (2, 7, 7), {"0": 16, "2": 6, "5": 1}),
    Case("convolutions, mse", _convolutions, (2, 7, 7), {"0": 16, "2": 6, "5": 1}, criterion="mse"),
    Case("pooled sequence", _pooled, (7, 4), {"0": 7, "3": 1}),
    Case("loss per token", _token_by_token, (4, 4), {"0": 4, "2": 4}, terms=4),
    Case("loss per token, mixing", _mixing_tokens, (4, 4), {"0": 4, "3": 4}, terms=4, mixes=True),
)


def curvlinops_factors(
    case: Case, kind: str, sharing: str, **options: object
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every layer as curvlinops has them."""
    from curvlinops import KFACLinearOperator

    model, x, y = case.build()
    operator = KFACLinearOperator(
        model,
        LOSSES[case.criterion](),
        list(model.parameters()),
        [(x, y)],
        fisher_type=KINDS.get(kind, kind),
        kfac_approx=sharing,
        check_deterministic=False,
        **options,
    )
    operator.compute_kronecker_factors()
    state = operator.state_dict()
    return {
        layer: (state["input_covariances"][layer], state["gradient_covariances"][layer])
        for layer in case.positions
    }


def defined(case: Case, layer: str, kind: str, sharing: str) -> Factors:
    """The factors by curvlab's definition, from the rows."""
    cotangents = {"empirical": rows.empirical, "exact": rows.exact}[kind]
    return rows.factors(*_arguments(case, layer), cotangents, sharing)


def curvlinops_definition(case: Case, layer: str, kind: str, sharing: str) -> Factors:
    """The factors by curvlinops' definition, from the rows, in curvlab's scale."""
    cotangents = {"empirical": rows.empirical, "exact": rows.exact_terms_together}[kind]
    return rows.factors(*_arguments(case, layer), cotangents, sharing)


def _arguments(case: Case, layer: str) -> tuple[nn.Module, str, Tensor, Tensor, str]:
    model, x, y = case.build()
    return model, layer, x, y, case.criterion


def curvlab_blocks(case: Case, layer: str, kind: str, sharing: str) -> tuple[Tensor, Tensor | None]:
    """The weight block, (B ⊗ A) for `weight.flatten()`, and the bias block of one layer."""
    model, x, y = case.build()
    problem = curvlab.Problem(model, LOSSES[case.criterion](), x, y)
    blocks = curvlab.estimate(f"fisher[kind={kind},sharing={sharing}]", problem).blocks
    bias = blocks.get(f"{layer}.bias")
    return blocks[f"{layer}.weight"].to_dense(), None if bias is None else bias.to_dense()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found - expected).norm() / expected.norm())


def comparisons() -> Iterator[tuple[Case, str, str, str]]:
    """Every case, layer, kind and sharing."""
    for case in CASES:
        for layer in case.positions:
            for kind in KINDS:
                for sharing in SHARINGS:
                    yield case, layer, kind, sharing


def row(case: Case, layer: str, kind: str, sharing: str) -> dict[str, object]:
    """One line: the scale, and how far curvlab is from curvlinops and each from its definition."""
    a, b = curvlinops_factors(case, kind, sharing)[layer]
    scale = case.scale(kind)
    own, peers = defined(case, layer, kind, sharing), curvlinops_definition(case, layer, kind, sharing)
    weight, bias = curvlab_blocks(case, layer, kind, sharing)
    errors = {
        "curvlinops - rows": max(relative_error(a, peers.inputs), relative_error(b, scale * peers.output)),
        "curvlab - rows": relative_error(weight, torch.kron(own.output, own.inputs)),
        "bias - rows": 0.0 if bias is None else relative_error(bias, own.bias),
    }
    between = relative_error(scale * weight, torch.kron(b, a))
    if case.same(kind, sharing):
        errors["curvlab - curvlinops"] = between
    verdict = "ok" if max(errors.values()) <= TOLERANCE else "OFF"
    return {
        "case": case.name,
        "layer": layer,
        "kind": kind,
        "sharing": sharing,
        "m": case.examples,
        "S": case.positions[layer],
        "T": case.terms,
        "K": case.outputs,
        "scale of B": scale,
        **{name: f"{value:.1e}" for name, value in errors.items()},
        **({} if case.same(kind, sharing) else {"curvlab - curvlinops": f"differs, {between:.2f}"}),
        "verdict": verdict,
    }


def main() -> None:
    """Print every comparison."""
    if find_spec("curvlinops") is None:
        raise SystemExit("curvlinops is not installed: pip install curvlinops-for-pytorch")
    table = pd.DataFrame([row(*one) for one in comparisons()])
    print(table.to_string(index=False, na_rep=""))


if __name__ == "__main__":
    main()
