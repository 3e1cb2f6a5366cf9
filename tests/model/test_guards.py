"""A guard holds until something that was read changes; and the code of a function in which each operation asks."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchmaker.model.guards import MAX_BYTES, MAX_ITEMS, MISSING, Guard, UnprovenError
from batchmaker.model.observed_code import observed_code


class Slots:
    __slots__ = ("one",)


def closed(guard: Guard) -> Guard:
    guard.close()
    return guard


def test_a_guard_holds_until_a_name_is_bound_to_another_object() -> None:
    names = {"one": [1], "two": 2}
    guard = Guard()
    assert guard.name(names, "one") == [1]
    assert guard.name(names, "three") is MISSING
    guard.kind(names)
    assert closed(guard).holds()
    names["two"] = 3
    assert guard.holds()
    names["one"] = [1]
    assert not guard.holds()


def test_a_name_that_was_not_there_and_is_bound_is_seen() -> None:
    names: dict[str, Any] = {}
    guard = Guard()
    guard.kind(names)
    guard.name(names, "one")
    closed(guard)
    assert guard.holds()
    names["one"] = None
    assert not guard.holds()


def test_a_slot_that_is_emptied_is_seen() -> None:
    value: Any = Slots()
    value.one = 1
    guard = Guard()
    guard.name({}, "one")
    assert guard.slot(vars(Slots)["one"], value) == 1
    assert closed(guard).holds()
    del value.one
    assert not guard.holds()


def test_what_is_too_large_or_of_another_kind_is_refused() -> None:
    for array in (np.zeros(MAX_BYTES + 1, np.uint8), np.array([object()]), torch.zeros(2).to_sparse()):
        with pytest.raises(UnprovenError):
            Guard().array(array)
    with pytest.raises(UnprovenError, match="too much"):
        Guard().container([None] * (MAX_ITEMS + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int8])
def test_all_values_of_a_tensor_are_compared(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3).to(dtype)
    guard = Guard()
    guard.name({}, "one")
    guard.kind(tensor)
    guard.array(tensor.T)
    guard.array(tensor)
    assert closed(guard).holds()
    tensor.data[1, 2] = 1
    assert not guard.holds()


def test_two_guards_of_the_same_reads_have_one_key() -> None:
    names, keys = {"one": 1, "two": 2}, []
    for order in (("one", "two"), ("two", "one"), ("one",)):
        guard = Guard()
        guard.kind(names)
        for name in order:
            guard.name(names, name)
        keys.append(closed(guard).key)
    assert keys[0] == keys[1] != keys[2]


FORMS = """
class A:
    def f(self, x):
        with x: pass
    def g(self, x):
        match x:
            case [a, *b] if a: return lambda y: y.c
            case {"k": v}: return v
    def h(self):
        class B:
            def inner(self): return self.x
        return B
    async def i(self):
        def inner(x): return x.y
        return [x async for x in await inner(self)]
    def j(self, x):
        global G
        import os
        a = b, *c = x.y = (lambda z: z.w)(x)
        x.y += (lambda z: z.w)(x)
        x[1] += a
        del x[2], a
        return {1, *x}, {**x}, 1 < x is None, x[1:2, ::3], super().f(x), f"{x!r:>{x}}", self.__hidden
    @staticmethod
    def k(x: int, *y: int, z: int = 3, **w: int) -> int:
        def inner():
            nonlocal x
            x = yield x
            yield from x
        return inner
"""


def codes(code: types.CodeType) -> list[types.CodeType]:
    return [part for one in code.co_consts if isinstance(one, types.CodeType) for part in (one, *codes(one))]


def test_every_function_of_any_form_asks_or_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(FORMS)
    found = codes(compile(FORMS, str(path), "exec", dont_inherit=True))
    for code in found:
        observed = observed_code(code)
        assert observed is not None
        assert observed.co_name == code.co_name
        if code.co_name not in ("A", "B"):  # class bodies are not called
            assert any(name.startswith(".") for name in observed.co_names) or code.co_names == ()
            assert not {"x", "c", "w", "f", "__hidden", "_A__hidden"} & set(observed.co_names)


def test_a_function_whose_source_has_changed_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "changed.py"
    path.write_text("def f(x):\n    return x.a\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    path.write_text("def f(x):\n    return x.b\n")
    assert observed_code(names["f"].__code__) is None
    exec("def g(x): return x.a", names)
    assert observed_code(names["g"].__code__) is None
