"""The arguments that an unfold function gives to cells: values, sequences of values, or data. Data is laid out here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.compile.declaration import Declared
from batchmaker.compiled import int64s
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.argument_errors import foreign, input_of, never_computed
from batchmaker.graph.recorder import Argument
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.graph.trees import SequenceArgument
from batchmaker.graph.values import HostValues, Output, Value, ValueSequence
from batchmaker.model.host_values import converted, host_sequence, host_value, rows_as_declared
from batchmaker.model.stand_ins import StandIn


class CalledCell(Protocol):
    """The part of a cell that is needed to read its arguments; see `batchmaker.model.cell.Cell`."""

    @property
    def name(self) -> str | None: ...

    @property
    def module(self) -> Any: ...

    @property
    def places(self) -> tuple[int, ...]: ...

    @property
    def declared(self) -> Declared | None: ...

    def data_dtype(self, port: int) -> str: ...


def where(cell: CalledCell, port: int | None = None) -> str:
    """Name a cell, or one of its inputs, for messages."""
    name = cell.name or type(cell.module).__name__
    return f"cell {name!r}" if port is None else input_of(name, cell.places, port)


def single(cell: CalledCell, argument: Any, cell_type: CellType | None, port: int) -> Argument:
    """Return one value for an input. cell_type: the cell's type, or None at first use."""
    if type(argument) is Value:
        return argument
    return host_value(argument, _declared(cell, cell_type, port), cell.data_dtype(port), where(cell, port))


def column(cell: CalledCell, sequence: Any, cell_type: CellType | None, port: int) -> SequenceArgument:
    """Return a sequence for an input, one element per call. cell_type: the cell's type, or None at first use."""
    if type(sequence) is ValueSequence:
        if not sequence.open_ended:
            return sequence
        len(sequence)  # an error if the loop has no length yet
        sequence = sequence.values
    if type(sequence) is np.ndarray and cell_type is not None and port < len(cell_type.inputs):
        rows = rows_as_declared(sequence, cell_type.inputs[port])
        if rows is not None:
            return rows
    if type(sequence) is not StandIn and isinstance(sequence, list | tuple) and set(map(type, sequence)) == {Value}:
        return sequence_of(sequence, where(cell, port))
    return host_sequence(sequence, _declared(cell, cell_type, port), cell.data_dtype(port), where(cell, port))


def fitted(cell: CalledCell, arguments: Sequence[Any], cell_type: CellType, first: int = 0) -> list[Any]:
    """Return arguments for the inputs from `first` on, laid out before the type was known, as the type takes them."""
    made = list(arguments)
    for port, (argument, spec) in enumerate(zip(arguments, cell_type.inputs[first:], strict=False), start=first):
        if isinstance(argument, HostValues) and argument.spec.dtype != spec.dtype:
            values = converted(argument.values, spec, where(cell, port))
            made[port - first] = HostValues(values, argument.count, spec)
    return made


def as_floats(arguments: Sequence[Any], specs: tuple[ValueSpec, ...], dtype: str) -> tuple[ValueSpec, ...]:
    """Return specs in which integers that came with the request are floats."""
    return tuple(
        [
            ValueSpec(spec.shape, dtype) if isinstance(argument, HostValues) and spec.dtype == "int64" else spec
            for argument, spec in zip(arguments, specs, strict=False)
        ]
    )


def integers(cell: CalledCell, data: Any, what: str) -> NDArray[np.int64]:
    """Return a writable array of integers. Otherwise raise InvalidRequestError; `what` describes the argument."""
    try:
        array = np.asarray(data)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{where(cell)}: {what} ({error})") from None
    if array.size and array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{where(cell)}: {what}, got {array.dtype} of shape {array.shape}")
    return int64s(array)


def is_several(parts: tuple[Any, ...]) -> bool:
    """Whether a tuple holds several sequences, as opposed to the elements of one sequence."""
    return all(
        part.is_sequence
        if type(part) is StandIn
        else isinstance(part, ValueSequence | list | tuple)
        or (isinstance(part, np.ndarray | torch.Tensor) and part.ndim > 0)
        or (isinstance(part, HostValues))
        for part in parts
    )


def is_empty(sequence: Any) -> bool:
    """Whether this is a sequence without elements. False for anything that is no sequence, or has no length yet."""
    kind: type[Any] = type(sequence)
    if type(sequence) is StandIn:
        return sequence.is_sequence and len(sequence) == 0
    if kind is ValueSequence:
        return not sequence.open_ended and len(sequence.numbers) == 0
    if kind is Value:
        return bool(sequence.spec.shape[:1] == (0,))
    if isinstance(sequence, np.ndarray | torch.Tensor):
        return tuple(sequence.shape[:1]) == (0,)
    return isinstance(sequence, list | tuple) and not sequence


def likely_element(sequence: Any, float_dtype: str) -> ValueSpec | None:
    """Return the spec of what an empty sequence would hold; None if nothing tells."""
    if type(sequence) is ValueSequence:
        return sequence.spec
    if type(sequence) is not StandIn and isinstance(sequence, np.ndarray | torch.Tensor) and sequence.ndim > 1:
        return ValueSpec(tuple(sequence.shape[1:]), float_dtype)
    return None


def reversed_data(sequence: Any) -> Any:
    """Return data or a sequence of values in reverse order."""
    if type(sequence) is StandIn:
        is_tensor = isinstance(sequence.codes, torch.Tensor)
    else:
        is_tensor = isinstance(sequence, torch.Tensor)
    return sequence.flip(0) if is_tensor else sequence[::-1]


def _declared(cell: CalledCell, cell_type: CellType | None, port: int) -> ValueSpec | None:
    inputs = cell_type.inputs if cell_type is not None else cell.declared.inputs if cell.declared is not None else ()
    return inputs[port] if port < len(inputs) else None


def sequence_of(values: Sequence[Value], where: str) -> ValueSequence:
    """Make a sequence of the values of one output. The sequence keeps the values alive."""
    kinds = {value.of for value in values}
    if len({id(of.origin) for of in kinds}) > 1:
        raise foreign(where)
    if len({(of.index, of.spec.row_signature) for of in kinds}) > 1:
        raise InvalidRequestError(f"{where}: the values of a sequence must all be the same output of like cells")
    if any(value.is_missing for value in values):
        raise never_computed(where)
    of = values[0].of
    if len({of.type_id for of in kinds}) > 1:
        of = Output(of.index, of.spec, of.origin)  # of no type: rows of other outputs beside it are elsewhere
    return ValueSequence(np.array([value.node for value in values]), of, holds=tuple(values))
