"""Short requests that come while nothing is in flight run at once, and get what they would get in any batch."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import POISON, Poisoned, assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine import StepSeen, lone_runs
from batchmaker.errors import CancelledError, CellError, DeadlineError
from insides import lone_table_bytes

WORDS = 20
WIDTH = 4


class Word(nn.Module):
    """word, h -> h."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        return self.cell(self.embed(word), h)


class Join(nn.Module):
    """left, right -> their parent, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        parent = torch.tanh(self.both(torch.cat((left, right), 1)))
        return parent, parent.argmax(1)


class Attend(nn.Module):
    """The rows that a memory has, their number, a query -> the mean of the rows, plus the query."""

    def forward(self, rows: Tensor, number: Tensor, query: Tensor) -> Tensor:
        is_other = torch.arange(rows.shape[1]) >= number[:, None]
        return rows.masked_fill(is_other[:, :, None], 0.0).sum(1) / number[:, None] + query


class Reading(bm.Model):
    """Lists of words are chains; pairs of requests are trees of them. The result has every kind of handle."""

    def __init__(self) -> None:
        self.word = bm.Cell(Word())
        self.join = bm.Cell(Join(), max_batch=4)
        self.tag = bm.Cell(nn.Linear(WIDTH, 2))
        self.look = bm.Cell(Attend(), memory="rows")

    def unfold(self, text: Any) -> dict[str, Any]:
        numbers: list[Any] = []
        tags: list[Any] = []

        def read(part: Any) -> Any:
            if isinstance(part, list):
                h = self.word.run(part)
                tags.append(self.tag.map(h.steps)[::-1])
                return self.look(h.steps, h)
            parent, number = self.join(*map(read, part))
            numbers.append(number)
            return parent

        top = read(text)
        return {"top": top, "again": [top], "numbers": numbers, "tags": tags, "said": "read"}


@torch.no_grad()
def alone(model: Reading, text: Any) -> dict[str, Any]:
    """The same in plain PyTorch."""
    word, join, tag = model.word.module, model.join.module, model.tag.module
    numbers: list[int] = []
    tags: list[Tensor] = []

    def read(part: Any) -> Tensor:
        if isinstance(part, list):
            steps = [torch.zeros(1, WIDTH)]
            for one in part:
                steps.append(word(torch.tensor([one]), steps[-1]))
            tags.append(tag(torch.cat(steps[1:])).flip(0))
            return torch.cat(steps[1:]).mean(0, keepdim=True) + steps[-1]
        parent, number = join(*map(read, part))
        numbers.append(int(number))
        return parent

    top = read(text)[0]
    return {"top": top, "again": [top], "numbers": numbers, "tags": tags, "said": "read"}


def assert_same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got["tags"], wanted["tags"])
    torch.testing.assert_close([got["top"], *got["again"]], [wanted["top"], *wanted["again"]])
    assert (got["numbers"], got["said"]) == (wanted["numbers"], wanted["said"])


TEXT = st.recursive(
    st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=5), lambda part: st.tuples(part, part), max_leaves=4
)


@pytest.fixture(scope="module")
def reading() -> Iterator[tuple[Reading, bm.Engine]]:
    model = Reading()
    with bm.Engine(model, threads=1, workers=1) as engine:
        yield model, engine


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that ran alone, in any engine, each with whether it was computed. No request is too long."""
    ran: list[Any] = []
    compute = lone_runs.LoneRuns.compute

    def counted(*arguments: Any) -> Any:
        ran.append(compute(*arguments))
        return ran[-1]

    monkeypatch.setattr(lone_runs, "SHORT_S", 3600.0)
    monkeypatch.setattr(lone_runs.LoneRuns, "compute", counted)
    return ran


def ask(engine: bm.Engine, request: Any, times: int = 4) -> Any:
    """One after the other, so that it has a template and runs alone at last."""
    return [engine.submit(request).result(60) for _ in range(times)][-1]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.tuples(TEXT, st.sampled_from(["alone", "together", "cancelled"])), min_size=1, max_size=8))
