"""The orders of TensorFlow Fold, DyNet and ED-Batch, and that no order lets anything starve."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, Program, cell_type, chain, host

from batchmaker.core.scheduler import Scheduler
from batchmaker.errors import InvariantError
from batchmaker.graph.recorder import Recorder
from batchmaker.lab.datasets import Tree, random_trees, read_trees, tree_depth
from batchmaker.policies import (
    POLICIES,
    AgendaPolicy,
    AgendaRemainingPolicy,
    CellPolicy,
    CellularPolicy,
    DepthPolicy,
    make,
)

SIZES = (1, 4096)
CELL_POLICIES = sorted(POLICIES.keys() - {"learned"})  # which needs a file


def labelled_tree(given_tree: Tree) -> tuple[list[Any], Program]:
    """A TreeLSTM as ED-Batch defines it: every node, leaf or not, also has an output node."""
    leaf, inner = cell_type(0, "leaf", 1, 2, SIZES), cell_type(1, "inner", 4, 2, SIZES)
    output = cell_type(2, "output", 1, 1, SIZES)

    def program(recorder: Recorder) -> Any:
        leaves = recorder.map(leaf, [host(*range(1, given_tree.num_leaves + 1))])
        labels = [recorder.map(output, [leaves[0]])[0]]
        if given_tree.num_internal:
            nodes = recorder.tree(inner, given_tree.children, leaves, [])
            labels.append(recorder.map(output, [nodes[0]])[0])
        return labels
        yield

    return [leaf, inner, output], program


def run_together(policy: CellPolicy, trees: Sequence[Tree]) -> Harness:
    cells, _ = labelled_tree(trees[0])
    core = Harness(cells, policy=policy, check_always=False)
    for request, each in enumerate(trees):
        core.arrive(request, labelled_tree(each)[1])
    core.run()
    core.check_nothing_left()
    return core


def depths_in(core: Harness, trees: Sequence[Tree]) -> list[set[int]]:
    """The depths that each batch has nodes of, from the trees themselves."""
    of: dict[tuple[int, str], list[int]] = {}
    for request, each in enumerate(trees):
        height = [0] * each.num_leaves
        for left, right in each.children.tolist():
            height.append(1 + max(height[left], height[right]))
        of[request, "leaf"] = height[: each.num_leaves]
        of[request, "inner"] = height[each.num_leaves :]
        of[request, "output"] = [h + 1 for h in height]
    seen: Counter[tuple[int, str]] = Counter()
    counts = []
    for ran in core.log:
        depths = set()
        per_request = Counter(ran.requests)
        for request, count in per_request.items():
            expected = sorted(of[request, ran.cell])
            begin = seen[request, ran.cell]
            depths |= set(expected[begin : begin + count])  # in order of depth, each node once
            seen[request, ran.cell] += count
        counts.append(depths)
    return counts


def test_depth_runs_one_batch_for_each_depth_and_type_in_order_of_depth():
    trees = random_trees(4, seed=3, min_leaves=2, max_leaves=20)
    core = run_together(DepthPolicy(), trees)
    found = depths_in(core, trees)
    assert all(len(depths) == 1 for depths in found)
    batches = [(min(depths), ran.cell) for depths, ran in zip(found, core.log, strict=True)]
    assert len(set(batches)) == len(batches)
    assert [depth for depth, _ in batches] == sorted(depth for depth, _ in batches)
    deepest = max(map(tree_depth, trees)) - 1
    assert Counter(cell for _, cell in batches) == {"leaf": 1, "inner": deepest, "output": deepest + 1}


def test_agenda_runs_a_trees_outputs_between_its_levels_and_agenda_remaining_saves_most_of_them_up():
    """A tree that leans to one side: leaf 0, inner 1..4, outputs 1..5."""
    leaning = Tree(tuple("abcde"), np.array([[0, 1], [5, 2], [6, 3], [7, 4]], np.int32), np.zeros(9, np.int64))
    agenda = run_together(AgendaPolicy(), [leaning])
    remaining = run_together(AgendaRemainingPolicy(), [leaning])
    # mean depths: leaf 0, inner 2.5, output (5 * 1 + 2 + 3 + 4 + 5) / 9 = 2.1: ready outputs always go first
    assert [ran.cell for ran in agenda.log] == ["leaf", "output", *["inner", "output"] * 4]
    # the leaves' outputs gone, those left are at 3.5; the inner nodes left are at 2.5, 3, 3.5 (a tie) and only then 4
    assert [ran.cell for ran in remaining.log] == ["leaf", "output", *["inner"] * 3, "output", "inner", "output"]


@pytest.mark.parametrize("seed", range(3))
def test_on_random_trees_agenda_remaining_needs_fewer_batches_than_agenda(seed):
    trees = random_trees(8, seed=seed, min_leaves=5, max_leaves=40)
    agenda, remaining, depth = (
        len(run_together(policy, trees).log) for policy in (AgendaPolicy(), AgendaRemainingPolicy(), DepthPolicy())
    )
    fewest = max(map(tree_depth, trees)) + 1  # the leaves, each level, and all outputs at once
    assert fewest <= remaining < agenda <= depth


@pytest.mark.slow
def test_on_the_sentiment_treebank_agenda_remaining_needs_fewer_batches_than_agenda(shared_data):
    path = shared_data / "sst" / "train.txt"
    if not path.exists():
        pytest.skip(f"no {path.name} at hand")
    trees = read_trees(path)
    groups = [trees[i : i + 8] for i in range(0, 160, 8)]
    agenda, remaining = (
        np.mean([len(run_together(policy, group).log) for group in groups])
        for policy in (AgendaPolicy(), AgendaRemainingPolicy())
    )
    assert remaining < 0.95 * agenda


@pytest.mark.parametrize(("policy", "name"), [(AgendaPolicy(), "mean"), (AgendaRemainingPolicy(), "mean_left")])
def test_means_are_over_the_nodes_that_are_meant(policy, name):
    """Two chains, 4 and 2 long, of which two steps each have been submitted."""
    cell = cell_type(0, "a", 2, sizes=(1, 4))
    core = Harness([cell], policy=policy)
    core.arrive(0, chain(cell, 4))
    core.arrive(1, chain(cell, 2))
    core.run(1.0)
    depths = core.scheduler.depths
    assert (depths.mean(0), depths.mean_left(0)) == (7 / 6, 2.5)
    core.run()
    assert (depths.mean(0), depths.mean_left(0)) == (7 / 6, 0.0)
    core.arrive(2, chain(cell, 2), 10.0)
    core.run(10.0)
    assert (depths.mean(0), depths.mean_left(0)) == (0.5, 1.0)  # a new mini-batch


def test_depths_are_not_kept_for_policies_that_do_not_ask():
    scheduler = Scheduler(CellularPolicy())
    with pytest.raises(InvariantError, match="needs_depth"):
        _ = scheduler.depths


# --- nothing starves ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CELL_POLICIES)
def test_a_request_of_low_priority_is_answered_while_work_of_high_priority_never_stops(name):
    """Every policy would rather go on with type 0: it has the higher priority, the lower number and lower depths."""
    first, second = cell_type(0, "first", 2, sizes=(1, 2), priority=9), cell_type(1, "second", 2, sizes=(1, 2))
    core = Harness([first, second], policy=make(name), patience=10, check_always=False)

    def low(recorder: Recorder) -> Any:
        (value,) = recorder.run(first, [host(1, 2, 3)], None)
        (value,) = recorder.run(second, [host(4, 5)], [value])
        return [value]
        yield

    core.arrive(0, low)
    for request in range(1, 600):
        core.arrive(request, chain(first, 2), 0.5 * request)
    core.run()
    core.check_nothing_left()
    assert core.left_s(0) <= (3 + 2) * (10 + 2)
    assert sum(how == "reply" for _, how in core.answers.values()) == 600


@settings(max_examples=25)
@given(
    name=st.sampled_from(CELL_POLICIES),
    patience=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=4),
    max_batch=st.integers(1, 3),
)
@example(name="cellular", patience=3, steps=[(False, 2), (True, 1), (True, 1), (True, 1)], max_batch=1)
def test_any_request_ends_within_patience_per_task_behind_an_endless_stream(name, patience, steps, max_batch):
    cells = [cell_type(i, str(i), 2, sizes=(1, max_batch), priority=9 - 9 * i) for i in range(2)]
    policy = make(name)
    core = Harness(cells, policy=policy, patience=patience, check_always=False)

    def low(recorder: Recorder) -> Any:
        value = host(0)
        for second, length in steps:
            (value,) = recorder.run(cells[second], [host(*range(length))], [value])
        return [value]
        yield

    core.arrive(0, low)
    bound = sum(length for _, length in steps) * (2 * patience + 2) * policy.max_steps  # patience counts tasks
    newcomers = iter(range(1, 2 + max_batch * (bound + 20)))
    for end_s in range(20, bound + 21, 20):  # a full batch of newcomers at every step, until the request is answered
        for request in itertools.islice(newcomers, 20 * max_batch):
            core.arrive(request, chain(cells[0], 1), (request - 1) / max_batch)
        core.run(min(end_s - 1.0, float(bound)))
        if 0 in core.answers:
            break
    assert core.answers[0][1] == "reply"
