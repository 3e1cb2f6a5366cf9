"""How sequences begin and end, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from engine_models import Gate, Sums, Totals, Turns, assert_balanced, shut

import batchmaker as bm
from batchmaker.engine.request import SequenceEnd, SequenceEnded
from batchmaker.engine.sequence import Sequence
from batchmaker.errors import (
    CancelledError,
    DeadlineError,
    ModelError,
    OptionError,
    SequenceError,
    SequenceLimitError,
    StoppedError,
)
from batchmaker.lab import zoo
from insides import scheduler
from waiting import wait_until


def test_a_sequence_that_is_idle_for_too_long_ends_and_frees_what_it_kept() -> None:
    with bm.Engine(Totals(), threads=1) as engine:
        sequence = engine.open_sequence(idle_timeout_s=0.02)
        patient = engine.open_sequence(idle_timeout_s=math.inf)
        for x in range(1, 3):
            patient.submit([x]).result(60)
        wait_until(lambda: not sequence.is_open)
        with pytest.raises(SequenceError, match=r"no chunk came for 0.02 s; open another"):
            sequence.submit([1])
        assert (engine.num_sequences, scheduler(engine).num_rows) == (1, 1)
        assert float(patient.submit([3]).result(60)) == 6
        sequence.close()
        assert engine.num_sequences == 1
        patient.close()
    assert engine.num_sequences == 0
    assert_balanced(engine)


def test_no_more_sequences_than_allowed_are_open_at_once() -> None:
    with bm.Engine(Totals(), threads=1, max_sequences=2) as engine:
        one, two = engine.open_sequence(), engine.open_sequence()
        with pytest.raises(SequenceLimitError, match=r"2 sequences are open.*max_sequences"):
            engine.open_sequence()
        one.close()
        one.close()
        with engine.open_sequence() as three:
            assert float(three.submit([1]).result(60)) == 1
            assert engine.num_sequences == 2
        two.close()
        assert engine.num_sequences == 0
    with pytest.raises(OptionError, match="max_sequences"):
        bm.Engine(Totals(), max_sequences=-1)


def test_a_closed_sequence_takes_nothing_and_its_accepted_chunks_are_answered() -> None:
    with bm.Engine(Totals(), threads=1) as engine:
        sequence = engine.open_sequence()
        futures = [sequence.submit([1]) for _ in range(20)]
        sequence.close()
        with pytest.raises(SequenceError, match="it was closed"):
            sequence.submit([1])
        assert [float(future.result(60)) for future in futures] == list(range(1, 21))
        wait_until(lambda: scheduler(engine).num_rows == 0)
    assert_balanced(engine)


def test_leaving_a_sequence_by_an_error_gives_its_chunks_up() -> None:
    gate = Gate()
    with bm.Engine(Totals(gate), threads=1) as engine:
        with pytest.raises(KeyError), engine.open_sequence() as sequence:  # noqa: PT012
            gate.opened.set()
            assert float(sequence.submit([0]).result(60)) == 0
            shut(gate)
            futures = [sequence.submit([x]) for x in (1, 2, 3)]
            assert gate.entered.wait(60)
            raise KeyError
        gate.opened.set()
        assert all(isinstance(future.exception(60), CancelledError | SequenceError) for future in futures)
    assert_balanced(engine)


def test_stop_answers_the_accepted_chunks_of_open_sequences_and_then_ends_them() -> None:
    engine = bm.Engine(Totals(), threads=1)
    sequences = [engine.open_sequence() for _ in range(3)]
    futures = [sequence.submit([1]) for _ in range(30) for sequence in sequences]
    engine.stop()
    assert [float(future.result(0)) for future in futures[-3:]] == [30.0] * 3
    assert not any(sequence.is_open for sequence in sequences)
    with pytest.raises(SequenceError, match="the engine has been stopped"):
        sequences[0].submit([1])
    with pytest.raises(StoppedError):
        engine.open_sequence()
    sequences[0].close()
    assert engine.num_sequences == 0
    assert_balanced(engine)


def fails_late(sequence: Sequence) -> None:
    assert isinstance(sequence.submit([1], deadline_ms=-1).exception(60), DeadlineError)
    sequence.close(failed=True)


@pytest.mark.parametrize(
    ("ends", "end", "said"),
    [
        (lambda sequence: sequence.finish([1]).result(60), SequenceEnd.FINISHED, "it was finished"),
        (lambda sequence: sequence.close(), SequenceEnd.CLOSED, "it was closed"),
        (lambda sequence: sequence.close(drain=False), SequenceEnd.GIVEN_UP, "it was given up"),
        (fails_late, SequenceEnd.FAILED, "a chunk of it has no result"),
        (lambda sequence: sequence.close(stopped=True), SequenceEnd.STOPPED, "what served it was stopped"),
        (lambda sequence: sequence.close(drain=False, stopped=True), SequenceEnd.STOPPED, "what served it was stopped"),
        (lambda sequence: None, SequenceEnd.STOPPED, "the engine has been stopped"),
    ],
    ids=["finished", "closed", "given up", "failed", "stopped", "stopped at once", "the engine stopped"],
)
def test_who_opened_a_sequence_is_told_once_who_ended_it_and_why(
    ends: Callable[[Sequence], object], end: SequenceEnd, said: str
) -> None:
    told: list[SequenceEnded] = []
    with bm.Engine(Totals(), threads=1) as engine:
        sequence = engine.open_sequence(on_ended=told.append)
        assert float(sequence.submit([2]).result(60)) == 2
        ends(sequence)
        assert sequence.is_open == (said == "the engine has been stopped")
    sequence.close(drain=False)
    assert [(one.end, one.said) for one in told] == [(end, said)]
    with pytest.raises(SequenceError, match=said):
        sequence.submit([1])


@pytest.mark.parametrize("workers", [1, 2])
def test_stop_without_drain_settles_every_chunk(workers: int) -> None:
    engine = bm.Engine(Turns(), threads=1, workers=workers)
    sequences = [engine.open_sequence() for _ in range(3)]
    futures = [sequence.submit(90_000) for _ in range(3) for sequence in sequences]
    wait_until(lambda: engine.stats.steps > 10)
    engine.stop(drain=False)
    expected = StoppedError | SequenceError
    assert all(isinstance(future.exception(0), expected) for future in futures)
    assert_balanced(engine)


def test_only_policies_of_cells_and_models_with_chunks_serve_sequences() -> None:
    with bm.Engine(zoo.make("lstm", vocabulary_size=40, hidden=8), "padded", threads=1) as engine:
        with pytest.raises(OptionError, match="policy 'padded' batches whole requests"):
            engine.open_sequence()
        assert engine.num_sequences == 0
    with (
        bm.Engine(Sums(), threads=1) as engine,
        pytest.raises(ModelError, match=r"Sums has no unfold_chunk\(chunk, state\)"),
    ):
        engine.open_sequence()
    with bm.Engine(Totals(), threads=1) as engine, pytest.raises(OptionError, match="idle_timeout_s"):
        engine.open_sequence(idle_timeout_s=0)
