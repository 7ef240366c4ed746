"""Archives, images, data files, curvatures and learning states made to do harm: refused, within bounds."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import curvlab
from curvlab.data import dataset
from curvlab.data.download import unpack
from curvlab.exceptions import CurvlabError
from tests.adversarial.outcomes import HangError, Judge, time_limit

SUITE = "hostile files"
MEGABYTES = 100
Attack = Callable[[Path], object]


class Payload:
    """Whoever unpickles it makes a folder that the test would find."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


# Archives: two files are expected, of 1 kB each.


def archive(
    *members: tarfile.TarInfo | tuple[str, bytes], mode: str = "w:gz", cut: int | None = None
) -> Attack:
    def attack(folder: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
            for member in members:
                if isinstance(member, tarfile.TarInfo):
                    tar.addfile(member, io.BytesIO(b"x" * min(member.size, 1000)) if member.isreg() else None)
                else:
                    info = tarfile.TarInfo(member[0])
                    info.size = len(member[1])
                    tar.addfile(info, io.BytesIO(member[1]))
        (folder / "archive").write_bytes(buffer.getvalue()[:cut])
        unpack(folder / "archive", folder / "data", ("a.bin", "b.bin"), limit=10_000)

    return attack


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def bomb(name: str) -> Attack:
    """A member of 2 GB of zeros, which gzip makes small."""

    def attack(folder: Path) -> None:
        info = tarfile.TarInfo(name)
        info.size = 2 << 30
        packer = zlib.compressobj(9, wbits=31)
        with (folder / "archive").open("wb") as file:
            file.write(packer.compress(info.tobuf()))
            for _ in range(64):
                file.write(packer.compress(b"\x00" * (1 << 20)))
            file.write(packer.flush())
        unpack(folder / "archive", folder / "data", ("a.bin", "b.bin"), limit=10_000)

    return attack


GOOD = (("data/a.bin", b"a" * 1000), ("data/b.bin", b"b" * 1000))
ARCHIVES: dict[str, Attack] = {
    "a member with an absolute path": archive(*GOOD, ("/tmp/curvlab-was-here", b"x")),
    "a member above the folder": archive(*GOOD, ("data/../../above", b"x")),
    "a link out of the folder": archive(special("data/a.bin", tarfile.SYMTYPE, "/etc/passwd"), GOOD[1]),
    "a hard link out of the folder": archive(special("data/a.bin", tarfile.LNKTYPE, "/etc/passwd"), GOOD[1]),
    "a link, then a file through it": archive(
        special("data", tarfile.SYMTYPE, "/tmp"), ("data/a.bin", b"x"), GOOD[1]
    ),
    "a device": archive(special("data/a.bin", tarfile.CHRTYPE), GOOD[1]),
    "a pipe": archive(special("data/a.bin", tarfile.FIFOTYPE), GOOD[1]),
    "a folder in place of a file": archive(special("data/a.bin", tarfile.DIRTYPE), GOOD[1]),
    "a file that is missing": archive(GOOD[0]),
    "an archive cut off": archive(*GOOD, cut=60),
    "an empty archive": archive(),
    "no archive at all": archive(cut=0),
    "a bomb under an expected name": bomb("data/a.bin"),
    "a bomb under another name": bomb("data/readme"),
    "many small members": archive(*GOOD, *((f"data/{number}", b"x" * 100) for number in range(200))),
}

# Images: a folder of two classes, one of whose images is the attacker's.


def images(content: bytes | Callable[[Path], object]) -> Attack:
    def attack(folder: Path) -> None:
        for label in ("cat", "dog"):
            (folder / label).mkdir()
            for index in range(3):
                Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / label / f"{index}.png")
        hostile = folder / "cat" / "0.png"
        hostile.unlink()
        if callable(content):
            content(hostile)
        else:
            hostile.write_bytes(content)
        dataset("image-folder[size=8]").load(data_dir=folder).train.all()

    return attack


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


