"""The asv suites and `make bench-device` on the simulated device."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import base
from benchmarks import device as bench
from tests.simdev.device import Sim

pytestmark = pytest.mark.device

MODULES = ("providers", "solvers", "steps", "networks", "spectra", "errors")


def suites() -> Iterator[type[base.Suite]]:
    for name in MODULES:
        module = importlib.import_module(f"benchmarks.{name}")
        for _, found in inspect.getmembers(module, inspect.isclass):
            own = issubclass(found, base.Suite) and found.__module__ == module.__name__
            if own and "device" in getattr(found, "axes", {}) and not inspect.isabstract(found):
                yield found


@pytest.mark.slow
@pytest.mark.parametrize("suite", suites(), ids=lambda suite: f"{suite.__module__}.{suite.__name__}")
def test_a_suite_measures_on_the_device(sim: Sim, suite: type[base.Suite]) -> None:
    """Once, with the first of all parameters but the device's."""
    values = [
        "accelerator" if name == "device" else given[0]
        for name, given in zip(suite.param_names, suite.params, strict=True)
    ]
    own = suite()
    own.setup(*values)
    cached = [own.setup_cache()] if hasattr(own, "setup_cache") else []
    methods = [m for m in dir(own) if m.startswith(("track_", "time_"))]
    assert methods
    with sim.counted() as counting:
        for method in methods:
            found = getattr(own, method)(*cached, *values)
            assert method.startswith("time_") or found == found
    assert counting.counts.launches > 0


@pytest.mark.slow
def test_the_bench_of_a_device_publishes_nothing_of_a_simulated_one(
    sim: Sim, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SMALL", {"8-6-4": 10})
    assert bench.main(["--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "the only accelerator here is simulated. Missing: a GPU" in printed
    assert "pch-1 + kfi (captured)" in printed
    assert "Nothing was written" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_a_real_device_would_write(sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "what_is_missing", lambda: None)
    monkeypatch.setattr(bench, "NETWORKS", {"8-6-4": 10})
    monkeypatch.setattr(bench, "METHODS", ("sgd", "fisher + kfi"))
    assert bench.main(["--rounds", "2", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "measured ms" in page
    assert "predicted floor ms" in page
    assert page.count("| 8-6-4 |") == 3
    assert torch.device("sim").type in (tmp_path / "rows.json").read_text()
