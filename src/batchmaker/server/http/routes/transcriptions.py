"""OpenAI's transcriptions of files: the text of a file at once, or as events while it is heard."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing
from itertools import chain
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from batchmaker.server.access.departure import unless_gone
from batchmaker.server.access.sender import Sender, sender_of
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.form_body import read_form
from batchmaker.server.formats.messages import Parameter
from batchmaker.server.formats.openai_errors import openai_error
from batchmaker.server.formats.parameters import DAY_S
from batchmaker.server.formats.transcription_ask import TranscriptionAsk, check_language, read_transcription
from batchmaker.server.formats.transcriptions import Transcriber
from batchmaker.server.formats.wav import Wav, read_wav
from batchmaker.server.http.answers import EventStream, as_json
from batchmaker.server.http.routes.endpoint import Endpoint
from batchmaker.server.service.service import Service
from batchmaker.server.service.site import Site
from batchmaker.server.service.transcript import SOUND, PendingSound, Transcript

_AHEAD: Final = 2
"""Chunks of a file that the engine has at once: one that it computes and the next."""

_PRIORITY: Final = -1
"""Of a file: live sound goes first, with whatever priority."""

_PARAMETERS: Final[dict[str, Parameter]] = {"deadline_ms": 1e3 * DAY_S}
"""Of a file's chunks. A model's own deadline is for live ones."""


class _FileJob(NamedTuple):
    """One file to be heard."""

    ask: TranscriptionAsk
    transcriber: Transcriber
    wav: Wav
    sender: Sender

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": self.wav.num_samples / self.wav.rate}


def transcription_routes(site: Site) -> list[Route]:
    """Transcriptions of files."""
    service = site.service

    async def transcribe(request: Request) -> Response:
        """Return the text of a WAV file: whole, or its pieces as events."""
        with ExitStack() as stack:
            sender = sender_of(request.scope, site.keys)
            held = stack.enter_context(site.bodies.holding(sender.client))
            body, form = await held.read(request), request.headers.get("content-type")
            ask = read_transcription(await site.bodies.pieces.finish(read_form(body, form)))
            del body
            job = _FileJob(ask, service.transcriber(ask.model), read_wav(ask.file), sender)
            check_language(ask.language, job.transcriber.said, ask.model)
            job.transcriber.check_rate(job.wav.rate, "the file")
            if ask.response_format == "verbose_json" and job.transcriber.said.language is None:
                raise invalid(
                    f"response_format verbose_json names the language of the text, and the model {ask.model[:64]!r} "
                    "says none; use json or text"
                )
            deltas = _deltas(service, job)
            if not ask.stream:
                return _answer(job, await unless_gone(request.scope, _joined(deltas)))
            first = await unless_gone(request.scope, anext(deltas))  # its errors can still set the status
            return EventStream(_events(first, deltas, stack.pop_all()), service.limits.write_seconds)

    return [Route("/v1/audio/transcriptions", Endpoint(transcribe), methods=["POST"])]


def _answer(job: _FileJob, text: str) -> Response:
    if job.ask.response_format == "text":
        return PlainTextResponse(text)
    answer: dict[str, Any] = {"text": text, "usage": job.usage}
    if job.ask.response_format == "verbose_json":
        answer |= {"task": "transcribe", "language": job.transcriber.said.language, "duration": job.usage["seconds"]}
    return as_json(answer)


async def _joined(deltas: AsyncGenerator[str, None]) -> str:
    async with aclosing(deltas):
        return "".join([delta async for delta in deltas])


async def _deltas(service: Service, job: _FileJob) -> AsyncGenerator[str, None]:
    """Yield the pieces of the text, some of them empty. Closing it gives up what is not heard yet.

    Few chunks are sent ahead, so that a long file takes its turns among others. If the model is unloaded, the rest is
    sent at once: the call was accepted as a whole.
    """
    with service.conversation():
        served = service.repository.get(job.ask.model, None)
        sequence = served.connect(job.sender, _PRIORITY, SOUND)
        transcript = Transcript(served, job.transcriber, sequence, _PARAMETERS)
        sound = transcript.chunks(job.wav.data, job.wav.encoding, job.wav.rate)
        feeder = _Feeder(transcript, chain(sound, transcript.rest()))
        served.connected.add(feeder.send_all)
        try:
            while (begun := feeder.next()) is not None:
                yield await transcript.written(begun)
            yield transcript.ended()
        finally:
            served.connected.discard(feeder.send_all)
            feeder.give_up()
            sequence.close()


@final
class _Feeder:
    """Hands the chunks of a file to the engine, few of them ahead."""

    def __init__(self, transcript: Transcript, chunks: Iterator[NDArray[np.float32]]) -> None:
        self._transcript = transcript
        self._chunks = chunks
        self._begun: deque[PendingSound | ServiceError] = deque()
        self._ended = False
        self.send_all: Callable[[], None] = lambda: self._send(math.inf)

    def next(self) -> PendingSound | None:
        """Return the oldest chunk that the engine has; None at the end. Raises the ServiceError of one not taken."""
        self._send(_AHEAD)
        begun = self._begun.popleft() if self._begun else None
        if isinstance(begun, ServiceError):
            raise begun
        return begun

    def give_up(self) -> None:
        """Cancel what is not answered; a sequence that was finished is not closed once more."""
        for begun in self._begun:
            if isinstance(begun, PendingSound):
                begun.answer.cancel()

    def _send(self, most: float) -> None:
        try:
            while len(self._begun) < most and not self._ended:
                chunk = next(self._chunks, None)
                begun = self._transcript.begin_end() if chunk is None else self._transcript.begin(chunk)
                self._ended = chunk is None
                if begun is not None:
                    self._begun.append(begun)
        except ServiceError as fault:
            self._ended = True
            self._begun.append(fault)


async def _events(first: str, rest: AsyncGenerator[str, None], held: ExitStack) -> AsyncIterator[bytes]:
    """Yield the events of a stream. An error after the first one is an event too, and the last."""
    text = ""
    with held:
        async with aclosing(rest):
            try:
                if first:
                    text += first
                    yield _delta(first)
                async for delta in rest:
                    if delta:
                        text += delta
                        yield _delta(delta)
            except ServiceError as fault:
                if fault.kind is FaultKind.CANCELLED:
                    raise
                yield openai_error(fault.kind, str(fault))
                return
        yield msgspec.json.encode({"type": "transcript.text.done", "text": text})


def _delta(text: str) -> bytes:
    return msgspec.json.encode({"type": "transcript.text.delta", "delta": text})
