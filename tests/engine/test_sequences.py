"""Sequences: requests in chunks, whose state stays on the device in between."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_models import POISON, Count, Gate, Poisoned, Totals, Turns, assert_balanced, shut
from hypothesis import given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.core.commands import Read, RunTask
from batchmaker.core.layout import NODES, SUBGRAPHS
from batchmaker.core.live_streams import FRAMES
from batchmaker.errors import (
    CellError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
    SequenceError,
)
from batchmaker.lab import zoo
from insides import scheduler
from waiting import wait_until

SMALL = {"vocabulary_size": 40, "hidden": 8, "max_batch": 8}
LSTM = zoo.make("lstm", layers=2, **SMALL)
GRU = zoo.make("gru", **SMALL)


class Rounds(bm.Model):
    """Counts to the next multiple of ten in a loop that a value ends."""

    def __init__(self) -> None:
        self.count = bm.Cell(Count())

    def unfold(self, n: int) -> Any:
        return self.count(n)

    def unfold_chunk(self, chunk: Any, state: Any) -> Any:
        start = 0 if state is None else state
        value = self.count.loop((start,), until=lambda values: values % 10 == 0, max_steps=50)
        return value, value


def in_chunks(request: list[int], *cuts: int) -> list[list[int]]:
    edges = [0, *sorted(cuts), len(request)]
    return [request[a:b] for a, b in pairwise(edges) if a < b]


@pytest.mark.parametrize("policy", ["auto", "cellular", "lazy", "agenda", "depth"])
@pytest.mark.parametrize("workers", [1, 2])
def test_chunks_give_exactly_what_the_whole_gives(policy: str, workers: int) -> None:
    words = list(range(30))
    with bm.Engine({"lstm": LSTM, "gru": GRU}, policy, workers=workers, threads=1) as engine:
        for name in ("lstm", "gru"):
            with engine.open_sequence(model=name) as sequence:
                results = [sequence.submit(chunk) for chunk in in_chunks(words, 1, 2, 9, 20)]
                for result, end in zip(results, (1, 2, 9, 20, 30), strict=True):
                    whole = engine.submit(words[:end], model=name).result(60)
                    assert torch.allclose(result.result(60), whole, atol=1e-5)
    assert engine.service["lstm"].answered == engine.service["gru"].answered == 10
    assert_balanced(engine)


def test_the_state_between_chunks_stays_in_rows_and_never_travels() -> None:
    commands: list[Any] = []
    with bm.Engine(GRU, threads=1) as engine:
        engine.driver.record = lambda _, given: commands.extend(given)  # type: ignore[attr-defined]
        with engine.open_sequence() as sequence:
            for chunk in ([1, 2], [3], [4, 5, 6]):
                sequence.submit(chunk).result(60)
                assert scheduler(engine).num_rows == 1
            steps = [step for command in commands if isinstance(command, RunTask) for step in command.steps]
    assert sum(len(step.fetches) for step in steps) == 3  # the results
    assert not any(isinstance(command, Read) for command in commands)
    brought = [source for step in steps for sources in step.lanes.arriving for source in sources]
    tables = [source.table for source in brought]
    assert len(tables) == 3
    assert len(set(tables[1:])) == 1  # the first began from zeros, the others from the same state table
    assert_balanced(engine)


def test_chunks_of_many_sequences_run_in_one_batch_with_all_other_requests() -> None:
    gate = Gate()
    model = Totals(gate, max_batch=16)
    batches: list[int] = []
    rest = [0] * FRAMES  # beside live streams, it depends on the time of a step how many others run with them
    with bm.Engine(model, "cellular", threads=1) as engine:
        sequences = [engine.open_sequence() for _ in range(4)]
        begin = [sequence.submit([-1, *rest]) for sequence in sequences]
        gate.opened.set()  # also for the proof of shapes
        assert [float(future.result(60)) for future in begin] == [-1] * 4
        shut(gate)
        first = engine.submit([1])
        assert gate.entered.wait(60)
        futures = [sequence.submit([10 * i, *rest]) for i, sequence in enumerate(sequences)]
        futures += [engine.submit([7]) for _ in range(3)]
        engine.observe(lambda seen: batches.append(len(seen.requests)))
        gate.opened.set()
        assert [float(future.result(60)) for future in futures] == [-1, 9, 19, 29, 7, 7, 7]
        assert float(first.result(60)) == 1
        for sequence in sequences:
            sequence.close()
    assert max(batches) == 7
    assert_balanced(engine)


def test_functions_that_wait_go_on_from_values_and_from_plain_data() -> None:
    with bm.Engine(Turns(), threads=1) as engine:
        with engine.open_sequence() as sequence:
            assert sequence.submit(3).result(60) == [1, 2, 3]
            assert list(sequence.submit(2, stream=True)) == [4, 5]
            assert sequence.submit(0).result(60) == 5
            assert sequence.submit(0).result(60) == 5
            assert sequence.submit(1).result(60) == [6]
            assert scheduler(engine).num_rows == 1
        with engine.open_sequence() as other:
            assert other.submit(1).result(60) == [1]
    assert_balanced(engine)


@pytest.mark.parametrize("policy", ["cellular", "cellular:budget_ms=1000", "cellular:max_steps=1"])
@pytest.mark.parametrize("report_s", [0.0, 60.0], ids=["each-step-reported", "each-task-reported"])
def test_a_loop_that_a_value_ends_is_kept_where_it_ended(
    policy: str, report_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchmaker.executor.task_steps.REPORT_S", report_s)
    with (
        bm.Engine(Rounds(), policy, threads=1) as engine,
        engine.open_sequence() as sequence,
        engine.open_sequence() as other,
    ):
        assert int(other.submit(3).result(60)) == 10
        answers = [(sequence.submit(None), other.submit(None)) for _ in range(3)]
        assert [(int(one.result(60)), int(two.result(60))) for one, two in answers] == [(10, 20), (20, 30), (30, 40)]
    assert_balanced(engine)


def test_a_chunk_that_is_a_dict_fills_parameters_by_name() -> None:
    class Scaled(Totals):
        def unfold_chunk(self, xs: Any, factor: float, state: Any) -> Any:  # type: ignore[override]
            return super().unfold_chunk([factor * x for x in xs], state)

    with bm.Engine(Scaled(), threads=1) as engine, engine.open_sequence() as sequence:
        assert float(sequence.submit({"xs": [1, 2], "factor": 2}).result(60)) == 6
        with pytest.raises(InvalidRequestError, match=r"Scaled.unfold_chunk does not take this request"):
            sequence.submit({"ys": [1], "factor": 2}).result(60)


# --- chunks without a result --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cellular", "lazy"])
def test_a_failed_chunk_leaves_the_state_before_it_and_takes_those_behind_it_along(policy: str) -> None:
    with (
        bm.Engine(Totals(Poisoned("sequence")), policy, threads=1) as engine,
        engine.open_sequence() as sequence,
        engine.open_sequence() as other,
    ):
        assert float(sequence.submit([1, 2]).result(60)) == 3
        bad = sequence.submit([1, POISON, 1])
        behind = [sequence.submit([5]) for _ in range(3)]
        good = other.submit([4])
        with pytest.raises(CellError, match="poison"):
            bad.result(60)
        for future in behind:
            with pytest.raises(SequenceError, match="chunk 1 of the sequence, which was sent before, has no result"):
                future.result(60)
        assert float(good.result(60)) == 4
        wait_until(lambda: scheduler(engine).num_rows == 2)  # what each of the two has kept
        with pytest.raises(SequenceError, match=r"resume\(\)"):
            sequence.submit([7]).result(60)
        sequence.resume()
        assert float(sequence.submit([7]).result(60)) == 10
    assert engine.service["Totals"].failed == {"CellError": 1, "SequenceError": 4}
    assert_balanced(engine)


def test_a_chunk_that_cannot_be_unfolded_fails_like_any_other() -> None:
    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence() as sequence:
        assert float(sequence.submit([1]).result(60)) == 1
        with pytest.raises(InvalidRequestError, match="empty"):
            sequence.submit([]).result(60)
        sequence.resume()
        assert float(sequence.submit([1]).result(60)) == 2


def test_a_chunk_past_its_deadline_computes_nothing_and_can_be_sent_again() -> None:
    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence(deadline_ms=60_000) as sequence:
        assert float(sequence.submit([1]).result(60)) == 1
        with pytest.raises(DeadlineError):
            sequence.submit([5], deadline_ms=-1).result(60)
        sequence.resume()
        assert float(sequence.submit([5]).result(60)) == 6
    service = engine.service["Totals"]
    assert (service.with_deadline, service.given_up, service.answered) == (3, 1, 2)
    assert_balanced(engine)


def test_cancelled_chunks_leave_the_state_whether_they_ran_or_waited() -> None:
    gate = Gate()

    async def main(engine: bm.Engine) -> None:
        async with engine.open_sequence() as sequence:
            gate.opened.set()
            assert float(await sequence.submit([-3])) == -3
            shut(gate)
            chunks = [asyncio.ensure_future(sequence.submit([x])) for x in (1, 2, 3)]
            await asyncio.to_thread(gate.entered.wait, 60)
            chunks[1].cancel()
            await asyncio.sleep(0)
            gate.opened.set()
            assert float(await chunks[0]) == -2  # it was sent before the one given up
            with pytest.raises(SequenceError, match="chunk 2"):
                await chunks[2]
            sequence.resume()
            assert float(await sequence.submit([10])) == 8

    with bm.Engine(Totals(gate), threads=1) as engine:
        asyncio.run(main(engine))
    assert_balanced(engine)


def test_what_the_function_returns_must_be_a_result_and_a_state() -> None:
    class Forgetful(Totals):
        def unfold_chunk(self, xs: Any, state: Any) -> Any:
            return super().unfold_chunk(xs, state)[0]

    with (
        bm.Engine(Forgetful(), threads=1) as engine,
        engine.open_sequence() as sequence,
        pytest.raises(ModelError, match=r"Forgetful.unfold_chunk returned Value; it returns \(result, state\)"),
    ):
        sequence.submit([1]).result(60)


# --- what must always hold ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("cellular", 1), ("lazy", 1), ("cellular", 2)], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[bm.Engine]:
    policy, workers = request.param
    with bm.Engine(Totals(max_batch=4), policy, threads=1, workers=workers) as engine:
        yield engine
    assert_balanced(engine)


@settings(max_examples=40, deadline=None)
@given(
    plays=st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(1, 9), min_size=0, max_size=5), st.booleans()), max_size=25
    )
)
def test_any_interleaving_gives_what_each_sequence_alone_gives(
    engine: bm.Engine, plays: list[tuple[int, list[int], bool]]
) -> None:
    """Number 0 are plain requests; an empty chunk fails; the flag waits for the answer before going on."""
    sequences = {number: engine.open_sequence() for number in range(1, 5)}
    totals = dict.fromkeys(sequences, 0)
    asked = []
    for number, xs, waits in plays:
        if number == 0:
            future, expected = engine.submit(xs), sum(xs) if xs else None
        else:
            future = sequences[number].submit(xs)
            totals[number] += sum(xs)
            expected = totals[number] if xs else None
            if not xs:
                sequences[number].resume()
        asked.append((future, expected))
        if waits:
            future.exception(60)
    for future, expected in asked:
        if expected is None:
            assert isinstance(future.exception(60), InvalidRequestError)
        else:
            assert float(future.result(60)) == expected
    for sequence in sequences.values():
        sequence.close()
    state = scheduler(engine).state
    wait_until(lambda: scheduler(engine).num_rows == 0 and scheduler(engine).num_requests == 0)
    wait_until(lambda: not state.store.in_use and state.arena.num_used(NODES) == 0)  # freed just behind the rows


def play_long(num_chunks: int) -> list[int]:
    """One sequence of many chunks; blocks of memory in use after a fifth of them and at the end."""
    sizes = []
    with (
        bm.Engine(Totals(), threads=1) as engine,
        engine.open_sequence(idle_timeout_s=1000, deadline_ms=600_000) as sequence,
    ):
        for number in range(num_chunks):
            assert float(sequence.submit([1, 0]).result(60)) == number + 1
            arena = scheduler(engine).state.arena
            assert (scheduler(engine).num_rows, arena.num_used(NODES)) == (1, 1)
            if number + 1 in (num_chunks // 5, num_chunks):
                gc.collect()
                sizes.append(sys.getallocatedblocks())
        assert arena.counts[NODES] < 20
        assert arena.counts[SUBGRAPHS] < 20
    assert_balanced(engine)
    return sizes


def test_after_every_chunk_only_the_kept_state_is_left() -> None:
    play_long(300)


@pytest.mark.slow
def test_four_thousand_chunks_leave_memory_flat() -> None:
    early, late = play_long(4_000)
    assert late < early + 1_600  # less than a block for two chunks
