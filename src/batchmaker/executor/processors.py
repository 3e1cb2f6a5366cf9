"""The processors that this process may use, and how many compute threads that makes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

_PROCESS: Final = Path("/proc/self")
_V1_FILES: Final = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


@final
@dataclass(frozen=True, slots=True)
class Processors:
    """What limits the threads of this process.

    machine: processors of the machine. allowed: those on which this process may run. quota: processors' worth of time
    that its cgroup may use, None without a limit. omp_threads: what OMP_NUM_THREADS says, None if it says nothing.
    """

    machine: int
    allowed: int
    quota: float | None = None
    omp_threads: int | None = None

    @property
    def usable(self) -> int:
        """Processors that can be busy at once; a part of one counts as one."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, math.ceil(self.quota)))

    def threads(self, num_workers: int = 1) -> int:
        """Return the compute threads of each worker.

        OMP_NUM_THREADS if it is set, otherwise all usable processors but one, divided by the workers. One is for the
        engine's thread, the server and the callers together. Without it they would interrupt a compute thread, while
        the other threads of the same operation wait for this one. Steps would take many times as long. The same happens
        with more threads than the cgroup's quota allows: all are stopped when it is used up.
        """
        return self.omp_threads or max(1, (self.usable - 1) // num_workers)

    def divided(self, workers: int | Literal["auto"], num_threads: int | None) -> tuple[int, int | None]:
        """Return the number of workers, and the compute threads of each as far as they are chosen; see `threads`.

        "auto" makes use of all processors but one, with workers of one thread, or of `num_threads`; with
        OMP_NUM_THREADS, all together have as many as it says. With two processors or fewer, it is one worker.
        """
        if workers != "auto":
            return workers, num_threads
        if self.usable <= 2:
            return 1, num_threads
        each = num_threads or 1
        return max(1, self.threads() // each), each

    def explained(self, workers: int | Literal["auto"] = 1, chosen: int | None = None) -> str:
        """Return a sentence with the compute threads, and why they are so many. chosen: by the settings, if at all."""
        num_workers, each = self.divided(workers, chosen)
        threads = each or self.threads(num_workers)
        what = f"{threads} compute thread{'' if threads == 1 else 's'}"
        if num_workers > 1:
            what += f" for each of {num_workers} workers"
        if chosen is not None:
            return f"{what}: the settings say so"
        if self.omp_threads is not None:
            return f"{what}: OMP_NUM_THREADS is {self.omp_threads}"
        if self.quota is not None and self.quota < self.allowed:
            return f"{what}: the cgroup's quota is {self.quota:.3g} processors of {self.allowed}"
        return f"{what}: the process may use {self.allowed} processors of {self.machine}"


def found_processors(process: Path = _PROCESS, environment: Mapping[str, str] = os.environ) -> Processors:
    """Return what this process may use now. process: its folder in /proc."""
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Processors(machine, allowed, cgroup_quota(process), _omp_threads(environment))


def default_threads(num_workers: int = 1) -> int:
    """Return the compute threads of each worker; see `Processors.threads`."""
    return found_processors().threads(num_workers)


def cgroup_quota(process: Path = _PROCESS) -> float | None:
    """Return the processors' worth of time that the process may use: the least of its cgroup and those around it.

    None without a limit, and where there are no cgroups. process: its folder in /proc. Both versions of cgroups are
    read, also side by side.
    """
    quotas = [quota for folder in _folders(process) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _folders(process: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups that limit processors, from its own to the outermost that is seen."""
    mounts = _mounts(process)
    for line in _lines(process / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        kind = "cgroup2" if number == "0" and not controllers else "cgroup"
        if kind == "cgroup" and "cpu" not in controllers.split(","):
            continue
        for root, point in mounts[kind]:
            inner = _within(path, root)
            yield from (point / part for part in (inner, *inner.parents))


def _mounts(process: Path) -> dict[str, list[tuple[str, Path]]]:
    """Return where cgroups are mounted, by the kind of the file system: which of them is there, and the folder."""
    mounts: dict[str, list[tuple[str, Path]]] = {"cgroup": [], "cgroup2": []}
    for line in _lines(process / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, (kind, *more) = left.split(), right.split() or [""]
        if len(fields) < 5 or kind not in mounts:
            continue
        if kind == "cgroup2" or "cpu" in ",".join(more).split(","):
            mounts[kind].append((_unescaped(fields[3]), Path(_unescaped(fields[4]))))
    return mounts


def _within(path: str, root: str) -> Path:
    """Return a cgroup's path relative to the one that is mounted. A container may see only the mounted one."""
    try:
        inner = Path(path).relative_to(root)
    except ValueError:
        return Path()
    return Path() if ".." in inner.parts else inner


def _quota_of(folder: Path) -> float | None:
    both = next(iter(_lines(folder / "cpu.max")), "").split() or [
        next(iter(_lines(folder / name)), "") for name in _V1_FILES
    ]
    try:
        quota, period = (int(text) for text in both)
    except ValueError:  # "max", or no such files
        return None
    return quota / period if quota > 0 and period > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\134", "\\")


def _omp_threads(environment: Mapping[str, str]) -> int | None:
    """Return the first number of OMP_NUM_THREADS, which may be a list for nested loops. None for what is no number."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and 0 < int(first) < 1 << 16 else None
