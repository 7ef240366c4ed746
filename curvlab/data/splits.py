"""Splits, subsets and shuffles that depend on a seed and on nothing else.

Every draw has a generator of its own, keyed by the seed and by what it is for, so that no two
purposes share a stream and torch's global random state is neither read nor advanced.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from curvlab.exceptions import DataError

__all__ = ["generator", "permutation", "stratified_split", "stratified_subset"]


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator keyed by `seed` and `purpose`.

    >>> a, b = generator(0, "shuffle", 1), generator(0, "shuffle", 1)
    >>> torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    True
    """
    # torch reads 32 bits of a CPU seed: hashing keeps neighbouring seeds and epochs apart
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


def permutation(count: int, seed: int, *purpose: str | int) -> Tensor:
    """A random order of `count` things, fixed by `seed` and `purpose`.

    >>> permutation(5, 0, "shuffle").sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    return torch.randperm(count, generator=generator(seed, *purpose))


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of a training and a test set, drawn class by class.

    Of n examples round(fraction · n) are for testing, at least one and at most n - 1.

    >>> train, test = stratified_split(torch.tensor([0] * 10 + [1] * 5), 0.2, seed=0)
    >>> len(train), len(test)
    (12, 3)
    """
    train, test = [], []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        if len(members) < 2:
            raise DataError(
                f"class {label} has {len(members)} example; a training and a test set need at least two: "
                "add examples or leave the class out"
            )
        order = members[permutation(len(members), seed, "split", label)]
        cut = min(max(round(fraction * len(members)), 1), len(members) - 1)
        test.append(order[:cut])
        train.append(order[cut:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values


def stratified_subset(labels: Tensor | None, available: int, count: int, seed: int) -> Tensor:
    """Indices of `count` of the `available` examples.

    Each class is there in proportion (largest remainder); without labels, any `count` are taken.

    >>> chosen = stratified_subset(torch.tensor([0] * 80 + [1] * 20), 100, 10, seed=0)
    >>> (chosen < 80).sum().item(), len(chosen)
    (8, 10)
    """
    if not 1 <= count <= available:
        raise DataError(f"a subset of {count} examples was asked for; use 1 to {available}, all there are")
    if labels is None:
        return permutation(available, seed, "subset")[:count].sort().values
    values, sizes = labels.unique(return_counts=True)
    chosen = []
    for label, take in zip(values.tolist(), _quotas(sizes, count, seed), strict=True):
        members = (labels == label).nonzero().flatten()
        chosen.append(members[permutation(len(members), seed, "subset", label)[:take]])
    return torch.cat(chosen).sort().values


def _quotas(sizes: Tensor, count: int, seed: int) -> list[int]:
    """How many of each class make `count`; a seeded order breaks ties between equal remainders."""
    total = int(sizes.sum())
    quotas = sizes * count // total
    remainders = sizes * count % total
    order = permutation(len(sizes), seed, "quota")
    ranked = order[remainders[order].argsort(descending=True, stable=True)]
    quotas[ranked[: count - int(quotas.sum())]] += 1
    return [int(quota) for quota in quotas]
