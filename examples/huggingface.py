"""A Hugging Face language model in curvlab: GPT-2 from its configuration, no weights to download.

    python examples/huggingface.py [--size tiny|gpt2] [--batch 4] [--length 32] [--steps 3]

or, with the command line and this file in the working folder,

    curvlab compare --model huggingface:tiny --data huggingface:batches --provider fisher --solver ea-cg

Needs `pip install transformers`. The model takes a dict, as a tokenizer gives it, and returns an object with
`.logits`; the loss is per token, and padded positions are left out by their label, -100.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from torch import Tensor, nn

import curvlab
from curvlab.optim import SecondOrder

VOCABULARY = {"tiny": 61, "gpt2": 50_257}
IGNORED = -100
Batch = tuple[dict[str, Tensor], Tensor]


def build(size: str) -> nn.Module:
    """GPT-2 with random weights, without dropout and without a cache of keys and values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    widths = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64} if size == "tiny" else {}
    config = GPT2Config(
        vocab_size=VOCABULARY[size],
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **widths,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def tiny() -> nn.Module:
    """Two blocks of width 16: for `--model huggingface:tiny`."""
    return build("tiny")


def gpt2() -> nn.Module:
    """GPT-2 itself, 124 million parameters: for `--model huggingface:gpt2`."""
    return build("gpt2")


def batch_of(size: str, examples: int, length: int) -> Batch:
    """Random sentences of unequal lengths; the target of a token is the next one."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY[size], (examples, length + 1), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (examples, 1), generator=generator)
    mask = torch.arange(length) < lengths
    inputs = {"input_ids": tokens[:, :-1].masked_fill(~mask, 0), "attention_mask": mask.long()}
    return inputs, tokens[:, 1:].masked_fill(~mask, IGNORED)


def batches() -> list[Batch]:
    """One batch for the tiny model: for `--data huggingface:batches`."""
    return [batch_of("tiny", 8, 24)]


def gpt2_batches() -> list[Batch]:
    """One batch for GPT-2: for `--data huggingface:gpt2_batches`."""
    return [batch_of("gpt2", 2, 64)]


def main() -> None:
    """Estimate, solve, and take a few steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=VOCABULARY, default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    model, (inputs, targets) = build(options.size), batch_of(options.size, options.batch, options.length)

    problem = curvlab.Problem(model, "cross-entropy", inputs, targets)
    start = perf_counter()
    curvature = curvlab.estimate("fisher[kind=mc]", problem)
    seconds = perf_counter() - start
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    share = sum(parameters[name].numel() for name in curvature.blocks) / total
    print(f"{total:,} parameters, {share:.1%} with a block, estimated in {seconds:.1f} s")
    for note in curvature.notes:
        print(f"  note: {note}")

    solution = curvlab.solve("ea-cg", curvature, problem.gradient(), alpha=0.05)
    print(solution.frame().to_string(index=False, max_rows=8))

    optimizer = SecondOrder(
        model, "cross-entropy", provider="fisher[kind=mc]", solver="ea-cg", lr=0.03, alpha=0.1
    )
    for step in range(options.steps):
        print(f"step {step}: loss {float(optimizer.step(inputs, targets)):.4f}")


if __name__ == "__main__":
    main()
