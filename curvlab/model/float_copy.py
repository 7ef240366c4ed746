"""Models in bfloat16 or float16: the function is taken in float32, at the values that the parameters have.

    f(x; θ)  with  θ = float32(parameters)

A curvature of the rounded function has no meaning: its derivatives are those of a staircase. curvlab
therefore works with a copy of the model whose parameters and buffers are float32, and which follows the
values and modes of the model it was made of. The model itself is only read; a step is added to it in its own
dtype. What a model keeps outside its parameters and buffers (a closure over a weight, say) is not copied, and
is refused where the copy's outputs depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from curvlab.exceptions import ProblemError, StaleError
from curvlab.staleness import Versions

__all__ = ["LOW_PRECISION", "FloatCopy", "in_float"]

LOW_PRECISION = (torch.bfloat16, torch.float16)


def in_float(tensor: Tensor) -> Tensor:
    """A tensor of low precision as float32, any other as it is.

    >>> in_float(torch.ones(2, dtype=torch.bfloat16)).dtype, in_float(torch.ones(2).double()).dtype
    (torch.float32, torch.float64)
    """
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


@dataclass(eq=False)
class FloatCopy:
    """A float32 copy `model` of the model `given`, which `follow` brings to its values and modes.

    `settings` tells what of a model is neither: a change of it needs a new copy.

    >>> given = nn.Linear(2, 1, dtype=torch.bfloat16)
    >>> copied = FloatCopy.of(given, lambda model: None)
    >>> copied.model.weight.dtype, given.weight.dtype
    (torch.float32, torch.bfloat16)
    """

    given: nn.Module
    model: nn.Module
    settings: Callable[[nn.Module], Hashable] = field(repr=False)
    _versions: Versions | None = field(default=None, init=False, repr=False)
    _noted: Hashable = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, given: nn.Module, settings: Callable[[nn.Module], Hashable]) -> FloatCopy | None:
        """A copy of a model that has parameters or buffers of low precision; None of any other."""
        low = {id(tensor): tensor for tensor in _tensors(given) if tensor.dtype in LOW_PRECISION}
        if not low:
            return None
        try:
            model = deepcopy(given, {key: _float_leaf(tensor) for key, tensor in low.items()})
        except Exception as error:
            dtype = str(next(iter(low.values())).dtype).removeprefix("torch.")
            raise ProblemError(
                f"the model is in {dtype}, whose curvature is that of the float32 function, and no copy of "
                f"it in float32 can be made ({type(error).__name__}: {error}). Call model.float() first"
            ) from error
        copied = cls(given, model, settings)
        copied._noted = settings(given)
        return copied

    @property
    def dtype(self) -> str:
        """The low precision of the given model, in words."""
        low = next(tensor.dtype for tensor in _tensors(self.given) if tensor.dtype in LOW_PRECISION)
        return str(low).removeprefix("torch.")

    def __getstate__(self) -> dict[str, object]:
        """A pickled or deep copy has modules of its own: it reads all values and settings anew."""
        return {**self.__dict__, "_versions": None, "_noted": None}

    def follow(self) -> None:
        """Bring values and modes of the copy to those of the given model."""
        now = self.settings(self.given)
        self._noted = now if self._noted is None else self._noted
        if self._noted != now:
            raise StaleError(
                f"hooks or settings of the model have changed since a float32 copy of it was made, because "
                f"its parameters are {self.dtype}. Make a new Problem (or optimizer) of it"
            )
        for module, twin in zip(self.given.modules(), self.model.modules(), strict=True):
            twin.training = module.training
        pairs = list(zip(_tensors(self.given), _tensors(self.model), strict=True))
        named = {str(index): theirs for index, (theirs, _) in enumerate(pairs)}
        if self._versions is not None and not self._versions.differing(named):
            return
        with torch.no_grad():
            for theirs, own in pairs:
                own.copy_(theirs)
        self._versions = Versions.of(named)

    def check_own(self, leaves: list[Tensor]) -> None:
        """Refuse logits that were computed from parameters of the given model itself."""
        theirs = {id(parameter): name for name, parameter in self.given.named_parameters()}
        found = next((theirs[id(leaf)] for leaf in leaves if id(leaf) in theirs), None)
        if found is not None:
            raise ProblemError(
                f"the forward uses `{found}` from outside the model's modules (a closure or a hook that "
                f"holds it), so that a copy in float32 cannot be made of this {self.dtype} model. Call "
                f"model.float() first"
            )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _float_leaf(tensor: Tensor) -> Tensor:
    """The same values in float32, as a parameter with the same hooks where it is one."""
    values = tensor.detach().float()
    if not isinstance(tensor, nn.Parameter):
        return values
    own = nn.Parameter(values, tensor.requires_grad)
    for hook in (tensor._backward_hooks or {}).values():
        own.register_hook(hook)
    return own
