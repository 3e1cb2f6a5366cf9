"""A GPU as a `Device`: memory, operations and CUDA graphs come from torch; two kernels for rows are in rows.cu."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import RAISED_BY_USERS, DeviceError
from batchmaker.executor.cuda.device import (
    CannotRecordError,
    Device,
    DeviceLostError,
    Kernel,
    Launch,
    RecurrentKernel,
    row_copies,
)
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.found import found_device
from batchmaker.kernels.launch import CudaLayers
from batchmaker.kernels.layer import CallBuffers, LayerWeights
from batchmaker.kernels.nvrtc import CachedCompiler, Nvrtc
from batchmaker.kernels.source import joined

_LOG = logging.getLogger("batchmaker.executor")
_THREADS = 128
_WAITED = "called a synchronizing CUDA operation"
"""A part of torch's warning when an operation waits for the device. torch gives it in its debug mode only."""


@final
class Gpu:
    """One GPU and one stream on it. number: of the GPU in torch. tf32: see `open_devices`.

    DeviceError if the GPU or its driver is too old, or if the extra `cuda` is not installed.
    """

    def __init__(self, number: int, *, tf32: bool = False) -> None:
        gpu = found_device(number)
        self.torch_device = torch.device("cuda", number)
        self.name = torch.cuda.get_device_name(number)
        self._tf32 = tf32
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._recording = False
        self._broken: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.device(number):
            self._move_rows, self._signal = _loaded(number, gpu.arch, row_kernels(), ("move_rows", "signal_end"))
        self._gpu = gpu
        self._layers: CudaLayers | None = None
        self._launch_on = _core().Stream.from_handle(self._stream.cuda_stream)
        self._copy = _driver().cuMemcpyHtoDAsync

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Device.zeros. The memory comes from torch's allocator, and is set to zero on the stream."""
        with self._working():
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """See Device.pinned. The memory comes from torch's allocator of pinned memory."""
        with self._working():
            memory: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            return memory

    def upload(self, *copies: tuple[Tensor, NDArray[Any]]) -> None:
        """See Device.upload. Copies on the stream, by the driver: torch takes 20 us longer for each.

        The arrays must stay unchanged until they are copied.
        """
        with self._working():
            for target, source in copies:
                if source.nbytes > target.nbytes:
                    raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
                (result,) = self._copy(target.data_ptr(), source.ctypes.data, source.nbytes, self._stream.cuda_stream)
                if result:
                    self.check()
                    raise DeviceError(f"GPU {self.torch_device.index} ({self.name}): a copy failed: {result.name}")

    def compute(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """See Device.compute. `work` runs on the stream, without gradients, and with the precision of `tf32`."""
        with self._working(), self._precision():
            return work()

    def compute_waiting(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The same as `compute`: torch waits for the stream by itself when `work` reads a value."""
        return self.compute(work)

    def move_rows(self, where: Tensor, first: int, columns: Tensor, count: int, *, to_addresses: bool) -> None:
        """See Device.move_rows. One launch of our kernel, with a thread block for each row of each buffer."""
        if len(columns):
            arguments = (where.data_ptr(), first, columns.data_ptr(), count, to_addresses)
            self._launch(self._move_rows, (count, len(columns)), *map(np.int64, arguments[:4]), np.int32(to_addresses))

    def signal(self, where: Tensor) -> None:
        """See Device.signal. One launch of our kernel, which writes to pinned host memory."""
        self._launch(self._signal, (1,), np.int64(where.data_ptr()))

    def kernels(self, source: str, names: Sequence[str]) -> Sequence[Kernel]:
        """See Device.kernels."""
        number = self.torch_device.index
        with self._working():
            loaded = _loaded(number, self._gpu.arch, source, names)

        def launch(kernel: Any, grid: tuple[int, ...], *numbers: int) -> None:
            self._launch(kernel, grid, *map(np.int64, numbers))

        return [partial(launch, kernel) for kernel in loaded]

    def record(self, work: Callable[[], None]) -> Launch:
        """See Device.record. The recording is a CUDA graph.

        `work` runs twice before it is captured: for the first calls of libraries, and to see whether it waits for the
        device. This method itself waits for the device.
        """
        try:
            with self._working():
                torch.cuda.synchronize()  # the weights may have been written on another stream
                graph = torch.cuda.CUDAGraph()
                work()  # the first call of a library makes its workspaces, and cannot be recorded
                if self._waits(work):
                    raise CannotRecordError("it waits for a value, or copies between host and device")
                self._stream.synchronize()
                self._capture(graph, work)
        except (CannotRecordError, DeviceLostError, torch.OutOfMemoryError):
            raise
        except RAISED_BY_USERS as error:  # any error of the cell's own code
            self.check()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CannotRecordError(reason) from error
        return graph.replay

    def submitting(self) -> AbstractContextManager[None]:
        """See Device.submitting. The stream is made current once for many launches, which takes longer than one."""
        return self._working()

    def recurrent(self, weights: LayerWeights, rows: int, steps: int) -> RecurrentKernel | None:
        """See Device.recurrent. If making a kernel fails, this is logged, and None is returned."""
        if self._layers is None:
            cache = CacheDirectory(default_directory())
            self._layers = CudaLayers(self._gpu, CachedCompiler(Nvrtc(), cache), cache, self)
        try:
            with self._working():
                at_once = self._layers.at_once(weights, rows, steps)
        except DeviceLostError:
            raise
        except DeviceError as error:  # without a kernel the steps run one by one
            _LOG.warning("no persistent kernel for %d rows: %s", rows, error)
            return None
        if at_once is None:
            return None
        kernel, least_steps = at_once

        def prepare(call: CallBuffers) -> Launch:
            with self._working():
                enqueue = kernel.on_buffers(call)

            def submit() -> None:
                with self._working():
                    enqueue()

            return submit

        return RecurrentKernel(least_steps, prepare)

    def copy_rows(self, other: Device, source: Tensor, rows: NDArray[np.int64], target: Tensor) -> None:
        """See Device.copy_rows. The rows are picked on the other GPU's stream; this stream waits for that event."""
        assert isinstance(other, Gpu)
        with other._working():
            index = torch.from_numpy(rows).pin_memory()  # if not pinned, the copy might wait for the stream
            picked = source.index_select(0, index.to(other.torch_device, non_blocking=True))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(other._stream)
        with self._working():
            self._stream.wait_event(done)
            target.index_copy_(0, index.to(self.torch_device, non_blocking=True), picked.to(self.torch_device))
        picked.record_stream(self._stream)

    def read(self, row: Tensor) -> Tensor:
        """See Device.read. Waits for the stream."""
        with self._working():
            return row.cpu()

    def check(self) -> None:
        """See Device.check. Asks the stream for its state, without waiting."""
        self._raise_if_lost()

    def stop(self) -> None:
        """See Device.stop. Waits for the stream. Memory is freed with the tensors that use it."""
        with self._working():
            self._stream.synchronize()

    def _waits(self, work: Callable[[], None]) -> bool:
        """Run the work and return whether it waited for the device.

        This is tested before a capture, because a capture that fails at a wait leaves torch's allocator in a bad state.
        """
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return any(_WAITED in str(warning.message) for warning in seen)

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        self._recording = True
        try:
            with torch.cuda.graph(
                graph, pool=self._graph_memory, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except RAISED_BY_USERS:
            self._clean_up(graph)
            raise
        finally:
            self._recording = False

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Repair torch's state after a failed capture, so that later recordings work.

        If the end of a capture fails, torch leaves its allocators in the recording state. The allocator of device
        memory is told to stop recording. The allocator of pinned memory keeps asking the graph, so the graph is kept.
        """
        memory, self._graph_memory = self._graph_memory, torch.cuda.graph_pool_handle()
        self._broken.append(graph)
        with suppress(RuntimeError):  # the end of the capture did not fail, so there is nothing to stop
            torch._C._cuda_endAllocateToPool(self.torch_device.index, memory)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        core = _core()
        with self._working():
            try:
                core.Device(self.torch_device.index).set_current()  # a thread that has not used torch yet has none
                core.launch(self._launch_on, core.LaunchConfig(grid=grid, block=_THREADS), kernel, *arguments)
            except Exception as error:  # the classes of errors of cuda.core are not public
                if not self._recording:
                    self.check()
                raise DeviceError(f"GPU {self.torch_device.index} ({self.name}): a launch failed: {error}") from error

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Use this device and its stream inside, without gradients. A failed device raises DeviceLostError.

        If the stream still answers after an error, the device has not failed, and the error is raised as it is. A
        stream that is being recorded cannot be asked; then `record` asks afterwards.
        """
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                yield
        except torch.AcceleratorError:
            if not self._recording:
                self._raise_if_lost()
            raise

    def _raise_if_lost(self) -> None:
        try:
            self._stream.query()
        except torch.AcceleratorError as error:
            raise DeviceLostError(str(error).splitlines()[0], self) from error

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Set inside whether products and convolutions of float32 round, as `tf32` says.

        torch has one setting for the whole process, so it is restored afterwards.
        """
        cudnn: Any = torch.backends.cudnn  # torch's type hints lack these settings
        settings = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
        before = [setting.fp32_precision for setting in settings]
        if all((precision == "tf32") == self._tf32 for precision in before):
            yield
            return
        _let_round(self._tf32, self._tf32)
        try:
            yield
        finally:
            _let_round(before[0] == "tf32", before[1] == "tf32")
            for setting, precision in zip(settings, before, strict=True):
                setting.fp32_precision = precision


def _let_round(products: bool, convolutions: bool) -> None:
    """Set torch's older settings, which also set the newer ones. If they disagree, torch refuses to read them."""
    torch.set_float32_matmul_precision("high" if products else "highest")
    torch.backends.cudnn.allow_tf32 = convolutions


def row_kernels() -> str:
    """Return the source of the two kernels of rows.cu, complete."""
    return row_copies() + joined(("rows.cu",), "batchmaker.executor.cuda")


def _loaded(number: int, arch: str, source: str, names: Sequence[str]) -> list[Any]:
    """Compile kernels of a source, or take them from the cache on disk, and load them on a device."""
    compiler = CachedCompiler(Nvrtc(), CacheDirectory(default_directory()))
    compiled = [compiler.compile(source, name, arch) for name in names]
    try:
        _core().Device(number).set_current()
        return [_core().ObjectCode.from_cubin(one.cubin).get_kernel(one.symbol) for one in compiled]
    except Exception as error:  # the classes of errors of cuda.core are not public
        raise DeviceError(f"GPU {number}: kernels for {arch} do not load: {error}") from error


def _core() -> Any:
    import cuda.core  # if it were missing, `found_device` would have raised

    return cuda.core


def _driver() -> Any:
    from cuda.bindings import driver  # as above

    return driver
