"""When requests arrive: Poisson processes, bursts, days and nights, recorded traces.

Times are float64 arrays of seconds, ascending.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from os import PathLike
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import DataError, OptionError
from batchmaker.lab.datasets.text import read_lines

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMESTAMP_COLUMN: Final = "TIMESTAMP"
_POINTS_OF_A_DAY: Final = 1 << 14


def poisson_arrivals(
    rate_rps: float, seed: int, *, count: int | None = None, seconds: float | None = None
) -> NDArray[np.float64]:
    """Return the arrival times of a Poisson process that starts at 0: [num_arrivals] float64 seconds.

    rate_rps: mean number of arrivals a second. Give `count`, the number of arrivals, or `seconds`, the end of
    the process (no arrival at or after it), or both: whichever comes first. With the same rate and seed, a
    shorter process is the beginning of a longer one.
    Raises OptionError if neither is given or an argument is out of range.
    """
    _positive("rate_rps", rate_rps)
    if seed < 0:
        raise OptionError(f"seed: got {seed}, expected at least 0.")
    if count is None and seconds is None:
        raise OptionError("poisson_arrivals: got neither `count` nor `seconds`; give one, or both.")
    if count is not None and count < 0:
        raise OptionError(f"count: got {count}, expected at least 0.")
    generator = np.random.default_rng(seed)
    if seconds is None:
        return _after(generator.standard_exponential(count or 0), rate_rps)
    _positive("seconds", seconds)
    most = math.inf if count is None else count
    gaps = np.empty(0)
    reached_s = 0.0
    while reached_s < seconds and gaps.size < most:
        expected = (seconds - reached_s) * rate_rps
        num_more = int(min(expected + 4 * math.sqrt(expected) + 16, most - gaps.size))
        gaps = np.concatenate([gaps, generator.standard_exponential(num_more)])
        reached_s = float(_after(gaps, rate_rps)[-1])
    arrivals = _after(gaps, rate_rps)
    return arrivals[arrivals < seconds]


def mmpp_arrivals(
    rate_rps: float,
    seed: int,
    *,
    count: int,
    burst_ratio: float = 8.0,
    burst_share: float = 0.1,
    burst_arrivals: float = 50.0,
) -> NDArray[np.float64]:
    """Return the arrival times of bursty traffic: [count] float64 seconds, from 0 on.

    A Markov-modulated Poisson process of two states, quiet and burst; the time in each state is exponential. rate_rps:
    mean rate over both. burst_ratio: rate in a burst over the quiet rate, at least 1. burst_share: share of time in
    bursts, above 0 and below 1. burst_arrivals: mean number of arrivals in one burst. The first state is drawn by its
    share. With the defaults the quiet rate is 0.59 and the burst rate 4.7 times the mean. Raises OptionError if an
    argument is out of range.
    """
    _positive("rate_rps", rate_rps)
    _positive("burst_arrivals", burst_arrivals)
    if seed < 0 or count < 0:
        raise OptionError(f"seed and count must be at least 0, got {seed} and {count}.")
    if not (1 <= burst_ratio < math.inf and 0 < burst_share < 1):
        raise OptionError(
            f"burst_ratio must be at least 1 and burst_share above 0 and below 1, got {burst_ratio} and {burst_share}."
        )
    quiet = 1.0 / (1.0 - burst_share + burst_share * burst_ratio)  # in units of the mean rate
    rates = (quiet, quiet * burst_ratio)
    burst_stay = burst_arrivals / rates[1]  # in units of the mean gap
    stays = (burst_stay * (1.0 - burst_share) / burst_share, burst_stay)
    generator = np.random.default_rng(seed)
    state = int(generator.random() < burst_share)
    parts: list[NDArray[np.float64]] = []
    reached, num_arrivals = 0.0, 0
    while num_arrivals < count:
        stay = float(generator.exponential(stays[state]))
        arrived = np.sort(generator.random(int(generator.poisson(rates[state] * stay)))) * stay
        parts.append(reached + arrived)
        reached, num_arrivals, state = reached + stay, num_arrivals + len(arrived), 1 - state
    times = np.concatenate(parts)[:count] if parts else np.empty(0)
    return times / rate_rps


def with_season(times_s: NDArray[np.float64], *, depth: float, day_s: float = 86_400.0) -> NDArray[np.float64]:
    """Return the same arrivals with days and nights: [num_arrivals] float64 seconds, from 0 on.

    times_s: [num_arrivals], ascending, at least 0, of a process whose rate knows no day. Afterwards the rate at time t
    is 1 - depth x cos(2 pi t / day_s) times what it was: a day begins at its quietest, and its mean is what it was.
    depth: at least 0 and below 1. Raises OptionError for options out of range.
    """
    _positive("day_s", day_s)
    if not 0 <= depth < 1:
        raise OptionError(f"the depth of a season must be at least 0 and below 1, got {depth}.")
    clock = np.linspace(0.0, 1.0, _POINTS_OF_A_DAY + 1)
    come = clock - depth / (2 * math.pi) * np.sin(2 * math.pi * clock)
    days, part = np.divmod(times_s / day_s, 1.0)
    warped: NDArray[np.float64] = (days + np.interp(part, come, clock)) * day_s
    return warped


def _after(gaps: NDArray[np.float64], rate_rps: float) -> NDArray[np.float64]:
    """Return arrival times in seconds after gaps in units of the mean gap; sums always run in one order."""
    times: NDArray[np.float64] = np.cumsum(gaps)
    return times / rate_rps


def trace_arrivals(
    path: str | PathLike[str], *, rate_rps: float | None = None, time_scale: float | None = None
) -> NDArray[np.float64]:
    """Return the times of a recorded trace: [num_arrivals] float64 seconds since the first arrival.

    path: UTF-8, gzipped if named `.gz`; either a CSV with a header and a column TIMESTAMP of ISO dates and
    times (microseconds count, finer digits are dropped; UTC unless an offset is given), or a plain file of
    seconds, one a line. Blank lines are passed over; lines may be out of order.
    rate_rps: stretch time evenly so that the mean rate, (num_arrivals - 1) / last time, becomes this.
    time_scale: multiply all times by this; 0.5 makes the trace twice as fast. Not both.
    Raises DataError, naming file and line, for a missing or malformed file, or if `rate_rps` is given and all
    arrivals are at one time; OptionError for options out of range.
    Source of the CSV format: Azure LLM inference traces (Patel et al., "Splitwise", ISCA 2024).
    """
    if rate_rps is not None and time_scale is not None:
        raise OptionError("trace_arrivals: got both `rate_rps` and `time_scale`; give one of them.")
    times = np.array(_recorded_times(path), dtype=np.float64)
    times.sort()
    times -= times[0]
    if time_scale is not None:
        return times * _positive("time_scale", time_scale)
    if rate_rps is None:
        return times
    _positive("rate_rps", rate_rps)
    lasts_s = float(times[-1])
    if lasts_s == 0.0:
        raise DataError(
            f"{path}: has {times.size} arrivals, all at one time, so there is no mean rate to bring to "
            f"{rate_rps} requests per second. Give a trace that lasts."
        )
    return times / lasts_s * ((times.size - 1) / rate_rps)


def _recorded_times(path: str | PathLike[str]) -> list[float]:
    """Return the times in file order, from any origin; at least one."""
    lines = read_lines(path)
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise DataError(f"{path}: the trace is empty; expected at least one arrival.")
    column = 0
    parse: Callable[[str], float] = _seconds
    wanted = "a number of seconds, or first a header with a column TIMESTAMP"
    header = _fields(numbered[0][1])
    if _TIMESTAMP_COLUMN in header:
        column = header.index(_TIMESTAMP_COLUMN)
        parse = _timestamp
        wanted = "a date and time such as 2023-11-16 18:15:46.680590"
        del numbered[0]
        if not numbered:
            raise DataError(f"{path}: the trace has a header and no arrivals; expected at least one.")
    times: list[float] = []
    for number, line in numbered:
        fields = _fields(line) if parse is _timestamp else [line]
        if column >= len(fields):
            raise DataError(f"{path}, line {number}: got {len(fields)} fields, expected {column + 1} or more.")
        try:
            times.append(parse(fields[column].strip()))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: got {fields[column]!r}, expected {wanted}.") from error
    return times


def _fields(line: str) -> list[str]:
    return [name.strip(' \t"') for name in line.split(",")]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError("not finite")
    return seconds


def _timestamp(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH).total_seconds()


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise OptionError(f"{name}: got {value}, expected a finite number above 0.")
    return value
