"""Templates: one graph for every request of one shape, if the unfold function looks at no value.

A template is proved, not declared. The function runs on stand-ins (`stand_ins`), and all else that it reads is recorded
(`reads`) and compared at each use (`guards`). Its recording is compared with the one of a real request of that shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import FunctionType
from typing import Any, final

import numpy as np
import torch

from batchmaker.arrays import Ints
from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.graph.cell_graph import CellGraph, HostInput
from batchmaker.graph.regions import segments_of
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.values import Value, ValueSequence
from batchmaker.model.cell import Cell
from batchmaker.model.guards import Guard, UnprovenError
from batchmaker.model.model import Model
from batchmaker.model.observed_code import observed_code
from batchmaker.model.reads import Reads
from batchmaker.model.region_recorder import Recorded
from batchmaker.model.scope import CellTypes
from batchmaker.model.sequence_state import KeptHandle, KeptState, signature
from batchmaker.model.stand_ins import CONSTANT, Kind, StandIn, StandIns, standing_in
from batchmaker.model.unfolding import PLAIN, Column, Unfolding, resolved


@final
@dataclass(frozen=True, slots=True)
class Feed:
    """The values of a request for one host input.

    host: the input, without values. spec: of one value. kind: of the request's values; all values of this kind are flat
    in one array, in order, followed by `constants`. codes: the positions of the input's values in it; None for all
    values in order. fixed: [count, *shape], if the values do not come from the request at all.
    """

    host: HostInput
    spec: ValueSpec
    kind: Kind | None
    codes: Ints | None
    constants: Any
    fixed: Any


@final
@dataclass(frozen=True, slots=True)
class Check:
    """A check: values of a request, given by codes or all of them, must be at least 0 and below `limit`.

    codes: without those of constants, which the proof has seen.
    """

    kind: Kind
    codes: Ints | None
    limit: int


@final
class Template:
    """The unfolding of any request of one shape, without its values. It replaces an ended `Unfolding`.

    graph: shared by all. feeds: one for each host input. checks: a request that fails one must be unfolded, because it
    is wrong. kinds, sizes: of its values, and how many it has of each. guard: while it holds, the function would still
    give this graph. form: templates of one form have the same feeds and checks, but for how many values and which, so
    the values of many requests can be laid out together. spans: the first nodes of all feeds, then the counts.
    """

    __slots__ = (
        "_result", "after", "before", "checks", "decided", "feeds", "form", "graph", "guard", "handles", "kinds",
        "loops", "num_nodes", "result_form", "returns_kept", "sizes", "spans", "streamed_collection",
        "streamed_sequence", "streams_result",
    )  # fmt: skip

    open = False
    awaited = ()

    def __init__(
        self,
        unfolding: Unfolding,
        before: KeptState | None,
        feeds: tuple[Feed, ...],
        checks: tuple[Check, ...],
        sizes: Mapping[Kind, int],
        guard: Guard,
    ) -> None:
        graph = unfolding.graph
        self.graph = CellGraph(
            graph.first,
            graph.num_nodes,
            graph.blocks,
            graph.runs,
            [feed.host for feed in feeds],
            graph.fetches,
            graph.plain,
            kept_nodes=graph.kept_nodes,
            shared=True,
            region=graph.region,
            keeps=graph.keeps,
            memories=graph.memories,
        )
        self.num_nodes = graph.num_nodes
        self.before = before
        self.after = unfolding.after
        self.loops = dict(unfolding.loops)
        self.feeds = feeds
        self.checks = checks
        self.kinds, self.sizes = tuple(sizes), tuple(sizes.values())
        self.guard = guard
        self.decided = unfolding.decided
        self.streamed_collection = unfolding.streamed_collection
        self.streamed_sequence = unfolding.streamed_sequence
        self.streams_result = unfolding.streams_result
        self._result = unfolding.returned
        self.handles = unfolding.handles
        self.result_form = unfolding.result_form
        self.returns_kept = unfolding.returns_kept
        fed = tuple(
            [
                (
                    feed.host.type_id,
                    feed.host.port,
                    feed.kind,
                    type(feed.fixed),
                    feed.codes is None,
                    feed.constants is None,
                    feed.host.nodes is None,
                )
                for feed in feeds
            ]
        )
        tested = tuple([(check.kind, check.codes is None, check.limit) for check in checks])
        self.form: Hashable = (self.kinds, fed, tested)
        self.spans = [*[feed.host.first for feed in feeds], *[feed.host.count for feed in feeds]]

    def results(self, count: int, column: Column) -> list[Any]:
        """Return the results of `count` requests; everything fetched must be there.

        column: gives what a handle of the result stands for in each of these requests.
        """
        return resolved(self._result, count, column)

    def close(self) -> None:
        """Nothing to do: there is no running function."""


def prove(
    model: Model,
    types: CellTypes[Cell],
    cells: Sequence[CellType],
    request: Any,
    max_nodes: int,
    before: KeptState | None,
    level: int = 0,
) -> Template:
    """Return the template of a request's shape. All its cells must have types. cells: by type. level: see Unfolding.

    UnprovenError gives the reason if there is none.
    """
    if before is not None and signature(before.structure) is None:
        raise UnprovenError("its state could change")
    with StandIns() as stand_ins:
        stand_in = stand_ins.of(request)
        reads = Reads(model, stand_in)
        token = standing_in.set(stand_ins)
        try:
            function = reads.function("unfold" if before is None else "unfold_chunk")
            unfolding = Unfolding(model, types, stand_in, max_nodes, before=before, function=function, level=level)
            unfolding.start()
        except RAISED_BY_USERS as error:  # among them Looked, which the function may have caught
            why = (
                "it looks at values of the request" if stand_ins.looked else f"on stand-ins it fails: {said_by(error)}"
            )
            raise UnprovenError(reads.refused or why) from None
        finally:
            standing_in.reset(token)
        if stand_ins.looked:
            raise UnprovenError("it looks at values of the request")
        if unfolding.waits:
            unfolding.close()
            raise UnprovenError("it is a generator function")
        if not all(_ends_alike(loop.until, reads) for loop in unfolding.loops.values()):
            raise UnprovenError("a loop ends by something that could change")
        decided = () if unfolding.graph.region is None else segments_of(unfolding.graph.region)
        for until in [one for segment in decided for loop in segment.loops for _, one in loop.conditions]:
            if not _ends_alike(until, reads) or (type(until) is FunctionType and reads.has_made(until)):
                raise UnprovenError("a loop in a branch or body ends by something that could change")
        if not (_is_plain(unfolding.returned) and _is_plain(unfolding.after.structure)):
            raise UnprovenError("it returns something that could be changed later")
        guard = reads.guard()
        feeds = tuple(
            [_feed(host, cells[host.type_id].inputs[host.port], stand_ins) for host in unfolding.graph.host_inputs]
        )
        return Template(unfolding, before, feeds, _checks(feeds, stand_ins), stand_ins.sizes, guard)


def _ends_alike(until: Any, reads: Reads) -> bool:
    """Whether what ends a loop is the same for all requests of a shape. Functions are looked at when the loop runs."""
    if type(until) is not FunctionType or not reads.has_made(until):
        return type(until) in (*PLAIN, FunctionType)
    bound = [*[cell.cell_contents for cell in until.__closure__ or ()], *(until.__defaults__ or ())]
    named = [*(until.__kwdefaults__ or {}).values()]
    return all(part is reads.model or type(part) in (*PLAIN, Cell) for part in (*bound, *named))


def _checks(feeds: Sequence[Feed], stand_ins: StandIns) -> tuple[Check, ...]:
    """Return the checks for each request: the function's own, and those of its cells."""
    wanted = [(kind, _all_of(codes, stand_ins.sizes[kind]), limit) for kind, codes, limit in stand_ins.checks]
    wanted += [
        (feed.kind, feed.codes, feed.spec.num_tokens)
        for feed in feeds
        if feed.kind is not None and feed.spec.num_tokens is not None
    ]
    of_all: dict[Kind, int] = {}
    for kind, codes, limit in wanted:
        if codes is None:
            of_all[kind] = min(limit, of_all.get(kind, limit))
    others = [
        Check(kind, codes[codes < stand_ins.sizes[kind]], limit)
        for kind, codes, limit in wanted
        if codes is not None and limit < of_all.get(kind, limit + 1)  # not if all values pass a stricter check
    ]
    others = [check for check in others if check.codes is None or len(check.codes)]
    return (*(Check(kind, None, limit) for kind, limit in of_all.items()), *others)


