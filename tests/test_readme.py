"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import curvlab

README = Path(__file__).parent.parent / "README.md"


def section(heading: str) -> str:
    """The first Python block below a heading."""
    _, _, below = README.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    found = re.search(r"```python\n(.*?)```", below, re.DOTALL)
    assert found is not None, f"no Python below {heading}"
    return found.group(1)


@pytest.mark.slow
def test_the_examples_of_any_network_and_of_its_spectra_run() -> None:
    names: dict[str, object] = {"curvlab": curvlab}
    for heading in ("### Any network", "### Spectra, traces, samples"):
        exec(section(heading), names)
