"""Sizes of batches at which a row gets the same bits, whatever its place and its neighbours. For deterministic engines.

A kernel is chosen by the number of rows, and rows at the end of a batch may be computed in another way than the others.
So bits depend on the size of a batch and on the place in it; on the numbers in other rows they do not, which is tried
before (`row_trial`). Rows of noise are run in all places of batches of several sizes, and the sizes that agree are
used. See docs/decisions/0036-the-same-bits.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell, TracedValue, row_spec
from batchmaker.compile.program import Program
from batchmaker.compile.row_trial import Batch, in_sizes
from batchmaker.errors import RAISED_BY_USERS, RowsError

ALIGNMENT: Final = 64
"""Bytes. Kernels may begin in another way at other addresses, so batches begin at a multiple of this."""

_NUMBERS: Final = 1 << 12
_COARSE_NUMBERS: Final = 1 << 20
"""Floating results that are looked at, at least: sums in another order differ in about half of the numbers of float32,
but in 16 bits only in one of some thousands, and on a processor with AMX in one of a hundred thousand."""
_FEWEST_ROWS: Final = 4
_MOST_ROWS: Final = 512
_MOST_COARSE_ROWS: Final = 4096
_MOST_LARGE_ROWS: Final = 32
_ORDERS: Final = 3
_SCALES: Final = (1.0, 0.1, 0.01)
"""Of the noise: large numbers would shut gates, and hide sums."""

Rows = NDArray[np.uint8]


@final
class SameBits:
    """A program that is called at certain sizes only, at which a row gets the same bits in every place.

    sizes: ascending. Batches of other sizes are cut, and padded. num_outputs: the first ones of the program's results;
    None: all of them.
    """

    def __init__(self, program: Program, sizes: Sequence[int], num_outputs: int | None = None) -> None:
        self._program = program
        self._num_outputs = num_outputs
        self.sizes = tuple(sizes)

    @property
    def note(self) -> str:
        """What was done."""
        several = len(self.sizes) > 2
        said = f"{self.sizes[0]} to {self.sizes[-1]}" if several else " or ".join(map(str, self.sizes))
        return f"deterministic: runs in one form, in batches of {said} rows"

    def __call__(self, *inputs: Tensor) -> Batch:
        return self._called(*inputs) if len(inputs[0]) in self.sizes else in_sizes(self._called, inputs, self.sizes)

    def _called(self, *inputs: Tensor) -> Batch:
        return self._program(*map(_aligned, inputs))[: self._num_outputs]


def decides(cell: TracedCell) -> list[fx.Node]:
    """Return the floating values of a graph from which others are made, such as the scores of an argmax.

    They are looked at beside the outputs: integers hide a difference of rounding nearly always. CannotRewriteError if
    one of them has no row per node.
    """
    sources = []
    for node in cell.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, TracedValue) or not value.dtype.is_floating_point:
            continue
        if any(map(_has_integers, node.users)) and not all(isinstance(size, int) for size in value.shape):
            row_spec(node, cell.inputs[0])
            sources.append(node)
    return sources


def with_same_bits(
    program: Program,
    tried: Batch,
    batch_sizes: Sequence[int],
    where: str,
    *,
    num_outputs: int,
    is_seen: bool,
    is_large: bool,
) -> SameBits:
    """Return a program at those sizes, of some of the given ones, at which it gives a row the same bits.

    program: returns, after the outputs, values that decide on these. is_seen: whether these are all; if not, it runs
    row by row. tried: different rows for which it does not raise. is_large: try few rows. RowsError if there is no
    such size.
    """
    if not is_seen:
        if batch_sizes[0] != 1:
            raise _no_size(where, batch_sizes)
        return SameBits(program, (1,), num_outputs)
    made = in_sizes(program, tried, batch_sizes)
    rows = _rows(program, tried, made, batch_sizes, is_large)
    groups: dict[bytes, list[int]] = {}
    for size in _some_of(batch_sizes):
        bits = _bits_of(program, rows, size)
        if bits is not None:
            groups.setdefault(bits, []).append(size)
    if not groups:
        raise _no_size(where, batch_sizes)
    return SameBits(program, max(groups.values(), key=lambda sizes: (len(sizes), sizes)), num_outputs)


def _no_size(where: str, batch_sizes: Sequence[int]) -> RowsError:
    """Return the error of a cell that has no size at which rows have the same bits."""
    return RowsError(
        f"{where}: deterministic=True needs a batch size at which a row gets the same bits in every place, and none of "
        f"{', '.join(map(str, batch_sizes))} is one. Let batch_sizes have 1."
    )


def _rows(program: Program, tried: Batch, made: Batch, batch_sizes: Sequence[int], is_large: bool) -> Batch:
    """Return rows of noise, and of integers of the tried rows; the tried rows where the program does not take noise."""
    each = sum([values[0].numel() for values in made if values.is_floating_point()])
    is_coarse = any(values.is_floating_point() and values.itemsize < 4 for values in (*made, *tried))
    wanted = -(-(_COARSE_NUMBERS if is_coarse else _NUMBERS) // max(each, 1))
    most = _MOST_COARSE_ROWS if is_coarse else _MOST_ROWS
    count = min(max(wanted, _FEWEST_ROWS), _MOST_LARGE_ROWS if is_large else most)
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(_SCALES).repeat(count)[:count]
    rows = []
    for values in tried:
        sample = values[torch.randint(len(values), (count,), generator=generator)]
        if values.is_floating_point():
            noise = torch.randn(sample.shape, generator=generator)
            sample = (noise * scales.view(-1, *[1] * (sample.dim() - 1))).to(values.dtype)
        rows.append(sample)
    try:
        in_sizes(program, tuple(rows), batch_sizes)
    except RAISED_BY_USERS:  # made-up values that the cell does not take
        return tried
    return tuple(rows)


def _bits_of(program: Program, rows: Batch, size: int) -> bytes | None:
    """Return the bits of all results of these rows in batches of a size; None if they depend on the place."""
    count, by_row, run = len(rows[0]), None, SameBits(program, (size,))
    for order in _orders(count):
        repeated = np.resize(order, -(-max(count, size) // size) * size)
        try:
            made = run(*[values[torch.from_numpy(repeated)] for values in rows])
        except RAISED_BY_USERS:  # the module does not take batches of this size
            return None
        bits = np.concatenate([_bytes_of(values) for values in made], 1)
        if by_row is None:
            by_row = np.empty((count, bits.shape[1]), np.uint8)
            by_row[repeated] = bits
        if not np.array_equal(by_row[repeated], bits):
            return None
    return None if by_row is None else by_row.tobytes()


def _orders(count: int) -> Iterator[NDArray[np.int64]]:
    """Yield orders of so many rows."""
    random = np.random.default_rng(0)
    yield np.arange(count)
    yield np.roll(np.arange(count)[::-1], 1)
    for _ in range(_ORDERS - 2):
        yield random.permutation(count)


def _bytes_of(values: Tensor) -> Rows:
    rows: Rows = values.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()
    return rows


def _some_of(sizes: Sequence[int]) -> list[int]:
    """Return two sizes in each doubling, of those that there are, and the largest."""
    wanted = [numerator << digits >> 1 for digits in range(sizes[-1].bit_length()) for numerator in (2, 3)]
    return sorted({sizes[bisect_left(sizes, size)] for size in wanted if size <= sizes[-1]} | {sizes[-1]})


def _aligned(values: Tensor) -> Tensor:
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()


def _has_integers(node: fx.Node) -> bool:
    """Whether something that a node makes is not floating."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(part, TracedValue) and not part.dtype.is_floating_point for part in parts)
