"""Requests as tables: for compiled simulations, of graphs in which each cell type is one run or one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph, Run
from batchmaker.lab.simulator.workload import ShapedRequests, SimulatedModel, SimulatedRequest

Ids = NDArray[np.int64]
Small = NDArray[np.int32]


class Shapes(NamedTuple):
    """The shapes of requests. A part is a run, or a node that is no part of a run; each has a type of its own.

    - steps, open_ended, waits: [shapes, types] steps of the part of a type; whether a value may end it; how many other
      parts must be done before it.
    - parts, model, form: [shapes] number of parts; the model; where the edges are.
    - first_fed, fed: [forms, types + 1] and [edges] the types that wait for a type.
    """

    steps: Small
    open_ended: Small
    waits: Small
    parts: Ids
    model: Ids
    form: Ids
    first_fed: Ids
    fed: Ids


_Part = tuple[int, int, bool, frozenset[int]]
"""Type, steps, whether it may end early, and the types of the parts that it reads."""


def shapes_of(model: SimulatedModel, requests: Sequence[SimulatedRequest]) -> tuple[Shapes, Ids] | str:
    """Return the shapes of requests, and [requests] the number of each request's; or why there are none."""
    if isinstance(requests, ShapedRequests):
        shapes, kinds = list(requests.shapes), requests.kinds.astype(np.int64)
    else:
        places: dict[int, int] = {}
        kinds = np.array([places.setdefault(id(request), len(places)) for request in requests], np.int64)
        shapes = [requests[i] for i in np.unique(kinds, return_index=True)[1].tolist()]
    num_types = len(model.cells)
    steps, open_ended, waits = (np.zeros((len(shapes), num_types), np.int32) for _ in range(3))
    forms: dict[tuple[tuple[int, frozenset[int]], ...], int] = {}
    form_of = np.zeros(len(shapes), np.int64)
    for i, shape in enumerate(shapes):
        parts = _parts(shape.graph)
        if isinstance(parts, str):
            return parts
        for type_id, length, may_end, sources in parts:
            steps[i, type_id], open_ended[i, type_id], waits[i, type_id] = length, may_end, len(sources)
        form_of[i] = forms.setdefault(tuple([(part[0], part[3]) for part in parts]), len(forms))
    edges = [[[t for t, sources in form if fed in sources] for fed in range(num_types)] for form in forms]
    counts = np.array([[len(fed) for fed in form] for form in edges], np.int64)
    ends = counts.cumsum().reshape(counts.shape)
    first_fed = np.concatenate((ends[:, :1] - counts[:, :1], ends), axis=1)
    fed = np.array([t for form in edges for of_type in form for t in of_type], np.int64)
    of_model = np.array([shape.model for shape in shapes], np.int64)
    return Shapes(steps, open_ended, waits, (steps > 0).sum(axis=1), of_model, form_of, first_fed, fed), kinds


def _parts(graph: CellGraph) -> list[_Part] | str:
    """Return the parts of a graph; or why it cannot be a table."""
    if graph.first or not graph.num_nodes:
        return "a request has no nodes, or begins with stored ones"
    type_of = np.full(graph.num_nodes, -1)
    found: list[_Part] = []
    for part in graph.parts:
        if isinstance(part, Run):
            type_of[part.first : part.first + part.length] = part.type_id
            sources = {int(type_of[node]) for node, _ in part.init if node >= 0}
            for given in part.sequences:
                if given is not None:
                    sources.update(type_of[given[0][given[0] >= 0]].tolist())
            found.append((int(part.type_id), part.length, part.open_ended, frozenset(sources)))
            continue
        type_of[part.first : part.first + part.count] = part.types
        for type_id, column in zip(part.types.tolist(), part.sources.T.tolist(), strict=True):
            found.append((type_id, 1, False, frozenset(int(type_of[node]) for node in column if node >= 0)))
    types = [part[0] for part in found]
    if len(set(types)) < len(types):
        return "a cell type occurs in several runs or nodes of one request"
    return found
