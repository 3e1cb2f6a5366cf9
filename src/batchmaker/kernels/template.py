"""The parameters of one instance of the kernel template, and derived sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

from batchmaker.errors import OptionError, unknown_name

CellKind = Literal["lstm", "gru", "gru-before", "gru-before-once"]
KernelType = Literal["float32", "bfloat16", "float16"]
Regime = Literal["block", "cluster", "grid"]

CELL_KINDS: tuple[CellKind, ...] = get_args(CellKind)
KERNEL_TYPES: tuple[KernelType, ...] = get_args(KernelType)
REGIMES: tuple[Regime, ...] = get_args(Regime)

WARP = 32
CHUNK_BYTES = 16
"""Weights are loaded and kept in pieces of this size: four 32-bit registers of one thread."""
MAX_CLUSTER = 16
MAX_THREADS = 1024
_MMA_COLUMNS, _MMA_ROWS, _MMA_DEPTH = 16, 8, 32
"""Gate columns and rows of one mma.m16n8k16, and the depth of two of them, which share one 16-byte load of h."""


@final
@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One way to compute a recurrent layer: the template's arguments, in their order (GRNN sections 5, 6 and 7.1).

    - cell: "lstm"; "gru", whose reset gate acts after the product as in PyTorch and cuDNN; "gru-before", where it acts
      on h before the product, which takes two exchanges per step; "gru-before-once", which takes one, because every
      block adds up all units' reset gates from the shares of all blocks (GRNN 5.1; regime grid and float32 alone).
    - dtype: of weights, inputs, h and outputs; sums and c are float32.
    - regime: the group that exchanges h at the end of a step: the threads of a block, the blocks of a cluster, or
      blocks of the whole grid.
    - hidden: units of the layer, any number.
    - tile_width: hidden units per work group, with all their gates (GRNN counts gate columns).
    - tile_height: rows that a block computes in one pass over time.
    - groups: work groups per block.
    - group_size: threads per work group; they share the sum over the hidden units.
    - row_step: rows whose sums a thread holds at once.
    - shared_steps: the number of the sum's `steps` whose weights come from shared memory; the weights of the others
      stay in registers.
    """

    cell: CellKind
    dtype: KernelType
    regime: Regime
    hidden: int
    tile_width: int
    tile_height: int
    groups: int
    group_size: int
    row_step: int
    shared_steps: int = 0

    # --- derived sizes
    # -------------------------------------------------------------------------------------------------

    @property
    def gates(self) -> int:
        """Products with the hidden state per unit."""
        return 4 if self.cell == "lstm" else 3

    @property
    def exchanges_per_step(self) -> int:
        """Vectors that the blocks of a tile must exchange in a step."""
        return 2 if self.cell == "gru-before" else 1

    @property
    def tiled_gates(self) -> int:
        """Gates whose columns belong to the owner of the unit: all, or all but the reset gate with one exchange."""
        return 2 if self.cell == "gru-before-once" else self.gates

    @property
    def reset_units(self) -> int:
        """Units for whose reset gate a thread adds up the block's share; 0 unless one exchange is enough."""
        return -(-self.hidden // self.num_threads) if self.cell == "gru-before-once" else 0

    @property
    def reset_chunks(self) -> int:
        """16-byte pieces of the reset gate's weights per thread."""
        return -(-self.reset_units * self.units_per_block // 4)

    @property
    def uses_tensor_workers(self) -> bool:
        return self.dtype != "float32"

    @property
    def item_bytes(self) -> int:
        return 2 if self.uses_tensor_workers else 4

    @property
    def num_threads(self) -> int:
        return self.groups * self.group_size

    @property
    def units_per_block(self) -> int:
        return self.groups * self.tile_width

    @property
    def blocks_per_tile(self) -> int:
        """Blocks that share the units of one batch tile; the last may have fewer units."""
        return -(-self.hidden // self.units_per_block)

    @property
    def group_columns(self) -> int:
        """Gate columns per work group, gate by gate, of the tiled gates."""
        return self.tiled_gates * self.tile_width

    @property
    def splits(self) -> int:
        """Warps that share one sum; their parts are added in shared memory."""
        return max(1, self.group_size // WARP)

    @property
    def step_depth(self) -> int:
        """Hidden units that a work group multiplies in one step of its sum."""
        return _MMA_DEPTH * self.splits if self.uses_tensor_workers else 4 * self.group_size

    @property
    def steps(self) -> int:
        """Steps of one sum over the hidden units."""
        return -(-self.hidden // self.step_depth)

    @property
    def padded_hidden(self) -> int:
        """Hidden units including the zeros that fill the last step."""
        return self.steps * self.step_depth

    @property
    def state_stride(self) -> int:
        """Elements from one row of h to the next in shared memory and in the exchange.

        For tensor cores it is 32 more than a multiple of 64: then the 16-byte loads of two rows cause no bank conflict.
        """
        if not self.uses_tensor_workers:
            return self.padded_hidden
        return self.padded_hidden + (32 - self.padded_hidden) % 64

    @property
    def chunks_per_step(self) -> int:
        """16-byte pieces of weights per thread and step."""
        return 2 * self.group_columns // _MMA_COLUMNS if self.uses_tensor_workers else self.group_columns

    @property
    def weight_registers(self) -> int:
        """32-bit registers per thread that hold weights for the whole call."""
        return 4 * ((self.steps - self.shared_steps) * self.chunks_per_step + self.reset_chunks)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all weights in the kernel's order, padding zeros included."""
        chunks = self.steps * self.chunks_per_step + self.reset_chunks
        return self.blocks_per_tile * chunks * self.num_threads * CHUNK_BYTES

    @property
    def sum_stride(self) -> int:
        """Floats from one row of partial sums to the next: a multiple of 16 plus four, to avoid bank conflicts."""
        columns = self.groups * self.group_columns
        return columns + (4 - columns) % 16

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block: weights, h (twice if peers write into it), partial sums, lengths."""
        weights = self.shared_steps * self.chunks_per_step * self.num_threads * CHUNK_BYTES
        once = self.cell == "gru-before-once"
        state = (
            (1 if self.regime == "grid" and not once else 2) * self.tile_height * self.state_stride * self.item_bytes
        )
        sums = self.splits * self.tile_height * self.sum_stride * 4
        own = 4 * self.tile_height * self.units_per_block if once else 0
        return weights + state + sums + 4 * self.tile_height + own

    @property
    def exchange_elements(self) -> int:
        """Elements of the exchange that one resident batch tile needs in global memory; 0 if h stays on the chip."""
        if self.regime != "grid":
            return 0
        shares = self.blocks_per_tile * self.hidden if self.cell == "gru-before-once" else 0
        return 2 * self.tile_height * (self.state_stride + shares)

    @property
    def name_expression(self) -> str:
        """The instance's name in the form for NVRTC."""
        numbers = (
            CELL_KINDS.index(self.cell),
            KERNEL_TYPES.index(self.dtype),
            REGIMES.index(self.regime),
            self.hidden,
            self.tile_width,
            self.tile_height,
            self.groups,
            self.group_size,
            self.row_step,
            self.shared_steps,
        )
        return f"recurrent<{', '.join(map(str, numbers))}>"

    # --- limits
    # ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise OptionError with the first invalid field and its valid values."""
        _check_name("cell", self.cell, CELL_KINDS)
        _check_name("dtype", self.dtype, KERNEL_TYPES)
        _check_name("regime", self.regime, REGIMES)
        for name in ("hidden", "tile_width", "tile_height", "groups", "group_size", "row_step"):
            if getattr(self, name) < 1:
                raise OptionError(f"kernel configuration: {name} is {getattr(self, name)}, wanted at least 1.")
        if self.group_size & (self.group_size - 1):
            raise OptionError(f"kernel configuration: group_size is {self.group_size}, wanted a power of two.")
        if self.num_threads % WARP or self.num_threads > MAX_THREADS:
            raise OptionError(
                f"kernel configuration: {self.groups} groups of {self.group_size} are {self.num_threads} threads, "
                f"wanted a multiple of {WARP}, at most {MAX_THREADS}."
            )
        if self.tile_height % self.row_step:
            raise OptionError(
                f"kernel configuration: row_step {self.row_step} does not divide tile_height {self.tile_height}."
            )
        if not 0 <= self.shared_steps <= self.steps:
            raise OptionError(
                f"kernel configuration: shared_steps is {self.shared_steps}, wanted 0 to {self.steps}, all of a sum's."
            )
        if self.uses_tensor_workers:
            self._check_tensor_workers()
        self._check_regime()

    def _check_tensor_workers(self) -> None:
        if self.group_size % WARP:
            raise OptionError(
                f"kernel configuration: group_size is {self.group_size}, wanted whole warps ({WARP}) for {self.dtype}."
            )
        if self.row_step % _MMA_ROWS:
            raise OptionError(
                f"kernel configuration: row_step is {self.row_step}, wanted a multiple of {_MMA_ROWS} for {self.dtype}."
            )
        columns = self.tile_width if self.cell == "gru-before" else self.group_columns
        if columns % _MMA_COLUMNS:
            raise OptionError(
                f"kernel configuration: tile_width is {self.tile_width}, wanted a multiple of "
                f"{4 if self.cell == 'lstm' else 16} for {self.cell} in {self.dtype}: tensor cores take "
                f"{_MMA_COLUMNS} gate columns at a time."
            )

    def _check_regime(self) -> None:
        blocks = self.blocks_per_tile
        if self.cell == "gru-before-once" and (self.regime != "grid" or self.dtype != "float32"):
            raise OptionError(
                f"kernel configuration: 'gru-before-once' is for regime 'grid' and float32, got {self.regime!r} and "
                f"{self.dtype}; elsewhere an exchange costs less than its sums, so take 'gru-before'."
            )
        if self.regime == "block" and blocks > 1:
            raise OptionError(
                f"kernel configuration: regime 'block' needs all {self.hidden} units in one block, "
                f"got {self.units_per_block}; raise groups or tile_width, or take 'cluster' or 'grid'."
            )
        if self.regime == "cluster" and not 2 <= blocks <= MAX_CLUSTER:
            raise OptionError(
                f"kernel configuration: regime 'cluster' needs 2 to {MAX_CLUSTER} blocks per tile, got {blocks}."
            )


def _check_name(field: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise unknown_name(f"kernel {field}", name, names)
