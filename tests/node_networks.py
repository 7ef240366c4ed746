"""Small float64 networks with non-linear nodes of every kind, and their dense curvature by torch.func.

Operations that `pch` leaves out (softmax, products) are attributes of the networks, so that a reference can
put their linearisation in the place: the Hessian of the rest is then what the found nodes must give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian, jvp
from torch.nn import functional as F

CLASSES = 3


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def matrix_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def softmax(a: Tensor) -> Tensor:
    return a.softmax(-1)


class Linearised:
    """A function with its value and slope at the arguments of its first call."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.at = function, ()

    def __call__(self, *args: Tensor) -> Tensor:
        if not self.at:
            self.at = tuple(a.detach().clone() for a in args)
            return self.function(*args)
        value, slope = jvp(self.function, self.at, tuple(a - b for a, b in zip(args, self.at, strict=True)))
        return value + slope


class Network(nn.Module):
    """A network whose left-out operations are named in `operations`."""

    operations: tuple[str, ...] = ()


class Residual(Network):
    """Convolutions with stride, padding, dilation and groups, both pools, a GroupNorm, a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.inner = nn.Conv2d(4, 4, 2, dilation=2, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.first(x)), 2, 1)
        x = x + F.silu(self.norm(self.inner(x)))
        x = F.max_pool2d(x, 2).mean((2, 3))
        return self.head(F.softplus(self.hidden(x), 2.0))


class Gate(Network):
    """A gated unit with an in-place activation, a node that is used twice, and an RMSNorm."""

    operations = ("product",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.norm = nn.RMSNorm(4)
        self.product: Any = product

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(self.first(x))
        opened = self.gate(x).sigmoid_()
        return self.head(self.product(torch.sin(u) + F.gelu(u), opened))


class Block(Network):
    """A Transformer block, written out."""

    operations = ("product", "softmax", "mixing")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.before, self.after = nn.LayerNorm(4), nn.LayerNorm(4)
        self.query, self.key, self.value = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 4)
        self.wide, self.back, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, CLASSES)
        self.product: Any = matrix_product
        self.mixing: Any = matrix_product
        self.softmax: Any = softmax

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.before(x)
        scores = self.product(self.query(h), self.key(h).transpose(1, 2))
        x = x + self.mixing(self.softmax(scores), self.value(h))
        x = x + self.back(F.gelu(self.wide(self.after(x))))
        return self.head(x.mean(1))


@dataclass(frozen=True)
class NodeCase:
    """A network with the shape of an example and the functions that are left out of its nodes."""

    network: type[Network]
    shape: tuple[int, ...]
    nodes: tuple[str, ...]
    left_out: tuple[str, ...]

    def make(self, examples: int, seed: int = 0) -> tuple[Network, Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.network().double()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.3 * torch.randn_like(p))
            return model, torch.randn(examples, *self.shape).double(), torch.randint(CLASSES, (examples,))


CASES = {
    "residual": NodeCase(Residual, (2, 6, 6), ("tanh", "group_norm", "silu", "softplus"), ()),
    "gate": NodeCase(Gate, (3,), ("rms_norm", "sigmoid", "sin", "gelu"), ("mul",)),
    "block": NodeCase(Block, (3, 4), ("layer_norm", "layer_norm", "gelu"), ("matmul", "softmax")),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "robust": lambda z, y: 1 / (1 + torch.exp(5 * (z.softmax(-1)[0, y[0]] - 0.2))),
}


def layer_hessian(model: Network, layer: str, x: Tensor, y: Tensor, loss: str) -> Tensor:
    """∂²ξ/∂z² at a layer's output for one example, with the left-out operations linearised."""
    module = model.get_submodule(layer)
    kept = {name: getattr(model, name) for name in model.operations}
    shapes: list[torch.Size] = []
    module_output = module.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    for name, function in kept.items():
        setattr(model, name, Linearised(function))
    try:
        model(x)
        module_output.remove()

        def of(offset: Tensor) -> Tensor:
            handle = module.register_forward_hook(lambda _, __, out: out + offset)
            try:
                return LOSSES[loss](model(x), y)
            finally:
                handle.remove()

        zero = torch.zeros(shapes[0], dtype=torch.float64)
        return hessian(of)(zero).detach().reshape(zero.numel(), zero.numel())
    finally:
        for name, function in kept.items():
            setattr(model, name, function)
