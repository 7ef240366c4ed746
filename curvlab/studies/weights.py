"""A model's weights from a file that may be anybody's: a state dict, as safetensors or torch.save writes it.

Nothing in the file is run: torch's own format is read with `weights_only`. What does not fit the model is
refused, also what torch would cast without a word, such as complex or integer weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab.exceptions import SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["load_weights"]

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
    state = _read(path)
    for name in WRAPPINGS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    _check(state, model, path)
    try:
        model.load_state_dict(state)
    # A module's own hooks read what they like of it.
    except Exception as error:
        raise _misfit(path, error) from error


def _read(path: Path) -> Any:
    import torch

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
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
    words = " ".join(str(reason).split())[:300]
    return SpecError(
        f"checkpoint {path} is not the state of this model: {words}. Save it with "
        f"torch.save(model.state_dict(), path)"
    )
