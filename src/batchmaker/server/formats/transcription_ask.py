"""What a call of OpenAI's /v1/audio/transcriptions asks for."""

from __future__ import annotations

from typing import Final, NamedTuple

from batchmaker.errors import unknown_name
from batchmaker.server.faults import invalid
from batchmaker.server.formats.form_body import FormBody
from batchmaker.server.formats.transcriptions import Transcriptions

_TAKEN: Final = ("file", "model", "response_format", "stream", "language", "prompt", "temperature")
_NEUTRAL: Final = {"prompt": ("",), "temperature": ("", "0", "0.0")}
"""Fields that are not supported, with the values that ask for nothing."""

_OF_THE_API: Final = (
    "chunking_strategy",
    "include",
    "timestamp_granularities",
    "keywords",
    "languages",
    "known_speaker_names",
    "known_speaker_references",
)
_FORMATS: Final = ("json", "text", "verbose_json")
_OTHER_FORMATS: Final = ("srt", "vtt", "diarized_json")
_FLAGS: Final = {"true": True, "false": False}


class TranscriptionAsk(NamedTuple):
    """file: the bytes of it. response_format: json, text or verbose_json."""

    model: str
    file: bytes
    response_format: str
    stream: bool
    language: str | None


def read_transcription(form: FormBody) -> TranscriptionAsk:
    """Return what a form asks for. INVALID if it is wrong, or asks for what is not supported."""
    for name in form.fields:
        plain = name.split("[", 1)[0]
        if plain in _OF_THE_API:
            raise invalid(f"{plain} is not supported; leave it out")
        if name not in _TAKEN:
            raise invalid(str(unknown_name("field", name[:64], _TAKEN)))
    for name, neutral in _NEUTRAL.items():
        if _field(form, name, "") not in neutral:
            raise invalid(f"{name} is not supported; leave it out")
    for name in form.files:
        if name != "file":
            raise invalid(f"unknown file {name[:64]!r}; the sound is the file named 'file'")
    if "file" not in form.files:
        raise invalid("the file is missing: send the sound as the file named 'file', with a filename")
    model = _field(form, "model", "")
    if not model:
        raise invalid("the field 'model' is missing")
    response_format = _field(form, "response_format", "json")
    if response_format in _OTHER_FORMATS:
        raise invalid(f"response_format {response_format!r} needs times or speakers of the model; use json or text")
    if response_format not in _FORMATS:
        raise invalid(str(unknown_name("response_format", response_format[:32], _FORMATS)))
    stream = _FLAGS.get(_field(form, "stream", "false").lower())
    if stream is None:
        raise invalid("stream must be true or false")
    if stream and response_format == "verbose_json":
        raise invalid("a stream is of response_format json; leave verbose_json out, or stream")
    return TranscriptionAsk(model, form.files["file"], response_format, stream, _field(form, "language", "") or None)


def check_language(language: str | None, said: Transcriptions, model: str) -> None:
    """Raise INVALID for another language than the model's: the model cannot be told which to hear."""
    if language is not None and language != said.language:
        what = "says no language" if said.language is None else f"writes {said.language!r}"
        raise invalid(f"language {language[:32]!r} cannot be asked for: the model {model[:64]!r} {what}; leave it out")


def _field(form: FormBody, name: str, missing: str) -> str:
    values = form.fields.get(name, [missing])
    if len(values) > 1:
        raise invalid(f"the field {name!r} is sent twice")
    return values[0]
