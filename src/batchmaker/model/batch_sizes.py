"""The batch sizes at which cells run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchmaker.errors import OptionError
from batchmaker.model.options import check_whole

DEFAULT_MAX_BATCH = 256


def checked_sizes(max_batch: Any, batch_sizes: Iterable[Any] | None, *, one_by_one: bool) -> tuple[int, ...]:
    """Return the batch sizes that options of a cell ask for, ascending. OptionError for any that cannot be."""
    if batch_sizes is None:
        most = DEFAULT_MAX_BATCH if max_batch is None else max_batch
        check_whole("max_batch", most, least=1)
        return (1,) if one_by_one else default_batch_sizes(int(most))
    given = list(batch_sizes)
    for size in given:
        check_whole("each of batch_sizes", size, least=1)
    sizes = tuple(sorted({int(size) for size in given}))
    if one_by_one and sizes != (1,):
        raise OptionError("independent_rows=False runs one row at a time; leave batch_sizes out")
    if not sizes:
        raise OptionError("batch_sizes must name at least one size, got none")
    if max_batch is not None and max_batch != sizes[-1]:
        raise OptionError(f"max_batch is {max_batch} but the largest of batch_sizes is {sizes[-1]}")
    return sizes


def size_ladder(largest: int, *, exact: int, parts: int) -> tuple[int, ...]:
    """Return the sizes from 1 to `largest`.

    Each size up to `exact`, then `parts` sizes (a power of two) in every doubling.
    """
    sizes = {*range(1, min(largest, exact) + 1), largest}
    size = exact
    while size < largest:
        size += max(1, (1 << (size.bit_length() - 1)) // parts)
        sizes.add(min(size, largest))
    return tuple(sorted(sizes))


def default_batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes at which a cell is called. Padding up to the next one adds less than an eighth."""
    return size_ladder(max_batch, exact=32, parts=8)
