"""Sentences with the head of each word: dependency trees, from CoNLL-U files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import DataError
from batchmaker.lab.datasets.text import read_lines

_COLUMNS: Final = 10


@dataclass(frozen=True, slots=True, eq=False)
class DependencyTree:
    """A sentence and its dependencies.

    words: in order. heads: [words] int64, the head of each word, counted from 1; 0 for the root. DataError unless every
    word leads to one root.
    """

    words: tuple[str, ...]
    heads: NDArray[np.int64]

    def __post_init__(self) -> None:
        heads, count = self.heads, len(self.words)
        if count == 0 or heads.shape != (count,) or heads.dtype != np.int64:
            raise DataError(
                f"dependency tree: got {count} words and heads {heads.dtype}{list(heads.shape)}, expected int64, as "
                "many as words, at least one."
            )
        if (wrong := np.flatnonzero((heads < 0) | (heads > count))).size:
            raise DataError(
                f"dependency tree: the head of word {wrong[0] + 1} is {heads[wrong[0]]}, expected 0 to {count}."
            )
        if (roots := np.flatnonzero(heads == 0) + 1).size != 1:
            raise DataError(f"dependency tree: words {roots.tolist()} have head 0, expected one root.")
        above = np.concatenate(([0], heads))
        reached = above
        for _ in range(count.bit_length()):
            reached = reached[reached]
        if reached.any():
            raise DataError(
                f"dependency tree: the heads of word {int(np.flatnonzero(reached)[0])} lead into a cycle, not to the "
                "root."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DependencyTree):
            return NotImplemented
        return self.words == other.words and np.array_equal(self.heads, other.heads)

    __hash__ = None  # type: ignore[assignment]


def read_conllu(path: str | PathLike[str]) -> list[DependencyTree]:
    """Return the sentences of a file in CoNLL-U. Gzipped if named `.gz`.

    Comments, ranges (1-2) and empty nodes (1.1) are left out. Raises DataError, naming file and line, for a line that
    has not ten columns or no number of a word and of its head, and if there is no sentence. Source of the format:
    Universal Dependencies, version 2.
    """
    trees: list[DependencyTree] = []
    words: list[str] = []
    heads: list[int] = []
    for number, line in enumerate([*read_lines(path), ""], start=1):
        if not line.strip():
            if words:
                try:
                    trees.append(DependencyTree(tuple(words), np.array(heads, np.int64)))
                except DataError as error:
                    raise DataError(f"{path}, the sentence before line {number}: {error}") from None
            words, heads = [], []
        elif not line.startswith("#"):
            columns = line.split("\t")
            if len(columns) != _COLUMNS:
                raise DataError(f"{path}, line {number}: got {len(columns)} columns, expected {_COLUMNS}.")
            if "-" in columns[0] or "." in columns[0]:
                continue
            if columns[0] != str(len(words) + 1) or not columns[6].isdecimal():
                raise DataError(
                    f"{path}, line {number}: got word {columns[0]!r} with head {columns[6]!r}, expected word "
                    f"{len(words) + 1} and a number."
                )
            words.append(columns[1])
            heads.append(int(columns[6]))
    if not trees:
        raise DataError(f"{path}: found no sentence; expected CoNLL-U.")
    return trees
