"""A cell made faster from inside: gate by gate, batched, laid out, written anew, and measured (ED-Batch 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import fx

from batchmaker.cells.dataflow import CannotRewriteError, TracedCell, extract
from batchmaker.cells.export import example_rows, spec_of_rows
from batchmaker.cells.lower import Packer
from batchmaker.cells.planning.atoms import gate_by_gate
from batchmaker.cells.planning.batching import Batched, batched, computing
from batchmaker.cells.planning.measuring import times_in_turn_s
from batchmaker.cells.planning.nodes import is_pointwise
from batchmaker.cells.planning.products import flatten_products, join_products, part_products
from batchmaker.cells.planning.rewriting import cheaper
from batchmaker.cells.planning.writing import write_batches
from batchmaker.cells.split import compile_whole

MEASURED_BATCH: Final = 64
_SECONDS: Final = 0.3
_GAIN: Final = 0.98
"""A way to batch is preferred to one before it if it needs at most this share of its time."""
_KNOWN_ALONE: Final = frozenset(
    ("bmm", "cat", "embedding", "flatten", "index_select", "matmul", "stack", "tanh", "unflatten")
)
_LINEAR: Final = torch.ops.aten.linear.default


@dataclass(frozen=True, slots=True)
class Plan:
    """A cell's batches and the graph that runs them.

    graph: equal to the cell's. num_operations: of the cell written gate by gate. batched: None where nothing was
    batched and `graph` is the cell's own; `note` says why, or what was done.
    """

    graph: TracedCell
    num_operations: int
    batched: Batched | None
    note: str


def plan_cell(cell: TracedCell, choose: Callable[[Sequence[TracedCell]], int] | None = None) -> Plan:
    """Return the fastest of the cell as it is and the ways to batch its operations.

    The ways differ in whether layers over values side by side are one product or a sum of several. choose: gives the
    index of the fastest graph, the cell itself being the first; by default they are measured, on random rows. The
    cell is not changed, and what the graph computes differs from it by rounding only.
    """
    try:
        gates = gate_by_gate(cell)
        ways = [_way(gates, apart) for apart in (True, False)]
    except CannotRewriteError as error:
        return Plan(cell, 0, None, f"not planned: {error}")
    num_operations = len(computing(gates))
    if not any(map(_can_be_batched, ways[0][1].operations)):
        return Plan(
            cell, num_operations, None, f"not planned: {_left_alone(ways[0][1]) or 'its operations'} cannot be batched"
        )
    graphs = [cell, *(graph for graph, _ in ways)]
    best = (choose or fastest)(graphs)
    if best == 0:
        return Plan(cell, num_operations, None, "planned, but left as it is: no batching was faster")
    graph, chosen = ways[best - 1]
    return Plan(graph, num_operations, chosen, _note(num_operations, chosen))


def fastest(graphs: Sequence[TracedCell]) -> int:
    """Return the index of the graph that takes least time at a batch of 64; the first unless one is clearly faster."""
    programs = [compile_whole(graph, Packer(reuse=True)) for graph in graphs]
    specs = [spec_of_rows(node.meta["val"]) for node in graphs[0].inputs]
    inputs = example_rows(specs, MEASURED_BATCH, random=True)
    calls = [partial(program, *inputs) for program in programs]
    least = [min(times) for times in times_in_turn_s(calls, _SECONDS, least=5, most=50)]  # what disturbs only adds
    best = 0
    for index, seconds in enumerate(least):
        if seconds < _GAIN * least[best]:
            best = index
    return best


def _way(gates: TracedCell, apart: bool) -> tuple[TracedCell, Batched]:
    graph = extract(gates, gates.inputs, gates.outputs)
    graph.constants = dict(graph.constants)
    (part_products if apart else join_products)(graph)
    flatten_products(graph)
    cheaper(graph)
    chosen = batched(graph)
    return write_batches(graph, chosen), chosen


def _note(num_operations: int, chosen: Batched) -> str:
    left = _left_alone(chosen)
    rest = f"; left as they are: {left}" if left else ""
    proven = "" if chosen.proven else " (not proven to be the fewest)"
    return f"{num_operations} operations planned as {len(chosen.batches)} batches{proven}{rest}"


def _can_be_batched(node: fx.Node) -> bool:
    return node.target is _LINEAR or is_pointwise(node)


def _left_alone(chosen: Batched) -> str:
    """Name the operations that the planner does not know."""
    names = (getattr(node.target, "__name__", str(node.target)).split(".")[0] for node in chosen.operations
             if not _can_be_batched(node))  # fmt: skip
    return ", ".join(dict.fromkeys(name for name in names if name not in _KNOWN_ALONE))
