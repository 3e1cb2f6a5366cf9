"""Errors for values that do not fit an input of a cell."""

from __future__ import annotations

from collections.abc import Sequence

from batchmaker.errors import InvalidRequestError, ModelError, ShapeError
from batchmaker.graph.spec import MAX_FETCHED, CellType, ValueSpec
from batchmaker.graph.trees import SequenceArgument


def input_of(cell: str, places: Sequence[int], port: int) -> str:
    """Name an input of a cell for messages. places: see CellType."""
    return f"cell {cell!r}, input {places[port] if port < len(places) else port}"


def misfit(cell: CellType, port: int, spec: ValueSpec) -> ShapeError:
    """Return the error for a value that the input does not accept."""
    return ShapeError(
        f"{input_of(cell.name, cell.places, port)}: got {spec}, expected {cell.inputs[port]}; "
        "match the shape and dtype or unfold through a projection"
    )


def foreign(where: str) -> InvalidRequestError:
    """Return the error for a handle of another request."""
    return InvalidRequestError(
        f"{where}: got a value of another request, whose unfold function made it; call the cell in this request too"
    )


def never_computed(where: str) -> InvalidRequestError:
    """Return the error for the output of a run over an empty sequence."""
    return InvalidRequestError(
        f"{where}: got an output of a run over an empty sequence, which has none; only its state, the last outputs, is "
        "there: that is `init`"
    )


def check_may_be_fetched(output: int) -> None:
    """Raise ModelError for an output that cannot go to the host."""
    if output >= MAX_FETCHED:
        raise ModelError(
            f"output {output} of a cell is returned, yielded or decides, which only the first {MAX_FETCHED} outputs "
            "can; let forward() return it earlier, or join outputs into one tensor"
        )


def common_length(cell: CellType, arguments: Sequence[SequenceArgument]) -> int:
    """Return the number of elements of each sequence. InvalidRequestError if they differ or one is empty."""
    length = len(arguments[0]) if arguments else 0
    for argument in arguments[1:]:
        if len(argument) != length:
            lengths = sorted({len(argument) for argument in arguments})
            raise InvalidRequestError(f"cell {cell.name!r}: sequences of different lengths {lengths}")
    if length == 0:
        raise InvalidRequestError(f"cell {cell.name!r}: the sequence is empty; at least one element is needed")
    return length
