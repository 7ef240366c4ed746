"""Ways to damage the folder of a run: each is a function of the folder, by the study that made it.

`edit` changes the first row of a kind, `line` and `whole` what results.jsonl says, `put` any other file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["DAMAGE", "Damage", "store_of"]

Damage = Callable[[Path], None]
GONE = object()


def store_of(folder: Path) -> Path:
    """The store of a run's folder: reproductions keep it in a folder of their experiment."""
    inner = folder / "grid" / "work" / "results.jsonl"
    return inner if inner.parent.exists() else folder / "results.jsonl"


def whole(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = store_of(folder)
        path.write_bytes(change(path.read_bytes()))

    return damage


def line(text: bytes) -> Damage:
    """A line of somebody else's between the others."""
    return whole(lambda data: data.replace(b"\n", b"\n" + text + b"\n", 1))


def edit(kind: str, **fields: Any) -> Damage:
    """Fields of the first row of a kind, set or (GONE) taken out."""

    def damage(folder: Path) -> None:
        path = store_of(folder)
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        chosen = next(row for row in rows if row.get("kind") == kind)
        chosen |= {name: value for name, value in fields.items() if value is not GONE}
        for name in [name for name, value in fields.items() if value is GONE]:
            del chosen[name]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return damage


def put(name: str, content: bytes | None = None, *, folder: bool = False) -> Damage:
    """Another content for a file; none takes it away; `folder` puts a folder in its place."""

    def damage(run: Path) -> None:
        path = next(run.rglob(name), run / name)
        path.unlink(missing_ok=True)
        if folder:
            path.mkdir()
        elif content is not None:
            path.write_bytes(content)

    return damage


def cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        path = next(folder.rglob(name))
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])

    return damage


def link(target: str) -> Damage:
    def damage(folder: Path) -> None:
        path = store_of(folder)
        path.unlink()
        path.symlink_to(path.parent / target)

    return damage


def fifo(folder: Path) -> None:
    path = store_of(folder)
    path.unlink()
    os.mkfifo(path)


def checkpoint(header: Any, tensors: int = 1) -> Damage:
    """A well-formed safetensors file whose tree is not a run's."""

    def damage(folder: Path) -> None:
        path = next(folder.rglob("checkpoint.safetensors"))
        path.unlink()
        held = {str(index): torch.ones(2) for index in range(tensors)}
        save_file(held, path, metadata={"curvlab": header if isinstance(header, str) else json.dumps(header)})

    return damage


def tampered(change: Callable[[dict[str, Any]], object]) -> Damage:
    """The run's own checkpoint with a part of its tree changed."""

    def damage(folder: Path) -> None:
        path = next(folder.rglob("checkpoint.safetensors"))
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        outer = json.loads(data[8 : 8 + size])
        inner = json.loads(outer["__metadata__"]["curvlab"])
        change(inner["tree"])
        outer["__metadata__"]["curvlab"] = json.dumps(inner)
        text = json.dumps(outer).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


