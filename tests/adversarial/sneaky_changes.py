"""More forwards that are not what they seem: subclasses, hooks, later changes and criteria.

Registered in the table of `tests.adversarial.sneaky`, which importing this module completes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from tests.adversarial.honest import K, chain, labelled, linear, two
from tests.adversarial.items import Made, Maker, Net
from tests.adversarial.sneaky import sneaky, table

__all__: list[str] = []


# subclasses and instances with a forward of their own


class SineReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(2 * x)


class ScalingDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class HalvingFlatten(nn.Flatten):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class CubedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x**3, self.weight, self.bias)


class NormalisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight), self.bias)


class Backwards(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(list(self)):
            x = module(x)
        return x


class CallsTwice(nn.Tanh):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(super().__call__(x))


class StandardisedConvolution(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2), keepdim=True), self.bias)


class ShiftedEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x + 1) % self.num_embeddings)


class HalvedNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2 + x


class LinearWithProperty(nn.Linear):
    """Its bias is a function of a parameter of another name."""

    def __init__(self, n: int, o: int) -> None:
        super().__init__(n, o, bias=False)
        self.shift = nn.Parameter(torch.randn(o))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift.exp()


def between(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(linear(4), layer, linear(3))


table(
    {
        "ReLU subclass": between(SineReLU()),
        "Dropout subclass": between(ScalingDropout(0.5)),
        "Flatten subclass": between(HalvingFlatten()),
        "activation called twice": between(CallsTwice()),
        "LayerNorm subclass": lambda: nn.Sequential(linear(4), HalvedNorm(3), linear(3)),
        "Sequential run backwards": lambda: Backwards(linear(3), nn.Tanh(), linear(4, 3)),
        "a bias by another name": lambda: nn.Sequential(LinearWithProperty(4, 3), nn.Tanh(), linear(3)),
    },
    4,
)


for _name, _layer in {
    "Linear subclass, scaled": ScaledLinear,
    "Linear subclass, cubed input": CubedLinear,
    "Linear subclass, normalised weight": NormalisedLinear,
}.items():

    @sneaky(_name)
    def _(layer: Any = _layer) -> Made:
        return labelled(nn.Sequential(layer(4, 3), nn.Tanh(), linear(3)), 4)


@sneaky("convolution subclass")
def _() -> Made:
    net = nn.Sequential(StandardisedConvolution(2, 2, 2), nn.Tanh(), nn.Flatten(), linear(6))
    return labelled(net, 2, 4)


@sneaky("embedding subclass")
def _() -> Made:
    net = Net(lambda s, x: s.head(torch.tanh(s.e(x)).mean(1)), e=ShiftedEmbedding(4, 3), head=linear(3))
    inputs = torch.randint(4, (5, 3))
    return Made(net.double(), inputs, torch.randint(K, (5,)))


@sneaky("an activation's forward replaced")
def _() -> Made:
    net = chain(nn.Tanh())
    net[1].forward = lambda x: torch.sin(3 * x)
    return labelled(net, 4)


@sneaky("a Linear's forward replaced")
def _() -> Made:
    net = chain(nn.Tanh())
    layer = net[0]
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    return labelled(net, 4)


@sneaky("the model's forward replaced")
def _() -> Made:
    net = chain(nn.Tanh())
    net.forward = lambda x: net[2](torch.sin(net[0](x)))
    return labelled(net, 4)


# hooks


def _scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def _scale_input(module: nn.Module, args: Any) -> tuple[Tensor]:
    return (args[0] * 2,)


def _scale_gradients(module: nn.Module, *gradients: Any) -> Any:
    return tuple(None if g is None else 2 * g for g in gradients[0])


def hooked(place: int, kind: str, hook: Callable[..., Any]) -> Maker:
    def make() -> Made:
        net = chain(nn.Tanh())
        getattr(net[place], f"register_{kind}")(hook)
        return labelled(net, 4, hessian="backward" not in kind)

    return make


for _place, _part in enumerate(("a Linear", "an activation", "the last Linear")):
    sneaky(f"forward hook on {_part} that changes")(hooked(_place, "forward_hook", _scale_output))
    sneaky(f"pre-hook on {_part} that changes")(hooked(_place, "forward_pre_hook", _scale_input))
    sneaky(f"backward hook on {_part} that changes")(hooked(_place, "full_backward_hook", _scale_gradients))
    sneaky(f"backward pre-hook on {_part} that changes")(
        hooked(_place, "full_backward_pre_hook", _scale_gradients)
    )


@sneaky("a hook on one Linear alone")
def _() -> Made:
    net = linear(4)
    net.register_forward_hook(lambda m, a, z: z**2)
    return labelled(net, 4)


@sneaky("a hook on the model")
def _() -> Made:
    net = chain(nn.Tanh())
    net.register_forward_hook(_scale_output)
    return labelled(net, 4)


@sneaky("a tensor hook that changes")
def _() -> Made:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: 2 * g)
        return s.head(h)

    return labelled(two(forward), 4, hessian=False)


@sneaky("a parameter hook that changes")
def _() -> Made:
    net = chain(nn.Tanh()).double()
    net[0].weight.register_hook(lambda g: 2 * g)
    return labelled(net, 4, hessian=False)


# parameters under other names


@sneaky("pruned bias")
def _() -> Made:
    net = chain(nn.Tanh()).double()
    prune.random_unstructured(net[0], "bias", amount=0.5)
    return labelled(net, 4)


@sneaky("pruned weight and bias")
def _() -> Made:
    net = chain(nn.Tanh()).double()
    prune.random_unstructured(net[0], "weight", amount=0.5)
    prune.random_unstructured(net[0], "bias", amount=0.4)
    return labelled(net, 4)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@sneaky("a parametrised bias")
def _() -> Made:
    net = chain(nn.Tanh())
    parametrize.register_parametrization(net[0], "bias", Doubled())
    return labelled(net, 4)


@sneaky("an embedding as the head, functionally")
def _() -> Made:
    def tied(function: Callable[..., Any], **parts: Any) -> Net:
        return Net(function, embed=nn.Embedding(K, 2), mix=linear(2, 2), **parts).double()

    net = tied(lambda s, x: F.linear(torch.tanh(s.mix(s.embed(x).cumsum(1))), s.embed.weight))
    head = nn.Linear(2, K, bias=False)
    twin = tied(lambda s, x: s.head(torch.tanh(s.mix(s.embed(x).cumsum(1)))), head=head)
    head.weight = twin.embed.weight
    twin.load_state_dict(net.state_dict() | {"head.weight": net.embed.weight})
    tokens = torch.randint(K, (4, 2))
    return Made(net, tokens, torch.randint(K, (4, 2)), twin=twin)


# changes after the Problem was made


def changed(name: str, change: Callable[[Any, Made], object], **fields: Any) -> None:
    """Apply `change(net, made)` between the Problem's first use and the questions."""
    net = fields.pop("net", lambda: chain(nn.Tanh()))

    @sneaky(f"later: {name}")
    def _() -> Made:
        made = labelled(net(), 4, **fields)
        made.change = lambda: change(made.model, made)
        return made


