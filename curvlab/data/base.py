"""A data set: training and test examples, and batches of them that any run can repeat.

The order of an epoch is a function of (seed, epoch) alone; a run that stopped after batch b
continues with `batches(…, start=b)` and sees exactly what it would have seen. What can be loaded
is a `Source`: a frozen configuration with one method, `load(seed, data_dir) -> Dataset`, which
`dataset` looks up by its name.

Splits, subsets and orders depend on a seed and on nothing else: every draw has a generator of
its own, keyed by the seed and by what it is for, so that no two purposes share a stream and
torch's global random state is neither read nor advanced.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from curvlab.data.inputs import Inputs, TokenInputs
from curvlab.exceptions import DataError, SpecError
from curvlab.measure.device import send
from curvlab.specs import Registry

__all__ = [
    "Batches",
    "Dataset",
    "Examples",
    "InputKind",
    "Source",
    "dataset",
    "datasets",
    "generator",
    "permutation",
    "stratified_split",
    "stratified_subset",
]

InputKind = Literal["rows", "images", "tokens"]
Begun = Callable[[], tuple[Tensor, Tensor]]

DESCRIPTIONS = {
    "rows": "rows of features",
    "images": "images (channels, height, width)",
    "tokens": "sequences of tokens",
}
ADVICE = {
    "rows": "digits, cifar10 or synthetic data",
    "images": "digits, cifar10 or synthetic-images",
    "tokens": "the data set characters",
}
NETWORKS = {
    "rows": "a fully-connected network (fcnn)",
    "images": "a network for images (cnn, resnet8, vit-tiny) or an fcnn",
    "tokens": "a network for tokens (gpt-nano)",
}


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs with their targets.

    Targets are class indices (int64; one for each token where the inputs are tokens), values (floating
    point, (examples, outputs)), or `None` where the inputs are their own targets. Batches hold inputs
    as rows, (examples, features), or with `shaped` in their own shape, (examples, *shape).
    """

    inputs: Inputs
    targets: Tensor | None
    shaped: bool = False

    def __post_init__(self) -> None:
        if self.targets is not None and len(self.targets) != len(self.inputs):
            raise DataError(f"{len(self.inputs)} inputs and {len(self.targets)} targets; give as many")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        if self.targets is not None:
            return self.targets.device
        return torch.device(getattr(self.inputs, "device", self.inputs.place))

    @property
    def features(self) -> int:
        """Length of one input row."""
        return self.inputs.features

    @property
    def labels(self) -> Tensor | None:
        """The targets where they are class indices, else `None`."""
        if self.targets is None or self.targets.is_floating_point():
            return None
        return self.targets

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these examples."""
        return self.begin(indices)()

    def begin(self, indices: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Do the host's part of `batch` ahead of time; the call returned does the device's."""
        begun = self.inputs.begin(indices)

        def finish() -> tuple[Tensor, Tensor]:
            rows = begun()
            if self.shaped:
                rows = rows.reshape(len(rows), *self.inputs.shape)
            if self.targets is None:
                return rows, rows
            return rows, self.targets[send(indices, self.targets.device)]

        return finish

    def all(self) -> tuple[Tensor, Tensor]:
        """Every example in one batch; mind the memory with large images."""
        return self.batch(torch.arange(len(self)))

    def in_order(self, batch_size: int) -> Batches:
        """Every example once, in the order they are kept: for evaluation."""
        return Batches(self, torch.arange(len(self)), batch_size)

    def select(self, indices: Tensor) -> Examples:
        """These examples only."""
        targets = None if self.targets is None else self.targets[indices]
        return replace(self, inputs=self.inputs.select(indices), targets=targets)

    def subset(self, count: int, seed: int = 0) -> Examples:
        """`count` of them drawn by `seed`, each class in proportion where an example has one class."""
        labels = self.labels if self.labels is not None and self.labels.ndim == 1 else None
        return self.select(stratified_subset(labels, len(self), count, seed))

    def at_most(self, count: int, seed: int = 0) -> Examples:
        """All of them, or a `subset` where there are more than `count`."""
        return self if len(self) <= count else self.subset(count, seed)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Examples:
        """The same examples on `device`, inputs and real targets in `dtype`; labels stay int64."""
        targets = self.targets
        if targets is not None:
            targets = targets.to(device) if self.labels is not None else targets.to(device, dtype)
        return replace(self, inputs=self.inputs.to(device, dtype), targets=targets)


def _one_ahead(begin: Callable[[Tensor], Begun], parts: Iterable[Tensor]) -> Iterator[Begun]:
    """What the host has to do for the next batch, done while the device works on this one."""
    with ThreadPoolExecutor(1, "curvlab-batches") as pool:
        waiting: Future[Begun] | None = None
        for part in parts:
            coming = pool.submit(begin, part)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()


