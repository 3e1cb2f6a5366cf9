"""What a fleet in virtual time comes to, in numbers and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import OptionError
from batchmaker.lab.simulator.fleet.records import ANSWERED, FAILED, FleetRecords


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """One simulation of a fleet. Latencies are of answered requests, from arrival to answer; None without any.

    requests: offered. failed: lost with their replicas. retried: given to a second one. throughput_rps: answers per
    second from the first arrival to the last answer. violation_share: of all requests, those not answered within the
    SLA. mean_batch: rows per step. busy_share: of the time that is paid for. mean_replicas, most_replicas: serving.
    paid_replicas: mean number that is paid for, with those that start and leave.
    """

    requests: int
    answered: int
    failed: int
    retried: int
    deaths: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    p999_ms: float | None
    throughput_rps: float
    violation_share: float
    mean_batch: float
    busy_share: float
    mean_replicas: float
    most_replicas: int
    paid_replicas: float


def summarise_fleet(records: FleetRecords, sla_s: float) -> FleetSummary:
    """Return the numbers of one simulation under this SLA. OptionError unless the SLA is above 0."""
    if not sla_s > 0:
        raise OptionError(f"an SLA must be a time above 0, got {sla_s} s")
    answered = records.outcome == ANSWERED
    latency_ms = 1e3 * (records.finished_s - records.arrived_s)[answered]
    has_answers = bool(len(latency_ms))
    p50, p90, p99, p999 = np.percentile(latency_ms, (50, 90, 99, 99.9)).tolist() if has_answers else (None,) * 4
    end_s = float(records.finished_s.max())
    span_s = end_s - float(records.arrived_s[0])
    within = [s for s in records.samples if s.at_s <= records.arrived_s[-1]] or records.samples
    serving = [sample.serving for sample in within]
    return FleetSummary(
        len(answered),
        int(answered.sum()),
        int((records.outcome == FAILED).sum()),
        int((records.tries > 1).sum()),
        records.deaths,
        float(latency_ms.mean()) if has_answers else None,
        p50,
        p90,
        p99,
        p999,
        _ratio(float(answered.sum()), span_s),
        1.0 - float((latency_ms <= 1e3 * sla_s).sum()) / len(answered),
        _ratio(records.rows, records.steps),
        _ratio(records.busy_s, records.paid_s),
        float(np.mean(serving)),
        max(serving),
        _ratio(records.paid_s, end_s),
    )


def _ratio(of: float, per: float) -> float:
    return of / per if per > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LatencyOverTime:
    """Latency of requests by when they came. at_s: [n] middle of each stretch of time. p50_ms, p99_ms: [n], NaN where
    none came. rate_rps: [n] arrivals."""

    at_s: NDArray[np.float64]
    p50_ms: NDArray[np.float64]
    p99_ms: NDArray[np.float64]
    rate_rps: NDArray[np.float64]


def latency_over_time(records: FleetRecords, num_stretches: int = 60) -> LatencyOverTime:
    """Return latencies and rate over the time in which requests came."""
    arrived_s = records.arrived_s
    edges = np.linspace(0.0, max(float(arrived_s[-1]), 1e-9), num_stretches + 1)
    begins: Sequence[int] = np.searchsorted(arrived_s, edges).tolist()
    latency_ms = 1e3 * (records.finished_s - arrived_s)
    p50, p99 = np.full(num_stretches, np.nan), np.full(num_stretches, np.nan)
    for i in range(num_stretches):
        part = slice(begins[i], begins[i + 1])
        mine = latency_ms[part][records.outcome[part] == ANSWERED]
        if len(mine):
            p50[i], p99[i] = np.percentile(mine, (50, 99))
    return LatencyOverTime((edges[:-1] + edges[1:]) / 2, p50, p99, np.diff(begins) / np.diff(edges))
