"""`torchrun -m curvlab train` on two ranks against one process: the same rows, and either resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from curvlab.data import dataset
from curvlab.distributed.communicator import rank_batches, shard
from curvlab.studies.setup import Setup
from curvlab.studies.train.folder import read_checkpoint
from curvlab.studies.train.run import TrainPlan, train

SECONDS = 900
# 250 examples in batches of 83: of the last batch, a single example, rank 1 has no row.
SETUP = Setup(data="digits[train=250]", arch="64-12-10", batch=83, device="cpu", dtype="float64")
OPTIONS = ["--data", "digits[train=250]", "--arch", "64-12-10", "--batch", "83", "--dtype", "float64"]
CLOCK = ("seconds", "cpu_seconds", "step_seconds", "peak_bytes")


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    launch = [
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    command = [sys.executable, "-m", *launch, "-m", "curvlab", "train", *OPTIONS, "--device", "cpu", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = read_checkpoint(folder / "checkpoint.safetensors")["model"]
    return held


def check_rows(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(actual) == len(expected)
    for found, row in zip(actual, expected, strict=True):
        for name, value in row.items():
            if isinstance(value, float) and isfinite(value) and name not in CLOCK:
                assert found[name] == pytest.approx(value, rel=1e-8), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    ["second-order[provider=fisher,solver=kfi,ema=0.5]", pytest.param("sgd[lr=0.1]", marks=pytest.mark.long)],
)
def test_two_ranks_make_the_run_of_one_process_and_one_resumes_it(tmp_path: Path, optimizer: str) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    ran = torchrun("--optimizer", optimizer, "--epochs", "2", "-o", str(two), "--json")
    assert ran.returncode == 0, ran.stderr
    printed = json.loads(ran.stdout)  # one rank prints
    expected = train(TrainPlan(SETUP, optimizer, 2), one)
    check_rows(printed["rows"], expected.to_dict("records"))
    models = model_of(two), model_of(one)
    assert models[0].keys() == models[1].keys() != set()
    for name, tensor in models[1].items():
        torch.testing.assert_close(models[0][name], tensor, rtol=0, atol=1e-8)
    resumed = train(TrainPlan(SETUP, optimizer, 3), two)
    check_rows(resumed.to_dict("records"), train(TrainPlan(SETUP, optimizer, 3), one).to_dict("records"))


def test_shards_of_all_ranks_are_the_batch_in_its_order() -> None:
    batches = dataset("digits[train=50]").load(seed=0).batches(7, seed=1, epoch=2, start=3)
    for ranks in (1, 2, 3, 9):
        parts = zip(*(rank_batches(batches, rank, ranks) for rank in range(ranks)), strict=True)
        for whole, pieces in zip(batches, parts, strict=True):
            for index in range(2):
                assert torch.equal(torch.cat([piece[index] for piece in pieces]), whole[index])


@pytest.mark.parametrize(("count", "ranks"), [(0, 2), (1, 3), (10, 4), (7, 7)])
def test_shards_are_contiguous_and_differ_by_at_most_one_row(count: int, ranks: int) -> None:
    parts = [shard(count, rank, ranks) for rank in range(ranks)]
    sizes = [part.stop - part.start for part in parts]
    assert [part.start for part in parts] == [sum(sizes[:rank]) for rank in range(ranks)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
