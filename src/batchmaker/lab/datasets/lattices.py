"""Lattices over characters and words (Zhang and Yang 2018), and the files of ED-Batch's evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import DataError
from batchmaker.lab.datasets.text import read_lines


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """A sentence whose characters and words are arcs between the places around its characters.

    Node 0 is the start, before the first character; node t is the place after character t. arcs: [num_arcs, 3] int64,
    each (source, target, id), targets ascending. An arc from t - 1 to t is a character and its id that of the
    character; any other goes over two characters or more and its id is that of a word. labels: [num_nodes] int64.
    Raises DataError if shapes or dtypes disagree, targets are not ascending, or an arc does not go forwards.
    """

    arcs: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.dtype != np.int64 or len(self.labels) == 0:
            raise DataError(
                f"lattice, labels: got {self.labels.dtype}{list(self.labels.shape)}, expected int64[nodes]."
            )
        if self.arcs.ndim != 2 or self.arcs.shape[1] != 3 or self.arcs.dtype != np.int64:
            raise DataError(f"lattice, arcs: got {self.arcs.dtype}{list(self.arcs.shape)}, expected int64[arcs, 3].")
        source, target, _ = self.arcs.T
        if (source < 0).any() or (source >= target).any() or (target >= self.num_nodes).any():
            raise DataError(
                f"lattice, arcs: expected 0 <= source < target < {self.num_nodes}; arcs go forwards and make no cycle."
            )
        if (np.diff(target) < 0).any():
            raise DataError("lattice, arcs: expected them in order of their targets.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lattice):
            return NotImplemented
        return np.array_equal(self.arcs, other.arcs) and np.array_equal(self.labels, other.labels)

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def are_characters(self) -> NDArray[np.bool_]:
        """Which arcs are characters: [num_arcs]."""
        are_short: NDArray[np.bool_] = self.arcs[:, 0] == self.arcs[:, 1] - 1
        return are_short


def read_lattices(path: str | PathLike[str]) -> list[Lattice]:
    """Return the lattices of a file of ED-Batch's evaluation, in file order. Gzipped if named `.gz`.

    The file has whole numbers between blanks: the number of lattices; then for each its number of nodes, a label for
    each node, and for each node its number of arcs with a source and an id for each. In the known files node 0 has no
    arcs and every other node has its character first. Raises DataError, naming file and line, for any other file, or
    one without lattices.
    """
    numbers = _NumberedLines(path)
    count = numbers.next("the number of lattices", least=1)
    lattices = [_read_lattice(numbers, f"lattice {i + 1} of {count}") for i in range(count)]
    numbers.end(f"{count} lattices")
    return lattices


def _read_lattice(numbers: _NumberedLines, which: str) -> Lattice:
    num_nodes = numbers.next(f"{which}: its number of nodes", least=1)
    labels = [numbers.next(f"{which}: the label of node {node}") for node in range(num_nodes)]
    arcs: list[tuple[int, int, int]] = []
    for node in range(num_nodes):
        for _ in range(numbers.next(f"{which}: the number of arcs to node {node}")):
            source = numbers.next(f"{which}: where an arc to node {node} comes from", below=node)
            arcs.append((source, node, numbers.next(f"{which}: the id of an arc to node {node}")))
    return Lattice(np.array(arcs, np.int64).reshape(-1, 3), np.array(labels, np.int64))


@final
class _NumberedLines:
    """The numbers of a file one by one, each with its line."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._line = 0
        self._words = self._read(read_lines(path))

    def _read(self, lines: list[str]) -> Iterator[str]:
        for number, line in enumerate(lines, start=1):
            self._line = number
            yield from line.split()

    def next(self, what: str, *, least: int = 0, below: int | None = None) -> int:
        """Return the next number. DataError if it is missing or out of range."""
        word = next(self._words, None)
        if word is None:
            raise DataError(f"{self._path}: the file ends after line {self._line}; expected {what}.")
        value = int(word) if word.isascii() and word.isdigit() and len(word) <= 18 else -1
        if value < least or (below is not None and value >= below):
            allowed = f"of at least {least}" if below is None else f"from {least} to {below - 1}"
            raise DataError(
                f"{self._path}, line {self._line}: got {word!r}, expected {what}, a whole number {allowed}."
            )
        return value

    def end(self, after: str) -> None:
        """Raise DataError if there is another number."""
        word = next(self._words, None)
        if word is not None:
            raise DataError(
                f"{self._path}, line {self._line}: got {word!r} after {after}; expected the end of the file."
            )
