"""Sound as text: what a model says of it, and what goes through one sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from batchmaker.engine import Answer
from batchmaker.errors import BatchmakerError, ModelError
from batchmaker.model.model import Model
from batchmaker.server.audio import Audio, Encoding, in_rows, row_of
from batchmaker.server.growing_text import GrowingText
from batchmaker.server.limits import Limits
from batchmaker.server.messages import InferRequest, InferResponse, Parameter, WantedOutput
from batchmaker.server.parameters import call_options
from batchmaker.server.sequences import ConnectedSequence, Wording
from batchmaker.server.signature import Signature, TensorSpec
from batchmaker.server.tensors import Tensor, kind_of

if TYPE_CHECKING:
    from batchmaker.server.served_model import ServedModel

_NOTHING: Final[NDArray[np.float32]] = np.zeros(0, np.float32)


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

    decode is called in the server's own thread, so it must be fast.
    """

    decode: Callable[[Sequence[int]], str] | None = None
    output: str | None = None
    chunk_s: float = 1.0
    language: str | None = None

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
    outputs = [out for out in signature.outputs if said.output in (None, out.name)]
    kind = "O" if said.decode is None else "i"
    if len(outputs) != 1 or kind_of(outputs[0].datatype) != kind or len(outputs[0].shape) != 1:
        listed = ", ".join(f"{out.name!r}: {out.datatype} {list(out.shape)}" for out in signature.outputs)
        wanted = "a text (BYTES)" if said.decode is None else "new tokens, int [n]"
        raise ModelError(f"{needs} one output must be {wanted}; name it if there are others. The outputs are {listed}")
    row = row_of(spec.shape)
    rows = min(max(1, round(said.chunk_s * audio.sample_rate / row)), limits.max_sequence)
    return Transcriber(said, audio, spec, outputs[0], rows * row)


SOUND: Final = Wording("the rest of this sound is not heard", "sound is a sequence")


class PendingSound(NamedTuple):
    """A chunk of sound that the engine has. Times are in seconds, by `time.perf_counter`."""

    request: InferRequest
    answer: Answer
    began_s: float
    submitted_s: float


@final
class Transcript:
    """The sound that goes through one sequence, and the text that comes out of it."""

    def __init__(
        self,
        served: ServedModel,
        transcriber: Transcriber,
        sequence: ConnectedSequence,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        """parameters: of each chunk."""
        self._served = served
        self._transcriber = transcriber
        self._sequence = sequence
        self._parameters = parameters or {}
        self._kept = _NOTHING  # less than a row
        self._growing = None if transcriber.said.decode is None else GrowingText(transcriber.said.decode)
        self._texts: list[str] = []
        self._has_begun = False
        self.num_samples = 0

    @property
    def text(self) -> str:
        """All that is written so far."""
        return "".join(self._texts)

    @property
    def seconds(self) -> float:
        """How long the sound is that has come."""
        return self.num_samples / self._transcriber.audio.sample_rate

    def chunks(self, data: bytes | memoryview, encoding: Encoding) -> Iterator[NDArray[np.float32]]:
        """Yield sound in chunks of whole rows; what is left of a row is kept for the next sound. INVALID as `samples`.

        It is converted chunk by chunk, since sound may be long.
        """
        audio, size, width = self._transcriber.audio, self._transcriber.chunk_size, encoding.width
        audio.check_whole(data, encoding)
        self.num_samples += len(data) // width
        at = 0
        while at < len(data):
            end = at + (size - len(self._kept)) * width
            samples = audio.samples(data[at:end], encoding)
            samples, at = np.concatenate([self._kept, samples]) if len(self._kept) else samples, end
            whole = len(samples) // self._transcriber.row * self._transcriber.row
            self._kept = samples[whole:].copy()
            if whole:
                yield samples[:whole]

    def rest(self) -> Iterator[NDArray[np.float32]]:
        """Yield the last row if it has begun, filled with silence."""
        if len(self._kept):
            row = np.zeros(self._transcriber.row, np.float32)
            row[: len(self._kept)], self._kept = self._kept, _NOTHING
            yield row

    def begin(self, chunk: NDArray[np.float32]) -> PendingSound:
        """Hand a chunk to the engine; `written` must follow. Raises ServiceError if it is refused."""
        spec = self._transcriber.spec
        self._has_begun = True
        request = self._request((Tensor(spec.name, "FP32", in_rows(chunk, spec.shape)),))

        def send() -> Answer:
            options, data = self._served.read_chunk(request, self._sequence)
            return self._served.port.submit(data, options, self._sequence.sequence)

        return self._sent(request, send)

    def begin_end(self) -> PendingSound | None:
        """Tell the model that no chunk comes any more; None for a model that has kept nothing back. As `begin`."""
        port, sequence = self._served.port, self._sequence.sequence
        if not self._has_begun or not port.takes_last:
            return None
        request = self._request(())
        return self._sent(request, lambda: port.finish(call_options(request.parameters), sequence))

    def _sent(self, request: InferRequest, send: Callable[[], Answer]) -> PendingSound:
        """Return a chunk that the engine has got. Raises ServiceError if it has not."""
        began_s = time.perf_counter()
        try:
            answer = send()
        except BatchmakerError as error:
            fault = self._sequence.refused(self._served.fault_of(error))
            self._served.count_refusal(fault)
            raise fault from error
        self._served.statistics.accepted += 1
        self._served.statistics.accepted_chunks += 1
        return PendingSound(request, answer, began_s, time.perf_counter())

    def _request(self, inputs: tuple[Tensor, ...]) -> InferRequest:
        return InferRequest(inputs, (WantedOutput(self._transcriber.output.name),), "", self._parameters)

    async def written(self, sent: PendingSound) -> str:
        """Return what a chunk adds to the text. Raises ServiceError if it has no result, which ends the sequence."""
        served = self._served
        try:
            result = await sent.answer
            answered_s = time.perf_counter()
            response = served.response(sent.request, result)
        except BatchmakerError as error:
            raise self._sequence.failed(error, served.fault_of(error)) from error
        ended_s, statistics = time.perf_counter(), served.statistics
        statistics.first_response_s.add(answered_s - sent.began_s)
        statistics.input_s += sent.submitted_s - sent.began_s
        statistics.output_s += ended_s - answered_s
        statistics.duration_s.add(ended_s - sent.began_s)
        return self._add(response)

    def ended(self) -> str:
        """Return what is left of the text when no chunk comes any more, such as a character that is not whole."""
        return self._keep("" if self._growing is None else self._growing.rest())

    def _add(self, response: InferResponse) -> str:
        values = response.outputs[0].data.reshape(-1).tolist()
        if self._growing is None:
            return self._keep("".join(value.decode(errors="replace") for value in values))
        return self._keep(self._growing.add([int(token) for token in values]))

    def _keep(self, text: str) -> str:
        if text:
            self._texts.append(text)
        return text
