"""Engines whose device schedules itself, its kernels on the CPU: the same answers, errors and words as otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated import emulated
from fake_device import FakeDevice
from test_cuda_executor import Mixed, plainly, running
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.device.memory import Sizes
from batchmaker.device.proof import NUM_REQUESTS
from batchmaker.engine import device_driver
from batchmaker.engine.engine import Engine
from batchmaker.errors import CancelledError, DeadlineError, DeviceError, InvalidRequestError
from insides import device_places, num_ended, scheduler


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_driver, "SIZES", Sizes(1 << 18, 1 << 16, 1 << 16, 64, 256))


@contextmanager
def engine_of(model: bm.Model, count: int = 1, **options: Any) -> Iterator[tuple[Engine, list[FakeDevice]]]:
    devices = [emulated(f"emulated {number}", seed=number, background=True) for number in range(count)]
    with running(model, *devices, policy="cellular", **options) as engine:
        yield engine, devices


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return self.cell(self.embedding(word), (h, c))


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, word: Tensor) -> Tensor:
        return self.embedding(word).tanh()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat((left, right), 1)).tanh()


class Chain(bm.Model):
    """The last state of an LSTM, and a number."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.cell = bm.Cell(Tagger(), batch_sizes=[1, 3, 8])
        self.example_request = [1, 2, 3]

    def unfold(self, words: Sequence[int]) -> Any:
        h, _ = self.cell.run(words)
        return {"state": h, "steps": h.steps, "length": len(words)}


