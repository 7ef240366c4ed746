"""What CONTRIBUTING.md, the decisions and the configuration of tools say is there, is there."""

from __future__ import annotations

import pydoc
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = ["CONTRIBUTING.md", "README.md", *(str(path.relative_to(ROOT)) for path in DECISIONS)]
SOURCES = {
    "docs": sorted((ROOT / "docs").glob("*.md")),
    "curvlab": sorted((ROOT / "curvlab").rglob("*.py")),
}
PATH = re.compile(
    r"(?<![\w/.<-])((?:curvlab|tests|docs|benchmarks|\.github|\.ci)/[\w./-]*\w"
    r"|\.pre-commit-config\.yaml|CITATION\.cff)"
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(PATH.findall(text)) | {
        str((ROOT / document).parent.relative_to(ROOT) / link)
        for link in re.findall(r"\]\(([\w./-]+\.md)\)", text)
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


# Groups of entry points look like modules, and are none.
GROUPS = {f"curvlab.{group}" for group in ("bindings", "columns", "datasets", "executors", "settings")}
TEXTS = [
    *DOCUMENTS,
    *(str(path.relative_to(ROOT)) for folder in ("docs", "curvlab") for path in SOURCES[folder]),
]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`~?(curvlab(?:\.\w+)+)", text)) - GROUPS


def test_every_dotted_name_that_a_text_gives_exists() -> None:
    named = {name for text in TEXTS for name in names_in((ROOT / text).read_text(encoding="utf-8"))}
    assert {"curvlab.testing.provider_checks", "curvlab.specs.INTERFACE"} <= named
    assert [name for name in sorted(named) if pydoc.locate(name) is None] == []


def test_the_paths_of_contributing_are_found_at_all() -> None:
    found = set(PATH.findall((ROOT / "CONTRIBUTING.md").read_text()))
    assert {"curvlab/providers", "tests/test_public_names.py", ".github/workflows/ci.yml", ".ci/run"} <= found


def test_every_target_that_a_document_names_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for d in DOCUMENTS for t in re.findall(r"`make ([a-z-]+)", (ROOT / d).read_text())}
    assert {"test", "test-fast", "test-long", "test-shuffled"} <= named <= targets


def test_the_map_has_its_place() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert text.index("## Map") < text.index("<!-- map: begin") < text.index("<!-- map: end -->")


def test_hooks_are_those_of_this_repository_and_fetch_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = {hook["id"]: hook for hook in config["repos"][0]["hooks"]}
    assert set(hooks) == {"ruff", "ruff-format", "mypy"}
    assert {hook["language"] for hook in hooks.values()} == {"system"}
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks.values())


def test_the_workflow_runs_what_every_change_must_pass_on_the_supported_versions() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = job["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    assert project["requires-python"].startswith(f">={versions[0]}")
    (torch,) = [line for line in project["dependencies"] if line.startswith("torch")]
    oldest, newest = job["strategy"]["matrix"]["torch"]
    assert (f"torch>={oldest.removesuffix('.0')}", newest) == (torch, "newest")


def test_the_citation_names_the_software_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Chen", "Chou", "Chang"]
    assert paper["title"].startswith("EA-CG:")
    assert paper["year"] == 2019


def test_the_script_of_ci_counts_what_was_skipped_and_why() -> None:
    script = (ROOT / ".ci/run").read_text()
    program = re.search(r"awk '(/\^SKIPPED.*?)' \"\$log\"", script, re.DOTALL)
    assert program is not None
    lines = "SKIPPED [2] tests/a.py:4: no Chromium\n.. passed\nSKIPPED [11] b.py: needs fork: here\n"
    found = subprocess.run(["awk", program[1]], input=lines, capture_output=True, text=True, check=True)
    assert (
        found.stdout == "skipped tests: 13\n  [2] tests/a.py:4: no Chromium\n  [11] b.py: needs fork: here\n"
    )
