"""Help pages, completion and misspelt commands answer without torch; `import curvlab` only knows names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import curvlab
from curvlab.cli import COMMANDS
from curvlab.cli.completion import GROUPS, NAMES
from curvlab.specs import Registry

HEAVY = ("torch", "pandas", "numpy", "scipy", "matplotlib", "sklearn", "rich")
PROBE = """
import json, sys
from curvlab.cli import main
try:
    main(sys.argv[1:], prog_name="curvlab")
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, [name for name in {heavy} if name in sys.modules]]), file=sys.stderr)
"""


def run(*arguments: str, **environment: str) -> tuple[str, str, int, list[str]]:
    """Standard output and error of a command in a new process, its exit code, and what heavy it imported."""
    made = subprocess.run(
        [sys.executable, "-c", PROBE.format(heavy=HEAVY), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=True,
    )
    code, heavy = json.loads(made.stderr.splitlines()[-1])
    return made.stdout, made.stderr, code, heavy


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda words: "-".join(words))
def test_the_help_of_every_command_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    output, _, code, heavy = run(*command, "--help")
    assert (code, heavy) == (0, [])
    assert output.startswith("Usage: curvlab")


def test_a_misspelt_command_is_answered_with_the_nearest_without_torch() -> None:
    _, errors, code, heavy = run("compair")
    assert (code, heavy) == (2, [])
    assert "Did you mean 'compare'?" in errors


def test_the_shell_completes_options_without_torch() -> None:
    output, _, _, heavy = run(
        _CURVLAB_COMPLETE="bash_complete", COMP_WORDS="curvlab compare --newt", COMP_CWORD="2"
    )
    assert "--newton-limit" in output
    assert heavy == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("compare -p pch", ["pch", "pch-1", "pch-2"]),
        ("compare -p fisher -s ea", ["ea-cg"]),
        ("compare --data dig", ["digits"]),
        ("compare --baseline mu", ["muon"]),
        ("compare --executor pro", ["process"]),
        ("compare --dtype float6", ["float64"]),
        ("train --provider he", ["hessian"]),
        ("spectrum -p gauss", ["gauss-newton"]),
        ("comp", ["compare"]),
    ],
)
def test_the_shell_completes_names_without_torch(words: str, offered: list[str]) -> None:
    typed = f"curvlab {words}"
    output, _, _, heavy = run(
        _CURVLAB_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1)
    )
    assert output.split() == [f"plain,{name}" for name in offered]
    assert heavy == []


def test_the_shell_completes_the_path_of_a_checkpoint() -> None:
    output, _, _, _ = run(
        _CURVLAB_COMPLETE="bash_complete", COMP_WORDS="curvlab compare --checkpoint run", COMP_CWORD="3"
    )
    assert output.split() == ["file,run"]


def test_completion_offers_the_names_of_the_registries_and_no_others() -> None:
    from curvlab.architectures import architectures
    from curvlab.criteria.registry import criteria
    from curvlab.data import datasets
    from curvlab.providers.registry import providers
    from curvlab.solvers.registry import solvers
    from curvlab.studies.executor import executors
    from curvlab.studies.train.optimizers import optimizers
    from curvlab.studies.train.plan import schedules

    held: list[Registry[Any]] = [providers, solvers, criteria, architectures, datasets, optimizers]
    kinds = ("provider", "solver", "criterion", "arch", "data", "optimizer", "schedule", "executor")
    for kind, registry in zip(kinds, [*held, schedules, executors], strict=True):
        own = {one.name for one in registry.describe() if one.origin == "curvlab"}
        own = own & set(NAMES[kind]) if kind == "optimizer" else own  # torch's own are added when asked for
        assert set(NAMES[kind]) == own, kind
        assert GROUPS.get(kind) == registry.group, kind


def test_importing_curvlab_imports_no_torch_and_knows_every_name() -> None:
    code = "import sys, curvlab; print('torch' in sys.modules, len(set(curvlab.__all__) - set(dir(curvlab))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "0"]


@pytest.mark.parametrize("name", curvlab.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from curvlab import {name}", namespace)
    assert namespace[name] is getattr(curvlab, name)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        _ = curvlab.nothing


@pytest.mark.parametrize("package", ["curvlab", "curvlab.report"])
def test_no_module_has_the_name_of_a_public_function_beside_it(package: str) -> None:
    """Importing it would put the module in the function's place."""
    import importlib
    import pkgutil
    from types import ModuleType

    found = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(found.__path__)}
    functions = {name for name in found.__all__ if not isinstance(getattr(found, name), ModuleType)}
    assert not modules & functions
