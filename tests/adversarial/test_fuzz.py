"""Whatever a spec, a configuration or a store says: an answer, or an error of curvlab's own.

Each property runs for seconds in CI; `make test-long` repeats all of them for an hour of processor time, or
for as many seconds as CURVLAB_FUZZ_SECONDS says, and prints how many cases of each it has tried.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from curvlab import specs
from curvlab.architectures import architectures
from curvlab.cli.options import make_settings
from curvlab.criteria.registry import criteria
from curvlab.data import datasets
from curvlab.exceptions import CurvlabError, SpecError
from curvlab.providers.registry import providers
from curvlab.reproduce.grid_study import GridStudy
from curvlab.solvers.registry import solvers
from curvlab.studies.compare.run import compare, load_comparison
from curvlab.studies.compare.settings import all_settings
from curvlab.studies.executor import executors
from curvlab.studies.store import Store
from curvlab.studies.train.optimizers import optimizers
from curvlab.studies.train.plan import schedules
from tests.adversarial.outcomes import HangError, Judge, time_limit
from tests.adversarial.workshop import TINY
from tests.cases import ONE_SCENE

SUITE = "fuzzed properties"
REGISTRIES: list[Any] = [
    architectures,
    criteria,
    datasets,
    executors,
    optimizers,
    providers,
    schedules,
    solvers,
]

# Texts near the grammar: names and fields that exist, values that fit and values that do not.
VALUES = st.one_of(
    st.sampled_from(
        ["none", "true", "nan", "-inf", "1e400", "-0", "64-32-10", "(1,2)", '"', '""', "[", "pch-1"]
    ),
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(str),
    st.text(max_size=8),
)


@st.composite
def spec_texts(draw: st.DrawFn) -> tuple[Any, str]:
    """A registry, and a text that may be a spec of it."""
    registry = draw(st.sampled_from(REGISTRIES))
    names = sorted(registry.names())
    name = draw(st.one_of(st.sampled_from(names), st.text(max_size=6)))
    known = [field.name for row in registry.describe() if row.name == name for field in row.fields]
    keys = st.one_of(st.sampled_from(known), st.text(max_size=4)) if known else st.text(max_size=4)
    fields = draw(st.lists(st.tuples(keys, VALUES), max_size=3))
    text = f"{name}[{','.join(f'{key}={value}' for key, value in fields)}]" if fields else name
    return registry, draw(st.sampled_from([text, text[:-1], text + "]", f" {text} "]))


def reads_spec(case: tuple[Any, str]) -> None:
    """A spec is refused, or has one canonical text that reads back to itself."""
    registry, text = case
    try:
        canonical = registry.canonical(text)
    except SpecError:
        return
    assert registry.canonical(canonical) == canonical
    assert registry.canonical(registry.label(text)) == canonical


def parses(text: str) -> None:
    try:
        found = specs.parse(text)
    except SpecError:
        return
    assert specs.parse(str(found)) == found


TOML = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=10),
        st.dates(),
        VALUES,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=5,
)


def configs(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.one_of(st.sampled_from(names), st.text(max_size=8))
    return st.dictionaries(keys, TOML, max_size=4)


def reads_config(values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(tomli_w.dumps(values), encoding="utf-8", errors="surrogateescape")
        try:
            made = make_settings({"config": str(path), "data": "digits"})
        except CurvlabError:
            return
        assert made.study


def reads_study(values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.toml"
        path.write_text(tomli_w.dumps(values), encoding="utf-8", errors="surrogateescape")
        try:
            plans = GridStudy.read(path).plans(device="cpu")
        except CurvlabError:
            return
        assert all(plan.optimizer for plan in plans)


def reads_lines(lines: list[bytes]) -> None:
    """Every row that is whole is used, and every other line is kept aside or the file left alone."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        data = b"\n".join(lines)
        (folder / "results.jsonl").write_bytes(data)
        try:
            store = Store(folder)
        except CurvlabError:
            assert (folder / "results.jsonl").read_bytes() == data
            return
        kept = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
        assert len(kept) == len(store) == len(store.rows())
        store.append({"key": "new"})
        assert store.has("new")


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.floats(allow_nan=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@cache
def comparison_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    compare(TINY, ["fisher"], ["kfi", "cg"], **ONE_SCENE, repetitions=1, output=folder)
    return folder


def reads_edited_rows(case: tuple[int, list[int], Any]) -> None:
    """A comparison one of whose values, at any depth, is another: shown without that row, or refused."""
    number, path, value = case
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name) / "run"
        shutil.copytree(comparison_folder(), folder)
        rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        place: Any = rows[number % len(rows)]
        for step in path:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = keys[step % len(keys)]
            if not isinstance(place[key], dict | list) or not place[key] or step == path[-1]:
                place[key] = value
                break
            place = place[key]
        (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            found = load_comparison(folder)
        except CurvlabError:
            return
        assert set(found.cells["status"]) <= {"ok", "skipped", "failed"} | {str(value)}


STUDY_KEYS = ["data", "arch", "epochs", "pairs", "lr", "batch", "alpha", "tol", "max_iter", "seed"]
PROPERTIES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "specs of every registry": (spec_texts(), reads_spec),
    "texts as specs": (st.text(alphabet='abc[](),="- \\\n0', max_size=20), parses),
    "configurations": (configs([one.name for one in all_settings() if one.name != "data"]), reads_config),
    "study files": (configs(STUDY_KEYS), reads_study),
    "lines of a store": (
        st.lists(
            st.one_of(st.binary(max_size=12), JSON.map(lambda v: json.dumps({"key": "k", "v": v}).encode())),
            max_size=5,
        ),
        reads_lines,
    ),
    "edited rows": (
        st.tuples(st.integers(0, 50), st.lists(st.integers(0, 50), min_size=1, max_size=4), JSON),
        reads_edited_rows,
    ),
}


def check(name: str, **profile: Any) -> int:
    """Try a property on new cases; how many they were."""
    strategy, holds = PROPERTIES[name]
    quiet = {"suppress_health_check": list(HealthCheck), "deadline": None}
    tried = 0

    @settings(**quiet, **profile)
    @given(strategy)
    def test(case: Any) -> None:
        nonlocal tried
        tried += 1
        holds(case)

    test()
    return tried


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_of_what_is_read_holds(name: str, judge: Judge) -> None:
    try:
        with time_limit():
            check(name)
    except HangError as error:
        judge(SUITE, "hang", error)
    except Exception as error:
        judge(SUITE, "traceback", f"{type(error).__name__}: {error}")
        raise
    judge(SUITE, "held")


@pytest.mark.long
def test_the_properties_hold_for_an_hour(judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    deadline = time.process_time() + float(os.environ.get("CURVLAB_FUZZ_SECONDS", "3600"))
    tried: Counter[str] = Counter()
    for name in cycle(PROPERTIES):
        if time.process_time() > deadline:
            break
        tried[name] += check(name, max_examples=100, derandomize=False, database=None)
        with capsys.disabled():
            print(dict(tried), flush=True)
    judge(SUITE, "held")
