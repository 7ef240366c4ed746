"""Activations: derivatives against autograd, also at kinks; lookups; refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from curvlab.activations import (
    FUNCTIONS,
    NAMES,
    Activation,
    Elementwise,
    Hardtanh,
    LeakyReLU,
    Sigmoid,
    activation_of,
    by_name,
    elementwise,
    module_of,
)
from curvlab.exceptions import ProblemError, SpecError

MODULES = [
    nn.Identity(),
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(),
    nn.LeakyReLU(1.7),
    nn.Hardtanh(-0.5, 2.0),
    nn.Sigmoid(),
    nn.Tanh(),
    nn.Softplus(),
    nn.Softplus(beta=2.0, threshold=3.0),
    nn.SiLU(),
    nn.ELU(),
    nn.ELU(alpha=1.6),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SELU(),
    nn.CELU(alpha=0.7),
    nn.Softsign(),
    nn.LogSigmoid(),
    nn.Mish(),
    nn.Hardswish(),
    nn.Tanhshrink(),
    nn.Softshrink(),
    nn.Hardshrink(),
    nn.Threshold(0.1, 2.0),
]
KINKS = [0.0, -0.5, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, -3.0, 6.0]
each_module = pytest.mark.parametrize("module", MODULES, ids=str)


def known(module: nn.Module) -> Activation:
    activation = activation_of(module)
    assert activation is not None
    return activation


def autograd(module: nn.Module, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Value and two derivatives of the module itself, by double backward."""
    leaf = z.clone().requires_grad_()
    value = module(leaf)
    (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
    if not first.requires_grad:
        return value.detach(), first, torch.zeros_like(z)
    (second,) = torch.autograd.grad(first.sum(), leaf, allow_unused=True, materialize_grads=True)
    return value.detach(), first.detach(), second


def assert_matches_autograd(module: nn.Module, z: torch.Tensor) -> None:
    activation = known(module)
    before = z.clone()
    h = activation.value(z)
    held = h.clone()
    first, second = activation.derivatives(z, h)
    value, first_reference, second_reference = autograd(module, before)
    torch.testing.assert_close(h, value, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(first, first_reference, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation.first(z, h), first_reference, rtol=1e-12, atol=1e-14)
    alone = activation.second(z)
    if activation.piecewise_linear:
        assert second is None
        assert alone is None
        assert not second_reference.any()
    else:
        torch.testing.assert_close(second, second_reference, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(alone, second_reference, rtol=1e-11, atol=1e-14)
    assert torch.equal(z, before)
    assert torch.equal(h, held)


@each_module
def test_derivatives_equal_double_backward(module: nn.Module) -> None:
    z = 3 * torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_matches_autograd(module, z)


@each_module
def test_derivatives_at_kinks_are_torchs(module: nn.Module) -> None:
    assert_matches_autograd(module, torch.tensor(KINKS, dtype=torch.float64))


@each_module
@given(entries=st.lists(st.floats(-30, 30), min_size=1, max_size=8))
def test_derivatives_equal_double_backward_anywhere(module: nn.Module, entries: list[float]) -> None:
    assert_matches_autograd(module, torch.tensor(entries, dtype=torch.float64))


@each_module
def test_float32_extremes_stay_finite(module: nn.Module) -> None:
    z = torch.tensor([-1e30, -1e4, -80.0, 80.0, 1e4, 1e30])
    activation = known(module)
    h = activation.value(z)
    first, second = activation.derivatives(z, h)
    assert torch.isfinite(first).all()
    assert second is None or torch.isfinite(second).all()


@each_module
def test_lipschitz_constant_is_the_supremum_of_the_slope(module: nn.Module) -> None:
    # Fine around the maxima of GELU and SiLU; the step elsewhere bounds the gap by its square.
    z = torch.cat([torch.linspace(-30, 30, 60001), torch.linspace(1.3, 2.5, 120001)]).double()
    z = torch.cat([z, torch.tensor(KINKS, dtype=torch.float64)])
    largest = float(autograd(module, z)[1].abs().max())
    lipschitz = known(module).lipschitz
    assert largest <= lipschitz * (1 + 1e-12)
    # Measured constants of modules whose slope jumps (Hardswish) are reached in the limit only.
    assert largest == pytest.approx(lipschitz, rel=1e-6 if isinstance(known(module), Elementwise) else 1e-9)


def test_documented_lipschitz_constants() -> None:
    steepest_one = ("tanh", "relu", "leaky-relu", "softplus", "elu", "identity")
    assert [by_name(name).lipschitz for name in steepest_one] == [1.0] * 6
    assert by_name("sigmoid").lipschitz == 0.25
    assert LeakyReLU(-3.0).lipschitz == 3.0


def test_piecewise_linear_activations_are_named() -> None:
    linear = {name for name in NAMES if by_name(name).piecewise_linear}
    assert linear == {"relu", "leaky-relu", "identity"}


@pytest.mark.parametrize("name", NAMES)
def test_name_module_and_activation_agree(name: str) -> None:
    z = torch.linspace(-3, 3, 11, dtype=torch.float64)
    assert by_name(name).name == name
    assert module_of(name) is not module_of(name)
    torch.testing.assert_close(module_of(name)(z), by_name(name).value(z))


@pytest.mark.parametrize("find", [by_name, module_of])
def test_unknown_name_suggests_the_nearest(find: object) -> None:
    with pytest.raises(SpecError, match=r"`sigmiod`.*leaky-relu.*Did you mean `sigmoid`"):
        find("sigmiod")  # type: ignore[operator]


def test_equal_settings_are_equal_and_hash_alike() -> None:
    assert activation_of(nn.LeakyReLU(0.2)) == LeakyReLU(0.2) != LeakyReLU(0.3)
    assert len({Sigmoid(), by_name("sigmoid"), known(nn.Sigmoid())}) == 1


@pytest.mark.parametrize(
    "module", [nn.ReLU(inplace=True), nn.SELU(inplace=True), nn.SiLU(inplace=True)], ids=str
)
def test_inplace_setting_leaves_the_argument_alone(module: nn.Module) -> None:
    z = torch.tensor([-1.0, 2.0])
    known(module).value(z)
    known(module).derivatives(z, known(module).value(z))
    assert z.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (torch.relu, (), {}),
        (functional.relu, (), {"inplace": False}),
        (torch.sigmoid, (), {}),
        (functional.sigmoid, (), {}),
        (torch.tanh, (), {}),
        (functional.tanh, (), {}),
        (functional.softplus, (), {}),
        (functional.softplus, (2.0, 3.0), {}),
        (functional.softplus, (), {"beta": 2.0}),
        (functional.gelu, (), {}),
        (functional.gelu, (), {"approximate": "tanh"}),
        (functional.silu, (), {"inplace": False}),
        (functional.elu, (0.3,), {}),
        (functional.elu, (), {"alpha": 2.0, "inplace": False}),
        (functional.leaky_relu, (0.3,), {}),
        (functional.leaky_relu, (), {"negative_slope": 0.3, "inplace": False}),
        (functional.hardtanh, (-2.0, 0.5), {}),
        (functional.relu6, (), {}),
        (functional.celu, (), {"alpha": 2.0}),
        (functional.selu, (), {}),
        (functional.softsign, (), {}),
        (functional.logsigmoid, (), {}),
        (functional.mish, (), {}),
    ],
)
def test_functions_map_to_the_activation_of_the_call(function, arguments, named) -> None:  # type: ignore[no-untyped-def]
    z = torch.linspace(-8, 8, 41, dtype=torch.float64)
    activation = FUNCTIONS[function](*arguments, **named)
    torch.testing.assert_close(activation.value(z), function(z, *arguments, **named), rtol=1e-13, atol=0)


@pytest.mark.parametrize("method", ["relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_"])
def test_tensor_methods_map_to_their_activation(method: str) -> None:
    z = torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(FUNCTIONS[method]().value(z), getattr(z.clone(), method)())


def test_frozen_single_slope_prelu_is_a_leaky_relu() -> None:
    module = nn.PReLU(init=0.125).requires_grad_(False)
    assert activation_of(module) == LeakyReLU(0.125)
    assert activation_of(nn.PReLU()) is None
    assert activation_of(nn.PReLU(3).requires_grad_(False)) is None


def test_hardsigmoid_has_the_slope_of_its_formula() -> None:
    # torch's backward multiplies by 1/6 in single precision and has no double backward.
    z = torch.tensor([-4.0, -3.0, -2.9, 0.0, 2.9, 3.0, 4.0], dtype=torch.float64)
    hardsigmoid = known(nn.Hardsigmoid())
    first, second = hardsigmoid.derivatives(z, hardsigmoid.value(z))
    assert first.tolist() == [0.0, 0.0, 1 / 6, 1 / 6, 1 / 6, 0.0, 0.0]
    assert second is None
    leaf = z.clone().requires_grad_()
    (reference,) = torch.autograd.grad(nn.Hardsigmoid()(leaf).sum(), leaf)
    torch.testing.assert_close(first, reference, rtol=1e-7, atol=0)


def test_relu6_is_a_hardtanh() -> None:
    assert activation_of(nn.ReLU6()) == Hardtanh(0.0, 6.0)


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), nn.Dropout(), nn.Softmax(-1), nn.BatchNorm1d(2)], ids=str
)
def test_other_modules_are_not_known(module: nn.Module) -> None:
    assert activation_of(module) is None


