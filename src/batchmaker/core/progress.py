"""Compiled loops that update the arena when a step is submitted and when it has run, or tell what was submitted.

`find_steps` calls `submit`, the state `count_submitted`, and `retire` the others. of_nodes, of_subgraphs, source,
source_table and consumer are the tables of the arena; the loops change them. All numbers are int64. Returned arrays are
new.
"""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Flags, Ints
from batchmaker.compiled import compiled, compiled_inline, compiled_within
from batchmaker.core.commands import ZERO_TABLE
from batchmaker.core.edges import follows
from batchmaker.core.layout import (
    ALIVE,
    DONE,
    END,
    EXTERNAL,
    FIRST_EDGE,
    HEAD,
    HELD,
    IN_FLIGHT,
    LANE,
    LANE_WORKER,
    LEFT,
    LENGTH_MASK,
    NEXT_SERIAL,
    NOBODY,
    NODE_BITS,
    NODE_MASK,
    NOWHERE,
    NUM_EDGES,
    NUM_FREE,
    OPEN_ENDED,
    OVER,
    PENDING,
    PIN,
    POOL,
    READY,
    REQUEST,
    ROW,
    ROWS_BEGIN,
    SERIAL,
    SPAN,
    STATE,
    STEP_SHIFT,
    SUBGRAPH,
    SUBMITTED,
    TYPE,
    USES,
)
from batchmaker.core.queues import put, ranks_of, sort


@compiled_within
def submit(
    of_nodes: Ints,
    of_subgraphs: Ints,
    consumer: Ints,
    worker: int,
    loops_ahead: bool,
    own_type_follows: bool,
    keys: Ints,
    ranks: Ints,
) -> tuple[Ints, Ints, int]:
    """Note that a step of these ready nodes is on a worker. Dependencies are updated as if it had run.

    The subgraphs of the nodes are pinned to the worker, and their in_flight counts these nodes. Single nodes become
    SUBMITTED.

    - loops_ahead: assume that runs continue that a value may end.
    - own_type_follows: see `follows`.
    - ranks: [keys] ranks of their requests; empty if all are equal.

    Returns the keys of the nodes that follow them and have become ready, in any order; their ranks, or an empty array;
    and how many would be ready but for nodes of other types.
    """
    most = 0
    for i in range(len(keys)):
        most += max(1, of_nodes[NUM_EDGES, keys[i] & NODE_MASK])
    ready, of = np.empty(most, np.int64), np.empty(most if len(ranks) > 0 else 0, np.int64)
    num_ready = num_held_up = 0
    for i in range(len(keys)):
        node = keys[i] & NODE_MASK
        mine = of_nodes[SUBGRAPH, node]
        of_subgraphs[IN_FLIGHT, mine] += 1
        of_subgraphs[PIN, mine] = worker
        before = num_ready
        if of_subgraphs[END, mine] > 0:  # a run feeds only other subgraphs
            if node + 1 < of_subgraphs[END, mine] and (loops_ahead or not of_subgraphs[OPEN_ENDED, mine]):
                ready[num_ready] = keys[i] + 1
                num_ready += 1
        else:
            of_nodes[STATE, node] = SUBMITTED
            first = of_nodes[FIRST_EDGE, node]
            for edge in range(first, first + of_nodes[NUM_EDGES, node]):
                fed = consumer[edge]
                other = of_nodes[SUBGRAPH, fed]
                if not follows(of_subgraphs, mine, other, own_type_follows):
                    continue
                of_nodes[PENDING, fed] -= 1
                if of_nodes[PENDING, fed] > 0:
                    continue
                if of_subgraphs[EXTERNAL, other] > 0:
                    num_held_up += 1
                else:
                    of_nodes[STATE, fed] = READY
                    ready[num_ready] = (of_subgraphs[SERIAL, other] << NODE_BITS) | fed
                    num_ready += 1
        if len(ranks) > 0:
            of[before:num_ready] = ranks[i]
    return ready[:num_ready], of[: num_ready if len(ranks) > 0 else 0], num_held_up


