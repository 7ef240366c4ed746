"""A layer's Hessian is the Gauss-Newton matrix of the network augmented with its nodes' inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian
from torch.nn import functional as F

import curvlab
from curvlab.exceptions import ProblemError
from curvlab.measure.memory import peak_bytes
from curvlab.model import nodes
from curvlab.model.nodes import ElementwiseNode, NodeRows, NonlinearNode, NormNode
from curvlab.model.recording import GraphRecording
from tests.node_networks import CASES, LOSSES, layer_hessian


def record(case: str, loss: str = "cross-entropy", examples: int = 1) -> tuple[GraphRecording, nn.Module]:
    model, inputs, targets = CASES[case].make(examples)
    recording = curvlab.Problem(model, loss, inputs, targets).recording()
    assert isinstance(recording, GraphRecording)
    return recording, model


def jacobians(recording: GraphRecording, node: NonlinearNode | None) -> dict[str, Tensor]:
    """∂u/∂z (or ∂logits/∂z) for each layer, of a single example, one backward pass for each row."""
    size = recording.logits.numel() if node is None else node.inputs.numel()
    rows: dict[str, list[Tensor]] = {}
    for unit in torch.eye(size).double():
        logits = unit.reshape(recording.logits.shape) if node is None else torch.zeros_like(recording.logits)
        start = {} if node is None else {node: unit.reshape(node.inputs.shape)}
        heard = {layer.name: None for layer in recording.layout if layer.roles}

        def hear(layer, seen, gradient, heard=heard):  # type: ignore[no-untyped-def]
            heard[layer.name] = gradient.flatten().clone()

        recording.backward(logits, hear, start)
        for name, row in heard.items():
            rows.setdefault(name, []).append(row)
    return {name: torch.stack(found) for name, found in rows.items() if found[0] is not None}


def local_hessian(node: NonlinearNode, gradient: Tensor) -> Tensor:
    """M of one example on u.flatten(), no mean taken."""
    if isinstance(node, ElementwiseNode):
        return torch.diag(node.own_terms(gradient).flatten())
    assert isinstance(node, NormNode)
    positions, groups, units = node.rows.counts
    scale = torch.ones_like(gradient) if node.scale is None else node.scale.expand_as(gradient)
    u, g = (node.rows.of(t).reshape(positions * groups, units) for t in (node.inputs, gradient * scale))
    blocks = [
        NormNode("row", NodeRows((1, units), 1, units=units), row[None], node.centred, node.eps, None)
        .mean_curvature(along[None], torch.ones(1).double())[0]
        for row, along in zip(u, g, strict=True)
    ]  # fmt: skip
    return torch.block_diag(*blocks)


def gradients_at_nodes(recording: GraphRecording) -> dict[NonlinearNode, Tensor]:
    heard: dict[NonlinearNode, Tensor] = {}
    for node in recording.forward.nodes:
        node.receive = lambda gradient, node=node: heard.update({node: gradient.clone()})  # type: ignore[misc]
    recording.backward(recording.terms.gradient_cotangent(), lambda *_: None)
    for node in recording.forward.nodes:
        node.receive = None
    return heard


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_the_hessian_at_every_layer_output_is_the_sum_over_logits_and_nodes(case: str, loss: str) -> None:
    recording, model = record(case, loss)
    heard = gradients_at_nodes(recording)
    curved = recording.criterion.hessians(recording.logits, recording.targets)[0]
    parts: dict[str, Tensor] = {n: j.T @ curved @ j for n, j in jacobians(recording, None).items()}
    newton = {name: value.clone() for name, value in parts.items()}
    for node, gradient in heard.items():
        local = local_hessian(node, gradient)
        for name, jacobian in jacobians(recording, node).items():
            parts[name] = parts[name] + jacobian.T @ local @ jacobian
    assert set(parts) == {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    worst = 0.0
    for name, found in parts.items():
        expected = layer_hessian(model, name, recording.inputs_given, recording.targets_given, loss)
        scale = float(expected.abs().max())
        assert float((found - expected).abs().max()) <= 1e-12 * max(scale, 1e-3), name
        worst = max(worst, float((newton[name] - expected).abs().max()) / max(scale, 1e-12))
    assert worst > 1e-2, "the nodes' terms must matter, or nothing was tested"


@pytest.mark.parametrize("case", CASES)
def test_nodes_are_found_by_their_calls_and_the_rest_is_named(case: str) -> None:
    recording, _ = record(case, examples=2)
    assert sorted(node.name for node in recording.forward.nodes) == sorted(CASES[case].nodes)
    assert recording.left_out == CASES[case].left_out


ELEMENTWISE = [torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus, F.elu, F.mish, torch.exp, torch.square]


@pytest.mark.parametrize("function", ELEMENTWISE, ids=lambda f: f.__name__)
def test_mean_curvature_is_the_mean_over_examples_and_positions(function) -> None:  # type: ignore[no-untyped-def]
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(function(self.conv(x)).mean(2))

    torch.manual_seed(1)
    model, x, y = Net().double(), torch.randn(4, 2, 5).double(), torch.tensor([0, 1, 1, 0])
    weight = torch.tensor([0.5, 2.0]).double()
    problem = curvlab.Problem(model, nn.CrossEntropyLoss(weight=weight), x, y)
    (found,) = problem.recording().node_curvatures()
    share = weight[y] / weight[y].sum()
    expected = torch.zeros(3).double()
    for i in range(4):
        u = model.conv(x[i : i + 1]).detach()

        def entry(z: Tensor, c: int, p: int, u: Tensor = u) -> Tensor:
            return function(u.index_put((torch.tensor(0), torch.tensor(c), torch.tensor(p)), z))[0, c, p]

        h = function(u.clone()).requires_grad_()
        (along,) = torch.autograd.grad(F.cross_entropy(model.head(h.mean(2)), y[i : i + 1]), h)
        for c in range(3):
            for p in range(4):
                second = hessian(lambda z, c=c, p=p, entry=entry: entry(z, c, p))(u[0, c, p])
                expected[c] += share[i] * second * along[0, c, p] / 4
    torch.testing.assert_close(found, expected[None], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("exponent", [3, torch.rand(64, 8).double() + 2], ids=["number", "of u's shape"])
def test_a_large_node_is_differentiated_in_pieces_with_the_same_numbers(
    exponent: float | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    u = (torch.rand(64, 8).double() + 1).requires_grad_()
    node = nodes.NodeFinder(64).before(torch.pow, (u, exponent), {}, [u])
    assert isinstance(node, ElementwiseNode)
    gradient = torch.randn(64, 8).double()
    monkeypatch.setattr(nodes, "PIECE", 100)  # 12 of the 64 rows at a time
    expected = exponent * (exponent - 1) * u.detach() ** (exponent - 2) * gradient
    torch.testing.assert_close(node.own_terms(gradient), expected, rtol=1e-13, atol=0)


SETTINGS = {
    "softplus": (F.softplus, (2.0, 3.0), {}),
    "gelu": (F.gelu, (), {"approximate": "tanh"}),
    "elu": (F.elu, (1.6,), {}),
    "silu": (F.silu, (), {"inplace": True}),
    "tanh": (torch.tanh_, (), {}),
    "sigmoid": (Tensor.sigmoid, (), {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_known_function_s_closed_form_has_the_settings_of_its_call(name: str) -> None:
    function, args, kwargs = SETTINGS[name]
    u = (3 * torch.randn(8, 5).double()).requires_grad_()
    node = nodes.NodeFinder(8).before(function, (u, *args), kwargs, [u])
    assert isinstance(node, ElementwiseNode)
    assert node.activation is not None
    gradient = torch.randn(8, 5).double()
    expected = node._twice_differentiated(u.detach()) * gradient
    torch.testing.assert_close(node.own_terms(gradient), expected, rtol=1e-11, atol=1e-13)


def test_a_function_without_a_closed_form_is_differentiated() -> None:
    u = torch.randn(8, 5).double().requires_grad_()
    node = nodes.NodeFinder(8).before(F.softsign, (u,), {}, [u])
    assert isinstance(node, ElementwiseNode)
    assert node.activation is None


def test_the_terms_of_a_node_take_little_more_memory_than_the_node() -> None:
    u, gradient = torch.randn(2, 16, 128, 1024).unbind()
    node = ElementwiseNode("silu", NodeRows(tuple(u.shape), 16), u, F.silu)
    assert peak_bytes(lambda: node.own_terms(gradient), device="cpu") < 2.5 * u.nbytes


NORMS = {
    "layer": (lambda x, w: F.layer_norm(x, (6,), w, eps=0.1), True, (6,)),
    "rms": (lambda x, w: F.rms_norm(x, (6,), w, eps=0.1), False, (6,)),
    "group": (lambda x, w: F.group_norm(x, 1, w, eps=0.1), True, (2, 3)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_the_closed_form_of_a_normalisation_is_its_hessian(kind: str) -> None:
    function, centred, shape = NORMS[kind]
    torch.manual_seed(0)
    u, g = torch.randn(1, *shape).double(), torch.randn(1, *shape).double()
    weight = torch.randn(shape[0]).double()
    node = NormNode(
        kind, NodeRows(u.shape, 1, units=6), u, centred, 0.1, weight.reshape(-1, *[1] * (len(shape) - 1))
    )
    found = node.mean_curvature(g, torch.ones(1).double())[0]
    expected = hessian(lambda x: (function(x, weight) * g).sum())(u).reshape(6, 6)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_what_an_activation_was_given_may_not_be_overwritten() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            u = self.first(x)
            h = torch.tanh(u)
            u.mul_(2)
            return self.head(h + u)

    problem = curvlab.Problem(Overwriting(), "cross-entropy", torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ProblemError, match="overwrites in place what `tanh` was given"):
        curvlab.estimate("pch-1", problem)
