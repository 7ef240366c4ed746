"""Characters of a generated text, for causal models: nothing is downloaded.

The text is a language of its own, fixed by the seed: 200 words of one to three syllables (a consonant, a
vowel and at times another consonant), each with `SUCCESSORS` words that may follow it, the r-th of them with
probability proportional to 1/r; a sentence has 3 to 10 words and ends in a full stop. So there is spelling,
vocabulary and order of words to be learnt, and the loss has a floor above zero.

An example is a window of `length` characters, its targets are the `length` characters one place later;
windows do not overlap, and the test windows come from later in the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from curvlab.data.base import Dataset, Examples, Source, generator
from curvlab.data.inputs import TokenInputs
from curvlab.exceptions import SpecError

__all__ = ["SYMBOLS", "Characters", "generate"]

SYMBOLS = " .abcdefghijklmnopqrstuvwxyz"
VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
WORDS = 200
CLOSED = 1 / 3
SUCCESSORS = 8
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Characters(Source):
    """Windows of `length` characters with the next character of each as its target.

    >>> data = Characters(length=16, examples=100).load(seed=0)
    >>> inputs, targets = data.train.all()
    >>> inputs.shape, targets.shape, data.outputs
    (torch.Size([80, 16]), torch.Size([80, 16]), 28)
    """

    architecture: ClassVar[str] = "gpt-nano"

    length: int = 32
    examples: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("length", 1), ("examples", 2)):
            if getattr(self, field) < least:
                raise SpecError(f"{field} is {getattr(self, field)}; use {least} or more")

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """The length of a window and the number of symbols."""
        return (self.length,), len(SYMBOLS)

    def _load(self, seed: int, data_dir: Path | None) -> Dataset:
        codes = _encode(generate(self.examples * self.length + 1, seed))
        inputs, targets = codes[:-1].reshape(-1, self.length), codes[1:].reshape(-1, self.length)
        cut = self.examples - max(round(TEST_FRACTION * self.examples), 1)
        return Dataset(
            name="characters",
            train=Examples(TokenInputs(inputs[:cut]), targets[:cut]),
            test=Examples(TokenInputs(inputs[cut:]), targets[cut:]),
            class_names=tuple(SYMBOLS),
            note=f"Characters of a generated text of {WORDS} words with {SUCCESSORS} successors each; "
            f"windows of {self.length} that do not overlap, the last 20 % for testing.",
        )


def generate(length: int, seed: int = 0) -> str:
    """The first `length` characters of the text of a seed; a shorter text is the beginning of a longer one.

    >>> text = generate(1000, seed=0)
    >>> len(text), set(text) <= set(SYMBOLS), generate(10, seed=0) == text[:10]
    (1000, True, True)
    """
    words = _lexicon(generator(seed, "characters", "words"))
    successors = torch.randint(WORDS, (WORDS, SUCCESSORS), generator=generator(seed, "characters", "order"))
    shares = 1 / torch.arange(1, SUCCESSORS + 1)
    steps = generator(seed, "characters", "text")
    parts: list[str] = []
    written, word = 0, 0
    while written < length:
        count = int(torch.randint(3, 11, (), generator=steps))
        chosen = torch.multinomial(shares, count, replacement=True, generator=steps)
        sentence = []
        for choice in chosen.tolist():
            word = int(successors[word, choice])
            sentence.append(words[word])
        parts.append(" ".join(sentence) + ". ")
        written += len(parts[-1])
    return "".join(parts)[:length]


def _lexicon(draws: torch.Generator) -> list[str]:
    words: list[str] = []
    while len(words) < WORDS:
        syllables = 1 + int(torch.multinomial(torch.tensor([3.0, 4.0, 2.0]), 1, generator=draws))
        word = "".join(_syllable(draws) for _ in range(syllables))
        if word not in words:
            words.append(word)
    return words


def _syllable(draws: torch.Generator) -> str:
    first, vowel, last, closed = torch.rand(4, generator=draws).tolist()
    start = CONSONANTS[int(first * len(CONSONANTS))] + VOWELS[int(vowel * len(VOWELS))]
    return start + CONSONANTS[int(last * len(CONSONANTS))] if closed < CLOSED else start


def _encode(text: str) -> Tensor:
    codes = {symbol: code for code, symbol in enumerate(SYMBOLS)}
    return torch.tensor([codes[symbol] for symbol in text])
