"""The batch sizes at which cells run."""

from __future__ import annotations


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
