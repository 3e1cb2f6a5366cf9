"""HTTP bodies of the Open Inference Protocol v2: JSON, optionally followed by binary tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Final

import msgspec

from batchmaker.server.faults import ServiceError, invalid
from batchmaker.server.formats.json_keys import by_name, keys_once
from batchmaker.server.formats.json_tensors import PIECE_BYTES, read_json
from batchmaker.server.formats.messages import InferRequest, InferResponse, Parameter, WantedOutput
from batchmaker.server.formats.parameters import as_sent, refuse_unsupported
from batchmaker.server.formats.pieces import Pieces
from batchmaker.server.formats.signature import Signature, check_once
from batchmaker.server.formats.tensors import (
    MAX_DIMENSIONS,
    MAX_NAME,
    Tensor,
    from_raw,
    num_elements,
    to_json,
    to_raw,
)
from batchmaker.server.limits import Limits

HEADER_LENGTH: Final = "inference-header-content-length"
"""The number of JSON bytes of a body. The rest is tensors, in the order in which the JSON names them."""


_Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


def at_most(kind: Any, most: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder of lists of `kind` whose items `items_of` returns: no more than `most` and one are made."""
    fields = [(f"item_{number}", kind | msgspec.UnsetType, msgspec.UNSET) for number in range(most + 1)]
    return msgspec.json.Decoder(msgspec.defstruct("AtMost", fields, array_like=True))


def items_of(decoded: Any) -> list[Any]:
    """Return what a decoder of `at_most` has found."""
    return [item for item in msgspec.structs.astuple(decoded) if item is not msgspec.UNSET]


class _Input(msgspec.Struct):
    name: _Text
    shape: msgspec.Raw
    datatype: _Text
    parameters: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: _Text
    parameters: dict[str, Parameter] = {}


class _Body(msgspec.Struct):
    inputs: msgspec.Raw
    id: str = ""
    parameters: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()


_BODY: Final = msgspec.json.Decoder(_Body)
_OUTPUTS: Final = msgspec.json.Decoder(list[_Output])
_PARAMETERS: Final = keys_once(Parameter)
SHAPE: Final = at_most(int, MAX_DIMENSIONS)
_MAX_BYTES: Final = 64 << 10
"""Of the JSON of a request's parameters, and of its outputs."""
_FEW_PARTS: Final = 64
_MAX_INPUT_BYTES: Final = 4 << 10
"""Of the JSON of one input's parameters."""


@lru_cache(maxsize=16)
def _inputs_decoder(most: int) -> msgspec.json.Decoder[Any]:
    return at_most(_Input, most)


