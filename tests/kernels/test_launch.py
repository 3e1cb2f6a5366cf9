"""What is handed to the driver, with a driver that runs the emulated kernel on just the addresses that it is given."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_emulator import Emulator
from recurrence import expected_answer, random_problem

from batchmaker.errors import DeviceError
from batchmaker.kernels import launch
from batchmaker.kernels.fallback import SteppedLayer, call_buffers
from batchmaker.kernels.launch import LoadedKernel, kernel_type, packed_weights
from batchmaker.kernels.layer import LayerWeights
from batchmaker.kernels.nvrtc import Compiled
from batchmaker.kernels.rows import call_rows
from batchmaker.kernels.template import KernelConfig
from batchmaker.kernels.tiling import packed_index
from insides import barrier_memory

GRID = KernelConfig("lstm", "float32", "grid", 13, 2, 2, 2, 16, 1)
CLUSTER = KernelConfig("gru", "float32", "cluster", 13, 3, 4, 2, 16, 2)
WIDE_CLUSTER = KernelConfig("gru-before", "float32", "cluster", 18, 1, 2, 2, 16, 1)
BLOCK = KernelConfig("lstm", "float32", "block", 10, 5, 3, 2, 16, 1, 1)
CONFIGS = [GRID, CLUSTER, WIDE_CLUSTER, BLOCK]
SHARED = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
WIDE = "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"


class Named:
    """A member of an enumeration of the driver."""

    def __init__(self, name):
        self.name = name


class FakeCuda:
    """Stands for cuda.core and cuda.bindings.driver; keeps what was set and launched, and can refuse either."""

    def __init__(self, sms=12):
        self.attributes = {}
        self.launches = []
        self.fails = None
        self.core = SimpleNamespace(
            Device=self.device, ObjectCode=SimpleNamespace(from_cubin=self.from_cubin), launch=self.launch,
            LaunchConfig=lambda **options: options, Stream=SimpleNamespace(from_handle="stream {}".format),
        )  # fmt: skip
        kinds = SimpleNamespace(**{name: Named(name) for name in (SHARED, WIDE)})
        self.driver = SimpleNamespace(
            CUfunction_attribute=kinds, CUresult=SimpleNamespace(CUDA_SUCCESS="ok"), cuKernelSetAttribute=self.set
        )
        self.sms = sms

    def device(self, ordinal):
        return SimpleNamespace(
            device_id=ordinal or 0, set_current=lambda: None, default_stream="default",
            properties=SimpleNamespace(multiprocessor_count=self.sms),
        )  # fmt: skip

    def from_cubin(self, cubin):
        if cubin != b"cubin":
            raise ValueError("not a cubin")
        occupancy = SimpleNamespace(
            max_active_blocks_per_multiprocessor=lambda threads, shared: 1,
            max_active_clusters=lambda options, stream: self.sms // options["cluster"],
        )
        return SimpleNamespace(get_kernel=lambda symbol: SimpleNamespace(handle=symbol, occupancy=occupancy))

    def set(self, kind, value, handle, device):
        self.attributes[kind.name] = value
        return ("ok" if self.fails != kind.name else Named("CUDA_ERROR_INVALID_VALUE"),)

    def launch(self, stream, options, kernel, *arguments):
        if self.fails == "launch":
            raise RuntimeError("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE")
        assert stream == "stream 77"
        self.launches.append((options, kernel.handle, arguments))


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(launch, "_modules", lambda: (fake.core, fake.driver))
    monkeypatch.setattr(launch, "_on", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return fake


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("launch"), CONFIGS)


def loaded(config, problem=None, cubin=b"cubin"):
    return LoadedKernel(config, Compiled("sm_90", cubin, "symbol", 1, 0, 0), loaded_weights(config, problem))


def loaded_weights(config, problem):
    shape = (config.gates * config.hidden, config.hidden)
    w_hh = torch.zeros(shape) if problem is None else torch.from_numpy(problem.w_hh)
    bias_n = torch.from_numpy(problem.bias_n) if problem is not None and config.cell == "gru" else None
    return LayerWeights(config.cell, w_hh, bias_n)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name_expression)
@pytest.mark.parametrize("sms", [8, 9, 40])
def test_what_is_launched_computes_the_call(cuda, emulator, config, sms):
    cuda.sms = max(sms, config.blocks_per_tile)
    problem = random_problem(config, seed=sms, batch=9, max_length=4)
    kernel = loaded(config, problem)
    h, c = (torch.from_numpy(each.copy()) for each in (problem.h, problem.c))
    wide = torch.full((len(problem.px), config.hidden + 3), torch.nan)
    y = wide[:, 2 : 2 + config.hidden]
    px = torch.from_numpy(problem.px)
    rows = call_rows(
        problem.px_offset, problem.slot, problem.length, None, None,
        num_inputs=len(px), num_slots=len(h), num_outputs=len(y),
    )  # fmt: skip
    for _ in range(2):  # the barrier's counters are those that the first call has left
        for table, before in ((h, problem.h), (c, problem.c)):
            table.copy_(torch.from_numpy(before))
        kernel.run(rows, px, h, c if config.cell == "lstm" else None, y)
        options, symbol, arguments = cuda.launches.pop()
        *addresses, y_stride, batch = arguments
        blocks = options["grid"] * options.get("cluster", 1)
        teams = blocks // config.blocks_per_tile
        assert blocks == teams * config.blocks_per_tile
        assert 1 <= teams <= min(cuda.sms // config.blocks_per_tile, -(-9 // config.tile_height))
        span = ((len(y) - 1) * y.stride(0) + config.hidden) * 4
        sizes = [h.nbytes, c.nbytes if config.cell == "lstm" else 0, span, 0]
        sizes += [each.nbytes for each in barrier_memory(kernel)]
        assert emulator.launch(CONFIGS.index(config), addresses, sizes, y_stride, batch, teams) == ""
        expected = expected_answer(config, problem)
        assert np.abs(h.numpy() - expected.h).max() < 1e-5
        np.testing.assert_allclose(y.numpy(), expected.y, atol=1e-5, rtol=0)
        if config.cell == "lstm":
            assert np.abs(c.numpy() - expected.c).max() < 1e-5
    assert symbol == "symbol"
    assert wide[:, :2].isnan().all()
    assert wide[:, -1].isnan().all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name_expression)
@pytest.mark.parametrize("lengths", [[5, 5, 3, 1, 0, 0], [2, 0, 0, 0, 0, 0], [0] * 6, [4] * 6])
def test_a_call_in_buffers_computes_what_its_steps_do(cuda, emulator, config, lengths):
    cuda.sms = 2 * config.blocks_per_tile
    problem = random_problem(config, seed=len(lengths), batch=6, max_length=5)
    weights = loaded_weights(config, problem)
    random = torch.Generator().manual_seed(2)
    call, wanted = (call_buffers(weights, 6, 5) for _ in range(2))
    if config.cell == "lstm":
        call, wanted = (replace(each, c_steps=torch.zeros(30, config.hidden)) for each in (call, wanted))
    for mine, right in zip(buffers_of(call), buffers_of(wanted), strict=True):
        if mine.dtype == torch.float32:
            right.copy_(mine.uniform_(-1, 1, generator=random))
    for each in (call, wanted):
        each.length.copy_(torch.tensor(lengths))
    kernel = loaded(config, problem)
    submit = kernel.on_buffers(call)  # it keeps the numbers of the rows
    submit()
    options, _, (*addresses, y_stride, batch) = cuda.launches.pop()
    assert (batch, y_stride) == (6, config.hidden)
    sizes = [call.h.nbytes, 0 if call.c is None else call.c.nbytes, call.y.nbytes]
    sizes += [0 if call.c_steps is None else call.c_steps.nbytes, *(each.nbytes for each in barrier_memory(kernel))]
    teams = options["grid"] * options.get("cluster", 1) // config.blocks_per_tile
    assert emulator.launch(CONFIGS.index(config), addresses, sizes, y_stride, batch, teams) == ""
    SteppedLayer(weights).run_buffers(wanted)
    done = torch.arange(5) < torch.tensor(lengths)[:, None]  # beyond, nothing is said of y and c_steps
    for mine, right in zip(buffers_of(call), buffers_of(wanted), strict=True):
        inside = done.flatten() if len(mine) == 30 else slice(None)
        torch.testing.assert_close(mine[inside], right[inside], atol=1e-5, rtol=0)


def buffers_of(call):
    return [each for each in (call.px, call.length, call.h, call.y, call.c, call.c_steps) if each is not None]


def test_grids_are_launched_cooperatively_and_clusters_as_clusters(cuda):
    for config in (GRID, CLUSTER, BLOCK):
        rows = call_rows([0], [0], [1], None, None, num_inputs=1, num_slots=1, num_outputs=None)
        c = torch.zeros(1, config.hidden) if config.cell == "lstm" else None
        h = torch.zeros(1, config.hidden)
        loaded(config).run(rows, torch.zeros(1, config.gates * config.hidden), h, c, None)
    grid, cluster, block = (options for options, _, _ in cuda.launches)
    assert grid == {"grid": 4, "block": 32, "shmem_size": GRID.shared_bytes, "is_cooperative": True}
    assert cluster == {"grid": 1, "cluster": 3, "block": 32, "shmem_size": CLUSTER.shared_bytes}
    assert block == {"grid": 1, "block": 32, "shmem_size": BLOCK.shared_bytes, "is_cooperative": False}


def test_shared_memory_and_wide_clusters_are_asked_for(cuda):
    loaded(CLUSTER)
    assert cuda.attributes == {SHARED: CLUSTER.shared_bytes}
    loaded(WIDE_CLUSTER)
    assert cuda.attributes == {SHARED: WIDE_CLUSTER.shared_bytes, WIDE: 1}


def test_a_call_without_steps_launches_nothing(cuda):
    rows = call_rows([0], [0], [0], None, None, num_inputs=0, num_slots=1, num_outputs=None)
    loaded(GRID).run(rows, torch.zeros(0, 52), torch.zeros(1, 13), torch.zeros(1, 13), None)
    assert cuda.launches == []


def test_a_tile_that_cannot_run_at_once_is_refused(cuda):
    cuda.sms = 3
    with pytest.raises(DeviceError, match="the 4 blocks of a tile cannot all run at once"):
        loaded(GRID)


def test_failures_of_the_driver_say_what_failed(cuda):
    with pytest.raises(DeviceError, match="does not load on cpu: not a cubin"):
        loaded(GRID, cubin=b"other")
    cuda.fails = SHARED
    with pytest.raises(DeviceError, match=f"setting {SHARED} to .* failed: CUDA_ERROR_INVALID_VALUE"):
        loaded(GRID)
    cuda.fails = "launch"
    kernel = loaded(GRID)
    rows = call_rows([0], [0], [1], None, None, num_inputs=1, num_slots=1, num_outputs=None)
    with pytest.raises(DeviceError, match="does not start on cpu: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        kernel.run(rows, torch.zeros(1, 52), torch.zeros(1, 13), torch.zeros(1, 13), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_packed_as_the_tiling_says(dtype):
    config = replace(KernelConfig("lstm", "float32", "grid", 20, 4, 8, 1, 32, 8), dtype=kernel_type(dtype))
    w_hh = torch.arange(80 * 20).reshape(80, 20).to(dtype)
    packed = packed_weights(config, w_hh)
    assert packed.dtype == dtype
    assert packed.nbytes == config.packed_bytes
    index = packed_index(config)
    inside = torch.from_numpy(index < w_hh.numel())
    assert torch.equal(packed[inside], w_hh.flatten()[torch.from_numpy(index)[inside]])
    assert (packed[~inside] == 0).all()
