"""Which models are chains, what is found in them, and what is refused with which sentence."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

import curvlab
from curvlab.curvature_layers import PlainLayer
from curvlab.exceptions import ProblemError, StaleError
from curvlab.model import recording


class Custom(nn.Module):
    """A forward of one's own around two Linear layers."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(3, 2), nn.Linear(4, 3)
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(self.before(x))))


class Cube(nn.Module):
    """An element-wise module that curvlab has never heard of."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3 + x


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Branching(nn.Module):
    """Takes one of two ways, by the values that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 1e9 else self.layer(x.relu())


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), *between, nn.Linear(3, 2))


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "one Linear": lambda: nn.Linear(4, 2),
    "one Linear in a Sequential": lambda: nn.Sequential(nn.Linear(4, 2)),
    "plain": lambda: mlp(nn.Tanh()),
    "no activation": lambda: mlp(),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Tanh())), nn.Linear(3, 2)
    ),
    "flatten": lambda: nn.Sequential(nn.Flatten(), *mlp(nn.GELU())),
    "identity and dropout": lambda: nn.Sequential(
        nn.Identity(), *mlp(nn.Dropout(), nn.Tanh(), nn.Identity())
    ),
    "custom module": lambda: mlp(Cube()),
    "missing biases": lambda: nn.Sequential(
        nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False)
    ),
    "functional": lambda: Custom(torch.tanh),
    "method": lambda: Custom(lambda x: x.sigmoid()),
    "settings": lambda: Custom(lambda x: F.leaky_relu(x, 0.3)),
    "keyword settings": lambda: Custom(lambda x: F.elu(x, alpha=0.5)),
    "view": lambda: Custom(F.silu, lambda x: x.view(x.size(0), -1)),
    "reshape": lambda: Custom(F.silu, lambda x: x.reshape(x.shape[0], -1)),
    "reshape to a width": lambda: Custom(F.silu, lambda x: x.reshape(-1, 4)),
    "reshape to this batch": lambda: Custom(torch.tanh, lambda x: x.reshape(5, -1)),
    "functional flatten": lambda: Custom(F.silu, lambda x: torch.flatten(x, 1)),
    "functional dropout": lambda: Custom(lambda x: F.dropout(x.tanh(), 0.5, training=False)),
    "in place": lambda: mlp(nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_is_recognised_and_run_as_the_model_runs_itself(kind: str) -> None:
    model = CHAINS[kind]().double().eval()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 2, (5,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    assert problem.reading.no_chain == ""
    torch.testing.assert_close(problem.recording().logits, model(x), rtol=1e-14, atol=1e-14)
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    gradient = problem.gradient()
    for (name, _), value in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradient[name], value, rtol=1e-11, atol=1e-14)


def test_layers_go_from_input_to_output_whatever_their_order_of_registration() -> None:
    problem = curvlab.Problem(Custom(torch.tanh), "mse", torch.randn(5, 4), torch.randn(5, 2))
    assert list(problem.network.parameters)[::2] == ["last.weight", "first.weight"]
    assert [layer.name for layer in problem.layers] == ["first", "last"]
    assert [layer.name for layer in curvlab.estimate("fisher", problem).layers] == ["first", "last"]


def test_images_are_flattened_as_the_model_does() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(3, 2, 2, 3).double()
    problem = curvlab.Problem(model, "cross-entropy", x, torch.tensor([0, 1, 1]))
    torch.testing.assert_close(problem.recording().logits, model(x))


NO_CHAINS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (lambda: Custom(lambda x: x + x.tanh()), "forward calls `add`"),
    "not element-wise": (lambda: mlp(Softmax()), r"module `1`.*not element-wise"),
    "layer norm": (lambda: mlp(nn.LayerNorm(3)), "`1.weight` belongs to no Linear layer"),
    "two activations": (lambda: mlp(nn.Tanh(), nn.ReLU()), "two activations, `tanh` and `relu`"),
    "activation first": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), "before the first Linear"),
    "activation last": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()), "follows the last Linear"),
    "branching": (Branching, "`relu` comes before the first Linear"),
    "unknown function": (lambda: Custom(torch.erf), "forward calls `erf`"),
    "transposed": (lambda: Custom(torch.tanh, lambda x: x.flip(1)), "forward calls `flip`"),
    "odd reshape": (
        lambda: Custom(torch.tanh, lambda x: x.reshape(5, 2, 2).reshape(5, 4)),
        "no plain flattening",
    ),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(3)), "`1.weight` belongs to no Linear layer"),
}


