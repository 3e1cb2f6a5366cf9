"""Values that come with a request: checked, converted to the declared dtype and laid out as one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.compile.export import torch_dtype
from batchmaker.errors import HandleError, InvalidRequestError, RequestShapeError
from batchmaker.graph.misuse import at_line
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import HostValues, Value, ValueSequence, are_below
from batchmaker.model.stand_ins import StandIn, holds_stand_ins, standing_in


def host_sequence(data: Any, spec: ValueSpec | None, float_dtype: str, where: str) -> HostValues:
    """Lay out one value per node.

    data: a list, NumPy array or tensor [count, *shape]. spec: the input's declaration, None at first use. float_dtype:
    dtype for floating data without a declaration; if it is an integer or bool dtype, it holds for those. Returns values
    [count, *shape] in the declared dtype, see `converted`. Raises InvalidRequestError or RequestShapeError, which name
    `where`.
    """
    stand_ins = standing_in.get()
    if stand_ins is not None and holds_stand_ins(data):
        return stand_ins.rows(data, spec)
    array = _as_array(data, where)
    if _kind(array) == "O":
        raise _no_numbers(data, array, spec, where)
    if array.ndim == 0:
        raise InvalidRequestError(f"{where}: got a single value, expected a sequence [count, *shape]")
    count = int(array.shape[0])
    if count == 0:
        raise InvalidRequestError(f"{where}: the sequence is empty; at least one element is needed")
    shape = tuple(array.shape[1:])
    if spec is None:
        spec = ValueSpec(shape, _default_dtype(array, float_dtype))
    elif shape != spec.shape:
        raise _other_shape(shape, spec, where)
    values = converted(array, spec, where)
    if spec.num_tokens is not None:
        _check_tokens(values, spec.num_tokens, where)
    return HostValues(values, count, spec)


def _other_shape(shape: tuple[int, ...], spec: ValueSpec, where: str) -> RequestShapeError:
    has_batch = len(shape) == len(spec.shape) + 1 and shape[1:] == spec.shape
    advice = "; a dimension too many: a request has no batch" if has_batch else ""
    return RequestShapeError(f"{where}: got rows of shape {shape}, expected {spec.shape}{advice}")


def rows_as_declared(array: NDArray[Any], spec: ValueSpec) -> HostValues | None:
    """Return an array that already is one value per node as declared; None for any other, even if it is wrong."""
    dtype = array.dtype
    if dtype is not _DTYPES.get(spec.dtype) or array.shape[1:] != spec.shape or not array.flags.carray:
        return None
    count = len(array) if array.ndim else 0
    if count == 0 or (spec.num_tokens is not None and (dtype is not _INT64 or not are_below(array, spec.num_tokens))):
        return None
    return HostValues(array, count, spec)


_INT64: Final = np.dtype(np.int64)
_DTYPES: Final = {name: np.dtype(name) for name in ("int64", "int32", "float32", "float64", "bool")}


def host_value(data: Any, spec: ValueSpec | None, float_dtype: str, where: str) -> HostValues:
    """Lay out a single value (shape `spec.shape`) as an array [1, *shape]; as host_sequence otherwise."""
    _check_is_one(data, where)
    stand_ins = standing_in.get()
    if stand_ins is not None and holds_stand_ins(data):
        return stand_ins.rows([data], spec)
    array = _as_array(data, where)
    if _kind(array) == "O":
        raise _no_numbers(data, array, spec, where)
    return host_sequence(array[None], spec, float_dtype, where)


def _check_is_one(data: Any, where: str) -> None:
    """HandleError for a sequence of values of cells, which is no row."""
    several = list(data) if type(data) in (list, tuple) else []
    if type(data) is tuple and set(map(type, several)) == {Value}:
        raise HandleError(
            f"{at_line()}{where}: got the {len(data)} outputs of a call or run, a tuple, expected one of them. Unpack "
            "them, as in `word, h = cell.run(...)`, or take one by its number: `cell.run(...)[-1]` is the last part of "
            "the state, also of a run over an empty sequence"
        )
    if type(data) is ValueSequence or Value in map(type, several):
        raise HandleError(
            f"{at_line()}{where}: got a sequence of values, expected one row. A cell reads a whole sequence as a "
            'memory: bm.Cell(module, memory="keys"), with the name of the parameter of forward() that takes it'
        )


@final
class CallData:
    """Lays out the data of single calls of one cell: see `graph.calls.Layout`.

    inputs: the cell's declaration. where: names an input in messages.
    """

    def __init__(self, inputs: Sequence[ValueSpec], float_dtype: str, where: Callable[[int], str]) -> None:
        self._inputs = inputs
        self._float_dtype = float_dtype
        self._where = where

    def snapshot(self, data: Any, port: int) -> Any:
        """Return a number unchanged, and a copy of anything else, so that the unfold function cannot change it."""
        if type(data) is StandIn:
            return data
        if isinstance(data, int | float | np.generic):
            _check_kind(_number_kind(data), self._inputs[port], np.asarray(data).dtype, self._where(port))
            return data
        _check_is_one(data, self._where(port))
        if holds_stand_ins(data):
            return host_value(data, self._inputs[port], self._float_dtype, self._where(port)).values[0]
        array = _as_array(data, self._where(port))
        if tuple(array.shape) != self._inputs[port].shape:
            raise _other_shape(tuple(array.shape), self._inputs[port], self._where(port))
        if _kind(array) == "O":
            raise _no_numbers(data, array, self._inputs[port], self._where(port))
        _check_kind(_kind(array), self._inputs[port], array.dtype, self._where(port))
        if isinstance(array, torch.Tensor):
            return array.clone()
        return array.copy() if array is data or array.base is not None else array

    def laid_out(self, data: Sequence[Any], port: int) -> HostValues:
        """Return one value per call, each as from `host_value`; in one pass if all are of one kind."""
        spec, where = self._inputs[port], self._where(port)
        if holds_stand_ins(data):
            return host_sequence(data, spec, self._float_dtype, where)
        rows = _stacked(data)
        if rows is not None:
            with suppress(InvalidRequestError):  # the code below reports the first wrong value
                return host_sequence(rows, spec, self._float_dtype, where)
        values = [host_value(one, spec, self._float_dtype, where).values for one in data]
        return HostValues(torch.cat([torch.as_tensor(one) for one in values]), len(data), spec)


def _stacked(data: Sequence[Any]) -> Any:
    """Return values of one type, dtype and shape as the rows of one array; None if they differ."""
    if len(set(map(type, data))) > 1:
        return None
    if not isinstance(data[0], np.ndarray | torch.Tensor):
        return np.array(data)
    if len({(row.dtype, row.shape) for row in data}) > 1:
        return None
    return torch.stack(list(data)) if isinstance(data[0], torch.Tensor) else np.stack(data)


def _as_array(data: Any, where: str) -> Any:
    """Return data as a NumPy array or as a tensor in the memory of the host, of any dtype."""
    if isinstance(data, torch.Tensor):
        return _dense(data, where)
    if isinstance(data, np.ndarray):
        if isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data):
            raise RequestShapeError(f"{where}: got an array with masked values, expected values; fill them first")
        return data
    if isinstance(data, Sequence) and len(data) and isinstance(data[0], torch.Tensor):
        return torch.stack([_dense(torch.as_tensor(row), where) for row in data])
    try:
        return np.asarray(data)
    except ValueError as error:
        raise RequestShapeError(f"{where}: the rows do not have one shape ({error})") from None


def _dense(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return a tensor as one that NumPy can view, with the same values: dense, in the memory of the host.

    RequestShapeError for one that has no values (meta), or whose rows differ in shape (nested).
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        raise RequestShapeError(f"{where}: got a nested tensor, whose rows have several shapes, expected one shape")
    if tensor.is_meta:
        error = NotImplementedError("a tensor without values")
        raise RequestShapeError(f"{where}: got a tensor on the device 'meta', which has no values") from error
    if tensor.layout is not torch.strided:  # sparse, mkldnn
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.cpu().resolve_neg()


_INTEGERS: Final = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)
_KINDS: Final = {"f": "f", "i": "i", "u": "i", "b": "b"}

_TAKES: Final = {"f": "fi", "i": "i", "b": "b"}
"""The kinds of values that an input of each kind takes."""


def _kind(array: Any) -> str:
    """Return f, i or b; O for anything that is not a number."""
    if isinstance(array, torch.Tensor):
        if array.dtype.is_floating_point:
            return "f"
        return "b" if array.dtype == torch.bool else "i" if array.dtype in _INTEGERS else "O"
    return _KINDS.get(array.dtype.kind, "O")


def _number_kind(number: int | float | np.generic) -> str:
    """Return the kind of a single number."""
    if isinstance(number, np.generic):
        return _KINDS.get(number.dtype.kind, "O")
    return "b" if isinstance(number, bool) else "i" if isinstance(number, int) else "f"


def _default_dtype(array: Any, dtype: str) -> str:
    """Return the dtype if it is of the array's kind, else the usual dtype of that kind."""
    kind = _kind(array)
    return dtype if kind == _dtype_kind(torch_dtype(dtype)) else {"f": "float32", "b": "bool"}.get(kind, "int64")


