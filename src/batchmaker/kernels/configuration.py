"""The configurations of the kernel that can serve a layer on a device (GRNN section 7.2, for this kernel)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, final

from batchmaker.errors import OptionError, unknown_name
from batchmaker.kernels.devices import DeviceSpec
from batchmaker.kernels.template import (
    CELL_KINDS,
    KERNEL_TYPES,
    MAX_CLUSTER,
    REGIMES,
    WARP,
    CellKind,
    KernelConfig,
    KernelType,
    Regime,
)

MAX_WEIGHT_REGISTERS: Final = 224
"""Of one thread (GRNN). The other registers hold sums, loaded values and addresses."""
FALLBACK: Final = "PyTorch's operations, step by step"
_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_ROW_STEPS: Final = (1, 2, 4, 8)
_OTHER_REGISTERS: Final = 40
"""Addresses, counters and other registers of the compiler.

The least number with which configurations compiled without spilling. The compiler takes more if there are more.
"""
_SHARED_WEIGHT_REGISTERS: Final = 20
"""Additional registers if some weights come from shared memory: those being loaded."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A recurrent layer and its call: `batch` rows of `steps` steps each. OptionError for invalid values."""

    cell: CellKind
    dtype: KernelType
    hidden: int
    batch: int
    steps: int = 100

    def __post_init__(self) -> None:
        if self.cell not in CELL_KINDS:
            raise unknown_name("cell", self.cell, CELL_KINDS)
        if self.dtype not in KERNEL_TYPES:
            raise unknown_name("dtype", self.dtype, KERNEL_TYPES)
        for name in ("hidden", "batch", "steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the recurrent weights."""
        return (4 if self.cell == "lstm" else 3) * self.hidden**2 * (4 if self.dtype == "float32" else 2)

    def __str__(self) -> str:
        return f"{self.cell} hidden {self.hidden} batch {self.batch} {self.dtype}"


def estimated_registers(config: KernelConfig) -> int:
    """Return the registers that a thread needs at least.

    They hold weights, sums, one load of h, the gates of its units, and the rest.
    """
    if config.uses_tensor_workers:
        tiles, row_tiles = config.group_columns // 16, config.row_step // 8
        sums, loaded = 4 * tiles * row_tiles, 4 * row_tiles
    else:
        sums, loaded = config.group_columns * config.row_step, 4 * config.row_step
    if config.shared_steps:
        loaded += _SHARED_WEIGHT_REGISTERS
    units = -(-config.tile_height * config.units_per_block // config.num_threads)
    return config.weight_registers + sums + loaded + units * (config.gates + 3) + _OTHER_REGISTERS


def register_limit(config: KernelConfig, device: DeviceSpec) -> int:
    """Return how many registers the compiler may give a thread. They are allocated in units of eight."""
    return min(device.max_registers_per_thread, device.registers // config.num_threads // 8 * 8)


def why_not(config: KernelConfig, device: DeviceSpec) -> str | None:
    """Return the reason why the configuration cannot run on the device, None if it can."""
    try:
        config.check()
    except OptionError as error:
        return str(error)
    if config.weight_registers > MAX_WEIGHT_REGISTERS:
        return f"{config.weight_registers} registers of weights per thread, at most {MAX_WEIGHT_REGISTERS}"
    if estimated_registers(config) > register_limit(config, device):
        return f"about {estimated_registers(config)} registers per thread, at most {register_limit(config, device)}"
    if config.shared_bytes > device.shared_bytes:
        return f"{config.shared_bytes} bytes of shared memory per block, at most {device.shared_bytes}"
    if device.resident(config.blocks_per_tile, cluster=config.regime == "cluster") < 1:
        return f"{config.blocks_per_tile} blocks of a tile cannot all run at once"
    return None


def candidates(problem: Problem, device: DeviceSpec) -> Iterator[KernelConfig]:
    """Yield the configurations that can run, each once. If there is none, the layer needs the fallback, see `FALLBACK`.

    Weights are kept in registers as far as they fit, the rest in shared memory. Of the groups that give a tile the same
    number of blocks only the fewest are tried, and tiles are no higher than the batch needs.
    """
    if problem.weight_bytes > device.on_chip_bytes:
        return
    seen: set[KernelConfig] = set()
    for regime in REGIMES:
        if regime == "cluster" and not device.processor_clusters:
            continue
        for shape in _shapes(problem, device, regime):
            for height, row_step in _heights(problem):
                config = _placed(replace(shape, tile_height=height, row_step=row_step), device)
                if config is not None and config not in seen and why_not(config, device) is None:
                    seen.add(config)
                    yield config


def fallback_reason(problem: Problem, device: DeviceSpec) -> str:
    """Return the reason why no configuration can run, and the name of the fallback."""
    need, have = problem.weight_bytes / 2**20, device.on_chip_bytes / 2**20
    if need > have:
        why = (
            f"its weights are {need:,.1f} MiB, registers and shared memory of a whole {device.name} are {have:,.1f} MiB"
        )
    else:
        why = f"no tiling keeps its {need:,.1f} MiB of weights with sums and states on a {device.name}"
    return f"{problem}: no persistent kernel fits ({why}); it is computed by {FALLBACK}."


def _shapes(problem: Problem, device: DeviceSpec, regime: Regime) -> Iterator[KernelConfig]:
    """Yield the parameters that are independent of the height: widths, groups and their sizes."""
    tensor = problem.dtype != "float32"
    most_blocks = {"block": 1, "cluster": MAX_CLUSTER, "grid": device.sms}[regime]
    sizes = [1 << power for power in range(5 if tensor else 0, 11)]
    for width in _widths(problem):
        for size in sizes:
            depth = 32 * max(1, size // WARP) if tensor else 4 * size
            if depth >= 2 * max(problem.hidden, 32):
                continue  # more than half of every sum would be padding
            for groups in _group_counts(problem.hidden, width, size, most_blocks, device.max_threads):
                blocks = -(-problem.hidden // (width * groups))
                if blocks <= most_blocks and (regime == "block") == (blocks == 1):
                    yield KernelConfig(
                        problem.cell,
                        problem.dtype,
                        regime,
                        problem.hidden,
                        width,
                        8 if tensor else 1,
                        groups,
                        size,
                        8 if tensor else 1,
                    )


def _widths(problem: Problem) -> list[int]:
    if problem.dtype == "float32":
        return [width for width in _WIDTHS if width <= problem.hidden]
    least = 4 if problem.cell == "lstm" else 16
    return [least * times for times in range(1, 9) if least * times < problem.hidden + least]


def _group_counts(hidden: int, width: int, size: int, most_blocks: int, max_threads: int) -> list[int]:
    """Return, in order, the fewest groups for each number of blocks, as whole warps."""
    whole = max(1, WARP // size)
    wanted = -(-hidden // width)
    counts = set()
    for blocks in range(1, most_blocks + 1):
        groups = -(-wanted // blocks)
        groups = -(-groups // whole) * whole
        if WARP <= groups * size <= max_threads:
            counts.add(groups)
    return sorted(counts)


def _heights(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield heights of a tile that share the batch evenly, with the number of rows at once."""
    row_steps = _ROW_STEPS if problem.dtype == "float32" else (8, 16)
    done: set[tuple[int, int]] = set()
    tiles = {-(-problem.batch // rows) for rows in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)} | {1, 2}
    for count in sorted(tiles):
        even = -(-problem.batch // count)
        for row_step in row_steps:
            height = -(-even // row_step) * row_step
            if height - even < max(row_steps[0], row_step // 2 + 1) and (height, row_step) not in done:
                done.add((height, row_step))
                yield height, row_step


def _placed(config: KernelConfig, device: DeviceSpec) -> KernelConfig | None:
    """Return the configuration with as few weights in shared memory as registers allow, None if it cannot run."""
    per_step = 4 * config.chunks_per_step
    free_registers = register_limit(config, device) - (estimated_registers(config) - config.weight_registers)
    reset = 4 * config.reset_chunks
    if min(free_registers, MAX_WEIGHT_REGISTERS) >= per_step * config.steps + reset:
        return config
    in_registers = (min(free_registers - _SHARED_WEIGHT_REGISTERS, MAX_WEIGHT_REGISTERS) - reset) // per_step
    return replace(config, shared_steps=config.steps - in_registers) if in_registers >= 0 else None