@compiled_within
def end_step(
    of_nodes: Ints,
    of_subgraphs: Ints,
    source: Ints,
    source_table: Ints,
    is_host: Flags,
    value_ports: Ints,
    num_step_inputs: int,
    nodes: Ints,
    subgraphs: Ints,
    entering: Ints,
) -> tuple[Ints, Ints]:
    """Note that steps have run and have read their inputs. Subgraphs without further steps on the worker are unpinned.

    - is_host: [tables].
    - value_ports: inputs that some node has fed so far, ascending.
    - nodes, subgraphs: [batch].
    - entering: the nodes that have read the inputs from `num_step_inputs` on. For all other nodes these inputs are
      lane state.

    Returns the nodes whose rows nobody will read any more; and [value_ports] how many of them were found up to the end
    of each port.
    """
    for i in range(len(subgraphs)):
        mine = subgraphs[i]
        of_subgraphs[IN_FLIGHT, mine] -= 1
        if of_subgraphs[IN_FLIGHT, mine] == 0:
            of_subgraphs[PIN, mine] = NOWHERE
    unused = np.empty(len(value_ports) * len(nodes), np.int64)
    ends = np.empty(len(value_ports), np.int64)
    num_unused = 0
    for k in range(len(value_ports)):
        port = value_ports[k]
        readers = nodes if port < num_step_inputs else entering
        for i in range(len(readers)):
            table = source_table[port, readers[i]]
            if table == ZERO_TABLE or is_host[table]:
                continue
            read = source[port, readers[i]]
            of_nodes[USES, read] -= 1
            if of_nodes[USES, read] == 0 and not of_nodes[HELD, read] and of_nodes[ROW, read] != NOWHERE:
                unused[num_unused] = read
                num_unused += 1
        ends[k] = num_unused
    return unused[:num_unused], ends


@compiled_within
def forget_memories(
    of_nodes: Ints, of_subgraphs: Ints, source: Ints, source_table: Ints, reach: Ints, num_memories: int, nodes: Ints
) -> Ints:
    """Note that these nodes, single ones and the last ones of runs, and all their runs will not read memories again.

    num_memories: of their cell. Returns the nodes whose rows nobody will read any more, each once.
    """
    most = 0
    for i in range(len(nodes)):
        node = nodes[i]
        for port in range(num_memories):
            most += (reach[port, node] & LENGTH_MASK) + 1
    unused, num_unused = np.empty(most, np.int64), 0
    for i in range(len(nodes)):
        node = nodes[i]
        mine = of_nodes[SUBGRAPH, node]
        for port in range(num_memories):
            if source_table[port, node] == ZERO_TABLE:
                continue
            read, apart = source[port, node], reach[port, node] >> STEP_SHIFT
            length = reach[port, node] & LENGTH_MASK
            if of_subgraphs[END, mine] > 0 and read == of_subgraphs[HEAD, mine]:
                length += 1  # its own steps, of which this is the last
            for _ in range(length):
                of_nodes[USES, read] -= 1
                if of_nodes[USES, read] == 0 and not of_nodes[HELD, read] and of_nodes[ROW, read] != NOWHERE:
                    unused[num_unused] = read
                    num_unused += 1
                read += apart
    return unused[:num_unused]


@compiled_within
def stop_or_go_on(
    of_nodes: Ints,
    of_subgraphs: Ints,
    requests: Ints,
    occupant: Ints,
    stopped: Flags,
    nodes: Ints,
    subgraphs: Ints,
) -> tuple[Ints, Ints, Ints]:
    """Note that steps of runs that may stop have run. Runs that stop, or reach their last node, leave their lanes.

    - requests: of dead ones nothing more is submitted. occupant: [lanes] of the worker that ran the steps.
    - stopped: [positions] whether the run stops here; empty if none does. Later positions of a stopped run did not run.
    - nodes, subgraphs: [positions] in the order of the steps.

    Returns the nodes at which runs end, and [as many] the last nodes of these runs; and the keys of the next nodes of
    the other runs, in any order. A next node is left out if it is on the worker already.
    """
    over_at = np.empty(len(nodes), np.int64)
    last = np.empty(len(nodes), np.int64)
    following = np.empty(len(nodes), np.int64)
    num_over = num_following = 0
    for i in range(len(nodes)):
        node, mine = nodes[i], subgraphs[i]
        if of_subgraphs[OPEN_ENDED, mine] in (0, OVER):
            continue
        if node + 1 == of_subgraphs[END, mine] or (len(stopped) > 0 and stopped[i]):
            over_at[num_over] = node
            last[num_over] = of_subgraphs[END, mine] - 1
            num_over += 1
            of_subgraphs[OPEN_ENDED, mine] = OVER
            if of_subgraphs[LANE, mine] != NOWHERE:
                occupant[of_subgraphs[LANE, mine]] = NOBODY
                of_subgraphs[LANE, mine] = NOWHERE
                of_subgraphs[LANE_WORKER, mine] = NOWHERE
    for i in range(len(nodes) - 1, -1, -1):
        node, mine = nodes[i], subgraphs[i]
        if of_subgraphs[OPEN_ENDED, mine] in (0, OVER) or of_subgraphs[IN_FLIGHT, mine] != 0:
            continue
        of_subgraphs[IN_FLIGHT, mine] = NOWHERE  # seen, until all are
        if requests[ALIVE, of_nodes[REQUEST, node]]:
            following[num_following] = (of_subgraphs[SERIAL, mine] << NODE_BITS) | (node + 1)
            num_following += 1
    for i in range(len(subgraphs)):
        of_subgraphs[IN_FLIGHT, subgraphs[i]] = max(of_subgraphs[IN_FLIGHT, subgraphs[i]], 0)
    return over_at[:num_over], last[:num_over], following[:num_following]


