"""All tables of the scheduler as one value for compiled loops.

A compiled loop is called with the addresses of the tables, in one array: to look at twenty arrays at every call takes
longer than what it does. Inside it the tables are ordinary arrays, whose bounds can be checked (NUMBA_BOUNDSCHECK=1).
The arena owns the memory, and writes the addresses anew when a table grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray as _carray  # type: ignore[attr-defined]
from numba import types as _types
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled_inline, compiled_merged, config, machine_code

carray: Any = _carray
types: Any = _types


class State(NamedTuple):
    """The tables, for compiled loops. `layout` says what their fields mean. Those of nodes, subgraphs, requests and
    extents are records (see `records` of the arena): what is known of one of these is in one place of memory.

    - nodes: [NODE_FIELDS, nodes]. subgraphs: [SUBGRAPH_FIELDS, subgraphs]. consumer: [edges] the node that reads.
    - source_table, source: [ports, nodes] for each input, its table and the node that computes it. `source` means
      nothing for host tables and ZERO_TABLE. Of an input that is a memory: the table and the first of its nodes.
    - reach: [memories, nodes] for each memory of a node, how many nodes it has and how far apart (see STEP_SHIFT).
    - requests: [REQUEST_FIELDS, slots]. extents: [EXTENT_FIELDS, extents].
    - types: [TYPE_FIELDS, types]. ports: [types, ports] the inputs that some node has fed so far, ascending. seconds,
      known_s: [types, largest batch + 1] of a step, by its rows; and [types, doublings] of these as measured, NaN where
      none was. See `learn_steps`.
    - queue: [QUEUE_FIELDS, room] the ready nodes.
    - pools: [POOL_FIELDS, pools]. free_rows: [room]. is_host: [tables] whether a table comes from the host.
    - workers: [WORKER_FIELDS, workers]. lanes: [LANE_FIELDS, workers, types]. occupant: [room] the subgraph in each
      lane, or NOBODY. lane_tables: [types, workers, ports] the table of each state input.
    - free: [KINDS, SIZE_CLASSES] see `extents`. counts: [COUNTS].
    - depth_of: [nodes] depth of each node in flight (see `Depths`); empty unless the policy needs depths.
    - keeps: [room] lists of what the sequences of requests keep; see KeptLists.
    - rules: [RULES] how tasks are formed. budget_s: [1, 1] see CellPolicy.
    """

    nodes: Ints
    subgraphs: Ints
    consumer: Ints
    source: Ints
    source_table: Ints
    requests: Ints
    extents: Ints
    types: Ints
    ports: Ints
    seconds: NDArray[np.float64]
    queue: Ints
    pools: Ints
    free_rows: Ints
    is_host: NDArray[np.bool_]
    workers: Ints
    lanes: Ints
    occupant: Ints
    lane_tables: Ints
    free: Ints
    counts: Ints
    depth_of: Ints
    rules: Ints
    budget_s: NDArray[np.float64]
    known_s: NDArray[np.float64]
    reach: Ints
    keeps: Ints


MOST_AXES: Final = 3


def addresses_of(tables: Sequence[NDArray[Any]]) -> Ints:
    """Return where tables are: [tables, 1 + MOST_AXES] the address of each, and its shape."""
    return np.array([[t.ctypes.data, *t.shape, *[0] * (MOST_AXES - t.ndim)] for t in tables], np.int64)


@machine_code
def _int64_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.int64)(types.int64), _as_pointer


@machine_code
def _float64_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.float64)(types.int64), _as_pointer


@machine_code
def _bool_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.boolean)(types.int64), _as_pointer


def _as_pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@compiled_inline
def row_at(a: Ints, k: int) -> Ints:
    """Return table k, which has one axis."""
    row: Ints = carray(_int64_pointer(a[k, 0]), (a[k, 1],))
    return row


@compiled_inline
def table_at(a: Ints, k: int) -> Ints:
    """Return table k, which has two axes."""
    table: Ints = carray(_int64_pointer(a[k, 0]), (a[k, 1], a[k, 2]))
    return table


@compiled_inline
def records_at(a: Ints, k: int) -> Ints:
    """Return table k, which has two axes, and whose columns are contiguous; see `records`."""
    table: Ints = carray(_int64_pointer(a[k, 0]), (a[k, 2], a[k, 1])).T
    return table


@compiled_inline
def _column_at(a: Ints, k: int) -> Ints:
    """Return table k, which has one axis, in the form that a field of records has."""
    table: Ints = carray(_int64_pointer(a[k, 0]), (a[k, 1], 1)).T[0]
    return table


@compiled_inline
def _block_at(a: Ints, k: int) -> Ints:
    table: Ints = carray(_int64_pointer(a[k, 0]), (a[k, 1], a[k, 2], a[k, 3]))
    return table


@compiled_inline
def float_table_at(a: Ints, k: int) -> NDArray[np.float64]:
    """Return table k, which has two axes, of float64."""
    table: NDArray[np.float64] = carray(_float64_pointer(a[k, 0]), (a[k, 1], a[k, 2]))
    return table


@compiled_inline
def _flags_at(a: Ints, k: int) -> NDArray[np.bool_]:
    table: NDArray[np.bool_] = carray(_bool_pointer(a[k, 0]), (a[k, 1],))
    return table


if config.DISABLE_JIT:  # the same without a compiler
    import ctypes

    def _array_at(a: Ints, k: int, num_axes: int, dtype: Any = np.int64) -> NDArray[Any]:
        address, *axes = a[k, : 1 + num_axes].tolist()
        size = int(np.prod(axes)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_byte * size).from_address(address) if size else b"", dtype).reshape(axes)

    row_at, table_at, _block_at = (partial(_array_at, num_axes=axes) for axes in (1, 2, 3))
    _column_at = row_at

    def records_at(a: Ints, k: int) -> Ints:
        return table_at(a[:, [0, 2, 1]], k).T

    float_table_at = partial(_array_at, num_axes=2, dtype=np.float64)
    _flags_at = partial(_array_at, num_axes=1, dtype=np.bool_)


@compiled_merged
def state_at(a: Ints) -> State:
    """Return the tables at these addresses; see `addresses_of`."""
    return State(
        records_at(a, 0),
        records_at(a, 1),
        _column_at(a, 2),
        records_at(a, 3),
        records_at(a, 4),
        records_at(a, 5),
        records_at(a, 6),
        table_at(a, 7),
        table_at(a, 8),
        float_table_at(a, 9),
        table_at(a, 10),
        table_at(a, 11),
        row_at(a, 12),
        _flags_at(a, 13),
        table_at(a, 14),
        _block_at(a, 15),
        row_at(a, 16),
        _block_at(a, 17),
        table_at(a, 18),
        row_at(a, 19),
        row_at(a, 20),
        row_at(a, 21),
        float_table_at(a, 22),
        float_table_at(a, 23),
        records_at(a, 24),
        row_at(a, 25),
    )
