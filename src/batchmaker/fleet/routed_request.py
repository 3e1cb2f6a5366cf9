"""What a router must know of a request: its model, how much there is to compute, and its sequence.

The front reads only this much of a body, and hands the body on as it came: what is wrong with it, the replica says.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple

import msgspec

from batchmaker.server.faults import ServiceError
from batchmaker.server.formats.infer_body import SHAPE, at_most, items_of, read_parameters
from batchmaker.server.formats.messages import Parameter
from batchmaker.server.formats.parameters import ChunkOptions, call_options, named_sequence
from batchmaker.server.formats.tensors import MAX_DIMENSIONS
from batchmaker.server.limits import Limits
from batchmaker.server.rpc.wire import parameters_of

_LETTERS: Final = 4
"""Letters of a text that count as one element, as many as make up a short word with its space."""

_MOST_DIGITS: Final = 12


class RoutedRequest(NamedTuple):
    """A request, as the router sees it.

    elements: numbers in its inputs, and a fourth of the letters; at least 1. chunk: None outside sequences. priority:
    as the client has said it.
    """

    model: str
    version: str | None
    elements: int
    chunk: ChunkOptions | None
    priority: Parameter = None


class _InputHead(msgspec.Struct):
    shape: msgspec.Raw = msgspec.Raw(b"[]")
    datatype: str = ""


class _BodyHead(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw(b"[]")
    parameters: msgspec.Raw = msgspec.Raw()


_HEAD: Final = msgspec.json.Decoder(_BodyHead)
_INPUTS: Final = at_most(_InputHead, Limits().max_tensors)
_GENERATE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

_MANY_BYTES: Final = 256 << 10
"""From here on the elements of a body are counted as a whole, not by key."""


def request_of_infer(model: str, version: str | None, body: bytes, header_length: str | None) -> RoutedRequest:
    """Return what the body of `infer` asks for. header_length: the number of its bytes that are JSON, as sent."""
    has_length = header_length is not None and header_length.isdecimal() and len(header_length) < _MOST_DIGITS
    head = body[: int(header_length)] if has_length and header_length is not None else body
    try:
        read = _HEAD.decode(head)
        inputs = [(items_of(SHAPE.decode(one.shape)), one.datatype) for one in items_of(_INPUTS.decode(read.inputs))]
        parameters = read_parameters(read.parameters)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ServiceError):
        return RoutedRequest(model, version, 1, None)
    return RoutedRequest(
        model, version, _elements(inputs, len(body)), _chunk_of(parameters), parameters.get("priority")
    )


def request_of_generate(model: str, version: str | None, body: bytes) -> RoutedRequest:
    """Return what the body of `generate` or `generate_stream` asks for."""
    try:
        parameters = read_parameters(_HEAD.decode(body).parameters)
        if len(body) > _MANY_BYTES:
            many = body.count(b",") + 1
            return RoutedRequest(model, version, many, _chunk_of(parameters), parameters.get("priority"))
        fields: dict[str, msgspec.Raw] = _GENERATE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ServiceError):
        return RoutedRequest(model, version, 1, None)
    elements = sum(_size(value) for name, value in fields.items() if name not in ("parameters", "id"))
    return RoutedRequest(model, version, max(1, elements), _chunk_of(parameters), parameters.get("priority"))


def request_of_message(message: Any) -> RoutedRequest:
    """Return what a ModelInferRequest asks for."""
    elements = _elements(((one.shape, one.datatype) for one in message.inputs), message.ByteSize())
    parameters = parameters_of(message.parameters) if message.parameters else {}
    chunk = _chunk_of(parameters) if parameters else None
    return RoutedRequest(message.model_name, message.model_version or None, elements, chunk, parameters.get("priority"))


def _elements(inputs: Any, num_bytes: int) -> int:
    """Return the elements of inputs, from their shapes and datatypes; no more than there are bytes.

    Shapes are what a client says: of many large sizes the product would take minutes, in which nobody is answered.
    """
    total = 0
    for shape, datatype in inputs:
        if datatype == "BYTES":
            total += num_bytes // _LETTERS
        else:
            total += prod(shape) if len(shape) <= MAX_DIMENSIONS else num_bytes
    return int(max(1, min(total, num_bytes)))


def _size(value: msgspec.Raw) -> int:
    """Return the elements of one value in JSON."""
    data = bytes(value)
    return len(data) // _LETTERS if data.startswith(b'"') else data.count(b",") + 1


def _chunk_of(parameters: Mapping[str, Parameter]) -> ChunkOptions | None:
    try:
        return call_options(parameters).chunk
    except (ServiceError, TypeError):  # the replica that has its sequence says what is wrong, and ends it
        name = named_sequence(parameters)
        return None if name is None else ChunkOptions(name)
