"""Percentiles and windows, with numbers that one can check by hand."""

from __future__ import annotations

import math

import numpy as np

from batchmaker.cli.bench.statistics import percentiles, whole_steps
from batchmaker.cli.profile import choose_batch
from batchmaker.cli.workload import make_workload, sentence_lengths


def test_percentiles_of_0_to_100_ms():
    found = percentiles(np.arange(101) / 1e3)
    assert (found.p50_ms, found.p90_ms, found.p99_ms) == (50.0, 90.0, 99.0)


def test_percentiles_of_nothing_are_not_numbers():
    assert math.isnan(percentiles([]).p50_ms)


def test_a_window_begins_and_ends_after_whole_batches():
    steps = [1, 1, 1, 2, 2, 3, 3, 3, 4]
    assert whole_steps(steps, 0) == (2, 7)
    assert whole_steps(steps, 3) == (4, 7)


def test_a_window_without_two_steps_is_everything():
    assert whole_steps([1, 1, 1], 0) == (0, 2)


def test_the_smallest_batch_near_the_best_is_chosen():
    assert choose_batch([1, 2, 4, 8], [10.0, 96.0, 100.0, 99.0]) == 2
    assert choose_batch([1, 2, 4, 8], [10.0, 90.0, 100.0, 99.0]) == 4


def test_lengths_as_asked_for():
    assert sentence_lengths("fixed:7", 3, 0).tolist() == [7, 7, 7]
    assert sentence_lengths("clip:5", 200, 0).max() == 5


def test_a_seed_gives_the_same_requests():
    first, second = (make_workload("lstm", count=5, seed=3) for _ in range(2))
    assert [list(a) for a in first.requests] == [list(b) for b in second.requests]
    assert first.cells.tolist() == [len(request) for request in first.requests]


def test_cells_of_pairs_are_source_and_words():
    workload = make_workload("seq2seq", count=4)
    assert workload.cells.tolist() == [len(r["source"]) + r["words"] for r in workload.requests]


def test_cells_of_trees_are_their_nodes():
    workload = make_workload("treelstm", count=4)
    assert workload.cells.tolist() == [2 * len(r["words"]) - 1 for r in workload.requests]
