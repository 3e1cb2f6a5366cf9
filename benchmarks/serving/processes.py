"""Servers as processes: batchmaker, LitServe and Ray Serve, each ready before anything is measured."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from generator import Plan, offer

HERE = Path(__file__).resolve().parent
_START_LIMIT_S = 180.0
_PEERS = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""What Ray's documentation recommends where throughput counts."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that takes requests."""

    process: subprocess.Popen[str]
    host: str
    port: int
    grpc_port: int | None = None

    def resident_mb(self) -> float:
        """Memory that the server and its children have in use."""
        return sum(map(resident_mb, family(self.process.pid)))

    def processor_s(self) -> float:
        """Processor time of the server and its living children."""
        return sum(map(_processor_s, family(self.process.pid)))

    def replicas_s(self) -> float:
        """Processor time of a fleet's replicas; 0 for a single server."""
        return sum(_processor_s(pid) for pid in family(self.process.pid) if b"ReplicaProcess" in _command(pid))


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _processor_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def resident_mb(pid: int) -> float:
    """Return the memory that a process has in use; 0 if it has ended."""
    return _status(pid, "VmRSS") / 1024


def _status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def batchmaker(*arguments: object, threads: int = 1, grpc: bool = False) -> Iterator[Server]:
    """Start `batchmaker serve ARGUMENTS`, and stop it at the end of the block."""
    command = [sys.executable, "-c", "from batchmaker.cli.main import main; main()", "serve", "--port", "0"]
    command += ["--threads", str(threads), *map(str, arguments)] + (["--grpc-port", "0"] if grpc else [])
    process = _start(command, {"PYTHONPATH": _models_in_reach()}, threads)
    try:
        line = process.stdout.readline()
        ports = list(map(int, re.findall(r"127\.0\.0\.1:(\d+)", line)))
        if not ports:
            raise RuntimeError(f"the server is not ready: {line!r}")
        yield Server(process, "127.0.0.1", ports[0], ports[1] if len(ports) > 1 else None)
    finally:
        _stop(process)


@contextlib.contextmanager
def peer(python: Path, script: str, task: str, *, threads: int = 1) -> Iterator[Server]:
    """Start a peer's application, peers/SCRIPT, with the interpreter of its own environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**_PEERS, "PYTHONPATH": _models_in_reach()}
    process = _start([str(python), str(HERE / "peers" / script), task, str(port)], environment, threads)
    try:
        end = time.monotonic() + _START_LIMIT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{script} did not start; run it by hand to see why")
            time.sleep(0.2)
        yield Server(process, "127.0.0.1", port)
    finally:
        _stop(process)


def _models_in_reach() -> str:
    """Return the PYTHONPATH with which a server finds the models of this folder."""
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


def _start(command: list[str], environment: Mapping[str, str], threads: int) -> subprocess.Popen[str]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is not to outlive whoever measures it
    numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    log = open(os.environ.get("SERVING_LOG", os.devnull), "a")  # noqa: SIM115 - the process has it
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment, **numbers},
        start_new_session=True,
    )  # fmt: skip


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _stop(process: subprocess.Popen[str]) -> None:
    """End a server and whatever it started."""
    children = family(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def warm_up(server: Server, request: bytes, limit_s: float = 60.0) -> None:
    """Return once the server answers as it should: some listen before they can."""
    end = time.monotonic() + limit_s
    while not (offer(Plan(server.host, server.port, [request], 4.0, 1.5, 4)).array("status") == 200).all():
        if time.monotonic() > end:
            raise RuntimeError("the server listens but does not answer; run it by hand to see why")
