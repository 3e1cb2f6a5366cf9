"""Calls are timed by the device's events; a device that fails is told apart from a slow one."""

from __future__ import annotations

import pytest
import torch

from batchmaker.errors import DeviceError
from batchmaker.kernels.cache import CacheDirectory
from batchmaker.kernels.configuration import Problem
from batchmaker.kernels.devices import H200
from batchmaker.kernels.found import FoundDevice, found_device
from batchmaker.kernels.launch import prepared_call
from batchmaker.kernels.nvrtc import CachedCompiler, Compiled, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import KernelConfig
from batchmaker.kernels.timing import REPEATS, WARM_UP, CudaTimer
from batchmaker.kernels.tuner import DeviceIdentity, recalled, tune

GPU = FoundDevice(DeviceIdentity("NVIDIA H200", 132, "580.65.6"), "sm_90", H200)
ASKED = Problem(cell="lstm", dtype="float32", hidden=64, batch=1)
CONFIG = KernelConfig("lstm", "float32", "block", 64, 1, 1, 64, 8, 1)
COMPILED = Compiled("sm_90", b"", "_symbol", 64, 0, 0)


@pytest.fixture
def device_ms(monkeypatch):
    """The device's clock, in milliseconds, as its events read it."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


def test_the_median_of_the_calls_after_warming_up_is_taken(device_ms):
    calls = []

    def prepare(problem, config, compiled):
        assert (problem, config, compiled) == (ASKED, CONFIG, COMPILED)

        def call():
            calls.append(1)
            slow = len(calls) <= WARM_UP or len(calls) % 10 == 0
            device_ms[0] += 100.0 if slow else 2.0

        return call

    assert CudaTimer(GPU, prepare).seconds(ASKED, CONFIG, COMPILED) == pytest.approx(2e-3)
    assert len(calls) == WARM_UP + REPEATS


def test_a_device_that_fails_is_an_error_that_names_kernel_and_device():
    def prepare(problem, config, compiled):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceError, match=r"recurrent<0, 0, 0, 64.* failed on NVIDIA H200: CUDA error: an illegal"):
        CudaTimer(GPU, prepare).seconds(ASKED, CONFIG, COMPILED)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "dtype"), [(64, "float32"), (256, "bfloat16"), (1024, "float32")])
def test_a_gpu_measures_the_best_and_its_winner_is_recalled(tmp_path, hidden, dtype):
    found, kept = found_device(), CacheDirectory(tmp_path)
    asked = Problem(cell="lstm", dtype=dtype, hidden=hidden, batch=10)
    compiler = CachedCompiler(Nvrtc(), kept)
    timer = CudaTimer(found, prepared_call)
    tuning = tune(asked, found.device, kernel_source(), compiler, timer=timer, cache=kept)
    assert [trial.failure for trial in tuning.trials] == [None] * len(tuning.trials)
    assert all(0 < trial.measured_s < 1 for trial in tuning.trials)
    assert recalled(asked, found.device, found.identity, kernel_source(), kept) == tuning.chosen.config
