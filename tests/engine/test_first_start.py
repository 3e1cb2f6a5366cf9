"""Whoever waits for the compiler at the first start is told why; nobody else is told anything."""

from __future__ import annotations

import logging
import threading

import pytest

from batchmaker.engine import first_start


def test_a_long_wait_for_the_compiler_is_explained_while_it_lasts(monkeypatch, caplog):
    said = []
    told = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
            told.set()

    def slow():
        assert told.wait(60), "nothing was said while the loops were compiled"

    logger = logging.getLogger(first_start.__name__)
    monkeypatch.setattr(logger, "handlers", [Listening()])
    caplog.set_level(logging.INFO, logger.name)
    monkeypatch.setattr(first_start, "prepare", slow)
    monkeypatch.setattr(first_start, "_WORTH_TELLING_S", 0.0)
    first_start.prepare_scheduler()
    assert "once per installation" in said[0]


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_said_after_a_start_that_took_no_time_or_failed(monkeypatch, broken):
    begun = []
    monkeypatch.setattr(first_start.threading, "Timer", lambda *args: begun.append(Noted()) or begun[-1])
    monkeypatch.setattr(first_start, "prepare", (lambda: 1 / 0) if broken else lambda: None)
    if broken:
        with pytest.raises(ZeroDivisionError):
            first_start.prepare_scheduler()
    else:
        first_start.prepare_scheduler()
    assert [timer.said for timer in begun] == [["start", "cancel"]]


class Noted:
    def __init__(self):
        self.said = []
        self.daemon = False

    def start(self):
        self.said.append("start")

    def cancel(self):
        self.said.append("cancel")
