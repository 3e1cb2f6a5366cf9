"""Modules as flat functions of rows: examples from specs, trial runs and `torch.export`."""

from __future__ import annotations

import inspect
import io
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from batchmaker.compile.causes import cause_of, count_cause
from batchmaker.compile.forward_signature import signature_of
from batchmaker.compile.tracing_thread import in_tracing_thread
from batchmaker.errors import RAISED_BY_USERS, ModelError, ShapeError, said_by
from batchmaker.graph.spec import ValueSpec

_KINDS = "float32, bfloat16, float16, float64, int64, int32, int16, int8, uint8, bool"
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KINDS.split(", ")}
_CHECKS: Final = ("_assert", "_functional_assert", "sym_constrain", "_functional_sym_constrain")
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def torch_dtype(name: str, where: str = "a value") -> torch.dtype:
    """Return the torch dtype of this short name. For an unknown one ModelError names the known ones."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ModelError(f"{where}: dtype {name!r} is not known; use one of {_KINDS}") from None


def row_bytes(spec: ValueSpec) -> int:
    """Return the bytes of one value."""
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def dtype_name(tensor: Tensor) -> str:
    """Return the short name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def float_dtype(module: nn.Module) -> str:
    """Return the dtype of the module's first floating weight, else float32."""
    return next((dtype_name(weight) for weight in module.parameters() if weight.dtype.is_floating_point), "float32")


class Rows(Protocol):
    """What has the shape and dtype of a batch: a tensor, or what stands for one in a graph."""

    @property
    def shape(self) -> Sequence[Any]:
        """Sizes, dimension 0 first."""

    @property
    def dtype(self) -> torch.dtype:
        """Kind of its elements."""


def spec_of_rows(batch: Rows) -> ValueSpec:
    """Return the spec of one row of a batch [n, *shape]."""
    name = _NAMES.get(batch.dtype)
    if name is None:
        raise ModelError(f"values of dtype {batch.dtype} cannot be kept in rows; use one of {_KINDS}")
    return ValueSpec(tuple(int(size) for size in batch.shape[1:]), name)


def example_rows(specs: Iterable[ValueSpec], num_rows: int, *, random: bool = False) -> tuple[Tensor, ...]:
    """Return one batch [num_rows, *shape] per spec: zeros, or normal noise for floating ones.

    Integers are always zero, the one token that every embedding has.
    """
    batches = []
    for spec in specs:
        dtype = torch_dtype(spec.dtype)
        shape = (num_rows, *spec.shape)
        noisy = random and dtype.is_floating_point
        batches.append(torch.randn(shape).to(dtype) if noisy else torch.zeros(shape, dtype=dtype))
    return tuple(batches)


class LSTMCellRows(nn.Module):
    """nn.LSTMCell as a flat cell: (x, h, c) -> (h, c)."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state: tuple[Tensor, Tensor] = self.cell(x, (h, c))
        return state


def flat_module(module: nn.Module) -> nn.Module:
    """Return the module, in eval mode, in a form that takes and returns single tensors."""
    flat = LSTMCellRows(module) if isinstance(module, nn.LSTMCell) else module
    return flat.eval()


def flat_outputs(outputs: Any, where: str) -> tuple[Tensor, ...]:
    """Flatten a module's result into a tuple of tensors. ModelError if it contains anything else."""
    leaves = pytree.tree_leaves(outputs)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise ModelError(
                f"{where}, output {index}: got {type(leaf).__name__}, expected a tensor with one row "
                "per node. Return tensors only."
            )
    if not leaves:
        raise ModelError(f"{where}: returned nothing, expected at least one tensor")
    return tuple(leaves)


def infer_outputs(
    module: nn.Module,
    inputs: tuple[ValueSpec, ...],
    where: str,
    batches: Sequence[tuple[Tensor, ...]] | None = None,
) -> tuple[ValueSpec, ...]:
    """Return the outputs' row specs, found by running batches, by default of two and three random rows.

    Raises ModelError if the module refuses the declared inputs, ShapeError if an output does not keep the batch in
    dimension 0 or its row shape depends on the batch.
    """
    if not inputs:
        raise ModelError(f"{where}: declares no inputs, expected at least one. Its dimension 0 is the batch.")
    seen: dict[int, tuple[ValueSpec, ...]] = {}
    for rows in batches or [example_rows(inputs, num_rows, random=True) for num_rows in (2, 3)]:
        num_rows = len(rows[0])
        try:
            with torch.no_grad():
                returned = module(*[row.clone() for row in rows])
        except RAISED_BY_USERS as error:
            raise _refused(module, inputs, where, rows, error) from error
        outputs = flat_outputs(returned, where)
        for index, output in enumerate(outputs):
            if output.dim() == 0 or output.shape[0] != num_rows:
                raise ShapeError(
                    f"{where}, output {index}: got shape {tuple(output.shape)} for a batch of {num_rows}, "
                    f"expected ({num_rows}, ...). Keep the batch in dimension 0 of every output."
                )
        seen[num_rows] = tuple(spec_of_rows(output) for output in outputs)
    check_alike(seen, where)
    return next(iter(seen.values()))


def check_alike(seen: Mapping[int, tuple[ValueSpec, ...]], where: str) -> None:
    """ShapeError unless the rows of outputs, by number of rows in a batch, are the same at each."""
    first, *others = seen
    for other in others:
        if seen[first] != seen[other]:
            raise ShapeError(
                f"{where}: {first} rows gave ({', '.join(map(str, seen[first]))}), "
                f"{other} rows ({', '.join(map(str, seen[other]))}). "
                "The shape of a row may not depend on the batch."
            )


