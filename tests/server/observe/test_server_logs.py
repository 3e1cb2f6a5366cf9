"""Who logs never waits for who reads: a thread writes the lines, so many wait, and the others are counted."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from batchmaker.server.observe.logs import LogQueue


class Blocked(io.StringIO):
    """A stream that nobody reads, until `opened`."""

    def __init__(self):
        super().__init__()
        self.opened, self.entered = threading.Event(), threading.Event()

    def write(self, text):
        self.entered.set()
        self.opened.wait()
        return super().write(text)


@pytest.fixture
def logger():
    logger = logging.Logger("batchmaker.test")
    yield logger
    logger.handlers.clear()


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_json_with_what_was_given_and_the_traceback(logger):
    stream = io.StringIO()
    log = LogQueue(stream)
    logger.addHandler(log)
    logger.warning("it is %s", "late", extra={"model": "lstm"})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("call failed")
    log.end()
    first, second = lines(stream)
    assert (first["level"], first["logger"], first["event"]) == ("warning", "batchmaker.test", "it is late")
    assert first["model"] == "lstm"
    assert "ValueError: broken" in second["traceback"]


def test_nobody_waits_for_a_stream_that_nobody_reads(logger):
    stream = Blocked()
    log = LogQueue(stream, max_lines=3)
    logger.addHandler(log)
    logger.error("0")
    stream.entered.wait()  # the thread has it, and waits
    for number in range(1, 10):
        logger.error(str(number))
    assert log.num_dropped == 6
    log.end(within_s=0.0)
    stream.opened.set()
    log.end(within_s=60.0)
    assert [line["event"] for line in lines(stream)] == ["0", "1", "2", "3"]


def test_the_log_says_how_many_lines_it_dropped(logger):
    stream = Blocked()
    log = LogQueue(stream, max_lines=2)
    logger.addHandler(log)
    logger.error("0")
    stream.entered.wait()
    for number in range(1, 6):
        logger.error(str(number))
    stream.opened.set()
    log.queue.join()
    logger.error("after")
    log.end(within_s=60.0)
    *_, dropped, after = lines(stream)
    assert (dropped["level"], dropped["lines"]) == ("warning", 3)
    assert after["event"] == "after"
