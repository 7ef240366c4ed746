"""`SecondOrder`: any provider with any solver as a torch optimizer.

    d = solve(C, g, α),   v ← μ v + s d,   θ ← (1 - ηλ) θ + η v

with learning rate η, decoupled weight decay λ, momentum μ (0: v = s d) and clipping
s = min(1, max_grad_norm / ‖g‖). Every solver is linear in g, so scaling d clips g; ‖g‖ is known without
forming a gradient. The plain step forms nothing of a weight's size; momentum and curvatures that
outlive their batch (`ema`, `refresh_every`) do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from curvlab.criteria import Criterion
from curvlab.criteria.registry import criterion_named
from curvlab.curvature import Curvature
from curvlab.curvature_io import Packed
from curvlab.defaults import STEP_ALPHA, STEP_LR, STEP_PROVIDER, STEP_SOLVER
from curvlab.distributed.communicator import communicator_of
from curvlab.exceptions import ProblemError, SpecError
from curvlab.gradient import Gradient
from curvlab.linalg.precision import full_precision
from curvlab.measure.device import keep_freed_memory
from curvlab.model.graph import Network, unwrap
from curvlab.optim.average import average, kept
from curvlab.optim.batch_statistics import NOTE, BatchStatistics, running_statistics
from curvlab.optim.guard import Change, check_finite
from curvlab.optim.levenberg_marquardt import LevenbergMarquardt
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.providers.base import Provider
from curvlab.providers.estimate import Chosen, estimate_jointly
from curvlab.providers.registry import providers
from curvlab.solvers import Solution, solve
from curvlab.solvers.base import Solver
from curvlab.solvers.registry import solvers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SecondOrder"]

Closure = Callable[[], tuple[Tensor, Tensor]]


class SecondOrder(torch.optim.Optimizer):
    """Second-order steps θ ← θ + lr · d by a provider and a solver.

    Args:
        model: any model; every trainable parameter is stepped.
        criterion: a name, a torch loss or a `Criterion`.
        provider: the curvature, by name or as a provider.
        solver: the solver, by name or as a solver. For one with the mean input factor a provider with
            `sharing=expand` is estimated with `reduce`, which gives it the same step and is cheaper; the
            solution's `provider` and `residual_full` are then of that.
        lr: learning rate, a group's own where it has one.
        alpha: the damping, (1-α)C + αI; may be set anew at any time. The default is smaller than the paper's
            0.05, with which `compare` measures. Where all eigenvalues of the curvature are below α the step
            is about -g/α; for 0.05 that is so, at the start, in six of the eight layers of the paper's
            CIFAR-10 network, and they hardly move.
        params: parameters or parameter groups to train; all by default.
        momentum: factor of the running sum of directions (formed: one buffer a parameter).
        weight_decay: decoupled weight decay.
        max_grad_norm: scale the step as if the gradient had at most this norm.
        ema: exponential average of the curvature, C̄ ← ε C̄ + (1-ε) C with ε = min(1 - 1/k, ema) at the
            k-th estimate.
        refresh_every: estimate the curvature at every k-th step only.
        adapt: Levenberg-Marquardt adaptation of alpha; True for its defaults.
        process_group: step on the rows of all ranks of this group: every rank calls `step` with its own
            part of the batch (which may have no rows), and all take the same step.
        batchnorm: `"running"` for models with batch normalisation in training mode, which are refused
            without it: the gradient and the loss are those with the batch's statistics, and the curvature is
            that with the running ones, which a step updates once, as torch's own forward does. The
            solution's notes and the optimizer's `repr` say so.

    `on_solution`, if set, is called with every step's `Solution` before the parameters change. The model
    is used in the mode it is in; layers that are random in training mode are refused.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    >>> optimizer = SecondOrder(model, "cross-entropy", provider="pch-1", solver="ea-cg")
    >>> inputs, targets = torch.eye(4), torch.tensor([0, 1, 0, 1])
    >>> first = optimizer.step(inputs, targets)
    >>> bool(optimizer.step(lambda: (inputs, targets)) < first)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: str | Criterion | Any,
        provider: str | Provider = STEP_PROVIDER,
        solver: str | Solver = STEP_SOLVER,
        lr: float = STEP_LR,
        alpha: float = STEP_ALPHA,
        *,
        params: Iterable[Any] | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        ema: float = 0.0,
        refresh_every: int = 1,
        adapt: LevenbergMarquardt | bool = False,
        process_group: ProcessGroup | None = None,
        batchnorm: Literal["running"] | None = None,
    ) -> None:
        self.batchnorm = _batchnorm(batchnorm, process_group)
        with self._running_statistics(unwrap(model)):
            network = Network.of(model)
        if self.batchnorm is not None and network.copied is not None:
            raise SpecError(
                f'batchnorm="{self.batchnorm}" with a model in {network.copied.dtype}: its running '
                f"statistics would be those of a float32 copy. Call model.float() first"
            )
        self._model, self._criterion = network.given, criterion_named(criterion)
        self._names = {p: name for name, p in network.given.named_parameters()}
        self._blocks = set(network.parameters)
        self._provider, self._solver = provider, solver
        self._reads = solvers.make(solver).input_factor
        providers.make(provider)
        self._alpha = 0.0
        self.alpha = alpha
        self.max_grad_norm = _positive("max_grad_norm", max_grad_norm)
        self.ema, self.refresh_every = _fraction("ema", ema), _count("refresh_every", refresh_every)
        self.adapt = (LevenbergMarquardt() if adapt else None) if isinstance(adapt, bool) else adapt
        self.process_group = process_group
        self.on_solution: Callable[[Solution], None] | None = None
        self._base: Problem | None = None
        self._kept: Curvature | None = None
        self._steps = self._estimates = 0
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(self._everything() if params is None else params, defaults)
        keep_freed_memory(self.param_groups[0]["params"][0].device)

    @property
    def alpha(self) -> float:
        """The damping α of the next step."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        if not 0 < value <= 1:
            raise SpecError(f"alpha={value}: the identity's share must be in (0, 1]")
        self._alpha = float(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own lr, momentum and weight_decay."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        unknown = [p for p in group["params"] if self._names.get(p) not in self._blocks]
        if unknown:
            shapes = [self._names.get(p) or tuple(p.shape) for p in unknown]
            self.param_groups.pop()
            raise ProblemError(
                f"{shapes} have no curvature: only trainable parameters of the model do. Leave them to "
                f"another optimizer"
            )
        _rate("lr", group["lr"])
        _fraction("momentum", group["momentum"])
        _rate("weight_decay", group["weight_decay"])
        self._base = None

    @full_precision
    def step(self, inputs: Any, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Take one step on a batch, or on the (inputs, targets) that a closure returns; returns the loss.

        A step that would write NaN or infinity raises `SolveError` with the layer's name; parameters,
        running statistics and optimizer are then as they were. `p.grad` is neither read nor written.
        """
        inputs, targets = _batch(inputs, targets)
        if self.process_group is not None and isinstance(inputs, Tensor) and len(inputs) == 0:
            inputs, targets = [], None
        with torch.no_grad(), self._running_statistics(self._model) as statistics:
            problem = self._problem(inputs, targets)
            estimating = self._kept is None or self._steps % self.refresh_every == 0
            loss, gradient, fresh = self._observe(problem, estimating, statistics)
            curvature, keep = self._curvature(problem, fresh)
            group = self.process_group
            solution = solve(self._solver, curvature, gradient, alpha=self._alpha, process_group=group)
            self._base = problem.empty_like()  # knows the layers, for a rank that gets no rows next
            changes = list(self._changes(solution, self._clipping(gradient)))
            check_finite(changes)
            if self.on_solution is not None:
                self.on_solution(solution)
            adapting = self.adapt is not None and (self._steps + 1) % self.adapt.every == 0
            predicted = _predicted(changes, solution, curvature, gradient) if adapting else 0.0
            self._apply(changes)
            self._kept, self._estimates, self._steps = keep, self._estimates + estimating, self._steps + 1
            if adapting:
                self._adapt(float(loss), predicted, problem, statistics)
        return loss

    def _running_statistics(self, model: nn.Module) -> AbstractContextManager[BatchStatistics | None]:
        return nullcontext() if self.batchnorm is None else running_statistics(model)

    def _problem(self, inputs: Any, targets: Tensor | None) -> Problem:
        """The step's problem, which is looked at where an error on one rank reaches all."""
        if self._base is None:
            self._base = Problem(self._model, self._criterion, [], layers=self._layers())
        return self._base.with_data(inputs, targets)

    def _layers(self) -> list[str]:
        trained = {self._names[p] for group in self.param_groups for p in group["params"]}
        return [name for name in self._names.values() if name in trained]

    def _everything(self) -> list[Tensor]:
        return [p for p in self._names if p.requires_grad]

    def _observe(
        self, problem: Problem, estimating: bool, statistics: BatchStatistics | None
    ) -> tuple[Tensor, Gradient, Curvature | None]:
        """Loss, gradient and, where it is time for one, a new curvature; of all ranks in one exchange."""
        if statistics is not None and statistics.layers:
            loss, gradient = statistics.gradient(problem)
            fresh = estimate(self._provider, problem) if estimating else None
            return loss, gradient, fresh and replace(fresh, notes=(*fresh.notes, NOTE))
        if self.process_group is None:
            with problem.trust_recording():
                loss, gradient = problem.loss(), problem.gradient()
                fresh = estimate(self._estimated(problem), problem) if estimating else None
            return loss, gradient, fresh
        communicator = communicator_of(self.process_group)
        chosen = Chosen.jointly([self._provider] if estimating else [], problem, communicator)
        found = estimate_jointly(chosen, problem, communicator, gradient=True, loss=True)
        return found.joined.loss, found.joined.gradient, found.curvatures[0] if estimating else None

    def _estimated(self, problem: Problem) -> Provider:
        """The provider, or one that gives the solver the same step from fewer statistics."""
        provider = providers.make(self._provider)
        # Levenberg-Marquardt reads the whole matrix besides.
        if self._reads == "mean" and self.adapt is None:
            return provider.for_mean_input(problem)
        return provider

    def _curvature(self, problem: Problem, fresh: Curvature | None) -> tuple[Curvature, Curvature | None]:
        """The curvature to step with and the one to keep for later steps, from a new one or the one kept."""
        if fresh is None:
            assert self._kept is not None
            return self._kept, self._kept
        if not self.ema and self.refresh_every == 1:
            return fresh, None
        own = kept(fresh, problem.tensors.values())
        if not self.ema or self._kept is None:
            return fresh, own
        decay = min(1 - 1 / (self._estimates + 1), self.ema)
        averaged = average(self._kept, own, decay, self._reads)
        return averaged, averaged

    def _clipping(self, gradient: Gradient) -> float:
        if self.max_grad_norm is None:
            return 1.0
        norm = float(gradient.norm())
        return self.max_grad_norm / norm if norm > self.max_grad_norm else 1.0

    def _changes(self, solution: Solution, scale: float) -> Iterator[Change]:
        for group in self.param_groups:
            for p in group["params"]:
                name, momentum = self._names[p], group["momentum"]
                buffer = self.state[p].get("momentum_buffer") if p in self.state else None
                if momentum and buffer is None:
                    buffer = torch.zeros_like(p, memory_format=torch.contiguous_format)
                yield Change(
                    name,
                    p,
                    solution.direction.step(name),
                    float(group["lr"]),
                    scale,
                    buffer if momentum else None,
                    momentum,
                    group["weight_decay"],
                )

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            change.apply()
            if change.buffer is not None:
                self.state[change.parameter]["momentum_buffer"] = change.buffer

    def _adapt(
        self, before: float, predicted: float, problem: Problem, statistics: BatchStatistics | None
    ) -> None:
        assert self.adapt is not None
        try:
            if statistics is not None and statistics.layers:
                after = float(statistics.loss(problem))
            else:
                after = float(problem.loss(process_group=self.process_group))
        except ProblemError:
            after = float("inf")
        self._alpha = self.adapt.adapted(self._alpha, before - after, predicted)

    def __repr__(self) -> str:
        own = {"provider": self._provider, "solver": self._solver, "alpha": self._alpha}
        own |= {"batchnorm": NOTE.partition(": ")[2]} if self.batchnorm else {}
        lines = "".join(f"    {name}: {value}\n" for name, value in own.items())
        head, _, groups = super().__repr__().partition("\n")
        return f"{head}\n{lines}{groups}"

    def state_dict(self) -> dict[str, Any]:
        """The groups and buffers as torch gives them; damping, counts and a kept curvature beside them."""
        own = {"alpha": self._alpha, "steps": self._steps, "estimates": self._estimates}
        packed = None if self._kept is None else vars(self._kept.pack())
        return {**super().state_dict(), "second_order": {**own, "curvature": packed}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, of an optimizer with the same parameters."""
        super().load_state_dict(state_dict)
        own = state_dict["second_order"]
        self._alpha, self._steps, self._estimates = own["alpha"], own["steps"], own["estimates"]
        device = self.param_groups[0]["params"][0].device
        packed = own["curvature"]
        self._kept = None if packed is None else Curvature.unpack(Packed(**packed)).to(device)


def _batch(inputs: Any, targets: Tensor | None) -> tuple[Any, Tensor | None]:
    given = inputs() if callable(inputs) and not isinstance(inputs, Tensor) else (inputs, targets)
    pair = isinstance(given, tuple | list) and len(given) == 2
    if not pair or (isinstance(given[0], Tensor) and given[1] is None):
        raise ProblemError(
            f"a scalar loss alone carries no curvature: call step(inputs, targets), or step(closure) with a "
            f"closure that returns (inputs, targets); got {_described(given)}"
        )
    return given[0], given[1]


def _described(given: Any) -> str:
    if isinstance(given, tuple | list):
        return " and ".join("no targets" if g is None else type(g).__name__ for g in given)
    return f"a closure that returned {'a scalar' if isinstance(given, Tensor) else type(given).__name__}"


def _predicted(changes: list[Change], solution: Solution, curvature: Curvature, gradient: Gradient) -> float:
    """-(gᵀδ + ½ δᵀCδ), block by block; from the factors unless momentum has formed δ."""
    total = torch.zeros((), dtype=torch.float64)
    if any(change.buffer is not None for change in changes):
        deltas = {name: torch.zeros_like(gradient[name]) for name in gradient}
        deltas |= {change.name: change.form() for change in changes}
        image = curvature @ deltas
        for name, delta in deltas.items():
            total -= (delta * (gradient[name] + 0.5 * image[name])).sum().cpu().double()
        return float(total)
    for change in changes:
        measures, scale = solution.blocks[change.name].measures, change.rate * change.scale
        reduction = scale * measures.slope() + 0.5 * scale**2 * measures.quadratic()
        total -= reduction.cpu().double()
    return float(total)


def _batchnorm(value: str | None, process_group: ProcessGroup | None) -> str | None:
    if value not in (None, "running"):
        raise SpecError(f'batchnorm={value!r}: expected "running", or None')
    if value is not None and process_group is not None:
        raise SpecError(
            f'batchnorm="{value}" with a process_group: the running statistics of the ranks would differ, '
            f"and with them the function whose curvature is joined. Step without process_group, or call "
            f"model.eval() and train with fixed statistics"
        )
    return value


def _rate(name: str, value: float) -> float:
    if not 0 <= float(value) < float("inf"):
        raise SpecError(f"{name}={value}: expected a finite number that is not negative")
    return value


def _fraction(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise SpecError(f"{name}={value}: expected a number in [0, 1); 0 turns it off")
    return value


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise SpecError(f"{name}={value}: expected a positive number, or None for no limit")
    return value


def _count(name: str, value: int) -> int:
    if value < 1:
        raise SpecError(f"{name}={value}: expected 1 or more steps")
    return value
