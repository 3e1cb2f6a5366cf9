"""The sections of benchmarks/gpu.py on the persistent kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchmaker.kernels import PersistentGRU, PersistentLSTM
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.configuration import Problem, candidates
from batchmaker.kernels.cost import cost, ranked
from batchmaker.kernels.found import found_device
from batchmaker.kernels.launch import LoadedKernel
from batchmaker.kernels.layer import LayerWeights
from batchmaker.kernels.nvrtc import CachedCompiler, Compiled, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.template import CELL_KINDS, KernelConfig
from batchmaker.kernels.tuner import TOP, batch_bucket, compiled_best
from gpu_deadline import Deadline

Row = dict[str, Any]
STEPS: Final = 100
SIZES: Final = [(hidden, batch) for hidden in (64, 256, 1024) for batch in (1, 10, 20, 64)]
TARGETS: Final = {  # ms, of the specification: float32, bfloat16
    (64, 1): (0.06, 0.06), (64, 10): (0.06, 0.06), (64, 20): (0.06, 0.06),
    (256, 1): (0.10, 0.09), (256, 10): (0.10, 0.09), (256, 20): (0.11, 0.09),
    (1024, 1): (0.19, 0.18), (1024, 10): (0.34, 0.22), (1024, 20): (0.51, 0.25), (1024, 64): (1.2, 0.37),
}  # fmt: skip
GRNN: Final = {  # ms, of the paper's table 1: Titan V, float32, with copies over PCIe
    (64, 1): 0.20, (64, 10): 0.23, (64, 20): 0.24, (256, 1): 0.30, (256, 10): 0.38, (256, 20): 0.49,
    (1024, 1): 0.63, (1024, 10): 4.3, (1024, 20): 8.0,
}  # fmt: skip
GRNN_GRU: Final = {  # ms, of its table 3: with one synchronisation a step, with two
    (64, 1): (0.181, 0.28), (64, 10): (0.186, 0.285), (64, 20): (0.201, 0.307),
    (256, 1): (0.275, 0.372), (256, 10): (0.323, 0.411), (256, 20): (0.431, 0.498),
    (1024, 1): (6.46, 0.683), (1024, 10): (64.76, 3.162), (1024, 20): (129.52, 6.324),
}  # fmt: skip
FLASHRNN: Final = {  # ms on an H100, of FlashRNN's paper: its fused kernel in bfloat16, nn.LSTM in float16
    "bfloat16": {"flashrnn_ms": 4.87, "flashrnn_nn_ms": None}, "float16": {"flashrnn_ms": None, "flashrnn_nn_ms": 2.01},
}  # fmt: skip
TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 5e-3}
TUNED: Final = (("lstm", "float32", 256, 10), ("lstm", "bfloat16", 1024, 20), ("gru", "float32", 1024, 10))
CHECKED: Final = [(64, 10), (200, 3), (256, 20), (1024, 1), (1024, 64)]
"""Hidden sizes and batches that are compared with float64."""
WIDE: Final = 40
"""Configurations that the wide search measures, those that the model ranks first."""


def target_ms(hidden: int, batch: int, dtype: str) -> float | None:
    """Return what the specification wants for 100 steps, None where it says nothing."""
    wanted = TARGETS.get((hidden, batch))
    return None if wanted is None else wanted[0 if dtype == "float32" else 1]


# --- time ------------------------------------------------------------------------------------------------------------


def call_ms(call: Callable[[], object], calls: int = 8, repeats: int = 11) -> float:
    """Return the median over repetitions of the time of one of several calls in a row, by events, after a warm-up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def recorded(call: Callable[[], object]) -> Callable[[], None]:
    """Return what replays the call as a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def attempt(row: Row, name: str, make: Callable[[], float]) -> None:
    """Write a time into a row, or why there is none."""
    try:
        row[name] = make()
    except Exception as error:  # one way that fails does not keep the others from being timed
        row[name] = None
        row.setdefault("failures", {})[name] = f"{type(error).__name__}: {error}".splitlines()[0]


# --- what is timed ----------------------------------------------------------------------------------------------------


def module_of(cell: str, width: int, hidden: int, dtype: str, layers: int = 1) -> Any:
    kind = nn.LSTM if cell == "lstm" else nn.GRU
    return kind(width, hidden, layers).to("cuda", getattr(torch, dtype)).eval().requires_grad_(False)


def persistent(cell: str, module: Any) -> Any:
    if cell == "lstm":
        return PersistentLSTM.from_module(module)
    return PersistentGRU.from_module(module, reset_after=cell == "gru")


def persistent_ms(cell: str, module: Any, x: Tensor) -> float:
    made = persistent(cell, module)
    return call_ms(lambda: made(x))


def kernel_call(problem: Problem, config: KernelConfig, compiled: Compiled) -> Callable[[], None]:
    """Return what enqueues the recurrent kernel alone, all of its numbers on the device, so that it can be recorded."""
    dtype, gates = getattr(torch, problem.dtype), 4 if problem.cell == "lstm" else 3
    hidden, batch, steps = problem.hidden, problem.batch, problem.steps
    w_hh = torch.randn(gates * hidden, hidden, device="cuda").mul_(hidden**-0.5).to(dtype)
    bias_n = torch.zeros(hidden, device="cuda") if problem.cell == "gru" else None
    kernel = LoadedKernel(config, compiled, LayerWeights(problem.cell, w_hh, bias_n))
    px = torch.randn(steps * batch, gates * hidden, device="cuda").to(dtype)
    h = torch.zeros(batch, hidden, device="cuda", dtype=dtype)
    c = torch.zeros(batch, hidden, device="cuda") if problem.cell == "lstm" else None
    y = torch.empty(steps * batch, hidden, device="cuda", dtype=dtype)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    step_offset = torch.arange(steps, dtype=torch.int32, device="cuda") * batch
    length = torch.full((batch,), steps, dtype=torch.int32, device="cuda")
    return lambda: kernel.enqueue(rows, step_offset, rows, length, rows, px, h, c, y)


def loop_call(cell: str, module: Any, x: Tensor) -> Callable[[], Tensor]:
    """Return one product for all inputs, then a product and pointwise operations per step; it gives the last h."""
    w_ih, w_hh, b_ih, b_hh = (
        getattr(module, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    w, hidden = w_hh.t().contiguous(), w_hh.shape[1]
    zero = torch.zeros(x.shape[1], hidden, device=x.device, dtype=x.dtype)

    def call() -> Tensor:
        projected = torch.nn.functional.linear(x, w_ih, b_ih + b_hh if cell == "lstm" else b_ih)
        h, c = zero, zero
        for step in projected:
            if cell == "lstm":
                i, f, g, o = torch.addmm(step, h, w).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                recurrent = torch.addmm(b_hh, h, w)
                r, z = torch.sigmoid(step[:, : 2 * hidden] + recurrent[:, : 2 * hidden]).chunk(2, 1)
                n = torch.tanh(step[:, 2 * hidden :] + r * recurrent[:, 2 * hidden :])
                h = torch.lerp(n, h, z)
        return h

    return call


def timed_row(cell: str, dtype: str, hidden: int, batch: int, steps: int = STEPS) -> Row:
    """Return the times of one size in all ways, ms for all steps."""
    row: Row = {"cell": cell, "dtype": dtype, "hidden": hidden, "batch": batch, "steps": steps}
    is_lstm = cell == "lstm"  # the specification and the paper have no times for the GRU in PyTorch's form
    row |= {
        "target_ms": target_ms(hidden, batch, dtype) if is_lstm else None,
        "grnn_ms": GRNN.get((hidden, batch)) if is_lstm else None,
    }
    problem = Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch, steps=steps)  # type: ignore[arg-type]
    found = found_device()
    compiler = CachedCompiler(Nvrtc(), CacheDirectory(default_directory()))
    served = replace(problem, batch=batch_bucket(batch))  # as PersistentLSTM chooses, so that it is compiled once
    best = compiled_best(served, found.device, kernel_source(), compiler, arch=found.arch)
    if best is not None:
        row["configuration"] = best[0].name_expression
        row["predicted_ms"] = 1e3 * cost(problem, best[0], found.device).seconds
        attempt(row, "kernel_ms", lambda: call_ms(recorded(kernel_call(problem, *best))))
    module = module_of(cell, hidden, hidden, dtype)
    x = torch.randn(steps, batch, hidden, device="cuda").to(getattr(torch, dtype))
    packed = pack_padded_sequence(x, torch.full((batch,), steps))
    attempt(row, "persistent_ms", lambda: persistent_ms(cell, module, x))
    if cell != "gru-before":
        attempt(row, "padded_ms", lambda: call_ms(lambda: module(x)))
        attempt(row, "packed_ms", lambda: call_ms(lambda: module(packed)))
        attempt(row, "loop_ms", lambda: call_ms(recorded(loop_call(cell, module, x)), calls=3))
    return row


# --- sections --------------------------------------------------------------------------------------------------------


def table1(until: Deadline) -> list[Row]:
    """The paper's table 1 and its like for GRU in PyTorch's form."""
    grid = [(cell, dtype, *size) for cell in ("lstm", "gru") for dtype in ("float32", "bfloat16") for size in SIZES]
    return _each(grid, timed_row, ("cell", "dtype", "hidden", "batch"), until)


def flashrnn(until: Deadline) -> list[Row]:
    """The size of which FlashRNN (Pöppel et al. 2024, arXiv 2412.07752) gives times on an H100: 1,024 steps."""

    def one(dtype: str) -> Row:
        row = timed_row("lstm", dtype, 768, 16, steps=1024)
        return {**row, "target_ms": None, **FLASHRNN[dtype]}

    return _each([(dtype,) for dtype in FLASHRNN], one, ("dtype",), until)


def table3(until: Deadline) -> list[Row]:
    """A GRU with one exchange per step (reset after the product) and with two (the canonical one), float32."""
    grid = [(hidden, batch) for hidden in (64, 256, 1024) for batch in (1, 10, 20)]

    def both(hidden: int, batch: int) -> Row:
        one, two = (timed_row(cell, "float32", hidden, batch) for cell in ("gru", "gru-before"))
        return {
            "hidden": hidden, "batch": batch, "one_ms": one.get("kernel_ms"), "two_ms": two.get("kernel_ms"),
            "grnn_one_ms": GRNN_GRU[hidden, batch][0], "grnn_two_ms": GRNN_GRU[hidden, batch][1],
            "failures": {**one.get("failures", {}), **two.get("failures", {})},
        }  # fmt: skip

    return _each(grid, both, ("hidden", "batch"), until)


def networks(until: Deadline) -> list[Row]:
    """The paper's two networks: char-RNN, 3 layers of 128, 100 steps; text classification, 2 of 256, 20 steps."""
    shapes = [("char-RNN", 3, 128, 100), ("text classification", 2, 256, 20)]
    grid = [
        (*shape, dtype, batch) for shape in shapes for dtype in ("float32", "bfloat16") for batch in (1, 10, 20, 64)
    ]

    def one(name: str, layers: int, hidden: int, steps: int, dtype: str, batch: int) -> Row:
        row: Row = {"network": name, "layers": layers, "hidden": hidden, "steps": steps, "dtype": dtype, "batch": batch}
        module = module_of("lstm", hidden, hidden, dtype, layers)
        x = torch.randn(steps, batch, hidden, device="cuda").to(getattr(torch, dtype))
        attempt(row, "persistent_ms", lambda: persistent_ms("lstm", module, x))
        attempt(row, "padded_ms", lambda: call_ms(lambda: module(x)))
        return row

    return _each(grid, one, ("network", "layers", "hidden", "steps", "dtype", "batch"), until)


