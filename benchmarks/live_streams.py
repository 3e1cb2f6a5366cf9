"""How many live streams of `examples/voice_activity` a server holds: a frame of 32 ms each, over WebSockets.

    python benchmarks/live_streams.py                        # the most streams, a connection each
    python benchmarks/live_streams.py --connections 100      # the most streams over so many connections
    python benchmarks/live_streams.py --streams 200          # what these take, the event loop's time among it
    python benchmarks/live_streams.py --idle 10000           # the memory of idle streams, a connection each
    python benchmarks/live_streams.py --all                  # all of these, to benchmarks/results/live-streams.json

Starts the server, opens streams whose frames are spread evenly over the 32 ms, and looks for the most streams of which
99 % of the answers come before the next frame. Latency counts from when a frame was due, so a client that is late
counts against the server. The client is on the same machine: it sends frames made beforehand and counts bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

import batchmaker as bm
from provenance import ROOT, made_by

MEASURES = ("src/batchmaker/server", "src/batchmaker/engine", "benchmarks/live_streams.py")
EXAMPLE = ROOT / "examples" / "voice_activity"
PERIOD_S = 0.032
TEXT = 0x81  # the first byte of a message in text: an error, such as 503
HEAD = struct.Struct("<IBBHI")  # of a frame where one connection carries many: see docs/live-audio.md
BEGIN = 1
STATE_BYTES = 4 * (64 + 128 + 128)  # of a stream: context, h and c
HANDSHAKE = (
    "GET /v2/models/voice_activity/{}?answers=binary HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Server(NamedTuple):
    port: int
    pid: int


class Measured(NamedTuple):
    """Latency from when a frame was due; processor time a frame, of the event loop and of the busiest other thread."""

    streams: int
    median_ms: float
    p99_ms: float
    loop_us: float
    engine_us: float
    answered: int


class Stream:
    """due: when the unanswered frames were due. refused: when those were due that got an error."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.due: deque[float] = deque()
        self.refused: list[float] = []
        self.latencies: list[float] = []
        self.begun = False


class Connection(asyncio.Protocol):
    """One WebSocket. carries_many: its messages hold frames of many streams."""

    def __init__(self, carries_many: bool) -> None:
        self.ready = asyncio.get_running_loop().create_future()
        self.streams: list[Stream] = []
        self.waiting: list[bytes] = []
        self._carries_many = carries_many
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(HANDSHAKE.format("sequences" if self._carries_many else "sequence").encode())

    def send(self, stream: Stream, sound: bytes) -> None:
        """Send a frame with those that are due together; see `flush`."""
        if self._carries_many:
            self.waiting.append(HEAD.pack(stream.number, 0 if stream.begun else BEGIN, 0, 0, len(sound)) + sound)
            stream.begun = True
        else:
            self.transport.write(message(sound))

    def flush(self) -> None:
        if self.waiting:
            self.transport.write(message(b"".join(self.waiting)))
            self.waiting = []

    def data_received(self, data: bytes) -> None:
        if not self.ready.done():
            if not data.startswith(b"HTTP/1.1 101"):
                self.ready.set_exception(RuntimeError(f"the server refused: {data[:300]!r}"))
            else:
                self.ready.set_result(None)
            return
        now_s, at, data = time.perf_counter(), 0, self._unread + data
        while len(data) - at >= 4:  # the shortest answer has six bytes
            first, size, begin = data[at], data[at + 1], at + 2
            if size >= 126:  # the size is in the next bytes
                width = 2 if size == 126 else 8
                size, begin = int.from_bytes(data[begin : begin + width], "big"), begin + width
            if begin + size > len(data):
                break
            at = begin + size
            self._answered(first, data[begin:at], now_s)
        self._unread = data[at:]

    def _answered(self, first: int, said: bytes, now_s: float) -> None:
        if first == TEXT:
            stream = self.streams[json.loads(said).get("sequence", 0) if self._carries_many else 0]
            stream.refused.append(stream.due.popleft())
        elif not self._carries_many:
            if self.streams[0].due:  # not a message that closes the connection
                self.streams[0].latencies.append(now_s - self.streams[0].due.popleft())
        else:
            place = 0
            while place < len(said):
                number, _, _, _, size = HEAD.unpack_from(said, place)
                place += HEAD.size + size
                self.streams[number].latencies.append(now_s - self.streams[number].due.popleft())


