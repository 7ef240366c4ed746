"""A curvature: the blocks of one symmetric matrix, named as the model's parameters.

    C = blockdiag(blocks of the layers) + λI

The layers (see `curvature_layers`) are of the data part; λ, the `shift`, is that of an l2 term in the loss.
Kronecker products are in the paper's column order, E[hhᵀ] ⊗ B^t: on torch's row-flattened weights they are
B^t ⊗ E[hhᵀ].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from html import escape
from math import isfinite, nan
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from curvlab.curvature_io import Packed, load_packed, save_packed
from curvlab.curvature_layers import LayerCurvature, OperatorLayer
from curvlab.curvature_structures import JointLayer, unpack_layer
from curvlab.exceptions import (
    ArgumentError,
    CurvatureFileError,
    DenseSizeError,
    MatrixFreeError,
    OperandError,
    ProblemError,
    StaleError,
    describe_argument,
    named_briefly,
    stacklevel_of_caller,
)
from curvlab.layer_algebra import add_layers, scale_layer, select_layer, select_named, sum_named
from curvlab.linalg import (
    Block,
    DiagonalFactor,
    EigenBlock,
    FactorBlock,
    KroneckerBlock,
    ShiftedBlock,
    ViewedBlock,
)
from curvlab.linalg.blocks import DENSE_BYTES, check_dense_bytes
from curvlab.linalg.eigenbases import DENSE_OPERATOR_UP_TO, Eigenbasis
from curvlab.linalg.estimators import Estimate, Estimator, estimate_trace
from curvlab.linalg.execution import FullPrecision
from curvlab.linalg.factors import frobenius_norm
from curvlab.linalg.flat import NamedProduct, WholeProduct, flatten, unflatten
from curvlab.matrix_functions import (
    LOGDET_STEPS,
    Damping,
    MatrixFunction,
    SymmetricMatrix,
    draw_samples,
    estimate_measure,
    kind_of,
    log_determinant,
    matrix_inverse,
    matrix_power,
)
from curvlab.measure.device import keep_freed_memory
from curvlab.staleness import Versions, change_message

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse.linalg import LinearOperator

__all__ = ["Curvature", "Definiteness", "LayerCurvature", "StaleWarning"]

EIGENVALUES_UP_TO = 512
EXACT_TRACE_UP_TO = 1000  # parameters of a matrix-free block, in `frame`
FRAME_PROBES = 12
STRUCTURES = {
    "kronecker": "Kronecker-factored, block diagonal by parameter",
    "diagonal": "diagonal",
    "block": "block diagonal by parameter",
    "ekfac": "diagonal in the eigenvectors of Kronecker factors, by parameter",
    "layer": "block diagonal by layer",
    "full": "the whole matrix, cross-layer blocks included",
}


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
    the curvature includes. `structure` names the matrix: `kronecker`, `ekfac`, `diagonal`, `block` (block
    diagonal by parameter), `layer` (by layer) or `full` (with its cross-layer blocks). `products_at_once` is
    how many products may be taken in one batched pass. `left_out` are the trainable parameters that have no
    block, by the user's choice of layers, with their shapes. `agree_on`, of a matrix whose products are sums
    over ranks, raises on all of them where they do not come with the same request.

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
    full_product: NamedProduct | None = field(default=None, repr=False)
    versions: Versions | None = field(default=None, repr=False)
    live: bool = False
    shift: float = 0.0
    structure: str = "kronecker"
    left_out: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    products_at_once: int = field(default=1, repr=False)
    agree_on: Callable[[object], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Layers with blocks between their parameters bring the product with these."""
        if any(isinstance(layer, JointLayer) for layer in self.layers):
            object.__setattr__(self, "full_product", JointProduct(self.layers))

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
            raise OperandError(f"the operand has no entry for {missing}; expected {list(blocks)}")
        vectors = {name: _checked_operand(name, block, vectors[name]) for name, block in blocks.items()}
        if self.full_product is None:
            return {name: block.matmul(vectors[name]) for name, block in blocks.items()}
        images = self.full_product(vectors)
        if self.shift == 0:
            return images
        return {name: image + self.shift * vectors[name] for name, image in images.items()}

    def to_dense(self, max_bytes: int = DENSE_BYTES) -> Tensor:
        """The whole matrix, parameters flattened and joined in the order of `blocks`."""
        blocks = self.blocks
        example = next(iter(blocks.values())).example
        try:
            check_dense_bytes(self.numel, example.element_size(), max_bytes, f"`{self.provider}`")
        except MemoryError as error:
            raise DenseSizeError(str(error)) from None
        if self.full_product is None:
            return torch.block_diag(*[block.to_dense(max_bytes) for block in blocks.values()])
        return self.rows_product(torch.eye(self.numel, dtype=example.dtype, device=example.device)).T

    def flat_product(self, vector: Tensor) -> Tensor:
        """C x for the flattened and joined parameters: one vector (n,), or each column of a matrix (n, r)."""
        shapes = {name: block.shape for name, block in self._blocks.items()}
        if not isinstance(vector, Tensor):
            raise ArgumentError(f"flat_product takes a tensor; got a {describe_argument(vector)}")
        if vector.ndim == 2 and len(vector) == self.numel:
            return self.rows_product(vector.T).T
        if vector.shape != (self.numel,):
            raise OperandError(
                f"flat_product takes a vector of {self.numel:,} entries, all parameters flattened and "
                f"joined, or a matrix of such columns; got shape {tuple(vector.shape)}"
            )
        return flatten(self @ unflatten(vector, shapes), list(shapes))

    def rows_product(self, rows: Tensor) -> Tensor:
        """C x for each row x, (r, n): several in one batched pass where the curvature's products allow it."""
        if isinstance(self.full_product, WholeProduct):
            # The operator itself checks that it is fresh, once for each product.
            shapes = {name: block.shape for name, block in self._blocks.items()}
            images = self.full_product.rows(rows, shapes)
            return images if self.shift == 0 else images.add_(rows, alpha=self.shift)
        if self.products_at_once > 1 and len(rows) > 1:
            batched = self._batched_product
            # What torch cannot batch, such as a recording that was let go of and is made anew, is done by the
            # loop below, which also raises errors of any other reason.
            with suppress(RuntimeError, ProblemError):
                return torch.cat([batched(part) for part in rows.split(self.products_at_once)])
        if self.agree_on is not None and len(rows) > 1:
            self.agree_on(("products", tuple(rows.shape)))
        return torch.stack([self.flat_product(row) for row in rows])

    @cached_property
    def _batched_product(self) -> Callable[[Tensor], Tensor]:
        """The product under vmap; one is taken before, since what it keeps cannot be made in there."""
        self.flat_product(next(iter(self._blocks.values())).example.new_zeros(self.numel))
        return torch.vmap(self.flat_product)

    @property
    def matrix(self) -> SymmetricMatrix:
        """The matrix on the flattened and joined parameters: what spectra and functions are computed from."""
        blocks = self.blocks
        shapes = {name: block.shape for name, block in blocks.items()}
        example = next(iter(blocks.values())).example
        keep_freed_memory(example.device)  # one product after the other, each with the same temporaries
        return SymmetricMatrix(
            shapes, self.rows_product, example, self.provider, lambda: self._basis, self.agree_on
        )

    @cached_property
    def _basis(self) -> Eigenbasis | None:
        if self.full_product is None:
            return Eigenbasis.of(self._blocks)
        return Eigenbasis.of_dense(self.to_dense()) if self.numel <= DENSE_OPERATOR_UP_TO else None

    def to_scipy(self) -> LinearOperator:
        """A scipy LinearOperator on the flattened and joined parameters."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        example = next(iter(self.blocks.values())).example

        def matvec(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if np.iscomplexobj(x):  # C is real: C (a + ib) = Ca + i Cb
                return matvec(np.real(x)) + 1j * matvec(np.imag(x))
            vector = torch.as_tensor(np.asarray(x).reshape(-1), dtype=example.dtype, device=example.device)
            return self.flat_product(vector).numpy(force=True)

        dtype = np.dtype("float64" if example.dtype == torch.float64 else "float32")
        return LinearOperator((self.numel, self.numel), matvec=matvec, rmatvec=matvec, dtype=dtype)

    @overload
    def trace(self) -> Tensor: ...
    @overload
    def trace(
        self, *, estimator: Estimator | None = None, probes: int | None = None, seed: int = 0
    ) -> Estimate: ...
    def trace(
        self, *, estimator: Estimator | None = None, probes: int | None = None, seed: int = 0
    ) -> Tensor | Estimate:
        """tr C, exact; with `estimator` (`hutchinson`, `hutch++`) or `probes` an `Estimate` from products."""
        if estimator is None and probes is None:
            return torch.stack([block.trace() for block in self.blocks.values()]).sum()
        if not self.matrix_free:
            return Estimate(float(self.trace()), 0.0, 0)
        return estimate_measure("trace", self.matrix, estimator, probes, seed)

    @overload
    def diagonal(self) -> dict[str, Tensor]: ...
    @overload
    def diagonal(
        self, *, estimator: Estimator | None = None, probes: int | None = None, seed: int = 0
    ) -> Estimate: ...
    def diagonal(
        self, *, estimator: Estimator | None = None, probes: int | None = None, seed: int = 0
    ) -> dict[str, Tensor] | Estimate:
        """The diagonal, by parameter name and in the parameter's shape; an `Estimate` as for `trace`."""
        if estimator is None and probes is None:
            return {name: block.diagonal() for name, block in self.blocks.items()}
        if not self.matrix_free:
            exact = self.diagonal()
            return Estimate(exact, {name: torch.zeros_like(value) for name, value in exact.items()}, 0)
        return estimate_measure("diagonal", self.matrix, estimator, probes, seed)

    @overload
    def frobenius_norm(self) -> Tensor: ...
    @overload
    def frobenius_norm(
        self, *, estimator: Estimator | None = None, probes: int | None = None, seed: int = 0
    ) -> Estimate: ...
    def frobenius_norm(
        self, *, estimator: Estimator | None = None, probes: int | None = None, seed: int = 0
    ) -> Tensor | Estimate:
        """‖C‖_F, with cross-layer blocks (full=true) from the dense form; an `Estimate` as for `trace`."""
        if estimator is None and probes is None:
            if self.full_product is not None:
                return frobenius_norm(self.to_dense())
            return torch.stack([block.frobenius_norm() for block in self.blocks.values()]).norm()
        if not self.matrix_free:
            return Estimate(float(self.frobenius_norm()), 0.0, 0)
        return estimate_measure("frobenius_norm", self.matrix, estimator, probes, seed)

    def eigvalsh(self) -> dict[str, Tensor]:
        """Eigenvalues of each parameter's diagonal block, ascending: by block, whatever the structure.

        With structure=full these are not the eigenvalues of the matrix: `curvlab.spectrum` answers for that.
        """
        return {name: block.eigvalsh() for name, block in self.blocks.items()}

    def logdet(
        self,
        *,
        damping: Damping | None = None,
        probes: int | None = None,
        steps: int = LOGDET_STEPS,
        seed: int = 0,
    ) -> Tensor | Estimate:
        """log det of the damped matrix, C + τI for `Additive(τ)`, (1-α)C + αI for `Mixed(α)`.

        Exact, a scalar tensor, where the eigenvalues are known from factors (or the matrix is small); else an
        `Estimate` by Lanczos quadrature. Refused with the smallest eigenvalue where that is not positive.

        >>> import curvlab
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> problem = curvlab.Problem(model, "mse", torch.zeros(3, 2), torch.zeros(3, 2))
        >>> round(float(curvlab.estimate("fisher", problem).logdet(damping=curvlab.Additive(0.5))), 4)
        -2.7726
        """
        return log_determinant(self.matrix, damping, probes, steps, seed)

    def inverse(self, *, damping: Damping | None = None) -> MatrixFunction:
        """The inverse of the damped matrix, to be multiplied with: `curvature.inverse(damping=…) @ v`."""
        return matrix_inverse(self.matrix, damping)

    def power(self, exponent: float, *, damping: Damping | None = None) -> MatrixFunction:
        """A power of the damped matrix, to be multiplied with: `curvature.power(-0.5, damping=…) @ v`."""
        return matrix_power(self.matrix, exponent, damping)

    def sample(self, n: int, *, damping: Damping | None = None, seed: int = 0) -> dict[str, Tensor]:
        """`n` draws from the normal distribution with the inverse of the damped matrix as covariance.

        {name: (n, *shape)}: of a Laplace approximation with this precision, the deviations from the mode.
        """
        return draw_samples(self.matrix, n, damping, seed)

    def _data_product(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The product of blocks, without the shift."""
        return {name: b @ vectors[name] for layer in self.layers for name, b in layer.blocks.items()}

    def __add__(self, other: Curvature) -> Curvature:
        """The sum of two matrices over the same parameters, known by its products."""
        if not isinstance(other, Curvature):
            return NotImplemented
        mine, theirs = ({n: kind_of(b) for n, b in one._blocks.items()} for one in (self, other))
        if mine != theirs:
            only = sorted({*mine.items()} ^ {*theirs.items()}, key=str)[:4]
            raise ArgumentError(
                f"`{self.provider}` + `{other.provider}`: they are of different parameters, as {only} shows; "
                f"expected the same names, shapes, dtype and device. Take .select([…]) or .to(…) of both"
            )
        blocks = {name: block for layer in other.layers for name, block in layer.blocks.items()}
        coupled = self.full_product is not None or other.full_product is not None

        def sum_of(products: Sequence[NamedProduct]) -> NamedProduct:
            return lambda vectors: sum_named(*(product(vectors) for product in products))

        terms = [one.full_product or one._data_product for one in (self, other)]
        noted = {id(one): one for one in (self.versions, other.versions) if one is not None}
        return Curvature(
            f"{self.provider} + {other.provider}",
            self.criterion,
            tuple(add_layers(layer, blocks) for layer in self.layers),
            Definiteness(self.psd and other.psd, f"a sum of {self.definiteness} and {other.definiteness}"),
            exact=self.exact and other.exact,
            notes=(*self.notes, *other.notes),
            full_product=WholeProduct.made_of(terms, sum_of) if coupled else None,
            versions=sum(noted.values(), start=Versions(())) if noted else None,
            live=self.live or other.live,
            shift=self.shift + other.shift,
            structure="full" if coupled else "block",
            products_at_once=min(self.products_at_once, other.products_at_once),
        )

    def __mul__(self, scale: float) -> Curvature:
        """The multiple of a matrix, in the same form."""
        if not isinstance(scale, int | float) or not isfinite(scale):
            raise ArgumentError(
                f"a curvature is multiplied with a finite number; got {scale!r}. For a product with vectors "
                f"use `curvature @ vectors`"
            )
        scale, product = float(scale), self.full_product

        def scaled(products: Sequence[NamedProduct]) -> NamedProduct:
            return lambda vectors: {name: scale * value for name, value in products[0](vectors).items()}

        sign = self.definiteness if scale >= 0 else Definiteness(False, "a negative multiple")
        return replace(
            self,
            provider=f"{scale:g} × {self.provider}",
            layers=tuple(scale_layer(layer, scale) for layer in self.layers),
            definiteness=sign,
            full_product=None if product is None else WholeProduct.made_of([product], scaled),
            shift=scale * self.shift,
        )

    __rmul__ = __mul__

    def __sub__(self, other: Curvature) -> Curvature:
        """The difference of two matrices over the same parameters."""
        return self + other * -1.0

    def select(self, names: Sequence[str]) -> Curvature:
        """The sub-matrix of some parameters, by their names or those of their layers.

        >>> import curvlab
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> problem = curvlab.Problem(model, "mse", torch.ones(5, 4), torch.zeros(5, 2))
        >>> list(curvlab.estimate("fisher", problem).select(["0", "2.bias"]).blocks)
        ['0.weight', '0.bias', '2.bias']
        """
        known = {layer.name: tuple(layer.blocks) for layer in self.layers}
        known |= {name: (name,) for name in self._blocks}
        names = names if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
        unknown = [name for name in names if name not in known] if isinstance(names, list) else []
        if unknown or not isinstance(names, list) or not names:
            given = f"`{unknown[0]}`" if unknown and not isinstance(names, str) else repr(names)
            raise ArgumentError(f"select: got {given}; expected a list of names among {list(known)}")
        chosen = {parameter for name in names for parameter in known[name]}
        layers = [select_layer(layer, chosen) for layer in self.layers]
        product, blocks = self.full_product, self._blocks

        def selected(products: Sequence[NamedProduct]) -> NamedProduct:
            return lambda vectors: select_named(products[0], blocks, chosen, vectors)

        return replace(
            self,
            layers=tuple(layer for layer in layers if layer is not None),
            full_product=None if product is None else WholeProduct.made_of([product], selected),
        )

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
        packed = load_packed(path)
        try:
            return Curvature.unpack(packed)
        # Whatever part is missing or of another kind, the file was not written by `save`.
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CurvatureFileError(
                f"{path} is no whole curvature ({type(error).__name__}: {error}); save it again with "
                f"Curvature.save"
            ) from error

    def pack(self) -> Packed:
        """The parts of a curvature whose layers all have factors."""
        layers = [layer.formed() for layer in self.layers]
        tensors = {
            f"{index}/{path}": tensor
            for index, layer in enumerate(layers)
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
            "layers": [layer.header() for layer in layers],
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
        if self.live or self.matrix_free:
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

        Above 1,000 parameters the trace of a matrix-free block is an estimate from a few products, with its
        standard error in `trace_error` (0 where the trace is exact). `structure` is that of the matrix.
        Trainable parameters that have no block follow, with the form `no block`.
        """
        import pandas as pd

        rows = [self._row(name, block) for name, block in self.blocks.items()]
        return pd.DataFrame([*rows, *(_row_without_block(*entry) for entry in self.left_out.items())])

    def _row(self, name: str, block: Block) -> dict[str, object]:
        closed = _closed_form(block)
        known = closed or block.numel <= EIGENVALUES_UP_TO
        smallest, largest = _extremes(block) if known else (nan, nan)
        trace = _block_trace(block) if not closed and block.numel > EXACT_TRACE_UP_TO else None
        return {
            "block": name,
            "shape": "×".join(map(str, block.shape)),
            "form": block.form,
            "structure": self.structure,
            "trace": float(block.trace()) if trace is None else float(trace),
            "trace_error": 0.0 if trace is None else trace.standard_error,
            "frobenius_norm": float(block.frobenius_norm()) if known else nan,
            "smallest_eigenvalue": smallest,
            "largest_eigenvalue": largest,
            "bytes": block.nbytes,
        }

    def __repr__(self) -> str:
        kind = "exact" if self.exact else "approximate"
        rest = f", no block for {named_briefly(list(self.left_out))}" if self.left_out else ""
        return (
            f"Curvature({self.provider}, criterion={self.criterion}, "
            f"{STRUCTURES.get(self.structure, self.structure)}, {len(self._blocks)} blocks, "
            f"{self.numel:,} parameters{rest}, {kind}, {self.definiteness}, {self.nbytes:,} bytes)"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: nothing is computed for it. `frame()` has the measures."""
        import pandas as pd

        self.check_fresh()
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        rows = [
            {"block": name, "shape": "×".join(map(str, b.shape)), "form": b.form, "bytes": b.nbytes}
            for name, b in self._blocks.items()
        ]
        return f"<p>{escape(repr(self))}</p>{notes}{pd.DataFrame(rows).to_html(index=False)}"


@dataclass(frozen=True, eq=False)
class JointProduct:
    """The product with all blocks of some layers, those between the parameters of a layer included."""

    layers: tuple[LayerCurvature, ...]

    def __call__(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matrix times `vectors`, by parameter."""
        found: dict[str, Tensor] = {}
        for layer in self.layers:
            if isinstance(layer, JointLayer):
                found |= layer.product(vectors)
            else:
                found |= {name: block.matmul(vectors[name]) for name, block in layer.blocks.items()}
        return found


def _checked_operand(name: str, block: Block, entry: Tensor) -> Tensor:
    """The entry, if it is a tensor of its block's shape, dtype and device."""
    example = block.example
    if not isinstance(entry, Tensor):
        raise ArgumentError(f"the operand's `{name}` is a {describe_argument(entry)}; expected a tensor")
    if tuple(entry.shape) != block.shape:
        raise OperandError(
            f"the operand's `{name}` has shape {tuple(entry.shape)}; expected {block.shape}, the parameter's "
            f"own"
        )
    if (entry.dtype, entry.device) != (example.dtype, example.device):
        raise OperandError(
            f"the operand's `{name}` is {entry.dtype} on {entry.device}; the curvature is {example.dtype} on "
            f"{example.device}. Convert one with .to()"
        )
    return entry


def _closed_form(block: Block) -> bool:
    data = block.block if isinstance(block, ShiftedBlock) else block
    return isinstance(data, KroneckerBlock | FactorBlock | ViewedBlock | EigenBlock)


def _block_trace(block: Block) -> Estimate:
    def product(rows: Tensor) -> Tensor:
        return torch.stack([block.matmul(row.reshape(block.shape)).flatten() for row in rows])

    given = {"like": block.example, "probes": FRAME_PROBES, "seed": 0}
    return estimate_trace(product, block.numel, estimator="hutchinson", **given)  # type: ignore[arg-type]


def _row_without_block(name: str, shape: tuple[int, ...]) -> dict[str, object]:
    measured = ("trace", "trace_error", "frobenius_norm", "smallest_eigenvalue", "largest_eigenvalue")
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
    else:  # a block that knows its eigenvalues, or a small one
        values = block.eigvalsh()
        return float(values[0]), float(values[-1])
    if any(f.rank_bound > EIGENVALUES_UP_TO and not isinstance(f, DiagonalFactor) for f in factors):
        return nan, nan
    ends = [factor.eigvalsh()[[0, -1]] for factor in factors]
    products = ends[0] if len(ends) == 1 else torch.outer(ends[0], ends[1])
    return float(products.min()), float(products.max())
