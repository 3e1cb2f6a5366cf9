"""The frames of a WebSocket, however their bytes are cut, beside another's parser."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import PayloadTooBig, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, SERVER
from websockets.protocol import Protocol as TheirProtocol

from batchmaker.server.ws.message_reader import ControlFrame, MessageReader, WrongFrameError, framed

MOST = 1000
Read = list[bytes | str | ControlFrame | int]


def written(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    """A frame as a client writes it, masked; also one that it may not write."""
    size, mask = len(data), b"\x01\xf2\x83\x04"
    head = bytes([0x80 * fin | opcode]) + (bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack("!H", size))
    return head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))


def read(*pieces: bytes) -> Read:
    """Return messages and control frames, and the code of the error that ends them."""
    reader, found = MessageReader(MOST), Read()
    try:
        for piece in pieces:
            reader.feed(piece)
            while (message := reader.next()) is not None:
                if not isinstance(message, ControlFrame) or message.opcode:
                    found.append(message)
    except WrongFrameError as error:
        found.append(error.code)
    return found


def theirs(data: bytes) -> Read:
    """The same by websockets, which gives fragments one by one."""
    protocol, found, parts = TheirProtocol(SERVER, state=OPEN, max_size=MOST), Read(), list[bytes]()
    is_text = False
    protocol.receive_data(data)
    for event in protocol.events_received():
        assert isinstance(event, Frame)
        if event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if event.opcode is not Opcode.CONT:
                parts, is_text = [], event.opcode is Opcode.TEXT
            parts.append(bytes(event.data))
            if event.fin:
                whole = b"".join(parts)
                try:
                    found.append(whole.decode() if is_text else whole)
                except UnicodeDecodeError:
                    return [*found, 1007]
        else:
            found.append(ControlFrame(int(event.opcode), bytes(event.data)))
    if isinstance(protocol.parser_exc, PayloadTooBig):
        found.append(1009)
    elif isinstance(protocol.parser_exc, ProtocolError):
        found.append(1002)
    return found


FRAMES = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 2, 9, 10]),
        st.one_of(st.binary(max_size=140), st.sampled_from([bytes(400), bytes(999), "\u20ac".encode()])),
        st.sampled_from([True, True, False]),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(frames=FRAMES, cuts=st.lists(st.integers(0, 3000), max_size=6))
def test_frames_are_read_as_by_another_parser_wherever_they_are_cut(frames, cuts):
    data = b"".join(written(opcode, content, fin=fin) for opcode, content, fin in frames)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    ours, others = read(*(data[begin:end] for begin, end in itertools.pairwise(places))), theirs(data)
    if others and others[-1] in (1002, 1009):
        others.pop()
        if isinstance(ours[len(others)], ControlFrame):  # that one counts pings within a message against its size
            return
        assert ours.pop() in (1002, 1009)  # a frame may be wrong in two ways
    assert ours == others


@settings(deadline=None)
@given(head=st.binary(min_size=2, max_size=10), rest=st.binary(max_size=60))
def test_any_bytes_are_read_as_by_another_parser(head, rest):
    """Where that one stops earlier or later than at this error, what came before it is the same."""
    ours, others = read(head + bytes(4) + rest), theirs(head + bytes(4) + rest)
    assert ours == others or {*ours[-1:], *others[-1:]} <= {1002, 1009}
    assert ours[: len(others) - 1] == others[:-1]


def test_every_cut_of_one_byte_gives_the_same():
    data = (
        written(1, b"a", fin=False) + written(9, b"ping") + written(0, "\u20ac".encode()) + written(2, bytes(300))
        + written(8, b"\x03\xe8")
    )  # fmt: skip
    whole = read(data)
    assert whole == [ControlFrame(9, b"ping"), "a\u20ac", bytes(300), ControlFrame(8, b"\x03\xe8")]
    assert read(*(data[place : place + 1] for place in range(len(data)))) == whole
    for place in range(len(data)):
        assert read(data[:place], data[place:]) == whole


def test_a_thousand_frames_in_one_read_are_all_there():
    messages = [b"%d" % number for number in range(1000)]
    assert read(b"".join(written(2, message) for message in messages)) == messages


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x82\x05hello", 1002),  # not masked
        (b"\x82\x00", 1002),  # the same, and nothing more comes
        (b"\xc2\x80" + bytes(4), 1002),  # a reserved bit
        (b"\x83\x80" + bytes(4), 1002),  # an unknown opcode
        (b"\x80\x80" + bytes(4), 1002),  # continues nothing
        (written(2, b"a", fin=False) + written(2, b"b"), 1002),
        (b"\x09\x80" + bytes(4), 1002),  # a ping in fragments
        (b"\x89\xfe\x00\x80" + bytes(4), 1002),  # a ping that is too long
        (written(1, b"\xff"), 1007),
        (b"\x82\xfe\x03\xe9" + bytes(4), 1009),
        (b"\x82\xff" + b"\xff" * 8 + bytes(4), 1009),
        (written(2, bytes(600), fin=False) + written(0, bytes(401)), 1009),
    ],
)
def test_what_is_no_frame_ends_the_connection_with_its_code(data, code):
    assert read(data) == [code]
    assert read(*(data[place : place + 1] for place in range(len(data)))) == [code]


def test_what_is_not_whole_is_counted():
    reader = MessageReader(MOST)
    reader.feed(written(2, bytes(100), fin=False) + written(0, bytes(200))[:50])
    assert reader.next() == ControlFrame(0, b"")
    assert reader.num_unread == 50
    assert reader.next() is None
    assert (reader.num_partial, reader.num_unread) == (150, 0)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("kind", [str, bytes])
def test_what_the_server_writes_another_reads(kind, size):
    said = "x" * size if kind is str else bytes(size)
    client = TheirProtocol(CLIENT, state=OPEN)
    client.receive_data(framed(said))
    (event,) = client.events_received()
    data = bytes(event.data)
    assert (data.decode() if kind is str else data) == said
    assert event.opcode is (Opcode.TEXT if kind is str else Opcode.BINARY)
