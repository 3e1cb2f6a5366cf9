"""A chunk that loses its result after it was computed: its sequence is in the state from before it, to the row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_models import Totals, assert_balanced
from hypothesis import given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.core.commands import Reply
from batchmaker.core.layout import NODES
from batchmaker.engine.answer import Answer
from batchmaker.errors import CancelledError, CellError, SequenceError
from insides import scheduler, submit_ticket
from waiting import wait_until


class Moments:
    """Calls a function in the engine's thread when a request has been computed and is not answered yet."""

    def __init__(self, engine: bm.Engine) -> None:
        self.then: Callable[[], object] | None = None
        engine.driver.record = self._seen  # type: ignore[attr-defined]

    def _seen(self, events: Any, commands: Any) -> None:
        if self.then is not None and any(isinstance(command, Reply) for command in commands):
            then, self.then = self.then, None
            then()


class Held(Totals):
    """Totals whose state may go on unchanged (an empty list)."""

    def unfold_chunk(self, xs: Any, state: Any) -> Any:
        if not xs:
            return list(state), state
        total = super().unfold_chunk(xs, None if state is None else state[0])[0]
        return total, (total, *(() if state is None else state[:1]))


def cancelled_as_it_is_answered(moments: Moments, submit: Callable[[], Answer]) -> tuple[Answer, list[bool]]:
    """Submit a chunk, and cancel it between its computation and its answer. Returns what `cancel` said, too."""
    said: list[bool] = []
    answers: list[Answer] = []
    submitted, cancelled = threading.Event(), threading.Event()

    def cancel() -> None:
        assert submitted.wait(60)
        said.append(answers[0].cancel())
        cancelled.set()

    moments.then = cancel
    answers.append(submit())
    submitted.set()
    assert cancelled.wait(60)
    return answers[0], said


@pytest.mark.parametrize("policy", ["cellular", "lazy"])
def test_a_chunk_cancelled_between_its_computation_and_its_answer_leaves_the_state_before_it(policy: str) -> None:
    with bm.Engine(Totals(), policy, threads=1) as engine, engine.open_sequence() as sequence:
        moments = Moments(engine)
        assert float(sequence.submit([1]).result(60)) == 1
        answer, said = cancelled_as_it_is_answered(moments, lambda: sequence.submit([10]))
        assert said == [True]
        with pytest.raises(CancelledError):
            answer.result(60)
        with pytest.raises(SequenceError, match=r"chunk 1 .* resume\(\)"):
            sequence.submit([5]).result(60)
        sequence.resume()
        assert float(sequence.submit([5]).result(60)) == 6
        assert scheduler(engine).num_rows == 1
    assert_balanced(engine)


def test_the_first_chunk_cancelled_so_leaves_nothing() -> None:
    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence() as sequence:
        moments = Moments(engine)
        _, said = cancelled_as_it_is_answered(moments, lambda: sequence.submit([10]))
        assert said == [True]
        sequence.resume()
        assert float(sequence.submit([5]).result(60)) == 5
    assert_balanced(engine)


def test_a_chunk_cancelled_after_its_answer_has_been_answered_and_the_sequence_goes_on() -> None:
    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence() as sequence:
        answer = sequence.submit([10])
        assert float(answer.result(60)) == 10
        assert answer.cancel() is False
        assert float(sequence.submit([5]).result(60)) == 15
    assert_balanced(engine)


def test_a_stream_that_cannot_be_handed_over_leaves_the_state_before_it() -> None:
    def refuse(value: Any) -> None:
        raise ValueError("full")

    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence() as sequence:
        assert float(sequence.submit([1]).result(60)) == 1
        ticket = sequence.ticket([10])
        ticket.on_value = refuse
        answer = submit_ticket(engine, ticket)
        with pytest.raises(CellError, match="what it streams to raised ValueError: full"):
            answer.result(60)
        sequence.resume()
        assert float(sequence.submit([5]).result(60)) == 6
    assert_balanced(engine)


@pytest.fixture(scope="module")
def held() -> Iterator[tuple[bm.Engine, Moments]]:
    with bm.Engine(Held(max_batch=4), threads=1) as engine:
        yield engine, Moments(engine)
    assert_balanced(engine)


CHUNKS = st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=3), st.booleans()), max_size=12)


@settings(max_examples=40, deadline=None)
@given(chunks=CHUNKS)
def test_whichever_chunks_lose_their_answers_the_others_are_answered_as_if_those_had_never_come(
    held: tuple[bm.Engine, Moments], chunks: list[tuple[list[int], bool]]
) -> None:
    """The flag cancels a chunk at the moment of its answer. An empty chunk keeps the rows of the chunk before it."""
    engine, moments = held
    before: list[float] = []  # the values in the state
    with engine.open_sequence() as sequence:
        for xs, lost in chunks:
            if not xs and not before:
                continue
            total = sum(xs) + (before[0] if before else 0)
            after = [total, *before[:1]] if xs else before
            if lost:
                answer, said = cancelled_as_it_is_answered(moments, lambda xs=xs: sequence.submit(xs))
                assert (said, type(answer.exception(60))) == ([True], CancelledError)
                sequence.resume()
                continue
            result = sequence.submit(xs).result(60)
            assert [float(value) for value in (result if not xs else [result])] == (after if not xs else [total])
            before = after
        wait_until(lambda: scheduler(engine).num_rows == len(before))
    wait_until(lambda: scheduler(engine).num_rows == 0)
    assert scheduler(engine).state.arena.num_used(NODES) == 0
