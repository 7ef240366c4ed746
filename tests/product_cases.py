"""Small models of every kind, for products with exact matrices: a model, its inputs, and a twin where needed.

The twin of a model computes the same logits from functions of which torch's second derivatives are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

__all__ = [
    "CLASSES",
    "EXAMPLES",
    "MODELS",
    "Apply",
    "Case",
    "checkpointed",
    "head",
    "mlp",
    "tokens",
    "vectors",
]

CLASSES, EXAMPLES = 3, 4


class Apply(nn.Module):
    """A function of the input and of this module, for forwards that need no class of their own."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


@dataclass
class Case:
    """A model with its inputs; `twin` computes the same from functions that can be differentiated twice."""

    model: nn.Module
    inputs: Any
    twin: Callable[[Mapping[str, Tensor], Any], Tensor] | None = None


def head(features: int) -> nn.Linear:
    return nn.Linear(features, CLASSES)


def vectors(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, *shape)


def tokens(*shape: int, vocabulary: int = 5) -> Tensor:
    return torch.randint(vocabulary, (EXAMPLES, *shape))


def after(layer: nn.Module, features: int, activation: Callable[[Tensor], Tensor] = torch.tanh) -> nn.Module:
    """The layer, an activation, the mean over positions behind dimension 1, a head."""
    return Apply(
        lambda self, x: self.head(activation(self.layer(x)).flatten(2).mean(2)),
        layer=layer,
        head=head(features),
    )


def sequence(layer: nn.Module, features: int) -> nn.Module:
    """The layer over (examples, time, features), the mean over time, a head."""
    return Apply(lambda self, x: self.head(self.layer(x).mean(1)), layer=layer, head=head(features))


def recurrent(layer: nn.Module, features: int) -> nn.Module:
    return Apply(lambda self, x: self.head(self.layer(x)[0].mean(1)), layer=layer, head=head(features))


def normalised(norm: nn.Module) -> nn.Module:
    layer = nn.Conv1d(2, 4, 1)
    return Apply(
        lambda self, x: self.head(torch.tanh(self.norm(self.layer(x))).square().mean(2)),
        layer=layer,
        norm=norm,
        head=head(4),
    )


def batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(20, 4, 3))
    return norm


def transposing(norm: nn.Module) -> nn.Module:
    return Apply(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def attention(need_weights: bool) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(self.layer(x, x, x, need_weights=need_weights)[0].mean(1))

    return Apply(forward, layer=nn.MultiheadAttention(4, 2, batch_first=True), head=head(4))


def dot_product_attention() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).unflatten(2, (2, 6)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))

    return Apply(forward, layer=nn.Linear(3, 12), head=head(4))


def encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, activation="gelu", batch_first=True)
    return sequence(layer, 4)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 3, padding=1)
        self.first, self.second = nn.Conv2d(2, 3, 3, 2, 1), nn.Conv2d(3, 3, 3, 1, 1, groups=3)
        self.skip = nn.Conv2d(2, 3, 1, 2)
        self.head = head(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x), inplace=True)
        x = F.silu(self.second(F.silu(self.first(x))) + self.skip(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def tied() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.table(x)).mean(1), self.table.weight)

    return Apply(forward, table=nn.Embedding(CLASSES, 4))


def reused() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Sigmoid(), layer)


def lora() -> nn.Module:
    base = nn.Linear(3, 4)
    base.requires_grad_(False)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))

    model = Apply(forward, base=base, down=nn.Linear(3, 1, bias=False), up=nn.Linear(1, 4), head=head(4))
    model.head.bias.requires_grad_(False)
    return model


def plain_parameters() -> nn.Module:
    """A class token, a scale, and a parameter that takes no part."""

    def forward(self: Any, x: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(x), 1, 3), x], 1)
        return self.head(torch.tanh(rows * self.scale).prod(1))

    return Apply(
        forward,
        token=nn.Parameter(torch.randn(1, 1, 3)),
        scale=nn.Parameter(torch.rand(3)),
        unused=nn.Parameter(torch.randn(2)),
        head=head(3),
    )


def bag(mode: str, **options: Any) -> nn.Module:
    layer = nn.EmbeddingBag(5, 3, mode=mode, **options)
    return Apply(lambda self, *x: self.head(torch.tanh(self.layer(*x))), layer=layer, head=head(3))


def bag_twin(reduce: Callable[[Tensor], Tensor]) -> Callable[[Mapping[str, Tensor], Any], Tensor]:
    """The rows of each bag from a product with one-hot rows."""

    def twin(parameters: Mapping[str, Tensor], bags: Any) -> Tensor:
        rows = [reduce(F.one_hot(b, 5).to(torch.float64) @ parameters["layer.weight"]) for b in bags]
        return torch.tanh(torch.stack(rows)) @ parameters["head.weight"].T + parameters["head.bias"]

    return twin


def total_of(rows: Tensor) -> Tensor:
    return rows.sum(0)


