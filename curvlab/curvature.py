"""A curvature: the blocks of one symmetric matrix, named as the model's parameters.

A Kronecker layer keeps its output factor B^t and its input factors; its bias block is B^t and its
weight block E[hhᵀ] ⊗ B^t in the paper's column order (B^t ⊗ E[hhᵀ] on torch's row-flattened weights).
A matrix-free layer keeps a mean bias block and an operator for the weight.
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
from curvlab.exceptions import ArgumentError, MatrixFreeError, StaleError, describe_argument
from curvlab.linalg import Block, Factor, FactorBlock, KroneckerBlock
from curvlab.linalg.blocks import DENSE_BYTES, check_dense_bytes, dense_from
from curvlab.linalg.factors import InputFactors, frobenius_norm
from curvlab.linalg.flat import flatten, unflatten
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
class LayerCurvature:
    """The blocks of one Linear layer.

    `output` is B^t, where the provider has one; `inputs` the layer's input factors, where the weight
    block is a Kronecker product; `weight_operator` and `bias_operator` the blocks that are matrix-free.
    """

    name: str
    weight_name: str | None
    bias_name: str | None
    output: Factor | None
    inputs: InputFactors | None = None
    weight_operator: Block | None = None
    bias_operator: Block | None = None

    @property
    def kronecker(self) -> bool:
        """Whether the weight block is a Kronecker product."""
        return self.inputs is not None

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """The blocks by parameter name."""
        blocks: dict[str, Block] = {}
        if self.weight_name is not None:
            blocks[self.weight_name] = self._weight_block()
        if self.bias_name is not None:
            blocks[self.bias_name] = self._bias_block()
        return blocks

    def _weight_block(self) -> Block:
        if self.weight_operator is not None:
            return self.weight_operator
        assert self.output is not None
        assert self.inputs is not None
        return KroneckerBlock(self.output, self.inputs.full)

    def _bias_block(self) -> Block:
        if self.bias_operator is not None:
            return self.bias_operator
        assert self.output is not None
        return FactorBlock(self.output)

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerCurvature:
        """The same layer with `function` applied to each tensor of its factors."""
        if self.weight_operator is not None or self.bias_operator is not None:
            raise MatrixFreeError(
                f"layer `{self.name}` is matrix-free: its blocks read the model and the batch, which stay as "
                f"they are. Convert the model and the batch, and estimate again"
            )
        assert self.output is not None
        inputs = None if self.inputs is None else self.inputs.map(function)
        return replace(self, output=self.output.map(function), inputs=inputs)


@dataclass(frozen=True, eq=False)
class Curvature:
    """A symmetric matrix over the parameters of a model, block by block.

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

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by parameter name, layer by layer; a warning tells where the parameters have changed."""
        self.check_fresh()
        return self._blocks

    @cached_property
    def _blocks(self) -> dict[str, Block]:
        return {name: block for layer in self.layers for name, block in layer.blocks.items()}

    @property
    def psd(self) -> bool:
        """Whether the matrix is positive semi-definite."""
        return self.definiteness.psd

    @property
    def matrix_free(self) -> bool:
        """Whether the weight blocks are operators rather than Kronecker products."""
        return not all(layer.kronecker or layer.weight_name is None for layer in self.layers)

    @property
    def numel(self) -> int:
        """Number of parameters covered."""
        return sum(block.numel for block in self._blocks.values())

    @property
    def nbytes(self) -> int:
        """Bytes held by the blocks, a tensor shared by several counted once."""
        held: dict[int, int] = {}
        for layer in self.layers:
            tensors = {} if layer.inputs is None else layer.inputs.tensors()
            outputs = {} if layer.output is None else layer.output.tensors()
            held |= {id(t): t.nbytes for t in (*tensors.values(), *outputs.values())}
            held |= {id(b): b.nbytes for b in (layer.weight_operator, layer.bias_operator) if b is not None}
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
        warnings.warn(change_message(changed, since, old), StaleWarning, stacklevel=4)

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
        if self.full_product is not None:
            return self.full_product(vectors)
        return {name: block @ vectors[name] for name, block in blocks.items()}

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
        tensors: dict[str, Tensor] = {}
        layers = []
        for index, layer in enumerate(self.layers):
            assert layer.output is not None
            row: dict[str, Any] = {"name": layer.name, "weight": layer.weight_name, "bias": layer.bias_name}
            row["output"] = layer.output.kind
            tensors |= {f"{index}/output/{key}": t for key, t in layer.output.tensors().items()}
            if layer.inputs is not None:
                row["input"] = layer.inputs.full.kind
                tensors |= {f"{index}/input/{key}": t for key, t in layer.inputs.tensors().items()}
            layers.append(row)
        header = {
            "provider": self.provider,
            "criterion": self.criterion,
            "psd": self.definiteness.psd,
            "why": self.definiteness.why,
            "exact": self.exact,
            "notes": list(self.notes),
            "layers": layers,
        }
        return Packed(header, tensors)

    @staticmethod
    def unpack(packed: Packed) -> Curvature:
        """The curvature that `pack` took apart."""
        header = packed.header
        layers = tuple(
            LayerCurvature(
                row["name"],
                row["weight"],
                row["bias"],
                packed.factor(index, row["output"]),
                packed.input_factors(index, row["input"]) if "input" in row else None,
            )
            for index, row in enumerate(header["layers"])
        )
        return Curvature(
            header["provider"],
            header["criterion"],
            layers,
            Definiteness(header["psd"], header["why"]),
            header["exact"],
            tuple(header["notes"]),
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
        """One row a block: shape, form, trace, Frobenius norm, extreme eigenvalues where cheap, bytes."""
        import pandas as pd

        return pd.DataFrame([_row(name, block) for name, block in self.blocks.items()])

    def __repr__(self) -> str:
        kind = "exact" if self.exact else "approximate"
        return (
            f"Curvature({self.provider}, criterion={self.criterion}, {len(self._blocks)} blocks, "
            f"{self.numel:,} parameters, {kind}, {self.definiteness}, {self.nbytes:,} bytes)"
        )

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(repr(self))}</p>{notes}{self.frame().to_html(index=False)}"


def _row(name: str, block: Block) -> dict[str, object]:
    known = isinstance(block, KroneckerBlock | FactorBlock) or block.numel <= EIGENVALUES_UP_TO
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


def _extremes(block: Block) -> tuple[float, float]:
    """Smallest and largest eigenvalue: of a Kronecker product, from those of its factors."""
    if isinstance(block, KroneckerBlock):
        factors = [block.output, block.input]
    elif isinstance(block, FactorBlock):
        factors = [block.factor]
    else:
        values = block.eigvalsh()
        return float(values[0]), float(values[-1])
    if any(factor.rank_bound > EIGENVALUES_UP_TO for factor in factors):
        return nan, nan
    ends = [factor.eigvalsh()[[0, -1]] for factor in factors]
    products = ends[0] if len(ends) == 1 else torch.outer(ends[0], ends[1])
    return float(products.min()), float(products.max())
