"""Lines and aligned sentence pairs from plain or gzipped UTF-8 files."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from batchmaker.errors import DataError


@dataclass(frozen=True, slots=True)
class SentencePair:
    """One source line and its translation, neither of them blank.

    line_number: of the pair in both files, counted from 1.
    """

    source: str
    target: str
    line_number: int

    @property
    def source_tokens(self) -> tuple[str, ...]:
        return tokenize(self.source)

    @property
    def target_tokens(self) -> tuple[str, ...]:
        return tokenize(self.target)


@dataclass(frozen=True, slots=True)
class AlignedText:
    """The usable pairs of two aligned files, in file order.

    num_skipped: pairs left out because at least one side is blank.
    """

    pairs: tuple[SentencePair, ...]
    num_skipped: int

    def __len__(self) -> int:
        return len(self.pairs)


def tokenize(line: str) -> tuple[str, ...]:
    """Return the line's whitespace-separated tokens; whitespace is Unicode's, as in `str.split`."""
    return tuple(line.split())


def read_lines(path: str | PathLike[str]) -> list[str]:
    r"""Return the file's lines without their line ends, blank lines included.

    path: UTF-8 text, gzipped where the name ends in `.gz`. Only "\n" and "\r\n" end a line, so that aligned
    files stay aligned; a byte order mark is dropped. An empty file has no lines.
    Raises DataError if the file is missing, cannot be read or decompressed, or is not UTF-8.
    """
    path = Path(path)
    data = _read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line_number}: got a byte that is not UTF-8 (0x{error.object[error.start]:02x}). "
            "Convert the file to UTF-8."
        ) from error
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def read_aligned(source_path: str | PathLike[str], target_path: str | PathLike[str]) -> AlignedText:
    """Return the pairs of two aligned files: line i of one translates line i of the other.

    Pairs with a blank side are skipped and counted, as is usual with Europarl.
    Raises DataError if the line counts differ, if no pair is left, or as `read_lines` does.
    """
    sources = read_lines(source_path)
    targets = read_lines(target_path)
    if len(sources) != len(targets):
        raise DataError(
            f"aligned files have different numbers of lines: {source_path} has {len(sources)}, "
            f"{target_path} has {len(targets)}. Line i of one must translate line i of the other."
        )
    pairs = tuple(
        SentencePair(source, target, line_number)
        for line_number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1)
        if source.strip() and target.strip()
    )
    if not pairs:
        raise DataError(
            f"{source_path} and {target_path}: none of {len(sources)} lines has text on both sides; "
            "expected at least one pair."
        )
    return AlignedText(pairs, num_skipped=len(sources) - len(pairs))


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file. Check the path.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: the name ends in .gz but the content is not a whole gzip file ({error}).") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
