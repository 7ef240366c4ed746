"""Forwards that are not what they seem: each must come out right, or be refused by curvlab's own error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.adversarial.honest import K, chain, labelled, linear, two
from tests.adversarial.items import Made, Maker, Net

SNEAKY: dict[str, Maker] = {}


def sneaky(name: str) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        assert name not in SNEAKY, name
        SNEAKY[name] = make
        return make

    return register


def table(entries: dict[str, Callable[[], nn.Module]], *shape: int, m: int = 5, **fields: Any) -> None:
    for name, model in entries.items():
        sneaky(name)(lambda model=model: labelled(model(), *shape, m=m, **fields))


# what the forward does to the graph


def _no_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(s.a(x))
    return s.head(h)


def _grad_disabled(s: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    try:
        h = torch.tanh(s.a(x))
    finally:
        torch.set_grad_enabled(True)
    return s.head(h + s.a(x))


def _no_grad_second_use(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(s.a(x))
    with torch.no_grad():
        again = torch.tanh(s.a(h))
    return s.head(h + again)


class Reversed(torch.autograd.Function):
    """The identity, with its gradient turned round: no derivative of anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Rounded(torch.autograd.Function):
    """Straight through: rounds, and passes gradients on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Through numpy there is no graph of the backward pass.
        return torch.from_numpy(g.detach().numpy() * 3 * x.detach().numpy() ** 2)


def _branch(test: Callable[[Any, Tensor], bool]) -> Callable[[], nn.Module]:
    """tanh where the test holds, else twice its sine."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        return s.head(torch.tanh(h) if test(s, x) else 2 * torch.sin(h))

    return lambda: two(forward)


