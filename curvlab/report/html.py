"""The report as one HTML file that needs nothing else: styles, script and figures are inside.

All text is escaped by the template; a content policy forbids every request and every script but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from curvlab import __version__
from curvlab.report.content import Content
from curvlab.report.drawing import svg
from curvlab.report.theme import DARK, LIGHT, PAGE, Theme

__all__ = ["html_page"]


def html_page(content: Content) -> str:
    """The page, whole."""
    environment = Environment(
        loader=PackageLoader("curvlab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    look = content.look(PAGE)
    script = _asset("sort.js")
    return environment.get_template("report.html.j2").render(
        content=content,
        svgs={
            drawing.name: svg(drawing.draw(look), drawing.name, drawing.caption)
            for section in content.sections
            for drawing in section.drawings
        },
        style=Markup(_asset("style.css")),
        light=_declarations(LIGHT),
        dark=_declarations(DARK),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )


def _asset(name: str) -> str:
    return resources.files("curvlab.report").joinpath("templates", name).read_text(encoding="utf-8")


def _declarations(theme: Theme) -> Markup:
    return Markup(" ".join(f"--{name}: {colour};" for name, colour in theme.variables().items()))
