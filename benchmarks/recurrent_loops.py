"""Steps of a task in one compiled call, beside the cell step by step and beside nn.LSTM, nn.GRU and nn.RNN.

    python benchmarks/recurrent_loops.py [--kinds lstm gru rnn] [--batch 1 4 16 64 256] [--json results.json]
    python benchmarks/recurrent_loops.py --products [--batch 1 8 64 256]

Microseconds of a step, the least of many, in the time of the thread that computes; all are called in turn. One thread.
Words come from a folded table in the loop and in the steps; the sequence multiplies its inputs
too. A task has 25 steps up to batch 16, otherwise 5.

--products: instead, GFLOP/s of the product of n states and the weights of an LSTM in float32: oneDNN's over panels, and
MKL's packed one, each in a compiled loop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from batchmaker.arrays import aligned_zeros
from batchmaker.compile.binding import bind
from batchmaker.compile.export import example_rows
from batchmaker.executor.task_loop import HOISTED_SIZES
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import example_task
from batchmaker.kernels.cpu.products import Products, library
from batchmaker.kernels.cpu.steps import BLOCK, PACKED, PANELS, multiply
from batchmaker.kernels.cpu.tiles import LANES
from batchmaker.model.batch_sizes import default_batch_sizes

KINDS = {"lstm": (nn.LSTMCell, nn.LSTM, 2), "gru": (nn.GRUCell, nn.GRU, 1), "rnn": (nn.RNNCell, nn.RNN, 1)}
SIZES = [("float32", 64), ("float32", 128), ("float32", 256), ("float32", 512), ("bfloat16", 1024)]
NUM_TOKENS = 1000
TIMES = 8
FAST = {"error_model": "numpy", "fastmath": True}


class Words(nn.Module):
    def __init__(self, cell: nn.Module, hidden: int) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(NUM_TOKENS, hidden), cell

    def forward(self, token: Tensor, *state: Tensor) -> Any:
        return self.cell(self.embedding(token), state if len(state) > 1 else state[0])


def least_us(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Return the least time of each call in microseconds."""
    least, order = [float("inf")] * len(calls), list(range(len(calls)))
    end, turns = time.perf_counter() + seconds, 0
    while turns < 4 or time.perf_counter() < end:
        random.shuffle(order)
        turns += 1
        for i in order:
            begin = time.thread_time()
            calls[i]()
            least[i] = min(least[i], time.thread_time() - begin)
    return [1e6 * taken for taken in least]


def measure(kind: str, dtype: str, hidden: int, batches: list[int], seconds: float) -> list[dict[str, Any]]:
    """Return the lines of one cell."""
    torch.manual_seed(0)
    cell_class, sequence_class, num_state = KINDS[kind]
    torch_dtype = getattr(torch, dtype)
    module = Words(cell_class(hidden, hidden), hidden).to(torch_dtype).eval()
    inputs = (ValueSpec((), "int64", NUM_TOKENS), *[ValueSpec((hidden,), dtype)] * num_state)
    cell = bind(module, inputs, name=kind, num_step_inputs=1)
    cell.warm_up(default_batch_sizes(max(batches)), HOISTED_SIZES)
    sequence = sequence_class(hidden, hidden).to(torch_dtype)
    loop = cell.loop
    assert loop is not None
    lines = []
    for n in batches:
        steps = 25 if n <= 16 else 5
        task = example_task(loop, n, steps)
        task.inputs = (np.random.default_rng(0).integers(0, NUM_TOKENS, n * steps),)
        rows, x = example_rows((*cell.hoisted, *inputs[1:]), n), torch.randn(steps, n, hidden).to(torch_dtype)
        calls: list[Callable[[], object]] = [
            lambda task=task: loop.run(task),
            lambda rows=rows, steps=steps: [cell.step(rows[:1], rows[1:]) for _ in range(steps)],
            lambda x=x: sequence(x),
        ]
        looped, stepped, whole = (taken / steps for taken in least_us(calls, seconds))
        lines.append(
            {"kind": kind, "dtype": dtype, "hidden": hidden, "batch": n, "loop_us": looped, "step_us": stepped,
             "sequence_us": whole, "chosen": cell.loop_for(n) is not None}
        )  # fmt: skip
        print(
            f"{kind} {hidden} {dtype} x {n}: loop {looped:.1f} us, step {stepped:.1f} ({looped / stepped:.2f}), "
            f"sequence {whole:.1f} ({looped / whole:.2f})", flush=True,
        )  # fmt: skip
    return lines


@njit(**FAST)
def multiply_often(times, how, n, a, narrow, w, addresses, g):
    for _ in range(times):
        multiply(how, n, a, narrow, w, addresses, g)


def measure_products(hidden: int, batches: list[int], seconds: float) -> None:
    """Print what each product of the library does, which all take turns. One that this machine lacks is left out."""
    weights, width = torch.randn(4 * hidden, hidden), 4 * hidden
    a, g = (aligned_zeros((BLOCK, size), np.float32) for size in (hidden + LANES, width))
    a[:] = np.random.default_rng(0).standard_normal(a.shape, np.float32)
    narrow, w = np.zeros((1, 1), np.float32), np.zeros((hidden, width), np.float32)
    made = {"panels": Products(weights, library()), "packed": Products(weights, replace(library(), brgemm=None))}
    ways = {"panels": PANELS, "packed": PACKED}
    made = {name: one for name, one in made.items() if one.ways[-1] == ways[name]}
    for n in [batch for batch in batches if batch <= BLOCK]:
        calls: list[Callable[[], object]] = [
            lambda name=name, one=one, n=n: multiply_often(TIMES, ways[name], n, a, narrow, w, one.addresses, g)
            for name, one in made.items()
        ]
        taken = zip(made, least_us(calls, seconds), strict=True)
        said = [f"{name} {2e-3 * TIMES * n * hidden * width / us:.0f}" for name, us in taken]
        print(f"{hidden} x {n}: {', '.join(said)} GFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["lstm"], choices=KINDS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--products", action="store_true", help="measure products alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if options.products:
        for hidden in [hidden for dtype, hidden in SIZES if dtype == "float32"]:
            measure_products(hidden, options.batch, options.seconds)
        return
    lines = [
        line
        for kind in options.kinds
        for dtype, hidden in SIZES
        for line in measure(kind, dtype, hidden, options.batch, options.seconds)
    ]
    if options.json:
        machine = {"processor": platform.processor(), "load": os.getloadavg()[0], "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