@compiled_within
def finish(
    of_nodes: Ints, of_subgraphs: Ints, consumer: Ints, requests: Ints, own_type_follows: bool, nodes: Ints
) -> tuple[Ints, Ints, Ints]:
    """Mark these nodes as DONE. Count down the missing inputs of subgraphs and the units left of requests.

    - own_type_follows: see `follows`.
    - nodes: single nodes, and last nodes of runs.

    Returns the subgraphs that wait for no other now, in any order; the slots of the requests without work left; and [as
    many] the index in `nodes` of the last unit of each of these requests.
    """
    most = 0
    for i in range(len(nodes)):
        most += of_nodes[NUM_EDGES, nodes[i]]
    free = np.empty(most, np.int64)
    finished, places = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
    num_free = num_finished = 0
    for i in range(len(nodes)):
        node = nodes[i]
        of_nodes[STATE, node] = DONE
        first = of_nodes[FIRST_EDGE, node]
        for edge in range(first, first + of_nodes[NUM_EDGES, node]):
            waiting = of_nodes[SUBGRAPH, consumer[edge]]
            if follows(of_subgraphs, of_nodes[SUBGRAPH, node], waiting, own_type_follows):
                continue
            of_subgraphs[EXTERNAL, waiting] -= 1
            if of_subgraphs[EXTERNAL, waiting] == 0:
                free[num_free] = waiting
                num_free += 1
        slot = of_nodes[REQUEST, node]
        requests[LEFT, slot] -= 1
        if requests[LEFT, slot] == 0:
            finished[num_finished], places[num_finished] = slot, i
            num_finished += 1
    return free[:num_free], finished[:num_finished], places[:num_finished]


@compiled
def release(
    of_nodes: Ints, of_subgraphs: Ints, requests: Ints, types: Ints, queue: Ints, counts: Ints, subgraphs: Ints
) -> None:
    """Queue the ready nodes of these subgraphs, in this order, behind all others. Their external inputs are all done.

    Those of dead requests are left out. First nodes are those that wait for no other node of their subgraph.
    """
    most, num_types = 0, types.shape[1]
    for i in range(len(subgraphs)):
        most += 1 if of_subgraphs[END, subgraphs[i]] > 0 else of_subgraphs[SPAN, subgraphs[i]]
    ready = np.empty(most, np.int64)
    begins = np.zeros(num_types + 1, np.int64)
    num_found = 0
    for i in range(len(subgraphs)):
        mine = subgraphs[i]
        first, is_run = of_subgraphs[HEAD, mine], of_subgraphs[END, mine] > 0
        if not requests[ALIVE, of_nodes[REQUEST, first]]:
            continue
        of_subgraphs[SERIAL, mine] = counts[NEXT_SERIAL]
        for node in range(first, first + (1 if is_run else of_subgraphs[SPAN, mine])):
            if is_run or (of_nodes[SUBGRAPH, node] == mine and of_nodes[PENDING, node] == 0):
                of_nodes[STATE, node] = READY
                ready[num_found] = (counts[NEXT_SERIAL] << NODE_BITS) | node
                num_found += 1
                begins[of_subgraphs[TYPE, mine] + 1] += 1
        counts[NEXT_SERIAL] += 1
    for i in range(num_types):
        begins[i + 1] += begins[i]
    keys, place = np.empty(num_found, np.int64), begins.copy()
    for i in range(num_found):
        mine = of_subgraphs[TYPE, of_nodes[SUBGRAPH, ready[i] & NODE_MASK]]
        keys[place[mine]] = ready[i]
        place[mine] += 1
    for type_id in range(num_types):
        if begins[type_id] == begins[type_id + 1]:
            continue
        mine_only = keys[begins[type_id] : begins[type_id + 1]]
        ranks = ranks_of(of_nodes, requests, counts, mine_only)
        sort(mine_only, ranks)
        put(types, queue, type_id, mine_only, ranks)


