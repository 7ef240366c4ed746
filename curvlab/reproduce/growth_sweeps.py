"""What grows in Table 1's study, from where to where, while all else stays.

    outputs      n_t        units of the layer
    inputs       n_{t-1}    its inputs
    batch        m          examples
    iterations   |CG|       of a solver that iterates

A ladder is geometric. Where a formula has several terms, the sizes that stay are chosen so that the term in
the variable that grows is a large one; in the sample space the batch is smaller than the layer is wide, as it
is where curvlab chooses that form. The two forms need ladders of their own where one does so little that its
seconds would be those of the calls, not of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from curvlab.exceptions import SpecError

__all__ = [
    "ITERATIVE",
    "SAMPLE_SPACE",
    "SCALES",
    "SYMBOLS",
    "TEXTBOOK",
    "VARIABLES",
    "Scale",
    "Sizes",
    "Sweep",
    "sweeps",
]

SYMBOLS = {"outputs": "n_t", "inputs": "n_{t-1}", "batch": "m", "iterations": "|CG|"}
VARIABLES = tuple(SYMBOLS)
TEXTBOOK, SAMPLE_SPACE = "textbook", "sample space"
BOTH = (TEXTBOOK, SAMPLE_SPACE)
ITERATIVE = ("ea-cg", "cg")


@dataclass(frozen=True)
class Sizes:
    """A layer of n_t × n_{t-1} weights, the batch it sees and the iterations of a solver."""

    outputs: int
    inputs: int
    batch: int
    iterations: int = 20

    def scaled(self, factor: float) -> Sizes:
        """The same with layer and batch larger or smaller; iterations stay.

        >>> Sizes(256, 1024, 128).scaled(0.25)
        Sizes(outputs=64, inputs=256, batch=32, iterations=20)
        """
        larger = {name: max(1, round(size * factor)) for name, size in asdict(self).items()}
        return Sizes(**larger | {"iterations": self.iterations})


@dataclass(frozen=True)
class Scale:
    """How large, how long and how often.

    `factor` multiplies all sizes, `ratio` is a ladder's step; `iterations` are those of CG while another size
    grows.
    """

    factor: float
    ratio: float
    points: int
    repetitions: int
    iterations: int


SCALES = {
    "smoke": Scale(factor=0.25, ratio=1.5, points=4, repetitions=2, iterations=6),
    "laptop": Scale(factor=1.0, ratio=1.5, points=6, repetitions=5, iterations=20),
    "paper": Scale(factor=1.5, ratio=1.5, points=8, repetitions=9, iterations=20),
}


@dataclass(frozen=True)
class Sweep:
    """One variable grows, from the value it has in `start`, for these subjects in these formulations."""

    quantity: str
    subjects: tuple[str, ...]
    formulations: tuple[str, ...]
    variable: str
    start: Sizes

    def ladder(self, scale: Scale) -> Iterator[Sizes]:
        """The sizes of each point.

        >>> sweep = Sweep("solve", ("kfi",), BOTH, "inputs", Sizes(outputs=128, inputs=512, batch=128))
        >>> [sizes.inputs for sizes in sweep.ladder(SCALES["laptop"])]
        [512, 768, 1152, 1728, 2592, 3888]
        """
        first = self.start.scaled(scale.factor)
        if self.variable != "iterations":
            first = replace(first, iterations=scale.iterations)
        for step in range(scale.points):
            grown = round(getattr(first, self.variable) * scale.ratio**step)
            yield replace(first, **{self.variable: grown})


RECURSIONS = ("gauss-newton", "pch-1")
INVERSES = ("kfi", "sm-kfi")
SWEEPS = (
    Sweep("curvature", ("fisher",), BOTH, "outputs", Sizes(512, 256, 512)),
    Sweep("curvature", ("fisher",), BOTH, "inputs", Sizes(1024, 256, 512)),
    Sweep("curvature", ("fisher",), BOTH, "batch", Sizes(1024, 256, 256)),
    Sweep("curvature", RECURSIONS, (TEXTBOOK,), "outputs", Sizes(256, 1024, 128)),
    Sweep("curvature", RECURSIONS, (TEXTBOOK,), "inputs", Sizes(256, 512, 128)),
    Sweep("curvature", RECURSIONS, (TEXTBOOK,), "batch", Sizes(768, 768, 128)),
    Sweep("solve", INVERSES, BOTH, "outputs", Sizes(384, 256, 128)),
    Sweep("solve", ("kfi",), (TEXTBOOK,), "inputs", Sizes(128, 512, 128)),
    Sweep("solve", ("kfi",), (SAMPLE_SPACE,), "inputs", Sizes(128, 8192, 128)),
    Sweep("solve", ("kfi",), (TEXTBOOK,), "batch", Sizes(128, 2048, 96)),
    Sweep("solve", ("kfi",), (SAMPLE_SPACE,), "batch", Sizes(128, 8192, 128)),
    Sweep("solve", ("sm-kfi",), BOTH, "inputs", Sizes(512, 2048, 128)),
    Sweep("solve", ("sm-kfi",), BOTH, "batch", Sizes(512, 2048, 96)),
    Sweep("solve", ("ea-cg",), BOTH, "outputs", Sizes(384, 1024, 128)),
    Sweep("solve", ("ea-cg",), (TEXTBOOK,), "inputs", Sizes(384, 2048, 128)),
    Sweep("solve", ("ea-cg",), (SAMPLE_SPACE,), "inputs", Sizes(256, 8192, 128)),
    Sweep("solve", ("ea-cg",), (TEXTBOOK,), "batch", Sizes(256, 2048, 96)),
    Sweep("solve", ("ea-cg",), (SAMPLE_SPACE,), "batch", Sizes(256, 8192, 128)),
    Sweep("solve", ("ea-cg",), BOTH, "iterations", Sizes(768, 1024, 128, iterations=8)),
    Sweep("solve", ("cg",), BOTH, "outputs", Sizes(256, 512, 128)),
    Sweep("solve", ("cg",), (TEXTBOOK,), "inputs", Sizes(128, 384, 128)),
    Sweep("solve", ("cg",), (SAMPLE_SPACE,), "inputs", Sizes(128, 8192, 128)),
    Sweep("solve", ("cg",), (TEXTBOOK,), "batch", Sizes(128, 1024, 96)),
    Sweep("solve", ("cg",), (SAMPLE_SPACE,), "batch", Sizes(128, 4096, 128)),
    Sweep("solve", ("cg",), BOTH, "iterations", Sizes(512, 1024, 128, iterations=8)),
)


def sweeps(scale_name: str) -> Iterator[tuple[Sweep, Sizes]]:
    """Every sweep with each of its points, at a scale."""
    if scale_name not in SCALES:
        raise SpecError(f"scale `{scale_name}` is not known; use one of {', '.join(SCALES)}")
    for sweep in SWEEPS:
        for sizes in sweep.ladder(SCALES[scale_name]):
            yield sweep, sizes
