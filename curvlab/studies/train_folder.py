"""The folder of a training run: what it was, what it measured, and where it can go on.

    config.toml  environment.json             the plan and what else the result depends on
    results.jsonl  metrics.csv                one row an epoch
    checkpoint.safetensors                    model, optimizer, position, random state, rows
    learning-curve.png

The checkpoint holds the rows too: whatever a kill kept from the other files is written on resuming.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from curvlab import specs
from curvlab.exceptions import SpecError, StoreError
from curvlab.measure.environment import environment
from curvlab.studies.checkpoint import read_checkpoint, write_checkpoint
from curvlab.studies.files import locked, writable_folder, write_text_atomic
from curvlab.studies.rates import rate_words, rates_of
from curvlab.studies.spreadsheet import csv_text
from curvlab.studies.store import Store
from curvlab.studies.train_plan import TrainPlan
from curvlab.studies.train_run import TrainRun

__all__ = ["TrainFolder", "frame_of"]

OUTPUTS = (
    "checkpoint.safetensors",
    "results.jsonl",
    "results.rejected.jsonl",
    "metrics.csv",
    "learning-curve.png",
)


class TrainFolder:
    """The output folder of one plan; opened by one process at a time."""

    def __init__(self, path: str | Path, plan: TrainPlan, fresh: bool = False) -> None:
        self.plan = plan.resolve()
        self.path = writable_folder(path)
        self.checkpoint = self.path / "checkpoint.safetensors"
        self._config = self.path / "config.toml"
        found = self._read_config()
        if fresh and found is not None:
            self._remove_outputs(found)
        elif found is not None:
            self._check_same(found)
        self.store = Store(self.path)
        write_text_atomic(self._config, to_toml(self.plan.canonical()))
        described = environment(self.plan.setup.device)
        write_text_atomic(self.path / "environment.json", json.dumps(described, indent=2) + "\n")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; another process that wants it waits."""
        with locked(self.path / ".train.lock"):
            yield

    def restore(self, run: TrainRun) -> None:
        """Bring a run to where the folder's checkpoint left it, if there is one."""
        if self.checkpoint.exists():
            run.restore(read_checkpoint(self.checkpoint))
            self._publish(run)

    def save(self, run: TrainRun) -> None:
        """Write the run's state; rows that are new go to the other files."""
        write_checkpoint(self.checkpoint, run.state())
        self._publish(run)

    def draw(self, run: TrainRun) -> None:
        """Draw the learning curve."""
        from curvlab.studies.curves import save_curves

        label = f"{run.plan.labels()['optimizer']}\n{rate_words(rates_of(run.plan.optimizer))}"
        save_curves({label: frame_of(run.rows)}, self.path / "learning-curve.png")

    def _publish(self, run: TrainRun) -> None:
        known = self.store.keys()
        new = [row for row in run.rows if row["key"] not in known]
        for row in new:
            self.store.append(row)
        if new or not (self.path / "metrics.csv").exists():
            write_text_atomic(self.path / "metrics.csv", csv_text(frame_of(run.rows)))

    def _read_config(self) -> dict[str, Any] | None:
        try:
            return tomllib.loads(self._config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise StoreError(f"cannot read {self._config}: {error}; choose another folder") from error

    def _check_same(self, found: dict[str, Any]) -> None:
        wanted = _flat(tomllib.loads(to_toml(self.plan.identity())))
        held = _flat(found)
        if "epochs" not in wanted:
            held.pop("epochs", None)
        names = [n for n in sorted(wanted.keys() | held.keys()) if wanted.get(n) != held.get(n)]
        if names:
            differences = "; ".join(f"{n} is {_text(held, n)} there, {_text(wanted, n)} now" for n in names)
            raise SpecError(
                f"{self.path} holds a run with another configuration: {differences}. Choose another folder "
                f"with -o, or begin anew there with --fresh"
            )

    def _remove_outputs(self, found: dict[str, Any]) -> None:
        if found.get("study") != "train":
            raise SpecError(
                f"{self.path} holds the results of another study, which --fresh of a training run does not "
                f"remove; choose another folder with -o"
            )
        for name in OUTPUTS:
            (self.path / name).unlink(missing_ok=True)


def frame_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One row an epoch, without the store's own fields."""
    return pd.DataFrame(rows).drop(columns=["kind", "key"], errors="ignore")


def to_toml(fields: dict[str, Any]) -> str:
    """Texts, numbers and booleans, and one level of tables, as TOML; what is None is left out.

    >>> print(to_toml({"epochs": 3, "setup": {"data": "digits", "model": None}}), end="")
    epochs = 3
    <BLANKLINE>
    [setup]
    data = "digits"
    """
    tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
    lines = [
        f"{name} = {json.dumps(v)}" for name, v in fields.items() if name not in tables and v is not None
    ]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "optimizer":
            value = {"name": (spec := specs.parse(value)).name, **spec.fields}
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _text(fields: dict[str, Any], name: str) -> str:
    return f"`{fields[name]}`" if name in fields else "not set"
