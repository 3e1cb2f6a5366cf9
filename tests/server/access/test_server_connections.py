"""Connections that do nothing keep nobody out, and one client cannot have them all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchmaker.server.access.connections import Connections


class Counted:
    """A connection that says when it was closed for being idle."""

    def __init__(self):
        self.closed_idle = False

    def close_idle(self):
        assert not self.closed_idle
        self.closed_idle = True


def test_who_comes_takes_the_place_of_the_one_idle_longest():
    connections = Connections(2, 2)
    first, second, third = Counted(), Counted(), Counted()
    assert connections.opened(first, "a") is None
    assert connections.opened(second, "a") is None
    connections.busy(first)
    connections.idle(first)
    assert connections.opened(third, "b") is None
    assert (first.closed_idle, second.closed_idle, third.closed_idle) == (False, True, False)
    assert (connections.num_open, connections.num_closed_idle) == (2, 1)


def test_connections_with_a_call_under_way_are_left_alone():
    connections = Connections(1, 2)
    first = Counted()
    assert connections.opened(first, "a") is None
    connections.busy(first)
    assert "as many connections are open" in (connections.opened(Counted(), "b") or "")
    assert not first.closed_idle
    connections.closed(first)
    assert connections.opened(Counted(), "b") is None


def test_one_address_has_no_more_than_one_may():
    connections = Connections(100, 2)
    first, second, third = Counted(), Counted(), Counted()
    assert connections.opened(first, "a") is None
    assert connections.opened(second, "a") is None
    assert "your address" in (connections.opened(third, "a") or "")
    assert connections.opened(Counted(), "b") is None
    assert connections.num_refused == 1
    connections.closed(third)
    connections.closed(first)
    assert connections.opened(Counted(), "a") is None


@given(
    max_open=st.integers(1, 4),
    max_of_client=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from("ocbi"), st.integers(0, 9), st.sampled_from("xyz"))),
)
def test_counts_are_right_whatever_happens(max_open: int, max_of_client: int, events: list[tuple]) -> None:
    connections = Connections(max_open, max_of_client)
    held: dict[Counted, str] = {}
    busy: set[Counted] = set()
    for what, which, client in events:
        chosen = list(held)[which % len(held)] if held else None
        if what == "o":
            new = Counted()
            mine, all_busy = sum(of == client for of in held.values()), len(busy) == len(held)
            stays = connections.opened(new, client) is None
            assert stays == (mine < max_of_client and (len(held) < max_open or not all_busy))
            if stays:
                held[new] = client
        elif chosen is not None and what == "c":
            connections.closed(chosen)
            del held[chosen]
            busy.discard(chosen)
        elif chosen is not None and what == "b":
            connections.busy(chosen)
            busy.add(chosen)
        elif chosen is not None:
            connections.idle(chosen)
            busy.discard(chosen)
        assert not any(one.closed_idle for one in busy)
        held = {one: of for one, of in held.items() if not one.closed_idle}
        assert connections.num_open == len(held) <= max_open
