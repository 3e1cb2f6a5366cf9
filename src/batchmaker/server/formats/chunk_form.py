"""The format of the chunks and answers of one connection: tensor values or plain JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeVar, final

import msgspec
import numpy as np

from batchmaker.errors import unknown_name
from batchmaker.server.faults import STATUS, FaultKind, ServiceError, invalid
from batchmaker.server.formats.audio import Encoding, in_rows
from batchmaker.server.formats.generate_body import read_generate, write_generate
from batchmaker.server.formats.infer_body import lone_surrogate
from batchmaker.server.formats.messages import InferRequest, InferResponse, Parameter, WantedOutput
from batchmaker.server.formats.parameters import call_options
from batchmaker.server.formats.pieces import at_once
from batchmaker.server.formats.signature import Signature, TensorSpec, as_array
from batchmaker.server.formats.tensors import NUMPY, Tensor, from_raw, raw_width, to_raw
from batchmaker.server.limits import Limits

_KNOWN: Final = ("answers", "output", "deadline_ms", "priority", "audio", "rate")
_ANSWERS: Final = ("json", "binary")
_LIMITS: Final = Limits()
_Number = TypeVar("_Number", int, float)
MAX_TEXT_BYTES: Final = 256 << 10
"""Bytes of a chunk in JSON, which is read at once: within a tenth of a second, whatever is in it."""


_CONTROL: Final = re.compile(r'\s*\{\s*"(end|reset|state|open)"\s*:')


class OpenFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state that a sequence goes on from, in base64."""

    state: bytes


class ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text message that is no chunk: one of these."""

    end: Literal[True] | None = None
    reset: Literal[True] | None = None
    state: Literal[True] | None = None
    open: OpenFrom | None = None


_CONTROLS: Final = msgspec.json.Decoder(ControlMessage)


@final
class ChunkForm:
    """Reads chunks and writes answers in the format of a connection's query.

    A text message is a chunk in the form of `generate`. A binary message holds the values of the model's only tensor,
    without name and shape; with `audio=pcm16` or `audio=pcmu`, sound. Answers are in the form of `generate` or, with
    `answers=binary`, the values of one output.
    """

    def __init__(
        self, signature: Signature, query: Mapping[str, str], limits: Limits = _LIMITS, *, nulls: bool = False
    ) -> None:
        """query: answers, output, audio and its rate; deadline_ms and priority of every chunk. INVALID otherwise.

        nulls: see to_json.
        """
        for name in query:
            if name not in _KNOWN:
                raise invalid(str(unknown_name("query parameter", name[:64], _KNOWN)))
        self._signature = signature
        self._limits = limits
        self._nulls = nulls
        self._tensor = _only_tensor(signature)
        self._input_names = frozenset(spec.name for spec in signature.inputs)
        self._parameters: dict[str, Parameter] = _numbers(query)
        self.priority = call_options(self._parameters).priority
        self._outputs = (WantedOutput(query["output"]),) if "output" in query else ()
        signature.check_outputs(self._outputs)
        answers = query.get("answers", "json")
        if answers not in _ANSWERS:
            raise invalid(f"answers must be json or binary, got {answers[:32]!r}")
        self.is_binary = answers == "binary"
        """Whether answers are values."""
        self.deadline_ms = call_options(self._parameters).deadline_ms
        self.plain = InferRequest((), self._outputs, "", self._parameters)
        """What a chunk of plain values asks for."""
        codes = signature.encode is not None or signature.decode is not None
        self._encoding = _encoding(signature, query)
        is_sound = self._encoding is not None
        self._values = None if codes or is_sound or self._tensor is None else _values_form(self._tensor, limits)
        self.takes_values = self._values is not None
        """Whether `read_values` reads binary messages."""
        self._make_input = signature.input_maker(self._tensor) if self._tensor is not None else None
        self._output = signature.plain_output if self.is_binary and not codes else None
        self.gives_values = self._output is not None
        """Whether `write_values` makes the answer."""
        if self.is_binary and not self._outputs and len(signature.outputs) != 1:
            names = ", ".join(spec.name for spec in signature.outputs)
            raise invalid(f"binary answers hold one output, and the model has {names}; name one as output=NAME")

    def read(self, message: bytes | str) -> InferRequest:
        """Return the chunk in a message. INVALID if it does not fit the model's inputs."""
        if isinstance(message, str):
            text = message.encode()
            if len(text) > MAX_TEXT_BYTES:
                raise ServiceError(
                    FaultKind.TOO_LARGE,
                    f"a chunk in JSON has {len(text)} bytes; at most {MAX_TEXT_BYTES} are taken. Send its values as a "
                    "binary message, or in several chunks",
                )
            chunk = at_once(read_generate(text, self._signature, self._limits))
            return msgspec.structs.replace(
                chunk, outputs=self._outputs, parameters={**self._parameters, **chunk.parameters}
            )
        if self._encoding is not None:
            return InferRequest((self._sound(message, self._encoding),), self._outputs, "", self._parameters)
        if self._tensor is None:
            raise invalid("the inputs of this model are not one tensor of numbers: send each chunk as JSON, as text")
        tensor = from_raw(
            self._tensor.name, self._tensor.datatype, _shape(self._tensor, len(message)), memoryview(message)
        )
        return InferRequest((tensor,), self._outputs, "", self._parameters)

    def _sound(self, message: bytes, encoding: Encoding) -> Tensor:
        audio, spec = self._signature.audio, self._signature.audio_input
        if audio is None or spec is None:
            raise TypeError("sound was not refused of a model that takes none")
        return Tensor(spec.name, "FP32", in_rows(audio.samples(message, encoding), spec.shape))

    def read_chunk(self, message: bytes | str) -> tuple[InferRequest, bool]:
        """As `read`; also whether the chunk is marked as the last one: by the parameter `sequence_end`."""
        chunk = self.read(message)
        if chunk.parameters.get("sequence_end") is not True or "sequence_id" in chunk.parameters:
            return chunk, False
        parameters = {name: value for name, value in chunk.parameters.items() if name != "sequence_end"}
        return msgspec.structs.replace(chunk, parameters=parameters), True

    def read_control(self, message: str) -> ControlMessage | None:
        """Return what a text message asks for in place of a chunk; None for a chunk. INVALID if it is malformed.

        A name of an input is always that input.
        """
        control = _CONTROL.match(message)
        if control is None or control[1] in self._input_names:
            return None
        try:
            return _CONTROLS.decode(message)
        except msgspec.DecodeError as error:
            said = lone_surrogate(message.encode()) or error
            raise invalid(f"{control[1]!r} is no input of this model, and no control of this form: {said}") from None

    def read_values(self, message: bytes | memoryview) -> Any:
        """Return the argument of `unfold_chunk` of plain values, not copied. INVALID if they do not fit the input."""
        values, tensor = self._values, self._tensor
        assert values is not None
        assert tensor is not None
        assert self._make_input is not None
        count, rest = divmod(len(message), values.row_bytes)
        if rest or count > values.most_rows or (count != 1 and not values.varies):
            chunk = self.read(bytes(message))
            return self._signature.to_request(chunk.inputs, self._limits)  # which says what is wrong
        data = np.frombuffer(message, values.dtype)
        if values.shape is not None:
            data = data.reshape(values.shape)
        return self._make_input(data.item() if tensor.single else data)

    def write_values(self, result: Any) -> bytes:
        """Return the values of the only output, of a binary answer. ValueError, TypeError for what is no tensor."""
        assert self._output is not None
        return as_array(result).astype(self._output, copy=False).tobytes()

    def write(self, response: InferResponse) -> bytes | str:
        """Return the message that answers a chunk."""
        return to_raw(response.outputs[0]) if self.is_binary else write_generate(response, nulls=self._nulls).decode()

    @staticmethod
    def write_fault(fault: ServiceError, request_id: str = "") -> str:
        """Return the message for a chunk without a result: always text."""
        said: dict[str, Any] = {"error": str(fault), "status": STATUS[fault.kind]}
        if fault.retry_after_s is not None:
            said["retry_after_s"] = fault.retry_after_s
        if request_id:
            said["id"] = request_id
        return msgspec.json.encode(said).decode()