class Payload:
    """Whoever unpickles it makes a folder that the test would find."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


FORMAT = "curvlab-checkpoint-1"
LINES: dict[str, Damage] = {
    "the last row torn": whole(lambda data: data[:-20]),
    "cut in the middle": cut("results.jsonl", 0.5),
    "an empty store": whole(lambda data: b""),
    "a store that is gone": lambda folder: store_of(folder).unlink(),
    "no newline at the end": whole(lambda data: data.rstrip(b"\n")),
    "garbage between rows": line(b"\xff\xfe\x00garbage"),
    "zeros between rows": line(b"\x00" * 512),
    "zeros at the end, as after a power cut": whole(lambda data: data + b"\x00" * 4096),
    "an empty line": line(b""),
    "a row without key": line(b'{"kind": "epoch"}'),
    "a row whose key is a number": line(b'{"key": 3}'),
    "a list for a row": line(b"[1, 2]"),
    "a row of NaN": line(b'{"key": "k", "seconds": NaN}'),
    "a row nested without end": line(b'{"key": "k", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 10,000 digits": line(b'{"key": "k", "n": ' + b"9" * 10_000 + b"}"),
    "a row of another study": line(b'{"key": "k", "kind": "harvest", "tons": 3}'),
    "a row whose kind is a list": line(b'{"key": "k", "kind": ["solve"]}'),
    "a byte-order mark": whole(lambda data: b"\xef\xbb\xbf" + data),
    "the line ends of Windows": whole(lambda data: data.replace(b"\n", b"\r\n")),
    "every row twice": whole(lambda data: data + data),
    "a store that links to itself": link("results.jsonl"),
    "a store that links to nothing": link("nothing.jsonl"),
    "a folder for a store": put("results.jsonl", folder=True),
    "a pipe for a store": fifo,
    "rejected rows that cannot be written": lambda folder: (
        (store_of(folder).with_name("results.rejected.jsonl")).mkdir(),
        line(b"{")(folder),
    )[-1],
    "a holder's note of garbage": put(".run.json", b"\xff{"),
}

DAMAGE: dict[str, dict[str, Damage]] = {
    "compare": LINES
    | {
        "in UTF-16": whole(lambda data: data.decode().encode("utf-16")),
        "a foreign store": whole(lambda data: b'{"name": "somebody else"}\n'),
        "a cost without repetition": edit("cost", repetition=GONE),
        "a repetition that is text": edit("cost", repetition="first"),
        "a repetition that is true": edit("cost", repetition=True),
        "seconds that are text": edit("cost", estimate_seconds="fast"),
        "seconds that are missing": edit("cost", apply_seconds=GONE),
        "a list for a solver": edit("solve", solver=["kfi"]),
        "an object for a provider": edit("solve", provider={"name": "fisher"}),
        "no provider": edit("error", provider=GONE),
        "a status that is a number": edit("solve", status=1),
        "no status": edit("cost", status=GONE),
        "a message that is a list": edit("error", message=["a"]),
        "bytes that are text": edit("solve", peak_bytes="many"),
        "layers that are text": edit("error", layers="all"),
        "layers of numbers": edit("error", layers=[1, 2]),
        "a layer without its name": edit("error", layers=[{"error": 1.0}]),
        "a layer whose error is text": edit("error", layers=[{"layer": "Total", "error": "large"}]),
        "blocks of numbers": edit("solve", blocks=[3]),
        "traces of unequal length": edit("solve", traces={"block": ["a"], "iteration": [], "residual": []}),
        "traces with a list for a number": edit(
            "solve", traces={"block": ["a"], "iteration": [[None]], "residual": [0.1]}
        ),
        "an integer beyond every float": edit("cost", apply_seconds=10**400),
        "a draw beyond every float": edit("solve", draw=10**400),
        "traces of numbers": edit("solve", traces={"block": 3}),
        "notes of numbers": edit("solve", notes=[3]),
        "a study without config": edit("study", config=GONE),
        "a study whose config is a list": edit("study", config=[]),
        "a study whose environment is null": edit("study", environment=None),
        "a study whose warnings are text": edit("study", warnings="none"),
        "a config without providers": edit("study", config={"alpha": 1.0}),
        "no config.toml": put("config.toml"),
        "a config.toml of garbage": put("config.toml", b"\xff\xfe["),
        "a config.toml of another program": put("config.toml", b"[tool]\nname = 3\n"),
        "a config.toml with a wrong type": put("config.toml", b"providers = 3\n"),
        "a folder for config.toml": put("config.toml", folder=True),
        "no environment.json": put("environment.json"),
        "an environment.json of garbage": put("environment.json", b"\xff"),
        "an environment.json that is a list": put("environment.json", b"[]"),
        "an environment.json nested without end": put("environment.json", b"[" * 100_000),
        "a folder for results.csv": put("results.csv", folder=True),
    },
    "train": LINES
    | {
        "a foreign store": whole(lambda data: b'{"name": "somebody else"}\n'),
        "no checkpoint": put("checkpoint.safetensors"),
        "an empty checkpoint": put("checkpoint.safetensors", b""),
        "half a checkpoint": cut("checkpoint.safetensors", 0.5),
        "a checkpoint without its last byte": cut("checkpoint.safetensors", 0.999),
        "a checkpoint of garbage": put("checkpoint.safetensors", os.urandom(4096)),
        "a checkpoint that claims 2^60 bytes": put(
            "checkpoint.safetensors", struct.pack("<Q", 2**60) + b"{}"
        ),
        "a pickle for a checkpoint": put("checkpoint.safetensors", pickle.dumps(Payload())),
        "a folder for a checkpoint": put("checkpoint.safetensors", folder=True),
        "a checkpoint of another program": checkpoint("{}"),
        "a checkpoint whose header is no JSON": checkpoint("{"),
        "a checkpoint whose header is a list": checkpoint([]),
        "a checkpoint without tree": checkpoint({"format": FORMAT}),
        "a checkpoint whose tree is a list": checkpoint({"format": FORMAT, "tree": []}),
        "a checkpoint whose tree is empty": checkpoint({"format": FORMAT, "tree": {}}),
        "a checkpoint that names no tensor": checkpoint(
            {"format": FORMAT, "tree": {"model": {"__tensor__": "77"}}}
        ),
        "a checkpoint nested without end": checkpoint("[" * 100_000),
        "a checkpoint without model": tampered(lambda tree: tree.pop("model")),
        "a checkpoint with a wrong shape": tampered(
            lambda tree: tree["model"].update({"0.weight": tree["model"]["0.bias"]})
        ),
        "a checkpoint without optimizer": tampered(lambda tree: tree.pop("optimizer")),
        "a checkpoint without random state": tampered(lambda tree: tree["random"].pop("cpu")),
        "a checkpoint whose rows are text": tampered(lambda tree: tree.update(rows="many")),
        "a checkpoint whose rows are numbers": tampered(lambda tree: tree.update(rows=[1, 2, 3])),
        "a checkpoint whose rows lack keys": tampered(lambda tree: tree.update(rows=[{"epoch": 0}])),
        "a checkpoint whose epoch is text": tampered(lambda tree: tree.update(epoch="last")),
        "a checkpoint whose epoch is negative": tampered(lambda tree: tree.update(epoch=-1)),
        "a checkpoint with an unknown tally": tampered(lambda tree: tree["tally"].update(unknown=1)),
        "no config.toml": put("config.toml"),
        "a config.toml of garbage": put("config.toml", b"\xff\xfe["),
        "a config.toml of another program": put("config.toml", b"[tool]\nname = 3\n"),
        "a config.toml with a wrong type": put("config.toml", b"optimizer = 3\n"),
        "a folder for config.toml": put("config.toml", folder=True),
        "no metrics.csv": put("metrics.csv"),
        "a folder for metrics.csv": put("metrics.csv", folder=True),
        "no environment.json": put("environment.json"),
    },
    "reproduce": LINES
    | {
        "a foreign store": whole(lambda data: b'{"name": "somebody else"}\n'),
        "an epoch whose spec is a list": edit("epoch", spec=["sgd"]),
        "an epoch without its spec": edit("epoch", spec=GONE),
        "an epoch of an unknown optimizer": edit("epoch", spec="rocket"),
        "an epoch whose loss is text": edit("epoch", train_loss="small"),
        "an epoch without status": edit("epoch", status=GONE),
        "a scale that is a list": edit("scale", scale=[1]),
        "a scale that is missing": edit("scale", scale=GONE),
        "an environment that is null": edit("environment", environment=None),
        "no runs": lambda folder: shutil.rmtree(folder / "work" / "runs"),
        "half a checkpoint": cut("checkpoint.safetensors", 0.5),
    },
}
