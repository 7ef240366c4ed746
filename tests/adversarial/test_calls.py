"""Mistaken calls from Python: each is refused with a sentence of curvlab's own, and answers are right.

The command line's table is in commands.py; here are arguments that only a program can give, and answers that
would have been wrong without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvlab
from curvlab.exceptions import CurvlabError
from curvlab.optim import SecondOrder
from tests.adversarial.outcomes import HangError, Judge, time_limit

SUITE = "mistaken calls"
NAN, INF = float("nan"), float("inf")
DAMPING = curvlab.Additive(0.1)
Call = Callable[[], object]


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=generator, dtype=torch.float64), torch.arange(8) % 3


X, Y = batch()


def problem(model: nn.Module | None = None) -> curvlab.Problem:
    return curvlab.Problem(model or net(), "cross-entropy", *batch())


def fisher() -> curvlab.Curvature:
    return curvlab.estimate("fisher", problem())


def hessian() -> curvlab.Curvature:
    return curvlab.estimate("hessian", problem())


def single() -> curvlab.Curvature:
    given = curvlab.Problem(net(torch.float32), "cross-entropy", X.float(), Y)
    return curvlab.estimate("fisher", given)


def slope() -> dict[str, Tensor]:
    return dict(problem().gradient())


def surface(change: Callable[[Tensor], Any] = lambda value: value, **options: Any) -> object:
    directions = [{name: change(value) for name, value in slope().items()}]
    return curvlab.landscape(problem(), directions, **({"points": 3} | options))


def tracked(step: Any = 0, **options: Any) -> object:
    return curvlab.Tracker(problem(), **({"every": 1, "measures": ["trace"]} | options))(step)


def on_meta() -> object:
    return curvlab.Problem(net().to("meta"), "cross-entropy", X.to("meta"), Y.to("meta"))


def one_memory() -> object:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight.data = model[0].weight.data
    return problem(model)


def overlapping() -> object:
    memory, model = torch.randn(18).double(), nn.Linear(5, 3).double()
    model.weight, model.bias = nn.Parameter(memory[:15].view(3, 5)), nn.Parameter(memory[13:16])
    return problem(model)


def transformed() -> object:
    model = net()
    return torch.func.grad(lambda x: curvlab.Problem(model, "cross-entropy", x, Y).loss())(X)


class Short:
    """An operator whose products have too few entries."""

    shape = (3, 3)

    def __matmul__(self, vector: Any) -> Any:
        return vector[:2]


NESTED = torch.nested.nested_tensor([*X])
# What is refused, by what is given; the words that the answer has: what was given, and what was expected.
MISTAKES: dict[str, tuple[Call, tuple[str, ...]]] = {
    "a model without values": (on_meta, ("meta", "to_empty")),
    "nested inputs": (lambda: curvlab.Problem(net(), "cross-entropy", NESTED, Y), ("nested", "dense")),
    "inputs of a torch.func transform": (transformed, ("torch.func", "outside")),
    "parameters tied by .data": (one_memory, ("0.weight", "2.weight", "same memory", "clone")),
    "parameters that overlap": (overlapping, ("weight", "bias", "same memory")),
    "a lazy model": (
        lambda: curvlab.Problem(nn.Sequential(nn.LazyLinear(3)), "cross-entropy", X.float(), Y),
        ("lazy", "run the model"),
    ),
    "a stream with an empty batch": (
        lambda: curvlab.Problem(net(), "cross-entropy", [(X[:4], Y[:4]), (X[:0], Y[:0])]).gradient(),
        ("batch 1", "(0, 5)"),
    ),
    "a refilled buffer": (
        lambda: curvlab.estimate("fisher", refilled()),
        ("overwritten", "new tensor"),
    ),
    "batches that are none": (lambda: curvlab.keep_batches(3), ("int", "batches")),  # type: ignore[arg-type]
    "batches of None": (lambda: curvlab.keep_batches(None), ("NoneType",)),  # type: ignore[arg-type]
    "a text for batches": (lambda: curvlab.keep_batches("abc"), ("str", "batches")),
    "a direction that is not finite": (lambda: surface(lambda v: v * NAN), ("finite",)),
    "a complex direction": (lambda: surface(lambda v: v.to(torch.complex128)), ("real",)),
    "a sparse direction": (lambda: surface(lambda v: v.to_sparse()), ("dense",)),
    "a direction of lists": (lambda: surface(lambda v: v.tolist()), ("list", "dense tensor")),
    "a direction without values": (lambda: surface(lambda v: v.to("meta")), ("finite",)),
    "an empty direction": (lambda: curvlab.landscape(problem(), [{}]), ("directions",)),
    "a landscape of a model": (lambda: curvlab.landscape(net(), [slope()]), ("Problem", "Sequential")),  # type: ignore[arg-type]
    "a radius in words": (lambda: surface(radius="far"), ("far", "positive")),
    "a radius of NaN": (lambda: surface(radius=NAN), ("nan", "positive")),
    "half a point": (lambda: surface(points=2.5), ("2.5", "whole number")),
    "points without end": (lambda: surface(points=10**10), ("10,000,000,000", "days")),
    "a square of points without end": (
        lambda: curvlab.landscape(problem(), [slope(), slope()], points=10**6),
        ("1,000,000", "days"),
    ),
    "a tracker every half step": (lambda: tracked(every=2.5), ("every=2.5", "whole number")),
    "a tracker every NaN": (lambda: tracked(every=NAN), ("every=nan", "whole number")),
    "a tracker every word": (lambda: tracked(every="2"), ("every='2'", "whole number")),
    "a step that is text": (lambda: tracked("0"), ("step='0'", "whole number")),
    "a step of NaN": (lambda: tracked(NAN), ("step=nan", "whole number")),
    "a step of None": (lambda: tracked(None), ("step=None",)),
    "measures of None": (lambda: tracked(measures=None), ("None", "top-eigenvalue")),
    "measures of lists": (lambda: tracked(measures=[[]]), ("[[]]", "top-eigenvalue")),
    "no measures in a generator": (lambda: tracked(measures=(m for m in ())), ("top-eigenvalue",)),
    "a tracker of a model": (lambda: curvlab.Tracker(net()), ("Problem", "Sequential")),  # type: ignore[arg-type]
    "similarity of two precisions": (lambda: curvlab.similarity(fisher(), single()), ("dtype", ".to(")),
    "similarity by half a vector": (lambda: curvlab.similarity(fisher(), fisher(), k=2.5), ("k=2.5",)),  # type: ignore[arg-type]
    "a sum of two precisions": (lambda: fisher() + single(), ("float32", "dtype")),
    "a multiple of NaN": (lambda: NAN * fisher(), ("nan", "finite")),
    "a selection of None": (lambda: fisher().select(None), ("None", "0.weight")),  # type: ignore[arg-type]
    "eigenpairs of true": (lambda: curvlab.spectrum(fisher(), k=True), ("k=True",)),
    "half an eigenpair": (lambda: curvlab.spectrum(fisher(), k=2.5), ("k=2.5",)),  # type: ignore[call-overload]
    "a tolerance of NaN": (lambda: curvlab.spectrum(hessian(), k=2, tol=NAN), ("tol=nan",)),
    "a tolerance below zero": (lambda: curvlab.spectrum(hessian(), k=2, tol=-1.0), ("tol=-1",)),
    "a seed in words": (lambda: curvlab.spectrum(hessian(), k=2, seed="x"), ("seed='x'",)),  # type: ignore[call-overload]
    "a seed beyond 64 bits": (lambda: curvlab.density(hessian(), seed=2**70), ("seed", "64 bits")),
    "half a probe": (lambda: curvlab.density(hessian(), 2.5), ("probes=2.5",)),  # type: ignore[arg-type]
    "a density of too many points": (
        lambda: curvlab.density(hessian(), points=10**12),
        ("1,000,000,000,000", "10,000"),
    ),
    "a width of NaN": (lambda: curvlab.density(hessian(), width=NAN), ("width=nan",)),
    "half a draw": (lambda: fisher().sample(1.5, damping=DAMPING), ("1.5", "whole number")),  # type: ignore[arg-type]
    "draws without end": (lambda: fisher().sample(10**12, damping=DAMPING), ("bytes",)),
    "an exponent of NaN": (lambda: fisher().power(NAN, damping=DAMPING), ("exponent=nan", "finite")),
    "an exponent of infinity": (lambda: fisher().power(INF, damping=DAMPING), ("exponent=inf", "finite")),
    "an exponent in words": (lambda: fisher().power("x", damping=DAMPING), ("exponent='x'",)),  # type: ignore[arg-type]
    "probes without end": (lambda: hessian().trace(probes=10**15), ("1,000,000,000,000,000", "bytes")),
    "probes of NaN": (lambda: hessian().diagonal(estimator="hutchinson", probes=NAN), ("probes=nan",)),  # type: ignore[call-overload]
    "a determinant of zero": (lambda: fisher().logdet(), ("smallest eigenvalue", "damping")),
    "a root of the inverse of zero": (lambda: fisher().power(-0.5), ("smallest eigenvalue", "damping")),
    "samples of a singular precision": (lambda: fisher().sample(1), ("smallest eigenvalue", "damping")),
    "an operator that is not symmetric": (
        lambda: curvlab.curvature_from(np.array([[0.0, 1.0], [0.0, 0.0]])),
        ("not symmetric", "Aᵀ"),
    ),
    "a complex operator": (
        lambda: curvlab.curvature_from(np.array([[0.0, 1j], [-1j, 0.0]])),
        ("complex", "real numbers"),
    ),
    "an operator of NaN": (lambda: curvlab.curvature_from(np.full((2, 2), NAN)), ("not finite",)),
    "an operator of no size": (lambda: curvlab.curvature_from(np.zeros((0, 0))), ("0 × 0",)),
    "an operator that forgets an entry": (lambda: curvlab.curvature_from(Short()), ("(2,)", "3 entries")),
    "an adaptation in words": (
        lambda: SecondOrder(net(), "cross-entropy", adapt="x"),  # type: ignore[arg-type]
        ("adapt='x'", "LevenbergMarquardt"),
    ),
    "a capture in words": (
        lambda: SecondOrder(net(), "cross-entropy", capture="yes"),  # type: ignore[arg-type]
        ("capture='yes'", "Capture"),
    ),
}


def refilled() -> curvlab.Problem:
    class Loader:
        def __iter__(self) -> Any:
            inputs, labels = torch.empty(4, 5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
            for start in (0, 4):
                inputs.copy_(X[start : start + 4])
                labels.copy_(Y[start : start + 4])
                yield inputs, labels

    return curvlab.Problem(net(), "cross-entropy", Loader())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistaken_call_is_refused_with_a_sentence(name: str, judge: Judge) -> None:
    call, words = MISTAKES[name]
    try:
        with time_limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = call()
    except HangError as error:
        judge(SUITE, "hang", error)
    except CurvlabError as error:
        missing = [word for word in words if word not in str(error)]
        judge(SUITE, "silent" if missing else "refused", f"{missing} not in: {error}")
    except Exception as error:
        judge(SUITE, "traceback", f"{type(error).__name__}: {error}")
    else:
        judge(SUITE, "silent", f"answered {answer!r}")


def wide_inverse() -> tuple[Tensor, Tensor]:
    """A small damping of a wide layer in float32: no eigenvalue of D is below τ."""
    torch.manual_seed(0)
    model, inputs, labels = nn.Linear(300, 200), torch.randn(400, 300), torch.randint(200, (400,))
    found = []
    for dtype in (torch.float32, torch.float64):
        given = curvlab.Problem(model.to(dtype), "cross-entropy", inputs.to(dtype), labels)
        inverse = curvlab.estimate("fisher", given).inverse(damping=curvlab.Additive(1e-3))
        found.append((inverse @ given.gradient())["weight"].double())
    return found[0], found[1]


def of_integers(matrix: Any) -> tuple[Tensor, Tensor]:
    """Vectors have fractions where a matrix of integers has none."""
    vector = torch.tensor([0.5, -0.25], dtype=torch.float64)
    return curvlab.curvature_from(matrix).flat_product(vector), torch.tensor([0.75, 0.0]).double()


class OneBuffer:
    """An operator that writes every image into the same memory."""

    shape = (3, 3)

    def __init__(self) -> None:
        self.buffer = np.zeros(3)

    def __matmul__(self, vector: Any) -> Any:
        self.buffer[:] = np.array([3.0, 2.0, 1.0]) * vector
        return self.buffer


def semi_definite_root() -> tuple[Tensor, Tensor]:
    """C^½ twice is C, of a singular matrix too: rounding below zero has no root."""
    curvature, vector = fisher(), slope()
    root = curvature.power(0.5)
    twice, once = root @ (root @ vector), curvature @ vector
    return torch.cat([v.flatten() for v in twice.values()]), torch.cat([once[n].flatten() for n in twice])


def kept_batches() -> tuple[Tensor, Tensor]:
    def refill() -> Any:
        inputs, labels = torch.empty(4, 5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
        for start in (0, 4):
            inputs.copy_(X[start : start + 4])
            labels.copy_(Y[start : start + 4])
            yield inputs, labels

    kept = curvlab.Problem(net(), "cross-entropy", curvlab.keep_batches(refill())).gradient()
    return kept["0.weight"], slope()["0.weight"]


def generated_measures() -> tuple[Tensor, Tensor]:
    tracker = curvlab.Tracker(problem(), 1, (name for name in ["trace"]))  # type: ignore[arg-type]
    tracker(0)
    return torch.tensor(len(tracker.frame())), torch.tensor(1)


# What was refused or wrong without reason: (what is found, what is right).
ANSWERS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "an inverse in float32 with a small damping": wide_inverse,
    "a matrix of integers": lambda: of_integers(np.array([[2, 1], [1, 2]])),
    "a tensor of integers": lambda: of_integers(torch.tensor([[2, 1], [1, 2]])),
    "an operator with one buffer": lambda: (
        curvlab.spectrum(curvlab.curvature_from(OneBuffer()), 3).eigenvalues,
        torch.tensor([3.0, 2.0, 1.0]).double(),
    ),
    "the root of a singular matrix": semi_definite_root,
    "kept batches of a refilled buffer": kept_batches,
    "measures from a generator": generated_measures,
    "eigenpairs by a numpy number": lambda: (
        curvlab.spectrum(fisher(), k=np.int64(2)).eigenvalues,
        curvlab.spectrum(fisher(), k=2).eigenvalues,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_unusual_call_is_answered_right(name: str, judge: Judge) -> None:
    found, right = ANSWERS[name]()
    tolerance = 1e-4 if "float32" in name else 1e-10
    near = torch.allclose(found, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))
    judge(SUITE, "held" if near else "silent", (found, right))
