"""ViT-B/16 as torchvision has it: class token, positions, `nn.MultiheadAttention`; 86,567,656 parameters.

`attention="qkv"` has timm's attention in its place: one Linear layer for queries, keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class QKVAttention(nn.Module):
    """timm's attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        examples, length, width = x.shape
        qkv = self.qkv(x).reshape(examples, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(examples, length, width))


class EncoderBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, hidden: int, attention: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention: nn.Module = (
            nn.MultiheadAttention(width, heads, batch_first=True)
            if attention == "torch"
            else QKVAttention(width, heads)
        )
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        if isinstance(self.self_attention, nn.MultiheadAttention):
            x = x + self.self_attention(y, y, y, need_weights=False)[0]
        else:
            x = x + self.self_attention(y)
        return x + self.mlp(self.ln_2(x))


class ViTB16(nn.Module):
    """Images (examples, 3, image, image) to logits."""

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        num_classes: int = 1000,
        attention: str = "torch",
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, width))
        nn.init.normal_(self.pos_embedding, std=0.02)
        self.layers = nn.Sequential(*(EncoderBlock(width, heads, 4 * width, attention) for _ in range(depth)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = self.layers(x + self.pos_embedding)
        return self.head(self.ln(x)[:, 0])
