"""A learned policy in the scheduler: as many batches as offline, and the same answers whatever its table says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness, Program, cell_type, host
from test_scheduler_properties import make_cells, play, settings_of_a_run

from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch, merged, unrolled
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType
from batchmaker.lab.datasets import Tree, random_trees
from batchmaker.policies import CellPolicy, make
from batchmaker.policies.learned import CellRow, LearntFrom, PolicyFile
from batchmaker.policies.learned.encodings import ENCODINGS, State
from batchmaker.policies.learned.policy import TablePolicy
from batchmaker_papers.learners.mini_batch import schedule

SIZES = (1, 4096)
LEARNT = LearntFrom("none", 1, 1, 1, 1, 1, 0, 1.0, 0.0, "none")
TREE = [cell_type(0, "leaf", 1, 2, SIZES), cell_type(1, "inner", 4, 2, SIZES), cell_type(2, "output", 1, 1, SIZES)]
LATTICE = [
    cell_type(0, "character", 2, 1, SIZES),
    cell_type(1, "word", 2, 1, SIZES),
    cell_type(2, "sum", 2, 1, SIZES),
    cell_type(3, "label", 1, 1, SIZES),
]
TABLES: dict[str, dict[State, int]] = {
    "outputs last": {(0, 2): 0, (2, 0): 0, (1, 2): 1, (2, 1): 1},
    "outputs first": {(0, 2): 2, (2, 0): 2, (1, 2): 2, (2, 1): 2, (3, 0): 3, (0, 3): 3},
    "nothing": {},
}


def written(path: Path, cells: list[CellType], table: dict[State, int], encoding: Any = "sort") -> str:
    """Return the name of a policy with this table. A file holds at least one state: one that is never met."""
    rows = (*map(CellRow.of, cells), CellRow("never", 0, 0))
    PolicyFile("any", encoding, rows, table or {(len(cells),): len(cells)}, LEARNT).write(path)
    return f"learned:file={path}"


def of_tree(given_tree: Tree) -> Program:
    def program(recorder: Recorder) -> Any:
        leaf, inner, output = TREE
        leaves = recorder.map(leaf, [host(*range(given_tree.num_leaves))])
        labels = [recorder.map(output, [leaves[0]])[0]]
        if given_tree.num_internal:
            nodes = recorder.tree(inner, given_tree.children, leaves, [])
            labels.append(recorder.map(output, [nodes[0]])[0])
        return labels
        yield

    return program


def of_lattice(words: dict[int, int], length: int) -> Program:
    """words: where a word ends, and where it begins."""

    def program(recorder: Recorder) -> Any:
        character, word, join, label = LATTICE
        states: list[Any] = [host(0)]
        labels = []
        for place in range(1, length + 1):
            (state,) = recorder.node(character, [host(place), states[-1]])
            if place in words:
                (other,) = recorder.node(word, [host(place), states[words[place]]])
                (state,) = recorder.node(join, [state, other])
            states.append(state)
            labels += recorder.node(label, [state])
        return labels
        yield

    return program


def recorded(program: Program) -> CellGraph:
    recorder = Recorder()
    with pytest.raises(StopIteration):
        next(program(recorder))
    return recorder.take()


def closed(programs: list[Program], cells: list[CellType]) -> MiniBatch:
    return merged([unrolled(recorded(program), len(cells)) for program in programs])


def batches_live(policy: CellPolicy, programs: list[Program], cells: list[CellType]) -> int:
    core = Harness(cells, policy=policy, check_always=False)
    for request, program in enumerate(programs):
        core.arrive(request, program)
    core.run()
    core.check_nothing_left()
    return len(core.log)


def lattices(count: int, seed: int) -> list[Program]:
    chosen = [{end: end - 2 - (seed + end) % 2 for end in range(4, 20, 2 + (seed + i) % 3)} for i in range(count)]
    return [of_lattice(words, 20 - i % 5) for i, words in enumerate(chosen)]


@pytest.mark.parametrize("name", ["depth", "agenda", "agenda-remaining", "sufficient"])
@pytest.mark.parametrize("seed", range(3))
def test_trees_take_as_many_batches_in_the_scheduler_as_offline(name: str, seed: int):
    programs = list(map(of_tree, random_trees(8, seed=seed, min_leaves=1, max_leaves=25)))
    offline, live = make(name), make(name)
    assert isinstance(offline, CellPolicy)
    batches = schedule(Frontier(closed(programs, TREE)), offline)
    assert batches_live(live, programs, TREE) == len(batches)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("draw", "cells"), [(lattices, LATTICE), (None, TREE)], ids=["lattices", "trees"])
def test_a_table_takes_as_many_batches_in_the_scheduler_as_offline(
    tmp_path: Path, encoding: Any, table: str, draw: Callable[[int, int], list[Program]] | None, cells: list[CellType]
):
    known = {state: run for state, run in TABLES[table].items() if max(state) < len(cells)}
    programs = draw(6, 1) if draw else list(map(of_tree, random_trees(6, seed=1, min_leaves=2, max_leaves=20)))
    policy = make(written(tmp_path / "policy.json", cells, known, encoding))
    offline = schedule(Frontier(closed(programs, cells)), TablePolicy(encoding, known))
    assert batches_live(policy, programs, cells) == len(offline)


def test_types_are_known_by_name_in_whatever_order_the_model_uses_them(tmp_path: Path):
    known = TABLES["outputs last"]
    policy = make(written(tmp_path / "policy.json", list(reversed(TREE)), {(0, 1): 1, (1, 0): 1, (0, 2): 2, (2, 0): 2}))
    programs = list(map(of_tree, random_trees(6, seed=2, min_leaves=2, max_leaves=20)))
    offline = schedule(Frontier(closed(programs, TREE)), TablePolicy("sort", known))
    assert batches_live(policy, programs, TREE) == len(offline)


def test_a_cell_that_the_file_does_not_have_is_left_to_the_condition(tmp_path: Path):
    """As of a model without an example request, whose cells are not known before they are used."""
    known: dict[State, int] = {(0, 1): 1, (1, 0): 1}
    programs = lattices(4, 2)
    offline = schedule(Frontier(closed(programs, LATTICE)), TablePolicy("sort", known))
    policy = make(written(tmp_path / "policy.json", LATTICE[:2], known))
    assert batches_live(policy, programs, LATTICE) == len(offline)


def test_a_full_batch_goes_before_what_the_table_says(tmp_path: Path):
    """The table puts labels off; but ten are ready for a batch of four when the one character of the other is."""
    character, label = (cell_type(number, name, 1, 1, (1, 4)) for number, name in enumerate(("character", "label")))

    def word(recorder: Recorder) -> Any:
        (last,) = recorder.run(character, [host(1, 2, 3)], None)
        return list(recorder.node(label, [last]))
        yield

    def labels(recorder: Recorder) -> Any:
        return [recorder.map(label, [host(*range(10))])[0]]
        yield

    core = Harness([character, label], policy=make(written(tmp_path / "p.json", [character, label], {(1, 0): 0})))
    core.arrive(0, word)
    core.arrive(1, labels)
    core.run()
    assert [(ran.cell, ran.step.batch) for ran in core.log] == [
        ("label", 4), ("label", 4), ("character", 1), ("character", 1), ("character", 1), ("label", 3),
    ]  # fmt: skip


CELLS = make_cells(1, 4, random.Random(0))


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    run=settings_of_a_run(),
    encoding=st.sampled_from(sorted(ENCODINGS)),
    choices=st.lists(st.integers(0, 4), min_size=31, max_size=31),
)
def test_no_table_changes_what_programs_compute(tmp_path: Path, run: dict[str, Any], encoding: Any, choices: list[int]):
    """Any programs, arrivals, failures and devices, and a table that knows about half of the states."""
    states = [subset for size in (1, 2, 3) for subset in itertools.combinations(range(len(CELLS)), size)]
    table = {
        (*subset, subset[0]) if encoding == "max" else subset: subset[choice % len(subset)]
        for subset, choice in zip(states, choices, strict=False)
        if choice
    }
    harness = play(run | {"policy": written(tmp_path / "policy.json", CELLS, table, encoding)})
    harness.check_nothing_left()
    harness.check_replay()
