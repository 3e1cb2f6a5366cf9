"""Sequences as clients name them, under a virtual clock: who has which, for how long, and what ends one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmaker.clock import VirtualClock
from batchmaker.engine.open_sequences import SequenceLimit, Sequences
from batchmaker.engine.request import SequenceEnd
from batchmaker.engine.sequence import Sequence
from batchmaker.errors import SequenceError
from batchmaker.lab import zoo
from batchmaker.server.access.sender import Sender
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.parameters import CallOptions, ChunkOptions, call_options
from batchmaker.server.limits import Limits
from batchmaker.server.service.engine_port import EngineOptions, EnginePort
from batchmaker.server.service.sequences import OpenSequences
from insides import sequences_with_names


class Port:
    """An engine's sequences without its thread: what is sent to it is done at once."""

    takes_sequences = True

    def __init__(self, limit: int = 1000) -> None:
        self.clock = VirtualClock()
        self.sequences = Sequences(self.clock, SequenceLimit(limit))

    def open_sequence(self, priority, idle_s, on_ended, state):
        entry = self.sequences.make(idle_s, on_ended)
        self.sequences.open(entry)
        return Sequence(entry, SimpleNamespace(send=lambda call: call()), None, None, None)

    def pass_time(self, seconds):
        self.sequences.expire(self.clock.advance(seconds))


def sequences_of(port, **limits):
    return OpenSequences("m", port, Limits(**limits))


def chunk(name=7, *, start=False, end=False):
    return CallOptions(chunk=ChunkOptions(name, start, end))


def of(holder="", connection="1", address="10.0.0.1"):
    return Sender(holder, address, connection)


SOMEBODY = of()


def take(open_sequences, name=7, sender=SOMEBODY, **marks):
    return open_sequences.take(chunk(name, **marks), sender)


def refused(open_sequences, name=7, sender=SOMEBODY, **marks) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        take(open_sequences, name, sender, **marks)
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
    assert sequences_of(Port()).take(CallOptions(), of()) is None


OTHERS = [of("ann"), of("bob"), of(address="10.0.0.2"), of(address="::1")]


@pytest.mark.parametrize("connection", ["1", "2"])
@pytest.mark.parametrize("name", [7, "7", (1 << 64) - 1])
def test_a_sequence_is_its_owners_own(name, connection):
    """Another key, or without keys another address, has other sequences by the same names, on whatever connection."""
    port = Port()
    named = sequences_of(port)
    first = take(named, name, of(), start=True)
    for other in OTHERS:
        mine = Sender(other.holder, other.address, connection)
        assert "Send sequence_start" in str(refused(named, name, mine))
        assert take(named, name, mine, start=True).sequence is not first.sequence
        take(named, name, mine, end=True)
        assert take(named, name, of()).sequence is first.sequence


def test_an_owner_may_go_on_over_any_of_its_connections():
    named = sequences_of(Port())
    first = take(named, sender=of(connection="1"), start=True)
    assert all(take(named, sender=of(connection=str(n))).sequence is first.sequence for n in (2, 3, 2, 1))
    take(named, sender=of(connection="4"), end=True)
    again = take(named, sender=of(connection="2"), start=True)  # the name is free: whoever used it before
    assert take(named, sender=of(connection="1")).sequence is again.sequence


def test_a_connection_that_uses_a_sequence_may_begin_it_anew():
    port = Port(limit=1)
    named = sequences_of(port)
    old = take(named, start=True)
    new = take(named, start=True)
    assert not old.sequence.is_open
    assert take(named).sequence is new.sequence
    assert port.sequences.num_open == 1