def correctness(until: Deadline) -> list[Row]:
    """Ragged packed batches beside the same weights in float64: the largest error of any output."""
    grid = [(cell, dtype, *size) for dtype in TOLERANCES for cell in CELL_KINDS for size in CHECKED]

    def one(cell: str, dtype: str, hidden: int, batch: int) -> Row:
        module = module_of(cell, hidden, hidden, dtype)
        lengths = np.random.default_rng(hidden + batch).integers(1, 61, batch)
        lengths[0] = 60
        x = torch.randn(60, batch, hidden, device="cuda").to(getattr(torch, dtype))
        packed = pack_padded_sequence(x, torch.from_numpy(lengths), enforce_sorted=False)
        found, _ = pad_packed_sequence(persistent(cell, module)(packed)[0])
        wanted = in_float64(cell, module, x)
        inside = torch.arange(60, device="cuda")[:, None] < torch.from_numpy(lengths).to("cuda")
        error = float((found.double() - wanted)[inside].abs().max())
        return {
            "cell": cell, "dtype": dtype, "hidden": hidden, "batch": batch, "error": error,
            "tolerance": TOLERANCES[dtype], "passed": error <= TOLERANCES[dtype],
        }  # fmt: skip

    return _each(grid, one, ("cell", "dtype", "hidden", "batch"), until)


