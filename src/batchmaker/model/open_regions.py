"""Regions and segments while they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, final

from batchmaker.graph.argument_errors import check_may_be_fetched
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.regions import (
    NO_SLOT,
    SPAN,
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

    - item: its number in its region. needs: the decisions that its nodes wait for; itself if there is no other segment
      of the same.
    - arguments: slot -> handle inside the segment. spans: as in Segment -> handle inside the segment, of length 1.
    - exports: (node, output, count, step) -> slot. moves: (slot, node, output), see `moved`.
    - size: see Segment. first: of such a segment, output -> slot of its first node. ends: slot -> (output, slot of the
      first state or NO_SLOT). fetched: see Segment.
    """

    def __init__(
        self,
        region: OpenRegion,
        recorder: Recorder,
        scope: UnfoldingScope,
        needs: frozenset[int] | None,
        size: int = NO_SLOT,
    ) -> None:
        self.region, self.recorder, self.scope, self.size = region, recorder, scope, size
        self.item = region.new_item(needs)
        self.needs = region.needs[self.item]
        region.items[self.item] = self.made
        self.arguments: dict[int, Value] = {}
        self.spans: dict[tuple[int, int, int], ValueSequence] = {}
        self.exports: dict[tuple[int, int, int, int], int] = {}
        self.moves: list[tuple[int, int, int]] = []
        self.first: dict[int, int] = {}
        self.ends: dict[int, tuple[int, int]] = {}
        self.fetched: set[int] = set()

    def slot_of(self, handle: Value | ValueSequence, first: int, count: int, step: int) -> int:
        """Return the slot of what other items read: `count` nodes from the first one, or one node and its output."""
        key = (first, handle.of.index, count, step)
        if key not in self.exports:
            slot = self.exports[key] = self.region.new_slot(self.item)
            self.region.values[slot], self.region.held[slot] = handle, (self.region.constant(count), step)
        return self.exports[key]

    def first_of(self, of: Output) -> int:
        """Return the slot of the first node, of a segment with a size. of: the output that is read of all nodes."""
        if of.index not in self.first:
            slot = self.first[of.index] = self.region.new_slot(self.item)
            self.region.held[slot] = (self.size, 1)
            self.region.values[slot] = ValueSequence(range(1), Output(of.index, of.spec, self.recorder))
        return self.first[of.index]

    def end_of(self, of: Output, init: int) -> int:
        """Return a slot for what the last step returns, of a run with a size. init: see `ends`."""
        slot = self.region.new_slot(self.item)
        self.ends[slot] = (of.index, init)
        self.region.held[slot] = (self.region.constant(1), 1)
        self.region.values[slot] = Value(0, Output(of.index, of.spec, EndOrigin(self.fetched)))
        if init != NO_SLOT:
            self.region.sources[slot] = [(self.region, init)]
        return slot

    def span(self, slots: tuple[int, int, int], spec: ValueSpec) -> ValueSequence:
        """Return a handle to a sequence outside the segment, for a memory, or for inputs of a segment with a size."""
        if slots not in self.spans:
            number = SPAN - len(self.spans)
            self.spans[slots] = ValueSequence(range(number, number + 1), Output(0, spec, self.recorder))
            self.region.wait(self.item, slots[:2])
        return self.spans[slots]

    def moved(self, slot: int, value: Value) -> None:
        """Let a slot for one value be for another one of this segment."""
        self.exports = {key: other for key, other in self.exports.items() if other != slot}
        self.moves.append((slot, value.node, value.of.index))

    def made(self) -> Segment:
        """Return the segment. Nothing can be recorded in it any more."""
        holders = dict[tuple[int, int, int], int]()
        for (first, _, count, step), slot in self.exports.items():
            if holders.setdefault((first, count, step), slot) != slot:
                del self.region.held[slot]  # another slot holds the same nodes
        exports = (*[(slot, key[0], key[1]) for key, slot in self.exports.items()], *self.moves)
        if self.region.outside is None and not self.needs:
            return Segment(None, tuple(self.arguments), exports)
        ends = [(slot, *end) for slot, end in self.ends.items() if slot in self.region.used]
        return Segment(
            self.recorder.take_last(),
            tuple(self.arguments),
            (*exports, *[(slot, 0, output) for output, slot in self.first.items()]),
            tuple(self.spans),
            self.size,
            tuple(ends),
            tuple(sorted(self.fetched)),
            tuple(self.scope.loops.values()),
        )


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
class EndOrigin:
    """The origin of a value that the last step of a run with a size returns. fetched: outputs; see Pieces."""

    def __init__(self, fetched: set[int]) -> None:
        self.fetched = fetched

    def fetch(self, value: Value | ValueSequence) -> None:
        check_may_be_fetched(value.of.index)
        self.fetched.add(value.of.index)

    def pick(self, sequence: ValueSequence, index: Value) -> Value:
        raise AssertionError("an end is no sequence")


