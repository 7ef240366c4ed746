"""The settings of a comparison: what is compared, where, how, and how often; read from and written to TOML.

subject     a `Setup` (by name, rebuilt anywhere) or a `Problem` (as it is, in this process)
study       hash of all that every number depends on: subject, α, device, dtype, threads, versions, and the
            hash of curvlab's own source: rows that another source measured belong to another study
key         hash of a study and one choice in it: a provider, a pair, an optimizer

It is measured at points on the way of a training, by name:

init          the model as it is built                 checkpoint   the state that a file holds
step:N        after N steps of Adam                    epoch:N      after N passes over the training set
trained       after as many steps as a stated cost buys, at most 100
given         a problem from Python, as it is

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab import defaults, imports
from curvlab.exceptions import ArgumentError, SpecError, unknown_name
from curvlab.measure.environment import source_hash
from curvlab.specs import Registry
from curvlab.studies.schema import (
    Setting,
    check_epochs,
    check_rate,
    extra_columns,
    extra_settings,
    setting,
    settings_of,
)
from curvlab.studies.setup import SETUP, Setup
from curvlab.studies.store import key_of
from curvlab.studies.train.plan import TRAIN_BATCH

if TYPE_CHECKING:
    from torch import Tensor

    from curvlab.problem import Problem
    from curvlab.providers import Provider
    from curvlab.solvers import Solver

__all__ = [
    "GIVEN",
    "Point",
    "Settings",
    "all_settings",
    "build",
    "command_settings",
    "damping_of",
    "read_points",
]

BOTH = ("compare", "plan")
LEAST_SECONDS = 1e-3  # that the quickest measurement takes, with its row
OF_STEPS = ("solve", "error", "control", "scene")  # kinds of rows that the limits of references decide


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
    alphas: tuple[str, ...] = setting(
        ("0.01", "0.5", "1%", "10%", "100%"),
        "Further dampings to measure steps at: α, or a share of the Hessian's largest eigenvalue.",
        metavar="X,Y%,…",
        decides="solve",
    )
    at: tuple[str, ...] = setting(
        (),
        "Points to measure at: init, trained, checkpoint, step:N, epoch:N, with commas; the last decides.",
        metavar="POINT,…",
        default_words="init,trained",
        decides="",
    )
    at_lr: float = setting(0.003, "Learning rate of the Adam steps that lead to these points.")
    checkpoint: str | None = setting(
        None,
        "State dict to begin at: safetensors, or torch's own, read with weights_only.",
        metavar="FILE",
        decides="",
    )
    seeds: int = setting(1, "Seeds of model and data to measure with.", least=1, decides="")
    batches: int = setting(
        0, "Batches to measure on.", least=1, default_words="3, or 1 of images or sequences", decides=""
    )
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
    reference_limit: float = setting(
        defaults.REFERENCE_OPERATIONS,
        "Operations that the exact Newton direction, and errors on any graph, may take.",
        least=0,
        decides="solve",
    )
    threads: int = setting(0, "Threads of torch.", least=1, most=1024, default_words="as torch chooses")
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
                raise ArgumentError(str(unknown_name("setting", name, own | added.keys())))
        made = cls(subject, **{name: value for name, value in given.items() if name in own})
        made = replace(
            made,
            subject=subject.resolve() if isinstance(subject, Setup) else subject,
            providers=_distinct(providers, made.providers),
            solvers=_distinct(solvers, made.solvers),
            baselines=_names(made.baselines),
            alpha=float(made.alpha),
            alphas=_split(made.alphas),
            at=read_points(_names(made.at)),
            threads=made.threads or torch.get_num_threads(),
            extra=added | {name: value for name, value in given.items() if name in added},
        )
        made = made._with_scenes()
        made._check()
        return made

    def _with_scenes(self) -> Settings:
        """Where to measure, if that was left open: never at an untrained model alone."""
        if not isinstance(self.subject, Setup):
            if self.at not in ((), (GIVEN,)) or self.seeds > 1 or self.batches > 1 or self.checkpoint:
                raise SpecError(
                    "at, seeds, batches and checkpoint need a model that can be built and trained again; "
                    "give a Setup (or use the command line) instead of a Problem, or leave them out"
                )
            return replace(self, at=(GIVEN,), batches=1)
        own = imports.is_address(self.subject.data)
        if own and self.batches > 1:
            raise SpecError(
                f"batches={self.batches}: `{self.subject.data}` is measured as it is, all of its batches "
                "together; name a data set, or leave batches out"
            )
        if self.checkpoint is not None and not Path(self.checkpoint).is_file():
            raise SpecError(f"checkpoint {self.checkpoint} is no file; give the path of a state dict")
        usual = ("checkpoint",) if self.checkpoint is not None else ("init", "trained")
        many = 1 if own or self.subject.input_kind != "rows" else 3
        made = replace(self, at=self.at or usual, batches=self.batches or many)
        if "checkpoint" in made.at and made.checkpoint is None:
            raise SpecError("point `checkpoint` needs a file: --checkpoint FILE")
        if GIVEN in made.at:
            raise SpecError(f"point `{GIVEN}` is that of a Problem; use init, trained, step:N or epoch:N")
        return made

    def on(self, problem: Problem) -> Settings:
        """The settings with providers as they are on this problem, which labels, keys and frames then carry.

        Off a chain `pch-1` is `pch[kind=rows,poseig=last]`; two that come out equal are one.
        """
        from curvlab.providers.base import resolved_choice
        from curvlab.providers.registry import providers

        return replace(
            self, providers=_distinct(providers, [resolved_choice(one, problem) for one in self.providers])
        )

    def resolutions(self, problem: Problem) -> dict[str, str]:
        """What each provider that was asked for by name is on this problem, for `resolved_as`."""
        from curvlab.providers.base import resolved_choice

        return {one: str(resolved_choice(one, problem)) for one in self.providers if isinstance(one, str)}

    def resolved_as(self, known: Mapping[str, str]) -> Settings | None:
        """The same from what these providers have turned out to be before; None where one of them has not."""
        from curvlab.providers.registry import providers

        try:
            return replace(self, providers=_distinct(providers, [known[one] for one in self.providers]))  # type: ignore[index]
        except (KeyError, SpecError):
            return None

    def value(self, name: str) -> Any:
        """The value of a setting, whoever has added it."""
        return self.extra[name] if name in self.extra else getattr(self, name)

    def values(self, decides: str) -> dict[str, Any]:
        """The settings that rows of a kind depend on, by name (`Setting.decides`)."""
        return {one.name: self.value(one.name) for one in _own_and_extra() if one.decides == decides}

    def _check(self) -> None:
        from curvlab.solvers import Mixed
        from curvlab.studies.train.optimizers import optimizers

        for one in _own_and_extra():
            one.check(self.value(one.name))
        try:
            Mixed(self.alpha)
            for text in self.alphas:
                damping_of(text, 1.0)
        except ValueError as error:
            raise SpecError(str(error)) from error
        check_rate(self.at_lr, "at_lr")
        if self.lr is not None:
            check_rate(self.lr)
        self._check_amount()
        check_epochs(self.epochs)
        for name in self.baselines:
            optimizers.make(name).resolve()
        if self.epochs and not self._trains:
            raise SpecError(
                f"epochs={self.epochs} needs a data set with a training and a test part; name one "
                '(data="digits", …) instead of your own batches, or leave epochs out'
            )

    def _check_amount(self) -> None:
        """Refuse what no machine ends with: more of the shortest measurements than fit into a day."""
        pairs, scenes = len(self.pairs), len(self.at) * self.seeds * self.batches
        cells = pairs * (scenes + len(self.at) * self.repetitions)
        days = cells * LEAST_SECONDS / 86_400
        if days > 1:
            raise SpecError(
                f"seeds={self.seeds:,}, batches={self.batches:,} and repetitions={self.repetitions:,} make "
                f"{cells:,} measurements of {pairs} pairs at {len(self.at)} points: at least {days:,.1f} "
                f"days. Use fewer of them"
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
        found |= {name: list(found[name]) for name in ("baselines", "alphas", "at")}
        return found | (_short_fields(subject) if isinstance(subject, Setup) else {"problem": repr(subject)})

    @cached_property
    def study(self) -> str:
        """The hash that the rows of this comparison share."""
        import torch

        return key_of(
            {
                "subject": _identity(self.subject),
                "checkpoint_bytes": _file_hash(self.checkpoint),
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
        decided = self.values("solve" if kind in OF_STEPS else kind)
        return key_of({"study": self.study, "kind": kind, **decided, **added, **choice})


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


def damping_of(text: str, largest: float) -> float:
    """α of `--alphas`: a number, or of a share s of the largest eigenvalue λ that with α/(1-α) = s λ.

    >>> damping_of("0.05", 3.0), damping_of("50%", 2.0)
    (0.05, 0.5)
    """
    share = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf) or not (share or value < 1):
        raise SpecError(
            f"alphas: `{text}` is neither a damping between 0 and 1 nor a share such as 10% of the largest "
            f"eigenvalue"
        )
    return value / 100 * largest / (1 + value / 100 * largest) if share else value


def _split(given: Any) -> tuple[str, ...]:
    """Texts, each with one value or several with commas."""
    parts = [part.strip() for text in _names(given) for part in str(text).split(",")]
    return tuple(dict.fromkeys(part for part in parts if part))


def _file_hash(path: str | None) -> str | None:
    """A hash of what the file holds; a file that is not there is an error when it is read."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def build(subject: Setup | Problem, epoch: int = 0, start: int = 0) -> Problem:
    """The problem; a user's own model and data draw what they draw at random from the seed.

    Of a data set by name, batch `start` of that epoch's order.
    """
    if not isinstance(subject, Setup):
        return subject
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed)
        return subject.build_problem(epoch, start)


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


