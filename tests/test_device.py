"""Device helpers that only another process can show."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from curvlab.measure import device

def step():
    held = [torch.ones(3_000_000) for _ in range(4)]  # 12 MB each, all freed at the end

def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
before = faults(3)
device.keep_freed_memory("cpu")
faults(3)
print(before, faults(3))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of glibc is what it is about")
def test_pages_that_a_step_freed_are_there_for_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 10_000
    assert after < before / 10
