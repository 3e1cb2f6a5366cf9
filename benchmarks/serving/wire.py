"""Requests as bytes, for each server's own protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def post(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a whole HTTP/1.1 POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def infer_binary(
    model: str, inputs: Mapping[str, Sequence[Any]], dtype: str = "INT64", parameters: Mapping[str, Any] | None = None
) -> bytes:
    """Return an inference request with tensors as bytes, answered in bytes. inputs: whole numbers by name."""
    arrays = {name: np.ascontiguousarray(values, np.int64) for name, values in inputs.items()}
    head = {
        "inputs": [
            {"name": name, "shape": array.shape, "datatype": dtype, "parameters": {"binary_data_size": array.nbytes}}
            for name, array in arrays.items()
        ],
        "parameters": {"binary_data_output": True, **(parameters or {})},
    }
    text = json.dumps(head).encode()
    body = text + b"".join(array.tobytes() for array in arrays.values())
    return post(f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": str(len(text))})


def infer_json(model: str, inputs: Mapping[str, Sequence[Any]]) -> bytes:
    """Return an inference request with tensors as JSON, answered in JSON."""
    listed = [
        {"name": name, "shape": [len(values)], "datatype": "INT64", "data": list(map(int, values))}
        for name, values in inputs.items()
    ]
    return post(f"/v2/models/{model}/infer", json.dumps({"inputs": listed}).encode())


def peer_json(path: str, value: Any) -> bytes:
    """Return what the peers' applications take: {"input": value}."""
    return post(path, json.dumps({"input": value}).encode(), {"Content-Type": "application/json"})
