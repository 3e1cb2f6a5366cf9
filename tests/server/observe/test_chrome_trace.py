"""The trace of a running engine: what Perfetto opens."""

from __future__ import annotations

import threading

from batchmaker.engine import StepSeen, StepsSeen
from batchmaker.server.observe.chrome_trace import StepRing, chrome_trace, trace_events


def step(begin_s, requests, worker=0):
    return StepSeen(worker, "cell", begin_s, begin_s + 0.5, tuple(requests), 4)


def steps(begin_s, requests, rows=(1,)):
    return StepsSeen(0, "cell", begin_s, begin_s + 0.5 * len(rows), requests, rows, [4] * len(rows))


def test_a_ring_keeps_the_last_steps_only():
    ring = StepRing(3)
    for number in range(5):
        ring.add(steps(float(number), [number]))
    assert [seen.begin_s for seen in ring.since(0.0)] == [2.0, 3.0, 4.0]
    assert [seen.begin_s for seen in ring.since(3.5)] == [4.0]
    assert StepRing(0).since(0.0) == []
    without = StepRing(0)
    without.add(steps(1.0, [1]))
    assert without.since(0.0) == []


def test_a_ring_counts_the_steps_of_a_report_not_the_reports():
    ring = StepRing(3)
    for begin_s in (0.0, 1.0, 2.0):
        ring.add(steps(begin_s, [1, 2, 3], rows=(1, 2)))
    assert [(seen.begin_s, seen.end_s, seen.requests) for seen in ring.since(0.0)] == [
        (1.5, 2.0, (2, 3)), (2.0, 2.5, (1,)), (2.5, 3.0, (2, 3)),
    ]  # fmt: skip
    assert [seen.begin_s for seen in ring.since(2.5)] == [2.5]


def test_a_ring_can_be_read_while_it_is_written():
    ring = StepRing(100)
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            ring.add(steps(float(number), [number]))
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            begins = [seen.begin_s for seen in ring.since(-1.0)]
            assert begins == sorted(begins)
    finally:
        stop.set()
        writer.join()


def test_a_trace_shows_steps_by_worker_and_requests_by_row():
    steps = [step(10.0, [1, 2]), step(10.5, [1, None, 3], worker=1)]
    trace = chrome_trace(trace_events(4, "lstm 1", steps, 10.0))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    by_worker = [(e["tid"], e["ts"], e["dur"], e["args"]["rows"]) for e in spans if e["pid"] == 4]
    assert by_worker == [(0, 0.0, 500_000.0, 2), (1, 500_000.0, 500_000.0, 3)]
    by_row = {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in spans if e["pid"] == 5}
    assert by_row == {
        "request 1": (0, 0.0, 1e6), "request 2": (1, 0.0, 500_000.0), "request 3": (1, 500_000.0, 500_000.0),
    }  # fmt: skip
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"lstm 1", "lstm 1: workers", "worker 0", "worker 1", "row 0", "row 1"} <= names


def test_no_steps_make_a_trace_without_spans():
    assert all(event["ph"] == "M" for event in trace_events(0, "idle", [], 0.0))
