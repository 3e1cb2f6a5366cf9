"""Greedy decoders: a recurrent step of the last token, then the choice of the next, in one call for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import BoundCell, bind
from batchmaker.compile.loops import ChainLoop
from batchmaker.engine.stop_tests import StopTests
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.greedy import GreedyLoop
from batchmaker.kernels.cpu.loop import LoopTask
from batchmaker.model.scope import OpenLoop

HIDDEN, TOKENS = 16, 5
KINDS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
NONE = np.zeros(0, np.int64)


class Speaker(nn.Module):
    """(token, *state) -> (next token, *state), or with the token last; `last` for the order."""

    def __init__(self, kind: str, *, last: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(TOKENS, 4), KINDS[kind](4, HIDDEN)
        self.out, self.last = nn.Linear(HIDDEN, TOKENS, bias=bias), last

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        token, *state = (given[-1], *given[:-1]) if self.last else given
        made = self.cell(self.embedding(token), tuple(state) if len(state) > 1 else state[0])
        made = made if isinstance(made, tuple) else (made,)
        chosen = self.out(made[0]).argmax(-1)
        return (*made, chosen) if self.last else (chosen, *made)


def bound(module: nn.Module, kind: str, *, last: bool = False, dtype: str = "float32") -> BoundCell:
    torch.manual_seed(1)
    for weight in module.parameters():
        weight.data = torch.randn_like(weight).to(getattr(torch, dtype))
    token, h = ValueSpec((), "int64", TOKENS), ValueSpec((HIDDEN,), dtype)
    state = (h, h) if kind == "lstm" else (h,)
    inputs = (*state, token) if last else (token, *state)
    return bind(module.eval(), inputs, name="speak", num_step_inputs=0)


def greedy_loop(cell: BoundCell) -> GreedyLoop:
    assert isinstance(cell.loop, GreedyLoop)
    return cell.loop


def one_by_one(cell: BoundCell, first: int, steps: int, until: int | None, *, last: bool) -> list[int]:
    """Return what a chain says that begins with a token and zeros."""
    state = [torch.zeros(1, *spec.shape, dtype=getattr(torch, spec.dtype)) for spec in cell.inputs]
    state[-1 if last else 0] = torch.tensor([first])
    said: list[int] = []
    for _ in range(steps):
        state = list(cell.call(tuple(state)))
        said.append(int(state[-1 if last else 0]))
        if said[-1] == until:
            break
    return said


def task_of(loop: GreedyLoop, firsts: Sequence[int], steps: Sequence[int], *, last: bool) -> tuple[LoopTask, Any, Any]:
    """Return a task of chains that begin with these tokens, the longest first, its nodes, and its chains' positions.

    The nodes of a chain follow each other.
    """
    running = [sum(count > step for count in steps) for step in range(max(steps))]
    ends = np.cumsum(running)
    lanes = np.concatenate([np.arange(n) for n in running])
    bases = np.cumsum([0, *steps[:-1]])
    nodes = np.concatenate([bases[:n] + step for step, n in enumerate(running)])
    tokens = np.array(firsts, np.int64)
    moves = np.zeros((loop.num_state, len(firsts)), np.int64)
    token = loop.num_state - 1 if last else 0
    moves[token] = 1
    rows = np.zeros_like(moves)
    rows[token] = np.arange(len(firsts))
    fetched = np.full(len(lanes), -7, np.int64)
    everywhere = np.arange(len(lanes))
    task = LoopTask(
        ends, len(firsts), np.ones(len(ends), np.bool_), lanes, np.array([0, tokens.ctypes.data]), NONE, NONE, (),
        np.arange(len(firsts)), moves, rows, loop.zeros(len(firsts)), NONE, NONE, NONE, (everywhere,),
        (len(loop.outputs) - 1 if last else 0,), (fetched,),
    )  # fmt: skip
    return task, nodes, tokens


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    chains=st.lists(st.tuples(st.integers(0, TOKENS - 1), st.integers(1, 7)), min_size=1, max_size=9),
    until=st.integers(0, TOKENS - 1),
    last=st.booleans(),
    tested=st.booleans(),
)
@example(kind="gru", chains=[(token % TOKENS, 5) for token in range(70)], until=2, last=False, tested=True)
def test_a_task_says_what_its_chains_say_alone(
    kind: str, chains: list[tuple[int, int]], until: int, last: bool, tested: bool
) -> None:
    cell = bound(Speaker(kind, last=last), kind, last=last)
    loop = greedy_loop(cell)
    chains = sorted(chains, key=lambda chain: -chain[1])
    firsts, steps = zip(*chains, strict=True)
    task, nodes, _kept = task_of(loop, firsts, steps, last=last)
    tests = StopTests()
    tests.enter([(int(first), OpenLoop(0, count - 1, until)) for first, count in zip(nodes, steps, strict=False)])
    ended = loop.run(task, nodes, tests if tested else None)
    assert ended is not None
    stopped, skipped = ended
    for lane, (first, count) in enumerate(chains):
        mine = np.flatnonzero(task.lanes == lane)
        expected = one_by_one(cell, first, count, until if tested else None, last=last)
        said = task.fetched[0][mine].tolist()
        assert said == expected + [0] * (count - len(expected))
        assert skipped[mine].tolist() == [step >= len(expected) for step in range(count)]
        assert stopped[mine].tolist() == [tested and step == len(expected) - 1 for step in range(count)]


@pytest.mark.slow
def test_tokens_of_bfloat16_are_chosen_by_rounded_scores() -> None:
    cell = bound(Speaker("gru"), "gru", dtype="bfloat16")
    task, nodes, _kept = task_of(greedy_loop(cell), range(TOKENS), [4] * TOKENS, last=False)
    assert greedy_loop(cell).run(task, nodes, None) is not None
    expected = [one_by_one(cell, first, 4, None, last=False) for first in range(TOKENS)]
    assert [task.fetched[0][task.lanes == lane].tolist() for lane in range(TOKENS)] == expected


def test_a_token_without_a_row_is_left_to_the_steps() -> None:
    loop = greedy_loop(bound(Speaker("gru"), "gru"))
    task, nodes, _kept = task_of(loop, [1, TOKENS], [2, 2], last=False)
    assert loop.run(task, nodes, None) is None


def test_a_stop_test_that_is_called_is_left_to_the_steps() -> None:
    loop = greedy_loop(bound(Speaker("gru"), "gru"))
    task, nodes, _kept = task_of(loop, [1, 2], [2, 2], last=False)
    tests = StopTests()
    tests.enter([(0, OpenLoop(0, 1, 3)), (2, OpenLoop(0, 1, lambda values: values > 3))])
    assert loop.run(task, nodes, tests) is None
    assert (task.fetched[0] == -7).all()


def test_the_first_of_the_best_tokens_is_chosen() -> None:
    speaker = Speaker("gru", bias=False)
    cell = bound(speaker, "gru")
    speaker.out.weight.data[:] = speaker.out.weight.data[:1]
    cell = bind(speaker, cell.inputs, name="speak", num_step_inputs=0)
    task, nodes, _kept = task_of(greedy_loop(cell), [3], [3], last=False)
    assert greedy_loop(cell).run(task, nodes, None) is not None
    assert task.fetched[0].tolist() == [0, 0, 0]


class Other(Speaker):
    """Chooses by something else than a linear layer of the new state."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        token, h = given
        made = self.cell(self.embedding(token), h)
        return self.out(made + h).argmax(-1), made


