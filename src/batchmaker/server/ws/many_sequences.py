"""One WebSocket connection, many sequences: its messages hold frames of them, and so do its answers."""

from __future__ import annotations

import logging
from asyncio import get_running_loop
from collections.abc import Sequence as Sized
from typing import Any, Final, final

import msgspec

from batchmaker.server.access.sender import Sender
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.chunk_form import ChunkForm, OpenFrom
from batchmaker.server.formats.infer_body import lone_surrogate
from batchmaker.server.service.sequences import MANY_SEQUENCES
from batchmaker.server.service.served_model import ServedModel
from batchmaker.server.service.site import Site
from batchmaker.server.ws.chunk_room import ChunkRoom
from batchmaker.server.ws.lane import AnswerKind, Lane, LaneAnswer
from batchmaker.server.ws.message_reader import framed
from batchmaker.server.ws.one_sequence import AFTER_ENGINE_S, DEFECT, Closing, stopping
from batchmaker.server.ws.protocol import SocketProtocol
from batchmaker.server.ws.sequence_frames import (
    BEGIN,
    END,
    GIVE_UP,
    NOTHING,
    RESET,
    STATE,
    VALUES,
    SequenceFrame,
    read_frame,
    written_frame,
)

_LOG = logging.getLogger("batchmaker.server")
_TOGETHER: Final = 64
"""Frames of one message that are handled before others have their turn."""

_MOST_JOINED: Final = 256 << 10
"""Bytes of answers in one message, unless one answer is longer."""

_MOST_ENDED: Final = 1 << 14
"""How many numbers of failed sequences are remembered."""

_IDLE: Final = Closing(1008, "no sequence was open for as long as one may be idle")
_REFUSED: Final = Closing(1011, "a sequence cannot go on here: see the error")
_MALFORMED: Final = 1007
"""The code for a message that is no frames (RFC 6455, section 7.4.1): whose they are, nobody knows."""


class TextFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frame as a text message. chunk: as in the body of `generate`. state: to begin with, in base64; true asks.

    Without `sequence` it is about all of the connection: `state`, with an id, asks for the states; `open` brings them.
    """

    sequence: int | None = None
    begin: bool = False
    end: bool = False
    reset: bool = False
    give_up: bool = False
    state: str | bool = False
    chunk: msgspec.Raw = msgspec.Raw()
    open: OpenFrom | None = None
    id: str = ""


_TEXT: Final = msgspec.json.Decoder(TextFrame)
_BYTES: Final = msgspec.json.Decoder(bytes)


@final
class SequencesSocket:
    """Takes frames of many sequences, and joins the answers of one turn of the engine into one message.

    Each frame has one answer, and those of a sequence come in the order of its frames. A client may have
    `max_chunks_ahead` frames of a sequence unanswered; another one is an error. So a slow sequence holds up no other:
    to stop reading would hold up all. Room in memory and the rate of the key are the client's as a whole: while they
    are used up, nothing is read.

    An error ends its sequence alone. What was sent behind it has no answer and is not computed, up to a frame that
    begins a sequence of that number anew.

    The whole connection can go on elsewhere: its state is a message of frames, of which each begins an open sequence or
    ends one that failed. It is told when all that was sent before is answered.
    """

    __slots__ = (
        "_at", "_binary", "_ended_sequences", "_form", "_frame", "_has_ended", "_lanes", "_message", "_opening",
        "_quiet", "_quiet_since_s", "_room", "_sender", "_served", "_site", "_socket", "_states", "_states_id",
        "_stopping", "_turn_waits",
    )  # fmt: skip

    def __init__(
        self,
        site: Site,
        served: ServedModel,
        form: ChunkForm,
        socket: SocketProtocol,
        *,
        key: str | None,
        sender: Sender,
    ) -> None:
        """key: for counting each frame. sender: whose the sequences are, and the bytes."""
        self._site = site
        self._served = served
        self._form = form
        self._binary = form.is_binary
        self._socket = socket
        self._sender = sender
        self._room = ChunkRoom(site, key, sender.client)
        self._lanes: dict[int, Lane] = {}
        self._ended_sequences: dict[int, None] = {}  # sequences that failed, of which more may be on its way
        self._message: memoryview | None = None  # the frames that have not been looked at are in here
        self._at = 0
        self._frame: SequenceFrame | None = None  # what has come, and for which there is no room yet
        self._opening = False  # they are the state of a connection
        self._states: dict[int, LaneAnswer] | None = None  # of all open sequences, if they were asked for
        self._states_id = ""
        self._turn_waits = False
        self._stopping = False
        self._has_ended = False
        self._quiet: dict[Lane, float] = {}  # since when nothing has come; the longest idle one first
        self._quiet_since_s = get_running_loop().time()
        served.connected.add(self.stop)

    # --- frames --------------------------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether a message is taken now. See Conversation."""
        return self._message is None and self._frame is None and self._states is None and not self._stopping

    def received(self, message: bytes | str) -> None:
        """Take a message."""
        if isinstance(message, str):
            self._read_text(message)
        else:
            self._read_frames(message)
        self._work()

    def _read_frames(self, message: bytes) -> None:
        self._message, self._at = memoryview(message), 0
        self._room.held.resize(self._room.held.size + len(message))

    def _read_text(self, message: str) -> None:
        try:
            text = _TEXT.decode(message)
            state = _BYTES.decode(msgspec.json.encode(text.state)) if isinstance(text.state, str) else b""
        except (msgspec.DecodeError, ValueError) as error:
            said = lone_surrogate(message.encode()) or error
            self._close(Closing(_MALFORMED, f"a text message is no frame: {said}"[:120]))
            return
        flags = BEGIN * text.begin | END * text.end | RESET * text.reset | GIVE_UP * text.give_up
        chunk = bytes(text.chunk)
        if text.sequence is None:
            self._take_all(text)
        elif not 0 <= text.sequence < 1 << 32 or (chunk and text.state):
            why = "sequence must be from 0 to 2^32 - 1" if not chunk else "a frame has a chunk or a state, not both"
            self._close(Closing(_MALFORMED, f"a text message is no frame: {why}"))
        elif chunk:
            self._frame = SequenceFrame(text.sequence, flags, VALUES, chunk.decode(), 0)
        else:
            kind = STATE if text.state else NOTHING
            self._frame = SequenceFrame(text.sequence, flags, kind, memoryview(state), 0)

    def _work(self) -> None:
        """Handle frames, up to some, or up to one for which there is no room."""
        for _ in range(_TOGETHER):
            if self._has_ended or self._turn_waits or not self._socket.writable:
                return
            frame = self._frame
            if frame is None:
                message = self._message
                if message is None:
                    return
                if self._at == len(message):
                    self._message = None
                    self._room.held.resize(self._room.held.size - len(message))
                    if self._opening:
                        self._opening = False
                        self._socket.write(framed('{"open":true}'))
                    return
                try:
                    frame = read_frame(message, self._at)
                except ValueError as error:
                    where = f"a message is no frames, at byte {self._at}: {error}"
                    self._close(Closing(_MALFORMED, where[:120]))
                    return
                self._at = frame.next_at
            if self._opening:
                self._resume(frame)
            elif not self._enter(frame):
                return
        if self._message is not None:
            self._turn_waits = True
            get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_waits = False
        self._go_on()

    def _go_on(self) -> None:
        if self._has_ended:
            return
        try:
            self._work()
        except Exception:
            _LOG.exception("a WebSocket failed")
            self._close(DEFECT)
        else:
            self._socket.go_on()

    def _enter(self, frame: SequenceFrame) -> bool:
        """Handle a frame. False if it has to wait for room."""
        self._frame = None
        lane = self._lanes.get(frame.number)
        has_failed = frame.number in self._ended_sequences if lane is None else lane.has_failed
        if has_failed and not frame.flags & BEGIN:
            return True  # sent before its client knew
        size = len(frame.content)
        try:
            if not self._room.enter(size):
                self._frame = frame
                self._socket.plan(self._room.retry_s)
                return False
        except ServiceError as fault:
            self._fault(frame.number, lane, fault)
            return True
        held = self._room.held
        if frame.flags & GIVE_UP:
            held.resize(held.size - size)
            self._give_up(frame.number, lane)
            return True
        try:
            lane = self._lane_of(frame, lane)
        except ServiceError as fault:
            held.resize(held.size - size)
            self._fault(frame.number, lane, fault)
            return True
        if frame.kind != VALUES:
            held.resize(held.size - size)
        self._quiet.pop(lane, None)
        self._hand_on(frame, lane)
        if lane.is_done:
            self._answer([lane])
        return True

    def _lane_of(self, frame: SequenceFrame, lane: Lane | None) -> Lane:
        """Return where a frame goes, a new lane for a sequence that begins. Raises ServiceError."""
        if not frame.flags & BEGIN:
            if lane is None or lane.is_finished:
                raise invalid(f"sequence {frame.number} is not open: its first frame says begin")
            if lane.num_waiting >= self._site.service.limits.max_chunks_ahead:
                most = self._site.service.limits.max_chunks_ahead
                raise ServiceError(
                    FaultKind.TOO_MANY,
                    f"{most} frames of sequence {frame.number} are not answered, as many as may be; wait for answers",
                )
            return lane
        if lane is not None:
            raise ServiceError(
                FaultKind.CONFLICT,
                f"sequence {frame.number} is open, or its last answer has not come; take another number",
            )
        self._site.service.check_open()
        state = bytes(frame.content) if frame.kind == STATE and not isinstance(frame.content, str) else None
        sequence = self._served.connect(self._sender, self._form.priority, MANY_SEQUENCES, state)
        self._ended_sequences.pop(frame.number, None)
        lane = self._lanes[frame.number] = Lane(self._served, sequence, self._form, self._room.held, self, frame.number)
        return lane

    @staticmethod
    def _hand_on(frame: SequenceFrame, lane: Lane) -> None:
        last = bool(frame.flags & END)
        if frame.flags & RESET and (last or frame.kind == VALUES):
            lane.reset(answered=False)
        if frame.kind == VALUES:
            lane.take(frame.content, last=last)
        elif frame.kind == STATE and not frame.flags & BEGIN:
            if last or frame.flags & RESET or len(frame.content):
                lane.refuse(0, invalid("a frame that asks for the state has no other flags and no content"))
            else:
                lane.ask_state()
        elif last:
            lane.finish()
        elif frame.flags & BEGIN:
            lane.confirm("begin")
        elif frame.flags & RESET:
            lane.reset()
        else:
            lane.refuse(0, invalid("a frame without content begins, ends or resets its sequence"))

    def _fault(self, number: int, lane: Lane | None, fault: ServiceError) -> None:
        """Answer with an error, behind the answers that are due, and end the sequence."""
        if lane is not None and not lane.is_finished:
            lane.refuse(0, fault)
            if lane.is_done:
                self._answer([lane])
            return
        self._served.count_refusal(fault)
        self._note_ended(number)
        self._socket.write(framed(_with("sequence", number, self._form.write_fault(fault))))

    def _give_up(self, number: int, lane: Lane | None) -> None:
        """Give up what is not answered of a sequence, and end it."""
        if lane is not None:
            self._end_lane(lane)
        answer = LaneAnswer(AnswerKind.NOTHING, b"", "end", is_last=True)
        self._socket.write(framed(_frame(number, answer) if self._binary else _text(number, answer)))

    def _note_ended(self, number: int) -> None:
        self._ended_sequences[number] = None
        if len(self._ended_sequences) > _MOST_ENDED:
            del self._ended_sequences[next(iter(self._ended_sequences))]

    # --- all sequences together, for another connection ----------------------------------------------------------

    def _take_all(self, text: TextFrame) -> None:
        """Do what a text message asks of the connection."""
        if text == TextFrame(state=True, id=text.id):
            self._states, self._states_id = {}, text.id
            self._quiet.clear()  # until they are answered
            for lane in self._lanes.values():
                if not lane.is_finished:
                    lane.ask_state()
            self._answer(list(self._lanes.values()))
        elif text.open is None or text != TextFrame(open=text.open):
            self._close(Closing(_MALFORMED, "a text message is no frame: it has no sequence"))
        elif self._lanes or self._ended_sequences:
            self._close(Closing(_MALFORMED, "'open' must come before all sequences"))
        else:
            self._opening = True
            self._read_frames(text.open.state)

    def _resume(self, frame: SequenceFrame) -> None:
        """Go on with a sequence of another connection, or note that it failed there."""
        if (frame.flags, frame.kind) == (END, NOTHING):
            self._note_ended(frame.number)
        elif (frame.flags, frame.kind) != (BEGIN, STATE):
            self._close(Closing(_MALFORMED, "'open' has what is no state of a connection"))
        else:
            try:
                lane = self._lane_of(frame, self._lanes.get(frame.number))
            except ServiceError as fault:
                self._socket.write(framed(self._form.write_fault(fault)))
                self._close(_REFUSED)
            else:
                self._quiet[lane] = get_running_loop().time()

    def _tell_states(self) -> None:
        """Answer with the states of all sequences, once there are all."""
        states = self._states
        if states is None or len(states) < len(self._lanes) or self._has_ended:
            return
        self._states = None
        refused = [str(answer.data) for answer in states.values() if answer.kind is AnswerKind.FAULT]
        if refused:
            said = _with("id", self._states_id, refused[0])
        else:
            frames = [written_frame(number, END, NOTHING, b"") for number in self._ended_sequences]
            for number, answer in states.items():
                assert isinstance(answer.data, bytes)
                frames.append(written_frame(number, BEGIN, STATE, answer.data))
            whole = {"id": self._states_id, "state": b"".join(frames), "sequences": len(states)}
            said = msgspec.json.encode(whole).decode()
        self._socket.write(framed(said))
        self._socket.go_on()

    # --- answers -------------------------------------------------------------------------------------------------

    def answered(self, lanes: Sized[Lane]) -> None:
        """Answer the chunks that have their results. See LaneOwner."""
        if self._has_ended:
            return
        try:
            self._answer(lanes)
        except Exception:
            _LOG.exception("a WebSocket failed")
            self._close(DEFECT)
            return
        if self._frame is not None and not self._turn_waits:  # there may be room now
            self._go_on()

    def writable(self) -> None:
        """Go on with the answers that have waited for the client. See Conversation."""
        self.answered(list(self._lanes.values()))
        self._go_on()

    def _answer(self, lanes: Sized[Lane]) -> None:
        if self._has_ended or not self._socket.writable:
            return
        now_s = get_running_loop().time()
        frames: list[bytes] = []
        texts: list[bytes] = []
        for lane in lanes:
            if self._lanes.get(lane.number) is not lane:
                continue  # it has ended
            for answer in lane.answers():
                if self._states is not None and not lane.num_waiting and not answer.is_last:
                    self._states[lane.number] = answer  # the last thing that was asked of it
                elif self._binary and answer.kind is not AnswerKind.FAULT:
                    frames.append(_frame(lane.number, answer))
                else:
                    texts.append(framed(_text(lane.number, answer)))
                if answer.is_last:
                    self._forget(lane, answer)
            if not lane.num_waiting and not lane.is_finished:
                self._quiet.pop(lane, None)
                self._quiet[lane] = now_s
        if frames or texts:
            self._socket.write(b"".join((*_joined(frames), *texts)))
            self._quiet_since_s = now_s
        self._tell_states()
        self._end_if_done()

    def _forget(self, lane: Lane, answer: LaneAnswer) -> None:
        """Note the end of a sequence, with its last answer."""
        self._end_lane(lane)
        if answer.kind is AnswerKind.FAULT:
            self._note_ended(lane.number)

    def _end_lane(self, lane: Lane, *, stopped: bool = False) -> None:
        del self._lanes[lane.number]
        self._quiet.pop(lane, None)
        if self._states is not None:
            self._states.pop(lane.number, None)
        lane.close(stopped=stopped)

    # --- ends ----------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> float | None:
        """End sequences, and a connection, to which nothing has come for too long; try again what had no room."""
        limit_s = self._site.service.limits.sequence_idle_seconds
        idle_s = limit_s + AFTER_ENGINE_S
        if self._frame is not None and self._room.retry_s <= now_s and not self._turn_waits:
            self._go_on()
        while self._quiet and not self._has_ended:
            lane, since_s = next(iter(self._quiet.items()))
            if since_s + idle_s > now_s:
                break
            self._end_lane(lane)
            said = f"no frame came for {limit_s:g} seconds: the sequence has ended"
            fault = self._form.write_fault(ServiceError(FaultKind.TOO_SLOW, said))
            self._socket.write(framed(_with("sequence", lane.number, fault)))
            self._note_ended(lane.number)
            self._quiet_since_s = now_s
        self._tell_states()
        self._end_if_done()
        if self._has_ended:
            return None
        due_s = min(next(iter(self._quiet.values()), now_s), now_s) + idle_s
        if not self._lanes and self._frame is None:
            due_s = self._quiet_since_s + idle_s
            if due_s <= now_s:
                self._close(_IDLE)
                return None
        return due_s if self._frame is None else min(due_s, max(self._room.retry_s, now_s))

    def stop(self) -> None:
        """Take no more; answer the frames already taken, and end."""
        self._stopping = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._has_ended:
            return
        stopped = self._stopping and not any(lane.num_waiting for lane in self._lanes.values())
        drained = self._site.service.draining and not self._lanes
        if (stopped or drained) and self._message is None and self._frame is None:
            self._close(stopping(self._served))

    def lost(self, why: str, code: int) -> None:
        """Give up what is computed: nobody is there for it. See Conversation."""
        self._finish()

    def _close(self, closing: Closing) -> None:
        if not self._has_ended:
            self._finish()
            self._socket.close(closing.code, closing.reason)

    def _finish(self) -> None:
        self._has_ended = True
        self._message = self._frame = None
        self._served.connected.discard(self.stop)
        for lane in tuple(self._lanes.values()):
            self._end_lane(lane, stopped=self._stopping)
        self._room.held.release()
        self._site.service.disconnect()


