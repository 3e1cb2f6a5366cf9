"""The orders that closed mini-batches are run in: ED-Batch's example, its baselines, and schedules that can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learned_graphs import lattice, trees

from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.bound import lower_bound
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch, merged, mini_batch
from batchmaker.graph.spec import TypeId
from batchmaker.policies.agenda import AgendaPolicy, AgendaRemainingPolicy
from batchmaker.policies.base import CellPolicy, ReadyView
from batchmaker.policies.depth import DepthPolicy
from batchmaker.policies.learned.encodings import encode_base, encode_max, encode_sort
from batchmaker.policies.learned.policy import TablePolicy
from batchmaker.policies.sufficient import SufficientPolicy
from batchmaker_papers.learners.comparison import compare
from batchmaker_papers.learners.mini_batch import (
    ClosedBatch,
    check_schedule,
    num_batches,
    schedule,
    schedule_from_sinks,
)

POLICIES = {
    "depth": DepthPolicy(),
    "agenda": AgendaPolicy(),
    "agenda-remaining": AgendaRemainingPolicy(),
    "sufficient": SufficientPolicy(),
    "table": TablePolicy("sort", {(0, 1): 1, (1, 0): 0, (3, 0): 0}),
}


@st.composite
def mini_batches(draw: st.DrawFn) -> MiniBatch:
    """Any graph without cycles, of up to 25 nodes of up to four types."""
    types = draw(st.lists(st.integers(0, 3), min_size=1, max_size=25))
    sources = [draw(st.lists(st.integers(0, node - 1), max_size=3)) if node else [] for node in range(len(types))]
    return mini_batch(types, sources, 4)


@pytest.fixture
def parse_tree() -> MiniBatch:
    """The tree-based network of the paper's Figure 1: internal nodes I (0), an output O (1) of each, and one reduction
    R (2) of all outputs. Six internal nodes have no child; four others lie one above the other."""
    inner = [[], [], [], [], [], [], [0, 1], [6, 2], [7, 3], [8, 4]]
    outputs = [[node] for node in range(len(inner))]
    types = [0] * len(inner) + [1] * len(outputs) + [2]
    return mini_batch(types, [*inner, *outputs, list(range(len(inner), len(inner) + len(outputs)))], 3)


def kinds(batches: list[ClosedBatch]) -> str:
    return "".join("IOR"[batch.type_id] for batch in batches)


def test_the_papers_tree_needs_its_outputs_once_and_only_the_condition_and_what_is_learnt_know_it(parse_tree):
    frontier = Frontier(parse_tree)
    machine = TablePolicy("base", {(0,): 0, (0, 1): 0, (1,): 1, (2,): 2})  # Figure 2(a)
    assert lower_bound(parse_tree) == 7
    assert kinds(schedule(frontier, machine)) == "IIIIIOR"
    assert kinds(schedule(frontier, SufficientPolicy())) == "IIIIIOR"
    assert kinds(schedule_from_sinks(parse_tree)) == "IIIIIOR"
    # one batch for each depth and type: outputs at depths 1 to 5
    assert kinds(schedule(frontier, DepthPolicy())) == "IIOIOIOIOOR"
    # I at 1.0 on average, O at 2.0: the first batches are right, since all of I lies lower
    assert kinds(schedule(frontier, AgendaPolicy())) == "IIIIIOR"
    # after the first I, those left are at 2.5 and O still at 2.0: an extra batch; the last I, at 4.0, is passed by too
    assert kinds(schedule(frontier, AgendaRemainingPolicy())) == "IOIIIOIOR"


def test_states_are_what_the_paper_says_with_ties_to_the_lower_id():
    assert encode_base([3, 0, 5, 3]) == (0, 2, 3)
    assert encode_max([3, 0, 5, 3]) == (0, 2, 3, 2)
    assert encode_max([4, 4, 0, 0]) == (0, 1, 0)
    assert encode_sort([3, 0, 5, 3]) == (2, 0, 3)


def test_depth_makes_one_batch_for_each_depth_and_type():
    requests = merged(trees(6, seed=1))
    expected = len(set(zip(requests.depths.tolist(), requests.types.tolist(), strict=True)))
    assert len(schedule(Frontier(requests), DepthPolicy())) == expected


@given(mini_batches(), st.sampled_from(sorted(POLICIES)), st.none() | st.integers(1, 4))
def test_every_policy_computes_each_node_once_after_its_sources(given_batch, name, max_batch):
    frontier = Frontier(given_batch)
    batches = schedule(frontier, POLICIES[name], max_batch)
    check_schedule(given_batch, batches)
    assert len(batches) >= lower_bound(given_batch, max_batch)
    assert max_batch is None or max(len(batch.nodes) for batch in batches) <= max_batch
    if max_batch is None and name != "depth":
        assert num_batches(frontier, POLICIES[name]) == len(batches)


@given(mini_batches(), st.none() | st.integers(1, 4))
def test_a_schedule_found_from_the_sinks_can_run_forwards(given_batch, max_batch):
    batches = schedule_from_sinks(given_batch, max_batch=max_batch)
    check_schedule(given_batch, batches)
    assert len(batches) >= lower_bound(given_batch, max_batch)


@given(mini_batches(), st.dictionaries(st.lists(st.integers(0, 3), min_size=1).map(tuple), st.none()))
def test_a_state_that_a_table_does_not_know_is_left_to_the_condition(given_batch, states):
    """A table that knows some states runs the rest as if it knew nothing."""
    known = {state: state[0] for state in states if sorted(set(state)) == sorted(state)}
    policy, empty = TablePolicy("sort", known), TablePolicy("sort", {})
    assert schedule(Frontier(given_batch), empty) == schedule(Frontier(given_batch), SufficientPolicy())
    check_schedule(given_batch, schedule(Frontier(given_batch), policy))


def test_a_policy_that_chooses_what_is_not_ready_is_a_defect():
    class Wrong(CellPolicy):
        name = "wrong"

        def rank(self, view: ReadyView) -> Sequence[TypeId]:
            return [TypeId(1)]

    with pytest.raises(InvariantError, match="'wrong' chose type 1, which has no ready node"):
        schedule(Frontier(mini_batch([0, 1], [[], [0]], 2)), Wrong())
    with pytest.raises(OptionError, match="max_batch must be at least 1, got 0"):
        schedule(Frontier(mini_batch([0], [[]], 1)), SufficientPolicy(), 0)


def test_a_policy_that_looks_at_requests_is_refused():
    class Curious(CellPolicy):
        name = "curious"

        def __init__(self, read: Callable[[ReadyView], object]) -> None:
            super().__init__()
            self._read = read

        def rank(self, view: ReadyView) -> Sequence[TypeId]:
            self._read(view)
            return view.ready

    frontier = Frontier(mini_batch([0], [[]], 1))
    with pytest.raises(OptionError, match="'curious' looks at requests, and a closed mini-batch has only nodes"):
        schedule(frontier, Curious(lambda view: view.requests))
    with pytest.raises(InvariantError, match="'curious' reads depths and does not declare needs_depth"):
        schedule(frontier, Curious(lambda view: view.depths))
    seen: list[object] = []

    def look(view: ReadyView) -> None:
        seen.append((view.num_waiting, len(view.waiting(1)), view.num_running(TypeId(0)), view.now_s))

    assert len(schedule(frontier, Curious(look))) == 1
    assert seen == [(0, 0, 0, 0.0)]


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([ClosedBatch(0, (0,)), ClosedBatch(1, (1,))], "1 nodes are in no batch, the first of them 2"),
        ([ClosedBatch(1, (1,)), ClosedBatch(0, (0, 2))], "batch 0: node 1 runs before"),
        ([ClosedBatch(0, (0, 2)), ClosedBatch(0, (1,))], "batch 1, of type 0: node 1"),
        ([ClosedBatch(0, (0, 2)), ClosedBatch(1, (1,)), ClosedBatch(0, (2,))], "batch 2, of type 0: node 2 has run"),
    ],
)
def test_a_schedule_that_cannot_run_is_found_out(batches, says):
    with pytest.raises(InvariantError, match=says):
        check_schedule(mini_batch([0, 1, 0], [[], [0], []], 2), batches)


def test_policies_are_compared_on_the_same_mini_batches():
    groups = [merged([lattice(20, seed=8 * i + j) for j in range(8)]) for i in range(3)]
    standings = {standing.policy: standing for standing in compare(groups, {"sort": {}, "base": {}})}
    assert list(standings) == [
        "depth", "agenda", "agenda-remaining", "heuristic-forward", "heuristic-backward", "e_sort", "e_base",
    ]  # fmt: skip
    bounds = {standing.lower_bound for standing in standings.values()}
    assert bounds == {sum(map(lower_bound, groups)) / 3}
    assert standings["e_sort"].mean_batches == standings["heuristic-forward"].mean_batches
    assert all(standing.mean_batches >= min(bounds) and standing.decision_us > 0 for standing in standings.values())
