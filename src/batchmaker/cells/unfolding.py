"""One request's unfold function while it runs: graphs out, values in, a result at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import lru_cache
from typing import Any, final

import torch

from batchmaker.cells.cell import CellTypes, OpenLoop, UnfoldingScope, current_scope
from batchmaker.cells.model import Model
from batchmaker.errors import BatchmakerError, InvalidRequestError, NodeLimitError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.recorder import DEFAULT_MAX_NODES, Recorder
from batchmaker.graph.values import Value, ValueSequence

Handle = Value | ValueSequence
Lookup = Callable[[int, int], Any]
"""(local node, output) -> the value, which must have been fetched."""


@final
class Unfolding:
    """Runs `model.unfold(request)` and collects what it records.

    After `start` and each `resume`: `graph` is what was added, `open` tells whether the function waits, `awaited` lists
    the (node, output) it waits for, `dropped` the nodes it can no longer use.
    """

    def __init__(self, model: Model, types: CellTypes, request: Any, max_nodes: int = DEFAULT_MAX_NODES) -> None:
        self._model = model
        self._request = request
        self._max_yields = max_nodes
        self._generator: Generator[Any, Any, Any] | None = None
        waits = inspect.isgeneratorfunction(type(model).unfold)
        self._recorder = Recorder(max_nodes, holds_values=waits)
        self._scope = UnfoldingScope(self._recorder, types)
        self._yielded: Any = None
        self._streamed: list[Any] = []
        self._result: Any = None
        self.graph = CellGraph(0, 0)
        self.open = False
        self.awaited: list[tuple[int, int]] = []

    @property
    def loops(self) -> dict[int, OpenLoop]:
        """The loops that a value ends, by first local node."""
        return self._scope.loops

    def loop_of(self, node: int) -> OpenLoop | None:
        """Return the loop that a local node is a step of, if a value may end it."""
        return next((loop for loop in self._scope.loops.values() if loop.first <= node <= loop.last), None)

    def take_dropped(self) -> tuple[tuple[int, int], ...]:
        """Return (first node, count) of handles dropped since the last call."""
        dropped = tuple(self._recorder.dropped)
        self._recorder.dropped.clear()
        return dropped

    def start(self) -> None:
        """Call the unfold function, up to its first `yield` if it has one. Raises what it raises."""
        try:
            result = self._enter(lambda: _call(self._model, self._request))
        except StopIteration as error:  # a `next` in a function that is no generator
            raise InvalidRequestError(f"{type(self._model).__name__}.unfold raised StopIteration") from error
        if inspect.isgenerator(result):
            self._generator = result
            self._advance(lambda: next(result))
        else:
            self._finish(result)

    def resume(self, lookup: Lookup) -> Any:
        """Hand the function what it waited for and run it on. Returns what it was handed."""
        generator = self._generator
        assert generator is not None
        sent = _resolve(self._yielded, lookup, scalars=True)
        self._streamed.append(sent)
        self._yielded = None
        if len(self._streamed) > self._max_yields:  # values already there can be waited for without a new node
            raise NodeLimitError(
                f"{type(self._model).__name__}.unfold yielded more than {self._max_yields} times; "
                "does it end? Raise max_nodes if it should"
            )
        self._advance(lambda: generator.send(sent))
        return sent

    def result(self, lookup: Lookup) -> Any:
        """Return the request's result; everything fetched must be there."""
        if self._generator is not None and self._result is None:
            return self._streamed
        return _resolve(self._result, lookup, scalars=False)

    @property
    def streamed_sequence(self) -> ValueSequence | None:
        """The sequence whose elements stream to the caller as they are computed, where the result is one."""
        return self._result if isinstance(self._result, ValueSequence) else None

    @property
    def streams_result(self) -> bool:
        """Whether nothing streams before the end, so that a stream consists of the result alone."""
        return self._generator is None and self.streamed_sequence is None

    def close(self) -> None:
        """Let the function clean up, if it waits."""
        if self._generator is not None:
            self._generator.close()

    def _advance(self, step: Callable[[], Any]) -> None:
        try:
            self._yielded = self._enter(step)
        except StopIteration as stop:
            self._finish(stop.value)
            return
        self.awaited = []
        for handle in _handles(self._yielded):
            self._recorder.fetch(handle)
            self._note_awaited(handle)
        if not self.awaited:
            raise InvalidRequestError(
                f"{type(self._model).__name__}.unfold yielded {type(self._yielded).__name__}; yield a value of a cell"
            )
        self.open = True
        self.graph = self._recorder.take()

    def _note_awaited(self, handle: Handle) -> None:
        if isinstance(handle, Value):
            self.awaited.append((_place(handle), handle.output))
        else:
            len(handle)  # an open-ended loop has none: an error with advice
            self.awaited.extend((int(node), handle.output) for node in handle.nodes)

    def _finish(self, result: Any) -> None:
        self._result = result
        for handle in _handles(result):
            self._recorder.fetch(handle)
        self.open = False
        self.awaited = []
        self.graph = self._recorder.take()

    def _enter(self, call: Callable[[], Any]) -> Any:
        token = current_scope.set(self._scope)
        try:
            return call()
        except (BatchmakerError, StopIteration):
            raise
        except Exception as error:
            name = type(self._model).__name__
            raise InvalidRequestError(f"{name}.unfold raised {type(error).__name__}: {error}") from error
        finally:
            current_scope.reset(token)


@lru_cache(maxsize=256)
def _num_parameters(model: type[Model]) -> int:
    return len(inspect.signature(model.unfold).parameters) - 1


def _call(model: Model, request: Any) -> Any:
    if isinstance(request, Mapping) and _num_parameters(type(model)) > 1:
        try:
            inspect.signature(model.unfold).bind(**request)
        except TypeError as error:
            raise InvalidRequestError(f"{type(model).__name__}.unfold does not take this request: {error}") from None
        return model.unfold(**request)
    return model.unfold(request)


def end_of_loop(node: int) -> int:
    """Return the number under which the final outputs of a loop are looked up, wherever it ended. node: its last."""
    return -1 - node


def _place(value: Value) -> int:
    return end_of_loop(value.node) if value.ends_open_loop else value.node


def _handles(structure: Any) -> Iterator[Handle]:
    if isinstance(structure, Value | ValueSequence):
        yield structure
    elif isinstance(structure, Mapping):
        for item in structure.values():
            yield from _handles(item)
    elif isinstance(structure, list | tuple):
        for item in structure:
            yield from _handles(item)


def _resolve(structure: Any, lookup: Lookup, *, scalars: bool) -> Any:
    """Replace every handle by what was computed. scalars: single numbers as Python numbers, else as tensors."""
    if isinstance(structure, Value):
        value = lookup(_place(structure), structure.output)
        if structure.spec.shape == ():
            return value if scalars else torch.tensor(value, dtype=_dtype(structure.spec.dtype))
        return value
    if isinstance(structure, ValueSequence):
        values = _sequence_values(structure, lookup)
        if structure.spec.shape == ():
            return torch.tensor(values, dtype=_dtype(structure.spec.dtype))
        return torch.stack(values)
    if isinstance(structure, Mapping):
        return {key: _resolve(item, lookup, scalars=scalars) for key, item in structure.items()}
    if isinstance(structure, list | tuple):
        items = [_resolve(item, lookup, scalars=scalars) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return structure


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
