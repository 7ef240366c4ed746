"""The paper's claims, in our words, by the experiment that answers them."""

from __future__ import annotations

import pandas as pd

from curvlab.reproduce.curves.claims import (
    Choice,
    best_claim,
    level_claim,
    no_dearer_claim,
    same_time_claim,
    solver_claim,
)
from curvlab.reproduce.errors.claims import accumulation_claim, ordering_claim
from curvlab.reproduce.growth.claims import card_claim, growth_claim
from curvlab.reproduce.judgement import Claim

__all__ = ["claims"]


def claims() -> dict[str, tuple[Claim, ...]]:
    """Every claim that is judged, by experiment."""
    return {
        "table1": (card_claim(), growth_claim("kfi"), growth_claim("ea-cg")),
        "table2": (*_convex_errors(), accumulation_claim()),
        "table3": (*_convex_errors(), accumulation_claim()),
        "table4": (*_non_convex_errors(), accumulation_claim()),
        "table5": (*_non_convex_errors(), accumulation_claim()),
        "table2-kfi": (*_convex_errors(), accumulation_claim()),
        "table4-kfi": (*_non_convex_errors(), accumulation_claim()),
        "fig-convex-cifar10": (
            solver_claim("EA-CG converges faster than KFI by time.", "loss_at_time", "ea-cg", "kfi"),
            solver_claim("KFI's training loss falls faster by epochs.", "loss", "kfi", "ea-cg"),
            solver_claim("EA-CG has the better test accuracy.", "accuracy", "ea-cg", "kfi"),
            level_claim("With EA-CG the three matrices perform alike.", "loss", _with("ea-cg")),
            best_claim(
                "With KFI the Fisher matrix converges faster than the other two.",
                "loss_at_time",
                ["fisher + kfi"],
                _with("kfi"),
            ),
        ),
        "fig-convex-imagenet10": (
            same_time_claim("EA-CG and KFI take almost the same time.", "ea-cg", "kfi"),
            solver_claim("KFI has the lower training loss.", "loss", "kfi", "ea-cg"),
            no_dearer_claim("Second-order methods are as fast as SGD where inputs are wide.", "sgd"),
        ),
        "fig-nonconvex-cifar10": (
            solver_claim("EA-CG beats KFI in training loss by time.", "loss_at_time", "ea-cg", "kfi"),
            solver_claim("EA-CG beats KFI in test accuracy.", "accuracy", "ea-cg", "kfi"),
            best_claim("The Fisher matrix with EA-CG is best.", "loss", ["fisher + ea-cg"], _everything),
        ),
        "fig-nonconvex-imagenet10": (
            solver_claim("EA-CG beats KFI in training loss.", "loss", "ea-cg", "kfi"),
            level_claim("Test accuracy hardly tells EA-CG from KFI.", "accuracy", _second_order),
            best_claim("PCH with KFI has the best test accuracy.", "accuracy", ["pch-1 + kfi"], _everything),
        ),
        "pch1-vs-pch2": (
            level_claim("PCH-1 and PCH-2 train alike, cross-entropy, by loss.", "loss", _of("cross-entropy")),
            level_claim("… by test accuracy.", "accuracy", _of("cross-entropy")),
            level_claim("PCH-1 and PCH-2 train alike, robust loss, by loss.", "loss", _of("robust")),
            level_claim("… by test accuracy, robust loss.", "accuracy", _of("robust")),
        ),
    }


def _convex_errors() -> tuple[Claim, ...]:
    return (
        ordering_claim(
            ("pch-1", "gauss-newton"), "PCH-1 is closer to the absolute Hessian than Gauss-Newton."
        ),
        ordering_claim(("pch-2", "pch-1"), "PCH-2 is closer than PCH-1."),
        ordering_claim(("gauss-newton", "fisher"), "Gauss-Newton is closer than the Fisher matrix."),
        ordering_claim(
            ("pch-2", "pch-1", "gauss-newton", "fisher"), "The Totals are ordered as the table has them."
        ),
    )


def _non_convex_errors() -> tuple[Claim, ...]:
    return (
        ordering_claim(
            ("pch-1", "fisher"), "PCH-1 is closer to the absolute Hessian than the Fisher matrix."
        ),
        ordering_claim(
            ("pch-2", "fisher"), "PCH-2 is closer to the absolute Hessian than the Fisher matrix."
        ),
        ordering_claim(("pch-1", "pch-2"), "PCH-1 is closer than PCH-2."),
        ordering_claim(("pch-1", "pch-2", "fisher"), "The Totals are ordered as the table has them."),
    )


def _with(solver: str) -> Choice:
    return lambda table: table[table["solver"] == solver]


def _of(criterion: str) -> Choice:
    return lambda table: table[table["criterion"].str.startswith(criterion)]


def _second_order(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["provider"] != ""]


def _everything(table: pd.DataFrame) -> pd.DataFrame:
    return table
