"""The end of a sequence, its reset, and its state as bytes, with which it goes on elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import POISON, Poisoned, Totals, assert_balanced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.core.commands import Reserve
from batchmaker.engine.cell_driver import MOST_UNKNOWN
from batchmaker.errors import CellError, InvalidRequestError, SequenceError, SequenceStateError
from batchmaker.executor.state_tables import StateTables
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab import zoo
from batchmaker.model.moved_state import MovedState, written
from batchmaker.model.sequence_state import KeptHandle, KeptState
from covering import covering

SMALL = {"vocabulary_size": 40, "hidden": 8, "max_batch": 8}
WORDS = list(range(30))


class Smooth(nn.Module):
    """Frame and the frame before -> their mean."""

    def forward(self, frame: Tensor, before: Tensor) -> Tensor:
        return (frame + before) / 2


class LooksAhead(bm.Model):
    """Gives the mean of each frame and the next one, so that it is always a frame behind."""

    def __init__(self) -> None:
        self.smooth = bm.Cell(Smooth())
        self.told: list[Any] = []

    def unfold(self, frames: Any) -> Any:
        return [self.smooth(a, b) for a, b in itertools.pairwise(frames)]

    def unfold_chunk(self, frames: Any, state: Any, last: bool) -> Any:
        self.told.append((frames is None, last))
        held = [] if state is None else [state]
        known = held + ([] if frames is None else [torch.tensor([float(x)]) for x in frames])
        means = [self.smooth(b, a) for a, b in itertools.pairwise(known)]
        if last and known:
            means.append(self.smooth(known[-1], torch.zeros(1)))
        return means, known[-1] if known else None


def means(frames: list[int], *, last: bool) -> list[float]:
    ends = [*frames, 0] if last else frames
    return [(a + b) / 2 for a, b in itertools.pairwise(ends)]


def numbers(values: Any) -> list[float]:
    return [float(value) for value in values]


def test_a_model_with_look_ahead_answers_for_its_last_frames_at_the_end() -> None:
    for chunk in (None, [7, 9]):
        model = LooksAhead()
        with bm.Engine(model, threads=1) as engine:
            sequence = engine.open_sequence()
            heard = numbers(sequence.submit([1, 3, 5]).result(60))
            heard += numbers(sequence.finish(chunk).result(60))
            assert heard == means([1, 3, 5, *(chunk or [])], last=True)
            assert not sequence.is_open
            with pytest.raises(SequenceError, match="has ended: it was finished"):
                sequence.submit([1])
            assert model.told == [(False, False), (chunk is None, True)]
        assert_balanced(engine)


def test_chunks_of_one_shape_have_a_template_for_the_middle_and_another_for_the_end() -> None:
    gru = bm.recurrent(nn.GRU(4, 5))

    class Listener(bm.Model):
        def __init__(self) -> None:
            self.gru = gru

        def unfold(self, frames: Tensor) -> Any:
            return self.gru(frames)[0]

        def unfold_chunk(self, frames: Tensor, state: Any, last: bool) -> Any:
            heard, state = self.gru(frames, state)
            return (heard, state) if last else (heard[-1], state)

    frames = torch.randn(6, 4)
    with bm.Engine(Listener(), threads=1) as engine:
        whole = engine.submit(frames).result(60)
        for _ in range(4):
            sequence = engine.open_sequence()
            for at in (0, 2):
                assert torch.allclose(sequence.submit(frames[at : at + 2]).result(60), whole[at + 1], atol=1e-5)
            assert torch.allclose(sequence.finish(frames[4:]).result(60), whole[4:], atol=1e-5)


def test_a_chunk_that_is_a_dict_may_name_an_input_last_itself() -> None:
    class Named(bm.Model):
        def __init__(self) -> None:
            self.smooth = bm.Cell(Smooth())

        def unfold(self, frame: Any) -> Any:
            return frame

        def unfold_chunk(self, frame: Any, last: Any, state: Any = None) -> Any:
            return self.smooth(frame, last), None

    with bm.Engine(Named(), threads=1) as engine, engine.open_sequence() as sequence:
        assert float(sequence.submit({"frame": torch.ones(1), "last": torch.zeros(1)}).result(60)) == 0.5


def test_every_input_is_none_at_an_end_without_a_chunk() -> None:
    class Two(bm.Model):
        def __init__(self) -> None:
            self.smooth = bm.Cell(Smooth())

        def unfold(self, left: Any, right: Any) -> Any:
            return self.smooth(left, right)

        def unfold_chunk(self, left: Any, right: Any, state: Any, last: bool) -> Any:
            if left is None and right is None:
                return ("over", last), None
            return self.smooth(left, right), None

    with bm.Engine(Two(), threads=1) as engine:
        sequence = engine.open_sequence()
        assert float(sequence.submit({"left": torch.ones(1), "right": torch.zeros(1)}).result(60)) == 0.5
        assert sequence.finish().result(60) == ("over", True)


def test_other_models_are_finished_without_being_asked() -> None:
    with bm.Engine(Totals(), threads=1) as engine:
        sequence = engine.open_sequence()
        answers = [sequence.submit([x]) for x in (1, 2, 3)]
        assert sequence.finish().result(60) is None
        assert [float(answer.result(0)) for answer in answers] == [1, 3, 6]
        other = engine.open_sequence()
        assert float(other.finish([4]).result(60)) == 4
        assert not other.is_open
        assert engine.num_sequences == 0
        assert engine.service["Totals"].answered == 4  # an end without a chunk is no request
    assert_balanced(engine)


def test_after_a_reset_chunks_begin_from_no_state() -> None:
    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence() as sequence:
        before = [sequence.submit([x]) for x in (1, 2)]
        assert sequence.reset().result(60) is None
        after = [sequence.submit([x]) for x in (5, 6)]
        assert [float(answer.result(60)) for answer in (*before, *after)] == [1, 3, 5, 11]
    assert_balanced(engine)


def test_a_reset_goes_on_after_a_chunk_without_a_result() -> None:
    with bm.Engine(Totals(Poisoned()), threads=1) as engine, engine.open_sequence() as sequence:
        assert float(sequence.submit([1]).result(60)) == 1
        wrong, behind = sequence.submit([POISON]), sequence.submit([1])
        assert isinstance(wrong.exception(60), CellError | InvalidRequestError)
        assert isinstance(behind.exception(60), SequenceError)
        sequence.reset()
        assert float(sequence.submit([2]).result(60)) == 2
    assert_balanced(engine)


@pytest.mark.parametrize(
    ("name", "workers", "policy"), covering(["lstm", "gru"], [1, 2], ["auto", "cellular", "agenda", "depth"])
)
def test_a_sequence_goes_on_from_its_state_wherever_and_as_often_as_wanted(
    name: str, policy: str, workers: int
) -> None:
    model = zoo.make(name, **SMALL)
    with bm.Engine(model, policy, workers=workers, threads=1) as engine:
        whole = engine.submit(WORDS).result(60)
        with engine.open_sequence() as sequence:
            sequence.submit(WORDS[:11]).result(60)
            state = sequence.state()
            assert torch.allclose(sequence.submit(WORDS[11:]).result(60), whole, atol=1e-5)
        assert type(state) is bytes
        for _ in range(3):
            with engine.open_sequence(state=state) as again:
                assert torch.allclose(again.submit(WORDS[11:]).result(60), whole, atol=1e-5)
    assert_balanced(engine)
    with bm.Engine(model, threads=1) as elsewhere, elsewhere.open_sequence(state=state) as moved:  # has run nothing
        assert torch.allclose(moved.submit(WORDS[11:]).result(60), whole, atol=1e-5)
    assert_balanced(elsewhere)


def test_chunks_of_one_shape_begin_from_nodes_of_the_cell_and_of_copies() -> None:
    model = zoo.make("lstm", **SMALL)

    async def one(number: int) -> None:
        words = [number] * (1 + number % 3)
        async with engine.open_sequence() as sequence:
            for turn in range(1, 6):
                whole = await engine.submit(words * turn)
                assert torch.allclose(await sequence.submit(words), whole, atol=1e-5)

    async def main() -> None:
        await asyncio.gather(*map(one, range(1, 13)))

    with bm.Engine(model, threads=1) as home, home.open_sequence() as sequence:
        sequence.submit([3, 4]).result(60)
        state = sequence.state().replace(b"step", b"pets")  # a cell that no engine has run
    with bm.Engine(model, threads=1) as engine:
        whole = engine.submit([3, 4, 1]).result(60)
        for _ in range(3):
            with engine.open_sequence(state=state) as sequence:
                assert torch.allclose(sequence.submit([1]).result(60), whole, atol=1e-5)
        asyncio.run(main())
    assert_balanced(engine)


def test_a_state_that_was_moved_back_and_forth_has_the_same_bits() -> None:
    model = zoo.make("lstm", layers=2, **SMALL)
    with bm.Engine(model, threads=1) as one, bm.Engine(model, threads=1) as other:
        staying, state = one.open_sequence(), None
        for at, word in enumerate(WORDS):
            here = (one, other)[at % 2]
            with here.open_sequence(state=state) as moving:
                heard, state = moving.submit([word]).result(60), moving.state()
            assert torch.allclose(heard, staying.submit([word]).result(60), atol=1e-5)
        with one.open_sequence(state=state) as last:
            assert last.state() == state
        staying.close()
    assert_balanced(one)
    assert_balanced(other)


def test_a_transducer_moves_with_what_its_decisions_keep() -> None:
    transducer = zoo.make("rnnt", pitches=5, vocabulary_size=8, hidden=6, max_batch=8)
    sound = torch.randn(12, 5)
    with bm.Engine(transducer, threads=1) as engine:
        whole = engine.submit(sound).result(60)
        with engine.open_sequence() as sequence:
            heard = [*sequence.submit(sound[:5]).result(60)]
            state = sequence.state()
    with bm.Engine(transducer, threads=1) as elsewhere, elsewhere.open_sequence(state=state) as moved:
        heard += [*moved.submit(sound[5:]).result(60)]
    assert [int(word) for word in heard] == [int(word) for word in whole]


class Plain(bm.Model):
    """Keeps plain data beside a value."""

    def __init__(self) -> None:
        self.smooth = bm.Cell(Smooth())

    def unfold(self, frame: Any) -> Any:
        return frame

    def unfold_chunk(self, chunk: Any, state: Any) -> Any:
        if chunk == "what":
            return state[1:], state
        return None, (self.smooth(torch.ones(1), torch.zeros(1)), *chunk)


plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=25)
@given(st.lists(plain_data, max_size=3))
def test_plain_data_comes_back_as_it_was(data: list[Any]) -> None:
    with bm.Engine(Plain(), threads=1) as engine:
        with engine.open_sequence() as sequence:
            sequence.submit(data).result(60)
            state = sequence.state()
        with engine.open_sequence(state=state) as again:
            assert again.submit("what").result(60) == tuple(data)


def test_arrays_and_tensors_in_a_state_come_back() -> None:
    with bm.Engine(Plain(), threads=1) as engine:
        with engine.open_sequence() as sequence:
            sequence.submit([np.arange(3), torch.ones(2, dtype=torch.bfloat16)]).result(60)
            state = sequence.state()
        with engine.open_sequence(state=state) as again:
            array, tensor = again.submit("what").result(60)
            assert type(array) is np.ndarray
            assert array.tolist() == [0, 1, 2]
            assert tensor.dtype == torch.bfloat16
            assert tensor.tolist() == [1, 1]


def test_a_state_that_cannot_be_moved_says_so_and_the_sequence_goes_on() -> None:
    with bm.Engine(Plain(), threads=1) as engine, engine.open_sequence() as sequence:
        sequence.submit([object()]).result(60)
        with pytest.raises(SequenceStateError, match=r"has a object, which cannot be moved; keep handles, numbers"):
            sequence.state()
        assert len(sequence.submit("what").result(60)) == 1


def test_a_state_of_another_model_or_of_other_weights_is_refused() -> None:
    one, other = zoo.make("lstm", **SMALL, seed=0), zoo.make("lstm", **SMALL, seed=1)
    with bm.Engine(one, threads=1) as engine, engine.open_sequence() as sequence:
        sequence.submit([1, 2]).result(60)
        state = sequence.state()
    with bm.Engine(other, threads=1) as engine:
        with pytest.raises(SequenceStateError, match="another model, or of one with other weights"):
            engine.open_sequence(state=state)
        assert engine.num_sequences == 0


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    with bm.Engine(Totals(), threads=1) as engine:
        with engine.open_sequence() as sequence:
            sequence.submit([1]).result(60)
            state = bytearray(sequence.state())
        for _ in range(data.draw(st.integers(1, 3))):
            state[data.draw(st.integers(0, len(state) - 1))] = data.draw(st.integers(0, 255))
        cut = bytes(state[: data.draw(st.integers(0, len(state)) | st.just(len(state)))])
        try:
            with engine.open_sequence(state=cut) as again:
                again.submit([1]).exception(60)  # a number may have become another
        except SequenceError:
            pass
        with engine.open_sequence() as fresh:
            assert float(fresh.submit([2]).result(60)) == 2
    assert_balanced(engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(structure={"kept": 5, "output": 0, "shape": [], "dtype": "float32"}),
        lambda header: header.update(structure={"kept": -1, "output": 0, "shape": [], "dtype": "float32"}),
        lambda header: header.update(structure={"kept": 0, "output": 7, "shape": [], "dtype": "float32"}),
        lambda header: header.update(structure={"kept": 0, "output": 0, "shape": [9], "dtype": "float32"}),
        lambda header: header.update(structure={"kept": 0, "output": 0, "shape": [], "dtype": "string"}),
        lambda header: header.update(structure={"exec": "import os"}),
        lambda header: header.update(structure={"list": 7}),
        lambda header: header.update(kept=[["step", [0, 0]]]),
        lambda header: header.update(kept=[["step", [1]]]),
        lambda header: header.update(kept=[["step", []]]),
        lambda header: header.update(kept={}),
        lambda header: header.pop("kept"),
        lambda header: header.pop("model"),
        lambda header: header.update(structure=[1]),
    ],
)
def test_a_state_whose_header_says_something_wrong_is_refused(change: Any) -> None:
    with bm.Engine(Totals(), threads=1) as engine:
        with engine.open_sequence() as sequence:
            sequence.submit([1]).result(60)
            state = sequence.state()
        size = int.from_bytes(state[:8], "little")
        whole = json.loads(state[8 : 8 + size])
        ((name, text),) = whole["__metadata__"].items()
        header = json.loads(text)
        change(header)
        whole["__metadata__"][name] = json.dumps(header)
        text = json.dumps(whole).encode()
        text += b" " * (-len(text) % 8)
        with pytest.raises(SequenceStateError, match="no state of a sequence, or they are damaged"):
            engine.open_sequence(state=len(text).to_bytes(8, "little") + text + state[8 + size :])
        with pytest.raises(SequenceStateError, match="a state is bytes, got str"):
            engine.open_sequence(state="abc")  # type: ignore[arg-type]
        assert engine.num_sequences == 0


def test_states_that_somebody_makes_up_do_not_fill_the_engine() -> None:
    """Each kind of kept values that no cell has is bound once, and what is bound stays."""
    with bm.Engine(Totals(), threads=1) as engine:
        engine.submit([1]).result(60)
        refused = 0
        for width in range(2, 2 * MOST_UNKNOWN):
            kept = KeptState(KeptHandle(0, 0, ValueSpec((width,), "float32")), 1)
            made_up = written(MovedState(kept, [[torch.zeros(width)]], ["add"]), engine.identity())
            with engine.open_sequence(state=made_up) as sequence:
                error = sequence.submit([1]).exception(60)
                refused += isinstance(error, SequenceError)
        assert refused >= MOST_UNKNOWN - 2
        assert len(engine.registry.types) <= 8 + MOST_UNKNOWN
        with engine.open_sequence() as sequence:
            assert float(sequence.submit([2]).result(60)) == 2
    assert_balanced(engine)


def test_a_state_needs_the_answers_before_it_and_waits_for_them() -> None:
    with bm.Engine(Totals(), threads=1) as engine:
        with engine.open_sequence() as sequence:
            sent = [sequence.submit([x]) for x in range(1, 9)]
            state = sequence.state()
            assert all(answer.done() for answer in sent)
        with engine.open_sequence(state=state) as again:
            assert float(again.submit([0]).result(60)) == 36
        with engine.open_sequence() as empty:
            state = empty.state()
        with engine.open_sequence(state=state) as again:
            assert float(again.submit([3]).result(60)) == 3
    assert_balanced(engine)


def test_a_state_for_which_there_is_no_memory_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StateTables.reserve

    def reserve(tables: StateTables, command: Reserve) -> None:
        if full and any(spec.spec.dtype == "float32" for spec in command.tables):
            raise MemoryError("no memory")
        real(tables, command)

    full = False
    with bm.Engine(Totals(), threads=1) as engine, engine.open_sequence() as sequence:
        sequence.submit([4]).result(60)
        state = sequence.state()
    monkeypatch.setattr(StateTables, "reserve", reserve)
    with bm.Engine(Totals(), threads=1) as engine:
        full = True
        with engine.open_sequence(state=state) as refused:
            assert isinstance(refused.submit([1]).exception(60), SequenceError)
        full = False
        with engine.open_sequence(state=state) as again:
            assert float(again.submit([1]).result(60)) == 5
    assert_balanced(engine)


def test_a_state_is_not_given_after_a_chunk_without_a_result_until_the_caller_resumes() -> None:
    with bm.Engine(Totals(Poisoned()), threads=1) as engine, engine.open_sequence() as sequence:
        sequence.submit([1]).result(60)
        sequence.submit([POISON]).exception(60)
        with pytest.raises(SequenceError, match="has no result"):
            sequence.state()
        sequence.resume()
        state = sequence.state()
        with engine.open_sequence(state=state) as again:
            assert float(again.submit([2]).result(60)) == 3


def test_tasks_of_one_event_loop_move_sequences_without_blocking_it() -> None:
    async def main() -> list[float]:
        sequence = engine.open_sequence()
        await sequence.submit([1])
        answer = sequence.snapshot()
        sequence.reset()
        fresh = sequence.submit([7])
        moved = engine.open_sequence(state=await answer)
        last = moved.finish([2])
        heard = [float(await fresh), float(await last)]
        sequence.close()
        return heard

    with bm.Engine(Totals(), threads=1) as engine:
        assert asyncio.run(main()) == [7, 3]
    assert_balanced(engine)


@pytest.mark.slow
def test_a_sequence_goes_on_in_another_process(tmp_path: Path) -> None:
    program = """