def _is_plain(returned: Any) -> bool:
    """Whether a result consists of handles and immutable objects, in lists, tuples, dicts and dataclasses."""
    if type(returned) in (Value, ValueSequence, KeptHandle, *PLAIN):
        return True
    if type(returned) is dict:
        return all(type(key) in PLAIN for key in returned) and all(map(_is_plain, returned.values()))
    if is_dataclass(returned) and not isinstance(returned, type):
        plain = getattr(returned, "__dict__", {}).keys() <= returned.__dataclass_fields__.keys()
        return plain and all(_is_plain(getattr(returned, field.name, returned)) for field in fields(returned))
    is_tuple = issubclass(type(returned), tuple) and (type(returned) is tuple or hasattr(returned, "_fields"))
    return (is_tuple or type(returned) is list) and all(map(_is_plain, returned))


def _feed(host: HostInput, spec: ValueSpec, stand_ins: StandIns) -> Feed:
    if type(host.values) is not StandIn:
        return Feed(replace(host, values=None), spec, None, None, None, host.values)
    kind, codes = host.values.kind, np.array(host.values.codes, np.int64).reshape(-1)
    size, constant_values = stand_ins.sizes[kind], stand_ins.constants.get(kind, [])
    constants = None
    if (codes >= CONSTANT).any():
        codes[codes >= CONSTANT] += size - CONSTANT
        constants = np.array(constant_values, np.int64 if kind is int else np.float64)
    return Feed(replace(host, values=None), spec, kind, _all_of(codes, size), constants, None)


