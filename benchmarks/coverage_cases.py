"""Small models, one for each kind of module with parameters, for the table of `benchmarks.coverage`.

Each model has the module under `body`, whose parameters are of interest, and most have a Linear head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

EXAMPLES, CLASSES = 4, 3


class Headed(nn.Module):
    """A body, the mean over positions of what it gives, and a Linear head."""

    def __init__(self, body: nn.Module, width: int, channels_first: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.channels_first = body, nn.Linear(width, CLASSES), channels_first

    def forward(self, *inputs: Tensor) -> Tensor:
        found = self.body(*inputs)
        hidden: Tensor = found[0] if isinstance(found, tuple) else found
        if hidden.ndim > 2:
            hidden = hidden.flatten(2).mean(2) if self.channels_first else hidden.flatten(1, -2).mean(1)
        return self.head(hidden)


class SelfAttention(nn.Module):
    """MultiheadAttention of a sequence with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


class ClassToken(nn.Module):
    """A learned token before the sequence and learned positions: parameters without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.positions


class LoRA(nn.Module):
    """A frozen Linear layer with a trained low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


class Tied(nn.Module):
    """A matrix that looks tokens up and scores them: a loss per token over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.body(tokens)).tanh() @ self.body.weight.T


@dataclass(frozen=True)
class Case:
    """A module kind, its model, and one batch for it."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    targets: tuple[int, ...] = (EXAMPLES,)
    classes: int = CLASSES

    def build(self) -> tuple[nn.Module, Any, Tensor]:
        """Model, inputs and targets, always the same ones."""
        torch.manual_seed(0)
        model = self.model().double().eval()
        return model, self.inputs(), torch.randint(self.classes, self.targets)


def _reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(EXAMPLES, *shape, dtype=torch.float64)


def _tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(7, (EXAMPLES, *shape))


def _rows(name: str, body: Callable[[], nn.Module], width: int = 4) -> Case:
    return Case(name, lambda: Headed(body(), width), _reals(4))


def _sequence(name: str, body: Callable[[], nn.Module]) -> Case:
    return Case(name, lambda: Headed(body(), 4), _reals(5, 4))


def _images(name: str, body: Callable[[], nn.Module], dimensions: int = 2) -> Case:
    return Case(name, lambda: Headed(body(), 4, channels_first=True), _reals(4, *[5] * dimensions))


def _chain() -> nn.Module:
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 4), act=nn.Sigmoid(), head=nn.Linear(4, CLASSES)))


def _convolutions() -> list[Case]:
    kinds = {
        1: (nn.Conv1d, nn.ConvTranspose1d),
        2: (nn.Conv2d, nn.ConvTranspose2d),
        3: (nn.Conv3d, nn.ConvTranspose3d),
    }
    cases = []
    for dimensions, pair in kinds.items():
        for kind in pair:
            name = kind.__name__
            cases.append(_images(name, lambda kind=kind: kind(4, 4, 3, padding=1), dimensions))
    return [
        *cases,
        _images("Conv2d(groups=2)", lambda: nn.Conv2d(4, 4, 3, groups=2)),
        _images("Conv2d, depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4)),
        _images(
            "Conv2d(padding_mode='circular')", lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        ),
    ]


CASES = (
    Case("Linear, a chain", _chain, _reals(4)),
    _rows("Linear, one row per example", lambda: nn.Linear(4, 4)),
    _sequence("Linear, several positions", lambda: nn.Linear(4, 4)),
    *_convolutions(),
    Case("Embedding", lambda: Headed(nn.Embedding(7, 4), 4), _tokens(5)),
    Case("EmbeddingBag", lambda: Headed(nn.EmbeddingBag(7, 4), 4), _tokens(5)),
    Case("Embedding, also the head", Tied, _tokens(5), targets=(EXAMPLES, 5), classes=7),
    _sequence("LayerNorm", lambda: nn.LayerNorm(4)),
    _sequence("RMSNorm", lambda: nn.RMSNorm(4)),
    _images("GroupNorm", lambda: nn.GroupNorm(2, 4)),
    _images("InstanceNorm2d(affine=True)", lambda: nn.InstanceNorm2d(4, affine=True)),
    _images("BatchNorm2d, eval mode", lambda: nn.BatchNorm2d(4)),
    _sequence("MultiheadAttention", SelfAttention),
    _sequence(
        "TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    ),
    Case(
        "Bilinear",
        lambda: Headed(nn.Bilinear(4, 4, 4), 4),
        lambda: (_reals(4)(), _reals(4)()),
    ),
    _rows("RNNCell", lambda: nn.RNNCell(4, 4)),
    _rows("LSTMCell", lambda: nn.LSTMCell(4, 4)),
    _rows("GRUCell", lambda: nn.GRUCell(4, 4)),
    _sequence("RNN", lambda: nn.RNN(4, 4, batch_first=True)),
    _sequence("LSTM", lambda: nn.LSTM(4, 4, batch_first=True)),
    _sequence("GRU", lambda: nn.GRU(4, 4, batch_first=True)),
    _rows("PReLU", lambda: nn.Sequential(nn.PReLU(4))),
    _sequence("class token and positions", ClassToken),
    _rows("LoRA on a frozen Linear", LoRA),
    _rows("weight_norm(Linear)", lambda: parametrizations.weight_norm(nn.Linear(4, 4))),
    _rows("spectral_norm(Linear)", lambda: parametrizations.spectral_norm(nn.Linear(4, 4))),
)
