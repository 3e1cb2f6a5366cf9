from __future__ import annotations

import numpy as np
import pytest
import torch

from batchmaker.errors import OptionError, ShapeError
from batchmaker.kernels.fallback import SteppedLayer
from batchmaker.kernels.layer import LayerWeights
from batchmaker.kernels.rows import call_rows

SIZES = {"num_inputs": 10, "num_slots": 4, "num_outputs": 10}


def test_rows_come_back_longest_first():
    rows = call_rows([0, 2, 7], [3, 1, 0], [2, 3, 2], [5, 0, 8], None, **SIZES)
    assert rows.length.tolist() == [3, 2, 2]
    assert rows.px_offset.tolist() == [2, 0, 7]
    assert rows.slot.tolist() == [1, 3, 0]
    assert rows.y_offset.tolist() == [0, 5, 8]
    assert rows.step_offset.tolist() == [0, 1, 2]
    assert all(getattr(rows, name).dtype == np.int32 for name in ("px_offset", "slot", "length", "y_offset"))


def test_a_call_may_have_no_rows_and_rows_no_steps():
    assert call_rows([], [], [], None, None, **SIZES).longest == 0
    assert call_rows([99], [0], [0], None, None, **SIZES).longest == 0


def test_steps_may_run_backwards():
    assert call_rows([9], [0], [3], None, [0, -4, -8], **SIZES).step_offset.tolist() == [0, -4, -8]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 1], [0], [1], None, None), ShapeError, "px_row_offset has 2 rows, slot has 1"),
        (([[0]], [0], [1], None, None), ShapeError, "px_row_offset has shape"),
        (([0], [0.5], [1], None, None), ShapeError, "slot has shape .* float64, wanted whole numbers"),
        (([0], [0], [-1], None, None), OptionError, "row 0 has length -1"),
        (([0, 0], [1, 4], [1, 1], None, None), OptionError, "row 1 has slot 4, the state tables have 4 rows"),
        (([0], [-1], [1], None, None), OptionError, "row 0 has slot -1"),
        (([0, 1, 2], [2, 0, 2], [1, 1, 1], None, None), OptionError, "slot 2 belongs to two rows"),
        (([0], [0], [3], None, [0, 1]), ShapeError, "step_offset has 2 steps, the longest row has 3"),
        (([8], [0], [3], None, None), OptionError, "px_row_offset and the steps reach rows 8 to 10, there are 10"),
        (([3], [0], [2], None, [0, -4]), OptionError, "reach rows -1 to 3"),
        (([0], [0], [2], [9], None), OptionError, "y_offset and the steps reach rows 9 to 10"),
    ],
)
def test_calls_that_name_what_is_not_there_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        call_rows(*arguments, **SIZES)


def run_layer(**changes):
    arguments = {
        "px": torch.zeros(3, 8),
        "px_row_offset": [0],
        "slot": [1],
        "length": [3],
        "h_state": torch.ones(2, 2),
        "c_state": torch.ones(2, 2),
        "y": torch.full((3, 2), torch.nan),
    } | changes
    SteppedLayer(LayerWeights("lstm", torch.zeros(8, 2), None)).run(**arguments)
    return arguments


def test_only_the_slot_of_a_row_is_written():
    call = run_layer(y=torch.full((3, 5), torch.nan)[:, 1:3])
    assert call["h_state"][0].tolist() == [1, 1]
    assert call["c_state"].tolist() == [[1, 1], [0.125, 0.125]]
    assert torch.equal(call["y"][2], call["h_state"][1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"px": torch.zeros(3, 6)}, r"px has shape \(3, 6\), wanted \(rows, 8\)"),
        ({"px": torch.zeros(3, 8).half()}, "px is torch.float16, wanted torch.float32"),
        ({"h_state": torch.zeros(2)}, "h_state has shape"),
        ({"h_state": torch.zeros(2, 2).t()}, "h_state has strides .* make it contiguous"),
        ({"c_state": None}, "needs c_state"),
        ({"c_state": torch.zeros(2, 2).half()}, "c_state is torch.float16, wanted torch.float32"),
        ({"c_state": torch.zeros(3, 2)}, "c_state has 3 rows, h_state has 2"),
        ({"y": torch.zeros(2, 3).t()}, "y has strides"),
        ({"px": torch.zeros(3, 8, device="meta")}, "px is on meta, the weights are on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ShapeError, match=message):
        run_layer(**change)


def test_a_gru_has_no_c():
    layer = SteppedLayer(LayerWeights("gru", torch.zeros(6, 2), None))
    with pytest.raises(ShapeError, match="a gru has no c_state"):
        layer.run(torch.zeros(1, 6), [0], [0], [1], torch.zeros(1, 2), torch.zeros(1, 2))
