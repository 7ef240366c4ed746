"""Configuration files: what is written is read back, and so is what earlier versions wrote."""

from __future__ import annotations

import tomllib

import pytest

from curvlab.exceptions import SpecError
from curvlab.files import read_settings, read_toml, toml_text
from curvlab.studies.setup import Setup
from curvlab.studies.train.run import TrainPlan, train


@pytest.mark.parametrize(
    "value",
    [0.1, 1e-300, 5e22, 3, -1, True, "", 'a"b\\c\n\t\x00\x7f é', ["a,b", "c]"], [], [0.1, 2.0], 1e-10],
)
def test_values_come_back_as_they_were(value, tmp_path):
    (tmp_path / "c.toml").write_text(toml_text({"x": value, "y": {"x": value}}, "two\nlines"))
    found = read_toml(tmp_path / "c.toml")
    assert found == {"x": value, "y": {"x": value}}
    assert type(found["x"]) is type(value)


def test_a_flat_configuration_of_an_earlier_version_is_read(tmp_path):
    (tmp_path / "config.toml").write_text(
        "# The resolved configuration; run it again with: curvlab compare --config config.toml -o FOLDER\n"
        'providers = ["pch-1", "fisher[kind=mc]"]\nalpha = 0.05\nthreads = 1\narch = "64-32-10"\n'
    )
    known = ("providers", "alpha", "threads", "arch")
    found = read_settings(tmp_path / "config.toml", known)
    assert found["providers"] == ["pch-1", "fisher[kind=mc]"]
    assert (found["alpha"], found["threads"], found["arch"]) == (0.05, 1, "64-32-10")
    with pytest.raises(SpecError, match="alpha"):
        read_settings(tmp_path / "config.toml", ("providers", "threads", "arch"))


def test_a_training_run_of_an_earlier_version_is_resumed(tmp_path):
    plan = TrainPlan(Setup(data="digits[train=50,test=20]", batch=10, device="cpu"), "sgd", epochs=1)
    train(plan, tmp_path)
    fields = tomllib.loads((tmp_path / "config.toml").read_text())
    setup = fields.pop("setup")
    quoted = {True: "true", False: "false"}

    def lines(table: dict[str, object]) -> str:
        texts = {k: f'"{v}"' if isinstance(v, str) else quoted.get(v, v) for k, v in table.items()}
        return "".join(f"{key} = {text}\n" for key, text in texts.items())

    (tmp_path / "config.toml").write_text(f"{lines(fields)}\n[setup]\n{lines(setup)}")
    assert len(train(plan, tmp_path)) == 2