def test_in_any_order_each_request_gets_what_plain_pytorch_computes(
    reading: tuple[Reading, bm.Engine], runs: list[Any], texts: list[tuple[Any, str]]
) -> None:
    model, engine = reading
    for text, _ in texts:
        ask(engine, text, 2)
    before, waiting = len(runs), list[tuple[Any, Any]]()
    for text, how in texts:
        if how == "alone":
            assert_same(engine.submit(text).result(60), alone(model, text))
        elif how == "together":
            waiting += [(text, answer) for answer in engine.submit_many([text] * 3)]
        else:
            answer = engine.submit(text)
            if answer.cancel():
                with pytest.raises(CancelledError):
                    answer.result(60)
    for text, answer in waiting:
        assert_same(answer.result(60), alone(model, text))
    if all(how == "alone" for _, how in texts):
        assert len(runs) == before + len(texts)
    assert all(results is not None for results in runs)


def test_the_scheduler_is_not_asked_and_steps_are_counted(reading: tuple[Reading, bm.Engine], runs: list[Any]) -> None:
    _, engine = reading
    text = ([1, 2, 3], [4])
    ask(engine, text)
    before, ran = engine.stats, len(runs)
    asked_s, cells, steps, tasks = before.scheduler_s, before.cells, before.steps, before.tasks
    ask(engine, text, 1)
    assert len(runs) == ran + 1
    assert engine.stats.scheduler_s == asked_s
    assert engine.stats.cells - cells == 4 + 4 + 2 + 1  # words, tags, looks back, a pair
    assert (engine.stats.steps > steps, engine.stats.tasks > tasks) == (True, True)


def test_more_than_a_few_requests_share_batches(reading: tuple[Reading, bm.Engine], runs: list[Any]) -> None:
    _, engine = reading
    ask(engine, [1, 2, 3])
    ran = len(runs)
    engine.map([[1, 2, 3]] * (lone_runs.MOST + 1), progress=False)
    assert len(runs) == ran


def test_a_result_carries_nothing_of_others(reading: tuple[Reading, bm.Engine], runs: list[Any]) -> None:
    _, engine = reading
    for result in (ask(engine, [5] * 30), ask(engine, [5] * 30, 1)):
        assert len(pickle.dumps(result["top"])) < 1_000
        result["top"].zero_()
        assert result["tags"][0].abs().sum() > 0
    assert len(runs) > 0