def _scale(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.5)


def _fresh(n: int, o: int) -> nn.Linear:
    layer = nn.Linear(n, o)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    return layer.double()


changed("a layer replaced", lambda net, made: net.__setitem__(0, _fresh(4, 3)))
changed("the head replaced", lambda net, made: net.__setitem__(2, _fresh(3, 3)))
changed("an activation replaced", lambda net, made: net.__setitem__(1, nn.Sigmoid()))
changed("a layer appended", lambda net, made: net.append(_fresh(3, 3)))
changed("an activation appended", lambda net, made: net.append(nn.Tanh()))
changed("a layer removed", lambda net, made: net.__delitem__(2))
changed(
    "a wider layer", lambda net, made: (net.__setitem__(0, _fresh(4, 5)), net.__setitem__(2, _fresh(5, 3)))
)
changed("a layer frozen", lambda net, made: net[0].requires_grad_(False))
changed("a bias frozen", lambda net, made: net[0].bias.requires_grad_(False))
changed("all but the head frozen", lambda net, made: net[0].requires_grad_(False))
changed("a forward hook", lambda net, made: net[1].register_forward_hook(_scale_output))
changed("a pre-hook", lambda net, made: net[1].register_forward_pre_hook(_scale_input))
changed("a hook on the first layer", lambda net, made: net[0].register_forward_hook(_scale_output))
changed(
    "a backward hook", lambda net, made: net[1].register_full_backward_hook(_scale_gradients), hessian=False
)
changed("a read-only hook", lambda net, made: net[1].register_forward_hook(lambda *a: None))
changed("a replaced forward", lambda net, made: setattr(net[1], "forward", torch.sin))
changed(
    "the model's replaced forward", lambda net, made: setattr(net, "forward", lambda x: net[2](net[0](x)))
)
changed("weights changed in place", lambda net, made: _scale(net[0].weight))
changed("weights changed through .data", lambda net, made: net[0].weight.data.mul_(1.5))
changed(
    "weights given anew",
    lambda net, made: setattr(net[0], "weight", nn.Parameter(1.5 * net[0].weight.detach())),
)
changed("weight.data given anew", lambda net, made: setattr(net[0].weight, "data", 1.5 * net[0].weight.data))
changed(
    "a state loaded", lambda net, made: net.load_state_dict({k: 1.5 * v for k, v in net.state_dict().items()})
)
changed("a bias taken away", lambda net, made: setattr(net[0], "bias", None))
changed(
    "a weight tied",
    lambda net, made: setattr(net[2], "weight", net[0].weight),
    net=lambda: nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4)),
)
changed(
    "a parametrisation", lambda net, made: parametrize.register_parametrization(net[0], "weight", Doubled())
)
changed("a pruned weight", lambda net, made: prune.l1_unstructured(net[0], "weight", amount=0.4))
changed("a pruned bias", lambda net, made: prune.l1_unstructured(net[0], "bias", amount=1))
changed("inputs changed in place", lambda net, made: _scale(made.inputs))
changed("targets changed in place", lambda net, made: made.targets.copy_((made.targets + 1) % K))
changed(
    "float32", lambda net, made: (net.float(), setattr(made, "inputs", made.inputs.float())), hessian=False
)
changed(
    "a slope changed",
    lambda net, made: setattr(net[1], "negative_slope", 0.9),
    net=lambda: chain(nn.LeakyReLU(0.1)),
)
changed(
    "a flag flipped",
    lambda net, made: setattr(net, "flag", True),
    net=lambda: two(lambda s, x: s.head(s.a(x).tanh() if s.flag else s.a(x).sin()), flag=False),
)
changed(
    "a branch on the mode, to eval",
    lambda net, made: net.eval(),
    net=lambda: two(lambda s, x: s.head(s.a(x).tanh() if s.training else s.a(x).sin())),
)
changed(
    "a submodule to eval",
    lambda net, made: net.b.eval(),
    net=lambda: two(lambda s, x: s.head(s.a(x).tanh() if s.b.training else s.a(x).sin()), b=nn.Identity()),
)
changed(
    "dropout turned on",
    lambda net, made: net.train(),
    net=lambda: chain(nn.Dropout(0.5), nn.Tanh()).eval(),
    answerable=False,
)
changed(
    "dropout's probability raised",
    lambda net, made: setattr(net[1], "p", 0.5),
    net=lambda: chain(nn.Dropout(0.0), nn.Tanh()),
    answerable=False,
)
changed("dropout turned off", lambda net, made: net.eval(), net=lambda: chain(nn.Dropout(0.0), nn.Tanh()))
changed(
    "batch norm to training",
    lambda net, made: net.train(),
    net=lambda: nn.Sequential(linear(4), nn.BatchNorm1d(3), linear(3)).eval(),
    independent=False,
)
changed(
    "a buffer changed",
    lambda net, made: net.shift.add_(1),
    net=lambda: two(lambda s, x: s.head((s.a(x) + s.shift).tanh()), shift=nn.Buffer(torch.zeros(3))),
)
changed(
    "running statistics changed",
    lambda net, made: net[1].running_mean.add_(1),
    net=lambda: nn.Sequential(linear(4), nn.BatchNorm1d(3), nn.Tanh(), linear(3)).eval(),
)


