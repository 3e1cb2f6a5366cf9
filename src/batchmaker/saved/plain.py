"""Plain data as JSON and back: numbers, strings, lists, dicts, tuples, tensors and arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from batchmaker.compile.export import torch_dtype
from batchmaker.errors import ModelError, SavedModelError

_TAGS = ("$tuple", "$float", "$tensor", "$array", "$dict")

OTHERS = ("$cell", "$model")
"""Tags of data that is not plain."""

Writes = Callable[[Any, str], Any]
"""Data that is not plain, and its place -> its JSON, with a tag; None if it cannot be saved."""
Reads = Callable[[str, Any, str], Any]
"""A tag that is unknown here, its content and place -> the object."""


def to_json(value: Any, where: str, other: Writes | None = None) -> Any:
    """Return `value` in types of JSON, other types tagged. SavedModelError names data that is not plain.

    Tensors and arrays become {"$tensor": {"dtype", "shape", "data"}}, tuples {"$tuple": [...]}, numbers that are not
    finite {"$float": "inf"}, dicts whose keys are not all plain text {"$dict": [[key, value], ...]}. other: converts
    everything else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | np.integer):
        if not -(1 << 63) <= int(value) < 1 << 64:
            raise SavedModelError(f"{where}: {value} does not fit in 64 bits")
        return int(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list):
        return [to_json(item, f"{where}[{index}]", other) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [to_json(item, f"{where}[{index}]", other) for index, item in enumerate(value)]}
    if isinstance(value, Tensor):
        return {"$tensor": _tensor_to_json(value.detach().cpu(), where)}
    if isinstance(value, np.ndarray):
        if value.dtype.name not in ("float16", "float32", "float64", "bool") and value.dtype.kind not in "iu":
            raise SavedModelError(f"{where}: arrays of {value.dtype} cannot be saved; use numbers or bools")
        data = [to_json(item, where) for item in value.ravel().tolist()]
        return {"$array": {"dtype": value.dtype.name, "shape": list(value.shape), "data": data}}
    if isinstance(value, dict):
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            return {
                "$dict": [
                    [to_json(key, where), to_json(item, f"{where}[{key!r}]", other)] for key, item in value.items()
                ]
            }
        return {key: to_json(item, f"{where}[{key!r}]", other) for key, item in value.items()}
    if other is not None and (made := other(value, where)) is not None:
        return made
    advice = "Keep numbers, strings, lists, tuples, dicts, tensors or arrays"
    if isinstance(value, nn.Module):
        advice = "A saved model keeps modules as cells alone: wrap it in bm.Cell, a list of cells for an nn.ModuleList"
    raise SavedModelError(
        f"{where}: {type(value).__name__} is not plain data and cannot be saved. {advice}; or define saved_state() and "
        "restore(state) in the model's class."
    )


def _tensor_to_json(tensor: Tensor, where: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        torch_dtype(dtype, where)
    except ModelError as error:
        raise SavedModelError(str(error)) from None
    data = [to_json(item, where) for item in tensor.reshape(-1).tolist()]
    return {"dtype": dtype, "shape": list(tensor.shape), "data": data}


def from_json(value: Any, where: str, other: Reads | None = None) -> Any:
    """Return the original of `to_json`. other: for its own tags.

    SavedModelError for JSON that `to_json` cannot have written.
    """
    if isinstance(value, list):
        return [from_json(item, where, other) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: from_json(item, where, other) for key, item in value.items()}
    if other is not None and tag in OTHERS and len(value) == 1:
        return other(tag, value[tag], where)
    if tag not in _TAGS or len(value) != 1:
        raise SavedModelError(f"{where}: unknown tag {tag!r}; known: {', '.join(_TAGS)}. Save the model again.")
    try:
        content = value[tag]
        if tag == "$tuple":
            return tuple(from_json(list(content), where, other))
        if tag == "$dict":
            return {from_json(key, where): from_json(item, where, other) for key, item in content}
        return _UNTAG[tag](content, where)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, ModelError) as error:
        raise SavedModelError(f"{where}: malformed {tag} ({error}). Save the model again.") from None


def _array(content: Any, where: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(content["dtype"])
    if dtype.kind not in "iufb":
        raise ValueError(f"dtype {dtype}")
    return np.array(from_json(content["data"], where), dtype).reshape(content["shape"])


def _tensor(content: Any, where: str) -> Tensor:
    data = from_json(content["data"], where)
    return torch.tensor(data, dtype=torch_dtype(content["dtype"], where)).reshape(content["shape"])


_UNTAG: dict[str, Callable[[Any, str], Any]] = {
    "$float": lambda content, where: float(content),
    "$array": _array,
    "$tensor": _tensor,
}
