"""One request's unfold function while it runs: graphs out, values in, a result at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Hashable, Mapping
from functools import lru_cache
from typing import Any, Final, final

import numpy as np
import torch

from batchmaker.errors import (
    BatchmakerError,
    InvalidRequestError,
    ModelError,
    NodeLimitError,
    RequestError,
    RowsError,
    nearest_name,
    said_by,
)
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.misuse import line_of
from batchmaker.graph.recorder import DEFAULT_MAX_NODES, Recorder
from batchmaker.graph.values import Value, ValueSequence
from batchmaker.graph.whole_runs import CONCURRENCIES
from batchmaker.model.cell import Cell
from batchmaker.model.decisions import picked
from batchmaker.model.model import Model
from batchmaker.model.region_recorder import Recorded
from batchmaker.model.scope import CellTypes, OpenLoop, UnfoldingScope, current_scope
from batchmaker.model.sequence_state import NOTHING_KEPT, KeptState, keep
from batchmaker.model.stand_ins import StandIn
from batchmaker.model.structure import Handle, handles, replaced

Lookup = Callable[[int, int], Any]
"""(local node, output) -> its value, which must have been fetched."""

Column = Callable[[Handle], list[Any]]
"""A handle -> what it stands for in each of some requests."""

PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
"""Kinds of values that have no parts and cannot change."""

_RESULTS: Final = frozenset((Value, ValueSequence, tuple, list, dict))
"""The usual result types of functions that do not wait."""
_EMPTY: Final = CellGraph(0, 0)
_NO_DICTS: Final = frozenset((StandIn, list, tuple, np.ndarray, str, int, float))


@final
class Unfolding:
    """Runs `model.unfold(request)`, or `model.unfold_chunk(request, state)`, and collects the recording.

    - before: the previous state of the sequence; None for a request outside a sequence.
    - function: called in place of the model's own.
    - level: of concurrency, see `level_of`: whether runs are steps or one node depends on it.

    After `start` and each `resume`: `graph` is the new part, `open` tells whether the function waits, `awaited` lists
    the (node, output) it waits for, `dropped` the nodes it can no longer use. `after`, once it has ended: the state of
    the sequence if this request is answered. `decided`, then: its decisions by computed values, if any.
    """

    def __init__(
        self,
        model: Model,
        types: CellTypes[Cell],
        request: Any,
        max_nodes: int = DEFAULT_MAX_NODES,
        *,
        before: KeptState | None = None,
        function: Callable[..., Any] | None = None,
        level: int = len(CONCURRENCIES) - 1,
    ) -> None:
        self._call_as = function
        self._model = model
        self._request = request
        self._max_yields = max_nodes
        self._generator: Generator[Any, Any, Any] | None = None
        self._before = before
        self._function = "unfold" if before is None else "unfold_chunk"
        waits = _waits(getattr(type(model), self._function))
        num_kept = 0 if before is None else before.num_nodes
        self._recorder = Recorder(max_nodes, holds_values=waits, num_kept=num_kept, level=level)
        self._scope = UnfoldingScope(self._recorder, types)
        self._recorder.pick = picked
        self._yielded: Any = None
        self._streamed: list[Any] = []
        self._result: Any = None
        self.graph = _EMPTY
        self.open = False
        self.awaited: list[tuple[int, int]] = []
        self.after = NOTHING_KEPT
        self.decided: Recorded | None = None

    @property
    def loops(self) -> dict[int, OpenLoop]:
        """The loops that end at a value, by first local node."""
        return self._scope.loops

    def take_dropped(self) -> tuple[tuple[int, int], ...]:
        """Return (first node, count) of handles dropped since the last call."""
        dropped = tuple(self._recorder.dropped)
        self._recorder.dropped.clear()
        return dropped

    def start(self) -> None:
        """Call the unfold function, up to its first `yield` if it has one. Raises every exception of the function."""
        try:
            result = self._enter(self._call)
        except StopIteration as error:  # `next` in a function that is no generator
            raise InvalidRequestError(f"{self._name} raised StopIteration") from error
        if type(result) in _RESULTS:
            self._finish(result)
        elif inspect.isgenerator(result):
            self._generator = result
            self._advance(None)
        elif inspect.iscoroutine(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ModelError(
                f"{self._name} returned {type(result).__name__}; nobody awaits it. It must be no `async def`"
            )
        else:
            self._finish(result)

    def resume(self, lookup: Lookup) -> Any:
        """Give the function the values that it waited for and continue it. Returns these values."""
        yielded = self._yielded
        if type(yielded) is Value:
            sent = lookup(_place(yielded), yielded.of.index)
        else:
            (sent,) = resolved(yielded, 1, lambda handle: [_waited_for(handle, lookup)])
        self._streamed.append(sent)
        self._yielded = None
        if len(self._streamed) > self._max_yields:  # waiting for existing values adds no node
            raise NodeLimitError(
                f"{self._name} yielded more than {self._max_yields} times; does it end? Raise max_nodes if it should"
            )
        self._advance(sent)
        return sent

    def result(self, lookup: Lookup) -> Any:
        """Return the request's result; everything fetched must be there."""
        (result,) = self.results(1, lambda handle: [computed(handle, lookup)])
        return result

    def results(self, count: int, column: Column) -> list[Any]:
        """Return the request's result, as Template.results does for many. count: 1."""
        if self._generator is not None and self._result is None:
            return [self._streamed]
        return resolved(self._result, count, column)

    @property
    def returned(self) -> Any:
        """The function's result, with its handles; for a chunk without the state."""
        return self._result

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The handles in the function's result, in order."""
        return tuple(handles(self._result))

    @property
    def result_form(self) -> Hashable:
        """Results with equal ones are one handle of equal values, whatever their nodes; None: another result."""
        result = self._result
        if self.decided is not None or not isinstance(result, Value | ValueSequence):
            return None
        return isinstance(result, Value), result.output, result.spec.shape, result.spec.dtype

    @property
    def returns_kept(self) -> bool:
        """Whether the result contains values that were kept from an earlier request of the sequence."""
        if self._before is None or self._before.num_nodes == 0 or self.decided is not None:
            return False
        first = self._before.num_nodes
        return any(
            handle.node < first if isinstance(handle, Value) else (handle.nodes < first).any()
            for handle in self.handles
        )

    @property
    def waits(self) -> bool:
        """Whether the function can wait for values."""
        return self._generator is not None

    @property
    def streamed_sequence(self) -> ValueSequence | None:
        """The sequence whose elements stream to the caller as they are computed, if the result is one."""
        is_plain = isinstance(self._result, ValueSequence) and self.decided is None
        return self._result if is_plain else None

    @property
    def streamed_collection(self) -> int | None:
        """The number of the collection whose elements stream to the caller as they come, if the result is one."""
        is_decided = isinstance(self._result, ValueSequence) and self.decided is not None
        return self.decided.collections.get(self._result) if is_decided and self.decided is not None else None

    @property
    def streams_result(self) -> bool:
        """Whether nothing streams before the end, so the stream consists of the result alone."""
        return self._generator is None and self.streamed_sequence is None and self.streamed_collection is None

    def close(self) -> None:
        """Let the function clean up, if it is waiting."""
        if self._generator is not None:
            self._generator.close()

    def _advance(self, sent: Any) -> None:
        """Let the function go on to its next `yield` or its end."""
        assert self._generator is not None
        try:
            yielded = self._yielded = self._enter(self._generator.send, sent)
        except StopIteration as stop:
            self._finish(stop.value)
            return
        self.awaited = []
        for handle in (yielded,) if type(yielded) is Value else handles(yielded):
            self._recorder.fetch(handle)
            self._note_awaited(handle)
        if not self.awaited:
            raise InvalidRequestError(f"{self._name} yielded {type(yielded).__name__}; yield a value of a cell")
        self.open = True
        self.graph = self._recorder.take()

    def _note_awaited(self, handle: Handle) -> None:
        if isinstance(handle, Value):
            self.awaited.append((_place(handle), handle.output))
        elif handle.open_ended:
            self.awaited.append((end_of_loop(int(handle.numbers[-1])), handle.output))
        else:
            self.awaited.extend((int(node), handle.output) for node in handle.nodes)

    def _finish(self, result: Any) -> None:
        if self._before is not None:
            if not isinstance(result, tuple) or len(result) != 2:
                raise ModelError(
                    f"{self._name} returned {type(result).__name__}; it returns (result, state), a tuple of two: the "
                    "chunk's result, and what the next chunk gets as its state"
                )
            result, state = result
            self.after = keep(state, self._recorder, self._scope.decisions)
        decisions = self._scope.decisions
        self._result = result
        if type(result) is Value or type(result) is ValueSequence:
            if decisions is None or not decisions.returns(result):
                self._recorder.fetch(result)
        else:
            for handle in handles(result):
                if decisions is None or not decisions.returns(handle):
                    self._recorder.fetch(handle)
        self.open = False
        self.awaited = []
        if decisions is not None:
            self.decided, self._scope.decisions = decisions.recorded(), None
        self.graph = self._recorder.take_last()
        if self.decided is not None:
            self.graph.region, self.graph.keeps = self.decided.region, self.decided.keeps

    @property
    def _name(self) -> str:
        return f"{type(self._model).__name__}.{self._function}"

    def _call(self) -> Any:
        """Call the function; a dict fills several parameters by name."""
        function, request = self._call_as or getattr(self._model, self._function), self._request
        state: dict[str, Any] = {} if self._before is None else {"state": self._before.handles_in(self._recorder)}
        kind = type(request)
        is_dict = kind is dict or (kind not in _NO_DICTS and isinstance(request, Mapping))
        names = _parameters(type(self._model), self._function)
        if self._before is not None and takes_last(type(self._model)) and not (is_dict and "last" in request):
            state["last"] = self._before.last
        if request is None and len(names) > 1 + len(state):  # the end of a sequence, without a chunk
            is_dict, request = True, {name: None for name in names if name not in state}
        if is_dict and len(names) > 1 + len(state):
            signature = inspect.signature(function)
            try:
                signature.bind(**request, **state)
            except TypeError as error:
                said = _misfit(signature, request, state) or str(error)
                raise InvalidRequestError(f"{self._name} does not take this request: {said}") from None
            return function(**request, **state)
        return function(request, **state)

    def _advice_on_dict(self) -> str:
        """Return what to do about a dict that may have been meant as the value of the only parameter; "" otherwise."""
        names = [name for name in _parameters(type(self._model), self._function) if name not in ("state", "last")]
        if len(names) != 1 or not isinstance(self._request, Mapping) or names[0] not in self._request:
            return ""
        return (
            f"; {self._function} has the one parameter {names[0]!r}, which gets a dict itself and not the value in it: "
            "give that value as the request"
        )

    def _enter(self, call: Callable[..., Any], *arguments: Any) -> Any:
        token = current_scope.set(self._scope)
        try:
            return call(*arguments)
        except InvalidRequestError as error:
            error.args = (f"{error}{self._advice_on_dict()}", *error.args[1:])
            raise
        except ModelError as error:
            _name_line(error)
            raise
        except (BatchmakerError, StopIteration):
            raise
        except Exception as error:
            said, line = said_by(error), line_of(error)
            at = f" (at {line})" if line else ""
            advice = _advice(error, said) or self._advice_on_dict()
            raise InvalidRequestError(f"{self._name} raised {said}{advice}{at}") from error
        finally:
            current_scope.reset(token)


