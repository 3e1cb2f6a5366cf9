"""What is read of a server and its models; the rooms that define these parts are above this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Sized
from typing import Protocol

from batchmaker.clock import Clock
from batchmaker.engine import DriverStats
from batchmaker.engine.heartbeat import Heartbeat
from batchmaker.server.limits import Limits
from batchmaker.server.observe.chrome_trace import StepRing
from batchmaker.server.observe.statistics import ModelStatistics


class ObservedEngine(Protocol):
    """See EnginePort."""

    @property
    def clock(self) -> Clock: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def stats(self) -> DriverStats: ...


class ObservedSequences(Protocol):
    """See OpenSequences."""

    @property
    def num_begun(self) -> int: ...
    @property
    def num_connected(self) -> int: ...


class ObservedModel(Protocol):
    """See ServedModel."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def responds(self) -> bool: ...
    @property
    def statistics(self) -> ModelStatistics: ...
    @property
    def steps(self) -> StepRing: ...
    @property
    def port(self) -> ObservedEngine: ...
    @property
    def sequences(self) -> ObservedSequences: ...
    @property
    def connected(self) -> Sized: ...


class ObservedModels(Protocol):
    """See Repository."""

    def models(self) -> Sequence[ObservedModel]: ...


class ObservedService(Protocol):
    """See Service."""

    @property
    def limits(self) -> Limits: ...
    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def answered(self) -> Counter[tuple[str, str]]: ...
    @property
    def repository(self) -> ObservedModels: ...


class ObservedReload(Protocol):
    """See Reload."""

    @property
    def successful(self) -> bool: ...
    @property
    def taken_over_unix_s(self) -> float: ...
