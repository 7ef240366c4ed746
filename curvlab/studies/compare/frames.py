"""A comparison: the rows of the store as the frames that tables, figures and reports are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from curvlab.studies.compare.columns import (
    BLOCKS,
    BY_TIME,
    CELLS,
    CONVERGENCE,
    DAMPINGS,
    DRAWN,
    DRAWS,
    ERRORS,
    PHASES,
    POINTS,
    REPETITIONS,
    SCENES,
    SPECTRA,
    TRACES,
    TUNING,
    cell_columns,
)
from curvlab.studies.compare.costs import CONTROLS, disturbance_words, separate_runs_words
from curvlab.studies.compare.race import race_rows
from curvlab.studies.schema import Column
from curvlab.studies.small.errors import TOTAL
from curvlab.studies.store import Row, identity_of

__all__ = ["Comparison", "comparison_from"]

UNTRAINED = "init"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was compared and what came of it.

    Attributes:
        config: the resolved settings.
        environment: versions, device, threads.
        command: the shell command that does it again.
        cells: one row per provider and solver, at the deciding point, the last of `at`: status, seconds
            (median and interquartile range over the repetitions), bytes, operations, errors, closeness to
            Newton's direction and decrease of the loss (medians over the draws), residuals.
        controls: the same of the controls: `identity`, `sgd` and `newton`, which have no solver.
        draws: one row per pair or control and scene (point, seed, batch): closeness and decrease.
        points: one row per pair or control and point: medians over the draws.
        dampings: one row per pair or control, scene and damping α, with that damping's own Newton step.
        spectra: one row per provider, scene and layer: largest and median eigenvalue of its curvature.
        scenes: one row per point, seed and batch: loss, largest eigenvalue of the Hessian, coverage.
        repetitions: one row per pair or control, point and repetition: seconds of each phase, wall clock,
            processor time, and what other programs did meanwhile.
        errors: one row per provider, scene and layer, and one whose layer is "Total".
        traces: relative residual by pair, block and iteration.
        blocks: one row per pair and block: how it was solved, and its closeness to Newton's direction.
        convergence: one row per optimizer, seed and epoch, with the optimizer's learning rate, α and
            momentum, and where the run was after equal processor time.
        by_time: the same up to that time, for the optimizers that make more epochs in it.
        tuning: one row per trial of a tuning: values, epochs, validation loss, and which were chosen.
        warnings: sentences a reader should know.
        failures: sentences on cells that failed.
    """

    config: dict[str, Any]
    environment: dict[str, Any]
    command: str
    cells: pd.DataFrame
    repetitions: pd.DataFrame
    errors: pd.DataFrame
    traces: pd.DataFrame
    blocks: pd.DataFrame
    convergence: pd.DataFrame
    by_time: pd.DataFrame = field(default_factory=pd.DataFrame)
    tuning: pd.DataFrame = field(default_factory=pd.DataFrame)
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    controls: pd.DataFrame = field(default_factory=lambda: _frame([], CELLS))
    draws: pd.DataFrame = field(default_factory=lambda: _frame([], DRAWS))
    points: pd.DataFrame = field(default_factory=lambda: _frame([], POINTS))
    dampings: pd.DataFrame = field(default_factory=lambda: _frame([], DAMPINGS))
    spectra: pd.DataFrame = field(default_factory=lambda: _frame([], SPECTRA))
    scenes: pd.DataFrame = field(default_factory=lambda: _frame([], SCENES))
    coverage: dict[str, float] = field(default_factory=dict)

    @property
    def point(self) -> str:
        """The point that decides: the last of those measured at."""
        return str(self.config.get("at", [UNTRAINED])[-1])

    def at_point(self, name: str) -> pd.DataFrame:
        """The rows of a frame that are of the deciding point; all, where the frame has no points."""
        frame: pd.DataFrame = getattr(self, name)
        return frame[frame["point"] == self.point] if "point" in frame else frame

    @property
    def ok(self) -> bool:
        """Whether no cell failed (a skipped one has not) and at least one pair was measured."""
        return self.measured and not self.failures

    @property
    def measured(self) -> bool:
        """Whether any pair was: not where all were skipped or failed."""
        return bool((self.cells["status"] == "ok").any())

    @property
    def frames(self) -> dict[str, pd.DataFrame]:
        """All frames by name."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: frame for name, frame in found.items() if isinstance(frame, pd.DataFrame)}

    def __repr__(self) -> str:
        counts = self.cells["status"].value_counts().to_dict()
        return f"Comparison({', '.join(f'{n} {status}' for status, n in counts.items())})"


def comparison_from(
    study: Mapping[str, Any], config: Mapping[str, Any], rows: Iterable[Row], command: str
) -> Comparison:
    """The frames of `config`'s providers and solvers from the rows of one study."""
    by_kind = _by_kind(rows, study["key"], config)
    points = list(config.get("at", [UNTRAINED]))
    deciding = points[-1]
    pairs = [(provider, solver) for provider in config["providers"] for solver in config["solvers"]]
    named = [*((name, "") for name in CONTROLS), *pairs]
    measured = _in_order(by_kind["control"], named) + _in_order(by_kind["solve"], pairs)
    first = {pair: row for pair, row in reversed(measured) if row["point"] == deciding}
    shown = [(pair, first[pair]) for pair in pairs if pair in first]
    controls = [((name, ""), first[name, ""]) for name in CONTROLS if (name, "") in first]
    timed = [row for row in by_kind["cost"] if row["repetition"] < config["repetitions"]]
    times = pd.DataFrame([row for _, row in _in_order(timed, named) if row["status"] == "ok"])
    broken = [row for _, row in _in_order(timed, named) if row["status"] == "failed"]
    wrong = [row for name in config["providers"] for row in by_kind["error"] if row["provider"] == name]
    race = race_rows(by_kind["convergence"], by_kind["tuning"], config)
    makers = [_Cells(point, measured, times, broken, wrong) for point in points]
    last = makers[-1]
    return Comparison(
        config=dict(config),
        environment=dict(study["environment"]),
        command=command,
        cells=_frame([last.cell(pair, row) for pair, row in shown], cell_columns()),
        controls=_frame([last.cell(pair, row) for pair, row in controls], CELLS),
        draws=_frame([_named(pair) | row for pair, row in measured if row["status"] == "ok"], DRAWS),
        points=_frame(
            [
                maker.cell(pair, {"status": "ok", "message": ""})
                for maker in makers
                for pair in named
                if maker.has(pair)
            ],
            POINTS,
        ),
        dampings=_frame([row for pair, solve in measured for row in _damping_rows(pair, solve)], DAMPINGS),
        spectra=_frame([row for one in wrong for row in _listed(one, "spectra")], SPECTRA),
        scenes=_frame([row for row in by_kind["scene"] if row["status"] == "ok"], SCENES),
        coverage=next((_coverage(row) for row in wrong if "bias_share" in row), {}),
        repetitions=_frame(_records(times), REPETITIONS).sort_values(
            ["repetition"], kind="stable", ignore_index=True
        ),
        errors=_frame([row for one in wrong for row in _listed(one, "layers")], ERRORS),
        traces=_frame([row for pair, solve in shown for row in _trace_rows(pair, solve)], TRACES),
        blocks=_frame(
            [_named(pair) | row for pair, solve in shown for row in solve.get("blocks", [])], BLOCKS
        ),
        convergence=_frame(race.convergence, CONVERGENCE),
        by_time=_frame(race.by_time, BY_TIME),
        tuning=_frame(race.tuning, TUNING),
        warnings=[
            *filter(None, [disturbance_words(times), separate_runs_words(_at(times, deciding))]),
            *_warnings(study, shown, wrong, race.warnings),
        ],
        failures=_failures([*(row for _, row in measured), *broken, *wrong, *by_kind["scene"], *race.runs]),
    )