@pytest.mark.parametrize("kind", NO_CHAINS)
def test_the_recursions_say_why_a_model_is_no_chain_while_the_others_still_work(kind: str) -> None:
    make, reason = NO_CHAINS[kind]
    model = make().double().eval()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 2, (5,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    for name in ("pch[kind=recursive]", "gauss-newton[kind=recursive]"):
        with pytest.raises(ProblemError, match=f"`{re.escape(name)}` follows a recursion.*({reason})"):
            curvlab.estimate(name, problem)
    check_against_torch(model, problem)


def derivatives(values: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """∂values/∂parameters, (values, entries), a pass for each: torch.func errs on LayerNorm's weights."""
    found = []
    for value in values.flatten():
        pieces = torch.autograd.grad(
            value, parameters, retain_graph=True, create_graph=True, allow_unused=True
        )
        zeros = [torch.zeros_like(p) if g is None else g for g, p in zip(pieces, parameters, strict=True)]
        found.append(torch.cat([g.flatten() for g in zeros]))
    return torch.stack(found)


def difference_quotients(gradient: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Tensor:
    """The Hessian by central differences of gradients."""
    step, columns = 1e-5, []
    for entries in (parameter.data.view(-1) for parameter in parameters):  # put back, so no change to count
        for index in range(len(entries)):
            value, found = float(entries[index]), []
            for shift in (step, -step):
                entries[index] = value + shift
                found.append(gradient().detach())
            entries[index] = value
            columns.append((found[0] - found[1]) / (2 * step))
    return torch.stack(columns)


def check_against_torch(model: nn.Module, problem: curvlab.Problem, differences: bool = False) -> None:
    """The gradient, and every block that no Kronecker product approximates, against autograd.

    With `differences` the Hessian is compared with difference quotients.
    """
    hessian, fisher, newton, rows = curvlab.estimate(
        ["hessian[full=true]", "fisher", "gauss-newton[kind=exact]", "gauss-newton"], problem
    )
    batch = next(problem.batches())
    x, y = batch.inputs, batch.targets
    names = list(hessian.blocks)
    assert set(names) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(names) == set(fisher.blocks) == set(newton.blocks) == set(rows.blocks)
    plain = {layer.parameter_name for layer in fisher.layers if isinstance(layer, PlainLayer)}
    parameters = [model.get_parameter(name) for name in names]
    logits = model(x)
    gradient = derivatives(F.cross_entropy(logits, y), parameters)[0]
    found = torch.cat([problem.gradient()[name].flatten() for name in names])
    torch.testing.assert_close(found, gradient.detach(), rtol=1e-10, atol=1e-13)
    dense = hessian.to_dense()
    if differences:

        def again() -> Tensor:
            return derivatives(F.cross_entropy(model(x), y), parameters)[0]

        full = difference_quotients(again, parameters)
        torch.testing.assert_close(dense, full, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(dense, dense.T, rtol=1e-10, atol=1e-12)
    else:
        full = derivatives(gradient, parameters).detach()
        torch.testing.assert_close(dense, full, rtol=1e-10, atol=1e-12)
    sizes = [parameter.numel() for parameter in parameters]
    jacobians = derivatives(logits, parameters).detach().unflatten(0, logits.shape).split(sizes, dim=2)
    p = logits.detach().softmax(1)
    curved = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    errors = p - F.one_hot(y, p.shape[1])
    for name, jacobian in zip(names, jacobians, strict=True):
        expected = torch.einsum("ika,ikl,ilb->ab", jacobian, curved, jacobian) / len(x)
        torch.testing.assert_close(newton.blocks[name].to_dense(), expected, rtol=1e-10, atol=1e-12)
        if name.endswith("bias") or name in plain:
            torch.testing.assert_close(rows.blocks[name].to_dense(), expected, rtol=1e-10, atol=1e-12)
            each = torch.einsum("ik,ika->ia", errors, jacobian)
            expected = each.T @ each / len(x)
            torch.testing.assert_close(fisher.blocks[name].to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_linear_layers_over_a_sequence_have_the_blocks_of_their_positions() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).tanh().mean(1))

    model = Pooled().double()
    x, y = torch.randn(5, 3, 4).double(), torch.randint(0, 2, (5,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    assert curvlab.estimate("hessian", problem).to_dense().shape == (23, 23)
    check_against_torch(model, problem)
    z = model.embed(x).detach().requires_grad_()
    loss = F.cross_entropy(model.head(z.tanh().mean(1)), y, reduction="sum")
    g = torch.autograd.grad(loss, z)[0]
    inputs = torch.einsum("ipa,ipb->ab", x, x) / 15
    outputs = torch.einsum("ipa,ipb->ab", g, g) / 5
    block = curvlab.estimate("fisher", problem).blocks["embed.weight"].to_dense()
    torch.testing.assert_close(block, torch.kron(outputs, inputs), rtol=1e-11, atol=1e-14)
    only_head = curvlab.Problem(model, "cross-entropy", x, y, layers=["head"])
    assert list(curvlab.estimate("fisher", only_head).blocks) == ["head.weight", "head.bias"]


def test_an_embedding_may_take_integers() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 2)).double()
    problem = curvlab.Problem(model, "cross-entropy", torch.randint(0, 7, (5, 2)), torch.randint(0, 2, (5,)))
    assert curvlab.estimate("fisher", problem).psd


# Selection.


def test_a_subset_of_layers_and_frozen_parameters_have_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 2, (5,))
    names = ["pch-1", "fisher", "hessian", "gauss-newton[kind=exact]", "gauss-newton"]
    found = curvlab.estimate(names, curvlab.Problem(model, "cross-entropy", x, y))
    # Dense while the model is as it was: matrix-free blocks read it anew.
    whole = [{name: block.to_dense() for name, block in one.blocks.items()} for one in found]
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    some = curvlab.Problem(model, "cross-entropy", x, y, layers=["0", "4"])
    assert list(some.gradient()) == ["0.bias", "4.weight"]
    for one, other in zip(whole, curvlab.estimate(names, some), strict=True):
        assert list(other.blocks) == ["0.bias", "4.weight"]
        for name, block in other.blocks.items():
            torch.testing.assert_close(block.to_dense(), one[name], rtol=1e-12, atol=1e-14)
    with pytest.raises(StaleError, match=r"0\.weight, 4\.bias changed since `hessian`"):
        found[2].blocks["2.weight"].to_dense()
    lowest = curvlab.Problem(model, "cross-entropy", x, y, layers=["2"])
    assert list(curvlab.estimate("hessian[full=true]", lowest).blocks) == ["2.weight", "2.bias"]
    expected = whole[2]["2.bias"]
    torch.testing.assert_close(curvlab.estimate("hessian", lowest).blocks["2.bias"].to_dense(), expected)


# Models that share, reuse or make their weights, or leave some unused.


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def reused() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


class Twice(nn.Module):
    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 3), shift

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh() + self.shift)


