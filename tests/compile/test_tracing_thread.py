"""torch traces in one thread of the process, which lives as long as the process."""

from __future__ import annotations

import contextvars
import multiprocessing
import threading

import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.compile.export import export_cell, without_writes
from batchmaker.compile.tracing_thread import in_tracing_thread
from batchmaker.compiled import NOT_COMPILING
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.shapes import call_with_shapes

ROW = ValueSpec((4,), "float32")


class Noting(nn.Module):
    """Notes the threads that run it."""

    def __init__(self, seen):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = seen.append  # torch.export puts attributes that a call has changed back as they were

    def forward(self, x):
        self.note(threading.current_thread())
        return self.linear(x).relu_()


class Once(bm.Model):
    example_request = (1.0, 2.0, 3.0, 4.0)

    def __init__(self, seen):
        self.cell = bm.Cell(Noting(seen))

    def unfold(self, request):
        return self.cell(torch.tensor(request))


def in_a_thread_that_ends(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_all_traces_of_the_process_are_in_one_thread_that_does_not_end():
    seen = []
    for _ in range(2):
        in_a_thread_that_ends(lambda: export_cell(Noting(seen), (ROW,)))
    export_cell(Noting(seen), (ROW,))
    in_a_thread_that_ends(lambda: call_with_shapes(Noting(seen), (ROW,), "a module"))
    assert len(seen) == 4
    (thread,) = set(seen)
    assert thread.is_alive()
    assert thread.daemon  # code that hangs while it is traced does not keep the process from ending


def test_a_second_engine_traces_where_the_first_did():
    seen = [], []
    for number in range(2):
        with bm.Engine(Once(seen[number])) as engine:
            engine.submit([1.0, 2.0, 3.0, 4.0]).result()
    tracing = in_tracing_thread(threading.current_thread)
    assert tracing in seen[0]
    assert tracing in seen[1]


def test_a_program_traced_elsewhere_is_made_free_of_writes_in_the_same_thread(monkeypatch):
    program, where = export_cell(Noting([]), (ROW,)), []
    known = type(program).run_decompositions

    def noting(self, *args):
        where.append(threading.current_thread().name)
        return known(self, *args)

    monkeypatch.setattr(type(program), "run_decompositions", noting)
    in_a_thread_that_ends(lambda: without_writes(program))
    assert where == ["batchmaker-tracing"]


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_what_is_raised_there_is_raised_here_and_the_next_trace_goes_on(error):
    def fails():
        raise error

    with pytest.raises(type(error)) as caught:
        in_tracing_thread(fails)
    assert caught.value is error
    assert in_tracing_thread(lambda a, b: a + b, 1, b=2) == 3


def test_a_trace_within_a_trace_does_not_wait_for_itself():
    assert in_tracing_thread(in_tracing_thread, threading.current_thread) is in_tracing_thread(threading.current_thread)


def test_callers_at_the_same_time_are_served_one_after_another_and_each_gets_its_own():
    together, running, found = threading.Barrier(8), [], []

    def call(number):
        running.append(number)
        assert len(running) == 1
        return running.pop()

    def ask(number):
        together.wait()
        found.append((number, in_tracing_thread(call, number)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(number, number) for number in range(8)]


def test_a_trace_sees_context_variables_of_its_caller_and_none_of_torchs_modes():
    asked_by = contextvars.ContextVar("asked_by")
    asked_by.set("me")
    with torch.inference_mode(), torch.autocast("cpu"):
        seen = in_tracing_thread(
            lambda: (asked_by.get(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        )
    assert seen == ("me", False, False)


def _export_in_child(answers):
    answers.put(len(list(export_cell(nn.Linear(4, 4), (ROW,)).graph.nodes)) > 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_process_traces_in_a_thread_of_its_own():
    export_cell(nn.Linear(4, 4), (ROW,))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_export_in_child, args=(answers,))
    child.start()
    child.join(120.0)
    assert child.exitcode == 0
    assert answers.get()


def test_nothing_is_compiled_while_torch_traces():
    """It replaces `min` and others for the whole process meanwhile, which numba reads when it compiles."""
    tracing, compiled_there, go_on = threading.Event(), threading.Event(), threading.Event()

    def traced():
        tracing.set()
        go_on.wait(60)
        return compiled_there.is_set()

    def compiles():
        with NOT_COMPILING:
            compiled_there.set()

    outcome = []
    tracer = threading.Thread(target=lambda: outcome.append(in_tracing_thread(traced)))
    tracer.start()
    assert tracing.wait(60)
    other = threading.Thread(target=compiles)
    other.start()
    other.join(0.2)
    go_on.set()
    tracer.join(60)
    other.join(60)
    assert outcome == [False]
    assert compiled_there.is_set()
