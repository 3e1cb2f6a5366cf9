"""An unfold function step by step: what it may return, wait for and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from unfolding_forms import Begin, add, look, run, yield_all

from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.model.unfolding import Unfolding, end_of_loop
from insides import recorder_of


def fetched(unfolding: Unfolding) -> list[tuple[int, int]]:
    return [(int(node), fetch.output) for fetch in unfolding.graph.fetches for node in fetch.nodes]


# --- what it may return --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (lambda m: add(m), [0.0]),
        (lambda m: (add(m), add(m)), ([0.0], [10.0])),
        (lambda m: [add(m), "kept", None, 3], [[0.0], "kept", None, 3]),
        (lambda m: {"a": add(m), "b": [add(m)]}, {"a": [0.0], "b": [[10.0]]}),
        (lambda m: Pair(add(m), 2), Pair([0.0], 2)),
        (lambda m: run(m).steps, [[0.0], [10.0], [20.0]]),
        (lambda m: run(m).steps[::-2], [[20.0], [0.0]]),
        (lambda m: None, None),
        (lambda m: "nothing computed", "nothing computed"),
    ],
    ids=["value", "tuple", "list with data", "dict", "named tuple", "sequence", "slice", "nothing", "data"],
)
def test_values_anywhere_in_the_result_are_replaced_and_all_else_is_kept(
    begin: Begin, request_: Callable[[Any], Any], wanted: Any
) -> None:
    unfolding = begin(request_)
    result = unfolding.result(look)
    assert type(result) is type(wanted) or isinstance(result, Tensor)
    assert listed(result) == wanted
    assert not unfolding.open
    assert unfolding.awaited == []


def test_a_request_leaves_nothing_behind_that_only_the_collector_of_garbage_would_find(begin: Begin) -> None:
    gc.disable()
    try:
        unfolding = begin(lambda m: [add(m, total=add(m)), run(m)])
        recorder = weakref.ref(recorder_of(unfolding))
        del unfolding
        assert recorder() is None
    finally:
        gc.enable()


def listed(structure: Any) -> Any:
    """The structure with tensors as lists."""
    if isinstance(structure, Tensor):
        return structure.tolist()
    if isinstance(structure, dict):
        return {key: listed(item) for key, item in structure.items()}
    if isinstance(structure, tuple | list):
        items = [listed(item) for item in structure]
        return type(structure)(*items) if isinstance(structure, Pair) else type(structure)(items)
    return structure


def test_only_what_is_returned_travels_to_the_host(begin: Begin) -> None:
    def request(m: Any) -> Any:
        values = [add(m) for _ in range(4)]
        return [values[1], values[3], values[1]]

    assert fetched(begin(request)) == [(1, 0), (3, 0)]


def test_a_single_number_is_a_python_number_in_a_result_and_when_waited_for(begin: Begin, wait: Begin) -> None:
    def lookup(node: int, output: int) -> Any:
        return 7

    result = begin(lambda m: m.step(1, [0.0])[0]).result(lookup)
    assert (type(result), result) == (int, 7)
    unfolding = wait(lambda m: yield_all(m.step(1, [0.0])[0]))
    sent = unfolding.resume(lookup)
    assert (type(sent), sent) == (int, 7)


def test_the_steps_of_a_loop_end_where_it_ended(begin: Begin) -> None:
    unfolding = begin(lambda m: m.step.loop((0, [0.0]), until=2, max_steps=5)[0].steps)

    def lookup(node: int, output: int) -> Any:
        if node > 1:
            raise KeyError(node)
        return node + 1

    assert unfolding.result(lookup).tolist() == [1, 2]
    (loop,) = unfolding.loops.values()
    assert (loop.first, loop.last, loop.until) == (0, 4, 2)


def test_the_end_of_a_loop_is_looked_up_wherever_it_ended(begin: Begin) -> None:
    unfolding = begin(lambda m: m.step.loop((0, [0.0]), until=2, max_steps=5)[1])
    asked: list[tuple[int, int]] = []

    def lookup(node: int, output: int) -> Tensor:
        asked.append((node, output))
        return torch.zeros(1)

    unfolding.result(lookup)
    assert asked == [(end_of_loop(4), 1)]


def test_what_streams_is_told_by_the_result(begin: Begin, wait: Begin) -> None:
    value, sequence = begin(add), begin(lambda m: run(m).steps)
    assert (value.streams_result, value.streamed_sequence) == (True, None)
    assert not sequence.streams_result
    assert sequence.streamed_sequence is not None
    assert sequence.streamed_sequence.nodes.tolist() == [0, 1, 2]
    assert not wait(lambda m: yield_all(add(m))).streams_result


# --- what it may wait for ------------------------------------------------------------------------------------------


def test_a_function_that_waits_goes_on_with_what_it_waited_for(wait: Begin) -> None:
    got: list[Any] = []

    def request(m: Any) -> Any:
        got.append((yield add(m)))
        got.append((yield {"both": [add(m), add(m)], "data": 5}))
        got.append((yield run(m).steps))
        return "done"

    unfolding = wait(request)
    assert (unfolding.open, unfolding.awaited) == (True, [(0, 0)])
    assert (unfolding.graph.first, unfolding.graph.num_nodes) == (0, 1)
    assert unfolding.resume(look).tolist() == [0.0]
    assert (unfolding.open, unfolding.awaited) == (True, [(1, 0), (2, 0)])
    assert (unfolding.graph.first, unfolding.graph.num_nodes) == (1, 2)
    unfolding.resume(look)
    assert unfolding.awaited == [(3, 0), (4, 0), (5, 0)]
    unfolding.resume(look)
    assert (unfolding.open, unfolding.awaited, unfolding.graph.num_nodes) == (False, [], 0)
    assert unfolding.result(look) == "done"
    assert listed(got) == [[0.0], {"both": [[10.0], [20.0]], "data": 5}, [[30.0], [40.0], [50.0]]]


def test_without_a_result_what_was_yielded_is_the_result(wait: Begin) -> None:
    unfolding = wait(lambda m: yield_all(add(m), [add(m)]))
    unfolding.resume(look)
    unfolding.resume(look)
    assert listed(unfolding.result(look)) == [[0.0], [[10.0]]]


def test_a_function_waits_for_the_end_of_a_loop_to_have_its_last_value_or_all_its_steps(wait: Begin) -> None:
    def loop(m: Any) -> Any:
        return m.step.loop((0, [0.0]), until=2, max_steps=5)[0]

    assert wait(lambda m: yield_all(loop(m))).awaited == [(end_of_loop(4), 0)]
    assert wait(lambda m: yield_all(loop(m).steps)).awaited == [(end_of_loop(4), 0)]


def test_the_steps_of_a_loop_are_asked_for_before_waiting_or_not_at_all(wait: Begin) -> None:
    def request(m: Any, early: bool) -> Any:
        word, h = m.step.loop((0, [0.0]), until=2, max_steps=5)
        states = h.steps if early else None
        yield word
        return [word.steps, states if early else h.steps]

    unfolding = wait(lambda m: request(m, early=True))
    assert {(node, 1) for node in range(5)} <= set(fetched(unfolding))
    unfolding.resume(lambda node, output: 2)
    assert not unfolding.open
    late = wait(lambda m: request(m, early=False))
    with pytest.raises(ModelError, match=r"output 1 of a loop.*take `\.steps` before the next `yield`"):
        late.resume(lambda node, output: 2)


@pytest.mark.parametrize(
    ("yielded", "name"), [(None, "NoneType"), (3, "int"), ([], "list"), ({"a": ["b"]}, "dict"), ("word", "str")]
)
def test_waiting_for_something_that_is_no_value_is_refused(wait: Begin, yielded: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"WaitingForms\.unfold yielded {name}; yield a value of a cell"):
        wait(lambda m: yield_all(yielded))


# --- what it lets go -----------------------------------------------------------------------------------------------


def test_handles_that_a_waiting_function_drops_are_told_once(wait: Begin) -> None:
    def request(m: Any) -> Any:
        first, steps = add(m), run(m).steps
        one = steps[1]
        del steps
        yield first
        del first
        yield one
        del one
        yield add(m)

    unfolding = wait(request)
    assert unfolding.take_dropped() == ()
    unfolding.resume(look)
    assert unfolding.take_dropped() == ((0, 1),)
    assert unfolding.take_dropped() == ()
    unfolding.resume(look)
    assert unfolding.take_dropped() == ((1, 3),)


def test_values_that_a_chain_has_taken_may_be_dropped_at_once(wait: Begin) -> None:
    def request(m: Any) -> Any:
        values = [add(m), add(m)]
        end = m.add.run(values, ([0.0],))
        del values
        yield end

    unfolding = wait(request)
    assert sorted(unfolding.take_dropped()) == [(0, 1), (1, 1)]
    unfolding.resume(look)


def test_a_function_that_never_waits_notes_no_drops(begin: Begin) -> None:
    def request(m: Any) -> Any:
        add(m)
        return add(m)

    assert begin(request).take_dropped() == ()


def test_closing_lets_the_function_clean_up(wait: Begin, begin: Begin) -> None:
    cleaned: list[bool] = []

    def request(m: Any) -> Any:
        try:
            yield add(m)
        finally:
            cleaned.append(True)

    wait(request).close()
    assert cleaned == [True]
    begin(add).close()
