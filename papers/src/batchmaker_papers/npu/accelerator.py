"""A systolic-array accelerator with DRAM: the cost of one call of a cell, by batch size (LazyBatching, Table I).

The work of a cell is a tuple of operations for a single request (a row); a batch does them for every row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.errors import OptionError
from batchmaker_papers.npu.systolic import ARRAY, Counts, Dataflow


@final
@dataclass(frozen=True, slots=True)
class SharedGemm:
    """A product with weights that all requests share: a batch of b is `count` products of b * m rows.

    m: rows of one request. k, n: see systolic.Gemm. count: products with weights of their own, such as the groups of
    a grouped convolution. The weights' traffic is a Weights of its own.
    """

    m: int
    k: int
    n: int
    count: int = 1


@final
@dataclass(frozen=True, slots=True)
class OwnGemm:
    """`count` products of one request's values with each other, as in attention: a batch of b is b * count products."""

    count: int
    m: int
    k: int
    n: int


@final
@dataclass(frozen=True, slots=True)
class VectorWork:
    """Arithmetic on single values: a number of operations of one lane of the vector unit."""

    lane_operations: int


@final
@dataclass(frozen=True, slots=True)
class Activations:
    """Values that an operation reads and writes. They stay on the chip while those of the whole batch fit."""

    values_in: int
    values_out: int


@final
@dataclass(frozen=True, slots=True)
class Streamed:
    """Values read from or written to a table in DRAM, which never stays on the chip: rows of an embedding."""

    values: int


@final
@dataclass(frozen=True, slots=True)
class Weights:
    """Weights, read once for the whole batch. They stay on the chip if those of all cells fit there."""

    values: int


Operation: TypeAlias = SharedGemm | OwnGemm | VectorWork | Activations | Streamed | Weights


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Npu:
    """The accelerator. Defaults are those of Table I of LazyBatching, as far as given.

    array: rows and columns of the systolic array, and lanes of the vector unit. bytes_per_value: of weights and
    activations alike; the paper does not give it, see papers/docs/npu-model.md.
    """

    array: int = ARRAY
    clock_hz: float = 700e6
    activation_bytes: int = 8 << 20
    weight_bytes: int = 4 << 20
    dram_latency_cycles: int = 100
    dram_bytes_per_s: float = 360e9
    bytes_per_value: int = 1

    def __post_init__(self) -> None:
        for name in ("array", "clock_hz", "dram_latency_cycles", "dram_bytes_per_s", "bytes_per_value"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise OptionError(f"{name} of an NPU must be a finite number above 0, got {value}")
        for name in ("activation_bytes", "weight_bytes"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} of an NPU must be at least 0, got {getattr(self, name)}")

    def seconds(
        self, operations: Sequence[Operation], batch: int, dataflow: Dataflow, *, working_set: int | None = None
    ) -> float:
        """Return seconds of one call with `batch` rows; see `cycles`."""
        if batch < 0:
            raise OptionError(f"batch must be at least 0, got {batch}")
        return float(self.cycles(operations, np.array([batch]), dataflow, working_set=working_set)[0]) / self.clock_hz

    def cycles(
        self, operations: Sequence[Operation], sizes: Counts, dataflow: Dataflow, *, working_set: int | None = None
    ) -> NDArray[np.float64]:
        """Return the cycles of one call at each batch size: [len(sizes)] float64, 0 for an empty batch.

        A call takes the longer of computing (array, then vector unit) and a DRAM access with all moved bytes: the two
        overlap. working_set: weights, in values, of all cells that take turns on the accelerator; None: more than fits.
        """
        compute = np.zeros(len(sizes), np.float64)
        moved = np.zeros(len(sizes), np.float64)
        weights_stay = working_set is not None and working_set * self.bytes_per_value <= self.weight_bytes
        for operation in operations:
            match operation:
                case SharedGemm(m, k, n, count):
                    compute += dataflow(sizes * m, k, n, np.full_like(sizes, count), self.array)
                case OwnGemm(count, m, k, n):
                    compute += dataflow(np.full_like(sizes, m), k, n, sizes * count, self.array)
                case VectorWork(lane_operations):
                    compute += -(-sizes * lane_operations // self.array)
                case Activations(values_in, values_out):
                    values = sizes * (values_in + values_out)
                    moved += np.where(values * self.bytes_per_value > self.activation_bytes, values, 0)
                case Streamed(values_per_row):
                    moved += sizes * values_per_row
                case Weights(values_once):
                    moved += 0 if weights_stay else values_once
        moved_bytes = moved * self.bytes_per_value
        per_cycle = self.dram_bytes_per_s / self.clock_hz
        memory = self.dram_latency_cycles + moved_bytes / per_cycle
        return np.where(sizes > 0, np.maximum(compute, memory), 0.0)

    def latency_table(
        self, cells: Mapping[str, Sequence[Operation]], max_batch: int, dataflow: Dataflow
    ) -> LatencyTable:
        """Return the time of every cell at every batch size up to `max_batch`. Nothing is random, so p95 = median.

        cells: operations of each cell by its name. All of them together are the working set.
        """
        if max_batch < 1:
            raise OptionError(f"max_batch must be at least 1, got {max_batch}")
        working_set = sum(weight_values(operations) for operations in cells.values())
        sizes = np.arange(1, max_batch + 1)
        latencies = []
        for name, operations in cells.items():
            cycles = self.cycles(operations, sizes, dataflow, working_set=working_set)
            seconds = tuple((cycles / self.clock_hz).tolist())
            latencies.append(CellLatency(name, tuple(sizes.tolist()), seconds, seconds))
        return LatencyTable(tuple(latencies))


def weight_values(operations: Sequence[Operation]) -> int:
    """Return the number of weights that the operations read."""
    return sum(operation.values for operation in operations if isinstance(operation, Weights))
