"""Optimizers by name: `second-order[provider=…,solver=…]`, and the baselines that it is compared with.

    sgd, adam, lbfgs, muon       with the fields of the classes below
    adamw, rmsprop, nadam, …     every other class of `torch.optim`, in lower case, with its own fields
    package.module:function      whatever takes the parameters (the model, where its first argument is called
                                 `model`) and `lr`, and gives a torch optimizer: the class of another
                                 package, or a function of one's own

The gradient of a baseline is backpropagated from the criterion's closed form, Σ c_i ∇ξ(h^k_i) / Σ c_i, which
is what the second-order step uses too. Torch is imported when an optimizer is built, or one of its own asked
for: help pages and lists read the configurations alone.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from curvlab import defaults, imports
from curvlab.exceptions import SpecError, UserCodeError
from curvlab.specs import Registry
from curvlab.studies.schema import check_rate, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from curvlab.criteria import Criterion
    from curvlab.criteria.base import LossTerms
    from curvlab.distributed.communicator import Communicator

__all__ = [
    "LBFGS",
    "SGD",
    "Adam",
    "GradientSteps",
    "Muon",
    "OptimizerRegistry",
    "OptimizerSpec",
    "SecondOrderSpec",
    "Stepper",
    "optimizers",
]

R = TypeVar("R")


class Stepper(Protocol):
    """What training needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, each with its `lr`."""

    def step(self, inputs: Any, targets: Tensor) -> Tensor:
        """One step on a batch; returns the loss before it."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""


@dataclass(frozen=True, eq=False)
class _Forward:
    """A batch's logits with their graph, and the loss of each of its rows: the examples, or loss terms."""

    logits: Tensor
    terms: LossTerms | None
    gradients: Tensor
    losses: Tensor
    weights: Tensor
    weighted: bool

    def cotangents(self, weights: Tensor) -> Tensor:
        """What is sent back through the logits, for a weight of each row."""
        if self.terms is None:
            return self.gradients * weights[:, None]
        by_example = weights.reshape(self.terms.examples, self.terms.per_example)
        return self.terms.as_logits(self.gradients, by_example)


class GradientSteps:
    """A torch optimizer that reads `p.grad`, stepping on the batches of all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | _Together,
        model: nn.Module,
        criterion: Criterion,
        communicator: Communicator | None = None,
    ) -> None:
        from curvlab.distributed.communicator import LOCAL

        self.optimizer, self.model, self.criterion = optimizer, model, criterion
        self.communicator = communicator or LOCAL

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optimizer.param_groups

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step of the optimizer, which may ask for the loss several times; returns the first."""
        losses: list[Tensor] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            losses.append(self._backpropagate(inputs, targets))
            return losses[-1]

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        return losses[0]

    def _backpropagate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        passed = self._on_all_ranks(lambda: self._forward(inputs, targets))
        weights = passed.weights / self._total_weight(passed)
        self._on_all_ranks(lambda: passed.logits.backward(passed.cotangents(weights)))
        return self._reduce(weights @ passed.losses)

    def _on_all_ranks(self, function: Callable[[], R]) -> R:
        """What `function` returns; where it raises on one rank, all raise instead of waiting for its sums."""
        from curvlab.distributed.agreement import agree

        return agree(self.communicator, function, on=next(self.model.parameters()).device)

    def _forward(self, inputs: Tensor, targets: Tensor) -> _Forward:
        import torch

        from curvlab.criteria.base import LossTerms

        with torch.enable_grad():
            logits = self.model(inputs)
        rows, terms = logits.detach(), None
        if logits.ndim > 2:  # an example has several predictions, each with a target of its own
            terms = LossTerms.of(self.criterion, logits, targets)
            rows, targets = terms.logits, terms.targets
        self.criterion.check_targets(rows, targets)
        given = self.criterion.weights(rows, targets)
        weights = rows.new_ones(len(rows)) if given is None else given
        gradients, losses = self.criterion.gradients(rows, targets), self.criterion.losses(rows, targets)
        return _Forward(logits, terms, gradients, losses, weights, given is not None)

    def _total_weight(self, passed: _Forward) -> Tensor:
        """Σ c_j over the rows of all ranks."""
        from curvlab.measure import device
        from curvlab.model.recording import AllWeightsZeroError

        total = self.communicator.sum(passed.weights.sum())
        # Without weights the sum is the number of examples, and a batch has at least one.
        if passed.weighted and device.readable(total) and not bool(total > 0):
            raise AllWeightsZeroError
        return total

    def _reduce(self, loss: Tensor) -> Tensor:
        """Add up the gradients and the loss over all ranks, in one all-reduce."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        held = [loss, *(p.grad for p in parameters if p.grad is not None)]
        total, *gradients = self.communicator.sums(held)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return total

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        self.optimizer.load_state_dict(state_dict)


@dataclass(frozen=True)
class OptimizerSpec(ABC):
    """An optimizer's configuration; its learning rate is a finite number above zero."""

    def __post_init__(self) -> None:
        check_rate(self.lr)

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate."""

    @abstractmethod
    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        """The optimizer for a model; each rank has rows of its own, and all take the same step."""

    def labels(self, name: str) -> dict[str, str]:
        """How result rows name it: `optimizer`, `provider` and `solver`."""
        return {"optimizer": name, "provider": "", "solver": ""}

    def resolve(self) -> OptimizerSpec:
        """The same with every name in it in its canonical form."""
        return self


@dataclass(frozen=True)
class SecondOrderSpec(OptimizerSpec):
    """Any provider with any solver; see `curvlab.optim.SecondOrder`.

    `adapt_every` is 0, or after how many steps Levenberg-Marquardt adapts alpha.
    """

    provider: str = setting(defaults.STEP_PROVIDER, "Curvature of the step.", flags=("-p", "--provider"))
    solver: str = setting(defaults.STEP_SOLVER, "Solver of the step.", flags=("-s", "--solver"))
    lr: float = setting(
        defaults.STEP_LR, "Learning rate.", default_words=f"{defaults.STEP_LR:g}, or the baseline's own"
    )
    alpha: float = setting(defaults.STEP_ALPHA, "Damping, (1-α)C + αI.")
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    ema: float = 0.0
    refresh_every: int = 1
    adapt_every: int = 0
    spring: float = 0.0

    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        from curvlab.optim import LevenbergMarquardt, SecondOrder

        return SecondOrder(
            model,
            criterion,
            self.provider,
            self.solver,
            self.lr,
            self.alpha,
            momentum=self.momentum,
            spring=self.spring,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            ema=self.ema,
            refresh_every=self.refresh_every,
            adapt=LevenbergMarquardt(every=self.adapt_every) if self.adapt_every else False,
            process_group=None if communicator is None else communicator.process_group,
        )

    def labels(self, name: str) -> dict[str, str]:
        label = f"{self.provider} + {self.solver}"
        return {"optimizer": label, "provider": self.provider, "solver": self.solver}

    def resolve(self) -> OptimizerSpec:
        from curvlab.providers.registry import providers
        from curvlab.solvers.registry import solvers

        provider, solver = providers.canonical(self.provider), solvers.canonical(self.solver)
        return replace(self, provider=provider, solver=solver)


@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """torch.optim.SGD with momentum: the paper's baseline."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction("momentum", self.momentum)
        _check_decay(self.weight_decay)
        if self.nesterov and not self.momentum:
            raise SpecError("nesterov=true needs a momentum above 0, such as momentum=0.9")

    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        import torch

        made = torch.optim.SGD(
            model.parameters(),
            self.lr,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )
        return GradientSteps(made, model, criterion, communicator)


