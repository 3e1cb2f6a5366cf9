"""The state of a sequence between two chunks: the second result of `unfold_chunk`, without its request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.errors import ModelError
from batchmaker.graph.argument_errors import foreign, never_computed
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import Output, Value, ValueSequence
from batchmaker.model.structure import handles, replaced


@dataclass(frozen=True, slots=True, eq=False)
class KeptHandle:
    """Stands for a handle, also in a set. places: of its nodes among the kept nodes, one number or several."""

    places: int | Ints
    output: int
    spec: ValueSpec


@final
@dataclass(frozen=True, slots=True)
class KeptState:
    """A structure with KeptHandle in place of handles; everything else is unchanged.

    num_nodes: number of kept nodes; their outputs stay on the device. last: the chunk that begins with it is the last
    one of its sequence.
    """

    structure: Any = None
    num_nodes: int = 0
    last: bool = False

    def handles_in(self, recorder: Recorder) -> Any:
        """Return the structure with handles for the next request, whose recorder begins with the kept nodes."""

        def handle(part: KeptHandle) -> Value | ValueSequence:
            output = Output(part.output, part.spec, recorder)
            if isinstance(part.places, int):
                return Value(part.places, output)
            return ValueSequence(part.places, output)

        return replaced(self.structure, (KeptHandle,), handle)


NOTHING_KEPT = KeptState()
"""The state of a sequence that keeps nothing: always this object."""


def keep(structure: Any, recorder: Recorder, decisions: Any = None) -> KeptState:
    """Mark the nodes of the structure's handles as kept, and return the structure without handles.

    decisions: those of the request, if it has some. What they fill is kept behind the nodes of the recorder.
    ModelError for the steps of a loop that ends at a value: their number is unknown.
    """
    marked, decided = list[Value | ValueSequence](), dict[int, int]()
    for handle in handles(structure):
        place = decisions.keeps(handle) if decisions is not None and isinstance(handle, Value) else None
        if place is None:
            marked.append(handle)
        else:
            decided[id(handle)] = place
    for handle in marked:
        if isinstance(handle, ValueSequence) and handle.open_ended and handle.values is None:
            raise ModelError(
                "the steps of a loop with `until` or of a while_loop cannot be kept for the next chunk; keep its last "
                "output, or wait for those of a loop with `until`: `words = yield loop.steps`"
            )
        if handle.origin is not recorder:
            raise foreign("the state that unfold_chunk returned")
        if isinstance(handle, Value) and handle.is_missing:
            raise never_computed("the state that unfold_chunk returned")
    marked = [handle for handle in marked if isinstance(handle, Value) or not handle.open_ended]
    parts = [handle.nodes if isinstance(handle, ValueSequence) else np.array([handle.node]) for handle in marked]
    nodes = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
    recorder.keep(nodes)

    def kept_handle(handle: Value | ValueSequence) -> Any:
        if id(handle) in decided:
            return KeptHandle(len(nodes) + decided[id(handle)], 0, handle.spec)
        if isinstance(handle, ValueSequence) and handle.open_ended:
            return handle.values
        if isinstance(handle, Value):
            return KeptHandle(int(np.searchsorted(nodes, handle.node)), handle.output, handle.spec)
        return KeptHandle(np.searchsorted(nodes, handle.nodes), handle.output, handle.spec)

    if structure is None:
        return NOTHING_KEPT
    return KeptState(replaced(structure, (Value, ValueSequence), kept_handle), len(nodes) + len(decided))


def signature(structure: Any) -> Hashable | None:
    """Return a key that is equal for equal structures; None if a part could change."""
    if type(structure) is KeptHandle:
        places = structure.places if isinstance(structure.places, int) else structure.places.tobytes()
        return (KeptHandle, places, structure.output, structure.spec)
    if structure is None or type(structure) in (bool, int, float, str, bytes):
        return (type(structure), structure)
    if type(structure) is dict:
        parts = [signature(part) for part in structure.values()]
        has_text_names = all(type(name) is str for name in structure)
        return None if None in parts or not has_text_names else (dict, tuple(structure), *parts)
    if type(structure) in (list, tuple):
        parts = [signature(part) for part in structure]
        return None if None in parts else (type(structure), *parts)
    return None
