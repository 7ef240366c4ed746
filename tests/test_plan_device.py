"""Plans for devices by name: counts as they are there, and a floor that is called one."""

from __future__ import annotations

import json
from math import isnan

import pytest
import torch
from click.testing import CliRunner

from curvlab import plan
from curvlab.cli import main
from curvlab.measure.data_sheets import DATA_SHEETS
from curvlab.measure.operations import Launch, Operations, count, operations
from curvlab.studies.setup import Setup
from curvlab.studies.small.floor import Rates, calibrate, rates_of
from curvlab.studies.small.plan import COLUMNS
from curvlab.studies.small.speeds import Curve, Speeds

CHAIN = Setup(arch="24-16-12-8-4", batch=20)
PAIR = {"providers": ["fisher"], "solvers": ["kfi"], "forms": ["sample-space"]}


def test_launches_views_operations_and_bytes_are_counted_by_hand() -> None:
    x, y = torch.ones(3, 4), torch.ones(4, 5)
    with operations() as found:
        z = (x @ y).T
        z.add_(1.0)
        torch._foreach_add([x, y], 1.0)
        torch.empty(7)
    assert [one.name for one in found.launches] == ["aten.mm", "aten.add_", "aten._foreach_add"]
    assert found.views == 1
    assert [one.side for one in found.launches] == [3, 0, 0]
    assert [one.bytes for one in found.launches] == [4 * (12 + 20 + 15), 4 * 2 * 15, 4 * 2 * (12 + 20)]
    assert found.flops == count(lambda: x @ y) == 2 * 3 * 4 * 5


def test_a_floor_is_launches_or_work_whichever_is_longer_and_reads() -> None:
    asked = Operations([Launch("a", 1000, 10), Launch("b", 10, 4000)], views=5, reads=2)
    device = Rates("d", flops=1e3, bandwidth=1e3, launch=2.0, read=0.25, source="by hand")
    assert asked.seconds(1e3, 1e3) == 1.0 + 4.0
    assert device.floor(asked) == max(2 * 2.0, 5.0) + 0.5
    assert device.verdict(asked).startswith("bound by memory traffic")
    slow = Rates("d", flops=1e3, bandwidth=1e3, launch=7.0, read=0.25, source="by hand")
    assert slow.floor(asked) == 14.0 + 0.5
    assert slow.verdict(asked) == "launch bound: launches and reads take 2.9 × its arithmetic"
    processor = Rates("c", 1e3, 1e3, launch=1.0, read=0.0, source="by hand", overlapping=False)
    assert processor.floor(asked) == (2 + 5) * 1.0 + 5.0


def test_the_side_of_a_launch_is_that_of_its_matrices_or_of_what_is_factorised() -> None:
    lower, columns = torch.eye(6), torch.ones(6, 2)
    with operations() as found:
        lower @ columns
        lower @ columns[:, 0]
        torch.linalg.cholesky_ex(lower)
        torch.cholesky_solve(columns, lower)
        torch.addmm(torch.ones(2), columns.T, columns)
    assert [one.side for one in found.launches if one.flops] == [2, 1, 6, 6, 2]


def test_speeds_go_by_kind_and_size() -> None:
    """A factorisation by its own curve, an addition by the bytes, a product by the larger of two times."""
    product, own = Curve(((1, 1e3), (16, 16e3))), Curve(((1, 10.0),))
    speeds = Speeds(product, {"aten.linalg_cholesky_ex": own}, Curve(((1, 100.0),)))
    launches = [
        Launch("aten.mm", 8000, 100, 4),
        Launch("aten.mm", 8, 100, 4),
        Launch("aten.linalg_cholesky_ex", 50, 1, 16),
        Launch("aten.add", 0, 300),
    ]
    assert [speeds.of(one) for one in launches] == pytest.approx([2.0, 1.0, 5.0, 3.0])
    assert speeds.seconds(Operations(launches)) == pytest.approx(11.0)
    processor = Rates("c", 1, 1, launch=1.0, read=0.0, source="", overlapping=False, speeds=speeds)
    assert processor.floor(Operations(launches, views=2)) == pytest.approx(6 + 11.0)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_a_device_that_is_not_here_is_planned_from_its_data_sheet(name: str) -> None:
    row = plan(Setup(arch=CHAIN.arch, batch=CHAIN.batch, device=name), **PAIR).iloc[0]
    sheet, rates = DATA_SHEETS[name], rates_of(name)
    assert sheet.source
    assert rates is not None
    assert row["status"] == "ok"
    assert row["fits"]
    assert row["floor_seconds"] >= row["launches"] * sheet.launch + row["reads"] * sheet.read
    assert row["bound"].startswith("launch bound")


@pytest.mark.slow
def test_a_wider_device_has_a_lower_floor_and_counts_do_not_depend_on_it() -> None:
    wide = Setup(arch="4096-4096-4096-10", batch=4096)
    frames = {name: plan(wide, **PAIR, device=name).iloc[0] for name in ("h100", "a100", "4090")}
    assert frames["h100"]["floor_seconds"] < frames["a100"]["floor_seconds"]
    assert len({row["launches"] for row in frames.values()}) == 1
    assert frames["a100"]["bound"].startswith("bound by arithmetic")


def test_cuda_that_is_not_here_has_counts_and_no_floor() -> None:
    row = plan(CHAIN, **PAIR, device="cuda").iloc[0]
    assert row["launches"] > 0
    assert isnan(row["floor_seconds"])
    assert row["bound"] == ""


def test_without_a_device_nothing_is_added() -> None:
    frame = plan(CHAIN, **PAIR)
    assert list(frame.columns) == COLUMNS
    assert frame["launches"].isna().all()
    assert frame["floor_seconds"].isna().all()


def test_launches_elsewhere_are_those_of_the_accelerator_s_routes() -> None:
    """Off the CPU products are not cut into pieces: fewer launches, no fewer operations."""
    wide = Setup(arch="3072-1024-10", batch=500)
    there, here = (plan(wide, **PAIR, device=name).iloc[0] for name in ("h100", "cpu"))
    assert there["launches"] < here["launches"]
    assert there["flops"] == here["flops"]


def test_what_does_not_fit_the_device_is_said() -> None:
    setup = Setup(arch="150528-1024-10", batch=100)
    frame = plan(setup, ["fisher"], ["kfi"], device="4090")
    assert frame[["form", "fits"]].values.tolist() == [["sample-space", True], ["textbook", False]]


def test_the_command_shows_a_floor_its_source_and_no_measurement() -> None:
    named = "plan --arch 24-16-4 --batch 20 -p fisher -s kfi --form sample-space --device h100"
    arguments = named.split(" ")
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "On NVIDIA H100 SXM, 80 GB, counted" in text
    assert "predicted, not measured" in text
    assert "H100 Tensor Core GPU data sheet" in text
    assert "launch bound" in text
    assert "≥" in text
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert found["rates"]["source"].startswith("NVIDIA H100")
    assert not [key for key in found["cells"][0] if "seconds" in key and "floor" not in key]


def test_this_machine_is_calibrated_and_its_error_told() -> None:
    found = calibrate()
    assert found.rates.flops > found.rates.bandwidth > 0
    assert not found.rates.overlapping
    assert found.predicted > 0 < found.measured
    assert found.error == found.predicted / found.measured - 1
    speeds = found.rates.speeds
    assert speeds is not None
    curves = [speeds.product, speeds.stream, *speeds.factorisations.values()]
    assert all(value > 0 for curve in curves for _, value in curve.points)
    assert found.rates.flops == max(value for _, value in speeds.product.points)
