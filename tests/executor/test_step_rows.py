"""What a step reads from state tables, and what it leaves there."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker.core.commands import ZERO_TABLE, Reserve, TableId, TableSpec
from batchmaker.executor import step_rows
from batchmaker.executor.state_tables import StateTables, as_array
from batchmaker.executor.step_rows import InputReader, keep_rows
from batchmaker.graph.spec import ValueSpec

FORMS = [("float32", (3,)), ("int64", ()), ("bfloat16", (2, 2)), ("bool", (5,)), ("float64", (0,))]
NUM_ROWS = 12


def filled(count=4):
    """Return tables of each form, `count` of each, with other numbers in every row."""
    tables, specs = StateTables(), [ValueSpec(shape, dtype) for dtype, shape in FORMS]
    for form, spec in enumerate(specs):
        for k in range(count):
            number = TableId(1 + form * count + k)
            tables.reserve(Reserve((TableSpec(number, spec),), NUM_ROWS))
            numbers = torch.arange(tables[number].numel()).reshape(tables[number].shape) + 100 * number
            tables[number].copy_(numbers % 2 == 0 if spec.dtype == "bool" else numbers)
    return tables, specs


@pytest.mark.parametrize("most_copied", [0, 1 << 20])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_inputs_are_the_rows_that_the_task_names(most_copied, data):
    tables, specs = filled()
    count, padding = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 3))
    begin = data.draw(st.integers(0, 2))
    of, rows = np.zeros((2, len(FORMS), begin + count), np.int64)
    for form in range(len(FORMS)):
        if data.draw(st.booleans()):  # together in one table, perhaps
            of[form], rows[form] = 1 + form * 4, data.draw(st.integers(0, 2)) + np.arange(begin + count)
            continue
        for p in range(begin + count):
            of[form, p] = data.draw(st.sampled_from([ZERO_TABLE, *range(1 + form * 4, 5 + form * 4)]))
            rows[form, p] = data.draw(st.integers(0, NUM_ROWS - 1))
    rows %= NUM_ROWS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_rows, "MOST_COPIED", most_copied)
        reader = InputReader(specs)
        for _ in range(2):  # the second time in the memory of the first
            inputs = reader.read(tables, of, rows, begin, begin + count, count + padding)
            for form, (values, spec) in enumerate(zip(inputs.values, specs, strict=True)):
                assert values.shape == (count + padding, *spec.shape)
                for i, p in enumerate(range(begin, begin + count)):
                    table, row = TableId(int(of[form, p])), int(rows[form, p])
                    wanted = torch.zeros_like(values[i]) if table == ZERO_TABLE else tables[table][row]
                    assert torch.equal(values[i], wanted)
            reader.leave(inputs)


def test_large_inputs_that_stand_together_are_not_copied():
    tables, specs = filled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_rows, "MOST_COPIED", 0)
        (values,) = InputReader(specs[:1]).read(tables, np.full((1, 3), 1), np.array([[2, 3, 4]]), 0, 3, 4).values
        tables[TableId(1)][3] = 7
    assert values[1].tolist() == [7, 7, 7]


def test_rows_after_those_of_the_step_repeat_its_first_so_that_no_cell_sees_what_no_request_gave():
    tables, specs = filled()
    reader = InputReader(specs[:1])
    of, rows = np.array([[1, 2]]), np.array([[5, 6]])
    (values,) = reader.read(tables, of, rows, 0, 2, 4).values
    assert torch.equal(values[2:], tables[TableId(1)][[5, 5]])


@pytest.mark.parametrize(("of", "row"), [(1, NUM_ROWS), (1, -1), (99, 0), (-1, 0)])
def test_a_row_that_no_table_has_is_an_error_and_no_read_of_other_memory(of, row):
    tables, specs = filled()
    with pytest.raises(IndexError, match="a row that its table does not have"):
        InputReader(specs[:1]).read(tables, np.array([[of]]), np.array([[row]]), 0, 1, 1)


def test_outputs_are_kept_at_their_rows_and_nothing_else_changes():
    tables, specs = filled()
    numbers = tuple(TableId(1 + 4 * form) for form in range(len(FORMS)))
    before = [tables[number].clone() for number in numbers]
    outputs = [torch.ones(4, *spec.shape).to(tables[number].dtype) for spec, number in zip(specs, numbers, strict=True)]
    keep_rows(tables, numbers, outputs, np.array([3, 0]), np.array([7, 2]))
    for number, old, output in zip(numbers, before, outputs, strict=True):
        old[[7, 2]] = output[[3, 0]]
        assert torch.equal(tables[number], old)


def test_outputs_that_are_rows_of_the_table_itself_are_kept_as_they_were():
    tables, _ = filled()
    number = TableId(1)
    before = tables[number].clone()
    keep_rows(tables, (number,), [tables[number].narrow(0, 0, 3)], np.array([0, 1, 2]), np.array([1, 2, 3]))
    assert torch.equal(tables[number][1:4], before[:3])


def test_outputs_of_another_dtype_or_not_in_one_piece_are_kept_as_values():
    tables, _ = filled()
    number = TableId(1)
    keep_rows(
        tables, (number,), [torch.arange(6.0, dtype=torch.float64).reshape(3, 2).t()], np.array([1]), np.array([0])
    )
    assert tables[number][0].tolist() == [1, 3, 5]


@pytest.mark.parametrize("turned", [torch.ones(1, 3) * 1j, torch._neg_view(torch.ones(1, 3))], ids=["view", "whole"])
def test_numbers_that_torch_negates_when_it_reads_them_are_kept_as_it_reads_them(turned):
    tables, _ = filled()
    values = turned.conj().imag if turned.is_complex() else turned
    assert values.is_neg()
    keep_rows(tables, (TableId(1),), [values], np.array([0]), np.array([0]))
    assert tables[TableId(1)][0].tolist() == as_array(values)[0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(("at", "row"), [(3, 0), (-1, 0), (0, NUM_ROWS), (0, -1)])
def test_a_row_that_no_output_or_table_has_is_an_error_and_no_write_to_other_memory(at, row):
    tables, _ = filled()
    with pytest.raises(IndexError, match="a row that its table, or its output, does not have"):
        keep_rows(tables, (TableId(1),), [torch.zeros(3, 3)], np.array([at]), np.array([row]))
