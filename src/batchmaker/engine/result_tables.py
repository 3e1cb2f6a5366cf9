"""Tables of values that have come to the host, each at the number of its node."""

from __future__ import annotations

import math
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.executor.tables import as_array
from batchmaker.graph.spec import ValueSpec

Nodes = NDArray[np.int64]

NARROW_BYTES: Final = 256
"""Values up to this size have a table. It has a row for every node number there is: wider ones would take too much."""


@final
class ResultTable:
    """One output of cells that give such values, at the numbers of their nodes. Made and grown by ResultTables."""

    __slots__ = ("_spec", "_width", "rows")

    def __init__(self, spec: ValueSpec, num_rows: int) -> None:
        self._spec = spec
        self._width = math.prod(spec.shape)
        shape = (num_rows,) if self._width == 1 else (num_rows, self._width)
        self.rows: NDArray[Any] = np.zeros(shape, as_array(torch.empty(0, dtype=torch_dtype(spec.dtype))).dtype)

    def write(self, nodes: Nodes, values: Tensor) -> None:
        """Store what has come of these nodes: [count, *shape], or numbers [count] for all parts of each."""
        self.rows[nodes] = (
            as_array(values).reshape(-1) if self._width == 1 else as_array(values).reshape(len(nodes), -1)
        )

    def read(self, nodes: Nodes) -> Tensor:
        """Return what is stored of these nodes, [count, *shape], as a tensor of its own."""
        values = torch.from_numpy(self.rows.take(nodes, 0))
        if self._spec.dtype == "bfloat16":
            values = values.view(torch.bfloat16)
        return values.view(len(nodes), *self._spec.shape) if self._spec.shape else values


@final
class ResultTables:
    """All tables, by output and kind of value, for node numbers below the greatest that `fit` was told of."""

    __slots__ = ("_num_rows", "_tables")

    def __init__(self) -> None:
        self._num_rows = 1024
        self._tables: dict[tuple[int, tuple[int, ...], str], ResultTable | None] = {}

    def fit(self, num_rows: int) -> None:
        """Make room for node numbers below this."""
        if num_rows <= self._num_rows:
            return
        self._num_rows = max(2 * self._num_rows, num_rows)
        for table in self._tables.values():
            if table is not None:
                grown = np.zeros((self._num_rows, *table.rows.shape[1:]), table.rows.dtype)
                grown[: len(table.rows)] = table.rows
                table.rows = grown

    def find(self, output: int, spec: ValueSpec) -> ResultTable | None:
        """Return the table of an output, None where its values are too wide to have one."""
        key = (output, spec.shape, spec.dtype)
        try:
            return self._tables[key]
        except KeyError:
            size = math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
            made = self._tables[key] = ResultTable(spec, self._num_rows) if 0 < size <= NARROW_BYTES else None
            return made
