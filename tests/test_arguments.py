"""Arguments of another kind than expected, or swapped: a sentence says what was given and how to call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import curvlab
from curvlab.exceptions import ArgumentError
from tests.cases import Case


@pytest.fixture(scope="module")
def curvature() -> curvlab.Curvature:
    return curvlab.estimate("pch-1", Case().build()[0])


@pytest.mark.parametrize(
    ("operand", "given"), [(torch.ones(7), r"Tensor of shape \(7,\)"), ([1.0], "list"), ("x", r"str \('x'\)")]
)
def test_a_product_with_anything_but_a_mapping_is_refused(
    curvature: curvlab.Curvature, operand: Any, given: str
) -> None:
    with pytest.raises(ArgumentError, match=f"got a {given}. .*flat_product") as raised:
        curvature @ operand
    assert isinstance(raised.value, TypeError)


def test_swapped_arguments_of_solve_are_said(curvature: curvlab.Curvature) -> None:
    gradient = {name: torch.zeros(block.shape) for name, block in curvature.blocks.items()}
    swapped: Any = (curvature, "cg", gradient)
    with pytest.raises(ArgumentError, match=r"the solver comes first.*got a Curvature"):
        curvlab.solve(*swapped, alpha=0.1)
    wrong: Any = ("cg", "pch-1", gradient)
    with pytest.raises(ArgumentError, match=r"second argument is a str \('pch-1'\); expected a Curvature"):
        curvlab.solve(*wrong, alpha=0.1)
    vector: Any = ("cg", curvature, torch.ones(3))
    with pytest.raises(ArgumentError, match=r"gradient is a Tensor of shape \(3,\); expected a mapping"):
        curvlab.solve(*vector, alpha=0.1)
