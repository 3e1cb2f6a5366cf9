"""The CUDA executor on a device that does things late: rows, completion, recordings, several devices, lost devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine.engine import Engine
from batchmaker.errors import CellError, DeviceError, EngineError, OptionError
from batchmaker.executor.cuda.executor import CudaExecutor
from batchmaker.executor.cuda.open import open_devices
from covering import covering
from insides import gpu_places, scheduler
from waiting import wait_until


@contextmanager
def running(model: bm.Model, *devices: FakeDevice, **options: Any) -> Iterator[Engine]:
    """An engine on fake devices that work in threads of their own; their tensors are on the CPU, as its cells are."""
    registry = Late()
    engine = Engine(
        model, executor=CudaExecutor(registry, lambda type_id, _: registry.bound[type_id], devices), **options
    )
    registry.is_of(engine)
    try:
        with engine:
            yield engine
        for device in devices:
            assert device.error is None
    finally:
        for device in devices:
            device.close()


class Late(Sequence):
    """The types of an engine that is made after its executor."""

    def is_of(self, engine: Engine) -> None:
        self.types, self.bound = engine.registry.types, engine.registry.bound

    def __getitem__(self, at: Any) -> Any:
        return self.types[at]

    def __len__(self) -> int:
        return len(self.types)


def fakes(count: int, **options: Any) -> list[FakeDevice]:
    return [FakeDevice(f"fake {number}", seed=number, background=True, **options) for number in range(count)]


def tree(depth: int) -> Any:
    return [depth, depth + 1] if depth == 0 else [tree(depth - 1), depth]


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


class Mixed(bm.Model):
    """Chains, a tree over the ends of chains, and an argmax that is looked at on the way."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.chain = bm.Cell(nn.GRUCell(6, 6), **options)
        self.leaf = bm.Cell(Leaf(), **options)
        self.inner = bm.Cell(Inner(), **options)
        self.example_request = [1, 2, 3]

    def unfold(self, words: Sequence[int]) -> Any:
        leaves = self.leaf.map(words)
        ends = self.chain.run(leaves)
        value = ends
        for leaf in list(leaves)[: len(words) // 2]:
            value = self.inner(value, leaf)
        seen = yield value
        if float(seen[0]) > 0:
            value = self.inner(value, value)
        return [value, ends.steps]


def plainly(model: Mixed, words: Sequence[int]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        leaves = model.leaf.module(torch.tensor(words))
        h, steps = torch.zeros(1, 6), []
        for row in leaves:
            h = model.chain.module(row[None], h)
            steps.append(h[0])
        value = h
        for row in leaves[: len(words) // 2]:
            value = model.inner.module(value, row[None])
        if float(value[0, 0]) > 0:
            value = model.inner.module(value, value)
        return value[0], torch.stack(steps)


REQUESTS = [[(i * 7 + j) % 10 for j in range(1 + (i * 5) % 9)] for i in range(40)]


@pytest.mark.parametrize(("count", "records"), covering([1, 2, 3], [True, False]))
def test_every_request_gets_what_plain_pytorch_computes(count: int, records: bool) -> None:
    model = Mixed(batch_sizes=[2, 3, 8])
    with running(model, *fakes(count, records=records)) as engine:
        for request, (value, steps) in zip(REQUESTS, engine.map(REQUESTS, progress=False), strict=True):
            want_value, want_steps = plainly(model, request)
            torch.testing.assert_close(value, want_value)
            torch.testing.assert_close(steps, want_steps)
        scheduler(engine).check_invariants()


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [64]])
def test_whatever_is_asked_results_never_change(sizes: Any) -> None:
    model = Mixed(batch_sizes=sizes)
    lists = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=25)
    with running(model, *fakes(2)) as engine:

        @settings(max_examples=20, deadline=None, database=None)
        @given(requests=lists)
        def check(requests: Any) -> None:
            for request, (value, steps) in zip(requests, engine.map(requests, progress=False), strict=True):
                want_value, want_steps = plainly(model, request)
                torch.testing.assert_close(value, want_value)
                torch.testing.assert_close(steps, want_steps)

        check()


def test_every_supported_size_is_recorded_at_the_start_and_none_later() -> None:
    (device,) = fakes(1)
    model = Mixed(batch_sizes=[1, 2, 4])
    with running(model, device) as engine:
        recorded = device.num_recorded
        assert recorded >= 3 * 3
        engine.map(REQUESTS, progress=False)
        assert device.num_recorded == recorded
        assert device.num_launched >= engine.stats.steps
        assert engine.stats.padded_cells > engine.stats.cells


def test_the_blocks_of_all_steps_of_a_task_go_to_the_device_together() -> None:
    (device,) = fakes(1)
    with running(Mixed(batch_sizes=[1, 2, 4]), device) as engine:
        before, tasks = device.num_uploads, engine.stats.tasks
        engine.map(REQUESTS, progress=False)
        assert device.num_uploads - before == engine.stats.tasks - tasks
        assert engine.stats.steps > engine.stats.tasks