def in_float64(cell: str, module: Any, x: Tensor) -> Tensor:
    """Return the outputs [steps, batch, hidden] with the module's weights in float64, step by step."""
    w_ih, w_hh, b_ih, b_hh = (
        getattr(module, f"{name}_l0").double() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = c = x.new_zeros(x.shape[1], w_hh.shape[1], dtype=torch.float64)
    outputs = []
    for step in x.double():
        given = step @ w_ih.t() + b_ih
        if cell == "lstm":
            i, f, g, o = (given + h @ w_hh.t() + b_hh).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            w, b, (gr, gz, gn) = w_hh.chunk(3), b_hh.chunk(3), given.chunk(3, 1)
            r, z = (gr + h @ w[0].t() + b[0]).sigmoid(), (gz + h @ w[1].t() + b[1]).sigmoid()
            after = r * (h @ w[2].t() + b[2]) if cell == "gru" else (r * h) @ w[2].t() + b[2]
            h = (1 - z) * (gn + after).tanh() + z * h
        outputs.append(h)
    return torch.stack(outputs)


def tuner(until: Deadline) -> list[Row]:
    """The model's first and best of five beside the best of a wide search."""

    def one(cell: Any, dtype: Any, hidden: int, batch: int) -> Row:
        problem = Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch)
        found = found_device()
        compiler = CachedCompiler(Nvrtc(), CacheDirectory(default_directory()))
        order = ranked(problem, list(candidates(problem, found.device)), found.device)
        times: list[float | None] = []
        for config, _ in order[:WIDE]:
            if until.passed and len(times) >= TOP:
                break
            row: Row = {}
            attempt(row, "ms", lambda config=config: call_ms(recorded(kernel_call(
                problem, config, compiler.compile(kernel_source(), config.name_expression, found.arch)
            )), repeats=5))  # fmt: skip
            times.append(row["ms"])
        return {
            "cell": cell, "dtype": dtype, "hidden": hidden, "batch": batch, "fit": len(order), "measured": len(times),
            "times_ms": times, **ratios(times),
        }  # fmt: skip

    return _each(list(TUNED), one, ("cell", "dtype", "hidden", "batch"), until)


