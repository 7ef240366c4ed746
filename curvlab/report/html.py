"""The report as one HTML file that needs nothing else: styles, script and figures are inside.

All text is escaped by the template; a content policy forbids every request, and every script but the
page's own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from curvlab.report.content import Content
from curvlab.report.drawing import svg
from curvlab.report.theme import DARK, LIGHT, PAGE, Theme
from curvlab.version import __version__

__all__ = ["html_fragment", "html_page", "mark_up"]

LONGEST_UNBROKEN = 34  # a longer name may break, or it would leave a phone's screen


def html_fragment(content: Content) -> str:
    """The page in a frame of its own, for a notebook: its styles and its script are not the notebook's."""
    page = escape(html_page(content))
    return str(
        Markup(
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:0" srcdoc="{}">'
        ).format(page)
        + Markup("</iframe>")
    )


def html_page(content: Content) -> str:
    """The page, whole."""
    environment = Environment(
        loader=PackageLoader("curvlab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked"] = mark_up
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


def mark_up(text: str, names: Sequence[str] = ()) -> Markup:
    r"""Escaped text in which `code` is code, pairs stand out whole and numbers keep their units.

    >>> str(mark_up("Use `a` <b>"))
    'Use <code>a</code> &lt;b&gt;'
    >>> str(mark_up("a-b + c: 2 ms", ["a-b + c"]))
    '<span class="pair">a-b + c</span>: 2\xa0ms'
    """
    whole = sorted((name for name in names if len(name) <= LONGEST_UNBROKEN), key=len, reverse=True)
    pattern = "|".join(["`[^`]+`", *(rf"(?<![\w-]){re.escape(name)}(?![\w\[-])" for name in whole)])
    result, end = Markup(), 0
    for match in re.finditer(pattern, text):
        code = match[0].startswith("`") and match[0] not in whole
        template = Markup("<code>{}</code>" if code else '<span class="pair">{}</span>')
        result += _spaced(text[end : match.start()]) + template.format(
            match[0].strip("`") if code else match[0]
        )
        end = match.end()
    return result + _spaced(text[end:])


def _spaced(text: str) -> Markup:
    return escape(re.sub(r"(?<=\d) (?=(%|×|[µm]?s|[kMGT]?B)(\W|$))", "\xa0", text))


def _asset(name: str) -> str:
    return resources.files("curvlab.report").joinpath("templates", name).read_text(encoding="utf-8")


def _declarations(theme: Theme) -> Markup:
    return Markup(" ".join(f"--{name}: {colour};" for name, colour in theme.variables().items()))
