from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import OptionError
from batchmaker.kernels.template import CELL_KINDS, KernelConfig
from batchmaker.kernels.tiling import owned_pairs, packed_index, step_sums, weight_index


@st.composite
def configurations(draw):
    cell = draw(st.sampled_from(CELL_KINDS))
    dtype = "float32" if cell == "gru-before-once" else draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    tensor = dtype != "float32"
    groups = draw(st.sampled_from([1, 2, 4]))
    group_size = draw(st.sampled_from([32, 64] if tensor else [8, 16, 32, 64]))
    width = draw(st.sampled_from([4, 16] if cell == "lstm" else [16])) if tensor else draw(st.integers(1, 5))
    row_step = 8 if tensor else draw(st.integers(1, 3))
    return KernelConfig(
        cell=cell,
        dtype=dtype,
        regime="grid",
        hidden=draw(st.integers(1, 150)),
        tile_width=width,
        tile_height=row_step * draw(st.integers(1, 3)),
        groups=max(groups, 32 // group_size),
        group_size=group_size,
        row_step=row_step,
    )


@given(configurations())
def test_every_weight_is_held_exactly_once(config):
    config.check()
    index = packed_index(config)
    assert index.nbytes // 8 * config.item_bytes == config.packed_bytes
    held = np.bincount(index.ravel(), minlength=config.gates * config.hidden**2 + 1)[:-1]
    assert (held == 1).all()


@given(configurations())
def test_every_output_has_exactly_one_owner(config):
    rows, units = owned_pairs(config)
    exists = units >= 0
    made = np.bincount(rows[exists] * config.hidden + units[exists], minlength=config.tile_height * config.hidden)
    assert len(made) == config.tile_height * config.hidden
    assert (made == 1).all()


@given(configurations())
def test_the_owner_of_a_unit_is_in_the_block_that_holds_all_of_its_weights(config):
    index = weight_index(config)
    _, owned = owned_pairs(config)
    for block in range(config.blocks_per_tile):
        columns = index[block][index[block] < config.gates * config.hidden**2] // config.hidden
        mine = np.unique(owned[block][owned[block] >= 0])
        assert np.array_equal(np.unique(columns % config.hidden), mine)
        assert len(np.unique(columns)) == config.tiled_gates * len(mine)


@given(configurations(), st.integers(0, 2**32 - 1))
def test_sums_in_the_order_of_the_kernel_agree_with_float64(config, seed):
    random = np.random.default_rng(seed)
    bound = 1 / np.sqrt(config.hidden)
    weights = random.uniform(-bound, bound, (config.gates * config.hidden, config.hidden)).astype(np.float32)
    h = random.uniform(-1, 1, (3, config.hidden)).astype(np.float32)
    expected = h.astype(np.float64) @ weights.T.astype(np.float64)
    assert np.abs(step_sums(config, weights, h) - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": "gruu"}, "unknown kernel cell 'gruu'.*Did you mean 'gru'"),
        ({"hidden": 0}, "hidden is 0, wanted at least 1"),
        ({"group_size": 24}, "wanted a power of two"),
        ({"groups": 3}, "48 threads, wanted a multiple of 32, at most 1024"),
        ({"groups": 128}, "2048 threads"),
        ({"row_step": 3}, "row_step 3 does not divide tile_height 4"),
        ({"shared_steps": 9}, "wanted 0 to 2"),
        ({"dtype": "bfloat16"}, "wanted whole warps"),
        ({"dtype": "bfloat16", "group_size": 32}, "row_step is 2, wanted a multiple of 8"),
        ({"dtype": "bfloat16", "group_size": 32, "row_step": 8, "tile_height": 8}, "wanted a multiple of 4 for lstm"),
        ({"regime": "block"}, "needs all 100 units in one block, got 4"),
        ({"cell": "gru-before-once", "regime": "cluster"}, "is for regime 'grid' and float32, got 'cluster'"),
        ({"regime": "cluster"}, "2 to 16 blocks per tile, got 25"),
    ],
)
def test_configurations_that_the_kernel_cannot_serve_are_refused(change, message):
    fields = {
        "cell": "lstm",
        "dtype": "float32",
        "regime": "grid",
        "hidden": 100,
        "tile_width": 1,
        "tile_height": 4,
        "groups": 4,
        "group_size": 16,
        "row_step": 2,
    }
    KernelConfig(**fields).check()
    with pytest.raises(OptionError, match=message):
        KernelConfig(**{**fields, **change}).check()
