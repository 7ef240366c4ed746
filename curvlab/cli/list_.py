"""`curvlab list`: everything that can be asked for by name, and which pairs exist."""

from __future__ import annotations

from typing import Any

import click

from curvlab.cli.console import break_name, print_json, table
from curvlab.specs import Description, Registry

__all__ = ["command"]


def _registries() -> dict[str, Registry[Any]]:
    from curvlab.architectures import architectures
    from curvlab.criteria.registry import criteria
    from curvlab.data import datasets
    from curvlab.providers.registry import providers
    from curvlab.solvers.registry import solvers
    from curvlab.studies.executor import executors
    from curvlab.studies.train.optimizers import optimizers

    return {
        "providers": providers,
        "solvers": solvers,
        "criteria": criteria,
        "architectures": architectures,
        "datasets": datasets,
        "optimizers": optimizers,
        "executors": executors,
    }


KINDS = ("providers", "solvers", "criteria", "architectures", "datasets", "optimizers", "executors", "pairs")
FIELD_WIDTH = 30


@click.command("list")
@click.argument("kind", required=False, type=click.Choice(KINDS), metavar="[KIND]")
@click.option("--json", "as_json", is_flag=True, help="Print the lists as JSON on standard output.")
def command(kind: str | None, as_json: bool) -> None:
    """List what can be asked for by name, with its fields and their defaults.

    KIND is providers, solvers, criteria, architectures, datasets, optimizers, executors or pairs; all of
    them without one. A field is set in brackets: 'ea-cg[max_iter=50,tol=1e-5]'. What other packages add
    through entry points is listed with the package it is from.

    \b
    Examples:
      curvlab list
      curvlab list solvers
      curvlab list pairs
    """
    from curvlab.studies.compare.compatibility import existing_pairs

    chosen = {name: registry.describe() for name, registry in _registries().items() if kind in (None, name)}
    pairs = existing_pairs() if kind in (None, "pairs") else {}
    if as_json:
        print_json({name: [_record(row) for row in rows] for name, rows in chosen.items()} | {"pairs": pairs})
        return
    for name, listed in chosen.items():
        cells = [[row.name, _fields(row), _about(row)] for row in listed]
        table(
            {"Name": "left", "Fields and defaults": "left", "What it is": "fold"},
            cells,
            title=name.capitalize(),
        )
    if pairs:
        names = list(next(iter(pairs.values())))
        rows = [
            [name, *("yes" if takes.get(solver) else "–" for solver in names)]
            for name, takes in pairs.items()
        ]
        table({"Provider": "name"} | dict.fromkeys(names, "left"), rows, title="Pairs that exist")


def _fields(row: Description) -> str:
    return "\n".join(break_name(str(field), FIELD_WIDTH) for field in row.fields) or "–"


def _about(row: Description) -> str:
    return row.doc if row.origin == "curvlab" else f"{row.doc} ({row.origin})"


def _record(row: Description) -> dict[str, Any]:
    fields = {field.name: {"takes": field.takes, "default": field.default} for field in row.fields}
    return {"name": row.name, "usage": row.usage, "fields": fields, "about": row.doc, "origin": row.origin}
