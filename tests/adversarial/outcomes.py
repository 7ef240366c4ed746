"""What became of an attack, and how the outcomes of a whole suite are counted and printed.

    refused      a sentence of curvlab's own and the promised exit code, with nothing changed
    held         answered right: resumed, read, or measured as without the attack
    silent       a wrong answer without a word
    lost         rows or files that were there are gone
    hang         not over within 60 seconds
    traceback    any other exception

A test records one outcome through the fixture `judge`, which fails unless it is one of the first two. The
counts of all suites are printed at the end of a run of pytest, also when its tests ran in several processes.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["GOOD", "OUTCOMES", "PROPERTY", "HangError", "Judge", "count_lines", "time_limit"]

GOOD = ("refused", "held")
OUTCOMES = (*GOOD, "silent", "lost", "hang", "traceback")
PROPERTY = "adversarial"
LIMIT_SECONDS = 60
Judge = Callable[..., None]


class HangError(BaseException):
    """Raised in the main thread when an attack takes too long; no `except Exception` swallows it."""


@contextmanager
def time_limit(seconds: int = LIMIT_SECONDS) -> Iterator[None]:
    """End the block with `HangError` after so many seconds, where the platform has alarms."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def count_lines(recorded: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each suite: how many attacks there were, and what became of them.

    >>> count_lines([("commands", "refused"), ("commands", "lost")])
    ['adversarial: 2 commands: 1 refused, 0 held; 0 silent, 1 lost, 0 hang, 0 traceback']
    """
    suites: dict[str, Counter[str]] = {}
    for suite, outcome in recorded:
        suites.setdefault(suite, Counter())[outcome] += 1
    lines = []
    for suite, number in sorted(suites.items()):
        good, bad = (
            ", ".join(f"{number[outcome]} {outcome}" for outcome in part)
            for part in (GOOD, OUTCOMES[len(GOOD) :])
        )
        lines.append(f"adversarial: {number.total()} {suite}: {good}; {bad}")
    return lines
