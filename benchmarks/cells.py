"""One step of a recurrent cell: the module as it is, nn.LSTM or nn.GRU per step, and the bound cell.

    python benchmarks/cells.py [--hidden 256 1024] [--batch 1 16 64 256] [--kinds lstm gru] [--json results.json]

Medians in microseconds. "step" leaves the hoisted input projection out, "hoist" is its share of one step when 8
steps are projected together, "sequence" is torch's own nn.LSTM over 20 steps divided by 20. One thread by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from batchmaker.compile.binding import bind
from batchmaker.compile.export import example_rows
from batchmaker.graph.spec import ValueSpec

SEQUENCE_STEPS = 20
HOISTED_STEPS = 8
KINDS = {"lstm": (nn.LSTMCell, nn.LSTM, 2), "gru": (nn.GRUCell, nn.GRU, 1), "rnn": (nn.RNNCell, nn.RNN, 1)}


def median_us(call: Callable[[], object], seconds: float) -> float:
    """Return the median time of one call in microseconds."""
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure(kind: str, dtype: str, hidden: int, batch: int, seconds: float) -> dict[str, float | str | int]:
    """Return one line of the table."""
    cell_class, sequence_class, num_states = KINDS[kind]
    torch_dtype = getattr(torch, dtype)
    row = ValueSpec((hidden,), dtype)
    module = cell_class(hidden, hidden).to(torch_dtype)
    bound = bind(module, (row,) * (1 + num_states), name=kind, num_step_inputs=1)
    inputs = example_rows(bound.inputs, batch, random=True)
    state = inputs[1:]
    many = example_rows(bound.inputs[:1], batch * HOISTED_STEPS, random=True)
    hoisted = bound.hoist(inputs[:1])
    whole = sequence_class(hidden, hidden).to(torch_dtype)
    steps = example_rows((ValueSpec((batch, hidden), dtype),), SEQUENCE_STEPS, random=True)[0]
    eager_state = state if kind == "lstm" else state[0]
    return {
        "kind": kind,
        "dtype": dtype,
        "hidden": hidden,
        "batch": batch,
        "module_us": median_us(lambda: module(inputs[0], eager_state), seconds),
        "sequence_us": median_us(lambda: whole(steps), seconds) / SEQUENCE_STEPS,
        "call_us": median_us(lambda: bound.call(inputs), seconds),
        "step_us": median_us(lambda: bound.step(hoisted, state), seconds),
        "hoist_us": median_us(lambda: bound.hoist(many), seconds) / HOISTED_STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=["lstm", "gru"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="per number")
    parser.add_argument("--json", type=Path, help="write the lines here as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    lines = []
    print(f"{'kind':5}{'dtype':>9}{'H':>6}{'B':>5}{'module':>9}{'sequence':>10}{'call':>9}{'step':>9}{'hoist':>9}")
    with torch.no_grad():
        for kind in options.kinds:
            for dtype in options.dtypes:
                for hidden in options.hidden:
                    for batch in options.batch:
                        line = measure(kind, dtype, hidden, batch, options.seconds)
                        lines.append(line)
                        numbers = [line[f"{name}_us"] for name in ("module", "sequence", "call", "step", "hoist")]
                        widths = (9, 10, 9, 9, 9)
                        shown = "".join(f"{n:{w}.0f}" for n, w in zip(numbers, widths, strict=True))
                        print(f"{kind:5}{dtype:>9}{hidden:6}{batch:5}{shown}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
