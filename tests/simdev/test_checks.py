"""Checks that are read together: what is mended is told, what is wrong is raised as it would be at once."""

from __future__ import annotations

import pytest
import torch

from curvlab.criteria.base import check_labels
from curvlab.exceptions import ProblemError
from curvlab.linalg.execution import collected
from curvlab.linalg.inverse import NotPositiveDefiniteError, cholesky_shifted
from tests.simdev.device import Sim

pytestmark = pytest.mark.device


def test_a_failed_factorisation_is_mended_when_it_is_read(sim: Sim) -> None:
    matrix = torch.ones(2, 2)  # in float32 the shift is lost
    expected = cholesky_shifted(matrix, 1e-9)
    with collected() as checks:
        assert checks is not None
        with sim.counted() as counting:
            factor = cholesky_shifted(matrix.to("sim"), 1e-9)
            fine = cholesky_shifted(torch.eye(2, device="sim"), 1.0)
        assert counting.counts.reads == 0
        assert not torch.equal(factor.cpu(), expected)
        assert checks.read()
        assert not checks.read()
    assert torch.equal(factor.cpu(), expected)
    assert torch.equal(fine.cpu(), 2**0.5 * torch.eye(2))


def test_a_matrix_that_is_not_definite_is_refused_when_it_is_read(sim: Sim) -> None:
    with collected() as checks:
        assert checks is not None
        cholesky_shifted(-torch.eye(2, device="sim"), 0.5)
        with pytest.raises(NotPositiveDefiniteError):
            checks.read()


def test_a_bad_label_says_the_same_and_comes_before_what_it_led_to(sim: Sim) -> None:
    logits, labels = torch.zeros(3, 4), torch.tensor([0, 7, 1])
    with pytest.raises(ProblemError) as at_once:
        check_labels(logits, labels)

    def wrong() -> None:
        with collected():
            check_labels(logits.to("sim"), labels.to("sim"))
            raise ValueError("what came of it")

    with pytest.raises(ProblemError) as together:
        wrong()
    assert str(together.value) == str(at_once.value)