def _dtype_kind(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


def _check_kind(kind: str, spec: ValueSpec, got: object, where: str) -> None:
    """RequestShapeError unless values of a kind can be those of an input."""
    if kind not in _TAKES[_dtype_kind(torch_dtype(spec.dtype, where))]:
        raise RequestShapeError(f"{where}: got values of dtype {got}, expected {spec.dtype}; convert them first")


def _no_numbers(data: Any, array: Any, spec: ValueSpec | None, where: str) -> RequestShapeError:
    """Return the error for data that is not made of numbers. array: the data as `_as_array` returned it."""
    wanted = "numbers" if spec is None else str(spec)
    said = f"values of dtype {array.dtype}"
    if isinstance(array, np.ndarray):
        try:
            parts = np.array(data, object).reshape(-1).tolist()
        except ValueError:  # parts of several shapes, of which NumPy can make no array
            parts = [data]
        odd = [(place, part) for place, part in enumerate(parts) if not _is_number(part)]
        if odd:
            place, part = odd[0]
            said = _named(part) + (f" at position {place}" if array.ndim else "")
    return RequestShapeError(f"{where}: got {said}, expected {wanted}; give numbers in its place, or let unfold do so")


def _is_number(part: Any) -> bool:
    if isinstance(part, np.generic):
        return part.dtype.kind in _KINDS
    return isinstance(part, bool | float) or (isinstance(part, int) and -(1 << 63) <= part < 1 << 64)


def _named(part: Any) -> str:
    """Name an object that is no number for a cell, for a message."""
    if part is None:
        return "None"
    if isinstance(part, str | bytes):
        return f"the text {part[:40]!r}"
    if isinstance(part, int):
        return f"an integer of {part.bit_length()} bits (no dtype holds it)"
    if isinstance(part, complex):
        return "a complex number"
    return f"{'an' if type(part).__name__[0] in 'aeiouAEIOU' else 'a'} {type(part).__name__}"


def converted(array: Any, spec: ValueSpec, where: str) -> Any:
    """Return an array or tensor in the dtype of a spec.

    Floats convert to floats, and are rounded; integers to integers and floats, and keep their values. Raises
    RequestShapeError for another kind, InvalidRequestError for a number that the dtype cannot hold.
    """
    if type(array) is np.ndarray and array.dtype is _DTYPES.get(spec.dtype):
        return _contiguous(array)
    _check_kind(_kind(array), spec, array.dtype, where)
    wanted = torch_dtype(spec.dtype)
    is_tensor = isinstance(array, torch.Tensor)
    had = array.dtype if is_tensor else _TORCH.get(array.dtype.name)
    if had != wanted:
        _check_range(array, had, wanted, where)
    if is_tensor:
        return array.to(wanted).resolve_neg()
    if spec.dtype == "bfloat16":
        return torch.from_numpy(_contiguous(array, "float32")).to(torch.bfloat16)
    return _contiguous(array, spec.dtype)


def _contiguous(array: NDArray[Any], dtype: str | None = None) -> NDArray[Any]:
    """Return an array of contiguous memory, in its dtype or another. NumPy counts one row that is read backwards as
    such, which torch does not take."""
    made = np.ascontiguousarray(array, dtype)
    return made.copy() if made.strides and min(made.strides) < 0 else made


_TORCH: Final = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "int64", "int32", "bool")}


