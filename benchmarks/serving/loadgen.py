"""MLPerf LoadGen's Server scenario against the server's process. Never an MLPerf submission: models and rules are ours.

    python benchmarks/serving/loadgen.py DATA [--seconds 25] [--only lstm --only seq2seq]

Needs `mlcommons-loadgen`. DATA: a folder with europarl_deen/ and sst/. LoadGen sends each query as it falls due (gaps
from an exponential distribution); the answer's bytes are not kept. VALID: its own word, from duration, count, the 99th
percentile of the latencies and its early stopping. The durations are shorter than MLPerf's ten minutes.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import tempfile
import threading
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import mlperf_loadgen as lg
import processes
import uvloop
import wire
from report import write

from batchmaker.cli.workload import make_workload


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what is asked of it and how fast it must be."""

    source: str
    files: tuple[str, ...]
    rate: float
    limit_ms: float


CASES = {
    "lstm": Case("lstm:hidden=1024,dtype=bfloat16", ("europarl_deen/raw5k.en",), 200.0, 250.0),
    "seq2seq": Case(
        "seq2seq:hidden=1024,dtype=bfloat16,vocabulary_size=30000",
        ("europarl_deen/raw5k.de", "europarl_deen/raw5k.en"),
        30.0,
        2000.0,
    ),
    "treelstm": Case("treelstm:hidden=256", ("sst/train.txt",), 300.0, 100.0),
}


@final
class Wire(asyncio.Protocol):
    """One connection; gives back the id of the query that was answered."""

    def __init__(self, sut: HttpSut) -> None:
        self._sut = sut
        self._received = b""
        self.query = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = int(received[:end].lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(received) < end + 4 + length:
            return
        self._received = b""
        self._sut.answered(self, received[9:12] == b"200")


@final
class HttpSut:
    """LoadGen's system under test: an event loop in a thread that passes queries on to a server."""

    def __init__(self, server: processes.Server, requests: list[bytes]) -> None:
        self._server, self._requests = server, requests
        self._free: list[Wire] = []
        self.num_failed = 0
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._keep = array.array("B", bytes(8))
        self._place = self._keep.buffer_info()[0]
        asyncio.run_coroutine_threadsafe(self._connect(64), self._loop).result()

    async def _connect(self, count: int) -> None:
        for _ in range(count):
            _, wire = await self._loop.create_connection(lambda: Wire(self), self._server.host, self._server.port)
            self._free.append(wire)

    def issue(self, samples: list[Any]) -> None:
        """Called by LoadGen, in its own thread."""
        self._loop.call_soon_threadsafe(self._send, [(sample.id, sample.index) for sample in samples])

    def flush(self) -> None:
        """Nothing is held back."""

    def _send(self, queries: list[tuple[int, int]]) -> None:
        for number, index in queries:
            if self._free:
                self._send_on(self._free.pop(), number, index)
            else:
                task = self._loop.create_task(self._connect(1))
                task.add_done_callback(lambda _, n=number, i=index: self._send_on(self._free.pop(), n, i))

    def _send_on(self, wire: Wire, number: int, index: int) -> None:
        wire.query = number
        wire.transport.write(self._requests[index])

    def answered(self, wire: Wire, good: bool) -> None:
        """Tell LoadGen."""
        self.num_failed += not good
        self._free.append(wire)
        lg.QuerySamplesComplete([lg.QuerySampleResponse(wire.query, self._place, 8)])

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def request_bytes(name: str, case: Case, data: Path) -> tuple[list[bytes], int | None]:
    """Return the model's requests as they go over the wire, and how many words there are."""
    work = make_workload(name, data=[data / file for file in case.files], count=4000)
    found = []
    for request in work.requests:
        named = request if isinstance(request, dict) else {"input_0": request}
        found.append(wire.infer_binary(name, named))
    return found, work.vocabulary_size


def run(name: str, case: Case, data: Path, seconds: float) -> dict[str, Any]:
    """Run LoadGen once and return what its summary says."""
    requests, words = request_bytes(name, case, data)
    source = case.source if "vocabulary_size" in case.source else f"{case.source},vocabulary_size={words}"
    settings = lg.TestSettings()
    settings.scenario = lg.TestScenario.Server
    settings.mode = lg.TestMode.PerformanceOnly
    settings.server_target_qps = case.rate
    settings.server_target_latency_ns = int(case.limit_ms * 1e6)
    settings.server_target_latency_percentile = 0.99
    settings.min_duration_ms = int(seconds * 1e3)
    settings.min_query_count = 100
    with processes.batchmaker(source) as server, tempfile.TemporaryDirectory() as folder:
        processes.warm_up(server, requests[0])
        sut = HttpSut(server, requests)
        handle = lg.ConstructSUT(sut.issue, sut.flush)
        library = lg.ConstructQSL(len(requests), len(requests), lambda _: None, lambda _: None)
        output = lg.LogOutputSettings()
        output.outdir = folder
        log = lg.LogSettings()
        log.log_output = output
        log.enable_trace = False
        lg.StartTestWithLogSettings(handle, library, settings, log)
        lg.DestroyQSL(library)
        lg.DestroySUT(handle)
        sut.close()
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
    if sut.num_failed:
        raise RuntimeError(f"{name}: {sut.num_failed} queries were not answered well, so the run counts for nothing")
    return {"rate": case.rate, "p99_limit_ms": case.limit_ms, "seconds": seconds, **_said(summary)}


def _said(summary: str) -> dict[str, Any]:
    lines = dict(line.split(":", 1) for line in summary.splitlines() if line.count(":") == 1)
    said = {name.strip(): value.strip() for name, value in lines.items()}
    wanted = ("Result is", "Completed samples per second", "Early Stopping satisfied", "Min duration satisfied",
              "Performance constraints satisfied")  # fmt: skip
    ms = {p: f"{p} percentile latency (ns)" for p in ("50.00", "90.00", "99.00")}
    return {
        **{name: said[name] for name in wanted if name in said},
        **{f"p{p[:2]}_ms": round(int(said[name]) / 1e6, 2) for p, name in ms.items() if name in said},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="may be given more than once")
    given = parser.parse_args()
    chosen = {name: case for name, case in CASES.items() if not given.only or name in given.only}
    settings = {"seconds": given.seconds, "percentile": 0.99, "loadgen": version("mlcommons-loadgen")}
    results: dict[str, Any] = {}
    for name, case in chosen.items():
        results[name] = run(name, case, given.data, given.seconds)
        write("loadgen", settings, results)


if __name__ == "__main__":
    main()
