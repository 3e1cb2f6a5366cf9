"""The CUDA executor and its device on a real GPU; everything here is skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_cuda_executor import REQUESTS, Mixed, OneByOne, plainly
from test_whole_tasks import LENGTHS, MODULES, Chain, flat, vectors
from torch import Tensor

from batchmaker.engine.engine import Engine
from batchmaker.errors import CellError
from batchmaker.executor.cuda.device import HEADER_WORDS, CannotRecordError
from batchmaker.executor.cuda.gpu import Gpu
from batchmaker.executor.cuda.open import open_devices
from batchmaker.lab import zoo
from insides import scheduler

pytestmark = pytest.mark.gpu

TOLERANCES = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 4e-3}
SENTENCES = [[(i * 7 + j * 3) % 50 for j in range(1 + (i * 5) % 17)] for i in range(60)]


@pytest.fixture
def gpu() -> Iterator[Any]:
    (device,) = open_devices("cuda:0")
    yield device
    device.stop()


def columns_of(*buffers: Tensor) -> Tensor:
    described = [(buffer.data_ptr(), buffer[:1].nbytes) for buffer in buffers]
    return torch.tensor(described, dtype=torch.int64, device=buffers[0].device)


def block_of(gpu: Any, addresses: np.ndarray, *header: int) -> tuple[Tensor, Tensor]:
    """Return where a device looks for its block, and the block; both must stay while it is used."""
    words = gpu.pinned(8 * (HEADER_WORDS + len(addresses))).view(np.int64)
    words[:HEADER_WORDS] = (*header, *[0] * (HEADER_WORDS - len(header)))
    words[HEADER_WORDS:] = addresses
    block, where, home = gpu.zeros((len(words),), torch.int64), gpu.zeros((1,), torch.int64), gpu.pinned(8)
    home.view(np.int64)[0] = block.data_ptr()
    gpu.upload((where, home.view(np.int64)), (block, words))
    gpu.stop()
    return where, block


# --- the device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 8, 300, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_come_from_anywhere_and_go_anywhere(gpu: Any, width: int, dtype: torch.dtype) -> None:
    count, size = 5, width * dtype.itemsize
    table = torch.arange(7 * width, device="cuda").to(dtype).view(7, width)
    host = gpu.pinned(2 * size)
    there = torch.from_numpy(host).view(dtype).view(2, width)
    there[:] = torch.arange(2 * width).to(dtype).view(2, width) + 1
    buffer = gpu.zeros((count, width), dtype)
    table_at, host_at = table.data_ptr(), host.ctypes.data
    torch.cuda.synchronize()
    sources = np.array([table_at + 6 * size, 0, host_at + size, table_at, host_at], np.int64)
    where, _block = block_of(gpu, sources)
    gpu.move_rows(where, HEADER_WORDS, columns_of(buffer), count, to_addresses=False)
    gpu.stop()
    wanted = torch.stack([table[6].cpu(), torch.zeros(width).to(dtype), there[1], table[0].cpu(), there[0]])
    torch.testing.assert_close(buffer.cpu(), wanted)

    back = gpu.zeros((7, width), dtype)
    gpu.stop()
    targets = np.array([host_at, back.data_ptr() + 2 * size, 0, back.data_ptr(), host_at + size], np.int64)
    where, _block = block_of(gpu, targets)
    gpu.move_rows(where, HEADER_WORDS, columns_of(buffer), count, to_addresses=True)
    gpu.stop()
    torch.testing.assert_close(there, wanted[[0, 4]])
    torch.testing.assert_close(back.cpu()[[2, 0]], wanted[[1, 3]])
    assert not back.cpu()[[1, 3, 4, 5, 6]].any()


def test_a_step_notes_its_times_and_then_its_number_and_the_next_block_is_in_turn(gpu: Any) -> None:
    memory = gpu.pinned(24).view(np.int64)
    memory[:] = 0
    at = memory.ctypes.data
    buffer = gpu.zeros((1, 4), torch.float32)
    following = gpu.zeros((HEADER_WORDS,), torch.int64)
    where, _block = block_of(gpu, np.zeros(1, np.int64), 17, at, at + 8, at + 16, following.data_ptr())
    gpu.move_rows(where, HEADER_WORDS, columns_of(buffer), 1, to_addresses=False)
    gpu.signal(where)
    gpu.stop()
    begin, end, counter = memory.tolist()
    assert counter == 17
    assert 0 < begin <= end
    assert int(where) == following.data_ptr()


def test_what_is_recorded_runs_again_on_new_values(gpu: Any) -> None:
    given, kept = gpu.zeros((4, 8), torch.float32), []

    def work() -> None:
        kept[:] = gpu.compute(lambda: (given * 2 + 1,))

    launch = gpu.record(work)
    for value in (1.0, 5.0):
        gpu.compute(lambda value=value: (given.fill_(value),))
        with gpu.submitting():
            launch()
        assert gpu.read(kept[0]).unique().tolist() == [2 * value + 1]


def test_work_that_waits_is_not_recorded_and_what_comes_after_is(gpu: Any) -> None:
    given = gpu.zeros((4,), torch.float32)

    def waits() -> None:
        gpu.compute(lambda: (given + float(given.sum()),))

    for _ in range(2):
        with pytest.raises(CannotRecordError, match="waits for a value"):
            gpu.record(waits)
    launch = gpu.record(lambda: gpu.compute(lambda: (given + 1,)) and None)
    with gpu.submitting():
        launch()
    gpu.check()


def test_a_recording_that_breaks_leaves_the_device_usable(gpu: Any) -> None:
    given, calls = gpu.zeros((4,), torch.float32), []

    def breaks_when_recorded() -> None:
        calls.append(1)
        gpu.compute(lambda: (given + (float(given.sum()) if len(calls) > 2 else 0.0),))

    with pytest.raises(CannotRecordError):
        gpu.record(breaks_when_recorded)
    assert len(calls) == 3
    kept: list[Tensor] = []
    launch = gpu.record(lambda: kept.extend(gpu.compute(lambda: (given + 1,))))
    with gpu.submitting():
        launch()
    assert gpu.read(kept[-1]).tolist() == [1.0] * 4


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [3, 64]])
def test_every_request_gets_what_plain_pytorch_computes_on_a_gpu(sizes: list[int]) -> None:
    model = Mixed(batch_sizes=sizes)
    with Engine(model, device="cuda:0") as engine:
        for request, (value, steps) in zip(REQUESTS, engine.map(REQUESTS, progress=False), strict=True):
            want_value, want_steps = plainly(model, request)
            torch.testing.assert_close(value, want_value, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(steps, want_steps, rtol=1e-4, atol=1e-5)
        scheduler(engine).check_invariants()
        assert engine.stats.busy_s > 0
        assert engine.driver.executor.notes == []


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_states_are_those_of_the_cpu(name: str, dtype: str) -> None:
    wanted = in_float32(name, SENTENCES)
    model = zoo.make(name, hidden=64, vocabulary_size=50, layers=2, dtype=dtype)
    with Engine(model, device="cuda:0") as engine:
        for answer, want in zip(engine.map(SENTENCES, progress=False), wanted, strict=True):
            torch.testing.assert_close(answer.float(), want, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_tasks_in_one_launch_give_what_single_steps_do(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.make("lstm", hidden=64, vocabulary_size=50, dtype=dtype, max_batch=16)
    with Engine(model, device="cuda:0") as engine:
        found = engine.map(SENTENCES, progress=False)
        assert engine.driver.executor.num_whole_tasks > 0
        assert engine.driver.executor.notes == []
    monkeypatch.setattr(Gpu, "recurrent", lambda *_: None)
    with Engine(model, device="cuda:0") as engine:
        wanted = engine.map(SENTENCES, progress=False)
        assert engine.driver.executor.num_whole_tasks == 0
    for answer, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(answer.float(), want.float(), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_step_of_a_task_in_one_launch_is_that_of_the_cpu(module: Any) -> None:
    model = Chain(module, reads=3, max_batch=8)
    requests = vectors(LENGTHS)
    with Engine(model) as engine:
        wanted = engine.map(requests, progress=False)
    with Engine(model, device="cuda:0") as engine:
        for answer, want in zip(engine.map(requests, progress=False), wanted, strict=True):
            for mine, right in zip(flat(answer), flat(want), strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
        assert engine.driver.executor.num_whole_tasks > 0


def test_tf32_stays_within_its_tolerance() -> None:
    wanted = in_float32("lstm", SENTENCES)
    model = zoo.make("lstm", hidden=64, vocabulary_size=50, layers=2)
    before = torch.get_float32_matmul_precision()
    with Engine(model, device="cuda:0", tf32=True) as engine:
        for answer, want in zip(engine.map(SENTENCES, progress=False), wanted, strict=True):
            torch.testing.assert_close(answer, want, rtol=0, atol=4e-3)
    assert torch.get_float32_matmul_precision() == before


def in_float32(name: str, requests: list[Any]) -> list[Tensor]:
    """What the same weights give on the CPU."""
    with Engine(zoo.make(name, hidden=64, vocabulary_size=50, layers=2)) as engine:
        return engine.map(requests, progress=False)


def test_translations_are_those_of_the_cpu() -> None:
    model = zoo.make("seq2seq", hidden=32, vocabulary_size=50)
    with Engine(model) as engine:
        wanted = engine.map(SENTENCES, progress=False)
    with Engine(model, device="cuda:0") as engine:
        answers = engine.map(SENTENCES, progress=False)
    same = sum(torch.equal(answer, want) for answer, want in zip(answers, wanted, strict=True))
    assert same >= len(SENTENCES) - 2  # words whose scores are as good as equal may differ


def test_roots_of_trees_are_those_of_the_cpu() -> None:
    model = zoo.make("treelstm", hidden=32, vocabulary_size=50)
    trees = [balanced(2 + i % 9, i) for i in range(30)]
    with Engine(model) as engine:
        wanted = engine.map(trees, progress=False)
    with Engine(model, device="cuda:0") as engine:
        for answer, want in zip(engine.map(trees, progress=False), wanted, strict=True):
            torch.testing.assert_close(answer, want, rtol=1e-4, atol=1e-5)


def balanced(num_words: int, seed: int) -> dict[str, Any]:
    """A tree over so many words that joins the first two that are left, again and again."""
    line, children = list(range(num_words)), []
    while len(line) > 1:
        children.append(line[:2])
        line = [*line[2:], num_words + len(children) - 1]
    return {"words": [(seed + i) % 50 for i in range(num_words)], "children": children}


def test_a_cell_that_looks_at_values_runs_and_a_bad_row_fails_alone() -> None:
    with Engine(OneByOne(), device="cuda:0") as engine:
        futures = [engine.submit(1000.0 if i == 30 else float(i)) for i in range(64)]
        for i, future in enumerate(futures):
            if i == 30:
                with pytest.raises(CellError, match="cell 'cell' raised ValueError: too large"):
                    future.result(timeout=120)
            else:
                assert future.result(timeout=120).tolist() == [i + 1.0]
        (note,) = engine.driver.executor.notes
        assert "cell 'cell' is not recorded: it waits for a value" in note


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does() -> None:
    model = Mixed(batch_sizes=[1, 4])
    with Engine(model, device="cuda:0,1") as engine:
        for request, (value, _) in zip(REQUESTS * 4, engine.map(REQUESTS * 4, progress=False), strict=True):
            torch.testing.assert_close(value, plainly(model, request)[0], rtol=1e-4, atol=1e-5)
