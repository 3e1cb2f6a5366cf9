"""Bodies of `generate` and `generate_stream`: inputs and outputs as plain JSON, by name."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from batchmaker.server.bodies import decode_json
from batchmaker.server.faults import invalid
from batchmaker.server.messages import InferRequest, InferResponse, Parameter
from batchmaker.server.signature import Signature, TensorSpec
from batchmaker.server.tensors import MAX_DIMENSIONS, Tensor, from_json

_BODY: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()
_ID: Final = msgspec.json.Decoder(str)
_PARAMETERS: Final = msgspec.json.Decoder(dict[str, Parameter])


def read_generate(body: bytes, signature: Signature) -> InferRequest:
    """Return the request in a body such as {"source": [3, 4, 5], "parameters": {"deadline_ms": 50}}."""
    given: dict[str, msgspec.Raw] = decode_json(_BODY, body)
    request_id = decode_json(_ID, bytes(given.pop("id"))) if "id" in given else ""
    parameters = decode_json(_PARAMETERS, bytes(given.pop("parameters"))) if "parameters" in given else {}
    specs = {spec.name: spec for spec in signature.inputs}
    unknown = [name for name in given if name not in specs]
    if unknown:
        raise invalid(f"unknown key {unknown[0][:64]!r}; known: {', '.join(map(repr, specs))}, 'parameters' and 'id'")
    inputs = tuple(_tensor(specs[name], bytes(value)) for name, value in given.items())
    return InferRequest(inputs, (), request_id, parameters)


def _tensor(spec: TensorSpec, data: bytes) -> Tensor:
    """Return one input; a single value needs no list around it."""
    value = decode_json(_ANY, data)
    if not isinstance(value, list):
        return from_json(spec.name, spec.datatype, (1,), b"[" + data + b"]")
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < MAX_DIMENSIONS:
        shape.append(len(value))
        value = value[0] if value else None
    if shape == [0]:
        shape += [max(size, 0) for size in spec.shape[1:]]
    return from_json(spec.name, spec.datatype, shape, data)


def write_generate(response: InferResponse) -> bytes:
    """Return a response as JSON: each output under its name, a single value without a list around it."""
    answer: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        answer["id"] = response.id
    for tensor in response.outputs:
        data = tensor.data.tolist()
        if tensor.datatype == "BYTES":
            data = _texts(data)
        answer[tensor.name] = data[0] if tensor.name in response.single else data
    return msgspec.json.encode(answer)


def _texts(data: Any) -> Any:
    """Return nested lists of bytes as text; bytes that are not UTF-8 are marked."""
    return [_texts(item) for item in data] if isinstance(data, list) else data.decode(errors="replace")
