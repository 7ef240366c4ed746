"""Hand-made layers of every kind, each with its blocks written out densely.

The dense blocks are made of loops over entries and `torch.kron`, and share no code with curvlab's views and
blocks: entry (a, b) of a block is that of the parameter's entries a and b in torch's own order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from curvlab.curvature import Curvature, Definiteness
from curvlab.curvature_layers import (
    KroneckerLayer,
    KroneckerPart,
    LayerCurvature,
    PlainLayer,
    SharedLayer,
    Summand,
    TiedLayer,
)
from curvlab.linalg import DenseFactor, DiagonalFactor, Factor, GramFactor, MatrixView
from curvlab.linalg.factors import InputFactors

Place = tuple[int, int, int]


def rows_places(shape: tuple[int, ...], parts: int) -> list[Place]:
    """For every entry, in torch's order, the part, output and input that it belongs to."""
    outputs, inputs = shape[0] // parts, int(torch.Size(shape[1:]).numel())
    return [(row // outputs, row % outputs, column) for row in range(shape[0]) for column in range(inputs)]


def transposed_places(shape: tuple[int, ...], parts: int) -> list[Place]:
    outputs = shape[1] // parts
    return [
        (column // outputs, column % outputs, row) for row in range(shape[0]) for column in range(shape[1])
    ]


def transposed_convolution_places(shape: tuple[int, ...], parts: int) -> list[Place]:
    channels, taps = shape[0] // parts, int(torch.Size(shape[2:]).numel())
    return [
        (c // channels, o, (c % channels) * taps + k)
        for c, o, k in product(range(shape[0]), range(shape[1]), range(taps))
    ]


PLACES = {
    "rows": rows_places,
    "transposed": transposed_places,
    "transposed-convolution": transposed_convolution_places,
}


def random_factor(kind: str, size: int, seed: int, rows: int = 3) -> tuple[Factor, Tensor]:
    """A positive semi-definite factor of a kind, and its dense form."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows if kind == "gram" else size + 2, size, generator=generator, dtype=torch.float64)
    if kind == "diagonal":
        values = x[0].square() + 0.1
        return DiagonalFactor(values), values.diag()
    if kind == "gram":
        c = torch.rand(rows, generator=generator, dtype=torch.float64)
        return GramFactor(x, c.sqrt()), x.T @ (c[:, None] * x)
    dense = x.T @ x / len(x)
    return DenseFactor(dense), dense


@dataclass(frozen=True)
class Written:
    """A layer, its dense blocks by parameter name, and the factors and means that they are made of."""

    layer: LayerCurvature
    blocks: dict[str, Tensor]
    a: list[Tensor] = field(default_factory=list)
    b: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    mean_b: Tensor | None = None
    places: list[Place] = field(default_factory=list)

    def parts(self, gradient: Tensor) -> list[Tensor]:
        """The gradient of the weight as one matrix per part, entry by entry."""
        matrices = [gradient.new_zeros(b.shape[0], a.shape[0]) for a, b in zip(self.a, self.b, strict=True)]
        for value, (g, o, n) in zip(gradient.flatten(), self.places, strict=True):
            matrices[g][o, n] = value
        return matrices

    def whole(self, matrices: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The way back."""
        return torch.stack([matrices[g][o, n] for g, o, n in self.places]).reshape(shape)

    def sub_block(self, part: int) -> Tensor:
        """B of ḡ for one part."""
        assert self.mean_b is not None
        size = len(self.b[part])
        return self.mean_b[part * size : (part + 1) * size, part * size : (part + 1) * size]


def dense_block(places: list[Place], b: list[Tensor], a: list[Tensor]) -> Tensor:
    """B_g ⊗ A_g entry by entry, zero between parts."""
    block = torch.zeros(len(places), len(places), dtype=torch.float64)
    for i, (g, o, n) in enumerate(places):
        for j, (h, p, m) in enumerate(places):
            if g == h:
                block[i, j] = b[g][o, p] * a[g][n, m]
    return block


def shared(
    name: str,
    shape: tuple[int, ...],
    parts: int = 1,
    layout: str = "rows",
    outputs: str = "dense",
    inputs: str = "dense",
    bias: bool = True,
    seed: int = 0,
) -> Written:
    """A shared layer whose mean output factor is another than the factors of its parts."""
    view = MatrixView(shape, parts, layout)
    count, o, n = view.matrix_shape
    a, b, means, made = [], [], [], []
    for part in range(count):
        output, dense_b = random_factor(outputs, o, 10 * seed + part)
        full, dense_a = random_factor(inputs, n, 10 * seed + part + 5)
        mean = torch.randn(n, generator=torch.Generator().manual_seed(seed + part), dtype=torch.float64)
        made.append(KroneckerPart(output, InputFactors(full, mean)))
        a, b, means = [*a, dense_a], [*b, dense_b], [*means, mean]
    mean_output, mean_b = random_factor(outputs, count * o, seed + 77)
    names = (f"{name}.weight", f"{name}.bias" if bias else None)
    layer = SharedLayer(name, *names, view, tuple(made), mean_output)
    places = PLACES[layout](shape, parts)
    blocks = {f"{name}.weight": dense_block(places, b, a)} | ({f"{name}.bias": mean_b} if bias else {})
    return Written(layer, blocks, a, b, means, mean_b, places)


def kronecker(name: str, shape: tuple[int, int], outputs: str = "dense", inputs: str = "dense") -> Written:
    """A layer as a Linear module has it."""
    output, b = random_factor(outputs, shape[0], 1)
    full, a = random_factor(inputs, shape[1], 2)
    mean = torch.linspace(-1, 2, shape[1], dtype=torch.float64)
    names = (f"{name}.weight", f"{name}.bias")
    layer = KroneckerLayer(name, *names, output, InputFactors(full, mean))
    places = rows_places(shape, 1)
    return Written(layer, {names[0]: torch.kron(b, a), names[1]: b}, [a], [b], [mean], b, places)


def plain(name: str, shape: tuple[int, ...], kind: str) -> Written:
    """A parameter without structure."""
    factor, dense = random_factor(kind, int(torch.Size(shape).numel()), 3)
    return Written(PlainLayer(name, shape, factor), {name: dense})


def tied(name: str, vocabulary: int = 7, width: int = 3) -> Written:
    """A matrix used as a lookup (input factor diagonal) and as a head."""
    shape = (vocabulary, width)
    lookup = shared("lookup", shape, 1, "transposed", "dense", "diagonal", seed=1)
    head = shared("head", shape, 1, "rows", "diagonal", "dense", seed=2)
    summands = []
    for one in (lookup, head):
        assert isinstance(one.layer, SharedLayer)
        assert one.layer.view is not None
        summands.append(Summand(one.layer.view, one.layer.parts))
    block = lookup.blocks["lookup.weight"] + head.blocks["head.weight"]
    return Written(TiedLayer(name, shape, tuple(summands)), {name: block})


SHARED = {
    "convolution": lambda: shared("conv", (4, 3, 2, 2)),
    "gram": lambda: shared("conv", (4, 3, 2, 2), 1, "rows", "gram", "gram"),
    "groups": lambda: shared("conv", (4, 2, 3), 2),
    "depthwise": lambda: shared("conv", (3, 1, 2, 2), 3, bias=False),
    "attention": lambda: shared("in_proj", (9, 3), 3, outputs="gram"),
    "transposed-convolution": lambda: shared("conv", (4, 3, 2, 2), 1, "transposed-convolution"),
    "transposed-groups": lambda: shared("conv", (4, 2, 3), 2, "transposed-convolution", "dense", "gram"),
    "embedding": lambda: shared("embedding", (6, 3), 1, "transposed", "dense", "diagonal", bias=False),
    "vocabulary-head": lambda: shared("head", (6, 3), 1, "rows", "diagonal", "dense"),
    "conv1d": lambda: shared("c_attn", (3, 6), 2, "transposed"),
}
OTHERS = {
    "linear": lambda: kronecker("linear", (3, 5)),
    "linear-diagonal": lambda: kronecker("linear", (3, 5), "diagonal", "diagonal"),
    "plain-dense": lambda: plain("norm.weight", (5,), "dense"),
    "plain-gram": lambda: plain("token", (1, 2, 4), "gram"),
    "plain-diagonal": lambda: plain("positions", (3, 4), "diagonal"),
}
WITH_FACTORS = SHARED | OTHERS
ALL = WITH_FACTORS | {"tied": lambda: tied("wte.weight")}


def curvature_of(*written: Written, **fields: object) -> Curvature:
    layers = tuple(one.layer for one in written)
    return Curvature("hand-made", "mse", layers, Definiteness(True, "made so"), **fields)  # type: ignore[arg-type]


def gradient_of(curvature: Curvature, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return {
        name: torch.randn(block.shape, generator=generator, dtype=torch.float64)
        for name, block in curvature.blocks.items()
    }