def _at(times: pd.DataFrame, point: str) -> pd.DataFrame:
    """The times of one point; a row of an earlier release does not say which run it is of."""
    if times.empty:
        return times
    own = times[times["point"] == point]
    return own.assign(run=own["run"].fillna("")) if "run" in own else own


def _in_order(rows: Iterable[Row], named: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], Row]]:
    """The rows of these pairs, with them, in their order."""
    by_pair: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_pair.setdefault(_pair(row), []).append(row)
    return [(pair, row) for pair in named for row in by_pair.get(pair, [])]


def _listed(row: Row, what: str) -> list[Row]:
    """The entries of a provider's row, each with the provider and the scene."""
    scene = {name: row[name] for name in ("provider", "point", "seed", "draw")}
    return [scene | entry for entry in row.get(what, [])]


def _damping_rows(pair: tuple[str, str], row: Row) -> list[Row]:
    scene = {name: row[name] for name in ("point", "seed", "draw")}
    return [_named(pair) | scene | entry for entry in row.get("dampings", [])]


def _coverage(row: Row) -> dict[str, float]:
    """The shares of the parameters that the two errors speak for, and how many probes the second is from."""
    return {name: float(row[name]) for name in ("bias_share", "weight_share", "weight_probes")}


@dataclass(frozen=True)
class _Cells:
    """What is known of pairs at one point."""

    point: str
    measured: Sequence[tuple[tuple[str, str], Row]]
    times: pd.DataFrame
    broken: Sequence[Row]
    wrong: Sequence[Row]

    def has(self, pair: tuple[str, str]) -> bool:
        """Whether the pair was measured at the point."""
        return bool(self._rows(pair))

    def _rows(self, pair: tuple[str, str]) -> list[Row]:
        return [
            row
            for name, row in self.measured
            if name == pair and row["point"] == self.point and row["status"] == "ok"
        ]

    def cell(self, pair: tuple[str, str], row: Row) -> Row:
        """The row of a pair: `row` with the medians over the draws at the point, its errors and its times."""
        failed = next((row for row in self.broken if _pair(row) == pair), None)
        rows = self._rows(pair)
        medians = {name: _median(rows, name) for name in DRAWN if any(name in one for one in rows)}
        return {
            **row,
            **_named(pair),
            **({} if failed is None or row["status"] != "ok" else _failed_as(failed)),
            **medians,
            **{f"{name}_iqr": _spread(rows, name) for name in medians if len(rows) > 1},
            **self._seconds(pair),
            **self._errors(pair[0]),
            **({"loss_left": 1 - medians["decrease"]} if "decrease" in medians else {}),
            "zero_step": bool(row.get("zero_step", False)),
            "point": self.point,
            "draws": len(rows),
        }

    def _errors(self, provider: str) -> dict[str, float]:
        totals = [
            layer
            for row in self.wrong
            if row["provider"] == provider and row["point"] == self.point
            for layer in row.get("layers", [])
            if layer["layer"] == TOTAL
        ]
        names = {"error_total": "error", "error_relative": "relative", "weight_relative": "weight_relative"}
        medians = {column: _median(totals, name) for column, name in names.items() if totals}
        spreads = {f"{column}_iqr": _spread(totals, name) for column, name in names.items() if totals}
        return medians | spreads

    def _seconds(self, pair: tuple[str, str]) -> dict[str, float]:
        if self.times.empty:
            return {}
        own = self.times
        own = own[(own["provider"] == pair[0]) & (own["solver"] == pair[1]) & (own["point"] == self.point)]
        return _phase_seconds(own) if len(own) else {}


