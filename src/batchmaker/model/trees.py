"""Trees and other graphs without cycles as arrays of children, for unfold functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from batchmaker.arrays import Ints
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.spec import CellType
from batchmaker.graph.trees import SequenceArgument, TreePart
from batchmaker.model.arguments import CalledCell, column, fitted, integers
from batchmaker.model.scope import UnfoldingScope, scope_of
from batchmaker.model.stand_ins import StandIn

CHILDREN: Final = "children must be integers [num_nodes, arity]"


@final
@dataclass(slots=True)
class TreeCalls:
    """Calls of one cell among the nodes of a tree; see `Cell.at`. places: a slice if they are all nodes."""

    cell: CalledCell
    places: Any
    children: Any
    inputs: tuple[Any, ...]


def tree(leaves: Any, *parts: TreeCalls) -> Any:
    """Add the inner nodes of a tree or DAG that call several cells.

    leaves: as for `Cell.tree`. parts: `cell.at(places, children, ...)` of each cell; together they have one place for
    each inner node, from 0 on. Children come before parents, whichever cells they call. All cells must return the same
    outputs, with the parts of a node's state last. A part without places is ignored. Returns the outputs as sequences
    over all inner nodes, in order of their places.
    """
    if not parts:
        raise InvalidRequestError("a tree has no parts; give cell.at(places, children) of at least one cell")
    scope = scope_of(parts[0].cell)
    nodes = [(part, integers(part.cell, part.children, CHILDREN)) for part in parts]
    if len(nodes) > 1:
        nodes = [(part, children) for part, children in nodes if children.shape[:1] != (0,)] or nodes[:1]
    if scope.decisions is not None:
        scope, leaves, nodes = _placed(scope, leaves, nodes)
    states = _states(scope, leaves, nodes[0][0])
    outputs = scope.recorder.mixed_tree(states, [_part(scope, part, children, states) for part, children in nodes])
    return outputs[0] if len(outputs) == 1 else outputs


def _placed(
    scope: UnfoldingScope, leaves: Any, nodes: Sequence[tuple[TreeCalls, Ints]]
) -> tuple[UnfoldingScope, Any, list[tuple[TreeCalls, Ints]]]:
    """Return the scope that a tree goes to, and its sequences there."""
    first, several = nodes[0][0], leaves if isinstance(leaves, tuple) else (leaves,)
    inputs = [(first.cell, len(first.inputs) + k, leaf, True) for k, leaf in enumerate(several)]
    inputs += [(part.cell, port, one, True) for part, _ in nodes for port, one in enumerate(part.inputs)]
    scope, placed, _ = scope.decisions.place(inputs)
    at, made = len(several), list[tuple[TreeCalls, Ints]]()
    for part, children in nodes:
        end = at + len(part.inputs)
        made.append((TreeCalls(part.cell, part.places, part.children, tuple(placed[at:end])), children))
        at = end
    return scope, tuple(placed[: len(several)]), made


def _states(scope: UnfoldingScope, leaves: Any, first: TreeCalls) -> list[SequenceArgument]:
    """Return the leaves as one sequence for each part of a state."""
    parts = leaves if type(leaves) is not StandIn and isinstance(leaves, tuple) else (leaves,)
    cell_type = scope.types.type_of(first.cell)
    return [column(first.cell, part, cell_type, len(first.inputs) + k) for k, part in enumerate(parts)]


def _part(scope: UnfoldingScope, part: TreeCalls, children: Ints, states: Sequence[SequenceArgument]) -> TreePart:
    cell, places = part.cell, part.places
    cell_type: CellType | None = scope.types.type_of(cell)
    if not isinstance(places, slice):
        places = integers(cell, places, "places must be integers [num_nodes]")
    inputs = [column(cell, sequence, cell_type, port) for port, sequence in enumerate(part.inputs)]
    if cell_type is None:
        arity = children.shape[1] if children.ndim == 2 else 0
        arguments = (*inputs, *[*states] * arity)
        cell_type = scope.types.learn(cell, tuple([argument.spec for argument in arguments]), arguments)
        inputs = fitted(cell, inputs, cell_type)
    return TreePart(cell_type, places, children, inputs)
