"""The costs of steps in a simulation: from a file, or from the NPU model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cli.simulate.workload import SimulatedWorkload
from batchmaker.cost.latency import LatencyTable
from batchmaker.cost.lengths import LengthProfile
from batchmaker.cost.profile import CostProfile, PredictedLength, ProfileOptions
from batchmaker.errors import OptionError
from batchmaker.extensions import extension
from batchmaker.graph.work import work_of
from batchmaker.lab.zoo.blueprint import Blueprint

DATAFLOW: Final = "tpu"
"""Weights are loaded ahead of their use, as in the accelerators on which the paper's is modelled."""


def cost_profile(
    blueprint: Blueprint, workload: SimulatedWorkload, *, npu: bool, dataflow: str, table: Path | None
) -> tuple[CostProfile, str]:
    """Return the costs of steps, the lengths for policies, and the origin of the costs.

    Lengths are those in the file if it has any, or else those from which the workload is drawn. OptionError unless
    exactly one source of costs is given.
    """
    if npu == (table is not None):
        raise OptionError(
            "what does a step cost? Give --npu, for LazyBatching's accelerator, or --latency-table FILE, as "
            "`batchmaker profile MODEL --out FILE` writes it; one of the two"
        )
    if table is not None:
        read = CostProfile.read(table)
        lengths = read.lengths or predicted_lengths(blueprint, workload)
        return replace(read, lengths=lengths), table.name
    most = max(cell.max_batch for cell in blueprint.model.cells)
    npu_costs = extension("batchmaker.costs", "npu", "--npu: LazyBatching's accelerator")
    latency: LatencyTable = npu_costs(blueprint.shapes, most, dataflow)
    about = ProfileOptions("int8", 1, f"NPU model, dataflow {dataflow}", "")
    lengths = predicted_lengths(blueprint, workload)
    return CostProfile(blueprint.model.name, about, latency, lengths), f"npu:{dataflow}"


def predicted_lengths(blueprint: Blueprint, workload: SimulatedWorkload) -> tuple[PredictedLength, ...]:
    """Return, for every run that may end early, the dependence of its length on a cell with one step per element.

    Nothing is predicted of a model that decides by values.
    """
    if blueprint.decides:
        return ()
    source, words = 7, 5
    graph, cells = blueprint.sized(source, words).graph, blueprint.model.cells
    ends = sorted({int(run.type_id) for run in graph.runs if run.open_ended})
    work = work_of(graph)
    as_long = work.types[(work.nodes == source) & ~np.isin(work.types, ends)].tolist()
    source_type = as_long[0] if as_long else None
    predictions = []
    for type_id in ends:
        lengths = workload.lengths or _lengths(workload, source_type, type_id)
        if len(lengths[0]):
            name = None if source_type is None else cells[source_type].name
            predictions.append(PredictedLength(cells[type_id].name, name, LengthProfile.from_pairs(*lengths)))
    return tuple(predictions)


def _lengths(workload: SimulatedWorkload, length: int | None, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nodes of type `length` (0 for None) and of type `end`, for all samples with any of the latter."""
    counts = [
        dict(zip(work.types.tolist(), work.nodes.tolist(), strict=True))
        for work in (request.work for request in workload.samples)
    ]
    pairs = [(0 if length is None else count.get(length, 0), count[end]) for count in counts if end in count]
    source_lengths, steps = np.array(pairs, np.int64).reshape(-1, 2).T
    return source_lengths, steps
