"""ResNet-50 as torchvision has it: bottleneck blocks (v1.5: the stride is in the 3×3 convolution), BatchNorm.

Layers have torchvision's names (`layer1.0.conv1`, `layer2.0.downsample.0`, `fc`), 25,557,032 parameters.
"""

from __future__ import annotations

from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, with a projection where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = EXPANSION * width
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """Images (examples, 3, height, width) to logits; `blocks` and `width` make smaller ones."""

    def __init__(
        self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.depth, before = len(blocks), width
        for index, count in enumerate(blocks):
            planes, stride = width * 2**index, 1 if index == 0 else 2
            first = Bottleneck(before, planes, stride)
            before = EXPANSION * planes
            rest = [Bottleneck(before, planes, 1) for _ in range(count - 1)]
            self.add_module(f"layer{index + 1}", nn.Sequential(first, *rest))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for index in range(self.depth):
            x = self.get_submodule(f"layer{index + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))
