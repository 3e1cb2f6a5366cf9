"""Whatever an unfold function reads, and however it changes: a template is used only if unfolding gives the same."""

from __future__ import annotations

import abc
import builtins
import enum
import functools
import os
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from operator import setitem
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_templates import Look, Serving

import batchmaker as bm
from batchmaker.model.registry import CellRegistry
from batchmaker.model.template_cache import TemplateCache
from batchmaker.model.templates import Template

SENTINEL = object()
LEVEL = 0
TABLE = {"deep": 0}


class Mode(enum.Enum):
    FAST = 0
    SLOW = 1


class Pair(NamedTuple):
    deep: int
    wide: int


@dataclass
class Config:
    deep: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    deep: int
    words: Any


class Slots:
    __slots__ = ("deep",)

    def __init__(self) -> None:
        self.deep = 0


class Lazy:
    def __init__(self) -> None:
        self.hidden = 0

    def __getattr__(self, name: str) -> Any:
        if name == "deep":
            return self.hidden
        raise AttributeError(name)


class Descriptor:
    def __get__(self, owner: Any, _: Any) -> Any:
        return owner.hidden


class Odd:
    def __init__(self) -> None:
        self.hidden = 0

    def __bool__(self) -> bool:
        return bool(self.hidden)

    def __eq__(self, other: object) -> bool:
        return self.hidden == other

    def __hash__(self) -> int:
        return 1

    def __len__(self) -> int:
        return int(self.hidden)

    def __iter__(self) -> Any:
        return iter([1] * self.hidden)


class Abstract(abc.ABC):  # noqa: B024 - classes are registered with it
    pass


def default(deep: int = 0, *, wide: int = 0) -> int:
    return deep + wide


def zero() -> int:
    return 0


def one() -> int:
    return 1


