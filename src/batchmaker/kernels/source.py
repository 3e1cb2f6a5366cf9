"""The kernel's source text."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

INSTRUCTIONS: Final = "device.cuh"
ALGORITHM: Final = ("sums.cuh", "recurrent.cu")


def kernel_source() -> str:
    """Return the CUDA C++ source of the kernel template: complete without headers, for NVRTC or nvcc, C++17."""
    return joined((INSTRUCTIONS, *ALGORITHM))


def algorithm() -> str:
    """Return the part of the source that is written in terms of the instructions, whatever provides those."""
    return joined(ALGORITHM)


def joined(names: tuple[str, ...]) -> str:
    room = files("batchmaker.kernels")
    return "\n".join(room.joinpath(name).read_text(encoding="utf-8") for name in names)