class _Values(NamedTuple):
    """Plain values of the only input. shape: None if it has one dimension. varies: one of its dimensions does."""

    dtype: np.dtype[Any]
    row_bytes: int
    most_rows: int
    shape: tuple[int, ...] | None
    varies: bool


def _values_form(spec: TensorSpec, limits: Limits) -> _Values | None:
    """Return how values are read in one step; None for datatypes that have to be converted, and shapes too large."""
    if spec.datatype in ("BF16", "BOOL") or any(size > limits.max_sequence for size in spec.shape):
        return None
    fixed = [size for size in spec.shape if size != -1]
    shape = None if len(spec.shape) == 1 else spec.shape
    varies = -1 in spec.shape
    row_bytes = raw_width(spec.datatype) * math.prod(fixed)
    if not row_bytes:
        return None
    return _Values(NUMPY[spec.datatype], row_bytes, limits.max_sequence if varies else 1, shape, varies)


def _only_tensor(signature: Signature) -> TensorSpec | None:
    """Return the input for a binary message: the only one, or the only required one."""
    required = [spec for spec in signature.inputs if not spec.optional] or list(signature.inputs)
    if len(required) != 1 or required[0].datatype == "BYTES":
        return None
    free = required[0].shape.count(-1)
    return required[0] if free == 0 or (free == 1 and 0 not in required[0].shape) else None


def _shape(spec: TensorSpec, num_bytes: int) -> tuple[int, ...]:
    """Return the shape of data with this number of bytes. INVALID if it is not a whole number of rows."""
    if -1 not in spec.shape:
        return spec.shape
    row = raw_width(spec.datatype) * math.prod(size for size in spec.shape if size != -1)
    count, rest = divmod(num_bytes, row)
    if rest:
        raise invalid(
            f"a binary chunk of {num_bytes} bytes is no whole number of rows of {row} bytes: input {spec.name!r} is "
            f"{spec.datatype} of shape {list(spec.shape)}"
        )
    return tuple(count if size == -1 else size for size in spec.shape)


def _encoding(signature: Signature, query: Mapping[str, str]) -> Encoding | None:
    """Return how binary messages are sound; None if they are values."""
    if "audio" not in query:
        if "rate" in query:
            raise invalid("rate is that of sound: name its encoding too, as audio=pcm16")
        return None
    if signature.audio is None:
        raise invalid("this model does not say that an input is sound (it has no serving_audio()): leave out audio")
    rate = _number(query, "rate", int) if "rate" in query else None
    return signature.audio.encoding(query["audio"], rate)


def _numbers(query: Mapping[str, str]) -> dict[str, Parameter]:
    """Return the parameters for every chunk."""
    kinds = {"deadline_ms": float, "priority": int}
    return {name: _number(query, name, kind) for name, kind in kinds.items() if name in query}


def _number(query: Mapping[str, str], name: str, kind: Callable[[str], _Number]) -> _Number:
    try:
        return kind(query[name])
    except ValueError:
        raise invalid(f"{name} must be a number, got {query[name][:32]!r}") from None