class Overriding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


ANSWERED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "no Linear": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten()),
        {"1": "shared"},
    ),
    "shared": (shared, {"0": "shared", "0.bias": "plain", "2.bias": "plain"}),
    "reused": (reused, {"0": "shared"}),
    "used twice": (Twice, {"layer": "shared"}),
    "used twice in no chain": (lambda: Twice(1.0), {"layer": "shared"}),
    "parametrised": (
        lambda: nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(nn.Linear(3, 3))),
        {
            "0": "linear",
            "1.bias": "plain",
            "1.parametrizations.weight.original0": "plain",
            "1.parametrizations.weight.original1": "plain",
        },
    ),
    "weight norm of old": (
        lambda: nn.Sequential(nn.Linear(3, 3), weight_norm(nn.Linear(3, 3))),
        {"0": "linear", "1.bias": "plain", "1.weight_g": "plain", "1.weight_v": "plain"},
    ),
    "overriding": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Overriding(3, 3)),
        {"0": "linear", "2": "linear"},
    ),
    "unused": (Unused, {"used": "linear", "spare.weight": "plain", "spare.bias": "plain"}),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", ANSWERED)
def test_a_model_that_shares_reuses_or_makes_its_weights_is_answered_as_torch_does(kind: str) -> None:
    make, kinds = ANSWERED[kind]
    model = make().double()
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(5, 3).double(), torch.randint(0, 2, (5,)))
    assert {layer.name: layer.kind for layer in problem.layers} == kinds
    # torch's second derivative of weight_norm is wrong: it is not even symmetric.
    check_against_torch(model, problem, differences=kind in ("parametrised", "weight norm of old"))
    with pytest.raises(ProblemError, match=r"`pch\[kind=recursive\]` follows a recursion"):
        curvlab.estimate("pch[kind=recursive]", problem)