class Sine(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sin(3 * z)


class Flipped(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z.flip(-1)


class Centred(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z - z.mean(0, keepdim=True)


class Branching(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z if z.sum() > 0 else -z


class LoudReLU(nn.ReLU):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(z)


def test_any_elementwise_module_gets_its_derivatives() -> None:
    sine, z = elementwise(Sine()), torch.linspace(-4, 4, 33, dtype=torch.float64).reshape(3, 11)
    first, second = sine.derivatives(z, sine.value(z))
    torch.testing.assert_close(first, 3 * torch.cos(3 * z), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(second, -9 * torch.sin(3 * z), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(sine.first(z, z), first)
    assert sine.lipschitz == pytest.approx(3.0, rel=1e-10)
    assert sine.name == "sine"


def test_a_subclass_is_not_taken_for_its_base() -> None:
    assert activation_of(LoudReLU()) is None
    assert elementwise(LoudReLU()).value(torch.tensor([1.0])).item() == 2.0


@pytest.mark.parametrize("module", [nn.Softmax(-1), Flipped(), Centred(), Branching(), nn.RReLU()], ids=str)
def test_modules_that_mix_entries_or_are_random_are_refused(module: nn.Module) -> None:
    with pytest.raises(ProblemError, match="not element-wise"):
        elementwise(module.train())


@pytest.mark.parametrize(
    "module", [nn.GLU(), nn.Flatten(0), nn.LayerNorm(4, elementwise_affine=False)], ids=str
)
def test_modules_that_change_shape_or_fail_are_refused(module: nn.Module) -> None:
    with pytest.raises(ProblemError, match="element-wise"):
        elementwise(module)


@pytest.mark.parametrize("module", [nn.PReLU(), nn.BatchNorm1d(5, affine=False)], ids=str)
def test_modules_with_parameters_or_state_are_refused(module: nn.Module) -> None:
    with pytest.raises(ProblemError, match="parameters or buffers"):
        elementwise(module)


def test_the_probe_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with pytest.raises(ProblemError):
        elementwise(nn.Dropout().train())
    assert torch.equal(torch.rand(1), expected)


def test_activations_work_on_tensors_without_values() -> None:
    z = torch.empty(3, 2, device="meta")
    for module in MODULES:
        first, second = known(module).derivatives(z, known(module).value(z))
        assert first.shape == z.shape
        assert second is None or second.shape == z.shape
