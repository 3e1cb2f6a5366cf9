"""A worker that is never run ahead of still lets a type of low priority in."""

from __future__ import annotations

import numpy as np
import pytest

from batchmaker.core.commands import RunTask
from batchmaker.core.events import CellTypeAdded, RequestArrived, RequestId, StepsFinished
from batchmaker.core.scheduler import Scheduler
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.policies import CellularPolicy

STATE = ValueSpec((2,), "float32")
TOKEN = ValueSpec((), "int64")


def chain(cell: CellType, length: int):
    recorder = Recorder()
    recorder.run(cell, [HostValues(np.zeros(length, np.int64), length, TOKEN)], None)
    return recorder.take()


@pytest.mark.parametrize(
    ("take_turns", "order"),
    [(False, ["decoder"] * 3 + ["encoder"]), (True, ["decoder", "encoder", "decoder", "decoder"])],
)
def test_a_type_that_has_just_run_lets_a_waiting_one_in(take_turns: bool, order: list[str]) -> None:
    decoder = CellType(TypeId(0), "decoder", (TOKEN, STATE), (STATE,), (4,), priority=1)
    encoder = CellType(TypeId(1), "encoder", (TOKEN, STATE), (STATE,), (4,))
    scheduler = Scheduler(CellularPolicy(max_steps=1), take_turns=take_turns)
    commands = scheduler.handle(
        CellTypeAdded(decoder, 0.0),
        CellTypeAdded(encoder, 0.0),
        RequestArrived(RequestId(0), chain(decoder, 3), 0.0),
        RequestArrived(RequestId(1), chain(encoder, 1), 0.0),
    )
    seen = []
    for time_s in (1.0, 2.0, 3.0, 4.0):
        (task,) = (command for command in commands if isinstance(command, RunTask))
        seen.append(scheduler.cells[task.type_id].name)
        commands = scheduler.handle(StepsFinished(task.task, 0, task.num_steps, time_s))
    assert seen == order
    scheduler.check_invariants()
