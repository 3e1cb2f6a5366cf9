"""The operations of a cell for the NPU model, found by calling its module with shapes (`call_with_shapes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from batchmaker.compile.export import spec_of_rows
from batchmaker.errors import ModelError
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.lab.zoo.shapes import call_with_shapes
from batchmaker_papers.npu.accelerator import Operation, Weights
from batchmaker_papers.npu.arithmetic import AtenCall, merged, operations_of_call


class CellModules(Protocol):
    """Cell types with their modules: a CellRegistry, a ShapeRegistry."""

    @property
    def types(self) -> Sequence[CellType]: ...

    @property
    def modules(self) -> Sequence[nn.Module]: ...


def operations_of(module: nn.Module, inputs: Sequence[ValueSpec | Tensor]) -> tuple[Operation, ...]:
    """Return the operations of the module for one request; it is put in eval mode.

    inputs: specs of a row, or batches [n, *shape] as examples of it. ModelError if the module refuses such rows, if its
    operations depend on their values, or if it applies weights in an unknown way.
    """
    return _counted(module, tuple(map(_row, inputs)), f"module {type(module).__name__!r}")


def registry_operations(registry: CellModules) -> dict[str, tuple[Operation, ...]]:
    """Return the operations of every cell by its name. ModelError as `operations_of`, and if names repeat."""
    types = registry.types
    if len({cell.name for cell in types}) < len(types):
        raise ModelError(f"cells share a name among {', '.join(cell.name for cell in types)}; give each its own")
    return {
        cell.name: _counted(module, cell.inputs, f"cell {cell.name!r}")
        for cell, module in zip(types, registry.modules, strict=True)
    }


def _row(row: ValueSpec | Tensor) -> ValueSpec:
    return row if isinstance(row, ValueSpec) else spec_of_rows(row)


def _counted(module: nn.Module, inputs: tuple[ValueSpec, ...], where: str) -> tuple[Operation, ...]:
    counters: list[_Counter] = []

    def watch(rows: Sequence[Tensor]) -> _Counter:
        counters.append(_Counter(rows))
        return counters[0]

    call_with_shapes(module, inputs, where, watch)
    return merged(counters[0].operations)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of every ATen call that involves the request.

    A value involves the request if it was computed from `rows`; everything else is weights, or computed from them once.
    """

    def __init__(self, rows: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._alive: list[Tensor] = list(rows)  # a storage's address identifies it only while it is alive
        self._own = {_storage(row) for row in rows}
        self._read: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive += [*inputs, *made]
        if made and not all(map(self._is_shared, inputs)):
            call = AtenCall(func, args, tuple(inputs), made[0], self._is_shared, self._weights)
            self.operations += operations_of_call(call)
            self._own.update(map(_storage, made))
        return result

    def _is_shared(self, tensor: Tensor) -> bool:
        return _storage(tensor) not in self._own

    def _weights(self, tensor: Tensor) -> Weights | None:
        values = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            values *= size if stride else 1
        place = (_storage(tensor), int(tensor.storage_offset()), values)
        if place in self._read:
            return None
        self._read.add(place)
        return Weights(values)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