def _limits(dtype: torch.dtype, *, of_floats: bool) -> tuple[float, float]:
    """Return the range of a dtype: of its numbers, or of the integers that it holds exactly."""
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max
    largest = torch.finfo(dtype).max if of_floats else round(2 / torch.finfo(dtype).eps)
    return -largest, largest


def _check_range(array: Any, had: torch.dtype | None, wanted: torch.dtype, where: str) -> None:
    """InvalidRequestError for a number that a dtype cannot hold: a float beyond its range, an integer not exactly.

    had: the dtype of the values, None for one that torch does not have.
    """
    of_floats = _kind(array) == "f"
    low, high = _limits(wanted, of_floats=of_floats)
    if had is not None:
        least, most = _limits(had, of_floats=of_floats)
        if low <= least and most <= high:
            return
    values = (array.double() if of_floats else array).numpy() if isinstance(array, torch.Tensor) else array
    if values.size == 0 or (values.min() >= low and values.max() <= high):
        return
    outside = (values < low) | (values > high)
    if of_floats:
        outside &= np.isfinite(values)
    if outside.any():
        numbers, dtype = "numbers" if of_floats else "exact integers", str(wanted).removeprefix("torch.")
        raise InvalidRequestError(
            f"{where}: {values[outside].flat[0]} does not fit {dtype}, whose {numbers} are {low} to {high}; scale "
            "it, or declare a wider dtype"
        )


def _check_tokens(values: Any, num_tokens: int, where: str) -> None:
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        fits = int(values.view(np.uint64).max()) < num_tokens  # negative numbers are large without a sign
    else:
        fits = int(values.min()) >= 0 and int(values.max()) < num_tokens
    if not fits:
        flat = values.reshape(-1).tolist()
        position = next(i for i, token in enumerate(flat) if not 0 <= token < num_tokens)
        raise InvalidRequestError(
            f"{where}: token {flat[position]} at position {position} is outside the vocabulary 0..{num_tokens - 1}"
        )
