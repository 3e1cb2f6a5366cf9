"""The division of work in the kernel, in NumPy: it packs the weights and is the specification for tests.

GRNN tiles the output: the owner of a hidden unit has all of its gates (section 5). A block has `units_per_block` units,
a work group of it `tile_width`, and the threads of a group share the sum over the hidden units (section 6.3).
"""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Float32s, Ints
from batchmaker.kernels.template import WARP, KernelConfig


def weight_columns(config: KernelConfig) -> Ints:
    """Return the gate column of each weight of a thread: gate * hidden + unit, or -1 for padding.

    Shape [blocks, chunks, threads, items]: the same for all steps. Items are the content of one 16-byte chunk.
    """
    thread = np.arange(config.num_threads)
    if config.uses_tensor_workers:
        # The rows of A in mma.m16n8k16: registers 0 and 2 hold row lane / 4, registers 1 and 3 the row eight below.
        register = np.arange(8) // 2
        row = (thread % WARP // 4)[:, None] + 8 * (register % 2)
        column = 16 * (np.arange(config.chunks_per_step) // 2)[:, None, None] + row
    else:
        column = np.broadcast_to(
            np.arange(config.chunks_per_step)[:, None, None], (config.chunks_per_step, config.num_threads, 4)
        )
    gate, within = np.divmod(column, config.tile_width)
    gate = gate + config.gates - config.tiled_gates
    group = (thread // config.group_size)[:, None]
    block = np.arange(config.blocks_per_tile)[:, None, None, None]
    unit = block * config.units_per_block + group * config.tile_width + within
    return np.where(unit < config.hidden, gate * config.hidden + unit, -1)


def weight_depths(config: KernelConfig) -> Ints:
    """Return the hidden unit for each weight of a thread, or -1 for padding.

    Shape [steps, chunks, threads, items]: the same for all blocks.
    """
    lane = np.arange(config.num_threads) % config.group_size
    step = np.arange(config.steps)[:, None, None, None]
    if config.uses_tensor_workers:
        # Lane q of four loads eight neighbouring units; the first four go into one mma, the others into the next.
        item = np.arange(8)
        half = (np.arange(config.chunks_per_step) % 2)[:, None, None]
        split, quarter = (lane // WARP)[:, None], (lane % 4)[:, None]
        unit = WARP * (step * config.splits + split) + 8 * quarter + 4 * half + 2 * (item // 4) + item % 2
    else:
        unit = 4 * (step * config.group_size + lane[:, None]) + np.arange(4)
        unit = np.broadcast_to(unit, (config.steps, config.chunks_per_step, config.num_threads, 4))
    return np.where(unit < config.hidden, unit, -1)


def weight_index(config: KernelConfig) -> Ints:
    """Return the position of each packed weight in the flattened recurrent weights [gates * hidden, hidden].

    Shape [blocks, steps, chunks, threads, items], the kernel's order. Padding is gates * hidden * hidden, one past the
    end: a zero belongs there.
    """
    columns = weight_columns(config)[:, None]
    depths = weight_depths(config)[None]
    outside = config.gates * config.hidden * config.hidden
    return np.where((columns < 0) | (depths < 0), outside, columns * config.hidden + depths)


def reset_index(config: KernelConfig) -> Ints:
    """Return, for the GRU with one exchange, the position of each weight of the reset gate as in `weight_index`.

    Shape [blocks, chunks, threads, items]. A thread has those of a block's own units as inputs, and of every
    num_threads-th unit's gate as outputs; none for other cells.
    """
    number = (4 * np.arange(config.reset_chunks)[:, None] + np.arange(4))[:, None]
    k, within = np.divmod(number, config.units_per_block)
    output = np.arange(config.num_threads)[:, None] + k * config.num_threads
    block = np.arange(config.blocks_per_tile)[:, None, None, None]
    unit = block * config.units_per_block + within
    exists = (k < config.reset_units) & (output < config.hidden) & (unit < config.hidden)
    return np.where(exists, output * config.hidden + unit, config.gates * config.hidden * config.hidden)


def packed_index(config: KernelConfig) -> Ints:
    """Return the positions of all packed weights in the kernel's order, flat: block by block."""
    blocks = config.blocks_per_tile
    parts = (weight_index(config).reshape(blocks, -1), reset_index(config).reshape(blocks, -1))
    return np.concatenate(parts, axis=1).ravel()


def owned_pairs(config: KernelConfig) -> tuple[Ints, Ints]:
    """Return the rows of a tile and the units whose gates each thread combines; unused entries have unit -1.

    Shape of both: [blocks, pairs, threads]. Neighbouring threads have neighbouring units of one row.
    """
    pairs = -(-config.tile_height * config.units_per_block // config.num_threads)
    index = np.arange(pairs)[:, None] * config.num_threads + np.arange(config.num_threads)
    rows, within = np.divmod(index, config.units_per_block)
    units = np.arange(config.blocks_per_tile)[:, None, None] * config.units_per_block + within
    exists = (rows < config.tile_height) & (units < config.hidden)
    return np.broadcast_to(rows, units.shape), np.where(exists, units, -1)


def step_sums(config: KernelConfig, weights: Float32s, h: Float32s) -> Float32s:
    """Return h times the recurrent weights in the kernel's order of additions, in float32.

    weights: [gates * hidden, hidden]; h: [rows, hidden]. Returns [rows, gates * hidden]. For each sum a thread first
    adds up its own steps one after the other. Then the lanes of a warp are added in a tree, then the warps, first to
    last. The order of a tensor core within one mma is not specified; here its products are added in the order of the
    units.
    """
    rows, hidden = h.shape
    sums = np.zeros((rows, config.gates * hidden), np.float32)
    for column in range(config.gates * hidden):
        products = _padded(config, weights[column] * h)
        total = np.zeros(rows, np.float32)
        for split in range(config.splits):
            total = total + _warp_sum(config, products, split)
        sums[:, column] = total
    return sums


def _padded(config: KernelConfig, products: Float32s) -> Float32s:
    """Return the products of one column with zeros for the padding, [rows, steps, splits, lanes of a warp, items]."""
    wide = np.zeros((len(products), config.padded_hidden), np.float32)
    wide[:, : config.hidden] = products
    lanes = 4 if config.uses_tensor_workers else min(config.group_size, WARP)
    return wide.reshape(len(products), config.steps, config.splits, lanes, -1)


def _warp_sum(config: KernelConfig, products: Float32s, split: int) -> Float32s:
    """Return the sum of one warp's part of one column, [rows]."""
    part = products[:, :, split]
    if config.uses_tensor_workers:  # one accumulator for all lanes
        part = part.reshape(len(part), -1, 1, 1)
    lanes = np.zeros((len(part), part.shape[2]), np.float32)
    for step in range(part.shape[1]):
        for item in range(part.shape[3]):
            lanes = lanes + part[:, step, :, item]
    while lanes.shape[1] > 1:  # lane i is added to lane i + half, and so on
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
