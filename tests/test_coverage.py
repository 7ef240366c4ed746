"""The page of what has which curvature is the one that the code makes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import coverage
from benchmarks.coverage import Covered, Measured, covered, module_table, structure
from benchmarks.coverage_cases import CASES
from curvlab.linalg import DenseFactor, FactorBlock, KroneckerBlock

EYE = DenseFactor(torch.eye(2))


def test_a_block_is_named_by_its_structure():
    assert structure(FactorBlock(EYE)) == "dense"
    assert structure(KroneckerBlock(EYE, EYE)) == "A ⊗ B"


def test_a_chain_of_linear_layers_is_covered_by_fisher_hessian_and_pch():
    weight, bias = covered(CASES[0], ["fisher", "hessian", "pch-1"])
    assert (weight.parameter, weight.found) == (
        "weight",
        {"fisher": "A ⊗ B", "hessian": "operator", "pch-1": "A ⊗ B"},
    )
    assert bias.found["fisher"] == "dense"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_logits_for_its_targets(case):
    model, x, y = case.build()
    logits = model(*x) if isinstance(x, tuple) else model(x)
    assert logits.shape == (*y.shape, case.classes)


def test_parameters_with_equal_structures_share_a_line():
    words = dict.fromkeys(coverage.PROVIDERS, "dense")
    table = module_table([Covered("Norm", "weight", words), Covered("Norm", "bias", words)])
    assert "| Norm | `weight`, `bias` | dense |" in table


def test_a_verdict_names_every_limit_that_is_missed():
    within = Measured(
        "net", 4, 100, 1.0, planned=100.0, planning=0, measured=110, seconds=1, processor_seconds=1
    )
    assert within.verdict == "ok"
    beyond = Measured(
        "net", 4, 100, 0.5, planned=100.0, planning=0, measured=200, seconds=1, processor_seconds=1
    )
    assert beyond.verdict == "COVERAGE, PLAN"


@pytest.mark.slow
@pytest.mark.skipif(not coverage.PAGE.exists(), reason="docs/coverage.md has not been written")
def test_the_page_has_the_table_that_the_code_makes():
    table = module_table([entry for case in CASES for entry in covered(case)])
    assert table in coverage.PAGE.read_text(encoding="utf-8"), "run `python -m benchmarks.coverage`"