@compiled
def count_submitted(
    of_nodes: Ints, of_subgraphs: Ints, extents: Ints, on_workers: Ints, ready: Ints, counts: Ints
) -> None:
    """Count the submitted nodes in these extents, of whose runs no value may end one.

    - extents: [extents, 3] first node, number of nodes, row of `counts`.
    - on_workers: nodes of steps that have not finished.
    - ready: the ready nodes of all types that are used in runs.
    - counts: [owners, types], added to.
    """
    reached = np.zeros(of_subgraphs.shape[1], np.int64)  # one past the last submitted node of a run
    for node in on_workers:
        reached[of_nodes[SUBGRAPH, node]] = max(reached[of_nodes[SUBGRAPH, node]], node + 1)
    for key in ready:
        node = key & NODE_MASK
        reached[of_nodes[SUBGRAPH, node]] = max(reached[of_nodes[SUBGRAPH, node]], node)
    for i in range(len(extents)):
        base, size, row = extents[i]
        for node in range(base, base + size):
            mine = of_nodes[SUBGRAPH, node]
            end = of_subgraphs[END, mine]
            if end == 0:
                is_submitted = of_nodes[STATE, node] >= SUBMITTED
            else:
                is_submitted = node < reached[mine] or of_nodes[STATE, end - 1] == DONE
            counts[row, of_subgraphs[TYPE, mine]] += is_submitted


@compiled_inline
def free_row(of_nodes: Ints, of_subgraphs: Ints, types: Ints, pools: Ints, rows: Ints, node: int) -> None:
    """Give the row of a node back to its pool. rows: State.free_rows."""
    pool = types[POOL, of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]]
    rows[pools[ROWS_BEGIN, pool] + pools[NUM_FREE, pool]] = of_nodes[ROW, node]
    pools[NUM_FREE, pool] += 1
    of_nodes[ROW, node] = NOWHERE


@compiled
def free_rows(of_nodes: Ints, of_subgraphs: Ints, types: Ints, pools: Ints, rows: Ints, nodes: Ints) -> None:
    """Give the rows of these nodes back to their pools: by cell type, and in the order of the nodes within a type.

    The nodes are distinct, and each has a row. rows: State.free_rows.
    """
    if len(nodes) == 0:
        return
    first = of_subgraphs[TYPE, of_nodes[SUBGRAPH, nodes[0]]]
    most = first
    for node in nodes:
        type_id = of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
        first, most = min(first, type_id), max(most, type_id)
    for type_id in range(first, most + 1):
        for node in nodes:
            if of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]] == type_id:
                free_row(of_nodes, of_subgraphs, types, pools, rows, node)


@compiled
def let_go(places: Ints, of_nodes: Ints, of_subgraphs: Ints) -> tuple[Ints, Ints, Ints]:
    """Hold these nodes no longer, but for those on a worker and those in a run that goes on.

    places: [extents, 2] first node, and number of nodes. Returns the nodes whose rows nobody needs any more; the nodes
    that stay held, and for each of these the node whose end it waits for.
    """
    count = 0
    for k in range(len(places)):
        count += places[k, 1]
    unused, held, ends = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    num_unused, num_held = 0, 0
    for k in range(len(places)):
        for node in range(places[k, 0], places[k, 0] + places[k, 1]):
            end = of_subgraphs[END, of_nodes[SUBGRAPH, node]]
            tail = end - 1 if end > 0 else node
            has_row, is_done = of_nodes[ROW, node] != NOWHERE, of_nodes[STATE, tail] == DONE
            if has_row and not is_done and of_nodes[HELD, node] > 0:
                held[num_held], ends[num_held] = node, tail
                num_held += 1
                continue
            of_nodes[HELD, node] = 0
            if has_row and is_done and of_nodes[USES, node] == 0:
                unused[num_unused] = node
                num_unused += 1
    return unused[:num_unused], held[:num_held], ends[:num_held]
