"""Forwards that are what they seem: each must be answered, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.adversarial.items import Made, Maker, Net
from tests.any_rows import Explicit

K = 3
HONEST: dict[str, Maker] = {}


def honest(name: str) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        assert name not in HONEST, name
        HONEST[name] = make
        return make

    return register


def table(entries: dict[str, Callable[[], nn.Module]], *shape: int, m: int = 5, **fields: Any) -> None:
    """Entries that share the shape of their real inputs and a label for each example."""
    for name, model in entries.items():
        honest(name)(lambda model=model: labelled(model(), *shape, m=m, **fields))


def labelled(model: nn.Module, *shape: int, m: int = 5, **fields: Any) -> Made:
    return Made(model.double(), torch.randn(m, *shape).double(), torch.randint(K, (m,)), **fields)


def linear(n: int, o: int = K, **fields: Any) -> nn.Linear:
    return nn.Linear(n, o, **fields)


def chain(*activations: nn.Module) -> nn.Sequential:
    """4-3-…-3 with the given activations between."""
    layers: list[nn.Module] = [linear(4)]
    for activation in activations:
        layers += [activation, linear(K)]
    return nn.Sequential(*layers)


def two(function: Callable[..., Any], n: int = 4, d: int = 3, **parts: Any) -> Net:
    """A first layer `a` (n → d), a head (d → K) and what else is given."""
    return Net(function, a=linear(n, d), head=linear(d), **parts)


class Cube(torch.autograd.Function):
    """x³ + x, differentiable twice through its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 + x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (3 * x**2 + 1)


class PlainSubclass(nn.Linear):
    """A Linear by another name."""


def _loop(s: Any, x: Tensor) -> Tensor:
    for layer in s.layers:
        x = x + torch.tanh(layer(x))
    return s.head(x)


def _by_name(s: Any, x: Tensor) -> Tensor:
    return s.head(s.layers["second"](torch.tanh(s.layers["first"](x))))


def _moe_by_mask(s: Any, x: Tensor) -> Tensor:
    choice = (x[:, 0] > 0).to(x.dtype)[:, None]
    return s.head(torch.tanh(choice * s.a(x) + (1 - choice) * s.b(x)))


def _moe_soft(s: Any, x: Tensor) -> Tensor:
    gate = s.gate(x).softmax(-1)
    experts = torch.stack([s.a(x), s.b(x)], -1)
    return s.head((experts * gate[:, None, :]).sum(-1).tanh())


