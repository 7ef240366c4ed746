"""Small tools for sentences that are made from data."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count_words", "join_names", "sentence"]


def join_names(names: Sequence[str], last: str = "and") -> str:
    """Names as a list in words.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def count_words(count: int, noun: str) -> str:
    """A count with its noun.

    >>> count_words(1, "pair"), count_words(3, "pair")
    ('1 pair', '3 pairs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def sentence(text: str) -> str:
    """The text, ended by a full stop."""
    return text if text.endswith((".", "!", "?")) else text + "."
