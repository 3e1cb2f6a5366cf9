"""Where chunks of thousands of connections meet their engine: one call for a turn of the event loop, and one back.

A chunk of live audio comes every few milliseconds on each connection. What is done once for all chunks of a turn costs
each of them next to nothing: handing them to the engine's thread, waking the event loop, reading the clock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sized
from typing import Any, NamedTuple, Protocol, final

from batchmaker.engine import Answer, Sequence
from batchmaker.server.observe.statistics import ModelStatistics
from batchmaker.server.service.engine_port import EnginePort


class LaneOwner(Protocol):
    """What waits for the answers to the chunks of one sequence, or of many."""

    def answered(self, lanes: Sized[Any]) -> None:
        """Chunks of these lanes have their answers, of the one turn of the engine."""
        ...


class SentChunk(Protocol):
    """A chunk on its way. began_s: when it was read, by `time.perf_counter`. lane: of whose chunks it is one."""

    began_s: float
    lane: Any

    def settle(self, result: Any, error: BaseException | None, *, accepted: bool) -> None:
        """Take the answer. accepted: False if the engine has not got the chunk."""
        ...


class _OfChunk(Protocol):
    """What an answer belongs to; a Ticket is one."""

    @property
    def place(self) -> Any:
        """The chunk."""
        ...


class _AskedFor(NamedTuple):
    place: SentChunk


def _outcome(answer: Answer) -> tuple[Any, BaseException | None]:
    """Return the result and the error of an answer that is done."""
    error = answer.exception()
    return (None if error is not None else answer.result()), error


@final
class ChunkExchange:
    """Sends the chunks of one model. Used from one event loop; the engine's thread puts answers.

    statistics: counts the chunks that are accepted.
    """

    def __init__(self, port: EnginePort, statistics: ModelStatistics) -> None:
        self._port = port
        self._statistics = statistics
        self._sent: list[tuple[Sequence, Any, float | None, SentChunk]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._blocks: deque[Sized[tuple[_OfChunk, Any, BaseException | None]]] = deque()
        self._woken = False

    def send(self, sequence: Sequence, data: Any, deadline_ms: float | None, chunk: SentChunk) -> None:
        """Have the engine get a chunk at the end of this turn. Its lane's owner is told when it has its answer."""
        if not self._sent:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self.hand_over)
        self._sent.append((sequence, data, deadline_ms, chunk))

    def hand_over(self) -> None:
        """Hand what was sent to the engine, now."""
        sent, self._sent = self._sent, []
        if not sent:
            return
        refused = self._port.send_chunks(sent, self)
        now_s, count = time.perf_counter(), len(sent) - len(refused)
        statistics = self._statistics
        statistics.accepted += count
        statistics.accepted_chunks += count
        statistics.input_s += now_s * len(sent) - sum([chunk.began_s for _, _, _, chunk in sent])
        if refused:
            for chunk, error in refused:
                chunk.settle(None, error, accepted=False)
            self._tell([chunk for chunk, _ in refused])

    def ask(self, ask: Callable[[], Answer], chunk: SentChunk) -> None:
        """Ask a sequence for something in the order of its chunks; the answer comes as that to a chunk does.

        Raises what `ask` raises, if the engine has not got it.
        """
        self.hand_over()
        self._loop = asyncio.get_running_loop()
        placed = _AskedFor(chunk)
        ask().add_done_callback(lambda answer: self.put([(placed, *_outcome(answer))]))

    def count(self) -> None:
        """Count a chunk that was asked for as accepted."""
        self._statistics.accepted += 1
        self._statistics.accepted_chunks += 1

    def put(self, block: Sized[tuple[_OfChunk, Any, BaseException | None]]) -> None:
        """Take the answers of one turn of the engine. Called by the thread that answers: see AnswerTaker.

        Race: the event loop clears `_woken` before it looks for blocks. So a block that is put after the look finds it
        cleared, and wakes the loop again.
        """
        self._blocks.append(block)
        if not self._woken:
            self._woken = True
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:  # the loop is closed: nobody waits
                return

    def _take(self) -> None:
        self._woken = False
        answered: list[SentChunk] = []
        while self._blocks:
            for ticket, result, error in self._blocks.popleft():
                chunk: SentChunk = ticket.place
                chunk.settle(result, error, accepted=True)
                answered.append(chunk)
        self._tell(answered)

    @staticmethod
    def _tell(chunks: Sized[SentChunk]) -> None:
        """Tell the owners of these chunks' lanes, each once."""
        owners: dict[LaneOwner, dict[Any, None]] = {}
        for chunk in chunks:
            lane = chunk.lane
            owners.setdefault(lane.owner, {})[lane] = None
        for owner, lanes in owners.items():
            owner.answered(list(lanes))
