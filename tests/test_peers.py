"""curvlab and curvlinops give the same Kronecker factors, up to scales that were written down beforehand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import curvlab
from benchmarks import any_model_cost
from benchmarks.peers import kfac_factors
from benchmarks.peers.kfac_factors import CASES, KINDS, SHARINGS, TOLERANCE, Case, relative_error

pytest.importorskip("curvlinops", reason="compares with curvlinops, which is not installed")

EACH = pytest.mark.parametrize(
    ("case", "kind", "sharing"),
    [pytest.param(*one, id="-".join((one[0].name, *one[1:]))) for one in product(CASES, KINDS, SHARINGS)],
)


@EACH
def test_curvlinops_factors_are_those_of_the_rows_times_the_scale_written_down(case: Case, kind, sharing):
    found = kfac_factors.curvlinops_factors(case, kind, sharing)
    for layer in case.positions:
        rows = kfac_factors.curvlinops_definition(case, layer, kind, sharing)
        a, b = found[layer]
        assert relative_error(a, rows.inputs) < TOLERANCE
        assert relative_error(b, case.scale(kind) * rows.output) < TOLERANCE


@EACH
def test_curvlab_blocks_are_those_of_the_rows(case: Case, kind, sharing):
    for layer in case.positions:
        rows = kfac_factors.defined(case, layer, kind, sharing)
        weight, bias = kfac_factors.curvlab_blocks(case, layer, kind, sharing)
        assert relative_error(weight, torch.kron(rows.output, rows.inputs)) < TOLERANCE
        if bias is not None:
            assert relative_error(bias, rows.bias) < TOLERANCE


@EACH
def test_curvlab_and_curvlinops_agree_where_they_mean_the_same_and_differ_elsewhere(
    case: Case, kind, sharing
):
    found = kfac_factors.curvlinops_factors(case, kind, sharing)
    errors = [
        relative_error(
            case.scale(kind) * kfac_factors.curvlab_blocks(case, layer, kind, sharing)[0],
            torch.kron(found[layer][1], found[layer][0]),
        )
        for layer in case.positions
    ]
    if case.same(kind, sharing):
        assert max(errors) < TOLERANCE
    else:
        assert max(errors) > 0.01


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[7]], ids=lambda case: case.name)
def test_curvlinops_drawn_labels_have_the_scale_of_exact_in_the_mean(case: Case):
    found = kfac_factors.curvlinops_factors(case, "mc", "expand", mc_samples=3000)
    for layer in case.positions:
        rows = kfac_factors.defined(case, layer, "exact", "expand")
        assert relative_error(found[layer][1], case.scale("exact") * rows.output) < 0.05


def test_a_wrong_scale_would_be_seen():
    case = CASES[6]
    _, b = kfac_factors.curvlinops_factors(case, "empirical", "expand")["0"]
    rows = kfac_factors.defined(case, "0", "empirical", "expand")
    assert relative_error(b, rows.output) > 0.5


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kfi_is_the_inverse_of_curvlinops_with_its_heuristic_damping(case: Case, sharing):
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    if case.scale("empirical") != 1:
        pytest.skip("a scale of B is a scale of the damping")
    model, x, y = case.build()
    parameters = dict(model.named_parameters())
    loss = kfac_factors.LOSSES[case.criterion]()
    gradient = dict(
        zip(parameters, torch.autograd.grad(loss(model(x), y), list(parameters.values())), strict=True)
    )
    kfac = KFACLinearOperator(
        model,
        loss,
        list(parameters.values()),
        [(x, y)],
        fisher_type="empirical",
        kfac_approx=sharing,
        check_deterministic=False,
    )
    inverse = KFACInverseLinearOperator(kfac, damping=0.05, use_heuristic_damping=True)
    expected = dict(zip(parameters, inverse @ list(gradient.values()), strict=True))
    curvature = curvlab.estimate(
        f"fisher[kind=empirical,sharing={sharing}]", curvlab.Problem(model, loss, x, y)
    )
    solution = curvlab.solve("kfi", curvature, gradient, alpha=0.05)
    for layer in case.positions:  # curvlinops damps a bias with its weight's share of the damping
        assert relative_error(-solution.direction[f"{layer}.weight"], expected[f"{layer}.weight"]) < 1e-9


def curvlinops_operator(name: str, model: nn.Module, loss: nn.Module, x, y):
    import curvlinops

    return getattr(curvlinops, name)(
        model, loss, list(model.parameters()), [(x, y)], check_deterministic=False
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_product_with_the_hessian_is_that_of_curvlinops(case: Case):
    model, x, y = case.build()
    loss = kfac_factors.LOSSES[case.criterion]()
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    expected = curvlinops_operator("HessianLinearOperator", model, loss, x, y) @ list(vector.values())
    product = curvlab.estimate("hessian[full=true]", curvlab.Problem(model, loss, x, y)) @ vector
    for name, wanted in zip(vector, expected, strict=True):
        assert relative_error(product[name], wanted) < TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_of_exact_gauss_newton_are_those_of_curvlinops(case: Case):
    model, x, y = case.build()
    loss = kfac_factors.LOSSES[case.criterion]()
    parameters = dict(model.named_parameters())
    operator = curvlinops_operator("GGNLinearOperator", model, loss, x, y)
    blocks = curvlab.estimate("gauss-newton[kind=exact]", curvlab.Problem(model, loss, x, y)).blocks
    for index, (name, parameter) in enumerate(parameters.items()):
        vector = torch.randn_like(parameter)
        alone = [vector if other is parameter else torch.zeros_like(other) for other in parameters.values()]
        assert relative_error(blocks[name] @ vector, (operator @ alone)[index]) < TOLERANCE


def test_the_peers_step_lowers_the_loss(monkeypatch):
    monkeypatch.setattr(any_model_cost, "BATCH", 8)
    monkeypatch.setattr(any_model_cost, "RATE", 0.05)
    model, (x, y) = any_model_cost.resnet8(nn.SiLU), any_model_cost.batch()
    before = nn.functional.cross_entropy(model(x), y).item()
    any_model_cost.peer_step(model, x, y)()
    assert nn.functional.cross_entropy(model(x), y).item() < before


def test_curvlinops_has_no_hessian_product_of_silu_and_the_table_leaves_it_out(monkeypatch):
    monkeypatch.setattr(any_model_cost, "BATCH", 2)
    x, y = any_model_cost.batch()
    for activation, refused in ((nn.SiLU, True), (nn.Tanh, False)):
        model = any_model_cost.resnet8(activation)
        vector = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        assert (any_model_cost.peer_product(model, x, y, vector) is None) == refused
