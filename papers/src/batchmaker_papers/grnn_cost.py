"""GRNN's own space and performance model, for the TITAN V of the paper (Holmes et al., EuroSys 2019, sections 6 and 7).

It ranks tilings. Its unit is the time of one fused multiply-add; it does not predict seconds. The kernels of this
package have a model of their own, see `batchmaker.kernels.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, final

from batchmaker.errors import OptionError

SMS: Final = 80
WARP: Final = 32
SCHEDULERS: Final = 4
MAX_THREADS: Final = 1024
MAX_WEIGHT_REGISTERS: Final = 224
OTHER_REGISTERS: Final = 32
"""Registers of a thread that hold no weights."""
REGISTERS: Final = 65_536
MAX_TILE_WIDTH: Final = 64
GROUP_SIZES: Final = (1, 2, 4, 8, 16, 32)
L2_BYTES_PER_CLOCK: Final = 64
FMA_CLOCKS: Final = 4
FMAS_PER_SHUFFLE: Final = 7
L2_ROUND_TRIP_FMAS: Final = 50
ROUND_TRIPS: Final = 2
"""Of one grid synchronisation: arrival and release access L2 once each."""

Cell = Literal["lstm", "gru"]
Synchronisations = Literal[1, 2]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GrnnTiling:
    """One configuration of GRNN's kernel.

    tile_width: hidden units of a block, each with all its gates. tile_height: rows of the batch for these units.
    groups: work groups of a block. group_size: threads of a group, which share its outputs along K. syncs: grid
    synchronisations of a step; 2 only for the GRU (section 5.1).
    """

    cell: Cell
    hidden: int
    batch: int
    tile_width: int
    tile_height: int
    groups: int
    group_size: int
    syncs: Synchronisations = 1

    def __post_init__(self) -> None:
        for name in ("hidden", "batch", "tile_width", "tile_height", "groups", "group_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} of a tiling must be at least 1, got {getattr(self, name)}")
        if self.cell == "lstm" and self.syncs == 2:
            raise OptionError("an LSTM needs one synchronisation a step; two are for the GRU")

    @property
    def gates(self) -> int:
        """Gates that read the state at the start of a step: all of an LSTM, r and z of a GRU."""
        return 4 if self.cell == "lstm" else 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.groups * self.group_size

    @property
    def active_sms(self) -> int:
        """Blocks, each on an SM of its own (equation 2)."""
        return math.ceil(self.hidden / self.tile_width) * math.ceil(self.batch / self.tile_height)

    @property
    def subtile_width(self) -> int:
        """Gate columns of one work group (equation 7)."""
        return math.ceil(self.tile_width * self.gates / self.groups)

    @property
    def warps_per_scheduler(self) -> int:
        """Warps that share one of the SM's schedulers (equation 6)."""
        return math.ceil(self.threads / (WARP * SCHEDULERS))

    @property
    def weights_per_thread(self) -> float:
        """Weights that a thread keeps in registers (equation 5 uses them for pruning)."""
        first = self.subtile_width * self.hidden / self.group_size
        if self.cell == "lstm":
            return first
        if self.syncs == 2:
            return 1.5 * first
        return first + self.tile_width * math.ceil(self.hidden / self.threads)

    @property
    def can_run(self) -> bool:
        """Whether the device can run the kernel: SMs, registers, and threads in whole warps (section 7.2)."""
        return (
            self.active_sms <= SMS
            and self.threads <= MAX_THREADS
            and self.threads % WARP == 0
            and self.weights_per_thread <= MAX_WEIGHT_REGISTERS
            and (self.weights_per_thread + OTHER_REGISTERS) * self.threads <= REGISTERS
        )

    @property
    def fits(self) -> bool:
        """Whether it can run, in whole work groups, with a thread for each result, and as many warps to each scheduler.

        Only with these conditions, which the paper does not name, the ranks of Table 2 are reproduced.
        """
        return (
            self.can_run
            and self.batch % self.tile_height == 0
            and self.threads % (WARP * SCHEDULERS) == 0
            and self.tile_width * self.gates % self.groups == 0
            and self.subtile_width * self.tile_height <= self.group_size
        )


@final
@dataclass(frozen=True, slots=True)
class GrnnCost:
    """The four terms of one time step, in fused multiply-adds (equations 10, 12, 14 and section 7.1.2)."""

    data_movement: float
    partial_dot: float
    reduction: float
    synchronisation: float

    @property
    def total(self) -> float:
        """The sum of the terms: none of them overlaps another (equation 15)."""
        return self.data_movement + self.partial_dot + self.reduction + self.synchronisation


def grnn_cost(tiling: GrnnTiling) -> GrnnCost:
    """Return the cost of one step of the tiling.

    The two terms that the authors round to hundredths are rounded here.
    """
    return GrnnCost(
        data_movement=round(_data_movement(tiling), 2),
        partial_dot=round(_partial_dot(tiling), 2),
        reduction=_reduction(tiling),
        synchronisation=2 * ROUND_TRIPS * L2_ROUND_TRIP_FMAS if tiling.syncs == 2 else 0,
    )


