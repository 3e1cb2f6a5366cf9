"""Whoever waits for the compiler at the first start is told why; nobody else is told anything."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext

import pytest

from batchmaker.compiled import config, kept_in, place
from batchmaker.engine import setup
from batchmaker.policies.cellular import CellularPolicy
from insides import say_where_nothing_is_kept


def test_a_long_wait_for_the_compiler_is_explained_while_it_lasts(monkeypatch, caplog):
    said = []
    told = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
            told.set()

    def slow():
        assert told.wait(60), "nothing was said while the loops were compiled"

    logger = logging.getLogger(setup.__name__)
    monkeypatch.setattr(logger, "handlers", [Listening()])
    caplog.set_level(logging.INFO, logger.name)
    monkeypatch.setattr(setup, "prepare", slow)
    monkeypatch.setattr(setup, "_WORTH_TELLING_S", 0.0)
    setup.prepare_scheduler(CellularPolicy())
    assert "once per installation" in said[0]


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_said_after_a_start_that_took_no_time_or_failed(monkeypatch, broken):
    begun = []
    monkeypatch.setattr(setup.threading, "Timer", lambda *args: begun.append(Noted()) or begun[-1])
    monkeypatch.setattr(setup, "prepare", (lambda: 1 / 0) if broken else lambda: None)
    if broken:
        with pytest.raises(ZeroDivisionError):
            setup.prepare_scheduler(CellularPolicy())
    else:
        setup.prepare_scheduler(CellularPolicy())
    assert [timer.said for timer in begun] == [["start", "cancel"]]


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@pytest.mark.parametrize(("folder", "lines"), [("file/below", 1), ("folder", 0)])
def test_where_nothing_can_be_kept_a_start_says_so_in_one_line_with_the_remedy(tmp_path, caplog, folder, lines):
    (tmp_path / "file").touch()
    found = place, kept_in, say_where_nothing_is_kept
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "CACHE_DIR", str(tmp_path / folder))
        patch.setattr(setup, "compiled_ahead", lambda *_: nullcontext())
        for module in (setup, setup.interpreter, setup.step_rows):
            patch.setattr(module, "prepare", lambda: None)
        for each in found:
            each.cache_clear()
        for _ in range(2):
            setup.prepare_scheduler(CellularPolicy())
    for each in found:
        each.cache_clear()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == lines
    assert all(str(tmp_path / folder) in line for line in said)
    assert all("set NUMBA_CACHE_DIR to a folder that can be" in line for line in said)


class Noted:
    def __init__(self):
        self.said = []
        self.daemon = False

    def start(self):
        self.said.append("start")

    def cancel(self):
        self.said.append("cancel")


def test_nobody_has_to_choose_a_policy():
    assert setup.choose_policy(None, refuse=False).name == "auto"
    assert setup.choose_policy(None, refuse=False, on_cpu=False).name == "cellular"
    for on_cpu in (True, False):  # who is to be refused has to be forecast
        assert setup.choose_policy(None, refuse=True, on_cpu=on_cpu).name == "auto"
