"""Frames of a shared connection: they come out whole and in order, however they arrive, and nothing else does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.server.http.shared_connection import Answered, Call, FrameReader, GiveUp, framed

PAIRS = st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=3)
CALLS = st.builds(Call, st.integers(0, 2**40), st.binary(max_size=20), PAIRS, st.binary(max_size=300))
MESSAGES = st.lists(CALLS | st.builds(GiveUp, st.integers(0, 2**40)), max_size=6)


@given(MESSAGES, st.lists(st.integers(0, 2000), max_size=8))
def test_messages_come_out_whole_and_in_order_however_they_are_cut(messages, cuts):
    data = b"".join(map(framed, messages))
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader: FrameReader[Call | GiveUp] = FrameReader(Call | GiveUp, 1000)
    assert [m for begin, end in pairwise(at) for m in reader.feed(data[begin:end])] == messages


def test_an_answer_of_many_bytes_arrives_in_pieces():
    answer = Answered(7, 200, [(b"a", b"b")], bytes(1 << 20))
    reader: FrameReader[Answered] = FrameReader(Answered, 1 << 21)
    data = framed(answer)
    pieces = [reader.feed(data[begin : begin + 65536]) for begin in range(0, len(data), 65536)]
    assert [message for piece in pieces for message in piece] == [answer]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff\xffrest", "4294967295 bytes"),
        (b"\x00\x00\x00\x02\xc1\xc1", "malformed"),
        (b"\x00\x00\x00\x03\x92\x09\x01", "Invalid value 9"),
    ],
)
def test_what_is_no_message_is_refused_before_it_is_kept(data, said):
    reader: FrameReader[Call | GiveUp] = FrameReader(Call | GiveUp, 1000)
    with pytest.raises(ValueError, match=said):
        reader.feed(data)
