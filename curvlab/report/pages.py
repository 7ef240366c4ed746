"""A report in its folder: report.html, report.md and figures/*.png, of one content.

The page is one HTML file that needs nothing else: styles, script and figures are inside. All text is escaped
by the template; a content policy forbids every request, and every script but the page's own. The Markdown
stands beside PNG figures, for repositories and reviews.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from curvlab.files import write_bytes_atomic, write_text_atomic
from curvlab.report.content import Content, content_of
from curvlab.report.drawing import DARK, LIGHT, PAGE, Theme, png, svg
from curvlab.report.tables import Table
from curvlab.version import __version__

if TYPE_CHECKING:
    from curvlab.studies.compare.frames import Comparison

__all__ = [
    "code_block",
    "escape_markdown",
    "html_fragment",
    "html_page",
    "mark_up",
    "markdown_page",
    "write_pages",
    "write_report",
]


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
    whole = sorted(names, key=len, reverse=True)
    pattern = "|".join(["`[^`]+`", *(rf"(?<![\w-]){re.escape(name)}(?![\w\[-])" for name in whole)])
    result, end = Markup(), 0
    for match in re.finditer(pattern, text):
        code = match[0].startswith("`") and match[0] not in whole
        template = Markup("<code>{}</code>" if code else '<span class="pair">{}</span>')
        result += _keep_units_with_numbers(text[end : match.start()]) + template.format(
            match[0].strip("`") if code else match[0]
        )
        end = match.end()
    return result + _keep_units_with_numbers(text[end:])


def _keep_units_with_numbers(text: str) -> Markup:
    return escape(re.sub(r"(?<=\d) (?=(%|×|[µm]?s|[kMGT]?B)(\W|$))", "\xa0", text))


def _asset(name: str) -> str:
    return resources.files("curvlab.report").joinpath("templates", name).read_text(encoding="utf-8")


def _declarations(theme: Theme) -> Markup:
    return Markup(" ".join(f"--{name}: {colour};" for name, colour in theme.variables().items()))


def markdown_page(content: Content) -> str:
    """The Markdown text; figures are at `figures/<name>.png`."""
    environment = Environment(
        loader=PackageLoader("curvlab.report"),
        autoescape=False,  # Markdown has its own escapes: `finalize` puts them on every value
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.md.j2").render(
        content=content, fenced=code_block, table=_table, version=__version__
    )


def escape_markdown(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> escape_markdown("a|b <i> *c*")
    'a\\|b &lt;i> \\*c\\*'
    """
    text = " ".join(text.split())
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;")
    # At the start of a line `#`, `>`, `-` and `1.` would open a heading, a quotation or a list.
    return re.sub(r"^([#>+-]|\d+(?=[.)](\s|$)))", _guard, text)


def _guard(opening: re.Match[str]) -> str:
    return f"{opening[1]}\\" if opening[1].isdigit() else f"\\{opening[1]}"


def code_block(code: str) -> Markup:
    """Code between fences that are longer than any run of backticks in it.

    Code that has tags stands in an HTML block instead, where they can be escaped: between fences they would
    stay as they are in the file, for a viewer that knows no fences.

    >>> print(code_block("curvlab compare -p '<b>'"))
    <pre><code>curvlab compare -p &#39;&lt;b&gt;&#39;</code></pre>
    """
    if "<" in code:
        return Markup("<pre><code>{}</code></pre>").format(code)
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}\n{code}\n{fence}")


def _table(table: Table) -> Markup:
    rule = ["---:" if numeric else "---" for numeric in table.numeric]
    rows = [[escape_markdown(entry.text) for entry in row] for row in table.rows]
    lines = [[escape_markdown(head) for head in table.heads], rule, *rows]
    return Markup("\n".join(f"| {' | '.join(line)} |" for line in lines))


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) else escape_markdown(str(value))