table(
    {
        "no_grad around a part": lambda: two(_no_grad),
        "grad mode switched off and on": lambda: two(_grad_disabled, d=3),
        "no_grad around a second use": lambda: two(_no_grad_second_use, d=4),
        "weight.data": lambda: two(lambda s, x: s.head(torch.tanh(F.linear(x, s.a.weight.data, s.a.bias)))),
        "weight detached": lambda: two(lambda s, x: s.head(F.linear(x, s.a.weight.detach(), s.a.bias).sin())),
        "parameters of another model": lambda: two(
            lambda s, x: s.head(s.outside[0](x).tanh()), outside=[linear(4).double()]
        ),
        "branch on the grad mode": _branch(lambda s, x: torch.is_grad_enabled()),
        "branch on requires_grad": _branch(lambda s, x: x.requires_grad),
        "branch on the type": _branch(lambda s, x: type(x) is Tensor),
        "branch on isinstance": _branch(lambda s, x: isinstance(x, Tensor)),
        "branch on is_tensor": _branch(lambda s, x: torch.is_tensor(x)),
        "branch on a proxy": _branch(lambda s, x: not isinstance(x, fx.Proxy)),
        "branch on hasattr": _branch(lambda s, x: not hasattr(x, "node")),
        "branch on tracing": _branch(lambda s, x: not torch.jit.is_tracing()),
        "branch on scripting": _branch(lambda s, x: not torch.jit.is_scripting()),
        "branch on compiling": _branch(lambda s, x: not torch.compiler.is_compiling()),
        "branch on vmap": _branch(lambda s, x: not torch._C._functorch.is_batchedtensor(x)),
        "branch on functional tensors": _branch(
            lambda s, x: not torch._C._functorch.is_functorch_wrapped_tensor(x)
        ),
        "branch on the output's graph": lambda: two(
            lambda s, x: s.head(h.tanh() if (h := s.a(x)).grad_fn is not None else h.sin())
        ),
        "branch on hooks of a layer": _branch(lambda s, x: not s.a._forward_hooks),
        "branch on pre-hooks of a layer": _branch(lambda s, x: not s.a._forward_pre_hooks),
        "branch on the class of a layer": _branch(lambda s, x: type(s.a) is nn.Linear),
        "branch on contiguity": _branch(lambda s, x: x.is_contiguous()),
        "branch on a leaf": _branch(lambda s, x: x.is_leaf),
        "branch on the dtype": _branch(lambda s, x: x.dtype is torch.float64),
        "branch on the width": _branch(lambda s, x: x.shape[-1] % 2 == 0),
        "activation with an argument": lambda: two(lambda s, x: s.head(F.leaky_relu(s.a(x), 0.7))),
        "activation of two inputs": lambda: two(
            lambda s, x: s.head(torch.atan2(s.a(x), s.b(x))), b=linear(4, 3)
        ),
        "softmax as an activation": lambda: chain(nn.Softmax(-1)),
        "softmin over features": lambda: chain(nn.Softmin(1)),
        "cumsum over features": lambda: two(lambda s, x: s.head(s.a(x).cumsum(-1).tanh())),
        "features rolled": lambda: two(lambda s, x: s.head(s.a(x).roll(1, -1).tanh())),
        "straight-through rounding": lambda: two(lambda s, x: s.head(Rounded.apply(s.a(x)))),
        "the logits scaled by a constant": lambda: two(lambda s, x: 3.0 * s.head(torch.tanh(s.a(x)))),
        "a layer's output changed in place": lambda: two(lambda s, x: s.head(s.a(x).mul_(2).add_(1).tanh())),
        "a layer's input changed in place": lambda: two(
            lambda s, x: (t := x * 1, h := s.a(t), s.head(h.tanh() + t.detach()[:, :3]))[2]
        ),
        "double use of a bias": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)) + s.a.bias)),
        "weight decay inside the forward": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x))) + (s.a.weight**2).sum() * x[:, :1]
        ),
        "a weight used besides its layer": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x))) + F.linear(x, s.a.weight)
        ),
        "a weight and its transpose": lambda: two(
            lambda s, x: s.head(F.linear(torch.tanh(s.a(x)), s.a.weight.T)), d=4
        ),
        "a weight used in part": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x))) + x[:, :3] * s.a.weight[0, 0]
        ),
        "a weight normalised in the forward": lambda: two(
            lambda s, x: F.linear(torch.tanh(s.a(x)), F.normalize(s.head.weight), s.head.bias)
        ),
        "a weight clamped in the forward": lambda: two(
            lambda s, x: F.linear(torch.tanh(s.a(x)), s.head.weight.clamp(-0.3, 0.3), s.head.bias)
        ),
        "a masked weight": lambda: two(
            lambda s, x: s.head(F.linear(x, s.a.weight * s.a.weight.gt(0), s.a.bias).tanh())
        ),
        "one weight in two layers, one frozen use": lambda: two(
            lambda s, x: s.head(s.a(x).tanh() + F.linear(x, s.a.weight.detach()))
        ),
        "weight.data after a module call": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x))) + F.linear(x, s.a.weight.data)
        ),
        "a layer called for nothing": lambda: two(lambda s, x: (s.a(2 * x), s.head(torch.tanh(s.a(x))))[1]),
        "a layer called for nothing, twice": lambda: two(
            lambda s, x: (s.head(s.a(x)), s.head(s.a(x).sin()))[1]
        ),
        "a layer of zero use": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x))) + 0 * s.b(x), b=linear(4)),
        "a forward that differentiates": lambda: two(lambda s, x: s.head(_input_gradient(s.a, x))),
        "parameters through functional_call": lambda: two(
            lambda s, x: s.head(
                torch.func.functional_call(s.a, {"weight": 2 * s.a.weight, "bias": s.a.bias}, x).tanh()
            )
        ),
        "buffers rewritten with the same value": lambda: two(
            lambda s, x: (s.kept.copy_(torch.ones(1)), s.head(torch.tanh(s.a(x))))[1],
            kept=nn.Buffer(torch.ones(1).double()),
        ),
        "complex wiring": lambda: two(
            lambda s, x: s.head(
                torch.view_as_real(torch.view_as_complex(s.a(x).reshape(-1, 2, 2)) ** 2).flatten(1)
            ),
            d=4,
        ),
        "nan in an unused branch": lambda: two(
            lambda s, x: s.head(torch.where(x[:, :1] < 50, s.a(x), s.a(x) ** 2))
        ),
    },
    4,
)

