"""Small models and workloads to simulate, without torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest

NUMBER = ValueSpec((), "int64")


def cell_type(
    type_id: int, name: str, inputs: int, outputs: int, sizes: tuple[int, ...], priority: int = 0
) -> CellType:
    """A cell type whose values are all numbers."""
    return CellType(TypeId(type_id), name, (NUMBER,) * inputs, (NUMBER,) * outputs, sizes, priority)


CHAIN = SimulatedModel("chain", (cell_type(0, "step", 2, 1, (1, 2, 4)),))
PAIR = SimulatedModel(
    "pair", (cell_type(0, "encoder", 2, 1, (1, 4)), cell_type(1, "decoder", 1, 1, (1, 4), priority=1))
)


def chain(steps: int, model: SimulatedModel = CHAIN) -> SimulatedRequest:
    """So many steps of one cell."""
    recorder = Recorder()
    recorder.run(model.cells[0], [HostValues(None, steps, NUMBER)], None)
    return SimulatedRequest(recorder.take(), steps)


def pair(source: int, words: int) -> SimulatedRequest:
    """An encoder over the source, then a decoder that ends after so many words."""
    recorder = Recorder()
    (state,) = recorder.run(PAIR.cells[0], [HostValues(None, source, NUMBER)], None)
    recorder.run(PAIR.cells[1], [], [state], max_steps=words, open_ended=True)
    return SimulatedRequest(recorder.take(), source)


def offered(requests: Sequence[SimulatedRequest], arrived_s: Sequence[float]) -> Offered:
    return Offered(requests, np.array(arrived_s, np.float64))


def costs(cells: Sequence[CellType], fixed_s: float = 1.0, per_row_s: float = 0.0) -> StepCosts:
    """A step takes `fixed_s` and `per_row_s` for each row."""
    most = max(cell.max_batch for cell in cells)
    seconds = fixed_s + per_row_s * np.arange(most + 1) + np.zeros((len(cells), 1))
    seconds[:, 0] = 0
    return StepCosts(seconds)


def random_arrivals(rng: random.Random, count: int, spread: float) -> list[float]:
    return sorted(rng.choice([0.0, rng.uniform(0, spread), float(rng.randint(0, 9))]) for _ in range(count))
