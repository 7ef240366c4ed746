"""One tiny float64 network of each kind that curvlab speaks of, with its data and the terms of its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import curvlab
from tests.any_reference import (
    AnyReference,
    Blocks,
    TermSplit,
    bernoulli_terms,
    cross_entropy_terms,
    squared_terms,
)

CLASSES = 3
CLASS_WEIGHTS = [0.5, 2.0, 1.25]
VOCABULARY = 5


@dataclass(frozen=True, eq=False)
class Loss:
    """A criterion as curvlab is given it, the same in torch's own words, and its terms."""

    criterion: Callable[[], Any]
    torch_loss: Callable[[Tensor, Tensor], Tensor]
    terms: TermSplit
    likelihood: bool = True


def _flat(loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Classes last: torch wants the terms in one row."""
    return lambda z, y: loss(z.reshape(-1, z.shape[-1]), y.reshape(-1))


def _cross_entropy(**fields: Any) -> nn.CrossEntropyLoss:
    weight = fields.pop("weight", None)
    return nn.CrossEntropyLoss(
        weight=None if weight is None else torch.tensor(weight, dtype=torch.float64), **fields
    )


def _classes_last(**fields: Any) -> Loss:
    loss = _cross_entropy(**fields)
    terms = cross_entropy_terms(fields.get("weight"), fields.get("ignore_index", -100))
    return Loss(lambda: _cross_entropy(**fields), _flat(loss), terms)


LOSSES = {
    "cross-entropy": Loss(lambda: "cross-entropy", _flat(nn.CrossEntropyLoss()), cross_entropy_terms()),
    "weighted": _classes_last(weight=CLASS_WEIGHTS),
    "ignored": _classes_last(ignore_index=-1),
    "weighted, ignored": _classes_last(weight=CLASS_WEIGHTS, ignore_index=-100),
    "classes first": Loss(
        nn.CrossEntropyLoss, nn.CrossEntropyLoss(), cross_entropy_terms(classes_first=True)
    ),
    "classes first, weighted": Loss(
        lambda: _cross_entropy(weight=CLASS_WEIGHTS),
        _cross_entropy(weight=CLASS_WEIGHTS),
        cross_entropy_terms(CLASS_WEIGHTS, classes_first=True),
    ),
    "mse": Loss(nn.MSELoss, nn.MSELoss(), squared_terms()),
    "bce": Loss(nn.BCEWithLogitsLoss, nn.BCEWithLogitsLoss(), bernoulli_terms(), likelihood=False),
}


@dataclass(frozen=True, eq=False)
class AnyCase:
    """A network kind: `model()` and `data()` give it in float32, drawn from the seed."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Tensor]]
    loss: str = "cross-entropy"
    l2: float = 0.0
    output: Any = None
    hessian: bool = True
    seed: int = 0

    def make(self) -> tuple[nn.Module, Any, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.model().double()
            with torch.no_grad():
                # Norms begin at 1 and 0, biases of attention at 0: no value may hide a mistake.
                for p in model.parameters():
                    p.add_(0.3 * torch.randn_like(p))
            inputs, targets = self.data()
        return model, _double(inputs), _double(targets)

    def problem(self) -> curvlab.Problem:
        model, inputs, targets = self.make()
        extra: dict[str, Any] = {"l2": self.l2} if self.l2 else {}
        extra |= {} if self.output is None else {"output": self.output}
        return curvlab.Problem(model, LOSSES[self.loss].criterion(), inputs, targets, **extra)

    def reference(self) -> AnyReference:
        model, inputs, targets = self.make()
        return AnyReference(model, LOSSES[self.loss].terms, inputs, targets, self.l2, self.output)


def assert_blocks(
    curvature: curvlab.Curvature, expected: Blocks, either: Blocks | None = None, tolerance: float = 1e-10
) -> None:
    """Every block equals `expected`, or `either`, to `tolerance` of its largest entry."""
    assert set(curvature.blocks) == set(expected), "the parameters with a block"
    largest = max(float(block.abs().max()) for block in expected.values())
    for name, block in curvature.blocks.items():
        found = block.to_dense()
        assert found.shape == expected[name].shape, name
        # A block that is zero but for rounding is compared with the others.
        scale = max(float(expected[name].abs().max()), 1e-10 * largest)
        error = float((found - expected[name]).abs().max())
        if either is not None:
            error = min(error, float((found - either[name]).abs().max()))
        assert error <= tolerance * scale, f"{name}: off by {error:.3g} of {scale:.3g}"


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _double(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_double(v) for v in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# data


def real(*shape: int, m: int = 3) -> Callable[[], tuple[Tensor, Tensor]]:
    """Inputs (m, *shape) and one label for each example."""
    return lambda: (torch.randn(m, *shape) + 0.2, torch.randint(CLASSES, (m,)))


def tokens(t: int, m: int = 3) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(VOCABULARY, (m, t)), torch.randint(CLASSES, (m,)))


def labelled_positions(
    *shape: int, terms: tuple[int, ...], ignored: int | None = None, m: int = 3
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Inputs (m, *shape) and a label for each term; with `ignored`, examples of unequal lengths."""

    def draw() -> tuple[Tensor, Tensor]:
        targets = torch.randint(CLASSES, (m, *terms))
        if ignored is not None:
            flat = targets.reshape(m, -1)
            for i in range(m):
                flat[i, max(1, flat.shape[1] - i) :] = ignored
        return torch.randn(m, *shape), targets

    return draw


def regression(*shape: int, outputs: tuple[int, ...], m: int = 3) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(m, *shape), torch.randn(m, *outputs))


# networks


class Pooled(nn.Module):
    """A body whose positions are averaged, and a head."""

    def __init__(self, body: nn.Module, features: int, dims: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.body, self.head, self.dims = body, nn.Linear(features, CLASSES), dims

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).mean(self.dims))


def image_net(layer: nn.Module, channels: int) -> nn.Module:
    """A convolution (1 to 3 dimensions), tanh, an average over all positions, a head."""
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(2), _Mean(2), nn.Linear(channels, CLASSES))


class _Mean(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim)


class _Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Attention(nn.Module):
    """nn.MultiheadAttention on its own, batch first or not, of one or two sequences."""

    def __init__(self, d: int, batch_first: bool = True, cross: bool = False, **fields: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 2, batch_first=batch_first, **fields)
        self.head, self.cross = nn.Linear(d, CLASSES), cross

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        if not self.attention.batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        y, _ = self.attention(x, other, other)
        return self.head(y if self.attention.batch_first else y.transpose(0, 1)).mean(1)


class Twice(nn.Module):
    """One Linear used twice, with a residual between."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(d, d), nn.Linear(d, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        return self.head(torch.tanh(self.inner(x)))


class SharedWeight(nn.Module):
    """Two Linear modules with one weight and a bias each."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, CLASSES)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Language(nn.Module):
    """Tokens, an embedding, a residual block, a loss for each token; `tied`: the head is the embedding."""

    def __init__(self, vocabulary: int, d: int, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.mix, self.head = nn.Linear(d, d), nn.Linear(d, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mixed = torch.cumsum(h, 1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None]
        return self.head(h + torch.tanh(self.mix(mixed)))


class ClassToken(nn.Module):
    """A class token, a positional embedding, one Transformer layer."""

    def __init__(self, d: int, t: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(torch.zeros(t + 1, d))
        self.inner = nn.MultiheadAttention(d, 1, batch_first=True)
        self.head = nn.Linear(d, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head((x + self.inner(x, x, x, need_weights=False)[0])[:, 0])


class TwoInputs(nn.Module):
    """Images and a scale, by place or by name; what it returns is chosen by `result`."""

    def __init__(self, result: str = "tensor") -> None:
        super().__init__()
        self.first, self.head, self.result = nn.Linear(4, 3), nn.Linear(3, CLASSES), result

    def forward(self, pixels: Tensor, scale: Tensor | None = None) -> Any:
        h = torch.tanh(self.first(pixels))
        h = h if scale is None else h * scale
        z = self.head(h)
        return {
            "tensor": z,
            "tuple": (z, h),
            "dict": {"hidden": h, "logits": z},
            "object": SimpleNamespace(logits=z, hidden=h),
            "scores": {"hidden": h, "scores": z},
        }[self.result]


class Masked(nn.Module):
    """HF-style: input_ids with an attention_mask, attention over the tokens that count, a loss for each."""

    def __init__(self, d: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d, padding_idx=0)
        self.attention = nn.MultiheadAttention(d, 1, batch_first=True)
        self.head = nn.Linear(d, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        h = self.embed(input_ids)
        a, _ = self.attention(h, h, h, key_padding_mask=attention_mask == 0, need_weights=False)
        return SimpleNamespace(logits=self.head(h + a))


class Bilinear(nn.Module):
    """A bilinear layer of two inputs; of sequences the mean over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(3, 2, 3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.pair(x, y))
        return self.head(h if h.ndim == 2 else h.mean(1))


class Cell(nn.Module):
    """A recurrent cell over the tokens of an example."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Recurrent(nn.Module):
    """A recurrent layer over the tokens of an example, and a head on the mean of its outputs."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].mean(1))


class Adapted(nn.Module):
    """A frozen Linear layer with a low-rank adapter."""

    def __init__(self, n: int, o: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, o).requires_grad_(False)
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, o, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class Conv1DBlock(nn.Module):
    """transformers' Conv1D, whose weight is (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.inner, self.head = Conv1D(4, 3), Conv1D(CLASSES, 4)
        nn.init.normal_(self.inner.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))


def norm_net(norm: nn.Module, features: int, channels: int) -> nn.Module:
    """Channels first: a convolution, a norm, tanh, flattened into a head."""
    return nn.Sequential(
        nn.Conv1d(2, channels, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES)
    ).eval()


def transformer_layer(norm_first: bool, **fields: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=3, dropout=0.0, batch_first=True, norm_first=norm_first, **fields
    )
    return Pooled(layer, 4)


def _batch_norm(module: nn.Module) -> nn.Module:
    torch.nn.init.uniform_(module.running_mean)
    torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return module


def _masked_batch() -> tuple[Any, Tensor]:
    ids = torch.tensor([[1, 2, 4, 3], [3, 1, 0, 0], [2, 4, 2, 0]])
    labels = torch.randint(CLASSES, (3, 4)).masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, labels


def _token_labels(t: int, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (3, t)), torch.randint(CLASSES, (3, t))


CONVOLUTIONS: dict[str, AnyCase] = {
    "conv1d": AnyCase(lambda: image_net(nn.Conv1d(2, 3, 2), 3), real(2, 5)),
    "conv2d": AnyCase(lambda: image_net(nn.Conv2d(2, 3, 2), 3), real(2, 3, 4)),
    "conv2d without bias": AnyCase(lambda: image_net(nn.Conv2d(2, 3, 2, bias=False), 3), real(2, 3, 3)),
    "conv3d": AnyCase(lambda: image_net(nn.Conv3d(1, 2, (2, 1, 2)), 2), real(1, 3, 2, 3)),
    "stride": AnyCase(lambda: image_net(nn.Conv2d(2, 2, 2, stride=(2, 1)), 2), real(2, 5, 4)),
    "padding": AnyCase(lambda: image_net(nn.Conv2d(1, 2, 3, padding=(1, 2)), 2), real(1, 3, 3)),
    "padding same": AnyCase(lambda: image_net(nn.Conv2d(1, 2, (2, 3), padding="same"), 2), real(1, 3, 3)),
    "padding circular": AnyCase(
        lambda: image_net(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), 2), real(2, 3, 3)
    ),
    "padding reflect": AnyCase(
        lambda: image_net(nn.Conv1d(2, 2, 3, padding=2, padding_mode="reflect"), 2), real(2, 4)
    ),
    "padding replicate": AnyCase(
        lambda: image_net(nn.Conv3d(1, 2, 2, padding=1, padding_mode="replicate"), 2), real(1, 2, 1, 2)
    ),
    "dilation": AnyCase(lambda: image_net(nn.Conv2d(2, 2, 2, dilation=(2, 1)), 2), real(2, 4, 3)),
    "groups": AnyCase(lambda: image_net(nn.Conv2d(4, 6, 2, groups=2), 6), real(4, 3, 3)),
    "groups with every option": AnyCase(
        lambda: image_net(nn.Conv2d(4, 2, (2, 3), (2, 1), (1, 2), (1, 2), groups=2), 2), real(4, 3, 3)
    ),
    "depthwise": AnyCase(lambda: image_net(nn.Conv2d(3, 3, 2, groups=3), 3), real(3, 3, 3)),
    "depthwise multiplier": AnyCase(lambda: image_net(nn.Conv1d(2, 4, 2, groups=2), 4), real(2, 4)),
    "transposed 1d": AnyCase(lambda: image_net(nn.ConvTranspose1d(2, 3, 3), 3), real(2, 3)),
    "transposed 2d": AnyCase(
        lambda: image_net(nn.ConvTranspose2d(2, 2, (3, 2), 2, 1, output_padding=1), 2), real(2, 2, 3)
    ),
    "transposed 2d groups": AnyCase(
        lambda: image_net(nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), 6), real(4, 2, 2)
    ),
    "transposed 2d dilation": AnyCase(
        lambda: image_net(nn.ConvTranspose2d(2, 2, 2, dilation=2, padding=1, bias=False), 2), real(2, 3, 2)
    ),
    "transposed 3d": AnyCase(
        lambda: image_net(nn.ConvTranspose3d(1, 2, (1, 2, 2), (1, 2, 1)), 2), real(1, 2, 2, 1)
    ),
    "1x1": AnyCase(lambda: image_net(nn.Conv2d(2, 3, 1), 3), real(2, 2, 3)),
    "a loss for each pixel": AnyCase(
        lambda: nn.Sequential(nn.Conv2d(2, 2, 2, padding="same"), nn.Tanh(), nn.Conv2d(2, CLASSES, 1)),
        labelled_positions(2, 2, 2, terms=(2, 2)),
        loss="classes first",
    ),
    "a weighted loss for each pixel": AnyCase(
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, CLASSES, 1)),
        labelled_positions(2, 2, 2, terms=(2, 2), ignored=-100),
        loss="classes first, weighted",
    ),
}

NETWORKS: dict[str, AnyCase] = {
    "chain": AnyCase(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CLASSES)), real(4)),
    "sequence linear": AnyCase(lambda: Pooled(nn.Linear(3, 4), 4), real(4, 3)),
    "grid linear": AnyCase(lambda: Pooled(nn.Linear(2, 3), 3, (1, 2)), real(2, 3, 2)),
    "embedding": AnyCase(lambda: Pooled(nn.Embedding(VOCABULARY, 3), 3), tokens(4)),
    "embedding with padding_idx": AnyCase(
        lambda: Pooled(nn.Embedding(VOCABULARY, 3, padding_idx=1), 3), tokens(6)
    ),
    "embedding bag, mean": AnyCase(
        lambda: nn.Sequential(nn.EmbeddingBag(VOCABULARY, 3), nn.Tanh(), nn.Linear(3, CLASSES)), tokens(4)
    ),
    "embedding bag, sum": AnyCase(
        lambda: nn.Sequential(nn.EmbeddingBag(VOCABULARY, 3, mode="sum"), nn.Linear(3, CLASSES)), tokens(3)
    ),
    "layer norm": AnyCase(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, CLASSES)), real(4)
    ),
    "layer norm on a sequence": AnyCase(
        lambda: Pooled(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm((3, 2))), 2), real(3, 3)
    ),
    "rms norm": AnyCase(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.RMSNorm(3), nn.Linear(3, CLASSES)), real(4)
    ),
    "group norm": AnyCase(lambda: norm_net(nn.GroupNorm(2, 4), 12, 4), real(2, 4)),
    "instance norm": AnyCase(lambda: norm_net(nn.InstanceNorm1d(3, affine=True), 9, 3), real(2, 4)),
    "batch norm in eval mode": AnyCase(lambda: norm_net(_batch_norm(nn.BatchNorm1d(3)), 9, 3), real(2, 4)),
    "attention": AnyCase(lambda: Attention(4), real(3, 4)),
    "attention, sequence first": AnyCase(lambda: Attention(2, batch_first=False), real(3, 2)),
    "attention without bias": AnyCase(lambda: Attention(2, bias=False), real(3, 2)),
    "cross attention": AnyCase(
        lambda: Attention(2, cross=True),
        lambda: ((torch.randn(3, 2, 2), torch.randn(3, 4, 2)), torch.randint(CLASSES, (3,))),
    ),
    "attention with kdim and vdim": AnyCase(
        lambda: Attention(2, kdim=3, vdim=3),
        lambda: ((torch.randn(3, 2, 2), torch.randn(3, 3, 3)), torch.randint(CLASSES, (3,))),
    ),
    "transformer layer": AnyCase(lambda: transformer_layer(False), real(3, 4)),
    "transformer layer, norm first": AnyCase(lambda: transformer_layer(True, activation="gelu"), real(2, 4)),
    "residual and a layer used twice": AnyCase(lambda: Twice(3), real(3)),
    "a layer used twice on a sequence": AnyCase(lambda: Twice(2), labelled_positions(3, 2, terms=(3,))),
    "two layers with one weight": AnyCase(lambda: SharedWeight(3), real(3)),
    "language model": AnyCase(lambda: Language(CLASSES, 2), lambda: _token_labels(4, CLASSES)),
    "language model, tied": AnyCase(
        lambda: Language(CLASSES, 2, tied=True), lambda: _token_labels(4, CLASSES)
    ),
    "language model, tied, with a head bias": AnyCase(
        lambda: Language(CLASSES, 3, tied=True, bias=True), lambda: _token_labels(3, CLASSES)
    ),
    "Conv1D of transformers": AnyCase(Conv1DBlock, labelled_positions(2, 3, terms=(2,))),
    "class token and positions": AnyCase(lambda: ClassToken(2, 3), real(3, 2)),
    "bilinear": AnyCase(
        Bilinear, lambda: ((torch.randn(4, 3), torch.randn(4, 2)), torch.randint(CLASSES, (4,)))
    ),
    "tuple input": AnyCase(
        TwoInputs, lambda: ((torch.randn(4, 4), torch.rand(4, 1)), torch.randint(CLASSES, (4,)))
    ),
    "dict input": AnyCase(
        TwoInputs,
        lambda: ({"scale": torch.rand(4, 1), "pixels": torch.randn(4, 4)}, torch.randint(CLASSES, (4,))),
    ),
    "dict input with a mask, tokens of unequal lengths": AnyCase(
        Masked, _masked_batch, loss="weighted, ignored"
    ),
    "tuple output": AnyCase(lambda: TwoInputs("tuple"), real(4)),
    "dict output": AnyCase(lambda: TwoInputs("dict"), real(4)),
    "object with logits": AnyCase(lambda: TwoInputs("object"), real(4)),
    "named output": AnyCase(lambda: TwoInputs("scores"), real(4), output="scores"),
    "indexed output": AnyCase(lambda: TwoInputs("tuple"), real(4), output=0),
    "output by a function": AnyCase(lambda: TwoInputs("tuple"), real(4), output=lambda result: 2 * result[0]),
    "l2": AnyCase(lambda: Pooled(nn.Linear(3, 4), 4), real(4, 3), l2=0.3),
    "l2 of a transformer": AnyCase(lambda: transformer_layer(False), real(2, 4), l2=0.05),
    "mse": AnyCase(lambda: Pooled(nn.Linear(3, 4), 4), regression(4, 3, outputs=(CLASSES,)), loss="mse"),
    "mse for each token": AnyCase(lambda: Twice(2), regression(3, 2, outputs=(3, CLASSES)), loss="mse"),
    "bce": AnyCase(
        lambda: Pooled(nn.Linear(3, 4), 4),
        lambda: (torch.randn(3, 4, 3), torch.randint(2, (3, CLASSES)).float()),
        loss="bce",
    ),
    "one token": AnyCase(lambda: Twice(2), labelled_positions(1, 2, terms=(1,))),
    "four tokens": AnyCase(lambda: Twice(2), labelled_positions(4, 2, terms=(4,))),
    "unequal lengths": AnyCase(
        lambda: Twice(2), labelled_positions(4, 2, terms=(4,), ignored=-1), loss="ignored"
    ),
    "class-weighted tokens": AnyCase(lambda: Twice(2), labelled_positions(4, 2, terms=(4,)), loss="weighted"),
    "class-weighted tokens of unequal lengths": AnyCase(
        lambda: Twice(2), labelled_positions(4, 2, terms=(4,), ignored=-100), loss="weighted, ignored"
    ),
    "class-weighted examples": AnyCase(lambda: Pooled(nn.Linear(3, 4), 4), real(4, 3, m=5), loss="weighted"),
    "an ignored example": AnyCase(
        lambda: Pooled(nn.Linear(3, 4), 4),
        lambda: (torch.randn(4, 2, 3), torch.tensor([0, -1, 2, -1])),
        loss="ignored",
    ),
    "weighted attention tokens": AnyCase(
        lambda: nn.TransformerEncoderLayer(CLASSES, 1, 2, dropout=0.0, batch_first=True),
        labelled_positions(4, CLASSES, terms=(4,)),
        loss="weighted",
    ),
    "tokens with classes first": AnyCase(
        lambda: nn.Sequential(Twice(2), _Transpose()),
        labelled_positions(4, 2, terms=(4,)),
        loss="classes first",
    ),
    "weighted tokens with classes first": AnyCase(
        lambda: nn.Sequential(Twice(2), _Transpose()),
        labelled_positions(4, 2, terms=(4,), ignored=-100),
        loss="classes first, weighted",
    ),
    "bilinear on a sequence": AnyCase(
        Bilinear, lambda: ((torch.randn(3, 2, 3), torch.randn(3, 2, 2)), torch.randint(CLASSES, (3,)))
    ),
    "rms norm on a sequence": AnyCase(
        lambda: Pooled(nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2)), 2), real(3, 3)
    ),
    "instance norm with running statistics": AnyCase(
        lambda: norm_net(_batch_norm(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), 9, 3),
        real(2, 4),
    ),
    "batch norm of images in eval mode": AnyCase(
        lambda: image_net(nn.Sequential(nn.Conv2d(1, 2, 2), _batch_norm(nn.BatchNorm2d(2))), 2).eval(),
        real(1, 3, 3),
    ),
    "weight norm": AnyCase(
        lambda: nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, CLASSES)), real(3)
    ),
    "weight norm of a convolution": AnyCase(
        lambda: image_net(weight_norm(nn.Conv1d(2, 2, 2)), 2), real(2, 4)
    ),
    "spectral norm": AnyCase(
        lambda: nn.Sequential(spectral_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, CLASSES)).eval(),
        real(3),
    ),
    "low-rank adapter of a frozen layer": AnyCase(
        lambda: nn.Sequential(Adapted(3, 4, 2), nn.Tanh(), nn.Linear(4, CLASSES)), real(3)
    ),
    "low-rank adapter on a sequence": AnyCase(lambda: Pooled(Adapted(3, 3, 2), 3), real(3, 3)),
    "PReLU": AnyCase(lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU(3), nn.Linear(3, CLASSES)), real(3)),
    "RNN of two layers": AnyCase(lambda: Recurrent(nn.RNN(2, 2, 2, batch_first=True)), real(3, 2)),
    "GRU": AnyCase(lambda: Recurrent(nn.GRU(2, 2, batch_first=True)), real(2, 2)),
    "LSTM": AnyCase(lambda: Recurrent(nn.LSTM(2, 2, batch_first=True)), real(2, 2)),
    "RNN cell": AnyCase(lambda: Cell(nn.RNNCell(2, 2)), real(3, 2)),
    "GRU cell": AnyCase(lambda: Cell(nn.GRUCell(2, 2)), real(2, 2)),
    "LSTM cell": AnyCase(lambda: Cell(nn.LSTMCell(2, 2)), real(2, 2)),
}

CASES = {**NETWORKS, **CONVOLUTIONS}
# A recurrent cell's matrices are either Linear uses or plain blocks: DESIGN leaves it open.
EITHER_PLAIN = ("RNN cell", "GRU cell", "LSTM cell")
