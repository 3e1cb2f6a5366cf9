"""The section of benchmarks/gpu.py that compiles what the others ask for, by all processors at once."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context

from batchmaker.engine.engine import Engine
from batchmaker.executor.cuda.at_once import MOST_STEPS
from batchmaker.executor.cuda.blocks import prepare as prepare_blocks
from batchmaker.executor.cuda.chains import prepare as prepare_chains
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.configuration import Problem, candidates
from batchmaker.kernels.cost import ranked
from batchmaker.kernels.devices import DeviceSpec
from batchmaker.kernels.found import found_device
from batchmaker.kernels.nvrtc import CachedCompiler, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import CELL_KINDS
from batchmaker.kernels.tuner import batch_bucket, compiled_best
from batchmaker.lab import zoo
from gpu_deadline import Deadline
from gpu_kernels import CHECKED, FLASHRNN, SIZES, TOLERANCES, TUNED, WIDE, Row


def compiling(until: Deadline) -> list[Row]:
    """Compile what the other sections ask for into the cache, by all processors: otherwise each waits for its own.

    The engine's loops as well: on a fresh machine its first start takes half a minute.
    """
    found, begin_s = found_device(), time.perf_counter()
    work = jobs()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(load_loops), *(pool.submit(compile_job, job, found.device, found.arch) for job in work)]
        wait(waiting, timeout=max(0.0, until.left_s))
        for future in waiting:
            future.cancel()
        ready = [future for future in waiting if future.done() and not future.cancelled()]
    reasons = [str(error) for future in ready if (error := future.exception()) is not None]
    compiled = sum(future.result() for future in ready if future.exception() is None)
    return [{
        "jobs": len(waiting), "done": len(ready), "kernels": compiled, "seconds": time.perf_counter() - begin_s,
        "failures": reasons[:5],
    }]  # fmt: skip


Job = tuple[Problem, int, int]
"""The configurations of a problem from one rank to another; from 0 to 0, the one that is chosen."""


def jobs() -> list[Job]:
    """Return what all sections will compile, what comes first first."""
    layers = [(cell, 64, dtype) for cell in ("lstm", "gru") for dtype in TOLERANCES]
    layers += [("lstm", 1024, dtype) for dtype in ("bfloat16", "float16", "float32")]
    found = [
        Problem(cell=cell, dtype=dtype, hidden=hidden, batch=4**power, steps=MOST_STEPS)  # type: ignore[arg-type]
        for cell, hidden, dtype in layers
        for power in range(6 if hidden == 1024 else 5)
    ]
    ragged = [(cell, dtype, *size) for dtype in TOLERANCES for cell in CELL_KINDS for size in CHECKED]
    timed = [(cell, dtype, *size) for cell in ("lstm", "gru") for dtype in ("float32", "bfloat16") for size in SIZES]
    timed += [("gru-before", "float32", *size) for size in SIZES]
    timed += [
        ("lstm", dtype, hidden, batch)
        for hidden in (128, 256) for dtype in ("float32", "bfloat16") for batch in (1, 10, 20, 64)
    ]  # fmt: skip
    timed += [("lstm", dtype, 768, 16) for dtype in FLASHRNN]
    found += [
        Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch_bucket(batch))  # type: ignore[arg-type]
        for cell, dtype, hidden, batch in (*ragged, *timed)
    ]
    searched = [
        (Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch), first, first + 8)  # type: ignore[arg-type]
        for cell, dtype, hidden, batch in TUNED
        for first in range(0, WIDE, 8)
    ]
    return [*((problem, 0, 0) for problem in dict.fromkeys(found)), *searched]


def load_loops() -> int:
    """Compile the loops of an engine that serves an LSTM, or load them; no kernels."""
    sentences = [[1] * length for length in range(1, 20)]
    with Engine(zoo.make("lstm", hidden=8, vocabulary_size=4), policy="cellular:max_steps=5") as engine:
        engine.map(sentences, progress=False)
    prepare_blocks()
    prepare_chains()
    return 0


def compile_job(job: Job, device: DeviceSpec, arch: str) -> int:
    """Compile one job into the cache; return how many kernels were not there."""
    problem, first, end = job
    compiler = CachedCompiler(Nvrtc(), CacheDirectory(default_directory()))
    if end == 0:
        compiled_best(problem, device, kernel_source(), compiler, arch=arch)
    else:
        for config, _ in ranked(problem, list(candidates(problem, device)), device)[first:end]:
            compiler.compile(kernel_source(), config.name_expression, arch)
    return compiler.num_compiled
