"""Beside decisions by values: memories, loops with `until`, and what a `while_loop` collected as the input of cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
import pytest
import torch
from checked_commands import CommandChecks
from engine_models import assert_balanced
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import CancelledError, DeadlineError, InvalidRequestError, ModelError, NodeLimitError
from covering import covering
from insides import list_places, scheduler, schedulers

WIDTH, WORDS, EOS, MOST = 8, 11, 0, 12


class Encode(nn.Module):
    """x, h -> h"""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.cell(x, h)


class Speak(nn.Module):
    """word, h, keys, count -> word, h, whether to go on, whether the word is even. Attention over the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(WORDS, WIDTH), nn.GRUCell(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, word: Tensor, h: Tensor, keys: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = self.cell(torch.cat((self.embed(word), look(h, keys, count)), -1), h)
        word = (7 * self.out(h)).argmax(-1)
        return word, h, word != EOS, word % 2 == 0


class Look(nn.Module):
    """h, keys, count -> h"""

    def forward(self, h: Tensor, keys: Tensor, count: Tensor) -> Tensor:
        return h + look(h, keys, count)


class Past(nn.Module):
    """word, h, past, count -> word, h. Attention over what earlier steps returned."""

    def __init__(self) -> None:
        super().__init__()
        self.speak = Speak()

    def forward(self, word: Tensor, h: Tensor, past: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.speak(word, h, past, count)[:2]


class Even(nn.Module):
    """h -> whether to take the first branch; 0 to 2."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        number = (1000 * h.sum(-1)).long()
        return number % 2 == 0, number % 3


class Post(nn.Module):
    """word, h -> a row"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, 5)

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        return self.out(torch.cat((self.embed(word), h), -1)).tanh()


def look(h: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    scores = (keys @ h[:, :, None]).squeeze(2)
    scores = scores.masked_fill(torch.arange(keys.shape[1]) >= count[:, None], -1e9)
    there = (torch.arange(keys.shape[1]) < count[:, None]).to(h.dtype)
    weights = scores.softmax(1) * there if keys.shape[1] else scores
    return (weights[:, None] @ keys).squeeze(1)


class State(NamedTuple):
    word: Any
    h: Any
    going: Any
    even: Any


class Speaker(bm.Model):
    """Encoder, then words with attention over it while a value says so. What follows is what subclasses make of it."""

    collects_even = False

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.encode, self.speak = bm.Cell(Encode(), max_batch=8), bm.Cell(Speak(), max_batch=8, memory="keys")
        self.look, self.post = bm.Cell(Look(), max_batch=8, memory="keys"), bm.Cell(Post(), max_batch=8)
        self.even, self.fold = bm.Cell(Even(), max_batch=8), bm.Cell(Encode(), max_batch=8)
        self.past = bm.Cell(Past(), max_batch=8, memory=bm.Memory("past", own=True, output=1, row=WIDTH))
        torch.manual_seed(2)
        for cell in (self.encode, self.speak, self.past):  # so that requests say different words, and many of them
            for weight in cell.module.parameters():
                nn.init.normal_(weight, std=0.6)

    def spoken(self, x: Any, most: int = MOST) -> Any:
        keys = self.encode.run(x)

        def body(state: State) -> State:
            return State(*self.speak(state.word, state.h, keys.steps))

        start = State(1, keys, True, False)
        collect = (lambda s: s.even) if self.collects_even else None
        return bm.while_loop(lambda s: s.going, body, start, max_steps=most, collect=collect)

    def said(self, x: Tensor, most: int = MOST) -> tuple[list[State], State]:
        """The same, one by one: the collected states, and the last one."""
        h, keys = torch.zeros(WIDTH), []
        for one in x:
            h = self.encode.module(one[None], h[None])[0]
            keys.append(h)
        state, found = State(torch.tensor(1), h, True, False), []
        for _ in range(most):
            if not state.going:
                break
            given = (state.word[None], state.h[None], torch.stack(keys)[None], torch.tensor([len(keys)]))
            state = State(*[part[0] for part in self.speak.module(*given)])
            if not self.collects_even or state.even:
                found.append(state)
        return found, state

    def unfold(self, x: Any) -> Any:
        return self.spoken(x).h

    def alone(self, x: Tensor) -> Any:
        return self.said(x)[1].h


class Posted(Speaker):
    """A row for each word that was said."""

    def unfold(self, x: Any) -> Any:
        last = self.spoken(x)
        return self.post.map(last.word.steps, last.h.steps)

    def alone(self, x: Tensor) -> Any:
        rows = [self.post.module(s.word[None], s.h[None])[0] for s in self.said(x)[0]]
        return torch.stack(rows) if rows else torch.zeros(0, 5)


class PostedEven(Posted):
    """A row for each even word; often none is."""

    collects_even = True


class Folded(Speaker):
    """The end of a run over the steps, from zeros and from a state; its steps; and a look back at all steps."""

    def unfold(self, x: Any) -> Any:
        last = self.spoken(x)
        zeros, again = self.fold.run(last.h.steps), self.fold.run(last.h.steps, last.h)
        return zeros, again, again.steps, self.look(last.h, last.h.steps), self.look(zeros, again.steps)

    def alone(self, x: Tensor) -> Any:
        found, last = self.said(x)
        ends, all_steps = [], []
        for first in (torch.zeros(WIDTH), last.h):
            steps = [first]
            for state in found:
                steps.append(self.fold.module(state.h[None], steps[-1][None])[0])
            ends.append(steps[-1])
            all_steps.append(steps[1:])
        looked = self.back(last.h, [state.h for state in found])
        steps = torch.stack(all_steps[1]) if found else torch.zeros(0, WIDTH)
        return (*ends, steps, looked, self.back(ends[0], all_steps[1]))

    def back(self, h: Tensor, rows: Sequence[Tensor]) -> Tensor:
        keys = torch.stack(list(rows)) if rows else torch.zeros(1, WIDTH)
        return self.look.module(h[None], keys[None], torch.tensor([len(rows)]))[0]


class FoldedEven(Folded):
    collects_even = True


def three(words: Any) -> Any:
    return words == 3


class Branches(Speaker):
    """In branches: a look at the encoder's steps, and loops with `until` and their own past; one is the request's."""

    def unfold(self, x: Any) -> Any:
        keys = self.encode.run(x)
        first = self.past.loop((2, keys), until=EOS, max_steps=5)
        is_even, which = self.even(keys)
        looked = bm.cond(is_even, lambda: self.look(keys, keys.steps[::-1]), lambda: keys)

        def later() -> Any:
            word, h = self.past.loop((1, looked), until=three, max_steps=6)
            return self.past.loop((word, h), until={0: EOS}, max_steps=4)

        found = bm.switch(which, [
            lambda: self.past.loop((1, looked), until=EOS, max_steps=7), later, lambda: (first[0], looked)
        ])  # fmt: skip
        return found, first[0].steps, self.look(found[1], [keys, looked, keys])

    def loop(self, word: Tensor, h: Tensor, ends: int, most: int) -> tuple[Tensor, Tensor, list[int]]:
        past, words = list[Tensor](), list[int]()
        for _ in range(most):
            rows = torch.stack(past) if past else torch.zeros(1, WIDTH)
            word, h = (o[0] for o in self.past.module(word[None], h[None], rows[None], torch.tensor([len(past)])))
            past.append(h)
            words.append(int(word))
            if word == ends:
                break
        return word, h, words

    def alone(self, x: Tensor) -> Any:
        keys = [torch.zeros(WIDTH)]
        for one in x:
            keys.append(self.encode.module(one[None], keys[-1][None])[0])
        h = keys[-1]
        word, _, words = self.loop(torch.tensor(2), h, EOS, 5)
        is_even, which = (part[0] for part in self.even.module(h[None]))
        looked = Folded.back(self, h, keys[:0:-1]) if is_even else h
        if which == 0:
            found = self.loop(torch.tensor(1), looked, EOS, 7)[:2]
        elif which == 1:
            found = self.loop(*self.loop(torch.tensor(1), looked, 3, 6)[:2], EOS, 4)[:2]
        else:
            found = (word, looked)
        return found, torch.tensor(words), Folded.back(self, found[1], [h, looked, h])


REQUESTS = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (1, 5, 3, 9, 2, 7, 3, 4)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.allclose(torch.as_tensor(one).float(), torch.as_tensor(other).float(), atol=1e-5)


@pytest.mark.parametrize(
    ("made", "policy"),
    covering([Speaker, Posted, PostedEven, Folded, FoldedEven, Branches], ["auto", "cellular", "depth", "agenda"]),
)
def test_answers_are_those_of_pytorch_alone(made: type[Speaker], policy: str) -> None:
    model = made()
    wanted = [model.alone(x) for x in REQUESTS]
    with bm.Engine(model, policy, threads=1) as engine:
        checks = [CommandChecks(core, every=1) for core in schedulers(engine)]
        for driver, each in zip(engine.drivers, checks, strict=True):
            driver.record = each
        for _ in range(2):  # the second time from templates
            answers = engine.map(REQUESTS, progress=False)
            assert [same(one, expected) for one, expected in zip(answers, wanted, strict=True)] == [True] * 8
        assert engine.drivers[0].templates.num_templates > 0
    assert_balanced(engine)
    assert [wrong for each in checks for wrong in each.wrong] == []


def test_the_requests_of_these_tests_collect_much_and_nothing() -> None:
    counts = [len(PostedEven().said(x)[0]) for x in REQUESTS]
    assert 0 in counts
    assert max(counts) > 2


def test_two_workers_give_the_same() -> None:
    model = Folded()
    with bm.Engine(model, threads=1, workers=2) as engine:
        answers = engine.map(REQUESTS, progress=False)
    assert [same(a, model.alone(x)) for a, x in zip(answers, REQUESTS, strict=True)] == [True] * 8


def test_a_saved_model_uses_its_collected_steps_as_before(tmp_path: Path) -> None:
    bm.save(Counting("doubled"), tmp_path / "doubled", example_request=3)
    with bm.Engine(bm.load(tmp_path / "doubled"), threads=1) as engine:
        assert [one.tolist() for one in engine.map([7, 1], progress=False)] == [[4, 8, 12], []]


def test_what_is_computed_of_collected_steps_streams_one_by_one() -> None:
    model = Posted()
    with bm.Engine(model, threads=1) as engine:
        for _ in range(2):
            for x in REQUESTS:
                found = list(engine.submit(x, stream=True))
                assert same(torch.stack(found), model.alone(x))


class Counted(nn.Module):
    """n, top -> n + 1, whether it is below top, whether it is even."""

    def forward(self, n: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return n + 1, n + 1 < top, n % 2 == 1


class Sum(nn.Module):
    """n, total -> 2 n, total + n"""

    def forward(self, n: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * n, total + n


class Counting(bm.Model):
    """Counts up to a number, and uses the even ones in one of several ways."""

    def __init__(self, what: str = "sum") -> None:
        self.count, self.sum, self.what = bm.Cell(Counted(), max_batch=8), bm.Cell(Sum(), max_batch=8), what
        if what in ("first", "until"):
            self.up = bm.Cell(Up(), max_batch=8)

    def counted(self, top: Any, collect: Any = lambda s: s[2]) -> Any:
        def body(state: Any) -> Any:
            return self.count(state[0], top)

        return bm.while_loop(lambda s: s[1], body, (0, True, False), max_steps=100_000, collect=collect)

    def unfold(self, top: Any) -> Any:
        even = self.counted(top)[0].steps
        match self.what:
            case "sum":
                return self.sum.run(even, 100)[1]
            case "last":
                return self.sum.run(even, 100)[0]
            case "doubled":
                return self.sum.run(even, 0)[0].steps
            case "both":
                return even, self.sum.map(even, even)[1]
            case "first":
                return even.at(self.up(-1)), self.sum.run(even, 0)[0].at(self.up(-1))
            case "nested":
                doubled = self.sum.run(even, 0)[0].steps
                rows, _ = self.sum.map(doubled, even)

                def body(state: Any) -> Any:
                    n, total = state[0], self.sum.run(rows, state[1])[1]
                    return (*self.count(n, 3), total)[:2], total

                (n, _), total = bm.while_loop(
                    lambda s: s[0][1], lambda s: body((s[0][0], s[1])), ((0, True), 0), max_steps=9
                )
                return bm.cond(self.count(n, 9)[1], lambda: self.sum.run(doubled, total)[1], lambda: total)
            case "two":
                return self.sum.map(even, self.counted(top)[0].steps)
            case "all":
                return self.sum.map(even, [1, 2])
            case "slice":
                return self.sum.run(even[1:], 0)
            case "tree":
                return self.sum.tree([[0, 1]], even)
            case "branch":
                return bm.cond(self.count(1, 2)[1], lambda: even, lambda: even)
            case "inside":
                return bm.cond(self.count(1, 2)[1], lambda: self.counted(top)[0].steps.at(0), lambda: even)
            case _:
                return bm.cond(self.count(1, 9)[1], lambda: self.up.loop(0, until=5, max_steps=9).steps, lambda: 0)


class Up(nn.Module):
    """n -> n + 1"""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


def evens(top: int) -> list[int]:
    return list(range(2, max(top, 1) + 1, 2))


def test_lengths_of_all_kinds_give_what_python_gives() -> None:
    tops = [1, 2, 7, 40, 300, 1, 3, 129]
    with bm.Engine({what: Counting(what) for what in ("sum", "doubled", "nested", "both")}, threads=1) as engine:
        for _ in range(2):
            sums = [engine.submit(top, model="sum") for top in tops]
            doubled = [engine.submit(top, model="doubled") for top in tops]
            nested = [engine.submit(top, model="nested") for top in tops]
            both = [tuple(one.tolist() for one in engine.submit(top, model="both").result(60)) for top in tops]
            assert both == [(evens(top), [2 * n for n in evens(top)]) for top in tops]
            assert [answer.result(60) for answer in sums] == [100 + sum(evens(top)) for top in tops]
            assert [answer.result(60).tolist() for answer in doubled] == [[2 * n for n in evens(top)] for top in tops]
            wanted = [3 * sum(4 * n for n in evens(top)) + sum(2 * n for n in evens(top)) for top in tops]
            assert [answer.result(60) for answer in nested] == wanted
    assert_balanced(engine)


def test_what_no_step_computed_is_an_error_of_that_request_alone() -> None:
    with bm.Engine({"last": Counting("last"), "first": Counting("first")}, threads=1) as engine:
        none, some = engine.submit(1, model="last"), engine.submit(6, model="last")
        no_first, first = engine.submit(1, model="first"), engine.submit(5, model="first")
        with pytest.raises(
            InvalidRequestError, match="there is no value: it is of the last step of a run over an empty"
        ):
            none.result(60)
        with pytest.raises(InvalidRequestError, match="`at` got index 0 for a sequence of 0"):
            no_first.result(60)
        assert some.result(60) == 12
        assert first.result(60) == (2, 4)
    assert_balanced(engine)


def test_a_run_over_more_steps_than_nodes_are_allowed_fails_alone() -> None:
    with bm.Engine(Counting("sum"), threads=1, max_nodes=100) as engine:
        long, short = engine.submit(80), engine.submit(40)
        with pytest.raises(NodeLimitError):
            long.result(60)
        assert short.result(60) == 100 + sum(evens(40))
    assert_balanced(engine)


def test_requests_that_end_early_give_back_what_they_have_collected() -> None:
    with bm.Engine(Counting("sum"), threads=1) as engine:
        engine.map([4, 5], progress=False)
        long = [engine.submit(20_000) for _ in range(6)]
        late, short = engine.submit(30_000, deadline_ms=50), engine.submit(9)
        assert short.result(60) == 100 + sum(evens(9))
        given_up = [answer for answer in long if answer.cancel()]
        assert given_up
        assert all(isinstance(answer.exception(60), CancelledError) for answer in given_up)
        assert isinstance(late.exception(60), DeadlineError)
        assert engine.submit(7).result(60) == 112
        frames = scheduler(engine).frames
        assert not frames.slots
        free, places = list_places(frames)
        assert free == places > 0, "every place of a list is free"
    assert_balanced(engine)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("two", "collected by the same loop"), ("all", "collected by the same loop"),
        ("slice", "length of what a while_loop collects"), ("tree", "length of what a while_loop collects"),
        ("branch", "returns a sequence whose length values decide"), ("inside", "length of what a while_loop"),
        ("until", "returns a sequence"),
    ],
)  # fmt: skip
def test_wrong_use_is_an_error_that_names_the_line(what: str, said: str) -> None:
    with bm.Engine(Counting(what), threads=1) as engine:
        with pytest.raises(ModelError, match=said) as raised:
            engine.submit(3).result(60)
        assert "test_decided_sequences.py:" in str(raised.value)


class UntilInside(Counting):
    """Returns the steps of a loop with `until` that depends on a decision."""

    def __init__(self) -> None:
        super().__init__("until")

    def unfold(self, top: Any) -> Any:
        n = bm.cond(self.count(top, 3)[1], lambda: self.up(0), lambda: self.up(top))
        return self.up.loop(n, until=5, max_steps=9).steps


class KeepsSteps(Counting):
    """Keeps what it has collected for the next chunk."""

    def unfold_chunk(self, top: Any, state: Any) -> Any:
        steps = self.counted(top)[0].steps
        return steps, steps


def test_steps_that_cannot_be_returned_or_kept_say_so() -> None:
    with (
        bm.Engine(UntilInside(), threads=1) as engine,
        pytest.raises(ModelError, match="that depends on a decision, or is inside one, cannot be returned"),
    ):
        engine.submit(3).result(60)
    with (
        bm.Engine(KeepsSteps(), threads=1) as engine,
        engine.open_sequence() as sequence,
        pytest.raises(ModelError, match="or of a while_loop cannot be kept for the next chunk"),
    ):
        sequence.submit(3).result(60)


class Chunks(Folded):
    """The state that chunks keep is looked at as a memory, and is the end of a run over what was said."""

    def unfold_chunk(self, x: Any, state: Any) -> Any:
        keys = self.encode.run(x)
        before, kept = (keys, keys.steps) if state is None else state
        is_even, _ = self.even(before)
        looked = bm.cond(is_even, lambda: self.look(before, kept), lambda: before)

        def body(state: State) -> State:
            return State(*self.speak(state.word, state.h, kept))

        last = bm.while_loop(lambda s: s.going, body, State(1, looked, True, False), max_steps=MOST)
        folded = self.fold.run(last.h.steps, looked)
        return folded.steps, (folded, keys.steps)

    def chunks_alone(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        answers, state = list[Tensor](), None
        for x in chunks:
            keys = [torch.zeros(WIDTH)]
            for one in x:
                keys.append(self.encode.module(one[None], keys[-1][None])[0])
            before, kept = (keys[-1], keys[1:]) if state is None else state
            h = self.back(before, kept) if self.even.module(before[None])[0] else before
            word, going, steps = torch.tensor(1), True, [h]
            for _ in range(MOST):
                if not going:
                    break
                given = (word[None], h[None], torch.stack(kept)[None], torch.tensor([len(kept)]))
                word, h, going, _ = (part[0] for part in self.speak.module(*given))
                steps.append(self.fold.module(h[None], steps[-1][None])[0])
            answers.append(torch.stack(steps[1:]))
            state = (steps[-1], keys[1:])
        return answers


def test_chunks_read_what_the_chunk_before_has_kept() -> None:
    model = Chunks()
    with bm.Engine(model, threads=1) as engine:
        for shift in range(2):
            lists = [[REQUESTS[(k + n + shift) % 8] for n in range(5)] for k in range(3)]
            sequences = [engine.open_sequence() for _ in lists]
            wanted = [model.chunks_alone(chunks) for chunks in lists]
            for n in range(5):
                answers = [s.submit(chunks[n]) for s, chunks in zip(sequences, lists, strict=True)]
                assert [same(a.result(60), w[n]) for a, w in zip(answers, wanted, strict=True)] == [True] * 3
            for sequence in sequences:
                sequence.close()
    assert_balanced(engine)


class Lambdas(Counting):
    """Goes on in a branch to a number that a function says, which each request makes anew."""

    def __init__(self) -> None:
        super().__init__("until")

    def unfold(self, top: Any, times: Any = 5) -> Any:
        n, going, _ = self.count(top, 9)
        return bm.cond(going, lambda: self.up.loop(n, until=lambda m: m % times == 0, max_steps=20), lambda: n)


def test_functions_that_end_loops_in_branches_may_differ_from_request_to_request() -> None:
    with bm.Engine(Lambdas(), threads=1) as engine:
        asked = [(top, times) for top in (1, 4, 6, 12, 7) for times in (5, 7)]
        for repetition in range(3):
            answers = engine.map([{"top": top, "times": times} for top, times in asked], progress=False)
            assert answers == [
                next(m for m in range(top + 2, 99) if m % times == 0) if top + 1 < 9 else top + 1
                for top, times in asked
            ]
            if not repetition:
                known = len(scheduler(engine).frames.patterns)
        assert len(scheduler(engine).frames.patterns) == known, "equal functions are one"
    assert_balanced(engine)


def test_explain_says_at_what_loops_in_branches_end() -> None:
    with bm.Engine(Branches(), threads=1) as engine:
        engine.map(REQUESTS, progress=False)
        assert "until: step by step" in str(engine.explain())


class Greedy(nn.Module):
    """word, h, c -> word, h, c: what the engine runs as a compiled loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(WORDS, 16), nn.LSTMCell(16, 16), nn.Linear(16, WORDS)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(self.embed(word), (h, c))
        return self.out(h).argmax(-1), h, c


class Writer(bm.Model):
    """Repeats a loop with `until` in the body of a `while_loop`, and goes on with it in a branch."""

    def __init__(self) -> None:
        torch.manual_seed(8)
        self.greedy, self.even = bm.Cell(Greedy(), max_batch=8, host_outputs=(0,)), bm.Cell(Even(), max_batch=8)
        self.count, self.up = bm.Cell(Counted(), max_batch=8), bm.Cell(Up(), max_batch=8)

    def unfold(self, word: Any, top: Any) -> Any:
        start = self.greedy.loop((word, [0.1] * 16, [0.2] * 16), until=4, max_steps=30)

        def body(state: Any) -> Any:
            (n, _), (word, h, c) = state
            n, going, _ = self.count(n, top)
            return (n, going), self.greedy.loop((self.up(word), h, c), until=4, max_steps=20)

        _, (word, h, c) = bm.while_loop(lambda s: s[0][1], body, ((0, True), start), max_steps=50)
        is_even, _ = self.even(h)
        last, h, _ = bm.cond(
            is_even, lambda: self.greedy.loop((word, h, c), until=7, max_steps=9), lambda: (word, h, c)
        )
        return last, h, start[0].steps

    def alone(self, word: int, top: int) -> Any:
        def loop(word: Tensor, h: Tensor, c: Tensor, ends: int, most: int) -> Any:
            found = list[int]()
            for _ in range(most):
                word, h, c = (o[0] for o in self.greedy.module(word[None], h[None], c[None]))
                found.append(int(word))
                if word == ends:
                    break
            return word, h, c, found

        *state, words = loop(torch.tensor(word), torch.full((16,), 0.1), torch.full((16,), 0.2), 4, 30)
        for _ in range(max(top, 1)):
            state = loop(state[0] + 1, *state[1:3], 4, 20)[:3]
        if self.even.module(state[1][None])[0]:
            state = loop(*state, 7, 9)[:3]
        return state[0], state[1], torch.tensor(words)


def test_compiled_loops_in_branches_and_bodies_end_at_their_values() -> None:
    model, asked = Writer(), [(1, 1), (2, 5), (9, 0), (3, 3), (5, 2), (8, 7), (0, 4)]
    wanted = [model.alone(word % 9, top) for word, top in asked]
    with bm.Engine(model, threads=1) as engine:
        for _ in range(2):
            answers = engine.map([{"word": word % 9, "top": top} for word, top in asked], progress=False)
            assert [same(a, w) for a, w in zip(answers, wanted, strict=True)] == [True] * len(asked)
        said = str(engine.explain())
    if not numba.config.DISABLE_JIT:
        assert "compiled loop" in said.split("greedy")[1].split("\n")[0]
    assert_balanced(engine)


class Plus(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] > 0


class Keeper(bm.Model):
    """Keeps its first chunk. Answers the chunk, to which what is kept was added if the chunk is above zero."""

    def __init__(self) -> None:
        self.plus, self.positive = bm.Cell(Plus(), max_batch=8), bm.Cell(Positive(), max_batch=8)

    def unfold(self, x: Any) -> Any:
        return self.unfold_chunk(x, None)[0]

    def unfold_chunk(self, x: Any, state: Any) -> Any:
        x = self.plus(x, torch.zeros(2))
        kept = x if state is None else state[0]
        (found,) = bm.cond(self.positive(x), lambda: (self.plus(kept, x),), lambda: (x,))
        return found, (kept,)


def test_a_state_that_passes_a_chunk_unchanged_is_kept_whatever_the_chunk_decides() -> None:
    with bm.Engine(Keeper(), threads=1) as engine, engine.open_sequence() as sequence:
        answers = [sequence.submit(torch.full((2,), float(k))).result().tolist() for k in (1, 10, 100, 1000)]
    assert answers == [[2.0] * 2, [11.0] * 2, [101.0] * 2, [1001.0] * 2]


class Summed(bm.Model):
    """x, to which numbers are added one after the other if it is above zero."""

    def __init__(self) -> None:
        self.plus, self.positive, self.same = bm.Cell(Plus()), bm.Cell(Positive()), bm.Cell(nn.Identity())

    def unfold(self, numbers: Any, x: Any) -> Any:
        x = self.same(x)
        return bm.cond(self.positive(x), lambda: (self.plus.run(numbers, x),), lambda: (x,))[0]


def test_a_run_over_nothing_in_a_branch_gives_its_first_state() -> None:
    asked = [(count, sign) for count in (0, 2, 0, 3) for sign in (1.0, -1.0)]
    requests = [{"numbers": torch.ones(count, 2), "x": torch.full((2,), sign)} for count, sign in asked]
    with bm.Engine(Summed(), threads=1) as engine:
        for _ in range(3):
            answers = engine.map(requests, progress=False)
            assert [answer.tolist() for answer in answers] == [[sign + count * (sign > 0)] * 2 for count, sign in asked]
