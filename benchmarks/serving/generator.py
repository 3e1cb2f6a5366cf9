"""The one load generator of all serving benchmarks: HTTP over raw sockets, in a process of its own.

It reads a Plan from standard input and writes an Outcome to standard output, both as msgpack. Requests are whole byte
strings made beforehand, so that a request costs the generator two system calls and little else; its own processor time
is part of the outcome. Open loop: requests fall due by a Poisson process whatever the server does, and latency counts
from when a request was due. One that finds all connections taken waits for one. Closed loop (rate None): every
connection asks again as soon as it is answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
import uvloop

_TIMER_ABSOLUTE: Final = 1
_SETTLE_S: Final = 5.0
"""How long answers are waited for once the last request is due."""


class Plan(msgspec.Struct, frozen=True):
    """What to send. requests: whole HTTP requests, taken in turn. rate: a second; None for a closed loop."""

    host: str
    port: int
    requests: list[bytes]
    rate: float | None
    seconds: float
    connections: int = 256
    seed: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What came of it, in arrays of doubles over all requests sent, in the order in which they were due.

    due_s, sent_s, done_s: seconds since the start; done_s is NaN where no answer came. status: HTTP's, 0 for none.
    processor_s: of the generator itself.
    """

    due_s: bytes
    sent_s: bytes
    done_s: bytes
    status: bytes
    processor_s: float

    def array(self, name: str) -> np.ndarray:
        """Return one of the arrays."""
        return np.frombuffer(getattr(self, name), np.float64)


@final
class PreciseTimer:
    """Calls back at an instant of the monotonic clock, to the microsecond, where event loops round to milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, action) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        self._action = action
        loop.add_reader(self._file, self._fired)

    def at(self, when_s: float) -> None:
        """Call at this time; at once if it has passed."""
        nanoseconds = max(int(when_s * 1e9), 1)
        setting = struct.pack("qqqq", 0, 0, *divmod(nanoseconds, 1_000_000_000))
        self._libc.timerfd_settime(self._file, _TIMER_ABSOLUTE, setting, None)

    def _fired(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return
        self._action()


@final
class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.number: int | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = received[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(received) < end + 4 + length:
                return
        elif b"chunked" in head and not received.endswith(b"0\r\n\r\n"):
            return
        self._received = b""
        self.load.answered(self, int(received[9:12]))
        if b"connection: close" in head:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.lost(self)


@final
class Load:
    """Sends what the plan says and notes when it was answered."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        count = 1
        if plan.rate is not None:
            gaps = np.random.default_rng(plan.seed).exponential(1 / plan.rate, int(plan.rate * plan.seconds * 1.3) + 50)
            due = np.cumsum(gaps)
            self.due = due[due < plan.seconds].tolist()
            count = len(self.due)
        else:
            self.due = []
        self.sent = [float("nan")] * count
        self.done = [float("nan")] * count
        self.status = [0.0] * count
        self.free: list[Connection] = []
        self.waiting: deque[int] = deque()
        self.next = 0
        self.num_open = 0
        self.num_busy = 0
        self.ending = False

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await asyncio.gather(*(self._connect() for _ in range(self.plan.connections)))
        self.begin_s = time.monotonic()
        end_s = self.begin_s + self.plan.seconds
        if self.plan.rate is None:
            self.sent, self.done, self.status = [], [], []
            for connection in list(self.free):
                self._ask_again(connection)
        else:
            self.timer = PreciseTimer(self.loop, self._due)
            self._due()
        await asyncio.sleep(end_s - time.monotonic())
        self.ending = True
        while (self.num_busy or self.waiting) and time.monotonic() < end_s + _SETTLE_S:
            await asyncio.sleep(0.01)

    async def _connect(self) -> None:
        _, connection = await self.loop.create_connection(lambda: Connection(self), self.plan.host, self.plan.port)
        self.num_open += 1
        self._freed(connection)

    def _due(self) -> None:
        now_s = time.monotonic() - self.begin_s
        while self.next < len(self.due) and self.due[self.next] <= now_s:
            if self.free:
                self._send(self.free.pop(), self.next)
            else:
                self.waiting.append(self.next)
            self.next += 1
        if self.next < len(self.due):
            self.timer.at(self.begin_s + self.due[self.next])

    def _send(self, connection: Connection, number: int) -> None:
        connection.number = number
        self.num_busy += 1
        self.sent[number] = time.monotonic() - self.begin_s
        connection.transport.write(self.plan.requests[number % len(self.plan.requests)])

    def _ask_again(self, connection: Connection) -> None:
        if connection in self.free:
            self.free.remove(connection)
        self.due.append(time.monotonic() - self.begin_s)
        for column, empty in ((self.sent, float("nan")), (self.done, float("nan")), (self.status, 0.0)):
            column.append(empty)
        self._send(connection, len(self.due) - 1)

    def answered(self, connection: Connection, status: int) -> None:
        number, connection.number = connection.number, None
        if number is None:
            return
        self.num_busy -= 1
        self.done[number] = time.monotonic() - self.begin_s
        self.status[number] = status
        if not connection.transport.is_closing():
            self._freed(connection)

    def _freed(self, connection: Connection) -> None:
        if self.plan.rate is None and hasattr(self, "begin_s"):
            if not self.ending:
                self._ask_again(connection)
        elif self.waiting and not self.ending:
            self._send(connection, self.waiting.popleft())
        else:
            self.free.append(connection)

    def lost(self, connection: Connection) -> None:
        if connection.number is not None:
            connection.number = None
            self.num_busy -= 1
        elif connection in self.free:
            self.free.remove(connection)
        if not self.ending:
            task = self.loop.create_task(self._connect())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


def offer(plan: Plan) -> Outcome:
    """Run the plan in a process of its own and return the outcome."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())], input=msgspec.msgpack.encode(plan), stdout=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    return msgspec.msgpack.decode(done.stdout, type=Outcome)


def main() -> None:
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    load = Load(plan)
    before_s = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(load.run())
    processor_s = time.process_time() - before_s
    columns = [np.array(column, np.float64).tobytes() for column in (load.due, load.sent, load.done, load.status)]
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:  # standard output itself may be unbuffered, and then
        out.write(msgspec.msgpack.encode(Outcome(*columns, processor_s)))  # takes no more than a pipe holds


if __name__ == "__main__":
    main()
