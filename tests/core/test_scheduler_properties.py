"""Properties over random programs, arrivals, devices and mishaps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import ChunkProgram, Harness, Program, cell_type, host

from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType
from batchmaker.policies import POLICIES, make
from batchmaker.policies.ageing import PATIENCE

ENCODER, DECODER, LEAF, INNER, JOIN = range(5)
CELL_POLICIES = sorted(POLICIES.keys() - {"learned"})  # which needs a file


def make_cells(min_batch: int, max_batch: int, rng: random.Random) -> list[CellType]:
    """Types that share row pools and differ in arity, with priorities at random."""
    sizes = tuple(sorted({min_batch, max_batch}))
    shapes = [("encoder", 2, 1), ("decoder", 2, 2), ("leaf", 1, 2), ("inner", 4, 2), ("join", 3, 1)]
    return [
        cell_type(i, name, inputs, outputs, sizes, rng.randrange(3)) for i, (name, inputs, outputs) in enumerate(shapes)
    ]


def random_program(cells: list[CellType], seed: int, *, size: int, waits: bool, given: Sequence[Any] = ()) -> Program:
    """A program of `size` calls: runs, loops, trees, DAGs and single nodes that feed one another. Runs over sequences
    may be open-ended, and tree nodes may take inputs of their own. given: values that are there before."""

    def program(recorder: Recorder) -> Any:
        rng = random.Random(seed)
        values: list[Any] = list(given)
        sequences: list[Any] = []

        def argument() -> Any:
            return rng.choice(values) if values and rng.random() < 0.8 else host(rng.randrange(1 << 40))

        def numbers(length: int) -> Any:
            return host(*(rng.randrange(1 << 40) for _ in range(length)))

        def sequence(longest: int) -> Any:
            return rng.choice(sequences) if sequences and rng.random() < 0.5 else numbers(rng.randint(1, longest))

        for _ in range(size):
            kind = rng.randrange(6)
            if kind == 0:
                cell = rng.choice(cells)
                values += recorder.node(cell, [argument() for _ in cell.inputs])
            elif kind == 1:
                given_sequence = sequence(7)
                init = None if rng.random() < 0.5 else [argument()]
                open_ended = rng.random() < 0.3
                ends = recorder.run(cells[ENCODER], [given_sequence], init, open_ended=open_ended)
                values += ends
                if open_ended:
                    recorder.fetch(ends[0].steps)
                else:
                    sequences += [end.steps if rng.random() < 0.7 else end.steps[::-1] for end in ends]
            elif kind == 2:
                init = None if rng.random() < 0.3 else [argument(), argument()]
                ends = recorder.run(cells[DECODER], [], init, max_steps=rng.randint(1, 6), open_ended=True)
                recorder.fetch(ends[0].steps)
                values += ends
            elif kind == 3:
                given_sequence = sequence(6)
                sequences += recorder.map(cells[LEAF], [given_sequence])
            elif kind == 4:
                leaves = recorder.map(cells[LEAF], [numbers(rng.randint(1, 6))])
                count = len(leaves[0])
                if rng.random() < 0.5 and count > 1:  # a tree: every child has one parent
                    free, children = list(range(count)), []
                    while len(free) > 1:
                        i = rng.randrange(len(free) - 1)
                        children.append([free[i], free[i + 1]])
                        free[i : i + 2] = [count + len(children) - 1]
                else:
                    children = [[rng.randrange(count + i), rng.randrange(count + i)] for i in range(rng.randint(1, 6))]
                if rng.random() < 0.5:
                    sequences += recorder.tree(cells[INNER], np.array(children), leaves, [])
                else:
                    given_numbers = numbers(len(children))
                    sequences += recorder.tree(cells[JOIN], np.array(children), leaves[:1], [given_numbers])
            elif kind == 5 and sequences:
                values.append(rng.choice(rng.choice(sequences)))
            if waits and (values or sequences) and rng.random() < 0.4:
                asked = [rng.choice(values + sequences)] if rng.random() < 0.8 else [*values[:2], *sequences[:1]]
                yield [value for value in asked if not getattr(value, "ends_open_loop", False)]
                del asked
            if rng.random() < 0.3:
                rng.shuffle(values)
                del values[: len(values) // 2]
            if rng.random() < 0.3:
                rng.shuffle(sequences)
                del sequences[: len(sequences) // 2]
        return [value for value in values + sequences if rng.random() < 0.5]

    return program


def random_chunk(cells: list[CellType], seed: int, *, size: int, waits: bool) -> ChunkProgram:
    """A random program on what its sequence has kept, which keeps some of what it returns and of what it was given."""

    def program(recorder: Recorder, kept: list[list[Any]]) -> Any:
        given = [value for outputs in kept for value in outputs]
        found = yield from random_program(cells, seed, size=size, waits=waits, given=given)(recorder)
        rng = random.Random(seed + 1)
        chosen = [value for value in [*given, *found] if rng.random() < 0.5 and not getattr(value, "open_ended", False)]
        parts = [value.nodes if hasattr(value, "nodes") else np.array([value.node]) for value in chosen]
        recorder.keep(np.unique(np.concatenate([np.empty(0, np.int64), *parts])))
        return [
            value for value in found if not hasattr(value, "_steps") or value.node >= len(kept) or rng.random() < 0.5
        ]

    return program


@st.composite
def settings_of_a_run(draw: Any) -> dict[str, Any]:
    max_batch = draw(st.integers(1, 8))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "max_batch": max_batch,
        "min_batch": draw(st.integers(1, max_batch)),
        "max_steps": draw(st.sampled_from([1, 2, 5, 40])),
        "budget_ms": draw(st.sampled_from([None, None, 1.0, 3000.0])),
        "loops_ahead": draw(st.booleans()),
        "task_s": draw(st.sampled_from([0.0, 0.2, 1.0])),
        "most_told": draw(st.sampled_from([1, 1, 3, 40])),
        "num_workers": draw(st.integers(1, 3)),
        "run_ahead": draw(st.integers(0, 2)),
        "num_requests": draw(st.integers(1, 12)),
        "size": draw(st.integers(0, 8)),
        "waits": draw(st.booleans()),
        "mishaps": draw(st.booleans()),
        "priorities": draw(st.sampled_from([(0,), (3,), (0, 0, 1), (-1, 0, 1, 2)])),
        "spread": draw(st.sampled_from([0, 5, 30])),
        "num_sequences": draw(st.integers(0, 3)),
        "num_chunks": draw(st.integers(1, 5)),
        "policy": draw(st.sampled_from(CELL_POLICIES)),
        "patience": draw(st.sampled_from([1, 5, PATIENCE])),
    }


def play(run: dict[str, Any]) -> Harness:
    rng = random.Random(run["seed"])
    cells = make_cells(run["min_batch"], run["max_batch"], rng)
    fails = (lambda batch: (rng.randrange(batch),) if rng.random() < 0.05 else ()) if run["mishaps"] else lambda _: ()
    options: dict[str, Any] = {} if run["policy"] == "depth" else {"max_steps": run["max_steps"]}
    if run["policy"] == "cellular" and run.get("budget_ms") is not None:
        options = {"budget_ms": run["budget_ms"]}
    harness = Harness(
        cells,
        policy=lambda: make(run["policy"], **options),
        reports=lambda: rng.randint(1, run.get("most_told", 1)),
        tells_time="budget_ms" in options,
        loops_ahead=run.get("loops_ahead", False),
        task_s=run.get("task_s", 0.0),
        patience=run["patience"],
        num_workers=run["num_workers"],
        run_ahead=run["run_ahead"],
        duration=lambda: rng.choice([1.0, 1.0, 2.0, 5.0]),
        mode=lambda: rng.choice(["start", "split", "finish"]),
        fails=fails,
    )
    for request in range(run["num_requests"]):
        at_s = float(rng.randint(0, run["spread"]))
        waits = run["waits"] and rng.random() < 0.6
        program = random_program(cells, rng.randrange(2**32), size=run["size"], waits=waits)
        deadline_s = at_s + rng.randint(1, 20) if run["mishaps"] and rng.random() < 0.2 else None
        harness.arrive(request, program, at_s, deadline_s, rng.choice(run["priorities"]))
        if run["mishaps"] and rng.random() < 0.3:
            harness.cancel(request, at_s + rng.randint(0, 15))
    for sequence in range(run["num_sequences"]):
        chunks = []
        for number in range(run["num_chunks"]):
            request = 1000 * (sequence + 1) + number
            waits = run["waits"] and rng.random() < 0.6
            program = random_chunk(cells, rng.randrange(2**32), size=run["size"], waits=waits)
            deadline_s = rng.randint(1, 20) if run["mishaps"] and rng.random() < 0.2 else None
            chunks.append((request, program, deadline_s))
            if run["mishaps"] and rng.random() < 0.2:
                harness.cancel(request, float(rng.randint(0, 40)))
        at_s, gap_s = float(rng.randint(0, run["spread"])), float(rng.choice([0, 0, 3]))
        harness.arrive_chunks(sequence, chunks, at_s, gap_s)
    harness.run()
    return harness


def check(harness: Harness) -> None:
    harness.check_nothing_left()
    harness.check_replay()


def check_any(run: dict[str, Any]) -> None:
    harness = play(run)
    check(harness)
    if not run["mishaps"]:
        assert {how for _, how in harness.answers.values()} <= {"reply"}


def check_within_tasks(run: dict[str, Any]) -> None:
    """Where nodes follow within a task."""
    check(play(run | {"policy": "auto", "num_workers": 1, "task_s": run["task_s"] or 5.0, "waits": True}))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run())
def test_any_programs_on_any_device_compute_what_their_graphs_say(run: dict[str, Any]) -> None:
    check_any(run)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(settings_of_a_run())
def test_any_programs_compute_what_their_graphs_say_where_nodes_follow_within_a_task(run: dict[str, Any]) -> None:
    check_within_tasks(run)


@pytest.mark.slow
@pytest.mark.parametrize("check_run", [check_any, check_within_tasks])
def test_so_do_many_more(check_run: Callable[[dict[str, Any]], None]) -> None:
    settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])(given(settings_of_a_run())(check_run))()
