"""What one entry of the table of forwards is, and the verdict on it.

`honest` forwards must be answered, right. `sneaky` ones must come out right or refused, with a sentence of
curvlab's own: a wrong number is `silent`, any other exception a `traceback`. What is right is decided by
torch alone: the loss and its derivatives by autograd of criterion(model(x)), and the Fisher blocks from
examples that go through the model by themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvlab
from curvlab.exceptions import CurvlabError
from tests.any_reference import (
    AnyReference,
    Term,
    TermSplit,
    call,
    example,
    loss_hessian,
    pick_logits,
)

Blocks = dict[str, Tensor]
TOLERANCE = 1e-9


@dataclass(eq=False)
class Made:
    """A model with its criterion and data; `batches` instead of inputs and targets for a stream.

    Args:
        loss: criterion(logits, targets) of a batch in plain torch; the criterion itself where it is None.
        weights: c_i of the targets; ones where it is None.
        change: applied after the Problem was made and used once.
        independent: whether an example's output is the same alone and in the batch, and the loss a mean.
        answerable: whether there is a right answer at all (a random forward has none).
        twin: the same function and parameter names, where every matrix product is a module's call.
        either: matrices of an honest forward that may be plain blocks as well as Kronecker products.
        hessian: whether the Hessian is asked for (it has no meaning where hooks change gradients).
        differences: whether the Hessian is judged by central differences, where torch's own is wrong.
        terms: the loss terms of an example, where its positions have unequal weights.
    """

    model: nn.Module
    inputs: Any = None
    targets: Any = None
    criterion: Any = "cross-entropy"
    batches: list[tuple[Any, Tensor]] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    weights: Callable[[Tensor], Tensor] | None = None
    change: Callable[[], object] | None = None
    independent: bool = True
    answerable: bool = True
    twin: nn.Module | None = None
    either: tuple[str, ...] = ()
    hessian: bool = True
    differences: bool = False
    terms: TermSplit | None = None
    output: Any = None

    def problem(self) -> curvlab.Problem:
        extra: dict[str, Any] = {} if self.output is None else {"output": self.output}
        if self.batches is not None:
            return curvlab.Problem(self.model, self.criterion, self.batches, **extra)
        return curvlab.Problem(self.model, self.criterion, self.inputs, self.targets, **extra)

    @property
    def parts(self) -> list[tuple[Any, Tensor]]:
        return self.batches if self.batches is not None else [(self.inputs, self.targets)]

    def examples(self) -> Iterator[tuple[Any, Tensor]]:
        for inputs, targets in self.parts:
            for i in range(len(targets)):
                yield example(inputs, i), targets[i : i + 1]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


Maker = Callable[[], Made]


@dataclass(frozen=True, eq=False)
class Item:
    """One forward of the table."""

    name: str
    kind: str
    make: Maker

    def made(self) -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.make()


class Net(nn.Module):
    """Modules, parameters and plain attributes by name, and a forward given as a function of (self, …)."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# the oracle


