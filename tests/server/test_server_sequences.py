"""Sequences as clients name them, under a virtual clock: who has which, for how long, and what ends one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.clock import VirtualClock
from batchmaker.engine.open_sequences import Sequences
from batchmaker.engine.sequence import Sequence
from batchmaker.errors import SequenceError
from batchmaker.lab import zoo
from batchmaker.server.engine_port import EngineOptions, EnginePort
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.limits import Limits
from batchmaker.server.parameters import CallOptions, ChunkOptions, call_options
from batchmaker.server.sequences import OpenSequences


class Port:
    """An engine's sequences without its thread: what is sent to it is done at once."""

    takes_sequences = True

    def __init__(self, limit: int = 1000) -> None:
        self.clock = VirtualClock()
        self.sequences = Sequences(self.clock, limit=limit)

    def open_sequence(self, priority, idle_s):
        entry = self.sequences.make(idle_s)
        self.sequences.open(entry)
        return Sequence(entry, SimpleNamespace(send=lambda call: call()), None, None)

    def pass_time(self, seconds):
        self.sequences.expire(self.clock.advance(seconds))


def sequences_of(port, **limits):
    return OpenSequences("m", port, Limits(**limits))


def chunk(name=7, *, start=False, end=False):
    return CallOptions(chunk=ChunkOptions(name, start, end))


def take(open_sequences, name=7, caller="", **marks):
    return open_sequences.take(chunk(name, **marks), caller)


def refused(open_sequences, *names, **marks) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        take(open_sequences, *names, **marks)
    return caught.value


# --- what clients write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"sequence_id": 7}, ChunkOptions(7)),
        ({"sequence_id": "7", "sequence_start": True}, ChunkOptions("7", start=True)),
        ({"sequence_id": (1 << 64) - 1, "sequence_end": True}, ChunkOptions((1 << 64) - 1, end=True)),
        ({"sequence_id": 0, "sequence_start": False}, None),
        ({"sequence_id": "", "sequence_end": None}, None),
        ({"sequence_start": False}, None),
        ({"priority": 1}, None),
    ],
)  # fmt: skip
def test_a_request_says_which_sequence_it_is_part_of(parameters, said):
    assert call_options(parameters).chunk == said


@pytest.mark.parametrize(
    "parameters",
    [
        {"sequence_id": -1}, {"sequence_id": 1 << 64}, {"sequence_id": 7.0}, {"sequence_id": True},
        {"sequence_id": False}, {"sequence_id": "x" * 129}, {"sequence_id": 7, "sequence_start": 1},
        {"sequence_id": 7, "sequence_end": "true"}, {"sequence_start": True}, {"sequence_id": 0, "sequence_end": True},
    ],
)  # fmt: skip
def test_what_is_no_sequence_is_refused(parameters):
    with pytest.raises(ServiceError, match="sequence_") as caught:
        call_options(parameters)
    assert caught.value.kind is FaultKind.INVALID


# --- whose is which ---------------------------------------------------------------------------------------------------


def test_requests_of_one_name_are_one_sequence_until_the_last():
    named = sequences_of(Port())
    first = take(named, start=True)
    assert take(named).sequence is first.sequence
    assert take(named, "7", start=True).sequence is not first.sequence
    assert take(named, end=True).sequence is first.sequence
    assert "sequence 7 is not open" in str(refused(named))
    assert named.num_begun == 2


def test_a_request_in_no_sequence_has_no_place():
    assert sequences_of(Port()).take(CallOptions(), "") is None


def test_a_sequence_is_its_callers_own():
    named = sequences_of(Port())
    anns = take(named, caller="ann", start=True)
    assert "Send sequence_start" in str(refused(named, 7, "bob"))
    bobs = take(named, caller="bob", start=True)
    assert bobs.sequence is not anns.sequence
    assert take(named, caller="ann").sequence is anns.sequence


def test_beginning_anew_ends_what_was_open_under_that_name():
    port = Port(limit=1)
    named = sequences_of(port)
    old = take(named, start=True)
    new = take(named, start=True)
    assert not old.sequence.is_open
    assert take(named).sequence is new.sequence
    assert port.sequences.num_open == 1


def test_a_model_that_keeps_nothing_takes_no_sequence():
    named = sequences_of(SimpleNamespace(takes_sequences=False))
    assert "keeps nothing between requests" in str(refused(named, start=True))


@pytest.mark.parametrize(("policy", "takes"), [(None, True), ("lazy", True), ("padded", False)])
def test_only_policies_that_batch_cells_take_sequences(policy, takes):
    model = zoo.make("lstm", hidden=4, vocabulary_size=9)
    assert EnginePort(model, EngineOptions(policy, threads=1)).takes_sequences is takes


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_the_last_answer_frees_the_rows():
    port = Port()
    named = sequences_of(port)
    with take(named, start=True):
        pass
    assert port.sequences.num_open == 1
    with take(named, end=True):
        assert port.sequences.num_open == 1
    assert port.sequences.num_open == 0


