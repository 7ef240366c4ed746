"""The folder of a training run: what it was, what it measured, and where it can go on.

    config.toml  environment.json             the plan and what else the result depends on
    results.jsonl  metrics.csv                one row per epoch
    checkpoint.safetensors                    model, optimizer, position, random state, rows
    curvature.csv                             what `--track` has measured
    learning-curve.png
    previous-1/  previous-2/  …               runs that a fresh one has set aside, each as it was

The checkpoint holds the rows too: whatever a kill kept from the other files is written on resuming. Nothing
in the folder changes before the run has a checkpoint to write.


A checkpoint is a tree of tensors and plain values in one safetensors file, replaced atomically. Tensors are
stored as they are; their places in the tree, and every other value, are in the file's JSON header. There is
no pickle: reading a checkpoint runs nothing. Dictionaries keep the types of their keys, tuples become lists,
and floats come back to the bit.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlab import specs
from curvlab.exceptions import SpecError, StoreError
from curvlab.files import (
    csv_text,
    next_number,
    read_toml,
    replaced,
    toml_text,
    write_bytes_atomic,
    write_text_atomic,
)
from curvlab.measure.environment import environment
from curvlab.studies.store import Row, Store, refuse_foreign_results
from curvlab.studies.train.optimizers import optimizers
from curvlab.studies.train.plan import TrainPlan, rate_words, rates_of

__all__ = ["TrainFolder", "frame_of", "read_checkpoint", "steps_in", "write_checkpoint"]


FORMAT = "curvlab-checkpoint-1"
TENSOR, PAIRS = "__tensor__", "__pairs__"


def write_checkpoint(path: Path, tree: dict[str, Any]) -> None:
    """Write `tree` to `path`: a crash leaves the old checkpoint or the new one, never a part.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "checkpoint.safetensors"
    >>> write_checkpoint(path, {"state": {0: {"buffer": torch.ones(2), "lr": 0.1}}})
    >>> read_checkpoint(path)
    {'state': {0: {'buffer': tensor([1., 1.]), 'lr': 0.1}}}
    """
    tensors: dict[str, Tensor] = {}
    header = json.dumps({"format": FORMAT, "tree": _encode(tree, tensors)})
    with replaced(path) as temporary:
        save_file(tensors, temporary, metadata={"curvlab": header})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote; tensors are on the CPU, in memory of their own."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("curvlab", "{}"))
            # A copy lies aligned in memory, as the original did: the same bits come out of it.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            tree: Any = _decode(header.get("tree"), tensors) if isinstance(header, dict) else None
    except (OSError, SafetensorError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise StoreError(f"cannot read the checkpoint {path}: {error}; start again with --fresh") from error
    if not isinstance(tree, dict) or header.get("format") != FORMAT:
        raise StoreError(f"{path} is not a checkpoint of curvlab ({FORMAT}); start again with --fresh")
    return tree


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        # Each a copy on the CPU: safetensors takes no two tensors of one storage.
        tensors[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {TENSOR: key}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encode(item, tensors) for key, item in value.items()}
        return {PAIRS: [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_encode(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StoreError(f"a checkpoint holds tensors, numbers and texts; got a {type(value).__name__}")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if PAIRS in value:
        return {key: _decode(item, tensors) for key, item in value[PAIRS]}
    return {key: _decode(item, tensors) for key, item in value.items()}


CHECKPOINT = "checkpoint.safetensors"
DESCRIPTIONS = ("config.toml", "environment.json")
# The checkpoint is the last to be set aside: as long as it is there it holds the rows of the others.
OUTPUTS = (
    "results.jsonl",
    "results.rejected.jsonl",
    "metrics.csv",
    "curvature.csv",
    "curvature.html",
    "curvature.md",
    "learning-curve.png",
    CHECKPOINT,
)


class Resumable(Protocol):
    """What the folder keeps of a run: its rows, and its state as a tree that brings it back."""

    rows: list[Row]
    tracked: list[Row]

    def state(self) -> dict[str, Any]:
        """All that the run needs to go on."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""


