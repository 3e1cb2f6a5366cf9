"""Reads tensors from bytes or plain values, and writes them (Open Inference Protocol v2).

A tensor is a NumPy array with a name and one of the protocol's datatypes. BF16, which NumPy lacks, is stored as
float32, which has all its values; BYTES is an array of objects, each of them `bytes`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchmaker.server.faults import FaultKind, ServiceError, invalid

MAX_DIMENSIONS: Final = 16
MAX_NAME: Final = 256
"""Characters of a tensor's name."""
MAX_ELEMENTS: Final = 1 << 56
"""The limit of the product of an empty tensor's sizes without zeros: no array has more."""

NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<f4"),
    "BYTES": np.dtype(object),
}
"""The NumPy dtype of each datatype."""

_LENGTH: Final = struct.Struct("<I")


class Tensor(msgspec.Struct, frozen=True):
    """One named tensor. data: its values in the client's shape, with the dtype in NUMPY."""

    name: str
    datatype: str
    data: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


def kind_of(datatype: str) -> str:
    """Return b, i (signed or not), f or O. Datatypes of one kind are converted into each other, others never."""
    kind = NUMPY[datatype].kind
    return "i" if kind == "u" else kind


def num_elements(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return the number of elements of a declared tensor. INVALID unless datatype and shape are well formed."""
    if datatype not in NUMPY:
        raise invalid(f"tensor {name!r}: unknown datatype {datatype[:32]!r}; known: {', '.join(NUMPY)}")
    if len(shape) > MAX_DIMENSIONS:
        raise invalid(f"tensor {name!r}: {len(shape)} dimensions are more than {MAX_DIMENSIONS}")
    if min(shape, default=0) < 0:
        raise invalid(f"tensor {name!r}: shape {list(shape)} has a negative size")
    if 0 in shape and math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise invalid(f"tensor {name!r}: shape {list(shape)} has a size that no tensor can have")
    return math.prod(shape)


# --- bytes ----------------------------------------------------------------------------------------------------------


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: memoryview) -> Tensor:
    """Return the tensor whose little-endian elements are `raw`, copied. INVALID unless it is exactly that long."""
    count = num_elements(name, datatype, shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, _objects(_split_strings(name, count, raw), shape))
    width = raw_width(datatype)
    if len(raw) != count * width:
        raise invalid(
            f"tensor {name!r}: got {len(raw)} bytes, expected {count * width} for {datatype} of shape {list(shape)}"
        )
    if datatype == "BF16":
        data = (np.frombuffer(raw, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    elif datatype == "BOOL":
        bits = np.frombuffer(raw, np.uint8)
        if bits.size and bits.max() > 1:
            raise invalid(f"tensor {name!r}: a BOOL is a byte of 0 or 1, got {int(bits.max())}")
        data = bits.astype(np.bool_)
    else:
        data = np.frombuffer(raw, NUMPY[datatype]).copy()
    return Tensor(name, datatype, data.reshape(shape))


def raw_width(datatype: str) -> int:
    """Return the bytes of one element, for datatypes other than BYTES."""
    return 2 if datatype == "BF16" else NUMPY[datatype].itemsize


def to_raw(tensor: Tensor) -> bytes:
    """Return the elements as bytes for `from_raw`. Float32 becomes BF16 by rounding to nearest, ties to even."""
    if tensor.datatype == "BYTES":
        parts: list[bytes] = []
        for item in tensor.data.ravel():
            parts += (_LENGTH.pack(len(item)), item)
        return b"".join(parts)
    if tensor.datatype == "BF16":
        return _to_bfloat16(tensor.data)
    return np.ascontiguousarray(tensor.data, NUMPY[tensor.datatype]).tobytes()


def _to_bfloat16(data: NDArray[Any]) -> bytes:
    values = np.ascontiguousarray(data, "<f4").reshape(-1)
    bits = values.view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(values), bits | np.uint32(0x00400000), rounded)  # a NaN must not round to infinity
    return (kept >> np.uint32(16)).astype("<u2").tobytes()


def _split_strings(name: str, count: int, raw: memoryview) -> list[bytes]:
    """Split bytes into `count` strings, each with its length before it."""
    if count * _LENGTH.size > len(raw):
        raise invalid(
            f"tensor {name!r}: {len(raw)} bytes cannot hold {count} elements; each has its length (4 bytes) before it"
        )
    items: list[bytes] = []
    at = 0
    for _ in range(count):
        end = at + _LENGTH.size
        if end > len(raw):
            raise invalid(f"tensor {name!r}: the data ends within element {len(items)} of {count}")
        (length,) = _LENGTH.unpack_from(raw, at)
        at = end + length
        if at > len(raw):
            raise invalid(f"tensor {name!r}: element {len(items)} has {length} bytes by its length, but the data ends")
        items.append(bytes(raw[end:at]))
    if at != len(raw):
        raise invalid(f"tensor {name!r}: {len(raw) - at} bytes are left after {count} elements")
    return items


def _objects(items: Sequence[bytes], shape: Sequence[int]) -> NDArray[Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(tuple(shape))


# --- plain values ---------------------------------------------------------------------------------------------------


def from_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Return the tensor whose elements are a flat list, of `bytes` for BYTES. INVALID if they do not fit."""
    count = num_elements(name, datatype, shape)
    if len(values) != count:
        raise invalid(f"tensor {name!r}: got {len(values)} elements, expected {count} for shape {list(shape)}")
    if datatype == "BYTES":
        return Tensor(name, datatype, _objects(values, shape))
    return Tensor(name, datatype, fitting(name, datatype, values).reshape(tuple(shape)))


def fitting(name: str, datatype: str, values: Sequence[Any]) -> NDArray[Any]:
    """Return numbers as an array. INVALID for one outside the datatype's range: none becomes infinite, or another."""
    try:
        with np.errstate(over="raise"):
            return np.array(values, NUMPY[datatype])
    except (OverflowError, ValueError, FloatingPointError):
        raise invalid(f"tensor {name!r}: a value is outside the range of {datatype}") from None


# --- JSON -----------------------------------------------------------------------------------------------------------


def check_finite(tensor: Tensor, *, nulls: bool) -> None:
    """Raise UNSUPPORTED for NaN and infinities, which JSON cannot represent, unless they may become null."""
    if not nulls and tensor.data.dtype.kind == "f" and not np.isfinite(tensor.data).all():
        raise ServiceError(
            FaultKind.UNSUPPORTED,
            f"tensor {tensor.name!r} has values that are NaN or infinite, which JSON cannot represent: ask for it as "
            'binary data (infer), or have the server set json_nan = "null"',
        )


def to_json(tensor: Tensor, *, nulls: bool = False) -> list[Any]:
    """Return the elements as a flat list. UNSUPPORTED for values that JSON cannot represent.

    nulls: NaN and infinities become null when the list is encoded.
    """
    check_finite(tensor, nulls=nulls)
    if tensor.datatype == "BF16":
        raise ServiceError(
            FaultKind.UNSUPPORTED, f"tensor {tensor.name!r}: BF16 is not written in JSON; ask for binary data"
        )
    flat = tensor.data.reshape(-1).tolist()
    if tensor.datatype != "BYTES":
        return flat
    try:
        return [item.decode() for item in flat]
    except UnicodeDecodeError:
        raise ServiceError(
            FaultKind.UNSUPPORTED, f"tensor {tensor.name!r} is not UTF-8, so not JSON; ask for binary data"
        ) from None
