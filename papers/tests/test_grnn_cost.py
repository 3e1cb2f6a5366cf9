"""The paper's own space and performance model."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.errors import OptionError
from batchmaker_papers.grnn_cost import GrnnTiling, grnn_cost, grnn_runnable, grnn_space, grnn_space_size
from covering import covering

TABLE_2 = [(128, 2, 449.36), (64, 4, 322.98), (32, 8, 252.43), (16, 16, 443.03), (8, 32, 561.26)]


def tiling(groups, group_size, **changed):
    given = {"cell": "lstm", "hidden": 256, "batch": 20, "tile_width": 32, "tile_height": 2}
    return GrnnTiling(**{**given, "groups": groups, "group_size": group_size, **changed})


@pytest.mark.parametrize(("groups", "group_size", "cost"), TABLE_2)
def test_table_2_is_reproduced(groups, group_size, cost):
    assert round(grnn_cost(tiling(groups, group_size)).total, 2) == cost


def test_the_terms_are_those_that_the_paper_names():
    assert grnn_cost(tiling(128, 2)).partial_dot == pytest.approx(409, abs=1)
    assert grnn_cost(tiling(16, 16)).reduction == pytest.approx(118, abs=0.5)
    assert grnn_cost(tiling(8, 32)).reduction == pytest.approx(236, abs=0.5)


def test_every_tiling_of_table_2_fills_the_titan_v_and_fits():
    for groups, group_size, _ in TABLE_2:
        assert tiling(groups, group_size).active_sms == 80
        assert tiling(groups, group_size).threads == 256
        assert tiling(groups, group_size).fits


@pytest.mark.parametrize(
    ("groups", "group_size", "rank"), [(128, 2, 17), (64, 4, 3), (32, 8, 1), (16, 16, 14), (8, 32, 35)]
)
def test_the_cost_ranks_of_table_2_are_reproduced(groups, group_size, rank):
    mine = grnn_cost(tiling(groups, group_size)).total
    assert 1 + sum(grnn_cost(found).total < mine for found in grnn_space("lstm", 256, 20)) == rank


@pytest.mark.parametrize(("hidden", "batch"), [(h, b) for h in (64, 256) for b in (1, 10)])
def test_small_grus_synchronise_once(hidden, batch):
    assert min(grnn_space("gru", hidden, batch), key=lambda found: grnn_cost(found).total).syncs == 1


def test_large_grus_synchronise_twice():
    assert min(grnn_space("gru", 1024, 1), key=lambda found: grnn_cost(found).total).syncs == 2


def test_what_does_not_fit_is_not_in_the_space():
    assert not tiling(128, 2, tile_width=16, tile_height=1).fits  # 320 blocks for 80 SMs
    assert not tiling(8, 1, hidden=1024, batch=1, tile_height=1).fits  # 16 384 weights in one thread
    assert not tiling(128, 16).fits  # 2048 threads
    assert not tiling(32, 4).fits  # eight results for four threads
    assert list(islice(grnn_space("lstm", 16_384, 1), 1)) == []


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize(("hidden", "batch"), [(h, b) for h in (64, 256, 1024) for b in (1, 10, 20)])
def test_every_size_of_table_1_has_tilings_that_can_run(cell, hidden, batch):
    assert next(grnn_runnable(cell, hidden, batch)).can_run


def test_the_space_is_as_large_as_the_paper_says():
    assert grnn_space_size("lstm", 256, 20) > 100_000


def test_the_best_of_what_can_run_is_the_best_of_table_2():
    best = min(grnn_runnable("lstm", 256, 20), key=lambda found: grnn_cost(found).total)
    assert best == tiling(32, 8)


@pytest.mark.parametrize(("sizes", "cell"), covering([(12, 7), (24, 10), (33, 6)], ["lstm", "gru"]))
def test_no_height_that_is_left_out_is_better(cell, sizes):
    hidden, batch = sizes
    gates = 4 if cell == "lstm" else 2
    every = [
        GrnnTiling(cell=cell, hidden=hidden, batch=batch, tile_width=width, tile_height=height, groups=groups,
                   group_size=size, syncs=syncs)
        for width in range(1, hidden + 1) for height in range(1, batch + 1) for groups in range(1, gates * width + 1)
        for size in (1, 2, 4, 8, 16, 32) for syncs in ((1,) if cell == "lstm" else (1, 2)) if groups * size <= 1024
    ]  # fmt: skip
    assert len(every) == grnn_space_size(cell, hidden, batch)
    least = min(grnn_cost(found).total for found in every if found.can_run)
    assert least == min(grnn_cost(found).total for found in grnn_runnable(cell, hidden, batch))


@settings(max_examples=25)
@given(st.sampled_from(["lstm", "gru"]), st.sampled_from([16, 64, 128]), st.integers(1, 8))
def test_costs_are_positive_and_every_tiling_covers_the_output(cell, hidden, batch):
    for found in islice(grnn_space(cell, hidden, batch), 0, None, 97):
        assert grnn_cost(found).total > 0
        assert found.subtile_width * found.groups == found.tile_width * found.gates
        assert batch % found.tile_height == 0


def test_wrong_tilings_are_refused():
    with pytest.raises(OptionError, match="groups of a tiling must be at least 1, got 0"):
        tiling(0, 2)
    with pytest.raises(OptionError, match="two are for the GRU"):
        tiling(128, 2, syncs=2)
