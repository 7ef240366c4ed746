"""The notebooks in docs/ run from start to end with figures and tables, and are kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import curvlab

ROOT = Path(curvlab.__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def test_there_is_a_notebook() -> None:
    assert "digits" in [path.stem for path in NOTEBOOKS]


def test_outputs_are_not_kept(notebook: nbformat.NotebookNode) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(notebook: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The kernel draws into the notebook; the tests' own setting would leave it without figures.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    rich = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in data for data in rich) >= 3
    assert sum("text/html" in data for data in rich) >= 3
