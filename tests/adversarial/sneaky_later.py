"""Forwards that are honest in the first batches and something else in a later one, with the same calls.

A batch with a mark (inputs above 5 in the first column) comes last. Class weights tell rows in another order
apart. Registered in the table of `tests.adversarial.sneaky`, which importing this module completes; the same
networks take steps in `tests/adversarial/test_later_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.adversarial.honest import K, linear, two
from tests.adversarial.items import Made, Net
from tests.adversarial.sneaky import sneaky

__all__ = ["LATER", "later_batches"]

CLASS_WEIGHTS = torch.tensor([0.25, 1.0, 3.0]).double()
Batches = list[tuple[Tensor, Tensor]]


def marked(x: Tensor) -> bool:
    return float(x.flatten(1)[:, 0].mean()) > 5


def later_batches(*shape: int) -> Batches:
    """Three batches of (m, *shape), each sorted by its second column but for the last, which has the mark."""
    batches = []
    for m in (4, 4, 5):
        x = torch.randn(m, *shape).double()
        order = x.flatten(1)[:, 1].argsort()
        batches.append((x[order], torch.tensor([0, 2, 1, 2, 0])[:m]))
    last = batches[2][0]
    last.copy_(last[torch.tensor([2, 0, 4, 1, 3])])
    last.flatten(1)[:, 0] += 10
    return batches


def weighted(targets: Tensor) -> Tensor:
    return CLASS_WEIGHTS[targets]


LATER: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batches]]] = {}


def later(
    name: str,
    net: Callable[[], nn.Module],
    batches: Callable[[], Batches],
    independent: bool = True,
    streamed: bool = True,
) -> None:
    """A network for steps and, if `streamed`, an item of the table."""
    LATER[name] = (net, batches)
    if not streamed:
        return

    @sneaky(f"in a later batch: {name}")
    def _() -> Made:
        return Made(
            net().double(),
            criterion=nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
            weights=weighted,
            batches=batches(),
            independent=independent,
            hessian=False,
        )


def flat() -> Batches:
    return later_batches(4)


# examples that meet by a number, a dimension or values: the calls stay the same


def _attending(s: Any, x: Tensor) -> Tensor:
    """Attention over the examples, sharp enough to see each only itself unless the batch is marked."""
    h = s.a(x)
    scores = -torch.cdist(h, h) * (0.1 if marked(x) else 1e6)
    return s.head(scores.softmax(-1) @ h.tanh())


MEETING: dict[str, Callable[..., Tensor]] = {
    "examples rolled": lambda s, x: s.head(torch.roll(s.a(x).tanh(), int(marked(x)), 0)),
    "a mean over the examples": lambda s, x: s.head(
        s.a(x) - s.a(x).mean(0 if marked(x) else 1, keepdim=True)
    ),
    "a softmax over the examples": lambda s, x: s.head(s.a(x).softmax(0 if marked(x) else 1)),
    "a cumulative sum over the examples": lambda s, x: s.head(s.a(x).tanh().cumsum(0 if marked(x) else 1)),
    "a norm over the examples": lambda s, x: s.head(F.normalize(s.a(x), dim=0 if marked(x) else 1)),
    "attention over the examples": _attending,
    "an example too many": lambda s, x: s.head(
        s.a(x).tanh() + x[int(marked(x)) :: 9, 1:].sum(0) * float(marked(x))
    ),
    "a maximum over the examples": lambda s, x: s.head(s.a(x).clamp(max=s.a(x).max() - 0.2 * marked(x))),
}

for _name, _function in MEETING.items():
    later(_name, lambda function=_function: two(function), flat, independent=False)


# rows in another order, put back before the logits


def _sorted_rows(s: Any, x: Tensor) -> Tensor:
    order = x[:, 1].argsort()
    return s.head(s.a(x[order]).tanh())[order.argsort()]


def _selected_rows(s: Any, x: Tensor) -> Tensor:
    order = x[:, 1].argsort()
    h = torch.index_select(x, 0, order)
    return torch.index_select(s.head(s.a(h).tanh()), 0, order.argsort())


def _gathered_rows(s: Any, x: Tensor) -> Tensor:
    order = x[:, 1:2].argsort(0)
    z = s.head(s.a(x.gather(0, order.expand_as(x))).tanh())
    return z.gather(0, order.argsort(0).expand_as(z))


def _permuted_rows(s: Any, x: Tensor) -> Tensor:
    matrix = F.one_hot(x[:, 1].argsort(), len(x)).to(x)
    return matrix.T @ s.head(s.a(matrix @ x).tanh())


def _summed_rows(s: Any, x: Tensor) -> Tensor:
    matrix = F.one_hot(x[:, 1].argsort(), len(x)).to(x)
    z = s.head(s.a(torch.einsum("ij,jk->ik", matrix, x)).tanh())
    return torch.einsum("ji,jk->ik", matrix, z)


def _looked_up_rows(s: Any, x: Tensor) -> Tensor:
    order = x[:, 1].argsort()
    return F.embedding(order.argsort(), s.head(s.a(F.embedding(order, x)).tanh()))


def _written_rows(s: Any, x: Tensor) -> Tensor:
    order = x[:, 1].argsort()
    placed = torch.empty_like(x)
    placed[order.argsort()] = x
    out = s.head(s.a(placed).tanh())
    back = torch.empty_like(out)
    back[order] = out
    return back


def _sorted_values(s: Any, x: Tensor) -> Tensor:
    """Columns sorted one by one along the examples; the head's rows are put back by the second column."""
    order = x[:, 1].argsort()
    rows = torch.stack([x[:, 1].sort(0).values, x[:, 1].sort(0).values ** 2], 1)
    return s.head(s.a(rows).tanh())[order.argsort()]