def decode_json(decoder: msgspec.json.Decoder[Any], body: bytes | memoryview | msgspec.Raw, at: str = "") -> Any:
    """Return the decoded value. INVALID, with the place, if it cannot be decoded. at: where it is, as in ".inputs"."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason, _, place = str(error).partition(" - at `$")
        where = f" - at `${at}{place or '`'}" if at or place else ""
        lone = lone_surrogate(body)
        raise invalid(f"the body is not the JSON expected here: {(lone or reason)[:512] + where[:512]}") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


_HEX: Final = rb"[0-9a-fA-F]"
_LONE: Final = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]%b{2}\\u[dD][c-fC-F]%b{2})*+(\\u[dD][89a-fA-F]%b{2})"
    % (_HEX, _HEX, _HEX)
)
"""JSON up to the first escape of one half of a pair of surrogates without the other."""

_SCANNED_BYTES: Final = 1 << 20


def lone_surrogate(body: bytes | memoryview | msgspec.Raw) -> str:
    """Return what is wrong with JSON that has half of a character, "" if it has none: its decoder does not say so."""
    lone = _LONE.match(memoryview(body)[:_SCANNED_BYTES])
    if lone is None or lone.end() > _SCANNED_BYTES - len(lone[1]):  # the other half may come
        return ""
    return (
        f"{bytes(lone[1]).decode()} (byte {lone.start(1)}) is half of a character; send both halves, such as "
        "\\ud83d\\ude00, or the character itself in UTF-8"
    )


def read_parameters(raw: msgspec.Raw, at: str = ".parameters", most: int = _MAX_BYTES) -> dict[str, Parameter]:
    """Return parameters, empty for an empty Raw. INVALID if their JSON is longer than `most` bytes.

    One with few parts may be longer: it is little work, and the state of a sequence is as long as it is.
    """
    if raw and len(memoryview(raw)) > most and bytes(raw).count(b",") < _FEW_PARTS:
        most = len(memoryview(raw))
    return by_name(_part(_PARAMETERS, raw, at, most)) if raw else {}


def _part(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw, at: str, most: int) -> Any:
    if len(memoryview(raw)) > most:
        raise invalid(f"the JSON at `${at}` has {len(memoryview(raw))} bytes; at most {most} are taken")
    return decode_json(decoder, raw, at)


def read_infer(body: bytes, header_length: str | None, signature: Signature, limits: Limits) -> Pieces[InferRequest]:
    """Return the request in a body. header_length: the header HEADER_LENGTH, if the client sent it.

    Of its JSON, everything but the tensors' data is small, or refused before it is made into objects; and data whose
    shape the model does not take is not read.
    """
    view = memoryview(body)
    length = len(body) if header_length is None else _parsed_length(header_length, len(body))
    try:
        head: _Body = decode_json(_BODY, view[:length])
    except ServiceError as fault:
        if header_length is None and "trailing characters" in str(fault):
            hint = "tensors as bytes after the JSON need the header Inference-Header-Content-Length"
            raise invalid(f"{fault}; {hint}") from None
        raise
    if length > PIECE_BYTES:
        yield
    entries = items_of(decode_json(_inputs_decoder(limits.max_tensors), head.inputs, ".inputs"))
    if len(entries) > limits.max_tensors:
        raise invalid(f"more than {limits.max_tensors} inputs are not taken")
    check_once([one.name for one in entries])
    outputs = tuple(map(_wanted, _part(_OUTPUTS, head.outputs, ".outputs", _MAX_BYTES) if head.outputs else ()))
    parameters = read_parameters(head.parameters)
    raw = view[length:]
    inputs: list[Tensor] = []
    for number, one in enumerate(entries):
        if number and length > PIECE_BYTES:
            yield
        check = partial(signature.check_input, one.name, one.datatype, limits=limits)
        tensor, raw = yield from _read_input(one, raw, f".inputs[{number}]", check)
        inputs.append(tensor)
    if len(raw):
        raise invalid(f"{len(raw)} bytes are left after the last binary tensor; check binary_data_size")
    return InferRequest(tuple(inputs), outputs, head.id, parameters)


def _parsed_length(header_length: str, size: int) -> int:
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12):
        raise invalid(f"Inference-Header-Content-Length must be a number of bytes, got {header_length[:32]!r}")
    length = int(header_length)
    if length > size:
        raise invalid(f"Inference-Header-Content-Length is {length}, but the body has {size} bytes")
    return length


def _read_input(
    entry: _Input, raw: memoryview, at: str, check: Callable[[Sequence[int]], Any]
) -> Pieces[tuple[Tensor, memoryview]]:
    """Read an input; return it and the rest of the binary data."""
    parameters = read_parameters(entry.parameters, f"{at}.parameters", _MAX_INPUT_BYTES)
    refuse_unsupported(entry.name, parameters)
    size = parameters.get("binary_data_size")
    shape = items_of(_part(SHAPE, entry.shape, f"{at}.shape", _MAX_INPUT_BYTES))
    num_elements(entry.name, entry.datatype, shape)  # its error comes before all others
    check(shape)
    if size is None:
        if not entry.data:
            raise invalid(f"tensor {entry.name!r} has neither data nor binary_data_size")
        return (yield from read_json(entry.name, entry.datatype, shape, bytes(entry.data), check)), raw
    if entry.data:
        raise invalid(f"tensor {entry.name!r} has both data and binary_data_size; send one of them")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise invalid(
            f"tensor {entry.name!r}: binary_data_size must be a whole number, how many of the bytes after the JSON are "
            f"the tensor's, got {as_sent(size)}"
        )
    if size > len(raw):
        raise invalid(f"tensor {entry.name!r}: binary_data_size is {as_sent(size)}, but {len(raw)} bytes follow")
    return from_raw(entry.name, entry.datatype, shape, raw[:size]), raw[size:]


def _wanted(output: _Output) -> WantedOutput:
    refuse_unsupported(output.name, output.parameters)
    return WantedOutput(output.name, _flag(output.parameters, "binary_data"))


def _flag(parameters: dict[str, Parameter], name: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {as_sent(value)}")
    return value


def write_infer(response: InferResponse, request: InferRequest, *, nulls: bool = False) -> tuple[bytes, int | None]:
    """Return a body, and the length of its JSON if binary tensors follow.

    An output is binary if the client asked for that, for this output or (`binary_data_output`) for all. nulls: see
    to_json.
    """
    by_default = _flag(dict(request.parameters), "binary_data_output")
    is_binary = {wanted.name: wanted.binary for wanted in request.outputs}
    outputs: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for tensor in response.outputs:
        binary = is_binary.get(tensor.name)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if by_default if binary is None else binary:
            parts.append(to_raw(tensor))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = to_json(tensor, nulls=nulls)
        outputs.append(entry)
    head: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = response.parameters
    encoded = msgspec.json.encode(head)
    return (encoded, None) if not parts else (b"".join((encoded, *parts)), len(encoded))