def _frame(number: int, answer: LaneAnswer) -> bytes:
    assert isinstance(answer.data, bytes)
    return written_frame(number, END if answer.is_last else 0, answer.kind.value, answer.data)


def _joined(frames: Sized[bytes]) -> list[bytes]:
    """Return messages that hold these frames, in order."""
    messages: list[bytes] = []
    begin = size = 0
    for place, frame in enumerate(frames):
        if size and size + len(frame) > _MOST_JOINED:
            messages.append(framed(b"".join(frames[begin:place])))
            begin, size = place, 0
        size += len(frame)
    if size:
        messages.append(framed(b"".join(frames[begin:])))
    return messages


def _text(number: int, answer: LaneAnswer) -> str:
    """Return an answer as text."""
    if answer.kind is AnswerKind.FAULT:
        fault = str(answer.data) if answer.is_last else _with("end", False, str(answer.data))
        return _with("sequence", number, fault)
    said: dict[str, Any] = {"sequence": number}
    if answer.kind is AnswerKind.STATE:
        said["state"] = answer.data
    elif answer.kind is AnswerKind.VALUES:
        said["answer"] = msgspec.Raw(str(answer.data).encode())
    if answer.is_last:
        said["end"] = True
    return msgspec.json.encode(said).decode()


def _with(name: str, value: int | str, fault: str) -> str:
    """Return the text of an error with this before the rest."""
    return f'{{"{name}":{msgspec.json.encode(value).decode()},{fault[1:]}'
