"""The paper's claims about cost, judged by the frames of Table 1."""

from __future__ import annotations

from functools import partial

from curvlab.report.numbers import digits
from curvlab.reproduce.growth.card import CARD
from curvlab.reproduce.growth.sweeps import SAMPLE_SPACE, SYMBOLS, TEXTBOOK
from curvlab.reproduce.judgement import Claim, Frames, Judgement, unmeasured, verdict_of
from curvlab.reproduce.rows import rows_of

__all__ = ["card_claim", "growth_claim"]

WITHIN = 0.25


def card_claim() -> Claim:
    """That KFI runs out of memory at 150,528 inputs."""
    return Claim(
        f"KFI does not fit a card of {CARD} at 150,528 inputs.",
        "of the textbook's KFI, by the planned peak; that of the sample space is given beside it",
        _judge_card,
    )


def _judge_card(frames: Frames) -> Judgement:
    if "card" not in frames:
        return unmeasured()
    card = frames["card"]
    forms = {row.form: row for row in rows_of(card[card["solver"] == "kfi"])}
    textbook, reduced = forms["textbook"], forms["sample-space"]
    measured = (
        f"Textbook KFI: {digits(textbook.peak_gb)} GB. The same step in the sample space: "
        f"{digits(reduced.peak_gb)} GB, which {'fits' if reduced.fits else 'does not fit'}."
    )
    return Judgement(measured, "does not hold" if textbook.fits else "holds")


def growth_claim(solver: str) -> Claim:
    """That the solver's operations grow as the paper's order."""
    return Claim(
        f"The time of {solver} grows as Table 1 says.",
        f"by counted operations of the textbook's form, slope against the slope of the paper's O(·) over the "
        f"same ladder; holds: within {WITHIN} in every size, mixed: in some",
        partial(_judge_growth, solver),
    )


def _judge_growth(solver: str, frames: Frames) -> Judgement:
    if "exponents" not in frames:
        return unmeasured()
    fitted = frames["exponents"]
    counted = fitted[(fitted["subject"] == solver) & (fitted["measure"] == "operations")]
    timed = fitted[(fitted["subject"] == solver) & (fitted["measure"] == "seconds")]
    kept, words = [], []
    for row in rows_of(counted[counted["formulation"] == TEXTBOOK]):
        kept.append(abs(row.exponent - row.paper_ladder) <= WITHIN)
        seconds = timed[(timed["variable"] == row.variable) & (timed["formulation"] == TEXTBOOK)].iloc[0]
        reduced = counted[(counted["variable"] == row.variable) & (counted["formulation"] == SAMPLE_SPACE)]
        own = f", in the sample space {reduced['exponent'].iloc[0]:.2f}" if len(reduced) else ""
        words.append(
            f"in {SYMBOLS[row.variable]}: operations {row.exponent:.2f}, time {seconds['exponent']:.2f} "
            f"({seconds['low']:.2f} to {seconds['high']:.2f}), the paper's order {row.paper_ladder:.2f}{own}"
        )
    if not kept:
        return unmeasured("The frames do not have it.")
    return Judgement(f"Exponents {'; '.join(words)}.", verdict_of(kept))
