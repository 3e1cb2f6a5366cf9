"""Finds the best configuration for a layer: ranked by the cost model, compiled, and measured if there is a device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Protocol, final

import msgspec

from batchmaker.errors import DeviceError
from batchmaker.kernels.cache import CacheDirectory
from batchmaker.kernels.configuration import Problem, candidates, why_not
from batchmaker.kernels.cost import Cost, ranked
from batchmaker.kernels.devices import DeviceSpec
from batchmaker.kernels.nvrtc import Compiled, KernelCompiler
from batchmaker.kernels.template import KernelConfig

TOP: Final = 5
"""Number of configurations that are compiled and measured (GRNN's Top-5)."""


@final
@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """The GPU of a measurement. The winner may differ on another GPU or with another driver."""

    name: str
    sms: int
    driver: str


class Timer(Protocol):
    """Runs kernels on a device and measures the time."""

    @property
    def identity(self) -> DeviceIdentity:
        """The device."""

    def seconds(self, problem: Problem, config: KernelConfig, compiled: Compiled) -> float:
        """Return the median time of one call with rows that all have the problem's steps. DeviceError if it fails."""


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """One of the configurations with the highest ranks in the model.

    rank: by the model, from 1. registers, spill_bytes: see Compiled; None if it did not compile. measured_s: None if it
    was not measured. failure: why it cannot be used; None if it can.
    """

    rank: int
    config: KernelConfig
    cost: Cost
    registers: int | None = None
    spill_bytes: int | None = None
    measured_s: float | None = None
    failure: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of `tune`. trials: by rank; none if no configuration fits. measured_on: None without a device."""

    problem: Problem
    device: DeviceSpec
    arch: str
    num_candidates: int
    trials: tuple[Trial, ...]
    measured_on: DeviceIdentity | None

    @property
    def chosen(self) -> Trial | None:
        """The fastest measured trial; None if no trial is usable.

        Without measurements it is the first by rank that compiles without spilling, or the first that compiles.
        """
        usable = [trial for trial in self.trials if trial.failure is None]
        if self.measured_on is not None:
            return min(usable, key=lambda trial: trial.measured_s or 0.0, default=None)
        return next((trial for trial in usable if not trial.spill_bytes), usable[0] if usable else None)

    def measured_rank(self, trial: Trial) -> int | None:
        """Return the place of a trial among the measured ones, from 1; None if it was not measured."""
        if trial.measured_s is None:
            return None
        return 1 + sum(1 for other in self.trials if (other.measured_s or trial.measured_s) < trial.measured_s)


def tune(
    problem: Problem,
    device: DeviceSpec,
    source: str,
    compiler: KernelCompiler,
    *,
    arch: str | None = None,
    top: int = TOP,
    timer: Timer | None = None,
    cache: CacheDirectory | None = None,
    done: Callable[[Trial], object] = lambda trial: None,
) -> Tuning:
    """Rank all configurations that fit, compile the `top` first, measure them, and keep the winner in the cache.

    arch: to compile for; by default the device's. timer: None measures and keeps nothing. done: called after each
    trial. A configuration that does not compile or run is a failed trial; the others continue. DeviceError if all of
    them fail.
    """
    order = ranked(problem, list(candidates(problem, device)), device)
    trials = []
    for rank, (config, cost) in enumerate(order[:top], 1):
        trial = _tried(problem, Trial(rank, config, cost), source, compiler, arch or device.arch, timer)
        done(trial)
        trials.append(trial)
    if trials and all(trial.failure for trial in trials):
        raise DeviceError(
            f"{problem}: none of {len(trials)} configurations can be used; the first: {trials[0].failure}"
        )
    identity = timer.identity if timer else None
    tuning = Tuning(problem, device, arch or device.arch, len(order), tuple(trials), identity)
    if identity and cache and tuning.chosen:
        cache.write(winner_name(problem, identity, source), msgspec.json.encode(tuning.chosen.config))
    return tuning


def _tried(
    problem: Problem, trial: Trial, source: str, compiler: KernelCompiler, arch: str, timer: Timer | None
) -> Trial:
    try:
        compiled = compiler.compile(source, trial.config.name_expression, arch)
        trial = replace(trial, registers=compiled.registers, spill_bytes=compiled.spill_bytes)
        return replace(trial, measured_s=timer.seconds(problem, trial.config, compiled)) if timer else trial
    except DeviceError as error:
        return replace(trial, failure=str(error))


def batch_bucket(batch: int) -> int:
    """Return the largest batch served by the same configuration: the next power of two."""
    return 1 << (batch - 1).bit_length()


def winner_name(problem: Problem, identity: DeviceIdentity, source: str) -> str:
    """Return the cache name of a winner: device, driver, kernel source, layer and batch bucket."""
    parts = (
        identity.name,
        str(identity.sms),
        identity.driver,
        hashlib.sha256(source.encode()).hexdigest(),
        problem.cell,
        problem.dtype,
        str(problem.hidden),
        str(batch_bucket(problem.batch)),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{key}.winner.json"


def recalled(
    problem: Problem, device: DeviceSpec, identity: DeviceIdentity, source: str, cache: CacheDirectory
) -> KernelConfig | None:
    """Return the best measured configuration, None if there is none or it does not suit this problem."""
    entry = cache.read(winner_name(problem, identity, source))
    if entry is None:
        return None
    try:
        config = msgspec.json.decode(entry, type=KernelConfig)
    except msgspec.MsgspecError:
        return None
    meant = (config.cell, config.dtype, config.hidden) == (problem.cell, problem.dtype, problem.hidden)
    return config if meant and why_not(config, device) is None else None


@lru_cache(maxsize=256)
def best_ranked(problem: Problem, device: DeviceSpec) -> tuple[tuple[KernelConfig, Cost], ...]:
    """Return the model's `TOP`, the best first. Cached, because a start asks for the same few again."""
    return tuple(ranked(problem, list(candidates(problem, device)), device)[:TOP])


def compiled_best(
    problem: Problem, device: DeviceSpec, source: str, compiler: KernelCompiler, *, arch: str | None = None
) -> tuple[KernelConfig, Compiled] | None:
    """Return the first of the model's `TOP` that does not spill, compiling no more than needed.

    If all of them spill, the first. None if the layer needs the fallback. DeviceError if it does not compile.
    """
    first = None
    for config, _ in best_ranked(problem, device):
        compiled = compiler.compile(source, config.name_expression, arch or device.arch)
        if not compiled.spill_bytes:
            return config, compiled
        first = first or (config, compiled)
    return first


def agreement(trials: Sequence[Trial]) -> float | None:
    """Return the agreement of the model's order with the measured order: 1 if equal, -1 if reversed (Kendall's tau).

    None for fewer than two measured trials.
    """
    times = [trial.measured_s for trial in trials if trial.measured_s is not None]
    pairs = [(a, b) for i, a in enumerate(times) for b in times[i + 1 :]]
    if not pairs:
        return None
    return sum((b > a) - (b < a) for a, b in pairs) / len(pairs)
