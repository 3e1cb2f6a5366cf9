"""What a router must know of a request: its model, how much there is to compute, and its sequence.

The front reads only this much of a body, and hands the body on as it came: what is wrong with it, the replica says.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple

import msgspec

from batchmaker.server.faults import ServiceError
from batchmaker.server.messages import Parameter
from batchmaker.server.parameters import ChunkOptions, call_options
from batchmaker.server.rpc.wire import parameters_of

_LETTERS: Final = 4
"""Letters of a text that count as one element, as many as make up a short word with its space."""


class Asked(NamedTuple):
    """A request, as the router sees it.

    elements: numbers in its inputs, and a fourth of the letters; at least 1. chunk: None outside sequences.
    """

    model: str
    version: str | None
    elements: int
    chunk: ChunkOptions | None


class _InputHead(msgspec.Struct):
    shape: list[int] = []
    datatype: str = ""


class _BodyHead(msgspec.Struct):
    inputs: list[_InputHead] = []
    parameters: dict[str, Any] = {}


_INFER: Final = msgspec.json.Decoder(_BodyHead)
_GENERATE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PARAMETERS: Final = msgspec.json.Decoder(dict[str, Any])


def asked_of_infer(model: str, version: str | None, body: bytes, header_length: str | None) -> Asked:
    """Return what the body of `infer` asks for. header_length: the number of its bytes that are JSON, as sent."""
    head = body if header_length is None or not header_length.isdecimal() else body[: int(header_length)]
    try:
        read = _INFER.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked(model, version, 1, None)
    elements = _elements(((one.shape, one.datatype) for one in read.inputs), len(body))
    return Asked(model, version, elements, _chunk_of(read.parameters))


def asked_of_generate(model: str, version: str | None, body: bytes) -> Asked:
    """Return what the body of `generate` or `generate_stream` asks for."""
    try:
        given: dict[str, msgspec.Raw] = _GENERATE.decode(body)
        parameters = _PARAMETERS.decode(given.pop("parameters")) if "parameters" in given else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked(model, version, 1, None)
    given.pop("id", None)
    return Asked(model, version, max(1, sum(map(_size, given.values()))), _chunk_of(parameters))


def asked_of_message(message: Any) -> Asked:
    """Return what a ModelInferRequest asks for."""
    elements = _elements(((one.shape, one.datatype) for one in message.inputs), message.ByteSize())
    chunk = _chunk_of(parameters_of(message.parameters)) if message.parameters else None
    return Asked(message.model_name, message.model_version or None, elements, chunk)


def _elements(inputs: Any, num_bytes: int) -> int:
    """Return the elements of inputs, from their shapes and datatypes; no more than there are bytes."""
    total = sum(num_bytes // _LETTERS if datatype == "BYTES" else prod(shape) for shape, datatype in inputs)
    return int(max(1, min(total, num_bytes)))


def _size(value: msgspec.Raw) -> int:
    """Return the elements of one value in JSON."""
    data = bytes(value)
    return len(data) // _LETTERS if data.startswith(b'"') else data.count(b",") + 1


def _chunk_of(parameters: Mapping[str, Parameter]) -> ChunkOptions | None:
    try:
        return call_options(parameters).chunk
    except (ServiceError, TypeError):
        return None
