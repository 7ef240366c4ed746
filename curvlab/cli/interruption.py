"""Ctrl-C in a command whose folder keeps what was measured: it ends, and says how to go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from curvlab.cli.console import say

__all__ = ["INTERRUPTED", "kept_when_interrupted"]

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended."""


@contextmanager
def kept_when_interrupted(folder: Path, fresh: bool) -> Iterator[Callable[[], None]]:
    """End with the exit code of Ctrl-C, and say how to go on.

    Python drops an exception that is raised inside a finalizer, where a run that counts memory often is. The
    function given raises it again, and is to be called now and then.
    """
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    except KeyboardInterrupt:
        again = " without --fresh" if fresh else ""
        say(f"Interrupted; what was measured is in {folder}, and the same command{again} goes on from there.")
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)
