"""One cell in runs and loops, runs over nothing, and the steps of loops that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError

WORDS, SIZE, EOS = 20, 16, 1


class Lm(nn.Module):
    """(word, h) -> (the next word, h)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.out = nn.Embedding(WORDS, SIZE), nn.GRUCell(SIZE, SIZE), nn.Linear(SIZE, WORDS)
        for weights in (self.embed.weight, self.out.weight):
            weights.data.mul_(3)  # so that texts are of many lengths

    def forward(self, word: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gru(self.embed(word), h)
        return self.out(h).argmax(-1), h


class Writer(bm.Model):
    """Reads a prompt and goes on, with one cell."""

    def __init__(self) -> None:
        torch.manual_seed(24)
        self.step = bm.Cell(Lm(), max_batch=16)

    def unfold(self, prompt: Any) -> Any:
        word, h = self.step.run(prompt)
        word, h = self.step.loop((word, h), until=EOS, max_steps=9)
        return word.steps, h

    def alone(self, prompt: list[int]) -> tuple[list[int], Tensor]:
        h, word = torch.zeros(1, SIZE), torch.zeros(1, dtype=torch.int64)
        written: list[int] = []
        with torch.no_grad():
            for given in prompt:
                word, h = self.step.module(torch.tensor([given]), h)
            while len(written) < 9 and EOS not in written:
                word, h = self.step.module(word, h)
                written.append(int(word))
        return written, h[0]


PROMPTS = [[3], [4, 5], [6, 7, 8], [9, 2, 3, 4], [5], [8, 9], [2, 11, 12], [17, 18, 19, 3]]


def check(model: Any, engine: bm.Engine, prompts: list[list[int]]) -> None:
    for prompt, (written, h) in zip(prompts, engine.map(prompts, progress=False), strict=True):
        words, state = model.alone(prompt)
        assert written.tolist() == words
        torch.testing.assert_close(h, state, atol=1e-5, rtol=1e-4)


def test_one_cell_runs_over_a_prompt_and_loops_from_there() -> None:
    model = Writer()
    with bm.Engine(model, threads=1, workers=1) as engine:
        for _ in range(3):  # the shapes have templates after a while
            check(model, engine, PROMPTS)
        assert engine.driver.templates.num_templates == 4  # type: ignore[attr-defined]
        assert [cell.name for cell in engine.registry.types] == ["step", "step loop"]


def test_which_comes_first_does_not_matter_nor_single_calls_in_between() -> None:
    class Backwards(Writer):
        def unfold(self, prompt: Any) -> Any:
            word, h = self.step.loop((prompt[0], torch.zeros(SIZE)), until=EOS, max_steps=4)
            word, h = self.step(word, h)
            _, h = self.step.run(prompt, h)
            return self.step.loop((word, h), max_steps=2)[0].steps, h

        def alone(self, prompt: list[int]) -> tuple[list[int], Tensor]:
            word, h, steps = torch.tensor([prompt[0]]), torch.zeros(1, SIZE), 0
            with torch.no_grad():
                while steps == 0 or (steps < 4 and int(word) != EOS):
                    (word, h), steps = self.step.module(word, h), steps + 1
                word, h = self.step.module(word, h)
                for given in prompt:
                    _, h = self.step.module(torch.tensor([given]), h)
                one, state = self.step.module(word, h)
                two, _ = self.step.module(one, state)
            return [int(one), int(two)], h[0]

    model = Backwards()
    with bm.Engine(model, threads=1) as engine:
        for _ in range(3):
            check(model, engine, PROMPTS)
        assert [cell.name for cell in engine.registry.types] == ["step", "step run"]


def test_a_saved_model_with_a_cell_in_two_forms_gives_the_same(tmp_path: Path) -> None:
    model = SavedWriter()
    bm.save(model, tmp_path / "writer", example_request=[3, 4])
    loaded = bm.load(tmp_path / "writer")
    with bm.Engine(loaded, threads=1) as engine:
        check(model, engine, PROMPTS)


class SavedWriter(Writer):
    """At the top of a module, where a saved model's class must be."""


# --- runs over nothing -----------------------------------------------------------------------------------------------


class AllButLast(Writer):
    """Runs over the prompt without its last word, which may be nothing, and calls the cell on that word."""

    def unfold(self, prompt: Any) -> Any:
        word, h = self.step.run(prompt[:-1], torch.full((SIZE,), 0.5))
        return self.step(prompt[-1], h), word.steps, h, h.steps

    def alone(self, prompt: list[int]) -> Any:
        h, words, states = torch.full((1, SIZE), 0.5), [], []
        with torch.no_grad():
            for given in prompt[:-1]:
                word, h = self.step.module(torch.tensor([given]), h)
                words.append(int(word))
                states.append(h[0])
            last, after = self.step.module(torch.tensor(prompt[-1:]), h)
        return int(last), after[0], words, h[0], states


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("first", [[3], [4, 5]], ids=["nothing first", "nothing later"])
def test_a_run_over_nothing_gives_its_init_and_no_steps(first: list[int], workers: int) -> None:
    model = AllButLast()
    with bm.Engine(model, threads=1, workers=workers) as engine:
        for prompt in [first, *PROMPTS * 3]:
            (last, after), words, h, states = engine.submit(prompt).result(60)
            wanted = model.alone(prompt)
            assert (last, words.tolist()) == (wanted[0], wanted[2])
            assert (words.dtype, states.shape) == (torch.int64, (len(prompt) - 1, SIZE))
            torch.testing.assert_close(after, wanted[1], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(h, wanted[3], atol=1e-5, rtol=1e-4)
        assert any(driver.templates.num_templates for driver in engine.drivers)  # type: ignore[attr-defined]


def test_a_map_over_the_steps_of_a_run_over_nothing_gives_nothing() -> None:
    class Tagger(Writer):
        def __init__(self) -> None:
            super().__init__()
            self.tag, self.score = bm.Cell(nn.Linear(SIZE, 3)), bm.Cell(nn.Bilinear(SIZE, 3, 1))

        def unfold(self, prompt: Any) -> Any:
            steps = self.step.run(prompt, torch.zeros(SIZE))[1].steps
            tags = self.tag.map(steps)
            return tags, self.score.map(steps, tags)

    model = Tagger()
    with bm.Engine(model, threads=1) as engine:
        for prompt in [*PROMPTS, [], *PROMPTS, []]:
            tags, scores = engine.submit(prompt).result(60)
            assert (tags.shape, scores.shape) == ((len(prompt), 3), (len(prompt), 1))
        tags, scores = engine.submit([]).result(60)
    assert tags.dtype == scores.dtype == torch.float32


def test_the_init_of_a_run_over_nothing_may_be_the_end_of_a_loop_or_of_another_run() -> None:
    class Chained(Writer):
        def unfold(self, prompt: Any) -> Any:
            _, h = self.step.loop((prompt[0], torch.zeros(SIZE)), until=EOS, max_steps=5)
            _, again = self.step.run([], h)
            _, more = self.step.run(again.steps, again) if len(again.steps) else (None, again)
            return h, again, more, again.steps

    with bm.Engine(Chained(), threads=1) as engine:
        for h, again, more, steps in engine.map(PROMPTS, progress=False):
            assert torch.equal(h, again)
            assert torch.equal(h, more)
            assert steps.shape == (0, SIZE)


def test_an_output_that_a_run_over_nothing_does_not_have_is_an_error_where_it_is_used() -> None:
    def returns(step: bm.Cell, word: Any, h: Any) -> Any:
        return word

    def calls(step: bm.Cell, word: Any, h: Any) -> Any:
        return step(word, h)

    def gathers(step: bm.Cell, word: Any, h: Any) -> Any:
        return step.map([word], [h])

    def begins(step: bm.Cell, word: Any, h: Any) -> Any:
        return step.loop((word, h), max_steps=2)

    for use in (returns, calls, gathers, begins):

        class Uses(Writer):
            def unfold(self, prompt: Any) -> Any:
                return use(self.step, *self.step.run(prompt, torch.zeros(SIZE)))  # noqa: B023 - called now

        with bm.Engine(Uses(), threads=1) as engine:
            assert engine.submit([3]).exception(60) is None
            error = engine.submit([]).exception(60)
            assert isinstance(error, InvalidRequestError), use
            assert "an output of a run over an empty sequence" in str(error)


def test_a_run_over_nothing_needs_an_init_for_every_part_of_the_state() -> None:
    class Lstm(bm.Model):
        def __init__(self) -> None:
            self.step = bm.Cell(nn.LSTMCell(2, 3))

        def unfold(self, frames: Any, init: Any) -> Any:
            return self.step.run(frames, init)

    zeros = torch.zeros(3)
    with bm.Engine(Lstm(), threads=1) as engine:
        h, c = engine.submit({"frames": torch.zeros(0, 2), "init": (zeros, zeros + 1)}).result(60)
        assert (h.tolist(), c.tolist()) == ([0.0] * 3, [1.0] * 3)
        engine.submit({"frames": torch.zeros(1, 2), "init": None}).result(60)
        for init, message in (
            ((zeros, None), "none of them None"), ((zeros,), "needs 2 values of the state"), (None, "is empty"),
        ):  # fmt: skip
            error = engine.submit({"frames": torch.zeros(0, 2), "init": init}).exception(60)
            assert isinstance(error, InvalidRequestError)
            assert message in str(error)


# --- the steps of a loop that has ended ------------------------------------------------------------------------------


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3)

    def forward(self, word: Tensor) -> Tensor:
        result: Tensor = self.table(word)
        return result


class Rereader(Writer):
    """Writes, waits for what it has written, and reads that again."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.back = bm.Cell(Score()), bm.Cell(nn.GRUCell(SIZE, SIZE))

    def unfold(self, prompt: Any) -> Iterator[Any]:
        word, h = self.step.run(prompt)
        word, h = self.step.loop((word, h), until=EOS, max_steps=9)
        words, states = yield word.steps, h.steps
        assert words.tolist() == list(word.steps)
        assert list(reversed(word.steps)) == words.tolist()[::-1]
        assert len(word.steps) == len(h.steps) == len(words)
        assert (word.steps[0], word.steps[-1], word.steps[::-1].tolist()) == (words[0], words[-1], words.tolist()[::-1])
        assert word.steps[[0, -1]].tolist() == [words[0], words[-1]]
        assert torch.equal(h.steps[-1], states[-1])
        words.zero_()  # its own, and not that of the steps
        again = self.back.run(h.steps[::-1])
        return word.steps, self.score.map(word.steps), again, h.steps


def test_the_steps_of_a_loop_are_known_and_can_be_passed_on_once_they_are_yielded() -> None:
    model = Rereader()
    lengths = set()
    with bm.Engine(model, threads=1) as engine:
        for prompt, (words, scores, again, states) in zip(PROMPTS, engine.map(PROMPTS, progress=False), strict=True):
            wanted, h = model.alone(prompt)
            lengths.add(len(wanted))
            assert words.tolist() == wanted
            with torch.no_grad():
                torch.testing.assert_close(scores, model.score.module(torch.tensor(wanted)))
                back = torch.zeros(1, SIZE)
                for state in reversed(states):
                    back = model.back.module(state[None], back)
            torch.testing.assert_close(states[-1], h, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(again, back[0], atol=1e-5, rtol=1e-4)
    assert len(lengths) > 3, "loops of several lengths"


def test_steps_that_were_taken_early_can_be_yielded_when_the_loop_has_long_ended() -> None:
    class Late(Writer):
        def unfold(self, prompt: Any) -> Iterator[Any]:
            word, h = self.step.run(prompt)
            word, h = self.step.loop((word, h), until=EOS, max_steps=9)
            steps = word.steps
            yield word
            yield h
            words = yield steps
            again = yield steps
            assert torch.equal(words, again)
            return [*steps], h

    model = Late()
    with bm.Engine(model, threads=1) as engine:
        for prompt, (written, _) in zip(PROMPTS, engine.map(PROMPTS, progress=False), strict=True):
            assert written == model.alone(prompt)[0]
        streamed = list(engine.submit([4, 5], stream=True))
    assert streamed[2].tolist() == streamed[3].tolist() == model.alone([4, 5])[0]


def test_steps_of_a_loop_that_were_not_waited_for_say_how() -> None:
    def length(model: Writer, steps: Any) -> Any:
        return len(steps)

    def element(model: Writer, steps: Any) -> Any:
        return steps[0]

    def every(model: Writer, steps: Any) -> Any:
        return list(steps)

    def passed(model: Writer, steps: Any) -> Any:
        return model.step.run(steps)

    for use in (length, element, every, passed):

        class Uses(Writer):
            def unfold(self, prompt: Any) -> Any:
                return use(self, self.step.loop((prompt[0], torch.zeros(SIZE)), until=EOS, max_steps=3)[0].steps)  # noqa: B023

        with bm.Engine(Uses(), threads=1) as engine:
            error = engine.submit([3]).exception(60)
        assert isinstance(error, ModelError)
        assert "wait for them: `words = yield loop.steps`" in str(error)
        assert "test_chain_forms.py:" in str(error)


def test_the_state_of_a_sequence_may_hold_steps_that_were_waited_for() -> None:
    class Dialogue(Writer):
        def unfold_chunk(self, chunk: Any, state: Any) -> Iterator[Any]:
            h, before = state or (None, None)
            word, h = self.step.run(chunk, h)
            word, h = self.step.loop((word, h), until=EOS, max_steps=5)
            yield word.steps
            said = None if before is None else before.tolist()
            return (list(word.steps), said), (h, word.steps)

    with bm.Engine(Dialogue(), threads=1) as engine, engine.open_sequence() as sequence:
        first, nothing = sequence.submit([3, 4]).result(60)
        second, before = sequence.submit([5]).result(60)
    assert nothing is None
    assert before == first
    assert 1 <= len(second) <= 5
