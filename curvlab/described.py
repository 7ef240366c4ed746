"""What an argument is, in a few words, for the sentence that refuses it."""

from __future__ import annotations

from torch import Tensor

__all__ = ["described"]


def described(value: object) -> str:
    """The type, with a tensor's shape or a string's text.

    >>> import torch
    >>> described(torch.zeros(2, 3)), described("cg"), described(None)
    ('Tensor of shape (2, 3)', "str ('cg')", 'NoneType')
    """
    if isinstance(value, Tensor):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return f"str ({value!r})" if isinstance(value, str) else type(value).__name__