table(
    {"gradient reversal": lambda: two(lambda s, x: s.head(Reversed.apply(s.a(x).tanh())))}, 4, hessian=False
)
# torch has no second derivative of these, or a wrong one (weight_norm, without a word): differences judge.
table(
    {
        "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(linear(4)), nn.Tanh(), linear(3)),
        "pairwise distances": lambda: two(
            lambda s, x: s.head(torch.cdist(s.a(x), s.centres)), centres=nn.Parameter(torch.randn(3, 3))
        ),
        "a backward pass without a graph": lambda: two(lambda s, x: s.head(OnceDifferentiable.apply(s.a(x)))),
    },
    4,
    differences=True,
)


@sneaky("a layer inside vmap")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.vmap(lambda t: torch.tanh(s.a(t)))(x)))
    twin = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
    twin.load_state_dict(net.state_dict())
    return labelled(net, 4, twin=twin)


def _input_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad(torch.tanh(layer(x)).sum(), x, create_graph=True)
    return g[:, :3]


# examples


def _sorted(s: Any, x: Tensor, back: bool = True) -> Tensor:
    order = x.sum(1).argsort()
    z = s.head(torch.tanh(s.a(x[order])))
    return z[order.argsort()] if back else z


def _routed(s: Any, x: Tensor) -> Tensor:
    positive = x[:, 0] > 0
    h = x.new_zeros(len(x), 3)
    h[positive] = s.a(x[positive])
    h[~positive] = s.b(x[~positive])
    return s.head(torch.tanh(h))


def _grouped(s: Any, x: Tensor) -> Tensor:
    order = (x[:, 0] > 0).long().argsort(stable=True)
    split = int((x[:, 0] <= 0).sum())
    h = torch.cat([s.a(x[order[:split]]), s.b(x[order[split:]])])
    return s.head(torch.tanh(h[order.argsort()]))


def _large_batches(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.head(torch.tanh(h - h.mean(0) if len(x) > 3 else h))


def _one_by_one(s: Any, x: Tensor) -> Tensor:
    return torch.cat([s.head(torch.tanh(s.a(row[None]))) for row in x])


def _unbatched(s: Any, x: Tensor) -> Tensor:
    return torch.stack([s.head(torch.tanh(s.a(row))) for row in x])


def _halves(s: Any, x: Tensor) -> Tensor:
    return torch.cat([s.head(torch.tanh(s.a(part))) for part in x.chunk(2)])


def _padded_rows(s: Any, x: Tensor) -> Tensor:
    wide = torch.cat([x, x.new_ones(3, 4)])
    return s.head(torch.tanh(s.a(wide))[: len(x)])


def _unique(s: Any, x: Tensor) -> Tensor:
    rows, inverse = x.unique(dim=0, return_inverse=True)
    return s.head(torch.tanh(s.a(rows)))[inverse]


def _attention_over_the_batch(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    return s.head((h @ h.T).softmax(-1) @ h)


table(
    {
        "examples sorted and put back": lambda: two(_sorted),
        "examples flipped and put back": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x.flip(0)))).flip(0)),
        "examples rolled and put back": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x.roll(2, 0)).roll(-2, 0)))
        ),
        "experts by index": lambda: two(_routed, b=linear(4, 3)),
        "experts by grouping": lambda: two(_grouped, b=linear(4, 3)),
        "examples one by one": lambda: two(_one_by_one),
        "examples without a batch": lambda: two(_unbatched),
        "the batch in halves": lambda: two(_halves),
        "rows of padding": lambda: two(_padded_rows),
        "unique rows": lambda: two(_unique),
        "examples twice": lambda: two(lambda s, x: s.head(torch.tanh(s.a(torch.cat([x, -x])))).chunk(2)[0]),
        "pairs folded into the batch": lambda: two(
            lambda s, x: s.head(sum(torch.tanh(s.a(torch.cat([x, -x]))).chunk(2)))
        ),
        "examples repeated and averaged": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x.repeat_interleave(2, 0)))).unflatten(0, (-1, 2)).mean(1)
        ),
        "batch last": lambda: two(
            lambda s, x: s.head(torch.tanh(s.w @ x.T + s.a.bias[:, None]).T),
            w=nn.Parameter(torch.randn(3, 4)),
        ),
        "an extra leading dimension": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x[None])))[0]),
    },
    4,
)

