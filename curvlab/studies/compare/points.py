"""Points on the way of a training, by name: where a comparison measures.

init          the model as it is built                 checkpoint   the state that a file holds
step:N        after N steps of Adam                    epoch:N      after N passes over the training set
trained       after as many steps as a stated cost buys, at most 100
given         a problem from Python, as it is
"""

from __future__ import annotations

from dataclasses import dataclass

from curvlab.exceptions import SpecError

__all__ = ["GIVEN", "Point", "read_points"]

GIVEN = "given"
MOST = 864_000_000  # steps of a tenth of a millisecond in a day
USABLE = (
    "init, trained, checkpoint, step:N or epoch:N (N from 1), several with commas: --at init,epoch:1,epoch:5"
)
WORDS = {
    GIVEN: "the model as it was given",
    "init": "the model as it is built, untrained",
    "checkpoint": "the checkpoint",
}


@dataclass(frozen=True)
class Point:
    """A place on the way of a training.

    >>> Point.read("epoch:5").words
    'after 5 epochs of Adam'
    """

    name: str
    kind: str
    count: int = 0

    @classmethod
    def read(cls, text: str) -> Point:
        """The point by its name."""
        kind, _, count = text.partition(":")
        plain = kind in ("init", "trained", "checkpoint", GIVEN) and not count
        counted = kind in ("step", "epoch") and count.isdecimal() and count.strip("0") != ""
        if not plain and not counted:
            raise SpecError(f"point `{text}` is not known; use {USABLE}")
        # Python reads no number of thousands of digits.
        if counted and (len(count) > 12 or int(count) > MOST):
            raise SpecError(
                f"point `{text[:60]}`: more than {MOST:,} steps take longer than a day even on the smallest "
                f"model; measure earlier, or begin at a --checkpoint"
            )
        return cls(text, kind, int(count or 0))

    @property
    def words(self) -> str:
        """The point in words, as reports name it."""
        if self.kind == "trained":
            return "after training"
        if self.kind in ("step", "epoch"):
            return f"after {self.count} {self.kind}{'s' if self.count > 1 else ''} of Adam"
        return WORDS[self.kind]


def read_points(names: tuple[str, ...]) -> tuple[str, ...]:
    """The points that are named, one or several with commas in each text, checked.

    >>> read_points(("init,epoch:1", "epoch:5"))
    ('init', 'epoch:1', 'epoch:5')
    """
    found = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if names and not found:
        raise SpecError(f"at=`{','.join(names)}` names no point; use {USABLE}")
    return tuple(dict.fromkeys(Point.read(name).name for name in found))
