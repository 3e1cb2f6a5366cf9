"""The simulated device: seconds of a step of each cell at each batch size, from a latency table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.latency import LatencyTable, Quantile
from batchmaker.cost.profile import Overhead
from batchmaker.errors import DataError, OptionError
from batchmaker.lab.simulator.workload import SimulatedModel

NO_OVERHEAD: Final = Overhead()


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Step times.

    seconds: [cells, most + 1], by type id and rows. More rows take whole calls of `most` and one call for the rest.
    """

    seconds: NDArray[np.float64]

    def of(self, types: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return seconds of one step of each type with these numbers of rows."""
        most = self.seconds.shape[1] - 1
        if int(rows.max(initial=0)) <= most:
            seconds: NDArray[np.float64] = self.seconds[types, rows]
            return seconds
        whole, rest = np.divmod(rows, most)
        return np.asarray(whole * self.seconds[types, most] + self.seconds[types, rest], np.float64)


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """The simulated device. costs: of steps. workers: devices of one kind.

    For cell policies alone: run_ahead, take_turns: see Scheduler. overhead: of an engine whose own thread is the one
    worker; OptionError with more.
    """

    costs: StepCosts
    workers: int = 1
    run_ahead: int = 0
    take_turns: bool = False
    overhead: Overhead = NO_OVERHEAD

    def __post_init__(self) -> None:
        if self.workers > 1 and self.overhead != NO_OVERHEAD:
            raise OptionError(
                f"the overhead is that of an engine that computes in its own thread; got {self.workers} workers, "
                "whose steps it would run beside. Leave it out, or simulate one worker"
            )


def step_costs(
    model: SimulatedModel, table: LatencyTable, *, quantile: Quantile = "median", padded: bool = True
) -> StepCosts:
    """Return the cost of every step of the model.

    padded: a step with a batch between two of its cell's batch_sizes costs as much as the larger one, as on the CPU,
    whose executor pads it; without, the table's cost for exactly this number of rows. Other sizes are
    interpolated or extended as in LatencyTable. Raises DataError naming the cells that the table does not have.
    """
    names = {cell.name for cell in table.cells}
    missing = [cell.name for cell in model.cells if cell.name not in names]
    if missing:
        raise DataError(
            f"the latency table has no cell {', '.join(map(repr, missing))} of model {model.name!r}; it has "
            f"{', '.join(sorted(names))}. Measure this model with `batchmaker profile`, or give --npu."
        )
    most = max(cell.max_batch for cell in model.cells)
    seconds = table.dense([cell.name for cell in model.cells], most, quantile)
    if padded:
        for cell in model.cells:
            sizes = np.array(cell.batch_sizes)
            rows = np.arange(1, cell.max_batch + 1)
            seconds[cell.type_id, 1 : cell.max_batch + 1] = seconds[cell.type_id, sizes[np.searchsorted(sizes, rows)]]
    return StepCosts(seconds)
