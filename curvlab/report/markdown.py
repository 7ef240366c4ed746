"""The report as Markdown beside PNG figures: the same content as the page, for repositories and reviews."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from curvlab.report.content import Content
from curvlab.report.tables import Table
from curvlab.version import __version__

__all__ = ["code_block", "escape", "markdown_page"]


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


def escape(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line.

    >>> escape("a|b <i> *c*")
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
    rows = [[escape(entry.text) for entry in row] for row in table.rows]
    lines = [[escape(head) for head in table.heads], rule, *rows]
    return Markup("\n".join(f"| {' | '.join(line)} |" for line in lines))


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) else escape(str(value))
