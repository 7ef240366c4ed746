"""The settings of a comparison: what is compared, how, and how often; read from and written to TOML.

subject     a `Setup` (by name, rebuilt anywhere) or a `Problem` (as it is, in this process)
study       hash of all that every number depends on: subject, α, device, dtype, threads, versions, and the
            hash of curvlab's own source: rows that another source measured belong to another study
key         hash of a study and one choice in it: a provider, a pair, an optimizer

Torch is imported when settings are resolved: the help page and the completion of `curvlab compare` read the
fields alone.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from curvlab import defaults, imports, specs
from curvlab.exceptions import ArgumentError, SpecError
from curvlab.measure.source import source_hash
from curvlab.registry import Registry
from curvlab.studies.schema import Setting, extra_columns, extra_settings, setting, settings_of
from curvlab.studies.setup import SETUP, Setup
from curvlab.studies.store import key_of
from curvlab.studies.train.plan import TRAIN_BATCH

if TYPE_CHECKING:
    from torch import Tensor

    from curvlab.problem import Problem
    from curvlab.providers import Provider
    from curvlab.solvers import Solver

__all__ = ["Settings", "all_settings", "build", "command_settings"]

BOTH = ("compare", "plan")


@dataclass(frozen=True)
class Settings:
    """A comparison, resolved: labels are short, every open choice is made.

    `extra` holds the settings that others have registered (`curvlab.studies.schema.register_setting`).

    >>> settings = Settings.of(Setup(), providers=["pch[gamma=-1]"], solvers=["cg"])
    >>> settings.providers, settings.repetitions
    (('pch-1',), 15)
    """

    subject: Setup | Problem
    providers: tuple[str | Provider, ...] = setting(
        defaults.PROVIDERS,
        "Provider, once for each.",
        flags=("-p", "--provider"),
        decides="",
        commands=BOTH,
    )
    solvers: tuple[str | Solver, ...] = setting(
        defaults.SOLVERS, "Solver, once for each.", flags=("-s", "--solver"), decides="", commands=BOTH
    )
    alpha: float = setting(defaults.ALPHA, "Damping, (1-α)C + αI.", commands=BOTH)
    repetitions: int = setting(
        15,
        "Rounds of timing, in each of which every cell is timed once.",
        flags=("-r", "--repetitions"),
        least=1,
        decides="",
    )
    epochs: int = setting(
        0,
        "Train every cell and the baselines for N epochs, and as long as the slowest of them takes.",
        least=0,
        decides="convergence",
    )
    tune: bool = setting(
        True,
        "Choose learning rates and α on a validation set before training.",
        default_words="--tune",
        decides="",
    )
    train_seeds: int = setting(5, "Trainings of each, with weights of their own.", least=1, decides="")
    train_batch: int = setting(TRAIN_BATCH, "Examples a training step sees.", least=1, decides="convergence")
    lr: float | None = setting(
        None,
        "Learning rate of the second-order runs.",
        kind=float,
        default_words="the optimizer's",
        decides="convergence",
    )
    baselines: tuple[str, ...] = setting(
        defaults.BASELINES, "Optimizer to train beside them.", flags=("--baseline",), decides=""
    )
    newton_limit: int = setting(
        defaults.NEWTON_LIMIT,
        "Solve the exact Newton direction for up to N parameters.",
        least=0,
        decides="solve",
    )
    threads: int = setting(0, "Threads of torch.", least=1, default_words="as torch chooses")
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, subject: Setup | Problem, **given: Any) -> Settings:
        """Settings with every choice made and every name checked."""
        import torch

        from curvlab.providers.registry import providers
        from curvlab.solvers.registry import solvers

        own = {one.name for one in settings_of(cls)}
        added = {one.name: one.default for one in extra_settings()}
        for name in given:
            if name not in own | added.keys():
                raise ArgumentError(str(specs.unknown("setting", name, own | added.keys())))
        made = cls(subject, **{name: value for name, value in given.items() if name in own})
        made = replace(
            made,
            subject=subject.resolve() if isinstance(subject, Setup) else subject,
            providers=_distinct(providers, made.providers),
            solvers=_distinct(solvers, made.solvers),
            baselines=_names(made.baselines),
            alpha=float(made.alpha),
            threads=made.threads or torch.get_num_threads(),
            extra=added | {name: value for name, value in given.items() if name in added},
        )
        made._check()
        return made

    def value(self, name: str) -> Any:
        """The value of a setting, whoever has added it."""
        return self.extra[name] if name in self.extra else getattr(self, name)

    def values(self, decides: str) -> dict[str, Any]:
        """The settings that rows of a kind depend on, by name (`Setting.decides`)."""
        return {one.name: self.value(one.name) for one in _own_and_extra() if one.decides == decides}

    def _check(self) -> None:
        from curvlab.solvers import Mixed
        from curvlab.studies.train.optimizers import check_rate, optimizers

        for one in _own_and_extra():
            one.check(self.value(one.name))
        try:
            Mixed(self.alpha)
        except ValueError as error:
            raise SpecError(str(error)) from error
        if self.lr is not None:
            check_rate(self.lr)
        for name in self.baselines:
            optimizers.make(name).resolve()
        if self.epochs and not self._trains:
            raise SpecError(
                f"epochs={self.epochs} needs a data set with a training and a test part; name one "
                '(data="digits", …) instead of your own batches, or leave epochs out'
            )

    @property
    def _trains(self) -> bool:
        return isinstance(self.subject, Setup) and not imports.is_address(self.subject.data)

    @property
    def pairs(self) -> list[tuple[str | Provider, str | Solver]]:
        """Every provider with every solver."""
        return [(provider, solver) for provider in self.providers for solver in self.solvers]

    def fields(self) -> dict[str, Any]:
        """The settings as plain values, for config.toml and for frames."""
        from curvlab.providers.registry import providers
        from curvlab.solvers.registry import solvers

        registries: dict[str, Registry[Any]] = {"providers": providers, "solvers": solvers}
        subject = self.subject
        found = {one.name: self.value(one.name) for one in _own_and_extra()}
        for name, registry in registries.items():
            found[name] = [registry.label(one) for one in found[name]]
        found["baselines"] = list(self.baselines)
        return found | (_short_fields(subject) if isinstance(subject, Setup) else {"problem": repr(subject)})

    @cached_property
    def study(self) -> str:
        """The hash that the rows of this comparison share."""
        import torch

        return key_of(
            {
                "subject": _identity(self.subject),
                **self.values("study"),
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                },
                "source": source_hash(),
            }
        )

    def key(self, kind: str, **choice: Any) -> str:
        """The key of a row: the study, its kind, what decides that kind, and the choice it is about."""
        # Where a column was added, rows that lack it are of another kind of cell.
        added = (
            {"columns": [one.name for one in extra_columns()]} if kind == "solve" and extra_columns() else {}
        )
        return key_of({"study": self.study, "kind": kind, **self.values(kind), **added, **choice})


def _own_and_extra() -> tuple[Setting, ...]:
    return (*settings_of(Settings), *extra_settings())


def all_settings() -> tuple[Setting, ...]:
    """Everything that a configuration file of a comparison may set, also what others have registered."""
    return (*_own_and_extra(), *SETUP)


def command_settings(command: str) -> tuple[Setting, ...]:
    """The settings that are options of a command (`compare` or `plan`), without those of the setup."""
    return tuple(one for one in _own_and_extra() if command in one.commands)


def _short_fields(setup: Setup) -> dict[str, Any]:
    """The fields of a setup, names in their shortest form."""
    from curvlab.architectures import architectures
    from curvlab.criteria.registry import criteria
    from curvlab.data import datasets

    registries: dict[str, Registry[Any]] = {"arch": architectures, "data": datasets, "criterion": criteria}
    fields = setup.fields()
    for name, registry in registries.items():
        if fields[name] is not None and not imports.is_address(fields[name]):
            fields[name] = registry.label(fields[name])
    return fields | ({"batch": None} if imports.is_address(setup.data) else {})  # their batches have a size


def _distinct(registry: Any, specs: Any) -> tuple[Any, ...]:
    """Names by their label, instances as they are; the second of two equal choices is left out."""
    given = _names(specs)
    if not given:
        raise SpecError(f"no {registry.kind} was given; name at least one of {', '.join(registry.names())}")
    chosen = {registry.identity(s): registry.label(s) if isinstance(s, str) else s for s in given}
    return tuple(chosen.values())


def _names(given: Any) -> tuple[Any, ...]:
    """Several choices as a tuple; one by itself counts as one."""
    return (given,) if isinstance(given, str) or not isinstance(given, (list, tuple)) else tuple(given)


def _identity(subject: Setup | Problem) -> dict[str, Any]:
    """What a subject is told apart by: names say it all, objects are hashed by their values."""
    if not isinstance(subject, Setup):
        return {"problem": _fingerprint(subject)}
    own = any(imports.is_address(text) for text in (subject.data, subject.criterion, subject.model or ""))
    return subject.fields() | ({"values": _fingerprint(build(subject))} if own else {})


def build(subject: Setup | Problem) -> Problem:
    """The problem; a user's own model and data draw what they draw at random from the seed."""
    if not isinstance(subject, Setup):
        return subject
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed)
        return subject.build_problem()


def _fingerprint(problem: Problem) -> str:
    """A hash of the parameters, the batch and the loss, which shows a change of activation or criterion."""
    digest = hashlib.sha256(repr(problem).encode())
    for name, tensor in {**problem.tensors, "loss": problem.loss()}.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if math.prod(flat.shape) else b""
