"""The NPU model: what a call of a cell costs, by batch size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.errors import OptionError
from batchmaker_papers.npu.accelerator import (
    Activations,
    Npu,
    Operation,
    OwnGemm,
    SharedGemm,
    Streamed,
    VectorWork,
    Weights,
)
from batchmaker_papers.npu.systolic import Gemm, scalesim_os, scalesim_ws, tpu

FLOWS = st.sampled_from([scalesim_ws, scalesim_os, tpu()])
COUNTS = st.integers(1, 3000)
OPERATIONS: st.SearchStrategy[list[Operation]] = st.lists(
    st.one_of(
        st.builds(SharedGemm, COUNTS, COUNTS, COUNTS, st.integers(1, 4)),
        st.builds(OwnGemm, st.integers(1, 4), COUNTS, COUNTS, COUNTS),
        st.builds(VectorWork, st.integers(1, 10**6)),
        st.builds(Activations, st.integers(0, 10**7), st.integers(0, 10**7)),
        st.builds(Streamed, st.integers(1, 10**6)),
        st.builds(Weights, st.integers(1, 10**8)),
    ),
    max_size=6,
)


def cycles(operations: list[Operation], batch: int, flow=scalesim_ws, npu: Npu | None = None, **options: int) -> float:
    return float((npu or Npu()).cycles(operations, np.array([batch]), flow, **options)[0])


@given(OPERATIONS, FLOWS)
def test_a_larger_batch_is_never_faster(operations: list[Operation], flow):
    curve = Npu().cycles(operations, np.arange(70), flow)
    assert curve[0] == 0
    assert (curve[1:] >= 100).all()  # an access to DRAM
    assert (np.diff(curve) >= 0).all()


@given(OPERATIONS, st.integers(0, 64), FLOWS)
def test_a_curve_holds_what_is_told_one_by_one(operations: list[Operation], batch: int, flow):
    npu = Npu()
    assert npu.cycles(operations, np.arange(65), flow)[batch] / npu.clock_hz == npu.seconds(operations, batch, flow)


def test_weights_are_shared_by_the_batch_and_what_belongs_to_requests_adds_up():
    shared, own = [SharedGemm(3, 256, 512)], [OwnGemm(2, 3, 256, 512)]
    for batch in (1, 7, 64):
        assert cycles(shared, batch) == Gemm(3 * batch, 256, 512).cycles(scalesim_ws)
        assert cycles(own, batch) == 2 * batch * Gemm(3, 256, 512).cycles(scalesim_ws)


def test_groups_are_products_one_after_the_other():
    assert cycles([SharedGemm(10, 64, 64, 4)], 2) == 4 * Gemm(20, 64, 64).cycles(scalesim_ws)


def test_the_vector_unit_has_as_many_lanes_as_the_array_has_columns():
    assert cycles([VectorWork(100_000)], 2) == -(-200_000 // 128)


def test_computing_and_moving_overlap_and_the_longer_one_counts():
    weights = 10_000_000
    memory = 100 + weights / (360e9 / 700e6)
    assert cycles([Weights(weights), VectorWork(128)], 1) == pytest.approx(memory)
    assert cycles([Weights(weights), VectorWork(128 * 100_000)], 1) == 100_000
    assert cycles([Weights(weights)], 64) == pytest.approx(memory)  # once for the whole batch


def test_a_value_may_have_two_bytes():
    single, double = cycles([Weights(10**7)], 1), cycles([Weights(10**7)], 1, npu=Npu(bytes_per_value=2))
    assert double - 100 == pytest.approx(2 * (single - 100))


def test_weights_stay_if_all_cells_fit_together():
    operations: list[Operation] = [Weights(3 << 20)]
    assert cycles(operations, 1, working_set=4 << 20) == 100
    assert cycles(operations, 1, working_set=(4 << 20) + 1) > 100
    assert cycles(operations, 1) > 100  # nothing is known of the others


def test_activations_stay_while_those_of_the_whole_batch_fit():
    operations: list[Operation] = [Activations(1 << 20, 1 << 20)]
    assert cycles(operations, 4) == 100
    assert cycles(operations, 5) == pytest.approx(100 + 5 * (2 << 20) / (360e9 / 700e6))


def test_rows_of_a_table_always_come_from_dram():
    assert cycles([Streamed(514)], 2) == pytest.approx(100 + 2, rel=1e-3)


def test_a_latency_table_has_every_batch_size_and_no_spread():
    cells = {"a": [SharedGemm(1, 512, 512), Weights(512 * 512)], "b": [VectorWork(1000)]}
    npu = Npu()
    table = npu.latency_table(cells, 64, tpu())
    dense = table.dense(["b", "a"], 64)
    assert (dense == table.dense(["b", "a"], 64, "p95")).all()
    for batch in (1, 17, 64):
        assert dense[1, batch] == pytest.approx(npu.seconds(cells["a"], batch, tpu(), working_set=512 * 512))


def test_what_fits_together_decides_for_each_cell():
    small: list[Operation] = [Weights(3 << 20)]
    alone = Npu().latency_table({"a": small}, 1, tpu()).seconds("a", 1)
    with_another = Npu().latency_table({"a": small, "b": small}, 1, tpu()).seconds("a", 1)
    assert alone < with_another


@pytest.mark.parametrize(
    "options",
    [{"array": 0}, {"clock_hz": 0.0}, {"dram_bytes_per_s": float("inf")}, {"bytes_per_value": 0}, {"weight_bytes": -1}],
)
def test_accelerators_that_cannot_be_are_refused(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        Npu(**options)


def test_batches_below_nothing_are_refused():
    with pytest.raises(OptionError, match="batch"):
        Npu().seconds([], -1, tpu())
    with pytest.raises(OptionError, match="max_batch"):
        Npu().latency_table({"a": []}, 0, tpu())
