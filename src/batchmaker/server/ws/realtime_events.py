"""The events of OpenAI's realtime API for transcription: what clients send and what they get."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from batchmaker.server.faults import ServiceError, invalid
from batchmaker.server.formats.audio import PCM16, PCMU, Encoding
from batchmaker.server.formats.infer_body import decode_json
from batchmaker.server.formats.openai_errors import openai_error_body

GA_FORMATS: Final[dict[str, Encoding]] = {"audio/pcm": PCM16, "audio/pcmu": PCMU}
BETA_FORMATS: Final[dict[str, Encoding]] = {"pcm16": PCM16, "g711_ulaw": PCMU}

_COMPLETED: Final = "conversation.item.input_audio_transcription.completed"
_DELTA: Final = "conversation.item.input_audio_transcription.delta"
_FAILED: Final = "conversation.item.input_audio_transcription.failed"


# --- from the client -------------------------------------------------------------------------------------------------


class RealtimeEvent(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """Something that a client sends. event_id: its own name of it, which errors repeat."""

    event_id: str | None = None


class UpdateSession(RealtimeEvent, tag="session.update", kw_only=True):
    session: msgspec.Raw


class UpdateTranscriptionSession(RealtimeEvent, tag="transcription_session.update", kw_only=True):
    session: msgspec.Raw


class AppendAudio(RealtimeEvent, tag="input_audio_buffer.append", kw_only=True):
    """audio: base64 in JSON."""

    audio: bytes


class CommitAudio(RealtimeEvent, tag="input_audio_buffer.commit"):
    pass


class ClearAudio(RealtimeEvent, tag="input_audio_buffer.clear"):
    pass


_Taken = UpdateSession | UpdateTranscriptionSession | AppendAudio | CommitAudio | ClearAudio
_EVENT: Final = msgspec.json.Decoder(_Taken)
_TYPES: Final = (
    "session.update",
    "transcription_session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
)


class _Head(msgspec.Struct):
    type: str = ""
    event_id: str | None = None


_HEAD: Final = msgspec.json.Decoder(_Head)


class RefusedEvent(Exception):  # noqa: N818 - the client's error, for the client
    """An event that is not taken. event_id: the client's name of it."""

    def __init__(self, fault: ServiceError, event_id: str | None = None) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.event_id = event_id


def read_event(message: bytes) -> _Taken:
    """Return the event in a message. RefusedEvent if it is none, or none that is implemented."""
    head = _Head()
    try:
        head = decode_json(_HEAD, message)
        if head.type not in _TYPES:
            raise invalid(
                f"the event {head.type[:64]!r} is not implemented; a transcription session takes {', '.join(_TYPES)}"
            )
        event: _Taken = decode_json(_EVENT, message)
        return event
    except ServiceError as fault:
        raise RefusedEvent(fault, head.event_id) from fault


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    rate: int | None = None


