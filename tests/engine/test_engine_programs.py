"""Random programs of every form at once, through the engine and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import assert_balanced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError
from batchmaker.graph.values import Value, ValueSequence
from batchmaker.model.scope import OpenLoop, current_scope

WIDTH = 4
FORMS = ("node", "run", "map", "tree", "fed_tree", "loop", "ending_loop", "ending_run")


class Combine(nn.Module):
    """a, b -> tanh(A a + B b): anything may be fed to it, as state or as input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.a(a) + self.b(b))


class CombineThree(nn.Module):
    """x, left, right -> tanh(X x + combine(left, right)): a tree node with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(WIDTH, WIDTH)
        self.combine = Combine()

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(self.x(x) + self.combine(left, right))


class Once(nn.Module):
    """h -> sin(A h)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.sin(self.a(h))


torch.manual_seed(7)
KINDS = {"fed_tree": CombineThree, "loop": Once, "ending_loop": Once}
MODULES: dict[str, nn.Module] = {name: KINDS.get(name, Combine)() for name in FORMS}
START = torch.linspace(-1, 1, WIDTH)


def ends(values: Any) -> Any:
    """The stop test of every loop that a value ends: about one step in two ends it."""
    return values[:, 0] * 20 % 2 < 1


def run_until(cell: bm.Cell, sequence: list[Value], init: Value) -> Value:
    """Add a chain over a sequence that ends where `ends` says so, as `Cell.loop` does for one without."""
    scope = current_scope.get()
    assert scope is not None
    known = scope.types.type_of(cell) or scope.types.learn(cell, (sequence[0].spec, init.spec))
    nodes = np.array([value.node for value in sequence])
    column = ValueSequence(nodes, sequence[0].of, holds=sequence)
    (end,) = scope.recorder.run(known, [column], [init], open_ended=True)
    scope.types.in_runs(known, 1)
    first = int(end.steps.nodes[0])
    scope.loops[first] = OpenLoop(first, end.node, ends)
    return end


def children_of(count: int) -> list[list[int]]:
    """A DAG of `count` inner nodes over `count` leaves: the first takes a leaf twice, others a leaf and a node."""
    return [[i, i + count - 1 if i else 0] for i in range(count)]


class Programs(bm.Model):
    """A request is (plan, waits): a list of (form, count, seed), each of which adds values that later ones pick from.

    waits: wait for the newest value after each.
    """

    def __init__(self) -> None:
        for name, module in MODULES.items():
            setattr(self, name, bm.Cell(module, max_batch=6))

    def unfold(self, request: Any) -> Generator[Any, Any, Any]:
        plan, waits = request
        values: list[Any] = [self.node(START, START)]
        for form, count, seed in plan:
            picked = [values[(seed + 7 * i) % len(values)] for i in range(count)]
            start = values[seed % len(values)]
            if form == "node":
                values.append(self.node(picked[-1], start))
            elif form == "run":
                values.extend(self.run.run(picked, start).steps)
            elif form == "map":
                values.extend(self.map.map(picked, picked[::-1]))
            elif form == "tree":
                values.extend(self.tree.tree(children_of(count), self.map.map(picked, picked)))
            elif form == "fed_tree":
                leaves = self.map.map(picked, picked)
                given = picked if seed % 2 else torch.outer(torch.arange(count), START)
                values.extend(self.fed_tree.tree(children_of(count), leaves, given))
            elif form == "loop":
                values.append(self.loop.loop((start,), max_steps=count))
            elif form == "ending_loop":
                values.append(self.ending_loop.loop((start,), until=ends, max_steps=count))
            else:
                values.append(run_until(self.ending_run, picked, start))
            if waits:
                yield values[-1]
        return values


@torch.no_grad()
def call(name: str, *arguments: Tensor) -> Tensor:
    result: Tensor = MODULES[name](*(argument[None] for argument in arguments))[0]
    return result


