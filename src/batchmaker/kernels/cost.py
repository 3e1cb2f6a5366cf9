"""The cost of a call of the kernel, in clocks of one SM: our counterpart of GRNN's performance model (section 7.1).

Unlike GRNN's model it predicts time, because it also chooses between regimes, whose exchanges differ most. Within a
step only the next step's input overlaps with other phases, so a step is the sum of its phases. Within a phase the
slowest unit counts, or a warp's own chain of instructions if that is longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from batchmaker.kernels.configuration import Problem
from batchmaker.kernels.devices import DeviceSpec, Timings
from batchmaker.kernels.template import CHUNK_BYTES, WARP, KernelConfig

SCHEDULERS = 4
RECORDED_OPERATIONS = 10
"""Kernels in the recording of a step: rows in, product, gates, rows out, signal."""


@final
@dataclass(frozen=True, slots=True)
class KernelStepCost:
    """The phases of one step of one batch tile, in clocks.

    multiply: h times the weights, and the reduction of sums. gates: the pointwise operations of each unit. exchange: h
    to all blocks of the tile, barrier included. input: the part of fetching the next step's input that the others do
    not hide.
    """

    multiply: float
    gates: float
    exchange: float
    input: float

    @property
    def total(self) -> float:
        return self.multiply + self.gates + self.exchange + self.input


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """A whole call. tiles_in_turn: batch tiles that a team of blocks takes one after another.

    start_s: launch, and loading of weights onto the chip. seconds: the whole call, for rows that all have the problem's
    steps.
    """

    step: KernelStepCost
    tiles_in_turn: int
    start_s: float
    seconds: float


def cost(problem: Problem, config: KernelConfig, device: DeviceSpec) -> Cost:
    """Return the predicted cost of a configuration that can run on the device."""
    tiles = math.ceil(problem.batch / config.tile_height)
    most = device.resident(config.blocks_per_tile, cluster=config.regime == "cluster")
    teams = min(tiles, most)
    in_turn = math.ceil(tiles / teams)
    rows = min(config.tile_height, problem.batch)
    step = _step(problem, config, rows, teams * config.blocks_per_tile, device)
    weights = config.packed_bytes / config.blocks_per_tile
    timings = device.timings
    loading = timings.dram_latency + weights / _l2_share(teams * config.blocks_per_tile, timings)
    start_s = timings.launch_s + max(loading / device.clock_hz, config.packed_bytes / device.dram_bytes_per_s)
    seconds = start_s + in_turn * problem.steps * step.total / device.clock_hz
    return Cost(step, in_turn, start_s, seconds)


def recorded_step_s(problem: Problem, device: DeviceSpec) -> float:
    """Return the predicted time of one recorded step with a library's product and pointwise operations.

    It is the launches, and the product: the longer of its arithmetic and the loading of its weights onto the chip.
    """
    timings = device.timings
    macs = problem.weight_bytes // (4 if problem.dtype == "float32" else 2) * problem.batch
    per_clock = 128.0 if problem.dtype == "float32" else SCHEDULERS * 16 * 8 * 16 / timings.mma_clocks
    multiplying_s = macs / (per_clock * device.sms * timings.library_share * device.clock_hz)
    if problem.weight_bytes <= device.l2_bytes / 2:
        loading_s = problem.weight_bytes / timings.l2_total_bytes_per_clock / device.clock_hz
    else:
        loading_s = problem.weight_bytes / device.dram_bytes_per_s
    return RECORDED_OPERATIONS * timings.recorded_launch_s + max(multiplying_s, loading_s)


def least_steps(problem: Problem, config: KernelConfig, device: DeviceSpec) -> int | None:
    """Return the number of steps from which on one call is predicted to be faster than recorded steps, at least 2.

    None if it never is.
    """
    one = cost(problem, config, device)
    per_step = (one.seconds - one.start_s) / problem.steps
    saved = recorded_step_s(problem, device) - per_step
    return None if saved <= 0 else max(2, math.ceil(one.start_s / saved))


def _step(problem: Problem, config: KernelConfig, rows: int, blocks: int, device: DeviceSpec) -> KernelStepCost:
    timings = device.timings
    multiply = (_tensor_products if config.uses_tensor_workers else _scalar_products)(config, rows, timings)
    multiply += config.exchanges_per_step * _block_barrier(config, timings)
    if config.reset_units:
        multiply += _reset_shares(config, rows, blocks, timings)
    gates = _gates(config, rows, timings)
    exchange = config.exchanges_per_step * _exchange(config, rows, blocks, timings)
    waited = _exposed_input(problem, config, rows, blocks, exchange + multiply, device)
    return KernelStepCost(multiply, gates, exchange, waited)


def _scalar_products(config: KernelConfig, rows: int, timings: Timings) -> float:
    """Float32: each warp multiplies `row_step` rows at a time, and adds up its lanes' parts by shuffles."""
    warps, passes = config.num_threads / WARP, math.ceil(rows / config.row_step)
    per_scheduler = math.ceil(warps / SCHEDULERS)
    lanes = min(config.group_size, WARP)
    sums = config.group_columns * config.row_step
    products = 4 * config.steps * sums
    loads = config.steps * config.row_step
    weight_loads = config.shared_steps * config.chunks_per_step
    shuffles, results = _shuffles(sums, lanes)
    stages = math.log2(lanes)

    instructions = products + loads + weight_loads + 4 * shuffles + 2 * results
    issue = per_scheduler * passes * instructions
    h_clocks = max(1.0, lanes * CHUNK_BYTES / timings.shared_bytes_per_clock)
    weight_clocks = WARP * CHUNK_BYTES / timings.shared_bytes_per_clock
    shared = warps * passes * (loads * h_clocks + weight_loads * weight_clocks + results)
    shuffling = warps * passes * shuffles * WARP / timings.shuffle_lanes_per_clock
    chain = passes * (
        timings.shared_latency
        + max(products, timings.fma_latency * 4 * config.steps)
        + stages * (timings.shuffle_latency + 2 * timings.fma_latency)
    )
    return max(issue, shared, shuffling, chain)


