"""The kernel's source text."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

INSTRUCTIONS: Final = "device.cuh"
ALGORITHM: Final = ("sums.cuh", "recurrent.cu")


def kernel_source() -> str:
    """Return the CUDA C++ source of the kernel template: C++17, complete without headers, for NVRTC or nvcc."""
    return joined((INSTRUCTIONS, *ALGORITHM))


def algorithm() -> str:
    """Return the part of the source that uses machine instructions by name only, for any implementation of them."""
    return joined(ALGORITHM)


def joined(names: tuple[str, ...], package: str = "batchmaker.kernels") -> str:
    """Return the text of these files of a package, one after the other."""
    room = files(package)
    return "\n".join(room.joinpath(name).read_text(encoding="utf-8") for name in names)
