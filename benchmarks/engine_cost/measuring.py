"""Timers, medians of ratios, offered loads and the facts of the machine, for all lines of benchmarks/overhead.py."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

import batchmaker as bm
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import machine
from batchmaker.engine import Answer
from batchmaker.engine.stats import DriverStats
from batchmaker.lab.datasets import poisson_arrivals

Better = Literal["higher", "lower"]
Pending = Answer | Future[Any]
"""What ours and theirs give for a request: both have `result`, `exception` and `add_done_callback`."""
Submit = Callable[[Any], Pending]
UNANSWERED_S: Final = 20.0
"""How long answers are waited for once the last request is due; after that they count as late as they are."""


class NotRunError(Exception):
    """A line cannot be measured here, such as one whose peer is not installed; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run measures.

    data: the folder of europarl_deen, sst, lattice_edbatch. quick: so little of everything that it only shows that it
    works. dynet, litserve: interpreters of environments with DyNet and with LitServe. before: the commit whose orders
    the lattices are compared with.
    """

    data: Path
    quick: bool = False
    dynet: Path | None = None
    litserve: Path | None = None
    before: str = "2ee5aed"

    def of(self, full: Any, quick: Any) -> Any:
        """Return the value for this run."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one piece of work, the engine's beside a baseline's.

    ours, theirs: medians, in `unit`. ratio: the median over repeats of ours / theirs, which is not the ratio of the
    medians. target: what the ratio should come to, None where nothing was asked. An absolute figure has no baseline:
    its ratio is the figure itself. more: whatever else is worth keeping.
    """

    work: str
    figure: str
    unit: str
    ours: float
    theirs: float | None
    ratio: float
    better: Better
    target: float | None = None
    baseline: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the ratio is as good as the target, None without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target

    def to_json(self) -> dict[str, Any]:
        """Return the row with numbers of four digits."""
        return {**_rounded(asdict(self)), "met": self.is_met}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{float(value):.4g}") if isinstance(value, float | np.floating) else value


def say(text: str) -> None:
    """Tell how far the run is, on standard error."""
    print(text, file=sys.stderr, flush=True)


# --- both sides in turn -----------------------------------------------------------------------------------------------


def interleaved(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, NDArray[np.float64]]:
    """Measure all sides once each repeat, every second time in the other order: name -> [repeats, *figures]."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: -1 if repeat % 2 else 1]:
            with quiet_interpreter():
                found[name].append(sides[name]())
    return {name: np.array(values, np.float64) for name, values in found.items()}


def compared(
    work: str,
    figure: str,
    unit: str,
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
    *,
    better: Better,
    baseline: str,
    target: float | None = None,
    **more: Any,
) -> Row:
    """Return the row of a figure that was measured in turn on both sides; ValueError if one of them is 0.

    ours, theirs: [repeats].
    """
    if not (np.all(ours > 0) and np.all(theirs > 0)):
        raise ValueError(f"{work}, {figure}: a side did nothing (ours {ours.tolist()}, {baseline} {theirs.tolist()})")
    ratio = float(np.median(ours / theirs))
    middle = float(np.median(ours)), float(np.median(theirs))
    return Row(work, figure, unit, *middle, ratio, better, target, baseline, more)


def absolute(
    work: str, figure: str, unit: str, value: float, *, target: float, better: Better = "lower", **more: Any
) -> Row:
    """Return the row of a figure that is compared with nothing but its target."""
    return Row(work, figure, unit, value, None, value, better, target, "", more)


def best_of(sides: Mapping[str, Callable[[], float]], looks: int = 2) -> tuple[str, dict[str, float]]:
    """Return the name of the side with the highest figure, and the best of so many looks at each."""
    found = interleaved(sides, looks)
    best = {name: float(values.max()) for name, values in found.items()}
    return max(best, key=best.__getitem__), best


