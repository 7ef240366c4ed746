"""How many functions and files of the package one call walks through, by sys.setprofile.

    python -m benchmarks.walk [problem estimate solve compare train] [--files]

A walk is one call of a public name on a chain of three layers: `Problem(…)`, `estimate("pch-1")`,
`solve("ea-cg")`, `curvlab compare` with one pair and `curvlab train` of one epoch, each in a process of its
own. It is made once before it is counted, with a problem of its own, so that imports are not counted.
Counted are the functions and the files of the package that were entered, the calls from one file into
another, each as often as it happens, and the deepest nesting; a call that passes through torch belongs to the
nearest caller in the package. Only public names are used, so that the same script measures any commit:

    PYTHONPATH=<a checkout> python benchmarks/walk.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

import curvlab
from curvlab.cli import main as curvlab_command

PACKAGE = str(Path(curvlab.__file__).parent)
WIDTHS = (16, 12, 8, 4)
EXAMPLES = 32


@dataclass
class Walk:
    """What was entered while profiling was on."""

    functions: set[CodeType] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    crossings: int = 0
    depth: int = 0

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """What sys.setprofile calls: count the functions of the package that are entered."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        self.functions.add(code)
        self.files.add(code.co_filename)
        callers = _callers(frame)
        self.depth = max(self.depth, len(callers) + 1)
        if callers and callers[0] != code.co_filename:
            self.crossings += 1


def _callers(frame: FrameType) -> list[str]:
    """The files of the package's frames below `frame`, the nearest first."""
    found = []
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename.startswith(PACKAGE):
            found.append(caller.f_code.co_filename)
        caller = caller.f_back
    return found


def walk(make_call: Callable[[], Callable[[], object]]) -> Walk:
    """Make the call once, then anew, and count what that enters, in threads that it starts too."""
    make_call()()
    call = make_call()
    seen = Walk()
    threading.setprofile(seen.profile)
    sys.setprofile(seen.profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def _problem() -> Callable[[], curvlab.Problem]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    model = nn.Sequential(*layers[:-1])
    batch = (torch.randn(EXAMPLES, WIDTHS[0]), torch.arange(EXAMPLES) % WIDTHS[-1])
    return lambda: curvlab.Problem(model, "cross-entropy", *batch)


def _estimate() -> Callable[[], object]:
    problem = _problem()()
    return lambda: curvlab.estimate("pch-1", problem)


def _solve() -> Callable[[], object]:
    problem = _problem()()
    curvature, gradient = curvlab.estimate("pch-1", problem), problem.gradient()
    return lambda: curvlab.solve("ea-cg", curvature, gradient, alpha=0.05)


def _compare() -> Callable[[], object]:
    return _command("compare", "-p", "pch-1", "-s", "ea-cg", "--arch", "64-16-12-10", "-r", "1")


def _train() -> Callable[[], object]:
    return _command("train", "--arch", "64-16-12-10", "--epochs", "1")


def _command(*words: str) -> Callable[[], object]:
    """The console script `curvlab` with these words."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            words_and_folder = [*words, "--quiet", "--output", str(Path(folder) / "run")]
            curvlab_command(words_and_folder, standalone_mode=False)

    return run


WALKS: dict[str, Callable[[], Callable[[], object]]] = {
    "problem": _problem,
    "estimate": _estimate,
    "solve": _solve,
    "compare": _compare,
    "train": _train,
}


def _line(name: str, seen: Walk, files: bool) -> str:
    line = f"{name:10} {len(seen.functions):9,} {len(seen.files):6} {seen.crossings:18,} {seen.depth:6}"
    names = sorted(str(Path(file).relative_to(PACKAGE)) for file in seen.files)
    return "\n    ".join([line, *names]) if files else line


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per walk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)}; all by default")
    parser.add_argument("--files", action="store_true", help="list the files that each walk enters")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.walks if name not in WALKS]
    if unknown:
        parser.error(f"unknown walk {', '.join(unknown)}: expected some of {', '.join(WALKS)}")
    if chosen.here:
        print(*(_line(name, walk(WALKS[name]), chosen.files) for name in chosen.walks), sep="\n")
        return
    print(f"{'walk':10} {'functions':>9} {'files':>6} {'file-to-file calls':>18} {'depth':>6}", flush=True)
    for name in chosen.walks or WALKS:
        # A process of its own: what an earlier walk has imported or cached would not be entered again.
        options = ["--here", *(["--files"] if chosen.files else [])]
        subprocess.run([sys.executable, __file__, name, *options], check=True)


if __name__ == "__main__":
    main()
