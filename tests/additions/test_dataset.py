"""A data set is added from this file alone, with the architecture that fits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from curvlab.data import Dataset, Examples, Source, TensorInputs, datasets
from curvlab.studies.setup import Setup


@dataclass(frozen=True)
class Parity(Source):
    """Bits and whether an even number of them is set."""

    bits: int = 5

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        rows = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * self.bits)
        examples = Examples(TensorInputs(rows), rows.sum(1).long() % 2)
        return Dataset("parity", examples, examples, ("even", "odd"), note="All strings of bits.")


@pytest.mark.slow
def test_a_data_set_of_another_package_is_loaded_by_its_name(install: Any, compare: Any) -> None:
    install(datasets, "parity", Parity)
    shown = compare("--data", "parity[bits=4]", "--arch", "4-3-2", "-p", "fisher", "-s", "kfi")
    assert shown.config["data"] == "parity[bits=4]"
    assert "--data 'parity[bits=4]'" in shown.compared.command
    assert shown.compared.cells["status"].tolist() == ["ok"]
    assert "parity[bits=4]" in shown.page


def test_the_architecture_takes_its_ends_from_the_data(install: Any) -> None:
    install(datasets, "parity", Parity)
    model = Setup(data="parity[bits=7]", batch=10).build_problem().model
    assert (model[0].in_features, model[-1].out_features) == (7, 2)
