"""Which models are chains, what is found in them, and what is refused with which sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

import curvlab
from curvlab.exceptions import ProblemError
from curvlab.model.graph import Network


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
    """Cannot be traced: its forward looks at values."""

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
    "functional flatten": lambda: Custom(F.silu, lambda x: torch.flatten(x, 1)),
    "functional dropout": lambda: Custom(lambda x: F.dropout(x.tanh(), 0.5, training=False)),
    "in place": lambda: mlp(nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_is_recognised_and_run_as_the_model_runs_itself(kind: str) -> None:
    model = CHAINS[kind]().double().eval()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 2, (5,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    assert problem.network.why_no_chain == ""
    torch.testing.assert_close(problem.recording().logits, model(x), rtol=1e-14, atol=1e-14)
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    gradient = problem.gradient()
    for (name, _), value in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradient[name], value, rtol=1e-11, atol=1e-14)


def test_layers_go_from_input_to_output_whatever_their_order_of_registration() -> None:
    network = Network.of(Custom(torch.tanh))
    assert [layer.name for layer in network.layers] == ["last", "first"]
    assert [layer.name for layer in network.selected] == ["first", "last"]


def test_images_are_flattened_as_the_model_does() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randn(3, 2, 2, 3).double()
    problem = curvlab.Problem(model, "cross-entropy", x, torch.tensor([0, 1, 1]))
    torch.testing.assert_close(problem.recording().logits, model(x))


NO_CHAINS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (lambda: Custom(lambda x: x + x.tanh()), "forward calls `add`|does not take the output"),
    "not element-wise": (lambda: mlp(Softmax()), r"module `1`.*not element-wise"),
    "layer norm": (lambda: mlp(nn.LayerNorm(3)), r"module `1`.*parameters"),
    "two activations": (lambda: mlp(nn.Tanh(), nn.ReLU()), "two activations, `tanh` and `relu`"),
    "activation first": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), "before the first Linear"),
    "activation last": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()), "follows the last Linear"),
    "untraceable": (Branching, "cannot be traced"),
    "unknown function": (lambda: Custom(torch.erf), "forward calls `erf`"),
    "transposed": (lambda: Custom(torch.tanh, lambda x: x.flip(1)), "forward calls `flip`"),
    "odd reshape": (lambda: Custom(torch.tanh, lambda x: x.reshape(5, -1)), "no plain flattening"),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(3)), r"module `1`.*parameters"),
}


@pytest.mark.parametrize("kind", NO_CHAINS)
def test_the_recursions_say_why_a_model_is_no_chain_while_the_others_still_work(kind: str) -> None:
    make, reason = NO_CHAINS[kind]
    model = make().double().eval()
    x, y = torch.randn(5, 4).double(), torch.randint(0, 2, (5,))
    problem = curvlab.Problem(model, "cross-entropy", x, y)
    for name in ("pch-1", "gauss-newton"):
        with pytest.raises(ProblemError, match=f"`{name}` follows a recursion.*({reason})"):
            curvlab.estimate(name, problem)
    hessian, fisher, newton = curvlab.estimate(
        ["hessian[full=true]", "fisher", "gauss-newton[kind=exact]"], problem
    )
    check_against_torch(model, x, y, hessian, fisher, newton)


def check_against_torch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    hessian: curvlab.Curvature,
    fisher: curvlab.Curvature,
    newton: curvlab.Curvature,
) -> None:
    names = list(hessian.blocks)
    parameters = {name: model.get_parameter(name).detach() for name in names}

    def logits(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (x,))

    nested = torch.func.hessian(lambda p: F.cross_entropy(logits(p), y))(parameters)
    size = {name: p.numel() for name, p in parameters.items()}
    full = torch.cat([torch.cat([nested[a][b].reshape(size[a], size[b]) for b in names], 1) for a in names])
    torch.testing.assert_close(hessian.to_dense(), full, rtol=1e-10, atol=1e-12)
    jacobians = torch.func.jacrev(logits)(parameters)
    p = logits(parameters).softmax(1)
    curved = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    errors = p - F.one_hot(y, p.shape[1])
    for name in names:
        jacobian = jacobians[name].flatten(2)
        expected = torch.einsum("ika,ikl,ilb->ab", jacobian, curved, jacobian) / len(x)
        torch.testing.assert_close(newton.blocks[name].to_dense(), expected, rtol=1e-10, atol=1e-12)
        if name.endswith("bias"):
            gradients = torch.einsum("ik,ika->ia", errors, jacobian)
            expected = gradients.T @ gradients / len(x)
            torch.testing.assert_close(fisher.blocks[name].to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_linear_layers_over_a_sequence_have_a_hessian_and_refuse_the_rest() -> None:
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
    with pytest.raises(ProblemError, match=r"layer `embed` saw inputs of shape \(5, 3, 4\).*only `hessian`"):
        curvlab.estimate("fisher", problem)
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
    whole = curvlab.estimate(names, curvlab.Problem(model, "cross-entropy", x, y))
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    some = curvlab.Problem(model, "cross-entropy", x, y, layers=["0", "4"])
    assert list(some.gradient()) == ["0.bias", "4.weight"]
    for one, other in zip(whole, curvlab.estimate(names, some), strict=True):
        assert list(other.blocks) == ["0.bias", "4.weight"]
        for name, block in other.blocks.items():
            torch.testing.assert_close(block.to_dense(), one.blocks[name].to_dense(), rtol=1e-12, atol=1e-14)
    lowest = curvlab.Problem(model, "cross-entropy", x, y, layers=["2"])
    assert list(curvlab.estimate("hessian[full=true]", lowest).blocks) == ["2.weight", "2.bias"]
    expected = whole[2].blocks["2.bias"].to_dense()
    torch.testing.assert_close(curvlab.estimate("hessian", lowest).blocks["2.bias"].to_dense(), expected)


# Refusals.


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def reused() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


class Twice(nn.Module):
    def __init__(self, traceable: bool) -> None:
        super().__init__()
        self.layer, self.traceable = nn.Linear(3, 3), traceable

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        return self.layer(h if self.traceable else h + 1)


def frozen() -> nn.Module:
    return mlp(nn.Tanh()).requires_grad_(False)


def mixed() -> nn.Module:
    model = mlp(nn.Tanh())
    model[2].double()
    return model


class Overriding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no module": (lambda: torch.tanh, "model is a builtin.*expected a torch.nn.Module"),
    "no Linear": (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), "no torch.nn.Linear layer"),
    "shared": (shared, "layers `0` and `2` share a parameter"),
    "reused": (reused, "layers `0` and `2` share a parameter"),
    "used twice": (lambda: Twice(True), "layer `layer` is used twice"),
    "all frozen": (frozen, "are frozen"),
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
    "functional dropout": (lambda: Custom(lambda x: F.dropout(x, 0.5)), "calls `dropout` with training=True"),
    "parametrised": (lambda: mlp(parametrizations.weight_norm(nn.Linear(3, 3))), "layer `1` is parametrised"),
    "weight norm of old": (lambda: mlp(weight_norm(nn.Linear(3, 3))), "layer `1` is parametrised"),
    "overriding": (lambda: mlp(Overriding(3, 3)), r"layer `1` \(Overriding\) has a forward of its own"),
    "lazy": (lambda: mlp(nn.Tanh(), nn.LazyLinear(3)), "layer `2`.*is lazy"),
    "mixed dtypes": (mixed, "layer `2` is torch.float64 on cpu, but layer `0` torch.float32"),
    "widths": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(2, 2)),
        "layer `1` expects 2 features.*`0` gives 3",
    ),
    "unused": (Unused, r"layer `spare` takes no part.*\['used'\]"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_analysed_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ProblemError, match=message):
        curvlab.Problem(make(), "mse", torch.randn(5, 4), torch.randn(5, 2))  # type: ignore[arg-type]


def test_a_layer_reused_in_a_forward_that_is_no_chain_is_refused() -> None:
    problem = curvlab.Problem(Twice(False), "mse", torch.randn(5, 3), torch.randn(5, 3))
    with pytest.raises(ProblemError, match="layer `layer` is used twice"):
        curvlab.estimate("fisher", problem)


def test_a_random_forward_that_no_module_shows_is_refused() -> None:
    model = Custom(lambda x: x + torch.randn_like(x))
    problem = curvlab.Problem(model, "mse", torch.randn(5, 4), torch.randn(5, 2))
    for name in ("fisher", "hessian"):
        with pytest.raises(ProblemError, match="forward of Custom draws random numbers"):
            curvlab.estimate(name, problem)


def test_a_model_put_back_in_training_mode_is_refused_later_too() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.dropout(self.layer(x).tanh(), training=self.training))

    model = Dropping().eval()
    problem = curvlab.Problem(model, "mse", torch.randn(5, 4), torch.randn(5, 2))
    assert problem.network.chain is not None
    model.train()
    with pytest.raises(ProblemError, match=r"functional dropout.*training mode"):
        problem.gradient()


@pytest.mark.parametrize(
    ("layers", "message"),
    [(["1"], r"names \['1'\].*no Linear layers.*\['0', '2'\]"), ("0", r"layers=\['0'\]"), ([], "layers=")],
)
def test_a_wrong_choice_of_layers_is_refused(layers: list[str], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        curvlab.Problem(mlp(nn.Tanh()), "mse", torch.randn(5, 4), torch.randn(5, 2), layers=layers)


# Wrappers.


def check_wrapped(wrapped: nn.Module, model: nn.Module) -> None:
    x, y = torch.randn(5, 4), torch.randn(5, 2)
    problem, expected = (curvlab.Problem(m, "mse", x, y) for m in (wrapped, model))
    assert problem.model is model
    assert problem.network.chain is not None
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
    expected, expected_read = other(x), read(x)
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
            assert Network.of(read).chain is not None

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
