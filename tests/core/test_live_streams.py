"""Frames of live streams wait for no bulk work: they go first, and what runs beside them is short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler_harness import ChunkProgram, Harness, cell_type, chain, host

from batchmaker import policies
from batchmaker.core import live_streams
from batchmaker.core.arena import Arena
from batchmaker.core.batching import SHORT_TASK_S
from batchmaker.core.layout import NODE_MASK, REQUEST
from batchmaker.core.live_streams import FRAMES
from batchmaker.core.priorities import Priorities
from batchmaker.policies.ageing import AGED_EVERY
from insides import num_beside

FRAME, BULK = cell_type(0, "frame", 2, sizes=(1, 4)), cell_type(1, "bulk", 2, sizes=(1, 4))
STEP_S = SHORT_TASK_S / 8.5
BULK_REQUEST, FIRST_FRAME = 1000, 0


def frames(cell: Any, count: int = 1) -> ChunkProgram:
    """A chunk that goes on from the node that is kept, for so many steps."""

    def program(recorder: Any, kept: Any) -> Any:
        value = kept[0][0] if kept else host(7)
        for _ in range(count):
            (value,) = recorder.node(cell, [value, host(1)])
        recorder.keep(np.array([value.node]))
        return [value]
        yield

    return program


def plain(cell: Any) -> Any:
    """A request of one node."""

    def program(recorder: Any) -> Any:
        (value,) = recorder.node(cell, [host(0), host(1)])
        return [value]
        yield

    return program


def harness(policy: str, **options: Any) -> Harness:
    return Harness(
        [FRAME, BULK], policy=lambda: policies.make(policy), duration=lambda: STEP_S, tells_time=True,
        reports=lambda: 64, check_always=False, **options,
    )  # fmt: skip


POLICIES = ["cellular", "cellular:max_steps=5", "agenda", "depth", "sufficient", "auto", "lazy"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frame_waits_for_the_task_that_runs_however_many_others_wait(policy: str) -> None:
    one = harness(policy)
    for number in range(400):
        one.arrive(BULK_REQUEST + number, plain(BULK))
    one.arrive_chunks(0, [(FIRST_FRAME + number, frames(FRAME), None) for number in range(10)], 4.5 * STEP_S)
    one.run()
    one.check_nothing_left()
    waited = 0
    for number in range(10):
        arrived_s = 4.5 * STEP_S if number == 0 else one.left_s(FIRST_FRAME + number - 1)
        (began_s,) = [ran.start_s for ran in one.log if FIRST_FRAME + number in ran.requests]
        waited += len({ran.task for ran in one.log if arrived_s < ran.start_s < began_s})
    # each for the task that was running when it came, and some for the turn of those that have waited longest
    assert waited <= 10 + 10 // (AGED_EVERY - 1) + 1


@pytest.mark.parametrize("cell", [FRAME, BULK])
def test_tasks_are_short_while_frames_come_and_long_again_after_a_silence(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_streams, "SILENCE_S", 50 * STEP_S)
    one = harness("cellular", aged_every=None)
    for number in range(3):
        one.arrive(BULK_REQUEST + number, chain(cell, 600))
    one.arrive_chunks(0, [(FIRST_FRAME + n, frames(FRAME), None) for n in range(8)], 100 * STEP_S, 12 * STEP_S)
    one.run()
    last_s = max(one.left_s(FIRST_FRAME + number) for number in range(8))
    tasks: dict[int, list[float]] = {}
    for ran in one.log:
        tasks.setdefault(ran.task, []).append(ran.start_s)
    beside = [len(times) for times in tasks.values() if one.left_s(FIRST_FRAME) < times[0] < last_s]
    after = [len(times) for times in tasks.values() if times[0] > last_s + 50 * STEP_S]
    assert max(beside) == 8
    assert max(after) > 3 * max(beside)


def test_recordings_that_are_sequences_are_no_live_streams() -> None:
    one = harness("cellular")
    one.arrive_chunks(0, [(0, frames(FRAME, FRAMES + 1), None)], 0.0)
    one.run()
    assert not one.scheduler.live_streams.are_served
    one.arrive_chunks(1, [(1, frames(FRAME, FRAMES), None)], one.now_s + 1.0)
    one.run()
    assert one.scheduler.live_streams.are_served


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_among_more_frames_than_are_computed_is_answered(policy: str) -> None:
    one = harness(policy)
    for sequence in range(12):  # four at a time: there are always some that wait
        chunks = [(100 * sequence + number, frames(FRAME), None) for number in range(60)]
        one.arrive_chunks(sequence, chunks, 0.0)
    one.arrive(10**6, chain(BULK, 3), 5 * STEP_S)
    one.run(until_s=120 * STEP_S)
    assert one.answers[10**6][1] == "reply"


@pytest.mark.parametrize(
    ("chunks", "others", "rows"), [(0, 9, 4), (2, 9, 4), (4, 9, 4), (6, 9, 6), (20, 0, 16), (1, 0, 4)]
)
def test_a_step_beside_frames_has_all_of_them_and_other_rows_for_a_short_task(
    chunks: int, others: int, rows: int
) -> None:
    arena = Arena()
    priorities = Priorities(arena)
    keys = np.arange(chunks + others, dtype=np.int64)
    for key in keys.tolist():
        arena.nodes[REQUEST, key & NODE_MASK] = key
        priorities.enter(key, 2 * (1 - key % 3) + (key < chunks))
    known_s = np.array([0.1, 0.5, 0.9, 1.5, np.nan]) * SHORT_TASK_S  # for 1, 2, 4, 8 and 16 rows
    assert num_beside(arena.nodes, arena.requests, keys, known_s, 16) == rows


@pytest.mark.parametrize(
    ("known", "rows"),
    [
        ((np.nan,) * 5, 16),  # nothing: the next step tells
        ((np.nan, np.nan, np.nan, np.nan, 4.0), 4),  # 4 would take a quarter of what 16 take, at best
        ((np.nan, np.nan, 1.2, np.nan, 4.0), 2),
        ((0.3, 0.6, 1.2, np.nan, 4.0), 2),
        ((2.0, 2.5, 3.0, 3.5, 4.0), 1),
        ((0.2, 0.3, 0.4, 0.5, 0.9), 16),
    ],
)
def test_sizes_of_which_nothing_is_known_are_tried_if_they_may_be_short(known: tuple[float, ...], rows: int) -> None:
    arena, none = Arena(), np.empty(0, np.int64)
    assert num_beside(arena.nodes, arena.requests, none, np.array(known) * SHORT_TASK_S, 16) == rows
