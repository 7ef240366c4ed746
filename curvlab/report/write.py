"""Write a report into its folder: report.html, report.md, figures/*.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from curvlab.files import write_bytes_atomic, write_text_atomic
from curvlab.report.content import Content, content_of
from curvlab.report.drawing import png
from curvlab.report.html import html_page
from curvlab.report.markdown import markdown_page
from curvlab.report.theme import LIGHT

if TYPE_CHECKING:
    from curvlab.studies.compare.frames import Comparison

__all__ = ["write_pages", "write_report"]


def write_report(comparison: Comparison, folder: str | Path) -> Path:
    """Render the comparison and return the path of the HTML page, which is written last."""
    return write_pages(content_of(comparison), folder)


def write_pages(content: Content, folder: str | Path, name: str = "report") -> Path:
    """Render `content` as <name>.html and <name>.md with its figures; returns the HTML page, written last."""
    folder = Path(folder)
    look = content.look(LIGHT)
    for section in content.sections:
        for drawing in section.drawings:
            write_bytes_atomic(folder / "figures" / drawing.file_name, png(drawing.draw(look)))
    write_text_atomic(folder / f"{name}.md", markdown_page(content))
    page = folder / f"{name}.html"
    write_text_atomic(page, html_page(content))
    return page
