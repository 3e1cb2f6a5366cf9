"""Tasks of LSTM and GRU chains in one launch, on the fake device, beside the same requests on the CPU step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_executor import Inner, fakes, running
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine.engine import Engine
from batchmaker.lab import zoo
from covering import covering
from insides import scheduler


class Swapped(nn.Module):
    """An LSTM whose state is (c, h), with h once more as an output that is not state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(4, 6)

    def forward(self, x: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.lstm(x, (h, c))
        return h, c, h


class Chain(bm.Model):
    """A chain over vectors: its state at the end, each step's first output, and what a tree makes of some of them."""

    def __init__(self, module: nn.Module, *, reads: int = 0, **options: Any) -> None:
        self.cell = bm.Cell(module, **options)
        self.inner = bm.Cell(Inner(), **options)
        self.reads = reads
        self.example_request = [[0.0] * 4, [1.0] * 4]

    def unfold(self, vectors: Sequence[Any]) -> Any:
        after = self.cell.run(vectors)
        parts = list(after) if isinstance(after, tuple) else [after]
        value = parts[0]
        for step in list(parts[0].steps)[: self.reads]:
            value = self.inner(value, step)
        return [*parts, parts[0].steps, value]


class Handed(bm.Model):
    """Two chains of one cell, the second from the state that the first has left, and from one that a tree has made."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(5)
        self.cell = bm.Cell(nn.GRUCell(4, 6), **options)
        self.inner = bm.Cell(Inner(), **options)
        self.example_request = [[0.0] * 4, [1.0] * 4]

    def unfold(self, vectors: Sequence[Any]) -> Any:
        first = self.cell.run(vectors)
        second = self.cell.run(vectors[::-1], first)
        third = self.cell.run(vectors, self.inner(first, second))
        return [first.steps, second.steps, third.steps]


class Late(bm.Model):
    """Waits for a value in the middle, so that chains join what runs already."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(6)
        self.cell = bm.Cell(nn.LSTMCell(4, 6), **options)
        self.example_request = [[0.0] * 4, [1.0] * 4]

    def unfold(self, vectors: Sequence[Any]) -> Any:
        h, c = self.cell.run(vectors)
        seen = yield h
        h, c = self.cell.run(vectors if float(seen[0]) > 0 else vectors[:1], (h, c))
        return [h, c]


def vectors(lengths: Sequence[int], seed: int = 0) -> list[list[list[float]]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, 4, generator=random).tolist() for length in lengths]


def flat(answer: Any) -> list[Tensor]:
    return [answer] if isinstance(answer, Tensor) else [each for part in answer for each in flat(part)]


def assert_agrees(model: bm.Model, requests: Sequence[Any], *devices: FakeDevice, atol: float = 1e-6) -> list[str]:
    """Compare answers on devices with those of the CPU; return the executor's notes."""
    with Engine(model) as engine:
        wanted = engine.map(requests, progress=False)
    with running(model, *devices) as engine:
        found = engine.map(requests, progress=False)
        scheduler(engine).check_invariants()
        notes = engine.driver.executor.notes
    for mine, right in zip(found, wanted, strict=True):
        for a, b in zip(flat(mine), flat(right), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=atol)
    return notes


LENGTHS = [1 + (i * 7) % 11 for i in range(40)]
MODULES = [nn.GRUCell(4, 6), nn.GRUCell(4, 6, bias=False), nn.LSTMCell(4, 6), Swapped()]


@pytest.mark.parametrize(("sizes", "module"), covering([[1, 2, 4, 8], [3, 64]], MODULES), ids=str)
def test_answers_are_those_of_the_cpu(module: nn.Module, sizes: list[int]) -> None:
    (device,) = fakes(1, at_once=2)
    assert assert_agrees(Chain(module, batch_sizes=sizes), vectors(LENGTHS), device) == []
    assert device.num_recurrent > 0


@pytest.mark.parametrize(("model", "count"), covering([Handed, Late], [1, 3]))
def test_chains_that_begin_where_others_end_get_their_state(model: Any, count: int) -> None:
    devices = fakes(count, at_once=2)
    assert_agrees(model(batch_sizes=[2, 3, 8]), vectors(LENGTHS), *devices)
    assert sum(device.num_recurrent for device in devices) > 0


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=20),
    most=st.integers(1, 9),
    seed=st.integers(0, 1000),
    lstm=st.booleans(),
)
def test_whatever_is_asked_results_never_change(lengths: list[int], most: int, seed: int, lstm: bool) -> None:
    torch.manual_seed(seed)
    device = FakeDevice(seed=seed, background=True, at_once=2)
    model = Late(max_batch=most) if lstm else Handed(max_batch=most)
    assert_agrees(model, vectors(lengths, seed), device)


