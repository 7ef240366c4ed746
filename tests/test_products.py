"""Products with the Hessian and Gauss-Newton matrix of any model equal dense references, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian as dense_hessian
from torch.autograd.functional import jacobian as dense_jacobian
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from curvlab.criteria import MSE, Criterion, CrossEntropy, FunctionCriterion, Robust
from curvlab.criteria.base import AllWeightsZeroError
from curvlab.exceptions import ArgumentError, ProblemError, StaleError
from curvlab.model.double_backward import TwiceDifferentiable
from curvlab.model.network import ModelCall
from curvlab.model.products import ModelProducts
from tests.product_cases import (
    CLASSES,
    EXAMPLES,
    MODELS,
    Apply,
    Case,
    checkpointed,
    head,
    mlp,
    tokens,
    vectors,
)

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _float64() -> Any:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(previous)


def labels() -> Tensor:
    return torch.arange(EXAMPLES) % CLASSES


def robust_loss(logits: Tensor, targets: Tensor) -> Tensor:
    probability = logits.softmax(-1)[torch.arange(len(logits)), targets]
    return (1 / (1 + (5 * (probability - 0.2)).exp())).mean()


@dataclass
class Loss:
    """A criterion, targets for it, and torch's own mean loss."""

    criterion: Criterion
    targets: Callable[[], Tensor]
    mean: Callable[[Tensor, Tensor], Tensor]


LOSSES = {
    "cross-entropy": Loss(CrossEntropy(), labels, F.cross_entropy),
    "mse": Loss(MSE(), lambda: torch.randn(EXAMPLES, CLASSES), F.mse_loss),
    "robust": Loss(Robust(), labels, robust_loss),
}


