"""The large fixtures have the published parameter counts, allocate nothing on the meta device, compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.models import GPT2, ConvNeXtT, ResNet50, ViTB16, transformers_gpt2

PUBLISHED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet50": (ResNet50, 25_557_032),
    "convnext-t": (ConvNeXtT, 28_589_128),
    "vit-b/16": (ViTB16, 86_567_656),
    "vit-b/16, timm's attention": (lambda: ViTB16(attention="qkv"), 86_567_656),
    "gpt2": (GPT2, 124_439_808),
    "gpt2, transformers": (transformers_gpt2, 124_439_808),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_number_of_parameters(name):
    if name.endswith("transformers"):
        pytest.importorskip("transformers")
    make, count = PUBLISHED[name]
    with torch.device("meta"):
        model = make().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert all(parameter.is_meta for parameter in model.parameters())


# The forward pass of transformers reads values of its mask back, which a meta tensor does not have.
@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.endswith("transformers")])
def test_the_logits_of_a_batch_have_the_right_shape_without_allocating(name):
    with torch.device("meta"):
        model = PUBLISHED[name][0]().eval()
        if name.startswith("gpt2"):
            logits = model(torch.zeros(2, 16, dtype=torch.int64)).logits
            assert logits.shape == (2, 16, 50_257)
        else:
            logits = model(torch.zeros(2, 3, 224, 224))
            assert logits.shape == (2, 1000)
    assert logits.is_meta


SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: ResNet50(blocks=(1, 1), width=8, num_classes=5),
    "convnext": lambda: ConvNeXtT(depths=(1, 1), widths=(8, 16), num_classes=5, layer_scale=1.0),
    "vit": lambda: ViTB16(image=32, patch=8, width=16, depth=2, heads=2, num_classes=5),
    "vit-qkv": lambda: ViTB16(image=32, patch=8, width=16, depth=2, heads=2, num_classes=5, attention="qkv"),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_of_the_same_shape_treats_every_example_by_itself(name):
    torch.manual_seed(0)
    model = SMALL[name]().double().eval()
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    logits = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-12)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.slow
def test_the_gpt2_twin_computes_what_transformers_computes():
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    original, twin = transformers_gpt2(**sizes).double().eval(), GPT2(**sizes).double().eval()
    assert set(twin.state_dict()) == set(original.state_dict())
    twin.load_state_dict(original.state_dict())
    tokens = torch.randint(11, (3, 8))
    torch.testing.assert_close(twin(tokens).logits, original(tokens).logits, rtol=0, atol=1e-12)


def test_both_attentions_of_the_vit_compute_the_same():
    torch.manual_seed(0)
    ours, theirs = SMALL["vit-qkv"]().double().eval(), SMALL["vit"]().double().eval()
    renamed = {
        name.replace("in_proj_", "qkv.").replace("out_proj", "proj"): value
        for name, value in theirs.state_dict().items()
    }
    ours.load_state_dict(renamed)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-12)
