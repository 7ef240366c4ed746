"""The house as it stands: which module imports which, and the map of it in CONTRIBUTING.md.

    python -m tests.house        writes the map anew

The import graph counts every import: at the top of a module, inside a function and for type checking only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import curvlab

__all__ = [
    "ALLOWED_CYCLES",
    "PACKAGE",
    "cycles",
    "drawing",
    "import_graph",
    "map_in",
    "module_files",
    "rooms",
]

PACKAGE = Path(curvlab.__file__).parent
Graph = dict[str, set[str]]

# A cycle that is allowed, as the set of its modules or packages, with the reason.
ALLOWED_CYCLES: dict[frozenset[str], str] = {}
# A command imports the studies when it is called, so that `--help` stays fast; nothing imports the commands.
NOT_LOOKED_AT = "curvlab.cli"


def module_files(package: Path = PACKAGE) -> dict[str, Path]:
    """The package's modules by name; a package's name is that of its `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if not within(name, NOT_LOOKED_AT)}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imports_of(source: str, known: Iterable[str]) -> Iterator[str]:
    """The known modules that a source imports anywhere: at its top, in a function or for type checking."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inner]
        else:
            continue
        yield from (name for name in names if name in known)


def import_graph(files: Mapping[str, Path]) -> Graph:
    """What each module imports; an import from another package also runs that package's `__init__`."""
    graph: Graph = {}
    for name, path in files.items():
        found = set(imports_of(path.read_text(encoding="utf-8"), files))
        parents = {p for target in found for p in packages_of(target) if not within(name, p)}
        graph[name] = (found | parents) - {name}
    return graph


def packages_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def rooms(graph: Graph) -> Graph:
    """The same graph between the packages and modules directly below the root."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    merged: Graph = {}
    for name, targets in graph.items():
        merged.setdefault(room(name), set()).update({room(t) for t in targets} - {room(name)})
    return merged


def cycles(graph: Graph) -> list[frozenset[str]]:
    """The sets of nodes that reach each other."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted(groups, key=sorted)


def reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def imported_directly(graph: Graph) -> Graph:
    """The graph without what follows from other imports: a room that is reached through another one."""
    return {
        name: {t for t in targets if not any(t in reachable(graph, other) for other in targets - {t})}
        for name, targets in graph.items()
    }


def levels(graph: Graph) -> list[list[str]]:
    """The rooms from the top down: each imports only from levels below its own."""
    depth: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((depth_of(target) for target in graph[name]), default=-1)
        return depth[name]

    for name in graph:
        depth_of(name)
    found: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for name in sorted(graph):
        found[depth[name]].append(name)
    return found[::-1]


def drawing() -> str:
    """The map: a diagram of the rooms, an arrow from each to those it imports."""
    graph = rooms(import_graph(module_files()))
    graph = {name: targets - {"curvlab"} for name, targets in graph.items() if name != "curvlab"}
    direct = imported_directly(graph)
    lines = ["```mermaid", "graph TD"]
    for level in levels(graph):
        for name in level:
            short = name.removeprefix("curvlab.")
            folder = (PACKAGE / short).is_dir()
            lines.append(f"    {short}[{short}{'/' if folder else '.py'}]")
    for name in sorted(direct):
        for target in sorted(direct[name]):
            lines.append(f"    {name.removeprefix('curvlab.')} --> {target.removeprefix('curvlab.')}")
    return "\n".join([*lines, "```"])


MARKED = re.compile(r"(<!-- map: begin[^\n]*-->\n)(.*?)(<!-- map: end -->)", re.DOTALL)


def map_in(text: str) -> str:
    """The map that a document holds between its two marks."""
    found = MARKED.search(text)
    if found is None:
        raise ValueError("the document has no marks `<!-- map: begin … -->` and `<!-- map: end -->`")
    return found.group(2).strip()


if __name__ == "__main__":
    path = PACKAGE.parent / "CONTRIBUTING.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(MARKED.sub(lambda found: f"{found[1]}{drawing()}\n{found[3]}", text), encoding="utf-8")
