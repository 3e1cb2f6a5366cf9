"""A model: cells and an unfold function in plain Python."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from batchmaker.cells.cell import Cell
from batchmaker.cost.profile import CostProfile
from batchmaker.errors import ModelError

_CALLED: Final = ("unfold", "unfold_chunk", "batched", "length")
"""What an engine calls and does not await."""

_KEPT_APART = ("example_request", "deadline_ms", "profile")
"""Attributes that a saved model keeps by themselves, whatever its `saved_state` returns."""


class Model(ABC):
    """What is served: make the cells in `__init__`, call them in `unfold`.

    example_request: optional; if set, it is unfolded when the engine starts, to prove shapes and types and to
    materialise every cell at every batch size before the first request. Without it the first request does that.
    can_pad: False where `batched` only computes requests one after the other, which policy `padded` then refuses.
    deadline_ms: milliseconds within which a request is to be answered, where it does not say so itself. profile: what
    the cells cost and how often they are called, for policies that forecast; `batchmaker.load` finds it beside the
    model. Both are saved with the model.
    """

    example_request: Any = None
    can_pad: bool = True
    deadline_ms: float | None = None
    profile: CostProfile | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, Cell) and value.name is None:
            value.name = name
        super().__setattr__(name, value)

    @property
    def cells(self) -> dict[str, Cell]:
        """The model's cells by attribute name, in order of definition."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Cell)}

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
        """Return what a saved model keeps besides its cells: plain data, by default all other attributes."""
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
