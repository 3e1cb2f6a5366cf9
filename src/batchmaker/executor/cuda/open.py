"""Opens GPUs by name. If this is not possible, the error says what is missing."""

from __future__ import annotations

import re

import torch

from batchmaker.errors import DeviceError, OptionError
from batchmaker.executor.cuda.device import Device


def open_devices(device: str, *, tf32: bool = False) -> list[Device]:
    """Return the GPUs that `device` names: `cuda` for all, `cuda:0` or `cuda:0,2` for some.

    tf32: let matrix products and convolutions of float32 round their factors to 10 bits. Raises errors as
    `device_numbers`, and DeviceError if the extra `cuda` is not installed, or a GPU or its driver is too old.
    """
    numbers = device_numbers(device)
    from batchmaker.executor.cuda.gpu import Gpu

    return [Gpu(number, tf32=tf32) for number in numbers]


def device_numbers(device: str) -> list[int]:
    """Return the numbers of the GPUs that `device` names.

    OptionError for a wrong name. DeviceError if torch has no CUDA, or there is no driver or no such GPU.
    """
    if not re.fullmatch(r"cuda(:\d+(,\d+)*)?", device):
        raise OptionError(f"device must be 'cpu', 'cuda' or like 'cuda:0' or 'cuda:0,1', got {device!r}")
    if torch.version.cuda is None:
        raise DeviceError(
            f"device {device!r} needs a torch with CUDA, and torch {torch.__version__} has none; install a CUDA build, "
            "or use device 'cpu'"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device {device!r}: torch {torch.__version__} is made for CUDA {torch.version.cuda} and finds no GPU that "
            "it can use; see whether `nvidia-smi` lists one and its driver is new enough, or use device 'cpu'"
        )
    count = torch.cuda.device_count()
    numbers = [int(number) for number in re.findall(r"\d+", device)] or list(range(count))
    if unknown := [number for number in numbers if number >= count]:
        raise DeviceError(f"device {device!r}: there is no GPU {unknown[0]}; {count} found, numbered from 0")
    if len(set(numbers)) < len(numbers):
        raise OptionError(f"device {device!r} names a GPU twice")
    return numbers
