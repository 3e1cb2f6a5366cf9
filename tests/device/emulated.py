"""A device whose kernels are compiled by g++ and run on the CPU, in an order that a seed decides."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDevice

HEADER = Path(__file__).with_name("kernel_host.hpp")
THREADS = 3
"""In a block. Few, and no power of two: kernels must work with any number."""


def emulated(
    name: str = "emulated", *, seed: int = 0, mutate: Callable[[str], str] = str, **options: Any
) -> FakeDevice:
    """Return a device that runs kernels. mutate: changes their source."""
    order = random.Random(seed)

    def compiler(source: str, names: Sequence[str]) -> list[Callable[..., None]]:
        library = _library(mutate(source), tuple(names))
        return [partial(_launch, library, name, order) for name in names]

    return FakeDevice(name, seed=seed, compiler=compiler, **options)


def _launch(library: Any, name: str, order: random.Random, grid: tuple[int, ...], *numbers: int) -> None:
    words = np.array(numbers, np.int64)
    x, y = (*grid, 1)[:2]
    said = ctypes.create_string_buffer(200)
    library[f"run_{name}"](x, y, THREADS, order.getrandbits(31), ctypes.c_void_p(words.ctypes.data), said)
    assert not said.value, f"{name}: {said.value.decode()}"


@cache
def _library(source: str, names: tuple[str, ...]) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of the kernels needs g++ (C++17), which is not on this machine")
    folder = Path(mkdtemp(prefix="batchmaker-kernels-"))
    entries = "".join(
        f"""extern "C" void run_{name}(unsigned x, unsigned y, unsigned threads, unsigned seed, int64_t* words,
    char* said) {{
    const auto found = host::run(x, y, threads, seed, [](void* with) {{ host::call({name}, (int64_t*)with); }}, words);
    snprintf(said, 200, "%s", found.c_str());
}}
"""
        for name in names
    )
    program, library = folder / "kernels.cpp", folder / "kernels.so"
    program.write_text(f'#include "{HEADER}"\n#include <cstdio>\n{source}\n{entries}')
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    built = subprocess.run([compiler, *flags, "-o", library, program], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[:4000]
    found = ctypes.PyDLL(str(library))  # one launch at a time, of all devices
    shutil.rmtree(folder)
    return found
