"""What the numbers of an experiment were measured on: the scale, the data set, and the source of curvlab.

A scale is recorded in the store when work is done at it, so that a page tells what its numbers are even where
it is written by a command at another scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from curvlab.measure.environment import distinct_sources, mixed_sources
from curvlab.report.content import Content
from curvlab.report.numbers import join_names
from curvlab.reproduce.experiment import ENVIRONMENT, Frames
from curvlab.reproduce.subjects import SMOKE, Options
from curvlab.studies.store import Store, key_of

__all__ = ["BANNER", "Provenance", "record_scale"]

SCALE = "scale"
BANNER = (
    "Measured at smoke scale: scikit-learn's 8×8 digits with a small network, few updates, short ladders of "
    "sizes, and not the paper's data. This shows that the studies run; nothing here is evidence for or "
    "against the paper. `--scale laptop` measures on CIFAR-10."
)


@dataclass(frozen=True)
class Provenance:
    """The scales that rows were measured at, and the data sets they name (none for a study of costs).

    `sources` are the states of curvlab's source that measured them: a study goes on where it was, also after
    a change of the code.

    >>> Provenance(("smoke",), ("digits",)).words
    'on digits, smoke scale'
    """

    scales: tuple[str, ...]
    data: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, store: Store, frames: Frames, options: Options) -> Provenance:
        """Of what a store holds; the scale asked for, where none was recorded."""
        scales = [str(row[SCALE]) for row in store.rows(SCALE)] or [options.scale]
        named = [str(name) for frame in frames.values() if "data" in frame for name in frame["data"].unique()]
        measured = [row.get("source") for row in store.rows() if row.get("kind") not in (SCALE, ENVIRONMENT)]
        return cls(_distinct(scales), _distinct(named), tuple(distinct_sources(measured)))

    @property
    def smoke(self) -> bool:
        """Whether any of it is no more than a trial: a user's own study names its own data."""
        return SMOKE in self.scales and (
            not self.data or any(name.startswith("digits") for name in self.data)
        )

    @property
    def words(self) -> str:
        """The data and the scale, to follow "measured"."""
        return ", ".join(
            [*([f"on {join_names(self.data)}"] if self.data else []), f"{join_names(self.scales)} scale"]
        )

    @property
    def mixed(self) -> str:
        """A sentence that names the states of the source where there is more than one."""
        return mixed_sources(self.sources)

    def mark(self, content: Content) -> Content:
        """The page, with a banner and a title where it is only a trial, and the sources that it mixes."""
        first = (BANNER,) if self.smoke else ()
        last = (self.mixed,) if self.mixed else ()
        answer = replace(content.answer, paragraphs=(*first, *content.answer.paragraphs, *last))
        title = f"{content.title} ({self.words})" if self.smoke else content.title
        return replace(content, title=title, answer=answer)


def record_scale(store: Store, scale: str) -> None:
    """Keep at what scale the store's rows are measured, once."""
    key = key_of({"kind": SCALE, SCALE: scale})
    if not store.has(key):
        store.append({"kind": SCALE, "key": key, SCALE: scale})


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