class _Transcription(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    language: str | None = None
    prompt: Any = None
    delay: Any = None
    keywords: Any = None
    languages: Any = None


class _SoundInput(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    transcription: _Transcription | UnsetType | None = UNSET
    noise_reduction: Any = None
    turn_detection: Any = None


class _Audio(msgspec.Struct, forbid_unknown_fields=True):
    input: _SoundInput = msgspec.field(default_factory=_SoundInput)


class _GaSession(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "transcription"
    audio: _Audio = msgspec.field(default_factory=_Audio)
    include: Any = None


class _BetaSession(msgspec.Struct, forbid_unknown_fields=True):
    input_audio_format: str | None = None
    input_audio_transcription: _Transcription | UnsetType | None = UNSET
    input_audio_noise_reduction: Any = None
    turn_detection: Any = None
    include: Any = None


class _SessionHead(msgspec.Struct):
    type: Any = "transcription"


_Session = TypeVar("_Session", _GaSession, _BetaSession)
_SESSION_HEAD: Final = msgspec.json.Decoder(_SessionHead)
_GA: Final = msgspec.json.Decoder(_GaSession)
_BETA: Final = msgspec.json.Decoder(_BetaSession)


class SessionChange(NamedTuple):
    """What a client wants of its session; None for what stays as it is. format: its name, among `formats`."""

    model: str | None
    language: str | None
    format: str | None
    rate: int | None
    formats: dict[str, Encoding]
    beta: bool


def read_change(event: UpdateSession | UpdateTranscriptionSession) -> SessionChange:
    """Return the change. INVALID if it is wrong, or asks for what is not implemented."""
    if isinstance(event, UpdateTranscriptionSession):
        beta: _BetaSession = decode_json(_BETA, event.session, ".session")
        _refuse(
            {
                "include": beta.include,
                "turn_detection": beta.turn_detection,
                "input_audio_noise_reduction": beta.input_audio_noise_reduction,
            }
        )
        model, language = _transcription(beta.input_audio_transcription, "input_audio_transcription")
        return SessionChange(model, language, beta.input_audio_format, None, BETA_FORMATS, True)
    kind = decode_json(_SESSION_HEAD, event.session, ".session").type
    if kind != "transcription":
        raise invalid(f"a session of type {str(kind)[:32]!r} is not implemented; use type 'transcription'")
    session: _GaSession = decode_json(_GA, event.session, ".session")
    sound = session.audio.input
    _refuse(
        {
            "include": session.include,
            "audio.input.noise_reduction": sound.noise_reduction,
            "audio.input.turn_detection": sound.turn_detection,
        }
    )
    model, language = _transcription(sound.transcription, "audio.input.transcription")
    form, rate = (None, None) if sound.format is None else (sound.format.type, sound.format.rate)
    return SessionChange(model, language, form, rate, GA_FORMATS, False)


def _transcription(transcription: _Transcription | UnsetType | None, at: str) -> tuple[str | None, str | None]:
    if isinstance(transcription, UnsetType):
        return None, None
    if transcription is None:
        raise invalid(f"session.{at} cannot be null: this is a transcription session")
    _refuse({f"{at}.{name}": getattr(transcription, name) for name in ("prompt", "delay", "keywords", "languages")})
    return transcription.model, transcription.language


def _refuse(fields: dict[str, Any]) -> None:
    """Raise INVALID for what asks for something that is not implemented."""
    for name, value in fields.items():
        if value not in (None, "", []):
            why = "; commit when an utterance has ended" if name.endswith("turn_detection") else ""
            raise invalid(f"session.{name} is not implemented: leave it out{why}")


# --- from the server -------------------------------------------------------------------------------------------------


class SessionView(NamedTuple):
    """The session as clients see it. model, rate: None while they are not known."""

    id: str
    model: str | None
    language: str | None
    encoding: Encoding
    rate: int | None

    def event(self, kind: str) -> dict[str, Any]:
        """Return session.created or session.updated."""
        form: dict[str, Any] = {"type": _name_of(self.encoding, GA_FORMATS)}
        if self.encoding is PCM16 and self.rate is not None:
            form["rate"] = self.rate
        sound = {
            "format": form,
            "transcription": self._transcription(),
            "noise_reduction": None,
            "turn_detection": None,
        }
        session = {
            "id": self.id,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": sound},
        }
        return {"type": kind, "session": session}

    def beta_event(self) -> dict[str, Any]:
        """Return transcription_session.updated."""
        session = {
            "id": self.id,
            "object": "realtime.transcription_session",
            "input_audio_format": _name_of(self.encoding, BETA_FORMATS),
            "input_audio_transcription": self._transcription(),
            "turn_detection": None,
        }
        return {"type": "transcription_session.updated", "session": session}

    def _transcription(self) -> dict[str, Any] | None:
        if self.model is None:
            return None
        return {"model": self.model} if self.language is None else {"model": self.model, "language": self.language}


def _name_of(encoding: Encoding, formats: dict[str, Encoding]) -> str:
    return next(name for name, one in formats.items() if one is encoding)


def committed(item: str, previous: str | None) -> dict[str, Any]:
    return {"type": "input_audio_buffer.committed", "item_id": item, "previous_item_id": previous}


def cleared() -> dict[str, Any]:
    return {"type": "input_audio_buffer.cleared"}


def delta(item: str, text: str) -> dict[str, Any]:
    return {"type": _DELTA, "item_id": item, "content_index": 0, "delta": text}


def completed(item: str, text: str, seconds: float) -> dict[str, Any]:
    usage = {"type": "duration", "seconds": seconds}
    return {"type": _COMPLETED, "item_id": item, "content_index": 0, "transcript": text, "usage": usage}


def failed(item: str, fault: ServiceError) -> dict[str, Any]:
    return {"type": _FAILED, "item_id": item, "content_index": 0, "error": openai_error_body(fault.kind, str(fault))}


def refused(fault: ServiceError, event_id: str | None, code: str | None = None) -> dict[str, Any]:
    """Return the event `error`. event_id: of the client's event."""
    return {"type": "error", "error": {**openai_error_body(fault.kind, str(fault)), "code": code, "event_id": event_id}}
