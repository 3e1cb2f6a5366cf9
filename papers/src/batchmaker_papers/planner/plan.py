"""Optimises the inside of a cell: gate by gate, batched, laid out, written as a new graph, measured (ED-Batch 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, copied
from batchmaker.compile.export import example_rows, spec_of_rows
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.passes.atoms import gate_by_gate
from batchmaker.compile.passes.cheaper import cheaper, cheaper_sums
from batchmaker.compile.passes.fusion import can_fuse
from batchmaker.compile.passes.nodes import is_pointwise
from batchmaker.compile.passes.open_steps import open_steps
from batchmaker.compile.passes.pointwise import Pass
from batchmaker.compile.passes.products import flatten_products, join_products, merge_products, part_products
from batchmaker.compile.split import Split, compile_whole, split_cell
from batchmaker_papers.planner.batch_calls import write_batches
from batchmaker_papers.planner.cell_nodes import Batched, batched, computing
from batchmaker_papers.planner.timing import times_in_turn_s

MEASURED_BATCH: Final = 64
_SECONDS: Final = 0.4
_GAIN: Final = 0.98
"""A way is preferred to an earlier one if it needs at most this share of its time."""
_KNOWN_ALONE: Final = frozenset(
    ("bmm", "cat", "embedding", "flatten", "index_select", "matmul", "stack", "tanh", "unflatten")
)
_LINEAR: Final = torch.ops.aten.linear.default


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a cell.

    graph: equal to the cell's. batched: its batches; None for the unplanned cell. fused: pointwise operations run in
    passes over the rows, whatever their batches. reuse: other pointwise operations overwrite values without another
    reader. num_operations: of the cell gate by gate.
    """

    graph: TracedCell
    batched: Batched | None = None
    fused: bool = False
    reuse: bool = True
    num_operations: int = 0

    def packer(self) -> Packer:
        """Return the packer for compiling the graph."""
        return Packer(reuse=self.reuse, fuse=self.fused)

    def lowered(self) -> TracedCell:
        """Return the graph of the calls that run."""
        made = copied(self.graph)
        lower(made, self.packer())
        return made


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to run a cell, and a note on what was done. If nothing was done, the way is the unplanned cell."""

    way: Way
    note: str


def plan_cell(cell: TracedCell, choose: Callable[[Sequence[Way]], int] | None = None) -> Plan:
    """Return the fastest of the unplanned cell and the ways to batch its operations.

    The ways differ in two respects: layers over concatenated values are one product or a sum of several; and pointwise
    operations run batch by batch or in passes over the rows. choose: returns the index of the fastest way, with the
    unplanned cell first; by default the ways are measured on random rows. The cell is not changed, and the result of
    the graph differs from the cell's by rounding only.
    """
    itself = Way(cell, fused=True)
    try:
        ways = ways_of(cell)
    except CannotRewriteError as error:
        return Plan(itself, f"not planned: {error}")
    chosen = ways[0].batched
    if chosen is not None and not any(map(_can_be_batched, chosen.operations)):
        return Plan(itself, f"not planned: {_left_alone(chosen) or 'its operations'} cannot be batched")
    best = (choose or fastest)([itself, *ways])
    if best == 0:
        return Plan(itself, "planned, but left as it is: no batching was faster")
    return Plan(ways[best - 1], _note(ways[best - 1]))


def ways_of(cell: TracedCell) -> list[Way]:
    """Return the ways to batch a cell's operations. CannotRewriteError if there is none.

    First in batches, with separate and joined products, then in passes, if these apply.
    """
    gates = gate_by_gate(cell)
    ways = [_in_batches(gates, apart) for apart in (True, False)]
    opened = gate_by_gate(open_steps(cell))
    for apart in (True, False):
        graph = _regrouped(opened, apart)
        cheaper_sums(graph)
        if can_fuse(graph):
            chosen = batched(graph)
            merge_products(graph)
            ways.append(Way(graph, chosen, fused=True, num_operations=len(computing(opened))))
    return ways


def fastest(ways: Sequence[Way]) -> int:
    """Return the index of the fastest way at a batch of 64; the first unless another is clearly faster."""
    programs = [compile_whole(way.graph, way.packer()) for way in ways]
    specs = [spec_of_rows(node.meta["val"]) for node in ways[0].graph.inputs]
    inputs = example_rows(specs, MEASURED_BATCH, random=True)
    return _first_of_least([partial(program, *inputs) for program in programs])


def fastest_in_runs(ways: Sequence[Way], num_step_inputs: int) -> int:
    """Return, as `fastest`, the way whose hoisted part and step together are fastest.

    Raises CannotRewriteError if a way cannot be split.
    """
    splits = [split_cell(way.graph, num_step_inputs, way.packer()) for way in ways]
    specs = [spec_of_rows(node.meta["val"]) for node in ways[0].graph.inputs]
    inputs = example_rows(specs, MEASURED_BATCH, random=True)
    step_inputs, state = inputs[:num_step_inputs], inputs[num_step_inputs:]
    return _first_of_least([partial(_hoist_and_step, split, step_inputs, state) for split in splits])


def _hoist_and_step(split: Split, step_inputs: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> None:
    split.step(*split.hoist(*step_inputs), *state)


def _first_of_least(calls: Sequence[Callable[[], Any]]) -> int:
    """Return the index of the fastest call; an earlier one unless a later one is clearly faster."""
    least = [min(times) for times in times_in_turn_s(calls, _SECONDS, least=5, most=50)]  # disturbances only add time
    best = 0
    for index, seconds in enumerate(least):
        if seconds < _GAIN * least[best]:
            best = index
    return best


def _in_batches(gates: TracedCell, apart: bool) -> Way:
    graph = _regrouped(gates, apart)
    cheaper(graph)
    chosen = batched(graph)
    return Way(write_batches(graph, chosen), chosen, num_operations=len(computing(gates)))


def _regrouped(gates: TracedCell, apart: bool) -> TracedCell:
    graph = copied(gates)
    (part_products if apart else join_products)(graph)
    flatten_products(graph)
    return graph


def _note(way: Way) -> str:
    chosen = way.batched
    assert chosen is not None
    alone = _left_alone(chosen)
    rest = f"; left as they are: {alone}" if alone else ""
    if way.fused:
        calls = computing(way.lowered())
        passes = sum(isinstance(node.target, Pass) for node in calls)
        made = f"{_counted(len(calls), 'call', 'calls')}, {_counted(passes, 'pass', 'passes')} over the rows among them"
        return f"{way.num_operations} operations planned as {made}{rest}"
    proven = "" if chosen.proven else " (not proven to be the fewest)"
    return f"{way.num_operations} operations planned as {len(chosen.batches)} batches{proven}{rest}"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _can_be_batched(node: fx.Node) -> bool:
    return node.target is _LINEAR or is_pointwise(node)


def _left_alone(chosen: Batched) -> str:
    """Return the names of the operations that the planner does not support."""
    names = (
        getattr(node.target, "__name__", str(node.target)).split(".")[0]
        for node in chosen.operations
        if not _can_be_batched(node)
    )
    return ", ".join(dict.fromkeys(name for name in names if name not in _KNOWN_ALONE))
