"""The fallback beyond the persistent kernels: steps replayed from a recording, on a device that does things late."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchmaker.errors import DeviceError
from batchmaker.kernels import fallback
from batchmaker.kernels.fallback import RecordedLayer, SteppedLayer
from batchmaker.kernels.layer import LayerWeights, RecurrentLayer

HIDDEN = 5


def weights_of(cell: Any, dtype: torch.dtype = torch.float32) -> LayerWeights:
    random = torch.Generator().manual_seed(1)
    gates = 4 if cell == "lstm" else 3
    w_hh = torch.randn(gates * HIDDEN, HIDDEN, generator=random).to(dtype)
    return LayerWeights(cell, w_hh, torch.randn(HIDDEN, generator=random) if cell == "gru" else None)


def called(layer: RecurrentLayer, weights: LayerWeights, seed: int, lengths: list[int], *, strided: bool) -> Any:
    """Run one call on random values and return the tensors that it writes: of rows in any slots, px in any order."""
    random = torch.Generator().manual_seed(seed)
    dtype, batch = weights.w_hh.dtype, len(lengths)
    steps = max(lengths, default=0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    px = values(batch * steps + 2, weights.gates * HIDDEN).to(dtype)
    h, c = values(batch + 3, HIDDEN).to(dtype), values(batch + 3, HIDDEN)
    wide = torch.full((len(px), HIDDEN + 4), torch.nan, dtype=dtype)
    y = wide[:, 2 : 2 + HIDDEN] if strided else wide[:, :HIDDEN].contiguous()
    slots = torch.randperm(batch + 3, generator=random)[:batch].tolist()
    offset = [1 + row if strided else 1 + row * steps for row in range(batch)]
    step_offset = [t * batch if strided else t for t in range(steps)]
    cells = c if weights.cell == "lstm" else None
    layer.run(px, offset, slots, lengths, h, cells, y, step_offset=step_offset)
    return h, c, y


@pytest.mark.parametrize("cell", ["lstm", "gru", "gru-before"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    most=st.sampled_from([2, 4, 32]),
    strided=st.booleans(),
)
def test_replayed_steps_compute_what_plain_operations_do(
    cell: Any, seed: int, lengths: list[int], most: int, strided: bool
) -> None:
    weights, device = weights_of(cell), FakeDevice(seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "MOST_STEPS", most)
        layer = RecordedLayer(weights, device)
        found = called(layer, weights, seed, lengths, strided=strided)
        again = called(
            layer, weights, seed + 1, lengths, strided=strided
        )  # what the first has left behind is no matter
        device.stop()
    for each, number in ((found, seed), (again, seed + 1)):
        for mine, wanted in zip(
            each, called(SteppedLayer(weights), weights, number, lengths, strided=strided), strict=True
        ):
            torch.testing.assert_close(mine, wanted, equal_nan=True)
    assert device.num_recorded == (max(lengths) > 0)


def test_a_recording_serves_all_calls_of_its_bucket() -> None:
    weights, device = weights_of("lstm"), FakeDevice()
    layer = RecordedLayer(weights, device)
    for lengths in ([3, 4, 1], [4, 4, 4, 3], [3, 3, 3], [3] * 4):
        called(layer, weights, 0, lengths, strided=False)
    assert device.num_recorded == 1
    called(layer, weights, 0, [5, 1, 1], strided=False)
    called(layer, weights, 0, [1], strided=False)
    assert device.num_recorded == 3
    before = device.num_launched
    called(layer, weights, 0, [fallback.MOST_STEPS * 2 + 1], strided=False)
    assert device.num_launched == before + 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_as_by_plain_operations(dtype: torch.dtype) -> None:
    weights, device = weights_of("lstm", dtype), FakeDevice()
    found = called(RecordedLayer(weights, device), weights, 3, [7, 2, 0], strided=True)
    device.stop()
    for mine, wanted in zip(found, called(SteppedLayer(weights), weights, 3, [7, 2, 0], strided=True), strict=True):
        torch.testing.assert_close(mine, wanted, equal_nan=True)


def test_where_nothing_can_be_recorded_it_says_so_once_and_computes(caplog: pytest.LogCaptureFixture) -> None:
    weights, device = weights_of("gru"), FakeDevice(records=False)
    layer = RecordedLayer(weights, device)
    with caplog.at_level(logging.WARNING, "batchmaker.kernels"):
        results = [called(layer, weights, seed, [4, 1 + seed], strided=False) for seed in range(3)]
    device.stop()
    for seed, found in enumerate(results):
        wanted = called(SteppedLayer(weights), weights, seed, [4, 1 + seed], strided=False)
        torch.testing.assert_close(found, wanted, equal_nan=True)
    (record,) = caplog.records
    assert "not recorded (it waits for a value)" in record.getMessage()


def test_a_lost_device_is_an_error_and_no_reason_to_go_on_without_recordings() -> None:
    weights, device = weights_of("gru"), FakeDevice()
    device.lose()
    with pytest.raises(DeviceError, match="it fell off the bus"):
        called(RecordedLayer(weights, device), weights, 0, [2], strided=False)
