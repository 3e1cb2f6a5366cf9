"""Files of rows, cut into blocks that are read and written one at a time: Parquet, or JSON lines."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from batchmaker.errors import DataError, OptionError, needing

Format = Literal["parquet", "jsonl"]
Row = dict[str, Any]

_ENDINGS: Final[dict[str, Format]] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_LINE: Final = msgspec.json.Decoder(dict[str, Any])


class RowBlock(msgspec.Struct, frozen=True):
    """Rows `begin` to `end` of a Parquet file, or its bytes from `begin` to `end` of whole JSON lines.

    number: its place in the order of the input. num_rows: in it.
    """

    number: int
    path: str
    begin: int
    end: int
    num_rows: int


def find_files(path: Path) -> tuple[list[Path], Format]:
    """Return the input's files in the order of their names, and their format. DataError if there are none, or two."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a file, or a folder of files: *{', *'.join(_ENDINGS)}")
    files = sorted(one for one in path.iterdir() if one.suffix in _ENDINGS) if path.is_dir() else [path]
    formats = {_ENDINGS.get(one.suffix) for one in files}
    if len(formats) != 1 or None in formats:
        endings = sorted({one.suffix for one in files})
        raise DataError(f"{path} holds {endings or 'no such files'}; expected one of {', '.join(_ENDINGS)}")
    return [one.resolve() for one in files], _ENDINGS[files[0].suffix]


def cut_into_blocks(files: Sequence[Path], form: Format, block_rows: int) -> list[RowBlock]:
    """Return the blocks of all files, in order. Parquet is cut by its metadata; JSON lines are read through once."""
    if block_rows < 1:
        raise OptionError(f"block_rows must be at least 1, got {block_rows}")
    blocks: list[RowBlock] = []
    for file in files:
        for begin, end, rows in _row_ranges(file, block_rows) if form == "parquet" else _byte_ranges(file, block_rows):
            blocks.append(RowBlock(len(blocks), str(file), begin, end, rows))
    return blocks


def _row_ranges(file: Path, block_rows: int) -> Iterator[tuple[int, int, int]]:
    total = int(_parquet().read_metadata(file).num_rows)
    for begin in range(0, total, block_rows):
        end = min(begin + block_rows, total)
        yield begin, end, end - begin


def _byte_ranges(file: Path, block_rows: int) -> Iterator[tuple[int, int, int]]:
    begin = at = rows = 0
    with file.open("rb") as lines:
        for line in lines:
            at += len(line)
            rows += bool(line.strip())
            if rows == block_rows:
                yield begin, at, rows
                begin, rows = at, 0
    if rows:
        yield begin, at, rows


def read_block(block: RowBlock, form: Format) -> list[Row]:
    """Return the rows of a block. DataError for a line that is no JSON object."""
    if form == "parquet":
        rows: list[Row] = _read_rows(block).to_pylist()
        return rows
    with open(block.path, "rb") as file:
        file.seek(block.begin)
        lines = file.read(block.end - block.begin).splitlines()
    try:
        return [_LINE.decode(line) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        raise DataError(f"{block.path}, bytes {block.begin} to {block.end}: not JSON lines: {error}") from None


def _read_rows(block: RowBlock) -> Any:
    """Return a Parquet block as a table, reading only the row groups that it touches."""
    file, groups, first, skipped = _parquet().ParquetFile(block.path), [], 0, None
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first < block.end and first + rows > block.begin:
            groups.append(group)
            skipped = first if skipped is None else skipped
        first += rows
    return file.read_row_groups(groups).slice(block.begin - (skipped or 0), block.num_rows)


def part_of(out: Path, number: int, form: Format) -> Path:
    """Return the output file of a block. It is there only when it is whole."""
    return out / f"part-{number:06d}.{form}"


def write_part(out: Path, number: int, form: Format, rows: Sequence[Row]) -> None:
    """Write a block's rows into its output file, all or nothing: a crash leaves no half of a file."""
    final = part_of(out, number, form)
    written = final.with_name(f".{final.name}.{os.getpid()}")
    if form == "parquet":
        arrow = importlib.import_module("pyarrow")
        _parquet().write_table(arrow.Table.from_pylist(list(rows)), written)
    else:
        with written.open("wb") as file:
            file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
    os.replace(written, final)


def json_text(array: NDArray[Any]) -> Any:
    """Return an array as JSON: each number in as few digits as its type needs, null for one that is not finite."""
    if not array.ndim or array.dtype.kind not in "fiub":
        return array.tolist()
    return msgspec.Raw(orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY))


def _parquet() -> Any:
    with needing("ray", "Parquet"):
        return importlib.import_module("pyarrow.parquet")
