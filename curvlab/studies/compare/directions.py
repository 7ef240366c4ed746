"""How good a direction is: how far from the exact damped Newton direction, and what it does to the loss.

    ((1-α) H_b + αI) n_b = -g_b         H_b the exact Hessian's block of parameter b
    cosine = ⟨d, n⟩ / (‖d‖ ‖n‖)         distance = ‖d - n‖ / ‖n‖
    sine = min over t ≥ 0 of ‖t d - n‖ / ‖n‖, the distance at the best scale: a learning rate is tuned anyway

Each block has one Krylov space that starts at its gradient (`spectra`), on a float64 copy on the CPU; every α
is solved in it to a relative residual of 1e-8. A product with a block runs through the whole network, so the
cost is counted before: where the spaces would take more than `operations`, the direction is left out, or it
ends unsolved with the reason. Where a damped block is indefinite there is no Newton direction.

The decrease of the loss along θ + ηd needs no reference, so it exists for every network, however large:

    actual      1 - L(θ + ηd) / L(θ)       at η = 1, and at the best η that is found
    predicted   -(gᵀd + ½ dᵀCd) / L(θ)     by the pair's own curvature C, at η = 1

The best η is the first minimum that is found from η = 1 on by doubling or halving, refined by golden sections
of its bracket: about ten forward passes. On another batch the decrease is taken at the η that the direction's
own batch chose, as a user would.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvlab.criteria.base import LossTerms
from curvlab.curvature import Curvature
from curvlab.defaults import NEWTON_LIMIT, REFERENCE_OPERATIONS
from curvlab.linalg import Block
from curvlab.measure.operations import counting
from curvlab.model.network import Inputs, ModelCall
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.studies.compare.spectra import Krylov
from curvlab.studies.small.references import product_operations

__all__ = [
    "Closeness",
    "Descent",
    "DescentBench",
    "Newton",
    "NewtonReference",
    "backpropagate",
    "closeness",
    "newton",
    "predicted_decrease",
]

TOLERANCE = 1e-8
MAX_STEPS = 1000
BASIS_BYTES = 10**9
GROWTH = 20  # products between two looks at the residual
FEWEST = 10  # products a block needs at the least, for the cost to be worth beginning


@dataclass(frozen=True)
class Closeness:
    """How close a direction is to Newton's; NaN with the reason where that is not known.

    A direction of zero has no cosine, and is at distance 1: it leaves the whole way.
    """

    cosine: float
    distance: float
    sine: float
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Newton:
    """The direction by parameter name, and why it is missing for those that have none."""

    direction: Mapping[str, Tensor]
    reasons: Mapping[str, str]

    def block(self, direction: Mapping[str, Tensor], name: str) -> Closeness:
        """The closeness of `direction` for one parameter."""
        return self._closeness(direction, [name])

    def joint(self, direction: Mapping[str, Tensor]) -> Closeness:
        """The closeness of `direction` over all parameters together."""
        return self._closeness(direction, list(direction))

    def _closeness(self, direction: Mapping[str, Tensor], names: list[str]) -> Closeness:
        missing = [name for name in names if name in self.reasons]
        if missing:
            others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            return _unknown_closeness(f"{missing[0]}{others}: {self.reasons[missing[0]]}")
        return closeness([(direction[name], self.direction[name]) for name in names])


def closeness(pairs: Iterable[tuple[Tensor, Tensor]]) -> Closeness:
    """How close the first of each pair of tensors is to the second, over all of them together.

    >>> close = closeness([(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))])
    >>> round(close.cosine, 4), round(close.distance, 4), round(close.sine, 4)
    (0.7071, 1.0, 0.7071)
    """
    exact = [(d.detach().to("cpu", torch.float64), n.to("cpu", torch.float64)) for d, n in pairs]
    dot = sum(float((d * n).sum()) for d, n in exact)
    gap, size, ours = (
        _norm(x) for x in ((d - n for d, n in exact), (n for _, n in exact), (d for d, _ in exact))
    )
    if size == 0:
        return _unknown_closeness("the gradient is zero here, and so is Newton's direction")
    if ours == 0:
        return Closeness(math.nan, gap / size, 1.0, "this direction is zero, so it has no angle to Newton's")
    scale = max(dot, 0.0) / ours**2
    # Not √(1 - cosine²), which has no digits left where the two nearly agree.
    sine = _norm(scale * d - n for d, n in exact) / size
    return Closeness(dot / (ours * size), gap / size, sine)


def _unknown_closeness(reason: str) -> Closeness:
    return Closeness(math.nan, math.nan, math.nan, reason)


def newton(
    problem: Problem,
    alpha: float,
    *,
    parameters: int = NEWTON_LIMIT,
    operations: float = REFERENCE_OPERATIONS,
) -> Newton:
    """The exact damped Newton direction of `problem`, where its size and its cost are within the limits.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    >>> problem = Problem(model, "cross-entropy", torch.eye(3), torch.tensor([0, 1, 0]))
    >>> exact = newton(problem, alpha=0.05)
    >>> round(exact.joint(exact.direction).cosine, 9)
    1.0
    """
    return NewtonReference(problem, parameters=parameters, operations=operations).at(alpha)


class NewtonReference:
    """The Newton directions of a problem at any damping, from one Krylov space for each block.

    `spent` counts the operations so far, in multiplications and additions.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        parameters: int = NEWTON_LIMIT,
        operations: float = REFERENCE_OPERATIONS,
    ) -> None:
        self.sizes = _sizes(problem)
        self.operations, self.spent = operations, 0.0
        self.refusal = ""
        total = sum(self.sizes.values())
        if total > parameters:
            self.refusal = f"left out: {total:,} parameters, more than the limit of {parameters:,}"
            return
        # What products are charged at the least may settle it, before anything is copied or multiplied.
        self._check_operations(product_operations(0, problem))
        if not self.refusal:
            self._begin(_in_float64(problem))

    def _begin(self, problem: Problem) -> None:
        blocks, gradient = estimate("hessian", problem).blocks, problem.gradient()
        self.spaces = {name: _space(block, gradient[name]) for name, block in blocks.items()}
        self.shapes = {name: gradient[name].shape for name in blocks}
        self.costs: dict[str, float] = {}
        for name, space in self.spaces.items():
            with counting() as counted:
                space.grow(1)
            self.costs[name] = product_operations(counted.total, problem)
            self.spent += self.costs[name]
            self._check_operations(max(self.costs.values()))
            if self.refusal:
                self.spaces = {}
                return

    def _check_operations(self, each: float) -> None:
        """Refuse where the fewest products, of so many operations `each`, are beyond the limit."""
        remaining = len(self.sizes) * FEWEST * each
        if remaining > self.operations:
            self.refusal = (
                f"left out: {FEWEST} products with each of {len(self.sizes)} blocks would take "
                f"{remaining:.1e} operations, more than the limit of {self.operations:.1e} "
                f"(--reference-limit)"
            )

    def at(self, alpha: float) -> Newton:
        """The direction at damping α."""
        if self.refusal:
            return Newton({}, dict.fromkeys(self.sizes, self.refusal))
        solved = {name: self._solve(name, alpha) for name in self.spaces}
        reasons = {name: reason for name, (_, reason) in solved.items() if reason}
        named = solved.items()
        return Newton({name: d.reshape(self.shapes[name]) for name, (d, _) in named}, reasons)

    def largest_eigenvalue(self) -> float:
        """The largest Ritz value over all blocks: a lower bound of the largest eigenvalue, NaN if unknown."""
        found = [float(s.ritz()[0][-1]) for s in getattr(self, "spaces", {}).values() if s.steps]
        return max(found, default=math.nan)

    def _solve(self, name: str, alpha: float) -> tuple[Tensor, str]:
        """-n of one block in the parameter's shape, and why it is not to be used, if so."""
        space = self.spaces[name]
        most = min(MAX_STEPS, max(1, BASIS_BYTES // (8 * space.start.numel())))
        while True:
            if _indefinite(space, alpha):
                reason = "the damped Hessian is indefinite, so Newton's direction need not be one of descent"
                return torch.zeros_like(space.start), reason
            solution, residual = space.solve(1 - alpha, alpha)
            if residual <= TOLERANCE:
                return -solution, ""
            steps = min(GROWTH, most - space.steps)
            if steps <= 0 or self.spent + steps * self.costs[name] > self.operations:
                within = f"{space.steps} products, the limit of {self.operations:.1e} operations or of memory"
                return -solution, f"not solved to {TOLERANCE:g}: residual {residual:.1e} after {within}"
            before = space.steps
            space.grow(steps)
            self.spent += (space.steps - before) * self.costs[name]


def _space(block: Block, gradient: Tensor) -> Krylov:
    shape = gradient.shape
    return Krylov(lambda x: (block @ x.reshape(shape)).flatten(), gradient.detach().flatten())


def _indefinite(space: Krylov, alpha: float) -> bool:
    if not space.steps:
        return False
    values, _ = space.ritz()
    return bool((1 - alpha) * values[0] + alpha <= 0)


def _sizes(problem: Problem) -> dict[str, int]:
    """How many numbers each parameter with a block has."""
    parameters = dict(problem.model.named_parameters())
    names = [name for layer in problem.layers for name in layer.names]
    return {name: parameters[name].numel() for name in names}


def _in_float64(problem: Problem) -> Problem:
    model = copy.deepcopy(problem.model).to("cpu", torch.float64)
    batches = [(pytree.tree_map_only(Tensor, _real, b.inputs), _real(b.targets)) for b in problem.batches()]
    data = (batches,) if problem.streamed else batches[0]
    chosen = list(problem.network.parameters)
    output = problem.network.call.output
    return Problem(model, problem.criterion, *data, layers=chosen, l2=problem.l2, output=output)


def _real(targets: Tensor) -> Tensor:
    return targets.to("cpu", torch.float64) if targets.is_floating_point() else targets.to("cpu")


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


LARGEST, SMALLEST = 2.0**6, 2.0**-16
SECTIONS = 4
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Descent:
    """The relative decrease of the loss along a direction; NaN on another batch where there is none.

    `rate` is the best step size, `line` what was tried: (η, loss) in rising order of η.
    """

    full: float
    best: float
    rate: float
    other: float
    line: tuple[tuple[float, float], ...]


class DescentBench:
    """Measures directions from the parameters of a problem, on a copy of its model.

    >>> model = torch.nn.Linear(1, 1, bias=False).double()
    >>> torch.nn.init.constant_(model.weight, 2.0)
    Parameter containing:
    tensor([[2.]], dtype=torch.float64, requires_grad=True)
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> bench = DescentBench(Problem(model, "mse", one, 0 * one))
    >>> found = bench.along({"weight": -4 * one})
    >>> round(found.full, 3), round(found.best, 2), round(found.rate, 1)
    (0.0, 1.0, 0.5)
    """

    def __init__(self, problem: Problem, other: Problem | None = None) -> None:
        self.problem, self.other = problem, other
        self._model = copy.deepcopy(problem.model)
        self._call = ModelCall(self._model, problem.network.call.output)
        self._start = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self.loss = self._loss(problem)
        self._other_loss = math.nan if other is None else self._loss(other)

    def along(self, direction: Mapping[str, Tensor]) -> Descent:
        """The decrease of the loss along `direction`."""
        step = {name: direction[name].detach() for name in direction}
        tried: dict[float, float] = {}

        def loss_at(rate: float) -> float:
            if rate not in tried:
                with self._moved(step, rate):
                    tried[rate] = self._loss(self.problem)
            return tried[rate]

        full = loss_at(1.0)
        best = _best_rate(loss_at)
        other = math.nan
        if self.other is not None:
            with self._moved(step, best):
                other = self._share(self._loss(self.other), self._other_loss)
        line = tuple(sorted(tried.items()))
        return Descent(self._share(full, self.loss), self._share(tried[best], self.loss), best, other, line)

    def _share(self, loss: float, start: float) -> float:
        return 1 - loss / start if start > 0 else math.nan

    def _moved(self, step: Mapping[str, Tensor], rate: float) -> _Moved:
        return _Moved(self._model, self._start, step, rate)

    def _loss(self, problem: Problem) -> float:
        with torch.no_grad():
            terms = [self._terms(batch.inputs, batch.targets) for batch in problem.batches()]
            total = sum(float(one.total_weight) for one in terms)
            data = sum(float(one.loss) * float(one.total_weight) for one in terms) / total
            if not problem.l2:
                return data
            chosen = dict(self._model.named_parameters())
            squares = sum(float(chosen[name].square().sum()) for name in problem.network.parameters)
            return data + 0.5 * problem.l2 * squares

    def _terms(self, inputs: Inputs, targets: Tensor) -> LossTerms:
        logits = self._call(inputs)
        layout = self.problem.torch_layout
        return LossTerms.of(self.problem.criterion, logits, targets, torch_layout=layout)


class _Moved:
    """The model at θ + ηd inside, at θ outside."""

    def __init__(
        self, model: torch.nn.Module, start: Mapping[str, Tensor], step: Mapping[str, Tensor], rate: float
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.start, self.step, self.rate = start, step, rate

    def __enter__(self) -> None:
        self._set(self.rate)

    def __exit__(self, *error: object) -> None:
        self._set(0.0)

    def _set(self, rate: float) -> None:
        with torch.no_grad():
            for name, change in self.step.items():
                start = self.start[name]
                self.parameters[name].copy_(start if rate == 0 else start + rate * change.to(start))


def _best_rate(loss_at: Callable[[float], float]) -> float:
    """The step size of the first minimum from 1 on; a loss that is not finite counts as the worst."""

    def value(rate: float) -> float:
        loss = loss_at(rate)
        return loss if math.isfinite(loss) else math.inf

    rate = 1.0
    for candidate in _along(2.0 if value(2.0) < value(1.0) else 0.5):
        if not value(candidate) < value(rate) and math.isfinite(value(rate)):
            break
        rate = candidate
    low, high = rate / 2, rate * 2
    for _ in range(SECTIONS):
        first = high * (low / high) ** GOLDEN
        second = low * (high / low) ** GOLDEN
        if value(first) < value(second):
            high = second
        else:
            low = first
    found: Iterable[float] = (rate, first, second)
    return min(found, key=value)


def _along(factor: float) -> Iterator[float]:
    rate = factor
    while SMALLEST <= rate <= LARGEST:
        yield rate
        rate *= factor


def predicted_decrease(
    curvature: Curvature, gradient: Mapping[str, Tensor], direction: Mapping[str, Tensor], loss: float
) -> float:
    """What the quadratic model with this curvature promises of a full step, as a share of the loss."""
    step = {name: direction[name].detach() for name in curvature.blocks}
    image = curvature @ step
    slope = sum(float((gradient[name] * step[name]).sum()) for name in step)
    bend = sum(float((image[name] * step[name]).sum()) for name in step)
    return -(slope + bend / 2) / loss if loss > 0 else math.nan


def backpropagate(problem: Problem, inputs: Inputs, targets: Tensor) -> float:
    """Add the gradient of the mean loss of a batch to the parameters' `.grad`; the loss itself."""
    with torch.enable_grad():
        logits = problem.network.call(inputs)
        terms = LossTerms.of(problem.criterion, logits, targets, torch_layout=problem.torch_layout)
        share = terms.within * terms.share[:, None]
        logits.backward(terms.as_logits(problem.criterion.gradients(terms.logits, terms.targets), share))
    if problem.l2:
        for parameter in problem.network.parameters.values():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=problem.l2)
    return float(terms.loss)
