"""What the GPU behind the seam makes of errors and of work that cannot be recorded, on a stand-in for torch.cuda.

Nothing is computed here. tests/executor/test_gpu.py is the same on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchmaker.errors import DeviceError
from batchmaker.executor.cuda import gpu as module
from batchmaker.executor.cuda.device import CannotRecordError, DeviceLostError
from batchmaker.executor.cuda.gpu import Gpu


class Cuda:
    """A stand-in for torch.cuda. lost: the stream answers no more. breaks: the end of a capture fails."""

    def __init__(self) -> None:
        self.lost = self.breaks = self.capturing = False
        self.mode: Any = 0
        self.pools: list[int] = []
        self.captured_in: list[int] = []
        self.ended: list[int] = []
        self.replays = 0
        self.cuda_stream = 7
        self.copies: list[tuple[int, int, int, int]] = []
        self.copied: Any = 0

    def query(self) -> bool:
        assert not self.capturing, "a stream that is being recorded must not be asked"
        if self.lost:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand advice")
        return False

    def synchronize(self) -> None:
        self.query()

    def new_pool(self) -> int:
        self.pools.append(len(self.pools))
        return self.pools[-1]

    def set_mode(self, mode: Any) -> None:
        self.mode = mode

    def replay(self) -> None:
        self.replays += 1

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any]:
        self.copies.append((target, source, num_bytes, stream))
        return (self.copied,)

    @contextmanager
    def capture(self, graph: Any, *, pool: int, stream: Any, capture_error_mode: str) -> Any:
        self.captured_in.append(pool)
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
            if self.breaks:
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def end_pool(self, device: int, pool: int) -> None:
        if not self.breaks:
            raise RuntimeError("not currently recording to mempool_id")
        self.ended.append(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    for name, value in {
        "get_device_name": lambda number: "a GPU", "Stream": lambda device: cuda, "graph_pool_handle": cuda.new_pool,
        "device": lambda number: nullcontext(), "stream": lambda stream: nullcontext(), "CUDAGraph": lambda: cuda,
        "graph": cuda.capture, "synchronize": lambda: None, "get_sync_debug_mode": lambda: cuda.mode,
        "set_sync_debug_mode": cuda.set_mode,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_pool, raising=False)
    monkeypatch.setattr(module, "found_device", lambda number: SimpleNamespace(arch="sm_90"))
    monkeypatch.setattr(module, "_loaded", lambda number, arch, source, names: (None, None))
    monkeypatch.setattr(module, "_core", lambda: SimpleNamespace(Stream=SimpleNamespace(from_handle=lambda handle: 0)))
    monkeypatch.setattr(module, "_driver", lambda: SimpleNamespace(cuMemcpyHtoDAsync=cuda.copy))
    return cuda


def test_work_runs_twice_before_it_is_recorded_and_then_at_every_launch(cuda: Cuda) -> None:
    runs: list[bool] = []
    launch = Gpu(0).record(lambda: runs.append(cuda.capturing))
    assert runs == [False, False, True]
    launch()
    launch()
    assert cuda.replays == 2


def test_work_that_waits_is_never_captured(cuda: Cuda) -> None:
    def waits() -> None:
        if cuda.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)

    with pytest.raises(CannotRecordError, match="it waits for a value"):
        Gpu(0).record(waits)
    assert cuda.captured_in == []
    assert cuda.mode == 0


def test_a_capture_that_breaks_is_cleaned_up_and_the_next_has_fresh_memory(cuda: Cuda) -> None:
    device = Gpu(0)

    def refused() -> None:
        if cuda.capturing:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    cuda.breaks = True
    with pytest.raises(CannotRecordError, match="during capture"):
        device.record(refused)
    assert cuda.ended == cuda.captured_in == [0]
    cuda.breaks = False
    device.record(lambda: None)()
    assert cuda.captured_in == [0, 1]
    assert cuda.replays == 1


def test_an_error_of_the_cell_itself_is_the_reason(cuda: Cuda) -> None:
    def raises() -> None:
        raise ValueError("no such shape\nmore of it")

    with pytest.raises(CannotRecordError, match=r"^no such shape$"):
        Gpu(0).record(raises)


def test_memory_that_runs_out_is_not_a_reason_to_run_without_a_recording(cuda: Cuda) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        Gpu(0).record(full)


def test_a_device_is_lost_when_its_stream_answers_no_more_and_not_before(cuda: Cuda) -> None:
    device = Gpu(0)

    def fails() -> Any:
        raise torch.AcceleratorError("CUDA error: invalid argument")

    with pytest.raises(torch.AcceleratorError, match="invalid argument"):
        device.compute(fails)
    device.check()
    cuda.lost = True
    for call in (lambda: device.compute(fails), device.check, lambda: device.record(lambda: None), device.stop):
        with pytest.raises(DeviceLostError, match=r"unspecified launch failure$") as caught:
            call()
        assert caught.value.device is device


def test_a_launch_that_fails_says_so_and_asks_whether_the_device_lives(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Gpu(0)

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    core = SimpleNamespace(
        Device=lambda number: SimpleNamespace(set_current=lambda: None), LaunchConfig=lambda **_: None, launch=refuse
    )
    monkeypatch.setattr(module, "_core", lambda: core)
    block = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(DeviceError, match=r"GPU 0 \(a GPU\): a launch failed: CUDA_ERROR"):
        device.signal(block)
    cuda.lost = True
    with pytest.raises(DeviceLostError):
        device.signal(block)


def test_arrays_are_copied_in_order_and_a_copy_that_fails_says_so(cuda: Cuda) -> None:
    device, source = Gpu(0), np.arange(3)
    one, other = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    device.upload((one, source), (other, source))
    assert cuda.copies == [(one.data_ptr(), source.ctypes.data, 24, 7), (other.data_ptr(), source.ctypes.data, 24, 7)]
    with pytest.raises(ValueError, match="24 bytes do not fit into 16"):
        device.upload((torch.zeros(2, dtype=torch.int64), source))
    cuda.copied = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DeviceError, match=r"GPU 0 \(a GPU\): a copy failed: CUDA_ERROR_INVALID_VALUE"):
        device.upload((one, source))
    cuda.lost = True
    with pytest.raises(DeviceLostError):
        device.upload((one, source))


class Layers:
    """Stands for CudaLayers: what it gives or raises for any layer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def at_once(self, weights: Any, rows: int, steps: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def gpu_with(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Makes a GPU whose layers give, or raise, this answer."""

    def made(answer: Any) -> Any:
        monkeypatch.setattr(module, "CudaLayers", lambda *_: Layers(answer))
        monkeypatch.setattr(module, "Nvrtc", lambda: SimpleNamespace(version="none"))
        return Gpu(0)

    return made


def test_a_kernel_that_does_not_load_leaves_the_steps_to_recordings(
    gpu_with: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    device = gpu_with(None)
    assert device.recurrent(None, 8, 5) is None
    assert caplog.records == []
    device = gpu_with(DeviceError("the 64 blocks of a tile cannot all run at once"))
    assert device.recurrent(None, 8, 5) is None
    assert "no persistent kernel for 8 rows: the 64 blocks" in caplog.text
    device = gpu_with(DeviceLostError("gone", device))
    with pytest.raises(DeviceLostError):
        device.recurrent(None, 8, 5)


def test_a_kernel_is_submitted_with_the_buffers_that_it_was_prepared_for(
    cuda: Cuda, gpu_with: Callable[[Any], Any]
) -> None:
    calls: list[str] = []
    kernel = SimpleNamespace(on_buffers=lambda call: lambda: calls.append(call))
    device = gpu_with((kernel, 3))
    found = device.recurrent(None, 8, 5)
    submit = found.prepare("buffers")
    assert (found.least_steps, calls) == (3, [])
    launch = device.record(submit)
    assert calls == ["buffers"] * 3
    launch()
    assert cuda.replays == 1


@pytest.mark.parametrize("own", ["none", "ieee", "tf32"])
def test_products_round_as_the_device_says_and_torch_is_left_as_it_was(cuda: Cuda, own: str) -> None:
    def seen() -> Any:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def settings() -> Any:
        return [each.fp32_precision for each in (matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)]

    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = own  # the newer of torch's two ways, after which the older refuses to be read
    try:
        then = settings()
        assert Gpu(0).compute(seen) == ("highest", False)
        assert settings() == then
        matmul.fp32_precision = own
        assert Gpu(0, tf32=True).compute(lambda: settings()) == ["tf32"] * 3
        assert settings() == then
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before