@dataclass(frozen=True, eq=False)
class Batches:
    """An iterable of (inputs, targets), the same each time it is iterated over."""

    examples: Examples
    order: Tensor
    batch_size: int
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SpecError(f"batch size is {self.batch_size}; use 1 or more")
        if self.drop_last and self.batch_size > len(self.order):
            raise DataError(
                f"batch size {self.batch_size} with drop_last leaves no batch of {len(self.order)} examples; "
                f"use a batch size of at most {len(self.order)}"
            )
        if not 0 <= self.start <= self._total:
            raise DataError(f"start is batch {self.start}; use 0 to {self._total}, the batches of the epoch")

    @property
    def _total(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        """Batches from `start` on."""
        return self._total - self.start

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.parts(lambda count: slice(count))

    def parts(self, rows: Callable[[int], slice]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every batch those of so many rows that `rows` names; the others are not read."""
        place = self.examples.inputs.place
        order = send(self.order, place)  # once: an epoch brings no more indices to an accelerator
        firsts = range(self.start * self.batch_size, self._total * self.batch_size, self.batch_size)
        whole = (order[first : first + self.batch_size] for first in firsts)
        parts = (batch[rows(len(batch))] for batch in whole)
        ahead = place.type == "cpu" and self.examples.device.type != "cpu"
        yield from (finish() for finish in (_one_ahead if ahead else map)(self.examples.begin, parts))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples; `note` says where they are from and how they were standardised.

    >>> from curvlab.data import dataset
    >>> digits = dataset("digits").load(seed=0)
    >>> digits.features, digits.outputs, len(digits.batches(100, seed=0, epoch=0))
    (64, 10, 15)
    """

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    note: str

    @property
    def classes(self) -> int | None:
        """How many classes, or `None` for regression."""
        return len(self.class_names) or None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example before it is flattened."""
        return self.train.inputs.shape

    @property
    def features(self) -> int:
        """Inputs a network for this data has."""
        return self.train.features

    @property
    def kind(self) -> InputKind:
        """What an example is: a row of features, an image (channels, height, width), or tokens."""
        if isinstance(self.train.inputs, TokenInputs):
            return "tokens"
        return "images" if len(self.shape) == 3 else "rows"

    def given_as(self, kind: InputKind) -> Dataset:
        """The same data with inputs as a network takes them: rows, images or tokens.

        Images are rows too, flattened; nothing else is what it is not.

        >>> from curvlab.data import dataset
        >>> digits = dataset("digits").load().given_as("images")
        >>> next(iter(digits.batches(100)))[0].shape
        torch.Size([100, 1, 8, 8])
        """
        if kind not in DESCRIPTIONS:
            raise DataError(f"inputs are wanted as `{kind}`; use one of {', '.join(DESCRIPTIONS)}")
        if kind != self.kind and (self.kind, kind) != ("images", "rows"):
            raise DataError(
                f"the network takes {DESCRIPTIONS[kind]}, and the data set `{self.name}` has "
                f"{DESCRIPTIONS[self.kind]}, of shape {self.shape} each; use {ADVICE[kind]}, or "
                f"{NETWORKS[self.kind]}"
            )
        shaped = kind == "images"
        return replace(self, train=replace(self.train, shaped=shaped), test=replace(self.test, shaped=shaped))

    @property
    def outputs(self) -> int:
        """Outputs a network for this data has: the classes, or the columns of the targets."""
        if self.class_names:
            return len(self.class_names)
        return self.features if self.train.targets is None else self.train.targets.shape[1]

    def batches(
        self, batch_size: int, seed: int = 0, epoch: int = 0, *, drop_last: bool = False, start: int = 0
    ) -> Batches:
        """The training examples in the order that (seed, epoch) gives them, from batch `start` on."""
        order = permutation(len(self.train), seed, "shuffle", epoch)
        return Batches(self.train, order, batch_size, drop_last, start)

    def subset(self, train: int | None = None, test: int | None = None, seed: int = 0) -> Dataset:
        """Fewer examples, drawn by `seed` with each class in proportion; `None` keeps them all."""
        return replace(
            self,
            train=self.train if train is None else self.train.subset(train, seed),
            test=self.test if test is None else self.test.subset(test, seed),
        )

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Dataset:
        """The same data on `device` in `dtype`."""
        return replace(self, train=self.train.to(device, dtype), test=self.test.to(device, dtype))

    def reconstruction(self) -> Dataset:
        """The same inputs as their own targets: what an autoencoder learns, with `mse`."""
        return replace(
            self,
            train=replace(self.train, targets=None),
            test=replace(self.test, targets=None),
            class_names=(),
            note=f"{self.note} Targets are the inputs themselves.",
        )


@dataclass(frozen=True)
class Source(ABC):
    """A data set by its settings.

    `train` and `test` limit how many examples are used, drawn by the seed with each class in
    proportion; standardisation is always that of the whole training set.
    """

    architecture: ClassVar[str] = "fcnn"
    """The name of the architecture that fits; `fcnn` takes its inputs and outputs from the data."""

    train: int | None = None
    test: int | None = None

    def __post_init__(self) -> None:
        for field in ("train", "test"):
            count = getattr(self, field)
            if count is not None and count < 1:
                raise SpecError(f"{field} is {count}; use 1 or more examples, or leave it out for all")

    def load(self, seed: int = 0, data_dir: str | Path | None = None) -> Dataset:
        """The data set; `seed` fixes splits, subsets and synthetic draws, `data_dir` is where files are."""
        folder = None if data_dir is None else Path(data_dir).expanduser()
        found = self._load(seed, folder)
        for field, examples in (("train", found.train), ("test", found.test)):
            count = getattr(self, field)
            if count is not None and count > len(examples):
                raise SpecError(
                    f"{field} is {count}; `{found.name}` has {len(examples)} such examples: use that many or "
                    f"fewer, or leave it out for all"
                )
        return found.subset(self.train, self.test, seed)

    def sizes(self) -> tuple[tuple[int, ...], int] | None:
        """Shape of an example and outputs of a network for it; None where only loading it tells.

        >>> from curvlab.data import dataset
        >>> dataset("cifar10").sizes()
        ((3, 32, 32), 10)
        """
        return None

    @abstractmethod
    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        """The whole data set."""


datasets: Registry[Source] = Registry("data set", "curvlab.datasets")
"""All data sets by name: `curvlab.data` registers those of this package."""


def dataset(spec: str | Source) -> Source:
    """The data set of a spec, `name` or `name[key=value,…]`, ready to `.load(seed, data_dir)`.

    >>> dataset("synthetic[features=20,classes=3]").load().features
    20
    """
    return datasets.make(spec)


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
