"""The paper's O(·) for one layer, as polynomials of its sizes, and those of what curvlab computes.

The paper's Table 1, with m for |Batch|:

    curvature time   m n_t² (Fisher), n_{t-1}² n_t (Gauss-Newton and PCH)
    KFI              time n_t³ + n_{t-1}³ + n_{t-1}² n_t + n_{t-1} n_t²,   space n_{t-1}² + n_t²
    EA-CG            time |CG| (n_t² + 2 n_t n_{t-1}),                     space n_{t-1} + n_t²

and, from its analysis of space, Σ n_t² for the blocks of any curvature. Table 1 leaves out a term of the
recursion that the paper's own analysis of time has, n_{t-1} n_t², and what E[σ'σ'ᵀ] and E[hhᵀ] take, m n²;
curvlab's polynomials have them. The latter are orders, too: their terms have no constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from curvlab.reproduce.growth.sweeps import SAMPLE_SPACE, SYMBOLS, TEXTBOOK, VARIABLES

__all__ = ["RESOURCES", "Order", "Term", "curvlab_order", "paper_order"]

RESOURCES = {"seconds": "time", "operations": "time", "peak_bytes": "space"}
POWERS = {1: "", 2: "²", 3: "³"}


@dataclass(frozen=True)
class Term:
    """A coefficient times powers of the sizes.

    >>> str(Term(2, outputs=1, inputs=2))
    '2 n_{t-1}² n_t'
    """

    coefficient: int = 1
    inputs: int = 0
    outputs: int = 0
    batch: int = 0
    iterations: int = 0

    def __call__(self, sizes: Mapping[str, float]) -> float:
        return self.coefficient * prod(float(sizes[name]) ** self.degree(name) for name in VARIABLES)

    def degree(self, variable: str) -> int:
        """The power of a variable."""
        power: int = getattr(self, variable)
        return power

    def __str__(self) -> str:
        symbols = (
            SYMBOLS[name] + POWERS[self.degree(name)]
            for name in ("iterations", "batch", "inputs", "outputs")
            if self.degree(name)
        )
        return " ".join([str(self.coefficient)] * (self.coefficient != 1) + list(symbols)) or "1"


@dataclass(frozen=True)
class Order:
    """A sum of terms: how a cost grows.

    >>> order = Order(Term(outputs=2), Term(2, outputs=1, inputs=1))
    >>> str(order), order({"outputs": 3, "inputs": 5, "batch": 1, "iterations": 1}), order.degree("inputs")
    ('n_t² + 2 n_{t-1} n_t', 39.0, 1)
    """

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)

    def __call__(self, sizes: Mapping[str, float]) -> float:
        return sum(term(sizes) for term in self.terms)

    def degree(self, variable: str) -> int:
        """The exponent in one variable as it goes to infinity while the others stay."""
        return max(term.degree(variable) for term in self.terms)

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))


def paper_order(resource: str, quantity: str, subject: str) -> Order | None:
    """The paper's O(·) of `time` or `space`; None where it says nothing.

    >>> str(paper_order("space", "solve", "ea-cg")), paper_order("space", "solve", "cg")
    ('n_{t-1} + n_t²', None)
    """
    return PAPER.get((resource, quantity, subject))


def curvlab_order(resource: str, quantity: str, subject: str, formulation: str) -> Order | None:
    """The order of what curvlab computes in this formulation; None where it computes nothing.

    >>> str(curvlab_order("time", "solve", "ea-cg", "sample space"))
    'm² n_{t-1} + m² n_t + |CG| n_t²'
    """
    return CURVLAB.get((resource, quantity, subject, formulation))


RECURSION_BLOCKS = Order(Term(inputs=2), Term(outputs=2))
TABLE_RECURSION = Order(Term(inputs=2, outputs=1))
PAPER: dict[tuple[str, str, str], Order] = {
    ("time", "curvature", "fisher"): Order(Term(batch=1, outputs=2)),
    ("time", "curvature", "gauss-newton"): TABLE_RECURSION,
    ("time", "curvature", "pch-1"): TABLE_RECURSION,
    ("space", "curvature", "fisher"): Order(Term(outputs=2)),
    ("space", "curvature", "gauss-newton"): RECURSION_BLOCKS,
    ("space", "curvature", "pch-1"): RECURSION_BLOCKS,
    ("time", "solve", "kfi"): Order(
        Term(outputs=3), Term(inputs=3), Term(inputs=2, outputs=1), Term(inputs=1, outputs=2)
    ),
    ("space", "solve", "kfi"): Order(Term(inputs=2), Term(outputs=2)),
    ("time", "solve", "ea-cg"): Order(
        Term(iterations=1, outputs=2), Term(2, iterations=1, inputs=1, outputs=1)
    ),
    ("space", "solve", "ea-cg"): Order(Term(inputs=1), Term(outputs=2)),
}

ROWS = Term(batch=1, outputs=1)  # the layer's output gradients, scaled, or the coefficients M of D = M H
GRADIENT = Term(inputs=1, outputs=1)
OUTPUT = Term(outputs=2)
OUTPUT_INVERSE = Term(outputs=3)
INPUT = Term(inputs=2)
FORM_INPUT = Term(batch=1, inputs=2)
MEAN = Term(batch=1, inputs=1)
GRAM = Term(batch=2, inputs=1)
GRAM_INVERSE = Term(batch=3)
GRAM_SPACE = Term(batch=2)
FORM_OUTPUT = Term(batch=1, outputs=2)
GRAM_OUTPUT = Term(batch=2, outputs=1)
RECURSION_TIME = Order(Term(inputs=2, outputs=1), Term(inputs=1, outputs=2), FORM_INPUT, FORM_OUTPUT)
RECURSION_SPACE = Order(INPUT, GRADIENT, OUTPUT, MEAN, ROWS)
CG_OUTPUT = Term(iterations=1, outputs=2)

CURVLAB: dict[tuple[str, str, str, str], Order] = {
    ("time", "curvature", "fisher", TEXTBOOK): Order(FORM_OUTPUT),
    ("space", "curvature", "fisher", TEXTBOOK): Order(OUTPUT, ROWS),
    ("time", "curvature", "gauss-newton", TEXTBOOK): RECURSION_TIME,
    ("space", "curvature", "gauss-newton", TEXTBOOK): RECURSION_SPACE,
    ("time", "curvature", "pch-1", TEXTBOOK): RECURSION_TIME,
    ("space", "curvature", "pch-1", TEXTBOOK): RECURSION_SPACE,
    ("time", "solve", "kfi", TEXTBOOK): Order(
        OUTPUT_INVERSE, Term(inputs=3), Term(inputs=2, outputs=1), Term(inputs=1, outputs=2), FORM_INPUT
    ),
    ("space", "solve", "kfi", TEXTBOOK): Order(INPUT, OUTPUT, GRADIENT),
    ("time", "solve", "kfi", SAMPLE_SPACE): Order(
        GRAM, GRAM_INVERSE, OUTPUT_INVERSE, FORM_OUTPUT, GRAM_OUTPUT
    ),
    ("space", "solve", "kfi", SAMPLE_SPACE): Order(GRAM_SPACE, OUTPUT, ROWS),
    ("time", "solve", "sm-kfi", TEXTBOOK): Order(OUTPUT_INVERSE, Term(inputs=1, outputs=2), MEAN),
    ("space", "solve", "sm-kfi", TEXTBOOK): Order(OUTPUT, GRADIENT),
    ("time", "solve", "sm-kfi", SAMPLE_SPACE): Order(OUTPUT_INVERSE, FORM_OUTPUT, MEAN),
    ("space", "solve", "sm-kfi", SAMPLE_SPACE): Order(OUTPUT, ROWS, Term(inputs=1)),
    ("time", "solve", "ea-cg", TEXTBOOK): Order(CG_OUTPUT, Term(iterations=1, inputs=1, outputs=1), MEAN),
    ("space", "solve", "ea-cg", TEXTBOOK): Order(OUTPUT, GRADIENT),
    ("time", "solve", "ea-cg", SAMPLE_SPACE): Order(GRAM, GRAM_OUTPUT, CG_OUTPUT),
    ("space", "solve", "ea-cg", SAMPLE_SPACE): Order(OUTPUT, GRAM_SPACE, ROWS, Term(inputs=1)),
    ("time", "solve", "cg", TEXTBOOK): Order(
        Term(iterations=1, inputs=1, outputs=2), Term(iterations=1, inputs=2, outputs=1), FORM_INPUT
    ),
    ("space", "solve", "cg", TEXTBOOK): Order(INPUT, OUTPUT, GRADIENT),
    ("time", "solve", "cg", SAMPLE_SPACE): Order(
        GRAM, GRAM_INVERSE, GRAM_OUTPUT, Term(iterations=1, batch=1, outputs=2)
    ),
    ("space", "solve", "cg", SAMPLE_SPACE): Order(OUTPUT, GRAM_SPACE, ROWS),
}
