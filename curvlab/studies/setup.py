"""The setup of a study: model, data and criterion by name, resolved once, built from a seed or a checkpoint.

Everything a run depends on is a field, so that equal setups are equal values with one canonical form;
what is left open is filled in by `resolve` (the architecture that fits the data, the device of `auto`).
Torch and all that needs it is imported when something is resolved or built: help pages read the fields.

A checkpoint may be anybody's: a state dict, as safetensors or torch.save writes it. Nothing in the file is
run: torch's own format is read with `weights_only`. What does not fit the model is refused, also what torch
would cast without a word, such as complex or integer weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab import imports
from curvlab.exceptions import SpecError
from curvlab.studies.schema import setting, settings_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from curvlab.architectures import Architecture
    from curvlab.criteria import Criterion
    from curvlab.data import Dataset, InputKind
    from curvlab.problem import Problem

__all__ = ["SETUP", "Setup", "check_seed", "load_weights"]

# Examples of images and of sequences have many rows each, and their networks take long.
USUAL_BATCH: dict[str, int] = {"rows": 500, "images": 16, "tokens": 16}


@dataclass(frozen=True)
class Setup:
    """What is studied: by name, or at a user's own address `package.module:attribute`.

    >>> Setup(data="digits").resolve().arch
    'fcnn[activation=sigmoid,bias=true,init=xavier-uniform,widths=64-32-16-10]'
    """

    arch: str | None = setting(None, "Architecture: a name, or widths such as 64-32-16-10.")
    activation: str | None = setting(
        None, "Activation of the architecture: sigmoid, tanh, relu, …", metavar="NAME"
    )
    model: str | None = setting(None, "Your own model, or a function that builds it.", metavar="MODULE:NAME")
    data: str = setting("digits", "Data set, or MODULE:NAME of your own batches.")
    data_dir: str | None = setting(
        None, "Folder that holds the data set (also: CURVLAB_DATA).", metavar="DIR"
    )
    criterion: str = setting("cross-entropy", "Criterion, or MODULE:NAME.")
    batch: int = setting(
        0, "Examples in a batch.", least=1, default_words="500 rows, or 16 images or token sequences"
    )
    seed: int = setting(0, "Seed of everything random.")
    device: str = setting("auto", "auto, cpu, cuda, mps, …", metavar="NAME")
    dtype: str = setting("float32", "Precision of the model and the data.", choices=("float32", "float64"))

    def resolve(self) -> Setup:
        """The same setup with every open choice made and every name in its canonical form."""
        from curvlab.architectures import architectures
        from curvlab.criteria.registry import criteria
        from curvlab.data import datasets
        from curvlab.measure import device as devices

        for one in SETUP:
            if one.name != "batch" or self.batch:
                one.check(getattr(self, one.name))
        check_seed(self.seed)
        self._check_model()
        data = self.data if imports.is_address(self.data) else datasets.canonical(self.data)
        criterion = (
            self.criterion if imports.is_address(self.criterion) else criteria.canonical(self.criterion)
        )
        device = str(devices.resolve(self.device))
        if device == "meta":
            raise SpecError("device `meta` holds no values to measure; use cpu, or `curvlab plan`")
        arch = None if self.model is not None else architectures.canonical(self._architecture())
        found = replace(self, arch=arch, activation=None, data=data, criterion=criterion, device=device)
        return replace(found, batch=found.examples)

    @property
    def examples(self) -> int:
        """How many examples a batch has: as given, or by what an example is.

        >>> Setup().examples, Setup(arch="resnet8", data="synthetic-images").examples
        (500, 16)
        """
        return self.batch or USUAL_BATCH[self.input_kind]

    @property
    def input_kind(self) -> InputKind:
        """What the model is given for an example: a row of features, an image, or tokens."""
        if self.model is not None:
            if imports.is_address(self.data):
                return "rows"  # their batches have the size they have
            data = self.load_data()
            return "tokens" if data.kind == "tokens" else "images" if data.train.shaped else "rows"
        from curvlab.architectures import architecture

        return architecture(self.arch or self._fitting()).input_kind

    def _check_model(self) -> None:
        """Refuse what would shape a named architecture where the model is the user's own."""
        given = {"arch": self.arch, "activation": self.activation}
        ignored = [f"{name}=`{value}`" for name, value in given.items() if value is not None]
        if self.model is not None and ignored:
            raise SpecError(
                f"{' and '.join(ignored)} would change nothing: the model is your own, `{self.model}`. "
                f"Leave {'it' if len(ignored) == 1 else 'them'} out, or leave out the model"
            )

    def _architecture(self) -> Architecture:
        """The architecture by name, with the ends that it leaves open taken from the data set."""
        from curvlab.architectures import architecture

        name = self.arch or self._fitting()
        found: Any = architecture(name)
        if self.activation is not None:
            found = replace(found, activation=self.activation)
        if imports.is_address(self.data):
            found = found.fit(*found.sizes)
        elif self.arch is None and name == "fcnn":
            loaded = self.load_data()
            found = replace(found, widths=(loaded.features, *found.widths[1:-1], loaded.outputs))
        else:
            found = self._fit_ends(found)
        chosen: Architecture = found
        return chosen

    def _fit_ends(self, found: Architecture) -> Architecture:
        """Its open ends taken from the data set, which is loaded only where its settings do not tell."""
        from curvlab.data import dataset

        source = dataset(self.data)
        known = source.sizes()
        if known is None and found.is_open:
            loaded = source.load(seed=self.seed, data_dir=self.data_dir)
            known = loaded.shape, loaded.outputs
        return found if known is None else found.fit(*known)

    def _fitting(self) -> str:
        """The name of the architecture that fits the data set: its own, or one by its widths."""
        from curvlab.data import dataset

        return "fcnn" if imports.is_address(self.data) else dataset(self.data).architecture

    def fields(self) -> dict[str, Any]:
        """The fields as plain values, for configuration files and keys."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def load_data(self) -> Dataset:
        """The data set by name, on the CPU (`Dataset.to` moves it); raises for a user's own data.

        Its inputs are rows, images or tokens, as the architecture takes them. A user's own model gets rows
        (tokens where the data are), unless an attribute `input_kind = "images"` of it says otherwise.

        >>> Setup(arch="resnet8", data="digits").load_data().train.all()[0].shape
        torch.Size([1438, 1, 8, 8])
        """
        if imports.is_address(self.data):
            raise SpecError(
                f"data `{self.data}` is a user's own batches, which have no training and test split"
            )
        from curvlab.architectures import architecture
        from curvlab.data import dataset

        found = dataset(self.data).load(seed=self.seed, data_dir=self.data_dir)
        if self.model is not None:
            usual: InputKind = "tokens" if found.kind == "tokens" else "rows"
            return found.given_as(getattr(imports.load(self.model, "model"), "input_kind", usual))
        chosen = architecture(self.arch or self._fitting())
        fitting = found.given_as(chosen.input_kind)
        return fitting.reconstruction() if self.arch is not None and chosen.reconstructs else fitting

    def build_model(self) -> nn.Module:
        """The model: the named architecture from the seed, or the user's own."""
        from torch import nn

        from curvlab.measure import device as devices

        device, dtype = devices.resolve(self.device), self.torch_dtype
        if self.model is None:
            self.check_size()
            resolved = self if self.arch is not None else self.resolve()
            return resolved._architecture().build(self.seed, dtype=dtype, device=device)
        made = imports.load(self.model, "model")
        if not isinstance(made, nn.Module) and callable(made):
            made = imports.call(made, self.model, "model")
        if not isinstance(made, nn.Module):
            raise SpecError(f"model `{self.model}` gave a {type(made).__name__}; expected a torch.nn.Module")
        # A copy: what is done to it, training above all, is not to be seen in the user's own.
        return copy.deepcopy(made).to(device=device, dtype=dtype)

    def check_size(self) -> None:
        """Refuse a named network that cannot be held, or takes hours, before anything of it is made.

        >>> Setup(arch="64-99999999-10").check_size()
        Traceback (most recent call last):
        curvlab.exceptions.SpecError: the architecture ...
        """
        from curvlab.measure import device as devices

        if self.model is None:
            resolved = self if self.arch is not None else self.resolve()
            _check_size(resolved._architecture(), self.torch_dtype, devices.resolve(self.device))

    def build_criterion(self) -> Criterion:
        """The criterion by name, or the user's own function or loss."""
        from curvlab.criteria.registry import criterion_named

        if imports.is_address(self.criterion):
            made = imports.load(self.criterion, "criterion")
            # A command line cannot call a class such as torch.nn:HuberLoss.
            made = imports.call(made, self.criterion, "criterion") if isinstance(made, type) else made
            return criterion_named(made)
        return criterion_named(self.criterion)

    def build_batches(self, epoch: int = 0, start: int = 0) -> tuple[Tensor, Tensor] | Iterable[Any]:
        """A training batch, by default the first of the first epoch, or the user's own batch or batches."""
        from curvlab.measure import device as devices

        device, dtype = devices.resolve(self.device), self.torch_dtype
        if not imports.is_address(self.data):
            data = self.load_data()
            batches = data.batches(min(self.examples, len(data.train)), self.seed, epoch, start=start)
            inputs, targets = next(iter(batches))
            return _move(inputs, device, dtype), _move(targets, device, dtype)
        made = imports.load(self.data, "data")
        return imports.guarded(
            imports.call(made, self.data, "data") if callable(made) else made, self.data, "data"
        )

    def build_problem(self, epoch: int = 0, start: int = 0) -> Problem:
        """The model, the criterion and a batch (see `build_batches`) as a problem."""
        from torch import Tensor

        from curvlab.problem import Problem

        made = self.build_batches(epoch, start)
        model = self.build_model().eval()
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor):
            return Problem(model, self.build_criterion(), made[0], made[1])
        return Problem(model, self.build_criterion(), made)