@pytest.mark.parametrize("holder", ["", "ann"])
def test_a_second_client_of_one_owner_that_begins_the_same_sequence_is_refused_and_mixes_with_nobody(holder):
    named = sequences_of(Port())
    first, second = of(holder, "1"), of(holder, "2")
    begun = take(named, sender=first, start=True)
    fault = refused(named, sender=second, start=True)
    assert fault.kind is FaultKind.CONFLICT
    assert ("API key" if holder else "address") in str(fault)
    assert "its state is not yours" in str(fault)
    for stranger in (second, of(holder, "3")):  # the second may have other connections, too
        assert refused(named, sender=stranger).kind is not None
        assert refused(named, sender=stranger, end=True).kind is FaultKind.CONFLICT or stranger is second
        assert refused(named, sender=stranger, start=True).kind is FaultKind.CONFLICT
    assert take(named, sender=first).sequence is begun.sequence
    assert begun.sequence.is_open
    anew = take(named, sender=first, start=True)
    assert refused(named, sender=of(holder, "3")).kind is not None  # it is disputed still
    assert take(named, sender=first, end=True).sequence is anew.sequence
    assert take(named, sender=second, start=True).sequence.is_open


def test_a_client_whose_sequence_was_idle_for_too_long_does_not_go_on_with_anothers():
    port = Port()
    named = sequences_of(port)
    take(named, sender=of(connection="1"), start=True)
    port.pass_time(61)
    other = take(named, sender=of(connection="2"), start=True)
    assert "nothing came for 60 seconds" in str(refused(named, sender=of(connection="1")))
    assert take(named, sender=of(connection="2")).sequence is other.sequence


def test_a_model_that_keeps_nothing_takes_no_sequence():
    named = sequences_of(SimpleNamespace(takes_sequences=False))
    assert "keeps nothing between requests" in str(refused(named, start=True))


@pytest.mark.parametrize(("policy", "takes"), [(None, True), ("lazy", True), ("padded", False)])
def test_only_policies_that_batch_cells_take_sequences(policy, takes):
    model = zoo.make("lstm", hidden=4, vocabulary_size=9)
    assert EnginePort(model, EngineOptions(policy, threads=1)).takes_sequences is takes


# --- how it ends ------------------------------------------------------------------------------------------------------


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


REFUSALS = [
    ServiceError(kind, "not now", 2.0) for kind in (FaultKind.UNAVAILABLE, FaultKind.INVALID, FaultKind.TOO_MANY)
]


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda fault: fault.kind.name)
def test_a_request_that_is_refused_ends_its_sequence_once_those_before_it_are_answered_and_says_so(fault):
    port = Port()
    named = sequences_of(port)
    place = take(named, start=True)
    told = named.refused({"sequence_id": 7, "sequence_end": "what?"}, of(), fault)
    assert str(told) == "not now; sequence 7 has ended with it: begin anew with sequence_start"
    assert (told.kind, told.retry_after_s) == (fault.kind, 2.0)
    with place:
        pass
    assert "is not open" in str(refused(named))
    assert named.refused({"sequence_id": 7}, of(), fault) is fault


@pytest.mark.parametrize(("stopping", "end"), [(False, SequenceEnd.FAILED), (True, SequenceEnd.STOPPED)])
def test_a_chunk_that_is_refused_because_the_model_stops_ends_its_sequence_as_stopped(stopping, end):
    told = []
    named = OpenSequences("m", Port(), Limits(), lambda sender, ended: told.append(ended.end))
    take(named, start=True)
    named.stopping = stopping
    named.refused({"sequence_id": 7}, of(), REFUSALS[0])
    assert told == [end]


@pytest.mark.parametrize(
    "parameters", [{}, {"sequence_id": 0}, {"sequence_id": ""}, {"sequence_id": [7]}, {"sequence_id": 8}]
)
def test_a_request_that_names_no_open_sequence_ends_none(parameters):
    named = sequences_of(Port())
    place = take(named, start=True)
    assert named.refused(parameters, of(), REFUSALS[0]) is REFUSALS[0]
    assert take(named).sequence is place.sequence


