"""A curvature comes back from a file as it was, and no pickle is involved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import curvlab
from curvlab import curvature_io
from curvlab.exceptions import CurvlabError, FileWriteError, MatrixFreeError
from tests.cases import Case
from tests.test_streaming import split

NAMES = ["fisher", "fisher[kind=mc,samples=2]", "gauss-newton", "pch-1", "pch-2"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("streamed", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_round_trip_keeps_every_block_and_what_is_known(
    name: str, streamed: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    problem, _ = Case(loss="robust", examples=9).build()
    given = curvlab.estimate(name, split(problem, [4, 5]) if streamed else problem).to(dtype)
    path = tmp_path / "curvature.safetensors"
    given.save(path)
    found = curvlab.Curvature.load(path)
    for attribute in ("provider", "criterion", "definiteness", "exact", "notes"):
        assert getattr(found, attribute) == getattr(given, attribute)
    assert list(found.blocks) == list(given.blocks)
    for block_name, block in given.blocks.items():
        assert torch.equal(found.blocks[block_name].to_dense(), block.to_dense())
    for one, other in zip(given.layers, found.layers, strict=True):
        assert one.inputs is not None
        assert other.inputs is not None
        assert torch.equal(one.inputs.mean, other.inputs.mean)
        assert one.inputs.full.kind == other.inputs.full.kind


def test_a_file_is_readable_by_safetensors_alone(tmp_path: Path) -> None:
    problem, _ = Case().build()
    path = tmp_path / "curvature.safetensors"
    curvlab.estimate("pch-1", problem).save(str(path))
    with safe_open(path, framework="np") as file:
        assert file.get_tensor("0/output/matrix").shape == (3, 3)
        assert '"provider": "pch-1"' in file.metadata()["curvlab"]


@pytest.mark.parametrize("content", [b"", b"junk" * 20, b"\x02" + 7 * b"\0" + b"{}"])
def test_a_file_that_is_no_curvature_is_refused_with_its_path_and_what_was_expected(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "junk.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"junk\.safetensors .*expected a safetensors file that"):
        curvlab.Curvature.load(path)


def test_any_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="is not a curvature saved by curvlab"):
        curvlab.Curvature.load(path)


@pytest.mark.parametrize("name", ["hessian", "gauss-newton[kind=exact]"])
def test_a_matrix_free_curvature_says_why_it_cannot_be_saved(name: str, tmp_path: Path) -> None:
    problem, _ = Case().build()
    with pytest.raises(MatrixFreeError, match="no matrix to save"):
        curvlab.estimate(name, problem).save(tmp_path / "x")


def test_a_write_that_fails_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, _ = Case().build()
    path = tmp_path / "curvature.safetensors"
    curvlab.estimate("pch-1", problem).save(path)
    before = path.read_bytes()

    def full_disk(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"torn")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curvature_io, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left") as raised:
        curvlab.estimate("fisher", problem).save(path)
    assert isinstance(raised.value, CurvlabError)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "curvature.safetensors"
    with pytest.raises(FileWriteError, match=r"cannot write .*missing.*: .*No such file"):
        curvlab.estimate("pch-1", Case().build()[0]).save(path)