GIVEN = "given"
MOST = 864_000_000  # steps of a tenth of a millisecond in a day
USABLE = (
    "init, trained, checkpoint, step:N or epoch:N (N from 1), several with commas: --at init,epoch:1,epoch:5"
)
WORDS = {
    GIVEN: "the model as it was given",
    "init": "the model as it is built, untrained",
    "checkpoint": "the checkpoint",
}


@dataclass(frozen=True)
class Point:
    """A place on the way of a training.

    >>> Point.read("epoch:5").words
    'after 5 epochs of Adam'
    """

    name: str
    kind: str
    count: int = 0

    @classmethod
    def read(cls, text: str) -> Point:
        """The point by its name."""
        kind, _, count = text.partition(":")
        plain = kind in ("init", "trained", "checkpoint", GIVEN) and not count
        counted = kind in ("step", "epoch") and count.isdecimal() and count.strip("0") != ""
        if not plain and not counted:
            raise SpecError(f"point `{text}` is not known; use {USABLE}")
        # Python reads no number of thousands of digits.
        if counted and (len(count) > 12 or int(count) > MOST):
            raise SpecError(
                f"point `{text[:60]}`: more than {MOST:,} steps take longer than a day even on the smallest "
                f"model; measure earlier, or begin at a --checkpoint"
            )
        return cls(text, kind, int(count or 0))

    @property
    def words(self) -> str:
        """The point in words, as reports name it."""
        if self.kind == "trained":
            return "after training"
        if self.kind in ("step", "epoch"):
            return f"after {self.count} {self.kind}{'s' if self.count > 1 else ''} of Adam"
        return WORDS[self.kind]


def read_points(names: tuple[str, ...]) -> tuple[str, ...]:
    """The points that are named, one or several with commas in each text, checked.

    >>> read_points(("init,epoch:1", "epoch:5"))
    ('init', 'epoch:1', 'epoch:5')
    """
    found = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if names and not found:
        raise SpecError(f"at=`{','.join(names)}` names no point; use {USABLE}")
    return tuple(dict.fromkeys(Point.read(name).name for name in found))
