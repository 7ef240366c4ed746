"""A comparison: the rows of the store as the frames that tables, figures and reports are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from curvlab.studies.compare.columns import (
    BLOCKS,
    BY_TIME,
    CONVERGENCE,
    ERRORS,
    PHASES,
    REPETITIONS,
    TRACES,
    TUNING,
    cell_columns,
)
from curvlab.studies.compare.race import race_rows
from curvlab.studies.compare.timing import disturbance_words
from curvlab.studies.schema import Column
from curvlab.studies.small.errors import TOTAL
from curvlab.studies.store import Row, identity_of

__all__ = ["Comparison", "comparison_from"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was compared and what came of it.

    Attributes:
        config: the resolved settings.
        environment: versions, device, threads.
        command: the shell command that does it again.
        cells: one row per provider and solver: status, seconds (median and interquartile range over the
            repetitions), bytes, operations, error, closeness to Newton's direction, residuals.
        repetitions: one row per pair and repetition: seconds of each phase, wall clock, processor time, and
            what other programs did meanwhile.
        errors: one row per provider and layer, and one whose layer is "Total".
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

    @property
    def ok(self) -> bool:
        """Whether no cell failed (a skipped one has not) and at least one pair was measured."""
        return self.measured and not self.failures

    @property
    def measured(self) -> bool:
        """Whether any pair was: not where all were skipped or failed."""
        return bool((self.cells["status"] == "ok").any())

    def __repr__(self) -> str:
        counts = self.cells["status"].value_counts().to_dict()
        return f"Comparison({', '.join(f'{n} {status}' for status, n in counts.items())})"


def comparison_from(
    study: Mapping[str, Any], config: Mapping[str, Any], rows: Iterable[Row], command: str
) -> Comparison:
    """The frames of `config`'s providers and solvers from the rows of one study."""
    by_kind = _by_kind(rows, study["key"])
    pairs = [(provider, solver) for provider in config["providers"] for solver in config["solvers"]]
    solved = {(row["provider"], row["solver"]): row for row in by_kind["solve"]}
    timed = [row for row in by_kind["cost"] if row["repetition"] < config["repetitions"]]
    wrong = {row["provider"]: row for row in by_kind["error"] if row["provider"] in config["providers"]}
    race = race_rows(by_kind["convergence"], by_kind["tuning"], config)
    shown = [(pair, solved[pair]) for pair in pairs if pair in solved]
    times = pd.DataFrame(
        [row for pair in pairs for row in timed if _pair(row) == pair and row["status"] == "ok"]
    )
    broken = [row for pair in pairs for row in timed if _pair(row) == pair and row["status"] == "failed"]
    return Comparison(
        config=dict(config),
        environment=dict(study["environment"]),
        command=command,
        cells=_frame([_cell(pair, row, times, broken, wrong) for pair, row in shown], cell_columns()),
        repetitions=_frame(_records(times), REPETITIONS).sort_values(
            ["repetition"], kind="stable", ignore_index=True
        ),
        errors=_frame(
            [row for name in config["providers"] if name in wrong for row in _error_rows(wrong[name])], ERRORS
        ),
        traces=_frame([row for pair, solve in shown for row in _trace_rows(pair, solve)], TRACES),
        blocks=_frame(
            [_named(pair) | row for pair, solve in shown for row in solve.get("blocks", [])], BLOCKS
        ),
        convergence=_frame(race.convergence, CONVERGENCE),
        by_time=_frame(race.by_time, BY_TIME),
        tuning=_frame(race.tuning, TUNING),
        warnings=[*filter(None, [disturbance_words(times)]), *_warnings(study, shown, wrong, race.warnings)],
        failures=_failures([*(row for _, row in shown), *broken, *wrong.values(), *race.runs]),
    )


def _by_kind(rows: Iterable[Row], study: str) -> dict[str, list[Row]]:
    """The rows of a study by kind; of several for one cell and repetition the last, tried again, counts."""
    last = {identity_of(row): row for row in rows if row.get("study") == study}
    kinds: dict[str, list[Row]] = {kind: [] for kind in ("solve", "cost", "error", "tuning", "convergence")}
    for row in last.values():
        kinds.setdefault(str(row["kind"]), []).append(row)
    return kinds


def _pair(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["provider"], row["solver"]


def _named(pair: tuple[str, str]) -> Row:
    return {"provider": pair[0], "solver": pair[1]}


def _cell(
    pair: tuple[str, str], row: Row, times: pd.DataFrame, broken: list[Row], wrong: Mapping[str, Row]
) -> Row:
    failed = next((row for row in broken if _pair(row) == pair), None) if row["status"] == "ok" else None
    total: Row = next((e for e in wrong.get(pair[0], {}).get("layers", []) if e["layer"] == TOTAL), {})
    return {
        **row,
        **({} if failed is None else {"status": "failed", "message": failed["message"]}),
        **_seconds(pair, times),
        "zero_step": bool(row.get("zero_step", False)),
        "error_total": total.get("error"),
        "error_relative": total.get("relative"),
    }


def _seconds(pair: tuple[str, str], times: pd.DataFrame) -> dict[str, float]:
    if times.empty:
        return {}
    own = times[(times["provider"] == pair[0]) & (times["solver"] == pair[1])]
    if own.empty:
        return {}
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


def _error_rows(row: Row) -> list[Row]:
    return [{"provider": row["provider"], **layer} for layer in row.get("layers", [])]


def _trace_rows(pair: tuple[str, str], row: Row) -> list[Row]:
    traces = row.get("traces", {})
    columns = (traces.get(name, []) for name in ("block", "iteration", "residual"))
    return [
        _named(pair) | {"block": block, "iteration": iteration, "residual": residual}
        for block, iteration, residual in zip(*columns, strict=True)
    ]


def _warnings(
    study: Mapping[str, Any], shown: Any, wrong: Mapping[str, Row], trained: Sequence[str]
) -> list[str]:
    found = list(study.get("warnings", []))
    found += [f"{name}: {note}." for name, row in wrong.items() for note in row.get("notes", [])]
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


def _refusals(shown: Any, wrong: Mapping[str, Row]) -> list[str]:
    """Why pairs were skipped, and why errors were, unless the provider's pairs have said the same."""
    of_pairs = [row["message"] for _, row in shown if row["status"] == "skipped"]
    skipped = [row for row in wrong.values() if row["status"] == "skipped"]
    of_errors = [f"{row['provider']}: {row['message']}" for row in skipped if row["message"] not in of_pairs]
    return of_pairs + of_errors


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
