"""`batchmaker serve` as a process, and a plain client for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

HERE = Path(__file__).resolve().parent
START = [sys.executable, "-c", "from batchmaker.cli.main import main; main()", "serve"]
LIMIT_S = 600.0
"""For whatever a server or a client does in its own time. Waits end as soon as it is done: no test passes or fails by
the speed of the machine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered. content: the body as it came."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


class RunningServer:
    """A server that has said that it is ready."""

    def __init__(self, arguments: tuple[str, ...], log: Path, start: Sequence[str] = START) -> None:
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.log = log
        self.key: str | None = None  # with which metrics are read, if it asks for one
        self._connections: list[socket.socket] = []
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*start, "--port", "0", "--threads", "1", *arguments],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
            )  # fmt: skip
        self.ready_line = self._first_line()
        match = re.search(r"(https?)://([\d.]+):(\d+)", self.ready_line)
        if match is None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            raise AssertionError(f"no address in {self.ready_line!r}; log: {log.read_text()}")
        self.scheme, self.host, self.port = match[1], match[2], int(match[3])
        self.grpc_address = "".join(re.findall(r"grpcs?://(\S+)", self.ready_line))

    def _first_line(self) -> str:
        timer = threading.Timer(LIMIT_S, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One call on a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        return self.call("POST", path, json.dumps(content).encode(), **headers)

    def connect(self) -> socket.socket:
        """A bare connection, closed with the server unless it is before."""
        self._connections.append(socket.create_connection((self.host, self.port), timeout=LIMIT_S))
        return self._connections[-1]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all samples that have these labels."""
        total = 0.0
        key = {} if self.key is None else {"X_API_Key": self.key}
        for line in self.get("/metrics", **key).content.decode().splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match is None or match[1] != name:
                continue
            has = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if all(has.get(label) == value for label, value in labels.items()):
                total += float(match[3])
        return total

    def wait_for(self, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait for what the server does in its own time."""
        wait_until(holds, limit_s, told=lambda: f"log: {self.log.read_text()[-2000:]}")

    def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        self.wait_for(lambda: self.metric("nv_inference_pending_request_count") == 0)

    def terminate(self, limit_s: float = LIMIT_S) -> int:
        """Send SIGTERM and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_s)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def close(self) -> None:
        """End it, and what is connected to it."""
        self.terminate()
        for connection in self._connections:
            connection.close()


def read_head(connection: socket.socket) -> bytes:
    """Read up to the end of an answer's headers."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        if not chunk:
            return received
        received += chunk
    return received


def request_bytes(path: str, content: Any, *headers: str) -> bytes:
    """A whole POST as it goes over the wire."""
    body = json.dumps(content).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def make_certificate(folder: Path, name: str) -> None:
    """Write cert.pem and key.pem of a new certificate."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