def message(content: bytes) -> bytes:
    """A binary message as a client writes it: masked with zeros."""
    size = len(content)
    length = struct.pack("!BH", 0xFE, size) if size < 1 << 16 else struct.pack("!BQ", 0xFF, size)
    return b"\x82" + length + bytes(4) + content


def frames(count: int) -> list[bytes]:
    """Frames of noise."""
    rng = np.random.default_rng(0)
    sounds = (0.1 * rng.standard_normal((count, 512))).astype("<f4")
    return [sound.tobytes() for sound in sounds]


async def opened(server: Server, num_streams: int, num_connections: int) -> list[Stream]:
    """Return streams over connections that are open. num_connections: 0 for one each."""
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []
    for _ in range(num_connections or num_streams):
        _, connection = await loop.create_connection(lambda: Connection(num_connections > 0), "127.0.0.1", server.port)
        await connection.ready
        connections.append(connection)
    streams = []
    for place in range(num_streams):
        connection = connections[place % len(connections)]
        streams.append(Stream(connection, len(connection.streams)))
        connection.streams.append(streams[-1])
    return streams


def processor_s(pid: int) -> dict[str, float]:
    """Return the seconds of processor time that each thread of a process has used; "loop" is the event loop's."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "loop" if task.name == str(pid) else task.name
        with contextlib.suppress(OSError):  # it has ended
            threads[name] = 1e-9 * int((task / "schedstat").read_text().split()[0])
    return threads


async def measure(server: Server, num_streams: int, num_connections: int, seconds: float, warm_s: float) -> Measured:
    """Return what so many streams took, over all frames due after `warm_s`."""
    streams = await opened(server, num_streams, num_connections)
    connections = list(dict.fromkeys(stream.connection for stream in streams))
    sounds = frames(64)
    start_s = time.perf_counter() + 0.1
    before: dict[str, float] = {}
    for tick in range(int((warm_s + seconds) / PERIOD_S)):
        if tick == int(warm_s / PERIOD_S):
            for stream in streams:
                stream.latencies.clear()
                stream.refused.clear()
            before = processor_s(server.pid)
        for place, stream in enumerate(streams):
            due_s = start_s + PERIOD_S * (tick + place / num_streams)
            ahead_s = due_s - time.perf_counter()
            if ahead_s > 0.0005:
                for connection in connections if num_connections else ():
                    connection.flush()
                await asyncio.sleep(ahead_s)
            stream.due.append(due_s)
            if not stream.connection.transport.is_closing():  # the server has ended the sequence
                stream.connection.send(stream, sounds[(tick + place) % len(sounds)])
        for connection in connections if num_connections else ():
            connection.flush()
        await asyncio.sleep(0)
    after, answered = processor_s(server.pid), sum(len(stream.latencies) for stream in streams)
    await asyncio.sleep(0.5)
    for connection in connections:
        connection.transport.close()
    now_s = time.perf_counter()
    unanswered = [now_s - due_s for stream in streams for due_s in (*stream.due, *stream.refused)]
    latencies = [*unanswered, *(late for stream in streams for late in stream.latencies)]
    used_s = max(after[name] - before.get(name, 0.0) for name in after if name != "loop")
    return Measured(
        num_streams,
        *(1e3 * np.percentile(latencies, (50, 99))),
        1e6 * (after["loop"] - before["loop"]) / max(answered, 1),
        1e6 * used_s / max(answered, 1),
        answered,
    )


async def idle_bytes(server: Server, num_streams: int) -> float:
    """Return the bytes of the server's process for an idle stream with its connection, which has had one frame."""
    sound = frames(1)[0]

    async def more(count: int) -> list[Stream]:
        streams = await opened(server, count, 0)
        for begin in range(0, count, 100):
            some = streams[begin : begin + 100]
            for stream in some:
                stream.due.append(0.0)
                stream.connection.send(stream, sound)
            while any(stream.due for stream in some):
                await asyncio.sleep(0.01)
        return streams

    kept = await more(num_streams // 10)
    before = resident_bytes(server.pid)
    kept += await more(num_streams - len(kept))
    grown = resident_bytes(server.pid) - before
    count = num_streams - num_streams // 10
    for stream in kept:
        stream.connection.transport.close()
    return grown / count


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def running(num_streams: int) -> Iterator[Server]:
    """Serve the example, with room for so many streams."""
    sys.path.insert(0, str(EXAMPLE))
    import voice_activity

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server inherits it
    with tempfile.TemporaryDirectory() as folder:
        bm.save(voice_activity.build(), Path(folder) / "saved" / "voice_activity")
        room = num_streams + 1000
        settings = Path(folder) / "server.toml"
        settings.write_text(
            f"[limits]\nmax_sequences = {room}\nmax_connections = {room}\nmax_client_connections = {room}\n"
            "sequence_idle_seconds = 3600\n[log]\nlevel = 'warning'\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "batchmaker", "serve", f"{folder}/saved", "--port", "0", "--threads", "1"]
        server = subprocess.Popen(
            [*command, "--config", str(settings)], stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            assert server.stdout is not None
            yield Server(int(server.stdout.readline().split()[1].rpartition(":")[2]), server.pid)
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--warm-seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=0, help="that carry the streams; 0 for one each")
    parser.add_argument("--streams", type=int, nargs="*", help="these numbers alone")
    parser.add_argument("--idle", type=int, help="measure the memory of so many idle streams")
    parser.add_argument("--all", action="store_true", help="measure everything, and write the result file")
    settings = parser.parse_args()
    with running(max(2000, settings.idle or 0, 10_000 if settings.all else 0)) as server:
        if settings.idle:
            say_idle(server, settings.idle)
        elif settings.all:
            write_all(server, settings)
        elif settings.streams:
            for count in settings.streams:
                measured(server, count, settings.connections, settings)
        else:
            search(server, settings.connections, settings)


def measured(server: Server, count: int, connections: int, settings: argparse.Namespace) -> Measured:
    """Return and print what so many streams take."""
    found = uvloop.run(measure(server, count, connections, settings.seconds, settings.warm_seconds))
    print(
        f"{count} streams over {connections or count} connections: p50 {found.median_ms:.1f} ms, "
        f"p99 {found.p99_ms:.1f} ms; {found.answered} frames, of each {found.loop_us:.1f} us of the loop's thread "
        f"and {found.engine_us:.1f} us of the engine's",
        flush=True,
    )
    return found


def search(server: Server, connections: int, settings: argparse.Namespace) -> Measured:
    """Double and halve until the most streams that hold are known to 5 %; return what these take.

    A number holds if it does in one of two looks: another guest of the machine may have spoilt the first.
    """

    def held(count: int) -> Measured | None:
        for _ in range(2):
            found = measured(server, count, connections, settings)
            if found.p99_ms < 1e3 * PERIOD_S:
                return found
            if found.p99_ms > 10 * 1e3 * PERIOD_S:
                break
        return None

    best, good, bad = None, 0, 100
    while found := held(bad):
        best, good, bad = found, bad, 2 * bad
    while bad - good > max(1, 0.05 * bad):
        middle = (good + bad) // 2
        if found := held(middle):
            best, good = found, middle
        else:
            bad = middle
    print(f"{good} live streams, p99 below {1e3 * PERIOD_S:g} ms, load average {os.getloadavg()[0]:.2f}")
    return measured(server, 1, connections, settings) if best is None else best


def say_idle(server: Server, count: int) -> float:
    each = uvloop.run(idle_bytes(server, count))
    print(f"{count} idle streams, a connection each: {each:.0f} bytes of the process for one, its state {STATE_BYTES}")
    return each


def write_all(server: Server, settings: argparse.Namespace) -> None:
    """Measure everything and write the result file."""
    result: dict[str, Any] = {**made_by(MEASURES), "period_ms": 1e3 * PERIOD_S}
    result["at_200"] = {
        name: measured(server, 200, connections, settings)._asdict()
        for name, connections in (("one each", 0), ("20 connections", 20), ("one connection", 1))
    }
    result["most"] = {
        name: search(server, connections, settings)._asdict()
        for name, connections in (("one each", 0), ("100 connections", 100), ("one connection", 1))
    }
    result["idle"] = {"streams": 10_000, "bytes": say_idle(server, 10_000), "state_bytes": STATE_BYTES}
    result["load_average_after"] = os.getloadavg()[0]
    path = ROOT / "benchmarks" / "results" / "live-streams.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
