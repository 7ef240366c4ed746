"""Checkpointed, compiled and data-parallel models: the same curvature as the plain one, or a sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import curvlab
from curvlab.exceptions import ProblemError
from curvlab.optim import SecondOrder
from tests.any_models import assert_blocks

PROVIDERS = [
    "fisher",
    "fisher[kind=mc]",
    "fisher[kind=exact,sharing=reduce]",
    "gauss-newton[kind=rows]",
    "gauss-newton[kind=exact]",
    "hessian",
]
WRAPPERS = ("module.", "_orig_mod.")


class Body(nn.Module):
    """A convolution, a block of two layers and a norm, which may be checkpointed, and a head."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.stem, self.norm, self.head = nn.Conv1d(2, 3, 2), nn.LayerNorm(3), nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())

    def block(self, h: Tensor) -> Tensor:
        if self.how == "sequential":
            return self.norm(checkpoint_sequential(self.inner, 2, h, use_reentrant=False))
        return self.norm(self.inner(h))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).transpose(1, 2)
        if self.how in ("checkpoint", "reentrant"):
            h = h + checkpoint(self.block, h, use_reentrant=self.how == "reentrant")
        else:
            h = h + self.block(h)
        return self.head(h.mean(1))


def plain(how: str = "plain") -> Body:
    torch.manual_seed(0)
    return Body(how).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, 2, 4, generator=generator).double()
    return inputs, torch.randint(3, (5,), generator=generator)


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


def with_inner(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = plain()
    model.inner = wrap(model.inner)
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


MODELS: dict[str, Callable[[], Any]] = {
    "checkpoint": lambda: plain("checkpoint"),
    "checkpoint_sequential": lambda: plain("sequential"),
    "torch.compile": lambda: compiled(plain()),
    "compiled in place": compiled_in_place,
    "a compiled part": lambda: with_inner(compiled),
    "compiled, with checkpoints": lambda: compiled(plain("checkpoint")),
    "DataParallel": lambda: nn.DataParallel(plain()),
    "DataParallel around a part": lambda: with_inner(nn.DataParallel),
    "DistributedDataParallel": lambda: in_parallel(plain()),
    "DistributedDataParallel, compiled": lambda: compiled(in_parallel(plain())),
    "DistributedDataParallel around a compiled model": lambda: in_parallel(compiled(plain())),
    "DistributedDataParallel around a part": lambda: with_inner(in_parallel),
    "fx": lambda: torch.fx.symbolic_trace(plain()),
}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A group of this process alone: what DistributedDataParallel needs."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def own_name(name: str) -> str:
    """The parameter's name in the plain model."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@cache
def expected_blocks() -> list[dict[str, Tensor]]:
    """The blocks of the plain model, provider by provider."""
    curvatures = curvlab.estimate(PROVIDERS, curvlab.Problem(plain(), "cross-entropy", *data()))
    return [{name: block.to_dense() for name, block in one.blocks.items()} for one in curvatures]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_model_has_the_curvature_of_the_plain_one(name: str) -> None:
    problem = curvlab.Problem(MODELS[name](), "cross-entropy", *data())
    gradient = curvlab.Problem(plain(), "cross-entropy", *data()).gradient()
    assert {own_name(n) for n in problem.gradient()} == set(gradient)
    for parameter, value in problem.gradient().items():
        torch.testing.assert_close(value, gradient[own_name(parameter)], rtol=1e-12, atol=1e-14)
    for found, blocks in zip(curvlab.estimate(PROVIDERS, problem), expected_blocks(), strict=True):
        names = {own_name(n): n for n in found.blocks}
        assert_blocks(found, {names[n]: block for n, block in blocks.items()}, None, 1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_model_takes_the_steps_of_the_plain_one(name: str) -> None:
    moved = []
    for model in (plain(), MODELS[name]()):
        optimizer = SecondOrder(model, "cross-entropy", "fisher", "kfi")
        losses = [float(optimizer.step(*data())) for _ in range(2)]
        moved.append((losses, {own_name(n): p.detach() for n, p in model.named_parameters()}))
    assert moved[1][0] == pytest.approx(moved[0][0], rel=1e-12)
    for parameter, value in moved[0][1].items():
        torch.testing.assert_close(moved[1][1][parameter], value, rtol=1e-10, atol=1e-13)


def test_a_solution_is_added_to_the_wrapper_or_to_the_model_inside() -> None:
    inside, whole = plain(), plain()
    for model, target in ((inside, nn.DataParallel(inside)), (whole, whole)):
        problem = curvlab.Problem(target, "cross-entropy", *data())
        solution = curvlab.solve("ea-cg", curvlab.estimate("fisher", problem), problem.gradient(), alpha=0.1)
        solution.add_to(target, 0.1)
        assert not torch.equal(model.head.weight, plain().head.weight)
    assert torch.equal(inside.head.weight, whole.head.weight)


@pytest.mark.parametrize("provider", ["fisher", "hessian", "gauss-newton[kind=exact]"])
def test_a_reentrant_checkpoint_is_refused_naming_the_other(provider: str) -> None:
    with pytest.raises(ProblemError, match=r"use_reentrant=True.*use_reentrant=False"):
        curvlab.estimate(provider, curvlab.Problem(plain("reentrant"), "cross-entropy", *data()))


@pytest.mark.filterwarnings("ignore")
def test_a_reentrant_checkpoint_of_the_first_layers_is_refused_too() -> None:
    """Its input needs no gradient: torch itself leaves these layers without one, and warns at most."""

    class First(Body):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda t: self.stem(t).transpose(1, 2), x, use_reentrant=True)
            return self.head(torch.tanh(h).mean(1))

    torch.manual_seed(0)
    with pytest.raises(ProblemError, match="use_reentrant=False"):
        curvlab.Problem(First().double(), "cross-entropy", *data())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.jit.trace(plain(), data()[0]), "the model is TorchScript"),
        (lambda: torch.jit.script(plain().inner), "the model is TorchScript"),
        (lambda: with_inner(torch.jit.script), "module `inner` is TorchScript"),
    ],
    ids=["traced", "scripted", "a scripted part"],
)
def test_scripted_models_are_refused(make: Callable[[], nn.Module], named: str) -> None:
    with pytest.raises(ProblemError, match=named):
        curvlab.Problem(make(), "cross-entropy", *data())


def test_a_copy_of_a_wrapped_model_is_analysed_as_the_model_inside() -> None:
    wrapped = nn.DataParallel(plain())
    problem = copy.deepcopy(curvlab.Problem(wrapped, "cross-entropy", *data()))
    assert isinstance(problem.model, Body)
    assert problem.model is not wrapped.module