class Scoring(Speaker):
    """Gives the scores too."""

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        token, h = given
        made = self.cell(self.embedding(token), h)
        scores = self.out(made)
        return scores, scores.argmax(-1), made


@pytest.mark.parametrize("module", [Other, Scoring])
def test_other_choices_are_computed_step_by_step(module: Any) -> None:
    assert bound(module("gru"), "gru").loop is None


class Spelling(bm.Model):
    """A number's own words, until the end or 12 of them; answers with them and the last state's sum."""

    example_request = 3

    def __init__(self) -> None:
        torch.manual_seed(3)
        speaker = Speaker("gru")
        for weight in speaker.parameters():
            weight.data.normal_()
        self.speak = bm.Cell(speaker.eval(), max_batch=4, host_outputs=[0])

    def unfold(self, first: int) -> Any:
        said, h = self.speak.loop((first % TOKENS, [first / 10.0] * HIDDEN), until=TOKENS - 1, max_steps=12)
        return said.steps, h


@pytest.mark.parametrize("policy", ["cellular:budget_ms=1000", "cellular:max_steps=5", "cellular"])
def test_an_engine_of_decoders_answers_as_one_request_alone(policy: str) -> None:
    model = Spelling()
    with bm.Engine(model, policy=policy) as engine:
        found = engine.map(list(range(40)), progress=False)
        again = engine.map(list(range(40))[::-1], progress=False)[::-1]
    speaker = model.speak.module
    for first, (said, h) in enumerate(found):
        token, state = torch.tensor([first % TOKENS]), torch.full((1, HIDDEN), first / 10.0)
        expected: list[int] = []
        with torch.no_grad():
            while len(expected) < 12 and TOKENS - 1 not in expected:
                token, state = speaker(token, state)
                expected.append(int(token))
        assert said.tolist() == again[first][0].tolist() == expected
        torch.testing.assert_close(h, state[0], atol=1e-5, rtol=1e-5)


class Speech(Spelling):
    """As Spelling, of so many words, or until one of them."""

    def unfold(self, first: int, words: int, until: int | None) -> Any:  # type: ignore[override]
        said, _h = self.speak.loop((first % TOKENS, [first / 10.0] * HIDDEN), until=until, max_steps=words)
        return said.steps


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_decoders_that_end_at_a_token_beside_others_that_do_not_answer_as_alone(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChainLoop, "fastest", lambda loop, _batch: loop.loop)
    asked: list[dict[str, Any]] = [{"first": n, "words": 300, "until": TOKENS} for n in range(2)]  # which none says
    asked += [{"first": n, "words": 300, "until": TOKENS - 1} for n in range(1)]
    asked += [{"first": n, "words": 60, "until": None} for n in range(30)]
    model = Speech()
    model.example_request = asked[0]  # type: ignore[assignment]
    with bm.Engine(model, "cellular:budget_ms=1000", workers=workers, threads=1) as engine:
        found = engine.map(asked, progress=False)
        assert engine.heartbeat.alive
    for request, said in zip(asked, found, strict=True):
        token, state = torch.tensor([request["first"] % TOKENS]), torch.full((1, HIDDEN), request["first"] / 10.0)
        expected: list[int] = []
        with torch.no_grad():
            while len(expected) < request["words"] and request["until"] not in expected:
                token, state = model.speak.module(token, state)
                expected.append(int(token))
        assert said.tolist() == expected
