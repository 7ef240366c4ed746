"""What the paper printed: its Tables 2 to 5, and the settings it states.

Chen, Chou and Chang, "EA-CG: An Approximate Second-Order Method for Training Fully-Connected Neural
Networks", AAAI 2019. The figures of the paper are images without numbers; its claims about them are in
`curvlab.reproduce.experiments`.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["GRID", "paper_errors"]

GRID: dict[str, tuple[float, ...]] = {
    "lr": (0.05, 0.1, 0.2),
    "batch": (100, 500, 1000),
    "alpha": (0.01, 0.02, 0.05, 0.1),
    "max_iter": (5, 10, 20, 50),
    "tol": (1e-10, 1e-5, 1e-2, 1e-1),
}
"""The values of the paper's grid search."""


def paper_errors(table: str) -> pd.DataFrame:
    """The layer-wise errors of `table2` … `table5` as printed: provider, layer, error.

    >>> frame = paper_errors("table2")
    >>> frame[frame["layer"] == "Total"].set_index("provider")["error"].to_dict()
    {'fisher': 0.1535, 'gauss-newton': 0.0446, 'pch-1': 0.0402, 'pch-2': 0.033}
    """
    import pandas as pd

    from curvlab.studies.small.errors import TOTAL

    with resources.files("curvlab.reproduce").joinpath("paper_tables.csv").open(encoding="utf-8") as file:
        printed = pd.read_csv(file)
    found = printed[printed["table"] == table]
    layers = [TOTAL if layer == "total" else int(layer) for layer in found["layer"]]
    return found.assign(layer=layers)[["provider", "layer", "error"]].reset_index(drop=True)
