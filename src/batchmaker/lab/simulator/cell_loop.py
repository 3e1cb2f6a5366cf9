"""The loop of `CompiledCells`: arrivals, choices, tasks and answers of one worker in virtual time, compiled."""

from __future__ import annotations

from typing import Final

import numpy as np

from batchmaker.compiled import compiled, compiled_inline
from batchmaker.lab.simulator.lazy_loop import STOPPED, Lazy, admit, join_line, learn_lengths, learn_step, urgencies
from batchmaker.lab.simulator.line_loop import (
    MODELS,
    NEXT,
    NOBODY,
    NOW_S,
    NUM_NEW,
    PHASE,
    STALE,
    DeviceCosts,
    Flight,
    Task,
    Times,
    begin,
    end_step,
    form_task,
    leave,
)
from batchmaker.lab.simulator.shapes import Ids, Shapes
from batchmaker.policies.ageing import PATIENCE

ADMITTING, CHOOSING = range(2)
"""Meaning of `numbers[PHASE]`."""
WAIT: Final = -2
"""In place of a type: another look is needed, first of all at a table of lengths."""


@compiled_inline
def _ranks(flight: Flight, shapes: Shapes, kinds: Ids, device: DeviceCosts, lazy: Lazy) -> tuple[Times, Ids]:
    """Return two numbers for each type: types with ready parts go by the first, then by the second, then by id."""
    num_types = len(flight.ready)
    ranks, seconds = np.zeros(num_types), np.zeros(num_types, np.int64)
    if not device.watched:
        for type_id in range(num_types):
            ranks[type_id] = 0.0 if flight.ready[type_id] >= device.max_batch[type_id] else 1.0
            seconds[type_id] = -device.priority[type_id]
    elif flight.numbers[MODELS] > 1:
        urgency = urgencies(flight, shapes, kinds, lazy)
        for type_id in range(num_types):
            model = lazy.model[type_id]
            ranks[type_id] = urgency[model] if model < len(urgency) else np.inf
    return ranks, seconds


@compiled_inline
def _rank_first(flight: Flight, shapes: Shapes, kinds: Ids, device: DeviceCosts, lazy: Lazy) -> int:
    """Return the type that runs next of several; WAIT if urgencies need a table of lengths that is stale."""
    count, passed = flight.ready, flight.passed
    if device.watched and flight.numbers[MODELS] > 1 and flight.numbers[STALE] and not lazy.recent:
        return WAIT
    ranks, seconds = _ranks(flight, shapes, kinds, device, lazy)
    best = NOBODY
    for type_id in range(len(count)):
        if not count[type_id]:
            continue
        if best == NOBODY:
            best = type_id
            continue
        overdue = passed[type_id] if passed[type_id] >= PATIENCE else 0
        of_best = passed[best] if passed[best] >= PATIENCE else 0
        if overdue > of_best or (
            overdue == of_best
            and (ranks[type_id] < ranks[best] or (ranks[type_id] == ranks[best] and seconds[type_id] < seconds[best]))
        ):
            best = type_id
    return best


@compiled_inline
def _only_ready(count: Ids) -> int:
    """Return the type with ready parts if there is one such type; NOBODY if there is none, WAIT if there are more."""
    found = NOBODY
    for type_id in range(len(count)):
        if count[type_id]:
            if found != NOBODY:
                return WAIT
            found = type_id
    return found


@compiled_inline
def _note_passed(count: Ids, passed: Ids, chosen: int) -> None:
    """As `Ageing.ran`."""
    for type_id in range(len(count)):
        passed[type_id] = passed[type_id] + 1 if count[type_id] and type_id != chosen else 0


@compiled_inline
def _tell(
    flight: Flight, shapes: Shapes, kinds: Ids, device: DeviceCosts, arrived_s: Times
) -> None:  # fmt: skip
    """Requests that have arrived by now wait in line, or begin."""
    numbers = flight.numbers
    while numbers[NEXT] < len(arrived_s) and arrived_s[numbers[NEXT]] <= flight.seconds[NOW_S]:
        request = numbers[NEXT]
        if device.watched:
            join_line(flight, shapes, kinds[request], request)
        else:
            begin(flight, shapes, kinds[request], request, False)
        numbers[NEXT] += 1
        numbers[NUM_NEW] += 1


@compiled
def play(
    flight: Flight, shapes: Shapes, kinds: Ids, task: Task, device: DeviceCosts, lazy: Lazy, arrived_s: Times
) -> bool:  # fmt: skip
    """Play to the end and return False; or True where a table of lengths is stale: call again once it is made anew."""
    numbers, seconds, count, passed, watched = (
        flight.numbers, flight.seconds, flight.ready, flight.passed, device.watched
    )  # fmt: skip
    ends, end_s, batch, step_s = task.ends, task.end_s, task.batch, device.seconds
    base, expected, factors, corrects = lazy.base, lazy.expected, lazy.factors, lazy.corrects
    while True:
        if watched and numbers[PHASE] == ADMITTING and admit(flight, shapes, kinds, lazy) == STOPPED:
            return True
        type_id = _only_ready(count)
        if type_id == WAIT:
            type_id = _rank_first(flight, shapes, kinds, device, lazy)
        numbers[PHASE] = CHOOSING if type_id == WAIT else ADMITTING
        if type_id == WAIT:
            return True
        if type_id == NOBODY:
            if numbers[NEXT] == len(arrived_s):
                return False
            seconds[NOW_S] = max(seconds[NOW_S], arrived_s[numbers[NEXT]])
            _tell(flight, shapes, kinds, device, arrived_s)
            continue
        _note_passed(count, passed, type_id)
        num_steps = form_task(flight, shapes, kinds, task, device, type_id)
        for step in range(num_steps):
            seconds[NOW_S] = end_s[step]
            _tell(flight, shapes, kinds, device, arrived_s)
            num_done = end_step(flight, shapes, kinds, task, device, type_id, step)
            if watched and corrects:
                rows = ends[step] - (ends[step - 1] if step else 0)
                taken_s = step_s[type_id, rows] + device.step_s + rows * device.row_s
                learn_step(base, expected, factors, numbers, type_id, rows, taken_s)
            for i in range(num_done):
                if watched:
                    learn_lengths(flight, lazy, batch[i])
                leave(flight, batch[i], watched)