def _guarded(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    if not bool(torch.isfinite(h).all()) or float(h.abs().max()) > 1e6:
        h = h.clamp(-1, 1)
    return s.head(h.tanh())


def _in_place(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h.add_(1.0).sigmoid_()
    h = h * 2
    h[:, 0] += 1
    return s.head(h)


def _heads(s: Any, x: Tensor) -> Tensor:
    left, right = s.a(x).chunk(2, -1)
    return s.head(torch.tanh(left) * right)


def _manual_attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).chunk(3, -1)
    scores = torch.einsum("btd,bsd->bts", q, k) / 2
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    return s.head(torch.einsum("bts,bsd->btd", scores.softmax(-1), v).mean(1))


def _fused_attention(s: Any, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 1)).transpose(1, 2) for t in s.qkv(x).chunk(3, -1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return s.head(out.transpose(1, 2).flatten(2).mean(1))


def _sequence_first(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(s.a(x.transpose(0, 1)))
    return s.head(h.mean(0))


def _mixer(s: Any, x: Tensor) -> Tensor:
    x = x + s.tokens(s.norm(x).transpose(1, 2)).transpose(1, 2)
    return s.head((x + torch.tanh(s.channels(x))).mean(1))


def _hyper(s: Any, x: Tensor) -> Tensor:
    weight = s.a(x).reshape(-1, 2, 4)
    return s.head(torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1).tanh())


def _recurrent(s: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3)
    for t in range(x.shape[1]):
        h = torch.tanh(s.a(x[:, t]) + s.b(h))
    return s.head(h)


def _cell(s: Any, x: Tensor) -> Tensor:
    h = s.cell(x[:, 0])
    return s.head(s.cell(x[:, 1], h))


def _class_token(s: Any, x: Tensor) -> Tensor:
    x = torch.cat([s.token.expand(len(x), 1, -1), x], 1) + s.positions
    y, _ = s.attention(x, x, x)
    return s.head((x + y)[:, 0])


def _unet(s: Any, x: Tensor) -> Tensor:
    low = torch.tanh(s.down(x))
    up = torch.cat([torch.tanh(s.up(low)), x], 1)
    return s.head(up.flatten(2).mean(2))


def _rbf(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.head(torch.exp(-((h[:, None, :] - s.centres) ** 2).sum(-1)))


def _fourier(s: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(s.a(x))
    return s.head(spectrum.abs() ** 2)


def _branch_on_mode(s: Any, x: Tensor) -> Tensor:
    return s.head(torch.tanh(s.a(x)) if s.training else s.a(x))


def _harmless_isinstance(s: Any, x: Tensor) -> Tensor:
    if isinstance(s.a, nn.Linear) and hasattr(s, "head") and torch.is_tensor(x):
        return s.head(torch.tanh(s.a(x)))
    raise TypeError("no such layer")


table(
    {
        "chain": lambda: chain(nn.Tanh(), nn.Sigmoid()),
        "one layer": chain,
        "chain of GELU": lambda: chain(nn.GELU()),
        "chain of SiLU": lambda: chain(nn.SiLU()),
        "chain of ELU and Softplus": lambda: chain(nn.ELU(), nn.Softplus()),
        "chain of LeakyReLU": lambda: chain(nn.LeakyReLU(0.2)),
        "in-place activation": lambda: chain(nn.ReLU(inplace=True)),
        "PReLU": lambda: chain(nn.PReLU()),
        "one activation used twice": lambda: chain(*[nn.Tanh()] * 2),
        "no biases": lambda: nn.Sequential(linear(4, bias=False), nn.Tanh(), linear(3, bias=False)),
        "subclass without a forward": lambda: nn.Sequential(PlainSubclass(4, 3), nn.Tanh(), linear(3)),
        "dropout of probability 0": lambda: chain(nn.Dropout(0.0)),
        "dropout in eval mode": lambda: chain(nn.Dropout(0.5), nn.Tanh()).eval(),
        "nested sequentials": lambda: nn.Sequential(chain(nn.Tanh()), nn.Sequential(nn.Tanh(), linear(3))),
        "residual": lambda: two(lambda s, x: s.head(x + torch.tanh(s.a(x))), d=4),
        "module list in a loop": lambda: Net(
            _loop, layers=nn.ModuleList([linear(4, 4) for _ in range(3)]), head=linear(4)
        ),
        "module dict": lambda: Net(
            _by_name, layers=nn.ModuleDict({"first": linear(4), "second": linear(3, 2)}), head=linear(2)
        ),
        "dense connections": lambda: Net(
            lambda s, x: s.head(torch.cat([x, torch.tanh(s.a(x))], 1)), a=linear(4, 2), head=linear(6)
        ),
        "gate": lambda: two(lambda s, x: s.head(s.a(x).tanh() * s.b(x).sigmoid()), b=linear(4, 3)),
        "GLU": lambda: Net(lambda s, x: s.head(F.glu(s.a(x))), a=linear(4, 6), head=linear(3)),
        "a layer used twice": lambda: two(lambda s, x: s.head(torch.tanh(s.a(torch.tanh(s.a(x))))), d=4),
        "a layer used in a loop": lambda: two(lambda s, x: s.head(s.a(s.a(s.a(x).sin()).cos())), d=4),
        "one module under two names": lambda: _shared_module(),
        "keyword calls": lambda: two(lambda s, x: s.head(input=torch.tanh(s.a(input=x)))),
        "experts by mask": lambda: two(_moe_by_mask, b=linear(4, 3)),
        "experts by soft gate": lambda: two(_moe_soft, b=linear(4, 3), gate=linear(4, 2)),
        "a guard on the data": lambda: two(_guarded),
        "where on the data": lambda: two(
            lambda s, x: s.head(torch.where(x[:, :1] > 0, s.a(x), s.a(x).exp()))
        ),
        "a parameter in einsum": lambda: two(
            lambda s, x: s.head(torch.einsum("bi,ij->bj", torch.tanh(s.a(x)), s.w)),
            w=nn.Parameter(torch.randn(3, 3)),
        ),
        "a scale and a temperature": lambda: two(
            lambda s, x: s.head(s.scale * torch.tanh(s.a(x))) / s.temperature.exp(),
            scale=nn.Parameter(torch.randn(3)),
            temperature=nn.Parameter(torch.tensor(0.3)),
        ),
        "parameter list": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x) + s.shifts[0] * s.shifts[1])),
            shifts=nn.ParameterList([torch.randn(3), torch.randn(3)]),
        ),
        "an autograd function": lambda: two(lambda s, x: s.head(Cube.apply(s.a(x)))),
        "in-place operations": lambda: two(_in_place),
        "chunked heads": lambda: Net(_heads, a=linear(4, 6), head=linear(3)),
        "stacked heads": lambda: Net(
            lambda s, x: torch.stack([h(x) for h in s.heads]).logsumexp(0),
            heads=nn.ModuleList([linear(4) for _ in range(3)]),
        ),
        "a learned hyper-network": lambda: Net(_hyper, a=linear(4, 8), head=linear(2)),
        "bilinear": lambda: Net(
            lambda s, x: s.pair(x[:, :2], torch.tanh(s.a(x))), a=linear(4, 2), pair=nn.Bilinear(2, 2, K)
        ),
        "spectral norm in eval mode": lambda: nn.Sequential(
            parametrizations.spectral_norm(linear(4)), nn.Tanh(), linear(3)
        ).eval(),
        "fixed normalisation by buffers": lambda: _with_buffers(),
        "stop gradient on a branch": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)) * s.a(x).detach())),
        "a loss of its own logits": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x))).log_softmax(-1)),
        "features sorted inside an example": lambda: two(lambda s, x: s.head(s.a(x).sort(-1).values.tanh())),
        "radial basis functions": lambda: Net(
            _rbf, a=linear(4, 2), centres=nn.Parameter(torch.randn(3, 2)), head=linear(3)
        ),
        "Fourier transform": lambda: Net(_fourier, a=linear(4), head=linear(2)),
        "branch on the training mode, left alone": lambda: two(_branch_on_mode),
        "harmless isinstance and hasattr": lambda: two(_harmless_isinstance),
        "a wrapper around a model": lambda: Net(lambda s, x: s.inner(x), inner=chain(nn.Tanh())),
        "layer norm": lambda: nn.Sequential(linear(4), nn.LayerNorm(3), nn.Tanh(), linear(3)),
        "layer norm without affine": lambda: chain(nn.LayerNorm(3, elementwise_affine=False)),
        "RMS norm": lambda: nn.Sequential(linear(4), nn.RMSNorm(3), linear(3)),
        "unsqueezed and squeezed": lambda: two(lambda s, x: s.head(s.a(x.unsqueeze(1)).tanh()).squeeze(1)),
        "cosine classifier": lambda: two(
            lambda s, x: 5 * F.linear(F.normalize(s.a(x)), F.normalize(s.directions)),
            directions=nn.Parameter(torch.randn(3, 3)),
        ),
    },
    4,
)

