"""A model: cells and an unfold function in plain Python."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from batchmaker.cost.profile import CostProfile
from batchmaker.errors import ModelError
from batchmaker.model.cell import Cell

_CALLED: Final = ("unfold", "unfold_chunk", "batched", "length")
"""Functions that an engine calls without `await`."""

_KEPT_APART = ("example_request", "example_requests", "example_chunks", "deadline_ms", "profile")
"""Attributes that a saved model keeps separately, whatever its `saved_state` returns."""

_FOUND: Final = {
    "cells": "all cells of the model, in whatever attributes they are",
    "examples": "its example requests",
    "takes_chunks": "whether it has an unfold_chunk",
}
"""What a model finds out of itself, so that no attribute can have these names."""


class Model(ABC):
    """A model: make the cells in `__init__`, call them in `unfold`.

    - example_request: optional. The engine unfolds it when it starts, to prove shapes and types, and runs every cell at
      every batch size before the first request. Without it the first request does this.
    - example_requests: more of them, if one does not reach every cell.
    - example_chunks: chunks of one sequence, in order, for cells that only `unfold_chunk` calls.
    - can_pad: False if `batched` only computes requests one after the other. Policy `padded` then refuses the model.
    - optional_inputs, sole_input: for servers, whose clients give inputs by name, if requests are dicts: the keys that
      may be left out, and the key whose value alone is a request too.
    - deadline_ms: milliseconds for a request without its own deadline.
    - profile: the cells' costs and numbers of calls, for policies that forecast. `batchmaker.load` finds it beside the
      model.

    - config: the options of its constructor, a dict, for `save(..., form="weights")`.

    deadline_ms and profile are saved with the model.
    """

    example_request: Any = None
    example_requests: Sequence[Any] = ()
    example_chunks: Sequence[Any] = ()
    can_pad: bool = True
    optional_inputs: tuple[str, ...] = ()
    sole_input: str | None = None
    deadline_ms: float | None = None
    profile: CostProfile | None = None
    config: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, value in vars(cls).items():
            if name in _FOUND and not isinstance(value, property):
                raise _name_error(cls, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FOUND:
            raise _name_error(type(self), name)
        name_cells({name: value})
        super().__setattr__(name, value)

    @property
    def cells(self) -> dict[str, Cell]:
        """The model's cells by path, in order of definition. ModelError if two have one path.

        A path is `step`; in lists and dicts `steps.0`, `steps.word`; in a model that is an attribute of this one
        `lstm.l0`.
        """
        return cells_in(vars(self))

    @property
    def examples(self) -> list[Any]:
        """All example requests; `example_request` comes first."""
        return [*(() if self.example_request is None else (self.example_request,)), *self.example_requests]

    @abstractmethod
    def unfold(self, request: Any) -> Any:
        """Call cells on one request and return values: a value, a sequence, or a list, tuple or dict of them.

        A generator function may `yield` a value to wait for it. Yielded values are also streamed to the caller. If the
        function returns nothing, the list of yielded values is the result. A request that is a dict gives the keyword
        arguments if unfold has more than one parameter.
        """

    def unfold_chunk(self, chunk: Any, state: Any) -> tuple[Any, Any]:
        """Call cells on one chunk of a sequence (see Engine.open_sequence) and return (result, state).

        state: None for the first chunk, then the state returned for the previous chunk: handles, whose values have
        stayed on the device, and plain data, in a list, tuple or dict. A generator function may `yield`, as in
        `unfold`. A chunk that is a dict gives the keyword arguments if there are more parameters than `chunk` and
        `state`. A function with a parameter `last` gets True there for the last chunk of its sequence (see
        `Sequence.finish`), else False. The last chunk is None if the sequence was finished without one.
        """
        raise ModelError(
            f"{type(self).__name__} has no unfold_chunk(chunk, state): a sequence needs to know how a chunk goes on "
            "from the state of the one before. Define it, or submit whole requests."
        )

    @property
    def takes_chunks(self) -> bool:
        """Whether the model can serve sequences."""
        return type(self).unfold_chunk is not Model.unfold_chunk

    def saved_state(self) -> dict[str, Any]:
        """Return the data that a saved model keeps besides its cells, by default all other attributes.

        They must be plain data; cells and models may be inside.
        """
        attributes = vars(self).items()
        return {name: value for name, value in attributes if not isinstance(value, Cell) and name not in _KEPT_APART}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the data of `saved_state`. The cells exist; `__init__` was not called."""
        for name, value in state.items():
            setattr(self, name, value)

    def saved_weights(self) -> dict[str, Tensor]:
        """Return the tensors that `save(..., form="weights")` writes, and that `load` copies into, by name.

        By default those of the cells' modules, as `path.name`. A model over one network may return its
        `state_dict()`, so that the names are those of the network. Every weight of a cell must be among them.
        """
        return {
            f"{path}.{name}": tensor
            for path, cell in self.cells.items()
            for name, tensor in cell.module.state_dict().items()
        }

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute whole requests together on the padded batch, as graph batching does; results in order.

        Needed only for the baseline policies `padded` and `serial`, which run whole graphs.
        """
        raise ModelError(
            f"{type(self).__name__} has no batched(requests): graph batching needs to know how whole requests are "
            "padded and computed together. Define it, or use policy 'cellular'."
        )

    def alone(self, request: Any) -> Any:
        """Compute one request in plain PyTorch, without cells and batches. The result must equal that of `unfold`.

        Needed only for comparisons, if the network exists in such a form.
        """
        raise ModelError(f"{type(self).__name__} has no plain form of its network to compute a request with alone.")

    def length(self, request: Any) -> int:
        """Return the length by which graph batching assigns a request to a bucket."""
        return len(request)


def _name_error(kind: type[Model], name: str) -> ModelError:
    return ModelError(
        f"{kind.__name__}.{name}: an attribute of a model cannot be named {name!r}, because model.{name} is "
        f"{_FOUND[name]}. Give it another name, such as {'steps' if name == 'cells' else f'my_{name}'!r}"
    )


def cells_in(attributes: Mapping[str, Any]) -> dict[str, Cell]:
    """Return the cells in attributes, and in lists, tuples, dicts and models among them, by path."""
    cells: dict[str, Cell] = {}
    for name, value in attributes.items():
        if type(value) is Cell:
            _add(cells, name, value)
        elif isinstance(value, list | tuple | dict | Model):
            _find(value, name, cells, ())
    return cells


def _find(value: Any, path: str, cells: dict[str, Cell], outer: tuple[int, ...]) -> None:
    if isinstance(value, Cell):
        _add(cells, path, value)
    elif isinstance(value, list | tuple | dict | Model) and id(value) not in outer:
        parts: Any = (
            enumerate(value)
            if isinstance(value, list | tuple)
            else (value.items() if isinstance(value, dict) else vars(value).items())
        )
        for name, part in parts:
            _find(part, f"{path}.{name}", cells, (*outer, id(value)))


def _add(cells: dict[str, Cell], path: str, cell: Cell) -> None:
    if cells.setdefault(path, cell) is not cell:
        raise ModelError(f"two cells have the path {path!r}; give the keys of the dict, or the attributes, other names")


def name_cells(attributes: Mapping[str, Any]) -> None:
    """Name cells that have no name after their paths, or after the last part of the path inside their model."""
    for path, cell in cells_in(attributes).items():
        if cell.name is None or path.endswith(f".{cell.name}"):
            cell.name = path


def check_functions(model: Model) -> None:
    """ModelError if one of the model's functions is `async`: the engine's thread calls them without `await`."""
    for name in _CALLED:
        function = getattr(model, name)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ModelError(
                f"{type(model).__name__}.{name} is `async def`; an engine calls it and awaits nothing, so that nobody "
                "waits for it. Write `def` and fetch what it awaits before the request is submitted; to wait for a "
                "value of a cell, `yield` it."
            )
