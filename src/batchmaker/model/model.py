"""A model: cells and an unfold function in plain Python."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from batchmaker.cost.profile import CostProfile
from batchmaker.errors import ModelError
from batchmaker.model.cell import Cell

_CALLED: Final = ("unfold", "unfold_chunk", "batched", "length")
"""What an engine calls and does not await."""

_KEPT_APART = ("example_request", "example_requests", "deadline_ms", "profile")
"""Attributes that a saved model keeps by themselves, whatever its `saved_state` returns."""


class Model(ABC):
    """What is served: make the cells in `__init__`, call them in `unfold`.

    example_request: optional; if set, it is unfolded when the engine starts, to prove shapes and types and to
    materialise every cell at every batch size before the first request. Without it the first request does that.
    example_requests: more of them, where one does not reach every cell.
    can_pad: False where `batched` only computes requests one after the other, which policy `padded` then refuses.
    optional_inputs, sole_input: where requests are dicts, the keys that one may leave out, and the key whose value
    alone is a request too; for servers, whose clients give inputs by name.
    deadline_ms: milliseconds within which a request is to be answered, where it does not say so itself. profile: what
    the cells cost and how often they are called, for policies that forecast; `batchmaker.load` finds it beside the
    model. Both are saved with the model.
    """

    example_request: Any = None
    example_requests: Sequence[Any] = ()
    can_pad: bool = True
    optional_inputs: tuple[str, ...] = ()
    sole_input: str | None = None
    deadline_ms: float | None = None
    profile: CostProfile | None = None

    def __setattr__(self, name: str, value: object) -> None:
        name_cells({name: value})
        super().__setattr__(name, value)

    @property
    def cells(self) -> dict[str, Cell]:
        """The model's cells by path, in order of definition: `step`; in lists and dicts `steps.0`, `steps.word`; in a
        model that is an attribute of this one `lstm.l0`. ModelError where two have one path.
        """
        return cells_in(vars(self))

    @property
    def examples(self) -> list[Any]:
        """All example requests, the first one first."""
        return [*(() if self.example_request is None else (self.example_request,)), *self.example_requests]

    @abstractmethod
    def unfold(self, request: Any) -> Any:
        """Call cells on one request and return values: a value, a sequence, or a list, tuple or dict of them.

        A generator function may `yield` a value to wait for it; what it yields is also streamed to the caller, and if
        it returns nothing, the list of what it yielded is the result. A request that is a dict is passed as keyword
        arguments where unfold names more than one parameter.
        """

    def unfold_chunk(self, chunk: Any, state: Any) -> tuple[Any, Any]:
        """Call cells on one chunk of a sequence (see Engine.open_sequence) and return (result, state).

        state: None for the first chunk, then what this returned for the one before: handles, whose values have stayed
        on the device, and plain data, in a list, tuple or dict. A generator function may `yield`, as in `unfold`.
        A chunk that is a dict is passed as keyword arguments where more is named than `chunk` and `state`.
        """
        raise ModelError(
            f"{type(self).__name__} has no unfold_chunk(chunk, state): a sequence needs to know how a chunk goes on "
            "from the state of the one before. Define it, or submit whole requests."
        )

    @property
    def takes_chunks(self) -> bool:
        """Whether it can serve sequences."""
        return type(self).unfold_chunk is not Model.unfold_chunk

    def saved_state(self) -> dict[str, Any]:
        """Return what a saved model keeps besides its cells: by default all other attributes. They are plain data, in
        which cells and models may be.
        """
        kept = vars(self).items()
        return {name: value for name, value in kept if not isinstance(value, Cell) and name not in _KEPT_APART}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `saved_state` returned, in a model whose cells are there and whose __init__ was not called."""
        for name, value in state.items():
            setattr(self, name, value)

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute whole requests together on the padded batch, as graph batching does; results in order.

        Needed only for the policies `padded` and `serial` (the baselines), which run whole graphs.
        """
        raise ModelError(
            f"{type(self).__name__} has no batched(requests): graph batching needs to know how whole requests are "
            "padded and computed together. Define it, or use policy 'cellular'."
        )

    def alone(self, request: Any) -> Any:
        """Compute one request in plain PyTorch, without cells and batches: what `unfold` must give. Needed only to
        compare with, and only where the network is at hand in such a form.
        """
        raise ModelError(f"{type(self).__name__} has no plain form of its network to compute a request with alone.")

    def length(self, request: Any) -> int:
        """Return the length by which graph batching puts a request into a bucket."""
        return len(request)


def cells_in(attributes: Mapping[str, Any]) -> dict[str, Cell]:
    """Return the cells in attributes, and in lists, tuples, dicts and models among them, by path."""
    found: dict[str, Cell] = {}
    for name, value in attributes.items():
        if type(value) is Cell:
            _add(found, name, value)
        elif isinstance(value, list | tuple | dict | Model):
            _find(value, name, found, ())
    return found


def _find(value: Any, path: str, found: dict[str, Cell], outer: tuple[int, ...]) -> None:
    if isinstance(value, Cell):
        _add(found, path, value)
    elif isinstance(value, list | tuple | dict | Model) and id(value) not in outer:
        parts: Any = (
            enumerate(value)
            if isinstance(value, list | tuple)
            else (value.items() if isinstance(value, dict) else vars(value).items())
        )
        for name, part in parts:
            _find(part, f"{path}.{name}", found, (*outer, id(value)))


def _add(found: dict[str, Cell], path: str, cell: Cell) -> None:
    if found.setdefault(path, cell) is not cell:
        raise ModelError(f"two cells have the path {path!r}; give the keys of the dict, or the attributes, other names")


def name_cells(attributes: Mapping[str, Any]) -> None:
    """Name cells after their paths, where they have no name, or the end of it from the model that they are in."""
    for path, cell in cells_in(attributes).items():
        if cell.name is None or path.endswith(f".{cell.name}"):
            cell.name = path


def check_functions(model: Model) -> None:
    """Raise ModelError for a model one of whose functions is `async`: they run in the engine's thread, which awaits
    nothing."""
    for name in _CALLED:
        function = getattr(model, name)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ModelError(
                f"{type(model).__name__}.{name} is `async def`; an engine calls it and awaits nothing, so that nobody "
                "waits for it. Write `def` and fetch what it awaits before the request is submitted; to wait for a "
                "value of a cell, `yield` it."
            )
