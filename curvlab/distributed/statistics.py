"""Means over the rows of all ranks: what each rank sends, in which form, and what all ranks have afterwards.

    E[f] = Σ_r s_r E_r[f]        with s_r the share of rank r in Σ c_i

Every statistic is a sum over rows, so it is joined before anything non-linear. Each rank takes its *local
means* in one pass and describes them (its *payload*) to the others; the descriptions are small. From them
all ranks make the same choice between two forms, and a rank without rows learns the shapes of what it has to
add nothing to. For M rows over all ranks and a layer of n_t outputs and n_{t-1} inputs, in elements:

    rows      all-gather of H and S          M (n_{t-1} + n_t)
    dense     all-reduce of E[hhᵀ] and G     n_{t-1}² + n_t n_{t-1}
    DDP       all-reduce of G and g          n_t n_{t-1} + n_t

The first is the smaller one just where M < n_{t-1}, whatever n_t: then the rows are gathered, and the
solvers stay in the sample space; otherwise they work on the dense factor, as for a streamed data set.
The sums that belong to no rows (E[σ'σ'ᵀ], E[σ'' ⊙ Wᵀg], E[∇²ξ], biases) are all-reduced in any case, in one
message for each dtype. A ring moves (N-1)/N of a gathered payload into each rank, and twice that of a
reduced one.

The *joined statistics* are kept with each rank's problem, so that the curvature and the gradient of the same
data share the gathered rows: that is what the solvers tell the sample space by. Whether what is kept may be
used again is agreed on by all ranks in the call itself: a rank that has new data makes all start anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from curvlab.distributed.agreement import Description, check_agreement
from curvlab.distributed.communicator import Communicator
from curvlab.exceptions import NoRowsError, RankError
from curvlab.linalg import DenseFactor, Factor, GramFactor
from curvlab.linalg.factors import DiagonalFactor, InputFactors
from curvlab.linalg.steps import Gradient, RowFactor, RowGradient
from curvlab.model.layers import Layer
from curvlab.model.network import Network
from curvlab.model.recording import Recording
from curvlab.staleness import Versions

__all__ = [
    "Accumulator",
    "JoinedStatistics",
    "LayerTraffic",
    "LocalMeans",
    "LocalRows",
    "PayloadEntry",
    "Statistic",
    "gathers_rows",
    "join_statistics",
    "layer_traffic",
]

T = TypeVar("T")


def gathers_rows(rows: int, columns: int) -> bool:
    """Whether `rows` rows of `columns` entries are sent as they are, rather than as a dense factor.

    >>> gathers_rows(100, 3072), gathers_rows(100, 16)
    (True, False)
    """
    return rows < columns


@dataclass(frozen=True)
class LayerTraffic:
    """Elements that one layer's step communicates over all ranks, by what they are for."""

    gathered: int
    reduced: int
    data_parallel: int

    def received(self, ranks: int) -> float:
        """Elements that a ring brings into each rank."""
        return (self.gathered + 2 * self.reduced) * (ranks - 1) / ranks

    def received_data_parallel(self, ranks: int) -> float:
        """The same for DDP's gradient."""
        return 2 * self.data_parallel * (ranks - 1) / ranks


def layer_traffic(rows: int, inputs: int, outputs: int, *, hidden: bool, bend: bool = True) -> LayerTraffic:
    """Elements that a step with PCH (`bend`) or Gauss-Newton sends for one layer and M = `rows`.

    `hidden` is whether an activation follows, whose E[σ'σ'ᵀ] is then sent; after the last layer it is
    E[∇²ξ], of the same size. With `bend` the diagonal terms E[σ'' ⊙ Wᵀg] are sent too.

    >>> layer_traffic(100, 3072, 1024, hidden=True)
    LayerTraffic(gathered=409800, reduced=1050624, data_parallel=3146752)
    """
    slopes = outputs * outputs + (outputs if hidden and bend else 0)
    ddp = outputs * inputs + outputs
    if gathers_rows(rows, inputs):
        return LayerTraffic(rows * (inputs + outputs + 2), slopes + outputs, ddp)
    return LayerTraffic(0, slopes + outputs + inputs * inputs + inputs + outputs * inputs, ddp)


Joinable = Tensor | Factor | InputFactors | RowGradient
Values = tuple[Tensor | Factor | InputFactors, ...]


class Statistic(Protocol):
    """What is known here of a statistic: a hashable value that all ranks ask for alike.

    `row_factor` is which factor of the weights' gradients its rows are, if any: those are sent once for both.
    What it computes is for its accumulator to know.
    """

    @property
    def row_factor(self) -> RowFactor | None:
        """Which factor of the weights' gradients its rows are; None: neither."""