def test_a_parameter_that_takes_no_part_has_blocks_of_zeros() -> None:
    problem = curvlab.Problem(Unused(), "cross-entropy", torch.randn(5, 3), torch.randint(0, 2, (5,)))
    assert (
        problem.reading.no_chain
        == "`spare.weight` takes no part in its forward (leave it out with layers=[…])"
    )
    assert not problem.gradient()["spare.weight"].any()
    for curvature in curvlab.estimate(["fisher", "hessian", "gauss-newton[kind=exact]"], problem):
        assert not curvature.blocks["spare.weight"].to_dense().any()
        assert not curvature.blocks["spare.bias"].to_dense().any()
    some = curvlab.Problem(
        Unused(), "cross-entropy", torch.randn(5, 3), torch.randint(0, 2, (5,)), layers=["used"]
    )
    assert some.chain is not None


# Refusals.


def frozen() -> nn.Module:
    return mlp(nn.Tanh()).requires_grad_(False)


def mixed() -> nn.Module:
    model = mlp(nn.Tanh())
    model[2].double()
    return model


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no module": (lambda: torch.tanh, "model is a builtin.*expected a torch.nn.Module"),
    "all frozen": (frozen, "no parameter to analyse: all of Sequential is frozen"),
    "no parameter": (lambda: nn.Sequential(nn.Tanh()), "no parameter to analyse: .* has none"),
    "dropout": (
        lambda: mlp(nn.Dropout()),
        r"layer `1` \(Dropout\) is in training mode: its output is random",
    ),
    "rrelu": (lambda: mlp(nn.RReLU()), r"layer `1` \(RReLU\) is in training mode"),
    "batch norm": (
        lambda: mlp(nn.BatchNorm1d(3)),
        r"layer `1` \(BatchNorm1d\) uses the statistics of the batch",
    ),
    "batch norm without statistics": (
        lambda: mlp(nn.BatchNorm1d(3, track_running_stats=False)).eval(),
        r"layer `1` \(BatchNorm1d\) uses the statistics of the batch",
    ),
    "functional dropout": (
        lambda: Custom(lambda x: F.dropout(x, 0.5)),
        "forward of Custom draws random numbers.*eval",
    ),
    "random": (
        lambda: Custom(lambda x: x + torch.randn_like(x)),
        "forward of Custom draws random numbers.*take the randomness out",
    ),
    "lazy": (lambda: mlp(nn.Tanh(), nn.LazyLinear(3)), r"\['2.weight', '2.bias'\] are lazy"),
    "mixed dtypes": (mixed, "`2.weight` is torch.float64 on cpu, but `0.weight` torch.float32 on cpu"),
    "widths": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(2, 2)),
        r"the inputs of layer `1` have shape \(5, 3\), but it expects \(examples, 2\)",
    ),
    "another failure": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (2, 2))),
        r"forward of Sequential fails in layer `1` on inputs of shape \(5, 4\): RuntimeError",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_analysed_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ProblemError, match=message):
        curvlab.Problem(make(), "mse", torch.randn(5, 4), torch.randn(5, 2))  # type: ignore[arg-type]


