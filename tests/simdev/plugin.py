"""Runs the tests of the mathematics on the simulated device: `pytest -p tests.simdev.plugin FILE…`.

Their tensors are made where torch's default device says, which is `sim` inside of every test. What cannot
run there is left out by name, with the reason that pytest shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.simdev import device

IMPORTED = "its parameters hold tensors that are made when the file is imported, on the CPU"
CACHE = "it is about the CPU's cache, for which only the CPU's matrices have a border"
DRAWS = "so many draws take five seconds and more there"
LEFT_OUT = {
    "test_criteria.py::test_derivatives_equal_torch_func_on_the_mean_loss": IMPORTED,
    "test_criteria.py::test_float32_extremes_stay_finite_and_right": IMPORTED,
    "test_criteria.py::test_weighted_mean_loss_is_torchs_mean_reduction": IMPORTED,
    "test_curvature.py::test_scipy_s_solvers_take_it": "scipy works on numpy's views of the host's memory",
    "test_curvature.py::test_what_says_it_is_positive_semi_definite_is": DRAWS,
    "test_linalg_inverse.py::test_columns_of_a_whole_page_are_kept_apart_and_change_nothing": CACHE,
    "test_providers_blocks.py::test_mc_fisher_converges_to_exact_fisher": DRAWS,
    "test_solvers_per_layer.py::test_units_are_shared_out_over_ranks_and_products_are_not": "its ranks are "
    "threads, each with a default device of its own, the CPU",
}
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
