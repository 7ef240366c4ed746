"""The cost model picks the route it documents, in cases that see a constant that is off by two."""

from __future__ import annotations

import pytest
import torch

import curvlab
from curvlab.linalg import DenseFactor, GramFactor
from curvlab.linalg.factors import InputFactors, InputKind
from curvlab.linalg.steps import RowGradient
from curvlab.solvers import input_coordinates
from curvlab.solvers.input_coordinates import Eigen, Inverse, Iteration, Work, choose_coordinates

WORK: dict[str, Work] = {
    "kfi": Inverse(),
    "sm-kfi": Inverse(),
    "exact": Eigen(),
    "cg[max_iter=2]": Iteration(2),
    "cg[max_iter=20]": Iteration(20),
    "ea-cg": Iteration(20),
}

# solver, rows m, inputs n, outputs o, the gradient of these rows in factors (or a tensor), route
DECISIONS = [
    ("kfi", 100, 150528, 1024, True, "sample"),
    ("kfi", 1000, 64, 32, True, "dense"),
    ("kfi", 200, 784, 256, False, "row"),
    ("kfi", 10, 64, 256, False, "row"),
    ("kfi", 1000, 3072, 1024, False, "row"),
    ("kfi", 1000, 1100, 1024, False, "dense"),
    ("kfi", 48, 64, 64, False, "row"),
    ("kfi", 50, 64, 64, False, "dense"),
    ("exact", 100, 150528, 1024, True, "sample"),
    ("exact", 10, 16, 10, False, "row"),
    ("exact", 50, 64, 10, False, "dense"),
    ("cg[max_iter=20]", 100, 256, 10, True, "dense"),
    ("cg[max_iter=20]", 200, 784, 10, False, "row"),
    ("cg[max_iter=20]", 10, 64, 10, True, "sample"),
    ("cg[max_iter=2]", 10, 16, 64, True, "sample"),
    ("ea-cg", 50, 64, 64, True, "dense"),
    ("ea-cg", 50, 64, 256, True, "sample"),
    ("ea-cg", 1000, 3072, 16, True, "dense"),
    ("ea-cg", 50, 64, 256, False, "dense"),
    ("sm-kfi", 50, 16, 64, True, "dense"),
    ("sm-kfi", 100, 16, 10, True, "sample"),
    ("sm-kfi", 10, 150528, 10, False, "dense"),
]


def route_of(solver: str, m: int, n: int, o: int, own: bool) -> str:
    """The route of a layer of which nothing but the shapes is known."""
    root = torch.empty(m, device="meta")
    rows = GramFactor(torch.empty(m, n, device="meta"), root)
    layer = curvlab.LayerCurvature(
        "0", "0.weight", None, DenseFactor(torch.empty(o, o, device="meta")), InputFactors(rows)
    )
    in_factors = RowGradient(GramFactor(torch.empty(m, o, device="meta"), root), rows)
    gradient = in_factors if own else torch.empty(o, n, device="meta")
    kind: InputKind = "mean" if solver in ("ea-cg", "sm-kfi") else "full"
    return choose_coordinates(layer, gradient, kind, "auto", WORK[solver]).route


def decisions() -> list[str]:
    return [route_of(*shapes) for *shapes, _ in DECISIONS]


@pytest.mark.parametrize(("solver", "m", "n", "o", "own", "route"), DECISIONS)
def test_the_cost_model_picks_the_documented_route(
    solver: str, m: int, n: int, o: int, own: bool, route: str
) -> None:
    assert route_of(solver, m, n, o, own) == route


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", ["SYMMETRIC", "FLOPS_PER_BYTE", "PASSES", "_cholesky", "_eigh", "_qr"])
def test_the_decisions_see_each_constant(monkeypatch: pytest.MonkeyPatch, name: str, factor: float) -> None:
    """A constant off by two changes a decision, so the table above holds each of them."""
    given = getattr(input_coordinates, name)
    other = (lambda *sizes: factor * given(*sizes)) if callable(given) else factor * given
    monkeypatch.setattr(input_coordinates, name, other)
    assert decisions() != [route for *_, route in DECISIONS]


@pytest.mark.parametrize(("m", "n"), [(9, 9), (12, 9)])
def test_the_row_space_is_no_choice_where_it_is_no_smaller(m: int, n: int) -> None:
    assert route_of("kfi", m, n, 4, own=False) == "dense"


def test_a_factor_without_rows_is_solved_as_it_is() -> None:
    layer = curvlab.LayerCurvature(
        "0",
        "0.weight",
        None,
        DenseFactor(torch.eye(3)),
        InputFactors(DenseFactor(torch.eye(50)), torch.ones(50)),
    )
    for kind in ("full", "mean"):
        assert choose_coordinates(layer, torch.ones(3, 50), kind, "auto", Inverse()).route == "dense"
