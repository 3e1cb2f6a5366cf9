"""The steps of one task, found in one compiled call: who runs together, in which lanes, and where values lie.

A step takes the first ready nodes in order. It is booked as if it had run, so the next one may take their successors:
tasks of one worker run in order (ahead-of-time scheduling; BatchMaker section 4.3).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import NOWHERE, NodeArrays, SubgraphArrays
from batchmaker.scheduler.candidates import choose, joined
from batchmaker.scheduler.lanes import NOBODY, seat
from batchmaker.scheduler.placing import find_input, take_over
from batchmaker.scheduler.progress import submit
from batchmaker.scheduler.ready import NODE_MASK, Keys

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

FIRST_ROOM: Final = 512

# Rows of `Steps.at`, before those of inputs: what is said of each position.
NODE: Final = 0
SUBGRAPH: Final = 1
LANE: Final = 2
NUM_FACTS: Final = 3

# Rows of `Steps.ends`: how many there are of each up to the end of a step.
POSITIONS: Final = 0
DONE: Final = 1
ENTERING: Final = 2
LEFT: Final = 3
NUM_ENDS: Final = 4

# Rows of `Steps.flags`.
HAS_LANES: Final = 0
IS_DENSE: Final = 1
MAY_STOP: Final = 2
STEERS: Final = 3
NUM_FLAGS: Final = 4


class Limits(NamedTuple):
    """What bounds a task.

    max_batch, min_batch: rows of a step; a smaller one than min_batch begins no further step. max_steps: at least 1.
    budget_s: a further step must fit into so many seconds. more: whether the queue holds more than the candidates, so
    that a step which is not full could have been.
    """

    max_batch: int
    min_batch: int
    max_steps: int
    budget_s: float
    more: bool


class Places(NamedTuple):
    """Where rows of the cell type lie on one worker.

    plan_rows: whether to say so at all. is_host: [tables]. value_ports: inputs that other nodes have ever fed,
    ascending. free: [num_free or more] free rows of its pool, taken from the end. first_table, end_table: the pool's.
    num_inputs, num_sequence: inputs of the cell, and of those one per step of a run. occupant: [lanes] of the worker.
    lane_tables: [workers, state inputs].
    """

    plan_rows: bool
    is_host: Flags
    value_ports: Ids
    free: Ids
    num_free: int
    first_table: int
    end_table: int
    num_inputs: int
    num_sequence: int
    worker: int
    occupant: Ids
    lane_tables: Ids


class Steps(NamedTuple):
    """What the steps of a task are. Positions of all steps lie one after the other.

    num_steps: 0 where not even one could be formed for want of lanes or rows. lanes_wanted: so many lanes there must
    be, if it was for them. largest: rows of the largest step. ends: [NUM_ENDS, steps]. flags: [NUM_FLAGS, steps], 0 or
    1. at: [NUM_FACTS + 2 * inputs, positions] node, subgraph, lane, and of each input table and row. done: nodes that
    are done with their step. entering: nodes whose state inputs are read (where a step has no lanes, all). moves:
    [1 + 2 * state inputs, moves] position, and of each state input table and row. left: [2, ...] worker and lane that
    chains have left. kept: [2, kept] position and row. marks: [positions] of outputs that go to the host; all_marks: of
    any. num_used: candidates that were taken. ready: nodes that are ready now and were not taken. num_free: rows that
    are free now.
    """

    num_steps: int
    lanes_wanted: int
    largest: int
    ends: Ids
    flags: Ids
    at: Ids
    done: Ids
    entering: Ids
    moves: Ids
    left: Ids
    kept: Ids
    marks: Ids
    all_marks: int
    num_used: int
    ready: Keys
    num_free: int


@compiled
def _room(array: Any, size: int) -> Any:
    """Return the array, or a larger one that begins with it, so that its last dimension has at least `size` places."""
    have = array.shape[-1]
    if have >= size:
        return array
    larger = np.empty((array.shape[0], max(2 * have, size)), array.dtype)
    larger[:, :have] = array
    return larger


@compiled
def _look(nodes: NodeArrays, subgraphs: SubgraphArrays, batch: Ids) -> tuple[bool, bool, bool]:
    """Return whether some nodes are of runs, whether all are of runs that go on for certain, whether some may stop."""
    some, certain, may_stop = False, True, False
    for node in batch:
        mine = nodes.subgraph[node]
        is_run, is_open = subgraphs.end[mine] > 0, subgraphs.open_ended[mine]
        some |= is_run
        certain &= is_run and not is_open
        may_stop |= is_open
    return some, certain, may_stop


@compiled
def _goes_on(chosen: Keys, latest: Keys) -> bool:
    """Whether these are the next nodes of the runs whose nodes ran in the step before, all of them."""
    if len(chosen) != len(latest):
        return False
    same = True
    for i in range(len(chosen)):
        same &= chosen[i] == latest[i] + 1
    return same


@compiled
def _num_alike(nodes: NodeArrays, subgraphs: SubgraphArrays, keys: Keys, most: int) -> int:
    """Return how many steps these runs take together, from these nodes to the first end of one; at most `most`."""
    for key in keys:
        node = key & NODE_MASK
        most = min(most, subgraphs.end[nodes.subgraph[node]] - node)
    return most


@compiled
def _go_on(
    nodes: NodeArrays,
    subgraphs: SubgraphArrays,
    occupant: Ids,
    at: Ids,
    first: int,
    num_steps: int,
    keys: Keys,
    ranks: Ids,
) -> tuple[Keys, Ids]:
    """Book steps in which the chains of the step before all go on, in their lanes; those that end then leave them.

    first: where the positions of the first of these steps begin. keys, ranks: of its nodes, in the queue's order.
    Returns the keys and ranks of the nodes that are ready after the last, in order.
    """
    count = len(keys)
    for i in range(count):
        node, mine, lane = at[NODE, first - count + i], at[SUBGRAPH, first - count + i], at[LANE, first - count + i]
        for step in range(num_steps):
            position = first + step * count + i
            at[NODE, position], at[SUBGRAPH, position], at[LANE, position] = node + 1 + step, mine, lane
        subgraphs.in_flight[mine] += num_steps
        if node + num_steps + 1 == subgraphs.end[mine] and lane != NOWHERE:
            occupant[lane], subgraphs.lane[mine], subgraphs.lane_worker[mine] = NOBODY, NOWHERE, NOWHERE
    ready, of = np.empty(count, np.int64), np.empty(len(ranks), np.int64)
    num_ready = 0
    for i in range(count):
        node = keys[i] & NODE_MASK
        if node + num_steps < subgraphs.end[nodes.subgraph[node]]:
            ready[num_ready] = keys[i] + num_steps
            if len(ranks) > 0:
                of[num_ready] = ranks[i]
            num_ready += 1
    return ready[:num_ready], of[: num_ready if len(ranks) > 0 else 0]


@compiled
def _note_moves(
    nodes: NodeArrays, places: Places, before: Ids, home: Ids, at: Ids, first: int, moves: Ids, num_moves: int
) -> int:
    """Note what must be brought to the lanes of a step. before, home: see `seat`. Returns how many moves there are."""
    num_state = places.num_inputs - places.num_sequence
    for i in range(len(before)):
        if before[i] == at[LANE, first + i] and home[i] == places.worker:
            continue
        moves[0, num_moves] = first + i
        for part in range(num_state):
            if before[i] == NOBODY:
                port = places.num_sequence + part
                table, row = find_input(nodes, places.is_host, port, at[NODE, first + i])
            else:
                table, row = places.lane_tables[home[i], part], before[i]
            moves[1 + part, num_moves], moves[1 + num_state + part, num_moves] = table, row
        num_moves += 1
    return num_moves


@compiled
def _note_inputs(nodes: NodeArrays, places: Places, at: Ids, first: int, end: int, has_lanes: bool) -> None:
    """Note where the positions of a step find each input that is no lane state."""
    for port in range(places.num_inputs):
        is_state = has_lanes and port >= places.num_sequence
        for position in range(first, end):
            table, row = NOWHERE, NOWHERE
            if not is_state:
                table, row = find_input(nodes, places.is_host, port, at[NODE, position])
            at[NUM_FACTS + port, position], at[NUM_FACTS + places.num_inputs + port, position] = table, row


@compiled
def _keep(
    nodes: NodeArrays,
    subgraphs: SubgraphArrays,
    places: Places,
    at: Ids,
    first: int,
    end: int,
    has_lanes: bool,
    marks: Ids,
    kept: Ids,
    num_kept: int,
    num_free: int,
) -> tuple[int, int, int]:
    """Give rows to the positions of a step whose outputs others read, and mark the outputs that go to the host.

    Consumers look for the outputs of a run that may stop under its last node, since any step may turn out to be it.
    Returns how many are kept, how many rows are free, and all marks of the step.
    """
    all_marks = 0
    for position in range(first, end):
        node, mine = at[NODE, position], at[SUBGRAPH, position]
        owner = subgraphs.end[mine] - 1 if subgraphs.open_ended[mine] else node
        marks[0, position] = nodes.fetch[node] | nodes.fetch[owner]
        all_marks |= marks[0, position]
        if nodes.uses[owner] == 0 and not nodes.held[owner]:
            continue
        if nodes.row[owner] == NOWHERE and (
            has_lanes
            or not take_over(nodes, places.is_host, places.value_ports, places.first_table, places.end_table, owner)
        ):
            num_free -= 1
            nodes.row[owner] = places.free[num_free]
        kept[0, num_kept], kept[1, num_kept] = position, nodes.row[owner]
        num_kept += 1
    return num_kept, num_free, all_marks


@compiled
def find_steps(
    nodes: NodeArrays,
    subgraphs: SubgraphArrays,
    consumer: Ids,
    places: Places,
    limits: Limits,
    seconds: NDArray[np.float64],
    candidates: Keys,
    ranks: Ids,
) -> Steps:
    """Form the steps of one task and book them as submitted.

    seconds: [max_batch + 1] that a step of so many rows takes. candidates: ready nodes that may run on the worker, in
    the order of their queue. ranks: of their requests, empty where all are equal. Arrays that are returned are fresh.
    """
    ranked = len(ranks) > 0
    steps_room = min(limits.max_steps, 8)
    ends, flags = np.zeros((NUM_ENDS, steps_room), np.int64), np.zeros((NUM_FLAGS, steps_room), np.int64)
    at = np.empty((NUM_FACTS + 2 * places.num_inputs, FIRST_ROOM), np.int64)
    marks = np.empty((1, FIRST_ROOM), np.int64)
    done, entering = np.empty((1, FIRST_ROOM), np.int64), np.empty((1, FIRST_ROOM), np.int64)
    kept, left = np.empty((2, FIRST_ROOM), np.int64), np.empty((2, 16), np.int64)
    moves = np.empty((1 + 2 * (places.num_inputs - places.num_sequence), 16), np.int64)
    chosen, of = np.empty(limits.max_batch, np.int64), np.empty(limits.max_batch, np.int64)
    latest = np.empty(limits.max_batch, np.int64)
    waiting, waiting_ranks = np.empty(0, np.int64), np.empty(0, np.int64)
    num_steps = num_at = num_done = num_entering = num_moves = num_kept = num_left = num_used = all_marks = 0
    num_free, lanes_wanted, largest, num_latest = places.num_free, 0, 0, 0
    used_s = 0.0
    has_lanes = certain = may_stop = False
    while num_steps < limits.max_steps:
        count, next_used, taken = choose(
            candidates, ranks, num_used, waiting, waiting_ranks, limits.max_batch, chosen, of
        )
        if count == 0:
            break
        if num_steps > 0 and (
            count < limits.min_batch
            or used_s + seconds[count] > limits.budget_s
            or (limits.more and count < limits.max_batch and next_used == len(candidates))
        ):
            break
        if places.plan_rows and num_free < count:
            break
        first_at, num_alike = num_at, 1
        keys, of_keys = chosen[:count], of[: count if ranked else 0]
        goes_on = certain and taken == count and _goes_on(keys, latest[:num_latest])
        if goes_on:
            most = limits.max_steps - num_steps
            if used_s + most * seconds[count] > limits.budget_s:
                most = max(1, int((limits.budget_s - used_s) / seconds[count]))
            if places.plan_rows:
                most = min(most, num_free // count)
            num_alike = _num_alike(nodes, subgraphs, keys, most)
        num_rows = num_alike * count
        at, marks, done = _room(at, num_at + num_rows), _room(marks, num_at + num_rows), _room(done, num_done + count)
        entering, kept = _room(entering, num_entering + count), _room(kept, num_kept + num_rows)
        ends, flags = _room(ends, num_steps + num_alike), _room(flags, num_steps + num_alike)
        is_dense = goes_on and flags[IS_DENSE, num_steps - 1] > 0
        if not goes_on:
            batch = keys & NODE_MASK
            lanes, before, home = batch, batch, batch  # of a step without lanes, not looked at
            some_runs, certain, may_stop = _look(nodes, subgraphs, batch)
            has_lanes = places.plan_rows and some_runs
            if has_lanes:
                moves, left = _room(moves, num_moves + count), _room(left, num_left + count)
                wanted, is_dense, batch, lanes, before, home = seat(
                    places.occupant, nodes.subgraph, subgraphs, places.worker, batch
                )
                if wanted > 0:
                    lanes_wanted = wanted
                    break
            for i in range(count):
                at[NODE, first_at + i], at[SUBGRAPH, first_at + i] = batch[i], nodes.subgraph[batch[i]]
                at[LANE, first_at + i] = lanes[i] if has_lanes else NOWHERE
                if not has_lanes or before[i] == NOBODY:
                    entering[0, num_entering] = batch[i]
                    num_entering += 1
                elif home[i] != places.worker:
                    left[0, num_left], left[1, num_left] = home[i], before[i]
                    num_left += 1
            if has_lanes:
                num_moves = _note_moves(nodes, places, before, home, at, first_at, moves, num_moves)
        num_at += num_rows
        num_latest = count
        for i in range(count):
            latest[i] = keys[i] + num_alike - 1
        if goes_on:
            found, found_ranks = _go_on(nodes, subgraphs, places.occupant, at, first_at, num_alike, keys, of_keys)
            waiting, waiting_ranks = joined(found, found_ranks, ranked, waiting[taken:], waiting_ranks[taken:])
        if places.plan_rows:
            _note_inputs(nodes, places, at, first_at, num_at, has_lanes)
            num_kept, num_free, found_marks = _keep(
                nodes, subgraphs, places, at, first_at, num_at, has_lanes, marks, kept, num_kept, num_free
            )
            all_marks |= found_marks
        for step in range(num_alike):  # runs end with the last of these, if any does
            steers = may_stop
            for position in range(first_at + step * count, first_at + (step + 1) * count):
                node, mine = at[NODE, position], at[SUBGRAPH, position]
                steers |= nodes.held[node]
                if not subgraphs.open_ended[mine] and (subgraphs.end[mine] == 0 or node + 1 == subgraphs.end[mine]):
                    done[0, num_done] = node
                    num_done += 1
            ends[POSITIONS, num_steps], ends[DONE, num_steps] = first_at + (step + 1) * count, num_done
            ends[ENTERING, num_steps], ends[LEFT, num_steps] = num_entering, num_left
            flags[HAS_LANES, num_steps], flags[IS_DENSE, num_steps] = has_lanes, is_dense
            flags[MAY_STOP, num_steps], flags[STEERS, num_steps] = may_stop, steers
            num_steps += 1
        if not goes_on:
            found, found_ranks = submit(nodes, subgraphs, consumer, places.worker, keys, of_keys)
            waiting, waiting_ranks = joined(found, found_ranks, ranked, waiting[taken:], waiting_ranks[taken:])
        used_s += num_alike * seconds[count]
        largest = max(largest, count)
        num_used = next_used
    return Steps(
        num_steps, lanes_wanted, largest, ends[:, :num_steps], flags[:, :num_steps], at[:, :num_at],
        done[0, :num_done], entering[0, :num_entering], moves[:, :num_moves], left[:, :num_left],
        kept[:, :num_kept], marks[0, :num_at], all_marks, num_used, waiting, num_free,
    )  # fmt: skip
