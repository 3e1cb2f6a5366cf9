"""One connection of OpenAI's realtime API: a transcription session, each utterance of which is a sequence."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.types import Receive, Send

from batchmaker.server.access.request_body import HeldBytes
from batchmaker.server.access.sender import Sender
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.audio import PCM16, Encoding, named_encoding
from batchmaker.server.formats.transcription_ask import check_language
from batchmaker.server.formats.transcriptions import Transcriber
from batchmaker.server.service.sequences import ConnectedSequence
from batchmaker.server.service.served_model import ServedModel, StopCause
from batchmaker.server.service.site import Site
from batchmaker.server.service.transcript import SOUND, PendingSound, Transcript
from batchmaker.server.ws.realtime_events import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    RefusedEvent,
    SessionChange,
    SessionView,
    UpdateSession,
    UpdateTranscriptionSession,
    cleared,
    committed,
    completed,
    delta,
    failed,
    read_change,
    read_event,
    refused,
)

_LOOK_S: Final = 0.05
"""Seconds between two looks whether there is room for sound, where only others can make it."""

_EMPTY: Final = "input_audio_buffer_commit_empty"


class Farewell(NamedTuple):
    """How a connection is closed: the code of RFC 6455, and the reason."""

    code: int
    reason: str


_IDLE: Final = Farewell(1008, "nothing came for as long as a session may be idle")


@final
class _Gone(Exception):  # noqa: N818 - the end of a connection is no error of anybody
    """The client has gone, or reads nothing."""


@final
class _Item:
    """One utterance: its sequence, and the text of it. has_ended: nothing more is said of it."""

    __slots__ = ("has_ended", "name", "sequence", "transcript")

    def __init__(self, name: str, sequence: ConnectedSequence, transcript: Transcript) -> None:
        self.name = name
        self.sequence = sequence
        self.transcript = transcript
        self.has_ended = False


class _Heard(NamedTuple):
    """A chunk of an item that is not answered. begun: the request in the engine, or why it was refused."""

    item: _Item
    begun: PendingSound | ServiceError


class _Ended(NamedTuple):
    """An item has been committed, and all of it is answered."""

    item: _Item


class _Said(NamedTuple):
    """An event for the client."""

    event: dict[str, Any]


class _Named(NamedTuple):
    """The model of a session."""

    name: str
    served: ServedModel
    transcriber: Transcriber


@final
class RealtimeSession:
    """Reads events, has sound heard and sends events, in the order of what they answer.

    Sound goes to the engine as soon as it comes. As everywhere, none is refused for want of room: no further event is
    read while twice `max_chunks_ahead` chunks and answers wait, while the server holds as many bytes as it may, or
    while the rate of the key is used up.
    """

    def __init__(
        self, site: Site, sender: Sender, key: str | None, model: str | None, is_gone: Callable[[], bool]
    ) -> None:
        """key: for counting each event with sound. model: None if the client has not named it yet. is_gone: whether the
        client has gone, while it is not read.

        Raises ServiceError if the model writes nothing that it hears, or has no room for a sequence.
        """
        self._site, self._sender, self._key, self._is_gone = site, sender, key, is_gone
        self._limits = site.service.limits
        self._id = secrets.token_hex(8)
        self._language: str | None = None
        self._encoding: Encoding = PCM16
        self._items: set[_Item] = set()
        self._last_item: str | None = None
        self._num_items = self._num_events = 0
        self._waiting: deque[tuple[_Heard | _Ended | _Said | None, HeldBytes | None]] = deque()
        self._arrival, self._removal = asyncio.Event(), asyncio.Event()
        self._now_s = asyncio.get_running_loop().time
        self._quiet_since_s = self._now_s()
        self._key_counts = False  # the first event's key was checked when the connection was made
        self._stopping = self._has_read_all = False
        self._patience: asyncio.Timeout | None = None
        self._model = None if model is None else self._named(model)
        self._rate = 0 if self._model is None else self._model.transcriber.usual_rate
        self._item = None if self._model is None else self._begin_item(self._model)

    def _named(self, name: str) -> _Named:
        service = self._site.service
        return _Named(name, service.repository.get(name, None), service.transcriber(name))

    async def run(self, receive: Receive, send: Send) -> Farewell | None:
        """Answer events until the end; return how to close the connection, None if nobody listens."""
        self._say(self._view().event("session.created"))
        farewell: Farewell | None = None
        if self._model is not None:
            self._model.served.connected.add(self._stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write_all(send))
                farewell = await self._read_all(receive)
                self._has_read_all = True
                self._arrival.set()
                await writer
        except* _Gone:
            farewell = None
        finally:
            if self._model is not None:
                self._model.served.connected.discard(self._stop)
        return farewell

    def close(self) -> None:
        """Give up what is not answered, and free all rows."""
        for item in list(self._items):
            self._end(item)
        for what, held in self._waiting:
            if isinstance(what, _Heard) and isinstance(what.begun, PendingSound):
                what.begun.answer.cancel()  # a sequence that was finished is not closed once more
            if held is not None:
                held.release()
        self._waiting.clear()

    def _stop(self) -> None:
        """Read no further; answer what was read, and end."""
        self._stopping = True
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(self._now_s())

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _read_all(self, receive: Receive) -> Farewell:
        """Read events until there is a reason for reading no more, and return it."""
        while not self._stopping:
            now_s = self._now_s()
            since_s = now_s if self._waiting else self._quiet_since_s
            if now_s - since_s >= self._limits.sequence_idle_seconds:
                return _IDLE
            try:
                async with asyncio.timeout_at(since_s + self._limits.sequence_idle_seconds) as self._patience:
                    await self._room_ahead()
                    message = await receive()
            except TimeoutError:  # idle, if nothing has come in the meantime; or told to stop
                continue
            finally:
                self._patience = None
            if message["type"] == "websocket.disconnect":
                raise _Gone
            await self._take(message)
            self._quiet_since_s = self._now_s()
        cause = None if self._model is None else self._model.served.stop_cause
        return Farewell(1001, cause or StopCause.SERVER)

    async def _room_ahead(self) -> None:
        """Wait until another chunk may be read before those that wait are answered. _Gone if nobody waits for them."""
        while len(self._waiting) >= 2 * self._limits.max_chunks_ahead:
            await self._leaving()
            if self._is_gone():
                raise _Gone

    async def _leaving(self) -> None:
        """Wait until something has been answered."""
        self._removal.clear()
        await self._removal.wait()

    async def _take(self, message: Any) -> None:
        data: str | None = message.get("text")
        event_id: str | None = None
        try:
            if data is None:
                raise invalid("events are JSON, sent as text; sound is in base64 in input_audio_buffer.append")
            event = read_event(data.encode())
            event_id = event.event_id
            match event:
                case AppendAudio():
                    await self._append(event.audio, len(data))
                case CommitAudio():
                    self._commit(event_id)
                case ClearAudio():
                    self._clear()
                case _:
                    self._update(event)
        except RefusedEvent as refusal:
            self._say(refused(refusal.fault, refusal.event_id))
        except ServiceError as fault:
            self._say(refused(fault, event_id))

    async def _append(self, sound: bytes, num_bytes: int) -> None:
        """Have sound heard. Raises ServiceError for sound that is not taken; the utterance is then as it was."""
        if self._model is None:
            raise invalid(
                "no model is named: connect with ?model=NAME, or name it in session.update as "
                "audio.input.transcription.model"
            )
        self._model.transcriber.audio.check_whole(sound, self._encoding)
        held = await self._room(num_bytes)
        try:
            item = self._item
            if item is None:
                item = self._item = self._begin_item(self._model)
            for chunk in item.transcript.chunks(sound, self._encoding, self._rate):
                await self._room_ahead()
                if item.has_ended:  # its failure was said; the next sound begins another
                    break
                self._hear(item, chunk)
        except BaseException:
            held.release()
            raise
        self._wait(None, held)

    def _begin_item(self, model: _Named) -> _Item:
        sequence = model.served.connect(self._sender, 0, SOUND)
        self._num_items += 1
        name = f"item_{self._id}_{self._num_items}"
        item = _Item(name, sequence, Transcript(model.served, model.transcriber, sequence))
        self._items.add(item)
        return item

    def _hear(self, item: _Item, chunk: NDArray[np.float32] | None) -> None:
        """Hand a chunk to the engine; None for the end of the utterance."""
        try:
            begun = item.transcript.begin_end() if chunk is None else item.transcript.begin(chunk)
            if begun is not None:
                self._wait(_Heard(item, begun))
        except ServiceError as fault:
            self._wait(_Heard(item, fault))

    async def _room(self, size: int) -> HeldBytes:
        """Wait for room in memory and in the rate of the key. ServiceError if there is none for too long."""
        held, end_s = HeldBytes(self._site.bodies, self._sender.client), self._now_s() + self._limits.write_seconds
        while not self._site.bodies.fits(self._sender.client, size) and self._now_s() < end_s:
            await (self._leaving() if self._waiting else asyncio.sleep(_LOOK_S))
        try:
            held.add(size)
            while self._key_counts:
                try:
                    self._site.keys.caller(self._key)
                    break
                except ServiceError as fault:
                    wait_s = fault.retry_after_s or 0.0
                    if fault.kind is not FaultKind.TOO_MANY or self._now_s() + wait_s > end_s:
                        raise
                    await asyncio.sleep(wait_s)
            self._key_counts = True
            return held
        except BaseException:
            held.release()
            raise

    def _commit(self, event_id: str | None) -> None:
        """End the utterance; what is left of its text comes with the last chunk's answer."""
        item = self._item
        if item is None or not item.transcript.num_samples:
            empty = invalid("there is no sound to commit: none has come, or its utterance has failed")
            self._say(refused(empty, event_id, _EMPTY))
            return
        self._say(committed(item.name, self._last_item))
        for chunk in (*item.transcript.rest(), None):
            self._hear(item, chunk)
        self._wait(_Ended(item))
        self._item, self._last_item = None, item.name

    def _clear(self) -> None:
        """Forget the utterance."""
        if self._item is not None:
            self._end(self._item)
        self._say(cleared())

    def _update(self, event: UpdateSession | UpdateTranscriptionSession) -> None:
        change = read_change(event)
        model = self._model
        if change.model is not None and model is None:
            model = self._named(change.model)
        elif change.model is not None and model is not None and change.model != model.name:
            raise invalid(f"the model of this session is {model.name[:64]!r}; connect anew for another")
        if model is None and (change.language is not None or change.format is not None):
            raise invalid("name the model in the same event or before, as audio.input.transcription.model")
        if model is not None:
            check_language(change.language, model.transcriber.said, model.name)
            self._take_format(change, model.transcriber)
            if self._model is None:
                model.served.connected.add(self._stop)
        self._model, self._language = model, change.language or self._language
        view = self._view()
        self._say(view.beta_event() if change.beta else view.event("session.updated"))

    def _take_format(self, change: SessionChange, transcriber: Transcriber) -> None:
        """Set the format of the sound that comes, if it can be taken."""
        encoding, rate = self._encoding, self._rate or transcriber.usual_rate
        if change.format is not None:
            encoding = named_encoding(change.format, change.formats)
            rate = change.rate or encoding.rate or transcriber.usual_rate
            transcriber.check_rate(rate, change.format)
        if rate != self._rate and self._item is not None and self._item.transcript.num_samples:
            raise invalid("the rate of the sound cannot change within an utterance: commit or clear it first")
        self._encoding, self._rate = encoding, rate

    def _view(self) -> SessionView:
        name = None if self._model is None else self._model.name
        return SessionView(f"sess_{self._id}", name, self._language, self._encoding, self._rate or None)

    # --- writing -----------------------------------------------------------------------------------------------------

    def _say(self, event: dict[str, Any]) -> None:
        self._wait(_Said(event))

    def _wait(self, what: _Heard | _Ended | _Said | None, held: HeldBytes | None = None) -> None:
        self._waiting.append((what, held))
        self._arrival.set()

    async def _write_all(self, send: Send) -> None:
        """Send events in order, until the end of reading."""
        while True:
            while not self._waiting:
                if self._has_read_all:
                    return
                self._arrival.clear()
                await self._arrival.wait()
            what, held = self._waiting[0]
            for event in await self._events(what):
                await self._send(send, event)
            self._waiting.popleft()
            if held is not None:
                held.release()
            self._quiet_since_s = self._now_s()
            self._removal.set()

    async def _events(self, what: _Heard | _Ended | _Said | None) -> list[dict[str, Any]]:
        if isinstance(what, _Said):
            return [what.event]
        if what is None or what.item.has_ended:
            return []
        item = what.item
        try:
            if isinstance(what, _Ended):
                return self._completed(item)
            if isinstance(what.begun, ServiceError):
                raise what.begun
            text = await item.transcript.written(what.begun)
        except ServiceError as fault:
            if item.has_ended:  # forgotten meanwhile
                return []
            self._end(item)
            return [failed(item.name, fault)]
        return [delta(item.name, text)] if text and not item.has_ended else []

    def _completed(self, item: _Item) -> list[dict[str, Any]]:
        text = item.transcript.ended()
        self._end(item)
        last = completed(item.name, item.transcript.text, item.transcript.seconds)
        return [delta(item.name, text), last] if text else [last]

    def _end(self, item: _Item) -> None:
        """Nothing more is said of an utterance: free its rows."""
        item.has_ended = True
        item.sequence.close(stopped=self._stopping)
        self._items.discard(item)
        if self._item is item:
            self._item = None

    async def _send(self, send: Send, event: dict[str, Any]) -> None:
        self._num_events += 1
        text = msgspec.json.encode({"event_id": f"event_{self._id}_{self._num_events}", **event}).decode()
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await send({"type": "websocket.send", "text": text})
        except OSError as error:  # TimeoutError too: it reads nothing
            raise _Gone from error
