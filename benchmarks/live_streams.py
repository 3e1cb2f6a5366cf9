"""How many live streams of `examples/voice_activity` a server holds: a frame of 32 ms each, over a WebSocket each.

    python benchmarks/live_streams.py

Starts the server, opens streams whose frames are spread evenly over the 32 ms, and looks for the most streams of which
99 % of the answers come before the next frame. Latency counts from when a frame was due, so a client that is late
counts against the server. The client is on the same machine: it sends frames made beforehand and counts bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop

import batchmaker as bm

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "voice_activity"
PERIOD_S = 0.032
TEXT = 0x81  # the first byte of a message in text: an error, such as 503
HANDSHAKE = (
    b"GET /v2/models/voice_activity/sequence?answers=binary HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Server(NamedTuple):
    port: int
    pid: int


class Measured(NamedTuple):
    """Latency from when a frame was due; processor time a frame, of the event loop and of the busiest other thread."""

    median_ms: float
    p99_ms: float
    loop_us: float
    engine_us: float
    answered: int


class Stream(asyncio.Protocol):
    """One connection. due: when the unanswered frames were due. refused: when those were due that got an error."""

    def __init__(self) -> None:
        self.ready = asyncio.get_running_loop().create_future()
        self.due: deque[float] = deque()
        self.refused: list[float] = []
        self.latencies: list[float] = []
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(HANDSHAKE)

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
            if size == 126:  # the size is in the next two bytes
                size, begin = int.from_bytes(data[begin : begin + 2], "big"), begin + 2
            if begin + size > len(data):
                break
            at = begin + size
            if first == TEXT:
                self.refused.append(self.due.popleft())
            elif self.due:  # not a message that closes the connection
                self.latencies.append(now_s - self.due.popleft())
        self._unread = data[at:]


def frames(count: int) -> list[bytes]:
    """Messages with a frame of noise each, as a client writes them: masked with zeros."""
    rng = np.random.default_rng(0)
    sounds = (0.1 * rng.standard_normal((count, 512))).astype("<f4")
    return [b"\x82\xfe" + (2048).to_bytes(2, "big") + bytes(4) + sound.tobytes() for sound in sounds]


def processor_s(pid: int) -> dict[str, float]:
    """Return the seconds of processor time that each thread of a process has used; "loop" is the event loop's."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "loop" if task.name == str(pid) else task.name
        with contextlib.suppress(OSError):  # it has ended
            threads[name] = 1e-9 * int((task / "schedstat").read_text().split()[0])
    return threads


async def measure(server: Server, num_streams: int, seconds: float, warm_s: float) -> Measured:
    """Return what so many streams took, over all frames due after `warm_s`."""
    port = server.port
    loop = asyncio.get_running_loop()
    streams = [Stream() for _ in range(num_streams)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
        await stream.ready
    sounds = frames(64)
    start_s = time.perf_counter() + 0.1
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
                await asyncio.sleep(ahead_s)
            stream.due.append(due_s)
            if stream.transport.is_closing():  # the server has ended the sequence
                continue
            stream.transport.write(sounds[(tick + place) % len(sounds)])
        await asyncio.sleep(0)
    after, answered = processor_s(server.pid), sum(len(stream.latencies) for stream in streams)
    await asyncio.sleep(0.5)
    for stream in streams:
        stream.transport.close()
    now_s = time.perf_counter()
    unanswered = [now_s - due_s for stream in streams for due_s in (*stream.due, *stream.refused)]
    latencies = [*unanswered, *(late for stream in streams for late in stream.latencies)]
    used = sorted(((after[name] - before.get(name, 0.0), name) for name in after if name != "loop"), reverse=True)
    return Measured(
        *(1e3 * np.percentile(latencies, (50, 99))),
        1e6 * (after["loop"] - before["loop"]) / max(answered, 1),
        1e6 * used[0][0] / max(answered, 1),
        answered,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm-seconds", type=float, default=3.0)
    parser.add_argument("--streams", type=int, nargs="*", help="these numbers alone")
    settings = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE))
    import voice_activity

    with tempfile.TemporaryDirectory() as folder:
        bm.save(voice_activity.build(), Path(folder) / "voice_activity")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "batchmaker", "serve", folder, "--port", "0", "--threads", "1"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            port = int(server.stdout.readline().split()[1].rpartition(":")[2])
            search(Server(port, server.pid), settings)
        finally:
            server.terminate()
            server.wait()


def search(server: Server, settings: argparse.Namespace) -> None:
    """Print what the given numbers of streams take, or double and halve until the most that hold is known to 5 %."""

    def holds(count: int) -> bool:
        found = uvloop.run(measure(server, count, settings.seconds, settings.warm_seconds))
        print(
            f"{count} streams: p50 {found.median_ms:.1f} ms, p99 {found.p99_ms:.1f} ms; {found.answered} frames, of "
            f"each {found.loop_us:.1f} us of the event loop's thread and {found.engine_us:.1f} us of the engine's",
            flush=True,
        )
        return found.p99_ms < 1e3 * PERIOD_S

    if settings.streams:
        for count in settings.streams:
            holds(count)
        return
    good, bad = 0, 25
    while holds(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, 0.05 * bad):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    print(f"{good} live streams, p99 below {1e3 * PERIOD_S:g} ms, load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