@dataclass(frozen=True)
class Adam(OptimizerSpec):
    """torch.optim.Adam; its weight decay is decoupled (AdamW)."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction("beta1", self.beta1)
        _check_fraction("beta2", self.beta2)
        _check_decay(self.weight_decay)
        if not 0 < self.eps < math.inf:
            raise SpecError(f"eps={self.eps}: expected a finite number above 0, such as 1e-8")

    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        import torch

        betas = (self.beta1, self.beta2)
        made = torch.optim.AdamW(model.parameters(), self.lr, betas, self.eps, weight_decay=self.weight_decay)
        return GradientSteps(made, model, criterion, communicator)


@dataclass(frozen=True)
class LBFGS(OptimizerSpec):
    """torch.optim.LBFGS: `max_iter` iterations on every batch, with a strong-Wolfe line search."""

    lr: float = 1.0
    max_iter: int = 5
    history_size: int = 10
    line_search: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_iter", "history_size"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)}: expected 1 or more")

    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        import torch

        made = torch.optim.LBFGS(
            model.parameters(),
            self.lr,
            self.max_iter,
            history_size=self.history_size,
            line_search_fn="strong_wolfe" if self.line_search else None,
        )
        return GradientSteps(made, model, criterion, communicator)


@dataclass(frozen=True)
class Muon(OptimizerSpec):
    """torch.optim.Muon for the matrices and AdamW for all other parameters, at one learning rate.

    Muon's step is scaled to the size of AdamW's (`match_rms_adamw`), so that one rate suits both.
    """

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.0
    nesterov: bool = True

    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        import torch

        if not hasattr(torch.optim, "Muon"):
            raise SpecError(f"`muon` is torch's own, from 2.9 on; this is torch {torch.__version__}")
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        made: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                self.lr,
                self.weight_decay,
                self.momentum,
                self.nesterov,
                adjust_lr_fn="match_rms_adamw",
            )
            made.append(muon)
        if others:
            made.append(torch.optim.AdamW(others, self.lr, weight_decay=self.weight_decay))
        return GradientSteps(_Together(made), model, criterion, communicator)


class _Together:
    """Several torch optimizers, each with parameters of its own, that step together."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state_dict[str(number)])


