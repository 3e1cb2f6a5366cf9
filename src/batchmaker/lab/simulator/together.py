"""Several models on one device: their cells side by side, as one model for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np

from batchmaker.cost.latency import LatencyTable
from batchmaker.cost.profile import CostProfile, PredictedLength
from batchmaker.errors import OptionError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import TypeId
from batchmaker.lab.simulator.workload import SimulatedModel, SimulatedRequest


@final
class Together:
    """Models that share the workers. Cells are named model/cell, as in an engine that serves several models.

    model: all of them as one. OptionError unless the models have different names, and at least one is given.
    """

    def __init__(self, models: Sequence[SimulatedModel]) -> None:
        names = [model.name for model in models]
        if not names or len(set(names)) < len(names):
            raise OptionError(f"models that run together need names of their own, got {', '.join(names) or 'none'}")
        self._names = names
        self._first = np.cumsum([0, *(len(model.cells) for model in models)]).tolist()
        self._requests: dict[tuple[int, int], tuple[SimulatedRequest, SimulatedRequest]] = {}
        cells = [
            replace(cell, type_id=TypeId(cell.type_id + first), name=f"{model.name}/{cell.name}")
            for model, first in zip(models, self._first, strict=False)
            for cell in model.cells
        ]
        self.model = SimulatedModel(" + ".join(names), tuple(cells))

    def request(self, number: int, request: SimulatedRequest) -> SimulatedRequest:
        """Return a request of one model as a request of the joint model. OptionError if values decide in it.

        number: of the model. Requests that are one object stay one.
        """
        if request.decided is not None:
            raise OptionError(f"model {self._names[number]!r} decides by values, so it cannot run with others")
        key = (number, id(request))
        if key not in self._requests:
            moved = _shifted(request.graph, self._first[number])
            self._requests[key] = (request, replace(request, graph=moved, model=number))  # keeps the key's id in use
        return self._requests[key][1]

    def profile(self, profiles: Sequence[CostProfile]) -> CostProfile:
        """Return the cost profile of all models' cells. profiles: one per model, in order."""
        cells = [
            replace(cell, name=f"{name}/{cell.name}")
            for name, profile in zip(self._names, profiles, strict=True)
            for cell in profile.latency.cells
        ]
        lengths = [
            PredictedLength(f"{name}/{one.cell}", None if one.given is None else f"{name}/{one.given}", one.profile)
            for name, profile in zip(self._names, profiles, strict=True)
            for one in profile.lengths
        ]
        return CostProfile(self.model.name, profiles[0].options, LatencyTable(tuple(cells)), tuple(lengths))


def _shifted(graph: CellGraph, first: int) -> CellGraph:
    """Return the same graph with cell types counted from `first` on."""
    return replace(
        graph,
        blocks=[replace(block, types=block.types + np.int16(first)) for block in graph.blocks],
        runs=[replace(run, type_id=TypeId(run.type_id + first)) for run in graph.runs],
        host_inputs=[replace(host, type_id=TypeId(host.type_id + first)) for host in graph.host_inputs],
        known_work=None,
    )
