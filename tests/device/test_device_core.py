"""A device that schedules itself, its kernels on the CPU: whatever comes, each request is answered once and rightly."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import mutants
import numpy as np
import pytest
from emulated import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from played_requests import TINY, cells, chain, crowded, planned_types, play, tried

from batchmaker.device.core import DeviceCore
from batchmaker.device.memory import Sizes
from batchmaker.device.plan import plan_of
from batchmaker.device.proof import TriedCell, computed_plainly, prove, random_graph
from batchmaker.executor.cuda.device import CannotRecordError, DeviceLostError


@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(seed=st.integers(0, 10_000), ring=st.sampled_from([40, 64, 500]), slots=st.sampled_from([1, 3, 16]))
def test_whatever_comes_is_answered_once_as_plain_pytorch_does(seed: int, ring: int, slots: int) -> None:
    play(seed, 15, sizes=replace(TINY, ring=ring, num_slots=slots))


def test_many_requests_go_through_tables_that_hold_few() -> None:
    play(1, 150, sizes=replace(TINY, arena_bytes=1 << 13, answer_bytes=1 << 12, num_slots=4))


@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 2, 4, 8)])
def test_any_batch_sizes_do(sizes: tuple[int, ...]) -> None:
    play(5, 25, kinds=cells(5, sizes))


def test_a_core_that_has_been_empty_goes_on() -> None:
    core = play(2, 10)
    seen = core.num_finished
    kinds = [replace(one, cell=replace(one.cell, type_id=one.cell.type_id)) for one in cells(2)]
    play(3, 10, core=core, kinds=kinds)
    assert core.num_finished > seen


def test_a_long_run_is_one_entry_and_the_host_writes_as_much_for_it_as_for_a_short_one() -> None:
    kinds = cells(0)
    short, long = (plan_of(chain(kinds[0], length), planned_types(kinds)) for length in (2, 300))
    assert short.entries == long.entries == ((0, 1),)
    assert len(short.image) == len(long.image)
    assert long.num_bytes - short.num_bytes == 8 * 298  # its words
    play(
        7,
        0,
        graphs=[(chain(kinds[0], length), {}) for length in (300, 1, 2, 40)],
        kinds=kinds,
        sizes=replace(TINY, ring=16),
    )


def test_who_is_cancelled_ends_early_and_leaves_nothing() -> None:
    kinds = cells(0)
    device = emulated()
    core = DeviceCore(device, TINY)
    planned = {one.cell.type_id: core.learn(one.cell, lambda *rows, one=one: one.bound.call(rows)) for one in kinds}
    graph = chain(kinds[0], 400)
    data = [np.zeros(400, np.int64).view(np.uint8)]
    slot = core.add(plan_of(graph, planned), data)
    assert slot is not None
    assert not core.cancel(slot), "it has not been sent"
    core.submit()
    assert core.cancel(slot)
    ended, tasks = (), 0
    while not ended:
        core.submit()
        tasks = core.num_submitted
        device.stop()
        ended = core.poll().ended
    assert ended == (slot,)
    assert tasks < 6, "400 steps would take 50"
    core.release(slot)
    assert core.left_behind() == ""


def test_a_request_that_is_too_large_is_told_what_would_do() -> None:
    kinds = cells(0)
    core = DeviceCore(emulated(), TINY)
    planned = {one.cell.type_id: core.learn(one.cell, lambda *rows, one=one: one.bound.call(rows)) for one in kinds}
    said = core.too_large(plan_of(chain(kinds[0], 5000), planned))
    assert "bytes of rows and data on the device, and there are 32,768" in said
    assert "40," in said
    assert core.too_large(plan_of(chain(kinds[0], 50), planned)) == ""


def test_what_cannot_be_recorded_is_said() -> None:
    core = DeviceCore(emulated(records=False), TINY)
    with pytest.raises(CannotRecordError, match="it waits for a value"):
        core.learn(cells(0)[0].cell, lambda *rows: rows)
    with pytest.raises(CannotRecordError, match="batches of 64 need rings of twice that, and there are 64"):
        core.learn(replace(cells(0)[0].cell, batch_sizes=(64,)), lambda *rows: rows)


def test_a_lost_device_is_told() -> None:
    kinds = cells(0)
    device = emulated()
    core = DeviceCore(device, TINY)
    planned = {one.cell.type_id: core.learn(one.cell, lambda *rows, one=one: one.bound.call(rows)) for one in kinds}
    core.add(plan_of(chain(kinds[0], 3), planned), [np.zeros(3, np.int64).view(np.uint8)])
    device.lose()
    with pytest.raises(DeviceLostError):
        core.submit()


# --- the proof -------------------------------------------------------------------------------------------------------


def proved(kinds: list[TriedCell], mutate=str, learnt=None) -> str:
    device = emulated(background=True, mutate=mutate)
    try:
        core = DeviceCore(device, Sizes(1 << 18, 1 << 16, 1 << 16, 16, 128))
        planned = {
            one.cell.type_id: core.learn(one.cell, lambda *rows, one=one: one.bound.call(rows))
            for one in (learnt or kinds)
        }
        return prove(core, planned, kinds)
    finally:
        device.stop()
        device.close()


def test_a_core_that_is_right_passes_its_proof() -> None:
    assert proved(cells(0)) == ""


def test_a_core_that_computes_something_else_does_not() -> None:
    kinds = cells(0)
    other = [
        *kinds[:2],
        tried(2, kinds[2].cell.inputs, kinds[2].cell.outputs, None, lambda a, b: (a + b,), (1, 3, 5)),
        *kinds[3:],
    ]
    assert "differs from plain torch" in proved(kinds, learnt=other)


# --- rings and mutants -----------------------------------------------------------------------------------------------


def test_rings_may_be_full() -> None:
    for seed in range(4):
        crowded(seed)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """What became of each mutant, in a process of its own: a wrong address ends it."""
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, mutants.__file__], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(line.split(": ", 1) for line in run.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_is_found(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name] == ("survived" if name == "none" else "found")


def test_graphs_of_the_proof_have_runs_nodes_loops_and_values_of_each_other() -> None:
    rng = np.random.default_rng(0)
    made = [random_graph(cells(0), rng, 6) for _ in range(40)]
    graphs = [graph for graph, _ in made]
    assert any(graph.runs for graph in graphs)
    assert any((block.sources >= 0).any() for graph in graphs for block in graph.blocks)
    assert any(given is not None for graph in graphs for run in graph.runs for given in run.sequences)
    lengths = [run.length for graph in graphs for run in graph.runs if run.open_ended]
    kinds, device = {one.cell.type_id: one for one in cells(0)}, emulated()
    ended = [n for graph, stops in made for n in computed_plainly(graph, kinds, device, stops)[1].values()]
    assert len(lengths) == len(ended)
    assert sum(ended) < sum(lengths)
