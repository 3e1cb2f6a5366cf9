"""Finds the steps of one task in one compiled call: which nodes run together, in which lanes, and where values are.

Lanes are the dense places that hold the state of running chains on one worker. A batch in lanes 0 to n-1 is a slice of
the lane tables. So a batch whose members do not change copies nothing. If a chain leaves, the chain in the last lane
moves into its lane. A chain that joins takes the next free lane.

A step takes the first ready nodes in order. It is noted as if it had run, so the next step can take the successors: the
tasks of one worker run in order (ahead-of-time scheduling; BatchMaker section 4.3). `form` calls `find_steps`.

nodes, subgraphs, source, source_table and consumer are the tables of the arena; the loops change them. at, moves,
keeps, marks, done, ends and flags are arrays of `Steps` (see there).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled_within
from batchmaker.core.commands import ZERO_TABLE
from batchmaker.core.layout import (
    END,
    FETCH,
    HELD,
    IN_FLIGHT,
    LANE,
    LANE_WORKER,
    LENGTH_MASK,
    NOBODY,
    NODE_MASK,
    NOWHERE,
    OPEN_ENDED,
    ROW,
    STEP_SHIFT,
    SUBGRAPH,
    USES,
)
from batchmaker.core.progress import submit
from batchmaker.core.queues import choose, joined
from batchmaker.core.steps import (
    AT_LANE,
    AT_NODE,
    AT_SUBGRAPH,
    DONE,
    ENTERING,
    HAS_LANES,
    IS_DENSE,
    MAY_STOP,
    NUM_ENDS,
    NUM_FACTS,
    NUM_FLAGS,
    POSITIONS,
    STEERS,
    VACATED,
    Places,
    Steps,
    TaskArrays,
    TaskLimits,
)

FIRST_ROOM: Final = 512

FOLLOWING: Final = 2
"""A further step that is not full has at least so many nodes for each that could follow, too, but for a node of another
type. Else the other type goes first, and the step will be larger."""


@compiled_within
def seat(
    occupant: Ints, nodes: Ints, subgraphs: Ints, worker: int, batch: Ints
) -> tuple[int, bool, Ints, Ints, Ints, Ints]:
    """Give a lane to every chain of a batch. The lanes are 0 to n-1 if no chain outside the batch is in one of them.

    Otherwise every chain keeps its lane, and new chains take free lanes. A chain that ends with this step is no
    occupant afterwards, so its lane is free from the next step on.

    batch: nodes of distinct subgraphs; a single node is a chain of length one. nodes, subgraphs: the tables of the
    arena.

    Returns:

    - How many lanes are needed if there are too few; otherwise 0. If it is not 0, nothing has changed, and the other
      results mean nothing.
    - Whether the lanes are 0 to n-1.
    - [batch] the nodes, ordered by lane if the lanes are 0 to n-1.
    - [batch] their lanes.
    - [batch] the lanes in which their state was before; NOBODY if they had none.
    - [batch] the workers of these earlier lanes.
    """
    count, capacity = len(batch), len(occupant)
    here = np.empty(count, np.int64)  # the lane on this worker, or NOBODY, by index in `batch`
    is_taken = np.zeros(count, np.bool_)
    num_seated = 0
    for i in range(count):
        mine = nodes[SUBGRAPH, batch[i]]
        here[i] = subgraphs[LANE, mine] if subgraphs[LANE_WORKER, mine] == worker else NOBODY
        num_seated += here[i] != NOBODY
        if 0 <= here[i] < count:
            is_taken[here[i]] = True
    is_dense = count <= capacity
    for k in range(min(count, capacity)):
        is_dense &= is_taken[k] or occupant[k] == NOBODY
    lanes, ordered = np.empty(count, np.int64), np.empty(count, np.int64)
    before, home = np.empty(count, np.int64), np.empty(count, np.int64)
    new = np.empty(count, np.int64)
    next_free = 0
    for i in range(count):
        new[i] = here[i]
        if here[i] == NOBODY or (is_dense and here[i] >= count):
            while next_free < capacity and (is_taken[next_free] if is_dense else occupant[next_free] != NOBODY):
                next_free += 1
            if next_free == capacity:
                return capacity + count - num_seated, False, ordered, lanes, before, home
            new[i] = next_free
            next_free += 1
    for i in range(count):
        mine = nodes[SUBGRAPH, batch[i]]
        position = new[i] if is_dense else i
        ordered[position], lanes[position] = batch[i], new[i]
        before[position] = subgraphs[LANE, mine] if subgraphs[LANE_WORKER, mine] != NOWHERE else NOBODY
        home[position] = subgraphs[LANE_WORKER, mine]
        if here[i] != NOBODY and here[i] != new[i]:
            occupant[here[i]] = NOBODY
    for i in range(count):
        node, lane = ordered[i], lanes[i]
        mine = nodes[SUBGRAPH, node]
        if not subgraphs[OPEN_ENDED, mine] and (subgraphs[END, mine] == 0 or node + 1 == subgraphs[END, mine]):
            occupant[lane], subgraphs[LANE, mine], subgraphs[LANE_WORKER, mine] = NOBODY, NOWHERE, NOWHERE
        else:
            occupant[lane], subgraphs[LANE, mine], subgraphs[LANE_WORKER, mine] = mine, lane, worker
    return 0, is_dense, ordered, lanes, before, home


@compiled_within
def _room(array: Any, size: int) -> Any:
    """Return the array if its last dimension is at least `size`; otherwise a larger array that begins with it."""
    have = array.shape[-1]
    if have >= size:
        return array
    larger = np.empty((array.shape[0], max(2 * have, size)), array.dtype)
    for row in range(array.shape[0]):
        for column in range(have):
            larger[row, column] = array[row, column]
    return larger


@compiled_within
def _look(nodes: Ints, subgraphs: Ints, loops_ahead: bool, batch: Ints) -> tuple[bool, bool, bool]:
    """Return three facts about the nodes of a batch.

    - Some are of runs.
    - All are of runs that are assumed to continue.
    - Some are of runs that may stop.
    """
    some, certain, may_stop = False, True, False
    for i in range(len(batch)):
        mine = nodes[SUBGRAPH, batch[i]]
        is_run, is_open = subgraphs[END, mine] > 0, subgraphs[OPEN_ENDED, mine] > 0
        some |= is_run
        certain &= is_run and (loops_ahead or not is_open)
        may_stop |= is_open
    return some, certain, may_stop


@compiled_within
def _goes_on(chosen: Ints, latest: Ints) -> bool:
    """Whether the chosen nodes are exactly the next nodes of the runs in the step before."""
    if len(chosen) != len(latest):
        return False
    same = True
    for i in range(len(chosen)):
        same &= chosen[i] == latest[i] + 1
    return same


@compiled_within
def _num_alike(nodes: Ints, subgraphs: Ints, keys: Ints, most: int) -> int:
    """Return how many steps these runs take together from here on, until the first of them ends; at most `most`."""
    for i in range(len(keys)):
        node = keys[i] & NODE_MASK
        most = min(most, subgraphs[END, nodes[SUBGRAPH, node]] - node)
    return most


@compiled_within
def _go_on(
    nodes: Ints, subgraphs: Ints, occupant: Ints, at: Ints, first: int, num_steps: int, keys: Ints, ranks: Ints
) -> tuple[Ints, Ints]:
    """Write steps in which all chains of the step before continue, in the same lanes.

    Chains that end with the last of these steps leave their lanes.

    first: the first position of the first of these steps. keys, ranks: of its nodes, in the order of the queue. Returns
    the keys and ranks of the nodes that are ready after the last of these steps, in order.
    """
    count = len(keys)
    for i in range(count):
        before = first - count + i
        node, mine, lane = at[AT_NODE, before], at[AT_SUBGRAPH, before], at[AT_LANE, before]
        for step in range(num_steps):
            position = first + step * count + i
            at[AT_NODE, position], at[AT_SUBGRAPH, position], at[AT_LANE, position] = node + 1 + step, mine, lane
        subgraphs[IN_FLIGHT, mine] += num_steps
        ends = node + num_steps + 1 == subgraphs[END, mine] and not subgraphs[OPEN_ENDED, mine]
        if ends and lane != NOWHERE:
            occupant[lane], subgraphs[LANE, mine], subgraphs[LANE_WORKER, mine] = NOBODY, NOWHERE, NOWHERE
    ready, of = np.empty(count, np.int64), np.empty(len(ranks), np.int64)
    num_ready = 0
    for i in range(count):
        node = keys[i] & NODE_MASK
        if node + num_steps < subgraphs[END, nodes[SUBGRAPH, node]]:
            ready[num_ready] = keys[i] + num_steps
            if len(ranks) > 0:
                of[num_ready] = ranks[i]
            num_ready += 1
    return ready[:num_ready], of[: num_ready if len(ranks) > 0 else 0]


@compiled_within
def _note_moves(
    arrays: TaskArrays, places: Places, before: Ints, home: Ints, at: Ints, first: int, moves: Ints, num_moves: int
) -> int:
    """Write the moves of a step: state to copy into lanes. before, home: see `seat`. Returns the number of moves."""
    nodes, source, source_table, is_host = arrays.nodes, arrays.source, arrays.source_table, arrays.is_host
    num_state = places.num_inputs - places.num_step_inputs
    for i in range(len(before)):
        if before[i] == at[AT_LANE, first + i] and home[i] == places.worker:
            continue
        moves[0, num_moves] = first + i
        for part in range(num_state):
            if before[i] == NOBODY:
                port, node = places.num_step_inputs + part, at[AT_NODE, first + i]
                table = source_table[port, node]
                row = node if table == ZERO_TABLE or is_host[table] else nodes[ROW, source[port, node]]
            else:
                table, row = arrays.lane_tables[home[i], part], before[i]
            moves[1 + part, num_moves], moves[1 + num_state + part, num_moves] = table, row
        num_moves += 1
    return num_moves


@compiled_within
def _note_inputs(arrays: TaskArrays, places: Places, at: Ints, first: int, end: int, num_found: int) -> None:
    """Write the tables and rows of the first `num_found` inputs of these positions. The other inputs are lane state.

    Of memories, which are the first inputs, only the tables: see `_note_members`.
    """
    nodes, source, source_table, is_host = arrays.nodes, arrays.source, arrays.source_table, arrays.is_host
    num_inputs, num_memories = places.num_inputs, places.num_memories
    for port in range(num_memories):
        for position in range(first, end):
            at[NUM_FACTS + port, position] = source_table[port, at[AT_NODE, position]]
    for port in range(num_memories, num_found):
        for position in range(first, end):
            node = at[AT_NODE, position]
            table = source_table[port, node]
            own = table == ZERO_TABLE or is_host[table]
            at[NUM_FACTS + port, position] = table
            at[NUM_FACTS + num_inputs + port, position] = node if own else nodes[ROW, source[port, node]]
    for port in range(num_found, num_inputs):
        at[NUM_FACTS + port, first:end] = NOWHERE
        at[NUM_FACTS + num_inputs + port, first:end] = NOWHERE


@compiled_within
def _note_members(
    arrays: TaskArrays,
    places: Places,
    at: Ints,
    first: int,
    count: int,
    num_alike: int,
    goes_on: bool,
    members: Ints,
    num_members: int,
) -> tuple[Ints, int]:
    """Write the rows of the memories of equal steps that begin at position `first`, each with `count` positions.

    The outputs of these steps have rows already. Steps of one run share what the last of them reads: that of an earlier
    one is the beginning of it. goes_on: the step before has the same chains in the same order; they share with it what
    is no longer now. Returns `members`, which may be a larger array now, and how many are written.
    """
    nodes, source, reach = arrays.nodes, arrays.source, arrays.reach
    for port in range(places.num_memories):
        row, length_row = NUM_FACTS + places.num_inputs + port, NUM_FACTS + 2 * places.num_inputs + port
        for i in range(count):
            last = first + (num_alike - 1) * count + i
            node = at[AT_NODE, last]
            length, apart = reach[port, node] & LENGTH_MASK, reach[port, node] >> STEP_SHIFT
            begin, before = num_members, at[AT_NODE, first - count + i] if goes_on else node
            if goes_on and reach[port, before] == reach[port, node]:
                begin, length = at[row, first - count + i], 0
            members = _room(members, num_members + length)
            for step in range(num_alike):
                position = first + step * count + i
                at[row, position] = begin
                at[length_row, position] = reach[port, at[AT_NODE, position]] & LENGTH_MASK
            read = source[port, node]
            for k in range(length):
                members[0, num_members + k] = nodes[ROW, read]
                read += apart
            num_members += length
    return members, num_members


@compiled_within
def _keep(
    arrays: TaskArrays,
    places: Places,
    at: Ints,
    first: int,
    end: int,
    has_lanes: bool,
    marks: Ints,
    keeps: Ints,
    num_kept: int,
    num_free: int,
) -> tuple[int, int, int]:
    """Give rows to the positions whose outputs are read later, and mark the outputs that go to the host.

    Consumers look for the outputs of a run that may stop at its last node, because any step may turn out to be the
    last. A step that its own run reads has a row of its own beside that. A single node takes over the row of its first
    child if no other node reads the child, no unfold function holds it, and both use the same pool.

    Returns the number of kept outputs, the number of free rows, and the marks of all these positions together.
    """
    nodes, subgraphs, source, source_table = arrays.nodes, arrays.subgraphs, arrays.source, arrays.source_table
    is_host, value_ports, free, all_marks = arrays.is_host, arrays.value_ports, arrays.free, 0
    for position in range(first, end):
        node, mine = at[AT_NODE, position], at[AT_SUBGRAPH, position]
        owner = subgraphs[END, mine] - 1 if subgraphs[OPEN_ENDED, mine] else node
        marks[0, position] = nodes[FETCH, node] | nodes[FETCH, owner]
        all_marks |= marks[0, position]
        if owner != node and nodes[USES, node] > 0:
            num_free -= 1
            nodes[ROW, node] = free[num_free]
            keeps[0, num_kept], keeps[1, num_kept] = position, nodes[ROW, node]
            num_kept += 1
        if nodes[USES, owner] == 0 and not nodes[HELD, owner]:
            continue
        if nodes[ROW, owner] == NOWHERE and not has_lanes and len(value_ports) > 0:
            child, table = source[value_ports[0], owner], source_table[value_ports[0], owner]
            if places.first_table <= table < places.end_table and not nodes[HELD, child]:
                num_reads = 0
                for k in range(len(value_ports)):
                    port = value_ports[k]
                    num_reads += source[port, owner] == child and not is_host[source_table[port, owner]]
                if nodes[USES, child] == num_reads:
                    nodes[ROW, owner], nodes[ROW, child] = nodes[ROW, child], NOWHERE
        if nodes[ROW, owner] == NOWHERE:
            num_free -= 1
            nodes[ROW, owner] = free[num_free]
        keeps[0, num_kept], keeps[1, num_kept] = position, nodes[ROW, owner]
        num_kept += 1
    return num_kept, num_free, all_marks


@compiled_within
def _note_done(
    nodes: Ints, subgraphs: Ints, at: Ints, first: int, end: int, done: Ints, num_done: int
) -> tuple[int, bool]:
    """Write the nodes that are done with a step: single nodes, and last steps of runs.

    A run that may stop is left out: when it is done is known only after the step. Returns the number of done nodes, and
    whether an unfold function holds any node of the step.
    """
    held = False
    for position in range(first, end):
        node, mine = at[AT_NODE, position], at[AT_SUBGRAPH, position]
        held |= nodes[HELD, node] > 0
        last = subgraphs[END, mine]
        if not subgraphs[OPEN_ENDED, mine] and (last == 0 or node + 1 == last):
            done[0, num_done] = node
            num_done += 1
    return num_done, held


@compiled_within
def _certain(nodes: Ints, subgraphs: Ints, keys: Ints) -> Ints:
    """Return the keys of the nodes that are not in runs that a value may end."""
    certain = np.empty(len(keys), np.int64)
    count = 0
    for i in range(len(keys)):
        if not subgraphs[OPEN_ENDED, nodes[SUBGRAPH, keys[i] & NODE_MASK]]:
            certain[count] = keys[i]
            count += 1
    return certain[:count]


@compiled_within
def find_steps(
    arrays: TaskArrays,
    places: Places,
    limits: TaskLimits,
    rows_wanted: int,
    rows_needed: int,
    candidates: Ints,
    ranks: Ints,
) -> Steps:
    """Form the steps of one task and mark their nodes as submitted. Returned arrays are new.

    - rows_wanted, rows_needed: of the result; there are no candidates if they are not 0.
    - candidates: ready nodes that may run on the worker, in the order of their queue.
    - ranks: [candidates] ranks of their requests; empty if all are equal.
    """
    nodes, subgraphs, occupant, seconds = arrays.nodes, arrays.subgraphs, arrays.occupant, arrays.seconds
    ranked, plan_rows = len(ranks) > 0, places.plan_rows
    steps_room = min(limits.max_steps, 8)
    ends, flags = np.zeros((NUM_ENDS, steps_room), np.int64), np.zeros((NUM_FLAGS, steps_room), np.int64)
    at = np.empty((NUM_FACTS + 2 * places.num_inputs + places.num_memories, FIRST_ROOM), np.int64)
    marks = np.empty((1, FIRST_ROOM), np.int64)
    done, entering = np.empty((1, FIRST_ROOM), np.int64), np.empty((1, FIRST_ROOM), np.int64)
    keeps, vacated = np.empty((2, FIRST_ROOM), np.int64), np.empty((2, 16), np.int64)
    members = np.empty((1, 16), np.int64)
    moves = np.empty((1 + 2 * (places.num_inputs - places.num_step_inputs), 16), np.int64)
    chosen, of = np.empty(limits.max_batch, np.int64), np.empty(limits.max_batch, np.int64)
    latest = np.empty(limits.max_batch, np.int64)
    waiting, waiting_ranks = np.empty(0, np.int64), np.empty(0, np.int64)
    none = int(np.int64(0))  # with a literal 0, numba would compile another version of each function
    num_steps = num_at = num_done = num_entering = num_moves = num_kept = num_vacated = num_used = all_marks = none
    num_members = none
    num_held_up = none
    num_free, lanes_wanted, largest, num_latest = places.num_free, 0, 0, 0
    used_s = 0.0
    has_lanes = certain = may_stop = False
    while num_steps < limits.max_steps:
        count, next_used, num_taken = choose(
            candidates, ranks, num_used, waiting, waiting_ranks, limits.max_batch, chosen, of
        )
        if count == 0:
            break
        if num_steps > 0 and (
            count < limits.min_batch
            or used_s + seconds[count] > limits.budget_s
            or (limits.more and count < limits.max_batch and next_used == len(candidates))
            or (count < limits.max_batch and count < FOLLOWING * num_held_up)
        ):
            break
        if plan_rows and num_free < count * places.rows_each:
            break
        first_at, num_alike = num_at, 1
        keys, of_keys = chosen[:count], of[: count if ranked else 0]
        goes_on = certain and num_taken == count and _goes_on(keys, latest[:num_latest])
        if goes_on:
            most = limits.max_steps - num_steps
            if used_s + most * seconds[count] > limits.budget_s:
                most = max(1, int((limits.budget_s - used_s) / seconds[count]))
            if plan_rows:
                most = min(most, num_free // (count * places.rows_each))
            num_alike = _num_alike(nodes, subgraphs, keys, most)
        num_rows = num_alike * count
        at, marks, done = _room(at, num_at + num_rows), _room(marks, num_at + num_rows), _room(done, num_done + count)
        entering, keeps = _room(entering, num_entering + count), _room(keeps, num_kept + num_rows * places.rows_each)
        ends, flags = _room(ends, num_steps + num_alike), _room(flags, num_steps + num_alike)
        is_dense = goes_on and flags[IS_DENSE, num_steps - 1] > 0
        if not goes_on:
            batch = keys & NODE_MASK
            lanes, before, home = batch, batch, batch  # lanes, before and home are not used without lanes
            some_runs, certain, may_stop = _look(nodes, subgraphs, limits.loops_ahead, batch)
            has_lanes = plan_rows and some_runs
            if has_lanes:
                moves, vacated = _room(moves, num_moves + count), _room(vacated, num_vacated + count)
                wanted, is_dense, batch, lanes, before, home = seat(occupant, nodes, subgraphs, places.worker, batch)
                if wanted > 0:
                    lanes_wanted = wanted
                    break
            for i in range(count):
                at[AT_NODE, first_at + i], at[AT_SUBGRAPH, first_at + i] = batch[i], nodes[SUBGRAPH, batch[i]]
                at[AT_LANE, first_at + i] = lanes[i] if has_lanes else NOWHERE
                if not has_lanes or before[i] == NOBODY:
                    entering[0, num_entering] = batch[i]
                    num_entering += 1
                elif home[i] != places.worker:
                    vacated[0, num_vacated], vacated[1, num_vacated] = home[i], before[i]
                    num_vacated += 1
            if has_lanes:
                num_moves = _note_moves(arrays, places, before, home, at, first_at, moves, num_moves)
        num_at += num_rows
        num_latest = count
        for i in range(count):
            latest[i] = keys[i] + num_alike - 1
        if goes_on:
            ready, ready_ranks = _go_on(nodes, subgraphs, occupant, at, first_at, num_alike, keys, of_keys)
            waiting, waiting_ranks = joined(ready, ready_ranks, ranked, waiting[num_taken:], waiting_ranks[num_taken:])
        if plan_rows:
            num_found = places.num_step_inputs if has_lanes else places.num_inputs
            _note_inputs(arrays, places, at, first_at, num_at, num_found)
            num_kept, num_free, found_marks = _keep(
                arrays, places, at, first_at, num_at, has_lanes, marks, keeps, num_kept, num_free
            )
            all_marks |= found_marks
            if places.num_memories > 0:
                members, num_members = _note_members(
                    arrays, places, at, first_at, count, num_alike, goes_on, members, num_members
                )
        for step in range(num_alike):  # a run can end only with the last of these
            begin = first_at + step * count
            num_done, held = _note_done(nodes, subgraphs, at, begin, begin + count, done, num_done)
            ends[POSITIONS, num_steps], ends[DONE, num_steps] = begin + count, num_done
            ends[ENTERING, num_steps], ends[VACATED, num_steps] = num_entering, num_vacated
            flags[HAS_LANES, num_steps], flags[IS_DENSE, num_steps] = has_lanes, is_dense
            flags[MAY_STOP, num_steps], flags[STEERS, num_steps] = may_stop, may_stop or held
            num_steps += 1
        if not goes_on:
            ready, ready_ranks, more_held_up = submit(
                nodes,
                subgraphs,
                arrays.consumer,
                places.worker,
                limits.loops_ahead,
                limits.own_type_follows,
                keys,
                of_keys,
            )
            num_held_up += more_held_up
            waiting, waiting_ranks = joined(ready, ready_ranks, ranked, waiting[num_taken:], waiting_ranks[num_taken:])
        used_s += num_alike * seconds[count]
        largest = max(largest, count)
        num_used = next_used
    if may_stop:
        waiting = _certain(nodes, subgraphs, waiting)
    return Steps(
        num_steps,
        lanes_wanted,
        rows_wanted,
        rows_needed,
        largest,
        ends[:, :num_steps],
        flags[:, :num_steps],
        at[:, :num_at],
        done[0, :num_done],
        entering[0, :num_entering],
        moves[:, :num_moves],
        vacated[:, :num_vacated],
        keeps[:, :num_kept],
        members[:, :num_members],
        marks[0, :num_at],
        all_marks,
        num_used,
        waiting,
        num_free,
    )