def grnn_space(cell: Cell, hidden: int, batch: int) -> Iterator[GrnnTiling]:
    """Yield every tiling that fits, of tiles up to 64 units wide: the space in which Table 2 has its ranks."""
    heights = [height for height in range(1, batch + 1) if batch % height == 0]
    gates = 4 if cell == "lstm" else 2
    for width in range(1, MAX_TILE_WIDTH + 1):
        groups = [count for count in range(1, gates * width + 1) if gates * width % count == 0]
        for tiling in _tilings(cell, hidden, batch, (width,), heights, groups):
            if tiling.fits:
                yield tiling


def grnn_runnable(cell: Cell, hidden: int, batch: int) -> Iterator[GrnnTiling]:
    """Yield the tilings that can run, of the whole space: any width, and any number of work groups.

    Of the heights that cut the batch into the same number of tiles only the least is here: all four terms of the cost
    grow with the height, and nothing else depends on it (see `papers/docs/kernels.md`).
    """
    heights = sorted({math.ceil(batch / tiles) for tiles in range(1, batch + 1)})
    gates = 4 if cell == "lstm" else 2
    for width in range(1, hidden + 1):
        most = min(gates * width, MAX_THREADS)
        if gates * width * hidden > REGISTERS or math.ceil(hidden / width) > SMS:
            continue  # the weights of a block do not fit it, or its tiles the device
        for tiling in _tilings(cell, hidden, batch, (width,), heights, range(1, most + 1)):
            if tiling.can_run:
                yield tiling


def grnn_space_size(cell: Cell, hidden: int, batch: int) -> int:
    """Return how many combinations of the four parameters there are (section 7), before any is left out.

    Tiles of 1 to `hidden` units and 1 to `batch` rows; work groups of 1 to 32 threads, a power of two, at most one for
    each gate column, and at most 1024 threads.
    """
    gates = 4 if cell == "lstm" else 2
    shapes = sum(min(gates * width, MAX_THREADS // size) for width in range(1, hidden + 1) for size in GROUP_SIZES)
    return shapes * batch * (1 if cell == "lstm" else 2)


def _tilings(
    cell: Cell, hidden: int, batch: int, widths: Sequence[int], heights: Sequence[int], groups: Sequence[int]
) -> Iterator[GrnnTiling]:
    all_syncs: tuple[Synchronisations, ...] = (1,) if cell == "lstm" else (1, 2)
    for width, count, height, size, syncs in product(widths, groups, heights, GROUP_SIZES, all_syncs):
        if count * size <= MAX_THREADS:
            yield GrnnTiling(
                cell=cell,
                hidden=hidden,
                batch=batch,
                tile_width=width,
                tile_height=height,
                groups=count,
                group_size=size,
                syncs=syncs,
            )


def _data_movement(tiling: GrnnTiling) -> float:
    """The state that a block loads over the bus to L2, which a pair of SMs shares.

    The paper says that the cost doubles above half of the SMs; in the published figures it triples when all SMs are
    used.
    """
    values: float = tiling.hidden * tiling.tile_height
    if tiling.cell == "gru" and tiling.syncs == 2:
        values *= 2  # the state, then r * h
    elif tiling.cell == "gru":
        values += values * tiling.hidden / tiling.tile_width  # partial sums from every block of the row of tiles
    congestion = 1 + math.floor(tiling.active_sms / (SMS / 2))
    return 4 * values * congestion / (L2_BYTES_PER_CLOCK * FMA_CLOCKS)


def _partial_dot(tiling: GrnnTiling) -> float:
    """The multiply-adds of one thread, in the time of one warp without reuse, divided by the speed-ups S1 and S2.

    Doubling the warps of a scheduler takes 1.6 times as long instead of twice; doubling the gate columns takes 1.33
    times as long; until their product is 8. From there on the time is proportional to the work.
    """
    per_column = tiling.tile_height * tiling.hidden / tiling.group_size
    warps, columns = tiling.warps_per_scheduler, tiling.subtile_width
    if warps * columns <= 8:
        base: float = per_column * 1.6 ** math.log2(warps) * 1.33 ** math.log2(columns)
    else:
        base = 4.7 * (warps * columns / 8) * per_column
    if tiling.cell == "lstm":
        return base
    if tiling.syncs == 2:
        return 1.5 * base  # the candidate gate follows: half as much again
    return base + tiling.tile_width + tiling.hidden / tiling.tile_width


def _reduction(tiling: GrnnTiling) -> float:
    """The shuffles that add a group's partial sums, divided by the speed-up S3.

    There are log2(group_size) shuffles, and one more for groups below a warp, to collect the results. They hide behind
    each other (3 % more for each result and warp) up to twelve; then they queue.
    """
    shuffles = math.log2(tiling.group_size) + (1 if tiling.group_size < WARP else 0)
    results = tiling.warps_per_scheduler * tiling.subtile_width * tiling.tile_height
    slower = 1.03**results if results < 12 else 1.03**8 * results / 12
    stages = 1 if tiling.cell == "lstm" else 2
    return stages * shuffles * FMAS_PER_SHUFFLE * slower
