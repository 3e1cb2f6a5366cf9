"""What values decide in a request: it is computed once, by the cells' own modules, and what decisions read is noted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.regions import (
    ARGUMENT,
    NO_SLOT,
    Branch,
    Choice,
    Item,
    Pick,
    Region,
    Segment,
    WhileLoop,
    segments_of,
)
from batchmaker.lab.simulator.decisions import ReadValue, RecordedDecisions, work_of_decided
from batchmaker.lab.zoo.reference import NodeValues, TypesAndModules
from batchmaker.model.scope import OpenLoop


@final
@dataclass(slots=True)
class _Copy:
    """A copy of a segment, or the request's own graph. read_values: what decisions have read of it."""

    values: NodeValues
    read_values: list[ReadValue] = field(default_factory=list)


_Place = tuple[_Copy, int, int]
"""A copy, a node of it, and an output."""


@final
class DecidedRequest:
    """A request that decides by values, computed. graph: with its data. loops: see Unfolding.

    recorded: what decided. outputs: rows of the region's outputs, each [1, *shape]. Raises InvalidRequestError where a
    value names a branch or an element that is not there; ModelError for what is not computed here.
    """

    def __init__(self, types: TypesAndModules, graph: CellGraph, loops: Mapping[int, OpenLoop]) -> None:
        self._types = types
        self._own = _Copy(NodeValues(types))
        segments = segments_of(graph.region)
        if any(one.spans or one.size != NO_SLOT or one.loops or (one.graph and one.graph.memories) for one in segments):
            raise ModelError(
                "a simulation computes no cells over what a while_loop collects, and no memories or loops with `until` "
                "in branches and bodies. Measure this model with an engine."
            )
        self._begun: dict[int, list[_Copy]] = {id(segment): [] for segment in segments}
        with torch.no_grad():
            self._own.values.compute(graph, dict(loops))
            self.outputs = [_row(place) for place in self._region(graph.region, {})]
        self.recorded = RecordedDecisions(
            tuple(self._own.read_values),
            tuple([tuple([tuple(copy.read_values) for copy in self._begun[id(segment)]]) for segment in segments]),
            work_of_decided(graph, [len(self._begun[id(segment)]) for segment in segments]),
        )

    def _region(self, region: Region, slots: dict[int, Any]) -> list[Any]:
        """Compute a region; return what is in its outputs. slots: what it captures."""
        slots.update(region.constants)
        needs = region.num_needs
        ready = [item for item, count in enumerate(needs) if not count]
        while ready:
            at = min(ready)
            ready.remove(at)
            self._item(region.items[at], slots)
            for following in region.follows[at]:
                needs[following] -= 1
                if not needs[following]:
                    ready.append(following)
        return [slots[slot] for slot in region.outputs]

    def _item(self, item: Item, slots: dict[int, Any]) -> None:
        """Fill the slots of an item."""
        if isinstance(item, Segment):
            copy = self._own if item.graph is None else self._segment(item, slots)
            slots.update({slot: (copy, node, output) for slot, node, output in item.exports})
        elif isinstance(item, Choice):
            value, count = _value(slots[item.index]), len(item.branches)
            which = int(value == 0) if item.is_cond else value
            if not 0 <= which < count:
                raise InvalidRequestError(f"`switch` got index {value} for {count} branches")
            slots.update(zip(item.results, self._branch(item.branches[which], slots), strict=True))
        elif isinstance(item, Pick):
            value, count = _value(slots[item.index]), slots[item.count]
            if not 0 <= value < count:
                raise InvalidRequestError(f"`at` got index {value} for a sequence of {count} values")
            copy, node, output = slots[item.first]
            slots[item.result] = (copy, node + value * item.step, output)
        elif isinstance(item, WhileLoop):
            self._loop(item, slots)

    def _segment(self, segment: Segment, slots: dict[int, Any]) -> _Copy:
        """Compute a copy of a segment."""
        arguments = {ARGUMENT - place: _row(slots[slot]) for place, slot in enumerate(segment.arguments)}
        copy = _Copy(NodeValues(self._types, arguments))
        assert segment.graph is not None
        copy.values.compute(segment.graph, {})
        self._begun[id(segment)].append(copy)
        return copy

    def _branch(self, branch: Branch, slots: dict[int, Any]) -> list[Any]:
        return self._region(branch.region, {own: slots[outside] for own, outside in branch.captured})

    def _loop(self, loop: WhileLoop, slots: dict[int, Any]) -> None:
        """Repeat the body of a loop, as `decide` does."""
        begins = zip(loop.state, loop.init, strict=True)
        slots.update({slot: slots[first] for slot, first in begins if first != NO_SLOT})
        going = loop.going == NO_SLOT or _value(slots[loop.going]) != 0
        for _ in range(slots[loop.limit]):
            if not going:
                break
            state = self._branch(loop.body, slots)
            slots.update(zip(loop.state, state[: len(loop.state)], strict=True))
            tests = state[len(loop.state) :]
            if loop.filters:
                _value(tests.pop())
            going = not loop.tests or _value(tests.pop()) != 0


def _row(place: _Place) -> Tensor:
    copy, node, output = place
    return copy.values.row(node, output)


def _value(place: _Place) -> int:
    """Return a value that decides, and note it."""
    copy, node, output = place
    value = int(copy.values.row(node, output)[0])
    copy.read_values.append((output, node, value))
    return value
