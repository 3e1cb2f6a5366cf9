"""Cycles of matrix products on a systolic array, in closed form.

A product of [m, k] and [k, n] has m input rows, k values to each sum, and n outputs. The array has `array` x `array`
cells. `count` such products, independent of each other, run one after the other. `m` and `count` may be arrays of the
same shape; then so is the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError, unknown_name

ARRAY: Final = 128
"""Rows and columns of the array in LazyBatching, Table I."""
RHO: Final = 4.0
"""Weight rows loaded per cycle at which loading keeps pace with DRAM at one byte per weight: 514 / 128."""

Counts: TypeAlias = NDArray[np.int64]
Dataflow: TypeAlias = Callable[[Counts, int, int, Counts, int], Counts]
"""(m, k, n, count, array) -> cycles. The mapping of products onto an array."""


@final
@dataclass(frozen=True, slots=True)
class Gemm:
    """The matrix product [m, k] x [k, n].

    A convolution is such a product by im2col: m output pixels, k values under the filter, n filters. OptionError unless
    all three are at least 1.
    """

    m: int
    k: int
    n: int

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n) < 1:
            raise OptionError(f"a matrix product needs sizes of at least 1, got M={self.m}, K={self.k}, N={self.n}")

    def cycles(self, dataflow: Dataflow, array: int = ARRAY) -> int:
        """Return the cycles of this product alone on an array x array grid."""
        if array < 1:
            raise OptionError(f"the array must have at least 1 row, got {array}")
        m, one = np.array([self.m], object), np.array([1], object)  # exact integers of any size
        return int(dataflow(m, self.k, self.n, one, array)[0])


def scalesim_ws(m: Counts, k: int, n: int, count: Counts, array: int) -> Counts:
    """Return SCALE-Sim's cycles with stationary weights: each tile is loaded, streamed through and drained separately.

    Equal to the compute cycles that SCALE-Sim 3.0.0 reports without memory stalls.
    """
    return count * (_tiles(k, array) * _tiles(n, array) * (m + 3 * array - 2) - 1)


def scalesim_os(m: Counts, k: int, n: int, count: Counts, array: int) -> Counts:
    """Return SCALE-Sim's cycles with stationary outputs: each output tile takes k steps and fill and drain.

    Equal to the compute cycles that SCALE-Sim 3.0.0 reports without memory stalls.
    """
    return count * (-(-m // array) * _tiles(n, array) * (k + 2 * array - 2) - 1)


def tpu(rho: float = RHO) -> Dataflow:
    """Return a dataflow with stationary weights that loads the next tile while the present one is used.

    rho: weight rows loaded per cycle. A tile takes as long as the slower of loading and streaming. Only the first load
    and the last drain count separately, and consecutive products just have more tiles. OptionError unless rho is above
    0.
    """
    if not 0 < rho < float("inf"):
        raise OptionError(f"rho must be a finite number above 0, got {rho}")

    def cycles(m: Counts, k: int, n: int, count: Counts, array: int) -> Counts:
        load = math.ceil(array / rho)
        return load + count * _tiles(k, array) * _tiles(n, array) * np.maximum(m, load) + 2 * array - 2

    return cycles


def dataflow_named(name: str, rho: float = RHO) -> Dataflow:
    """Return the dataflow named ws, os or tpu; `rho` is for tpu. OptionError for any other name."""
    dataflows: dict[str, Callable[[], Dataflow]] = {
        "ws": lambda: scalesim_ws,
        "os": lambda: scalesim_os,
        "tpu": lambda: tpu(rho),
    }
    if name not in dataflows:
        raise unknown_name("dataflow", name, dataflows)
    return dataflows[name]()


def _tiles(size: int, array: int) -> int:
    return -(-size // array)
