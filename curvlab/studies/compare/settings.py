"""The settings of a comparison: what is compared, how, and how often; read from and written to TOML.

subject     a `Setup` (by name, rebuilt anywhere) or a `Problem` (as it is, in this process)
study       hash of all that every number depends on: subject, α, device, dtype, threads, versions, and the
            hash of curvlab's own source: rows that another source measured belong to another study
key         hash of a study and one choice in it: a provider, a pair, an optimizer
"""

from __future__ import annotations

import hashlib
import math
import platform
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlab import imports
from curvlab.architectures import architectures
from curvlab.criteria.registry import criteria
from curvlab.data import datasets
from curvlab.exceptions import SpecError
from curvlab.measure.source import source_hash
from curvlab.problem import Problem
from curvlab.providers import Provider
from curvlab.providers.registry import providers as provider_registry
from curvlab.registry import Registry
from curvlab.solvers import Mixed, Solver
from curvlab.solvers.registry import solvers as solver_registry
from curvlab.studies.compare.newton import PARAMETERS
from curvlab.studies.setup import Setup
from curvlab.studies.small.errors import DEFAULT_PROVIDERS
from curvlab.studies.store import key_of
from curvlab.studies.train.optimizers import check_rate, optimizers

__all__ = ["DEFAULT_SOLVERS", "Settings", "build"]

DEFAULT_SOLVERS = ("kfi", "sm-kfi", "cg", "ea-cg")


@dataclass(frozen=True)
class Settings:
    """A comparison, resolved: labels are short, every open choice is made.

    >>> settings = Settings.of(Setup(), providers=["pch[gamma=-1]"], solvers=["cg"])
    >>> settings.providers, settings.repetitions
    (('pch-1',), 5)
    """

    subject: Setup | Problem
    providers: tuple[str | Provider, ...] = DEFAULT_PROVIDERS
    solvers: tuple[str | Solver, ...] = DEFAULT_SOLVERS
    alpha: float = 0.05
    repetitions: int = 5
    epochs: int = 0
    train_batch: int = 100
    lr: float | None = None
    baselines: tuple[str, ...] = ("sgd", "adam")
    newton_limit: int = PARAMETERS
    threads: int = 0

    @classmethod
    def of(cls, subject: Setup | Problem, **fields: Any) -> Settings:
        """Settings with every choice made and every name checked."""
        made = cls(subject, **fields)
        return replace(
            made,
            subject=subject.resolve() if isinstance(subject, Setup) else subject,
            providers=_distinct(provider_registry, made.providers),
            solvers=_distinct(solver_registry, made.solvers),
            alpha=float(made.alpha),
            threads=made.threads or torch.get_num_threads(),
        )._checked()

    def _checked(self) -> Settings:
        try:
            Mixed(self.alpha)
        except ValueError as error:
            raise SpecError(str(error)) from error
        for name, least in (
            ("repetitions", 1),
            ("epochs", 0),
            ("train_batch", 1),
            ("threads", 1),
            ("newton_limit", 0),
        ):
            if getattr(self, name) < least:
                raise SpecError(f"{name}={getattr(self, name)}: use {least} or more")
        if self.lr is not None:
            check_rate(self.lr)
        for name in self.baselines:
            optimizers.make(name).resolve()
        if self.epochs and not self._trains:
            raise SpecError(
                f"epochs={self.epochs} needs a data set with a training and a test part; name one "
                '(data="digits", …) instead of your own batches, or leave epochs out'
            )
        return self

    @property
    def _trains(self) -> bool:
        return isinstance(self.subject, Setup) and not imports.is_address(self.subject.data)

    @property
    def pairs(self) -> list[tuple[str | Provider, str | Solver]]:
        """Every provider with every solver."""
        return [(provider, solver) for provider in self.providers for solver in self.solvers]

    def fields(self) -> dict[str, Any]:
        """The settings as plain values, for config.toml and for frames."""
        subject = (
            _readable(self.subject) if isinstance(self.subject, Setup) else {"problem": repr(self.subject)}
        )
        names = ("alpha", "repetitions", "epochs", "train_batch", "lr", "newton_limit", "threads")
        return {
            "providers": [provider_registry.label(provider) for provider in self.providers],
            "solvers": [solver_registry.label(solver) for solver in self.solvers],
            "baselines": list(self.baselines),
            **{name: getattr(self, name) for name in names},
            **subject,
        }

    @cached_property
    def study(self) -> str:
        """The hash that the rows of this comparison share."""
        return key_of(
            {
                "subject": _identity(self.subject),
                "alpha": self.alpha,
                "threads": self.threads,
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                },
                "source": source_hash(),
            }
        )

    def key(self, kind: str, **choice: Any) -> str:
        """The key of a row: the study, its kind and the choice it is about."""
        return key_of({"study": self.study, "kind": kind, **choice})


def _readable(setup: Setup) -> dict[str, Any]:
    """The fields of a setup, names in their shortest form."""
    registries: dict[str, Registry[Any]] = {"arch": architectures, "data": datasets, "criterion": criteria}
    fields = setup.fields()
    for name, registry in registries.items():
        if fields[name] is not None and not imports.is_address(fields[name]):
            fields[name] = registry.label(fields[name])
    return fields | ({"batch": None} if imports.is_address(setup.data) else {})  # their batches have a size


def _distinct(registry: Any, specs: Any) -> tuple[Any, ...]:
    """Names by their label, instances as they are; the second of two equal choices is left out."""
    given = [specs] if isinstance(specs, str) or not isinstance(specs, (list, tuple)) else specs
    if not given:
        raise SpecError(f"no {registry.kind} was given; name at least one of {', '.join(registry.names())}")
    chosen = {registry.identity(s): registry.label(s) if isinstance(s, str) else s for s in given}
    return tuple(chosen.values())


def _identity(subject: Setup | Problem) -> dict[str, Any]:
    """What a subject is told apart by: names say it all, objects are hashed by their values."""
    if isinstance(subject, Problem):
        return {"problem": _fingerprint(subject)}
    own = any(imports.is_address(text) for text in (subject.data, subject.criterion, subject.model or ""))
    return subject.fields() | ({"values": _fingerprint(build(subject))} if own else {})


def build(subject: Setup | Problem) -> Problem:
    """The problem; a user's own model and data draw what they draw at random from the seed."""
    if isinstance(subject, Problem):
        return subject
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
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if math.prod(flat.shape) else b""
