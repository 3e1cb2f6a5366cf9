"""Lists of words, and the lattices of sentences without blanks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import DataError
from batchmaker.lab.datasets.lattices import Lattice
from batchmaker.lab.datasets.text import read_lines
from batchmaker.lab.datasets.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class WordList:
    """Distinct words; a word's id is its place. DataError for an empty or repeated word."""

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)
    longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = {word: number for number, word in enumerate(self.words)}
        if len(ids) < len(self.words) or "" in ids:
            raise DataError("a word list holds distinct words, none of them empty.")
        object.__setattr__(self, "_ids", ids)
        object.__setattr__(self, "longest", max(map(len, self.words), default=0))

    def __len__(self) -> int:
        return len(self.words)

    def id_of(self, word: str) -> int | None:
        """Return the word's id, None if it is not in the list."""
        return self._ids.get(word)


def read_word_list(path: str | PathLike[str]) -> WordList:
    """Return the words of a file, one a line, alone or before a tab and a frequency. Gzipped if named `.gz`.

    Blank lines are skipped. Raises DataError, naming file and line, for any other line, a repeated word, or a file
    without words.
    """
    first: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        word, tab, frequency = line.partition("\t")
        if not word.strip() or (tab and not frequency.strip().isdecimal()):
            raise DataError(f"{path}, line {number}: got {line!r}, expected a word, or a word, a tab and a frequency.")
        if first.setdefault(word, number) != number:
            raise DataError(
                f"{path}, line {number}: {word!r} is already on line {first[word]}; expected each word once."
            )
    if not first:
        raise DataError(f"{path}: the file has no words; expected one a line.")
    return WordList(tuple(first))


def lattice_of(
    characters: Sequence[str], words: WordList, vocabulary: Vocabulary, labels: NDArray[np.int64] | None = None
) -> Lattice:
    """Return the lattice of a sentence: its characters, and every word of the list in it.

    characters: the sentence's, at least one. vocabulary: gives characters their ids. A word is two characters or more.
    Of the arcs to a node the character is first, then words, the longest first. labels: of the characters
    [len(characters)] int64, 0 if left out; the start has label 0.
    """
    if not characters:
        raise DataError("a lattice needs at least one character.")
    ids = vocabulary.encode_words(characters).tolist()
    arcs: list[tuple[int, int, int]] = []
    for target in range(1, len(characters) + 1):
        arcs.append((target - 1, target, ids[target - 1]))
        for source in range(max(0, target - words.longest), target - 1):
            word = words.id_of("".join(characters[source:target]))
            if word is not None:
                arcs.append((source, target, word))
    character_labels = np.zeros(len(characters), np.int64) if labels is None else labels
    return Lattice(np.array(arcs, np.int64), np.concatenate((np.zeros(1, np.int64), character_labels)))