def test_an_idle_sequence_ends_after_its_time_and_not_before():
    port = Port()
    named = sequences_of(port, sequence_idle_seconds=60)
    first = take(named, start=True)
    port.pass_time(59.9)
    assert take(named).sequence is first.sequence
    port.pass_time(0.2)
    fault = refused(named)
    assert fault.kind is FaultKind.INVALID
    assert "nothing came for 60 seconds" in str(fault)
    assert port.sequences.take_closed() == [0]
    assert take(named, start=True).sequence.is_open


def test_a_request_that_fails_ends_its_sequence_and_says_so():
    port = Port()
    named = sequences_of(port)
    with (
        pytest.raises(ServiceError, match=r"too bad; sequence 7 has ended with it: begin anew") as caught,
        take(named, start=True),
    ):
        raise ServiceError(FaultKind.INTERNAL, "too bad", 3.0)
    assert (caught.value.kind, caught.value.retry_after_s) == (FaultKind.INTERNAL, 3.0)
    assert port.sequences.num_open == 0
    assert "is not open" in str(refused(named))


def test_a_request_behind_one_that_failed_is_told_once():
    fault = ServiceError(FaultKind.INVALID, "the sequence has ended; begin anew")
    fault.__cause__ = SequenceError("chunk 1 has no result")
    with (
        pytest.raises(ServiceError, match=r"^the sequence has ended; begin anew$"),
        take(sequences_of(Port()), start=True),
    ):
        raise fault


def test_a_request_given_up_for_another_is_told_that_its_sequence_has_ended():
    """What is given up for a client that has gone is not answered; here another still waits."""
    with (
        pytest.raises(ServiceError, match="begin anew with sequence_start") as caught,
        take(sequences_of(Port()), start=True),
    ):
        raise ServiceError(FaultKind.CANCELLED, "the request was given up")
    assert caught.value.kind is FaultKind.INVALID


def test_a_client_that_goes_within_a_request_ends_its_sequence():
    port = Port()
    with pytest.raises(GeneratorExit), take(sequences_of(port), start=True):
        raise GeneratorExit
    assert port.sequences.num_open == 0


# --- how many ---------------------------------------------------------------------------------------------------------


def test_no_more_are_begun_than_may_be_open():
    port = Port(limit=2)
    named = sequences_of(port)
    for name in (1, 2):
        take(named, name, start=True)
    fault = refused(named, 3, start=True)
    assert (fault.kind, fault.retry_after) == (FaultKind.UNAVAILABLE, 1)
    with take(named, 1, end=True):
        pass
    take(named, 3, start=True)
    port.pass_time(1e6)
    take(named, 4, start=True)
    take(named, 5, start=True)


def test_one_key_has_its_share():
    port = Port()
    named = sequences_of(port, max_key_sequences=2, sequence_idle_seconds=60)
    for name in (1, 2):
        take(named, name, "ann", start=True)
    fault = refused(named, 3, "ann", start=True)
    assert fault.kind is FaultKind.UNAVAILABLE
    assert "2 sequences of this API key" in str(fault)
    take(named, 3, "bob", start=True)
    take(named, 2, "ann", start=True)  # in place of its own
    port.pass_time(61)
    take(named, 3, "ann", start=True)


OPERATIONS = st.tuples(
    st.sampled_from(["start", "go on", "end", "fail", "wait"]), st.sampled_from([1, 2, 3, "1"]), st.sampled_from("ab")
)


@given(st.lists(OPERATIONS, max_size=60))
def test_whatever_clients_do_exactly_what_they_left_open_is_open(operations):
    port = Port(limit=5)
    named = sequences_of(port, sequence_idle_seconds=60, max_key_sequences=3)
    left: set[tuple[str, int | str]] = set()
    for what, name, caller in operations:
        key = (caller, name)
        if what == "wait":
            port.pass_time(61)
            left.clear()
            continue
        full = len(left - {key}) >= 5 or sum(owner == caller for owner, _ in left - {key}) >= 3
        possible = not full if what == "start" else key in left
        left.discard(key)
        try:
            with take(named, name, caller, start=what == "start", end=what == "end"):
                assert possible
                if what == "fail":
                    raise ServiceError(FaultKind.INTERNAL, "failed")
                if what != "end":
                    left.add(key)
        except ServiceError:
            assert not possible or what == "fail"
        assert port.sequences.num_open == len(left)
