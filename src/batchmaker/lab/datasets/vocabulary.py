"""Words and their ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets.text import read_lines, tokenize

UNK_ID: Final = 0
"""The id of every word that is not in the vocabulary."""
BOS_ID: Final = 1
"""The input of a decoder before its first word."""
EOS_ID: Final = 2
"""The output of a decoder after its last word."""
RESERVED_WORDS: Final = ("<unk>", "<s>", "</s>")
"""Spellings of ids 0, 1, 2, in that order."""
NUM_RESERVED: Final = len(RESERVED_WORDS)
"""The first id of an ordinary word."""

_ALIASES: Final = {"<eos>": EOS_ID}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A list of distinct words; a word's id is its place in the list.

    words: all of them, the three reserved ones first. A word is not empty and holds no ASCII whitespace.
    `<eos>` in a text is read as `</s>`.
    Raises DataError where `words` is not such a list.
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.words[:NUM_RESERVED] != RESERVED_WORDS:
            raise DataError(f"a vocabulary starts with {', '.join(RESERVED_WORDS)}; got {self.words[:NUM_RESERVED]}.")
        ids: dict[str, int] = {}
        for word_id, word in enumerate(self.words):
            if not word or any(blank in word for blank in " \t\n\r\v\f"):
                raise DataError(f"vocabulary, word {word_id + 1}: {word!r} is empty or holds whitespace.")
            if ids.setdefault(word, word_id) != word_id or word in _ALIASES:
                first = ids[word] if ids[word] != word_id else _ALIASES[word]
                raise DataError(f"vocabulary, word {word_id + 1}: {word!r} is already word {first + 1}.")
        object.__setattr__(self, "_ids", ids | _ALIASES)

    @classmethod
    def from_sentences(cls, sentences: Iterable[Sequence[str]], max_size: int | None = None) -> Vocabulary:
        """Return the vocabulary of the sentences' words, most frequent first, ties by first appearance.

        sentences: one sequence of words each. max_size: largest number of ids, reserved ones included; None
        keeps every word. Reserved words in the text keep their ids.
        Raises DataError if there is no word, OptionError if `max_size` leaves no room for one.
        """
        if max_size is not None and max_size <= NUM_RESERVED:
            raise OptionError(
                f"max_size: got {max_size}, expected at least {NUM_RESERVED + 1} ({NUM_RESERVED} ids are reserved)."
            )
        counts: Counter[str] = Counter()
        for sentence in sentences:
            if isinstance(sentence, str):
                raise OptionError(f"from_sentences: got the line {sentence!r}, expected words. Use from_lines.")
            counts.update(sentence)
        if not counts:
            raise DataError("a vocabulary needs at least one word; the text given has none.")
        for word in (*RESERVED_WORDS, *_ALIASES):
            del counts[word]
        # Python's sort is stable and a Counter keeps insertion order, so ties go by first appearance.
        ranked = sorted(counts, key=counts.__getitem__, reverse=True)
        room = None if max_size is None else max_size - NUM_RESERVED
        return cls((*RESERVED_WORDS, *ranked[:room]))

    @classmethod
    def from_lines(cls, lines: Iterable[str], max_size: int | None = None) -> Vocabulary:
        """Return the vocabulary of the lines' whitespace tokens; otherwise as `from_sentences`."""
        return cls.from_sentences((tokenize(line) for line in lines), max_size)

    @classmethod
    def from_files(cls, paths: Iterable[str | PathLike[str]], max_size: int | None = None) -> Vocabulary:
        """Return the vocabulary of all the files together; otherwise as `from_sentences`.

        Raises DataError, naming the file, if one is missing, malformed or without a word.
        """
        lines: list[str] = []
        for path in paths:
            lines_of_file = read_lines(path)
            if not any(line.strip() for line in lines_of_file):
                raise DataError(f"{path}: the file has no words; expected lines of whitespace tokens.")
            lines += lines_of_file
        return cls.from_lines(lines, max_size)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Vocabulary:
        """Return the vocabulary in a file of one word a line, as `save` writes it.

        Raises DataError if the file is missing, does not start with the reserved words, or repeats a word.
        """
        words = tuple(read_lines(path))
        try:
            return cls(words)
        except DataError as error:
            raise DataError(f"{path}: {error} Expected one word a line.") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the words to `path`, one a line in order of id, UTF-8.

        Raises DataError if the file cannot be written.
        """
        text = "".join(f"{word}\n" for word in self.words)
        try:
            Path(path).write_text(text, encoding="utf-8", newline="\n")
        except (OSError, UnicodeEncodeError) as error:
            raise DataError(f"{path}: the vocabulary cannot be written ({error}).") from error

    def __len__(self) -> int:
        """Number of ids, reserved ones included."""
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def id_of(self, word: str) -> int:
        """Return the word's id, UNK_ID if it has none."""
        return self._ids.get(word, UNK_ID)

    def encode(self, line: str) -> NDArray[np.int64]:
        """Return the ids of the line's whitespace tokens: [num_tokens] int64, [0] for a blank line."""
        return self.encode_words(tokenize(line))

    def encode_words(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the words' ids: [num_words] int64. Nothing is added; unknown words become UNK_ID."""
        ids = self._ids
        return np.array([ids.get(word, UNK_ID) for word in words], dtype=np.int64)

    def decode(self, ids: ArrayLike) -> str:
        """Return the words of the ids joined by single spaces, without `<s>` and `</s>`.

        ids: [num_tokens], any integer dtype, or a list of ints.
        Raises DataError for an id that is not in the vocabulary or an array that is not such a list.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise DataError(f"decode: got shape {array.shape} of {array.dtype}, expected one-dimensional integers.")
        if array.size and not (array.min() >= 0 and array.max() < len(self.words)):
            wrong = next(int(i) for i in array if not 0 <= i < len(self.words))
            raise DataError(f"decode: got id {wrong}, expected 0 <= id < {len(self.words)}.")
        words = self.words
        return " ".join(words[i] for i in array.tolist() if i not in (BOS_ID, EOS_ID))
