"""A user's own model, data and criterion by address: what of the working folder is imported."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from curvlab import imports
from curvlab.exceptions import SpecError
from curvlab.studies.setup import Setup

ROOT = Path(__file__).parent.parent
TRAP = "import pathlib\npathlib.Path('TRAP').touch()\nraise RuntimeError('the working folder was let in')\n"
STUDY = """
import torch
from torch.nn import Linear, Sequential, Tanh

def build():
    import widths_of_mine
    return Sequential(Linear(4, widths_of_mine.HIDDEN), Tanh(), Linear(widths_of_mine.HIDDEN, 2))

def batches():
    return torch.ones(6, 4).cumsum(0), torch.tensor([0, 1, 0, 1, 0, 1])

criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
"""
OWN = ["--model", "study_of_mine:build", "--data", "study_of_mine:batches",
       "--criterion", "study_of_mine:criterion"]  # fmt: skip
COMPARE = [
    "compare",
    *OWN,
    "--at",
    "init",
    "--batches",
    "1",
    "-p",
    "fisher",
    "-s",
    "kfi",
    "-r",
    "1",
    "-o",
    "out",
]

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules into the working folder; what a test has imported from it is forgotten afterwards."""
    modules, finders, path = dict(sys.modules), [*sys.meta_path], [*sys.path]
    monkeypatch.chdir(tmp_path)

    def files(**contents: str) -> None:
        for name, content in contents.items():
            place = tmp_path / (name.replace("__in__", "/") + ".py")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)

    yield files
    assert sys.path == path
    sys.meta_path[:] = finders
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pip installs as `curvlab`: a script in a folder of its own."""
    path = tmp_path_factory.mktemp("bin") / "curvlab"
    path.write_text("from curvlab.cli import main\nif __name__ == '__main__':\n    main()\n")
    return [str(path)]


def curvlab_in(folder: Path, start: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, *start, *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "as_module",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["curvlab", "python -m curvlab"],
)
def test_a_file_named_like_a_package_of_the_report_is_not_imported(as_module, script, write, tmp_path):
    write(study_of_mine=STUDY, widths_of_mine="HIDDEN = 3\n")
    write(matplotlib=TRAP, seaborn=TRAP, jinja2=TRAP)
    found = curvlab_in(tmp_path, ["-m", "curvlab"] if as_module else script, *COMPARE)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "TRAP").exists()


def test_a_file_named_like_a_package_that_others_look_for_in_vain_is_not_imported(write, tmp_path):
    """Packages try to import optional ones: that is no import by the user's code."""
    missing = [n for n in ("numexpr", "bottleneck", "cupy", "xarray") if importlib.util.find_spec(n) is None]
    assert missing
    probe = (
        "def probe(name):\n    try:\n        __import__(name)\n    except ImportError:\n        return True\n"
    )
    write(study_of_mine=STUDY, widths_of_mine="HIDDEN = 3\n", **dict.fromkeys(missing, TRAP))
    imports.load("study_of_mine:build", "model")()
    library: dict[str, object] = {"__name__": "a_library.inside"}
    exec(probe, library)
    assert all(library["probe"](name) for name in missing)
    assert not (tmp_path / "TRAP").exists()


@pytest.mark.long
def test_worker_processes_load_the_address_and_nothing_else_of_the_folder(script, write, tmp_path):
    write(study_of_mine=STUDY, widths_of_mine="HIDDEN = 3\n")
    write(matplotlib=TRAP, socket=TRAP, selectors=TRAP, tempfile=TRAP)
    found = curvlab_in(tmp_path, script, *COMPARE, "--executor", "process[workers=2]", "--json")
    assert found.returncode == 0, found.stderr
    assert [cell["status"] for cell in json.loads(found.stdout)["cells"]] == ["ok"]
    assert not (tmp_path / "TRAP").exists()


def test_sys_path_is_as_it_was_also_when_the_import_fails(write):
    before = [*sys.path]
    write(broken_of_mine="import helper_of_mine\nraise KeyError('width')\n", helper_of_mine="")
    with pytest.raises(SpecError, match="importing broken_of_mine failed \\(KeyError: 'width'\\)"):
        imports.load("broken_of_mine:build", "model")
    assert sys.path == before
    assert "broken_of_mine" not in sys.modules
    write(broken_of_mine="import helper_of_mine\ndef build():\n    return 1\n\n\n")
    importlib.invalidate_caches()
    assert imports.load("broken_of_mine:build", "model")() == 1
    assert sys.path == before


