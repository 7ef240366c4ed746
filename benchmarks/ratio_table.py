"""The ratio suites as one table, with the quartiles that asv's single number leaves out.

    python -m benchmarks.ratio_table [REGEX …]

Each row is the work against its rival, measured in turns in this process; lower is better. As in asv, a
regular expression selects by the benchmark's name with its parameters.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pandas as pd

from benchmarks import base, providers, solvers, steps

MODULES = (providers, solvers, steps)


def chosen(patterns: list[str]) -> Iterator[tuple[base.Ratio, tuple[Any, ...]]]:
    """Suites with the parameters to run, those of one network together: it is then built once."""
    found = [
        (suite(), values)
        for module in MODULES
        for suite in vars(module).values()
        if isinstance(suite, type) and issubclass(suite, base.Ratio)
        for values in product(*suite.params)
        if not patterns or any(re.search(pattern, _name(suite, values)) for pattern in patterns)
    ]
    return iter(sorted(found, key=lambda row: base.ALL.index(_named(*row)["architecture"])))


def _named(suite: base.Ratio, values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(suite.param_names, values, strict=True))


def _name(suite: type[base.Ratio], values: tuple[Any, ...]) -> str:
    module = suite.__module__.rpartition(".")[2]
    return f"{module}.{suite.__name__}.track_ratio({', '.join(map(repr, values))})"


def row(suite: base.Ratio, values: tuple[Any, ...]) -> dict[str, object]:
    """One measurement as a row, or why there is none."""
    labels = {"ratio": type(suite).__name__, **_named(suite, values)}
    try:
        suite.setup(*values)
    except NotImplementedError as reason:
        return {**labels, "median": str(reason)}
    found = suite.measure()
    quartiles = f"{found.lower:.3f} to {found.upper:.3f}"
    return {**labels, "median": f"{found.median:.3f}", "quartiles": quartiles}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("regex", nargs="*", help="which ratios; all by default")
    rows = []
    for suite, values in chosen(parser.parse_args().regex):
        print(_name(type(suite), values), file=sys.stderr, flush=True)
        rows.append(row(suite, values))
    if not rows:
        parser.error("no ratio matches")
    frame = pd.DataFrame(rows).sort_values("ratio", kind="stable")
    print(frame.to_string(index=False, na_rep=""))


if __name__ == "__main__":
    main()