class Accumulator(Protocol):
    """Takes the means of some statistics, from one recording after the other."""

    def add(self, recording: Recording) -> None:
        """Count a batch with its weight."""

    def values(self) -> Mapping[Any, Values]:
        """The means so far, by statistic."""


@dataclass(frozen=True, eq=False)
class LocalMeans:
    """Means over the rows of one rank, and Σ c_i of these rows."""

    weight: float
    values: Mapping[Any, Values]
    gradient: Gradient | None = None
    loss: Tensor | None = None


class LocalRows(Protocol):
    """The rows of one rank: a `Problem`, as far as it is needed here."""

    network: Network

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that have blocks."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that results depend on."""

    @property
    def versions(self) -> Versions:
        """The present versions of `tensors`."""

    def examples(self) -> int:
        """Number of examples."""

    def describe(self, settings: Mapping[str, object]) -> Description:
        """What must be the same on all ranks: the model, the criterion, and further `settings`."""

    def local_means(self, statistics: Accumulator | None, *, gradient: bool, loss: bool) -> LocalMeans:
        """The means over these rows; raises `NoRowsError` where none counts."""


# The payload: what a rank holds, and how it describes it.

GRADIENT, LOSS = "the gradient", "the loss"
Kind = Literal["tensor", "factor", "inputs", "product"]
RowsKey = tuple[str, int]


@dataclass(frozen=True)
class PayloadEntry:
    """One thing to join, named by its owner (a statistic, the gradient, the loss) and its place there.

    `rows` is how many rows the rank holds of it; None where it holds a sum.
    """

    owner: str
    place: int
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int | None = None

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return self.owner, self.place, self.kind, self.shape, self.dtype

    @property
    def row_keys(self) -> tuple[RowsKey, ...]:
        """The rows it is made of: a weight's gradient shares them with the input and Fisher factors."""
        if self.kind == "product":
            return ("gradients", self.place), ("inputs", self.place)
        return ((self.owner, self.place),)

    def width(self, key: RowsKey) -> int:
        """The entries of a row of the factor under `key`."""
        return self.shape[0] if self.kind == "product" and key[0] == "gradients" else self.shape[-1]


def _payload(
    local: LocalMeans, owners: Mapping[Any, str], weights: Sequence[str]
) -> Iterator[tuple[PayloadEntry, Joinable]]:
    """What a rank holds, with its description; `weights` are the names of the weights, layer by layer.

    The place of a gradient's entry is that of its layer for a weight, and after all layers for a bias.
    """
    for statistic, values in local.values.items():
        for place, given in enumerate(values):
            value = given.formed() if isinstance(given, Factor) else given
            yield _entry(owners[statistic], place, value), value
    if local.gradient is not None:
        biases = len(weights)
        for name in local.gradient:
            entry = local.gradient.factored(name)
            if name in weights:
                yield _weight_entry(weights.index(name), entry), entry
            else:
                yield _entry(GRADIENT, biases, entry), entry
                biases += 1
    if local.loss is not None:
        yield _entry(LOSS, 0, local.loss), local.loss


def _entry(owner: str, place: int, value: Joinable) -> PayloadEntry:
    if isinstance(value, Tensor):
        return PayloadEntry(owner, place, "tensor", tuple(value.shape), value.dtype)
    assert isinstance(value, InputFactors | Factor)
    kind: Kind = "inputs" if isinstance(value, InputFactors) else "factor"
    factor = value.full if isinstance(value, InputFactors) else value
    if isinstance(factor, DiagonalFactor):
        return PayloadEntry(owner, place, kind, (factor.size,), factor.values.dtype)
    rows = len(factor.rows) if isinstance(factor, GramFactor) else None
    return PayloadEntry(owner, place, kind, (factor.size, factor.size), factor.example.dtype, rows)


def _weight_entry(place: int, value: Tensor | RowGradient) -> PayloadEntry:
    if isinstance(value, Tensor):
        return PayloadEntry(GRADIENT, place, "product", tuple(value.shape), value.dtype)
    rows = value.inputs.rows
    return PayloadEntry(GRADIENT, place, "product", value.shape, rows.dtype, len(rows))


def _owner_names(statistics: Sequence[Statistic]) -> dict[Any, str]:
    """A name for each statistic that is the same on all ranks, since all ask for the same ones."""
    return {s: s.row_factor or f"{index} {type(s).__name__}" for index, s in enumerate(statistics)}


