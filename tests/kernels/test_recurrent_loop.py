"""All steps of a task in one compiled call: equal to torch's cells, whatever chains do within the task."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_tasks import KINDS, NUM_TOKENS, Given, Made, as_tensor, expected, made, random_task

from batchmaker.kernels.cpu.loop import LoopPlan, StepKind
from batchmaker.kernels.cpu.products import Library, library
from batchmaker.kernels.cpu.steps import BLOCK, OWN, PACKED, PANEL_ROWS, PANELS, TILED, half_tanh, run_steps
from batchmaker.kernels.cpu.tiles import TILE_ROWS

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-2}
"""Largest absolute difference; states are about 1. bfloat16 has 8 bits, and a task up to six steps that each round:
between 1 and 2, six roundings to the other side are 0.047, and three of them have been seen."""


def check(of: Made, one: Given) -> None:
    """Run the task in every way to multiply, and compare all that is written with torch's cell."""
    wanted = expected(of, one)
    ways, most = of.loop.products.ways, np.zeros(1, np.bool_)
    plans = [LoopPlan(np.full(BLOCK + 1, way), most, ()) for way in ways]
    for plan in (*plans, LoopPlan(plans[0].ways, ~most, (1, 4, 16))):
        mine = one.copied()
        of.loop.plan = plan
        assert of.loop.run(mine.task)
        for got, values in zip((mine.task.state, mine.kept, mine.task.fetched), wanted, strict=True):
            for rows, value in zip(got, values, strict=True):
                torch.testing.assert_close(as_tensor(rows), value, atol=TOLERANCES[of.dtype], rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_task_is_computed_as_by_torch(kind: StepKind, dtype: torch.dtype, data: st.DataObject) -> None:
    of = made(kind, dtype, data.draw(st.sampled_from([1, 8, 13, 32, 64])), bias=data.draw(st.booleans()))
    check(of, random_task(of, data.draw(st.integers(0, 2**32)), num_steps=data.draw(st.integers(1, 6))))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_wider_than_a_block_are_computed_in_several(kind: StepKind, dtype: torch.dtype) -> None:
    of = made(kind, dtype, 16)
    check(of, random_task(of, 3, num_steps=3, num_lanes=3 * BLOCK))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("kind", KINDS)
def test_deep_tiles_are_multiplied_in_parts(kind: StepKind, dtype: torch.dtype) -> None:
    of = made(kind, dtype, 192)
    assert TILED in of.loop.products.ways
    check(of, random_task(of, 3, num_steps=2, num_lanes=TILE_ROWS + 3))


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_library_own_loops_multiply(kind: StepKind, dtype: torch.dtype) -> None:
    for hidden, way in ((15, OWN), (64, TILED)):
        of = made(kind, dtype, hidden, functions=Library())
        assert of.loop.products.ways == [way]
        check(of, random_task(of, 1, num_steps=4))


@pytest.mark.parametrize("way", [PACKED, PANELS])
@pytest.mark.parametrize("hidden", [5, 16, 70])
def test_each_product_of_the_library_multiplies_rows_of_any_width_and_number(hidden: int, way: int) -> None:
    functions = library() if way == PANELS else replace(library(), brgemm=None)
    if (functions.brgemm if way == PANELS else functions.sgemm) is None:
        pytest.skip("this torch, or this processor, does not have it")
    of = made("lstm", torch.float32, hidden, functions=functions)
    assert of.loop.products.ways[-1] == way
    for num_lanes in (1, PANEL_ROWS, PANEL_ROWS + 1, BLOCK + 2):
        check(of, random_task(of, num_lanes, num_steps=2, num_lanes=num_lanes))


def test_where_onednn_is_held_back_its_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert library.__wrapped__().brgemm is None


@pytest.mark.parametrize("seed", range(4))
def test_a_token_without_a_row_leaves_everything_as_it_was(seed: int) -> None:
    of = made("lstm", torch.float32, 8)
    for token in (-1, NUM_TOKENS):
        one = random_task(of, seed, num_steps=3)
        one.tokens[-1] = token
        one.task.inputs = tuple(one.tokens for _ in one.task.inputs)
        assert_nothing_changes(of, one)


def test_a_step_without_lanes_leaves_everything_as_it_was() -> None:
    of = made("gru", torch.float32, 8)
    one = random_task(of, 5, num_steps=3)
    one.task.used[1] = False
    assert_nothing_changes(of, one)


def assert_nothing_changes(of: Made, one: Given) -> None:
    before = one.copied()
    for by_product in (False, True):
        of.loop.plan = LoopPlan(of.loop.plan.ways, np.full(1, by_product), (1, 16) if by_product else ())
        assert not of.loop.run(one.task)
        for mine, was in ((one.task.state, before.task.state), (one.kept, before.kept)):
            for rows, old in zip(mine, was, strict=True):
                np.testing.assert_array_equal(rows, old)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_two_threads_compute_what_one_does(dtype: torch.dtype) -> None:
    of = made("lstm", dtype, 32)
    tasks = [random_task(of, seed, num_steps=40) for seed in range(2)]
    alone = [one.copied() for one in tasks]
    for one in alone:
        of.loop.run(one.task)
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(30):
            mine = tasks[number].copied()
            of.loop.run(mine.task)
            same = [np.array_equal(*pair) for pair in zip(mine.task.state, alone[number].task.state, strict=True)]
            if not all(same):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_each_dtype_has_one_form_that_is_compiled() -> None:
    """Another would be compiled in the middle of serving."""
    for dtype in TOLERANCES:
        for kind in KINDS:
            of = made(kind, dtype, 8)
            for seed in range(5):
                one = random_task(of, seed, num_steps=2)
                assert of.loop.run(one.task)
    assert len(run_steps.signatures) == len(TOLERANCES)  # type: ignore[attr-defined]


def test_the_lock_of_the_interpreter_is_not_held() -> None:
    assert run_steps.targetoptions["nogil"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_no_number(kind: StepKind) -> None:
    for dtype in TOLERANCES:
        of = made(kind, dtype, 8)
        one = random_task(of, 2, num_steps=1)
        task = one.task
        for rows in (*task.state, *one.entering):
            as_tensor(rows).fill_(torch.nan)
        task.move_tables[:] = np.arange(of.num_state)[:, None] + 1 + of.num_state
        task.move_rows[:] = 0
        assert of.loop.run(task)
        assert as_tensor(task.state[0])[task.lanes].isnan().all()


def test_tanh_is_right_to_the_last_bits() -> None:
    from numba import njit

    @njit
    def over(x: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        for i in range(len(x)):
            y[i] = half_tanh(x[i])
        return y

    x = np.linspace(-40, 40, 100_001, dtype=np.float32)
    x = np.concatenate([x, np.array([np.inf, -np.inf, 0, 1e-30], np.float32)])
    assert np.abs(over(x) - np.tanh(x.astype(np.float64) / 2)).max() < 4e-7
    assert np.isnan(over(np.array([np.nan], np.float32))).all()


def test_where_the_library_is_missing_nothing_of_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("batchmaker.kernels.cpu.products.ctypes.CDLL", missing)
    assert library.__wrapped__() == Library()
