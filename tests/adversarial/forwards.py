"""The table of forwards, honest and sneaky: what `tests/adversarial/test_forwards.py` runs.

python -m tests.adversarial.forwards [words of a name …]      prints the verdicts and their counts
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.adversarial import honest_inputs, sneaky_changes, sneaky_later
from tests.adversarial.honest import HONEST
from tests.adversarial.items import Item, verdict
from tests.adversarial.sneaky import SNEAKY

__all__ = ["ITEMS", "counts", "main"]

# Importing them completed the two tables.
assert not honest_inputs.__all__ + sneaky_changes.__all__
assert sneaky_later.LATER

ITEMS = [Item(name, "honest", make) for name, make in HONEST.items()] + [
    Item(name, "sneaky", make) for name, make in SNEAKY.items()
]


def counts(outcomes: dict[str, dict[str, str]]) -> str:
    """One line for each kind: how many came out right, refused, silently wrong or with a traceback."""
    lines = []
    for kind, found in outcomes.items():
        number = Counter(found.values())
        told = ", ".join(f"{number[o]} {o}" for o in ("right", "refused", "silent", "traceback"))
        lines.append(f"{len(found)} {kind} forwards: {told}")
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Print the verdict of every item whose name contains all words."""
    outcomes: dict[str, dict[str, str]] = {"honest": {}, "sneaky": {}}
    for item in ITEMS:
        if all(word in f"{item.kind} {item.name}" for word in words):
            found = verdict(item)
            outcomes[item.kind][item.name] = found.outcome
            print(f"{found.outcome:9} {item.kind}: {item.name}  {found.reason[:200]}")
    print(counts(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
