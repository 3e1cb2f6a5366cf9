"""Decisions by computed values: `cond`, `switch`, `while_loop` and `at`, against plain Python."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checked_commands import CommandChecks
from engine_models import assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import (
    CancelledError,
    CellError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
    NodeLimitError,
)
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.policies.auto import AutoPolicy
from insides import code_words, loops_everywhere, num_waiting_for_values, scheduler, schedulers

EXAMPLES = int(os.environ.get("BATCHMAKER_EXAMPLES", "6"))
PRIME = 1009
POLICIES = ("cellular", "auto", "lazy", "depth", "agenda", "sufficient")


class Mix(nn.Module):
    """Two rows of integers -> a row, in exact arithmetic."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (3 * x + 5 * torch.cat((y[:, 1:], y[:, :1]), 1) + 7) % PRIME


class Step(nn.Module):
    """A row and a count -> a row, the next count, whether to go on, whether to keep it."""

    def forward(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        following = (11 * x + count.unsqueeze(-1)) % PRIME
        return following, count + 1, (following[:, 0] + following[:, 1]) % 4 != 0, following[:, 0] % 2 == 0


class Fold(nn.Module):
    """An element and a row -> a number below 3, a row. The order counts."""

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        row = (7 * row + 13 * x + 1) % PRIME
        return (row[:, 0] + row[:, 1]) % 3, row


class Recall(nn.Module):
    """A row and a sequence of rows -> a number below 3, a row."""

    def forward(self, x: Tensor, rows: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(1, rows.shape[1] + 1)
        there = places * (places <= number.unsqueeze(-1))
        row = (5 * x + (rows * there.unsqueeze(-1)).sum(1) + number.unsqueeze(-1)) % PRIME
        return row.sum(-1) % 3, row


class Walk(nn.Module):
    """A row -> a number below 3, a row."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (17 * x + 3) % PRIME
        return (x[:, 0] + x[:, 1]) % 3, x


class Test(nn.Module):
    """A row -> a bool; a number below 3; a number below 4."""

    __test__ = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x[:, 0] + x[:, 1]
        return total % 2 == 0, total % 3, total % 4


# --- the same functions on values ------------------------------------------------------------------------------------


class Steps(list[Any]):
    def at(self, index: Any) -> Any:
        return self[int(index)]


class Eager:
    """A cell that computes at once. memory: of Recall, given, or the run's own output 1."""

    def __init__(self, module: nn.Module, memory: Any = None) -> None:
        self.module, self.memory = module, memory

    def recall(self, x: Any, rows: Sequence[Any]) -> Any:
        stacked = torch.stack(list(rows)) if len(rows) else torch.zeros(0, 2, dtype=torch.int64)
        return tuple([o[0] for o in self.module(x[None], stacked[None], torch.tensor([len(rows)]))])

    def __call__(self, *arguments: Any) -> Any:
        if self.memory is not None:
            return self.recall(*arguments)
        outputs = self.module(*[torch.as_tensor(a).unsqueeze(0) for a in arguments])
        return tuple([o[0] for o in outputs]) if isinstance(outputs, tuple) else outputs[0]

    def map(self, *sequences: Any) -> Any:
        rows = [self(*parts) for parts in zip(*sequences, strict=True)]
        return Steps(rows) if not rows or isinstance(rows[0], Tensor) else tuple(map(Steps, zip(*rows, strict=True)))

    def run(self, sequence: Any, init: Any) -> Any:
        found = (torch.tensor(0), init)
        for x in sequence:
            found = self(x, found[1])
        return found

    def loop(self, init: Any, *, max_steps: int, until: Any = None, memory: Any = None) -> Any:
        found, past = (torch.tensor(0), init[-1]), list[Any]()
        for _ in range(max_steps):
            if self.memory is None:
                found = self(found[1])
            else:
                found = self.recall(found[1], past if memory is None else memory)
                past.append(found[1])
            if until is not None and found[0] == until:
                break
        return found


def eager_cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    return true_fn() if pred else false_fn()


def eager_switch(index: Any, branches: Sequence[Callable[[], Any]]) -> Any:
    return branches[int(index)]()


class Kept(NamedTuple):
    """The last state of a loop, and the states that it collected."""

    state: Any
    collected: list[Any]


def eager_loop(cond_fn: Any, body_fn: Any, init: Any, *, max_steps: int, collect: Any = None) -> Kept:
    state, collected = init, []
    for _ in range(max_steps):
        if not cond_fn(state):
            break
        state = body_fn(state)
        if collect is None or collect(state):
            collected.append(state)
    return Kept(state, collected)


def handles_loop(*arguments: Any, **options: Any) -> Kept:
    state = bm.while_loop(*arguments, **options)
    return Kept(state, [])


class OfState(nn.Module):
    """As another module, whose first input is an earlier output that it does not need."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class WalkOn(OfState):
    def forward(self, number: Tensor, x: Tensor) -> Any:
        return self.module(x)


class RecallOn(OfState):
    def forward(self, number: Tensor, x: Tensor, rows: Tensor, count: Tensor) -> Any:
        return self.module(x, rows, count)


def cells(kind: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**{name: kind(*what) for name, what in {
        "mix": (Mix(),), "step": (Step(),), "test": (Test(),), "fold": (Fold(),), "walk": (Walk(),),
        "recall": (Recall(), "given"), "read": (Recall(), "looped"), "past": (Recall(), "own"),
    }.items()})  # fmt: skip


def made_cell(module: nn.Module, memory: str | None = None) -> bm.Cell:
    """A cell with the memory that Eager has."""
    if memory == "own":
        return bm.Cell(RecallOn(module), max_batch=4, memory=bm.Memory("rows", own=True, output=1, row=OWN))
    if memory is not None:
        return bm.Cell(module if memory == "given" else RecallOn(module), max_batch=4, memory="rows")
    return bm.Cell(WalkOn(module) if isinstance(module, Walk) else module, max_batch=4)


OWN = ValueSpec((2,), "int64")


def lazy_steps(kept: Kept, part: int) -> Any:
    return kept.state[part].steps


def eager_steps(kept: Kept, part: int) -> Any:
    return Steps([state[part] for state in kept.collected])


LAZY = SimpleNamespace(cond=bm.cond, switch=bm.switch, while_loop=handles_loop, steps=lazy_steps)
NOW = SimpleNamespace(cond=eager_cond, switch=eager_switch, while_loop=eager_loop, steps=eager_steps)

# --- random programs -------------------------------------------------------------------------------------------------

places = st.integers(0, 5)
calls = st.tuples(st.just("mix"), places, places)
datas = st.tuples(st.just("data"), places, st.integers(0, 2))
picks = st.tuples(st.just("at"), places, places)
maps = st.tuples(st.just("map"), places)
reads = st.tuples(st.just("recall"), places)
loops = st.tuples(st.sampled_from(("walk", "read", "past")), places, st.integers(1, 5), st.sampled_from((None, 0, 2)))
simple = st.one_of(calls, calls, datas, picks, maps, reads, loops)
uses = st.sampled_from(("none", "fold", "recall", "map", "run"))


def statements(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    block = st.lists(inner, min_size=0, max_size=3)
    return st.one_of(
        simple,
        st.tuples(st.just("cond"), places, block, block),
        st.tuples(st.just("switch"), places, block, block, block),
        st.tuples(st.just("loop"), places, block, st.integers(0, 4), st.booleans(), st.booleans(), uses),
    )


programs = st.lists(st.recursive(simple, statements, max_leaves=12), min_size=1, max_size=5)


def played(program: Sequence[Any], ops: Any, use: Any, x: Any, found: list[Any], rows: Any) -> Any:
    """Run statements on the values found so far; return the last."""
    found = list(found)

    def value(place: int) -> Any:
        return found[place % len(found)]

    def inner(block: Sequence[Any], more: Sequence[Any] = ()) -> Callable[[], Any]:
        return lambda: played(block, ops, use, x, [*found, *more], rows)

    for kind, *what in program:
        if kind == "mix":
            found.append(use.mix(value(what[0]), value(what[1])))
        elif kind == "data":
            found.append(use.mix(value(what[0]), x[what[1]]))
        elif kind == "map":
            rows = use.mix.map([value(what[0])] * 4, [*x, x[0]])
            found.append(rows[1])
        elif kind == "at":
            found.append(use.mix(rows.at(use.test(value(what[0]))[2]), value(what[1])))
        elif kind == "recall":
            found.append(use.recall(value(what[0]), rows)[1])
        elif kind in ("walk", "past", "read"):
            options: Any = {"memory": rows} if kind == "read" else {}
            init = (torch.tensor(0), value(what[0]))
            found.append(getattr(use, kind).loop(init, max_steps=what[1], until=what[2], **options)[1])
        elif kind == "cond":
            found.append(ops.cond(use.test(value(what[0]))[0], inner(what[1]), inner(what[2])))
        elif kind == "switch":
            found.append(ops.switch(use.test(value(what[0]))[1], list(map(inner, what[1:]))))
        else:
            place, block, most, tests, filters, how = what

            def body(state: Any, block: Any = block) -> Any:
                row, count, _, keep = state
                following, count, going, keep = use.step(row, count)
                return inner(block, [following])(), count, going, keep

            first = use.step(value(place), torch.tensor(0))
            init = (value(place), torch.tensor(0), first[2] if tests else True, False)
            collect = (lambda s: s[3]) if filters else None
            kept = ops.while_loop(lambda s: s[2], body, init, max_steps=most, collect=collect)
            last = kept.state[0]
            steps = None if how == "none" else ops.steps(kept, 0)
            if how in ("map", "run"):
                steps = use.mix.map(steps, ops.steps(kept, 0)) if how == "map" else use.fold.run(steps, last)[1]
                steps = [steps] if how == "run" else steps
            if how == "fold" or how == "map":
                last = use.fold.run(steps, last)[1]
            elif how != "none":
                last = use.recall(last, steps)[1]
            found.append(last)
    return found[-1]


class Program(bm.Model):
    """The programs of a list; a request names one."""

    def __init__(self, listed: Sequence[Any]) -> None:
        self.listed = listed
        made = cells(made_cell)
        self.mix, self.step, self.test, self.fold, self.walk = made.mix, made.step, made.test, made.fold, made.walk
        self.recall, self.read, self.past = made.recall, made.read, made.past

    def unfold(self, number: int, x: Any) -> Any:
        return run_program(self.listed[number], LAZY, self, x)


def run_program(program: Sequence[Any], ops: Any, use: Any, x: Any) -> Any:
    rows = use.mix.map([*x, x[0]], [*x, x[1]])
    return played(program, ops, use, x, [use.mix(x[0], x[1])], rows)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(programs, min_size=1, max_size=3), st.sampled_from(POLICIES), st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, PRIME)), min_size=1, max_size=8), st.booleans(),
)  # fmt: skip
def test_random_programs_give_what_plain_python_gives(
    listed: Sequence[Any], policy: str, workers: int, asked: Sequence[tuple[int, int]], in_one_call: bool
) -> None:
    """Watched at each step; or in compiled loops wherever there are any, in which tasks follow each other."""
    use, loops = cells(Eager), loops_everywhere() if in_one_call else nullcontext()
    with loops, bm.Engine(Program(listed), policy, threads=1, workers=workers) as engine:
        requests, checks = [], [CommandChecks(core, every=1) for core in schedulers(engine)]
        if not in_one_call:
            for driver, each in zip(engine.drivers, checks, strict=True):
                driver.record = each
        for which, seed in asked:
            x = torch.randint(0, PRIME, (3, 2), generator=torch.Generator().manual_seed(seed))
            requests.append({"number": which % len(listed), "x": x})
        for _ in range(2):  # the second time from templates
            answers = engine.map(requests, progress=False)
            for request, answer in zip(requests, answers, strict=True):
                wanted = run_program(listed[request["number"]], NOW, use, request["x"])
                assert answer.tolist() == wanted.tolist()
    assert_balanced(engine)
    assert [wrong for each in checks for wrong in each.wrong] == []


# --- what a loop collects, and how it ends ---------------------------------------------------------------------------


class Counted(nn.Module):
    """n, top -> n + 1, whether it is below top, whether it is even."""

    def forward(self, n: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = n + 1
        return n, n < top, n % 2 == 0


class State(NamedTuple):
    n: Any
    going: Any
    even: Any


class Counting(bm.Model):
    """Counts up to a number, and returns what its subclass wants of the loop."""

    collect: Any = None
    max_steps = 1000

    def __init__(self) -> None:
        self.count = bm.Cell(Counted(), max_batch=8)

    def loop(self, top: Any) -> Any:
        def body(state: State) -> State:
            return State(*self.count(state.n, top))

        return bm.while_loop(
            lambda state: state.going, body, State(0, True, False), max_steps=self.max_steps, collect=self.collect
        )

    def unfold(self, top: int) -> Any:
        return self.loop(top).n


class Numbers(Counting):
    """The numbers on the way."""

    def unfold(self, top: int) -> Any:
        return self.loop(top).n.steps


class EvenNumbers(Numbers):
    """The even numbers on the way."""

    collect = staticmethod(lambda state: state.even)


class Few(Counting):
    """As Counting, for at most three iterations."""

    max_steps = 3


class Once(bm.Model):
    """Doubles x as often as count goes up to 3, but not while `late` is as it was at first, which is data."""

    def __init__(self) -> None:
        self.step, self.mix = bm.Cell(Counted()), bm.Cell(Mix())

    def unfold(self, late: bool, x: Any) -> Any:
        def body(state: Any) -> Any:
            n, _, even, total = state
            total = bm.cond(even, lambda: self.mix(total, total), lambda: total)
            return (*self.step(n, 3), total)

        return bm.while_loop(lambda state: state[1], body, (0, True, late, x), max_steps=9)[3]


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_data_of_a_state_may_change_after_the_first_iteration(order: Sequence[bool]) -> None:
    """What changes it is a branch that the first iteration, whose choice is data, does not take."""
    mix, x = Eager(Mix()), torch.tensor([3, 5])

    def wanted(late: bool) -> list[int]:
        n, even, total = 0, late, x
        while n < 3:
            total = mix(total, total) if even else total
            n, even = n + 1, (n + 1) % 2 == 0
        return list(total.tolist())

    with bm.Engine(Once(), threads=1) as engine:
        assert [engine.submit({"late": late, "x": x}).result().tolist() for late in order] == [*map(wanted, order)]


class Modulo(nn.Module):
    def forward(self, n: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        n = (2 * n + 1) % by
        return n, n != 0


class Around(bm.Model):
    """A cell that divides by an integer, and is first called where nothing is known of it."""

    def __init__(self) -> None:
        self.turn = bm.Cell(Modulo())

    def unfold(self, by: int) -> Any:
        return bm.while_loop(lambda s: s[1], lambda s: self.turn(s[0], by), (1, True), max_steps=50)[0]


@pytest.mark.parametrize("example", [False, True])
def test_a_cell_that_divides_by_integers_may_be_first_called_in_a_loop(example: bool) -> None:
    model = Around()
    if example:
        model.example_request = 7
    with bm.Engine(model, threads=1) as engine:
        assert [int(engine.submit(by).result()) for by in (7, 3, 31)] == [0, 0, 0]


def test_a_loop_ends_by_its_value() -> None:
    with bm.Engine(Counting(), threads=1) as engine:
        assert engine.map([5, 1, 9, 2], progress=False) == [5, 1, 9, 2]


class Twin(nn.Module):
    """Two rows and a count -> two rows, the count less one, whether it is above zero. Each row is wide."""

    def forward(self, x: Tensor, y: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (3 * x + y + 1) % PRIME, (5 * y + x + 2) % PRIME, count - 1, count > 1


class Twins(bm.Model):
    """Both rows of the last of so many steps."""

    def __init__(self) -> None:
        self.step = bm.Cell(Twin(), max_batch=8)

    def unfold(self, x: Any, count: int) -> Any:
        last = bm.while_loop(
            lambda state: state[3], lambda state: self.step(*state[:3]), self.step(x, x, count), max_steps=50
        )
        return last[0], last[1]


def test_wide_outputs_of_one_node_are_answered_to_their_own_request() -> None:
    draw = torch.Generator().manual_seed(0)
    asked = [(torch.randint(0, PRIME, (64,), generator=draw), 1 + k * 7 % 12) for k in range(40)]
    requests, wanted = [{"x": x, "count": count} for x, count in asked], list[list[list[int]]]()
    for x, count in asked:
        rows = x[None], x[None]
        for _ in range(count):
            rows = Twin()(*rows, torch.tensor([count]))[:2]
        wanted.append([row[0].tolist() for row in rows])
    with bm.Engine(Twins(), threads=1) as engine:
        for _ in range(4):
            answers = engine.map(requests, progress=False)
            assert [[row.tolist() for row in answer] for answer in answers] == wanted


def test_a_loop_ends_after_its_most_iterations() -> None:
    with bm.Engine(Few(), threads=1) as engine:
        assert engine.map([5, 1, 9, 2], progress=False) == [3, 1, 3, 2]


def test_the_steps_of_a_loop_are_its_states_in_order() -> None:
    with bm.Engine(Numbers(), threads=1) as engine:
        for _ in range(3):
            assert [one.tolist() for one in engine.map([4, 1, 6], progress=False)] == [
                [1, 2, 3, 4], [1], [1, 2, 3, 4, 5, 6],
            ]  # fmt: skip


def test_a_loop_collects_only_what_it_is_asked_for() -> None:
    with bm.Engine(EvenNumbers(), threads=1) as engine:
        assert [one.tolist() for one in engine.map([4, 1, 7], progress=False)] == [[2, 4], [], [2, 4, 6]]


def test_what_a_loop_collects_streams_as_it_comes() -> None:
    with bm.Engine(EvenNumbers(), threads=1) as engine:
        for _ in range(3):
            assert list(engine.submit(9, stream=True)) == [2, 4, 6, 8]
            assert list(engine.submit(1, stream=True)) == []


def test_requests_of_one_shape_share_a_template_and_of_all_shapes_their_regions() -> None:
    with bm.Engine(Numbers(), threads=1) as engine:
        engine.map([3] * 8, progress=False)
        assert engine.drivers[0].templates.num_templates == 1
        begun = len(frames_of(engine).patterns)
        engine.map([3, 5, 7] * 8, progress=False)
        assert len(frames_of(engine).patterns) == begun


def frames_of(engine: bm.Engine) -> Any:
    return scheduler(engine).frames


# --- what is not chosen ----------------------------------------------------------------------------------------------


class Experts(bm.Model):
    """One of three experts, as a value says."""

    def __init__(self) -> None:
        self.test = bm.Cell(Test())
        self.experts = [bm.Cell(Mix()) for _ in range(3)]

    def unfold(self, x: Any) -> Any:
        index = self.test(x)[1]
        return bm.switch(index, [lambda cell=cell: cell(x, x) for cell in self.experts])


def test_what_is_not_chosen_does_not_run() -> None:
    requests = [torch.tensor([n, 0]) for n in range(30)]
    with bm.Engine(Experts(), threads=1) as engine:
        engine.map(requests, progress=False)
        before = engine.stats.cells
        answers = engine.map(requests, progress=False)
        assert engine.stats.cells - before <= 3 * 30, "a row of the data, the test, and one expert"
    wanted = [Mix()(row[None], row[None])[0].tolist() for row in requests]
    assert [one.tolist() for one in answers] == wanted


class Bound(Experts):
    """As Experts, with the branches' arguments bound to them."""

    def unfold(self, x: Any) -> Any:
        return bm.switch(self.test(x)[1], [partial(cell, x, x) for cell in self.experts])


def test_a_branch_may_be_a_partial_function() -> None:
    requests = [torch.tensor([n, 0]) for n in range(8)]
    with bm.Engine(Bound(), threads=1) as engine:
        for _ in range(2):
            answers = engine.map(requests, progress=False)
            assert [one.tolist() for one in answers] == [Mix()(row[None], row[None])[0].tolist() for row in requests]
        assert engine.drivers[0].templates.num_templates == 1


# --- who goes first --------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """x, gate -> x. Holds its worker for as long as the gate of the test is shut, if a row's gate is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.entered = threading.Event(), threading.Event()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if bool((gate != 0).any()):
            self.entered.set()
            assert self.opened.wait(60)
        return x.clone()


class Expert(nn.Module):
    """A row -> a row, in exact arithmetic."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return (self.number * x + 7) % PRIME


class Layers(bm.Model):
    """Three layers, each of one of three experts: as a value says, or the first. A gate is after the first layer."""

    def __init__(self) -> None:
        self.gated = bm.Cell(Gated(), max_batch=64)
        self.tests = [bm.Cell(Test(), max_batch=64) for _ in range(3)]
        self.experts = [[bm.Cell(Expert(9 * k + n + 2), max_batch=64) for n in range(3)] for k in range(3)]

    def unfold(self, x: Any, gate: int = 0, decides: bool = True) -> Any:
        for layer, (test, experts) in enumerate(zip(self.tests, self.experts, strict=True)):
            if decides:
                x = bm.switch(test(x)[1], [lambda cell=cell, x=x: cell(x) for cell in experts])
            else:
                x = experts[0](x)
            if layer == 0:
                x = self.gated(x, gate)
        return x

    def alone(self, x: Tensor, decides: bool = True) -> list[int]:
        for test, experts in zip(self.tests, self.experts, strict=True):
            which = int(test.module(x[None])[1]) if decides else 0
            x = experts[which].module(x)
        return x.tolist()


def held(engine: bm.Engine, model: Layers, requests: Sequence[dict[str, Any]]) -> tuple[list[list[int]], int]:
    """Let requests wait behind one that holds the worker; return their answers, and how many steps they took."""
    gated = model.gated.module
    gated.opened.clear()
    gated.entered.clear()
    first = engine.submit({"x": torch.tensor([1, 2]), "gate": 1})
    assert gated.entered.wait(60)
    answers = engine.submit_many(requests)
    before = engine.stats.steps
    gated.opened.set()
    found = [answer.result(60).tolist() for answer in answers]
    assert first.result(60).tolist() == model.alone(torch.tensor([1, 2]))
    return found, engine.stats.steps - before


@pytest.mark.parametrize("policy", ["auto", "cellular"])
def test_requests_at_the_same_place_stay_together(policy: str) -> None:
    model, rows = Layers(), list(torch.randint(0, PRIME, (60, 2), generator=torch.Generator().manual_seed(0)))
    with bm.Engine(model, policy, threads=1) as engine:
        for _ in range(2):
            found, steps = held(engine, model, [{"x": row} for row in rows])
            assert found == [model.alone(row) for row in rows]
        # Each layer's test once, each of its experts, and the gate; and what the first request does, ahead of them.
        assert steps <= 3 * (1 + 3) + 1 + 9


@pytest.mark.parametrize("repeat", [True, False])
def test_newcomers_begin_at_once_if_they_can_join_others_later(repeat: bool) -> None:
    kinds = SimpleNamespace(decide={True}, repeat=repeat, num_models=1, has_deadlines=False)
    cells = [CellType(TypeId(k), f"cell {k}", (), (), (4,)) for k in range(2)]
    view: Any = SimpleNamespace(kinds=kinds, cells=cells, num_in_cohort=0, waiting=lambda n: np.arange(n))
    policy = AutoPolicy()
    assert policy.begins_on_arrival(view)
    view.num_in_cohort = 3
    assert policy.begins_on_arrival(view) == repeat
    assert len(policy.admit(view).begin) == (8 if repeat else 0)
    assert policy.begins_together(view) == (None if repeat else 8)
    view.num_in_cohort = 0  # chunks of sequences may still be in flight
    assert len(policy.admit(view).begin) == 8, "two full batches"


class Watching(AutoPolicy):
    """`auto`, of which the test sees when it is asked, and that it sees nothing impossible."""

    asked = 0

    def rank(self, view: Any) -> Sequence[Any]:
        self.asked += 1
        assert (view.requests.left >= 0).all()
        return super().rank(view)


def test_the_default_policy_takes_up_what_values_began_when_other_requests_come() -> None:
    model, policy = Layers(), Watching()
    rows = [torch.tensor([n, 3 * n + 1]) for n in range(20)]
    with bm.Engine(model, policy, threads=1) as engine:
        found, _ = held(engine, model, [{"x": row} for row in rows])
        assert found == [model.alone(row) for row in rows]
        assert not policy.asked, "nothing is known that a policy could rank by"
        for _ in range(2):
            found, _ = held(engine, model, [{"x": row, "decides": n % 2 == 0} for n, row in enumerate(rows)])
            assert found == [model.alone(row, decides=n % 2 == 0) for n, row in enumerate(rows)]
        assert policy.asked
    assert_balanced(engine)


# --- errors ----------------------------------------------------------------------------------------------------------


class Outside(bm.Model):
    """Reads an element, or begins a branch, that is not there."""

    def __init__(self) -> None:
        self.mix, self.count = bm.Cell(Mix()), bm.Cell(Counted())

    def unfold(self, what: str, index: int) -> Any:
        n, _, _ = self.count(index, 0)
        row = torch.tensor([1, 2])
        if what == "at":
            return self.mix(self.mix.map([row] * 3, [row] * 3).at(n), row)
        return bm.switch(n, [lambda: self.mix(row, row)] * 3)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("at", r"test_decisions.py:\d+, `return .*\.at\(n\), row\)`: `at` got index {} for a sequence of 3"),
        ("switch", r"test_decisions.py:\d+, `return bm.switch\(n, .*`: `switch` got index {} for 3"),
    ],
)
@pytest.mark.parametrize("index", [-5, 2, 7, 1 << 40])
def test_an_index_without_an_element_is_an_error_of_that_request_alone_and_names_the_line(
    what: str, said: str, index: int
) -> None:
    with bm.Engine(Outside(), threads=1) as engine:
        wrong = engine.submit({"what": what, "index": index})
        right = [engine.submit({"what": what, "index": k}) for k in (-1, 0, 1)]
        with pytest.raises(InvalidRequestError, match=said.format(index + 1)):
            wrong.result(60)
        assert all(len(answer.result(60)) == 2 for answer in right)
    assert_balanced(engine)


def test_a_loop_without_an_end_is_an_error_of_that_request_alone() -> None:
    class Endless(Counting):
        max_steps = 1 << 40

    with bm.Engine(Endless(), threads=1, max_nodes=50) as engine:
        endless, short = engine.submit(1 << 30), engine.submit(8)
        with pytest.raises(NodeLimitError, match="does its while_loop end"):
            endless.result(60)
        assert short.result(60) == 8
    assert_balanced(engine)


class Raises(nn.Module):
    """n -> n + 1. Raises at 3 if n began below 10."""

    def forward(self, n: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if bool((n == 3).any()):
            raise ValueError("three")
        return n + 1, n + 1 < top, n % 2 == 0


def test_a_cell_that_raises_in_an_iteration_fails_its_own_request() -> None:
    class Failing(Counting):
        def __init__(self) -> None:
            self.count = bm.Cell(Raises(), max_batch=8)

        def unfold(self, first: int, top: int) -> Any:
            def body(state: State) -> State:
                return State(*self.count(state.n, top))

            return bm.while_loop(lambda s: s.going, body, State(first, True, False), max_steps=50).n

    with bm.Engine(Failing(), threads=1) as engine:
        asked = [engine.submit({"first": first, "top": 12}) for first in (0, 4, 1, 9, 3)]
        for answer, first in zip(asked, (0, 4, 1, 9, 3), strict=True):
            if first <= 3:
                with pytest.raises(CellError, match="three"):
                    answer.result(60)
            else:
                assert answer.result(60) == 12
    assert_balanced(engine)


def test_cancelled_and_late_requests_leave_nothing_behind() -> None:
    with bm.Engine(Counting(), threads=1) as engine:
        engine.map([3, 4], progress=False)
        long = [engine.submit(900) for _ in range(6)]
        late = engine.submit(950, deadline_ms=1)
        short = [engine.submit(n) for n in (2, 3)]
        given_up = [answer for answer in long[:3] if answer.cancel()]
        for answer in given_up:
            assert isinstance(answer.exception(60), CancelledError)
        assert [answer.result(60) for answer in short] == [2, 3]
        assert [answer.result(60) for answer in long[3:]] == [900] * 3
        assert isinstance(late.exception(60), DeadlineError)
        frames = frames_of(engine)
        assert not frames.slots
        assert not num_waiting_for_values(frames)
    assert_balanced(engine)


class Wrong(bm.Model):
    """Uses decisions wrongly in one of several ways."""

    def __init__(self, what: str) -> None:
        self.test, self.mix, self.count = bm.Cell(Test()), bm.Cell(Mix()), bm.Cell(Counted())
        self.what = what

    def unfold(self, row: Any) -> Any:
        flag, three, _ = self.test(row)
        y = self.mix(row, row)
        match self.what:
            case "structure":
                return bm.cond(flag, lambda: (y, y), lambda: y)
            case "shape":
                return bm.cond(flag, lambda: y, lambda: three)
            case "data":
                return bm.cond(flag, lambda: 1, lambda: 2)
            case "number":
                return bm.cond(flag, lambda: y, lambda: 1)
            case "pred":
                return bm.cond(y, lambda: y, lambda: y)
            case "sequence":
                return bm.cond(flag, lambda: self.mix.map([row], [row]), lambda: y)
            case "leak":
                inside: list[Any] = []
                bm.cond(flag, lambda: inside.append(self.mix(y, y)) or y, lambda: y)
                return self.mix(inside[0], y)
            case "state":
                return bm.while_loop(lambda s: s[1], lambda s: (s[0], flag, s[1]), (y, flag), max_steps=3)
            case "row":
                return bm.while_loop(lambda s: flag, lambda s: self.mix(y, y), list(range(64)), max_steps=3)
            case "changes":
                return bm.while_loop(lambda s: s[1], lambda s: (s[0] + 1, flag), (0, flag), max_steps=3)
            case "index":
                return self.mix.map([row], [row]).at(y)
            case "steps":
                out = bm.while_loop(lambda s: s[1], lambda s: (self.mix(s[0], y), flag), (y, flag), max_steps=3)
                return self.mix.map(out[0].steps, [row])
            case "inner steps":
                return bm.cond(flag, lambda: bm.while_loop(
                    lambda s: s[1], lambda s: (self.mix(s[0], y), flag), (y, flag), max_steps=3
                )[0].steps[0], lambda: y)  # fmt: skip
            case _:
                return bm.switch(three, [])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("structure", "true_fn returns tuple.*false_fn one value"), ("shape", r"false_fn returns int64\[\] where"),
        ("data", "returns 1 and false_fn 2"), ("number", r"data in place of a computed value: .*\(\)"),
        ("pred", "one bool or integer that a cell computes"),
        ("sequence", "returns a sequence"), ("leak", "used outside it"), ("state", "keeps its structure"),
        ("row", r"list\(of 64, each one value\).*returns one value; .*give a row of numbers as an array"),
        ("changes", "changes from 0 to 1 in Python"), ("index", "one bool or integer"), ("none", "no branches"),
        ("steps", "collected by the same loop"), ("inner steps", "length of what a while_loop collects"),
    ],
)  # fmt: skip
def test_wrong_use_is_an_error_that_names_the_line(what: str, said: str) -> None:
    with bm.Engine(Wrong(what), threads=1) as engine:
        with pytest.raises((ModelError, InvalidRequestError), match=said) as raised:
            engine.submit(torch.tensor([1, 2])).result(60)
        assert "test_decisions.py:" in str(raised.value)


def test_a_generator_function_is_told_to_decide_in_python() -> None:
    class Waits(Counting):
        def unfold(self, top: int) -> Any:
            n, going, _ = self.count(0, top)
            yield n
            return bm.cond(going, lambda: n, lambda: n)

    with bm.Engine(Waits(), threads=1) as engine, pytest.raises(ModelError, match="with `yield` cannot use cond"):
        engine.submit(3).result(60)


def test_decisions_are_made_inside_unfold_only() -> None:
    with pytest.raises(ModelError, match="was called outside"):
        bm.while_loop(lambda s: s, lambda s: s, 0, max_steps=1)


# --- sequences -------------------------------------------------------------------------------------------------------


class Totals(bm.Model):
    """The sum of a sequence's numbers; one that would be odd is left as it was."""

    def __init__(self) -> None:
        self.mix, self.test = bm.Cell(Mix()), bm.Cell(Test())

    def unfold(self, x: Any) -> Any:
        return self.unfold_chunk(x, None)[0]

    def unfold_chunk(self, x: Any, state: Any) -> Any:
        before = self.mix(x, x) if state is None else state
        mixed = self.mix(before, x)
        even = self.test(mixed)[0]
        after = bm.cond(even, lambda: self.mix(mixed, mixed), lambda: before)
        return (after, before), after


def test_a_sequence_keeps_what_decisions_made_of_its_state() -> None:
    use = cells(Eager)
    chunks = [torch.tensor([n * n % 17, 3 * n]) for n in range(12)]
    wanted, state = [], None
    for x in chunks:
        before = use.mix(x, x) if state is None else state
        mixed = use.mix(before, x)
        state = use.mix(mixed, mixed) if use.test(mixed)[0] else before
        wanted.append((state.tolist(), before.tolist()))
    with bm.Engine(Totals(), threads=1) as engine:
        sequences = [engine.open_sequence() for _ in range(3)]
        for x, expected in zip(chunks, wanted, strict=True):
            answers = [sequence.submit(x) for sequence in sequences]
            assert [tuple(part.tolist() for part in answer.result(60)) for answer in answers] == [expected] * 3
        for sequence in sequences:
            sequence.close()
    assert_balanced(engine)


# --- beside other things that models do -------------------------------------------------------------------------------


class Up(nn.Module):
    """n -> n + 1."""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


class Pair(nn.Module):
    """n -> a row of n and 2n."""

    def forward(self, n: Tensor) -> Tensor:
        return torch.stack((n, 2 * n), -1)


class AfterLoop(bm.Model):
    """The end of a `loop` with `until` decides, and is what a branch returns."""

    def __init__(self) -> None:
        self.up, self.pair = bm.Cell(Up(), host_outputs=(0,)), bm.Cell(Pair())
        self.mix, self.test = bm.Cell(Mix()), bm.Cell(Test())

    def unfold(self, first: int) -> Any:
        n = self.up.loop(first, until=7, max_steps=50)
        row = self.pair(n)
        even, three, _ = self.test(row)
        return bm.cond(even, lambda: (self.mix(row, row), n), lambda: (row, n)), bm.switch(three, [lambda: n] * 3)


def test_the_end_of_a_loop_with_until_can_be_decided_on_and_returned() -> None:
    with bm.Engine(AfterLoop(), threads=1) as engine:
        for _ in range(3):
            for (row, n), again in engine.map([1, 3, 6], progress=False):
                assert (row.tolist(), n, again) == ([7, 14], 7, 7)


def test_a_saved_model_decides_as_before(tmp_path: Path) -> None:
    bm.save(Numbers(), tmp_path / "numbers", example_request=3)
    with bm.Engine(bm.load(tmp_path / "numbers"), threads=1) as engine:
        assert [one.tolist() for one in engine.map([3, 1], progress=False)] == [[1, 2, 3], [1]]


class Averaged(nn.Module):
    """rows, number, x -> the sum of the rows and x."""

    def forward(self, rows: Tensor, number: Tensor, x: Tensor) -> Tensor:
        there = torch.arange(rows.shape[1]) < number.unsqueeze(-1)
        return (rows * there.unsqueeze(-1)).sum(1) + x


class ReadsMemory(bm.Model):
    """A cell with a memory: before a decision, or inside one."""

    def __init__(self, *, inside: bool) -> None:
        self.mix, self.test = bm.Cell(Mix()), bm.Cell(Test())
        self.sum = bm.Cell(Averaged(), memory="rows")
        self.inside = inside

    def unfold(self, x: Any) -> Any:
        rows = self.mix.map([x, x], [x, x])
        even = self.test(self.mix(x, x))[0]
        if self.inside:
            return bm.cond(even, lambda: self.sum(rows, x), lambda: self.mix(x, x))
        total = self.sum(rows, x)
        return bm.cond(even, lambda: self.mix(total, total), lambda: total)


@pytest.mark.parametrize("inside", [False, True])
def test_a_memory_is_read_before_decisions_and_inside_them(inside: bool) -> None:
    with bm.Engine(ReadsMemory(inside=inside), threads=1) as engine:
        for x in (torch.tensor([3, 4]), torch.tensor([2, 3]), torch.tensor([3, 4])):
            mixed = Mix()(x[None], x[None])[0]
            is_even, total = mixed.sum() % 2 == 0, 2 * mixed + x
            wanted = (
                (total if inside else Mix()(total[None], total[None])[0]) if is_even else mixed if inside else total
            )
            assert engine.submit(x).result(60).tolist() == wanted.tolist()


class Changing(bm.Model):
    """Changes its data between two branches that read it."""

    def __init__(self) -> None:
        self.test, self.mix = bm.Cell(Test()), bm.Cell(Mix())

    def unfold(self, x: Any) -> Any:
        even = self.test(self.mix(x, x))[0]
        row, listed = torch.tensor([1, 2]), [1, 2]
        first = bm.cond(even, lambda: self.mix(row, x), lambda: self.mix(x, listed))
        row += 5
        listed[0] = 6
        second = bm.cond(even, lambda: self.mix(row, x), lambda: self.mix(x, listed))
        return first, second


def test_data_that_the_function_changes_is_read_as_it_was_at_each_call() -> None:
    with bm.Engine(Changing(), threads=1) as engine:
        for x in (torch.tensor([1, 2]), torch.tensor([2, 2]), torch.tensor([1, 2]), torch.tensor([2, 2])):
            even = bool(Mix()(x[None], x[None]).sum() % 2 == 0)
            wanted = [
                (Mix()(row[None], x[None]) if even else Mix()(x[None], listed[None]))[0].tolist()
                for row, listed in (
                    (torch.tensor([1, 2]), torch.tensor([1, 2])), (torch.tensor([6, 7]), torch.tensor([6, 2])),
                )
            ]  # fmt: skip
            assert [part.tolist() for part in engine.submit(x).result(60)] == wanted


class Ordered(Counting):
    """A loop whose state is a mapping of another class than dict."""

    def unfold(self, top: int) -> Any:
        def body(state: Any) -> Any:
            n, going, _ = self.count(state["n"], top)
            return OrderedDict(n=n, going=going)

        return bm.while_loop(lambda s: s["going"], body, OrderedDict(n=0, going=True), max_steps=100)["n"]


def test_a_state_may_be_any_mapping() -> None:
    with bm.Engine(Ordered(), threads=1) as engine:
        assert engine.map([4, 1], progress=False) == [4, 1]


def test_regions_are_forgotten_once_they_are_many_and_no_request_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmaker.core.frames.MOST_CODE", 0)
    with bm.Engine(EvenNumbers(), threads=1) as engine:
        for top in (3, 6, 2, 7, 6):
            assert engine.submit(top).result(60).tolist() == list(range(2, top + 1, 2))
            words = code_words(frames_of(engine))
        assert engine.submit(5).result(60).tolist() == [2, 4]
        assert code_words(frames_of(engine)) == words, "what was there before is gone"
    assert_balanced(engine)
