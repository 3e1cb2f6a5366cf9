"""Kernels on a GPU: loading, packing of weights, and launches on torch's current stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from batchmaker.errors import DeviceError
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.configuration import Problem, fallback_reason
from batchmaker.kernels.cost import least_steps
from batchmaker.kernels.devices import DeviceSpec
from batchmaker.kernels.fallback import RecordedLayer, StepRecorder
from batchmaker.kernels.found import FoundDevice, found_device
from batchmaker.kernels.layer import CallBuffers, LayerWeights, RecurrentLayer
from batchmaker.kernels.nvrtc import CachedCompiler, Compiled, KernelCompiler, Nvrtc
from batchmaker.kernels.rows import CallRows, call_rows
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import KERNEL_TYPES, KernelConfig, KernelType
from batchmaker.kernels.tiling import packed_index
from batchmaker.kernels.tuner import batch_bucket, best_ranked, compiled_best, recalled

_LOG = logging.getLogger("batchmaker.kernels")
_COUNTER_STRIDE: Final = 32
"""Words between the barriers of two teams: each barrier has its own cache line."""
_PORTABLE_CLUSTER: Final = 8


@final
class LoadedKernel:
    """One instance of the kernel on one GPU, with the weights of one layer.

    Calls must not overlap in time: they share the exchange and the barrier's counters. An aborted call leaves these in
    an unknown state; make a new instance then.
    """

    def __init__(self, config: KernelConfig, compiled: Compiled, weights: LayerWeights) -> None:
        """Load the kernel on the device of the weights. DeviceError if it does not load or a team does not fit."""
        self._config = config
        self._core, self._driver = _modules()
        device = weights.w_hh.device
        try:
            with _on(device):
                self._device = self._core.Device(device.index)
                self._device.set_current()
                self._kernel = self._core.ObjectCode.from_cubin(compiled.cubin).get_kernel(compiled.symbol)
                self._allow(config)
                self._max_teams = self._resident_teams()
        except DeviceError:
            raise
        except Exception as error:  # the error classes of cuda.core are not public
            raise DeviceError(f"{config.name_expression} does not load on {device}: {error}") from error
        if self._max_teams < 1:
            raise DeviceError(
                f"{config.name_expression}: the {config.blocks_per_tile} blocks of a tile cannot all run at once on "
                f"{device}; take a configuration with fewer."
            )
        self._packed = packed_weights(config, weights.w_hh)
        self._bias_n = weights.bias_n
        self._exchange = torch.zeros(
            self._max_teams * config.exchange_elements, dtype=weights.w_hh.dtype, device=device
        )
        self._arrivals = torch.zeros(self._max_teams * _COUNTER_STRIDE, dtype=torch.int32, device=device)

    def run(self, rows: CallRows, px: Tensor, h_state: Tensor, c_state: Tensor | None, y: Tensor | None) -> None:
        """Enqueue one call on torch's current stream; see RecurrentLayer.run, which has checked the arguments."""
        if rows.longest == 0:
            return
        batch = len(rows.slot)
        numbers = np.concatenate([rows.px_offset, rows.step_offset, rows.slot, rows.length, rows.y_offset])
        on_device = torch.from_numpy(numbers).pin_memory().to(px.device, non_blocking=True)
        bounds = np.cumsum([batch, rows.longest, batch, batch]).tolist()
        px_offset, step_offset, slot, length, y_offset = torch.tensor_split(on_device, bounds)
        self.enqueue(px_offset, step_offset, slot, length, y_offset, px, h_state, c_state, y)

    def enqueue(
        self,
        px_offset: Tensor,
        step_offset: Tensor | None,
        slot: Tensor,
        length: Tensor,
        y_offset: Tensor,
        px: Tensor,
        h_state: Tensor,
        c_state: Tensor | None,
        y: Tensor | None,
        c_steps: Tensor | None = None,
    ) -> None:
        """As run, with the rows' numbers on the device: int32, longest row first, without checks.

        c_steps: c of every step of an LSTM, [rows of y, hidden], float32.

        Nothing is allocated, so a CUDA graph can capture the call; a replay reads the tensors' contents at that time.
        """
        tensors = (
            self._packed,
            self._bias_n,
            px,
            px_offset,
            step_offset,
            slot,
            length,
            h_state,
            c_state,
            y,
            y_offset,
            c_steps,
            self._exchange,
            self._arrivals,
        )
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        batch, y_stride = len(slot), 0 if y is None else y.stride(0)
        options = self._launch_config(min(-(-batch // self._config.tile_height), self._max_teams))
        stream = self._core.Stream.from_handle(torch.cuda.current_stream(px.device).cuda_stream)
        try:
            with _on(px.device):
                self._device.set_current()
                self._core.launch(stream, options, self._kernel, *addresses, np.int32(y_stride), np.int32(batch))
        except Exception as error:  # as above
            raise DeviceError(f"{self._config.name_expression} does not start on {px.device}: {error}") from error

    def on_buffers(self, call: CallBuffers) -> Callable[[], None]:
        """Return a function that enqueues a call in these buffers.

        The owner of a recording must keep it, because it holds the rows' numbers.
        """
        row = torch.arange(call.rows, dtype=torch.int32, device=call.h.device)
        first = row * call.steps
        return lambda: self.enqueue(first, None, row, call.length, first, call.px, call.h, call.c, call.y, call.c_steps)

    def _allow(self, config: KernelConfig) -> None:
        """Allow the shared memory and the cluster size of the instance; the defaults are smaller."""
        kinds = self._driver.CUfunction_attribute
        wanted = {kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: config.shared_bytes}
        if config.regime == "cluster" and config.blocks_per_tile > _PORTABLE_CLUSTER:
            wanted[kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for kind, value in wanted.items():
            (result,) = self._driver.cuKernelSetAttribute(kind, value, self._kernel.handle, self._device.device_id)
            if result != self._driver.CUresult.CUDA_SUCCESS:
                raise DeviceError(f"{config.name_expression}: setting {kind.name} to {value} failed: {result.name}.")

    def _resident_teams(self) -> int:
        """Return how many teams can run at once.

        More teams would not meet at the barrier, or would only wait for their turn.
        """
        config, occupancy = self._config, self._kernel.occupancy
        if config.regime == "cluster":
            stream = self._device.default_stream
            return int(occupancy.max_active_clusters(self._launch_config(1), stream=stream))
        blocks = occupancy.max_active_blocks_per_multiprocessor(config.num_threads, config.shared_bytes)
        return int(blocks) * int(self._device.properties.multiprocessor_count) // config.blocks_per_tile

    def _launch_config(self, teams: int) -> Any:
        config = self._config
        common = {"block": config.num_threads, "shmem_size": config.shared_bytes}
        if config.regime == "cluster":  # the grid counts clusters
            return self._core.LaunchConfig(grid=teams, cluster=config.blocks_per_tile, **common)
        cooperative = config.regime == "grid"
        return self._core.LaunchConfig(grid=teams * config.blocks_per_tile, is_cooperative=cooperative, **common)


@final
class CudaLayers:
    """Makes layers on one GPU. Kernels are chosen by the tuner's cache, else by the cost model, and compiled once."""

    def __init__(
        self, gpu: FoundDevice, compiler: KernelCompiler, cache: CacheDirectory, recorder: StepRecorder
    ) -> None:
        """recorder: records the steps of layers without a fitting configuration."""
        self._gpu = gpu
        self._compiler = compiler
        self._cache = cache
        self.recorder = recorder

    @classmethod
    def for_device(cls, device: torch.device, cache: Path | None = None) -> CudaLayers:
        """Return layers for the GPU that holds the weights.

        cache: directory of compiled kernels and of the tuner's winners; by default that of `batchmaker tune`.
        DeviceError if the weights are not on a GPU, or if GPU, driver or compiler are missing or too old.
        """
        gpu = found_device(device.index or 0)
        if device.type != "cuda" or not torch.cuda.is_available():
            raise DeviceError(
                f"persistent kernels run on a GPU, the weights are on {device}; move the module there (module.cuda()) "
                "with a build of torch for CUDA."
            )
        directory = CacheDirectory(cache or default_directory())
        return cls(gpu, CachedCompiler(Nvrtc(), directory), directory, StreamRecorder(device))

    def layer(self, weights: LayerWeights) -> RecurrentLayer:
        return CudaLayer(self, weights)

    def loaded(self, weights: LayerWeights, batch: int) -> LoadedKernel | None:
        """Load a kernel for calls of about `batch` rows; None, with a warning, if no configuration fits the layer."""
        problem = Problem(cell=weights.cell, dtype=kernel_type(weights.w_hh.dtype), hidden=weights.hidden, batch=batch)
        source = kernel_source()
        gpu = self._gpu
        config = recalled(problem, gpu.device, gpu.identity, source, self._cache)
        if config is not None:
            return LoadedKernel(config, self._compiler.compile(source, config.name_expression, gpu.arch), weights)
        best = compiled_best(problem, gpu.device, source, self._compiler, arch=gpu.arch)
        if best is None:
            _LOG.warning("%s", fallback_reason(problem, gpu.device))
            return None
        return LoadedKernel(*best, weights)

    def at_once(self, weights: LayerWeights, rows: int, steps: int) -> tuple[LoadedKernel, int] | None:
        """Return a kernel for these numbers of rows and steps, and from how many steps on it is faster than recordings.

        The number comes from the cost model, or is 2 if the tuner has measured a configuration for such calls. None if
        it is more than `steps`, if no configuration fits, and for unsupported types.
        """
        if weights.w_hh.dtype not in map(torch_dtype, KERNEL_TYPES):
            return None
        dtype = kernel_type(weights.w_hh.dtype)
        problem = Problem(cell=weights.cell, dtype=dtype, hidden=weights.hidden, batch=rows, steps=steps)
        source, gpu = kernel_source(), self._gpu
        config = recalled(problem, gpu.device, gpu.identity, source, self._cache)
        if config is not None:
            compiled = self._compiler.compile(source, config.name_expression, gpu.arch)
            return LoadedKernel(config, compiled, weights), 2
        if not any(_pays(problem, config, gpu.device) for config, _ in best_ranked(problem, gpu.device)):
            return None  # before any compilation
        best = compiled_best(problem, gpu.device, source, self._compiler, arch=gpu.arch)
        least = None if best is None else _pays(problem, best[0], gpu.device)
        return None if best is None or least is None else (LoadedKernel(*best, weights), least)


@final
class CudaLayer(RecurrentLayer):
    """See RecurrentLayer. Kernels are loaded at the first call of each batch size, rounded up to a power of two."""

    def __init__(self, layers: CudaLayers, weights: LayerWeights) -> None:
        super().__init__(weights)
        self._layers = layers
        self._kernels: dict[int, LoadedKernel | None] = {}
        self._steps: RecordedLayer | None = None

    def run_rows(self, rows: CallRows, px: Tensor, h_state: Tensor, c_state: Tensor | None, y: Tensor | None) -> None:
        """Compute the rows with a persistent kernel for their number, or step by step if none fits.

        The arguments are those of RecurrentLayer.run_rows. DeviceError if a kernel cannot be compiled or loaded.
        """
        bucket = batch_bucket(max(1, len(rows.slot)))
        if bucket not in self._kernels:
            self._kernels[bucket] = self._layers.loaded(self._weights, bucket)
        kernel = self._kernels[bucket]
        if kernel is not None:
            kernel.run(rows, px, h_state, c_state, y)
            return
        self._steps = self._steps or RecordedLayer(self._weights, self._layers.recorder)
        self._steps.run_rows(rows, px, h_state, c_state, y)


@final
class StreamRecorder:
    """Records work of torch's current stream as CUDA graphs; see StepRecorder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once, capture it as a CUDA graph, and return a function that replays the graph.

        Raises torch's error if the work cannot be captured.
        """
        with _on(self._device), torch.no_grad():
            aside, graph = torch.cuda.Stream(self._device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the buffers were made on another stream
            with torch.cuda.stream(aside):
                work()  # the first call of a library initialises it, which cannot be recorded
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                work()

        def replay() -> None:
            with _on(self._device):
                graph.replay()

        return replay


def _pays(problem: Problem, config: KernelConfig, device: DeviceSpec) -> int | None:
    """Return the number of steps from which on a call is faster than recorded steps, None if the problem has fewer."""
    least = least_steps(problem, config, device)
    return None if least is None or least > problem.steps else least


def prepared_call(problem: Problem, config: KernelConfig, compiled: Compiled) -> Callable[[], None]:
    """Load a kernel on torch's current GPU with random weights and data; return a function that enqueues one call."""
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = getattr(torch, problem.dtype)
    gates = 4 if problem.cell == "lstm" else 3
    spread = problem.hidden**-0.5

    def uniform(*shape: int, bound: float, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device).uniform_(-bound, bound).to(kind)

    w_hh = uniform(gates * problem.hidden, problem.hidden, bound=spread)
    bias_n = uniform(problem.hidden, bound=spread, kind=torch.float32) if problem.cell == "gru" else None
    kernel = LoadedKernel(config, compiled, LayerWeights(problem.cell, w_hh, bias_n))
    px = uniform(problem.steps * problem.batch, gates * problem.hidden, bound=1.0)
    h = uniform(problem.batch, problem.hidden, bound=1.0)
    c = uniform(problem.batch, problem.hidden, bound=1.0, kind=torch.float32) if problem.cell == "lstm" else None
    y = torch.empty(len(px), problem.hidden, dtype=dtype, device=device)
    rows = call_rows(
        range(problem.batch),
        range(problem.batch),
        [problem.steps] * problem.batch,
        None,
        range(0, len(px), problem.batch),
        num_inputs=len(px),
        num_slots=problem.batch,
        num_outputs=len(y),
    )
    return lambda: kernel.run(rows, px, h, c, y)


def packed_weights(config: KernelConfig, w_hh: Tensor) -> Tensor:
    """Return the recurrent weights [gates * hidden, hidden] in the kernel's order, flat."""
    index = torch.from_numpy(packed_index(config)).to(w_hh.device)
    return torch.cat([w_hh.detach().flatten(), w_hh.new_zeros(1)]).index_select(0, index)


def kernel_type(dtype: torch.dtype) -> KernelType:
    """Return the kernels' name of a supported dtype."""
    return next(name for name in KERNEL_TYPES if torch_dtype(name) == dtype)


def torch_dtype(name: KernelType) -> torch.dtype:
    """Return the torch dtype of a name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU current, as cuda.core needs it, and then restore torch's current GPU."""
    return torch.cuda.device(device)


def _modules() -> tuple[Any, Any]:
    import cuda.core  # found_device has reported missing packages
    from cuda.bindings import driver

    return cuda.core, driver
