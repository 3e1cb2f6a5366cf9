"""Reads tensors from JSON, in pieces, whatever their size.

The text is valid JSON already; skipping a value is fast, and making objects of it is not. So the structure of a tensor
of numbers, which is its text without the numbers, is compared with that of its shape first, and no list is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from batchmaker.server.faults import ServiceError, invalid
from batchmaker.server.formats.pieces import Pieces
from batchmaker.server.formats.tensors import MAX_DIMENSIONS, NUMPY, Tensor, fitting, from_values, num_elements

PIECE_BYTES: Final = 16 << 10
"""Bytes of JSON that are read at once: some milliseconds, even where each number takes microseconds."""

_PIECE_ITEMS: Final = 20_000
_MAX_STRINGS: Final = 250_000
_MAX_LISTS: Final = 20_000
"""Strings and lists in one tensor of strings, which are made before their number can be checked."""

_JSON_TYPE: Final[dict[str, type]] = {"b": bool, "i": int, "u": int, "f": float, "O": str}
_SPACE: Final = b" \t\r\n"
_SCALARS: Final[dict[str, bytes]] = {
    "b": b"truefals" + _SPACE,
    **dict.fromkeys("iuf", b"0123456789+-.eE" + _SPACE),
}
"""The letters of values and the space around them: without them, only the structure of lists is left."""

_RAGGED: Final = (
    "its lists have other lengths than the first, and a tensor has one shape; send the elements as one flat list and "
    "the lengths as another input, if the model takes them so"
)
_LISTS: Final = re.compile(rb"[\[ \t\r\n]*")
_EMPTY: Final = re.compile(rb"[\[\], \t\r\n]*")


@lru_cache(maxsize=256)
def _decoder(scalar: type, depth: int) -> msgspec.json.Decoder[Any]:
    wanted: Any = scalar
    for _ in range(depth):
        wanted = list[wanted]
    return msgspec.json.Decoder(wanted)


Check = Callable[[Sequence[int]], object]
"""Raises INVALID for a shape that the model does not take, before the elements are read."""


def read_json(name: str, datatype: str, shape: Sequence[int] | None, data: bytes, check: Check) -> Pieces[Tensor]:
    """Return the tensor of a JSON list, flat or nested like the shape. INVALID if the elements do not fit.

    shape: None for that of the lists themselves; a value without a list is one of shape (1,).
    """
    if datatype == "BF16":
        raise invalid(f"tensor {name!r}: BF16 cannot be written in JSON; send it as binary data")
    if shape is not None:
        num_elements(name, datatype, shape)
    elif not _LISTS.match(data)[0].strip():  # type: ignore[index]
        shape, data = (1,), b"[" + data + b"]"
    read = _strings if datatype == "BYTES" else _numbers
    return (yield from read(name, datatype, shape, data, check))


# --- numbers --------------------------------------------------------------------------------------------------------


def _numbers(name: str, datatype: str, shape: Sequence[int] | None, data: bytes, check: Check) -> Pieces[Tensor]:
    dtype, long = NUMPY[datatype], len(data) > PIECE_BYTES
    structure = data.translate(None, _SCALARS[dtype.kind])
    flat = fits = _is_flat(structure)
    if shape is None:
        shape = _shape_of(name, structure, data)
        fits = flat or _is_nested(structure, shape)
        check = check if fits else partial(_unless_ragged, name, check)
    check(shape)
    if long:
        yield
    count = math.prod(shape)
    num_commas = structure.count(b",")
    if flat and num_commas != max(count - 1, 0):
        raise _other_count(name, 0 if _EMPTY.fullmatch(data) else num_commas + 1, count, shape)
    if not fits and not _is_nested(structure, shape):
        raise invalid(f"tensor {name!r}: data is no {datatype} of shape {list(shape)}: {_reason(dtype, shape, data)}")
    if long:
        yield
    array = np.empty(count, dtype)
    if count:
        yield from _fill(array, name, datatype, data.translate(None, b"[]"))
    elif not _EMPTY.fullmatch(data):
        raise _other_count(name, num_commas + 1, count, shape)
    return Tensor(name, datatype, array.reshape(tuple(shape)))


def _fill(array: np.ndarray[Any, Any], name: str, datatype: str, text: bytes) -> Pieces[None]:
    """Write the elements in a text such as "1,2,3" into an array of as many as it has commas, and one."""
    decode = _decoder(_JSON_TYPE[NUMPY[datatype].kind], 1).decode
    at = start = 0
    while start < len(text):
        if start:
            yield
        end = text.find(b",", start + PIECE_BYTES) if len(text) - start > PIECE_BYTES else -1
        end = len(text) if end < 0 else end
        try:
            values = decode(b"[" + text[start:end] + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            after = f" (of the elements after {at})" if at else ""
            raise invalid(f"tensor {name!r}: data is no {datatype}: {error}{after}") from None
        array[at : at + len(values)] = fitting(name, datatype, values)
        at += len(values)
        start = end + 1
    if at != len(array):  # a piece without an element
        raise _other_count(name, at, len(array), array.shape)


def _unless_ragged(name: str, check: Check, shape: Sequence[int]) -> None:
    """Check the shape of the first lists, where others have other lengths: a wrong one is not what is wrong."""
    try:
        check(shape)
    except ServiceError:
        raise invalid(f"tensor {name!r}: {_RAGGED}") from None


def _other_count(name: str, got: int, count: int, shape: Sequence[int]) -> ServiceError:
    return invalid(f"tensor {name!r}: got {got} elements, expected {count} for shape {list(shape)}")


def _is_flat(structure: bytes) -> bool:
    return structure[:1] == b"[" and structure[-1:] == b"]" and structure.count(b",") == len(structure) - 2


def _is_nested(structure: bytes, shape: Sequence[int]) -> bool:
    """Whether this is the structure of lists of a shape, such as "[[,],[,]]" of (2, 2)."""
    length = 1  # of the structure of one element with the comma before it
    for size in reversed(shape):
        length = 2 + max(size * length - 1, 0) + 1
    if length - 1 != len(structure):
        return False  # before anything of that length is made
    made = b""
    for size in reversed(shape):
        made = b"[" + b",".join([made] * size) + b"]"
    return made == structure


def _shape_of(name: str, structure: bytes, data: bytes) -> tuple[int, ...]:
    """Return the shape of lists by their first ones; whether the others are like them, `_is_nested` says."""
    depth = len(structure) - len(structure.lstrip(b"["))
    if depth > MAX_DIMENSIONS:
        raise invalid(f"tensor {name!r}: {depth} dimensions or more are more than {MAX_DIMENSIONS}")
    end = structure.find(b"]")
    sizes = [structure.count(b",", 0, end) + 1]
    if sizes == [1] and not data[: data.find(b"]")].translate(None, b"[" + _SPACE):
        sizes = [0]
    inner = max(sizes[0], 1)  # how many commas and one there are in one list
    for level in range(2, depth + 1):
        end = structure.find(b"]" * level)
        if end < 0:
            break
        size = (structure.count(b",", 0, end) + 1) // inner
        sizes.append(size)
        inner *= size
    if len(sizes) != depth or 0 in sizes[1:]:
        raise invalid(f"tensor {name!r}: {_RAGGED}")
    return tuple(reversed(sizes))


def _reason(dtype: np.dtype[Any], shape: Sequence[int], data: bytes) -> str:
    """Return what is wrong with data whose structure is not that of its shape; in detail only if it is short."""
    nested = data.lstrip(_SPACE)[:1] == b"[" and data.lstrip(_SPACE)[1:].lstrip(_SPACE)[:1] == b"["
    if len(data) <= PIECE_BYTES:
        try:
            _decoder(_JSON_TYPE[dtype.kind], len(shape) if nested and len(shape) > 1 else 1).decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return str(error)
    return _RAGGED


# --- strings --------------------------------------------------------------------------------------------------------


def _strings(name: str, datatype: str, shape: Sequence[int] | None, data: bytes, check: Check) -> Pieces[Tensor]:
    if shape is not None:
        check(shape)
    if len(data) > PIECE_BYTES:
        yield
    if data.count(b'"') - data.count(b'\\"') > 2 * _MAX_STRINGS:  # half of those there are, or more
        raise invalid(f"tensor {name!r}: has more than {_MAX_STRINGS} strings; send it as binary data")
    lists: bytes = _LISTS.match(data)[0]  # type: ignore[index]
    depth = lists.count(b"[")
    if shape is not None and (len(shape) < 2 or depth < 2):
        depth = 1
    if depth > MAX_DIMENSIONS:
        raise invalid(f"tensor {name!r}: {depth} dimensions or more are more than {MAX_DIMENSIONS}")
    if depth > 1 and data.count(b"[") > _MAX_LISTS:
        raise invalid(f"tensor {name!r}: has more than {_MAX_LISTS} lists in it; send it flat, or as binary data")
    wanted = "" if shape is None else f" of shape {list(shape)}"
    try:
        values = _decoder(str, depth if shape is None else len(shape) if depth > 1 else 1).decode(data)
        if shape is None:
            shape = _sizes(values, depth)
            check(shape)
        if depth > 1:
            values = _flattened(values, tuple(shape))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise invalid(f"tensor {name!r}: data is no {datatype}{wanted}: {error}") from None
    for start in range(0, len(values), _PIECE_ITEMS):
        if start:
            yield
        values[start : start + _PIECE_ITEMS] = [item.encode() for item in values[start : start + _PIECE_ITEMS]]
    return from_values(name, datatype, shape, values)


def _sizes(values: Any, depth: int) -> tuple[int, ...]:
    """Return the shape of nested lists by their first ones."""
    sizes: list[int] = []
    for _ in range(depth):
        sizes.append(len(values))
        if not values:
            break
        values = values[0]
    return tuple(sizes)


def _flattened(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return nested lists as one flat list. ValueError unless their lengths are those of `shape`."""
    count = 1
    for outer, inner in pairwise(shape):
        count *= outer
        if len(values) != count or any(len(row) != inner for row in values):
            raise ValueError(_RAGGED)
        values = [item for row in values for item in row]
    return values
