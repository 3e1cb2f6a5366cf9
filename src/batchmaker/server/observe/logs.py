"""Logs as one JSON object per line on standard error, written by a separate thread without blocking others."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any, Final, Literal, final

import msgspec

Level = Literal["debug", "info", "warning", "error"]

MAX_LINES: Final = 10_000
"""Most lines that may wait to be written."""

_OWN: Final = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_OTHERS: Final = ("uvicorn", "grpc", "asyncio", "py.warnings")
"""Other packages' loggers, whose warnings are logged too."""


@final
class JsonFormatter(logging.Formatter):
    """Formats time, level, logger and event of a record, its `extra` fields, and its traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON. Values that JSON cannot represent are written as text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _OWN)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


@final
class LogQueue(QueueHandler):
    """Passes lines to a separate thread, which writes them.

    Standard error may be a pipe that nobody reads, and a write to a full pipe waits for ever; callers must not wait.
    When `max_lines` wait, further lines are dropped and counted, and the next written line reports their number.
    """

    queue: Queue[logging.LogRecord]

    def __init__(self, stream: Any, max_lines: int = MAX_LINES) -> None:
        """stream: has `write` and `flush`."""
        super().__init__(Queue(max_lines))
        self.setFormatter(JsonFormatter())
        self.num_dropped = 0
        self._num_reported = 0
        self._listener = QueueListener(self.queue, _LogWriter(stream))
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return logging.makeLogRecord({"msg": self.format(record), "name": record.name})

    def enqueue(self, record: logging.LogRecord) -> None:
        """Add a line. Called with the handler's lock held."""
        try:
            if self.num_dropped > self._num_reported:
                self.queue.put_nowait(self.prepare(_dropped(self.num_dropped - self._num_reported)))
                self._num_reported = self.num_dropped
            self.queue.put_nowait(record)
        except Full:
            self.num_dropped += 1

    def end(self, within_s: float = 1.0) -> None:
        """Write the waiting lines, for `within_s` at most. Lines that nobody reads are then lost."""
        end = time.monotonic() + within_s
        while self.queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.001)
        if not self.queue.unfinished_tasks:
            self._listener.stop()


@final
class _NoLock(nullcontext[None]):
    """Stands for the lock of a handler that has none. Python 3.13 enters the lock without a look at it."""

    def acquire(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


@final
class _LogWriter(logging.StreamHandler[Any]):
    """Writes for one thread, without a lock: the end of the process would wait for a lock."""

    def createLock(self) -> None:  # noqa: N802
        self.lock = _NoLock()  # type: ignore[assignment]


@final
class _StandardError:
    """Standard error without Python's buffer, because the end of the process would wait for its lock."""

    def write(self, text: str) -> None:
        rest = text.encode("utf-8", "backslashreplace")
        while rest:
            rest = rest[os.write(sys.stderr.fileno(), rest) :]

    def flush(self) -> None:
        """Nothing is buffered."""


def _dropped(count: int) -> logging.LogRecord:
    fields = {"name": "batchmaker.server", "levelno": logging.WARNING, "levelname": "WARNING", "lines": count}
    return logging.makeLogRecord({**fields, "msg": "lines of this log were dropped: they are not read fast enough"})


def configure(level: Level) -> LogQueue:
    """Send the logs of batchmaker, and warnings of its packages, to standard error as JSON."""
    handler = LogQueue(_StandardError())
    logging.captureWarnings(True)
    for name in ("batchmaker", *_OTHERS):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel("WARNING")
    set_level(level)
    return handler


def set_level(level: Level) -> None:
    """Set the level of batchmaker's own log lines."""
    logging.getLogger("batchmaker").setLevel(level.upper())
