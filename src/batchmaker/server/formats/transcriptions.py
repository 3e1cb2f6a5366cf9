"""What a model says of the text that it hears, checked against its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final, runtime_checkable

from batchmaker.errors import ModelError
from batchmaker.model.model import Model
from batchmaker.server.formats.audio import Audio, row_of
from batchmaker.server.formats.resampling import Resampler
from batchmaker.server.formats.signature import Signature, TensorSpec
from batchmaker.server.formats.tensors import kind_of
from batchmaker.server.limits import Limits

_OPENAI_RATE: Final = 24_000
"""Of PCM in OpenAI's realtime API."""


@final
@dataclass(frozen=True, slots=True)
class Transcriptions:
    """How a model that hears writes what it has heard: the result of its `serving_transcriptions()`.

    Clients of OpenAI's API can then send files to /v1/audio/transcriptions and live sound to /v1/realtime. One of its
    inputs is sound (`serving_audio()`), the others are optional, and it has an `unfold_chunk`: sound goes through a
    sequence. What a chunk adds to the text is the chunk's result; nothing is taken back.

    - decode: tokens -> their text, for a result of new tokens, int [n]. None for a result that is a text.
    - output: the name of the output; None for the only one.
    - chunk_s: seconds of sound in a chunk of a file, and at most in a chunk of live sound.
    - language: of the text, as in ISO 639-1, if it has one.
    - resample: whether sound of another rate than the model's is taken, and made sound of that rate (by a low-pass
      filter, see `resampling`); otherwise it is refused. Live PCM is then taken to be of 24000 Hz, as in OpenAI's API,
      if its client says nothing.

    decode is called in the server's own thread, so it must be fast.
    """

    decode: Callable[[Sequence[int]], str] | None = None
    output: str | None = None
    chunk_s: float = 1.0
    language: str | None = None
    resample: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.chunk_s <= 3600.0:
            raise ModelError(f"Transcriptions(chunk_s={self.chunk_s!r}): seconds above 0 and at most 3600 are wanted")


@runtime_checkable
class DeclaresTranscriptions(Protocol):
    """A model that writes what it hears; None if it does not."""

    def serving_transcriptions(self) -> Transcriptions | None: ...


@final
@dataclass(frozen=True, slots=True)
class Transcriber:
    """A model's transcriptions, checked against its tensors. spec: the input that is sound."""

    said: Transcriptions
    audio: Audio
    spec: TensorSpec
    output: TensorSpec
    chunk_size: int

    @property
    def usual_rate(self) -> int:
        """Samples a second of live PCM if nothing is said."""
        return _OPENAI_RATE if self.said.resample else self.audio.sample_rate

    def check_rate(self, rate: int, what: str) -> None:
        """Raise INVALID for sound of a rate that is not taken. what: the sound."""
        if self.said.resample and rate > 0:
            Resampler(rate, self.audio.sample_rate)
        else:
            self.audio.check_rate(rate, what)

    @property
    def row(self) -> int:
        """Samples in a row of the input."""
        return row_of(self.spec.shape)


def transcriber_of(model: Model, signature: Signature, limits: Limits) -> Transcriber | None:
    """Return how a model writes what it hears, None if it does not. ModelError if its tensors are not those needed."""
    said: Any = model.serving_transcriptions() if isinstance(model, DeclaresTranscriptions) else None
    if said is None:
        return None
    name = type(model).__name__
    if not isinstance(said, Transcriptions):
        raise ModelError(f"{name}.serving_transcriptions() returned {type(said).__name__}, not Transcriptions")
    audio, spec = signature.audio, signature.audio_input
    needs = f"{name} has serving_transcriptions(), so"
    if audio is None or spec is None:
        raise ModelError(f"{needs} it must say which of its inputs is sound: define serving_audio()")
    others = [other.name for other in signature.inputs if other is not spec and not other.optional]
    if others or not model.takes_chunks:
        wrong = f"the inputs {', '.join(others)} must be optional" if others else "it needs an unfold_chunk"
        raise ModelError(f"{needs} {wrong}: sound goes through a sequence, with nothing beside it")
    if signature.decode is not None:
        raise ModelError(f"{needs} its signature has no `decode`: Transcriptions(decode=...) makes the text")
    outputs = [out for out in signature.outputs if said.output in (None, out.name)]
    kind = "O" if said.decode is None else "i"
    if len(outputs) != 1 or kind_of(outputs[0].datatype) != kind or len(outputs[0].shape) != 1:
        listed = ", ".join(f"{out.name!r}: {out.datatype} {list(out.shape)}" for out in signature.outputs)
        wanted = "a text (BYTES)" if said.decode is None else "new tokens, int [n]"
        raise ModelError(f"{needs} one output must be {wanted}; name it if there are others. The outputs are {listed}")
    row = row_of(spec.shape)
    rows = min(max(1, round(said.chunk_s * audio.sample_rate / row)), limits.max_sequence)
    return Transcriber(said, audio, spec, outputs[0], rows * row)
