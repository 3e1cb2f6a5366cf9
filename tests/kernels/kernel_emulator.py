"""The kernel's source on the host: compiled by g++ over host_instructions.hpp, run on NumPy arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from batchmaker.kernels.source import algorithm
from batchmaker.kernels.template import KernelConfig
from batchmaker.kernels.tiling import packed_index

HEADER = Path(__file__).with_name("host_instructions.hpp")
POINTERS = (
    *("packed", "bias_n", "px", "px_offset", "step_offset", "slot", "length"),
    *("h_state", "c_state", "y", "y_offset", "c_steps", "exchange", "arrivals"),
)
MODELLED = ("h_state", "c_state", "y", "c_steps", "exchange", "arrivals")
TORCH_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Problem:
    """What one call of the kernel computes, in float32 NumPy. Rows need not be sorted.

    px: [rows, gates * hidden]; w_hh: [gates * hidden, hidden]; bias_n: [hidden]; h, c: [slots, hidden].
    """

    px: np.ndarray
    px_offset: np.ndarray
    slot: np.ndarray
    length: np.ndarray
    w_hh: np.ndarray
    bias_n: np.ndarray
    h: np.ndarray
    c: np.ndarray
    step_offset: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """error: what the emulation found, or "". h, c: the state afterwards. y, c_steps: [px rows, hidden], h and c of
    every step, NaN if not written; c_steps is None but for an LSTM."""

    error: str
    h: np.ndarray
    c: np.ndarray
    y: np.ndarray
    c_steps: np.ndarray | None = None


class Emulator:
    """Instances of the kernel template, compiled for the host, each from the kernel's source or from a changed one."""

    def __init__(self, folder: Path, configs: Sequence[KernelConfig], sources: Sequence[str] | None = None) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("the emulation of the kernels needs g++ (C++17), which is not on this machine")
        self._configs = list(configs)
        self._arrivals: dict[int, np.ndarray] = {}
        program, library = folder / "kernels.cpp", folder / "kernels.so"
        program.write_text(_program(self._configs, sources or [algorithm()] * len(configs)))
        flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
        built = subprocess.run([compiler, *flags, "-o", library, program], capture_output=True, text=True, check=False)
        if built.returncode:
            raise RuntimeError(f"g++ cannot compile the kernel's source for the host:\n{built.stderr[:4000]}")
        self._library = ctypes.CDLL(str(library))

    def run(self, instance: int, problem: Problem, seed: int = 0, teams: int = 1) -> Answer:
        """Run one call with `teams` sets of blocks, in an order that the seed decides. Counters outlive calls."""
        config = self._configs[instance]
        arrays = _arguments(config, problem, teams)
        arrays["arrivals"] = self._arrivals.setdefault(instance, np.zeros(1024, np.uint32))
        addresses = [None if arrays[name] is None else arrays[name].ctypes.data for name in POINTERS]
        sizes = [getattr(arrays[name], "nbytes", 0) for name in MODELLED]
        error = self.launch(instance, addresses, sizes, config.hidden, len(problem.slot), teams, seed)
        if error:  # the counters are where the emulation stopped
            del self._arrivals[instance]
        dtype = TORCH_TYPES[config.dtype]
        c = arrays["c_state"]
        return Answer(
            error=error,
            h=_widen(arrays["h_state"], dtype),
            c=problem.c if c is None else c,
            y=_widen(arrays["y"], dtype),
            c_steps=arrays["c_steps"],
        )

    def launch(
        self,
        instance: int,
        addresses: Sequence[int | None],
        sizes: Sequence[int],
        y_stride: int,
        batch: int,
        teams: int,
        seed: int = 0,
    ) -> str:
        """Run one call on memory as it is; return what the emulation finds wrong, or "".

        addresses: of what POINTERS names. sizes: bytes of what MODELLED names, 0 where there is nothing.
        """
        config = self._configs[instance]
        error = ctypes.create_string_buffer(400)
        self._library[f"run_{instance}"](
            (ctypes.c_void_p * len(POINTERS))(*addresses),
            (ctypes.c_size_t * len(MODELLED))(*sizes),
            ctypes.c_int(y_stride),
            ctypes.c_int(batch),
            ctypes.c_int(teams * config.blocks_per_tile),
            ctypes.c_int(config.blocks_per_tile if config.regime == "cluster" else 1),
            ctypes.c_size_t(config.shared_bytes),
            ctypes.c_uint(seed),
            error,
        )
        return error.value.decode()


