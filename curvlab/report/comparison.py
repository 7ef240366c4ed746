"""A comparison that shows itself: the answer, the figures and the page from Python, and in a notebook.

compared = curvlab.compare(problem)     evaluated in a cell: answer, table and figures
compared.answer                         the answer in words
compared.figure("pareto")               matplotlib axes
compared.report("folder")               report.html, report.md and figures/*.png
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab.exceptions import ArgumentError, unknown_name
from curvlab.studies.compare import run
from curvlab.studies.compare.frames import Comparison
from curvlab.studies.compare.run import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from curvlab.report.recommendation import Recommendation

__all__ = ["ShownComparison", "compare", "load_comparison", "shown"]


@dataclass(frozen=True, eq=False)
class ShownComparison(Comparison):
    """A `Comparison` with its answer, its figures and its report."""

    @functools.cached_property
    def recommendation(self) -> Recommendation:
        """The answer with what it is read from: the pair, the front, the measure."""
        from curvlab.report.content import answer_of

        return answer_of(self)

    @property
    def answer(self) -> str:
        """The answer in words: the headline, why, and what limits it; `recommendation.text` says more."""
        return self.recommendation.brief

    def figure(self, name: str) -> Axes:
        """One of the report's figures by name, in light colours."""
        from curvlab.report.content import content_of
        from curvlab.report.drawing import LIGHT

        content = content_of(self)
        drawings = {one.name: one for section in content.sections for one in section.drawings}
        if name not in drawings:
            raise ArgumentError(str(unknown_name("figure", name, drawings)))
        return drawings[name].draw(content.look(LIGHT))

    def report(self, folder: str | Path) -> Path:
        """Write report.html, report.md and the figures into the folder; the path of the page."""
        from curvlab.report.pages import write_report

        return write_report(self, folder)

    def _repr_html_(self) -> str:
        from curvlab.report.content import content_of
        from curvlab.report.pages import html_fragment

        return html_fragment(content_of(self))


def shown(comparison: Comparison) -> ShownComparison:
    """The same comparison with its answer, figures and report."""
    return ShownComparison(**{one.name: getattr(comparison, one.name) for one in fields(Comparison)})


@functools.wraps(run.compare)
def compare(*args: Any, **kwargs: Any) -> ShownComparison:  # noqa: D103
    if kwargs.get("on_progress") is not None:
        return shown(run.compare(*args, **kwargs))
    with _notebook_progress() as follow:
        return shown(run.compare(*args, **{**kwargs, "on_progress": follow}))


compare.__signature__ = inspect.signature(run.compare)  # type: ignore[attr-defined]


@functools.wraps(run.load_comparison)
def load_comparison(folder_path: str | Path) -> ShownComparison:  # noqa: D103
    return shown(run.load_comparison(folder_path))


@contextmanager
def _notebook_progress() -> Iterator[Callable[[Progress], None] | None]:
    """A bar of rich's in a notebook, nothing elsewhere: a script has its own output."""
    if "ipykernel" not in sys.modules:
        yield None
        return
    from rich.progress import Progress as Bar

    with Bar(transient=True) as bar:
        task = bar.add_task("curvlab compare", total=None)
        yield lambda progress: bar.update(task, completed=progress.done, total=progress.total)
