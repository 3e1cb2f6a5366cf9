"""A log of a live engine, kept in a file, gives the same commands when it is played again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_models import PAIR, costs, pair

from batchmaker.core.commands import RunTask
from batchmaker.core.events import StepsFinished
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.engine import Engine
from batchmaker.errors import DataError, InvariantError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.simulator.cell_simulation import CellSimulation
from batchmaker.lab.simulator.costs import SimulatedDevice
from batchmaker.lab.simulator.replay import EventLog, SchedulerOptions, Turn, check_replay
from batchmaker.lab.simulator.workload import Offered
from batchmaker.policies.cellular import CellularPolicy


def live_log(name: str, requests: list[Any], **options: Any) -> EventLog:
    """Serve the requests on a CPU and record what the scheduler was told and commanded."""
    engine = Engine(zoo.make(name, hidden=8, vocabulary_size=30, max_batch=8, **options), "cellular", threads=1)
    log = EventLog(SchedulerOptions("cellular", take_turns=True, loops_ahead=True))
    assert isinstance(engine.driver, CellDriver)
    engine.driver.record = log.record
    with engine:
        for future in [engine.submit(request) for request in requests]:
            future.result()
    return log


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("seq2seq", [[3, 4, 5, 6][: 1 + i % 4] for i in range(30)]),
        ("treelstm", [{"words": [1, 2, 3], "children": [[0, 1], [3, 2]]}, {"words": [1, 2], "children": [[0, 1]]}] * 6),
    ],
)
def test_a_live_log_from_its_file_gives_the_same_commands(name: str, requests: list[Any], tmp_path: Path) -> None:
    log = live_log(name, requests)
    log.save(tmp_path / "log.msgpack")
    loaded = EventLog.load(tmp_path / "log.msgpack")
    assert loaded.options == log.options
    assert check_replay(loaded) == check_replay(log) == sum(len(turn.commands) for turn in log.turns)
    assert sum(isinstance(command, RunTask) for turn in loaded.turns for command in turn.commands) > 3


def simulated_log(num_requests: int) -> EventLog:
    simulation = CellSimulation(
        PAIR, CellularPolicy(), Offered([pair(3, 2)] * num_requests, np.arange(float(num_requests))),
        SimulatedDevice(costs(PAIR.cells)),
    )  # fmt: skip
    log = EventLog(SchedulerOptions("cellular", give_up_late=False, plan_rows=False))
    handle = simulation.scheduler.handle

    def listen(*events: Any) -> Any:
        commands = handle(*events)
        log.record(events, commands)
        return commands

    simulation.scheduler.handle = listen  # type: ignore[method-assign]
    simulation.run()
    return log


def test_a_simulated_log_can_be_replayed_too(tmp_path: Path) -> None:
    log = simulated_log(6)
    log.save(tmp_path / "log")
    assert check_replay(EventLog.load(tmp_path / "log")) > 10


def test_another_order_of_events_is_found_out() -> None:
    log = simulated_log(6)
    number = next(i for i, turn in enumerate(log.turns) if any(isinstance(c, RunTask) for c in turn.commands))
    turn = log.turns[number]
    log.turns[number] = Turn(turn.events, (*turn.commands[:-1], turn.commands[0]))
    with pytest.raises(InvariantError, match=f"turn {number}: "):
        check_replay(log)


def test_options_that_were_others_are_found_out() -> None:
    log = simulated_log(6)
    log.options = SchedulerOptions("cellular", give_up_late=False, plan_rows=True)
    with pytest.raises(InvariantError, match="turn"):
        check_replay(log)
    log.options = SchedulerOptions("serial")
    with pytest.raises(OptionError, match="whole requests"):
        check_replay(log)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no event log"),
        (b"\xc0", "version None"),
        (b"\x81\xa7version\x02", "malformed"),
        (b"hello", "log|version"),
    ],
)
def test_a_file_that_is_no_log_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(DataError, match=message):
        EventLog.load(tmp_path / "log")


def test_a_log_that_is_missing_or_tampered_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        EventLog.load(tmp_path / "nothing")
    with pytest.raises(DataError, match="cannot be written"):
        simulated_log(1).save(tmp_path / "no" / "folder")
    log = simulated_log(2)
    event = next(e for turn in log.turns for e in turn.events if isinstance(e, StepsFinished))
    log.turns.append(Turn((event,), ()))
    log.save(tmp_path / "log")
    data = (tmp_path / "log").read_bytes().replace(b"StepsFinished", b"StepsFinishxd")
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(DataError, match="malformed"):
        EventLog.load(tmp_path / "log")