LAYERS = 1_000
LAYER_SECONDS = 5e-3
"""What a layer takes in each estimate and solve, however narrow it is."""


def _check_size(chosen: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a network by its bytes or its layers.

    Bytes are those of the parameters and a gradient: the least that any study needs at once.
    """
    import torch

    from curvlab.architectures import architectures
    from curvlab.measure import device as devices

    if not devices.readable(torch.empty(0, dtype=dtype, device=device)):
        return  # planned, not made
    parameters = list(chosen.build(dtype=dtype, device="meta").parameters())
    needed, held = 2 * sum(p.nbytes for p in parameters), devices.memory_bytes(device)
    if held is not None and needed > held:
        raise SpecError(
            f"the architecture `{architectures.canonical(chosen)}` has "
            f"{sum(p.numel() for p in parameters):,} parameters: with one gradient they take "
            f"{needed:,} bytes, and {device} has {held:,}. Use narrower layers, or "
            f"`curvlab plan`, which allocates nothing"
        )
    layers = sum(p.ndim > 1 for p in parameters)
    if layers > LAYERS:
        raise SpecError(
            f"the architecture has {layers:,} layers: every estimate and every solve would take about "
            f"{layers * LAYER_SECONDS:.0f} s for their number alone, and a study makes hundreds. Use "
            f"{LAYERS:,} layers or fewer"
        )


def check_seed(seed: int) -> None:
    """Raise `SpecError` unless torch's generators take the seed: an integer of 64 bits, signed or not.

    >>> check_seed(-1)
    """
    if not -(2**63) <= seed < 2**64:
        raise SpecError(f"seed={seed}: use an integer of 64 bits, from -2^63 to 2^64 - 1, such as 0")


def _move(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On `device`; in `dtype` unless they are classes or tokens."""
    return values.to(device, dtype) if values.is_floating_point() else values.to(device)


SETUP = settings_of(Setup)
"""The settings that every command shares: what is studied."""


WRAPPINGS = ("state_dict", "model_state_dict", "model")


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Give the model the weights of a file; one that wraps its state dict in a dictionary is understood.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "state.pt"
    >>> torch.save({"model": torch.nn.Linear(2, 1).state_dict()}, path)
    >>> load_weights(torch.nn.Linear(2, 1), path)
    """
    path = Path(path)
    if not path.is_file():  # a pipe would be waited for, and a device read without end
        raise SpecError(f"checkpoint {path} cannot be read: it is no file. Give the path of a state dict")
    state = _read_model(path)
    for name in WRAPPINGS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    _check(state, model, path)
    try:
        model.load_state_dict(state)
    # A module's own hooks read what they like of it.
    except Exception as error:
        raise _misfit(path, error) from error


def _read_model(path: Path) -> Any:
    import torch

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused below, torch has advice of its own
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Torch's sentences go on with how to run what is in the file.
        reason = str(error).partition("\n")[0].partition(". ")[0] or "it is empty or cut off"
        raise SpecError(
            f"checkpoint {path} cannot be read ({type(error).__name__}: {reason}); expected a state dict, as "
            f"safetensors or as torch.save(model.state_dict(), …) writes it"
        ) from error


def _check(state: Any, model: nn.Module, path: Path) -> None:
    """Refuse what torch would cast without a word, or refuse at the length of a page."""
    import torch

    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise _misfit(path, f"expected weights by name, got a {type(state).__name__}")
    own: Mapping[str, Tensor] = model.state_dict()
    for name, value in own.items():
        given = state.get(name)
        if not isinstance(value, torch.Tensor) or given is None:
            continue  # the state of a module's own, or missing, which torch says
        if not isinstance(given, torch.Tensor):
            raise _misfit(path, f"`{name}` is a {type(given).__name__}, not a tensor")
        if given.layout != torch.strided or given.device.type == "meta":
            kind = "without values" if given.device.type == "meta" else str(given.layout)
            raise _misfit(path, f"`{name}` is a tensor that is {kind}; expected a dense one")
        if given.shape != value.shape:
            raise _misfit(
                path, f"`{name}` has shape {tuple(given.shape)}; the model's is {tuple(value.shape)}"
            )
        if (given.is_complex(), given.is_floating_point()) != (value.is_complex(), value.is_floating_point()):
            raise _misfit(path, f"`{name}` is {given.dtype}; the model's is {value.dtype}")


def _misfit(path: Path, reason: object) -> SpecError:
    words = " ".join(str(reason).split())[:300].rstrip(".")
    return SpecError(
        f"checkpoint {path} is not the state of this model: {words}. Save it with "
        f"torch.save(model.state_dict(), path)"
    )