class Oracle:
    """What torch says of a model: loss, gradient, Hessian, and Fisher blocks from examples alone."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.criterion = made.loss or plain_loss(made.criterion)

    def logits(self, inputs: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return pick_logits(call(self.made.model, inputs), self.made.output)

    def share(self) -> list[float]:
        """Each batch's share of Σ c_i."""
        counts = [float(self.weights(targets).sum()) for _, targets in self.made.parts]
        return [count / sum(counts) for count in counts]

    def weights(self, targets: Tensor) -> Tensor:
        if self.made.weights is None:
            return torch.ones(len(targets), dtype=torch.float64)
        return self.made.weights(targets)

    def loss(self) -> Tensor:
        terms = zip(self.share(), self.made.parts, strict=True)
        return torch.stack([s * self.criterion(self.logits(x), y) for s, (x, y) in terms]).sum()

    def gradient(self) -> dict[str, Tensor]:
        return self._gradient(self.loss())

    def _gradient(self, loss: Tensor) -> dict[str, Tensor]:
        named = self.made.parameters
        if not loss.requires_grad:
            return {name: torch.zeros_like(p) for name, p in named.items()}
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}

    def hessian(self) -> Tensor:
        if self.made.differences:
            return self.difference_hessian()
        return loss_hessian(self.loss(), list(self.made.parameters.values()))

    def difference_hessian(self, step: float = 1e-4) -> Tensor:
        """Central differences of the gradient, of fourth order: good to about 1e-10."""
        rows = []
        for p in self.made.parameters.values():
            for k in range(p.numel()):
                row: Tensor | float = 0.0
                for shift, factor in ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0)):
                    with torch.no_grad():
                        p.view(-1)[k] += shift * step
                    row = row + factor / (12 * step) * self._flat_gradient()
                    with torch.no_grad():
                        p.view(-1)[k] -= shift * step
                rows.append(row)
        return torch.stack([torch.as_tensor(row) for row in rows])

    def _flat_gradient(self) -> Tensor:
        return torch.cat([g.flatten() for g in self.gradient().values()])

    def plain_blocks(self) -> Blocks:
        """E[∇ξ_i ∇ξ_iᵀ] of every parameter."""
        blocks = {n: torch.zeros(p.numel(), p.numel()).double() for n, p in self.made.parameters.items()}
        total = 0.0
        for inputs, targets in self.made.examples():
            c = float(self.weights(targets)[0])
            if c == 0:
                continue
            total += c
            for name, g in self._gradient(self.criterion(self.logits(inputs), targets)).items():
                blocks[name] += c * torch.outer(g.flatten(), g.flatten())
        return {name: block / total for name, block in blocks.items()}