def twice(function: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(function)
    def called() -> int:
        return 2 * function() - function()

    return called


decorated = twice(default)


def given_deep(deep: int, **_: int) -> int:
    return deep


def counter() -> tuple[Callable[[], int], Callable[[int], None]]:
    deep = 0

    def read() -> int:
        return deep

    def write(value: int) -> None:
        nonlocal deep
        deep = value

    return read, write


def world() -> Any:
    """Return a model whose class and settings nothing else shares."""

    class Base(bm.Model):
        level = 0

        def unfold(self, request: Any) -> Any:
            total = 1
            for read in self.reads:
                total += int(read(self))
            return self.look.run(request[:total])

        def of_base(self) -> int:
            return self.flag

        def closed_over(self, number: int) -> int:
            return number + self.flag

    class Own(Base):
        descriptor = Descriptor()
        reads: tuple[Callable[[Any], Any], ...]

        def of_base(self) -> int:
            return super().of_base()

        @property
        def depth(self) -> int:
            return self.flag

        @classmethod
        def of_class(cls) -> int:
            return cls.level

    class Helper:
        shared = 0

        def __init__(self) -> None:
            self.deep = 0

        def __call__(self) -> int:
            return self.deep

        def value(self) -> int:
            return 0

    class Other(Helper):
        shared = 1

        def value(self) -> int:
            return 1

    m: Any = Own()
    m.look = bm.Cell(Look())
    m.flag = m.hidden = m.unread = 0
    m.config, m.helper, m.slots, m.lazy, m.odd = Config(), Helper(), Slots(), Lazy(), Odd()
    m.other = Other
    m.table, m.nested, m.names, m.ordered = {"k": 0}, [[0]], {"b"}, {0: 0, 1: 1}
    m.settings = types.ModuleType("settings")
    m.settings.DEEP = 0
    m.functions = {"f": zero}
    m.partial = functools.partial(given_deep, deep=0)
    m.mode, m.speed, m.pair = None, Mode.FAST, Pair(0, 0)
    m.array, m.tensor = np.zeros(2, np.int64), torch.zeros(2)
    m.shared = torch.from_numpy(m.array)
    m.closed, m.write = counter()
    m.holder = zero
    return m


def toggle(owner: Any, name: str = "deep") -> None:
    setattr(owner, name, 1 - getattr(owner, name))


def toggle_item(owner: Any, key: Any) -> None:
    owner[key] = 1 - owner[key]


def toggle_global() -> None:
    global LEVEL
    LEVEL = 1 - LEVEL


def toggle_builtin() -> None:
    builtins.HOSTILE = 1 - getattr(builtins, "HOSTILE", 0)  # type: ignore[attr-defined]


def read_builtin(_: Any) -> Any:
    return HOSTILE  # type: ignore[name-defined] # noqa: F821


def read_partly(m: Any) -> int:
    total = 0
    for name, (first, *_), extra in zip(["a"], [[m.flag, 2]], [m.table.get("k", 0)], strict=True):
        total += first + extra if name == "a" else 7
    return total if total < 2 else 1


def read_planned(m: Any) -> int:
    plan = Plan(m.flag, [1])
    return plan.deep if len(plan.words) == 1 else 5


def swap_class(m: Any) -> None:
    m.helper.__class__ = m.other if type(m.helper) is not m.other else m.other.__bases__[0]


def swap_dict(m: Any) -> None:
    m.helper.__dict__ = {"deep": 1 - m.helper.deep}


def swap_bases(m: Any) -> None:
    kind = type(m)
    kind.__bases__ = (types.new_class("Between", (kind.__bases__[0],), {}, lambda names: names.update(level=1)),)


def swap_code(_: Any) -> None:
    zero.__code__, one.__code__ = one.__code__, zero.__code__


def swap_order(m: Any) -> None:
    first = next(iter(m.ordered))
    m.ordered[first] = m.ordered.pop(first)


def swap_keywords(m: Any) -> None:
    toggle_item(m.partial.keywords, "deep")


Reading = tuple[Callable[[Any], Any], Callable[[Any], Any], bool]
"""How a setting is read, how it is changed, and whether there is a template."""

READS: dict[str, Reading] = {
    "attribute": (lambda m: m.flag, lambda m: toggle(m, "flag"), True),
    "object": (lambda m: m.config.deep, lambda m: toggle(m.config), True),
    "class of an object": (lambda m: m.helper.shared, lambda m: toggle(type(m.helper), "shared"), True),
    "hidden by an object": (lambda m: m.helper.shared, lambda m: setattr(m.helper, "shared", 1), True),
    "class": (lambda m: m.level, lambda m: toggle(type(m).__mro__[1], "level"), True),
    "hidden by a class": (lambda m: m.level, lambda m: setattr(type(m), "level", 1), True),
    "class itself": (lambda m: type(m).level + m.__class__.level, lambda m: setattr(type(m), "level", 1), True),
    "class method": (lambda m: m.of_class(), lambda m: toggle(type(m).__mro__[1], "level"), True),
    "bases": (lambda m: m.level, swap_bases, True),
    "property": (lambda m: m.depth, lambda m: toggle(m, "flag"), True),
    "new property": (lambda m: m.depth, lambda m: setattr(type(m), "depth", property(lambda _: 1)), True),
    "super": (lambda m: m.of_base(), lambda m: toggle(m, "flag"), True),
    "dict": (lambda m: m.table["k"], lambda m: toggle_item(m.table, "k"), True),
    "items": (lambda m: sum([v for k, v in m.table.items() if k != "a"]), lambda m: toggle_item(m.table, "k"), True),
    "nested": (lambda m: m.nested[0][0], lambda m: toggle_item(m.nested[0], 0), True),
    "length": (lambda m: len(m.nested[0]) - 1, lambda m: m.nested[0].append(0) if len(m.nested[0]) < 2 else None, True),
    "set": (lambda m: "a" in m.names, lambda m: m.names.symmetric_difference_update({"a"}), True),
    "order": (lambda m: next(iter(m.ordered)), swap_order, True),
    "global": (lambda _: LEVEL, lambda _: toggle_global(), True),
    "global dict": (lambda _: TABLE["deep"], lambda _: toggle_item(TABLE, "deep"), True),
    "built in": (read_builtin, lambda _: toggle_builtin(), True),
    "closure": (lambda m: m.closed(), lambda m: m.write(1 - m.closed()), True),
    "default": (lambda _: default(), lambda _: setattr(default, "__defaults__", (1 - default(),)), True),
    "decorated": (lambda _: decorated(), lambda _: setattr(default, "__defaults__", (1 - default(),)), True),
    "keyword": (lambda _: default(), lambda _: toggle_item(default.__kwdefaults__, "wide"), True),
    "code": (lambda _: zero(), swap_code, True),
    "function": (lambda m: m.functions["f"](), lambda m: setitem(m.functions, "f", one), True),
    "partial": (lambda m: m.partial(), swap_keywords, True),
    "own partial": (lambda m: functools.partial(m.closed_over, 0)(), lambda m: toggle(m, "flag"), True),
    "partial of a partial": (lambda m: functools.partial(m.partial)(), swap_keywords, False),
    "mapped": (lambda m: sum(map(m.closed_over, [0])), lambda m: toggle(m, "flag"), True),
    "sorted": (lambda m: sorted([0, 1], key=lambda x: x if m.flag else -x)[0], lambda m: toggle(m, "flag"), True),
    "method": (lambda m: m.helper.value(), lambda m: setattr(type(m.helper), "value", lambda _: 1), True),
    "own method": (lambda m: m.helper.value(), lambda m: setattr(m.helper, "value", one), True),
    "callable": (lambda m: m.helper(), lambda m: toggle(m.helper), True),
    "another class": (lambda m: m.helper.value(), swap_class, True),
    "another dict": (lambda m: m.helper.deep, swap_dict, True),
    "late attribute": (lambda m: getattr(m, "late", 0), lambda m: setattr(m, "late", 1), True),
    "late name": (lambda m: hasattr(m.helper, "late"), lambda m: setattr(type(m.helper), "late", 1), True),
    "module": (lambda m: m.settings.DEEP, lambda m: toggle(m.settings, "DEEP"), True),
    "sentinel": (lambda m: m.mode is SENTINEL, lambda m: setattr(m, "mode", SENTINEL), True),
    "training": (lambda m: not m.look.module.training, lambda m: m.look.module.train(not m.look.module.training), True),
    "array": (lambda m: m.array[0], lambda m: toggle_item(m.array, 0), True),
    "array in memory of a tensor": (lambda m: m.array[0], lambda m: m.shared.fill_(1), True),
    "tensor": (lambda m: int(m.tensor[0]), lambda m: m.tensor.fill_(1), True),
    "data of a tensor": (lambda m: int(m.tensor[0]), lambda m: m.tensor.data.fill_(1), True),
    "storage of a tensor": (lambda m: int(m.tensor[0]), lambda m: setattr(m.tensor, "data", torch.ones(2)), True),
    "tensor in memory of an array": (lambda m: m.shared[0], lambda m: toggle_item(m.array, 0), True),
    "slots": (lambda m: m.slots.deep, lambda m: toggle(m.slots), True),
    "enum": (lambda m: m.speed is Mode.SLOW, lambda m: setattr(m, "speed", Mode.SLOW), True),
    "value of an enum": (lambda m: m.speed.value, lambda m: setattr(m, "speed", Mode.SLOW), True),
    "named tuple": (lambda m: m.pair.deep, lambda m: setattr(m, "pair", Pair(1 - m.pair.deep, 0)), True),
    "unpacked": (read_partly, lambda m: toggle(m, "flag"), True),
    "dataclass": (read_planned, lambda m: toggle(m, "flag"), True),
    "text": (lambda m: {"0": 0, "1": 1}[f"{m.flag:d}"], lambda m: toggle(m, "flag"), True),
    "looked up": (lambda m: m.lazy.deep, lambda m: toggle(m.lazy, "hidden"), False),
    "descriptor": (lambda m: m.descriptor, lambda m: toggle(m, "hidden"), False),
    "test": (lambda m: 1 if m.odd else 0, lambda m: toggle(m.odd, "hidden"), False),
    "comparison": (lambda m: m.odd == 1, lambda m: toggle(m.odd, "hidden"), False),
    "element": (lambda m: 1 in [m.odd], lambda m: toggle(m.odd, "hidden"), False),
    "own length": (lambda m: len(m.odd), lambda m: toggle(m.odd, "hidden"), False),
    "own iteration": (lambda m: sum(m.odd), lambda m: toggle(m.odd, "hidden"), False),
    "registered": (lambda m: isinstance(m.helper, Abstract), lambda m: Abstract.register(type(m.helper)), False),
    "environment": (lambda _: "HOSTILE" in os.environ, lambda _: os.environ.update(HOSTILE="1"), False),
    "number": (lambda m: int(str(id(m.holder) % 1)) + m.flag, lambda m: toggle(m, "flag"), False),
    "all attributes": (lambda m: vars(m)["flag"], lambda m: toggle(m, "flag"), False),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings_as_before() -> None:
    reset()


def reset() -> None:
    global LEVEL
    LEVEL, TABLE["deep"] = 0, 0
    builtins.HOSTILE = 0  # type: ignore[attr-defined]
    default.__defaults__, default.__kwdefaults__["wide"] = (0,), 0
    if zero():
        swap_code(None)
    os.environ.pop("HOSTILE", None)


@pytest.fixture(scope="module")
def types_() -> CellRegistry:
    return CellRegistry()


def serving(types_: CellRegistry, *reads: str) -> Serving:
    model = world()
    model.reads = tuple([READS[name][0] for name in reads])
    return Serving(model, TemplateCache(types_.types, 1000), types_)


REQUEST = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("name", READS)
def test_a_setting_that_changes_is_seen_at_once(types_: CellRegistry, name: str) -> None:
    served, (_, change, has_template) = serving(types_, name), READS[name]
    asked = [served.ask(REQUEST) for _ in range(4)]
    assert [type(one) is Template for one in asked] == [False, False, has_template, has_template]
    before = asked[-1].graph.num_nodes
    served.model.unread = 5  # type: ignore[attr-defined]
    assert (type(served.ask(REQUEST)) is Template) == has_template
    change(served.model)
    changed = served.ask(REQUEST)
    assert changed.graph.num_nodes != before
    assert type(changed) is not Template


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(READS)), min_size=1, max_size=4, unique=True),
    changes=st.lists(st.integers(-2, 3), max_size=12),
)
def test_answers_are_those_of_unfolding_after_any_changes(
    types_: CellRegistry, names: list[str], changes: list[int]
) -> None:
    reset()
    served = serving(types_, *names)
    try:
        for change in changes:
            for _ in range(3):
                served.ask(REQUEST)  # which compares
            if change >= 0:
                READS[names[change % len(names)]][1](served.model)
            served.ask(REQUEST)
    finally:
        reset()