def mean_of(rows: Tensor) -> Tensor:
    return rows.mean(0)


def maximum_of(rows: Tensor) -> Tensor:
    return rows[rows.argmax(0), torch.arange(rows.shape[1])]


def bag_with_offsets() -> Case:
    bags = [torch.tensor(b) for b in ([0, 1, 1], [2], [4, 0], [3, 3, 3, 1])]
    inputs = (torch.cat(bags), torch.tensor([0, 3, 4, 6]))
    twin = bag_twin(mean_of)
    return Case(bag("mean"), inputs, lambda parameters, _: twin(parameters, bags))


def bag_with_padding() -> Case:
    inputs = torch.tensor([[0, 2, 2], [1, 3, 4], [2, 2, 0], [4, 4, 1]])
    bags = [row[row != 2] for row in inputs]
    twin = bag_twin(total_of)
    return Case(bag("sum", padding_idx=2), inputs, lambda parameters, _: twin(parameters, bags))


def bag_with_weights() -> Case:
    inputs = tokens(3)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x, per_sample_weights=self.factors.expand(x.shape))))

    def twin(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        rows = F.one_hot(x, 5).to(torch.float64) @ parameters["layer.weight"]
        mixed = torch.einsum("bnd,n->bd", rows, parameters["factors"])
        return torch.tanh(mixed) @ parameters["head.weight"].T + parameters["head.bias"]

    parts = {"layer": nn.EmbeddingBag(5, 3, mode="sum"), "factors": nn.Parameter(torch.rand(3))}
    return Case(Apply(forward, **parts, head=head(3)), inputs, twin)


def distances(p: float) -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.cdist(x, self.centres, p=p))

    def twin(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        difference = x[:, None] - parameters["centres"]
        norms = difference.abs().pow(p).sum(-1).pow(1 / p)
        return norms @ parameters["head.weight"].T + parameters["head.bias"]

    model = Apply(forward, centres=nn.Parameter(torch.randn(5, 3)), head=head(5))
    return Case(model, vectors(3), twin)


def pair_distances() -> Case:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.pdist(self.points).expand(len(x), -1) * x)

    def twin(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        a, b, c = parameters["points"]
        norms = torch.stack([(a - b).norm(), (a - c).norm(), (b - c).norm()])
        return (norms * x) @ parameters["head.weight"].T + parameters["head.bias"]

    return Case(Apply(forward, points=nn.Parameter(torch.randn(3, 2)), head=head(3)), vectors(3), twin)


def spatial_transformer() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        theta = self.locate(x.flatten(1)).view(-1, 2, 3) + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        sampled = F.grid_sample(torch.tanh(self.layer(x)), grid, align_corners=False)
        return self.head(sampled.mean((2, 3)))

    locate = nn.Linear(9, 6)
    return Apply(forward, locate=locate, layer=nn.Conv2d(1, 2, 1), head=head(2))


def checkpointed(use_reentrant: bool) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(lambda h: F.silu(self.second(h)), hidden, use_reentrant=use_reentrant)
        return self.head(hidden)

    return Apply(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 4), head=head(4))


def checkpointed_attention() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.layer, x, use_reentrant=False).mean(1))

    layer = nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)
    return Apply(forward, layer=layer, head=head(2))


def packed_lstm() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        lengths = torch.tensor([3, 3, 2, 1])
        return self.head(self.layer(pack_padded_sequence(x, lengths, batch_first=True))[1][0][-1])

    return Apply(forward, layer=nn.LSTM(2, 2, batch_first=True), head=head(2))


def dictionary_case() -> Case:
    def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
        hidden = torch.tanh(self.table(ids)) * mask[..., None]
        return SimpleNamespace(loss=None, logits=self.head(hidden.sum(1)))

    model = Apply(forward, table=nn.Embedding(5, 3), head=head(3))
    return Case(model, {"ids": tokens(4), "mask": torch.rand(EXAMPLES, 4)})


def weight_norm_case() -> Case:
    def twin(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        g, v = (p[f"0.parametrizations.weight.original{k}"] for k in range(2))
        hidden = torch.tanh(x @ (g * v / v.norm(dim=1, keepdim=True)).T + p["0.bias"])
        return hidden @ p["2.weight"].T + p["2.bias"]

    return Case(nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), head(4)), vectors(3), twin)


def mlp(*activations: nn.Module) -> nn.Module:
    layers: list[nn.Module] = []
    for activation in activations:
        layers += [nn.Linear(3, 3), activation]
    return nn.Sequential(*layers, head(3))