NEAR = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}


@pytest.mark.parametrize(("dtype", "name"), covering(NEAR, ["lstm", "gru"]))
def test_tokens_and_sixteen_bits(name: str, dtype: str) -> None:
    (device,) = fakes(1, at_once=2)
    model = zoo.make(name, hidden=16, vocabulary_size=50, dtype=dtype, max_batch=8)
    sentences = [[(i * 7 + j * 3) % 50 for j in range(length)] for i, length in enumerate(LENGTHS)]
    assert_agrees(model, sentences, device, atol=NEAR[dtype])
    assert device.num_recurrent > 0


def test_h_of_every_step_may_be_read_by_other_cells() -> None:
    (device,) = fakes(1, at_once=2)
    assert_agrees(Chain(nn.GRUCell(4, 6), reads=3, max_batch=8), vectors(LENGTHS), device)
    assert device.num_recurrent > 0


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_c_of_every_step_may_be_read_by_other_cells(dtype: str, atol: float) -> None:
    class ReadsC(bm.Model):
        def __init__(self) -> None:
            torch.manual_seed(7)
            kind = getattr(torch, dtype)
            self.cell = bm.Cell(nn.LSTMCell(4, 6).to(kind), max_batch=8)
            self.inner = bm.Cell(Inner().to(kind), max_batch=8)
            self.example_request = [[0.0] * 4, [1.0] * 4]

        def unfold(self, vectors: Sequence[Any]) -> Any:
            h, c = self.cell.run(torch.tensor(vectors, dtype=getattr(torch, dtype)))
            inner = [self.inner(h, c) for h, c in zip(h.steps, c.steps, strict=True)]
            return [c.steps, *inner]

    (device,) = fakes(1, at_once=2)
    assert_agrees(ReadsC(), vectors([6] * 40), device, atol=atol)
    assert device.num_recurrent > 2 * 2 * recorded_sizes(8)  # each ran twice while it was recorded


def recorded_sizes(max_batch: int) -> int:
    return next(power for power in range(9) if 4**power >= 2 * max_batch) + 1


def test_what_is_more_than_one_layer_runs_step_by_step() -> None:
    (device,) = fakes(1, at_once=2)
    model = zoo.make("lstm", hidden=8, vocabulary_size=50, layers=2, max_batch=8)
    assert_agrees(model, [[1, 2, 3, 4], [5, 6]], device)
    assert device.num_recurrent == 0


def test_tasks_of_fewer_steps_than_it_takes_run_step_by_step() -> None:
    (device,) = fakes(1, at_once=3)
    assert_agrees(Chain(nn.GRUCell(4, 6), max_batch=4), vectors([2] * 4), device)
    assert device.num_recurrent == 2 * recorded_sizes(4)


def test_all_sizes_are_recorded_at_the_start_and_none_later() -> None:
    (device,) = fakes(1, at_once=2)
    with running(Chain(nn.LSTMCell(4, 6), max_batch=8), device) as engine:
        recorded = device.num_recorded
        engine.map(vectors(LENGTHS), progress=False)
        assert device.num_recorded == recorded
        assert engine.stats.steps > 0
        assert round(1e9 * engine.stats.busy_s) > 0


def test_what_cannot_be_recorded_runs_step_by_step_and_there_is_a_note() -> None:
    (device,) = fakes(1, at_once=2, records=False)
    notes = assert_agrees(Chain(nn.GRUCell(4, 6), max_batch=8), vectors(LENGTHS), device)
    assert "tasks of cell 'cell' do not run at once: it waits for a value" in notes


def test_a_lost_device_fails_what_was_there_and_the_others_go_on() -> None:
    model, devices = Chain(nn.GRUCell(4, 6), max_batch=4), fakes(2, at_once=2)
    requests = vectors(LENGTHS)
    with Engine(model) as engine:
        wanted = engine.map(requests, progress=False)
    with running(model, *devices) as engine:
        futures = [engine.submit(request) for request in requests]
        futures[3].exception(timeout=120)
        devices[0].lose()
        for future, right in zip(futures, wanted, strict=True):
            if future.exception(timeout=120) is None:
                torch.testing.assert_close(future.result()[0], right[0])
        for answer, right in zip(engine.map(requests, progress=False), wanted, strict=True):
            torch.testing.assert_close(answer[1], right[1])
