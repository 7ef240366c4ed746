"""The direction of a solution: a step for each parameter, in factors until it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvlab.exceptions import SolveError
from curvlab.gradient import LazyTensors
from curvlab.linalg import Combination, Matrix, RowProduct
from curvlab.linalg.product import checksum, form, magnitude
from curvlab.staleness import Versions

__all__ = ["Direction"]


class Direction(LazyTensors[Matrix]):
    """{parameter name: step}, to be added to the parameters; formed each time an entry is read.

    A step may refer to the gradient it was solved for, or to the rows of the batch: once these were changed
    in place, the step is refused.
    """

    def __init__(self, entries: Mapping[str, Matrix]) -> None:
        super().__init__(entries)
        referred = {name: _referred(entry) for name, entry in entries.items()}
        self._referred = Versions.of({name: held for name, held in referred.items() if held is not None})

    @staticmethod
    def _form(entry: Matrix) -> Tensor:
        return form(entry)

    def factored(self, name: str) -> Matrix:
        """The entry as it is held: a tensor, or what forms one."""
        entry = super().factored(name)
        if name in self._referred.changed():
            what = f"the gradient of `{name}`" if isinstance(entry, Combination) else "the batch"
            raise SolveError(
                f"{what} was changed in place since the solve, and the step of `{name}` refers to it: "
                f"read or add the step before, or solve for a copy"
            )
        return entry

    def is_zero(self) -> bool:
        """Whether every step is zero, so that adding it changes nothing (no step is formed)."""
        return all(float(magnitude(entry)) == 0 for entry in self._entries.values())

    def sums(self) -> dict[str, Tensor]:
        """For each parameter a scalar tensor that is finite where its step is (nothing is read).

        A step in factors is finite where they are: the rows were checked when they were recorded, the
        gradient when it was given.
        """
        return {name: checksum(entry) for name, entry in self._entries.items()}

    def finite(self) -> dict[str, Tensor]:
        """For each parameter a scalar tensor: whether its step is free of NaN and infinity."""
        return {name: torch.isfinite(total) for name, total in self.sums().items()}


def _referred(entry: Matrix) -> Tensor | None:
    """The tensor that a step has not copied."""
    if isinstance(entry, Combination):
        return entry.matrix
    return entry.gram.rows if isinstance(entry, RowProduct) else None
