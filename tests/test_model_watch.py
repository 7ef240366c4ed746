"""What is seen of a forward: each use of each parameter, the chain where there is one, the loss terms."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvlab.criteria import MSE, CrossEntropy
from curvlab.criteria.base import AllWeightsZeroError, LossTerms
from curvlab.exceptions import ProblemError
from curvlab.model.chain import ChainReader, ReadChain
from curvlab.model.network import ModelCall, example_count, slice_examples
from curvlab.model.watch import Watch

B = 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.scale * self.first(x).relu_() - self.shift)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.layer(x).tanh())
        return self.head(h + F.linear(h, self.layer.weight.t()) + h @ self.layer.weight)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=2)
        self.token = nn.Parameter(torch.rand(1, 1, 6))
        self.block = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1)
        return self.head(self.block(h)[:, 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Folded(nn.Module):
    """As HF's Conv1D: a product of rows that are folded into the batch, with the weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6, 5)), nn.Parameter(torch.rand(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        folded = torch.addmm(self.bias, x.reshape(-1, 6), self.weight)
        return self.head(folded.view(*x.shape[:-1], 5).tanh().mean(1))


def images(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (6,)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Flatten(), nn.Linear(10, 3)),
        (2, 6),
    ),
    "residual, scale and shift": (Residual, (6,)),
    "tied, transposed and functional": (Tied, (6,)),
    "convolutions": (
        lambda: images(
            nn.Conv2d(2, 4, 3, padding=1, stride=2, bias=False),
            nn.SiLU(),
            nn.Conv2d(4, 4, (3, 1), padding="same", dilation=(2, 1), groups=2),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4, 2, 2, stride=2, groups=2),
        ),
        (2, 6, 6),
    ),
    "circular padding": (lambda: images(nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular")), (2, 5)),
    "normalisations": (
        lambda: images(
            nn.Conv2d(2, 4, 1),
            nn.GroupNorm(2, 4),
            nn.BatchNorm2d(4),
            nn.InstanceNorm2d(4, affine=True),
            nn.LayerNorm((4, 3, 3)),
            nn.Flatten(),
            nn.RMSNorm(36),
        ),
        (2, 3, 3),
    ),
    "recurrent": (Recurrent, (3, 6)),
    "folded rows": (Folded, (3, 6)),
}


def make(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "tokens and attention":
        return Tokens().double().eval(), torch.randint(0, 11, (B, 5))
    build, shape = MODELS[kind]
    model, x = build().double().eval(), torch.randn(B, *shape, dtype=torch.float64)
    model(x)  # gives lazy layers their sizes
    return model, x


@pytest.mark.parametrize("kind", [*MODELS, "tokens and attention"])
def test_the_uses_of_every_parameter_add_up_to_the_gradient_of_every_example(kind: str) -> None:
    model, x = make(kind)
    parameters = dict(model.named_parameters())
    with Watch(parameters, B) as watch:
        logits = model(x)
    cotangent = torch.randn_like(logits)
    found: dict[str, Tensor] = {}
    by_listener = defaultdict(list)
    for seen in watch.uses:
        by_listener[seen.listener].append(seen)
    for listener, uses in by_listener.items():

        def receive(gradient: Tensor, uses: list = uses) -> None:
            for seen in uses:
                name, rows = seen.view.name, seen.view.rows
                shape = parameters[name].shape
                part = shape if rows is None else (rows[1] - rows[0], *shape[1:])
                assert seen.use is not None
                mine = seen.use.example_gradients(gradient, tuple(part))
                whole = mine.new_zeros(B, *shape)
                whole[:, slice(*(rows or (None,)))] = mine
                found[name] = found.get(name, 0) + whole

        listener.receive = receive
    torch.autograd.grad(logits, watch.token, cotangent, retain_graph=True)
    for index in range(B):
        one = torch.zeros_like(cotangent)
        one[index] = cotangent[index]
        expected = torch.autograd.grad(model(x), list(parameters.values()), one)
        for name, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][index], value, rtol=1e-11, atol=1e-12, msg=name)


def test_a_part_without_gradients_and_a_detached_weight_are_no_uses() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.first(x)
            return self.last(h) + F.linear(x, self.last.weight.detach())

    model = Hidden()
    with Watch(dict(model.named_parameters()), B) as watch:
        model(torch.randn(B, 6))
    assert [seen.view.name for seen in watch.uses] == ["last.weight", "last.bias"]


# Chains.


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3 + x


def read(model: nn.Module, x: Tensor) -> tuple[ReadChain | None, str]:
    weights = {id(m.weight): m.bias for m in model.modules() if isinstance(m, nn.Linear)}
    reader = ChainReader(x, weights, model)
    with reader.watching_modules(), Watch(dict(model.named_parameters()), len(x), reader):
        logits = model(x)
    return reader.result(logits), reader.why_not


