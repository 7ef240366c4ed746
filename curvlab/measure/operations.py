"""What a run asks of a device: launches, views, bytes that go through memory, and floating-point operations.

A *launch* is an operation that is neither a view nor an allocation; the bytes of one are those of its
operands and of its results, as if no cache held any of them. Fake tensors serve as well as real ones.

Floating-point operations are counted by torch's counter, with formulas for the linear algebra it leaves out.
A multiplication and an addition count one each; element-wise work and reductions count nothing,
so a number here is that of the matrix algebra. Beside torch's own formulas (matrix products,
convolutions, attention), per matrix of a batch, k right-hand sides:

    mv, addmv, addr    2mn             dot, vdot            2n
    Cholesky           n³/3            Cholesky solve       2n²k        Cholesky inverse  2n³/3
    triangular solve   n²k             LU (p ≤ q)           p²q - p³/3  LU solve          2n²k
    solve              2n³/3 + 2n²k    inverse              2n³         determinant       2n³/3
    QR, R alone        2p²(q - p/3)    Q of c columns       4mcp - 2(m + c)p² + 4p³/3, added
    eigh               9n³             eigenvalues alone    4n³/3
    SVD (thin)         6p²q + 20p³     singular values      2p²q + 2p³

with p ≤ q the two sides of a rectangular matrix. Iterative ones (eigh, SVD) are conventions, those
of Golub and Van Loan, since their work depends on the values. Thirds are rounded down. Under any
dispatch mode, hence here, torch's `eigvalsh` and `svdvals` compute the vectors too, and count so.

Forward-mode differentiation stands in for tangents that are zero with implicit zeros, tensors without memory.
torch multiplies them by a number correctly, except under a dispatch mode, where `mul.Scalar` reads the memory
that is not there and the process dies. Entered inside a measuring mode, `ImplicitZeros` answers that one
operation itself: the product is an implicit zero again, as it is without any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

from curvlab.linalg.execution import census, elsewhere

__all__ = [
    "Flops",
    "ImplicitZeros",
    "Launch",
    "Operations",
    "count",
    "counting",
    "of_operation",
    "operations",
]


@dataclass(frozen=True)
class Launch:
    """One launch: its operation, its arithmetic, the bytes that it reads and writes, its shortest side.

    The shortest side of its matrices is 1 of a product with a vector, and 0 without arithmetic.
    """

    name: str
    flops: int
    bytes: int
    side: int = 0


@dataclass
class Operations:
    """All launches of a run, in order; how many views it made, and how often the host read."""

    launches: list[Launch] = field(default_factory=list)
    views: int = 0
    reads: int = 0

    @property
    def flops(self) -> int:
        """Their arithmetic together."""
        return sum(launch.flops for launch in self.launches)

    @property
    def bytes(self) -> int:
        """Their traffic together."""
        return sum(launch.bytes for launch in self.launches)

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Σ max(flops / peak, bytes / bandwidth): what the arithmetic and the memory take at the least."""
        return sum(max(one.flops / flops, one.bytes / bandwidth) for one in self.launches)


@contextmanager
def operations(there: bool = False) -> Iterator[Operations]:
    """Count what runs inside; `there` as it would run on an accelerator, wherever its tensors are.

    >>> with operations() as found:
    ...     _ = (torch.ones(3, 4) @ torch.ones(4, 5)).T
    >>> [launch.name for launch in found.launches], found.views, found.flops
    (['aten.ones', 'aten.ones', 'aten.mm'], 1, 120)
    """
    found = Operations()
    with elsewhere() if there else nullcontext(), census() as reads, _Counting(found), ImplicitZeros():
        yield found
    found.reads += reads.reads


class _Counting(TorchDispatchMode):
    def __init__(self, found: Operations) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        name = str(packet)
        if func.namespace != "aten" or name in ALLOCATIONS:
            return result
        if func.is_view or name in VIEWS:
            self.found.views += 1
            return result
        if torch.Tag.data_dependent_output in func.tags:
            self.found.reads += 1
        shapes = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        flops = of_operation(packet, args, kwargs, result)
        size = sum(tensor.numel() * tensor.element_size() for tensor in shapes)
        side = _shortest_side(packet, shapes) if flops else 0
        self.found.launches.append(Launch(name, flops, size, side))
        return result


