"""Regions and segments while they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, final

from batchmaker.errors import ModelError
from batchmaker.graph.misuse import at_line
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.regions import (
    Branch,
    Item,
    Region,
    Segment,
    shared,
)
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import Output, Value, ValueSequence
from batchmaker.model.scope import UnfoldingScope

DECIDED: Final = -(1 << 40)
"""The node of a handle to slot k is DECIDED - k. No node has such a number."""


@final
class Pieces:
    """A segment while it is recorded.

    item: its number in its region. needs: the decisions that its nodes wait for. arguments: slot -> handle inside the
    segment. exports: (node, output, count, step) -> slot. moves: (slot, node, output), see `moved`.
    """

    def __init__(self, region: OpenRegion, recorder: Recorder, scope: UnfoldingScope, needs: frozenset[int]) -> None:
        self.region, self.recorder, self.scope, self.needs = region, recorder, scope, needs
        self.item = region.new_item(needs)
        region.items[self.item] = self.made
        self.arguments: dict[int, Value] = {}
        self.exports: dict[tuple[int, int, int, int], int] = {}
        self.moves: list[tuple[int, int, int]] = []

    def slot_of(self, handle: Value | ValueSequence, first: int, count: int, step: int) -> int:
        """Return the slot of what other items read: `count` nodes from the first one, or one node and its output."""
        key = (first, handle.of.index, count, step)
        if key not in self.exports:
            slot = self.exports[key] = self.region.new_slot(self.item)
            self.region.values[slot], self.region.held[slot] = handle, (count, step)
        return self.exports[key]

    def moved(self, slot: int, value: Value) -> None:
        """Let a slot for one value be for another one of this segment."""
        self.exports = {key: other for key, other in self.exports.items() if other != slot}
        self.moves.append((slot, value.node, value.of.index))

    def made(self) -> Segment:
        """Return the segment. Nothing can be recorded in it any more."""
        exports = (*[(slot, key[0], key[1]) for key, slot in self.exports.items()], *self.moves)
        is_own = self.region.outside is None and not self.needs
        return Segment(None if is_own else self.recorder.take_last(), tuple(self.arguments), exports)


@final
class DecidedOrigin:
    """The origin of handles to slots that decisions fill. region: None once the function has ended."""

    def __init__(self, region: OpenRegion) -> None:
        self.region: OpenRegion | None = region

    def fetch(self, value: Value | ValueSequence) -> None:
        raise AssertionError("Decisions.returns takes these")

    def pick(self, sequence: ValueSequence, index: Value) -> Value:
        raise AssertionError("a slot is no sequence")


@final
class CollectionOrigin:
    """The origin of a handle to what a loop collects of one part of its state."""

    def __init__(self, loop: LoopParts, place: int) -> None:
        self.loop, self.place = loop, place

    def fetch(self, value: Value | ValueSequence) -> None:
        raise AssertionError("Decisions.returns takes these")

    def pick(self, sequence: ValueSequence, index: Value) -> Value:
        raise ModelError(f"{at_line()}the steps of a while_loop can only be returned")


@final
class LoopParts:
    """Of a loop that is recorded: its region, its body, and (number of the collection, place in the state)."""

    def __init__(self, region: OpenRegion, body: OpenRegion) -> None:
        self.region, self.body = region, body
        self.collected: list[tuple[int, int]] = []


@final
class OpenRegion:
    """A region while it is recorded.

    - fills: for each slot, the item that fills it, or None. waits: for each item, those that it waits for.
    - sources: for slots that no segment fills, the slots whose values they get. values: for the others, what was
      recorded. held: see Region.
    - captured: slot outside -> own slot. constants: number -> slot.
    """

    def __init__(self, outside: OpenRegion | None) -> None:
        self.outside = outside
        self.origin = DecidedOrigin(self)
        self.fills: list[int | None] = []
        self.items: list[Callable[[], Item]] = []
        self.waits: list[set[int]] = []
        self.needs: list[frozenset[int]] = []
        self.segments: dict[frozenset[int], Pieces] = {}
        self.sources: dict[int, list[tuple[OpenRegion, int]]] = {}
        self.values: dict[int, Value | ValueSequence] = {}
        self.held: dict[int, tuple[int, int]] = {}
        self.captured: dict[int, int] = {}
        self.constants: dict[int, int] = {}
        self.outputs: list[int] = []

    def new_item(self, needs: frozenset[int] | None = None) -> int:
        """Return the number of a new item. needs: of a segment."""
        number = len(self.items)
        self.items.append(_nothing)
        self.waits.append(set(needs or ()))
        self.needs.append(frozenset((number,)) if needs is None else needs)
        return number

    def new_slot(self, filled_by: int | None = None) -> int:
        self.fills.append(filled_by)
        return len(self.fills) - 1

    def constant(self, number: int) -> int:
        """Return the slot of a number."""
        if number not in self.constants:
            self.constants[number] = self.new_slot()
        return self.constants[number]

    def captures(self, slot: int) -> int:
        """Return the slot that gets what is in a slot of the region outside."""
        if slot not in self.captured:
            assert self.outside is not None
            own = self.captured[slot] = self.new_slot()
            self.sources[own] = [(self.outside, slot)]
        return self.captured[slot]

    def needs_of(self, slot: int) -> frozenset[int]:
        """Return the decisions that what is in a slot waits for."""
        item = self.fills[slot]
        return frozenset() if item is None else self.needs[item]

    def wait(self, item: int, slots: Iterable[int]) -> None:
        """Let an item wait for those that fill these slots."""
        self.waits[item] |= {filled for slot in slots if (filled := self.fills[slot]) is not None and filled != item}

    def handle(self, slot: int, spec: ValueSpec, chain: Any = None) -> Value:
        return Value(DECIDED - slot, Output(0, spec, self.origin), None, chain)

    def branch(self) -> Branch:
        """Return this region as one that begins inside another."""
        return Branch(self.finished(), tuple([(own, outside) for outside, own in self.captured.items()]))

    def finished(self) -> Region:
        """Return the region. Nothing can be recorded in it any more."""
        items = tuple([made() for made in self.items])
        follows: list[list[int]] = [[] for _ in items]
        for number, waits in enumerate(self.waits):
            for item in sorted(waits):
                follows[item].append(number)
        return shared(Region(
            len(self.fills), items, tuple(map(tuple, follows)), tuple(self.outputs),
            tuple([(slot, number) for number, slot in self.constants.items()]),
            tuple([(slot, *of) for slot, of in self.held.items()]),
        ))  # fmt: skip

    def close(self) -> None:
        """Let go of what refers to this region in turn. Its handles still are what they are."""
        self.origin.region = None
        for known in (self.items, self.segments, self.sources, self.values):
            known.clear()


def _nothing() -> Item:
    raise AssertionError("this item was never recorded")