@pytest.mark.parametrize(
    "between", [nn.Sigmoid(), nn.ReLU(inplace=True), Cube(), nn.Softsign(), nn.Dropout(), nn.PReLU()]
)
def test_a_chain_is_read_with_what_its_layers_saw(between: nn.Module) -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), between.requires_grad_(False), nn.Linear(5, 3)
    ).eval()
    x = torch.randn(B, 2, 3)
    chain, _ = read(model, x)
    assert chain is not None
    z = F.linear(x.flatten(1), model[1].weight, model[1].bias)
    torch.testing.assert_close(chain.layers[0].preactivation, z)
    torch.testing.assert_close(chain.activations[0].value(z), chain.layers[1].inputs)
    torch.testing.assert_close(chain.layers[1].preactivation, model(x))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda x: x + x.tanh(), "calls `tanh`|calls `add`"),
        (lambda x: x.softmax(1), "calls `softmax`"),
        (lambda x: x.tanh().relu(), "two activations"),
        (lambda x: x.tanh().detach(), "calls `detach`"),
        (lambda x: x.mul_(2), "calls `mul_`"),
    ],
)
def test_what_is_no_chain_is_told_with_the_reason(between: Callable[[Tensor], Tensor], reason: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(between(self.first(x)))

    chain, why = read(Model(), torch.randn(B, 6))
    assert chain is None
    assert re.search(reason, why), why


# Loss terms.


@pytest.mark.parametrize("classes_first", [False, True])
def test_terms_give_torchs_loss_and_gradient_with_weights_and_ignored_tokens(classes_first: bool) -> None:
    torch.manual_seed(0)
    weight = torch.rand(5, dtype=torch.float64)
    logits = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 5, (3, 4))
    targets[0, 1] = targets[1] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight)
    (gradient,) = torch.autograd.grad(expected, logits)
    given = logits.movedim(-1, 1) if classes_first else logits
    terms = LossTerms.of(CrossEntropy(weight=weight), given, targets)
    torch.testing.assert_close(terms.loss, expected.detach())
    mine = terms.gradient_cotangent() * terms.share.reshape(-1, 1, 1)
    torch.testing.assert_close(mine.movedim(1, -1) if classes_first else mine, gradient)
    assert terms.share[1] == 0


def test_where_both_layouts_fit_a_torch_loss_is_refused_and_a_name_means_classes_last() -> None:
    logits, targets = torch.zeros(2, 3, 3), torch.zeros(2, 3).long()
    assert not LossTerms.of(CrossEntropy(), logits, targets).classes_first
    with pytest.raises(ProblemError, match=r"criterion=\"cross-entropy\".*transpose"):
        LossTerms.of(CrossEntropy(), logits, targets, torch_layout=True)


def test_numbers_are_one_term_of_several_outputs() -> None:
    terms = LossTerms.of(MSE(), torch.ones(3, 4), torch.zeros(3, 4))
    assert (terms.per_example, terms.outputs) == (1, 4)
    assert terms.loss == 1


def test_a_batch_of_which_nothing_counts_has_no_mean() -> None:
    terms = LossTerms.of(CrossEntropy(), torch.zeros(2, 3), torch.tensor([-100, -100]))
    with pytest.raises(AllWeightsZeroError, match="every example has weight 0"):
        _ = terms.loss


# Calling a model.


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(3, 2), what

    def forward(self, x: Tensor, mask: Tensor | None = None) -> object:
        return self.what(self.layer(x if mask is None else x * mask))


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits, self.other = logits, logits + 1


@pytest.mark.parametrize(
    ("what", "output", "shift"),
    [
        (lambda z: z, None, 0),
        (lambda z: Output(z), None, 0),
        (lambda z: {"logits": z}, None, 0),
        (lambda z: ("text", z, z + 1), None, 0),
        (lambda z: Output(z), "other", 1),
        (lambda z: (z, z + 1), 1, 1),
        (lambda z: [[z]], lambda r: r[0][0], 0),
    ],
)
def test_logits_are_found_in_what_a_model_returns(what: Callable, output: object, shift: int) -> None:
    model, x = Returns(what), torch.randn(4, 3)
    expected = model.layer(x) + shift
    for inputs in (x, (x,), {"x": x, "mask": torch.ones(4, 3)}):
        assert example_count(inputs) == 4
        torch.testing.assert_close(ModelCall(model, output)(inputs), expected)  # type: ignore[arg-type]
        half = ModelCall(model, output)(slice_examples(inputs, 1, 3))  # type: ignore[arg-type]
        torch.testing.assert_close(half, expected[1:3])


def test_what_is_no_logits_is_refused_with_what_it_is() -> None:
    with pytest.raises(ProblemError, match=r"returned str.*output="):
        ModelCall(Returns(lambda z: "text"))(torch.randn(4, 3))
    with pytest.raises(ProblemError, match=r"no such field; it has \['logits', 'other'\]"):
        ModelCall(Returns(Output), "missing")(torch.randn(4, 3))
    with pytest.raises(ProblemError, match="draws random numbers"):
        ModelCall(Returns(lambda z: z + torch.rand(4, 2)))(torch.randn(4, 3))
    with pytest.raises(ProblemError, match="examples in the first dimension"):
        example_count((torch.ones(3), torch.ones(4)))
