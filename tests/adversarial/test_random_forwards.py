"""Networks drawn at random (modules, branches, reuse, reshapes): right, or refused, and never silently wrong.

    HYPOTHESIS_PROFILE=thorough python -m pytest tests/adversarial/test_random_forwards.py

draws 500; with --hypothesis-show-statistics it tells how many were refused, and for what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.items import Item, Made, Oracle, kronecker_blocks, verdict
from tests.adversarial.outcomes import Judge

T, D, K = 2, 3, 3


class Program(nn.Module):
    """Instructions on a value of shape (m, T, D), with a pool of modules that may be used again."""

    def __init__(self, instructions: list[tuple[str, int]], per_token: bool) -> None:
        super().__init__()
        self.instructions, self.per_token = instructions, per_token
        self.linear = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D, bias=False)])
        self.tokens = nn.Linear(T, T)
        self.wide = nn.Linear(2 * D, D)
        self.convolution = nn.Conv1d(D, D, 3, padding=1)
        self.grouped = nn.Conv1d(D, D, 1, groups=D)
        self.norm = nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 1, batch_first=True)
        self.scale = nn.Parameter(torch.randn(D))
        self.head = nn.Linear(D, K)
        used = {name for name, _ in instructions}
        for name, module in (
            ("tokens", self.tokens),
            ("cat", self.wide),
            ("convolution", self.convolution),
            ("grouped", self.grouped),
            ("norm", self.norm),
            ("attention", self.attention),
        ):
            if name not in used:
                module.requires_grad_(False)
        self.scale.requires_grad_("scale" in used)

    def forward(self, x: Tensor) -> Tensor:
        for name, choice in self.instructions:
            x = STEPS[name](self, x, choice)
        return self.head(x if self.per_token else x.mean(1))


def _no_grad(p: Any, x: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        y = p.linear[k](x)
    return x + y.tanh()


def _routed(p: Any, x: Tensor, k: int) -> Tensor:
    chosen = x[:, 0, 0] > 0
    out = x.clone()
    out[chosen] = p.linear[k](x[chosen])
    return out


STEPS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "linear": lambda p, x, k: p.linear[k](x),
    "activation": lambda p, x, k: (torch.tanh, F.silu)[k](x),
    "residual": lambda p, x, k: x + torch.tanh(p.linear[k](x)),
    "gate": lambda p, x, k: p.linear[k](x).sigmoid() * p.linear[1 - k](x),
    "tokens": lambda p, x, k: x + p.tokens(x.transpose(1, 2)).transpose(1, 2),
    "cat": lambda p, x, k: p.wide(torch.cat([x, p.linear[k](x)], -1)),
    "convolution": lambda p, x, k: p.convolution(x.transpose(1, 2)).transpose(1, 2),
    "grouped": lambda p, x, k: p.grouped(x.transpose(1, 2)).transpose(1, 2),
    "norm": lambda p, x, k: p.norm(x),
    "attention": lambda p, x, k: x + p.attention(x, x, x, need_weights=bool(k))[0],
    "scale": lambda p, x, k: x * p.scale,
    "branch": lambda p, x, k: torch.where(x[:, :1, :1] > 0, x, p.linear[k](x).sin()),
    "sequence first": lambda p, x, k: p.linear[k](x.transpose(0, 1)).transpose(0, 1).tanh(),
    "last token": lambda p, x, k: x + p.linear[k](x[:, -1]).tanh()[:, None],
    "in place": lambda p, x, k: p.linear[k](x).mul_(0.5).sigmoid_(),
    "folded": lambda p, x, k: p.linear[k](x.flatten(0, 1)).unflatten(0, (len(x), T)),
    "functional": lambda p, x, k: x + F.linear(x, p.linear[k].weight).tanh(),
    "transposed": lambda p, x, k: x + F.linear(x, p.linear[k].weight.T).tanh(),
    "detached": lambda p, x, k: x + p.linear[k](x).detach(),
    "no grad": _no_grad,
    "routed": _routed,
    "rolled": lambda p, x, k: x + p.linear[k](x).roll(1, 0),
    "one by one": lambda p, x, k: torch.cat([p.linear[k](row[None]) for row in x]),
}
ACROSS_EXAMPLES = ("rolled",)
# A refusal of these is allowed; the rest are honest.
HARD = ("folded", "functional", "transposed", "detached", "no grad", "routed", "one by one", *ACROSS_EXAMPLES)
HONEST = [name for name in STEPS if name not in HARD]


def programs(names: list[str]) -> st.SearchStrategy[tuple[list[tuple[str, int]], bool]]:
    instruction = st.tuples(st.sampled_from(names), st.integers(0, 1))
    return st.tuples(st.lists(instruction, min_size=1, max_size=4), st.booleans())


def item_of(program: tuple[list[tuple[str, int]], bool], m: int, seed: int) -> Item:
    instructions, per_token = program

    def make() -> Made:
        torch.manual_seed(seed)
        model = Program(instructions, per_token).double()
        targets = torch.randint(K, (m, T) if per_token else (m,))
        independent = not any(name in ACROSS_EXAMPLES for name, _ in instructions) or m == 1
        return Made(model, torch.randn(m, T, D).double(), targets, independent=independent)

    return Item(f"{instructions}", "sneaky", make)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "allowed"),
    [(HONEST, ("right",)), (list(STEPS), ("right", "refused"))],
    ids=["honest", "any"],
)
def test_a_random_network_is_right_or_refused_where_it_is_not_honest(
    names: list[str], allowed: tuple[str, ...], judge: Judge
) -> None:
    outcomes: list[str] = []

    # With as many examples as tokens, a layer used with the sequence first and with it second is refused.
    counts = [m for m in range(1, 5) if m != T or "refused" in allowed]

    @given(programs(names), st.sampled_from(counts), st.integers(0, 999))
    def answered(program: tuple[list[tuple[str, int]], bool], m: int, seed: int) -> None:
        found = verdict(item_of(program, m, seed))
        event(found.outcome)
        outcomes.append(found.outcome)
        if found.outcome == "refused":
            event(f"refused with {sorted({name for name, _ in program[0] if name in HARD})}")
        assert found.outcome in allowed, f"{found.outcome}: {found.reason}"

    answered()
    for outcome in outcomes:
        judge("random forwards", "held" if outcome == "right" else outcome)


@pytest.mark.filterwarnings("ignore")
@given(programs(HONEST), st.integers(1, 3), st.integers(0, 999))
def test_references_of_random_networks_see_every_use(
    program: tuple[list[tuple[str, int]], bool], m: int, seed: int
) -> None:
    """The rows that the oracle sees sum to the gradient, for every matrix of an honest network."""
    made = item_of(program, m, seed).made()
    oracle = Oracle(made)
    plain = oracle.plain_blocks()
    (blocks, _) = kronecker_blocks(oracle)
    used = [n for n, g in oracle.gradient().items() if float(g.abs().max()) > 0]
    matrices = [n for n in used if plain[n].shape[0] > 2 * D and "bias" not in n and "norm" not in n]
    assert set(matrices) <= set(blocks)