ALLOCATIONS = {"aten.empty", "aten.empty_strided", "aten.empty_like"} | {
    "aten.new_empty",
    "aten.new_empty_strided",
}
NO_WORK = "_reshape_alias", "_unsafe_view", "detach", "lift_fresh", "_efficientzerotensor"
VIEWS = {f"aten.{name}" for name in NO_WORK}


Shape = Sequence[int]
aten = torch.ops.aten


@dataclass
class Flops:
    """Operations counted so far: the total is complete when the context that filled it has ended."""

    total: int = 0
    by_operation: dict[str, int] = field(default_factory=dict)


@contextmanager
def counting() -> Iterator[Flops]:
    """Count the floating-point operations of what runs inside.

    >>> with counting() as flops:
    ...     _ = torch.ones(3, 4) @ torch.ones(4)
    >>> flops.total, flops.by_operation
    (24, {'aten.mv': 24})
    """
    flops = Flops()
    counter = FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS))
    # Its own tracker hooks every module, which would change what is measured; nothing is asked by module.
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    with counter, ImplicitZeros():
        yield flops
    flops.total = counter.get_total_flops()
    flops.by_operation = {str(k): n for k, n in counter.get_flop_counts().get("Global", {}).items()}


class _NoModules:
    """Stands for a tracker of modules where all operations count together."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def count(function: Callable[[], object]) -> int:
    """Floating-point operations of one call of `function`, on real or on fake tensors.

    >>> count(lambda: torch.linalg.cholesky(torch.eye(30)))
    9000
    """
    with counting() as flops:
        function()
    return flops.total


def of_operation(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of one operation, given what it was called with and what it returned."""
    formula = _BY_OPERATION.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _shortest_side(packet: Any, tensors: Sequence[Tensor]) -> int:
    """The shortest side of the matrices, or of the matrix that is factorised or solved with."""
    if packet in (aten.mv, aten.addmv, aten.addmv_, aten.addr, aten.addr_, aten.dot, aten.vdot):
        return 1
    matrices = [tensor.shape[-2:] for tensor in tensors if tensor.ndim > 1]
    if packet in _FORMULAS and packet not in _PRODUCTS:
        square = [shape[0] for shape in matrices if shape[0] == shape[1]]
        return max(square, default=1)
    return min((side for shape in matrices for side in shape), default=1)


def _batch(shape: Shape) -> int:
    return prod(shape[:-2])


def _sides(shape: Shape) -> tuple[int, int]:
    return min(shape[-2:]), max(shape[-2:])


def _right_hand_sides(n: int, out: Any) -> int:
    """Columns solved for, over the batch as broadcast: read off the solution, the first output."""
    solution: Shape = out[0] if out and not isinstance(out[0], int) else out
    return prod(solution) // max(n, 1)


def _mv(a: Shape, x: Shape, **_: Any) -> int:
    return 2 * prod(a)


def _addmv(y: Shape, a: Shape, x: Shape, **_: Any) -> int:
    return 2 * prod(a)


def _addr(a: Shape, x: Shape, y: Shape, **_: Any) -> int:
    return 2 * prod(x) * prod(y)


def _dot(x: Shape, y: Shape, **_: Any) -> int:
    return 2 * prod(x)


def _addmm(c: Shape, a: Shape, b: Shape, *rest: Any, **_: Any) -> int:
    return 2 * prod(a) * b[-1]


def _cholesky(a: Shape, *rest: Any, **_: Any) -> int:
    return _batch(a) * a[-1] ** 3 // 3


def _cholesky_solve(b: Shape, factor: Shape, *rest: Any, out_shape: Any, **_: Any) -> int:
    return 2 * factor[-1] ** 2 * _right_hand_sides(factor[-1], out_shape)


def _cholesky_inverse(factor: Shape, *rest: Any, **_: Any) -> int:
    return _batch(factor) * 2 * factor[-1] ** 3 // 3


def _solve_triangular(a: Shape, b: Shape, *rest: Any, out_shape: Any, **_: Any) -> int:
    return a[-1] ** 2 * _right_hand_sides(a[-1], out_shape)