table(
    {
        "sequence linear": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)).mean(1))),
        "permuted views": lambda: Net(
            lambda s, x: s.head(torch.tanh(s.a(x.permute(0, 2, 1))).permute(0, 2, 1).reshape(len(x), -1)),
            a=linear(3, 2),
            head=linear(8),
        ),
        "mixer": lambda: Net(
            _mixer, norm=nn.LayerNorm(4), tokens=linear(3, 3), channels=linear(4, 4), head=linear(4)
        ),
        "attention by hand": lambda: Net(_manual_attention, qkv=linear(4, 6), head=linear(2)),
        "fused attention": lambda: Net(_fused_attention, qkv=linear(4, 6), head=linear(2)),
        "multi-head attention": lambda: Net(
            lambda s, x: s.head(s.attention(x, x, x)[0].mean(1)),
            attention=nn.MultiheadAttention(4, 2, batch_first=True),
            head=linear(4),
        ),
        "Transformer layer": lambda: Net(
            lambda s, x: s.head(s.layer(x)[:, -1]),
            layer=nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True),
            head=linear(4),
        ),
        "class token and positions": lambda: Net(
            _class_token,
            token=nn.Parameter(torch.randn(1, 1, 4)),
            positions=nn.Parameter(torch.randn(4, 4)),
            attention=nn.MultiheadAttention(4, 1, batch_first=True),
            head=linear(4),
        ),
        "recurrence by hand": lambda: Net(_recurrent, a=linear(4), b=linear(3), head=linear(3)),
        "layer norm on a sequence": lambda: nn.Sequential(nn.LayerNorm((3, 4)), nn.Flatten(), linear(12)),
        "flatten and unflatten": lambda: nn.Sequential(
            nn.Flatten(), linear(12, 4), nn.Unflatten(1, (2, 2)), nn.Tanh(), nn.Flatten(), linear(4)
        ),
    },
    3,
    4,
)