def _reset_shares(config: KernelConfig, rows: int, blocks: int, timings: Timings) -> float:
    """One exchange for the GRU: each block's share of all reset gates, and their sums over all blocks.

    The shares are loaded from L2; before that, two barriers of the block.
    """
    per_scheduler = math.ceil(config.num_threads / WARP / SCHEDULERS)
    products = per_scheduler * rows * config.units_per_block * (config.reset_units + 1)
    values = rows * config.hidden * config.blocks_per_tile
    adding = per_scheduler * math.ceil(values / config.num_threads)
    loading = timings.l2_latency + 4 * values / _l2_share(blocks, timings)
    gates = math.ceil(rows * config.hidden / config.num_threads) * per_scheduler * timings.gates_instructions / 4
    return products + max(adding, loading) + gates + 2 * _block_barrier(config, timings)


def _shuffles(sums: int, lanes: int) -> tuple[int, int]:
    """Return how many shuffles reduce `sums` values over `lanes` lanes, and how many results a lane then has."""
    count = 0
    while lanes > 1:
        sums = sums // 2 if sums % 2 == 0 else sums
        count += sums
        lanes //= 2
    return count, sums


def _tensor_products(config: KernelConfig, rows: int, timings: Timings) -> float:
    """16-bit types: mma.m16n8k16, two for each step of a sum and each tile of 16 columns and 8 rows."""
    warps, passes = config.num_threads / WARP, math.ceil(rows / config.row_step)
    tiles, row_tiles = config.group_columns // 16, config.row_step // 8
    products = 2 * config.steps * tiles * row_tiles
    weight_loads = config.shared_steps * config.chunks_per_step
    loads = config.steps * row_tiles + weight_loads
    stores = 4 * tiles * row_tiles
    per_scheduler = math.ceil(warps / SCHEDULERS)

    multiplying = per_scheduler * passes * products * timings.mma_clocks
    issue = per_scheduler * passes * (products + loads + 2 * stores)
    load_clocks = WARP * CHUNK_BYTES / timings.shared_bytes_per_clock
    shared = warps * passes * (loads * load_clocks + stores)
    chain = passes * (
        timings.shared_latency + max(2 * config.steps * timings.mma_latency, products * timings.mma_clocks) + 2 * stores
    )
    return max(multiplying, issue, shared, chain)


