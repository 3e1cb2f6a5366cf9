"""What policies see of requests: the same, whenever they first ask for it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, cell_type, chain, complete_tree

from batchmaker.policies.auto import AutoPolicy
from batchmaker.policies.base import ReadyView
from batchmaker.policies.cellular import CellularPolicy

CHAIN, LOOP = cell_type(0, "chain"), cell_type(1, "loop")
LEAF, INNER = cell_type(2, "leaf"), cell_type(3, "inner", 2)
CELLS = (CHAIN, LOOP, LEAF, INNER)
FACTS = ("arrived_s", "began_s", "deadline_s", "model", "priority", "open", "left", "done", "width")


class Asking(CellularPolicy):
    """Asks for the table before the `first`-th task, and before all that follow; keeps what it then says."""

    watches_requests: ClassVar[bool] = True

    def __init__(self, first: int, *, node_by_node: bool = False) -> None:
        super().__init__(max_steps=3)
        self.node_by_node = node_by_node  # type: ignore[misc]
        self.first = first
        self.seen: list[dict[str, Any]] = []

    def begins_on_arrival(self, view: ReadyView) -> bool:
        return True

    def rank(self, view: ReadyView) -> Any:
        self.seen.append({})
        if len(self.seen) > self.first:
            table = view.requests
            slots = table.in_flight
            self.seen[-1] = {fact: getattr(table, fact)[slots].tolist() for fact in FACTS}
            self.seen[-1]["in flight"] = slots.tolist()
        return super().rank(view)


def play(policy: Any, programs: Any, arrived_s: Any, deadlines: Any, cancelled: Any, **driver: Any) -> Harness:
    core = Harness(list(CELLS), policy=policy, tells_time=True, **driver)
    for request, (program, at_s, deadline_s) in enumerate(zip(programs, arrived_s, deadlines, strict=True)):
        core.arrive(request, program, at_s, deadline_s=None if deadline_s is None else at_s + deadline_s)
    for request, at_s in cancelled:
        core.cancel(request, at_s)
    return core.run()


CLOSED = st.one_of(
    st.integers(1, 9).map(lambda length: chain(CHAIN, length)),
    st.integers(2, 6).map(lambda leaves: complete_tree(LEAF, INNER, leaves)),
)
LOOPS = st.integers(1, 9).map(lambda length: chain(LOOP, length, open_ended=True))


def requests(programs: Any) -> Any:
    one = st.tuples(programs, st.integers(0, 12).map(float), st.none() | st.integers(1, 40).map(float))
    return st.lists(one, min_size=1, max_size=6)


@settings(max_examples=40)
@given(
    requests(CLOSED) | requests(CLOSED | LOOPS),
    st.integers(1, 20),
    st.lists(st.integers(0, 12), max_size=2),
    st.booleans(),
    st.fixed_dictionaries({"num_workers": st.integers(1, 2), "run_ahead": st.integers(0, 1)}),
)
def test_a_policy_sees_the_same_whenever_it_first_asks(
    sent: Any, first: int, gives_up: Any, node_by_node: bool, driver: Any
) -> None:
    programs, arrived_s, deadlines = zip(*sorted(sent, key=lambda one: one[1]), strict=True)
    cancelled = [(at % len(programs), at + 0.5) for at in gives_up if at + 0.5 > arrived_s[at % len(programs)]]
    early, late = Asking(0, node_by_node=node_by_node), Asking(first, node_by_node=node_by_node)
    play(early, programs, arrived_s, deadlines, cancelled, **driver)
    play(late, programs, arrived_s, deadlines, cancelled, **driver)
    assert len(late.seen) == len(early.seen)
    assert late.seen[first:] == early.seen[first:]


class Finishing(Asking):
    """Asks only when a request is answered."""

    def __init__(self) -> None:
        super().__init__(first=1 << 62)
        self.done: list[int] = []

    def requests_finished(self, view: ReadyView, slots: Any) -> None:
        assert not view.requests.left[slots].any()
        self.done += view.requests.done[slots].sum(axis=1).tolist()


def test_the_last_facts_of_an_answered_request_are_there_if_nobody_has_asked_before() -> None:
    policy = Finishing()
    play(policy, [chain(CHAIN, 5), complete_tree(LEAF, INNER, 4)], [0.0, 100.0], [None, None], [])
    assert policy.done == [5, 7]


@pytest.mark.parametrize(("deadline_s", "asks"), [(None, False), (1e6, True)])
def test_auto_asks_for_no_table_while_requests_are_chains_of_one_type_without_deadlines(deadline_s, asks) -> None:
    core = Harness([CHAIN], policy=AutoPolicy(), tells_time=True)
    for request in range(8):
        core.arrive(request, chain(CHAIN, 6), 0.5 * request, deadline_s=deadline_s)
    core.run(until_s=4.0)
    assert core.scheduler.num_requests
    assert core.scheduler.state.watched.is_kept == asks
