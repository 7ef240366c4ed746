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


# Networks for images and tokens

TRANSFORMER_BLOCK = 2 * 128 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
MIXER_BLOCK = 2 * 128 + (64 * 32 + 32) + (32 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)
RESNET8 = (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) * 9 + 16 * 32 + 32 * 64 + 650
RESNET8_CHANNELS = 3 * 16 + 3 * 32 + 3 * 64
COUNTS = {
    "lenet[image=1-32-32,padding=valid]": 61_706,
    "cnn": (3 * 16 + 16 * 32 + 32 * 64) * 9 + 16 + 32 + 64 + 64 * 10 + 10,
    "resnet8": RESNET8 + RESNET8_CHANNELS,
    "resnet8[norm=batch]": RESNET8 + 2 * RESNET8_CHANNELS,
    "resnet18": 11_173_962,
    "vit-tiny": (48 * 64 + 64) + 64 + 65 * 64 + 4 * TRANSFORMER_BLOCK + 128 + 650,
    "mlp-mixer": (48 * 64 + 64) + 4 * MIXER_BLOCK + 128 + 650,
    "gpt-nano[context=32,vocabulary=28]": 28 * 64 + 32 * 64 + 4 * TRANSFORMER_BLOCK + 128 + 28 * 64,
    "gpt-nano[context=32,vocabulary=28,tied=true]": 28 * 64 + 32 * 64 + 4 * TRANSFORMER_BLOCK + 128,
}
NETWORKS = ["lenet", "cnn", "resnet8", "vit-tiny", "mlp-mixer", "gpt-nano"]
NORMS = [
    *(f"{name}[norm={norm}]" for name in ("lenet", "cnn", "resnet8") for norm in ("none", "group", "layer")),
    *(f"{name}[norm=batch]" for name in ("lenet", "cnn", "resnet8")),
    *(f"{name}[norm={norm}]" for name in ("vit-tiny", "mlp-mixer", "gpt-nano") for norm in ("none", "layer")),
    *(f"{name}[norm=rms]" for name in ("vit-tiny", "mlp-mixer", "gpt-nano")),
]


def _inputs(net, examples=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    if net.input_kind == "tokens":
        return torch.randint(net.sizes.outputs, (examples, *net.sizes.inputs), generator=generator)
    return torch.randn(examples, *net.sizes.inputs, dtype=dtype, generator=generator)


@pytest.mark.parametrize("spec", COUNTS)
def test_a_network_has_its_number_of_parameters(spec):
    model = architecture(spec).build(device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[spec]


@pytest.mark.parametrize("spec", [*NORMS, "resnet18[norm=none]", "gpt-nano[tied=true]"])
def test_logits_at_the_start_are_finite_and_of_order_one(spec):
    net = architecture(spec)
    logits = net.build(seed=0).eval()(_inputs(net))
    expected = (8, 32, 28) if net.input_kind == "tokens" else (8, 10)
    assert logits.shape == expected
    assert torch.isfinite(logits).all()
    assert 0.05 < logits.std() < 5


@pytest.mark.parametrize("spec", NORMS)
def test_an_example_is_treated_by_itself_and_every_parameter_matters(spec):
    net = architecture(spec)
    model = net.build(seed=1, dtype=torch.float64).eval()
    inputs = _inputs(net, 3, torch.float64)
    logits = model(inputs)
    alone = torch.cat([model(one[None]) for one in inputs])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-12)
    logits.square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.count_nonzero()]
    assert without == []


@pytest.mark.parametrize(
    ("spec", "kind"),
    [("resnet8[norm=group]", nn.GroupNorm), ("cnn[norm=layer]", nn.LayerNorm), ("lenet", nn.Identity)],
)
def test_the_norm_is_the_one_asked_for_and_convolutions_have_a_bias_only_without(spec, kind):
    model = architecture(spec).build(device="meta")
    assert any(type(module) is kind for module in model.modules())
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert {module.bias is not None for module in convolutions} == {kind is nn.Identity}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_seed_means_one_network_of_every_kind_and_draws_nothing_else(name):
    net = architecture(name)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, same, other = net.build(seed=3), net.build(seed=3), net.build(seed=4)
    double = net.build(seed=3, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[key])
        assert torch.equal(value, double.state_dict()[key].float())
    assert not torch.equal(first.head.weight, other.head.weight)
    assert all(parameter.requires_grad for parameter in first.parameters())


def test_a_norm_leaves_the_drawn_weights_as_they_are():
    plain, grouped = (architecture(f"resnet8[norm={norm}]").build(seed=2) for norm in ("none", "group"))
    assert torch.equal(plain.head.weight, grouped.head.weight)
    assert torch.equal(plain.stage3[0].conv2.weight, grouped.stage3[0].conv2.weight)