def test_a_long_request_begins_as_others_do(
    reading: tuple[Reading, bm.Engine], runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = reading
    monkeypatch.setattr(lone_runs, "SHORT_S", 0.0)
    ask(engine, [7] * 9, 8)
    assert not runs


def test_who_looks_on_sees_every_step(reading: tuple[Reading, bm.Engine], runs: list[Any]) -> None:
    _, engine = reading
    ask(engine, [1, 2])
    seen: list[StepSeen] = []
    engine.observe(seen.append)
    ran = len(runs)
    answer = engine.submit([1, 2])
    answer.result(60)
    engine.observe(None)
    assert len(runs) == ran + 1
    assert sorted(step.cell for step in seen) == ["look", "tag", "word", "word"]
    assert {request for step in seen for request in step.requests} == {answer.request_id}
    assert sum(len(step.requests) for step in seen) == 5


@pytest.mark.parametrize("policy", ["cellular", "lazy:slack=replay", "agenda"])
def test_a_policy_by_name_is_always_asked(policy: str, runs: list[Any]) -> None:
    with bm.Engine(Reading(), policy, threads=1, workers=1) as engine:
        ask(engine, [1, 2, 3], 6)
    assert not runs


class Adding(bm.Model):
    """Numbers -> their sum; a poisoned one raises."""

    def __init__(self) -> None:
        self.add = bm.Cell(Poisoned(), state=(1,))

    def unfold(self, rows: Any) -> Any:
        return self.add.run(rows)


def rows(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(-1, 1)


def test_a_request_whose_cell_raises_fails_and_others_are_served(runs: list[Any]) -> None:
    with bm.Engine(Adding(), threads=1, workers=1) as engine:
        assert ask(engine, rows(1, 2)).tolist() == [3]
        with pytest.raises(CellError, match="poison in the batch"):
            engine.submit(rows(1, POISON)).result(60)
        assert runs[-1] is None
        assert engine.submit(rows(3, 4)).result(60).tolist() == [7]
        assert runs[-1] is not None
        assert_balanced(engine)


def test_deadlines_hold(runs: list[Any]) -> None:
    with bm.Engine(Adding(), threads=1, workers=1) as engine:
        ask(engine, rows(1, 2))
        ran = len(runs)
        assert engine.submit(rows(1, 2), deadline_ms=60_000).result(60).tolist() == [3]
        assert len(runs) == ran + 1
        with pytest.raises(DeadlineError):
            engine.submit(rows(1, 2), deadline_ms=1e-6).result(60)


def test_streams_and_chunks_go_through_the_scheduler(runs: list[Any]) -> None:
    class Summing(Adding):
        def unfold(self, rows: Any) -> Any:
            return self.add.run(rows).steps

        def unfold_chunk(self, rows: Any, state: Any) -> Any:
            total = self.add.run(rows, state)
            return total, total

    with bm.Engine(Summing(), threads=1, workers=1) as engine:
        ask(engine, rows(1, 2))
        ran = len(runs)
        assert [value.tolist() for value in engine.submit(rows(1, 2), stream=True)] == [[1], [3]]
        with engine.open_sequence() as sequence:
            assert [sequence.submit(rows(1, 2)).result(60).tolist() for _ in range(5)] == [[3], [6], [9], [12], [15]]
        assert len(runs) == ran


def test_their_tables_have_room_for_a_few_requests(runs: list[Any]) -> None:
    class Mapping(bm.Model):
        def __init__(self) -> None:
            self.word, self.tag = bm.Cell(nn.Embedding(WORDS, 64)), bm.Cell(nn.Linear(64, 64))

        def unfold(self, words: Any) -> Any:
            return self.tag.map(self.word.map(words))

    with bm.Engine(Mapping(), threads=1, workers=1) as engine:
        for length in (5, 9, 17):
            ask(engine, [7] * length)
        assert runs
        assert lone_table_bytes(engine) < 4 << 20


def test_tasks_are_kept_of_so_many_templates(
    reading: tuple[Reading, bm.Engine], runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = reading
    monkeypatch.setattr(lone_runs, "MOST_KEPT", 2)
    for length in itertools.chain(range(1, 7), range(1, 7)):
        assert_same(ask(engine, [3] * length), alone(model, [3] * length))


def test_an_engine_that_begins_anew_runs_requests_alone_again(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with bm.Engine(Adding(), threads=1, workers=1) as engine:
        ask(engine, rows(1, 2))
        poll, failures = type(engine.driver).poll, [RuntimeError("injected here")]

        def failing(driver: Any) -> None:
            if failures:
                raise failures.pop()
            poll(driver)

        monkeypatch.setattr(type(engine.driver), "poll", failing)
        assert ask(engine, rows(1, 2), 1).tolist() == [3]
        assert engine.stats.restarts == 1
        ran = len(runs)
        assert ask(engine, rows(1, 2)).tolist() == [3]
        assert len(runs) > ran


def test_a_memory_is_that_of_the_request(reading: tuple[Reading, bm.Engine], runs: list[Any]) -> None:
    model, engine = reading
    ask(engine, [1, 2, 3])
    ran = len(runs)
    for words in ([4, 5, 6], [7, 8, 9], [1, 2, 3]):
        assert_same(engine.submit(words).result(60), alone(model, words))
    assert len(runs) == ran + 3
