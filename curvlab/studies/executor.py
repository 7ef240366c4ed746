"""Where the cells of a study run: here in turn, in processes, on a Dask cluster, or in any `Executor`.

A study hands over functions and their arguments and takes results as they finish, so that each is in the
store before the next one is waited for. Other places to run are added to `executors`, by other packages
through the entry-point group `curvlab.executors`: a frozen dataclass whose `start()` gives an `Executor`. A
worker process that dies has its cells run again in a new pool.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from curvlab.exceptions import ExecutorError, SpecError
from curvlab.specs import Registry
from curvlab.studies.dask_executor import Dask

__all__ = ["Done", "Place", "Process", "Serial", "SerialExecutor", "Workers", "executors", "place_of", "run"]

A = TypeVar("A")
R = TypeVar("R")
ATTEMPTS = 3
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Place(Protocol):
    """Something that starts executors; `window` is how many calls are handed over at a time (None: all)."""

    in_process: ClassVar[bool]

    @property
    def window(self) -> int | None: ...

    def start(self) -> Executor: ...


class SerialExecutor(Executor):
    """Runs each call when it is submitted, in this process."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run now; the future is done when this returns."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Serial:
    """One cell at a time, in this process: honest timings."""

    in_process: ClassVar[bool] = True
    window: ClassVar[int | None] = 1

    def start(self) -> Executor:
        """An executor that runs what it is given at once."""
        return SerialExecutor()


@dataclass(frozen=True)
class Process:
    """Several processes on this machine; cells that run at the same time slow each other down."""

    in_process: ClassVar[bool] = False
    workers: int = 2

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SpecError(f"workers={self.workers}: at least one process is needed")

    @property
    def window(self) -> int | None:
        """Twice the workers, so that none waits for work."""
        return 2 * self.workers

    def start(self) -> Executor:
        """A pool of new processes: torch's threads do not survive a fork."""
        with _safe_path():
            return _Pool(
                self.workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
            )


class _Pool(ProcessPoolExecutor):
    """A pool whose processes import nothing from the working folder while they start.

    A new Python looks there first until it is given the path of its parent, so that a `socket.py` there would
    run in it.
    """

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Hand a call over; processes that are missing are started here."""
        with _safe_path():
            return super().submit(fn, *args, **kwargs)


def _end_with_parent() -> None:
    """Let this worker end when its parent does: a killed study leaves nobody who holds folders of its runs.

    A worker that waits for its next call holds both ends of the pipe, and would wait for ever. Where the
    kernel can (Linux), it ends the worker itself, whatever that does; a thread that waits for the parent's
    end, as everywhere else, does not run while a module such as torch is being loaded.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent.pid:  # it had ended before
            os._exit(1)

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let Python processes that are started now leave the working folder out of their path."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@dataclass(frozen=True)
class Given:
    """An executor that the caller has started and will end."""

    executor: Executor
    in_process: ClassVar[bool] = False
    window: ClassVar[int | None] = None

    def start(self) -> Executor:
        """The executor itself."""
        return self.executor


executors: Registry[Any] = Registry("executor", "curvlab.executors")
executors.register("serial", Serial)
executors.register("process", Process)
executors.register("dask", Dask)


def place_of(spec: str | Place | Executor) -> Place:
    """The place of a spec such as `process[workers=4]`; a started executor passes as it is.

    >>> place_of("process[workers=4]")
    Process(workers=4)
    """
    if isinstance(spec, Executor):
        return Given(spec)
    made: Place = executors.make(spec)
    return made


@dataclass(frozen=True)
class Done(Generic[A, R]):
    """An argument with the result of its call, or with the error that ended it."""

    argument: A
    result: R | None = None
    error: BaseException | None = None


class Workers:
    """The workers of one study: started when the first call needs them, and kept until the block ends.

    A study runs in stages, and a new process spends seconds on importing torch.

    >>> with Workers("serial") as workers:
    ...     [done.result for numbers in ([-1], [2]) for done in workers.run(abs, numbers)]
    [1, 2]
    """

    def __init__(self, spec: str | Place | Executor) -> None:
        self.place = place_of(spec)
        self._executor: Executor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, function: Callable[[A], R], arguments: Iterable[A]) -> Iterator[Done[A, R]]:
        """Call `function` with each argument, and give what came of it in the order the calls finish.

        When a worker dies, what was under way runs again in new workers, one call at a time, so that the call
        that ends its workers shows itself; after three of them it is given up.
        """
        window = self.place.window
        waiting = deque(_Call(argument) for argument in arguments)
        while waiting:
            if self._executor is None:
                self._executor = self.place.start()
            broken = yield from _drain(function, waiting, self._executor, window)
            if broken:
                self._end()
                window = 1

    def _end(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None and not isinstance(self.place, Given):
            executor.shutdown(wait=True, cancel_futures=True)


def run(
    function: Callable[[A], R], arguments: Iterable[A], spec: str | Place | Executor
) -> Iterator[Done[A, R]]:
    """`Workers.run` with workers of its own, which end with the last call.

    >>> [done.result for done in run(abs, [-1, 2], "serial")]
    [1, 2]
    """
    with Workers(spec) as workers:
        yield from workers.run(function, arguments)


@dataclass(eq=False)
class _Call(Generic[A]):
    argument: A
    attempts: int = 0


def _drain(
    function: Callable[[A], R], waiting: deque[_Call[A]], executor: Executor, window: int | None
) -> Generator[Done[A, R], None, bool]:
    """Hand over and take back until nothing waits, or the executor breaks: what it had then waits again.

    Returns whether it broke.
    """
    running: dict[Future[R], _Call[A]] = {}
    try:
        while waiting or running:
            while waiting and (window is None or len(running) < window):
                future = executor.submit(function, waiting[0].argument)
                running[future] = waiting.popleft()
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                done = _outcome(future, running[future].argument)
                del running[future]
                yield done
    except BrokenExecutor as error:
        calls = list(running.values())
        for call in reversed(calls):
            call.attempts += 1
            waiting.appendleft(call)
        if len(calls) == 1 and calls[0].attempts >= ATTEMPTS:
            waiting.popleft()
            yield Done(calls[0].argument, error=error)
        return True
    return False


def _outcome(future: Future[R], argument: A) -> Done[A, R]:
    try:
        return Done(argument, future.result())
    except BrokenExecutor:
        raise
    except CancelledError as error:
        raise ExecutorError(
            "the executor gave up cells that were under way (was its scheduler lost?). What had finished is "
            "kept: run the study again in the same folder, with this executor or any other"
        ) from error
    except Exception as error:
        return Done(argument, error=error)
