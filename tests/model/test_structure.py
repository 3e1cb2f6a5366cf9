"""Handles are found wherever their values can be put, and refused elsewhere; what is owned shares no memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import batchmaker as bm
from batchmaker.errors import ModelError
from batchmaker.model.structure import owned


@dataclass
class Out:
    scores: Any
    name: str = "a"
    late: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    scores: Any


class Named(NamedTuple):
    scores: Any


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


HOLDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (Out, lambda result: result.scores),
    "frozen dataclass": (Frozen, lambda result: result.scores),
    "named tuple": (Named, lambda result: result.scores),
    "deque": (lambda h: deque([h], maxlen=3), lambda result: result[0]),
    "set": (lambda h: {h}, lambda result: next(iter(result))),
    "frozen set": (lambda h: frozenset((h,)), lambda result: next(iter(result))),
    "ordered dict": (lambda h: OrderedDict(a=h), lambda result: result["a"]),
    "nested": (lambda h: [Out(deque([{"a": Frozen((h,))}]))], lambda result: result[0].scores[0]["a"].scores[0]),
}
HIDES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "object": (Holder, "Holder"),
    "slots": (Slotted, "Slotted"),
    "key": (lambda h: {h: 1}, "key of a dict"),
    "object in a list": (lambda h: [Holder([h])], "Holder"),
    "object in an object": (lambda h: Holder({"a": Slotted(h)}), "Holder"),
    "iterator": (lambda h: iter([h]), "list_iterator"),
    "tuple as key": (lambda h: {(h, 1): 2}, "key of a dict"),
}  # fmt: skip


class Held(bm.Model):
    """A request names how its result is held; `yields` waits for it instead."""

    def __init__(self) -> None:
        self.cell = bm.Cell(nn.Linear(4, 4))

    def unfold(self, hold: Callable[[Any], Any]) -> Any:
        return hold(self.cell([1.0, 2.0, 3.0, 4.0]))

    def unfold_chunk(self, chunk: Any, state: Any) -> Any:
        hold, take = chunk
        h = self.cell([1.0, 2.0, 3.0, 4.0] if state is None else take(state))
        return h, hold(h)


class Yields(Held):
    def unfold(self, hold: Callable[[Any], Any]) -> Any:
        return (yield hold(self.cell([1.0, 2.0, 3.0, 4.0])))


@pytest.mark.parametrize("kind", [Held, Yields])
def test_handles_in_containers_and_dataclasses_are_replaced_by_their_values(kind: type[Held]) -> None:
    model = kind()
    expected = model.cell.module(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))[0].detach()
    with bm.Engine(model) as engine:
        for hold, take in HOLDS.values():
            result = engine.submit(hold).result()
            assert type(result) is type(hold(1)) or isinstance(result, dict)
            torch.testing.assert_close(take(result), expected)


@pytest.mark.parametrize("kind", [Held, Yields])
def test_handles_that_are_hidden_are_refused_with_the_class(kind: type[Held]) -> None:
    with bm.Engine(kind()) as engine:
        for hold, said in HIDES.values():
            with pytest.raises(ModelError, match=said):
                engine.submit(hold).result()
        assert engine.submit(Out).result().name == "a"


def test_the_state_of_a_sequence_may_be_held_so_too() -> None:
    model = Held()
    with bm.Engine(model) as engine, torch.no_grad():
        for hold, take in HOLDS.values():
            with engine.open_sequence() as sequence:
                x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
                for _ in range(3):
                    x = model.cell.module(x)
                    torch.testing.assert_close(sequence.submit((hold, take)).result(), x[0])
        for hold, said in HIDES.values():
            with engine.open_sequence() as sequence, pytest.raises(ModelError, match=said):
                sequence.submit((hold, None)).result()


def test_an_object_that_holds_no_handle_is_given_as_it_is() -> None:
    holder = Holder({"a": [1, None, Slotted(torch.ones(2))]})
    with bm.Engine(Held()) as engine:
        assert engine.submit(lambda _: holder).result() is holder


PARTS = st.recursive(
    st.one_of(
        st.integers(), st.text(max_size=3), st.none(),
        st.builds(lambda n: np.arange(float(n)), st.integers(0, 4)),
        st.builds(lambda n: torch.arange(float(n)).reshape(1, -1), st.integers(0, 4)),
        st.builds(lambda n: torch.zeros(n, 2).T, st.integers(1, 4)),
    ),
    lambda part: st.one_of(
        st.lists(part, max_size=3), st.lists(part, max_size=3).map(tuple), st.dictionaries(st.text(max_size=2), part),
        st.builds(Out, part), st.builds(Frozen, part), st.builds(Named, part), st.lists(part, max_size=2).map(deque),
    ),
    max_leaves=12,
)  # fmt: skip


def leaves(structure: Any) -> list[Any]:
    if isinstance(structure, dict):
        return [structure, *[leaf for part in structure.values() for leaf in leaves(part)]]
    if isinstance(structure, list | tuple | deque):
        return [structure, *[leaf for part in structure for leaf in leaves(part)]]
    if isinstance(structure, Out | Frozen):
        return [structure, *leaves(structure.scores)]
    return [structure]


@given(PARTS)
def test_what_is_owned_is_equal_and_shares_no_memory(structure: Any) -> None:
    before, after = leaves(structure), leaves(owned(structure))
    assert list(map(type, before)) == list(map(type, after))
    for one, other in zip(before, after, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
            assert other.is_contiguous()
            assert one.numel() == 0 or one.data_ptr() != other.data_ptr()
        elif isinstance(one, np.ndarray):
            assert np.array_equal(one, other)
            assert not np.shares_memory(one, other)
        elif isinstance(one, list | dict | deque | Out):
            assert one is not other
        elif not isinstance(one, tuple | Frozen):
            assert one == other


def test_objects_of_other_classes_stay_and_what_is_deep_is_copied() -> None:
    holder = Holder([1])
    assert owned([holder])[0] is holder
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    made = owned(deep)
    assert made is not deep
    depth = 0
    while deep:
        deep, made, depth = deep[0], made[0], depth + 1
    assert (depth, made) == (100_000, [])


def test_what_contains_itself_is_returned_as_it_is() -> None:
    looped: list[Any] = [[1]]
    looped.append(looped)
    assert owned(looped) is looped


def test_what_stands_in_several_places_stands_there_in_the_copy_too():
    shared = [[1], torch.zeros(2)]
    structure = shared
    for _ in range(60):  # copied once in each place it would never end
        structure = [structure, structure]
    made = owned(structure)
    while len(made) == 2 and made[0] is made[1]:
        made = made[0]
    assert made[0] == [1]
    assert made[0] is not shared[0]