def test_siblings_are_imported_at_the_top_and_later_inside_functions(write):
    write(
        top_of_mine="import first_of_mine\nfrom pack_of_mine.inner import DEPTH\n"
        "def build():\n    import second_of_mine\n"
        "    return first_of_mine.WIDTH, DEPTH, second_of_mine.late()\n",
        first_of_mine="WIDTH = 7\n",
        second_of_mine="def late():\n    import importlib\n"
        "    return importlib.import_module('third_of_mine').X\n",
        third_of_mine="X = 5\n",
        pack_of_mine__in____init__="",
        pack_of_mine__in__inner="from . import depths\nDEPTH = depths.DEPTH\n",
        pack_of_mine__in__depths="DEPTH = 3\n",
    )
    assert imports.load("top_of_mine:build", "model")() == (7, 3, 5)


def test_siblings_are_not_importable_for_anybody_else(write):
    write(top_of_mine="import first_of_mine\n", first_of_mine="", other_of_mine="")
    imports.load("top_of_mine:first_of_mine", "model")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("other_of_mine")


def test_packages_and_plain_folders_of_modules_are_found(write):
    write(
        nets_of_mine__in____init__="",
        nets_of_mine__in__small="from nets_of_mine.widths import W\nfrom .widths import W as V\n",
        nets_of_mine__in__widths="W = 3\n",
        plain_of_mine__in__small="from plain_of_mine import widths\n",
        plain_of_mine__in__widths="W = 4\n",
    )
    assert imports.load("nets_of_mine.small:W", "model") == 3
    assert imports.load("nets_of_mine.small:V", "model") == 3
    assert imports.load("plain_of_mine.small:widths.W", "model") == 4


@pytest.mark.parametrize("name", ["colorsys", "matplotlib", "torch", "jinja2"])
def test_a_module_named_like_an_installed_one_is_the_users_at_its_address_only(name, write):
    installed = importlib.import_module(name)
    write(
        **{name: f"import {name} as other\nimport mate_of_mine\nMINE = mate_of_mine.X\n"}, mate_of_mine="X=1"
    )
    assert imports.load(f"{name}:MINE", "model") == 1
    assert imports.load(f"{name}:other", "model") is installed
    assert sys.modules[name] is installed
    assert importlib.import_module(name) is installed


def test_a_package_named_like_an_installed_one_has_its_own_submodules(write):
    write(json__in____init__="from .parts import X\n", json__in__parts="X = 9\n")
    assert imports.load("json:X", "data") == 9
    assert imports.load("json.parts:X", "data") == 9
    assert json.loads("1") == 1
    with pytest.raises(SpecError, match=r"importing json\.decoder failed"):
        imports.load("json.decoder:JSONDecoder", "data")


def test_a_plain_folder_hides_no_installed_package(write, tmp_path):
    (tmp_path / "collections").mkdir()
    assert imports.load("collections.abc:Iterator", "data") is Iterator


def test_each_working_folder_has_its_own_module_of_one_name(write, tmp_path, monkeypatch):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same_of_mine.py").write_text(f"X = {number}\n")
    found = []
    for number in (1, 2, 1):
        monkeypatch.chdir(tmp_path / str(number))
        found.append(imports.load("same_of_mine:X", "data"))
    assert found == [1, 2, 1]
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["kinds_of_mine", "colorsys"])
def test_objects_of_the_users_classes_are_pickled(name, write):
    write(**{name: "class Net:\n    def __init__(self):\n        self.width = 3\n"})
    net = imports.load(f"{name}:Net", "model")()
    assert pickle.loads(pickle.dumps(net)).width == 3


def test_an_installed_module_is_loaded_as_ever(write):
    assert imports.load("torch.nn:Linear", "model") is torch.nn.Linear
    with pytest.raises(SpecError, match="nowhere_at_all failed \\(ModuleNotFoundError"):
        imports.load("nowhere_at_all:x", "model")


def test_a_setup_builds_what_the_addresses_say(write):
    write(study_of_mine=STUDY, widths_of_mine="HIDDEN = 5\n")
    setup = Setup(model="study_of_mine:build", data="study_of_mine:batches", dtype="float64")
    assert setup.build_model()[0].out_features == 5
