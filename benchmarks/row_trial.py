"""What the trial of rows adds to the binding of a cell, for the cells of every network of the zoo.

    python benchmarks/row_trial.py [NETWORK ...] [--hidden 1024]

Prints milliseconds for each cell: the trial of the module, that of its fast forms, and the whole binding with both. The
median over all cells is the last line. --hidden: recurrent cells of this size besides. One thread, its own time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import batchmaker as bm
from batchmaker.compile import binding
from batchmaker.compile.row_trial import Tried
from batchmaker.lab.zoo import MODELS, make
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding


class Stopwatch:
    """Adds up the milliseconds in calls of some functions while the latest cell is bound."""

    def __init__(self) -> None:
        self.cells: list[dict[str, float]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and adds its time."""

        def run(*given: Any, **named: Any) -> Any:
            if name == "binding":
                self.cells.append({"binding": 0.0, "module": 0.0, "forms": 0.0})
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                if self.cells:
                    self.cells[-1][name] += 1e3 * (time.thread_time() - began)

        return run


class Recurrent(bm.Model):
    """One recurrent cell over a sequence of its own width."""

    def __init__(self, kind: type[nn.Module], hidden: int) -> None:
        self.step = bm.Cell(kind(hidden, hidden))
        self.example_request = torch.randn(2, hidden)

    def unfold(self, frames: torch.Tensor) -> Any:
        return self.step.run(frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(MODELS))
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    watch = Stopwatch()
    from batchmaker.model import registry as place

    place.bind = watch.timed("binding", place.bind)
    binding.try_rows = watch.timed("module", binding.try_rows)
    Tried.computes_the_same = watch.timed("forms", Tried.computes_the_same)  # type: ignore[method-assign]
    models: dict[str, Callable[[], bm.Model]] = {name: lambda name=name: make(name) for name in options.networks}
    models |= {
        f"{kind.__name__} {options.hidden}": lambda kind=kind: Recurrent(kind, options.hidden)
        for kind in (nn.LSTMCell, nn.GRUCell)
    }
    print(f"{'network':24} {'cells':>5} {'module':>8} {'forms':>8} {'both':>8} {'binding':>8}   (medians, ms)")
    every: list[dict[str, float]] = []
    for name, build in models.items():
        watch.cells = []
        model = build()
        cells = CellRegistry()
        for request in model.examples:
            Unfolding(model, cells, request).start()
        for number, bound in enumerate(cells.bound):
            if number not in cells.num_step_inputs:
                bound.call(bound.example(1))  # this form is made at its first use
        every += watch.cells
        middle = {key: statistics.median(cell[key] for cell in watch.cells) for key in watch.cells[0]}
        both = statistics.median(cell["module"] + cell["forms"] for cell in watch.cells)
        print(
            f"{name:24} {len(watch.cells):5} {middle['module']:8.2f} {middle['forms']:8.2f} {both:8.2f} "
            f"{middle['binding']:8.1f}",
            flush=True,
        )
    trials = sorted(cell["module"] + cell["forms"] for cell in every)
    print(
        f"{len(every)} cells: median {statistics.median(trials):.2f} ms, 90% below {trials[9 * len(trials) // 10]:.2f}"
    )


if __name__ == "__main__":
    main()
