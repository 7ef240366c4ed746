"""Every kind of layer: its blocks are the dense ones, and it converts, saves, loads and pickles."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import curvlab
from curvlab.curvature_layers import KroneckerLayer, LayerCurvature, OperatorLayer, SharedLayer
from curvlab.exceptions import CurvlabError, PairError
from curvlab.linalg import DenseFactor, DiagonalFactor, FactorBlock, GramFactor, MatrixView, OperatorBlock
from curvlab.linalg.factors import InputFactors, RankOneFactor, inner_product
from tests.layer_cases import ALL, PLACES, SHARED, curvature_of, gradient_of, random_factor, shared

VIEWS = {
    "convolution": MatrixView((4, 3, 2, 2)),
    "groups": MatrixView((4, 3, 2), 2),
    "transposed": MatrixView((4, 3), 1, "transposed"),
    "transposed-parts": MatrixView((4, 6), 3, "transposed"),
    "transposed-convolution": MatrixView((4, 3, 2, 2), 2, "transposed-convolution"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_puts_every_entry_in_its_place_and_back(name: str) -> None:
    view = VIEWS[name]
    parameter = torch.arange(float(torch.Size(view.shape).numel())).reshape(view.shape)
    matrices = view.matrices(parameter)
    assert tuple(matrices.shape) == view.matrix_shape
    for value, (g, o, n) in zip(
        parameter.flatten(), PLACES[view.layout](view.shape, view.parts), strict=True
    ):
        assert matrices[g, o, n] == value
    assert torch.equal(view.parameter(matrices), parameter)
    several = torch.stack([parameter, 2 * parameter])
    assert torch.equal(view.parameter(view.matrices(several)), several)
    assert MatrixView.unpack(view.pack()) == view


def test_a_view_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fall into 3 equal parts"):
        MatrixView((4, 3), 3)


@pytest.mark.parametrize("name", ALL)
def test_blocks_are_the_dense_ones_in_the_parameters_own_shape(name: str) -> None:
    written = ALL[name]()
    vectors = gradient_of(curvature_of(written))
    assert list(written.layer.blocks) == list(written.blocks)
    for key, dense in written.blocks.items():
        block, x = written.layer.blocks[key], vectors[key]
        torch.testing.assert_close((block @ x).flatten(), dense @ x.flatten(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(block.to_dense(), dense, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(block.trace(), dense.trace(), rtol=1e-12, atol=0)
        torch.testing.assert_close(block.diagonal().flatten(), dense.diagonal(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(block.frobenius_norm(), dense.norm(), rtol=1e-12, atol=0)
        torch.testing.assert_close(block.eigvalsh(), torch.linalg.eigvalsh(dense), rtol=1e-10, atol=1e-10)
        assert block.diagonal().shape == block.shape == x.shape


@pytest.mark.parametrize("name", ALL)
def test_a_layer_comes_back_from_a_file_a_pickle_and_a_conversion(name: str, tmp_path: Path) -> None:
    given = curvature_of(ALL[name](), shift=0.25)
    given.save(tmp_path / "c.safetensors")
    loaded = curvlab.Curvature.load(tmp_path / "c.safetensors")
    for found in (loaded, pickle.loads(pickle.dumps(given)), given.to(torch.float32).to(torch.float64)):
        (layer,), (one,) = found.layers, given.layers
        assert type(layer) is type(one)
        assert found.shift == 0.25
        for key, block in given.blocks.items():
            torch.testing.assert_close(found.blocks[key].to_dense(), block.to_dense(), rtol=1e-5, atol=1e-5)
        for kind in ("full", "mean"):
            for a, b in zip(layer.units(kind), one.units(kind), strict=True):
                assert (a.name, a.weight_name, a.bias_name) == (b.name, b.weight_name, b.bias_name)
    for key, block in given.blocks.items():
        assert torch.equal(loaded.blocks[key].to_dense(), block.to_dense())


def test_a_pickled_layer_holds_nothing_that_was_made_from_it() -> None:
    layer = SHARED["groups"]().layer
    before = len(pickle.dumps(layer))
    layer.units("mean")
    assert layer.blocks
    assert len(pickle.dumps(layer)) == before


@pytest.mark.parametrize("name", SHARED)
def test_units_are_one_per_matrix_and_are_kept(name: str) -> None:
    written = SHARED[name]()
    layer = written.layer
    assert isinstance(layer, SharedLayer)
    full, mean = layer.units("full"), layer.units("mean")
    assert full is layer.units("full")
    count = len(written.b)
    bias = layer.bias_name is not None
    assert [unit.weight_name for unit in full] == [layer.weight_name] * count + [None] * bias
    for part in range(count):
        torch.testing.assert_close(full[part].output.to_dense(), written.b[part])
        torch.testing.assert_close(mean[part].output.to_dense(), written.sub_block(part))
    if bias:
        assert full[-1].bias_name == layer.bias_name
        assert full[-1].output is layer.mean_output
        assert len(mean) == (1 if count == 1 else count + 1)
        assert mean[-1].bias_name == layer.bias_name


def test_factors_that_do_not_fit_their_view_are_refused() -> None:
    layer = shared("conv", (4, 3, 2)).layer
    assert isinstance(layer, SharedLayer)
    with pytest.raises(ValueError, match="1 matrices of 5 × 6; got factors of 4 × 6"):
        replace(layer, view=MatrixView((5, 3, 2)))
    with pytest.raises(ValueError, match="over all outputs of all parts, 1 × 4; got one of 3"):
        replace(layer, mean_output=DenseFactor(torch.eye(3)))
    with pytest.raises(ValueError, match="give None, None, \\(\\)"):
        replace(layer, weight_name=None)


def test_a_shared_layer_whose_weight_has_no_block_is_its_bias() -> None:
    factor = DenseFactor(torch.eye(3, dtype=torch.float64))
    layer = SharedLayer("conv", None, "conv.bias", None, (), factor)
    assert list(layer.blocks) == ["conv.bias"]
    for kind in ("full", "mean"):
        assert [(unit.weight_name, unit.bias_name) for unit in layer.units(kind)] == [(None, "conv.bias")]


def test_the_old_constructor_makes_the_kind_that_its_arguments_are() -> None:
    b, inputs = DenseFactor(torch.eye(2)), InputFactors(DenseFactor(torch.eye(3)), torch.zeros(3))
    operator = OperatorBlock((2, 3), lambda x: x, torch.zeros(()))
    kronecker = curvlab.LayerCurvature("0", "0.weight", "0.bias", b, inputs)
    free = curvlab.LayerCurvature("0", "0.weight", "0.bias", b, weight_operator=operator)
    mixed = curvlab.LayerCurvature("0", "0.weight", "0.bias", b, inputs, bias_operator=operator)
    assert isinstance(kronecker, KroneckerLayer)
    assert isinstance(free, OperatorLayer)
    assert isinstance(mixed, OperatorLayer)
    for layer in (kronecker, free, mixed):
        assert isinstance(layer, LayerCurvature)
        assert list(layer.blocks) == ["0.weight", "0.bias"]
        assert (layer.weight_name, layer.bias_name, layer.output) == ("0.weight", "0.bias", b)
    assert free.weight_operator is operator
    assert isinstance(free.blocks["0.bias"], FactorBlock)
    assert kronecker.weight_operator is None
    with pytest.raises(ValueError, match="neither an operator nor both factors"):
        curvlab.LayerCurvature("0", "0.weight", None, None)
    with pytest.raises(PairError, match="use `cg`"):
        free.units("full")


@pytest.mark.parametrize(
    ("left", "right"), list(product(["dense", "gram", "diagonal", "rank-one"], repeat=2))
)
def test_inner_products_of_factors_of_any_two_kinds(left: str, right: str) -> None:
    def make(kind: str, seed: int) -> tuple[object, torch.Tensor]:
        if kind != "rank-one":
            return random_factor(kind, 5, seed)
        vector = torch.linspace(-1, seed, 5, dtype=torch.float64)
        return RankOneFactor(vector), torch.outer(vector, vector)

    (one, dense_one), (other, dense_other) = make(left, 1), make(right, 2)
    expected = (dense_one @ dense_other).trace()
    torch.testing.assert_close(inner_product(one, other), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "gram", "diagonal"])
def test_a_diagonal_block_is_that_of_the_dense_form(kind: str) -> None:
    factor, dense = random_factor(kind, 6, 0)
    torch.testing.assert_close(factor.diagonal_block(2, 5).to_dense(), dense[2:5, 2:5])


def test_files_of_the_first_format_can_be_read(tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file

    rows = torch.tensor([[1.0, 2.0, 0.0]])
    layer = {"name": "0", "weight": "0.weight", "bias": "0.bias", "output": "dense", "input": "gram"}
    header = {"format": "curvlab-curvature-1", "provider": "pch-1", "criterion": "mse", "psd": True}
    header |= {"why": "by PosEig", "exact": False, "notes": ["a note"], "layers": [layer]}
    tensors = {"0/output/matrix": torch.eye(2), "0/input/rows": rows, "0/input/root": torch.ones(1)}
    save_file(tensors, tmp_path / "old", metadata={"curvlab": json.dumps(header)})
    found = curvlab.Curvature.load(tmp_path / "old")
    assert (found.provider, found.notes, found.shift, found.structure) == (
        "pch-1",
        ("a note",),
        0.0,
        "kronecker",
    )
    (one,) = found.layers
    assert isinstance(one, KroneckerLayer)
    assert isinstance(one.inputs.full, GramFactor)
    torch.testing.assert_close(found.blocks["0.weight"].to_dense(), torch.kron(torch.eye(2), rows.T @ rows))


def test_a_file_that_cannot_be_read_is_an_error_of_curvlab(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(CurvlabError, match="cannot be read"):
        curvlab.Curvature.load(tmp_path / "junk")


@pytest.mark.parametrize("name", ALL)
def test_the_shift_is_in_every_measure_of_the_curvature(name: str) -> None:
    written, shift = ALL[name](), 0.375
    curvature = curvature_of(written, shift=shift)
    vectors = gradient_of(curvature)
    dense = {key: block + shift * torch.eye(len(block)) for key, block in written.blocks.items()}
    whole = torch.block_diag(*dense.values())
    torch.testing.assert_close(curvature.to_dense(), whole)
    torch.testing.assert_close(curvature.trace(), whole.trace())
    torch.testing.assert_close(curvature.frobenius_norm(), whole.norm())
    for key, matrix in dense.items():
        torch.testing.assert_close((curvature @ vectors)[key].flatten(), matrix @ vectors[key].flatten())
        torch.testing.assert_close(curvature.diagonal()[key].flatten(), matrix.diagonal())
        torch.testing.assert_close(curvature.eigvalsh()[key], torch.linalg.eigvalsh(matrix))
    frame = curvature.frame().set_index("block")
    for key, matrix in dense.items():
        ends = torch.linalg.eigvalsh(matrix)[[0, -1]].tolist()
        found = frame.loc[key, ["smallest_eigenvalue", "largest_eigenvalue"]].tolist()
        assert found == pytest.approx(ends, rel=1e-9)


def test_the_shift_is_added_to_products_with_cross_layer_blocks() -> None:
    written = ALL["plain-dense"]()
    curvature = curvature_of(written, shift=0.5, full_product=lambda v: {n: 3 * x for n, x in v.items()})
    x = gradient_of(curvature)
    torch.testing.assert_close((curvature @ x)["norm.weight"], 3.5 * x["norm.weight"])


def test_a_wide_diagonal_factor_is_never_formed() -> None:
    n = 200_000
    factor = DiagonalFactor(torch.linspace(0, 1, n, dtype=torch.float64))
    x = torch.ones(2, n, dtype=torch.float64)
    target = torch.zeros_like(x)
    factor.add_product_(target, x, 2.0)
    torch.testing.assert_close(target[0], 2 * factor.values)
    torch.testing.assert_close(factor.matmul(x.T).T[1], factor.values)
    torch.testing.assert_close(factor.quadratic(x)[0], factor.trace())
    assert float(factor.eigvalsh()[-1]) == 1.0
