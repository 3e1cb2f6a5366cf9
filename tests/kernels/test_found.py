"""What there is of a GPU, told from a driver that is not there."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import SimpleNamespace

import pytest

from batchmaker.errors import DeviceError
from batchmaker.kernels.found import found_device

H200 = {
    "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132, "CLOCK_RATE": 1_980_000,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448, "L2_CACHE_SIZE": 62_914_560,
}  # fmt: skip


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


class FakeDriver:
    """Answers as `cuda.bindings.driver` does: a result, then the values."""

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in H200})

    def __init__(self, version=13_000, count=1, init=Result.CUDA_SUCCESS, **changed):
        self.version, self.count, self.init = version, count, init
        self.attributes = {**H200, **changed}

    def cuInit(self, flags):  # noqa: N802
        if isinstance(self.init, Exception):
            raise self.init
        return (self.init,)

    def cuDriverGetVersion(self):  # noqa: N802
        return Result.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self):  # noqa: N802
        return Result.CUDA_SUCCESS, self.count

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return Result.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length, handle):  # noqa: N802
        return Result.CUDA_SUCCESS, b"NVIDIA H200".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, name, handle):  # noqa: N802
        return Result.CUDA_SUCCESS, self.attributes[name]


def found(**changed):
    return found_device(0, FakeDriver(**changed), "580.65.6")


def test_a_gpu_is_described_by_what_it_says_of_itself():
    gpu = found(MULTIPROCESSOR_COUNT=114, CLOCK_RATE=1_755_000)
    assert (gpu.identity.name, gpu.identity.sms, gpu.identity.driver) == ("NVIDIA H200", 114, "580.65.6")
    assert (gpu.arch, gpu.device.arch) == ("sm_90", "sm_90")
    assert (gpu.device.clock_hz, gpu.device.shared_bytes) == (1.755e9, 232_448)
    assert sum(gpu.device.processor_clusters) <= 114


def test_a_gpu_between_two_models_takes_the_older_one():
    gpu = found(COMPUTE_CAPABILITY_MAJOR=8, COMPUTE_CAPABILITY_MINOR=6, MULTIPROCESSOR_COUNT=82)
    assert (gpu.arch, gpu.device.processor_clusters) == ("sm_86", ())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"init": RuntimeError("libcuda")}, "there is no NVIDIA driver on this machine"),
        ({"init": Result.CUDA_ERROR_NO_DEVICE}, "the NVIDIA driver says CUDA_ERROR_NO_DEVICE"),
        ({"version": 12_080}, "supports CUDA 12.8, 13.0 is needed; install driver 580 or later"),
        ({"count": 0}, "there is no GPU number 0; the driver sees 0"),
        ({"COMPUTE_CAPABILITY_MAJOR": 7}, "NVIDIA H200 has compute capability 7.0, the kernels need 8.0 or later"),
    ],
)
def test_what_is_missing_is_told(changed, told):
    with pytest.raises(DeviceError, match=told):
        found(**changed)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'batchmaker\[cuda\]'"):
        found_device()
