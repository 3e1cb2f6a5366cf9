"""The request parameters that the server uses; all others are ignored."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.messages import Parameter

DAY_S: Final = 86_400.0
"""Deadlines are within a day."""

MAX_ID: Final = 1024
"""Characters of a request's id."""

_MAX_PRIORITY: Final = (1 << 32) - 1
_MAX_SEQUENCE_ID: Final = (1 << 64) - 1
_MAX_SEQUENCE_NAME: Final = 128
_MOST_SAID: Final = 40
"""Characters of a wrong value in a message."""


SequenceName = int | str
"""A client's name of its sequence. 7 and "7" are two names."""


class ChunkOptions(msgspec.Struct, frozen=True):
    """The sequence of a chunk, and what is asked of the sequence with it.

    start, end: it is the first or the last. reset: the sequence forgets its state first. wants_state: the answer has
    the state after the chunk. state: what a sequence that starts goes on from; see Sequence.state.
    """

    name: SequenceName
    start: bool = False
    end: bool = False
    reset: bool = False
    wants_state: bool = False
    state: bytes | None = None

    @property
    def needs_no_input(self) -> bool:
        """Whether a request may ask only this of the sequence, and have no chunk."""
        return self.end or self.reset or self.wants_state or self.state is not None

    @property
    def only_asks(self) -> bool:
        """Whether a request without a chunk changes nothing."""
        return self.wants_state and not (self.start or self.end or self.reset)


class CallOptions(msgspec.Struct, frozen=True):
    """Options of a request for the engine. deadline_ms: from its arrival, waiting included. priority: larger first.

    chunk: None for a request outside sequences.
    """

    deadline_ms: float | None = None
    priority: int = 0
    chunk: ChunkOptions | None = None


_DEFAULT: Final = CallOptions()


def as_sent(value: Parameter) -> str:
    """Return a parameter's value for a message, as it is written in JSON; the beginning of a long one."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(value)
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}..."


def check_id(request_id: str) -> None:
    """Raise INVALID for an id that is too long: it is sent back with every part of an answer."""
    if len(request_id) > MAX_ID:
        raise invalid(f"the request's id has {len(request_id)} characters; at most {MAX_ID} are taken")


def call_options(parameters: Mapping[str, Parameter]) -> CallOptions:
    """Return the options in a request's parameters.

    `timeout` (microseconds; 0 is none, as in Triton) and `deadline_ms`: the earlier counts. `priority`: 1 is the
    highest; without one, or with 0, a request comes after all that have one. `sequence_id`: 0 and "" are none.
    """
    if not parameters:
        return _DEFAULT
    deadlines_ms = [
        milliseconds
        for name, unit_ms in (("timeout", 1e-3), ("deadline_ms", 1.0))
        if (milliseconds := _milliseconds(name, parameters.get(name), unit_ms)) is not None
    ]
    return CallOptions(min(deadlines_ms, default=None), _priority(parameters.get("priority")), _chunk(parameters))


def named_sequence(parameters: Mapping[str, Parameter]) -> SequenceName | None:
    """Return the name of a request's sequence, whatever else is wrong with its parameters; None if it has none."""
    name = parameters.get("sequence_id")
    return name if name and isinstance(name, int | str) and not isinstance(name, bool) else None


class _ParametersOnly(msgspec.Struct):
    parameters: dict[str, Any] = {}


_PARAMETERS_ONLY: Final = msgspec.json.Decoder(_ParametersOnly)


def parameters_in(body: bytes, json_length: str | None = None) -> Mapping[str, Any]:
    """Return the parameters in a body of which something else is wrong; none where they cannot be read either.

    json_length: the number of its bytes that are JSON, as the client has said; None for all.
    """
    try:
        return _PARAMETERS_ONLY.decode(body if json_length is None else body[: int(json_length)]).parameters
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {}


def refuse_unsupported(name: str, parameters: Mapping[str, Parameter]) -> None:
    """Raise UNSUPPORTED for parameters of an input or output that this server does not implement."""
    if parameters.get("classification"):
        raise ServiceError(FaultKind.UNSUPPORTED, f"tensor {name!r}: classification is not supported; ask for the data")
    if "shared_memory_region" in parameters:
        raise ServiceError(FaultKind.UNSUPPORTED, f"tensor {name!r}: shared memory is not supported; send the data")


def _milliseconds(name: str, value: Parameter, unit_ms: float) -> float | None:
    is_timeout = name == "timeout"
    if value is None or (is_timeout and value == 0 and not isinstance(value, bool)):
        return None
    # compared before it is multiplied: an integer may be larger than every float
    if isinstance(value, bool | str) or not 0 < value <= 1e3 * DAY_S / unit_ms:
        unit = "microseconds" if is_timeout else "milliseconds"
        none = "0 or without it" if is_timeout else "without it"
        raise invalid(
            f"parameter {name!r} must be a number of {unit} above 0 and within a day, got {as_sent(value)}; {none}, "
            "the request has no deadline of its own"
        )
    return value * unit_ms


def _priority(value: Parameter) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_PRIORITY:
        raise invalid(
            "parameter 'priority' must be a whole number, 0 (default) or 1 (highest) and on up to "
            f"{_MAX_PRIORITY}, got {as_sent(value)}"
        )
    return _MAX_PRIORITY + 1 - value if value else 0


def _chunk(parameters: Mapping[str, Parameter]) -> ChunkOptions | None:
    start, end, reset = (_flag(f"sequence_{what}", parameters.get(f"sequence_{what}")) for what in _ASKED)
    name, state = parameters.get("sequence_id"), parameters.get("sequence_state")
    if name is None or name == "" or (name == 0 and not isinstance(name, bool)):
        if start or end or reset or state:
            raise invalid(
                "sequence_start, sequence_end, sequence_reset and sequence_state need a sequence_id: a whole number "
                "above 0, or a string"
            )
        return None
    if isinstance(name, str):
        good = len(name) <= _MAX_SEQUENCE_NAME
    else:
        good = isinstance(name, int) and not isinstance(name, bool) and 0 < name <= _MAX_SEQUENCE_ID
    if isinstance(name, float) or not good:
        raise invalid(
            "parameter 'sequence_id' must be a whole number from 1 to 2^64 - 1, or a string of at most "
            f"{_MAX_SEQUENCE_NAME} characters, got {as_sent(name)}"
        )
    if isinstance(state, str) and not start:
        raise invalid("a sequence_state is what a sequence begins with: send it with sequence_start; true asks for one")
    if state is True and end:
        raise invalid(
            "sequence_state asks for what the sequence goes on from, and sequence_end ends it: send one of them"
        )
    data = state_in(state) if isinstance(state, str) else None
    return ChunkOptions(name, start, end, reset, data is None and _flag("sequence_state", state), data)


_ASKED: Final = ("start", "end", "reset")


def state_in(text: str) -> bytes:
    """Return a state that came as text, in base64. INVALID if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise invalid("a sequence_state is base64 of what the server gave as one") from None


def state_as_text(state: bytes) -> str:
    """Return a state as `state_in` reads it."""
    return base64.b64encode(state).decode()


def _flag(name: str, value: Parameter) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(f"parameter {name!r} must be true or false, got {as_sent(value)}")
