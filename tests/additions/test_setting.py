"""A setting of `compare` is added from this file alone."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

import curvlab
from curvlab.cli import main
from curvlab.exceptions import ArgumentError, SpecError
from curvlab.studies.compare.settings import Settings
from curvlab.studies.schema import Setting, register_setting
from curvlab.studies.setup import Setup

TOP = Setting("top_share", float, 0.5, "Share of the spectrum to look at.", least=0)
TINY = Setup(arch="6-4-3", data="synthetic[features=6,classes=3,examples=50]", batch=20)

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.slow
def test_a_registered_setting_is_an_option_a_key_and_on_the_page(compare: Any, tmp_path: Any) -> None:
    register_setting(TOP)
    help_page = CliRunner().invoke(main, ["compare", "--help"]).output
    assert "--top-share X" in help_page
    assert "Share of the spectrum to look at." in help_page
    shown = compare("-p", "fisher", "-s", "kfi", "--top-share", "0.25")
    assert shown.config["top_share"] == 0.25
    assert shown.compared.config["top_share"] == 0.25
    assert "--top-share 0.25" in shown.compared.command
    assert "top_share" in shown.page
    assert "top\\_share" in shown.markdown


@pytest.mark.slow
def test_a_registered_setting_is_read_from_the_configuration_file_and_checked(
    compare: Any, tmp_path: Any
) -> None:
    register_setting(TOP)
    file = tmp_path / "mine.toml"
    file.write_text("top_share = 0.75\n")
    assert compare("-p", "fisher", "-s", "kfi", "--config", str(file)).config["top_share"] == 0.75
    file.write_text('top_share = "much"\n')
    refused = CliRunner().invoke(main, ["compare", "--config", str(file), "-o", str(tmp_path / "x")])
    assert refused.exit_code == 2
    assert "`top_share` is 'much'; expected a number" in refused.output


def test_a_registered_setting_is_a_keyword_argument_with_its_default_and_bound() -> None:
    register_setting(TOP)
    assert Settings.of(TINY).extra == {"top_share": 0.5}
    compared = curvlab.compare(TINY, ["fisher"], ["kfi"], repetitions=1, top_share=0.1)
    assert compared.config["top_share"] == 0.1
    with pytest.raises(SpecError, match="top_share=-1: use 0 or more"):
        Settings.of(TINY, top_share=-1)


def test_rows_depend_on_a_registered_setting() -> None:
    register_setting(TOP)
    assert Settings.of(TINY, top_share=0.1).study != Settings.of(TINY, top_share=0.2).study


def test_an_unknown_keyword_is_refused_with_the_nearest_setting() -> None:
    with pytest.raises(ArgumentError, match="Did you mean `repetitions`"):
        curvlab.compare(TINY, repetition=1)
    with pytest.raises(ArgumentError, match="`top_share` is not a setting"):
        curvlab.compare(TINY, top_share=0.1)
