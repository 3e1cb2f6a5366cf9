"""All tables of the scheduler as one value for compiled loops.

A compiled loop is called with the addresses of the tables, in one array: to look at twenty arrays at every call takes
longer than what it does. Inside it the tables are ordinary arrays, whose bounds can be checked (NUMBA_BOUNDSCHECK=1).
The arena owns the memory, and writes the addresses anew when a table grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from batchmaker.compiled import compiled_inline, config

Ids = NDArray[np.int64]
_made: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic


class State(NamedTuple):
    """The tables, for compiled loops. `layout` says what their fields mean.

    - nodes: [NODE_FIELDS, nodes]. subgraphs: [SUBGRAPH_FIELDS, subgraphs]. consumer: [edges] the node that reads.
    - source_table, source: [ports, nodes] for each input, its table and the node that computes it. `source` means
      nothing for host tables and ZERO_TABLE.
    - requests: [REQUEST_FIELDS, slots]. extents: [EXTENT_FIELDS, extents].
    - types: [TYPE_FIELDS, types]. ports: [types, ports] the inputs that some node has fed so far, ascending. seconds:
      [types, largest batch + 1] of a step, by its rows.
    - queue: [QUEUE_FIELDS, room] the ready nodes.
    - pools: [POOL_FIELDS, pools]. free_rows: [room]. is_host: [tables] whether a table comes from the host.
    - workers: [WORKER_FIELDS, workers]. lanes: [LANE_FIELDS, workers, types]. occupant: [room] the subgraph in each lane,
      or NOBODY. lane_tables: [types, workers, ports] the table of each state input.
    - free: [KINDS, SIZE_CLASSES] see `extents`. counts: [COUNTS].
    - depth_of: [nodes] depth of each node in flight (see `Depths`); empty unless the policy needs depths.
    - rules: [RULES] how tasks are formed. budget_s: [1] see CellPolicy.
    """

    nodes: Ids
    subgraphs: Ids
    consumer: Ids
    source: Ids
    source_table: Ids
    requests: Ids
    extents: Ids
    types: Ids
    ports: Ids
    seconds: NDArray[np.float64]
    queue: Ids
    pools: Ids
    free_rows: Ids
    is_host: NDArray[np.bool_]
    workers: Ids
    lanes: Ids
    occupant: Ids
    lane_tables: Ids
    free: Ids
    counts: Ids
    depth_of: Ids
    rules: Ids
    budget_s: NDArray[np.float64]


NUM_TABLES: Final = len(State._fields)
MOST_AXES: Final = 3


def addresses_of(state: State) -> Ids:
    """Return where the tables are: [NUM_TABLES, 1 + MOST_AXES] the address of each, and its shape."""
    return np.array([[t.ctypes.data, *t.shape, *[0] * (MOST_AXES - t.ndim)] for t in state], np.int64)


@_made
def _int64_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.int64)(types.int64), _as_pointer


@_made
def _float64_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.float64)(types.int64), _as_pointer


@_made
def _bool_pointer(_: Any, address: Any) -> Any:
    return types.CPointer(types.boolean)(types.int64), _as_pointer


def _as_pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@compiled_inline
def _row(a: Ids, k: int) -> Ids:
    return carray(_int64_pointer(a[k, 0]), (a[k, 1],))


@compiled_inline
def _table(a: Ids, k: int) -> Ids:
    return carray(_int64_pointer(a[k, 0]), (a[k, 1], a[k, 2]))


@compiled_inline
def _block(a: Ids, k: int) -> Ids:
    return carray(_int64_pointer(a[k, 0]), (a[k, 1], a[k, 2], a[k, 3]))


@compiled_inline
def state_at(a: Ids) -> State:
    """Return the tables at these addresses; see `addresses_of`."""
    return State(
        _table(a, 0), _table(a, 1), _row(a, 2), _table(a, 3), _table(a, 4), _table(a, 5), _table(a, 6), _table(a, 7),
        _table(a, 8), carray(_float64_pointer(a[9, 0]), (a[9, 1], a[9, 2])), _table(a, 10), _table(a, 11), _row(a, 12),
        carray(_bool_pointer(a[13, 0]), (a[13, 1],)), _table(a, 14), _block(a, 15), _row(a, 16), _block(a, 17),
        _table(a, 18), _row(a, 19), _row(a, 20), _row(a, 21), carray(_float64_pointer(a[22, 0]), (a[22, 1],)),
    )  # fmt: skip


if config.DISABLE_JIT:
    import ctypes

    _DTYPES: Final = {"seconds": np.float64, "budget_s": np.float64, "is_host": np.bool_}
    _AXES: Final = {"consumer": 1, "free_rows": 1, "is_host": 1, "occupant": 1, "counts": 1, "depth_of": 1, "rules": 1,
                    "budget_s": 1, "lanes": 3, "lane_tables": 3}  # fmt: skip

    def state_at(a: Ids) -> State:
        """As above, without a compiler."""
        found = []
        for name, (address, *shape) in zip(State._fields, a.tolist(), strict=True):
            axes, dtype = shape[: _AXES.get(name, 2)], np.dtype(_DTYPES.get(name, np.int64))
            size = int(np.prod(axes)) * dtype.itemsize
            memory = (ctypes.c_byte * size).from_address(address) if size else b""
            found.append(np.frombuffer(memory, dtype).reshape(axes))
        return State(*found)