class _MadeSpec(OptimizerSpec):
    """The configuration of an optimizer that curvlab does not know: its fields are the maker's arguments."""

    maker: ClassVar[Callable[..., Any]]
    asked: ClassVar[str]
    takes_model: ClassVar[bool]

    def build(
        self, model: nn.Module, criterion: Criterion, communicator: Communicator | None = None
    ) -> Stepper:
        subject = model if self.takes_model else list(model.parameters())
        try:
            made = type(self).maker(subject, **asdict(self))
        except Exception as error:
            raise UserCodeError(
                f"optimizer `{self.asked}` was not made ({type(error).__name__}: {error}); it is called with "
                f"the {'model' if self.takes_model else 'list of parameters'}, {', '.join(asdict(self))}"
            ) from error
        wanted = ("step", "zero_grad", "param_groups", "state_dict", "load_state_dict")
        missing = [name for name in wanted if not hasattr(made, name)]
        if missing:
            raise SpecError(
                f"optimizer `{self.asked}` gave a {type(made).__name__} without {', '.join(missing)}; "
                f"expected a torch.optim.Optimizer"
            )
        return GradientSteps(made, model, criterion, communicator)


def _made_spec(asked: str, maker: Callable[..., Any]) -> type[OptimizerSpec]:
    """A configuration with one field for each argument of `maker` that is a number, a flag or a text.

    An argument of another kind (None, a function) stays as the maker has it.
    """
    first, *arguments = inspect.signature(maker).parameters.values()
    kinds = {one.name: kind for one in arguments if (kind := _kind_of(one)) is not None}
    if "lr" not in (one.name for one in arguments):
        raise SpecError(f"optimizer `{asked}` takes no argument `lr`; wrap it in a function that does")
    defaults_of = {one.name: one.default for one in arguments}
    lr = defaults_of["lr"] if isinstance(defaults_of["lr"], (int, float)) else 1e-3
    values: dict[str, Any] = {name: kinds[name](defaults_of[name]) for name in kinds} | {"lr": float(lr)}
    annotated = {
        name: tuple[float, ...] if kinds.get(name) is tuple else type(values[name]) for name in values
    }
    fields = [(name, annotated[name], field(default=value)) for name, value in values.items()]
    space = {"maker": staticmethod(maker), "asked": asked, "takes_model": first.name == "model"}
    made: type[OptimizerSpec] = make_dataclass(
        asked, fields, bases=(_MadeSpec,), namespace={**space, "__module__": __name__}, frozen=True
    )
    made.__doc__ = f"`{asked}`, with its own arguments."
    return made


def _kind_of(argument: inspect.Parameter) -> Callable[[Any], Any] | None:
    """How a value of an argument is read, by its default and annotation; None where it cannot be set."""
    value, annotation = argument.default, str(argument.annotation)
    if isinstance(value, bool):
        return bool
    if isinstance(value, str):
        return str
    if isinstance(value, int) and value and "float" not in annotation:
        return int
    if isinstance(value, (int, float)):  # a bare 0 may become 0.01, as weight_decay=0
        return int if annotation in ("int", "<class 'int'>") else float
    if isinstance(value, tuple) and value and all(isinstance(one, float) for one in value):
        return tuple
    return None


class OptimizerRegistry(Registry["OptimizerSpec"]):
    """The registered optimizers, those of `torch.optim` by their names in lower case, and addresses.

    >>> optimizers.make("rmsprop[lr=0.02]").lr
    0.02
    >>> optimizers.label("torch.optim:NAdam[lr=0.01]")
    'torch.optim:NAdam[lr=0.01]'
    """

    def _make_entry(self, name: str) -> type[OptimizerSpec] | None:
        maker = imports.load(name, "optimizer") if imports.is_address(name) else _torch_optimizer(name)
        if maker is None:
            return None
        if not callable(maker):
            raise SpecError(f"optimizer `{name}` is a {type(maker).__name__}; expected a class or a function")
        return _made_spec(name, maker)


def _torch_optimizer(name: str) -> Callable[..., Any] | None:
    """The class of `torch.optim` with this name in lower case."""
    import torch

    base = torch.optim.Optimizer
    known = {
        attribute.lower(): found
        for attribute, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, base) and found is not base
    }
    return known.get(name.lower())


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise SpecError(f"{name}={value}: expected a number from 0 to below 1, such as 0.9")


def _check_decay(value: float) -> None:
    if not 0 <= value < math.inf:
        raise SpecError(f"weight_decay={value}: expected a finite number of 0 or more, such as 1e-4")


optimizers = OptimizerRegistry("optimizer")
optimizers.register("second-order", SecondOrderSpec, "any provider with any solver")
optimizers.register("sgd", SGD, "torch's SGD, momentum 0.9")
optimizers.register("adam", Adam, "torch's Adam")
optimizers.register("lbfgs", LBFGS, "torch's L-BFGS, a few iterations a batch")
optimizers.register("muon", Muon, "torch's Muon for matrices, AdamW for the rest")