def _gates(config: KernelConfig, rows: int, timings: Timings) -> float:
    """Sigmoids and products of all units and rows of a block, 32 per warp.

    The first warp of a scheduler hides nothing.
    """
    turns = math.ceil(rows * config.units_per_block / WARP / min(SCHEDULERS, config.num_threads / WARP))
    return timings.gates_latency + (turns - 1) * (timings.gates_instructions + config.gates * config.splits)


def _exchange(config: KernelConfig, rows: int, blocks: int, timings: Timings) -> float:
    """Transfer of the new values of h from their owners to their readers."""
    whole = rows * config.state_stride * config.item_bytes
    if config.regime == "block":
        return _block_barrier(config, timings)
    if config.regime == "cluster":
        stores = rows * config.units_per_block * config.blocks_per_tile
        sent = 4 * stores / timings.peer_bytes_per_clock  # a 16-bit value takes as much of the network
        issued = 3 * stores / WARP / min(SCHEDULERS, config.num_threads / WARP)
        return max(sent, issued) + timings.cluster_barrier
    arrivals = config.blocks_per_tile * timings.l2_atomic_clocks
    released = timings.l2_latency + arrivals + 1.5 * timings.l2_latency  # the stores; then the counter, polled
    loaded = timings.l2_latency + whole / _l2_share(blocks, timings)
    return released + loaded + 3 * _block_barrier(config, timings)


def _block_barrier(config: KernelConfig, timings: Timings) -> float:
    return timings.barrier_clocks + timings.barrier_clocks_per_warp * config.num_threads / WARP


def _exposed_input(
    problem: Problem, config: KernelConfig, rows: int, blocks: int, hidden_behind: float, device: DeviceSpec
) -> float:
    """The part of fetching the next step's inputs that is not hidden by exchange and products.

    The inputs come from L2, where the product has left them, unless those of the call fill more than half of it. First
    an index is read, which gives their place.
    """
    timings = device.timings
    per_row = config.gates * config.hidden * config.item_bytes
    per_step = blocks / config.blocks_per_tile * rows * per_row
    if problem.batch * problem.steps * per_row <= device.l2_bytes / 2:
        latency, bytes_per_clock = timings.l2_latency, timings.l2_total_bytes_per_clock
    else:
        latency, bytes_per_clock = timings.dram_latency, device.dram_bytes_per_s / device.clock_hz
    return max(0.0, 2 * timings.shared_latency + latency + per_step / bytes_per_clock - hidden_behind)


def _l2_share(blocks: int, timings: Timings) -> float:
    """Bytes per clock from L2 for each of `blocks` SMs."""
    return min(timings.l2_bytes_per_clock, timings.l2_total_bytes_per_clock / blocks)


def ranked(problem: Problem, configs: list[KernelConfig], device: DeviceSpec) -> list[tuple[KernelConfig, Cost]]:
    """Return configurations with their costs, the cheapest first.

    Several may all wait for their inputs and so take equally long. Then the one with the least work is first, because
    the wait is the least certain of the phases; then the one with fewer threads.
    """
    costs = [(config, cost(problem, config, device)) for config in configs]

    def key(each: tuple[KernelConfig, Cost]) -> tuple[float, float, int, str]:
        config, predicted = each
        doing = predicted.step.total - predicted.step.input
        return round(predicted.seconds, 8), doing, config.num_threads, config.name_expression

    return sorted(costs, key=key)