import sys, torch, batchmaker as bm
from batchmaker.lab import zoo
model = zoo.make("lstm", vocabulary_size=40, hidden=8, max_batch=8)
with bm.Engine(model, threads=1) as engine, engine.open_sequence(state=open(sys.argv[1], "rb").read()) as sequence:
    print(sequence.submit(list(range(11, 30))).result(60).tolist())
"""
    model = zoo.make("lstm", **SMALL)
    with bm.Engine(model, threads=1) as engine, engine.open_sequence() as sequence:
        sequence.submit(WORDS[:11]).result(60)
        (tmp_path / "state").write_bytes(sequence.state())
        whole = engine.submit(WORDS).result(60)
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state")], capture_output=True, text=True, check=True
    ).stdout
    assert torch.allclose(torch.tensor(json.loads(said)), whole, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.one_of(
            st.integers(1, 9), st.just("reset"), st.just("move"), st.just("fork"), st.just(POISON), st.just("wait")
        ),
        max_size=14,
    )
)
def test_whatever_is_done_with_sequences_each_chunk_gets_the_sum_since_its_beginning(steps: list[Any]) -> None:
    with bm.Engine(Totals(Poisoned()), threads=1) as engine:
        sequence, total = engine.open_sequence(), 0
        answers: list[tuple[Any, int]] = []
        for step in steps:
            if step == "reset":
                sequence.reset()
                total = 0
            elif step == "move":
                state = sequence.state()
                sequence.close()
                sequence = engine.open_sequence(state=state)
            elif step == "fork":
                with engine.open_sequence(state=sequence.state()) as other:
                    assert float(other.submit([1]).result(60)) == total + 1
            elif step == "wait":
                [answer.result(60) for answer, _ in answers]
            elif step == POISON:
                assert sequence.submit([POISON]).exception(60) is not None
                sequence.resume()
            else:
                total += step
                answers.append((sequence.submit([step]), total))
        for answer, expected in answers:
            assert float(answer.result(60)) == expected
        sequence.close()
    assert_balanced(engine)
