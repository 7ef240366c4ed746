"""A measured column of `compare` is added from this file alone."""

from __future__ import annotations

from typing import Any

import pytest

from curvlab.exceptions import SpecError
from curvlab.studies.compare.measurements import Cell
from curvlab.studies.compare.settings import Settings
from curvlab.studies.schema import Column, Setting, register_column, register_setting
from curvlab.studies.setup import Setup

pytestmark = pytest.mark.usefixtures("registered")


def scaled_trace(cell: Cell) -> float:
    """The trace of all blocks, times the setting of this file."""
    return cell.settings.extra["factor"] * sum(
        float(block.trace()) for block in cell.curvature.blocks.values()
    )


def register() -> None:
    register_setting(Setting("factor", float, 1.0, "Factor of the trace."))
    register_column(
        Column(
            "trace",
            "number",
            "trace of the curvature",
            short="Trace",
            covers="all blocks",
            measure=scaled_trace,
        )
    )


@pytest.mark.slow
def test_a_registered_column_is_in_the_frame_the_table_and_the_pages(compare: Any) -> None:
    register()
    once = compare("-p", "fisher", "-s", "kfi", "-s", "ea-cg")
    shown = compare("-p", "fisher", "-s", "kfi", "-s", "ea-cg", "--factor", "10")
    traces = shown.compared.cells["trace"]
    assert traces.gt(0).all()
    assert traces.tolist() == pytest.approx((10 * once.compared.cells["trace"]).tolist())
    assert "Trace" in shown.result.stdout
    for text in (shown.page, shown.markdown):
        assert "trace of the curvature (all blocks)" in text


@pytest.mark.long
def test_a_store_without_the_column_is_measured_again(compare: Any) -> None:
    plain = compare("-p", "fisher", "-s", "kfi")
    assert "trace" not in plain.compared.cells
    before = Settings.of(Setup()).key("solve")
    register_column(Column("trace", measure=lambda cell: 7.0))
    assert Settings.of(Setup()).key("solve") != before
    assert compare("-p", "fisher", "-s", "kfi").compared.cells["trace"].tolist() == [7.0]


def test_a_column_that_fails_fails_its_cell_with_the_reason(compare: Any) -> None:
    def broken(cell: Cell) -> float:
        raise RuntimeError("no trace today")

    register_column(Column("trace", measure=broken))
    with pytest.raises(AssertionError, match="no trace today"):
        compare("-p", "fisher", "-s", "kfi")


def test_a_column_that_nothing_measures_is_refused() -> None:
    with pytest.raises(SpecError, match="has no `measure`"):
        register_column(Column("trace"))