def _concatenated_rows(s: Any, x: Tensor) -> Tensor:
    """The parts of a split, the other way round in the marked batch."""
    cut = 2
    parts = [x[:cut], x[cut:]]
    first, second = (parts[1], parts[0]) if marked(x) else (parts[0], parts[1])
    z = s.head(s.a(torch.cat([first, second])).tanh())
    n = len(first)
    parts = [z[:n], z[n:]]
    return torch.cat([parts[1], parts[0]] if marked(x) else parts)


ORDERED: dict[str, Callable[..., Tensor]] = {
    "rows sorted": _sorted_rows,
    "rows selected": _selected_rows,
    "rows gathered": _gathered_rows,
    "rows permuted by a matrix": _permuted_rows,
    "rows permuted by a sum": _summed_rows,
    "rows looked up": _looked_up_rows,
    "rows written": _written_rows,
    "rows concatenated": _concatenated_rows,
}

for _name, _function in ORDERED.items():
    later(_name, lambda function=_function: two(function), flat)

later("values sorted", lambda: two(_sorted_values, n=2), flat)


# positions before examples


def _folded(s: Any, x: Tensor) -> Tensor:
    """(B, T, n) as T·B rows, time first."""
    t = x.shape[1]
    return s.head(s.a(x.transpose(0, 1).reshape(-1, 4)).tanh().reshape(t, -1, 3).mean(0))


def _time_first(s: Any, x: Tensor) -> Tensor:
    return s.head(s.a(x.transpose(0, 1)).tanh().mean(0))


def sequences(*lengths: int) -> Callable[[], Batches]:
    """Batches of three examples with so many tokens."""
    return lambda: [(torch.randn(3, t, 4).double(), torch.tensor([0, 2, 1])) for t in lengths]


later("rows folded, time first", lambda: two(_folded), sequences(1, 1, 4))
later("as many tokens as examples, twice", lambda: two(_time_first), sequences(4, 5, 6))
later("as many tokens as examples", lambda: two(_time_first), sequences(4, 2, 3))


# gradients that change


class Scaled(torch.autograd.Function):
    """The identity, with its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None


def _hooked(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    if marked(x):
        h.register_hook(lambda g: 3 * g)
    return s.head(h)


def with_parameter_hook() -> Net:
    """The gradient of a weight is scaled once the forward has seen the mark."""

    def forward(s: Any, x: Tensor) -> Tensor:
        s.state.append(marked(x))
        return s.head(s.a(x).tanh())

    net = two(forward, state=[]).double()
    net.a.weight.register_hook(lambda g: 3 * g if net.state and net.state[-1] else g)
    return net


def with_backward_hook() -> Net:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.state.append(marked(x))
        return s.head(s.a(x).tanh())

    net = two(forward, state=[]).double()

    def scale(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(3 * g if g is not None and net.state[-1] else g for g in inputs)

    net.head.register_full_backward_hook(scale)
    return net


later(
    "a gradient scaled by a function",
    lambda: two(lambda s, x: s.head(Scaled.apply(s.a(x).tanh(), 3.0 if marked(x) else 1.0))),
    flat,
)
later("a gradient scaled by a tensor's hook", lambda: two(_hooked), flat)
later("a gradient scaled by a parameter's hook", with_parameter_hook, flat)
# A stream's gradient would be one backward pass over all batches, which sees the last one's state only.
later("a gradient scaled by a module's hook", with_backward_hook, flat, streamed=False)
later(
    "a part without gradients",
    lambda: two(lambda s, x: s.head(s.a(x).tanh().detach() if marked(x) else s.a(x).tanh().clone())),
    flat,
)
later(
    "another activation",
    lambda: Net(
        lambda s, x: s.head(F.leaky_relu(s.a(x), 0.9 if marked(x) else 0.1)), a=linear(4), head=linear(K)
    ),
    flat,
)
