"""More forwards that are what they seem: inputs, outputs, parameters, hooks, losses and criteria.

Registered in the table of `tests.adversarial.honest`, which importing this module completes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from tests.adversarial.honest import K, chain, honest, labelled, linear, two
from tests.adversarial.items import Made, Net
from tests.any_reference import cross_entropy_terms

__all__: list[str] = []


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


def _lora_parameters(s: Any, x: Tensor) -> Tensor:
    return s.head(torch.tanh(s.base(x) + x @ s.down.T @ s.up.T))


@honest("tuple inputs")
def _() -> Made:
    net = two(lambda s, x, y: s.head(torch.tanh(s.a(x)) * y)).double()
    return Made(net, (torch.randn(5, 4).double(), torch.rand(5, 3).double()), torch.randint(K, (5,)))


@honest("siamese")
def _() -> Made:
    net = two(lambda s, x, y: s.head((torch.tanh(s.a(x)) - torch.tanh(s.a(y))).abs())).double()
    return Made(net, (torch.randn(5, 4).double(), torch.randn(5, 4).double()), torch.randint(K, (5,)))


@honest("dict inputs")
def _() -> Made:
    net = two(lambda s, *, pixels, scale: s.head(torch.tanh(s.a(pixels)) * scale)).double()
    inputs = {"scale": torch.rand(5, 1).double(), "pixels": torch.randn(5, 4).double()}
    return Made(net, inputs, torch.randint(K, (5,)))


@honest("dict inputs with a mask")
def _() -> Made:
    def forward(s: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
        h = s.embed(input_ids) * attention_mask.unsqueeze(-1)
        return SimpleNamespace(logits=s.head(torch.tanh(s.a(h)).sum(1)))

    net = two(forward, embed=nn.Embedding(6, 4)).double()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    inputs = {"input_ids": torch.randint(6, (4, 3)), "attention_mask": mask}
    return Made(net, inputs, torch.randint(K, (4,)))


for _name, _wrap in {
    "tuple output": lambda z, h: (z, h),
    "dict output": lambda z, h: {"hidden": h, "logits": z},
    "dataclass output": Output,
    "namespace output": lambda z, h: SimpleNamespace(hidden=h, logits=z),
}.items():

    @honest(_name)
    def _(wrap: Any = _wrap) -> Made:
        def forward(s: Any, x: Tensor) -> Any:
            h = torch.tanh(s.a(x))
            return wrap(s.head(h), h)

        return labelled(two(forward), 4)


@honest("named output")
def _() -> Made:
    return labelled(two(lambda s, x: {"a": x, "scores": s.head(torch.tanh(s.a(x)))}), 4, output="scores")


@honest("functional weights")
def _() -> Made:
    net = two(
        lambda s, x: F.linear(torch.tanh(F.linear(x, s.a.weight, s.a.bias)), s.head.weight, s.head.bias)
    )
    twin = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
    twin.load_state_dict(net.state_dict())
    return labelled(net, 4, twin=twin, either=("a.weight", "head.weight"))


@honest("a raw weight and bias")
def _() -> Made:
    net = two(
        lambda s, x: s.head(torch.tanh(x @ s.w + s.b)),
        d=2,
        w=nn.Parameter(torch.randn(4, 2)),
        b=nn.Parameter(torch.randn(2)),
    )
    return labelled(net, 4)


@honest("checkpointing")
def _() -> Made:
    torch.manual_seed(5)
    net = two(lambda s, x: s.head(checkpoint(lambda t: torch.tanh(s.a(t)), x, use_reentrant=False)))
    torch.manual_seed(5)
    twin = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
    return labelled(net, 4, twin=twin)


@honest("LoRA modules on a frozen base")
def _() -> Made:
    net = Net(
        lambda s, x: s.head(torch.tanh(s.base(x) + s.up(s.down(x)))),
        base=linear(4, 3).requires_grad_(False),
        down=linear(4, 1, bias=False),
        up=linear(1, 3, bias=False),
        head=linear(3),
    )
    return labelled(net, 4)


@honest("LoRA parameters on a frozen base")
def _() -> Made:
    net = Net(
        _lora_parameters,
        base=linear(4, 3).requires_grad_(False),
        down=nn.Parameter(torch.randn(1, 4)),
        up=nn.Parameter(torch.randn(3, 1)),
        head=linear(3).requires_grad_(False),
    )
    return labelled(net, 4)


@honest("pruned weight")
def _() -> Made:
    net = chain(nn.Tanh()).double()
    prune.random_unstructured(net[0], "weight", amount=0.4)
    return Made(net, torch.randn(5, 4).double(), torch.randint(K, (5,)))


# torch's second derivative of weight_norm is wrong (differences say so), so that the Hessian may be refused:
# the table of sneaky forwards asks for it.


@honest("weight norm")
def _() -> Made:
    net = nn.Sequential(parametrizations.weight_norm(linear(4)), nn.Tanh(), linear(3))
    return labelled(net, 4, hessian=False)


@honest("old weight norm")
def _() -> Made:
    net = nn.Sequential(torch.nn.utils.weight_norm(linear(4).double()), nn.Tanh(), linear(3).double())
    return Made(net, torch.randn(5, 4).double(), torch.randint(K, (5,)), hessian=False)


for _name, _frozen in {
    "frozen first layer": ["0.weight", "0.bias"],
    "frozen last layer": ["2.weight", "2.bias"],
    "frozen weight": ["0.weight"],
    "frozen bias": ["0.bias"],
}.items():

    @honest(_name)
    def _(frozen: Any = _frozen) -> Made:
        net = chain(nn.Tanh())
        for name in frozen:
            net.get_parameter(name).requires_grad_(False)
        return labelled(net, 4)


@honest("unused head")
def _() -> Made:
    return labelled(two(lambda s, x: s.head(torch.tanh(s.a(x))), other=linear(3)), 4)


def _see(*_: Any) -> None:
    """Read, and change nothing."""


@honest("read-only forward hooks")
def _() -> Made:
    net = chain(nn.Tanh())
    for module in net.modules():
        module.register_forward_hook(_see)
    return labelled(net, 4)


@honest("read-only pre-hooks")
def _() -> Made:
    net = chain(nn.Tanh())
    for module in net.modules():
        module.register_forward_pre_hook(_see)
    return labelled(net, 4)


@honest("read-only backward hooks")
def _() -> Made:
    net = chain(nn.Tanh())
    net[0].register_full_backward_hook(_see)
    net[2].register_full_backward_hook(_see)
    return labelled(net, 4)


@honest("read-only tensor hook")
def _() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        if h.requires_grad:
            h.register_hook(_see)
        return s.head(h)

    return labelled(two(forward), 4)


@honest("activations kept in a list")
def _() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.seen.append(float(x.sum()))
        return s.head(torch.tanh(s.a(x)))

    return labelled(two(forward, seen=[]), 4)


@honest("embedding and mean")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(s.embed(x))).mean(1)), embed=nn.Embedding(5, 4)).double()
    return Made(net, torch.randint(5, (5, 3)), torch.randint(K, (5,)))


@honest("embedding with padding_idx")
def _() -> Made:
    net = Net(
        lambda s, x: s.head(torch.tanh(s.e(x)).mean(1)), e=nn.Embedding(4, 3, padding_idx=0), head=linear(3)
    )
    return Made(net.double(), torch.randint(4, (5, 4)), torch.randint(K, (5,)))


@honest("a loss for each token")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(x.cumsum(1))))).double()
    return Made(net, torch.randn(5, 2, 4).double(), torch.randint(K, (5, 2)))


@honest("tokens of unequal lengths")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(x.cumsum(1))))).double()
    targets = torch.tensor([[0, 1, 2, 1], [2, -100, -100, -100], [1, 1, -100, -100]])
    flat = nn.CrossEntropyLoss()
    return Made(
        net,
        torch.randn(3, 4, 4).double(),
        targets,
        criterion=nn.CrossEntropyLoss(),
        loss=lambda z, y: flat(z.flatten(0, 1), y.flatten()),
        weights=lambda y: (y >= 0).double().sum(1),
        terms=cross_entropy_terms(),
    )


@honest("pixels with classes first")
def _() -> Made:
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, K, 1)).double()
    return Made(net, torch.randn(4, 2, 2, 2).double(), torch.randint(K, (4, 2, 2)), nn.CrossEntropyLoss())


@honest("class weights")
def _() -> Made:
    weight = torch.tensor([0.5, 2.0, 1.0]).double()
    criterion = nn.CrossEntropyLoss(weight=weight)
    return labelled(
        two(lambda s, x: s.head(torch.tanh(s.a(x)).mean(1))),
        3,
        4,
        criterion=criterion,
        weights=lambda y: weight[y],
    )


@honest("mse")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(x)).mean(1))).double()
    return Made(net, torch.randn(5, 3, 4).double(), torch.randn(5, K).double(), "mse")


@honest("mse of one output")
def _() -> Made:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    targets = torch.randn(5, 1).double()
    return Made(net, torch.randn(5, 4).double(), targets, nn.MSELoss())


@honest("binary labels")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
    targets = torch.randint(2, (5, K)).double()
    return Made(net, torch.randn(5, 4).double(), targets, nn.BCEWithLogitsLoss())


@honest("a stream of batches of unequal sizes")
def _() -> Made:
    net = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Unflatten(1, (3, 4)), nn.Flatten()).double()
    return Made(
        net,
        batches=[(torch.randn(m, 3, 4).double(), torch.randint(12, (m,))) for m in (3, 1, 2)],
    )


@honest("positions by a sinusoid")
def _() -> Made:
    angles = torch.arange(3)[:, None] * torch.exp(-torch.arange(4) * math.log(10.0) / 4)
    return labelled(two(lambda s, x: s.head(torch.tanh(s.a(x + angles.sin().to(x.dtype))).mean(1))), 3, 4)


@honest("a criterion of one example")
def _() -> Made:
    def squares(z: Tensor, y: Tensor) -> Tensor:
        return ((z - y) ** 2).sum() + z.logsumexp(0)

    def mean(z: Tensor, y: Tensor) -> Tensor:
        return torch.stack([squares(*pair) for pair in zip(z, y, strict=True)]).mean()

    net = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
    return Made(net, torch.randn(5, 4).double(), torch.randn(5, K).double(), squares, loss=mean)


@honest("a criterion that sums the outputs of one example")
def _() -> Made:
    net = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
    targets = torch.randn(5, K).double()
    return Made(
        net,
        torch.randn(5, 4).double(),
        targets,
        lambda z, y: ((z - y) ** 2).sum(),
        loss=lambda z, y: ((z - y) ** 2).sum() / len(z),
    )
