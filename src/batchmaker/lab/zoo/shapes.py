"""Cell types from shapes alone: modules are called with fake tensors, which have shapes and no values.

Nothing is computed and no memory is used, so modules on the meta device, too large for this machine, can be called too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchmaker.compile.export import example_rows, flat_module, flat_outputs, spec_of_rows
from batchmaker.compile.tracing_thread import in_tracing_thread
from batchmaker.errors import BatchmakerError, ModelError, ShapeError
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.model.cell import Cell
from batchmaker.model.initial_state import initial_state
from batchmaker.model.scope import Arguments

Watch = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
"""Makes what watches a call from its inputs: one row of each."""

_UNWATCHED: Final = nullcontext()


@final
class ShapeRegistry:
    """Cell types from shapes alone, in place of a CellRegistry.

    Nothing is bound, so a model on the meta device can be unfolded. Each cell is a type of its own. types and modules
    are those of the cells used so far.
    """

    def __init__(self) -> None:
        self._types: dict[Cell, CellType] = {}
        self.types: list[CellType] = []
        self.modules: list[nn.Module] = []
        self.num_step_inputs: dict[TypeId, int] = {}
        self._forms: dict[tuple[TypeId, int], CellType] = {}

    def type_of(self, cell: Cell) -> CellType | None:
        """Return the type of a cell that has been used before."""
        return self._types.get(cell)

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...], arguments: Arguments = ()) -> CellType:
        """Give a cell a type. ModelError as `call_with_shapes`."""
        name = cell.name or type(cell.module).__name__
        outputs = call_with_shapes(cell.module, inputs, f"cell {name!r}")
        cell_type = CellType(
            TypeId(len(self.types)), name, inputs, outputs, cell.batch_sizes, cell.priority, cell.host_outputs
        )
        self.types.append(cell_type)
        self.modules.append(cell.module)
        self._types[cell] = cell_type
        return cell_type

    def other(
        self, cell: Cell, inputs: tuple[ValueSpec, ...], error: ShapeError, arguments: Arguments = ()
    ) -> NoReturn:
        """Raise the error: only one shape of a cell's inputs is supported here."""
        raise error

    def in_runs(self, cell: CellType, num_step_inputs: int) -> CellType:
        """Return the type for chains of a cell with so many inputs per step; see CellTypes."""
        if self.num_step_inputs.setdefault(cell.type_id, num_step_inputs) == num_step_inputs:
            return cell
        form = self._forms.get((cell.type_id, num_step_inputs))
        if form is None:
            form = cell.in_form(TypeId(len(self.types)), num_step_inputs)
            self._forms[cell.type_id, num_step_inputs] = form
            self.num_step_inputs[form.type_id] = num_step_inputs
            self.types.append(form)
            self.modules.append(self.modules[cell.type_id])
        return form

    def whole_form(self, cell: Cell, cell_type: CellType, arguments: Arguments, num_step_inputs: int) -> None:
        """Return nothing: runs are steps here."""

    def zero_state(self, cell: Cell, step_inputs: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
        """Return the specs of a chain's initial state when the unfold function gives none."""
        with torch.device(_device(cell.module)):
            return initial_state(cell, step_inputs)


def call_with_shapes(
    module: nn.Module, inputs: tuple[ValueSpec, ...], where: str, watch: Watch | None = None
) -> tuple[ValueSpec, ...]:
    """Return the specs of the outputs' rows for one row of the inputs; the module is put in eval mode.

    where: names the module in errors. watch: watches the call. Runs in the tracing thread. ModelError if the module
    refuses such rows, or if what it does depends on their values.
    """
    return in_tracing_thread(_called, module, inputs, where, watch)


def _called(module: nn.Module, inputs: tuple[ValueSpec, ...], where: str, watch: Watch | None) -> tuple[ValueSpec, ...]:
    runnable = flat_module(module)
    with _plain_kernels(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), torch.device(_device(module)):
        rows = example_rows(inputs, 1)
        try:
            with _UNWATCHED if watch is None else watch(rows):
                outputs = flat_outputs(runnable(*rows), where)
        except BatchmakerError:
            raise
        except Exception as error:  # the module's code may raise anything
            declared = ", ".join(map(str, inputs))
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{where}: it cannot be called with the shapes of a row of ({declared}): {reason}. What it does may "
                "not depend on values, and the row must be what forward() takes."
            ) from error
    for index, output in enumerate(outputs):
        if output.dim() == 0 or output.shape[0] != 1:
            raise ShapeError(
                f"{where}, output {index}: got shape {tuple(output.shape)} for a batch of 1, expected (1, ...). "
                "Keep the batch in dimension 0 of every output."
            )
    return tuple(map(spec_of_rows, outputs))


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


def _device(module: nn.Module) -> torch.device:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
