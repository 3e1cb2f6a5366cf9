"""Which configurations can run, and what the cost model says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.errors import OptionError
from batchmaker.kernels.configuration import (
    MAX_WEIGHT_REGISTERS,
    Problem,
    candidates,
    fallback_reason,
    register_limit,
    why_not,
)
from batchmaker.kernels.cost import cost, ranked
from batchmaker.kernels.devices import A100, H200, modelled
from batchmaker.kernels.template import KernelConfig
from covering import covering

CELLS = ("lstm", "gru", "gru-before")


def problem(hidden, batch, cell="lstm", dtype="float32", steps=100):
    return Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch, steps=steps)


def best(asked, device=H200):
    return ranked(asked, list(candidates(asked, device)), device)[0]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(CELLS), st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(1, 300),
    st.integers(1, 40), st.sampled_from([A100, H200]), st.integers(0, 50),
)  # fmt: skip
def test_every_candidate_can_run_and_computes_every_unit_and_row(cell, dtype, hidden, batch, device, skipped):
    asked = problem(hidden, batch, cell, dtype)
    found = list(islice(candidates(asked, device), skipped, None, 51))
    for config in found:
        assert why_not(config, device) is None
        assert config.units_per_block * config.blocks_per_tile >= hidden
        assert config.padded_hidden >= hidden
        assert config.tile_height % config.row_step == 0
        assert config.num_threads <= 1024
        assert config.weight_registers <= min(MAX_WEIGHT_REGISTERS, register_limit(config, device))
        assert register_limit(config, device) * config.num_threads <= 65_536
        assert config.shared_bytes <= device.shared_bytes
        assert config.blocks_per_tile <= device.sms
        assert 0 < cost(asked, config, device).seconds < 1
    assert len(set(found)) == len(found)


REGIMES = {64: "block", 256: "cluster", 1024: "grid"}


@pytest.mark.parametrize(("hidden", "dtype", "cell"), covering(REGIMES, ["float32", "bfloat16", "float16"], CELLS))
def test_sizes_take_the_regime_that_they_are_meant_for(cell, dtype, hidden):
    assert best(problem(hidden, 10, cell, dtype))[0].regime == REGIMES[hidden]


@pytest.mark.parametrize("hidden", [1, 2, 3, 17, 63, 65, 100, 127, 333, 1000])
@pytest.mark.parametrize(("cell", "dtype"), [("lstm", "float32"), ("gru", "bfloat16"), ("gru-before", "float16")])
def test_small_and_odd_sizes_fit_too(cell, dtype, hidden):
    assert next(candidates(problem(hidden, 3, cell, dtype), H200)).padded_hidden >= hidden


def test_without_clusters_no_cluster_is_a_candidate():
    assert {config.regime for config in candidates(problem(256, 4), A100)} == {"grid"}


def test_large_layers_have_no_candidate_and_the_fallback_is_named():
    for hidden in (2048, 8192):
        assert list(candidates(problem(hidden, 1), H200)) == []
    reason = fallback_reason(problem(2048, 1), H200)
    assert "lstm hidden 2048 batch 1 float32: no persistent kernel fits (its weights are 64.0 MiB" in reason
    assert reason.endswith("it is computed by PyTorch's operations, step by step.")
    tight = replace(H200, shared_bytes=16 << 10, registers=70_000)
    assert "no tiling keeps its 36.0 MiB" in fallback_reason(problem(1536, 64), replace(tight, sms=200))


def test_half_of_the_bytes_let_twice_the_size_in():
    assert best(problem(2048, 1, dtype="bfloat16"))[0].regime == "grid"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"shared_steps": 99}, "shared_steps is 99"),
        ({"groups": 32, "group_size": 4}, "registers of weights per thread, at most 224"),
        ({"group_size": 64, "groups": 16, "row_step": 8, "tile_height": 64}, "registers per thread, at most 64"),
        ({"tile_height": 256, "groups": 16, "group_size": 32, "shared_steps": 2}, "bytes of shared memory per block"),
        ({"regime": "grid", "groups": 1, "group_size": 256}, "blocks of a tile cannot all run at once"),
    ],
)
def test_what_cannot_run_is_told_why(changed, reason):
    fits = KernelConfig("lstm", "float32", "cluster", 256, 1, 1, 32, 8, 1)
    assert why_not(fits, H200) is None
    assert reason in why_not(replace(fits, **changed), H200)


def test_more_rows_and_steps_never_take_less_time():
    times = [best(problem(128, batch, dtype="bfloat16"))[1].seconds for batch in (1, 10, 20, 64, 200, 2000)]
    assert times == sorted(times)
    config = best(problem(64, 10))[0]
    once, twice = (cost(problem(64, 10, steps=steps), config, H200) for steps in (100, 200))
    assert twice.seconds - twice.start_s == pytest.approx(2 * (once.seconds - once.start_s))


def test_tiles_without_a_place_are_taken_in_turn():
    config = KernelConfig("lstm", "float32", "grid", 1024, 1, 4, 8, 32, 4)
    assert [cost(problem(1024, batch), config, H200).tiles_in_turn for batch in (4, 5, 16, 17)] == [1, 2, 4, 5]


def test_a_second_exchange_costs_as_much_as_the_first():
    config = KernelConfig("gru", "float32", "grid", 1024, 1, 4, 8, 32, 4)
    after, before = (
        cost(problem(1024, 4, cell), replace(config, cell=cell), H200).step.exchange for cell in ("gru", "gru-before")
    )
    assert before == 2 * after


def test_rows_that_do_not_exist_cost_nothing_in_float32():
    config = KernelConfig("lstm", "float32", "cluster", 256, 1, 8, 32, 8, 1)
    one, eight = (cost(problem(256, batch), config, H200).step for batch in (1, 8))
    assert one.multiply < eight.multiply
    assert one.exchange < eight.exchange


def test_wrong_problems_are_refused_with_the_nearest_name():
    with pytest.raises(
        OptionError, match=r"unknown cell 'lsmt'; known: gru, gru-before, gru-before-once, lstm\. Did you mean 'lstm'"
    ):
        problem(64, 1, "lsmt")
    with pytest.raises(OptionError, match="unknown dtype 'float64'"):
        problem(64, 1, dtype="float64")
    with pytest.raises(OptionError, match="batch must be at least 1, got 0"):
        problem(64, 0)
    with pytest.raises(
        OptionError, match=r"arch 'sm_75': there is a cost model for sm_80, sm_90.* older ones are not supported"
    ):
        modelled("sm_75")
    assert modelled("sm_90a") is H200
