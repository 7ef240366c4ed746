"""GPT-2 small from its configuration: transformers' own class, and a twin that needs torch alone.

The twin has Hugging Face's `Conv1D` (y = x W + b with W of shape (inputs, outputs)), its names of layers, its
tied head and its tanh GELU; 124,439,808 parameters each. No weights are downloaded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

SMALL = {"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


def transformers_gpt2(**sizes: int) -> nn.Module:
    """`GPT2LMHeadModel` of a configuration without dropout; needs transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**{**SMALL, **sizes, **still}))


class Conv1D(nn.Module):
    """A Linear layer whose weight is (inputs, outputs), as Hugging Face's."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, rows, self.weight).reshape(*x.shape[:-1], self.nf)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        examples, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (
            part.reshape(examples, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).reshape(examples, length, width))


class MLP(nn.Module):
    """Two `Conv1D` with a tanh GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(4 * width, width)
        self.c_proj = Conv1D(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Tokens (examples, length) to an object with `.logits` (examples, length, vocabulary)."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        size = {**SMALL, **sizes}
        width = size["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(size["vocab_size"], width),
                "wpe": nn.Embedding(size["n_positions"], width),
                "h": nn.ModuleList(Block(width, size["n_head"]) for _ in range(size["n_layer"])),
                "ln_f": nn.LayerNorm(width, eps=1e-5),
            }
        )
        for name in ("wte", "wpe"):
            nn.init.normal_(self.transformer[name].weight, std=0.02)
        self.lm_head = nn.Linear(width, size["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, input_ids: Tensor) -> Any:
        part: Any = self.transformer
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = part["wte"](input_ids) + part["wpe"](positions)
        for block in part["h"]:
            x = block(x)
        return SimpleNamespace(logits=self.lm_head(part["ln_f"](x)))