MODELS: dict[str, Callable[[], Case]] = {
    "tanh": lambda: Case(mlp(nn.Tanh(), nn.Sigmoid()), vectors(3)),
    "silu, gelu, softplus": lambda: Case(mlp(nn.SiLU(), nn.GELU(), nn.Softplus()), vectors(3)),
    "in place": lambda: Case(mlp(nn.SiLU(True), nn.ELU(inplace=True), nn.Hardtanh(inplace=True)), vectors(3)),
    "prelu": lambda: Case(mlp(nn.PReLU(), nn.Tanh()), vectors(3)),
    "bilinear": lambda: Case(
        Apply(lambda s, x: s.head(torch.tanh(s.layer(x, x))), layer=nn.Bilinear(2, 2, 3), head=head(3)),
        vectors(2),
    ),
    "conv1d": lambda: Case(after(nn.Conv1d(2, 3, 2, 2, 1, padding_mode="circular"), 3), vectors(2, 5)),
    "conv2d": lambda: Case(after(nn.Conv2d(2, 2, 3, padding="same", dilation=2), 2), vectors(2, 4, 3)),
    "conv3d": lambda: Case(after(nn.Conv3d(1, 2, 2), 2), vectors(1, 3, 2, 3)),
    "grouped": lambda: Case(after(nn.Conv2d(4, 4, 2, groups=2), 4, F.silu), vectors(4, 3, 3)),
    "transposed": lambda: Case(
        after(nn.ConvTranspose2d(2, 2, 2, stride=2, output_padding=1, groups=2), 2), vectors(2, 2, 3)
    ),
    "convolutions": lambda: Case(
        after(
            nn.Sequential(
                nn.Conv2d(2, 4, 3, (2, 1), padding=1, bias=False),
                nn.Tanh(),
                nn.Conv2d(4, 4, (1, 3), padding="same", dilation=2, groups=2),
                nn.Sigmoid(),
                nn.ConvTranspose2d(4, 2, 2, stride=2, dilation=2, bias=False),
                nn.Tanh(),
                nn.Conv2d(2, 2, 2, padding="valid"),
            ),
            2,
        ),
        vectors(2, 4, 3),
    ),
    "residual": lambda: Case(Residual(), vectors(2, 4, 4)),
    "embedding": lambda: Case(sequence(nn.Embedding(5, 3, padding_idx=1), 3), tokens(4)),
    "sparse embedding": lambda: Case(
        sequence(nn.Embedding(5, 3, sparse=True), 3),
        ids := tokens(4),
        lambda p, _: F.linear(p["layer.weight"][ids].mean(1), p["head.weight"], p["head.bias"]),
    ),
    "bag, sum": lambda: Case(bag("sum"), tokens(3), bag_twin(total_of)),
    "bag, mean": lambda: Case(bag("mean", sparse=True), tokens(3), bag_twin(mean_of)),
    "bag, max": lambda: Case(bag("max"), tokens(3), bag_twin(maximum_of)),
    "bag, offsets": bag_with_offsets,
    "bag, padding": bag_with_padding,
    "bag, weights": bag_with_weights,
    "layer norm": lambda: Case(normalised(transposing(nn.LayerNorm(4))), vectors(2, 3)),
    "rms norm": lambda: Case(normalised(transposing(nn.RMSNorm(4))), vectors(2, 3)),
    "group norm": lambda: Case(normalised(nn.GroupNorm(2, 4)), vectors(2, 3)),
    "instance norm": lambda: Case(normalised(nn.InstanceNorm1d(4, affine=True)), vectors(2, 5)),
    "batch norm": lambda: Case(normalised(batch_norm()), vectors(2, 3)),
    "attention": lambda: Case(attention(need_weights=False), vectors(3, 4)),
    "attention with weights": lambda: Case(attention(need_weights=True), vectors(3, 4)),
    "encoder layer": lambda: Case(encoder_layer(), vectors(3, 4)),
    "dot-product attention": lambda: Case(dot_product_attention(), vectors(3, 3)),
    "lstm": lambda: Case(recurrent(nn.LSTM(2, 2, batch_first=True), 2), vectors(3, 2)),
    "gru": lambda: Case(recurrent(nn.GRU(2, 2, batch_first=True, bidirectional=True), 4), vectors(3, 2)),
    "packed lstm": lambda: Case(packed_lstm(), vectors(3, 2)),
    "tied": lambda: Case(tied(), tokens(4, vocabulary=CLASSES)),
    "reused": lambda: Case(reused(), vectors(3)),
    "weight norm": weight_norm_case,
    "spectral norm": lambda: Case(
        nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), head(4)), vectors(3)
    ),
    "lora": lambda: Case(lora(), vectors(3)),
    "plain parameters": lambda: Case(plain_parameters(), vectors(2, 3)),
    "cdist": lambda: distances(2.0),
    "cdist, p = 3": lambda: distances(3.0),
    "cdist, p = 1": lambda: distances(1.0),
    "pdist": pair_distances,
    "grid sample": lambda: Case(spatial_transformer(), vectors(1, 3, 3)),
    "checkpointed": lambda: Case(checkpointed(use_reentrant=False), vectors(3)),
    "checkpointed attention": lambda: Case(checkpointed_attention(), vectors(3, 2)),
    "dictionary and .logits": dictionary_case,
}
