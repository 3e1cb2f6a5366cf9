"""A recorded log of events and commands: kept in a file, and played again to the same commands.

log = EventLog(SchedulerOptions("cellular", take_turns=True, loops_ahead=True))
engine.driver.record = log.record        # a live engine; or hand it what a simulation sees
...
log.save("log.msgpack")
check_replay(EventLog.load("log.msgpack"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import msgspec
import numpy as np

from batchmaker import policies
from batchmaker.core.commands import (
    Admit,
    Command,
    Fail,
    Read,
    Reply,
    Reserve,
    RunTask,
    StateStored,
    StoredRow,
)
from batchmaker.core.events import (
    CellTypeAdded,
    Event,
    GraphExtended,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    SequenceClosed,
    SequenceRestored,
    StepsFinished,
    TimePassed,
)
from batchmaker.core.scheduler import Scheduler
from batchmaker.errors import DataError, InvariantError, OptionError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.base import CellPolicy

VERSION: Final = 2
_CLASSES: Final = {
    kind.__name__: kind
    for kind in (
        CellTypeAdded, GraphExtended, RequestArrived, RequestCancelled, RequestFailed, SequenceClosed,
        SequenceRestored, StepsFinished, TimePassed,
        Admit, Fail, Read, Reply, Reserve, RunTask, StateStored, StoredRow,
    )
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options of a scheduler. policy: as text; see `policies.make`. The rest: see Scheduler."""

    policy: str
    num_workers: int = 1
    run_ahead: int = 0
    take_turns: bool = False
    loops_ahead: bool = False
    task_s: float = 0.0
    give_up_late: bool = True
    plan_rows: bool = True
    aged_every: int | None = AGED_EVERY

    def make(self, policy: CellPolicy | None = None) -> Scheduler:
        """Return a fresh scheduler, with this policy if one is given. OptionError unless it is a cell policy."""
        made = policies.make(self.policy) if policy is None else policy
        if not isinstance(made, CellPolicy):
            raise OptionError(f"policy {self.policy!r} batches whole requests; only logs of cell policies are replayed")
        options = asdict(self)
        del options["policy"]
        return Scheduler(made, **options)


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """One call of `Scheduler.handle`."""

    events: tuple[Event, ...]
    commands: tuple[Command, ...]


@final
class EventLog:
    """Every event of a scheduler and its commands. Values of requests are not kept."""

    def __init__(self, options: SchedulerOptions, turns: Sequence[Turn] = ()) -> None:
        self.options = options
        self.turns = list(turns)

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Record one turn: for the `record` hook of a driver."""
        self.turns.append(Turn(tuple(map(_without_values, events)), tuple(commands)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the log as msgpack. DataError if the file cannot be written."""
        turns = [([_tagged(e) for e in turn.events], [_tagged(c) for c in turn.commands]) for turn in self.turns]
        content = {"version": VERSION, "options": asdict(self.options), "turns": turns}
        try:
            Path(path).write_bytes(msgspec.msgpack.encode(content, enc_hook=_array_out))
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror or error}).") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> EventLog:
        """Return a log from its file. DataError if it is missing, malformed or of another version."""
        try:
            content = msgspec.msgpack.decode(Path(path).read_bytes())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
        except msgspec.DecodeError as error:
            raise DataError(f"{path}: is no event log ({error}).") from error
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise DataError(f"{path}: has version {version!r}, this batchmaker reads {VERSION}. Record it again.")
        try:
            turns = [
                Turn(tuple(map(_untagged, events)), tuple(map(_untagged, commands)))
                for events, commands in content["turns"]
            ]
            return cls(msgspec.convert(content["options"], SchedulerOptions), turns)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: is a malformed event log ({error}).") from error


def check_replay(log: EventLog, policy: CellPolicy | None = None) -> int:
    """Give a fresh scheduler all events of the log; return the number of its commands, all as recorded.

    policy: a fresh one, if text is not enough, for example with a cost profile. Raises InvariantError, naming the turn
    and the first command that differs.
    """
    scheduler, count = log.options.make(policy), 0
    for number, turn in enumerate(log.turns):
        commands = scheduler.handle(*turn.events)
        if len(commands) != len(turn.commands):
            raise InvariantError(f"turn {number}: {len(commands)} commands, recorded were {len(turn.commands)}")
        for command, recorded in zip(commands, turn.commands, strict=True):
            if not _same(command, recorded):
                raise InvariantError(f"turn {number}: the command is {command}, recorded was {recorded}")
        count += len(commands)
    return count


def _without_values(event: Event) -> Event:
    """Return the event without data for devices."""
    if not isinstance(event, RequestArrived | GraphExtended):
        return event
    graph = event.graph
    bare = CellGraph(
        graph.first,
        graph.num_nodes,
        list(graph.blocks),
        list(graph.runs),
        [replace(host, values=None) for host in graph.host_inputs],
        list(graph.fetches),
        graph.plain,
        kept_nodes=graph.kept_nodes,
        memories=list(graph.memories),
    )
    return replace(event, graph=bare)


def _tagged(one: Event | Command) -> tuple[str, dict[str, Any]]:
    return type(one).__name__, {field.name: getattr(one, field.name) for field in fields(one)}


def _untagged(pair: Sequence[Any]) -> Any:
    name, content = pair
    return msgspec.convert(content, _CLASSES[name], dec_hook=_array_in)


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} cannot be kept in a log")


def _array_in(kind: type, value: Any) -> Any:
    array = np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    return array.copy()


def _same(one: Any, other: Any) -> bool:
    """Deep equality, arrays included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if is_dataclass(one):
        return all(_same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