# --------------------------------------------------------------------------------------------- reference


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Reference:
    """Dense matrices of `mean(model(inputs), targets)` over the flat vector of the trainable parameters."""

    def __init__(self, case: Case, targets: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
        # functional_call leaves tensors in the place of parameters where a module is used twice
        case = Case(deepcopy(case.model), case.inputs, case.twin)
        self.case, self.targets, self.mean = case, targets, mean
        parameters = trainable(case.model)
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self.flat = torch.cat([p.detach().flatten() for p in parameters.values()])

    def slices(self) -> dict[str, slice]:
        ends = torch.tensor([shape.numel() for shape in self.shapes.values()]).cumsum(0).tolist()
        return {n: slice(end - self.shapes[n].numel(), end) for n, end in zip(self.shapes, ends, strict=True)}

    def logits(self, flat: Tensor) -> Tensor:
        parts = {n: flat[at].view(self.shapes[n]) for n, at in self.slices().items()}
        if self.case.twin is not None:
            return self.case.twin(parts, self.case.inputs)
        inputs = self.case.inputs
        named = inputs if isinstance(inputs, dict) else {}
        given = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
        returned = functional_call(self.case.model, parts, given, named)
        return getattr(returned, "logits", returned)

    def hessian(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return dense_hessian(lambda flat: self.mean(self.logits(flat), self.targets), self.flat)

    def gauss_newton(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = dense_jacobian(self.logits, self.flat).flatten(0, -2)
        logits = self.logits(self.flat).detach()
        outputs = dense_hessian(lambda z: self.mean(z, self.targets), logits)
        return jacobian.T @ outputs.reshape(len(jacobian), -1) @ jacobian


def check_products(
    case: Case, targets: Tensor, criterion: Criterion, mean: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Full products, products over two parameters and every dense block, of both matrices."""
    reference = Reference(case, targets, mean)
    parameters = trainable(case.model)
    products = ModelProducts(ModelCall(case.model), criterion, parameters)
    batch = products.prepare(case.inputs, targets)
    matrices = {"hessian": reference.hessian(), "gauss_newton": reference.gauss_newton()}
    for kind, matrix in matrices.items():
        given = {name: torch.randn_like(p) for name, p in parameters.items()}
        for names in (list(given), sorted({*list(given)[:1], *list(given)[-1:]})):
            rows = torch.cat([torch.arange(len(matrix))[reference.slices()[name]] for name in names])
            expected = matrix[rows][:, rows] @ torch.cat([given[name].flatten() for name in names])
            chosen = {name: given[name] for name in names}
            for found in (
                getattr(products, kind)(case.inputs, targets, chosen),
                getattr(batch, kind)(chosen),
            ):
                assert list(found) == names
                assert [v.shape for v in found.values()] == [parameters[name].shape for name in names]
                flat = torch.cat([value.flatten() for value in found.values()]) / batch.total_weight
                torch.testing.assert_close(flat, expected, rtol=TOLERANCE, atol=TOLERANCE)
        for name, at in reference.slices().items():
            block = getattr(batch, f"{kind}_block")(name) / batch.total_weight
            torch.testing.assert_close(block, matrix[at, at], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_products_and_blocks_equal_dense_matrices(model: str, loss: str) -> None:
    case = MODELS[model]()
    case.model.eval()
    chosen = LOSSES[loss]
    check_products(case, chosen.targets(), chosen.criterion, chosen.mean)


@pytest.mark.parametrize("model", MODELS)
def test_hessian_products_equal_differences_of_the_gradient(model: str) -> None:
    """Of the model as it is, with the gradients that torch's own kernels give."""
    case = MODELS[model]()
    case.model.eval()
    targets, parameters = labels(), trainable(case.model)
    along = {name: torch.randn_like(p) for name, p in parameters.items()}
    if model == "embedding":
        along["layer.weight"][1] = 0  # the row of `padding_idx`, which autograd takes for a constant

    def gradient(step: float) -> Tensor:
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(along[name], alpha=step)
        loss = F.cross_entropy(ModelCall(case.model)(case.inputs), targets)
        given = torch.autograd.grad(
            loss, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(along[name], alpha=step)
        return torch.cat([g.to_dense().flatten() for g in given])

    products = ModelProducts(ModelCall(case.model), CrossEntropy(), parameters)
    found = products.hessian(case.inputs, targets, along)
    step = 1e-4
    near, far = (gradient(h) - gradient(-h) for h in (step, 2 * step))
    expected = (8 * near - far) / (12 * step)
    flat = torch.cat([value.flatten() for value in found.values()]) / EXAMPLES
    torch.testing.assert_close(flat, expected, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------- convolutions

CONVOLUTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": (F.conv1d, (3, 2, 7), (4, 2, 3), {"stride": 2, "padding": 1}),
    "1d, same": (F.conv1d, (3, 2, 7), (4, 2, 3), {"padding": "same", "dilation": 2}),
    "1d, same, even": (F.conv1d, (3, 2, 7), (4, 2, 2), {"padding": "same"}),
    "2d, groups": (F.conv2d, (3, 4, 5, 6), (6, 2, 3, 2), {"groups": 2, "stride": (1, 2), "dilation": [2, 1]}),
    "2d, depthwise": (F.conv2d, (3, 4, 5, 6), (4, 1, 3, 3), {"groups": 4, "padding": (1, 0)}),
    "2d, one image": (F.conv2d, (4, 5, 6), (3, 4, 2, 2), {"padding": "valid"}),
    "3d": (F.conv3d, (2, 2, 4, 3, 4), (3, 2, 2, 2, 2), {"stride": (2, 1, 1)}),
    "1d transposed": (F.conv_transpose1d, (3, 2, 5), (2, 3, 3), {"stride": 2, "output_padding": 1}),
    "2d transposed": (F.conv_transpose2d, (3, 4, 3, 3), (4, 2, 2, 3), {"groups": 2, "padding": (1, 0)}),
    "3d transposed": (F.conv_transpose3d, (2, 2, 2, 3, 2), (2, 2, 2, 2, 2), {"dilation": (1, 2, 1)}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_second_derivatives_of_a_convolution_are_torchs_own(kind: str, bias: bool) -> None:
    function, shape, kernel, settings = CONVOLUTIONS[kind]
    outputs = kernel[1] * settings.get("groups", 1) if "transposed" in kind else kernel[0]
    given = [torch.randn(shape), torch.randn(kernel), torch.randn(outputs) if bias else None]
    tensors = [x.requires_grad_() for x in given if x is not None]

    def derivatives() -> tuple[Tensor, ...]:
        value = function(*given, **settings)
        generator = torch.Generator().manual_seed(1)
        gradients = torch.autograd.grad(value.square().sum(), tensors, create_graph=True)
        along = [torch.randn(g.shape, generator=generator) for g in gradients]
        return (value, *gradients, *torch.autograd.grad(gradients, tensors, along))

    expected = derivatives()
    with TwiceDifferentiable():
        found = derivatives()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_product_differentiates_a_convolution_only_where_it_goes_on() -> None:
    """A Gauss-Newton product takes Jv from the derivative at the cotangent: nothing at images and weights."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2), nn.Flatten(), head(6))
    products = ModelProducts(ModelCall(model), CrossEntropy(), trainable(model))
    batch = products.prepare(vectors(2, 5), labels())
    along = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    counts = {}
    for kind in ("gauss_newton", "hessian"):
        with OperationCount("aten::convolution_backward") as operations:
            getattr(batch, kind)(along)
        counts[kind] = operations.count
    assert counts == {"gauss_newton": 2, "hessian": 2 + 2}  # of two layers; images have no derivative


class OperationCount(TorchDispatchMode):
    """How often an operation of this name runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().split(".")[0] == self.name
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------- loss layouts


def weighted_cross_entropy(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, targets: F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


WEIGHT = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
LABELS = torch.tensor([[0, 1], [2, -100], [-100, -100], [1, 1]])
LAYOUTS: dict[str, tuple[bool, Tensor, Criterion, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes last": (False, LABELS, CrossEntropy(), weighted_cross_entropy()),
    "class weights": (False, LABELS, CrossEntropy(WEIGHT), weighted_cross_entropy(weight=WEIGHT)),
    "another ignored label": (
        False,
        LABELS.clamp(min=0),
        CrossEntropy(WEIGHT, ignore_index=0, label_smoothing=0.2),
        weighted_cross_entropy(weight=WEIGHT, ignore_index=0, label_smoothing=0.2),
    ),
    "classes first": (
        True,
        LABELS,
        CrossEntropy(WEIGHT, label_smoothing=0.1),
        lambda z, y: F.cross_entropy(z, y, weight=WEIGHT, label_smoothing=0.1),
    ),
    "probabilities": (
        False,
        torch.rand(EXAMPLES, 2, CLASSES, dtype=torch.float64),
        CrossEntropy(),
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(0, 1)),
    ),
    "numbers": (False, torch.ones(EXAMPLES, 2, CLASSES, dtype=torch.float64), MSE(), F.mse_loss),
    "robust": (
        False,
        LABELS.clamp(min=0),
        Robust(),
        lambda z, y: robust_loss(z.flatten(0, 1), y.flatten()),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_loss_terms_of_an_example_are_weighted_as_torch_does(layout: str) -> None:
    classes_first, targets, criterion, mean = LAYOUTS[layout]

    def forward(self: Any, x: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.layer(x)))
        return logits.transpose(1, 2) if classes_first else logits

    case = Case(Apply(forward, layer=nn.Linear(3, 2), head=head(2)), vectors(2, 3))
    check_products(case, targets, criterion, mean)


def test_a_function_of_the_user_is_a_criterion() -> None:
    def one(logits: Tensor, target: Tensor) -> Tensor:
        return (logits - target).pow(4).sum() + logits.prod()

    def mean(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([one(z, y) for z, y in zip(logits, targets, strict=True)]).mean()

    check_products(Case(mlp(nn.Tanh()), vectors(3)), vectors(CLASSES), FunctionCriterion(one), mean)


def test_a_torch_loss_that_fits_two_layouts_is_refused() -> None:
    layer = nn.Linear(3, CLASSES)
    products = ModelProducts(ModelCall(layer), CrossEntropy(), trainable(layer), torch_layout=True)
    with pytest.raises(ProblemError, match="dimension 1"):
        products.prepare(vectors(CLASSES, 3), torch.zeros(EXAMPLES, CLASSES).long())


def test_a_batch_of_which_nothing_counts_has_no_products() -> None:
    model = mlp(nn.Tanh())
    products = ModelProducts(ModelCall(model), CrossEntropy(), trainable(model))
    with pytest.raises(AllWeightsZeroError):
        products.prepare(vectors(3), torch.full((EXAMPLES,), -100))


# -------------------------------------------------------------------------------------------- behaviour


def example(model: nn.Module | None = None, **options: Any) -> tuple[ModelProducts, Tensor, Tensor]:
    model = mlp(nn.SiLU()) if model is None else model
    return ModelProducts(ModelCall(model), CrossEntropy(), trainable(model), **options), vectors(3), labels()


def random_vectors(products: ModelProducts) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in products.parameters.items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_batches_add_up_and_l2_adds_its_multiple_of_the_identity_to_the_mean() -> None:
    products, inputs, targets = example()
    shifted = ModelProducts(products.call, products.criterion, products.parameters, l2=0.3)
    v = random_vectors(products)
    for kind in ("hessian", "gauss_newton"):
        whole = getattr(products, kind)(inputs, targets, v)
        parts = [shifted.prepare(inputs[at], targets[at]) for at in (slice(0, 1), slice(1, None))]
        total = torch.stack([part.total_weight for part in parts]).sum()
        values = [getattr(part, kind)(v) for part in parts]
        mean = {name: (values[0][name] + values[1][name]) / total for name in v}
        assert_same(mean, {name: whole[name] / total + 0.3 * v[name] for name in v})
        block = getattr(parts[1], f"{kind}_block")("2.bias")
        plain = getattr(products.prepare(inputs[1:], targets[1:]), f"{kind}_block")("2.bias")
        torch.testing.assert_close(block, plain + 0.3 * (EXAMPLES - 1) * torch.eye(CLASSES))


@pytest.mark.parametrize("where", ["no_grad", "inference_mode", "autocast"])
def test_products_are_the_same_wherever_the_caller_stands(where: str) -> None:
    torch.set_default_dtype(torch.float32)
    products, inputs, targets = example()
    v = random_vectors(products)
    expected = {kind: getattr(products, kind)(inputs, targets, v) for kind in ("hessian", "gauss_newton")}
    block = products.prepare(inputs, targets).hessian_block("0.bias")
    contexts = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    with contexts[where]:
        given = {name: value.clone() for name, value in v.items()}
        batch = products.prepare(inputs.clone(), targets.clone())
        for kind, values in expected.items():
            for found in (
                getattr(products, kind)(inputs.clone(), targets, given),
                getattr(batch, kind)(given),
            ):
                for name in v:
                    assert not found[name].requires_grad
                    assert not found[name].is_inference()
                    torch.testing.assert_close(found[name], values[name])
        torch.testing.assert_close(batch.hessian_block("0.bias"), block)


def test_products_leave_no_trace_on_the_model() -> None:
    model = mlp(nn.SiLU(), nn.Tanh())
    model[1].register_forward_hook(lambda *_: None)
    heard: list[Tensor] = []
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        p.register_hook(lambda gradient: heard.append(gradient) or 2 * gradient)  # type: ignore[func-returns-value]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator, hooks = torch.get_rng_state(), [dict(p._backward_hooks or {}) for p in model.parameters()]
    products, inputs, targets = example(model)
    unhooked = deepcopy(model)
    for p in unhooked.parameters():
        p._backward_hooks = None
    v = {name: torch.ones_like(p) for name, p in products.parameters.items()}
    generator = torch.get_rng_state()
    for kind in ("hessian", "gauss_newton"):
        found = getattr(products, kind)(inputs, targets, v)
        assert_same(found, getattr(example(unhooked)[0], kind)(inputs, targets, v))
    torch.set_rng_state(generator)
    products.prepare(inputs, targets).hessian_block("2.bias")
    with pytest.raises(ProblemError):
        products.prepare(inputs, targets[:2])
    assert heard == []
    assert torch.equal(generator, torch.get_rng_state())
    assert hooks == [dict(p._backward_hooks or {}) for p in model.parameters()]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    F.cross_entropy(model(inputs), targets).backward()
    assert len(heard) == len(list(model.parameters()))


def test_what_a_product_gives_is_the_callers() -> None:
    products, inputs, targets = example(l2=0.1)
    batch, v = products.prepare(inputs, targets), random_vectors(products)
    first = batch.hessian(v)
    kept = {name: value.clone() for name, value in first.items()}
    for value in first.values():
        value.zero_()
    assert_same(batch.hessian(v), kept)


def test_a_prepared_batch_whose_parameters_changed_says_so() -> None:
    products, inputs, targets = example()
    batch = products.prepare(inputs, targets)
    with torch.no_grad():
        products.parameters["0.weight"].add_(0.1)
    with pytest.raises(StaleError, match=r"`0\.weight` has changed"):
        batch.hessian(random_vectors(products))
    with pytest.raises(StaleError, match="Prepare the batch again"):
        batch.gauss_newton_block("2.bias")


def test_a_block_falls_back_to_single_products_where_torch_cannot_batch() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return CubeSlope.apply(gradients[0], x)

    class CubeSlope(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
            ctx.save_for_backward(gradient, x)
            return 3 * gradient * x**2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            gradient, x = ctx.saved_tensors
            if float(gradients[0].sum()) == torch.inf:  # reads a value, as vmap refuses
                raise AssertionError
            return gradients[0] * 3 * x**2, gradients[0] * 6 * gradient * x

    layer, last = nn.Linear(3, 2), head(2)
    case = Case(Apply(lambda s, x: s.head(Cube.apply(s.layer(x))), layer=layer, head=last), vectors(3))

    def twin(parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        hidden = F.linear(x, parameters["layer.weight"], parameters["layer.bias"]) ** 3
        return F.linear(hidden, parameters["head.weight"], parameters["head.bias"])

    case.twin = twin
    check_products(case, labels(), CrossEntropy(), F.cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_model_runs_as_written(wrapped: bool) -> None:
    model = mlp(nn.SiLU(), nn.Tanh())
    products, inputs, targets = example(model)
    v = random_vectors(products)
    expected = products.hessian(inputs, targets, v)
    if wrapped:
        compiled: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        model.compile(backend="aot_eager")
        compiled = model
    products = ModelProducts(ModelCall(compiled), CrossEntropy(), trainable(compiled))
    named = dict(zip(products.parameters, v.values(), strict=True))
    found = products.hessian(inputs, targets, named)
    assert_same(dict(zip(v, found.values(), strict=True)), expected)


# --------------------------------------------------------------------------------------------- refusals


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.values = x.detach().numpy()
        return x**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.from_numpy(2 * gradients[0].detach().numpy() * ctx.values)


class Stop(torch.autograd.Function):
    """The identity, with no gradient: it leaves no graph, and rightly so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.zeros_like(gradients[0]).detach()


def fused_distances(x: Tensor) -> Tensor:
    """A function of torch without a second derivative that is not written out."""
    return torch.ops.aten._cdist_forward(x, torch.eye(3) + x.detach().mean(), 2.0, None)


def function_after_layer(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Apply(lambda self, x: self.head(function(self.layer(x))), layer=nn.Linear(3, 3), head=head(3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "once differentiable": (lambda: function_after_layer(Once.apply), "`Once`"),
    "numpy": (lambda: function_after_layer(ThroughNumpy.apply), "`ThroughNumpy`"),
    "fused": (lambda: function_after_layer(fused_distances), "`_cdist_backward` of torch"),
    "reentrant checkpoint": (lambda: checkpointed(use_reentrant=True), "use_reentrant=False"),
    "reentrant checkpoint of the input": (
        lambda: Apply(
            lambda self, x: self.head(checkpoint(self.layer, x, use_reentrant=True)),
            layer=nn.Linear(3, 3),
            head=head(3),
        ),
        "use_reentrant=False",
    ),
    "no_grad": (lambda: Apply(torch.no_grad()(lambda self, x: self.head(x)), head=head(3)), "no_grad"),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(), head(3)), "random numbers"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_differentiated_twice_is_refused_by_name(model: str, kind: str) -> None:
    make, words = REFUSED[model]
    products, inputs, targets = example(make())
    with pytest.raises(ProblemError, match=words):
        getattr(products, kind)(inputs, targets, random_vectors(products))


def test_scaled_gradients_of_an_embedding_are_refused() -> None:
    for layer in (
        nn.Embedding(5, 3, scale_grad_by_freq=True),
        nn.EmbeddingBag(5, 3, scale_grad_by_freq=True),
    ):
        model = Apply(
            lambda self, x: self.head(self.layer(x).reshape(EXAMPLES, -1)[:, :3]), layer=layer, head=head(3)
        )
        products, _, targets = example(model)
        with pytest.raises(ProblemError, match="scale_grad_by_freq=False"):
            products.prepare(tokens(2), targets)


def test_a_function_that_stops_gradients_is_no_broken_one() -> None:
    products, inputs, targets = example(function_after_layer(Stop.apply))
    found = products.hessian(inputs, targets, random_vectors(products))
    assert not found["layer.weight"].any()
    assert found["head.weight"].any()


def test_parameters_and_vectors_that_do_not_fit_are_refused() -> None:
    products, inputs, targets = example()
    layer = nn.Linear(3, CLASSES).requires_grad_(False)
    with pytest.raises(ProblemError, match="`weight` is frozen"):
        ModelProducts(ModelCall(layer), CrossEntropy(), dict(layer.named_parameters()))
    with torch.inference_mode():
        layer = nn.Linear(3, CLASSES)
    with pytest.raises(ProblemError, match="inference mode"):
        ModelProducts(ModelCall(layer), CrossEntropy(), dict(layer.named_parameters()))
    with pytest.raises(ArgumentError, match=r"`1\.weight`; expected names among \['0\.weight'"):
        products.hessian(inputs, targets, {"1.weight": torch.zeros(1)})
    with pytest.raises(ArgumentError, match="no parameter"):
        products.hessian(inputs, targets, {})
    with pytest.raises(ArgumentError, match=r"has shape \(2,\); expected the parameter's, \(3,\)"):
        products.gauss_newton(inputs, targets, {"0.bias": torch.zeros(2)})
    with pytest.raises(ArgumentError, match="`0`;"):
        products.prepare(inputs, targets, ["0.bias"]).hessian_block("0")
