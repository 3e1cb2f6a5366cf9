"""HTTP bodies of the Open Inference Protocol v2: JSON, optionally followed by binary tensors."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from batchmaker.server.faults import invalid
from batchmaker.server.limits import Limits
from batchmaker.server.messages import InferRequest, InferResponse, Parameter, WantedOutput
from batchmaker.server.parameters import refuse_unsupported
from batchmaker.server.tensors import Tensor, from_json, from_raw, num_elements, to_json, to_raw

HEADER_LENGTH: Final = "inference-header-content-length"
"""The number of JSON bytes of a body. The rest is tensors, in the order in which the JSON names them."""


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Parameter] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Parameter] = {}


class _Body(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Parameter] = {}
    outputs: list[_Output] = []


_BODY: Final = msgspec.json.Decoder(_Body)


def decode_json(decoder: msgspec.json.Decoder[Any], body: bytes | memoryview) -> Any:
    """Return the decoded value. INVALID, with the place, if it cannot be decoded."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not the JSON expected here: {error}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def read_infer(body: bytes, header_length: str | None, limits: Limits) -> InferRequest:
    """Return the request in a body. header_length: the header HEADER_LENGTH, if the client sent it."""
    view = memoryview(body)
    length = len(body) if header_length is None else _parsed_length(header_length, len(body))
    head: _Body = decode_json(_BODY, view[:length])
    if len(head.inputs) > limits.max_tensors:
        raise invalid(f"{len(head.inputs)} inputs are more than {limits.max_tensors}")
    raw = view[length:]
    inputs: list[Tensor] = []
    for given in head.inputs:
        tensor, raw = _read_input(given, raw)
        inputs.append(tensor)
    if len(raw):
        raise invalid(f"{len(raw)} bytes are left after the last binary tensor; check binary_data_size")
    outputs = tuple(_wanted(output) for output in head.outputs)
    return InferRequest(tuple(inputs), outputs, head.id, head.parameters)


def _parsed_length(header_length: str, size: int) -> int:
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12):
        raise invalid(f"Inference-Header-Content-Length must be a number of bytes, got {header_length[:32]!r}")
    length = int(header_length)
    if length > size:
        raise invalid(f"Inference-Header-Content-Length is {length}, but the body has {size} bytes")
    return length


def _read_input(given: _Input, raw: memoryview) -> tuple[Tensor, memoryview]:
    """Read an input; return it and the rest of the binary data."""
    refuse_unsupported(given.name, given.parameters)
    size = given.parameters.get("binary_data_size")
    if size is None:
        num_elements(given.name, given.datatype, given.shape)  # its error comes before the one for missing data
        if not given.data:
            raise invalid(f"tensor {given.name!r} has neither data nor binary_data_size")
        return from_json(given.name, given.datatype, given.shape, bytes(given.data)), raw
    if given.data:
        raise invalid(f"tensor {given.name!r} has both data and binary_data_size; send one of them")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(raw):
        raise invalid(f"tensor {given.name!r}: binary_data_size is {size!r}, but {len(raw)} bytes follow")
    return from_raw(given.name, given.datatype, given.shape, raw[:size]), raw[size:]


def _wanted(output: _Output) -> WantedOutput:
    refuse_unsupported(output.name, output.parameters)
    return WantedOutput(output.name, _flag(output.parameters, "binary_data"))


def _flag(parameters: dict[str, Parameter], name: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {value!r}")
    return value


def write_infer(response: InferResponse, request: InferRequest) -> tuple[bytes, int | None]:
    """Return a body, and the length of its JSON if binary tensors follow.

    An output is binary if the client asked for that, for this output or (`binary_data_output`) for all.
    """
    by_default = _flag(dict(request.parameters), "binary_data_output")
    asked = {wanted.name: wanted.binary for wanted in request.outputs}
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for tensor in response.outputs:
        binary = asked.get(tensor.name)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if by_default if binary is None else binary:
            parts.append(to_raw(tensor))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = to_json(tensor)
        outputs.append(entry)
    head: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    if response.id:
        head["id"] = response.id
    encoded = msgspec.json.encode(head)
    return (encoded, None) if not parts else (b"".join((encoded, *parts)), len(encoded))