class SpanOrigin:
    """The origin of a handle to a sequence whose length values decide. region: where it is. picked: see `at`."""

    length_said = (
        "the length of what a while_loop collects, or of what is computed of it, is not known while unfolding; return "
        "it, give it to `map`, `run` or a memory, or read an element by `.at`"
    )

    def __init__(self, region: OpenRegion, picked: Callable[[ValueSequence, Value], Value]) -> None:
        self.region, self._picked = region, picked

    def fetch(self, value: Value | ValueSequence) -> None:
        raise AssertionError("Decisions.returns takes these")

    def pick(self, sequence: ValueSequence, index: Value) -> Value:
        return self._picked(sequence, index)


@final
class CollectionOrigin(SpanOrigin):
    """That of what a loop collects of one part of its state. of: this part."""

    def __init__(
        self, loop: LoopParts, place: int, of: ValueSpec, picked: Callable[[ValueSequence, Value], Value]
    ) -> None:
        super().__init__(loop.region, picked)
        self.loop, self.place, self.of = loop, place, of


@final
class SizedOrigin(SpanOrigin):
    """That of an output of all nodes of a segment with a size. of: this output."""

    def __init__(self, pieces: Pieces, of: Output, picked: Callable[[ValueSequence, Value], Value]) -> None:
        super().__init__(pieces.region, picked)
        self.pieces, self.of = pieces, of


def unknown_sequence(origin: SpanOrigin, spec: ValueSpec) -> ValueSequence:
    """Return a handle to a sequence whose length values decide."""
    return ValueSequence(range(0), Output(0, spec, origin), open_ended={})


def is_unknown(argument: object) -> bool:
    """Whether this is a handle to a sequence whose length values decide."""
    return type(argument) is ValueSequence and isinstance(argument.of.origin, SpanOrigin)


@final
class LoopParts:
    """Of a loop that is recorded: its region, its number as an item, its body, the slot of how much it collects;
    (number of the collection, place in the state); and place in the state -> (slot of the list, the segment that makes
    a sequence of it)."""

    def __init__(self, region: OpenRegion, item: int, body: OpenRegion, count: int) -> None:
        self.region, self.item, self.body, self.count = region, item, body, count
        self.collected: list[tuple[int, int]] = []
        self.listed: dict[int, tuple[int, Pieces]] = {}


@final
class OpenRegion:
    """A region while it is recorded.

    - fills: for each slot, the item that fills it, or None. waits: for each item, those that it waits for.
    - sources: for slots that no segment fills, the slots whose values they get. values: for the others, what was
      recorded. held: see Region; by slot. used: slots of values that something reads.
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
        self.used: set[int] = set()
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
        return shared(
            Region(
                len(self.fills),
                items,
                tuple(map(tuple, follows)),
                tuple(self.outputs),
                tuple([(slot, number) for number, slot in self.constants.items()]),
                tuple([(slot, *of) for slot, of in self.held.items()]),
            )
        )

    def close(self) -> None:
        """Let go of what refers to this region in turn. Its handles still are what they are."""
        self.origin.region = None
        for table in (self.items, self.segments, self.sources, self.values):
            table.clear()


def _nothing() -> Item:
    raise AssertionError("this item was never recorded")
