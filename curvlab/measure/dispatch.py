"""A dispatch mode that lets forward-mode derivatives run under the measuring modes.

Forward-mode differentiation stands in for tangents that are zero with implicit zeros, tensors
without memory. torch multiplies them by a number correctly, except under a dispatch mode, where
`mul.Scalar` reads the memory that is not there and the process dies. Entered inside a measuring
mode, `ImplicitZeros` answers that one operation itself: the product is an implicit zero again,
as it is without any mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ImplicitZeros"]


class ImplicitZeros(TorchDispatchMode):
    """Multiplies implicit zeros by a number without reading them; passes all else on."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.mul.Scalar and args[0]._is_zerotensor():
            zeros, number = args
            dtype = torch.result_type(zeros, number)
            return torch._efficientzerotensor(list(zeros.shape), dtype=dtype, device=zeros.device)
        return func(*args, **(kwargs or {}))