def test_another_function_and_another_cell_are_seen_at_once(types_: CellRegistry) -> None:
    served = serving(types_, "attribute")
    assert served.has_template(*[REQUEST] * 3)
    served.model.look = bm.Cell(Look())
    assert not served.has_template(REQUEST)
    assert served.has_template(*[REQUEST] * 2)
    model: Any = served.model
    model.unfold = lambda request: model.look.run(request[:2])
    assert served.ask(REQUEST).graph.num_nodes == 2
    type(model).unfold = lambda self, request: self.look.run(request[:3])
    assert served.ask(REQUEST).graph.num_nodes == 2
    del model.unfold
    assert served.ask(REQUEST).graph.num_nodes == 3


ACTS: dict[str, Callable[[Any], Any]] = {
    "adds": lambda m: m.nested.append(1),
    "sets an item": lambda m: setitem(m.table, "k", 1),
    "sets an attribute": lambda m: setattr(m, "flag", 1),
    "prints": lambda m: print("hello"),
    "writes an array": lambda m: m.array.fill(1),
    "writes a tensor": lambda m: m.tensor.add_(1),
    "calls what acts": lambda m: m.write(1),
    "asks the time": lambda m: time.monotonic(),
    "draws": lambda m: np.random.rand(),
    "catches everything": lambda m: quietly(lambda: m.nested.append(1)),
}  # fmt: skip


def quietly(function: Callable[[], Any]) -> int:
    try:
        function()
    except BaseException:
        return 0
    return 0


@pytest.mark.parametrize("name", ACTS)
def test_what_acts_is_done_once_for_each_request(
    types_: CellRegistry, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served: Any = serving(types_)
    served.model.reads = (lambda m: 0 * len([ACTS[name](m)]),)
    for count in range(1, 5):
        served.ask(REQUEST)
        assert len(served.model.nested) in (1, 1 + count)
    assert served.templates.num_templates == 0
    assert capsys.readouterr().out.count("hello") in (0, 4)