def convolutional() -> nn.Module:
    unflatten, pool = nn.Unflatten(1, (1, 4)), nn.AdaptiveAvgPool1d(1)
    return nn.Sequential(unflatten, nn.Conv1d(1, 3, 2), nn.Tanh(), pool, nn.Flatten(), linear(3))


changed(
    "a stride changed",
    lambda net, made: setattr(net[1], "stride", (2,)),
    net=convolutional,
)
changed(
    "a padding changed",
    lambda net, made: setattr(net[1], "padding", (1,)),
    net=convolutional,
)
changed(
    "a layer of a list swapped",
    lambda net, made: net.layers.__setitem__(0, _fresh(4, 4)),
    net=lambda: Net(
        lambda s, x: s.head(s.layers[0](x).tanh()), layers=nn.ModuleList([linear(4, 4)]), head=linear(4)
    ),
)
changed(
    "an epsilon changed",
    lambda net, made: setattr(net[1], "eps", 0.5),
    net=lambda: nn.Sequential(linear(4), nn.LayerNorm(3), linear(3)),
)


# criteria


class Batchwise(nn.CrossEntropyLoss):
    """Class weights whose mean is over the batch's number, not over Σ c_i."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0]).to(z.dtype)
        return (weight[y] * F.cross_entropy(z, y, reduction="none")).mean()


class Weighted(nn.CrossEntropyLoss):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, weight=torch.tensor([1.0, 2.0, 3.0]).to(z.dtype))


class Contrastive(nn.CrossEntropyLoss):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class Centred(nn.MSELoss):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return ((z - z.mean(0)) ** 2).mean()


def criterion_case(name: str, criterion: Callable[[], Any], **fields: Any) -> None:
    targets = fields.pop("targets", lambda: torch.tensor([0, 1, 2, 2, 1]))

    @sneaky(f"criterion: {name}")
    def _() -> Made:
        net = two(lambda s, x: s.head(torch.tanh(s.a(x)))).double()
        return Made(net, torch.randn(5, 4).double(), targets(), criterion(), **fields)


CLASS_WEIGHT = torch.tensor([1.0, 2.0, 3.0]).double()


def real_targets() -> Tensor:
    return torch.randn(5, K).double()


def probabilities() -> Tensor:
    return torch.rand(5, K).double().softmax(1)


criterion_case("cross-entropy subclass, batch mean", Batchwise)
criterion_case("cross-entropy subclass, weighted", Weighted, weights=lambda y: CLASS_WEIGHT[y])
criterion_case("contrastive", Contrastive, independent=False)
criterion_case("centred over the batch", Centred, targets=real_targets, independent=False)
criterion_case(
    "a lambda with class weights",
    lambda: lambda z, y: F.cross_entropy(z, y, weight=CLASS_WEIGHT),
    weights=lambda y: CLASS_WEIGHT[y],
)
criterion_case(
    "a contrastive lambda",
    lambda: lambda z, y: F.cross_entropy(z @ z.T, torch.arange(len(z))),
    independent=False,
)
criterion_case("sum reduction", lambda: nn.CrossEntropyLoss(reduction="sum"), independent=False)
criterion_case("sum of squares", lambda: nn.MSELoss(reduction="sum"), targets=real_targets, independent=False)
criterion_case("no reduction", lambda: nn.CrossEntropyLoss(reduction="none"), answerable=False)
criterion_case(
    "ignore_index of a label in use",
    lambda: nn.CrossEntropyLoss(ignore_index=1),
    weights=lambda y: (y != 1).double(),
)
criterion_case(
    "class weights and ignore_index",
    lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHT, ignore_index=2),
    weights=lambda y: CLASS_WEIGHT[y] * (y != 2),
)
criterion_case("label smoothing", lambda: nn.CrossEntropyLoss(label_smoothing=0.2))
criterion_case(
    "label smoothing with class weights",
    lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHT, label_smoothing=0.2),
    weights=lambda y: CLASS_WEIGHT[y],
)
criterion_case(
    "probabilities with class weights",
    lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHT),
    targets=probabilities,
)
criterion_case("L1", nn.L1Loss, targets=real_targets)
criterion_case("smooth L1", nn.SmoothL1Loss, targets=real_targets)
criterion_case("Poisson", nn.PoissonNLLLoss, targets=lambda: real_targets().abs())
criterion_case("margins", nn.MultiMarginLoss, differences=True)
criterion_case(
    "Kullback-Leibler by batch mean", lambda: nn.KLDivLoss(reduction="batchmean"), targets=probabilities
)
criterion_case(
    "BCE with pos_weight",
    lambda: nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT),
    targets=lambda: torch.randint(2, (5, K)).double(),
)


def nll_case(name: str, targets: list[int], **fields: Any) -> None:
    weight = fields.pop("weight", None)
    ignore = fields.pop("ignore_index", -100)

    @sneaky(f"criterion: {name}")
    def _() -> Made:
        net = two(lambda s, x: s.head(torch.tanh(s.a(x))).log_softmax(-1)).double()
        criterion = nn.NLLLoss(weight=weight, ignore_index=ignore)
        c = torch.ones(K).double() if weight is None else weight
        return Made(
            net,
            torch.randn(5, 4).double(),
            torch.tensor(targets),
            criterion,
            weights=lambda y: c[y.clamp(min=0)] * (y != ignore),
        )


nll_case("NLLLoss", [0, 1, 2, 2, 1])
nll_case("NLLLoss with the default ignore_index", [0, -100, 2, -100, 1])
nll_case("NLLLoss with ignore_index", [0, 1, 2, 2, 1], ignore_index=2)
nll_case("NLLLoss with class weights", [0, 1, 2, 2, 1], weight=CLASS_WEIGHT)