@pytest.mark.parametrize(
    "stranger", [of("ann"), of(address="10.0.0.2"), of(connection="2")], ids=["key", "address", "connection"]
)
def test_nobody_ends_a_sequence_of_another_with_a_request_that_is_refused(stranger):
    named = sequences_of(Port())
    place = take(named, start=True)
    refused(
        named, sender=of(connection="3"), start=True
    )  # from here on, connections of the same address are told apart
    assert named.refused({"sequence_id": 7}, stranger, REFUSALS[0]) is REFUSALS[0]
    assert take(named).sequence is place.sequence


def test_a_refused_chunk_of_a_connection_ends_its_sequence():
    port = Port()
    connected = sequences_of(port).connect(of(), 0)
    told = connected.refused(REFUSALS[0])
    assert str(told) == "not now; the sequence has ended with it: connect anew"
    assert (connected.is_open, port.sequences.num_open) == (False, 0)


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
    first = take(named, 1, start=True).sequence
    take(named, 2, start=True)
    fault = refused(named, 3, start=True)
    assert (fault.kind, fault.retry_after) == (FaultKind.UNAVAILABLE, 1)
    with take(named, 1, end=True):
        first.close()  # as the engine's port does with the last chunk
    take(named, 3, start=True)
    port.pass_time(1e6)
    take(named, 4, start=True)
    take(named, 5, start=True)


def test_one_key_has_its_share():
    port = Port()
    named = sequences_of(port, max_key_sequences=2, sequence_idle_seconds=60)
    for name in (1, 2):
        take(named, name, of("ann"), start=True)
    fault = refused(named, 3, of("ann"), start=True)
    assert fault.kind is FaultKind.UNAVAILABLE
    assert "2 sequences of this API key" in str(fault)
    assert "2 sequences of this API key" in str(refused_connection(named, of("ann")))
    take(named, 3, of("bob"), start=True)
    take(named, 2, of("ann"), start=True)  # in place of its own
    port.pass_time(61)
    take(named, 3, of("ann"), start=True)
    named.connect(of("ann"), 0).close()
    named.connect(of("ann"), 0)
    refused(named, 4, of("ann"), start=True)


def refused_connection(named, sender) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        named.connect(sender, 0)
    return caught.value


OPERATIONS = st.tuples(
    st.sampled_from(["start", "go on", "end", "fail", "refuse", "wait"]), st.sampled_from([1, 2, "1"]),
    st.sampled_from("ab"), st.sampled_from("xyz"),
)  # fmt: skip


@given(st.lists(OPERATIONS, max_size=60))
def test_whatever_clients_do_nobody_goes_on_with_a_state_that_another_has_begun(operations):
    """Clients x, y and z of two owners, with a connection each, send what they like, in any order."""
    port = Port(limit=5)
    named = sequences_of(port, sequence_idle_seconds=60, max_key_sequences=3)
    begun_by: dict[object, tuple[str, str]] = {}  # by sequence: owner and client
    users: dict[object, set[str]] = {}
    began: dict[tuple[str, object, str], bool] = {}  # whether a client's last sequence_start of a name was taken
    for what, name, owner, client in operations:
        if what == "wait":
            port.pass_time(61)
            continue
        sender = of(owner, client)
        if what == "refuse":
            named.refused({"sequence_id": name}, sender, REFUSALS[0])
            continue
        try:
            taken = take(named, name, sender, start=what == "start", end=what == "end")
            with taken:
                sequence = taken.sequence
                if what == "start":
                    assert sequence not in begun_by
                    begun_by[sequence], users[sequence] = (owner, client), {client}
                    began[owner, name, client] = True
                assert begun_by[sequence][0] == owner
                assert began.get((owner, name, client), True), "its own beginning was refused"
                users[sequence].add(client)
                if what == "end":
                    sequence.close()  # as the engine's port does with the last chunk
                if what == "fail":
                    raise ServiceError(FaultKind.INTERNAL, "failed")
        except ServiceError as fault:
            if what == "start":
                began[owner, name, client] = fault.kind is not FaultKind.CONFLICT
            else:
                began.pop((owner, name, client), None)  # it has been told
    still_open = {sequence for sequence in sequences_with_names(named) if sequence.is_open}
    assert port.sequences.num_open == len(still_open)