PIXELS = chunk(b"IDAT", zlib.compress(b"\x00" * 1000))
IMAGES: dict[str, Attack] = {
    "an image of 10 gigapixels": images(png(100_000, 100_000, PIXELS)),
    "an image without pixels": images(png(8, 8)),
    "an image of width 0": images(png(0, 8, PIXELS)),
    "an image cut off": images(png(8, 8, PIXELS)[:40]),
    "an image of garbage": images(os.urandom(2048)),
    "an empty image": images(b""),
    "a text that is called an image": images(b"<svg onload='alert(1)'/>"),
    "a comment that unpacks to 2 GB": images(
        png(8, 8, chunk(b"zTXt", b"a\x00\x00" + zlib.compress(b"\x00" * (64 << 20))), PIXELS)
    ),
    "a pickle that is called an image": images(pickle.dumps(Payload())),
    "a link to an endless device": images(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": images(lambda path: path.symlink_to("nowhere.png")),
    "a pipe that is called an image": images(os.mkfifo),
    "a folder that is called an image": images(Path.mkdir),
}

# Curvatures: safetensors files that are not what `save` writes.


def curvature(
    header: Any = None, content: bytes | None = None, change: Callable[[dict[str, Any]], object] | None = None
) -> Attack:
    def attack(folder: Path) -> None:
        path = folder / "curvature.safetensors"
        if content is not None:
            path.write_bytes(content)
        elif change is not None:
            model = torch.nn.Sequential(torch.nn.Linear(3, 2))
            problem = curvlab.Problem(model, "cross-entropy", torch.eye(3), torch.tensor([0, 1, 0]))
            curvlab.estimate("fisher", problem).save(path)
            data = path.read_bytes()
            (size,) = struct.unpack("<Q", data[:8])
            outer = json.loads(data[8 : 8 + size])
            inner = json.loads(outer["__metadata__"]["curvlab"])
            change(inner)
            outer["__metadata__"]["curvlab"] = json.dumps(inner)
            text = json.dumps(outer).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        elif header is not None:
            text = header if isinstance(header, str) else json.dumps(header)
            save_file({"0": torch.ones(2)}, path, metadata={"curvlab": text})
        curvlab.Curvature.load(path)

    return attack


CURVATURES: dict[str, Attack] = {
    "a curvature that is not there": curvature(),
    "a pickle for a curvature": curvature(content=pickle.dumps(Payload())),
    "an empty curvature": curvature(content=b""),
    "a curvature that claims 2^60 bytes": curvature(content=struct.pack("<Q", 2**60) + b"{}"),
    "a curvature of garbage": curvature(content=os.urandom(4096)),
    "a curvature without header": curvature({}),
    "a curvature whose header is a list": curvature([]),
    "a curvature whose header is a number": curvature("3"),
    "a curvature whose header is no JSON": curvature("{"),
    "a curvature nested without end": curvature("[" * 100_000),
    "a curvature without layers": curvature(change=lambda header: header.pop("layers")),
    "a curvature whose layers are text": curvature(change=lambda header: header.update(layers="all")),
    "a curvature with a layer too many": curvature(
        change=lambda header: header["layers"].append(dict(header["layers"][0]))
    ),
    "a curvature whose layer is a number": curvature(change=lambda header: header.update(layers=[3])),
    "a curvature of another format": curvature(change=lambda header: header.update(format="curvlab-99")),
}

ATTACKS = ARCHIVES | IMAGES | CURVATURES
# What harms nobody is read as if it were not there.
HARMLESS = {
    "a member with an absolute path",
    "a link to an endless device",
    "a link to nothing",
    "a pipe that is called an image",
    "a folder that is called an image",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_file_is_refused_within_bounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Judge
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    monkeypatch.chdir(folder)
    outcome, why = "silent", "accepted"
    tracemalloc.start()
    try:
        with time_limit():
            ATTACKS[name](folder)
        outcome = "held" if name in HARMLESS else "silent"
    except HangError as error:
        outcome, why = "hang", str(error)
    except CurvlabError as error:
        named = str(folder) in str(error)
        outcome, why = ("refused", "") if named else ("silent", f"does not name the file: {error}")
    except Exception as error:
        outcome, why = "traceback", f"{type(error).__name__}: {error}"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    written = sorted(path.name for path in tmp_path.iterdir() if path != folder)
    outside = [str(path) for path in (Path("/tmp/curvlab-was-here"), folder / "unpickled") if path.exists()]
    if written or outside:
        outcome, why = "silent", f"{written + outside} came out of it"
    elif peak > MEGABYTES << 20:
        outcome, why = "hang", f"{peak >> 20} MB were taken"
    judge(SUITE, outcome, why)
