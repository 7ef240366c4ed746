"""Large networks as torchvision, timm and transformers shape them, for tests, with random weights."""

from tests.models.convnext import ConvNeXtT
from tests.models.gpt2 import GPT2, transformers_gpt2
from tests.models.resnet50 import ResNet50
from tests.models.vit import ViTB16

__all__ = ["GPT2", "ConvNeXtT", "ResNet50", "ViTB16", "transformers_gpt2"]