def _goes_by_rows(entries: Sequence[PayloadEntry]) -> bool:
    """Whether the rows themselves are sent, given the same entry of all ranks that have rows."""
    held = [entry.rows for entry in entries]
    return None not in held and gathers_rows(sum(rows or 0 for rows in held), entries[0].shape[-1])


# The call: what is asked for, what is there already, and what all ranks keep.


@dataclass(eq=False)
class JoinedStatistics:
    """Means over the rows of all ranks, as far as they were asked for."""

    communicator: Communicator
    versions: Versions
    found_share: float | None = None
    rows: dict[RowsKey, GramFactor] = field(default_factory=dict)
    values: dict[Any, Values] = field(default_factory=dict)
    found_gradient: Gradient | None = None
    found_loss: Tensor | None = None

    @property
    def share(self) -> float:
        """What the rows of this rank weigh among those of all."""
        return _require_asked(self.found_share, "the share of each rank")

    @property
    def gradient(self) -> Gradient:
        """E[∇ξ], in factors where the rows were gathered."""
        return _require_asked(self.found_gradient, "the gradient")

    @property
    def loss(self) -> Tensor:
        """E[ξ]."""
        return _require_asked(self.found_loss, "the loss")


def _require_asked(found: T | None, what: str) -> T:
    """What all ranks have joined, or an error where none of them has asked for it yet."""
    if found is None:
        raise LookupError(f"{what} over the rows of all ranks was not asked for: ask for it when they join")
    return found


