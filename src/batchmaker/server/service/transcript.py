"""Sound on its way through one sequence, and the text that comes out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.engine import Answer
from batchmaker.errors import BatchmakerError
from batchmaker.server.formats.audio import Encoding, in_rows
from batchmaker.server.formats.growing_text import GrowingText
from batchmaker.server.formats.messages import InferRequest, InferResponse, Parameter, WantedOutput
from batchmaker.server.formats.parameters import call_options
from batchmaker.server.formats.resampling import Resampler
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.formats.transcriptions import Transcriber
from batchmaker.server.service.sequences import ConnectedSequence, Wording
from batchmaker.server.service.served_model import ServedModel

_NOTHING: Final[NDArray[np.float32]] = np.zeros(0, np.float32)
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
        self._remainder = _NOTHING  # less than a row
        self._growing = None if transcriber.said.decode is None else GrowingText(transcriber.said.decode)
        self._texts: list[str] = []
        self._resampler: Resampler | None = None
        self._has_begun = False
        self._rate = transcriber.audio.sample_rate
        self.num_samples = 0

    @property
    def text(self) -> str:
        """All that is written so far."""
        return "".join(self._texts)

    @property
    def seconds(self) -> float:
        """How long the sound is that has come."""
        return self.num_samples / self._rate

    def chunks(self, data: bytes | memoryview, encoding: Encoding, rate: int) -> Iterator[NDArray[np.float32]]:
        """Yield sound in chunks of whole rows; what is left of a row is kept for the next sound. INVALID as `samples`.

        rate: samples a second; the same for all sound of the sequence. It is converted chunk by chunk, since sound may
        be long.
        """
        audio, size, width = self._transcriber.audio, self._transcriber.chunk_size, encoding.width
        audio.check_whole(data, encoding)
        if rate != audio.sample_rate and self._resampler is None:
            self._resampler = Resampler(rate, audio.sample_rate)
        self._rate = rate
        self.num_samples += len(data) // width
        at = 0
        while at < len(data):
            end = at + (size - len(self._remainder)) * width
            samples, at = audio.samples(data[at:end], encoding), end
            yield from self._rows(samples if self._resampler is None else self._resampler.feed(samples))

    def rest(self) -> Iterator[NDArray[np.float32]]:
        """Yield what is left: the last row is filled with silence."""
        if self._resampler is not None:
            yield from self._rows(self._resampler.rest())
        if len(self._remainder):
            row = np.zeros(self._transcriber.row, np.float32)
            row[: len(self._remainder)], self._remainder = self._remainder, _NOTHING
            yield row

    def _rows(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """Yield what is kept and these samples in whole rows, a chunk at most at a time; keep the rest."""
        samples = np.concatenate([self._remainder, samples]) if len(self._remainder) else samples
        size, row = self._transcriber.chunk_size, self._transcriber.row
        whole = len(samples) // row * row
        self._remainder = samples[whole:].copy()
        for at in range(0, whole, size):
            yield samples[at : min(at + size, whole)]

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
        port, sequence, request = self._served.port, self._sequence.sequence, self._request(())
        if not self._has_begun or not sequence.takes_last:
            return None
        deadline_ms = call_options(request.parameters).deadline_ms
        return self._sent(request, lambda: port.finish(sequence, None, deadline_ms)[0])

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
