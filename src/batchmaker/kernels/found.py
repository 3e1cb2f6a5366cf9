"""Finds a GPU that can run the kernels, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, final

from batchmaker.errors import DeviceError, needing
from batchmaker.kernels.devices import A100, H200, DeviceSpec
from batchmaker.kernels.tuner import DeviceIdentity

OLDEST_DRIVER: Final = (13, 0)
"""The version of CUDA that the driver must support, as required by the machine code of NVRTC 13."""


@final
@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A GPU. arch: the architecture to compile for. device: the cost model's numbers, with the GPU's own values."""

    identity: DeviceIdentity
    arch: str
    device: DeviceSpec


def found_device(ordinal: int = 0, driver: Any = None, release: str | None = None) -> FoundDevice:
    """Return the GPU with this number. DeviceError says what is missing: the extra, the driver, or a recent GPU.

    driver: `cuda.bindings.driver`, or a stand-in. release: of the driver; by default its own answer.
    """
    driver = driver or _driver()
    try:
        _called(driver, "no NVIDIA driver can be used", driver.cuInit(0))
    except RuntimeError as error:  # the bindings load the driver's library at the first call
        raise DeviceError("there is no NVIDIA driver on this machine") from error
    version = _called(driver, "the driver's version", driver.cuDriverGetVersion())
    supported = (version // 1000, version % 1000 // 10)
    if supported < OLDEST_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {supported[0]}.{supported[1]}, {OLDEST_DRIVER[0]}.{OLDEST_DRIVER[1]} is "
            "needed; install driver 580 or later"
        )
    count = _called(driver, "counting devices", driver.cuDeviceGetCount())
    if ordinal >= count:
        raise DeviceError(f"there is no GPU number {ordinal}; the driver sees {count}")
    handle = _called(driver, "opening the device", driver.cuDeviceGet(ordinal))
    return _described(driver, handle, release or driver_release() or f"CUDA {supported[0]}.{supported[1]}")


def driver_release() -> str | None:
    """Return the driver's release, such as 580.65.6; None if its management library does not tell."""
    try:
        from cuda.core import system

        return ".".join(map(str, system.get_kernel_mode_driver_version()))
    except Exception:  # its error classes are not public
        return None


def _described(driver: Any, handle: Any, release: str) -> FoundDevice:
    kinds = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_called(driver, f"asking for {name}", driver.cuDeviceGetAttribute(kind, handle)))

    raw = _called(driver, "asking for the name", driver.cuDeviceGetName(128, handle))
    name = raw.split(b"\0")[0].decode(errors="replace")
    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    if (major, minor) < (8, 0):
        raise DeviceError(f"{name} has compute capability {major}.{minor}, the kernels need 8.0 or later")
    nearest = H200 if major >= 9 else A100
    sms = attribute("MULTIPROCESSOR_COUNT")
    device = replace(
        nearest,
        name=name,
        arch=f"sm_{major}{minor}",
        sms=sms,
        clock_hz=1e3 * attribute("CLOCK_RATE"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        processor_clusters=nearest.processor_clusters if sms == nearest.sms else _even(nearest, sms),
    )
    return FoundDevice(DeviceIdentity(name, sms, release), device.arch, device)


def _even(nearest: DeviceSpec, sms: int) -> tuple[int, ...]:
    """Return the SMs of each GPC, taken from `nearest` if it has as many: the driver does not tell."""
    if not nearest.processor_clusters:
        return ()
    return (16,) * (sms // 16)


def _called(driver: Any, what: str, answer: Any) -> Any:
    """Return the result of a driver call. DeviceError if it failed."""
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what}: the NVIDIA driver says {getattr(result, 'name', result)}")
    return values[0] if values else None


def _driver() -> Any:
    with needing("cuda", "A GPU", DeviceError):
        from cuda.bindings import driver
    return driver
