"""Many requests that come together, and what comes back together."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import assert_balanced
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine import Answer
from batchmaker.errors import InvalidRequestError, OptionError, QueueFullError, SequenceError, StoppedError
from insides import num_free


class Adds(nn.Module):
    """row, total -> total + row."""

    def forward(self, row: Tensor, total: Tensor) -> Tensor:
        return total + row


class Totals(bm.Model):
    """Running totals of rows [n, width]: all of them, and the last."""

    def __init__(self, width: int = 3) -> None:
        self.add = bm.Cell(Adds(), max_batch=16)
        self.width = width

    def unfold(self, rows: Any) -> Any:
        total = self.add.run(rows, ([0.0] * self.width,))
        return {"all": total.steps, "last": total}

    def unfold_chunk(self, rows: Any, state: Any) -> Any:
        total = self.add.run(rows, ([0.0] * self.width,) if state is None else state)
        return total, (total,)


ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
LENGTHS = [1, 7, 2, 20, 7, 5, 18]


def expected() -> list[np.ndarray[Any, Any]]:
    return [part.cumsum(0) for part in np.split(ROWS, np.cumsum(LENGTHS)[:-1])]


@pytest.fixture
def engine() -> Any:
    with bm.Engine(Totals(), threads=1) as engine:
        yield engine
    assert_balanced(engine)


def same(results: list[Any]) -> bool:
    pairs = list(zip(results, expected(), strict=True))
    return all(np.allclose(got["all"], want, atol=1e-5) and np.allclose(got["last"], want[-1]) for got, want in pairs)


def test_map_takes_lists_arrays_tensors_iterators_and_ragged_ones(engine: bm.Engine) -> None:
    parts = np.split(ROWS, np.cumsum(LENGTHS)[:-1])
    for _ in range(3):  # the second request of a shape proves its template
        assert same(engine.map(parts, progress=False))
        assert same(engine.map(iter(parts), progress=False))
        assert same(engine.map(bm.Ragged(ROWS, LENGTHS), progress=False))
        assert same(engine.map(bm.Ragged(torch.from_numpy(ROWS), LENGTHS), progress=False))
        assert same([answer.result(60) for answer in engine.submit_many(bm.Ragged(ROWS, LENGTHS))])
        for whole in (ROWS.reshape(12, 5, 3), torch.from_numpy(ROWS).reshape(12, 5, 3)):
            for rows, got in zip(whole, engine.map(whole, progress=False), strict=True):
                assert np.allclose(got["last"], rows.sum(0), atol=1e-5)


def test_map_gives_ragged_results_in_few_tensors(engine: bm.Engine) -> None:
    for _ in range(3):
        found = engine.map(bm.Ragged(ROWS, LENGTHS), progress=False, ragged=True)
        assert found["all"].lengths.tolist() == LENGTHS
        assert np.allclose(found["all"].values, np.concatenate(expected()), atol=1e-5)
        assert found["last"].lengths.tolist() == [3] * len(LENGTHS)
        assert np.allclose(found["last"].values.reshape(-1, 3), [part[-1] for part in expected()], atol=1e-5)


@pytest.mark.parametrize("width", [3, 300])
def test_no_result_carries_another_along(width: int) -> None:
    rows = np.ones((40, 5, width), np.float32)
    with bm.Engine(Totals(width), threads=1) as engine:
        for _ in range(3):
            for result in engine.map(rows, progress=False):
                assert len(pickle.dumps(result["last"])) < 4 * width + 1000
                assert result["last"].untyped_storage().nbytes() == 4 * width
                assert result["all"].untyped_storage().nbytes() == 20 * width


def test_requests_that_are_submitted_together_are_answered_or_fail_alone(engine: bm.Engine) -> None:
    requests: list[Any] = [ROWS[:4], "wrong", ROWS[:2], np.zeros((2, 9), np.float32), ROWS[:4]]
    for _ in range(3):
        answers = engine.submit_many(requests, priority=1)
        assert [type(answer.exception(60)) for answer in answers[::2]] == [type(None)] * 3
        assert all(isinstance(answer.exception(60), InvalidRequestError) for answer in answers[1::2])
        assert np.allclose(answers[4].result()["last"], ROWS[:4].sum(0), atol=1e-5)
    assert engine.submit_many([]) == []


def test_requests_that_are_submitted_together_are_read_from_memory_of_their_own(engine: bm.Engine) -> None:
    requests = [ROWS[:5].copy() for _ in range(8)]
    answers = engine.submit_many(requests)
    for request in requests:
        request[:] = np.nan
    assert all(np.allclose(answer.result(60)["last"], ROWS[:5].sum(0), atol=1e-5) for answer in answers)


def test_answers_of_requests_that_came_together_are_awaited_and_cancelled_one_by_one(engine: bm.Engine) -> None:
    async def main() -> None:
        answers = engine.submit_many([ROWS[:n] for n in (1, 2, 3)] * 5)
        cancelled = answers[1].cancel()
        for place, answer in enumerate(answers):
            if place != 1 or not cancelled:
                assert np.allclose((await answer)["last"], ROWS[: 1 + place % 3].sum(0), atol=1e-5)

    asyncio.run(main())


def test_either_all_find_room_or_none_is_accepted() -> None:
    with bm.Engine(Totals(), threads=1, max_queue=4) as engine:
        with pytest.raises(QueueFullError):
            engine.submit_many([ROWS[:1]] * 5)
        answers = engine.submit_many([ROWS[:1]] * 4)
        assert len([answer.result(60) for answer in answers]) == 4
    assert num_free(engine) == 4  # type: ignore[union-attr]


def test_who_may_wait_for_room_submits_more_than_there_is() -> None:
    with bm.Engine(Totals(), threads=1, max_queue=4, when_full="wait") as engine:
        answers = engine.submit_many([ROWS[:n] for n in range(1, 20)])
        assert all(np.allclose(a.result(60)["last"], ROWS[: n + 1].sum(0), atol=1e-4) for n, a in enumerate(answers))

        async def main() -> list[Answer]:
            return engine.submit_many([ROWS[:1]] * 5)

        with pytest.raises(QueueFullError):  # an event loop is never blocked
            asyncio.run(main())
    assert num_free(engine) == 4  # type: ignore[union-attr]
    with pytest.raises(StoppedError):
        engine.submit_many([ROWS[:1]])


def test_chunks_of_many_sequences_go_together_and_each_sequence_goes_on_alone(engine: bm.Engine) -> None:
    sequences = [engine.open_sequence() for _ in range(5)]
    for begin in range(0, 40, 10):
        pairs = [(one, ROWS[begin + i : begin + 5]) for i, one in enumerate(sequences)]
        pairs += [(one, ROWS[begin + 5 : begin + 10 - i]) for i, one in enumerate(sequences)]
        answers = engine.submit_chunks(pairs)
        for i, last in enumerate(answers[5:]):
            mine = [part for at in range(0, begin + 10, 10) for part in ROWS[at + i : at + 10 - i]]
            assert np.allclose(last.result(60), np.sum(mine, 0), atol=1e-4)
        assert all(answer.exception() is None for answer in answers)
    sequences[2].close()
    for one, other in ((sequences[0], sequences[2]), (sequences[2], sequences[0])):
        with pytest.raises(SequenceError, match="the sequence has ended: it was closed"):
            engine.submit_chunks([(one, ROWS[:1]), (other, ROWS[:1])])
    assert engine.num_in_flight == 0
    for one in sequences:
        one.close()


def test_wrong_options_are_refused_at_once(engine: bm.Engine) -> None:
    with pytest.raises(OptionError):
        engine.submit_many([ROWS[:1]], priority=0.5)  # type: ignore[arg-type]