class Halved(nn.Module):
    """(n, rest) -> (n // 2, whether that is odd, n // 2, rest - 1)."""

    def forward(self, n: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
        half = n // 2
        return half, half % 2 == 1, half, rest - 1


class Halving(bm.Model):
    example_request = 8

    def __init__(self) -> None:
        self.halve = bm.Cell(Halved(), batch_sizes=[2, 8])

    def unfold(self, n: int) -> Any:
        halves, *_ = self.halve.loop((n, 3), until={1: True, 3: lambda rest: rest == 0}, max_steps=6)
        return halves.steps


def test_a_loop_on_a_device_ends_at_any_of_the_outputs_that_it_watches() -> None:
    with running(Halving(), *fakes(1)) as engine:
        found = [steps.tolist() for steps in engine.map([8, 3, 64, 40, 2], progress=False)]
    assert found == [[4, 2, 1], [1], [32, 16, 8], [20, 10, 5], [1]]


class Masked(nn.Module):
    """Looks a word up, and keeps the state where the mask says so: it reads the mask before the word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.linear = nn.Linear(6, 6)

    def forward(self, word: Tensor, mask: Tensor, unused: Tensor, h: Tensor) -> Tensor:
        kept = torch.where(mask[:, None], self.linear(h), h)
        return torch.tanh(self.embedding(word) + kept)


class Unused(nn.Module):
    """Does not look at one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, unused: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.tanh(x + self.linear(h))
        return after.sum(1), after


@pytest.mark.parametrize("module", [Masked, Unused])
def test_inputs_that_a_step_reads_in_another_order_or_not_at_all_are_its_own(module: type[nn.Module]) -> None:
    class Chain(bm.Model):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.chain = bm.Cell(module(), batch_sizes=[1, 4])

        def unfold(self, words: Sequence[int]) -> Any:
            unused = [[float(word)] * 3 for word in words]
            if module is Masked:
                mask = torch.tensor([word % 2 == 0 for word in words])
                return self.chain.run((torch.tensor(words), mask, torch.tensor(unused)))
            return self.chain.run((torch.tensor([[float(word)] * 6 for word in words]), torch.tensor(unused)))

    with Engine(Chain()) as engine:
        wanted = engine.map(REQUESTS, progress=False)
    with running(Chain(), *fakes(1)) as engine:
        for found, want in zip(engine.map(REQUESTS, progress=False), wanted, strict=True):
            torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_busy_time_counts_what_a_chain_computes_ahead_of_its_steps() -> None:
    class Chain(bm.Model):
        def __init__(self) -> None:
            self.chain = bm.Cell(nn.GRUCell(6, 6), batch_sizes=[4])

        def unfold(self, count: int) -> Any:
            return self.chain.run([[1.0] * 6] * count)

    with running(Chain(), *fakes(1)) as engine:
        engine.map([5, 7, 2], progress=False)
        alone_ns = 3000  # from a step's gathering to its signal on the fake device, which takes 1000 for everything
        assert round(1e9 * engine.stats.busy_s) > alone_ns * engine.stats.steps


def test_state_moves_with_the_work_that_needs_it() -> None:
    class Handed(bm.Model):
        """A wide start whose ends all meet: chains of both devices are read on one."""

        def __init__(self) -> None:
            torch.manual_seed(0)
            self.chain = bm.Cell(nn.GRUCell(6, 6), batch_sizes=[1])
            self.inner = bm.Cell(Inner(), batch_sizes=[1])

        def unfold(self, count: int) -> Any:
            ends = [self.chain.run([[float(i)] * 6] * 3) for i in range(count)]
            value = ends[0]
            for end in ends[1:]:
                value = self.inner(value, end)
            return value

    model = Handed()
    devices = fakes(2)
    with running(model, *devices) as engine:
        answers = engine.map([6] * 8, progress=False)
    for answer in answers:
        torch.testing.assert_close(answer, answers[0])
    assert sum(device.num_rows_copied for device in devices) > 0


class Fussy(nn.Module):
    """Refuses large numbers, once it has looked at them."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise ValueError("too large")
        return x + 1


class OneByOne(bm.Model):
    def __init__(self) -> None:
        self.cell = bm.Cell(Fussy(), batch_sizes=[64])

    def unfold(self, x: float) -> Any:
        return self.cell([float(x)])


def test_a_row_that_makes_a_cell_raise_fails_alone() -> None:
    with running(OneByOne(), *fakes(1, records=False)) as engine:
        futures = [engine.submit(1000.0 if i == 30 else float(i)) for i in range(64)]
        for i, future in enumerate(futures):
            if i == 30:
                with pytest.raises(CellError, match="cell 'cell' raised ValueError: too large"):
                    future.result(timeout=120)
            else:
                assert future.result(timeout=120).tolist() == [i + 1.0]
        assert engine.driver.executor.notes == ["cell 'cell' is not recorded: it waits for a value"]
        (cell,) = engine.explain().cells
        assert (cell.form, cell.why) == ("GPU launches one by one", "cell 'cell' is not recorded: it waits for a value")
        assert cell.one_by_one >= 1


def test_an_engine_on_gpus_tells_how_each_cell_runs_there() -> None:
    devices = fakes(2)
    with running(Mixed(batch_sizes=[1, 4]), *devices) as engine:
        engine.map(REQUESTS, progress=False)
        told = engine.explain()
        assert told.cells
        assert {cell.form for cell in told.cells} <= {"recorded GPU launch", "one GPU kernel for all steps of a task"}
        assert all(cell.in_loop + cell.one_by_one >= 1 for cell in told.cells)
        for device in devices:
            device.lose()
        wait_until(lambda: engine.submit(REQUESTS[0]).exception(120) and len(engine.driver.executor.notes) == 2)
        first = engine.explain().cells[0]
    assert "every device was lost" in first.form
    assert sorted(first.why.split("; ")) == [
        f"device {number} (fake {number}) was lost: it fell off the bus" for number in (0, 1)
    ]


def test_a_lost_device_fails_what_was_there_and_the_others_go_on() -> None:
    model = Mixed(batch_sizes=[1, 4])
    devices = fakes(2)
    with running(model, *devices) as engine:
        futures = [engine.submit(request) for request in REQUESTS * 4]
        futures[5].exception(timeout=120)
        devices[0].lose()
        outcomes = [future.exception(timeout=120) for future in futures]
        for request, future, error in zip(REQUESTS * 4, futures, outcomes, strict=True):
            if error is None:
                torch.testing.assert_close(future.result()[0], plainly(model, request)[0])
            else:
                assert isinstance(error, CellError | DeviceError)
                assert "lost" in str(error) or "it fell off the bus" in str(error)
        assert any(error is None for error in outcomes)
        for request, (value, _) in zip(REQUESTS, engine.map(REQUESTS, progress=False), strict=True):
            torch.testing.assert_close(value, plainly(model, request)[0])
        assert engine.driver.executor.notes == ["device 0 (fake 0) was lost: it fell off the bus"]
        lost = gpu_places(engine)[0]
        assert lost.num_finished == lost.num_submitted, "the watcher would wait for the lost device without end"
        scheduler(engine).check_invariants()


def test_an_engine_that_begins_anew_goes_on_with_its_devices() -> None:
    model = Mixed(batch_sizes=[1, 4])
    with running(model, *fakes(2)) as engine:
        engine.map(REQUESTS, progress=False)
        before = engine.driver.executor

        def fails(*_: Any) -> Any:
            raise ValueError("a defect")

        scheduler(engine).handle = fails
        assert isinstance(engine.submit(REQUESTS[0]).exception(timeout=120), EngineError)
        for request, (value, _) in zip(REQUESTS, engine.map(REQUESTS, progress=False), strict=True):
            torch.testing.assert_close(value, plainly(model, request)[0])
        assert engine.driver.executor is not before
        assert engine.driver.executor.num_workers == 2
        scheduler(engine).check_invariants()


def test_with_the_last_device_every_request_fails_and_the_engine_lives() -> None:
    (device,) = fakes(1)
    with running(Mixed(), device) as engine:
        device.lose()
        for _ in range(3):
            with pytest.raises(CellError, match=r"no device is left|it fell off the bus"):
                engine.submit([1, 2]).result(timeout=120)


def test_memory_that_runs_out_fails_the_task_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    (device,) = fakes(1)
    with running(OneByOne(), device) as engine:
        assert engine.submit(1.0).result(timeout=120).tolist() == [2.0]
        with monkeypatch.context() as patch:
            patch.setattr(device, "upload", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
            with pytest.raises(CellError, match="OutOfMemoryError: full"):
                engine.submit(1.0).result(timeout=120)
        assert engine.submit(2.0).result(timeout=120).tolist() == [3.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_error_says_what_is_missing() -> None:
    with pytest.raises(DeviceError, match=r"device 'cuda'.*use device 'cpu'"):
        Engine(OneByOne(), device="cuda")


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(OptionError, match="tf32=True is for GPUs"):
        Engine(OneByOne(), tf32=True)


def test_devices_have_names() -> None:
    with pytest.raises(OptionError, match="'cpu', 'cuda' or like 'cuda:0'"):
        open_devices("gpu0")
    with pytest.raises(OptionError, match="at least one"):
        CudaExecutor([], None, [])  # type: ignore[arg-type]
