"""The operations of a cell for the NPU model, found by running its module.

The module is called once with one row of fake tensors, which have shapes and no values. Nothing is computed and no
memory is used, so modules on the meta device, too large for this machine, can be counted too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from batchmaker.compile.export import example_rows, flat_module, flat_outputs, spec_of_rows
from batchmaker.compile.tracing_thread import in_tracing_thread
from batchmaker.errors import BatchmakerError, ModelError, ShapeError
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.lab.npu.accelerator import Operation, Weights
from batchmaker.lab.npu.arithmetic import AtenCall, merged, operations_of_call
from batchmaker.model.cell import Cell
from batchmaker.model.initial_state import initial_state
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import Given


def operations_of(module: nn.Module, inputs: Sequence[ValueSpec | Tensor]) -> tuple[Operation, ...]:
    """Return the operations of the module for one request; it is put in eval mode.

    inputs: specs of a row, or batches [n, *shape] as examples of it. ModelError if the module refuses such rows, if its
    operations depend on their values, or if it applies weights in an unknown way.
    """
    return _trial(module, tuple(map(_row, inputs)), f"module {type(module).__name__!r}")[0]


def registry_operations(registry: CellRegistry) -> dict[str, tuple[Operation, ...]]:
    """Return the operations of every bound cell by its name. ModelError as `operations_of`, and if names repeat."""
    return _by_name(
        registry.types,
        [
            _trial(module, cell.inputs, f"cell {cell.name!r}")[0]
            for cell, module in zip(registry.types, registry.modules, strict=True)
        ],
    )


@final
class ShapeRegistry:
    """Cell types from shapes alone, in place of a CellRegistry.

    Nothing is bound, so a model on the meta device can be unfolded. Each cell is a type of its own. types, outputs and
    operations are those of the cells used so far.
    """

    def __init__(self) -> None:
        self._types: dict[Cell, CellType] = {}
        self._operations: list[tuple[Operation, ...]] = []
        self.types: list[CellType] = []
        self.num_sequence_inputs: dict[TypeId, int] = {}
        self._forms: dict[tuple[TypeId, int], CellType] = {}

    @property
    def operations(self) -> dict[str, tuple[Operation, ...]]:
        """The operations of every cell by its name. ModelError if names repeat."""
        return _by_name(self.types, self._operations)

    def known(self, cell: Cell) -> CellType | None:
        """Return the type of a cell that has been used before."""
        return self._types.get(cell)

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...], given: Given = ()) -> CellType:
        """Count a cell's operations and give it a type. ModelError as `operations_of`."""
        name = cell.name or type(cell.module).__name__
        operations, outputs = _trial(cell.module, inputs, f"cell {name!r}")
        cell_type = CellType(
            TypeId(len(self.types)), name, inputs, outputs, cell.batch_sizes, cell.priority, cell.host_outputs
        )
        self.types.append(cell_type)
        self._operations.append(operations)
        self._types[cell] = cell_type
        return cell_type

    def other(self, cell: Cell, inputs: tuple[ValueSpec, ...], error: ShapeError, given: Given = ()) -> NoReturn:
        """Raise the error: only one shape of a cell's inputs is supported here."""
        raise error

    def in_runs(self, cell: CellType, num_sequence_inputs: int) -> CellType:
        """Return the type for chains of a cell with so many inputs per step; see CellTypes."""
        if self.num_sequence_inputs.setdefault(cell.type_id, num_sequence_inputs) == num_sequence_inputs:
            return cell
        form = self._forms.get((cell.type_id, num_sequence_inputs))
        if form is None:
            form = cell.in_form(TypeId(len(self.types)), num_sequence_inputs)
            self._forms[cell.type_id, num_sequence_inputs] = form
            self.num_sequence_inputs[form.type_id] = num_sequence_inputs
            self.types.append(form)
            self._operations.append(self._operations[cell.type_id])
        return form

    def whole_form(self, cell: Cell, known: CellType, given: Given, num_sequence_inputs: int) -> None:
        """Return nothing: runs are steps here."""

    def zero_state(self, cell: Cell, sequence: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
        """Return the specs of a chain's initial state when the unfold function gives none."""
        with torch.device(_device(cell.module)):
            return initial_state(cell, sequence)


def _by_name(
    types: Sequence[CellType], operations: Sequence[tuple[Operation, ...]]
) -> dict[str, tuple[Operation, ...]]:
    found = {cell.name: done for cell, done in zip(types, operations, strict=True)}
    if len(found) < len(types):
        raise ModelError(f"cells share a name among {', '.join(cell.name for cell in types)}; give each its own")
    return found


def _row(given: ValueSpec | Tensor) -> ValueSpec:
    return given if isinstance(given, ValueSpec) else spec_of_rows(given)


def _device(module: nn.Module) -> torch.device:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _trial(
    module: nn.Module, inputs: tuple[ValueSpec, ...], where: str
) -> tuple[tuple[Operation, ...], tuple[ValueSpec, ...]]:
    """Return the operations for one row, and the specs of the outputs' rows. Runs in the tracing thread."""
    return in_tracing_thread(_tried, module, inputs, where)


def _tried(
    module: nn.Module, inputs: tuple[ValueSpec, ...], where: str
) -> tuple[tuple[Operation, ...], tuple[ValueSpec, ...]]:
    runnable = flat_module(module)
    with _plain_kernels(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), torch.device(_device(module)):
        rows = example_rows(inputs, 1)
        counter = _Counter(rows)
        try:
            with counter:
                outputs = flat_outputs(runnable(*rows), where)
        except BatchmakerError:
            raise
        except Exception as error:  # the module's code may raise anything
            declared = ", ".join(map(str, inputs))
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{where}: its operations for a row of ({declared}) cannot be counted: {reason}. What it does may not "
                "depend on values, and the row must be what forward() takes."
            ) from error
    for index, output in enumerate(outputs):
        if output.dim() == 0 or output.shape[0] != 1:
            raise ShapeError(
                f"{where}, output {index}: got shape {tuple(output.shape)} for a batch of 1, expected (1, ...). "
                "Keep the batch in dimension 0 of every output."
            )
    return merged(counter.operations), tuple(map(spec_of_rows, outputs))


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Keep torch from calling whole recurrent layers and encoders as one operator, whose inside is not visible.

    The two settings are global to the process, for a few milliseconds.
    """
    encoders, layers = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(layers)
        torch.backends.mha.set_fastpath_enabled(encoders)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of every ATen call that involves the request.

    A value involves the request if it was computed from `rows`; everything else is weights, or computed from them once.
    """

    def __init__(self, rows: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._kept: list[Tensor] = list(rows)  # a storage's address identifies it only while it is alive
        self._own = {_storage(row) for row in rows}
        self._read: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._kept += [*given, *made]
        if made and not all(map(self._is_shared, given)):
            call = AtenCall(func, args, tuple(given), made[0], self._is_shared, self._weights)
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