table(
    {
        "tokens folded into the batch": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x.flatten(0, 1))).unflatten(0, (len(x), -1)).mean(1))
        ),
        "tokens folded before the batch": lambda: two(
            lambda s, x: s.head(
                torch.tanh(s.a(x.transpose(0, 1).flatten(0, 1))).unflatten(0, (-1, len(x))).mean(0)
            )
        ),
        "tokens folded into a convolution": lambda: Net(
            lambda s, x: s.head(
                s.c(x.flatten(0, 1)[:, None]).tanh().flatten(1).unflatten(0, (len(x), -1)).mean(1)
            ),
            c=nn.Conv1d(1, 1, 2),
            head=linear(3),
        ),
        "tokens masked out by an index": lambda: two(
            lambda s, x: s.head(
                torch.zeros(len(x), 3, 3)
                .double()
                .masked_scatter((x[..., :1] > 0).expand(-1, -1, 3), s.a(x[x[..., 0] > 0]).tanh())
                .sum(1)
            )
        ),
    },
    3,
    4,
)
table(
    {
        "as many tokens as examples, transposed": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x.transpose(0, 1))).mean(0))
        )
    },
    5,
    4,
)
table(
    {
        "as many tokens as examples, folded": lambda: two(
            lambda s, x: s.head(s.a(x.transpose(0, 1).flatten(0, 1)).tanh().unflatten(0, (5, -1)).mean(0))
        )
    },
    5,
    4,
)

table(
    {
        "examples sorted and left so": lambda: two(lambda s, x: _sorted(s, x, back=False)),
        "examples flipped": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x))).flip(0)),
        "examples rolled": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x) + s.a(x).roll(1, 0)))),
        "batch mean": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x) - s.a(x).mean(0)))),
        "batch mean, detached": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a(x) - s.a(x).mean(0).detach()))
        ),
        "batch statistics of the input": lambda: two(
            lambda s, x: s.head(torch.tanh(s.a((x - x.mean(0)) / (1 + x.std(0, correction=0)))))
        ),
        "batch statistics of large batches": lambda: two(_large_batches),
        "batch norm in training mode": lambda: nn.Sequential(
            linear(4), nn.BatchNorm1d(3, track_running_stats=False), linear(3)
        ),
        "batch maximum": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)) / s.a(x).abs().max())),
        "softmax over the batch": lambda: two(lambda s, x: s.head(s.a(x).softmax(0))),
        "cumsum over the batch": lambda: two(lambda s, x: s.head(s.a(x).tanh().cumsum(0))),
        "attention over the batch": lambda: two(_attention_over_the_batch),
        "scaled by the batch size": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x))) / len(x)),
        "branch on the batch size": lambda: two(
            lambda s, x: s.head(s.a(x).tanh() if len(x) > 1 else s.a(x).sin())
        ),
        "branch on larger batches": lambda: two(
            lambda s, x: s.head(s.a(x).tanh() if len(x) > 4 else s.a(x).sin())
        ),
        "branch on the batch's mean": lambda: two(
            lambda s, x: s.head(s.a(x).tanh() if float(x[:, 0].max()) > 0 else 3 * s.a(x))
        ),
        "every second example is left out": lambda: two(
            lambda s, x: s.head(s.a(x).tanh() * (torch.arange(len(x)) % 2)[:, None])
        ),
        "the first example differs": lambda: two(
            lambda s, x: s.head(torch.cat([s.a(x[:1]).tanh(), s.a(x[1:]).sin()]))
        ),
        "only the first example counts": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)) + s.a(x)[:1])),
        "grouped over the batch": lambda: two(lambda s, x: s.head(torch.tanh(s.a(x)) * (s.a(x).norm() + 1))),
    },
    4,
    independent=False,
)


