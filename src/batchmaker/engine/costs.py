"""What a policy is told of costs when the engine starts: stored beside the models, or measured here and now."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol, TypeGuard, runtime_checkable

import torch

from batchmaker.compile.binding import BoundCell
from batchmaker.compile.export import example_rows
from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import CostProfile, PredictedLength, ProfileOptions
from batchmaker.engine.catalogue import Catalogue, CatalogueEntry
from batchmaker.graph.spec import CellType
from batchmaker.model.registry import CellRegistry

CALLS_EACH: Final = 5
"""Calls from which the time of one batch size is taken."""

STEPS_PER_TASK: Final = 5
"""Steps over which the work that needs no state is shared, as in a full task."""


@runtime_checkable
class UsesCosts(Protocol):
    """A policy that forecasts."""

    wants_costs: ClassVar[bool]

    def use_profile(self, profile: CostProfile) -> None:
        """Take step times and length profiles from here."""


def wants_costs(policy: object) -> TypeGuard[UsesCosts]:
    """Whether a policy is to be given a profile."""
    return isinstance(policy, UsesCosts) and policy.wants_costs


def cost_profile(catalogue: Catalogue, registry: CellRegistry, threads: int | None) -> CostProfile | None:
    """Return what is known of all models' cells, under the names of their types; None if nothing is.

    Profiles stored beside the models come first. threads: measure what they do not know of the bound cells with so many
    compute threads; None: do not measure.
    """
    stored = [
        _under_its_names(served, served.model.profile) for served in catalogue if served.model.profile is not None
    ]
    cells = {cell.name: cell for profile in stored for cell in profile.latency.cells}
    lengths = {length.cell: length for profile in stored for length in profile.lengths}
    if threads is not None:
        for cell in _measured(registry, threads, known=set(cells)):
            cells[cell.name] = cell
    if not cells:
        return None
    name = "+".join(served.name for served in catalogue)
    options = stored[0].options if stored else _options(registry, threads or 1)
    return CostProfile(name, options, LatencyTable(tuple(cells.values())), tuple(lengths.values()))


def _under_its_names(served: CatalogueEntry, profile: CostProfile) -> CostProfile:
    """Return a stored profile with the names that the cells have in this engine."""
    if not served.prefix:
        return profile

    def named(name: str) -> str:
        return served.prefix + name

    lengths = tuple(
        PredictedLength(named(known.cell), None if known.given is None else named(known.given), known.profile)
        for known in profile.lengths
    )
    latency = LatencyTable(tuple(replace(cell, name=named(cell.name)) for cell in profile.latency.cells))
    return replace(profile, latency=latency, lengths=lengths)


def _options(registry: CellRegistry, threads: int) -> ProfileOptions:
    dtypes = [spec.dtype for cell in registry.types for spec in cell.outputs if "float" in spec.dtype]
    return ProfileOptions(dtypes[0] if dtypes else "float32", threads, platform.machine(), "measured at start")


def _measured(registry: CellRegistry, threads: int, known: set[str]) -> list[CellLatency]:
    """Return the times of the bound cells whose names are not known; of cells with one name, the slowest."""
    found: dict[str, CellLatency] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            for cell, bound in zip(registry.types, registry.bound, strict=True):
                if cell.name in known:
                    continue
                seen = _cell_latency(cell, bound, registry.num_sequence_inputs.get(cell.type_id))
                if cell.name not in found or found[cell.name].median_s[-1] < seen.median_s[-1]:
                    found[cell.name] = seen
    finally:
        torch.set_num_threads(before)
    return list(found.values())


def _cell_latency(cell: CellType, bound: BoundCell, num_sequence_inputs: int | None) -> CellLatency:
    sizes = _few(cell.batch_sizes)
    times = [_step_s(bound, size, num_sequence_inputs) for size in sizes]
    return CellLatency(cell.name, sizes, tuple(middle for middle, _ in times), tuple(most for _, most in times))


def _few(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return of the sizes the first and the last, and about one for each doubling in between."""
    chosen = [sizes[0]]
    for size, following in pairwise((*sizes[1:], math.inf)):
        if following > 2 * chosen[-1]:
            chosen.append(int(size))
    return tuple(chosen)


def _step_s(bound: BoundCell, size: int, num_sequence_inputs: int | None) -> tuple[float, float]:
    """Return the median and the longest time of a step of so many rows."""
    if num_sequence_inputs is None:
        inputs = example_rows(bound.inputs, size)
        return _times(lambda: bound.call(inputs))
    split = bound.split(num_sequence_inputs)
    state = example_rows(bound.inputs[num_sequence_inputs:], size)
    given = example_rows(bound.inputs[:num_sequence_inputs], size * STEPS_PER_TASK)
    hoisted = split.hoist(tuple(value[:size] for value in given))
    step = _times(lambda: split.step(hoisted, state))
    if not num_sequence_inputs:
        return step
    shared = _times(lambda: split.hoist(given))
    return step[0] + shared[0] / STEPS_PER_TASK, step[1] + shared[1] / STEPS_PER_TASK


def _times(call: Callable[[], Any]) -> tuple[float, float]:
    call()
    times = []
    for _ in range(CALLS_EACH):
        begin = time.perf_counter()
        call()
        times.append(max(time.perf_counter() - begin, 1e-9))
    times.sort()
    return times[len(times) // 2], times[-1]
