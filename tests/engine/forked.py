"""Programs that fork, for test_fork.py: each prints what the child and the parent saw. Run as a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import batchmaker as bm
from batchmaker.errors import StoppedError

sys.path.insert(0, str(Path(__file__).parents[1]))  # where modules are that tests of several folders use
from insides import locks_of


class Row(bm.Model):
    def __init__(self) -> None:
        self.cell = bm.Cell(nn.Linear(4, 4))
        self.gate = threading.Event()
        self.entered = threading.Event()

    def unfold(self, xs: list[float]) -> Any:
        if xs[0] < 0:
            self.entered.set()
            self.gate.wait(60)
        return self.cell(xs)

    def unfold_chunk(self, xs: list[float], state: Any) -> Any:
        return self.cell(xs), None


def said(call: Callable[[], Any]) -> str:
    """What a call in the child did: the class of its error, or its result."""
    try:
        return f"result {call()!r}"
    except BaseException as error:
        return f"{type(error).__name__} {'forked' in str(error)}"


def in_child(body: Callable[[], None]) -> None:
    """Run this in a forked process, and wait for its end."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)


def started() -> None:
    """An engine that works is forked: in the child every call says so, also for answers from before."""
    model = Row()
    engine = bm.Engine(model, threads=1, max_queue=8).start()
    xs = [1.0] * 4
    done = engine.submit(xs)
    done.result()
    sequence = engine.open_sequence()
    waiting = engine.submit([-1.0] * 4)
    model.entered.wait(60)
    behind, streamed = engine.submit(xs), engine.submit(xs, stream=True)
    locks = locks_of(engine)

    def child() -> None:
        print("submit:", said(lambda: engine.submit(xs)))
        print("map:", said(lambda: engine.map([xs, xs], progress=False)))
        print("open_sequence:", said(engine.open_sequence))
        print("chunk:", said(lambda: sequence.submit(xs)))
        print("answers:", *[said(answer.result) for answer in (waiting, behind)])
        print("stream:", said(lambda: list(streamed)))
        print("before:", said(lambda: tuple(done.result().shape)))
        print("cancel:", behind.cancel(), "close:", sequence.close())
        print("alive:", engine.heartbeat.alive, "stop:", engine.stop(), engine.stop(within_s=1.0))
        with bm.Engine(Row(), threads=1) as other:
            print("another:", tuple(other.submit(xs).result().shape))

    for lock in locks:  # as if other threads were just sending
        lock.acquire()
    in_child(child)
    for lock in locks:
        lock.release()
    model.gate.set()
    print("parent:", *[tuple(answer.result().shape) for answer in (waiting, behind, engine.submit(xs))])
    print("parent stops:", engine.stop())


def not_started() -> None:
    """An engine that was made and not started may start in the child, and in the parent afterwards."""
    engine = bm.Engine(Row(), threads=1)

    def run() -> None:
        with engine:
            print("answered:", tuple(engine.submit([1.0] * 4).result().shape))

    in_child(run)
    run()


def stopped() -> None:
    """An engine that was stopped before the fork says this, in the child too."""
    engine = bm.Engine(Row(), threads=1).start()
    engine.stop()

    def child() -> None:
        try:
            engine.submit([1.0] * 4)
        except StoppedError as error:
            print("stopped:", error)

    in_child(child)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for program in (stopped, not_started, started):
        program()
