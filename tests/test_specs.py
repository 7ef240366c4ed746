"""Specs read and write as the grammar says; registries find, refuse and explain."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Optional

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from curvlab import specs
from curvlab.exceptions import USUAL_NAMES, CurvlabError, SpecError
from curvlab.specs import Registry, Spec


class Mode(StrEnum):
    FAST = "fast"
    SAFE = "very-safe"


@dataclass(frozen=True)
class PCH:
    """The stand-in provider of these tests.

    More lines that a listing leaves out.
    """

    gamma: float = 0.0
    output_gamma: float = -1.0

    def __post_init__(self) -> None:
        if self.gamma > 0:
            raise ValueError(f"gamma must not be positive; got {self.gamma}")


@dataclass(frozen=True)
class Everything:
    count: int = 1
    rate: float = 0.5
    flag: bool = False
    label: str = "plain"
    kind: Literal["empirical", "mc", "exact"] = "empirical"
    mode: Mode = Mode.FAST
    widths: tuple[int, ...] = (64, 32, 10)
    rates: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    limit: int | None = None
    title: Optional[str] = None  # noqa: UP045 (both spellings of a union must read)
    size: int | float = 1


@dataclass(frozen=True)
class Needy:
    path: str
    size: int = 3


@dataclass
class Thawed:
    size: int = 3


@dataclass(frozen=True)
class Opaque:
    function: object = None


everything = st.builds(
    Everything,
    count=st.integers(),
    rate=st.floats(allow_nan=False),
    flag=st.booleans(),
    label=st.text(),
    kind=st.sampled_from(["empirical", "mc", "exact"]),
    mode=st.sampled_from(Mode),
    widths=st.lists(st.integers()).map(tuple),
    rates=st.lists(st.floats(allow_nan=False)).map(tuple),
    words=st.lists(st.text()).map(tuple),
    limit=st.none() | st.integers(),
    title=st.none() | st.text() | st.sampled_from(["none", "None", '"', "a,b", "[", "x[y=1,z=2]"]),
    size=st.integers(-1000, 1000) | st.floats(allow_nan=False),
)


@pytest.fixture
def providers() -> Registry[PCH]:
    registry: Registry[PCH] = Registry("provider")
    registry.register("pch-1", PCH, "absolute values", gamma=-1.0)
    registry.register("pch", PCH)
    return registry


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("pch-1", Spec("pch-1")),
        ("  pch[]  ", Spec("pch")),
        ("pch[gamma=-1]", Spec("pch", {"gamma": "-1"})),
        ("ea-cg[ max_iter = 20 , tol=1e-10 ]", Spec("ea-cg", {"max_iter": "20", "tol": "1e-10"})),
        ("fcnn[widths=64-32-10,activation=tanh]", Spec("fcnn", {"widths": "64-32-10", "activation": "tanh"})),
        ("a[b=c[d=1,e=(2,3)],f=(4,5)]", Spec("a", {"b": "c[d=1,e=(2,3)]", "f": "(4,5)"})),
        ('a[path="x,y]",n=1]', Spec("a", {"path": '"x,y]"', "n": "1"})),
        ("a[query=b=c]", Spec("a", {"query": "b=c"})),
    ],
)
def test_parse_reads_the_grammar(text: str, spec: Spec) -> None:
    assert specs.parse(text) == spec
    assert specs.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not start with a name"),
        ("[gamma=1]", "does not start with a name"),
        ("two words", "does not start with a name"),
        ("pch[gamma=-1", "does not end with"),
        ("pch[gamma=-1]x", "does not end with"),
        ("pch[gamma=-1][b=2]", "closes a bracket"),
        ("pch[a=(1]", "opens a bracket `(`"),
        ("pch[a=(1]]", "closes a bracket `]`"),
        ('pch[a="x]', "opens a double quote"),
        ("pch[gamma]", "`gamma` in `pch[gamma]` is not of the form"),
        ("pch[=1]", "not of the form"),
        ("pch[a=1,,b=2]", "nothing between two commas"),
        ("pch[a=1,]", "a comma at its end"),
        ("pch[a=1,a=2]", "gives `a` twice"),
    ],
)
def test_parse_refuses_what_is_not_the_grammar_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        specs.parse(text)
    assert words in str(caught.value)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_split_leaves_brackets_and_quotes_whole() -> None:
    assert specs.split('pch-1, a[b="],",c=1] ,(1,2)') == ["pch-1", 'a[b="],",c=1]', "(1,2)"]
    assert specs.split("  ") == []


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "-7", -7),
        ("rate", "1e-10", 1e-10),
        ("rate", "3", 3.0),
        ("flag", "true", True),
        ("flag", "False", False),
        ("label", "a b", "a b"),
        ("label", '"a\\"b"', 'a"b'),
        ("kind", "mc", "mc"),
        ("mode", "very-safe", Mode.SAFE),
        ("widths", "64-32-10", (64, 32, 10)),
        ("widths", "(64, 32)", (64, 32)),
        ("widths", "5", (5,)),
        ("widths", "()", ()),
        ("rates", "(0.1,1e-3)", (0.1, 1e-3)),
        ("words", '(a,"b,c")', ("a", "b,c")),
        ("limit", "none", None),
        ("limit", "12", 12),
        ("title", "None", None),
        ("title", '"none"', "none"),
        ("size", "2", 2),
        ("size", "2.5", 2.5),
    ],
)
def test_build_reads_a_value_by_its_annotation(key: str, text: str, value: object) -> None:
    built = getattr(specs.build(Everything, {key: text}), key)
    assert built == value
    assert type(built) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "takes"),
    [
        ("count", "1.5", "an integer"),
        ("rate", "fast", "a number"),
        ("flag", "yes", "true|false"),
        ("label", '"a"b', "text"),
        ("kind", "true", "empirical|mc|exact"),
        ("mode", "FAST", "fast|very-safe"),
        ("widths", "64-x", "integers such as 64-32-10"),
        ("widths", "64--1", "integers such as 64-32-10"),
        ("rates", "(a)", "a list (a number,…)"),
        ("limit", "many", "an integer or none"),
        ("size", "big", "an integer or a number"),
    ],
)
def test_build_refuses_a_bad_value_and_says_what_the_field_takes(key: str, text: str, takes: str) -> None:
    with pytest.raises(SpecError) as caught:
        specs.build(Everything, {key: text}, name="thing")
    assert str(caught.value) == f"`{key}` of `thing` takes {takes}; got `{text}`."


def test_build_refuses_an_unknown_key_and_suggests_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        specs.build(PCH, {"gama": "1"}, name="pch")
    assert str(caught.value) == (
        "`gama` is not a field of `pch`; known: `gamma`, `output_gamma`. Did you mean `gamma`?"
    )


def test_build_turns_the_refusal_of_the_class_into_a_spec_error() -> None:
    with pytest.raises(SpecError, match=r"`PCH\[gamma=1\]` is refused: gamma must not be positive"):
        specs.build(PCH, {"gamma": "1"})


def test_build_names_a_required_field_that_is_missing() -> None:
    with pytest.raises(SpecError, match=r"`folder` has no default for `path` \(text\)"):
        specs.build(Needy, {"size": "1"}, name="folder")


def test_build_refuses_a_field_that_no_text_can_give() -> None:
    with pytest.raises(SpecError, match="a value that no text can give"):
        specs.build(Opaque, {"function": "f"})
    with pytest.raises(SpecError, match="has no text form"):
        specs.canonical("opaque", Opaque(len))


@pytest.mark.slow
@example(Everything(size=float("inf")))
@given(everything)
def test_canonical_text_reads_back_to_an_equal_value(value: Everything) -> None:
    text = specs.canonical("everything", value)
    parsed = specs.parse(text)
    assert parsed.name == "everything"
    assert list(parsed.fields) == sorted(parsed.fields)
    again = specs.build(Everything, parsed.fields)
    assert again == value
    assert specs.canonical("everything", again) == text


@given(st.text())
def test_parse_either_reads_a_text_or_raises_a_spec_error(text: str) -> None:
    try:
        spec = specs.parse(text)
    except SpecError:
        return
    assert specs.parse(str(spec)) == spec


def test_canonical_normalises_numbers() -> None:
    assert specs.canonical("pch", PCH(gamma=-1)) == "pch[gamma=-1.0,output_gamma=-1.0]"
    assert specs.canonical("pch", PCH(gamma=-0.0)) == specs.canonical("pch", PCH(gamma=0))


def test_a_preset_name_and_its_spelled_out_form_are_the_same(providers: Registry[PCH]) -> None:
    assert providers.make("pch-1") == providers.make("pch[gamma=-1]") == PCH(gamma=-1.0)
    for spec in ("pch-1", "pch[gamma=-1]", PCH(-1.0)):
        assert providers.canonical(spec) == "pch[gamma=-1.0,output_gamma=-1.0]"


def test_a_preset_is_a_default_that_the_spec_can_replace(providers: Registry[PCH]) -> None:
    assert providers.make("pch-1[gamma=-2,output_gamma=0]") == PCH(-2.0, 0.0)


def test_an_instance_passes_through_a_registry(providers: Registry[PCH]) -> None:
    instance = PCH(-3.0)
    assert providers.make(instance) is instance


@pytest.mark.parametrize("given", [None, 3, PCH, ["pch"], len])
def test_a_registry_refuses_what_is_no_name_or_instance(providers: Registry[PCH], given: object) -> None:
    with pytest.raises(SpecError, match="provider: got"):
        providers.make(given)  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(providers: Registry[PCH]) -> None:
    with pytest.raises(CurvlabError) as caught:
        providers.make("phc-1")
    assert str(caught.value) == "`phc-1` is not a provider; known: `pch`, `pch-1`. Did you mean `pch-1`?"


def test_an_empty_registry_says_that_it_knows_none() -> None:
    with pytest.raises(SpecError, match="`x` is not an architecture; known: none"):
        Registry("architecture").make("x")


def test_a_listing_shows_fields_defaults_first_line_and_origin(providers: Registry[PCH]) -> None:
    plain, preset = providers.describe()
    assert (plain.name, plain.doc) == ("pch", "The stand-in provider of these tests.")
    assert (preset.name, preset.doc) == ("pch-1", "absolute values")
    assert preset.usage == "pch-1[gamma=-1.0,output_gamma=-1.0]"
    assert [(f.name, f.takes, f.default) for f in plain.fields] == [
        ("gamma", "a number", "0.0"),
        ("output_gamma", "a number", "-1.0"),
    ]
    assert plain.origin == PCH.__module__.partition(".")[0]


def test_a_listing_shows_what_a_required_field_takes() -> None:
    registry: Registry[Needy] = Registry("data set")
    registry.register("folder", Needy)
    assert registry.describe()[0].usage == "folder[path=<text>,size=3]"
    assert registry.describe()[0].doc == ""


def test_registering_refuses_what_would_not_work(providers: Registry[PCH]) -> None:
    with pytest.raises(SpecError, match="frozen dataclass"):
        providers.register("thawed", Thawed)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Did you mean `gamma`"):
        providers.register("pch-3", PCH, gama=0.0)
    with pytest.raises(SpecError, match="no brackets"):
        providers.register("pch[gamma=1]", PCH)
    with pytest.raises(SpecError, match="is already"):
        providers.register("pch", Needy)  # type: ignore[arg-type]
    providers.register("pch", PCH)
    assert providers.names() == ["pch", "pch-1"]


def test_an_instance_of_an_unregistered_class_has_no_canonical_text(providers: Registry[PCH]) -> None:
    with pytest.raises(SpecError, match="`Needy` is registered as no provider"):
        providers.canonical(Needy("x"))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Checked:
    kind: Literal["empirical", "mc", "exact"] = "empirical"
    mode: Mode = Mode.FAST

    def __post_init__(self) -> None:
        specs.check_choices(self)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "empiric"},
            "kind='empiric': expected one of empirical, mc, exact; did you mean",
        ),
        ({"kind": 3}, r"kind=3: expected one of empirical, mc, exact$"),
        ({"mode": "quick"}, "mode='quick': expected one of fast, very-safe"),
    ],
)
def test_a_value_that_is_none_of_its_choices_is_refused_with_them(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Checked(**fields)


def test_the_annotations_of_a_class_are_read_once_for_all_its_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Checked(kind="mc")

    def read_again(cls: type) -> dict:
        raise AssertionError(f"the annotations of {cls} are read again")

    monkeypatch.setattr(specs.typing, "get_type_hints", read_again)
    assert Checked(kind="exact", mode=Mode.SAFE).kind == "exact"
    assert specs.build(Checked, {"kind": "mc"}) == Checked("mc")


@pytest.fixture
def plugin_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two installed distributions, as importlib.metadata sees them: one sound, one with faults."""
    group = "curvlab.test_plugins"
    (tmp_path / "spec_plugin.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass

            @dataclass(frozen=True)
            class Mine:
                "A provider from elsewhere."
                size: int = 2

            not_a_dataclass = 3
            """
        )
    )
    entries = {
        "sound-plugin": {"mine": "spec_plugin:Mine"},
        "faulty-plugin": {
            "broken": "spec_plugin_that_is_not_there:Thing",
            "odd": "spec_plugin:not_a_dataclass",
            "pch": "spec_plugin:Mine",
        },
    }
    for name, points in entries.items():
        info = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spec_plugin", raising=False)
    return group


def test_a_plugin_is_found_by_name_and_a_faulty_one_breaks_no_other(plugin_group: str) -> None:
    registry: Registry[PCH] = Registry("provider", plugin_group)
    registry.register("pch", PCH)
    with pytest.warns(RuntimeWarning) as caught:
        names = registry.names()
    assert names == ["mine", "pch"]
    messages = sorted(str(warning.message) for warning in caught)
    assert len(messages) == 3
    assert all("faulty-plugin 1.2 is left out" in message for message in messages)
    assert [message.split("`")[1] for message in messages] == ["broken", "odd", "pch"]
    assert "ModuleNotFoundError" in messages[0]
    assert "not a frozen dataclass" in messages[1]
    assert "has that name" in messages[2]
    assert registry.canonical("mine[size=5]") == "mine[size=5]"
    assert registry.describe()[0].origin == "sound-plugin 1.2"
    assert type(registry.make("pch")) is PCH


@pytest.mark.filterwarnings("ignore:.*is left out:RuntimeWarning")
def test_a_built_in_name_wins_also_when_it_comes_after_the_plugin(plugin_group: str) -> None:
    registry: Registry[PCH] = Registry("provider", plugin_group)
    assert type(registry.make("mine")).__name__ == "Mine"
    with pytest.warns(RuntimeWarning, match="provider `mine` of sound-plugin 1.2 is left out"):
        registry.register("mine", PCH)
    assert registry.make("mine") == PCH()


def test_plugins_are_not_loaded_before_they_are_needed(plugin_group: str) -> None:
    registry: Registry[PCH] = Registry("provider", plugin_group)
    registry.register("pch", PCH)
    registry.make(PCH())
    assert "pch" in repr(registry)
    assert "spec_plugin" not in sys.modules


@pytest.mark.parametrize("name", sorted(USUAL_NAMES))
def test_what_a_usual_name_is_called_here_exists(name: str) -> None:
    from curvlab.providers.registry import providers
    from curvlab.solvers.registry import solvers
    from curvlab.studies.train.optimizers import optimizers

    with pytest.raises(SpecError) as refused:
        providers.make(name)
    said = str(refused.value)
    assert said.endswith(USUAL_NAMES[name])
    named = set(re.findall(r"`([^`]+)`", USUAL_NAMES[name])) - {"compare"}
    for text in named - set(solvers.names()):
        providers.make(text)
    if baseline := re.search(r"--baseline ([\w:]+)", said):
        optimizers.make(baseline[1])