def _triangular_solve(b: Shape, a: Shape, *rest: Any, out_shape: Any, **_: Any) -> int:
    return a[-1] ** 2 * _right_hand_sides(a[-1], out_shape)


def _lu(a: Shape, *rest: Any, **_: Any) -> int:
    p, q = _sides(a)
    return _batch(a) * (3 * p**2 * q - p**3) // 3


def _lu_solve(lu: Shape, pivots: Shape, b: Shape, *rest: Any, out_shape: Any, **_: Any) -> int:
    return 2 * lu[-1] ** 2 * _right_hand_sides(lu[-1], out_shape)


def _solve(a: Shape, b: Shape, *rest: Any, out_shape: Any, **_: Any) -> int:
    return _lu(a) + 2 * a[-1] ** 2 * _right_hand_sides(a[-1], out_shape)


def _inverse(a: Shape, *rest: Any, **_: Any) -> int:
    return _batch(a) * 2 * a[-1] ** 3


def _geqrf(a: Shape, *rest: Any, **_: Any) -> int:
    p, q = _sides(a)
    return _batch(a) * (6 * p**2 * q - 2 * p**3) // 3


def _qr(a: Shape, mode: str = "reduced", **_: Any) -> int:
    if mode == "r":
        return _geqrf(a)
    m, p = a[-2], min(a[-2:])
    columns = m if mode == "complete" else p
    return _geqrf(a) + _batch(a) * _form_q(m, columns, p)


def _householder_product(reflectors: Shape, tau: Shape, **_: Any) -> int:
    return _batch(reflectors) * _form_q(reflectors[-2], reflectors[-1], tau[-1])


def _form_q(m: int, columns: int, p: int) -> int:
    return (12 * m * columns * p - 6 * (m + columns) * p**2 + 4 * p**3) // 3


def _eigh(a: Shape, uplo: str = "L", compute_v: bool = True, **_: Any) -> int:
    return _batch(a) * (9 * a[-1] ** 3 if compute_v else 4 * a[-1] ** 3 // 3)


def _svd(a: Shape, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> int:
    p, q = _sides(a)
    return _batch(a) * (6 * p**2 * q + 20 * p**3 if compute_uv else 2 * p**2 * q + 2 * p**3)


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mv: _mv,
    aten.addmv: _addmv,
    aten.addmv_: _addmv,
    aten.addr: _addr,
    aten.addr_: _addr,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.addmm_: _addmm,
    aten.baddbmm_: _addmm,
    aten.addbmm: _addmm,
    aten.addbmm_: _addmm,
    aten.linalg_cholesky_ex: _cholesky,
    aten.cholesky: _cholesky,
    aten.cholesky_solve: _cholesky_solve,
    aten.cholesky_inverse: _cholesky_inverse,
    aten.linalg_solve_triangular: _solve_triangular,
    aten.triangular_solve: _triangular_solve,
    aten.linalg_lu_factor_ex: _lu,
    aten.linalg_lu: _lu,
    aten._linalg_det: _lu,
    aten._linalg_slogdet: _lu,
    aten.linalg_lu_solve: _lu_solve,
    aten._linalg_solve_ex: _solve,
    aten.linalg_inv_ex: _inverse,
    aten.geqrf: _geqrf,
    aten.linalg_qr: _qr,
    aten.linalg_householder_product: _householder_product,
    aten._linalg_eigh: _eigh,
    aten._linalg_svd: _svd,
}

_PRODUCTS = {aten.addmm_, aten.baddbmm_, aten.addbmm, aten.addbmm_}
_BY_OPERATION = {operation: shape_wrapper(formula) for operation, formula in _FORMULAS.items()}


class ImplicitZeros(TorchDispatchMode):
    """Multiplies implicit zeros by a number without reading them; passes all else on."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.mul.Scalar and args[0]._is_zerotensor():
            zeros, number = args
            dtype = torch.result_type(zeros, number)
            return torch._efficientzerotensor(list(zeros.shape), dtype=dtype, device=zeros.device)
        return func(*args, **(kwargs or {}))