def test_a_forward_that_turns_random_is_refused_in_every_use_and_the_random_state_put_back() -> None:
    noise = [0.0]
    model = Custom(lambda x: x + noise[0] * torch.randn_like(x) if noise[0] else x)
    problem = curvlab.Problem(model, "mse", torch.randn(5, 4), torch.randn(5, 2))
    noise[0] = 1.0
    for name in ("fisher", "hessian"):
        other = problem.with_data(torch.randn(5, 4), torch.randn(5, 2))
        before = torch.get_rng_state()
        with pytest.raises(ProblemError, match="forward of Custom draws random numbers"):
            curvlab.estimate(name, other)
        assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_that_another_thread_draws_are_not_the_models() -> None:
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.randn(3)

    drawing = threading.Thread(target=draw)
    drawing.start()
    try:
        for _ in range(20):
            problem = curvlab.Problem(mlp(nn.Tanh()), "mse", torch.ones(5, 4), torch.ones(5, 2))
            assert problem.chain is not None
    finally:
        stop.set()
        drawing.join()


def test_a_model_put_back_in_training_mode_is_refused_later_too() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(self.layer(x).tanh(), training=self.training))

    model = Dropping().eval()
    problem = curvlab.Problem(model, "mse", torch.randn(5, 4), torch.randn(5, 2))
    assert problem.chain is not None
    model.train()
    with pytest.raises(ProblemError, match=r"forward of Dropping draws random numbers.*eval"):
        problem.gradient()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["1"], r"layers=\['1'\] is frozen or has none"),
        (["0", "7"], r"names \['7'\], which the model does not have.*\['0', '2'\]"),
        ("0", r"layers=\['0'\]"),
        ([], "layers="),
    ],
)
def test_a_wrong_choice_of_layers_is_refused(layers: list[str], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        curvlab.Problem(mlp(nn.Tanh()), "mse", torch.randn(5, 4), torch.randn(5, 2), layers=layers)


# Wrappers.


def check_wrapped(wrapped: nn.Module, model: nn.Module) -> None:
    x, y = torch.randn(5, 4), torch.randn(5, 2)
    problem, expected = (curvlab.Problem(m, "mse", x, y) for m in (wrapped, model))
    assert problem.model is model
    assert problem.chain is not None
    for name in ("pch-1", "fisher", "hessian"):
        a, b = (curvlab.estimate(name, p).to_dense() for p in (problem, expected))
        assert torch.equal(a, b)


def test_compiled_models_work() -> None:
    model = mlp(nn.Tanh())
    check_wrapped(torch.compile(model, backend="eager"), model)


def test_models_compiled_in_place_work() -> None:
    model, x, y = Custom(lambda x: x + x.tanh()), torch.randn(5, 4), torch.randn(5, 2)
    problem = curvlab.Problem(model, "mse", x, y)
    expected = [curvature.to_dense() for curvature in curvlab.estimate(["fisher", "hessian"], problem)]
    model.compile(backend="eager")
    model(x)
    problem = curvlab.Problem(model, "mse", x, y)
    found = [curvature.to_dense() for curvature in curvlab.estimate(["fisher", "hessian"], problem)]
    torch.testing.assert_close(found, expected)


def test_data_parallel_models_work() -> None:
    model = mlp(nn.Tanh())
    check_wrapped(nn.DataParallel(model), model)


def test_distributed_models_work(tmp_path: os.PathLike[str]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        model = mlp(nn.Tanh())
        check_wrapped(nn.parallel.DistributedDataParallel(model), model)
    finally:
        torch.distributed.destroy_process_group()


def test_reading_a_model_in_one_thread_leaves_the_calls_of_others_alone() -> None:
    read, other, x = mlp(nn.Sigmoid()), mlp(nn.Tanh()), torch.randn(5, 4)
    expected, expected_read = other(x).detach(), read(x).detach()
    failures: list[str] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                assert torch.equal(other(x), expected)
                assert torch.equal(read(x), expected_read)
                assert isinstance(read[0].weight, nn.Parameter)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

    def build() -> None:
        for _ in range(60):
            try:
                problem = curvlab.Problem(read, "mse", x, torch.zeros(5, 2))
                assert problem.chain is not None
                assert torch.equal(problem.recording().logits, expected_read)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

    callers = [threading.Thread(target=call) for _ in range(2)]
    builders = [threading.Thread(target=build) for _ in range(2)]
    before = nn.Module.__call__, nn.Module.__getattr__
    for thread in (*callers, *builders):
        thread.start()
    for thread in builders:
        thread.join()
    stop.set()
    for thread in callers:
        thread.join()
    assert failures == []
    assert (nn.Module.__call__, nn.Module.__getattr__) == before


class Changing(nn.Module):
    """A chain whose forward can be told to be something else."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(4, 3), nn.Linear(3, 2), act or nn.Sigmoid()
        self.way, self.forwards = ["plain"], 0  # a list: what is in it is in no setting of the module

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        way = self.way[0]
        if way == "halved":
            x = x * 0.5
        modes = {"no gradients": torch.no_grad, "inference mode": torch.inference_mode}
        with modes.get(way, nullcontext)():
            z = self.first(x.flatten(1))
        if way == "in place":
            z.mul_(2)
        h = torch.tanh(z) if way == "another function" else self.act(z)
        if way == "overwritten":
            z.data = torch.zeros_like(z)
        if way == "skipped":
            h = z
        if way == "another weight":
            return F.linear(h, self.last.weight)
        if way == "twice":
            h = self.act(h)
        return self.last(h) + self.last(h) if way == "two heads" else self.last(h)


def steady(way: str = "plain", act: nn.Module | None = None) -> tuple[Changing, curvlab.Problem]:
    """A network of which a first batch was read."""
    torch.manual_seed(0)
    model = Changing(act).double()
    problem = curvlab.Problem(
        model, "cross-entropy", torch.randn(5, 4).double(), torch.tensor([0, 1, 1, 0, 1])
    )
    assert problem.network.known_forward
    model.way[0] = way
    return model, problem.with_data(torch.randn(6, 4).double(), torch.tensor([0, 1, 1, 0, 1, 0]))


def autograd_of(model: nn.Module, problem: curvlab.Problem) -> dict[str, Tensor]:
    (batch,) = problem.batches()
    loss = F.cross_entropy(model(batch.inputs), batch.targets)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = zip(model.named_parameters(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def test_a_later_batch_of_a_chain_is_one_forward_that_is_compared_call_by_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, problem = steady()
    monkeypatch.setattr(recording, "run_forward", lambda *_, **__: pytest.fail("it was read anew"))
    before = model.forwards
    gradient = problem.gradient()
    assert model.forwards == before + 1
    for name, expected in autograd_of(model, problem).items():
        torch.testing.assert_close(gradient[name], expected, rtol=1e-12, atol=1e-15)


CHANGES = (
    "halved,in place,no gradients,inference mode,another function,overwritten,skipped,another weight,twice,"
    "two heads"
)


@pytest.mark.parametrize("way", CHANGES.split(","))
def test_a_later_batch_that_is_another_chain_or_none_is_read_anew(way: str) -> None:
    model, problem = steady(way)
    try:
        gradient, loss = problem.gradient(), problem.loss()
    except ProblemError:
        return
    for name, expected in autograd_of(model, problem).items():
        torch.testing.assert_close(gradient[name], expected, rtol=1e-12, atol=1e-15)
    (batch,) = problem.batches()
    torch.testing.assert_close(loss, F.cross_entropy(model(batch.inputs), batch.targets))


def test_a_changed_setting_and_hooks_of_a_known_chain_are_seen() -> None:
    model, problem = steady(act=nn.LeakyReLU(0.1))
    model.act.negative_slope = 0.5
    gradient = problem.gradient()
    for name, expected in autograd_of(model, problem).items():
        torch.testing.assert_close(gradient[name], expected, rtol=1e-12, atol=1e-15)
    for add in (
        lambda model: model.act.register_forward_hook(lambda module, given, output: 2 * output),
        lambda model: model.first.weight.register_hook(lambda sent: 2 * sent),
    ):
        model, problem = steady()
        add(model)
        try:
            gradient = problem.gradient()
        except ProblemError:
            continue
        for name, expected in autograd_of(model, problem).items():
            torch.testing.assert_close(gradient[name], expected, rtol=1e-12, atol=1e-15)