@pytest.mark.parametrize("name", [*NETWORKS, "resnet18", "imagenet10-fcnn"])
def test_networks_are_planned_without_drawing_or_allocating(name, monkeypatch):
    net = architecture(name)

    def drawn(tensor, *_, **__):
        assert tensor.is_meta, "weights were drawn"
        return tensor

    monkeypatch.setattr(torch.Tensor, "normal_", drawn)
    monkeypatch.setitem(INITIALISERS, "xavier-uniform", drawn)
    model = net.build(device="meta", dtype=torch.float64)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}
    with FakeTensorMode():
        logits = net.build().eval()(_inputs(net, 7))
        assert logits.shape == (
            7,
            *(net.sizes.inputs if net.input_kind == "tokens" else ()),
            net.sizes.outputs,
        )


def test_layers_have_readable_names():
    names = [name for name, _ in architecture("resnet8").build(device="meta").named_parameters()]
    assert names[:4] == ["conv1.weight", "conv1.bias", "stage1.0.conv1.weight", "stage1.0.conv1.bias"]
    assert {"stage2.0.shortcut.conv.weight", "head.weight"} <= set(names)
    names = dict(architecture("gpt-nano").build(device="meta").named_parameters())
    assert {"token.weight", "position", "blocks.0.attention.qkv.weight", "blocks.3.mlp.fc2.bias"} <= set(
        names
    )


def test_a_residual_block_computes_its_formula():
    model = architecture("resnet8[activation=tanh]").build(seed=0, dtype=torch.float64)
    block, h = model.stage2[0], torch.randn(2, 16, 8, 8, dtype=torch.float64)
    conv = torch.nn.functional.conv2d
    inner = torch.tanh(conv(h, block.conv1.weight, stride=2, padding=1))
    outer = conv(inner, block.conv2.weight, padding=1) + conv(h, block.shortcut.conv.weight, stride=2)
    torch.testing.assert_close(block(h), torch.tanh(outer), rtol=0, atol=1e-13)


def test_the_character_model_looks_at_no_later_token():
    net = architecture("gpt-nano[context=6,vocabulary=9]")
    model = net.build(seed=0, dtype=torch.float64)
    tokens = _inputs(net, 2)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 9
    first, second = model(tokens), model(changed)
    torch.testing.assert_close(first[:, :4], second[:, :4], rtol=0, atol=1e-13)
    assert (first[:, 4:] - second[:, 4:]).abs().amax((1, 2)).min() > 1e-3
    assert model(tokens[:, :3]).shape == (2, 3, 9), "shorter sequences pass"


def test_a_tied_head_is_one_parameter_with_the_embedding():
    model = architecture("gpt-nano[tied=true]").build()
    assert model.head.weight is model.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_open_ends_are_taken_from_the_data():
    net = architecture("resnet8")
    assert net.is_open
    assert net.sizes == ((3, 32, 32), 10)
    fitted = net.fit((1, 8, 8), 7)
    assert (fitted.image, fitted.outputs, fitted.is_open) == ((1, 8, 8), 7, False)
    assert fitted.build()(torch.zeros(2, 1, 8, 8)).shape == (2, 7)
    assert architecture("gpt-nano").fit((16,), 5).sizes == ((16,), 5)
    assert architecture("gpt-nano[context=64]").fit((16,), 5).sizes == ((64,), 5), "a longer context is kept"
    assert architecture("fcnn").build(inputs=(1, 4, 5))[0].in_features == 20
    with pytest.raises(SpecError, match="image=3-32-32 and the data have 1-8-8"):
        architecture("cnn[image=3-32-32]").fit((1, 8, 8), 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet8[image=32-32]", "images of channels, height and width.*`32-32`"),
        ("resnet8[image=0-32-32]", "given inputs of `0-32-32`"),
        ("cnn[outputs=0]", "outputs is 0"),
        ("resnet8[norm=instance]", "norm"),
        ("vit-tiny[norm=batch]", "norm"),
        ("resnet8[blocks=1-1]", "blocks are 1-1 for 3 stages"),
        ("resnet8[widths=16-0-64]", "widths are positive integers"),
        ("lenet[widths=6-16]", "widths are 4 positive integers"),
        ("lenet[image=1-8-8,padding=valid]", "too small.*use padding=same"),
        ("cnn[activation=silo]", "silu"),
        ("vit-tiny[patch=5]", "does not divide into patches of 5×5"),
        ("vit-tiny[heads=5]", "width 64 does not divide into 5 heads"),
        ("mlp-mixer[depth=0]", "depth is 0"),
        ("gpt-nano[context=0]", "sequences of tokens"),
        ("resnet-8", "resnet8"),
    ],
)
def test_a_wrong_network_is_refused_with_what_was_expected(spec, message):
    with pytest.raises(SpecError, match=message):
        architecture(spec)


def test_inputs_of_another_kind_are_refused():
    with pytest.raises(SpecError, match=r"given inputs of `64`\. Use a data set of images"):
        architecture("resnet8").build(inputs=64)
    with pytest.raises(SpecError, match="Use the data set characters"):
        architecture("gpt-nano").build(inputs=(3, 8, 8))