ANY_SIZE: Final = (
    "forward() gets batches of any size in dimension 0, 1 too, where squeeze() and `if len(x) == 1` do something else. "
    "If only some sizes are possible, say which: bm.Cell(module, batch_sizes=[...]); independent_rows=False is for one "
    "row a call."
)
"""What to do about a module that takes batches of some sizes only."""


def _refused(
    module: nn.Module, inputs: tuple[ValueSpec, ...], where: str, rows: tuple[Tensor, ...], error: BaseException
) -> ModelError:
    """Return the error for a module that raised in its trial: what is wrong with its inputs, or its own error.

    If zeros of the same form run, the values are at fault, and not the form.
    """

    zeros = example_rows(inputs, len(rows[0]))

    def runs(specs: tuple[ValueSpec, ...]) -> bool:
        """Whether it runs with inputs of other specs: the same values where the shape is the same, else zeros."""
        values = [
            row.to(torch_dtype(spec.dtype)) if row.shape[1:] == spec.shape else example_rows((spec,), len(row))[0]
            for row, spec in zip(rows, specs, strict=True)
        ]
        return _runs(module, tuple(values))

    declared = ", ".join(map(str, inputs))
    count = count_cause(module, len(inputs))
    if count is not None:
        return ModelError(f"{where}: {count} ({declared}). Give a value for each: inputs first, then the state.")
    cause = None if _runs(module, zeros) else cause_of(module, inputs, runs)
    if cause is not None:
        return ShapeError(f"{where}, {cause}")
    size = len(rows[0])
    raised = f"{where}: a trial run with a batch of {size} (rows of {declared}) raised {said_by(error)}."
    others = [other for other in (1, 2, 3) if other != size and _runs(module, example_rows(inputs, other))]
    if others:
        return ModelError(f"{raised} With a batch of {others[-1]} it runs. {ANY_SIZE}")
    return ModelError(f"{raised} Give one value for each argument of forward(), with the shape and dtype of one row.")


def _runs(module: nn.Module, rows: tuple[Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            module(*[row.clone() for row in rows])
    except RAISED_BY_USERS:
        return False
    return True


def said_first(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def export_cell(
    module: nn.Module, inputs: tuple[ValueSpec, ...], *, max_batch: int = 4096
) -> torch.export.ExportedProgram:
    """Trace the module to a graph whose inputs all share a dynamic dimension 0.

    nn.LSTMCell is traced as (x, h, c) -> (h, c). max_batch limits the range for which the graph is checked, not the
    batches that batchmaker may run. Errors of torch.export are not caught. Runs in the tracing thread.
    """
    return in_tracing_thread(_export_cell, module, inputs, max_batch)


def _export_cell(module: nn.Module, inputs: tuple[ValueSpec, ...], max_batch: int) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=max(max_batch, 3))
    return _exported(module, example_rows(inputs, 3), tuple({0: batch} for _ in inputs))


MOST_ROOM: Final = 1 << 20
"""Most steps for which the graph of a form for whole runs is checked."""


def export_whole(
    module: nn.Module, inputs: tuple[ValueSpec, ...], columns: int, *, max_batch: int = 4096
) -> torch.export.ExportedProgram:
    """Trace a user's form for whole runs to a graph for any number of runs, and any room for their steps.

    inputs: of a step; the first `columns` are given at each. As `export_cell` otherwise.
    """
    return in_tracing_thread(_export_whole, module, inputs, columns, max_batch)


def _export_whole(
    module: nn.Module, inputs: tuple[ValueSpec, ...], columns: int, max_batch: int
) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=max(max_batch, 3))
    room = torch.export.Dim("room", min=1, max=MOST_ROOM)
    rows = example_rows([ValueSpec((5, *spec.shape), spec.dtype) for spec in inputs[:columns]], 3)
    examples = (*rows, torch.tensor([5, 3, 1]), *example_rows(inputs[columns:], 3))
    shapes = ({0: batch, 1: room},) * columns + ({0: batch},) * (len(inputs) - columns + 1)
    return _exported(module, examples, shapes)


def _exported(module: nn.Module, examples: tuple[Tensor, ...], shapes: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """shapes: the dimensions of each input that are not fixed."""
    flat = flat_module(module)
    kinds = [parameter.kind for parameter in signature_of(flat).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # torch.export counts *inputs as one argument, a tuple, if any come
        first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        shapes = (*shapes[:first], shapes[first:]) if len(shapes) > first else shapes
    with warnings.catch_warnings(), _quiet_torch(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(flat, examples, dynamic_shapes=shapes, strict=False)


def without_writes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the program with operations that write over what they are given written as ones that do not."""
    if not any(_is_mutable(node) for node in program.graph.nodes):
        return program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch copies its own deprecated classes
        functional: torch.export.ExportedProgram = in_tracing_thread(program.run_decompositions, {})
    return functional


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def is_check(node: fx.Node) -> bool:
    """Whether the node only looks at a value and raises where it is not as it should be: no result needs it."""
    return node.op == "call_function" and str(getattr(node.target, "__name__", "")).startswith(_CHECKS)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch from logging and printing pages about a module that cannot be traced; the error is enough."""
    of_torch = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name[:5] == "torch"]
    loggers = [logger for logger in of_torch if not logger.disabled]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger in loggers:
            logger.disabled = False