@dataclass(frozen=True)
class _Wanted:
    """What one call asks for, or what of it is not there yet."""

    statistics: tuple[Statistic, ...]
    gradient: bool
    loss: bool
    share: bool = True

    def lacking(self, joined: JoinedStatistics) -> _Wanted:
        statistics = tuple(s for s in self.statistics if s not in joined.values)
        gradient, loss = joined.found_gradient is None, joined.found_loss is None
        return _Wanted(statistics, self.gradient and gradient, self.loss and loss, joined.found_share is None)

    @property
    def nothing(self) -> bool:
        return not (self.statistics or self.gradient or self.loss or self.share)


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others: what it lacks and keeps, what it is, what its rows weigh, its payload.

    A rank without a row that counts has weight 0, and describes nothing.
    """

    lacks: tuple[object, ...]
    keeps: tuple[RowsKey, ...]
    digests: Mapping[str, int] = field(default_factory=dict)
    weight: float = 0.0
    entries: tuple[PayloadEntry, ...] = ()


def join_statistics(
    local: LocalRows,
    communicator: Communicator,
    kept: JoinedStatistics | None,
    statistics: Sequence[Statistic] = (),
    accumulator: Callable[[Sequence[Any]], Accumulator] | None = None,
    *,
    gradient: bool = False,
    loss: bool = False,
    settings: Mapping[str, object] | None = None,
) -> JoinedStatistics:
    """The means over the rows of all ranks; every rank must make this call with the same wishes.

    `kept` is what an earlier call returned. `accumulator(statistics)` takes the means of those of the
    `statistics` that are lacking. `settings` are what must be the same on all ranks beside model and
    criterion, by what messages call them.
    """
    wanted = _Wanted(tuple(statistics), gradient, loss)
    if kept is None or kept.communicator != communicator or kept.versions.differing(local.tensors):
        kept = JoinedStatistics(communicator, local.versions)

    def start(lacking: Sequence[Statistic]) -> Accumulator | None:
        return None if accumulator is None or not lacking else accumulator(lacking)

    call = _Call(local, wanted, start, kept, settings or {})
    reports = call.reports()
    check_agreement(communicator, call.description, [report.digests for report in reports])
    if len({(report.lacks, report.keeps) for report in reports}) > 1:
        # Some rank has other data than before: nothing that was kept is of the same rows.
        call = _Call(local, wanted, start, JoinedStatistics(communicator, local.versions), {})
        reports = call.reports()
    call.finish(reports)
    return call.joined


class _Call:
    """One call of `join_statistics`, from this rank's side."""

    def __init__(
        self,
        local: LocalRows,
        wanted: _Wanted,
        accumulator: Callable[[Sequence[Statistic]], Accumulator | None],
        joined: JoinedStatistics,
        settings: Mapping[str, object],
    ) -> None:
        self.local, self.accumulator, self.joined = local, accumulator, joined
        self.communicator = joined.communicator
        self.lacking = wanted.lacking(joined)
        self.owners = _owner_names(wanted.statistics)
        self.held: list[Joinable] = []
        self.settings = settings

    @cached_property
    def description(self) -> Description:
        """What this rank says of its model, criterion and settings."""
        return self.local.describe(self.settings)

    @cached_property
    def weights(self) -> list[str]:
        """The weights whose gradients are kept in factors."""
        return _row_weights(self.local.layers)

    def reports(self) -> list[_Report]:
        """The reports of all ranks; where a rank fails in its own pass, all raise."""
        return self.communicator.collect(self._report)

    def _report(self) -> _Report:
        todo = self.lacking
        lacks = (*(self.owners[s] for s in todo.statistics), todo.gradient, todo.loss, todo.share)
        report = _Report(lacks, tuple(self.joined.rows), self.description.digests())
        if todo.nothing:
            return report
        if todo.gradient:
            _ = self.weights  # here, where an error is raised on all ranks
        try:
            statistics = self.accumulator(todo.statistics)
            means = self.local.local_means(statistics, gradient=todo.gradient, loss=todo.loss)
        except NoRowsError:
            return report
        pairs = list(_payload(means, self.owners, self.weights))
        self.held = [held for _, held in pairs]
        return replace(report, weight=means.weight, entries=tuple(entry for entry, _ in pairs))

    def finish(self, reports: Sequence[_Report]) -> None:
        """Exchange what is lacking, and keep it."""
        if self.lacking.nothing:
            return
        total = sum(report.weight for report in reports)
        if not total:
            raise NoRowsError("no rank of the process group has a row that counts: no mean exists")
        _check_alike(reports)
        shares = [report.weight / total for report in reports]
        share = self.joined.found_share = shares[self.communicator.rank]
        template = next(report.entries for report in reports if report.weight)
        values: list[Joinable] = []
        if template:
            device = self.local.network.example.device
            mine = _Mine(self.held, share, device)
            values = _exchange(self.communicator, reports, mine, self.joined.rows)
        self._keep(template, values)

    def _keep(self, template: Sequence[PayloadEntry], values: Sequence[Joinable]) -> None:
        by_owner: dict[str, list[tuple[int, Joinable]]] = {}
        for entry, value in zip(template, values, strict=True):
            by_owner.setdefault(entry.owner, []).append((entry.place, value))
        for statistic in self.lacking.statistics:
            found = by_owner.get(self.owners[statistic], [])
            self.joined.values[statistic] = cast(Values, tuple(value for _, value in found))
        if self.lacking.gradient:
            self.joined.found_gradient = self._gradient(dict(by_owner[GRADIENT]))
        if self.lacking.loss:
            self.joined.found_loss = cast(Tensor, by_owner[LOSS][0][1])

    def _gradient(self, by_place: dict[int, Joinable]) -> Gradient:
        entries: dict[str, Tensor | RowGradient] = {}
        others = len(self.weights)
        for name in (name for layer in self.local.layers for name in layer.names):
            place = self.weights.index(name) if name in self.weights else others
            others += place == others
            entries[name] = cast(Tensor | RowGradient, by_place[place])
        return Gradient(entries)


def _row_weights(layers: Sequence[Layer]) -> list[str]:
    """The names of the weights whose gradients are held in rows, at the places of their input factors."""
    names: list[str] = []
    for layer in layers:
        if layer.kind == "linear":
            names.append(str(layer.weight_name))
        else:
            parts = sum(len(role.parts) for role in layer.roles)
            names += [f"{layer.name}, part {part}, by no rows" for part in range(parts)]
    return names


def _check_alike(reports: Sequence[_Report]) -> None:
    """Refuse ranks that came with different models or wishes, before their numbers are mixed."""
    described = {
        rank: [entry.alike for entry in report.entries]
        for rank, report in enumerate(reports)
        if report.weight
    }
    (first, expected), *others = described.items()
    for rank, found in others:
        if found != expected:
            raise RankError(
                f"ranks {first} and {rank} of the process group came with different models, providers or "
                f"dtypes: every rank must make the same calls with the same model"
            )


# The exchange: local means in, means over all ranks out.


