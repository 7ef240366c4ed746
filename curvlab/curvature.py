"""A curvature: the blocks of one symmetric matrix, named as the model's parameters.

    C = blockdiag(blocks of the layers) + λI

The layers (see `curvature_layers`) are of the data part; λ, the `shift`, is that of an l2 term in the loss.
Kronecker products are in the paper's column order, E[hhᵀ] ⊗ B^t: on torch's row-flattened weights they are
B^t ⊗ E[hhᵀ].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from math import nan
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlab.curvature_io import Packed, load_packed, save_packed
from curvlab.curvature_layers import LayerCurvature, OperatorLayer, unpack_layer
from curvlab.exceptions import (
    ArgumentError,
    MatrixFreeError,
    StaleError,
    describe_argument,
    named_briefly,
    stacklevel_of_caller,
)
from curvlab.linalg import Block, DiagonalFactor, FactorBlock, KroneckerBlock, ShiftedBlock, ViewedBlock
from curvlab.linalg.blocks import DENSE_BYTES, check_dense_bytes, dense_from
from curvlab.linalg.factors import frobenius_norm
from curvlab.linalg.flat import flatten, unflatten
from curvlab.linalg.precision import FullPrecision
from curvlab.staleness import Versions, change_message

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse.linalg import LinearOperator

__all__ = ["Curvature", "Definiteness", "LayerCurvature", "StaleWarning"]

EIGENVALUES_UP_TO = 512


class StaleWarning(UserWarning):
    """The parameters have changed since the curvature was computed."""


@dataclass(frozen=True)
class Definiteness:
    """Whether a curvature is positive semi-definite, and how that is known."""

    psd: bool
    why: str

    def __str__(self) -> str:
        return f"{'positive semi-definite' if self.psd else 'indefinite'} ({self.why})"


@dataclass(frozen=True, eq=False)
class Curvature(FullPrecision):
    """A symmetric matrix over the parameters of a model, block by block.

    `layers` and `full_product` are of the data part; `shift` is λ of λI, which every product and measure of
    the curvature includes. `structure` names the matrix: `kronecker`, or `diagonal`. `left_out` are the
    trainable parameters that have no block, by the user's choice of layers, with their shapes.

    >>> import curvlab
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    >>> problem = curvlab.Problem(model, "cross-entropy", torch.ones(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    >>> curvature = curvlab.estimate("pch-1", problem)
    >>> curvature.blocks["2.bias"].shape, curvature.definiteness.psd
    ((2,), True)
    """

    provider: str
    criterion: str
    layers: tuple[LayerCurvature, ...]
    definiteness: Definiteness
    exact: bool = False
    notes: tuple[str, ...] = ()
    full_product: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = field(default=None, repr=False)
    versions: Versions | None = field(default=None, repr=False)
    live: bool = False
    shift: float = 0.0
    structure: str = "kronecker"
    left_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by parameter name, layer by layer; a warning tells where the parameters have changed."""
        self.check_fresh()
        return self._blocks

    @cached_property
    def _blocks(self) -> dict[str, Block]:
        blocks = {name: block for layer in self.layers for name, block in layer.blocks.items()}
        if self.shift == 0:
            return blocks
        return {name: ShiftedBlock(block, self.shift) for name, block in blocks.items()}

    @property
    def psd(self) -> bool:
        """Whether the matrix is positive semi-definite."""
        return self.definiteness.psd

    @property
    def matrix_free(self) -> bool:
        """Whether any of the blocks is an operator that reads the model."""
        return any(layer.matrix_free for layer in self.layers)

    @property
    def numel(self) -> int:
        """Number of parameters covered."""
        return sum(block.numel for block in self._blocks.values())

    @property
    def nbytes(self) -> int:
        """Bytes held by the blocks, a tensor shared by several counted once."""
        held: dict[int, int] = {}
        for layer in self.layers:
            held |= {id(t): t.nbytes for t in layer.tensors().values()}
            if isinstance(layer, OperatorLayer):
                operators = layer.operators.values()
                held |= {id(b): b.nbytes for b in operators if not isinstance(b, FactorBlock)}
        return sum(held.values())

    def check_fresh(self) -> None:
        """Warn or raise if the parameters or the batch have changed since the curvature was computed.

        A Kronecker curvature is then that of the old parameters: a `StaleWarning`. A matrix-free one, or one
        whose batch was overwritten, is neither the old nor the new: a `StaleError`.
        """
        changed = self.versions.changed() if self.versions is not None else []
        if not changed:
            return
        since = f"`{self.provider}` was estimated"
        if self.live or "the inputs" in changed:
            again = "and its blocks read them: call estimate() again"
            raise StaleError(change_message(changed, since, again))
        old = "and its blocks are those of the old parameters"
        warnings.warn(change_message(changed, since, old), StaleWarning, stacklevel=stacklevel_of_caller())

    def __matmul__(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(vectors, Mapping):
            raise ArgumentError(
                f"`curvature @ x` takes a mapping of parameter names to tensors, such as problem.gradient(); "
                f"got a {describe_argument(vectors)}. For one vector of all parameters, flattened and "
                f"joined, use curvature.flat_product(x)"
            )
        blocks = self.blocks
        missing = [name for name in blocks if name not in vectors]
        if missing:
            raise ValueError(f"the operand has no entry for {missing}; expected {list(blocks)}")
        if self.full_product is None:
            return {name: block @ vectors[name] for name, block in blocks.items()}
        images = self.full_product(vectors)
        if self.shift == 0:
            return images
        return {name: image + self.shift * vectors[name] for name, image in images.items()}

    def to_dense(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        """The whole matrix, parameters flattened and joined in the order of `blocks`."""
        blocks = self.blocks
        example = next(iter(blocks.values())).example
        check_dense_bytes(self.numel, example.element_size(), max_bytes, f"`{self.provider}`")
        if self.full_product is None:
            return torch.block_diag(*[block.to_dense(max_bytes) for block in blocks.values()])
        return dense_from(self.flat_product, self.numel, example)

    def flat_product(self, vector: Tensor) -> Tensor:
        """C x for the flattened and joined parameters."""
        shapes = {name: block.shape for name, block in self._blocks.items()}
        return flatten(self @ unflatten(vector, shapes), list(shapes))

    def to_scipy(self) -> LinearOperator:
        """A scipy LinearOperator on the flattened and joined parameters."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        example = next(iter(self.blocks.values())).example

        def matvec(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            vector = torch.as_tensor(np.asarray(x).reshape(-1), dtype=example.dtype, device=example.device)
            return self.flat_product(vector).numpy(force=True)

        dtype = np.dtype("float64" if example.dtype == torch.float64 else "float32")
        return LinearOperator((self.numel, self.numel), matvec=matvec, rmatvec=matvec, dtype=dtype)

    def trace(self) -> Tensor:
        """tr C."""
        return torch.stack([block.trace() for block in self.blocks.values()]).sum()

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal, by parameter name and in the parameter's shape."""
        return {name: block.diagonal() for name, block in self.blocks.items()}

    def frobenius_norm(self) -> Tensor:
        """‖C‖_F; with cross-layer blocks (full=true) from the dense form."""
        if self.full_product is not None:
            return frobenius_norm(self.to_dense())
        return torch.stack([block.frobenius_norm() for block in self.blocks.values()]).norm()

    def eigvalsh(self) -> dict[str, Tensor]:
        """Eigenvalues of each diagonal block, ascending."""
        return {name: block.eigvalsh() for name, block in self.blocks.items()}

    def to(self, *args: torch.device | torch.dtype | str, **kwargs: object) -> Curvature:
        """The same curvature on another device or in another dtype."""
        layers = tuple(layer.map(lambda t: t.to(*args, **kwargs)) for layer in self.layers)  # type: ignore[call-overload]
        return replace(self, layers=layers)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the curvature to a safetensors file: tensors and a JSON header, no pickle."""
        if self.matrix_free:
            raise MatrixFreeError(
                f"`{self.provider}` is matrix-free: its products read the model and the batch, so there is "
                f"no matrix to save. Save the model and the batch instead"
            )
        save_packed(self.pack(), path)

    @staticmethod
    def load(path: str | PathLike[str]) -> Curvature:
        """Read a curvature that `save` wrote."""
        return Curvature.unpack(load_packed(path))

    def pack(self) -> Packed:
        """The parts of a curvature whose layers all have factors."""
        tensors = {
            f"{index}/{path}": tensor
            for index, layer in enumerate(self.layers)
            for path, tensor in layer.tensors().items()
        }
        header = {
            "provider": self.provider,
            "criterion": self.criterion,
            "psd": self.definiteness.psd,
            "why": self.definiteness.why,
            "exact": self.exact,
            "notes": list(self.notes),
            "shift": self.shift,
            "structure": self.structure,
            "left_out": {name: list(shape) for name, shape in self.left_out.items()},
            "layers": [layer.header() for layer in self.layers],
        }
        return Packed(header, tensors)

    @staticmethod
    def unpack(packed: Packed) -> Curvature:
        """The curvature that `pack` took apart, in this release or an earlier one."""
        header = packed.header
        by_layer: dict[str, dict[str, Tensor]] = {}
        for key, tensor in packed.tensors.items():
            index, _, path = key.partition("/")
            by_layer.setdefault(index, {})[path] = tensor
        layers = tuple(unpack_layer(row, by_layer[str(i)]) for i, row in enumerate(header["layers"]))
        return Curvature(
            header["provider"],
            header["criterion"],
            layers,
            Definiteness(header["psd"], header["why"]),
            header["exact"],
            tuple(header["notes"]),
            shift=header.get("shift", 0.0),
            structure=header.get("structure", "kronecker"),
            left_out={name: tuple(shape) for name, shape in header.get("left_out", {}).items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and deep copies hold: the factors, and no versions of the tensors they are from."""
        if self.live or self.matrix_free or self.full_product is not None:
            raise MatrixFreeError(
                f"`{self.provider}` is matrix-free: its products read the model and the batch, so there is "
                f"no matrix to pickle or copy. Pickle or copy these, and estimate again"
            )
        self.check_fresh()
        return {entry.name: getattr(self, entry.name) for entry in fields(self)} | {"versions": None}

    def __copy__(self) -> Curvature:
        return self  # a value: nothing of it can be set

    def frame(self) -> pd.DataFrame:
        """One row per block: shape, form, trace, Frobenius norm, extreme eigenvalues where cheap, bytes.

        Trainable parameters that have no block follow, with the form `no block`.
        """
        import pandas as pd

        rows = [_row(name, block) for name, block in self.blocks.items()]
        return pd.DataFrame([*rows, *(_row_without_block(*entry) for entry in self.left_out.items())])

    def __repr__(self) -> str:
        kind = "exact" if self.exact else "approximate"
        rest = f", no block for {named_briefly(list(self.left_out))}" if self.left_out else ""
        return (
            f"Curvature({self.provider}, criterion={self.criterion}, {len(self._blocks)} blocks, "
            f"{self.numel:,} parameters{rest}, {kind}, {self.definiteness}, {self.nbytes:,} bytes)"
        )

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(repr(self))}</p>{notes}{self.frame().to_html(index=False)}"


def _row(name: str, block: Block) -> dict[str, object]:
    data = block.block if isinstance(block, ShiftedBlock) else block
    known = isinstance(data, KroneckerBlock | FactorBlock | ViewedBlock) or block.numel <= EIGENVALUES_UP_TO
    smallest, largest = _extremes(block) if known else (nan, nan)
    return {
        "block": name,
        "shape": "×".join(map(str, block.shape)),
        "form": block.form,
        "trace": float(block.trace()) if known else nan,
        "frobenius_norm": float(block.frobenius_norm()) if known else nan,
        "smallest_eigenvalue": smallest,
        "largest_eigenvalue": largest,
        "bytes": block.nbytes,
    }


def _row_without_block(name: str, shape: tuple[int, ...]) -> dict[str, object]:
    measured = ("trace", "frobenius_norm", "smallest_eigenvalue", "largest_eigenvalue")
    unknown: dict[str, object] = dict.fromkeys(measured, nan)
    return {"block": name, "shape": "×".join(map(str, shape)), "form": "no block", **unknown, "bytes": 0}


def _extremes(block: Block) -> tuple[float, float]:
    """Smallest and largest eigenvalue: of a Kronecker product, from those of its factors."""
    if isinstance(block, ShiftedBlock):
        smallest, largest = _extremes(block.block)
        return smallest + block.shift, largest + block.shift
    if isinstance(block, ViewedBlock):
        pairs = [_extremes(product) for product in block.products]
        return min(low for low, _ in pairs), max(high for _, high in pairs)
    if isinstance(block, KroneckerBlock):
        factors = [block.output, block.input]
    elif isinstance(block, FactorBlock):
        factors = [block.factor]
    else:
        values = block.eigvalsh()
        return float(values[0]), float(values[-1])
    if any(f.rank_bound > EIGENVALUES_UP_TO and not isinstance(f, DiagonalFactor) for f in factors):
        return nan, nan
    ends = [factor.eigvalsh()[[0, -1]] for factor in factors]
    products = ends[0] if len(ends) == 1 else torch.outer(ends[0], ends[1])
    return float(products.min()), float(products.max())
