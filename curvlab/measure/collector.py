"""Hold the cyclic garbage collector off while something is measured.

When it happens to run is noise, in time and in memory alike.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_off"]


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cyclic collector inside; afterwards it is as it was before.

    >>> with collector_off():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
