"""Bodies of `generate` and `generate_stream`: inputs and outputs as plain JSON, by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from batchmaker.errors import nearest_name
from batchmaker.server.faults import invalid
from batchmaker.server.formats.infer_body import decode_json, read_parameters
from batchmaker.server.formats.json_keys import by_name, keys_once
from batchmaker.server.formats.json_tensors import PIECE_BYTES, read_json
from batchmaker.server.formats.messages import InferRequest, InferResponse
from batchmaker.server.formats.pieces import Pieces
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.formats.tensors import Tensor, check_finite
from batchmaker.server.limits import Limits

_ID: Final = msgspec.json.Decoder(str)
_RESERVED: Final = ("parameters", "id")


def read_generate(body: bytes, signature: Signature, limits: Limits) -> Pieces[InferRequest]:
    """Return the request in a body such as {"source": [3, 4, 5], "parameters": {"deadline_ms": 50}}."""
    specs = {spec.name: spec for spec in signature.inputs if spec.name not in _RESERVED}
    values = by_name(decode_json(_decoder(tuple(specs)), body))
    parameters = read_parameters(values.pop("parameters", msgspec.Raw()))
    request_id = decode_json(_ID, values.pop("id"), ".id") if "id" in values else ""
    inputs: list[Tensor] = []
    for name, value in values.items():
        if len(body) > PIECE_BYTES:
            yield
        inputs.append((yield from _tensor(specs[name], bytes(value), signature, limits)))
    return InferRequest(tuple(inputs), (), request_id, parameters)


@lru_cache(maxsize=256)
def _decoder(inputs: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of objects with some of these keys and no others; the first other one ends the reading."""
    names = (*_RESERVED, *inputs)

    def check(name: str) -> None:
        if name not in names:
            listed = f"{', '.join(map(repr, inputs))}, 'parameters' and 'id'"
            raise invalid(f"unknown key {name[:64]!r}; known: {listed}.{nearest_name(name[:64], names)}")

    return keys_once(msgspec.Raw, check)


def _tensor(spec: TensorSpec, data: bytes, signature: Signature, limits: Limits) -> Pieces[Tensor]:
    """Return one input; a single value needs no list around it, and an empty list stands for one of any shape."""

    def check(shape: Sequence[int]) -> None:
        signature.check_input(spec.name, spec.datatype, completed(shape), limits)

    def completed(shape: Sequence[int]) -> Sequence[int]:
        return shape if tuple(shape) != (0,) else (0, *(max(size, 0) for size in spec.shape[1:]))

    tensor = yield from read_json(spec.name, spec.datatype, None, data, check)
    return Tensor(tensor.name, tensor.datatype, tensor.data.reshape(tuple(completed(tensor.shape))))


def write_generate(response: InferResponse, *, nulls: bool = False) -> bytes:
    """Return a response as JSON: each output under its name, a single value without a list around it.

    nulls: see to_json.
    """
    answer: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        answer["id"] = response.id
    if response.parameters:
        answer["parameters"] = response.parameters
    for tensor in response.outputs:
        check_finite(tensor, nulls=nulls)
        data = tensor.data.tolist()
        if tensor.datatype == "BYTES":
            data = _texts(data)
        answer[tensor.name] = data[0] if tensor.name in response.single else data
    return msgspec.json.encode(answer)


def _texts(data: Any) -> Any:
    """Return nested lists of bytes as text; bytes that are not UTF-8 are marked."""
    return [_texts(item) for item in data] if isinstance(data, list) else data.decode(errors="replace")
