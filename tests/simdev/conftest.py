"""The simulated accelerator as a fixture: built once, and as it was after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simdev import device


@pytest.fixture
def sim() -> Iterator[device.Sim]:
    """The controls of the device; without a compiler the test is skipped, with the reason."""
    reason = device.lacking()
    if reason is not None:
        pytest.skip(reason)
    simulated = device.load()
    simulated.set_costs()
    torch.manual_seed(0)  # reaches the device's own generators only now that it is there
    torch.accelerator.set_device_index(0)
    yield simulated
    torch.accelerator.set_device_index(0)