def _all_of(codes: Ints, size: int) -> Ints | None:
    """Return None for codes that stand for all values in order."""
    codes = codes.reshape(-1)
    return None if len(codes) == size and bool((codes == np.arange(size)).all()) else codes


# --- comparison of two unfoldings ----------------------------------------------------------------------------------


def differs(template: Template, recorded: Unfolding, values: list[Any]) -> str | None:
    """Return a description of the first difference between a request's unfolding and its template; None without one.

    values: the values for the template's feeds in this request.
    """
    one, other = template.graph, recorded.graph
    if (one.first, one.num_nodes, one.plain) != (other.first, other.num_nodes, other.plain) or not (
        _same(one.blocks, other.blocks)
        and _same(one.runs, other.runs)
        and _same(one.kept_nodes, other.kept_nodes)
        and _same(one.memories, other.memories)
    ):
        return "the graph"
    if (one.region, one.keeps) != (other.region, other.keeps):
        return "what values decide"
    if not _same(one.fetches, other.fetches):
        return "what is fetched"
    if len(one.host_inputs) != len(other.host_inputs):
        return "what the request gives"
    for mine, laid_out, theirs in zip(one.host_inputs, values, other.host_inputs, strict=True):
        if not _same(mine, replace(theirs, values=None)) or not _same_values(laid_out, theirs.values):
            return "what the request gives"
    if not _same(template.loops, recorded.loops):
        return "how loops end"
    if not _same(template._result, recorded.returned) or _places(template.decided) != _places(recorded.decided):
        return "the result"
    if template.after.num_nodes != recorded.after.num_nodes or not _same(
        template.after.structure, recorded.after.structure
    ):
        return "the state that is kept"
    return None


def _places(decided: Recorded | None) -> Any:
    return None if decided is None else (tuple(decided.values.values()), tuple(decided.collections.values()))


def _same_values(one: Any, other: Any) -> bool:
    one, other = (torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for x in (one, other))
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.is_floating_point and not torch.equal(one.isnan(), other.isnan()):
        return False
    return bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))


def _same(one: Any, other: Any) -> bool:
    """Deep equality of results of unfold functions. Handles are equal if they stand for the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Value):
        return (one.node, one.output, one.spec, one.ends_open_loop) == (
            other.node,
            other.output,
            other.spec,
            other.ends_open_loop,
        )
    if isinstance(one, ValueSequence):
        return (one.output, one.spec, one.open_ended) == (other.output, other.spec, other.open_ended) and _same(
            one.nodes, other.nodes
        )
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, FunctionType):  # made anew by each run; the one of a proof asks
        return one.__code__ in (other.__code__, observed_code(other.__code__))
    if isinstance(one, PLAIN):
        return bool(one == other) or one != one
    fields = getattr(type(one), "__dataclass_fields__", None)
    return fields is not None and all(_same(getattr(one, name), getattr(other, name)) for name in fields)
