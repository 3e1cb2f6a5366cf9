"""Values that come with a request: checked, converted to the declared dtype and laid out as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from batchmaker.cells.export import torch_dtype
from batchmaker.errors import InvalidRequestError, RequestShapeError
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import HostValues


def host_sequence(data: Any, spec: ValueSpec | None, float_dtype: str, where: str) -> HostValues:
    """Lay out one value per node.

    data: a list, NumPy array or tensor [count, *shape]. spec: what the input declares, None at first use. float_dtype:
    dtype for floating data where nothing is declared. Returns values [count, *shape] in the declared dtype; floats
    convert to floats and integers to integers, nothing else. Raises InvalidRequestError or RequestShapeError, which
    name `where`.
    """
    array = _as_array(data, where)
    if array.ndim == 0:
        raise InvalidRequestError(f"{where}: got a single value, expected a sequence [count, *shape]")
    count = int(array.shape[0])
    if count == 0:
        raise InvalidRequestError(f"{where}: the sequence is empty; at least one element is needed")
    shape = tuple(int(n) for n in array.shape[1:])
    if spec is None:
        spec = ValueSpec(shape, _default_dtype(array, float_dtype))
    elif shape != spec.shape:
        raise RequestShapeError(f"{where}: got rows of shape {shape}, expected {spec.shape}")
    values = _convert(array, spec, where)
    if spec.num_tokens is not None:
        _check_tokens(values, spec.num_tokens, where)
    return HostValues(values, count, spec)


def host_value(data: Any, spec: ValueSpec | None, float_dtype: str, where: str) -> HostValues:
    """Lay out a single value (shape `spec.shape`) as an array [1, *shape]; as host_sequence otherwise."""
    array = _as_array(data, where)
    return host_sequence(array[None], spec, float_dtype, where)


def _as_array(data: Any, where: str) -> Any:
    if isinstance(data, torch.Tensor):
        return data.detach().cpu()
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, Sequence) and len(data) and isinstance(data[0], torch.Tensor):
        return torch.stack([torch.as_tensor(row).detach().cpu() for row in data])
    try:
        return np.asarray(data)
    except ValueError as error:
        raise RequestShapeError(f"{where}: the rows do not have one shape ({error})") from None


def _kind(array: Any) -> str:
    """Return f, i or b; O for anything that is not a number."""
    if isinstance(array, torch.Tensor):
        return "f" if array.dtype.is_floating_point else "b" if array.dtype == torch.bool else "i"
    return {"f": "f", "i": "i", "u": "i", "b": "b"}.get(array.dtype.kind, "O")


def _default_dtype(array: Any, float_dtype: str) -> str:
    return {"f": float_dtype, "b": "bool"}.get(_kind(array), "int64")


def _convert(array: Any, spec: ValueSpec, where: str) -> Any:
    kind = _kind(array)
    wanted = torch_dtype(spec.dtype, where)
    allowed = "f" if wanted.is_floating_point else "b" if wanted == torch.bool else "i"
    if kind != allowed:
        got = "objects" if kind == "O" else str(array.dtype)
        raise RequestShapeError(f"{where}: got values of dtype {got}, expected {spec.dtype}; convert them first")
    if isinstance(array, torch.Tensor):
        return array.to(wanted)
    if spec.dtype == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(torch.bfloat16)
    return np.ascontiguousarray(array, dtype=spec.dtype)


def _check_tokens(values: Any, num_tokens: int, where: str) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= num_tokens:
        flat = values.reshape(-1).tolist()
        position = next(i for i, token in enumerate(flat) if not 0 <= token < num_tokens)
        raise InvalidRequestError(
            f"{where}: token {flat[position]} at position {position} is outside the vocabulary 0..{num_tokens - 1}"
        )
