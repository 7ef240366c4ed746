"""What a notebook shows: tab completion, and values in one short line or one table."""

from __future__ import annotations

import subprocess
import sys

import pytest

import curvlab
from tests.cases import Case


@pytest.mark.slow
def test_tab_completion_shows_exactly_the_public_names_before_any_is_loaded() -> None:
    program = "import curvlab; print(*dir(curvlab))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == sorted([*curvlab.__all__, "__version__"])
    for name in dir(curvlab):
        assert getattr(curvlab, name) is not None


@pytest.mark.parametrize(
    ("provider", "block", "text"),
    [
        ("pch-1", "0.bias", "FactorBlock(dense, shape=(3,), float64, 72 bytes)"),
        ("pch-1", "0.weight", "KroneckerBlock(dense ⊗ gram, shape=(3, 4), float64, 272 bytes)"),
        ("hessian", "0.weight", "OperatorBlock(matrix-free, shape=(3, 4), float64, 0 bytes)"),
    ],
)
def test_a_block_is_one_line_without_its_numbers(provider: str, block: str, text: str) -> None:
    problem, _ = Case(widths=(4, 3, 2), examples=5).build()
    assert repr(curvlab.estimate(provider, problem).blocks[block]) == text


def test_a_layer_and_its_factors_show_no_numbers() -> None:
    problem, _ = Case(widths=(4, 3, 2), examples=2).build()
    layer = curvlab.estimate("pch-1", problem).layers[0]
    assert repr(layer.output) == "DenseFactor(3 × 3, rank ≤ 3, float64)"
    assert "source=GramFactor(4 × 4, rank ≤ 2, float64)" in repr(layer)
    assert "tensor(" not in repr(layer)


def test_a_direction_shows_names_and_shapes_and_forms_nothing() -> None:
    problem, _ = Case(widths=(4, 3, 2)).build()
    solution = curvlab.solve("kfi", curvlab.estimate("pch-1", problem), problem.gradient(), alpha=0.1)
    shapes = "0.weight: (3, 4), 0.bias: (3,), 2.weight: (2, 3), 2.bias: (2,)"
    assert repr(solution.direction) == f"Direction({shapes})"


def test_a_solution_is_a_table_with_a_row_a_block() -> None:
    problem, _ = Case(widths=(4, 3, 2)).build()
    solution = curvlab.solve("kfi", curvlab.estimate("pch-1", problem), problem.gradient(), alpha=0.1)
    page = solution._repr_html_()
    assert page.startswith("<p>Solution(kfi on pch-1, damping=mixed(0.1), 4 blocks)</p><table")
    assert page.count("<tr") == 1 + 4
    assert "<td>2.weight</td>" in page


def test_an_optimizer_shows_its_provider_solver_and_damping() -> None:
    problem, _ = Case().build()
    optimizer = curvlab.optim.SecondOrder(problem.model, "cross-entropy", "fisher", "kfi", lr=0.3, alpha=0.2)
    lines = repr(optimizer).splitlines()
    assert lines[:4] == ["SecondOrder (", "    provider: fisher", "    solver: kfi", "    alpha: 0.2"]
    assert "    lr: 0.3" in lines
    optimizer.alpha = 0.1
    assert "alpha: 0.1" in repr(optimizer)