table({"as many tokens as examples": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)).mean(1)))}, 5, 4)
table({"as many features as examples": lambda: chain(nn.Tanh())}, 4, m=4)
table({"one example": lambda: chain(nn.Tanh())}, 4, m=1)
table({"one example with positions": lambda: two(lambda s, x: s.head(s.a(x).tanh().mean(1)))}, 3, 4, m=1)

table(
    {
        "convolution and pooling": lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), linear(12)
        ),
        "max pooling": lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.MaxPool2d(3), nn.Flatten(), linear(2)),
        "adaptive pooling": lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2, stride=2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(3)
        ),
        "depthwise separable": lambda: nn.Sequential(
            nn.Conv2d(2, 2, 2, groups=2), nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Flatten(), linear(27)
        ),
        "down and up with a skip": lambda: Net(
            _unet, down=nn.Conv2d(2, 2, 2, stride=2), up=nn.ConvTranspose2d(2, 2, 2, stride=2), head=linear(4)
        ),
        "interpolated": lambda: Net(
            lambda s, x: s.head(F.interpolate(s.a(x), scale_factor=2, mode="bilinear").tanh().mean((2, 3))),
            a=nn.Conv2d(2, 3, 2),
            head=linear(3),
        ),
        "pixel shuffle": lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, stride=2), nn.PixelShuffle(2), nn.Tanh(), nn.Flatten(), linear(16)
        ),
        "group norm and residual": lambda: Net(
            lambda s, x: s.head((x + s.a(s.norm(x)).tanh()).mean((2, 3))),
            norm=nn.GroupNorm(1, 2),
            a=nn.Conv2d(2, 2, 3, padding=1),
            head=linear(2),
        ),
        "batch norm in eval mode": lambda: nn.Sequential(
            nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), linear(18)
        ).eval(),
        "patches by unfold": lambda: Net(
            lambda s, x: s.head(torch.tanh(s.a(F.unfold(x, 2, stride=2).transpose(1, 2))).mean(1)),
            a=linear(8, 3),
            head=linear(3),
        ),
    },
    2,
    4,
    4,
)


def _shared_module() -> nn.Module:
    a = linear(4, 4)
    return Net(lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x))))), a=a, b=a, head=linear(4))


def _with_buffers() -> nn.Module:
    net = two(lambda s, x: s.head(torch.tanh(s.a((x - s.mean) / s.deviation))))
    net.register_buffer("mean", torch.randn(4))
    net.register_buffer("deviation", torch.rand(4) + 0.5)
    return net


for _name, _cell_type in (("RNN", nn.RNNCell), ("GRU", nn.GRUCell), ("LSTM", nn.LSTMCell)):

    @honest(f"{_name} cell")
    def _(cell: Any = _cell_type) -> Made:
        forward = (
            _cell if cell is not nn.LSTMCell else lambda s, x: s.head(s.cell(x[:, 1], s.cell(x[:, 0]))[0])
        )
        either = ("cell.weight_ih", "cell.weight_hh")
        return labelled(Net(forward, cell=cell(2, 2), head=linear(2)), 2, 2, either=either)


class WrittenOutGRU(Explicit):
    """nn.GRU of one layer, batch first, with its two products shown."""

    def __init__(self, twin: nn.GRU) -> None:
        super().__init__()
        for name, parameter in twin.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.weight_hh_l0.shape[1])
        for t in range(x.shape[1]):
            xr, xz, xn = self.product(self.weight_ih_l0, self.bias_ih_l0, x[:, t]).chunk(3, -1)
            hr, hz, hn = self.product(self.weight_hh_l0, self.bias_hh_l0, h).chunk(3, -1)
            update = (xz + hz).sigmoid()
            h = (1 - update) * (xn + (xr + hr).sigmoid() * hn).tanh() + update * h
        return h


@honest("GRU over a sequence")
def _() -> Made:
    rnn, head = nn.GRU(2, 2, batch_first=True), linear(2)
    net = Net(lambda s, x: s.head(s.rnn(x)[0][:, -1]), rnn=rnn, head=head).double()
    twin = Net(lambda s, x: s.head(s.rnn(x)), rnn=WrittenOutGRU(rnn), head=head)
    either = ("rnn.weight_ih_l0", "rnn.weight_hh_l0")
    return labelled(net, 3, 2, twin=twin, either=either)


# DESIGN does not say whether a layer that sees (positions, examples, features) keeps its Kronecker product.
@honest("inner sequence first")
def _() -> Made:
    return labelled(two(_sequence_first), 3, 4, either=("a.weight",))
