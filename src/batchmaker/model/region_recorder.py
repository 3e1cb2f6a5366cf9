"""Recording the decisions of an unfold function: regions, and the segments of graph in them.

An unfold function runs once, before any value is known. So all branches and one iteration are recorded, each as a
region of its own (`batchmaker.graph.regions`), and the scheduler begins copies of them when the values are there.
`Decisions` collects the regions of one request: it sends each cell call to the segment that the call's arguments allow,
and makes slots for what one segment or region reads of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch import Tensor

from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.argument_errors import never_computed
from batchmaker.graph.misuse import at_line
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.regions import (
    A_LIST,
    ARGUMENT,
    NO_SLOT,
    Choice,
    Pick,
    Region,
    Tell,
    WhileLoop,
)
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import Collected, HostValues, Output, Value, ValueSequence
from batchmaker.model.arguments import column, sequence_of, single, where
from batchmaker.model.cell import copy_type, elements
from batchmaker.model.host_values import host_value
from batchmaker.model.leaves import built, changing_parts, flat, is_alike, is_data, is_equal, shown
from batchmaker.model.open_regions import (
    DECIDED,
    CollectionOrigin,
    DecidedOrigin,
    LoopParts,
    OpenRegion,
    Pieces,
    SizedOrigin,
    SpanOrigin,
    is_unknown,
    unknown_sequence,
)
from batchmaker.model.scope import UnfoldingScope
from batchmaker.model.stand_ins import StandIn

_WHOLE: Final = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64"))


_FIXED: Final = (StandIn, bool, int, float)
"""Kinds of data that cannot change."""
_ARRAYS: Final = (np.ndarray, Tensor)

CallArgument = tuple[Any, int, Any, bool]
"""An argument of a call: the cell, the input, what is given, and whether it is a sequence with one element per call."""
Read = tuple[Any, int, Any]
"""A memory of a call: the cell, the input, and what is given."""


OfState = Callable[[Any], Any]
"""What a `while_loop` calls with its state."""


@final
@dataclass(frozen=True, slots=True)
class Recorded:
    """The decisions of a request.

    - region: the request as a region.
    - values: for each handle that the function returned and that is not of the request's own graph, its output of the
      region; for a sequence, those of its elements. collections: for each handle of a sequence whose length values
      decide, the number of the collection. keeps: the outputs that the request's sequence keeps.
    """

    region: Region
    values: Mapping[Any, int | tuple[int, ...]]
    collections: Mapping[Any, int]
    keeps: tuple[int, ...]


@final
class Decisions:
    """All regions of one request. scope: of its unfold function."""

    def __init__(self, scope: UnfoldingScope) -> None:
        self._scope = scope
        self._recorder = scope.recorder
        self._whole = self._now = OpenRegion(None)
        self._regions = [self._whole]
        self._pieces: dict[Any, Pieces] = {}
        self._segment(frozenset(), scope)
        self._wanted: list[tuple[OpenRegion, int]] = []  # their values must travel to the host
        self._rows: dict[tuple[int, ValueSpec], tuple[Any, Any, ValueSequence]] = {}  # with the data, so ids stay
        self._copies: dict[tuple[Pieces, int, int], Value] = {}
        self._in_a_row: dict[int, tuple[ValueSequence, ValueSequence]] = {}  # by id, with the copies of the elements
        self._zeros: dict[ValueSpec, Tensor] = {}
        self._values: dict[Any, int | tuple[int, ...]] = {}
        self._collections: dict[Any, int] = {}
        self._keeps: list[int] = []

    # --- where values are ---------------------------------------------------------------------------------------------

    def _segment(self, needs: frozenset[int], scope: UnfoldingScope | None = None) -> Pieces:
        """Return the segment, of the region that is recorded now, of the nodes that wait for these decisions."""
        region = self._now
        pieces = region.segments.get(needs)
        if pieces is None:
            pieces = region.segments[needs] = self._new_segment(needs, scope)
        return pieces

    def _new_segment(
        self, needs: frozenset[int] | None, scope: UnfoldingScope | None = None, size: int = NO_SLOT
    ) -> Pieces:
        """Return a new segment of the region that is recorded now. size: see Segment."""
        if scope is None:
            recorder = Recorder(self._recorder.max_nodes)
            recorder.pick = self._recorder.pick
            scope = UnfoldingScope(recorder, self._scope.types)
        made = self._pieces[scope.recorder] = Pieces(self._now, scope.recorder, scope, needs, size)
        if size != NO_SLOT:
            self._now.wait(made.item, (size,))
        return made

    def _home(self, handle: Value | ValueSequence) -> OpenRegion:
        """Return the region that a handle belongs to."""
        origin = handle.of.origin
        if isinstance(origin, DecidedOrigin) and origin.region is not None:
            return origin.region
        if isinstance(origin, SpanOrigin):
            return origin.region
        pieces = self._pieces.get(origin)
        if pieces is None:
            raise InvalidRequestError(f"{at_line()}a handle belongs to another request")
        return pieces.region

    def _slot_of(self, value: Value) -> int:
        """Return the slot of a value in the region that is recorded now; the value may be of a region outside."""
        if value.is_missing:
            raise never_computed("an argument")
        if value.ends_open_loop:
            value = self._copy(value)
        home = self._home(value)
        if isinstance(value.of.origin, DecidedOrigin):
            home.used.add(DECIDED - value.node)
            return self._inside(home, DECIDED - value.node)
        return self._inside(home, self._pieces[value.of.origin].slot_of(value, value.node, 1, 1))

    def _inside(self, home: OpenRegion, slot: int) -> int:
        """Return the slot, in the region that is recorded now, for one of a region around it."""
        for region in reversed(self._path_from(home)):
            slot = region.captures(slot)
        return slot

    def _path_from(self, home: OpenRegion) -> list[OpenRegion]:
        """Return the regions from the one that is recorded now to the one inside `home`; none if they are the same."""
        path, at = list[OpenRegion](), self._now
        while at is not home:
            path.append(at)
            if at.outside is None:
                raise ModelError(
                    f"{at_line()}a value of one branch or iteration is used outside it; return it from there"
                )
            at = at.outside
        return path

    def _span_of(self, sequence: ValueSequence) -> tuple[int, int, int]:
        """Return the slots of a sequence's first node and of its length, and the step from each node to the next."""
        home = self._home(sequence)
        if isinstance(sequence.of.origin, SpanOrigin):
            first, count = self._unknown(sequence.of.origin)
            return self._inside(home, first), self._inside(home, count), 1
        len(sequence)
        pieces = self._pieces[sequence.of.origin]
        if not isinstance(sequence.numbers, range) or not sequence.numbers or sequence.numbers.start <= ARGUMENT:
            if id(sequence) not in self._in_a_row:
                (made,) = pieces.recorder.map(self._row_type(sequence.spec), [sequence])
                self._in_a_row[id(sequence)] = (sequence, made)
            sequence = self._in_a_row[id(sequence)][1]
        numbers = cast(range, sequence.numbers)
        slot = pieces.slot_of(sequence, numbers.start, len(numbers), numbers.step)
        return self._inside(home, slot), self._inside(home, home.constant(len(numbers))), numbers.step

    def _unknown(self, origin: SpanOrigin) -> tuple[int, int]:
        """Return the slots, in its own region, of the first node and of the length of a sequence whose length values
        decide. Of what a loop has collected, a segment makes nodes in a row."""
        if isinstance(origin, SizedOrigin):
            return origin.pieces.first_of(origin.of), origin.pieces.size
        assert isinstance(origin, CollectionOrigin)
        loop, region = origin.loop, origin.region
        if origin.place not in loop.listed:
            outside, self._now = self._now, region
            head = region.new_slot(loop.item)
            region.new_slot(loop.item)
            made = self._new_segment(None, size=loop.count)
            column = made.span((head, loop.count, A_LIST), origin.of)
            made.recorder.map(self._row_type(origin.of), [column])
            loop.listed[origin.place] = (head, made)
            self._now = outside
        made = loop.listed[origin.place][1]
        return made.first_of(Output(0, origin.of, made.recorder)), loop.count

    def _needs_of(self, handle: Value | ValueSequence) -> frozenset[int]:
        """Return the decisions, of the region that is recorded now, that a handle waits for."""
        if self._path_from(self._home(handle)):
            return frozenset()
        origin = handle.of.origin
        if isinstance(origin, SpanOrigin):
            return self._now.needs_of(self._unknown(origin)[0])
        if isinstance(origin, DecidedOrigin):
            return self._now.needs_of(DECIDED - cast(Value, handle).node)
        return self._pieces[origin].needs

    # --- where calls go -----------------------------------------------------------------------------------------------

    def place(
        self,
        arguments: Sequence[CallArgument],
        memories: Sequence[Read] = (),
        *,
        as_nodes: bool = True,
        may_have_size: bool = False,
    ) -> tuple[UnfoldingScope, list[Any], list[Any]]:
        """Return the scope of the segment that a call goes to, and the call's arguments and memories there.

        as_nodes: sequences must consist of nodes of the segment. may_have_size: the call is a map or a run, so
        `arguments` may be sequences whose length values decide. Then the segment has this length as its size, what is
        recorded there is one node or step, and `results` must be asked what the call returns.
        """
        handles = [handle for one in (*arguments, *memories) for handle in _handles(one[2])]
        pieces = self._segment_of_size(arguments) if may_have_size else None
        if pieces is None:
            pieces = self._segment(frozenset().union(*map(self._needs_of, handles)))
        if pieces.recorder is self._recorder:
            return pieces.scope, [one[2] for one in arguments], [one[2] for one in memories]
        placed = list[Any]()
        for cell, port, argument, is_column in arguments:
            if argument is None or type(argument) is Value:
                placed.append(argument if argument is None else self._here(pieces, argument))
                continue
            cell_type = self._scope.types.type_of(cell)
            if not is_column:
                placed.append(self._here(pieces, self._row(single(cell, argument, cell_type, port), argument)))
                continue
            if pieces.size != NO_SLOT:
                placed.append(pieces.span(self._span_of(argument), argument.spec))
                continue
            placed.append(self._sequence_here(pieces, cell, cell_type, port, argument, as_nodes=as_nodes))
        return pieces.scope, placed, [self._memory_here(pieces, *read) for read in memories]

    def _segment_of_size(self, arguments: Sequence[CallArgument]) -> Pieces | None:
        """Return a new segment for a call of sequences whose length values decide; None if no sequence is such."""
        columns = [(cell, argument) for cell, _, argument, is_column in arguments if is_column]
        unknown = [argument for _, argument in columns if is_unknown(argument)]
        if not unknown:
            return None
        sizes = {self._span_of(argument)[1] for argument in unknown}
        if len(unknown) < len(columns) or len(sizes) > 1:
            raise ModelError(
                f"{at_line()}{where(columns[0][0])}: beside what a while_loop has collected, all sequences of the call "
                "must be collected by the same loop, because their lengths must be equal"
            )
        return self._new_segment(None, size=sizes.pop())

    def results(self, scope: UnfoldingScope, outputs: Sequence[Any], state: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Return what a map or a run returns that went to this scope; see `place`.

        outputs: of the one node or step. state: of a run, the first state, with None for zeros.
        """
        pieces = self._pieces.get(scope.recorder)
        if pieces is None or pieces.size == NO_SLOT:
            return tuple(outputs)
        begins, returned = [None] * (len(outputs) - len(state)) + list(state), list[Any]()
        slots = {value.node: slot for slot, value in pieces.arguments.items()}
        for k, (output, begin) in enumerate(zip(outputs, begins, strict=True)):
            of, init = output.of, NO_SLOT
            steps = unknown_sequence(SizedOrigin(pieces, of, self._recorder.pick), of.spec)
            if type(output) is ValueSequence:
                returned.append(steps)
                continue
            if begin is not None:
                init = slots[begin.node]
            elif k >= len(outputs) - len(state):
                dtype: torch.dtype = getattr(torch, of.spec.dtype)
                zeros = self._zeros.setdefault(of.spec, torch.zeros(of.spec.shape, dtype=dtype))  # so it is made once
                init = self._slot_of(self._row_of(zeros, of.spec))
                pieces.region.wait(pieces.item, (init,))
            returned.append(pieces.region.handle(pieces.end_of(of, init), of.spec, Collected(steps)))
        return tuple(returned)

    def _memory_here(self, pieces: Pieces, cell: Any, port: int, argument: Any) -> Any:
        """Return a memory inside a segment: a sequence of its nodes, or a span."""
        if argument is None or (type(argument) is Value and not argument.spec.shape):
            return argument  # the cell says what is wrong
        if type(argument) is not ValueSequence:
            argument = self._made_sequence(pieces, cell, port, argument)
        if argument.of.origin is pieces.recorder and pieces.size == NO_SLOT:
            return argument
        return pieces.span(self._span_of(argument), argument.spec)

    def _made_sequence(self, pieces: Pieces, cell: Any, port: int, argument: Any) -> ValueSequence:
        """Return a value, a list of values or data as a sequence of nodes. pieces: of the call that reads it."""
        cell_type = self._scope.types.type_of(cell)
        home = pieces
        if pieces.size != NO_SLOT:
            home = self._segment(frozenset().union(*map(self._needs_of, _handles(argument))))
        if type(argument) is Value:
            return elements(home.scope, self._here(home, argument))
        if type(argument) is not StandIn and isinstance(argument, list | tuple) and {*map(type, argument)} == {Value}:
            return self._sequence_here(home, cell, cell_type, port, argument, as_nodes=True)
        made = column(cell, argument, cell_type, port)
        return self._sequence(made, argument) if isinstance(made, HostValues) else made

    def _here(self, pieces: Pieces, value: Value) -> Value:
        """Return a handle to a value inside a segment: an argument, unless it is computed there."""
        if value.of.origin is pieces.recorder:
            return value
        slot = self._slot_of(value)
        if slot not in pieces.arguments:
            made = Output(0, value.spec, pieces.recorder)
            pieces.arguments[slot] = Value(ARGUMENT - len(pieces.arguments), made)
            pieces.region.wait(pieces.item, (slot,))
        return pieces.arguments[slot]

    def _sequence_here(
        self, pieces: Pieces, cell: Any, cell_type: Any, port: int, argument: Any, *, as_nodes: bool
    ) -> ValueSequence:
        """Return a sequence inside a segment. argument: a sequence of values, or data."""
        if type(argument) is ValueSequence:
            if argument.of.origin is pieces.recorder:
                return argument
            len(argument)
        elif type(argument) is StandIn or not (
            isinstance(argument, list | tuple) and argument and all(type(part) is Value for part in argument)
        ):
            made = column(cell, argument, cell_type, port)
            argument = self._sequence(made, argument) if isinstance(made, HostValues) else made
        values = [self._here(pieces, part) for part in argument]
        if not values:
            raise InvalidRequestError(f"{at_line()}a call inside a branch or an iteration got an empty sequence")
        values = [self._copy(v) if v.node > ARGUMENT and v.of.index else v for v in values]  # all are output 0
        made = sequence_of(values, "values")
        if as_nodes and (made.nodes <= ARGUMENT).any():
            (made,) = pieces.recorder.map(self._row_type(made.spec), [made])
        return made

    # --- data as values -----------------------------------------------------------------------------------------------

    def _row_type(self, spec: ValueSpec) -> CellType:
        """Return the type of the cell that copies values of a spec, or makes values of data."""
        return copy_type(self._scope.types, spec)

    def _sequence(self, data: HostValues, source: Any) -> ValueSequence:
        """Return data as values, which the request's own graph makes. source: what the data was.

        The same number, array or tensor is made once, as long as it has not changed; a body is recorded twice.
        """
        spec, kind = ValueSpec(data.spec.shape, data.spec.dtype), type(source)
        is_fixed = type(data.values) is StandIn
        values = data.values if is_fixed else deepcopy(data.values)  # the function may change what is its own
        made_before = self._rows.get((id(source), spec))
        if made_before is not None and (kind in _FIXED or (kind in _ARRAYS and is_equal(made_before[1], values))):
            return made_before[2]
        (made,) = self._recorder.map(self._row_type(spec), [HostValues(values, data.count, spec)])
        self._rows[id(source), spec] = (source, values, made)
        return made

    def _row(self, data: Value | HostValues, source: Any) -> Value:
        return data if type(data) is Value else self._sequence(data, source)[0]

    def _row_of(self, source: Any, spec: ValueSpec) -> Value:
        """Return a value of this spec made of data."""
        try:
            data = host_value(
                source, ValueSpec(spec.shape, spec.dtype), spec.dtype, "data in place of a computed value"
            )
        except InvalidRequestError as error:
            raise type(error)(f"{at_line()}{error}") from None
        return self._row(data, source)

    def _value(self, part: Any, spec: ValueSpec) -> Value:
        return part if type(part) is Value else self._row_of(part, spec)

    def _copy(self, value: Value) -> Value:
        """Return a copy of a value as a node of its own, beside it."""
        pieces = self._pieces.get(value.of.origin)
        if pieces is None:
            pieces = self._segment(self._needs_of(value))
            value = self._here(pieces, value)
        key = (pieces, value.node, value.of.index)
        if key not in self._copies:
            (self._copies[key],) = pieces.recorder.node(self._row_type(value.spec), [value])
        return self._copies[key]

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _test(self, what: str, value: Any) -> int:
        """Return the slot of a value that decides."""
        if type(value) is not Value or value.spec.shape != () or value.spec.dtype not in _WHOLE:
            said = str(value.spec) if type(value) is Value else type(value).__name__
            raise ModelError(f"{at_line()}{what} takes one bool or integer that a cell computes, got {said}")
        slot = self._slot_of(value)
        self._wanted.append((self._now, slot))
        return slot

    def _inner(self, function: Callable[[], Any]) -> tuple[OpenRegion, Any]:
        """Record in a new region inside the present one; return it and what the function returned."""
        outside = self._now
        region = self._now = OpenRegion(outside)
        self._regions.append(region)
        try:
            return region, function()
        finally:
            self._now = outside

    def _give(self, region: OpenRegion, values: Iterable[Value]) -> None:
        """Add outputs of a region inside the present one."""
        outside, self._now = self._now, region
        try:
            region.outputs += [self._slot_of(value) for value in values]
        finally:
            self._now = outside

    def choice(self, what: str, index: Value, functions: Sequence[Callable[[], Any]], *, is_cond: bool) -> Any:
        """Record a choice between branches; see `cond`."""
        region, at, line = self._now, self._test(what, index), at_line()
        made = [self._inner(function) for function in functions]
        names = ("true_fn", "false_fn") if is_cond else tuple([f"branch {k}" for k in range(len(functions))])
        parted = [flat(result) for _, result in made]
        for name, (_, form) in zip(names, parted, strict=True):
            if form != parted[0][1]:
                raise ModelError(
                    f"{at_line()}{what}: {names[0]} returns {shown(parted[0][1])} and {name} {shown(form)}; all "
                    "branches return the same structure"
                )
        item = region.new_item()
        results, handles = list[int](), list[Any]()
        for parts in zip(*[leaves for leaves, _ in parted], strict=True):
            spec = _agreed(what, names, parts)
            if spec is None:
                handles.append(parts[0])
                continue
            slot = region.new_slot(item)
            for (inner, _), part in zip(made, parts, strict=True):
                self._give(inner, (self._value(part, spec),))
            region.sources[slot] = [(inner, inner.outputs[-1]) for inner, _ in made]
            region.held[slot] = (region.constant(1), 1)
            results.append(slot)
            handles.append(region.handle(slot, spec))
        inners = [inner for inner, _ in made]
        region.wait(item, (at, *[slot for inner in inners for slot in inner.captured]))
        region.items[item] = lambda: Choice(at, tuple([i.branch() for i in inners]), tuple(results), is_cond, line)
        return built(made[0][1], iter(handles))

    def pick(self, sequence: ValueSequence, index: Value) -> Value:
        """Record the choice of an element of a sequence; see ValueSequence.at."""
        region, at, line = self._now, self._test("at", index), at_line()
        first, count, step = self._span_of(sequence)
        item = region.new_item()
        slot = region.new_slot(item)
        region.sources[slot] = [(region, first)]
        region.wait(item, (first, count, at))
        region.items[item] = lambda: Pick(at, first, count, step, slot, line)
        return region.handle(slot, sequence.spec)

    def loop(self, cond_fn: OfState, body_fn: OfState, init: Any, limit: int, collect: OfState | None) -> Any:
        """Record a loop; see `while_loop`."""
        region, (begun, _) = self._now, flat(init)
        going = cond_fn(init)
        if type(going) is not Value and not known_now(going, "while_loop: cond_fn"):
            return init
        specs = self._state_specs(body_fn, init)
        item = region.new_item()
        state = [region.new_slot(item) for spec in specs if spec is not None]
        at, of = iter(state), [spec for spec in specs if spec is not None]
        handles = [part if s is None else region.handle(next(at), s) for part, s in zip(begun, specs, strict=True)]

        def iteration() -> tuple[bool, bool]:
            """Record the body once. Return whether going on, and whether keeping a value, depend on computed values."""
            body = self._now
            following = body_fn(built(init, iter(handles)))
            changed = [part for part, spec in zip(flat(following)[0], specs, strict=True) if spec is not None]
            body.outputs += [self._slot_of(self._value(p, s)) for p, s in zip(changed, of, strict=True)]
            again, where = cond_fn(following), None if collect is None else collect(following)
            if type(again) is Value:
                body.outputs.append(self._test("while_loop: cond_fn", again))
            elif not known_now(again, "while_loop: cond_fn"):
                raise ModelError(f"{at_line()}while_loop: cond_fn is always False after the first iteration")
            if where is not None:
                body.outputs.append(self._test("while_loop: collect", where))
            return type(again) is Value, where is not None

        body, (tests, filters) = self._inner(iteration)
        first = self._test("while_loop: cond_fn", going) if type(going) is Value else NO_SLOT
        begins = list[int]()
        initial = [part for part, spec in zip(begun, specs, strict=True) if spec is not None]
        for slot, part, one in zip(state, initial, of, strict=True):
            is_read = type(part) is Value or slot in body.captured or first != NO_SLOT or limit == 0
            begins.append(self._slot_of(self._value(part, one)) if is_read else NO_SLOT)
        for k, slot in enumerate(state):
            region.held[slot] = (region.constant(1), 1)
            region.sources[slot] = [(body, body.outputs[k]), *[(region, begins[k])][: begins[k] != NO_SLOT]]
        most, progress = region.constant(limit), region.new_slot()
        region.new_slot(), region.new_slot()
        parts = LoopParts(region, item, body, region.new_slot(item))
        outside = [slot for slot in body.captured if slot not in state]
        region.wait(item, [slot for slot in (first, *begins, *outside) if slot != NO_SLOT])
        region.items[item] = lambda: WhileLoop(
            first,
            body.branch(),
            tuple(state),
            tuple(begins),
            most,
            progress,
            tests,
            filters,
            tuple(parts.collected),
            tuple([(head, place) for place, (head, _) in parts.listed.items()]),
        )
        result, place = list[Any](), 0
        for part, spec in zip(handles, specs, strict=True):
            if spec is None:
                result.append(part)
                continue
            steps = unknown_sequence(CollectionOrigin(parts, place, spec, self._recorder.pick), spec)
            result.append(region.handle(state[place], spec, Collected(steps)))
            place += 1
        return built(init, iter(result))

    def _state_specs(self, body_fn: Callable[[Any], Any], init: Any) -> list[ValueSpec | None]:
        """Return the specs of the state's parts; None for data that the body does not change.

        The body is called with the first state, to see what it makes of the data there; and again with what changes in
        the place of data, until nothing more does.
        """
        first, region = flat(init)[0], self._now
        specs: list[ValueSpec | None] = [None] * len(first)
        while True:
            parts = [p if s is None else region.handle(region.new_slot(), s) for p, s in zip(first, specs, strict=True)]
            num_wanted = len(self._wanted)
            _, following = self._inner(partial(body_fn, built(init, iter(parts))))
            del self._wanted[num_wanted:]
            known, specs = specs, [s or new for s, new in zip(specs, changing_parts(init, following), strict=True)]
            if specs == known or None not in specs:
                return specs

    # --- the end ------------------------------------------------------------------------------------------------------

    def returns(self, handle: Value | ValueSequence) -> bool:
        """Note that a handle is part of the result. False if it is of the request's own graph, or of nobody."""
        origin = handle.of.origin
        if isinstance(origin, SpanOrigin):
            if origin.region is not self._whole:
                raise ModelError("the steps of a while_loop inside a branch or another loop cannot be returned")
            if handle not in self._collections:
                number = self._collections[handle] = len(self._collections)
                if isinstance(origin, CollectionOrigin):
                    origin.loop.collected.append((number, origin.place))
                    self._wanted.append((origin.loop.body, origin.loop.body.outputs[origin.place]))
                else:
                    self._tell(number, *self._unknown(origin))
            return True
        if not (isinstance(origin, DecidedOrigin) or origin in self._pieces):
            return False
        if isinstance(handle, ValueSequence) and handle.open_ended:
            if origin is self._recorder:
                return False
            raise ModelError(
                "the steps of a loop with `until` that depends on a decision, or is inside one, cannot be returned; "
                "use bm.while_loop, whose steps can"
            )
        values = [handle] if type(handle) is Value else list(handle)
        if origin is self._recorder:
            if all(value.node >= self._recorder.num_kept for value in values):
                return False
            values = [self._copy(value) for value in values]
        places = tuple([self._output(value) for value in values])
        self._wanted += [(self._whole, self._whole.outputs[place]) for place in places]
        self._values[handle] = places[0] if type(handle) is Value else places
        return True

    def _tell(self, number: int, first: int, count: int) -> None:
        """Let the elements of a sequence of the request's region go to the caller."""
        region = self._whole
        item, progress = region.new_item(), region.new_slot()
        region.wait(item, (first, count))
        region.items[item] = lambda: Tell(number, first, count, 1, progress)
        self._wanted.append((region, first))

    def keeps(self, value: Value) -> int | None:
        """Let the request's sequence keep a value; return the value's place among those that are kept so.

        None if it is of the request's own graph, or of nobody. Each is a node of its own.
        """
        origin = value.of.origin
        if origin is self._recorder or not (isinstance(origin, DecidedOrigin) or origin in self._pieces):
            return None
        self._keeps.append(self._output(self._copy(value)))
        return len(self._keeps) - 1

    def _output(self, value: Value) -> int:
        self._give(self._whole, (value,))
        return len(self._whole.outputs) - 1

    def recorded(self) -> Recorded:
        """Return what was recorded. Call it before the request's own graph is taken."""
        self._mark()
        region = self._whole.finished()
        for made in self._regions:
            made.close()
        return Recorded(region, self._values, self._collections, tuple(self._keeps))

    def _mark(self) -> None:
        """Let all values travel to the host that decisions or results need, wherever they may come from."""
        seen, waiting = set[tuple[OpenRegion, int]](), list(self._wanted)
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                region, slot = place
                value = region.values.get(slot)
                if type(value) is Value and value.of.origin is self._recorder and value.node < self._recorder.num_kept:
                    value = self._copy(value)  # the value itself came to the host with an earlier request
                    self._pieces[self._recorder].moved(slot, value)
                if value is not None:
                    value.of.origin.fetch(value)
                waiting += region.sources.get(slot, ())


def _handles(argument: Any) -> list[Value | ValueSequence]:
    """Return the handles in an argument of a call: itself, or the values in a list."""
    if type(argument) in (Value, ValueSequence):
        return [argument]
    if type(argument) is not StandIn and isinstance(argument, list | tuple):
        return [part for part in argument if type(part) in (Value, ValueSequence)]
    return []


def _agreed(what: str, names: Sequence[str], parts: Sequence[Any]) -> ValueSpec | None:
    """Return the spec of a part of what branches return; None if it is the same data in all."""
    values = [part for part in parts if type(part) is Value]
    for name, part in zip(names, parts, strict=True):
        if is_unknown(part):
            raise ModelError(
                f"{at_line()}{what}: {name} returns a sequence whose length values decide; return what a run over it "
                "gives, or an element"
            )
        if type(part) is ValueSequence:
            raise ModelError(f"{at_line()}{what}: {name} returns a sequence; return its elements, as a list")
        if not values and not is_alike(parts[0], part):
            raise ModelError(
                f"{at_line()}{what}: {names[0]} returns {parts[0]!r} and {name} {part!r}; a cell must compute what "
                "depends on the decision"
            )
        if values and type(part) is not Value and not is_data(part):
            raise ModelError(
                f"{at_line()}{what}: {name} returns {type(part).__name__} where another returns {values[0].spec}"
            )
        if type(part) is Value and part.spec.row_signature != values[0].spec.row_signature:
            raise ModelError(f"{at_line()}{what}: {name} returns {part.spec} where another returns {values[0].spec}")
    return values[0].spec if values else None


def known_now(pred: Any, what: str) -> bool:
    """Return a bool that is known while the request is unfolded. ModelError if it is none."""
    if type(pred) is StandIn or isinstance(pred, bool | int | np.bool_ | np.integer):
        return bool(pred)
    if isinstance(pred, Tensor | np.ndarray) and pred.ndim == 0:
        return bool(pred)
    raise ModelError(f"{at_line()}{what} takes one bool that a cell computes, got {type(pred).__name__}")
