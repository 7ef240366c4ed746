"""The data behind a matrix-free block: read anew for every product, and refused once it has changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from curvlab.exceptions import StaleError
from curvlab.model.recording import Recording
from curvlab.problem import Problem
from curvlab.staleness import Versions

__all__ = ["LiveData"]


@dataclass(frozen=True, eq=False)
class LiveData:
    """A problem as it was: a single batch's recording is kept, a stream is recorded for every product."""

    problem: Problem
    versions: Versions

    @classmethod
    def of(cls, problem: Problem) -> LiveData:
        """The problem as it is now."""
        return cls(problem, problem.versions)

    def check_unchanged(self) -> None:
        """Refuse to go on with parameters or a batch that have changed."""
        changed = self.versions.differing(self.problem.tensors)
        if changed:
            more = " and others" if len(changed) > 4 else ""
            raise StaleError(
                f"{', '.join(changed[:4])}{more} changed since the curvature was estimated, and its blocks "
                f"read them: call estimate() again"
            )

    def batches(self) -> Iterator[tuple[Recording, Tensor]]:
        """Each batch's recording, with its rows' weights in the mean over all."""
        self.check_unchanged()
        if not self.problem.streamed:
            recording = self.problem.recording()
            yield recording, recording.share
            return
        total = sum(recording.total_weight for recording in self.problem.recordings())
        for recording in self.problem.recordings():
            yield recording, recording.weights / total