def ended(form: str, xs: list[Tensor], h: Tensor) -> tuple[Tensor, int]:
    """Where a loop that takes at most one step per element ends, and after how many."""
    for taken, x in enumerate(xs, 1):
        h = call(form, x, h) if form == "ending_run" else call(form, h)
        if form != "loop" and ends(h[None]):
            return h, taken
    return h, len(xs)


def evaluated(plan: Any) -> list[Tensor]:
    """What a program gives, in plain PyTorch."""

    def tree(name: str, picked: list[Tensor], *given: list[Tensor]) -> list[Tensor]:
        nodes = [call("map", x, x) for x in picked]
        for i, (left, right) in enumerate(children_of(len(picked))):
            nodes.append(call(name, *(column[i] for column in given), nodes[left], nodes[right]))
        return nodes[len(picked) :]

    values = [call("node", START, START)]
    for form, count, seed in plan:
        picked = [values[(seed + 7 * i) % len(values)] for i in range(count)]
        h = values[seed % len(values)]
        if form == "node":
            values.append(call("node", picked[-1], h))
        elif form == "run":
            for x in picked:
                h = call("run", x, h)
                values.append(h)
        elif form == "map":
            values.extend(call("map", x, y) for x, y in zip(picked, picked[::-1], strict=True))
        elif form == "tree":
            values.extend(tree("tree", picked))
        elif form == "fed_tree":
            values.extend(tree("fed_tree", picked, picked if seed % 2 else [START * i for i in range(count)]))
        else:
            values.append(ended(form, picked, h)[0])
    return values


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[int, bm.Engine]]:
    """Engines by number of workers, kept for all examples."""
    with bm.Engine(Programs(), threads=1) as one, bm.Engine(Programs(), threads=1, workers=2) as two:
        yield {1: one, 2: two}


@pytest.mark.slow
@settings(max_examples=60)
@given(
    plans=st.lists(
        st.lists(st.tuples(st.sampled_from(FORMS), st.integers(1, 5), st.integers(0, 99)), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    ),
    workers=st.integers(1, 2),
    waiting=st.integers(0, 255),
)
def test_any_mix_of_forms_equals_plain_pytorch(engines: Any, plans: Any, workers: int, waiting: int) -> None:
    requests = [(plan, bool(waiting >> number & 1)) for number, plan in enumerate(plans)]
    found = engines[workers].map(requests)
    assert_balanced(engines[workers])
    for plan, values in zip(plans, found, strict=True):
        torch.testing.assert_close(values, evaluated(plan), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["ending_loop", "ending_run"])
def test_the_loops_of_the_random_programs_end_at_any_step(form: str) -> None:
    """Else the property above would say little of open-ended loops."""
    values = evaluated([("run", 5, seed) for seed in range(4)])
    taken = {ended(form, values[i : i + 5], values[i])[1] for i in range(len(values) - 5)}
    assert {1, 2} <= taken
    assert max(taken) > 3


def test_the_steps_of_a_loop_that_are_asked_for_too_late_are_an_error_and_in_time_are_complete() -> None:
    def late(m: Any, early: bool) -> Iterator[Any]:
        n, h = m.walk.loop((0, [0.0]), until=4, max_steps=8)
        steps = h.steps if early else None
        yield n
        return [n.steps, steps if early else h.steps]

    class Loops(bm.Model):
        def __init__(self) -> None:
            self.walk = bm.Cell(Walk(), host_outputs=(0,))

        def unfold(self, early: bool) -> Any:
            return (yield from late(self, early))

    class Walk(nn.Module):
        def forward(self, n: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return n + 1, h + n[:, None]

    with bm.Engine(Loops(), threads=1) as engine:
        words, states = engine.submit(True).result(60)
        assert (words.tolist(), states.tolist()) == ([1, 2, 3, 4], [[0.0], [1.0], [3.0], [6.0]])
        with pytest.raises(ModelError, match="before the next `yield`"):
            engine.submit(False).result(60)
    assert_balanced(engine)
