"""What users of 0.1 have written still works: names, attributes, arguments, commands and flags.

tests/data/public_names_0_1.json lists those of commit 31b49ba, as `public_names` below found them there. A
name that goes must warn for one release first (CONTRIBUTING.md, "Deprecation"): a warning is no failure here.
The list of a later release is made by `python -m tests.test_public_names > tests/data/public_names_X_Y.json`.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch import nn

import curvlab
from curvlab.cli import main
from curvlab.optim import SecondOrder

DATA = Path(__file__).parent / "data" / "public_names_0_1.json"
# Functions of the package, and those to come: a module of that name, once imported, would take their place.
FUNCTIONS = (
    "bounds",
    "compare",
    "density",
    "errors",
    "estimate",
    "landscape",
    "plan",
    "similarity",
    "solve",
    "spectrum",
)
# Curvatures and solutions are made by curvlab, so that their constructors are not promised.
CONSTRUCTED = ("Problem", "SecondOrder")
KINDS = {"KEYWORD_ONLY": "{}=", "VAR_POSITIONAL": "*{}", "VAR_KEYWORD": "**{}"}
Arguments = list[str]


def instances() -> dict[str, Any]:
    """One of each class whose attributes are promised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))
    problem = curvlab.Problem(model, "cross-entropy", torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0]))
    curvature = curvlab.estimate("pch-1", problem)
    solution = curvlab.solve("ea-cg", curvature, problem.gradient(), alpha=0.05)
    made = (problem, curvature, solution, SecondOrder(model, "cross-entropy"))
    return {type(instance).__name__: instance for instance in made}


def inherited(instance: Any) -> set[str]:
    """What Python or torch gives and curvlab does not override, which it promises nothing about."""
    base = torch.optim.Optimizer if isinstance(instance, torch.optim.Optimizer) else object
    return {*dir(base), "defaults", "param_groups", "state"} - {*vars(type(instance))}


def arguments(called: Any) -> Arguments | None:
    """`name`, or `name=` where it must be named, of each argument; None for what is not called."""
    if not callable(called):
        return None
    parameters = inspect.signature(called).parameters.values()
    return [KINDS.get(p.kind.name, "{}").format(p.name) for p in parameters if p.name not in ("self", "cls")]


def attributes(instance: Any) -> dict[str, Arguments | None]:
    """The public attributes of an instance and of its class; methods with their arguments."""
    names = ({*dir(type(instance)), *vars(instance)}) - inherited(instance)
    static = {
        n: inspect.getattr_static(type(instance), n, None) for n in sorted(names) if not n.startswith("_")
    }
    return {name: arguments(getattr(value, "__func__", value)) for name, value in static.items()}


def commands() -> dict[str, dict[str, list[str]]]:
    """Every command with its flags and arguments, by click's own objects; the program itself is `curvlab`."""
    context = click.Context(main, **main.context_settings)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {
        name: {
            "flags": sorted(_flags(command, context)),
            "arguments": [p.name for p in command.params if isinstance(p, click.Argument)],
        }
        for name, command in {"curvlab": main, **found}.items()
    }


def _flags(command: click.Command, context: click.Context) -> Iterator[str]:
    for option in command.get_params(click.Context(command, parent=context)):
        if isinstance(option, click.Option):
            yield from (*option.opts, *option.secondary_opts)


def public_names() -> dict[str, Any]:
    """Everything that is promised, of the curvlab that is imported."""
    functions = {n: getattr(curvlab, n) for n in curvlab.__all__}
    return {
        "names": sorted(curvlab.__all__),
        "functions": {n: arguments(f) for n, f in functions.items() if inspect.isfunction(f)},
        "constructors": {n: arguments(type(i)) for n, i in instances().items() if n in CONSTRUCTED},
        "attributes": {name: attributes(instance) for name, instance in instances().items()},
        "commands": commands(),
    }


PROMISED: dict[str, Any] = json.loads(DATA.read_text())


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return public_names()


def refusals(promised: Arguments | None, given: Arguments | None) -> list[str]:
    """The arguments that a call written for `promised` would see refused, or taken for another."""
    if promised is None or given is None:
        return []
    positional = [name for name in promised if name.isidentifier()]
    found = [name for name in given if name.isidentifier()]
    moved = [a for a, b in zip(positional, found, strict=False) if a != b]
    known = {name.strip("*=") for name in given}
    any_keyword = any(name.startswith("**") for name in given)
    any_position = any(name.startswith("*") and not name.startswith("**") for name in given)
    missing = [name for name in promised if not any_keyword and name.strip("*=") not in known]
    by_name_only = [] if any_position else positional[len(found) :]
    return [*([] if any_position else moved), *missing, *by_name_only]


@pytest.mark.parametrize(
    ("promised", "given", "expected"),
    [
        (["a", "b="], ["a", "b=", "c="], []),
        (["a", "b="], ["a", "b"], []),
        (["a", "b="], ["a", "**options"], []),
        (["a", "b"], ["*values"], ["a", "b"]),
        (["a", "b"], ["b", "a"], ["a", "b"]),
        (["a", "b"], ["a", "b="], ["b"]),
        (["a", "b="], ["a"], ["b="]),
        (None, ["a"], []),
    ],
)
def test_refused_arguments_are_found(promised: Arguments, given: Arguments, expected: list[str]) -> None:
    assert refusals(promised, given) == expected


@pytest.mark.parametrize("name", PROMISED["names"])
def test_a_name_of_the_package_is_still_there(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert getattr(curvlab, name) is not None


@pytest.mark.parametrize("name", PROMISED["functions"])
def test_a_function_takes_the_arguments_it_took(now: dict[str, Any], name: str) -> None:
    assert refusals(PROMISED["functions"][name], now["functions"][name]) == []


@pytest.mark.parametrize("name", PROMISED["constructors"])
def test_a_constructor_takes_the_arguments_it_took(now: dict[str, Any], name: str) -> None:
    assert refusals(PROMISED["constructors"][name], now["constructors"][name]) == []


@pytest.mark.parametrize("kind", PROMISED["attributes"])
def test_every_public_attribute_is_still_there_and_takes_the_arguments_it_took(
    now: dict[str, Any], kind: str
) -> None:
    instance = instances()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [name for name in PROMISED["attributes"][kind] if not hasattr(instance, name)] == []
    found = now["attributes"][kind]
    changed = {n: refusals(was, found.get(n)) for n, was in PROMISED["attributes"][kind].items()}
    assert {name: refused for name, refused in changed.items() if refused} == {}


@pytest.mark.parametrize("command", PROMISED["commands"])
def test_every_flag_and_argument_of_a_command_is_still_there(now: dict[str, Any], command: str) -> None:
    promised, found = PROMISED["commands"][command], now["commands"][command]
    assert set(promised["flags"]) - set(found["flags"]) == set()
    assert found["arguments"][: len(promised["arguments"])] == promised["arguments"]


def test_no_module_or_package_has_the_name_of_a_public_function() -> None:
    functions = {*FUNCTIONS, *(n for n in curvlab.__all__ if inspect.isfunction(getattr(curvlab, n)))}
    modules = {module.name for module in pkgutil.iter_modules(curvlab.__path__)}
    assert "providers" in modules
    assert functions & modules == set()


if __name__ == "__main__":
    print(json.dumps(public_names(), indent=1))
