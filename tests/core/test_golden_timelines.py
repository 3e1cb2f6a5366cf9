"""The examples of the BatchMaker paper, step by step."""

from __future__ import annotations

from scheduler_harness import cell_type, chain, complete_tree

from batchmaker.graph.recorder import Recorder
from batchmaker.graph.subgraphs import split
from batchmaker.lab.baselines.buckets import PaddedPolicy

LENGTHS = {1: 2, 2: 3, 3: 3, 4: 5, 5: 5, 6: 7, 7: 3, 8: 1}


def test_figure_5_under_cellular_batching(harness):
    cell = cell_type(0, "lstm", inputs=2, sizes=(1, 4))
    core = harness([cell])
    for request, length in LENGTHS.items():
        core.arrive(request, chain(cell, length), 0.0 if request <= 4 else 1.5)
    core.run()
    batches = [requests for _, _, requests in core.timeline()]
    assert batches[:5] == [(1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4, 5), (4, 5, 6, 7), (4, 5, 6, 7)]
    assert [core.left_s(request) for request in (1, 2, 3, 4)] == [2, 3, 3, 5]
    assert core.left_s(8) == 6  # it joins when request 4 has left
    assert core.left_s(5) == 7


def test_figure_5_under_graph_batching():
    policy, now, left = PaddedPolicy(max_batch=4, bucket_width=10), 0, {}
    for request, length in LENGTHS.items():
        policy.add(request, length, 0.0)
    while chosen := policy.choose(float(now)):
        now += max(LENGTHS[request] for request in chosen)
        left.update(dict.fromkeys(chosen, now))
    assert left == {1: 5, 2: 5, 3: 5, 4: 5, 5: 12, 6: 12, 7: 12, 8: 12}


def test_a_complete_tree_of_16_leaves_is_17_subgraphs():
    leaf, inner = cell_type(0, "leaf", 1, 2), cell_type(1, "inner", 4, 2)
    recorder = Recorder()
    next_ = complete_tree(leaf, inner, 16)(recorder)
    assert list(next_) == []
    graph = recorder.take()
    numbers, count = split(graph)
    assert (graph.num_nodes, count) == (31, 17)
    assert len(set(numbers[:16].tolist())) == 16
    assert set(numbers[16:].tolist()) == {16}


def test_successive_levels_of_a_tree_run_in_successive_steps_after_all_leaves(harness):
    leaf, inner = cell_type(0, "leaf", 1, 2, sizes=(1, 8)), cell_type(1, "inner", 4, 2, sizes=(1, 8), priority=1)
    core = harness([leaf, inner], max_steps=5)
    core.arrive(1, complete_tree(leaf, inner, 16))
    core.run()
    assert [(ran.cell, ran.step.batch) for ran in core.log] == [
        ("leaf", 8), ("leaf", 8), ("inner", 8), ("inner", 4), ("inner", 2), ("inner", 1),
    ]  # fmt: skip
    assert core.steps_per_task() == [2, 4]