@dataclass(frozen=True, eq=False)
class _Mine:
    """What this rank adds: its values by its share of the weight, or zeros where it has no rows."""

    held: Sequence[Joinable]
    share: float
    device: torch.device

    def sums(self, index: int, entry: PayloadEntry) -> list[Tensor]:
        shapes = [entry.shape, entry.shape[:1]] if entry.kind == "inputs" else [entry.shape]
        if not self.share:
            return [torch.zeros(shape, dtype=entry.dtype, device=self.device) for shape in shapes]
        return [tensor * self.share for tensor in _dense_tensors(self.held[index])]

    def rows(self, index: int, entry: PayloadEntry, key: RowsKey) -> tuple[Tensor, Tensor]:
        if not self.share:
            empty = torch.zeros((0, entry.width(key)), dtype=entry.dtype, device=self.device)
            return empty, empty.new_zeros(0)
        factor = _row_factor(self.held[index], key)
        return factor.rows, factor.root * sqrt(self.share)


def _dense_tensors(held: Joinable) -> list[Tensor]:
    if isinstance(held, InputFactors):
        return [_dense_or_diagonal(held.full), held.mean]
    if isinstance(held, RowGradient):
        return [held.form()]
    return [_dense_or_diagonal(held) if isinstance(held, Factor) else held]


def _dense_or_diagonal(factor: Factor) -> Tensor:
    return factor.values if isinstance(factor, DiagonalFactor) else factor.to_dense()


def _row_factor(held: Joinable, key: RowsKey) -> GramFactor:
    if isinstance(held, RowGradient):
        return held.gradients if key[0] == "gradients" else held.inputs
    factor = held.full if isinstance(held, InputFactors) else held
    assert isinstance(factor, GramFactor)
    return factor


def _exchange(
    communicator: Communicator,
    reports: Sequence[_Report],
    mine: _Mine,
    rows: dict[RowsKey, GramFactor],
) -> list[Joinable]:
    """The joined value of every entry; newly gathered rows are added to `rows`.

    A joined factor has the rows of all ranks, with the roots of their weights in the mean over all.
    """
    present = [report.entries for report in reports if report.weight]
    template, columns = present[0], list(zip(*present, strict=True))
    moved = rows.keys() | {key for c in columns if _goes_by_rows(c) for key in c[0].row_keys}
    # Rows that come anyway, for a weight's gradient, serve the Fisher factor too.
    by_rows = [_goes_by_rows(c) or (c[0].kind == "factor" and c[0].row_keys[0] in moved) for c in columns]
    wanted: dict[RowsKey, int] = {}
    for index, (entry, chosen) in enumerate(zip(template, by_rows, strict=True)):
        for key in entry.row_keys if chosen else ():
            if key not in rows:
                wanted.setdefault(key, index)
    rows |= _gather(communicator, reports, wanted, mine)
    sums = [[] if chosen else mine.sums(k, template[k]) for k, chosen in enumerate(by_rows)]
    totals = iter(communicator.sums([tensor for own in sums for tensor in own]))
    found = [[next(totals) for _ in own] for own in sums]
    return [_joined_value(entry, own, rows) for entry, own in zip(template, found, strict=True)]


def _gather(
    communicator: Communicator, reports: Sequence[_Report], wanted: Mapping[RowsKey, int], mine: _Mine
) -> dict[RowsKey, GramFactor]:
    """The rows of all ranks under each key, found in the entry of that index; all roots in one message."""
    if not wanted:
        return {}
    template = next(report.entries for report in reports if report.weight)
    counts = {
        key: [(report.entries[index].rows or 0) if report.weight else 0 for report in reports]
        for key, index in wanted.items()
    }
    own = {key: mine.rows(index, template[index], key) for key, index in wanted.items()}
    rows = {key: communicator.gather_rows(own[key][0], counts[key]) for key in wanted}
    per_rank = list(zip(*counts.values(), strict=True))
    totals = [sum(held) for held in per_rank]
    roots = communicator.gather_rows(torch.cat([root for _, root in own.values()]), totals).split(totals)
    by_rank = [part.split(list(held)) for part, held in zip(roots, per_rank, strict=True)]
    joined_roots = [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]
    return {key: GramFactor(rows[key], root) for key, root in zip(wanted, joined_roots, strict=True)}


def _joined_value(
    entry: PayloadEntry, totals: Sequence[Tensor], rows: Mapping[RowsKey, GramFactor]
) -> Joinable:
    if not totals:
        factors = [rows[key] for key in entry.row_keys]
        if entry.owner == GRADIENT:
            return RowGradient(*factors)
        return InputFactors(factors[0]) if entry.kind == "inputs" else factors[0]
    if entry.kind in ("inputs", "factor"):
        factor = DiagonalFactor(totals[0]) if totals[0].ndim == 1 else DenseFactor(totals[0])
        return InputFactors(factor, totals[1]) if entry.kind == "inputs" else factor
    return totals[0]