class Tree(bm.Model):
    """Words in a bracketing: leaves, inner nodes, and an encoder over the leaves in reverse."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.leaf, self.inner = bm.Cell(Leaf(), batch_sizes=[1, 4]), bm.Cell(Inner(), batch_sizes=[1, 4])
        self.gru = bm.Cell(nn.GRUCell(6, 6), batch_sizes=[1, 4])
        self.example_request = [[1, 2], 3]

    def unfold(self, tree: Any) -> Any:
        leaves: list[Any] = []

        def value(part: Any) -> Any:
            if isinstance(part, int):
                leaves.append(self.leaf(part))
                return leaves[-1]
            return self.inner(*map(value, part))

        root = value(tree)
        back = self.gru.run(self.leaf.map([3, 1, 2])[::-1])
        return self.inner(root, back), root


def plain_chain(model: Chain, words: Sequence[int]) -> Tensor:
    with torch.no_grad():
        h, c = torch.zeros(1, 6), torch.zeros(1, 6)
        steps = []
        for word in words:
            h, c = model.cell.module(torch.tensor([word]), h, c)
            steps.append(h[0])
        return torch.stack(steps)


def plain_tree(model: Tree, tree: Any) -> tuple[Tensor, Tensor]:
    def leaf(word: int) -> Tensor:
        return model.leaf.module(torch.tensor([word]))

    def value(part: Any) -> Tensor:
        return leaf(part) if isinstance(part, int) else model.inner.module(*map(value, part))

    with torch.no_grad():
        root, h = value(tree), torch.zeros(1, 6)
        for word in (2, 1, 3):
            h = model.gru.module(leaf(word), h)
        return model.inner.module(root, h)[0], root[0]


CHAINS = [[(i * 7 + j * 3) % 10 for j in range(1 + (i * 5) % 17)] for i in range(60)]
TREES = [[[1, 2], [3, [4, 5]]], [0, 1], [[0, 9], 1], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]] * 8


def num_taken(devices: Sequence[FakeDevice], engine: Engine) -> int:
    """Requests that the devices have scheduled themselves, without those that prove their cells."""
    return sum(num_ended(place.core) - NUM_REQUESTS * len(place.planned) for place in device_places(engine))


@pytest.mark.parametrize("count", [1, 2])
def test_chains_are_answered_by_the_device_as_plain_pytorch_answers_them(count: int) -> None:
    model = Chain()
    with engine_of(model, count) as (engine, devices):
        for words, got in zip(CHAINS, engine.map(CHAINS, progress=False), strict=True):
            want = plain_chain(model, words)
            torch.testing.assert_close(got["steps"], want)
            torch.testing.assert_close(got["state"], want[-1])
            assert got["length"] == len(words)
        assert num_taken(devices, engine) == len(CHAINS)
        assert engine.stats.cells >= sum(map(len, CHAINS))
        (said,) = engine.explain().cells
        assert said.form == "scheduled by the GPU itself"
        assert not [note for note in said.notes if "not scheduled" in note]
        assert engine.num_in_flight == 0


def test_trees_over_several_cells_too() -> None:
    model = Tree()
    with engine_of(model) as (engine, devices):
        for tree, (value, root) in zip(TREES, engine.map(TREES, progress=False), strict=True):
            want_value, want_root = plain_tree(model, tree)
            torch.testing.assert_close(value, want_value)
            torch.testing.assert_close(root, want_root)
        assert num_taken(devices, engine) == len(TREES)
        assert {cell.form for cell in engine.explain().cells} == {"scheduled by the GPU itself"}


def test_what_waits_for_values_is_the_schedulers_beside_it() -> None:
    model = Mixed()
    with engine_of(model) as (engine, devices):
        requests = [[1, 2, 3], [4], [5, 6, 7, 8]]
        for request, (value, steps) in zip(requests, engine.map(requests, progress=False), strict=True):
            want_value, want_steps = plainly(model, request)
            torch.testing.assert_close(value, want_value)
            torch.testing.assert_close(steps, want_steps)
        assert num_taken(devices, engine) == 0
        scheduler(engine).check_invariants()
    model = Chain()
    with engine_of(model) as (engine, devices):
        urgent = engine.submit([1, 2, 3], priority=1)
        other = engine.submit([1, 2, 3])
        torch.testing.assert_close(urgent.result()["steps"], other.result()["steps"])
        assert num_taken(devices, engine) == 1


def test_a_request_that_is_wrong_fails_alone() -> None:
    with engine_of(Chain()) as (engine, _):
        good, wrong = engine.submit([1, 2]), engine.submit([1, 77])
        assert good.result()["length"] == 2
        with pytest.raises(InvalidRequestError):
            wrong.result()


def test_the_cancelled_and_the_late_are_told_at_once_and_leave_nothing() -> None:
    model = Chain()
    with engine_of(model) as (engine, _):
        long = [1] * 900
        answers = engine.submit_many([long] * 6)
        late = engine.submit(long, deadline_ms=1)
        for answer in answers[:3]:
            answer.cancel()
        for answer in answers[:3]:
            with pytest.raises(CancelledError):
                answer.result()
        with pytest.raises(DeadlineError, match="not done by its deadline"):
            late.result()
        want = plain_chain(model, long)
        for answer in answers[3:]:
            torch.testing.assert_close(answer.result()["steps"], want)
        assert engine.map([[1, 2]], progress=False)[0]["length"] == 2
        (place,) = device_places(engine)
        end_s = time.monotonic() + 30
        while place.core.num_in_flight and time.monotonic() < end_s:
            time.sleep(0.01)
        assert place.core.left_behind() == ""


def test_stopping_without_draining_ends_all() -> None:
    with engine_of(Chain()) as (engine, _):
        answers = engine.submit_many([[1] * 900] * 20)
        engine.stop(drain=False)
        assert all(answer.done() for answer in answers)


def test_a_request_that_is_too_large_for_the_device_is_the_schedulers(caplog: pytest.LogCaptureFixture) -> None:
    model = Chain()
    with caplog.at_level(logging.INFO, "batchmaker.engine"), engine_of(model) as (engine, devices):
        long = [1] * 3000
        torch.testing.assert_close(engine.submit(long).result()["steps"], plain_chain(model, long))
        assert num_taken(devices, engine) == 0
    assert "a request needs 72,000 bytes of results, and there are 65,536" in caplog.text


def test_a_device_that_is_lost_ends_its_requests_with_one_error_each() -> None:
    with engine_of(Chain(), 2) as (engine, devices):
        answers = engine.submit_many([[1] * 900] * 20)
        for device in devices:
            device.lose("it fell off the bus")
        for answer in answers:
            with pytest.raises(DeviceError, match="it fell off the bus"):
                answer.result()
        assert engine.num_in_flight == 0
        assert "it fell off the bus" in str(engine.explain())


# --- the proof at the start ------------------------------------------------------------------------------------------


def test_a_device_that_computes_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model = Chain()
    device = emulated(background=True, mutate=lambda source: source.replace("where + step * stride;", "where;"))
    with caplog.at_level(logging.INFO, "batchmaker.engine"), running(model, device, policy="cellular") as engine:
        got = engine.map(CHAINS[:5], progress=False)
        for words, one in zip(CHAINS, got, strict=False):
            torch.testing.assert_close(one["steps"], plain_chain(model, words))
        (said,) = engine.explain().cells
        assert said.form == "recorded GPU launch"
        assert any("not scheduled by the GPU: output" in note and "differs" in note for note in said.notes)
    assert "is not scheduled by the GPU: output" in caplog.text


def test_why_a_device_is_not_used_is_said() -> None:
    for device, options, why in (
        (FakeDevice(background=True), {}, "DeviceError: this device compiles no kernels"),
        (emulated(background=True), {"policy": "lazy"}, "the policy is 'lazy'"),
        (emulated(background=True), {"policy": "cellular:max_steps=5"}, "the policy is 'cellular' with options"),
        (emulated(background=True, records=False), {}, "it waits for a value"),
    ):
        with running(Chain(), device, **{"policy": "cellular", **options}) as engine:
            assert engine.map([[1, 2]], progress=False)[0]["length"] == 2
            assert why in " ".join(str(engine.explain()).split())


class NoExample(Chain):
    def __init__(self) -> None:
        super().__init__()
        del self.example_request


def test_a_model_without_an_example_is_told_to_have_one() -> None:
    with running(NoExample(), emulated(background=True), policy="cellular") as engine:
        assert engine.map([[1, 2]], progress=False)[0]["length"] == 2
        assert "with an example_request in the model" in str(engine.explain())


# --- loops that end at a value ---------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """The next word by argmax, from a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.out = nn.Embedding(10, 6), nn.GRUCell(6, 6), nn.Linear(6, 10)

    def forward(self, word: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h = self.cell(self.embedding(word), h)
        return self.out(h).argmax(1), h


class Translator(bm.Model):
    """An encoder, and a decoder that ends at a word or after 9."""

    def __init__(self, until: Any = 3) -> None:
        torch.manual_seed(6)
        self.leaf, self.encoder = bm.Cell(Leaf(), batch_sizes=[1, 4]), bm.Cell(nn.GRUCell(6, 6), batch_sizes=[1, 4])
        self.decoder = bm.Cell(Decoder(), batch_sizes=[1, 4])
        self.until = until
        self.example_request = [1, 2, 3]

    def unfold(self, words: Sequence[int]) -> Any:
        h = self.encoder.run(self.leaf.map(words))
        word, end = self.decoder.loop((words[-1], h), max_steps=9, until=self.until)
        return word.steps, end, word


def plain_translation(model: Translator, words: Sequence[int]) -> tuple[list[int], Tensor]:
    with torch.no_grad():
        h, said = torch.zeros(1, 6), []
        for row in model.leaf.module(torch.tensor(words)):
            h = model.encoder.module(row[None], h)
        word = torch.tensor(words[-1:])
        while len(said) < 9 and (not said or said[-1] != 3):
            word, h = model.decoder.module(word, h)
            said.append(int(word))
        return said, h[0]


@pytest.mark.parametrize("until", [3, lambda word: word == 3])
def test_loops_end_at_a_word_on_the_device_and_at_a_function_on_the_host(until: Any) -> None:
    model = Translator(until)
    with engine_of(model) as (engine, devices):
        requests = [[(i * 7 + j * 3) % 10 for j in range(1 + i % 6)] for i in range(40)]
        lengths = set()
        for request, (steps, end, word) in zip(requests, engine.map(requests, progress=False), strict=True):
            said, h = plain_translation(model, request)
            assert steps.tolist() == said
            assert word == said[-1]
            torch.testing.assert_close(end, h)
            lengths.add(len(said))
        assert len(lengths) > 2
        assert num_taken(devices, engine) == (len(requests) if until == 3 else 0)
