"""Where the rows of a step come from and where they go to: compiled loops over its rows.

Arrays that belong to the arena or the tables are named as there; all numbers are int64. Arrays that are returned are
fresh.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import NOWHERE
from batchmaker.scheduler.commands import ZERO_TABLE

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@compiled
def find_inputs(
    row: Ids, source: Ids, source_table: Ids, is_host: Flags, first_port: int, end_port: int, nodes: Ids, places: Ids
) -> tuple[Ids, Ids, Ids]:
    """Find where nodes have their inputs from `first_port` to before `end_port`.

    row: [nodes]. source, source_table: [ports, nodes]. is_host: [tables]. nodes: [n], at least one. places: [n] their
    positions in the batch, or empty where they are the batch.
    Returns rows, positions: [ports * n], and [parts, 4]: port, table, and from where to where its rows and positions
    go. Parts are in order of port and then of table; positions within a part are in the order of `nodes`.
    """
    count, num_ports = len(nodes), end_port - first_port
    rows = np.empty(num_ports * count, np.int64)
    positions = np.empty(num_ports * count, np.int64)
    parts = np.empty((num_ports * min(count, len(is_host)), 4), np.int64)
    num_parts = at = 0
    for port in range(first_port, end_port):
        begin = num_parts  # first the tables, in order, and how many rows are from each
        part = -1
        for node in nodes:
            table = source_table[port, node]
            if part < 0 or parts[part, 1] != table:
                part = begin
                while part < num_parts and parts[part, 1] < table:
                    part += 1
                if part == num_parts or parts[part, 1] != table:
                    for later in range(num_parts, part, -1):
                        parts[later, 1] = parts[later - 1, 1]
                        parts[later, 3] = parts[later - 1, 3]
                    parts[part, 1] = table
                    parts[part, 3] = 0
                    num_parts += 1
            parts[part, 3] += 1
        for part in range(begin, num_parts):
            size = parts[part, 3]
            parts[part, 0] = port
            parts[part, 2] = at
            parts[part, 3] = at
            at += size
        part = begin
        for i in range(count):
            node = nodes[i]
            table = source_table[port, node]
            if parts[part, 1] != table:
                part = begin
                while parts[part, 1] != table:
                    part += 1
            own = table == ZERO_TABLE or is_host[table]
            end = parts[part, 3]
            rows[end] = node if own else row[source[port, node]]
            positions[end] = places[i] if len(places) > 0 else i
            parts[part, 3] = end + 1
    return rows, positions, parts[:num_parts]


@compiled
def keep_outputs(
    uses: Ids,
    held: Flags,
    row: Ids,
    fetch: Ids,
    source: Ids,
    source_table: Ids,
    is_host: Flags,
    value_ports: Ids,
    first_table: int,
    end_table: int,
    nodes: Ids,
    owners: Ids,
) -> tuple[Ids, Ids, Ids, int, int]:
    """Find which outputs of a step others will read; a node takes over the row of its first child where it may.

    uses, held, row, fetch: [nodes]. source, source_table: [ports, nodes]. is_host: [tables]. value_ports: ascending;
    empty where no row may be taken over. first_table, end_table: the tables of the pool. nodes: [batch]. owners:
    [batch] the node under whose number others look for each one's outputs.
    It may where nobody else reads the child and its row is of the same pool. The child has no row then.
    Returns the owners that are read, their rows (NOWHERE where they need a fresh one) and positions; how many need a
    fresh one; the marks of all outputs that go to the host.
    """
    count = len(nodes)
    readers = np.empty(count, np.int64)
    rows = np.empty(count, np.int64)
    positions = np.empty(count, np.int64)
    num_kept = num_fresh = marks = 0
    for i in range(count):
        owner = owners[i]
        marks |= fetch[nodes[i]] | fetch[owner]
        if uses[owner] == 0 and not held[owner]:
            continue
        found = row[owner]
        if found == NOWHERE and len(value_ports) > 0:
            child, table = source[value_ports[0], owner], source_table[value_ports[0], owner]
            if first_table <= table < end_table and not held[child]:
                mine = 0
                for port in value_ports:
                    mine += source[port, owner] == child and not is_host[source_table[port, owner]]
                if uses[child] == mine:
                    found = row[owner] = row[child]
                    row[child] = NOWHERE
        num_fresh += found == NOWHERE
        readers[num_kept], rows[num_kept], positions[num_kept] = owner, found, i
        num_kept += 1
    return readers[:num_kept], rows[:num_kept], positions[:num_kept], num_fresh, marks


@compiled
def take_rows(row: Ids, free: Ids, num_free: int, nodes: Ids, rows: Ids) -> None:
    """Each of these nodes that has no row gets a free one, from the end of the first `num_free`.

    row: [nodes]. free: enough rows. nodes, rows: [n] their rows, NOWHERE where they have none; filled in.
    """
    for i in range(len(nodes)):
        if rows[i] == NOWHERE:
            num_free -= 1
            rows[i] = row[nodes[i]] = free[num_free]


@compiled
def vacate(row: Ids, subgraph: Ids, type_id: NDArray[np.int16], num_types: int, nodes: Ids) -> tuple[Ids, Ids]:
    """These nodes, each of which has a row, have none any more.

    row, subgraph: [nodes]. type_id: [subgraphs], the arena's `type`.
    Returns their rows by the type of the node, in their order within it; [types + 1] where each type's begin, and how
    many they are.
    """
    begins = np.zeros(num_types + 1, np.int64)
    for node in nodes:
        begins[type_id[subgraph[node]] + 1] += 1
    for i in range(num_types):
        begins[i + 1] += begins[i]
    rows = np.empty(len(nodes), np.int64)
    place = begins.copy()
    for node in nodes:
        mine = type_id[subgraph[node]]
        rows[place[mine]] = row[node]
        place[mine] += 1
        row[node] = NOWHERE
    return rows, begins


@compiled
def fetched(fetch: Ids, nodes: Ids, owners: Ids, output: int) -> Ids:
    """Return the positions at which this output goes to the host. fetch: [nodes] marks. nodes, owners: [batch]."""
    positions = np.empty(len(nodes), np.int64)
    count = 0
    for i in range(len(nodes)):
        if (fetch[nodes[i]] | fetch[owners[i]]) >> output & 1:
            positions[count] = i
            count += 1
    return positions[:count]