def plain_loss(criterion: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The criterion as torch would be called with a batch; classes last."""
    if criterion == "mse":
        return nn.MSELoss()
    if criterion == "cross-entropy":
        return lambda z, y: nn.CrossEntropyLoss()(z.reshape(-1, z.shape[-1]), y.reshape(-1))
    return criterion


def one_term(oracle: Oracle) -> TermSplit:
    """The example's loss as a single term: all that the gradient and the empirical Fisher need."""

    def split(logits: Tensor, target: Tensor) -> list[Term]:
        def loss(z: Tensor) -> Tensor:
            return oracle.criterion(z.reshape(logits.shape), target)

        index = torch.arange(logits.numel())
        return [Term(float(oracle.weights(target)[0]), index, loss, lambda z: z[:0])]

    return split


def whole_batch(made: Made) -> tuple[Any, Tensor] | None:
    """All examples in one batch; None where those of a stream have shapes of their own."""
    if made.batches is None:
        return made.inputs, made.targets
    inputs, targets = zip(*made.batches, strict=True)
    if not all(isinstance(x, Tensor) and x.shape[1:] == inputs[0].shape[1:] for x in inputs):
        return None
    return torch.cat(inputs), torch.cat(targets)


def kronecker_blocks(oracle: Oracle) -> list[Blocks]:
    """A ⊗ B with `expand`, of the matrices all of whose uses are seen: g_ip h_ipᵀ sum to their gradient.

    Two readings: with and without uses that the logits do not depend on.
    """
    made = oracle.made
    data = whole_batch(made)
    if data is None or any(p.dtype is not torch.float64 for p in made.parameters.values()):
        return []
    inputs, targets = data
    terms = made.terms or one_term(oracle)
    model = made.model if made.twin is None else made.twin
    gradient = oracle.gradient()
    scale = 1e-3 * max(float(g.abs().max()) for g in gradient.values())
    found = []
    for live in (True, False):
        reference = AnyReference(
            model, terms, inputs, targets, 0.0, made.output, copied=False, functions=True, live=live
        )
        blocks, seen = reference.blocks("empirical"), reference.gradient_of_rows()
        whole = [n for n, rows in seen.items() if close(rows, gradient[n].flatten(), scale)]
        found.append({name: blocks[name] for name in whole})
    return found


# the verdict


@dataclass(frozen=True)
class Verdict:
    """right, refused, silent or traceback; with what was asked and the reason."""

    outcome: str
    reason: str = ""


def close(found: Tensor, expected: Tensor, scale: float) -> bool:
    if found.shape != expected.shape:
        return False
    tolerance = TOLERANCE if found.dtype is torch.float64 else 1e-4
    return float((found - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), scale, 1e-12)


def differing(found: Any, expected: Blocks, others: list[Blocks] | None = None) -> str:
    """The first parameter whose value is none of those expected; a parameter of value zero may be absent."""
    scale = 1e-3 * max(float(e.abs().max()) for e in expected.values())
    names = set(found)
    if names - set(expected):
        return f"unknown parameters {sorted(names - set(expected))}"
    for name, value in expected.items():
        allowed = [value, *(other[name] for other in others or [] if name in other)]
        if name not in names:
            if float(value.abs().max()) > 0:
                return f"{name} is absent"
            continue
        got = found[name]
        got = got if isinstance(got, Tensor) else got.to_dense()
        if not any(close(got.detach(), other.detach(), scale) for other in allowed):
            off = float((got - value).abs().max()) if got.shape == value.shape else tuple(got.shape)
            return f"{name} is off by {off}"
    return ""


def is_layers(model: nn.Module, name: str) -> bool:
    """Whether the parameter is the weight of one of torch's layers."""
    owner, _, last = name.rpartition(".")
    return last == "weight" and type(model.get_submodule(owner)).__module__.startswith("torch.nn")


def questions(item: Item, problem: curvlab.Problem) -> Iterator[tuple[str, Callable[[], str]]]:
    """What is asked of curvlab, each with a check that says what is wrong, or nothing."""
    made = item.made()
    if made.change is not None:
        made.change()
    oracle = Oracle(made)
    impossible = "" if made.answerable else "no answer is right: the forward is not a function of its input"
    dependent = "" if made.independent else "examples depend on each other, so there is no Fisher of theirs"

    def loss() -> str:
        found = problem.loss().detach()
        return impossible or ("" if close(found, oracle.loss().detach(), 0.0) else f"loss {float(found)}")

    def gradient() -> str:
        found = dict(problem.gradient())
        return impossible or differing(found, oracle.gradient())

    def fisher() -> str:
        found = curvlab.estimate("fisher", problem).blocks
        if impossible or dependent:
            return impossible or dependent
        plain = oracle.plain_blocks()
        readings = kronecker_blocks(oracle)
        matrices = readings[0] if readings else {}
        # A parameter that is no layer's may be read in either way; a honest layer's is a Kronecker product.
        either = {*made.either, *(n for n in plain if item.kind != "honest" or not is_layers(made.model, n))}
        only = {n: matrices[n] if n in matrices and n not in either else plain[n] for n in plain}
        return differing(found, only, readings)

    def hessian() -> str:
        curvature = curvlab.estimate("hessian[full=true]", problem)
        found = curvature.to_dense()
        if impossible:
            return impossible
        starts, start = {}, 0
        for name, p in made.parameters.items():
            starts[name] = torch.arange(start, start + p.numel())
            start += p.numel()
        order = torch.cat([starts[name] for name in curvature.blocks])
        expected = oracle.hessian()[order][:, order]
        # Differences are good to ten digits of the largest entry or so.
        scale = 1e3 * float(expected.abs().max()) if made.differences else 0.0
        return "" if close(found, expected, scale) else "the Hessian differs"

    yield "loss", loss
    yield "gradient", gradient
    yield "fisher", fisher
    if made.hessian:
        yield "hessian", hessian


def verdict(item: Item) -> Verdict:
    """Ask everything; the worst answer counts."""
    refusal = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = item.made()
        try:
            problem = made.problem()
            if made.change is not None:
                problem.gradient()
                made.change()
        except CurvlabError as error:
            return Verdict("refused", f"Problem: {error}")
        except Exception as error:
            return Verdict("traceback", f"Problem: {type(error).__name__}: {error}")
        for asked, check in questions(item, problem):
            try:
                wrong = check()
            except CurvlabError as error:
                refusal = refusal or f"{asked}: {error}"
                continue
            except Exception as error:
                return Verdict("traceback", f"{asked}: {type(error).__name__}: {error}")
            if wrong:
                return Verdict("silent", f"{asked}: {wrong}")
    return Verdict("refused", refusal) if refusal else Verdict("right")
