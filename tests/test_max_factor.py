"""Sides that are wider than `max_factor` and have more rows than that are diagonal, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.linalg import DiagonalFactor, GramFactor


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.positions = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x) + self.positions))


def problem(model: nn.Module, examples: int) -> curvlab.Problem:
    torch.manual_seed(1)
    if isinstance(model, Tokens):
        tokens = torch.randint(0, 9, (examples, 5))
        return curvlab.Problem(model, "cross-entropy", tokens, tokens.flip(1))
    x, y = torch.randn(examples, 7).double(), torch.randint(0, 3, (examples,))
    return curvlab.Problem(model, "cross-entropy", x, y)


@pytest.mark.parametrize("provider", ["fisher", "fisher[kind=exact]", "gauss-newton[kind=rows]"])
def test_a_chain_s_wide_sides_with_many_rows_are_diagonal(provider: str) -> None:
    opened = provider.rstrip("]").replace("[", "[") + ("," if "[" in provider else "[") + "max_factor=5]"
    whole = curvlab.estimate(provider, problem(chain(), 8))
    cut = curvlab.estimate(opened, problem(chain(), 8))
    first, second = cut.layers
    assert isinstance(first.inputs.full, DiagonalFactor)
    assert isinstance(first.output, DiagonalFactor)
    assert isinstance(second.inputs.full, DiagonalFactor)
    assert not isinstance(second.output, DiagonalFactor), "three outputs are not many"
    for name, block in cut.blocks.items():
        torch.testing.assert_close(block.diagonal(), whole.blocks[name].diagonal())
    few = curvlab.estimate(opened.replace("kind=exact,", ""), problem(chain(), 4)).layers[0]
    assert isinstance(few.inputs.full, GramFactor), "few rows are kept, however wide"


def test_a_vocabulary_head_and_a_wide_parameter_are_diagonal_and_said_to_be() -> None:
    model = Tokens().double()
    whole = curvlab.estimate("fisher", problem(model, 6))
    cut = curvlab.estimate("fisher[max_factor=8]", problem(model, 6))
    head = next(layer for layer in cut.layers if layer.name == "head")
    assert isinstance(head.parts[0].output, DiagonalFactor)
    assert head.parts[0].inputs.full.size == 4
    assert not isinstance(head.parts[0].inputs.full, DiagonalFactor)
    for name in ("head.weight", "positions"):
        torch.testing.assert_close(cut.blocks[name].diagonal(), whole.blocks[name].diagonal())
    said = " ".join(cut.notes)
    assert "`head`" in said
    assert "`positions`" in said
    gradient = problem(model, 6).gradient()
    for solver in ("kfi", "sm-kfi", "cg[max_iter=50]", "ea-cg", "exact"):
        solution = curvlab.solve(solver, cut, gradient, alpha=0.1)
        assert all(bool(torch.isfinite(step).all()) for step in solution.direction.values())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("network", ["chain", "tokens", "convolution in groups"])
def test_the_notes_name_every_side_that_is_cut_and_no_other(network: str, streamed: bool) -> None:
    torch.manual_seed(1)
    groups = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2))
    model = {"chain": chain(), "tokens": Tokens(), "convolution in groups": groups}[network].double()
    asked = problem(model, 8) if network != "convolution in groups" else None
    if asked is None:
        asked = curvlab.Problem(model, "cross-entropy", torch.randn(8, 4, 4, 4).double(), torch.arange(8) % 2)
    if streamed:
        batch = next(asked.batches())
        batches = [(batch.inputs[:3], batch.targets[:3]), (batch.inputs[3:], batch.targets[3:])]
        asked = curvlab.Problem(model, "cross-entropy", batches)
    whole = curvlab.estimate("fisher", asked)
    assert whole.notes == ()
    cut = curvlab.estimate("fisher[max_factor=5]", asked)
    for layer in cut.layers:
        said = [note for note in cut.notes if f"`{layer.name}`" in note]
        names = [name for name, block in layer.blocks.items() if not _equal(block, whole.blocks[name])]
        assert bool(names) == bool(said), layer.name
        if layer.name == "0" and network == "convolution in groups":
            assert any("bias block" in note for note in said)  # two groups of three outputs are six
        if layer.name != "embed" and names and "weight" in names[0]:
            assert any("input side" in note for note in said) == (
                layer.blocks[names[0]].to_dense().shape[0] // layer.blocks[names[0]].shape[0] > 5
            )


def _equal(block: curvlab.linalg.Block, other: curvlab.linalg.Block) -> bool:
    return torch.allclose(block.to_dense(), other.to_dense(), atol=1e-12)


def test_a_stream_turns_diagonal_when_its_rows_become_many() -> None:
    model = chain()
    torch.manual_seed(1)
    x, y = torch.randn(8, 7).double(), torch.randint(0, 3, (8,))
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    streamed = curvlab.estimate("fisher[max_factor=5]", curvlab.Problem(model, "cross-entropy", batches))
    whole = curvlab.estimate("fisher[max_factor=5]", curvlab.Problem(model, "cross-entropy", x, y))
    for name, block in streamed.blocks.items():
        torch.testing.assert_close(block.diagonal(), whole.blocks[name].diagonal())
    assert isinstance(streamed.layers[0].inputs.full, DiagonalFactor)


@pytest.mark.parametrize("spec", ["fisher", "gauss-newton[kind=rows]", "pch[kind=rows,samples=all]"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_bias_block_of_a_diagonal_side_is_diagonal_however_few_the_examples(
    spec: str, streamed: bool
) -> None:
    """Three examples of five tokens are fifteen rows at the head, and three of the mean gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6)).double()
    torch.manual_seed(1)
    x, y = torch.randn(3, 5, 3).double(), torch.randint(0, 6, (3, 5))
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    problem = curvlab.Problem(model, "cross-entropy", *((batches,) if streamed else (x, y)))
    opened = f"{spec}[max_factor=5]" if spec == "fisher" else spec.replace("]", ",max_factor=5]")
    curvature = curvlab.estimate(opened, problem)
    assert isinstance(curvature.layers[1].parts[0].output, DiagonalFactor)  # type: ignore[attr-defined]
    found = curvature.blocks["2.bias"].to_dense()
    torch.testing.assert_close(found, found.diagonal().diag())
    whole = curvlab.estimate(spec, problem).blocks["2.bias"].to_dense()
    if not spec.startswith("pch"):
        torch.testing.assert_close(found.diagonal(), whole.diagonal())
    with_mean = curvlab.providers.Fisher(max_factor=5)
    for solver in ("sm-kfi", "ea-cg"):
        direct = curvlab.solve(solver, curvlab.estimate(with_mean, problem), problem.gradient(), alpha=0.1)
        cheap = curvlab.estimate(with_mean.for_mean_input(problem), problem)
        other = curvlab.solve(solver, cheap, problem.gradient(), alpha=0.1)
        for name, step in direct.direction.items():
            torch.testing.assert_close(other.direction[name], step)
