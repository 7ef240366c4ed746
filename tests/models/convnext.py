"""ConvNeXt-T as torchvision and timm have it: depthwise 7×7, LayerNorm over channels, layer scale, GELU.

28,589,128 parameters. Stochastic depth, which is off in eval mode, is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of (examples, channels, height, width), as torchvision's own."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """x + γ ⊙ W₂ gelu(W₁ LN(depthwise x)), the Linear layers over the channels of each position."""

    def __init__(self, width: int, layer_scale: float = 1e-6) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.pwconv2(self.act(self.pwconv1(out))).permute(0, 3, 1, 2)
        return x + self.layer_scale * out


class ConvNeXtT(nn.Module):
    """Images (examples, 3, height, width), sides multiples of 32, to logits."""

    def __init__(
        self,
        depths: tuple[int, ...] = (3, 3, 9, 3),
        widths: tuple[int, ...] = (96, 192, 384, 768),
        num_classes: int = 1000,
        layer_scale: float = 1e-6,
    ) -> None:
        super().__init__()
        stem: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6)]
        stages: list[nn.Module] = [nn.Sequential(*stem)]
        for index, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if index:
                before = widths[index - 1]
                down = [LayerNorm2d(before, eps=1e-6), nn.Conv2d(before, width, 2, 2)]
                stages.append(nn.Sequential(*down))
            stages.append(nn.Sequential(*(ConvNeXtBlock(width, layer_scale) for _ in range(depth))))
        self.features = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))