def times_ms(call: Callable[[Any], Any], requests: Sequence[Any]) -> float:
    """Return the median time of a call, over requests one after the other."""
    taken = []
    for request in requests:
        begin_s = time.perf_counter()
        call(request)
        taken.append(time.perf_counter() - begin_s)
    return 1e3 * float(np.median(taken))


def spent(engine: bm.Engine, call: Any) -> tuple[float, DriverStats]:
    """Return the seconds of a call and what the engine counted meanwhile."""
    with quiet_interpreter():
        before, begin_s = replace(engine.stats), time.perf_counter()
        call()
        wall_s = time.perf_counter() - begin_s
        after = replace(engine.stats)
    return wall_s, DriverStats(*(b - a for a, b in zip(astuple(before), astuple(after), strict=True)))


# --- loads ------------------------------------------------------------------------------------------------------------


def all_waiting(submit: Submit, requests: Sequence[Any]) -> float:
    """Offer all requests at once; return answers per second until the last. Raises a request's error."""
    begin_s = time.perf_counter()
    futures = [submit(request) for request in requests]
    for future in futures:
        future.result()
    return len(requests) / (time.perf_counter() - begin_s)


def per_second(call: Callable[[], Any], count: int) -> float:
    """Return how many requests a second a call does that answers `count` of them."""
    begin_s = time.perf_counter()
    call()
    return count / (time.perf_counter() - begin_s)


def offered(submit: Submit, requests: Sequence[Any], rate: float, seconds: float, seed: int) -> NDArray[np.float64]:
    """Offer a Poisson process; return latencies in seconds from when requests were due.

    The first tenth is left out. A request without an answer counts as late as it is when waiting for it has ended.
    """
    due = poisson_arrivals(rate, seed, seconds=seconds)
    done = np.full(len(due), np.nan)

    def note(number: int, _: Pending) -> None:
        done[number] = time.perf_counter()

    futures = []
    begin_s = time.perf_counter() + 0.01
    due = due + begin_s
    for number, at_s in enumerate(due.tolist()):
        ahead_s = at_s - time.perf_counter()
        if ahead_s > 0:
            time.sleep(ahead_s)
        future = submit(requests[number % len(requests)])
        future.add_done_callback(partial(note, number))
        futures.append(future)
    wait_for_all(futures, UNANSWERED_S)
    taken = np.where(np.isnan(done), time.perf_counter(), done) - due
    return taken[len(taken) // 10 :]


def wait_for_all(pending: Sequence[Pending], within_s: float) -> None:
    """Wait until all are answered, but no longer than so many seconds."""
    end_s = time.perf_counter() + within_s
    with suppress(TimeoutError):
        for one in pending:
            one.exception(max(0.0, end_s - time.perf_counter()))


def at_rate(submit: Submit, requests: Sequence[Any], rate: float, seconds: float) -> Callable[[], tuple[float, float]]:
    """Return what measures p50 and p90 in ms under a Poisson load; each call has the next seed, alike on all sides."""
    seeds = iter(range(1 << 20))

    def measure() -> tuple[float, float]:
        taken = offered(submit, requests, rate, seconds, next(seeds))
        return 1e3 * float(np.percentile(taken, 50)), 1e3 * float(np.percentile(taken, 90))

    return measure


# --- what was measured where ------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Return the processor's model and flags, cores, and the versions of what computes."""
    flags: list[str] = []
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text("utf-8").splitlines() if line.startswith("flags"))
        flags = next(lines, "flags:").partition(":")[2].split()
    versions = {name: version(name) for name in ("torch", "numpy", "numba")}
    return {**machine(), "flags": flags, "python": platform.python_version(), **versions}


def stolen_s() -> float:
    """Return the processor seconds that other machines of the same host have taken, 0 where Linux does not say."""
    stat = Path("/proc/stat")
    fields = stat.read_text("utf-8").splitlines()[0].split() if stat.exists() else []
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def load_average() -> float | None:
    """Return the mean number of runnable processes in the last minute, None where nobody counts them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
