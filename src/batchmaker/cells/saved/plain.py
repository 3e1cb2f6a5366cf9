"""Plain data as JSON and back: numbers, strings, lists, dicts, tuples, tensors and arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchmaker.cells.export import torch_dtype
from batchmaker.errors import ModelError, SavedModelError

_TAGS = ("$tuple", "$float", "$tensor", "$array")


def to_json(value: Any, where: str) -> Any:
    """Return `value` in what JSON has, the rest tagged; SavedModelError names what is not plain data.

    Tensors and arrays become {"$tensor": {"dtype", "shape", "data"}}, tuples {"$tuple": [...]}, numbers that are not
    finite {"$float": "inf"}.
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
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Tensor):
        return {"$tensor": _tensor_to_json(value.detach().cpu(), where)}
    if isinstance(value, np.ndarray):
        if value.dtype.name not in ("float16", "float32", "float64", "bool") and value.dtype.kind not in "iu":
            raise SavedModelError(f"{where}: arrays of {value.dtype} cannot be saved; use numbers or bools")
        data = [to_json(item, where) for item in value.ravel().tolist()]
        return {"$array": {"dtype": value.dtype.name, "shape": list(value.shape), "data": data}}
    if isinstance(value, dict):
        if any(not isinstance(key, str) or key.startswith("$") for key in value):
            raise SavedModelError(f"{where}: the keys of a saved dict must be strings that do not start with '$'")
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise SavedModelError(
        f"{where}: {type(value).__name__} is not plain data and cannot be saved. Keep numbers, strings, lists, tuples, "
        "dicts, tensors or arrays; or define saved_state() and restore(state) in the model's class."
    )


def _tensor_to_json(tensor: Tensor, where: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        torch_dtype(dtype, where)
    except ModelError as error:
        raise SavedModelError(str(error)) from None
    data = [to_json(item, where) for item in tensor.reshape(-1).tolist()]
    return {"dtype": dtype, "shape": list(tensor.shape), "data": data}


def from_json(value: Any, where: str) -> Any:
    """Return what `to_json` was given. SavedModelError if the JSON is not what it makes."""
    if isinstance(value, list):
        return [from_json(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: from_json(item, where) for key, item in value.items()}
    if tag not in _TAGS or len(value) != 1:
        raise SavedModelError(f"{where}: unknown tag {tag!r}; known: {', '.join(_TAGS)}. Save the model again.")
    try:
        return _UNTAG[tag](value[tag], where)
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
    "$tuple": lambda content, where: tuple(from_json(list(content), where)),
    "$float": lambda content, where: float(content),
    "$array": _array,
    "$tensor": _tensor,
}
