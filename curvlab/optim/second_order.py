"""`SecondOrder`: any provider with any solver as a torch optimizer.

    d = solve(C, g, α),   v ← μ v + s d,   θ ← (1 - ηλ) θ + η v

with learning rate η, decoupled weight decay λ, momentum μ (0: v = s d) and clipping
s = min(1, max_grad_norm / ‖g‖). Every solver is linear in g, so scaling d clips g; ‖g‖ is known without
forming a gradient. The plain step forms nothing of a weight's size; momentum and curvatures that
outlive their batch (`ema`, `refresh_every`) do.

`spring` = μ is a momentum that the new rows may correct: near μ d₋, of the last direction, that one which
solves the damped system sC + τI,

    d = μ d₋ - (sC + τI)⁻¹ (s g + μ s C d₋),   θ ← (1 - ηλ) θ + η d

with s g the clipped gradient. A batch's C has few rows; what they say nothing of is kept from before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from curvlab.criteria import Criterion
from curvlab.criteria.registry import criterion_named
from curvlab.curvature import Curvature
from curvlab.curvature_io import Packed
from curvlab.defaults import STEP_ALPHA, STEP_LR, STEP_PROVIDER, STEP_SOLVER
from curvlab.distributed.agreement import adopt_first_rank, agree
from curvlab.distributed.communicator import communicator_of
from curvlab.exceptions import ProblemError, SpecError
from curvlab.linalg.execution import collected, full_precision
from curvlab.linalg.steps import Gradient
from curvlab.measure.device import keep_freed_memory, readable
from curvlab.model.network import Network, unwrap
from curvlab.optim.average import average, kept
from curvlab.optim.batch_statistics import NOTE, BatchStatistics, running_statistics
from curvlab.optim.capture import Capture, CapturedSteps, check_capturable
from curvlab.optim.guard import (
    Change,
    StagnationWarning,
    check_finite,
    check_writable,
    looks_at_residual,
    stagnated,
)
from curvlab.optim.levenberg_marquardt import LevenbergMarquardt
from curvlab.problem import Problem
from curvlab.providers import estimate
from curvlab.providers.base import Chosen, Provider, estimate_jointly, estimate_with_gradient
from curvlab.providers.registry import providers
from curvlab.solvers import Solution, solve
from curvlab.solvers.base import Mixed, Solver
from curvlab.solvers.registry import solvers
from curvlab.specs import check_number

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
        momentum: factor of the running sum of directions (formed: one buffer per parameter).
        spring: factor of the last direction in the SPRING momentum (formed as well); not together with
            `momentum`. Made for curvatures of few rows, `structure=layer` with solver `exact`.
        weight_decay: decoupled weight decay.
        max_grad_norm: scale the step as if the gradient had at most this norm.
        ema: exponential average of the curvature, C̄ ← ε C̄ + (1-ε) C with ε = min(1 - 1/k, ema) at the
            k-th estimate.
        refresh_every: estimate the curvature at every k-th step only.
        adapt: Levenberg-Marquardt adaptation of alpha; True for its defaults.
        process_group: step on the rows of all ranks of this group: every rank calls `step` with its own
            part of the batch (which may have no rows), and all take the same step. All ranks begin with the
            parameters and buffers of rank 0: one that had others gets rank 0's, and is warned. Settings or
            weights that differ later end all ranks with a `RankError`, and so does an error of one.
        batchnorm: `"running"` for models with batch normalisation in training mode, which are refused
            without it: the gradient and the loss are those with the batch's statistics, and the curvature is
            that with the running ones, which a step updates once, as torch's own forward does. The
            solution's notes and the optimizer's `repr` mention it.
        capture: steps of which the host reads nothing, and of which a graph of the device can therefore be
            made; True, or a `Capture` with the number of steps after which their checks are read (100). A
            step that fails writes nothing, nor does any after it; the reading raises what was wrong, with the
            number of the step, as do `read` and `state_dict`. For batches of one shape; the operations are
            captured again where lr, alpha or momentum change. Residuals are not looked at.

    Where rounding stops a solve far from its solution (`stagnated` with a relative residual above 1e-2, as
    in float32 near a stationary point) a `StagnationWarning` is given once; residuals are looked at in the
    tenth step and in every hundredth. `on_solution`, if set, is called with every step's `Solution` before
    the parameters change. The model is used in the mode it is in; layers that are random in training mode
    are refused.

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
        spring: float = 0.0,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        ema: float = 0.0,
        refresh_every: int = 1,
        adapt: LevenbergMarquardt | bool = False,
        process_group: ProcessGroup | None = None,
        batchnorm: Literal["running"] | None = None,
        capture: Capture | bool = False,
    ) -> None:
        communicator = communicator_of(process_group)
        try:
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
            self.spring = _fraction("spring", spring)
            self.ema, self.refresh_every = _fraction("ema", ema), _count("refresh_every", refresh_every)
            self.adapt = (LevenbergMarquardt() if adapt else None) if isinstance(adapt, bool) else adapt
            self.process_group = process_group
            refused = ("adapt", "max_grad_norm", "ema", "process_group", "batchnorm")
            given = {name: getattr(self, name) for name in refused}
            given["refresh_every"] = self.refresh_every if self.refresh_every > 1 else 0
            if capture:
                check_capturable(given)
            self.capture = (Capture() if capture else None) if isinstance(capture, bool) else capture
            self._captured = None if self.capture is None else CapturedSteps(self.capture)
            self.on_solution: Callable[[Solution], None] | None = None
            self._base: Problem | None = None
            self._kept: Curvature | None = None
            self._steps = self._estimates = 0
            self._said_stagnated = False
            defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
            super().__init__(self._everything() if params is None else params, defaults)
        except Exception as error:
            communicator.raise_on_all(error)
        communicator.collect(lambda: None)  # so that what is wrong on one rank is raised on all
        adopt_first_rank(communicator, network)
        keep_freed_memory(self.param_groups[0]["params"][0].device)

    @property
    def alpha(self) -> float:
        """The damping α of the next step."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        expected = "the identity's share, a number in (0, 1]"
        self._alpha = check_number("alpha", value, expected, lambda x: 0 < x <= 1)

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
        try:
            _check_group(group)
            if self.spring and group["momentum"]:
                raise SpecError(
                    f"spring={self.spring} with momentum={group['momentum']}: both add a part of the last "
                    f"direction to the next. Use one of them, with 0 for the other"
                )
        except SpecError:
            self.param_groups.pop()
            raise
        self._base = None

    @full_precision
    def step(self, inputs: Any, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Take one step on a batch, or on the (inputs, targets) that a closure returns; returns the loss.

        A step that would write NaN or infinity raises `SolveError` with the layer's name; parameters,
        running statistics and optimizer are then as they were. `p.grad` is neither read nor written.
        """
        if self._captured is not None:
            with torch.no_grad():
                return self._captured.step(self, self._unread, self._usual, inputs, targets)
        return self._usual(inputs, targets)[0]

    def read(self) -> None:
        """Read the checks of captured steps now, and raise what was wrong; nothing without `capture`."""
        if self._captured is not None:
            self._captured.read(self)

    def _unread(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, list[Change], object]:
        """The loss and the changes of a step of which nothing is read, and what a graph of it refers to."""
        if self.on_solution is not None:
            raise SpecError(
                "on_solution with capture=True: a replayed step shows no solution. Use one of them"
            )
        problem = self._problem(inputs, targets)
        loss, gradient, fresh = self._observe(problem, True, None)
        assert fresh is not None
        right: Mapping[str, Tensor] = self._spring_gradient(fresh, gradient, 1.0) if self.spring else gradient
        solution, changes = self._solve(fresh, right, 1.0)
        self._base = problem.empty_like()
        return loss, changes, (problem, solution)

    def _usual(self, inputs: Any, targets: Tensor | None) -> tuple[Tensor, list[Change], object]:
        """A step that reads what it has to; returns the loss and the changes that it has made."""
        communicator = communicator_of(self.process_group)
        with torch.no_grad(), self._running_statistics(self._model) as statistics:
            try:
                problem = self._problem(*_batch(inputs, targets))
            except Exception as error:
                communicator.raise_on_all(error)
            estimating = self._kept is None or self._steps % self.refresh_every == 0
            # Of one batch on an accelerator all checks are read together, before anything is written.
            together = self.process_group is None and isinstance(inputs, Tensor)
            with collected() if together else nullcontext() as checks:
                loss, gradient, fresh = self._observe(problem, estimating, statistics)
                curvature, keep = self._curvature(problem, fresh)
                if not curvature.live and not curvature.matrix_free:
                    problem.release_recording()  # the solve needs none of the graph's memory
                clipping = self._clipping(gradient)
                right: Mapping[str, Tensor] = gradient
                if self.spring:
                    right, clipping = self._spring_gradient(curvature, gradient, clipping), 1.0
                solution, changes = self._solve(curvature, right, clipping)
                if checks is not None and checks.read():  # a factorisation was mended in place
                    solution, changes = self._solve(curvature, right, clipping)
                    checks.read()
            self._base = problem.empty_like()  # knows the layers, for a rank that gets no rows next
            # No rank writes before all can.
            device = self.param_groups[0]["params"][0].device
            agree(communicator, lambda: self._check(changes, solution), on=device)
            adapt = self.adapt if self.adapt and (self._steps + 1) % self.adapt.every == 0 else None
            predicted = _predicted(changes, solution, curvature, gradient) if adapt else 0.0
            self._apply(changes)
            self._kept, self._estimates, self._steps = keep, self._estimates + estimating, self._steps + 1
            if adapt:
                after = self._loss_after(problem, statistics)
                self._alpha = adapt.adapted(self._alpha, float(loss) - after, predicted)
        return loss, changes, None

    def _solve(
        self, curvature: Curvature, gradient: Mapping[str, Tensor], clipping: float
    ) -> tuple[Solution, list[Change]]:
        group = self.process_group
        solution = solve(self._solver, curvature, gradient, alpha=self._alpha, process_group=group)
        changes = list(self._changes(solution, clipping))
        if group is None:
            check_finite(changes)
        return solution, changes

    def _check(self, changes: list[Change], solution: Solution) -> None:
        """Raise what speaks against writing the step, and show its solution to who asked for it."""
        check_writable(changes)
        if self.process_group is not None:
            check_finite(changes)
        due = not self._said_stagnated and looks_at_residual(self._steps)
        if due and readable(changes[0].parameter) and (sentence := stagnated(solution)):
            self._said_stagnated = True
            warnings.warn(sentence, StagnationWarning, stacklevel=6)
        if self.on_solution is not None:
            self.on_solution(solution)

    def _running_statistics(self, model: nn.Module) -> AbstractContextManager[BatchStatistics | None]:
        return nullcontext() if self.batchnorm is None else running_statistics(model)

    def _problem(self, inputs: Any, targets: Tensor | None) -> Problem:
        """The step's problem, which is looked at where an error on one rank reaches all."""
        if self.process_group is not None and isinstance(inputs, Tensor) and len(inputs) == 0:
            inputs, targets = [], None
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
                loss = problem.loss()
                if not estimating:
                    return loss, problem.gradient(), None
                curvature, gradient = estimate_with_gradient(self._estimated(problem), problem)
                return loss, gradient, curvature
        communicator = communicator_of(self.process_group)
        chosen = Chosen.jointly([self._provider] if estimating else [], problem, communicator)
        found = estimate_jointly(
            chosen, problem, communicator, gradient=True, loss=True, settings=self._settings()
        )
        return found.joined.loss, found.joined.gradient, found.curvatures[0] if estimating else None

    def _settings(self) -> dict[str, object]:
        """What must be the same on all ranks that step together, by what messages call it."""
        own = ("alpha", "spring", "max_grad_norm", "ema", "refresh_every", "adapt")
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {name: getattr(self, name) for name in own} | {
            "the provider": self._provider,
            "the solver": self._solver,
            "the parameter groups": groups,
            "the number of steps taken": self._steps,
        }

    def _estimated(self, problem: Problem) -> str | Provider:
        """The provider, or one that gives the solver the same step from fewer statistics."""
        # Levenberg-Marquardt reads the whole matrix besides.
        if self._reads != "mean" or self.adapt is not None:
            return self._provider
        given = providers.make(self._provider)
        found = given.for_mean_input(problem)
        return self._provider if found == given else found

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

    def _spring_gradient(
        self, curvature: Curvature, gradient: Gradient, clipping: float
    ) -> dict[str, Tensor]:
        """c g + μ s C d₋ with c the clipping: what the system is solved for."""
        found = {name: clipping * gradient.view(name) for name in gradient}
        stepped = [p for group in self.param_groups for p in group["params"] if p in self.state]
        last = {self._names[p]: self.state[p]["momentum_buffer"] for p in stepped}
        if not last:
            return found
        whole = {name: last.get(name, torch.zeros_like(value)).to(value) for name, value in found.items()}
        image = curvature @ whole
        factor = self.spring * Mixed(self._alpha).scale
        return {name: value + factor * image[name] for name, value in found.items()}

    def _changes(self, solution: Solution, scale: float) -> Iterator[Change]:
        for group in self.param_groups:
            for p in group["params"]:
                name, momentum = self._names[p], self.spring or group["momentum"]
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

    def _loss_after(self, problem: Problem, statistics: BatchStatistics | None) -> float:
        """The loss of the step's own rows with the parameters that it has written."""
        try:
            if statistics is not None and statistics.layers:
                return float(statistics.loss(problem))
            return float(problem.loss(process_group=self.process_group))
        except ProblemError:
            return float("inf")

    def __repr__(self) -> str:
        own = {"provider": self._provider, "solver": self._solver, "alpha": self._alpha}
        own |= {"batchnorm": NOTE.partition(": ")[2]} if self.batchnorm else {}
        lines = "".join(f"    {name}: {value}\n" for name, value in own.items())
        head, _, groups = super().__repr__().partition("\n")
        return f"{head}\n{lines}{groups}"

    def state_dict(self) -> dict[str, Any]:
        """The groups and buffers as torch gives them; damping, counts and a kept curvature beside them."""
        self.read()
        own = {"alpha": self._alpha, "steps": self._steps, "estimates": self._estimates}
        packed = None if self._kept is None else vars(self._kept.pack())
        return {**super().state_dict(), "second_order": {**own, "curvature": packed}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, of an optimizer with the same parameters.

        A state that does not fit is refused with `ProblemError`, and nothing of it is taken.
        """
        own = self._own_state(state_dict)
        device = self.param_groups[0]["params"][0].device
        packed = own["curvature"]
        kept = None if packed is None else Curvature.unpack(Packed(**packed)).to(device)
        super().load_state_dict(state_dict)
        self._captured = None if self.capture is None else CapturedSteps(self.capture)
        self._alpha, self._steps, self._estimates = own["alpha"], own["steps"], own["estimates"]
        self._kept = kept

    def _own_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What a state holds beside torch's own, once all of it is known to fit."""
        own = state_dict.get("second_order") if isinstance(state_dict, dict) else None
        if not isinstance(own, dict) or not {"alpha", "steps", "estimates", "curvature"} <= own.keys():
            raise ProblemError(
                "the state is not one of a SecondOrder: it has no `second_order` with alpha, steps, "
                "estimates and curvature. Give what the state_dict() of a SecondOrder returned"
            )
        check_number("alpha", own["alpha"], "a number in (0, 1]", lambda value: 0 < value <= 1)
        saved, groups = state_dict["param_groups"], self.param_groups
        sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
        if sizes[0] != sizes[1]:
            raise ProblemError(
                f"the state has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}: give the "
                f"state of an optimizer with the same parameters"
            )
        for group in saved:
            _check_group(group)
        for index, parameter in enumerate(p for group in groups for p in group["params"]):
            buffer = state_dict["state"].get(index, {}).get("momentum_buffer")
            if buffer is not None and buffer.shape != parameter.shape:
                raise ProblemError(
                    f"the state's momentum of `{self._names[parameter]}` has shape {tuple(buffer.shape)}; "
                    f"expected {tuple(parameter.shape)}: give the state of an optimizer of the same model"
                )
        return own

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: all but `on_solution`, which is the caller's own.

        The copy of an optimizer alone has a model of its own; copy both together, as in
        `copy.deepcopy((model, optimizer))`, to step the copied model.
        """
        if self.process_group is not None:
            raise ProblemError(
                "an optimizer with a process_group can be neither copied nor pickled: the group belongs to "
                "these processes. Use state_dict(), and load it into one that is made where it is used"
            )
        # Optimizer's own has its groups and state only; what is derived from the model is made again.
        self.read()
        captured = None if self.capture is None else CapturedSteps(self.capture)
        return {**self.__dict__, "on_solution": None, "_base": None, "_captured": captured}


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
        deltas = {name: torch.zeros_like(gradient.view(name)) for name in gradient}
        deltas |= {change.name: change.form() for change in changes}
        image = curvature @ deltas
        for name, delta in deltas.items():
            total -= (delta * (gradient.view(name) + 0.5 * image[name])).sum().cpu().double()
        return float(total)
    reductions = []
    for change in changes:
        measures, scale = solution.blocks[change.name].measures, change.rate * change.scale
        reductions.append(scale * measures.slope() + 0.5 * scale**2 * measures.quadratic())
    for reduction in torch.stack(reductions).cpu().double():  # read together
        total -= reduction
    return float(total)


def _check_group(group: dict[str, Any]) -> None:
    """Refuse a parameter group whose rates are missing, or no numbers in their ranges."""
    missing = [name for name in ("lr", "momentum", "weight_decay") if name not in group]
    if missing:
        raise SpecError(f"the parameter group has no {', '.join(missing)}; expected a number for each")
    _rate("lr", group["lr"])
    _fraction("momentum", group["momentum"])
    _rate("weight_decay", group["weight_decay"])


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


def _rate(name: str, value: object) -> float:
    return check_number(name, value, "a finite number that is not negative", lambda x: 0 <= x < inf)


def _fraction(name: str, value: object) -> float:
    return check_number(name, value, "a number in [0, 1); 0 turns it off", lambda x: 0 <= x < 1)


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    return check_number(name, value, "a positive number, or None for no limit", lambda x: x > 0)


def _count(name: str, value: object) -> int:
    return int(check_number(name, value, "1 or more steps, a whole number", lambda x: x >= 1 and x % 1 == 0))
