"""What a step changes in the arena when it is submitted and when it has run: compiled loops over its rows.

Arrays that belong to the arena or the books are named as there, and are what the loops change; `nodes`, `subgraphs` and
`keys` say of what. All numbers are int64 except state (int8), pin and type (int16), and flags. Arrays that are returned
are fresh.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import DONE, NOWHERE, READY, SUBMITTED, NodeArrays, SubgraphArrays
from batchmaker.scheduler.commands import ZERO_TABLE
from batchmaker.scheduler.lanes import NOBODY
from batchmaker.scheduler.ready import NODE_BITS, NODE_MASK, Keys

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Short = NDArray[np.int16]


@compiled
def unpinned_of(pin: Short, subgraph: Ids, worker: int, keys: Keys) -> Flags:
    """Return which of these ready nodes may run on a worker: those of subgraphs that no other one is at. [keys]"""
    mask = np.empty(len(keys), np.bool_)
    for i in range(len(keys)):
        mask[i] = pin[subgraph[keys[i] & NODE_MASK]] in (NOWHERE, worker)
    return mask


@compiled
def submit(
    nodes: NodeArrays, subgraphs: SubgraphArrays, consumer: Ids, worker: int, keys: Keys, ranks: Ids
) -> tuple[Keys, Ids]:
    """A step of these ready nodes is on a worker: their dependencies are updated as if it had run.

    Their subgraphs are pinned to the worker and have as many more node-steps in flight. Single nodes are SUBMITTED.
    ranks: of their requests, or empty.
    Returns the keys of the nodes of these subgraphs that are ready now, in no order, and their ranks, or empty.
    """
    most = 0
    for key in keys:
        most += max(1, nodes.num_edges[key & NODE_MASK])
    ready, of = np.empty(most, np.int64), np.empty(most if len(ranks) > 0 else 0, np.int64)
    num_ready = 0
    for i in range(len(keys)):
        node = keys[i] & NODE_MASK
        mine = nodes.subgraph[node]
        subgraphs.in_flight[mine] += 1
        subgraphs.pin[mine] = worker
        before = num_ready
        if subgraphs.end[mine] > 0:  # a run feeds only other subgraphs
            if node + 1 < subgraphs.end[mine] and not subgraphs.open_ended[mine]:
                ready[num_ready] = keys[i] + 1
                num_ready += 1
        else:
            nodes.state[node] = SUBMITTED
            for edge in range(nodes.first_edge[node], nodes.first_edge[node] + nodes.num_edges[node]):
                fed = consumer[edge]
                if nodes.subgraph[fed] != mine:
                    continue
                nodes.pending[fed] -= 1
                if nodes.pending[fed] == 0:
                    nodes.state[fed] = READY
                    ready[num_ready] = (subgraphs.sequence[mine] << NODE_BITS) | fed
                    num_ready += 1
        if len(ranks) > 0:
            of[before:num_ready] = ranks[i]
    return ready[:num_ready], of[: num_ready if len(ranks) > 0 else 0]


@compiled
def end_step(
    in_flight: Ids,
    pin: Short,
    uses: Ids,
    held: Flags,
    row: Ids,
    source: Ids,
    source_table: Ids,
    is_host: Flags,
    value_ports: Ids,
    num_sequence_inputs: int,
    nodes: Ids,
    subgraphs: Ids,
    entering: Ids,
) -> tuple[Ids, Ids]:
    """A step has run and has read its inputs. Its subgraphs are free of the worker if nothing else of theirs is there.

    source, source_table: [ports, nodes]. is_host: [tables]. value_ports: ascending. nodes, subgraphs: [batch].
    entering: the nodes that have read the inputs from `num_sequence_inputs` on.
    Returns the nodes whose rows nobody will read any more, and [value_ports] how many of them were found up to the end
    of each port.
    """
    for mine in subgraphs:
        in_flight[mine] -= 1
        if in_flight[mine] == 0:
            pin[mine] = NOWHERE
    unused = np.empty(len(value_ports) * len(nodes), np.int64)
    found = np.empty(len(value_ports), np.int64)
    num_unused = 0
    for k in range(len(value_ports)):
        port = value_ports[k]
        for node in nodes if port < num_sequence_inputs else entering:
            table = source_table[port, node]
            if table == ZERO_TABLE or is_host[table]:
                continue
            read = source[port, node]
            uses[read] -= 1
            if uses[read] == 0 and not held[read] and row[read] != NOWHERE:
                unused[num_unused] = read
                num_unused += 1
        found[k] = num_unused
    return unused[:num_unused], found


@compiled
def stop_or_go_on(
    request: Ids,
    end: Ids,
    open_ended: Flags,
    sequence: Ids,
    lane: Ids,
    lane_worker: Short,
    occupant: Ids,
    dying: Ids,
    stopped: Flags,
    nodes: Ids,
    subgraphs: Ids,
) -> tuple[Ids, Ids, Keys]:
    """A step of runs that may stop has run: those that stop, or come to their last node, leave their lanes.

    lane, lane_worker: [subgraphs]; occupant: [lanes] of the worker that ran it. dying: slots of requests of which
    nothing more is submitted. stopped: [batch], or empty where none does. nodes, subgraphs: [batch].
    Returns the nodes at which runs are over and [as many] the last nodes of these runs, and the keys of the next nodes
    of the others, in no order.
    """
    over_at = np.empty(len(nodes), np.int64)
    last = np.empty(len(nodes), np.int64)
    following = np.empty(len(nodes), np.int64)
    num_over = num_following = 0
    for i in range(len(nodes)):
        node, mine = nodes[i], subgraphs[i]
        if not open_ended[mine]:
            continue
        if node + 1 == end[mine] or (len(stopped) > 0 and stopped[i]):
            over_at[num_over] = node
            last[num_over] = end[mine] - 1
            num_over += 1
            if lane[mine] != NOWHERE:
                occupant[lane[mine]] = NOBODY
                lane[mine] = NOWHERE
                lane_worker[mine] = NOWHERE
            continue
        goes_on = True
        for slot in dying:
            goes_on &= request[node] != slot
        if goes_on:
            following[num_following] = (sequence[mine] << NODE_BITS) | (node + 1)
            num_following += 1
    return over_at[:num_over], last[:num_over], following[:num_following]


@compiled
def finish(
    state: NDArray[np.int8],
    request: Ids,
    subgraph: Ids,
    external: Ids,
    first_edge: Ids,
    num_edges: Ids,
    consumer: Ids,
    left: Ids,
    nodes: Ids,
) -> tuple[Ids, Ids, Ids]:
    """These nodes are DONE: subgraphs wait for so many inputs less, requests have so many units less left.

    left: [slots]. nodes: single ones, and last ones of runs.
    Returns the subgraphs that wait for no other one now, in no order, and the slots of requests without work left, with
    the places in `nodes` of what they did last.
    """
    most = 0
    for node in nodes:
        most += num_edges[node]
    free = np.empty(most, np.int64)
    over, places = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
    num_free = num_over = 0
    for i in range(len(nodes)):
        node = nodes[i]
        state[node] = DONE
        for edge in range(first_edge[node], first_edge[node] + num_edges[node]):
            waiting = subgraph[consumer[edge]]
            if waiting == subgraph[node]:
                continue
            external[waiting] -= 1
            if external[waiting] == 0:
                free[num_free] = waiting
                num_free += 1
        slot = request[node]
        left[slot] -= 1
        if left[slot] == 0:
            over[num_over], places[num_over] = slot, i
            num_over += 1
    return free[:num_free], over[:num_over], places[:num_over]


@compiled
def release(
    state: NDArray[np.int8],
    request: Ids,
    pending: Ids,
    subgraph: Ids,
    type_id: Short,
    head: Ids,
    span: Ids,
    end: Ids,
    sequence: Ids,
    dying: Ids,
    num_types: int,
    first_sequence: int,
    subgraphs: Ids,
) -> tuple[Keys, Ids, int]:
    """These subgraphs have places in the queue, from `first_sequence` on, and their first nodes are READY.

    First nodes wait for no other of their subgraph. type_id: [subgraphs], the arena's `type`. dying: slots of requests
    whose subgraphs are left out.
    Returns the keys of the first nodes, ascending within each type; [types + 1] where each type's begin, and their
    number; how many subgraphs have got places.
    """
    most = 0
    for mine in subgraphs:
        most += 1 if end[mine] > 0 else span[mine]
    found = np.empty(most, np.int64)
    begins = np.zeros(num_types + 1, np.int64)
    num_found, next_sequence = 0, first_sequence
    for mine in subgraphs:
        alive = True
        for slot in dying:
            alive &= request[head[mine]] != slot
        if not alive:
            continue
        sequence[mine] = next_sequence
        for node in range(head[mine], head[mine] + (1 if end[mine] > 0 else span[mine])):
            if end[mine] > 0 or (subgraph[node] == mine and pending[node] == 0):
                state[node] = READY
                found[num_found] = (next_sequence << NODE_BITS) | node
                num_found += 1
                begins[type_id[mine] + 1] += 1
        next_sequence += 1
    for i in range(num_types):
        begins[i + 1] += begins[i]
    keys = np.empty(num_found, np.int64)
    place = begins.copy()
    for i in range(num_found):
        mine = type_id[subgraph[found[i] & NODE_MASK]]
        keys[place[mine]] = found[i]
        place[mine] += 1
    return keys, begins, next_sequence - first_sequence
