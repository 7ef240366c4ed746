"""A third party's provider: built as a wheel, installed in a scratch environment, used by its name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import curvlab

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "thirdparty-curvature"
version = "1.2.3"

[project.entry-points."curvlab.providers"]
diagonal-fisher = "thirdparty_curvature:DiagonalFisher"

[tool.setuptools]
py-modules = ["thirdparty_curvature"]
"""

MODULE = '''
"""A provider as another package would write it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from curvlab.curvature import Definiteness
from curvlab.linalg import DenseFactor
from curvlab.providers import Fisher, Provider


@dataclass(frozen=True)
class DiagonalFisher(Provider):
    """The diagonal of the empirical Fisher, times a factor."""

    needs_chain: ClassVar[bool] = False
    scale: float = 1.0

    def statistics(self, problem):
        return Fisher().statistics(problem)

    def curvature(self, context, name):
        fisher = Fisher().curvature(context, name)
        layers = tuple(
            replace(layer, output=DenseFactor(torch.diag(self.scale * layer.output.diagonal())))
            for layer in fisher.layers
        )
        return replace(fisher, layers=layers, definiteness=Definiteness(self.scale >= 0, "squares"))
'''

USER = """
import torch
import curvlab
from curvlab.providers.registry import providers
from curvlab.testing import check_provider

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
problem = curvlab.Problem(model, "cross-entropy", torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 0]))
diagonal, fisher = curvlab.estimate(["diagonal-fisher[scale=2]", "fisher"], problem)
for name, block in diagonal.blocks.items():
    torch.testing.assert_close(block.to_dense().trace(), 2 * fisher.blocks[name].trace())
dense = diagonal.blocks["0.bias"].to_dense()
assert torch.equal(dense, torch.diag(dense.diagonal())), dense
assert "diagonal-fisher" in curvlab.errors(problem, ["diagonal-fisher"])["provider"].tolist()
check_provider("diagonal-fisher[scale=0.5]")
(row,) = [row for row in providers.describe() if row.name == "diagonal-fisher"]
print(row.origin, "|", row.usage, "|", row.doc)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command; its complaints if it fails."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    for needed in ("pip", "setuptools"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"building a wheel needs {needed}, which this environment does not have")
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "thirdparty_curvature.py").write_text(MODULE)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    return built


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The python of an environment that sees this one's packages but keeps its own apart."""
    run(sys.executable, "-m", "venv", "--without-pip", "scratch", cwd=tmp_path)
    base = str(tmp_path / "scratch")
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": base, "platbase": base}))
    seen = [sysconfig.get_path("purelib"), str(Path(curvlab.__file__).parents[1])]
    lines = [f"import site; site.addsitedir({path!r})" for path in seen]
    (site_packages / "seen.pth").write_text("\n".join(lines))
    return Path(base) / Path(sys.executable).relative_to(sys.prefix)


@pytest.mark.slow
def test_a_provider_from_another_package_is_used_by_name(tmp_path: Path, wheel: Path, scratch: Path) -> None:
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", scratch, "install", *options, wheel, cwd=tmp_path)
    script = tmp_path / "user.py"
    script.write_text(USER)
    assert run(scratch, script, cwd=tmp_path).split(" | ") == [
        "thirdparty-curvature 1.2.3",
        "diagonal-fisher[scale=1.0]",
        "The diagonal of the empirical Fisher, times a factor.\n",
    ]


def test_this_environment_does_not_see_the_plugin() -> None:
    from curvlab.providers.registry import providers

    assert "diagonal-fisher" not in providers.names()
