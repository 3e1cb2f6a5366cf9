"""Time of one call of a cell: a table over batch sizes, and its correction while serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchmaker.compiled import compiled
from batchmaker.errors import DataError, OptionError, unknown_name

Quantile: TypeAlias = Literal["median", "p95"]
"""A column of the table."""
WEIGHT: Final = 0.05
LOWEST: Final = 0.5
HIGHEST: Final = 2.0
"""See OnlineCorrection."""


@final
@dataclass(frozen=True, slots=True)
class CellLatency:
    """Measured or computed time of one call of a cell.

    batch: sizes, ascending, at least one. median_s, p95_s: seconds of one call at each size; p95_s is never below
    median_s. They need not grow with the size: the table that holds them smooths them. DataError if one of these
    conditions fails.
    """

    name: str
    batch: tuple[int, ...]
    median_s: tuple[float, ...]
    p95_s: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"latency of cell {self.name!r}"
        if not self.batch:
            raise DataError(f"{where}: no batch size was measured, expected at least one. Run `batchmaker profile`.")
        if self.batch[0] < 1 or any(small >= large for small, large in zip(self.batch, self.batch[1:], strict=False)):
            raise DataError(f"{where}: batch sizes are {list(self.batch)}, expected whole numbers from 1, ascending.")
        for column, times in (("median_s", self.median_s), ("p95_s", self.p95_s)):
            if len(times) != len(self.batch):
                raise DataError(f"{where}: {len(times)} times in {column} for {len(self.batch)} batch sizes.")
            wrong = next((time for time in times if not (math.isfinite(time) and time > 0)), None)
            if wrong is not None:
                raise DataError(f"{where}: {column} has {wrong}, expected seconds above 0.")
        if any(high < middle for middle, high in zip(self.median_s, self.p95_s, strict=True)):
            raise DataError(f"{where}: p95_s is below median_s at some batch size. Are the two exchanged?")


@final
@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Time of one call of each cell at any batch size.

    Between the measured sizes times are interpolated linearly, after they were made monotone: if a larger batch was
    faster than a smaller one, both get their mean. Below the smallest size its time holds. Above the largest, a batch
    counts as whole calls of the largest size and one call for the rest. Names must be unique; otherwise DataError.
    """

    cells: tuple[CellLatency, ...]

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        if not names:
            raise DataError("the latency table has no cells, expected at least one. Run `batchmaker profile`.")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"the latency table has cell {twice!r} twice. Give the cells names of their own.")

    def seconds(self, name: str, batch: int, quantile: Quantile = "median") -> float:
        """Return seconds of one call of the cell with `batch` rows; 0 for none. OptionError for an unknown cell."""
        if batch < 0:
            raise OptionError(f"batch must be at least 0, got {batch}")
        return float(_interpolated(self._cell(name), np.array([batch]), quantile)[0])

    def dense(self, names: Sequence[str], max_batch: int, quantile: Quantile = "median") -> NDArray[np.float64]:
        """Return [len(names), max_batch + 1] seconds: entry [i, b] for b rows of cell names[i]. Column 0 is zero.

        Each row is monotone. For an unknown cell OptionError names the nearest known one.
        """
        if max_batch < 0:
            raise OptionError(f"max_batch must be at least 0, got {max_batch}")
        sizes = np.arange(max_batch + 1)
        rows = [_interpolated(self._cell(name), sizes, quantile) for name in names]
        return np.array(rows, np.float64).reshape(len(names), max_batch + 1)

    def with_error(self, factor: float) -> LatencyTable:
        """Return a table with a deliberate error, for stress tests: every time multiplied by `factor`."""
        if not (math.isfinite(factor) and factor > 0):
            raise OptionError(f"the factor of an error must be a finite number above 0, got {factor}")
        return LatencyTable(
            tuple(
                replace(
                    cell,
                    median_s=tuple(factor * time for time in cell.median_s),
                    p95_s=tuple(factor * time for time in cell.p95_s),
                )
                for cell in self.cells
            )
        )

    def _cell(self, name: str) -> CellLatency:
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise unknown_name("cell in the latency table", name, (cell.name for cell in self.cells))


def isotonic(values: ArrayLike) -> NDArray[np.float64]:
    """Return the nearest non-decreasing sequence in least squares: [n] float64 (pool adjacent violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in np.asarray(values, np.float64).tolist():
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            count = counts[-2] + counts[-1]
            low, high = sorted(means[-2:])
            mean = (means[-2] * counts[-2] + means[-1] * counts[-1]) / count
            means[-2:], counts[-2:] = [min(max(mean, low), high)], [count]
    return np.repeat(means, counts)


def _interpolated(cell: CellLatency, sizes: NDArray[np.int64], quantile: Quantile) -> NDArray[np.float64]:
    """Return seconds of one call at each of the sizes: [len(sizes)] float64."""
    columns = {"median": cell.median_s, "p95": cell.p95_s}
    if quantile not in columns:
        raise unknown_name("quantile", quantile, columns)
    times = isotonic(columns[quantile])
    whole, rest = np.divmod(sizes, cell.batch[-1])
    of_rest = np.where(rest > 0, np.interp(rest, cell.batch, times), 0.0)
    return np.asarray(whole * times[-1] + of_rest, np.float64)


@compiled
def corrected(
    factor: float,
    predicted_s: float,
    measured_s: float,
    weight: float = WEIGHT,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
) -> float:
    """Return the slowdown of a cell after one more call; see OnlineCorrection. Both times are positive and finite."""
    return factor + weight * (min(max(measured_s / predicted_s, lowest), highest) - factor)


@final
class OnlineCorrection:
    """The present slowdown of each cell: a clamped moving average of measured time over predicted time.

    factors: [num_cells] float64, by which to multiply predictions; ones at first. The array is changed in place. One
    call counts with `weight`, so an average reaches back about 1 / weight calls. A single call counts as no less than
    `lowest` and no more than `highest`, and so do the averages.
    """

    __slots__ = ("factors", "highest", "lowest", "weight")

    def __init__(
        self, num_cells: int, *, weight: float = WEIGHT, lowest: float = LOWEST, highest: float = HIGHEST
    ) -> None:
        if not 0 < weight <= 1:
            raise OptionError(f"weight must be above 0 and at most 1, got {weight}")
        if not 0 < lowest <= 1 <= highest < math.inf:
            raise OptionError(f"expected 0 < lowest <= 1 <= highest, got {lowest} and {highest}")
        self.weight, self.lowest, self.highest = weight, lowest, highest
        self.factors: NDArray[np.float64] = np.ones(num_cells, np.float64)

    def observe(self, cell_index: int, predicted_s: float, measured_s: float) -> None:
        """Add one call to the average. Times that are not positive and finite are ignored.

        predicted_s: the table's time, before correction.
        """
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            return
        self.factors[cell_index] = corrected(
            self.factors[cell_index], predicted_s, measured_s, self.weight, self.lowest, self.highest
        )