def _failed_as(failed: Row) -> Row:
    return {"status": "failed", "message": failed["message"]}


def _numbers(rows: Iterable[Row], name: str) -> np.ndarray:
    values = np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=float)
    return values[np.isfinite(values)]


def _median(rows: Iterable[Row], name: str) -> float:
    """Over the draws in which it is known."""
    known = _numbers(rows, name)
    return float(np.median(known)) if len(known) else np.nan


def _spread(rows: Iterable[Row], name: str) -> float:
    known = _numbers(rows, name)
    return float(np.subtract(*np.quantile(known, [0.75, 0.25]))) if len(known) > 1 else np.nan


def _by_kind(rows: Iterable[Row], study: str, config: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The rows of a study by kind; of several for one cell and repetition the last counts.

    Such a cell was tried again, or measured again with other limits, dampings or registered columns. Only
    scenes of the configuration are kept. A row of an earlier release is one of the untrained model.
    """
    first = int(config.get("seed") or 0)
    seeds, batches = int(config.get("seeds", 1)), int(config.get("batches", 1))
    points = config.get("at", [UNTRAINED])
    last = {identity_of(row): row for row in rows if row.get("study") == study}
    kinds: dict[str, list[Row]] = {
        kind: [] for kind in ("scene", "control", "solve", "cost", "error", "tuning", "convergence")
    }
    for row in last.values():
        scene: Row = {"point": UNTRAINED, "seed": first, "draw": 0}
        named: Row = {"provider": row["control"], "solver": ""} if "control" in row else {}
        row = scene | row | named
        kept = row["point"] in points and first <= row["seed"] < first + seeds and row["draw"] < batches
        if kept or row["kind"] in ("tuning", "convergence", "study"):
            kinds.setdefault(str(row["kind"]), []).append(row)
    for kind in ("scene", "control", "solve", "error"):
        kinds[kind] = list({_cell_of(row): row for row in kinds[kind]}.values())
    order = {point: index for index, point in enumerate((points[-1], *points[:-1]))}
    for kind in ("scene", "control", "solve", "cost", "error"):
        kinds[kind].sort(key=lambda row: (order[row["point"]], row["seed"], row["draw"]))
    return kinds


def _cell_of(row: Row) -> tuple[Any, ...]:
    """What a row is of, whatever it was measured with."""
    return tuple(row.get(name) for name in ("provider", "solver", "point", "seed", "draw"))


def _pair(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["provider"], row["solver"]


def _named(pair: tuple[str, str]) -> Row:
    return {"provider": pair[0], "solver": pair[1]}


def _phase_seconds(own: pd.DataFrame) -> dict[str, float]:
    """The median and the interquartile range of each phase and of their total over the repetitions."""
    samples = {phase: own[f"{phase}_seconds"].to_numpy(float) for phase in PHASES}
    samples["total"] = np.sum(list(samples.values()), axis=0)
    result: dict[str, float] = {}
    for phase, values in samples.items():
        lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75])
        spread = (
            float(upper - lower) if len(values) > 1 else np.nan
        )  # one sample has no spread, not a zero one
        result |= {f"{phase}_seconds": float(median), f"{phase}_iqr": spread}
    return result


def _records(frame: pd.DataFrame) -> list[Row]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _trace_rows(pair: tuple[str, str], row: Row) -> list[Row]:
    traces = row.get("traces", {})
    columns = (traces.get(name, []) for name in ("block", "iteration", "residual"))
    return [
        _named(pair) | {"block": block, "iteration": iteration, "residual": residual}
        for block, iteration, residual in zip(*columns, strict=True)
    ]


def _warnings(
    study: Mapping[str, Any], shown: Any, wrong: Sequence[Row], trained: Sequence[str]
) -> list[str]:
    found = list(study.get("warnings", []))
    found += [f"{row['provider']}: {note}." for row in wrong for note in row.get("notes", [])]
    found += [f"{row['error_reason']}." for row in wrong if row.get("error_reason")]
    found += [
        f"{' + '.join(pair)}: its step is zero, so it would change nothing."
        for pair, row in shown
        if row.get("zero_step")
    ]
    reasons = [row["newton_reason"] for _, row in shown if _lacks_distance(row)]
    found += [f"No distance to Newton's direction: {reason}." for reason in reasons]
    found += [f"Left out: {message}" for message in _refusals(shown, wrong)]
    found += trained
    return list(dict.fromkeys(found))


def _lacks_distance(row: Row) -> bool:
    return bool(row.get("newton_reason") and pd.isna(row.get("distance", np.nan)))


def _refusals(shown: Any, wrong: Sequence[Row]) -> list[str]:
    """Why pairs were skipped, each reason once, and why errors were, unless pairs say the same."""
    by_message: dict[str, list[str]] = {}
    for pair, row in shown:
        if row["status"] == "skipped":
            by_message.setdefault(str(row["message"]), []).append(" + ".join(pair))
    of_errors = [
        f"{row['provider']}: {row['message']}"
        for row in wrong
        if row["status"] == "skipped" and row["message"] not in by_message
    ]
    return [*by_message, *of_errors]


def _failures(rows: Iterable[Row]) -> list[str]:
    texts = [f"{_what(row)}: {row['message']}" for row in rows if row["status"] == "failed"]
    return list(dict.fromkeys(texts))


def _what(row: Row) -> str:
    return row.get("optimizer") or " + ".join(row[name] for name in ("provider", "solver") if row.get(name))


def _frame(rows: Iterable[Row], columns: Sequence[Column]) -> pd.DataFrame:
    """The columns in order; numbers as numbers, with NaN where the store has null."""
    frame = pd.DataFrame(list(rows), columns=[column.name for column in columns])
    for column in columns:
        values = frame[column.name]
        if column.kind == "text":
            frame[column.name] = values.astype(object).fillna("").astype(str)
        elif column.kind != "label":
            frame[column.name] = pd.to_numeric(values)
    return frame