def _misfit(signature: inspect.Signature, request: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Say which inputs a request has too many or lacks; "" if that is not what is wrong with it."""
    inputs = {name: one for name, one in signature.parameters.items() if name not in state and one.kind in _NAMED}
    unknown = [str(name) for name in request if name not in inputs]
    missing = [name for name, one in inputs.items() if one.default is one.empty and name not in request]
    if not unknown and not missing:
        return ""
    what = [f"it has the unknown {', '.join(map(repr, unknown))}"] if unknown else []
    what += [f"it lacks {', '.join(map(repr, missing))}"] if missing else []
    listing = ", ".join(name if one.default is one.empty else f"{name} (optional)" for name, one in inputs.items())
    return f"{' and '.join(what)}; the inputs are {listing}.{nearest_name(unknown[0], inputs) if unknown else ''}"


_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _name_line(error: ModelError) -> None:
    """Let an error name the line of the unfold function, if it is the model's, and does not name a line already.

    Errors of requests are for their callers, who do not know the function.
    """
    line, said = line_of(error), str(error)
    if line and line not in said and not isinstance(error, RequestError | RowsError):
        error.args = (f"{said} (called at {line})", *error.args[1:])


def _advice(error: BaseException, said: str) -> str:
    """Return what to do about some errors of unfold functions; "" for all others."""
    if "step must be greater than zero" in said:
        return "; a tensor is reversed by x.flip(0)"
    if isinstance(error, RecursionError):
        return (
            "; the request is nested deeper than a function can call itself here. Walk it with a list of what is left "
            "to do, or send it as arrays (bm.tree)"
        )
    return ""


@lru_cache(maxsize=256)
def _waits(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function)


@lru_cache(maxsize=256)
def _parameters(model: type[Model], function: str) -> tuple[str, ...]:
    """Return the names of a function's parameters, without that of the model."""
    return tuple(inspect.signature(getattr(model, function)).parameters)[1:]


def takes_last(model: type[Model]) -> bool:
    """Whether the model's `unfold_chunk` is told which chunk is the last one."""
    return "last" in _parameters(model, "unfold_chunk")


def end_of_loop(node: int) -> int:
    """Return the number under which the final outputs of a loop are looked up. node: its last possible node."""
    return -1 - node


def _place(value: Value) -> int:
    return end_of_loop(value.node) if value.ends_open_loop else value.node


def resolved(structure: Any, count: int, column: Column) -> list[Any]:
    """Return a structure for each of `count` requests, with computed values in place of its handles."""
    kind = type(structure)
    if kind is Value or kind is ValueSequence:
        return column(structure)
    if kind in PLAIN:
        return [structure] * count
    if (kind is tuple or kind is list or kind is dict) and structure:
        parts = structure.values() if kind is dict else structure
        rows = zip(*[resolved(part, count, column) for part in parts], strict=True)
        if kind is tuple:
            return list(rows)
        return [dict(zip(structure, row, strict=True)) for row in rows] if kind is dict else list(map(list, rows))
    columns = {handle: column(handle) for handle in handles(structure)}
    return [
        replaced(structure, (Value, ValueSequence), lambda handle: columns[handle][place])  # noqa: B023 - called now
        for place in range(count)
    ]


def computed(handle: Handle, lookup: Lookup) -> Any:
    """Return what a handle stands for: a tensor, or a Python number where it is a single number."""
    if isinstance(handle, Value):
        return lookup(_place(handle), handle.output)
    values, shape, dtype = _sequence_values(handle, lookup), handle.spec.shape, _dtype(handle.spec.dtype)
    if not values:
        return torch.empty((0, *shape), dtype=dtype)
    return torch.stack(values) if shape else torch.tensor(values, dtype=dtype)


def _waited_for(handle: Handle, lookup: Lookup) -> Any:
    """As `computed`; the steps of a loop have their values from now on."""
    value = computed(handle, lookup)
    if isinstance(handle, ValueSequence) and handle.open_ended:
        handle.know(value.clone())
    return value


def _sequence_values(sequence: ValueSequence, lookup: Lookup) -> list[Any]:
    values = []
    for node in sequence.nodes.tolist():
        try:
            values.append(lookup(node, sequence.output))
        except KeyError:
            if not sequence.open_ended:
                raise
            break
    return values


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
