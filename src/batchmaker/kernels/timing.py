"""Times kernels on a GPU, for the tuner."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch

from batchmaker.errors import DeviceError
from batchmaker.kernels.configuration import Problem
from batchmaker.kernels.found import FoundDevice
from batchmaker.kernels.nvrtc import Compiled
from batchmaker.kernels.template import KernelConfig
from batchmaker.kernels.tuner import DeviceIdentity

WARM_UP = 5
REPEATS = 30

Prepare: TypeAlias = Callable[[Problem, KernelConfig, Compiled], Callable[[], object]]
"""Loads a kernel, makes data for it, and returns a function that enqueues one call on torch's current stream."""


@final
class CudaTimer:
    """Times calls by events on torch's current stream, one after the other, so each time includes a launch."""

    __slots__ = ("_gpu", "_prepare")

    def __init__(self, gpu: FoundDevice, prepare: Prepare) -> None:
        self._gpu = gpu
        self._prepare = prepare

    @property
    def identity(self) -> DeviceIdentity:
        return self._gpu.identity

    def seconds(self, problem: Problem, config: KernelConfig, compiled: Compiled) -> float:
        """Return the median of `REPEATS` calls after `WARM_UP` others. DeviceError if the device fails."""
        try:
            call = self._prepare(problem, config, compiled)
            for _ in range(WARM_UP):
                call()
            times = [self._timed(call) for _ in range(REPEATS)]
        except RuntimeError as error:  # torch's error for a device
            raise DeviceError(f"{config.name_expression} failed on {self._gpu.identity.name}: {error}") from error
        return statistics.median(times)

    @staticmethod
    def _timed(call: Callable[[], object]) -> float:
        make: Callable[..., Any] = torch.cuda.Event  # it has no types
        begin, end = make(enable_timing=True), make(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end))
