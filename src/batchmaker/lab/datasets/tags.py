"""Sentences with a tag for every word or character: WikiNER lines and CoNLL columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

from batchmaker.errors import DataError
from batchmaker.lab.datasets.text import read_lines, tokenize


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """A sentence and a tag for each of its words (or characters). DataError if it is empty or the numbers differ."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.words or len(self.words) != len(self.tags):
            raise DataError(
                f"tagged sentence: got {len(self.words)} words and {len(self.tags)} tags, expected as many of each, at "
                "least one."
            )


def read_tagged(path: str | PathLike[str]) -> list[TaggedSentence]:
    """Return the sentences of a file with one a line, each word written `word|TAG`. Gzipped if named `.gz`.

    The last bar is the one before the tag. Blank lines are skipped. Raises DataError, naming file and line, for a word
    without a tag, and if there is no sentence. Source of the format: WikiNER (Nothman et al. 2013).
    """
    sentences: list[TaggedSentence] = []
    for number, line in enumerate(read_lines(path), start=1):
        pairs = [token.rpartition("|") for token in tokenize(line)]
        for word, bar, tag in pairs:
            if not (word and tag):
                raise DataError(f"{path}, line {number}: got {word + bar + tag!r}, expected word|TAG.")
        if pairs:
            sentences.append(TaggedSentence(tuple(word for word, _, _ in pairs), tuple(tag for _, _, tag in pairs)))
    return _not_empty(sentences, path, "words written word|TAG, a sentence a line")


def read_columns(path: str | PathLike[str]) -> list[TaggedSentence]:
    r"""Return the sentences of a file with one word a line, a tab and its tag; a blank line ends a sentence.

    Gzipped if named `.gz`. Raises DataError, naming file and line, for any other line, and if there is no sentence.
    """
    return _read_columns(path, lambda word: word, "a word, a tab and its tag")


def read_numbered_characters(path: str | PathLike[str]) -> list[TaggedSentence]:
    """As `read_columns`, for characters followed by a digit, which is dropped: 科0 技1.

    The digit is the character's place in its word. The text before the digit counts as one character, even if it is
    several code points. Source of the format: Weibo NER, second edition (Peng and Dredze 2016).
    """
    return _read_columns(path, _without_digit, "a character, a digit, a tab and its tag")


def _read_columns(path: str | PathLike[str], shown: Callable[[str], str], wanted: str) -> list[TaggedSentence]:
    sentences: list[TaggedSentence] = []
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*read_lines(path), ""], start=1):
        if line.strip():
            word, _, tag = line.partition("\t")
            word, tag = shown(word), tag.strip()
            if not word or not tag or "\t" in tag:
                raise DataError(f"{path}, line {number}: got {line!r}, expected {wanted}.")
            words.append(word)
            tags.append(tag)
        elif words:
            sentences.append(TaggedSentence(tuple(words), tuple(tags)))
            words, tags = [], []
    return _not_empty(sentences, path, f"{wanted} on each line, and a blank line after each sentence")


def _without_digit(text: str) -> str:
    return text[:-1] if text[-1:].isdecimal() else ""


def _not_empty(sentences: list[TaggedSentence], path: str | PathLike[str], wanted: str) -> list[TaggedSentence]:
    if not sentences:
        raise DataError(f"{path}: the file has no sentences; expected {wanted}.")
    return sentences
