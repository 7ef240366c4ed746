"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import curvlab

README = Path(__file__).parent.parent / "README.md"


def section(heading: str) -> str:
    """The first Python block below a heading."""
    _, _, below = README.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    found = re.search(r"```python\n(.*?)```", below, re.DOTALL)
    assert found is not None, f"no Python below {heading}"
    return found.group(1)


def test_the_example_of_any_network_runs():
    exec(section("### Any network"), {"curvlab": curvlab})
