"""Rows over time from finished steps."""

from __future__ import annotations

from batchmaker.engine.stats import StepSeen
from batchmaker.engine.timeline import Span, Timeline, cell_spans, graph_spans


def step(begin, end, *requests):
    return StepSeen(0, "cell", begin, end, requests, len(requests))


def test_a_request_keeps_its_row_and_the_next_takes_it_over():
    steps = [step(0, 1, 1, 2), step(1, 2, 2, 3), step(2, 3, 3)]
    assert sorted(cell_spans(steps, 0, 3), key=lambda span: span.request) == [
        Span(1, 0, 0, 1, 1),
        Span(2, 1, 0, 2, 2),
        Span(3, 0, 1, 3, 3),
    ]


def test_only_the_stretch_asked_for_is_drawn():
    assert cell_spans([step(0, 1, 1), step(5, 6, 2)], 4, 7) == [Span(2, 0, 5, 6, 6)]


def test_a_padded_batch_holds_rows_until_its_longest_ends():
    spans = graph_spans([step(0, 10, 7, 8)], {7: 5, 8: 20}.__getitem__, 0, 10)
    assert spans == [Span(7, 0, 0, 10, 2.5), Span(8, 1, 0, 10, 10.0)]


def test_mean_batch_and_limit():
    timeline = Timeline(max_steps=2)
    assert timeline.mean_batch() == 0.0
    for number in range(1, 4):
        timeline.add(step(number, number + 1, *range(number)))
    assert len(timeline.steps) == 2
    assert timeline.mean_batch() == 1.5
