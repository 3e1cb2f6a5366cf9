"""Results of simulations: one line per run, spread over seeds, and confidence of differences between policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchmaker.errors import OptionError
from batchmaker.lab.simulator.workload import Records


@dataclass(frozen=True, slots=True)
class Summary:
    """One simulation in numbers.

    requests: offered. Latencies, from arrival to answer, are of the answered requests; None without any.
    throughput_rps: answers per second from the first arrival to the last answer. goodput_rps: of those, answers within
    the SLA. violation_share: the share of all requests not answered within the SLA: late, refused or given up.
    mean_batch: rows per batched call. busy_share: of the workers' time in that span.
    """

    requests: int
    answered: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    queue_mean_ms: float | None
    throughput_rps: float
    goodput_rps: float
    violation_share: float
    mean_batch: float
    busy_share: float


def summarise(records: Records, sla_s: float, num_workers: int = 1) -> Summary:
    """Return the numbers of one simulation under this SLA. OptionError unless the SLA is above 0."""
    answered, met = records.answered, records.met(sla_s)
    latency_ms = 1e3 * (records.finished_s - records.arrived_s)[answered]
    queue_ms = 1e3 * (records.started_s - records.arrived_s)[answered]
    span_s = float(records.finished_s.max() - records.arrived_s[0])
    p50_ms, p90_ms, p99_ms = np.percentile(latency_ms, (50, 90, 99)).tolist() if len(latency_ms) else (None,) * 3
    return Summary(
        len(answered),
        int(answered.sum()),
        float(latency_ms.mean()) if len(latency_ms) else None,
        p50_ms,
        p90_ms,
        p99_ms,
        float(queue_ms.mean()) if len(queue_ms) else None,
        _ratio(float(answered.sum()), span_s),
        _ratio(float(met.sum()), span_s),
        1.0 - float(met.mean()),
        _ratio(records.rows, records.steps),
        _ratio(records.busy_s, span_s * num_workers),
    )


def _ratio(of: float, per: float) -> float:
    return of / per if per > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over several seeds: its mean, and the quartiles."""

    mean: float
    p25: float
    p75: float


def spread(values: ArrayLike) -> Spread:
    """Return mean and quartiles of one number per seed. OptionError without numbers."""
    array = np.asarray(values, np.float64)
    if array.size == 0:
        raise OptionError("there is nothing to take a mean of; simulate at least one seed")
    p25, p75 = np.percentile(array, (25, 75)).tolist()
    return Spread(float(array.mean()), p25, p75)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two policies' numbers: the mean over seeds, and the range of 95 % of the resamples."""

    mean: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether the sign is the same throughout this range."""
        return self.low > 0 or self.high < 0


def paired_difference(
    one: Sequence[float] | NDArray[np.float64],
    other: Sequence[float] | NDArray[np.float64],
    *,
    seed: int = 0,
    resamples: int = 10_000,
) -> Difference:
    """Return one minus other by the paired bootstrap.

    one, other: a number per seed of two policies, seed by seed under common random numbers: the same arrivals and
    lengths. Seeds are drawn with replacement `resamples` times. OptionError unless there are equally many, at least 2.
    """
    if len(one) != len(other) or len(one) < 2:
        raise OptionError(
            f"a paired difference needs the same 2 or more seeds of both; got {len(one)} and {len(other)}"
        )
    gaps = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    resampled = np.random.default_rng(seed).integers(0, len(gaps), size=(resamples, len(gaps)))
    low, high = np.percentile(gaps[resampled].mean(axis=1), (2.5, 97.5)).tolist()
    return Difference(float(gaps.mean()), low, high)
