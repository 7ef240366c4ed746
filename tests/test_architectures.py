"""Architectures: names, widths, seeds and the random state that they leave alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from curvlab.architectures import FCNN, INITIALISERS, Autoencoder, architecture, architectures
from curvlab.exceptions import SpecError

HIDDEN = (1024, 512, 256, 128, 64, 32, 16)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("cifar10-fcnn", (3072, *HIDDEN, 10)),
        ("imagenet10-fcnn", (150528, *HIDDEN, 10)),
        ("digits-fcnn", (64, 32, 16, 10)),
        ("autoencoder", (64, 32, 16, 8, 16, 32, 64)),
    ],
)
def test_named_networks_have_the_widths_of_the_paper_and_sigmoid(name, widths):
    model = architecture(name).build(device="meta")
    linears = [module for module in model if isinstance(module, nn.Linear)]
    assert (linears[0].in_features, *(linear.out_features for linear in linears)) == widths
    assert all(isinstance(module, nn.Sigmoid) for module in model[1::2])
    assert len(model) == 2 * len(widths) - 3


def test_parameters_are_named_by_their_place_and_the_last_layer_has_no_activation():
    model = architecture("fcnn[widths=5-4-3,activation=tanh]").build()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert isinstance(model[1], nn.Tanh)
    assert isinstance(model[-1], nn.Linear)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_bias_can_be_left_out():
    model = architecture("fcnn[widths=5-4-3,bias=false]").build()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "2.weight"]


def test_bare_widths_are_an_fcnn():
    assert architecture("64-32-16-10") == FCNN(widths=(64, 32, 16, 10))
    assert architecture(" 3-2 ") == FCNN(widths=(3, 2))


def test_an_instance_passes_through():
    net = FCNN(widths=(3, 2))
    assert architecture(net) is net


def test_uniform_xavier_fills_its_interval_with_the_right_variance_and_biases_are_zero():
    layer = architecture("fcnn[widths=300-500]").build(seed=1, dtype=torch.float64)[0]
    bound = math.sqrt(6 / 800)
    assert bound * 0.999 < layer.weight.abs().max() <= bound
    assert layer.weight.var().item() == pytest.approx(2 / 800, rel=0.02)
    assert layer.bias.count_nonzero() == 0


def test_normal_xavier_has_the_right_variance_and_tails():
    layer = architecture("fcnn[widths=300-500,init=xavier-normal]").build(seed=1, dtype=torch.float64)[0]
    assert layer.weight.var().item() == pytest.approx(2 / 800, rel=0.02)
    assert layer.weight.abs().max() > 3 * math.sqrt(2 / 800)


def test_a_seed_means_one_network_in_every_dtype():
    net = architecture("6-5-4")
    first, same, other = net.build(seed=3), net.build(seed=3), net.build(seed=4)
    double = net.build(seed=3, dtype=torch.float64)
    assert torch.equal(first[0].weight, same[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert double[2].weight.dtype == double[2].bias.dtype == torch.float64
    assert torch.equal(double[2].weight.float(), first[2].weight)
    assert not torch.equal(first[0].weight.flatten()[:20], first[2].weight.flatten())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_building_leaves_the_global_random_state_alone(device):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = architecture("6-5-4").build(seed=3, device=device)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.device.type == device for parameter in model.parameters())


def test_the_largest_network_is_planned_without_drawing_its_weights(monkeypatch):
    def drawn(*_, **__):
        raise AssertionError("weights were drawn")

    monkeypatch.setitem(INITIALISERS, "xavier-uniform", drawn)
    assert architecture("imagenet10-fcnn").build(device="meta")[0].weight.shape == (1024, 150528)
    with FakeTensorMode():
        model = architecture("imagenet10-fcnn").build()
        assert model(torch.empty(7, 150528)).shape == (7, 10)


def test_the_network_computes_what_its_formula_says():
    model = architecture("4-3-2").build(seed=0, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = 1 / (1 + torch.exp(-(x @ model[0].weight.T)))
    torch.testing.assert_close(model(x), hidden @ model[2].weight.T, rtol=0, atol=1e-14)


def test_inputs_and_outputs_fit_the_ends_to_the_data():
    model = architecture("digits-fcnn").build(inputs=20, outputs=3)
    assert (model[0].in_features, model[-1].out_features) == (20, 3)
    mirror = architecture("autoencoder").build(inputs=20)
    assert (mirror[0].in_features, mirror[-1].out_features) == (20, 20)
    with pytest.raises(SpecError, match="20 inputs and 3 outputs"):
        architecture("autoencoder").build(inputs=20, outputs=3)
    with pytest.raises(SpecError, match="positive integers; given `0-32-16-10`"):
        architecture("digits-fcnn").build(inputs=0)


def test_only_an_autoencoder_reconstructs_and_its_widths_are_symmetric():
    assert architecture("autoencoder").reconstructs
    assert not architecture("fcnn").reconstructs
    with pytest.raises(SpecError, match="write widths=9-4-2-4-9"):
        Autoencoder(widths=(9, 4, 2))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fcnn[widths=64]", "at least two widths"),
        ("64", "at least two widths"),
        ("64-0-10", "positive integers; given `64-0-10`"),
        ("64--10", "joined by dashes"),
        ("-64-10", "joined by dashes"),
        ("fcnn[widths=64-x]", "widths"),
        ("fcnn[activation=sigmoit]", "sigmoid"),
        ("fcnn[init=zero]", "xavier-uniform"),
        ("cifar-fcnn", "cifar10-fcnn"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_was_expected(spec, message):
    with pytest.raises(SpecError, match=message):
        architecture(spec)


def test_wrong_values_from_python_are_refused_too():
    with pytest.raises(SpecError, match="positive integers"):
        FCNN(widths=(4, 2.5))
    with pytest.raises(SpecError, match="init is `he`"):
        FCNN(init="he")


def test_every_name_has_a_canonical_text_that_reads_back():
    for name in architectures.names():
        assert architecture(architectures.canonical(name)) == architecture(name)