def _arguments(config: KernelConfig, problem: Problem, teams: int) -> dict[str, np.ndarray | None]:
    """Return all that the kernel is given but the counters; outputs hold what is not a number."""
    dtype = TORCH_TYPES[config.dtype]
    packed = np.append(problem.w_hh.ravel(), np.float32(0))[packed_index(config)]
    offsets = problem.px_offset.astype(np.int32)
    return {
        "packed": _narrow(packed, dtype),
        "bias_n": problem.bias_n if config.cell == "gru" else None,
        "px": _narrow(problem.px, dtype),
        "px_offset": offsets,
        "step_offset": None if problem.step_offset is None else problem.step_offset.astype(np.int32),
        "slot": problem.slot.astype(np.int32),
        "length": problem.length.astype(np.int32),
        "h_state": _narrow(problem.h, dtype),
        "c_state": problem.c.copy() if config.cell == "lstm" else None,
        "y": _narrow(np.full((len(problem.px), config.hidden), np.nan, np.float32), dtype),
        "y_offset": offsets,
        "c_steps": np.full((len(problem.px), config.hidden), np.nan, np.float32) if config.cell == "lstm" else None,
        "exchange": _poisoned_exchange(config, teams),
    }


def _program(configs: Sequence[KernelConfig], sources: Sequence[str]) -> str:
    """Return one translation unit with every source in a namespace of its own and an entry point for each instance."""
    spaces = {source: f"source_{number}" for number, source in enumerate(dict.fromkeys(sources))}
    parts = [f'#include "{HEADER}"', *[f"namespace {space} {{\n{source}\n}}" for source, space in spaces.items()]]
    modelled = ", ".join(f"{{p[{POINTERS.index(name)}], sizes[{i}]}}" for i, name in enumerate(MODELLED))
    for number, (config, source) in enumerate(zip(configs, sources, strict=True)):
        item = "float" if config.dtype == "float32" else "unsigned short"
        kinds = ["const uint4", "const float", f"const {item}", *["const int"] * 4]
        kinds += [item, "float", item, "const int", "float", item, "unsigned"]
        arguments = ", ".join(f"({kind}*)p[{at}]" for at, kind in enumerate(kinds))
        parts.append(
            f'extern "C" void run_{number}(void** p, size_t* sizes, int y_stride, int batch, int blocks, int cluster,\n'
            f"    size_t shared, unsigned seed, char* error) {{\n"
            f"    const auto found = emulation::run(blocks, {config.num_threads}, cluster, shared, seed,\n"
            f"        {{{modelled}}},\n"
            f"        [=] {{ {spaces[source]}::{config.name_expression}({arguments}, y_stride, batch); }});\n"
            f'    snprintf(error, 400, "%s", found.c_str());\n}}'
        )
    return "\n".join(parts)


def _poisoned_exchange(config: KernelConfig, teams: int) -> np.ndarray | None:
    """Return the exchange with NaN wherever h belongs, and the zeros in its padding that the caller provides."""
    if config.exchange_elements == 0:
        return None
    exchange = np.zeros((teams, 2, config.tile_height, config.state_stride), np.float32)
    exchange[..., : config.hidden] = np.nan
    shares = np.full((teams, config.exchange_elements - exchange[0].size), np.nan, np.float32)
    whole = np.concatenate((exchange.reshape(teams, -1), shares), axis=1)
    return _narrow(whole, TORCH_TYPES[config.dtype])


def _narrow(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return a copy in `dtype`; 16-bit types as their bits."""
    narrow = torch.from_numpy(np.ascontiguousarray(values)).to(dtype, copy=True)
    return narrow.numpy() if dtype == torch.float32 else narrow.view(torch.uint16).numpy()


def _widen(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return values if dtype == torch.float32 else torch.from_numpy(values).view(dtype).float().numpy()
