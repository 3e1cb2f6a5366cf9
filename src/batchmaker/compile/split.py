"""The split of a cell into a state-independent part and a step.

The first part is computed for all steps of a task at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from batchmaker.compile.dataflow import (
    BATCH,
    TracedCell,
    TracedValue,
    copied,
    dependencies,
    extract,
    is_symbolic,
    row_spec,
)
from batchmaker.compile.fold import is_lookup
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.passes.nodes import put_together
from batchmaker.compile.passes.products import part_products
from batchmaker.compile.program import Program, compile_program
from batchmaker.compile.recurrent_cells import LoopedStep, find_looped_step
from batchmaker.graph.spec import ValueSpec


@dataclass(frozen=True, slots=True)
class Split:
    """A cell in two programs.

    hoist: the step inputs -> the hoisted values. step: hoisted values and state -> all outputs of the cell.
    hoisted: row specs of the hoisted values. num_hoisted_calls: operations in `hoist`; with none it passes its inputs
    on. looped: the step in the form for the CPU's loop, None if it has none. graph: the step as it was before it was
    compiled, if it is known.
    """

    hoist: Program
    step: Program
    hoisted: tuple[ValueSpec, ...]
    num_hoisted_calls: int
    looped: LoopedStep | None = None
    graph: TracedCell | None = None


def compile_whole(cell: TracedCell, packer: Packer, also: Sequence[fx.Node] = ()) -> Program:
    """Return the cell as one program. also: values that it returns after the outputs."""
    whole = extract(cell, cell.inputs, [*cell.outputs, *also])
    lower(whole, packer)
    return compile_program(whole)


def split_cell(cell: TracedCell, num_step_inputs: int, packer: Packer) -> Split:
    """Split the graph into the part that depends on the first inputs alone, and the rest.

    A look-up in a table stays in the step: passing on the token is cheaper than passing on the row. Raises
    CannotRewriteError if a passed value would have no batch dimension.
    """
    cell = extract(cell, cell.inputs, cell.outputs)  # a copy to take apart
    step_inputs = cell.inputs[:num_step_inputs]
    part_products(cell, _needs_only(cell, step_inputs))
    state = cell.inputs[num_step_inputs:]
    handed = _handed_over(cell, step_inputs)
    specs = tuple(row_spec(node, cell.inputs[0]) for node in handed)
    before = extract(cell, step_inputs, handed)
    after = extract(cell, [*handed, *state], cell.outputs)
    num_calls = sum(node.op == "call_function" for node in before.graph.nodes)
    looped, graph = find_looped_step(after, len(handed)), copied(after)
    lower(before, packer)
    lower(after, packer)
    return Split(compile_program(before), compile_program(after), specs, num_calls, looped, graph)


def _handed_over(cell: TracedCell, step_inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that depend on the step inputs alone and have a reader that does not."""
    needs_only = _needs_only(cell, step_inputs)
    early = {n for n in cell.graph.nodes if n.op != "output" and not is_symbolic(n) and needs_only(n)}
    handed: dict[fx.Node, None] = {}
    for node in cell.graph.nodes:
        if node not in early or all(user in early for user in node.users):
            continue
        if not isinstance(node.meta.get("val"), TracedValue):
            continue  # several outputs: the nodes that pick them are handed over
        source = next((s for s in node.all_input_nodes if s.op == "placeholder"), node)
        handed[source if is_lookup(node) else node] = None
    return put_together(list(handed))


def _needs_only(cell: TracedCell, step_inputs: Sequence[fx.Node]) -> Callable[[fx.Node], bool]:
    """Return a test for nodes that depend on some of the step inputs and on no state."""
    names = {node.name for node in step_inputs}
    depends = dependencies(cell.graph)
    return lambda node: bool(depends[node] & names) and depends[node] <= {*names, BATCH}