def ratios(times: list[float | None]) -> dict[str, float | None]:
    """Return by how much the model's first, and the best of its first five, are slower than the best of all."""
    good = [value for value in times if value is not None]
    first = [value for value in times[:TOP] if value is not None]
    if not good or not first:
        return {"top1_over_best": None, "top5_over_best": None}
    top1 = None if times[0] is None else times[0] / min(good)
    return {"top1_over_best": top1, "top5_over_best": min(first) / min(good)}


def _each(grid: list[Any], run: Callable[..., Row], names: tuple[str, ...], until: Deadline) -> list[Row]:
    """Run all of a grid; what the time does not allow, and what fails, is in the rows with a reason."""
    rows = []
    for point in grid:
        named = dict(zip(names, point, strict=True))
        if until.passed:
            rows.append({**named, "not_run": "out of time"})
            continue
        try:
            rows.append(run(*point))
        except Exception as error:  # one size that fails does not keep the others from being measured
            rows.append({**named, "not_run": f"{type(error).__name__}: {error}".splitlines()[0]})
        why = device_failure()
        if why is not None:  # nor does one that ends the process's use of the device take minutes to fail again
            rest = grid[len(rows) :]
            return rows + [{**dict(zip(names, each, strict=True)), "not_run": f"after {why}"} for each in rest]
    return rows


def device_failure() -> str | None:
    """Return why this process can use the device no more, None if it can, or there is none."""
    if not torch.cuda.is_available():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # torch's, of the device
        return str(error).splitlines()[0]
    return None
