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
    be, if it was for them. ends: [NUM_ENDS, steps]. flags: [NUM_FLAGS, steps]. at: [NUM_FACTS + 2 * inputs, positions]
    node, subgraph, lane, and of each input table and row. done: nodes that are done with their step. entering: nodes
    whose state inputs are read (where a step has no lanes, all). moves: [1 + 2 * state inputs, moves] position, and of
    each state input table and row. left: [2, ...] worker and lane that chains have left. kept: [2, kept] position and
    row. marks: [positions] of outputs that go to the host; all_marks: of any. num_used: candidates that were taken.
    ready: nodes that are ready now and were not taken. num_free: rows that are free now.
    """

    num_steps: int
    lanes_wanted: int
    ends: Ids
    flags: Flags
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
def _choose(
    candidates: Keys, ranks: Ids, first: int, waiting: Keys, waiting_ranks: Ids, limit: int, chosen: Keys, of: Ids
) -> tuple[int, int, int]:
    """Take up to `limit` nodes in order out of two ordered arrays: higher ranks first, then lower keys.

    ranks: of the candidates, empty where all are equal; then waiting_ranks means nothing. Writes chosen and `of`, their
    ranks. Returns how many were taken, the next candidate and how many of those that wait were taken.
    """
    count, at = 0, 0
    ranked = len(ranks) > 0
    while count < limit and (first < len(candidates) or at < len(waiting)):
        from_waiting = first == len(candidates)
        if not from_waiting and at < len(waiting):
            from_waiting = waiting[at] < candidates[first]
            if ranked and waiting_ranks[at] != ranks[first]:
                from_waiting = waiting_ranks[at] > ranks[first]
        if from_waiting:
            chosen[count] = waiting[at]
            if ranked:
                of[count] = waiting_ranks[at]
            at += 1
        else:
            chosen[count] = candidates[first]
            if ranked:
                of[count] = ranks[first]
            first += 1
        count += 1
    return count, first, at


@compiled
def _in_order(keys: Keys, ranks: Ids) -> bool:
    for i in range(1, len(keys)):
        if len(ranks) > 0 and ranks[i - 1] != ranks[i]:
            if ranks[i - 1] < ranks[i]:
                return False
        elif keys[i - 1] > keys[i]:
            return False
    return True


@compiled
def _joined(keys: Keys, ranks: Ids, ranked: bool, others: Keys, other_ranks: Ids) -> tuple[Keys, Ids]:
    """Return nodes that have become ready and those that wait, in order. keys: in any order; ranks: empty if unused."""
    if not _in_order(keys, ranks):
        order = np.argsort(keys)
        keys = keys[order]
        if ranked:
            ranks = ranks[order]
            order = np.argsort(-ranks, kind="mergesort")
            keys, ranks = keys[order], ranks[order]
    if len(others) == 0:
        return keys, ranks
    total = len(keys) + len(others)
    merged, of = np.empty(total, np.int64), np.empty(total if ranked else 0, np.int64)
    _choose(keys, ranks, 0, others, other_ranks, total, merged, of)
    return merged, of


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
    num_state = places.num_inputs - places.num_sequence
    ranked = len(ranks) > 0
    steps_room = min(limits.max_steps, 8)
    ends, flags = np.zeros((NUM_ENDS, steps_room), np.int64), np.zeros((NUM_FLAGS, steps_room), np.bool_)
    at = np.empty((NUM_FACTS + 2 * places.num_inputs, FIRST_ROOM), np.int64)
    marks = np.empty((1, FIRST_ROOM), np.int64)
    done, entering = np.empty((1, FIRST_ROOM), np.int64), np.empty((1, FIRST_ROOM), np.int64)
    kept, left = np.empty((2, FIRST_ROOM), np.int64), np.empty((2, 16), np.int64)
    moves = np.empty((1 + 2 * num_state, 16), np.int64)
    chosen, of = np.empty(limits.max_batch, np.int64), np.empty(limits.max_batch, np.int64)
    waiting, waiting_ranks = np.empty(0, np.int64), np.empty(0, np.int64)
    num_steps = num_at = num_done = num_entering = num_moves = num_kept = num_left = num_used = all_marks = 0
    num_free, lanes_wanted = places.num_free, 0
    used_s = 0.0
    while num_steps < limits.max_steps:
        count, next_used, taken = _choose(
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
        batch = chosen[:count] & NODE_MASK
        some_runs = some_open = steers = False
        for node in batch:
            mine = nodes.subgraph[node]
            some_runs |= subgraphs.end[mine] > 0
            some_open |= subgraphs.open_ended[mine]
            steers |= nodes.held[node]
        steers |= some_open
        has_lanes = places.plan_rows and some_runs
        at, marks, done = _room(at, num_at + count), _room(marks, num_at + count), _room(done, num_done + count)
        entering, kept = _room(entering, num_entering + count), _room(kept, num_kept + count)
        ends, flags = _room(ends, num_steps + 1), _room(flags, num_steps + 1)
        first_at = num_at
        flags[IS_DENSE, num_steps] = False
        if has_lanes:
            moves = _room(moves, num_moves + count)
            wanted, is_dense, ordered, lanes, before, home = seat(
                places.occupant, nodes.subgraph, subgraphs, places.worker, batch
            )
            if wanted > 0:
                lanes_wanted = wanted
                break
            left = _room(left, num_left + count)
            for i in range(count):
                at[LANE, first_at + i] = lanes[i]
                if before[i] == lanes[i] and home[i] == places.worker:
                    continue
                moves[0, num_moves] = first_at + i
                for part in range(num_state):
                    if before[i] == NOBODY:
                        table, row = find_input(nodes, places.is_host, places.num_sequence + part, ordered[i])
                    else:
                        table, row = places.lane_tables[home[i], part], before[i]
                    moves[1 + part, num_moves], moves[1 + num_state + part, num_moves] = table, row
                num_moves += 1
                if before[i] == NOBODY:
                    entering[0, num_entering] = ordered[i]
                    num_entering += 1
                elif home[i] != places.worker:
                    left[0, num_left], left[1, num_left] = home[i], before[i]
                    num_left += 1
            flags[IS_DENSE, num_steps] = is_dense
            batch = ordered
        else:
            for i in range(count):
                entering[0, num_entering + i] = batch[i]
                at[LANE, first_at + i] = NOWHERE
            num_entering += count
        for i in range(count):
            node = batch[i]
            mine = nodes.subgraph[node]
            at[NODE, first_at + i], at[SUBGRAPH, first_at + i] = node, mine
            if not subgraphs.open_ended[mine] and (subgraphs.end[mine] == 0 or node + 1 == subgraphs.end[mine]):
                done[0, num_done] = node
                num_done += 1
        if places.plan_rows:
            for port in range(places.num_inputs):
                for i in range(count):
                    table, row = NOWHERE, NOWHERE  # lane state
                    if not has_lanes or port < places.num_sequence:
                        table, row = find_input(nodes, places.is_host, port, batch[i])
                    at[NUM_FACTS + port, first_at + i] = table
                    at[NUM_FACTS + places.num_inputs + port, first_at + i] = row
            for i in range(count):
                mine = at[SUBGRAPH, first_at + i]
                owner = subgraphs.end[mine] - 1 if subgraphs.open_ended[mine] else batch[i]
                marks[0, first_at + i] = nodes.fetch[batch[i]] | nodes.fetch[owner]
                all_marks |= marks[0, first_at + i]
                if nodes.uses[owner] == 0 and not nodes.held[owner]:
                    continue
                if nodes.row[owner] == NOWHERE and not (
                    not has_lanes
                    and take_over(
                        nodes, places.is_host, places.value_ports, places.first_table, places.end_table, owner
                    )
                ):
                    num_free -= 1
                    nodes.row[owner] = places.free[num_free]
                kept[0, num_kept], kept[1, num_kept] = first_at + i, nodes.row[owner]
                num_kept += 1
        num_at += count
        ends[POSITIONS, num_steps], ends[DONE, num_steps] = num_at, num_done
        ends[ENTERING, num_steps], ends[LEFT, num_steps] = num_entering, num_left
        flags[HAS_LANES, num_steps], flags[MAY_STOP, num_steps], flags[STEERS, num_steps] = has_lanes, some_open, steers
        num_steps += 1
        used_s += seconds[count]
        num_used = next_used
        found, found_ranks = submit(
            nodes, subgraphs, consumer, places.worker, chosen[:count], of[: count if ranked else 0]
        )
        waiting, waiting_ranks = _joined(found, found_ranks, ranked, waiting[taken:], waiting_ranks[taken:])
    return Steps(
        num_steps, lanes_wanted, ends[:, :num_steps], flags[:, :num_steps], at[:, :num_at], done[0, :num_done],
        entering[0, :num_entering], moves[:, :num_moves], left[:, :num_left], kept[:, :num_kept], marks[0, :num_at],
        all_marks, num_used, waiting, num_free,
    )  # fmt: skip
