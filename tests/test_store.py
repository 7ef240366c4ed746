"""The store keeps every finished row whatever happens to the processes that write it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from curvlab.cli import main
from curvlab.exceptions import ResultsFolderError, StoreError
from curvlab.files import replaced, write_text_atomic
from curvlab.studies.store import Store, key_of, merge

# Forked, not spawned: a child starts in milliseconds, so a kill can fall on any moment of its work.
fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this platform cannot fork a process"
)


def start(function: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def write_rows(folder: Path, name: str, rows: int, report: int) -> None:
    """Append rows, and tell the descriptor `report` of each one after it was stored."""
    store = Store(folder)
    for i in range(rows):
        store.append({"key": f"{name}-{i}", "padding": "x" * 3000})
        os.write(report, f"{name}-{i}\n".encode())


def fill_disk(folder: Path, report: int) -> None:
    import resource

    store = Store(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for i in range(10):
        try:
            store.append({"key": str(i), "padding": "x" * 3000})
        except StoreError as error:
            os.write(report, f"{i} {error}".encode())
            return


def read_all(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_rows_come_back_in_order_and_survive_reopening(tmp_path):
    store = Store(tmp_path)
    for i in range(3):
        store.append({"key": f"k{i}", "kind": "cost" if i else "error", "value": i})
    again = Store(tmp_path)
    assert [row["value"] for row in again.rows()] == [0, 1, 2]
    assert [row["key"] for row in again.rows(kind="cost")] == ["k1", "k2"]
    assert again.keys() == {"k0", "k1", "k2"}
    assert again.has("k1")
    assert not again.has("k9")
    assert again.frame()["value"].tolist() == [0, 1, 2]
    assert len(again) == 3


def test_a_row_written_by_another_store_object_is_seen(tmp_path):
    one, two = Store(tmp_path), Store(tmp_path)
    one.append({"key": "a"})
    assert two.has("a")


def test_a_returned_row_is_a_copy(tmp_path):
    store = Store(tmp_path)
    store.append({"key": "a", "value": 1})
    store.rows()[0]["value"] = 2
    assert store.rows()[0]["value"] == 1


def test_scalars_become_numbers_and_non_finite_ones_null(tmp_path):
    store = Store(tmp_path)
    store.append(
        {
            "key": "a",
            "numpy": np.float64(0.1),
            "integer": np.int64(3),
            "torch": torch.tensor(2.5, dtype=torch.float64),
            "array": np.array([1.0, np.nan]),
            "nan": float("nan"),
            "infinite": -float("inf"),
            "tuple": (1, 2),
            "flag": np.bool_(True),
        }
    )
    (row,) = store.rows()
    assert row == {
        "key": "a",
        "numpy": 0.1,
        "integer": 3,
        "torch": 2.5,
        "array": [1.0, None],
        "nan": None,
        "infinite": None,
        "tuple": [1, 2],
        "flag": True,
    }


@pytest.mark.parametrize("row", [{}, {"key": 3}, {"key": "a", "x": object()}])
def test_a_row_without_key_or_with_an_object_is_refused_and_nothing_written(tmp_path, row):
    store = Store(tmp_path)
    with pytest.raises(StoreError):
        store.append(row)
    assert store.path.read_bytes() == b""


def test_key_is_the_documented_hash_of_canonical_json():
    expected = hashlib.sha256(b'{"a":[1,0.1],"b":"x"}').hexdigest()[:16]
    assert key_of({"b": "x", "a": (1, 0.1)}) == expected
    assert key_of({"a": np.float64(0.5)}) == key_of({"a": 0.5})
    assert key_of({"a": float("nan")}) == key_of({"a": float("nan")})
    assert key_of({"a": float("nan")}) != key_of({"a": None})
    assert key_of({"a": 1}) != key_of({"a": 1.0})
    with pytest.raises(StoreError, match="object"):
        key_of({"a": object()})


def test_a_torn_last_line_is_set_aside_and_the_rest_used(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"key": "a"}\n{"key": "b", "val')
    with pytest.warns(UserWarning, match="line 2"):
        store = Store(tmp_path)
    assert store.keys() == {"a"}
    store.append({"key": "c"})
    assert lines(store.path) == ['{"key": "a"}', '{"key": "c"}']
    assert json.loads(store.rejected_path.read_text())["text"] == '{"key": "b", "val'


@pytest.mark.parametrize(
    "bad", ["garbage", '{"no": "key"}', "[1]", "", '{"key": "b", "x": NaN}', '{"key": 1}', "[" * 100_000]
)
def test_a_corrupt_line_in_the_middle_is_reported_with_its_number(tmp_path, bad):
    (tmp_path / "results.jsonl").write_text('{"key": "a"}\n' + bad + '\n{"key": "c"}\n')
    with pytest.warns(UserWarning, match="line 2"):
        store = Store(tmp_path)
    assert [row["key"] for row in store.rows()] == ["a", "c"]
    assert [(bad.line, bad.text) for bad in store.bad_lines] == [(2, bad)]
    rejected = json.loads(store.rejected_path.read_text())
    assert rejected["line"] == 2
    assert rejected["text"] == bad
    assert not Store(tmp_path).bad_lines


def test_bytes_that_are_no_text_are_set_aside(tmp_path):
    (tmp_path / "results.jsonl").write_bytes(b'{"key": "a"}\n\xff\xfe\x00\r\n{"key": "c"}\n')
    with pytest.warns(UserWarning, match="line 2"):
        assert Store(tmp_path).keys() == {"a", "c"}


def test_a_line_torn_while_the_store_is_open_is_set_aside_by_the_next_append(tmp_path):
    store = Store(tmp_path)
    store.append({"key": "a"})
    with store.path.open("a") as file:
        file.write('{"key": "torn')
    with pytest.warns(UserWarning, match="line 2"):
        store.append({"key": "b"})
    assert lines(store.path) == ['{"key": "a"}', '{"key": "b"}']


def test_read_only_reports_but_changes_nothing(tmp_path):
    text = '{"key": "a"}\nbad\n'
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.warns(UserWarning, match="line 2"):
        store = Store(tmp_path, read_only=True)
    assert store.keys() == {"a"}
    assert [p.line for p in store.bad_lines] == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]
    assert store.path.read_text() == text
    with pytest.raises(StoreError, match="read only"):
        store.append({"key": "b"})


def test_reading_a_folder_without_results_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StoreError, match=r"results\.jsonl"):
        Store(tmp_path / "none", read_only=True)


@fork
@pytest.mark.filterwarnings("ignore:.*torn:UserWarning")
def test_killed_writers_lose_at_most_the_row_under_way(tmp_path):
    generator = random.Random(0)
    promised: list[str] = []
    kills = 12
    for attempt in range(kills):
        reader, report = os.pipe()
        process = start(write_rows, tmp_path, f"w{attempt}", 100_000, report)
        os.close(report)
        time.sleep(generator.uniform(0.01, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        promised += read_all(reader).splitlines()
    keys = [row["key"] for row in Store(tmp_path).rows()]
    assert len(promised) > kills, "the writers were killed before they wrote: the test shows nothing"
    assert len(keys) == len(set(keys))
    assert set(promised) <= set(keys)
    # Stored but not yet told: at most one row a kill.
    assert len(keys) <= len(promised) + kills


@fork
def test_concurrent_writers_lose_and_tear_nothing(tmp_path):
    reader, report = os.pipe()
    processes = [start(write_rows, tmp_path, f"w{i}", 60, report) for i in range(3)]
    os.close(report)
    assert len(read_all(reader).splitlines()) == 180
    for process in processes:
        process.join()
        assert process.exitcode == 0
    keys = [row["key"] for row in Store(tmp_path).rows()]
    for w in range(3):
        assert [key for key in keys if key.startswith(f"w{w}-")] == [f"w{w}-{i}" for i in range(60)]
    assert len(keys) == 180
    assert not (tmp_path / "results.rejected.jsonl").exists()


@fork
def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_whole_rows(tmp_path):
    reader, report = os.pipe()
    process = start(fill_disk, tmp_path, report)
    os.close(report)
    message = read_all(reader)
    process.join()
    assert "results.jsonl" in message
    stored = [json.loads(line)["key"] for line in lines(tmp_path / "results.jsonl")]
    assert stored == [str(i) for i in range(int(message.split()[0]))]
    assert stored
    assert (tmp_path / "results.jsonl").read_bytes().endswith(b"\n")


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        Store(tmp_path / "file" / "results")
    with pytest.raises(StoreError, match="file"):
        write_text_atomic(tmp_path / "file" / "report.md", "text")


FOREIGN = [
    b"epoch,loss\n1,0.5\n",
    b'{"name": "somebody else\'s", "value": 1}\n{"name": "too"}\n',
    b'{\n  "pretty": "printed"\n}\n',
    b'{"one": "document without an end of line"}',
    b"\xff\xfe\x00 binary",
    b"\n",
]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("data", FOREIGN)
def test_results_that_something_else_wrote_are_refused_and_left_as_they_are(tmp_path, data, fresh):
    path = tmp_path / "results.jsonl"
    path.write_bytes(data)
    with pytest.raises(ResultsFolderError, match=r"results\.jsonl was not written by curvlab.*-o DIR"):
        Store(tmp_path, fresh=fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]
    assert path.read_bytes() == data


@pytest.mark.parametrize("command", ["compare", "train", "merge"])
def test_a_command_on_a_folder_with_results_of_something_else_is_a_usage_error(tmp_path, command):
    Store(tmp_path / "other").append({"key": "a"})
    path = tmp_path / "run" / "results.jsonl"
    path.parent.mkdir()
    path.write_bytes(FOREIGN[0])
    words = [str(tmp_path / "other")] if command == "merge" else ["--batch", "10"]
    for option in [[]] if command == "merge" else [[], ["--fresh"]]:
        found = CliRunner().invoke(main, [command, *words, *option, "-o", str(path.parent)])
        assert found.exit_code == 2
        assert "was not written by curvlab" in found.stderr
        assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == ["results.jsonl"]
        assert path.read_bytes() == FOREIGN[0]


def test_a_first_row_that_was_torn_is_set_aside_like_any_other(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"key": "a", "val')
    with pytest.warns(UserWarning, match="line 1"):
        store = Store(tmp_path)
    assert store.rows() == []
    assert json.loads(store.rejected_path.read_text())["text"] == '{"key": "a", "val'


def test_merge_joins_stores_without_doubles_and_reports_conflicts(tmp_path):
    one, two = Store(tmp_path / "one"), Store(tmp_path / "two")
    one.append({"key": "a", "repetition": 0, "value": 1})
    one.append({"key": "a", "repetition": 1, "value": 2})
    two.append({"key": "a", "repetition": 0, "value": 1})
    two.append({"key": "a", "repetition": 1, "value": 3})
    two.append({"key": "b", "repetition": 0, "value": 4})
    merged = merge([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert (merged.added, merged.doubles) == (3, 1)
    assert [(c.kept["value"], c.dropped["value"]) for c in merged.conflicts] == [(2, 3)]
    assert [row["value"] for row in Store(tmp_path / "all").rows()] == [1, 2, 4]
    again = merge([tmp_path / "two"], tmp_path / "all")
    assert (again.added, again.doubles, len(again.conflicts)) == (0, 2, 1)


def test_atomic_write_replaces_whole_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "deep" / "report.md"
    write_text_atomic(path, "old")
    write_text_atomic(path, "new – with a dash")
    assert path.read_text(encoding="utf-8") == "new – with a dash"
    assert [p.name for p in path.parent.iterdir()] == ["report.md"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError, ValueError])
def test_whatever_ends_a_replacement_early_leaves_the_old_file_and_no_temporary_one(tmp_path, end):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with replaced(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise end

    with pytest.raises(StoreError if end is OSError else end):
        write()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["weights.bin"]