class TrainFolder:
    """The output folder of one plan, whose lock the caller holds."""

    def __init__(self, path: Path, plan: TrainPlan, fresh: bool = False) -> None:
        self.plan = plan.resolve()
        self.path = path
        self.checkpoint = path / CHECKPOINT
        self._fresh = fresh
        self._store: Store | None = None
        refuse_foreign_results(path)
        found = self._read_config()
        if fresh and found is not None:
            self._check_training(found)
        elif found is not None:
            self._check_same(found)

    def restore(self, run: Resumable) -> None:
        """Bring a run to where the folder's checkpoint left it, unless there is none or it begins anew."""
        if self.checkpoint.exists() and not self._fresh:
            state = read_checkpoint(self.checkpoint)
            try:
                _check_state(state)
                run.restore(state)
            # Whatever part is missing or of another kind, the file is not what this plan has written.
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise StoreError(
                    f"the checkpoint {self.checkpoint} does not fit its configuration "
                    f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); start again with "
                    f"--fresh, which sets it aside"
                ) from error
            self._publish(run)

    def save(self, run: Resumable) -> None:
        """Write the run's state; rows that are new go to the other files."""
        self._begin()
        write_checkpoint(self.checkpoint, run.state())
        self._publish(run)

    def draw(self, run: Resumable, draw: Callable[[pd.DataFrame, str], bytes]) -> None:
        """Put the learning curve in the folder, as `draw` gives it from the frame and a title."""
        title = f"{self.plan.labels()['optimizer']}\n{rate_words(rates_of(self.plan.optimizer))}"
        write_bytes_atomic(self.path / "learning-curve.png", draw(frame_of(run.rows), title))

    def _begin(self) -> Store:
        """The store, after an old run was set aside, if need be, and the new one's plan was written."""
        if self._store is None:
            if self._fresh:
                self._set_aside()
            store = Store(self.path)
            write_text_atomic(self.path / "config.toml", toml_text(self.plan.canonical()))
            described = environment(self.plan.setup.device)
            write_text_atomic(self.path / "environment.json", json.dumps(described, indent=2) + "\n")
            self._store = store
        return self._store

    def _set_aside(self) -> None:
        """Move the run that is there to a numbered folder, in which it could be resumed."""
        found = [name for name in OUTPUTS if _has_content(self.path / name)]
        if not found:
            return
        try:
            aside = self.path / f"previous-{next_number(self.path, 'previous-{}')}"
            aside.mkdir()
            for name in DESCRIPTIONS:
                if (self.path / name).exists():
                    shutil.copy2(self.path / name, aside / name)
            for name in found:
                (self.path / name).rename(aside / name)
        except OSError as error:
            raise StoreError(
                f"cannot set aside the run in {self.path}: {error.strerror or error}. What was moved is in "
                f"previous-…, the rest where it was"
            ) from error

    def _publish(self, run: Resumable) -> None:
        store = self._begin()
        known = store.keys()
        new = [row for row in run.rows if row["key"] not in known]
        for row in new:
            store.append(row)
        if new or not (self.path / "metrics.csv").exists():
            write_text_atomic(self.path / "metrics.csv", csv_text(frame_of(run.rows)))
        if run.tracked:
            write_text_atomic(self.path / "curvature.csv", csv_text(pd.DataFrame(run.tracked)))

    def _read_config(self) -> dict[str, Any] | None:
        path = self.path / "config.toml"
        try:
            return read_toml(path) if path.exists() else None
        except SpecError as error:
            raise StoreError(f"{error}; choose another folder with -o") from error

    def _check_same(self, found: dict[str, Any]) -> None:
        wanted = _flat(tomllib.loads(toml_text(self.plan.identity())))
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

    def _check_training(self, found: dict[str, Any]) -> None:
        if found.get("study") != "train":
            raise SpecError(
                f"{self.path} holds the results of another study, which --fresh of a training run does not "
                f"set aside; choose another folder with -o"
            )


def _check_state(state: dict[str, Any]) -> None:
    """Raise `ValueError` unless the position and the rows of a state are a run's."""
    for name in ("epoch", "steps"):
        if type(state[name]) is not int or state[name] < 0:
            raise ValueError(f"its {name} is {state[name]!r}")
    if not all(isinstance(row, dict) and {"key", "epoch", "status"} <= row.keys() for row in state["rows"]):
        raise ValueError("its rows are not those of a run")


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def steps_in(folder: Path) -> int:
    """How many steps the run of a folder has made by its checkpoint; 0 where there is none."""
    path = folder / CHECKPOINT
    return int(read_checkpoint(path)["steps"]) if path.exists() else 0


def frame_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per epoch, without the store's own fields."""
    return pd.DataFrame(rows).drop(columns=["kind", "key"], errors="ignore")


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "optimizer" and isinstance(value, str):
            value = {"name": (spec := specs.parse(_spelt_out(value))).name, **spec.fields}
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _spelt_out(optimizer: str) -> str:
    """An optimizer's text with the fields that were added since it was written, which had their defaults."""
    try:
        return optimizers.canonical(optimizers.make(optimizer).resolve())
    except SpecError:
        return optimizer


def _text(fields: dict[str, Any], name: str) -> str:
    return f"`{fields[name]}`" if name in fields else "not set"
