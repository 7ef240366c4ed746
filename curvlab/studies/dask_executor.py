"""A Dask cluster as a place to run the cells of a study.

The client's futures are those of `concurrent.futures`, so a study takes them as it takes a pool's. The
scheduler runs the cells of a worker that dies again elsewhere. If the scheduler itself is lost, so is what
was under way; what had finished is in the store, and the study resumes from there with any executor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from curvlab.exceptions import ExecutorError, SpecError

__all__ = ["Dask", "DaskExecutor"]

CONNECT_SECONDS = 20
CLOSE_SECONDS = 5
LOST = "what had finished is kept; run the study again in the same folder, with this executor or any other"
# A protocol (tcp://, tls://, …) that may be left out, a host and a port; or a place in this process.
ADDRESS = re.compile(r"(?:[a-z]+://)?[^\s/]+:\d+/?|inproc://\S+")
R = TypeVar("R")


class DaskExecutor(Executor):
    """A client of a Dask scheduler; ending it closes the client and leaves the cluster running."""

    def __init__(self, client: Any, resource: str = "") -> None:
        self.client = client
        options = {"resources": {resource: 1}} if resource else {}
        # Not pure: two repetitions of a timing are two calls, however equal their arguments.
        self._executor = client.get_executor(pure=False, **options)

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Hand a call over to the scheduler."""
        if self.client.status not in ("running", "connecting"):
            raise ExecutorError(f"the Dask client is {self.client.status}: {LOST}")
        submitted: Future[R] = self._executor.submit(fn, *args, **kwargs)
        return submitted

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close the client; calls that no worker has begun are then forgotten by the scheduler."""
        self.client.close(timeout=CLOSE_SECONDS)


@dataclass(frozen=True)
class Dask:
    """The workers of a running Dask scheduler, one cell at a time in each.

    Args:
        address: where the scheduler listens, such as tcp://host:8786.
        resource: a resource that each worker has one of (`dask worker --resources "GPU=1"`), of which every
            cell takes one; without it workers must have a single thread.
    """

    in_process: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    address: str = ""
    resource: str = ""

    def __post_init__(self) -> None:
        if not self.address:
            raise SpecError(
                "executor `dask` needs the address of a scheduler: dask[address=tcp://host:8786]. Start one "
                "with `dask scheduler`, and workers with `dask worker ADDRESS --nthreads 1`"
            )

        if not ADDRESS.fullmatch(self.address):
            # Dask itself takes most of a minute to refuse it.
            raise SpecError(
                f"executor `dask`: `{self.address}` is not the address of a scheduler; expected host and "
                f"port as `dask scheduler` prints them: dask[address=tcp://host:8786]"
            )

    def start(self) -> Executor:
        """A client of the scheduler."""
        try:
            from distributed import Client
        except ImportError as error:
            raise SpecError(
                "executor `dask` needs dask.distributed, which is not here: pip install 'curvlab[cluster]'"
            ) from error
        try:
            client = Client(self.address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ExecutorError(
                f"no Dask scheduler answers at {self.address} ({error}). Start one with `dask scheduler`, or "
                f"go on with another --executor: what has finished is in the results folder"
            ) from error
        try:
            self._check_workers(client.nthreads())
        except SpecError:
            client.close(timeout=CLOSE_SECONDS)
            raise
        return DaskExecutor(client, self.resource)

    def _check_workers(self, threads: dict[str, int]) -> None:
        if not threads:
            warnings.warn(
                f"the scheduler at {self.address} has no workers yet; the study waits for the first. Start "
                f"one with `dask worker {self.address} --nthreads 1`",
                stacklevel=4,
            )
        several = {worker: count for worker, count in threads.items() if count > 1}
        if several and not self.resource:
            raise SpecError(
                f"workers with several threads ({several}) would time cells while others run beside them: "
                f"start workers with --nthreads 1, or name a resource that each has one of, "
                f"dask[address={self.address},resource=GPU]"
            )
