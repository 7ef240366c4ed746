"""Runs the tests of the mathematics on the simulated device: `pytest -p tests.simdev.plugin FILE…`.

Their tensors are made where torch's default device says, which is `sim` inside of every test. What cannot
run there is left out by name, with the reason that pytest shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.simdev import device

LEFT_OUT: dict[str, str] = {}
"""Tests by file and name, and why they are of the CPU."""


def reason_for(nodeid: str) -> str | None:
    """Why a test is left out; None where it is not.

    >>> reason_for("tests/test_curvature.py::test_that_is_not_there") is None
    True
    """
    file, _, name = nodeid.partition("::")
    return LEFT_OUT.get(f"{file.rpartition('/')[2]}::{name.partition('[')[0]}")


def pytest_configure(config: pytest.Config) -> None:
    """Build and load the device, once for every worker."""
    if device.lacking() is None:
        device.load()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark what does not run, with its reason."""
    absent = device.lacking()
    for item in items:
        if (reason := absent or reason_for(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Make tensors on the device, fixtures' too."""
    if item.get_closest_marker("skip"):
        return (yield)
    torch.set_default_device("sim")
    try:
        return (yield)
    finally:
        torch.set_default_device(None)