@sneaky("batch statistics of batches above 64")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(x) - (s.a(x).mean(0) if len(x) > 64 else 0)))).double()
    return Made(net, torch.randn(70, 4).double(), torch.randint(K, (70,)), independent=False)


# data that come later


def later(function: Callable[..., Any], **fields: Any) -> Made:
    """Three batches; the last one has a mark (inputs above 5 in the first column)."""
    batches = [(torch.randn(m, 4).double(), torch.randint(K, (m,))) for m in (3, 2, 3)]
    batches[2][0][:, 0] += 10
    return Made(two(function).double(), batches=batches, **fields)


@sneaky("a branch that flips in a later batch")
def _() -> Made:
    return later(lambda s, x: s.head(s.a(x).sin() if float(x[:, 0].mean()) > 5 else s.a(x).tanh()))


@sneaky("no_grad in a later batch")
def _() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and float(x[:, 0].mean()) < 5):
            h = s.a(x).tanh()
        return s.head(h)

    return later(forward)


@sneaky("a layer left out in a later batch")
def _() -> Made:
    return later(lambda s, x: s.head(x[:, 1:] if float(x[:, 0].mean()) > 5 else s.a(x).tanh()))


@sneaky("a second use in a later batch")
def _() -> Made:
    return later(
        lambda s, x: s.head(s.a(x).tanh()) + (F.linear(x, s.a.weight) if float(x[:, 0].mean()) > 5 else 0)
    )


@sneaky("batch statistics in a later batch")
def _() -> Made:
    return later(
        lambda s, x: s.head(s.a(x).tanh() - (s.a(x).mean(0) if float(x[:, 0].mean()) > 5 else 0)),
        independent=False,
    )


@sneaky("a branch on a batch of one")
def _() -> Made:
    net = two(lambda s, x: s.head(s.a(x).tanh() if len(x) > 1 else s.a(x).sin())).double()
    batches = [(torch.randn(m, 4).double(), torch.randint(K, (m,))) for m in (3, 2, 1)]
    return Made(net, batches=batches, independent=False)


# random and stateful forwards


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def _moving_average(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    with torch.no_grad():
        s.average.mul_(0.9).add_(0.1 * h.mean(0))
    return s.head(torch.tanh(h - s.average))


def _remember(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    out = s.head(torch.tanh(h + s.state[0]))
    s.state[0] = h.detach().mean(0)
    return out


table(
    {
        "dropout": lambda: chain(nn.Dropout(0.5)),
        "functional dropout": lambda: two(lambda s, x: s.head(F.dropout(s.a(x), 0.4))),
        "noise": lambda: two(lambda s, x: s.head(s.a(x).tanh() + torch.randn_like(s.a(x)))),
        "noise from Python's generator": lambda: two(
            lambda s, x: s.head(s.a(x).tanh() * (1 + random.random()))
        ),
        "RReLU": lambda: chain(nn.RReLU()),
        "stochastic depth": lambda: two(lambda s, x: s.head(s.a(x).tanh() * float(torch.rand(())))),
        "Gumbel softmax": lambda: two(lambda s, x: s.head(F.gumbel_softmax(s.a(x)))),
        "a counter": lambda: nn.Sequential(linear(4), Counter(), nn.Tanh(), linear(3)),
        "a moving average": lambda: two(_moving_average, average=nn.Buffer(torch.zeros(3))),
        "a remembered state": lambda: two(_remember, state=[torch.zeros(3).double()]),
        "a weight changed by the forward": lambda: two(
            lambda s, x: (s.b.weight.data.mul_(1.5), s.head(s.a(x).tanh() + s.b(x)))[1], b=linear(4)
        ),
    },
    4,
    answerable=False,
)


@sneaky("batch norm that tracks in training mode")
def _() -> Made:
    return labelled(nn.Sequential(linear(4), nn.BatchNorm1d(3), linear(3)), 4, independent=False)
