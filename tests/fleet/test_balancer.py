"""The table of replicas: routing by work, sequences, and replicas that come and go."""

from __future__ import annotations

import asyncio

import pytest

from batchmaker.clock import VirtualClock
from batchmaker.errors import OptionError
from batchmaker.fleet.balancer import Balancer
from batchmaker.fleet.routed_request import RoutedRequest
from batchmaker.server.access.sender import NOBODY, Sender
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.formats.parameters import ChunkOptions


def asked(elements=1, model="m", chunk=None):
    return RoutedRequest(model, None, elements, chunk)


def chunk(name, start=False, end=False):
    return asked(chunk=ChunkOptions(name, start, end))


def balancer(count=2, router="least-work", clock=None):
    table = Balancer(router, idle_s=60.0, clock=clock or VirtualClock())
    for number in range(count):
        table.open(number, link=None)
    return table


def taken(table, *requests, caller=NOBODY):
    return [asyncio.run(table.take(request, caller)) for request in requests]


def test_a_long_request_counts_as_much_as_many_short_ones():
    table = balancer()
    places = [lease.replica.number for lease in taken(table, *(asked(n) for n in (90, 10, 20, 30, 20, 5)))]
    assert places == [0, 1, 1, 1, 1, 1]
    assert table.waiting_s == pytest.approx(175 * table.element_us("m") / 1e6)


def test_requests_are_counted_where_the_rule_counts():
    table = balancer(router="least-requests")
    assert [lease.replica.number for lease in taken(table, *(asked(n) for n in (90, 10, 20, 30)))] == [0, 1, 0, 1]


def test_an_unknown_rule_names_the_nearest():
    with pytest.raises(OptionError, match="least-work"):
        Balancer("least-wrok")


def test_what_an_element_takes_is_learnt_for_each_model():
    table = balancer(1)
    (replica,) = table.replicas.values()
    for model, elements in (("slow", 10), ("fast", 40)):
        for lease in taken(table, asked(elements, model)):
            lease.end(answered=True)
    table.learn(replica, "slow", busy_us=5000.0)
    table.learn(replica, "fast", busy_us=400.0)
    assert table.element_us("slow") == pytest.approx(500)
    assert table.element_us("fast") == pytest.approx(10)
    (lease,) = taken(table, asked(4, "slow"))
    assert replica.work_us == 2000
    lease.end(answered=False)
    assert (replica.work_us, replica.num_requests, table.work.load[0]) == (0, 0, 0)
    table.learn(replica, "slow", busy_us=900.0)
    assert table.element_us("slow") == pytest.approx(500), "nothing was answered, so nothing is known"


def test_a_suspended_replica_gets_nothing_and_keeps_its_load_when_it_is_back():
    table = balancer()
    taken(table, asked(50))
    table.suspend(table.replicas[0])
    assert [lease.replica.number for lease in taken(table, asked(60), asked(60))] == [1, 1]
    table.resume(table.replicas[0])
    assert [lease.replica.number for lease in taken(table, asked(60), asked(60))] == [0, 0]


def test_without_a_replica_clients_are_told_to_try_again():
    table = balancer(1)
    table.drain(table.replicas[0])
    for work in (lambda: taken(table, asked()), table.connect, table.any_open):
        with pytest.raises(ServiceError, match="no replica") as refused:
            work()
        assert (refused.value.kind, refused.value.retry_after) == (FaultKind.UNAVAILABLE, 1)


def test_a_model_has_no_room_when_every_open_replica_has_as_many_of_its_requests_as_it_takes():
    table = Balancer("round-robin", clock=VirtualClock(), most_requests=2)
    assert table.room_of("m", None).check_room() is None, "without replicas it is not for lack of room"
    for number in range(3):
        table.open(number, link=None)
    table.drain(table.replicas[2])
    leases = taken(table, asked(), asked(), asked())
    table.room_of("m", None).check_room()
    leases += taken(table, asked())
    with pytest.raises(ServiceError, match="'m' has 2 requests in flight at each replica") as caught:
        table.room_of("m", None).check_room()
    assert (caught.value.kind, caught.value.retry_after) == (FaultKind.UNAVAILABLE, 1.0)
    table.room_of("other", None).check_room()
    leases.pop().end(answered=False)
    table.room_of("m", None).check_room()
    for lease in leases:
        lease.end(answered=True)
    assert [replica.unanswered for replica in table.replicas.values()] == [{}, {}, {}]


def test_a_sequence_stays_at_a_replica_that_is_drained_and_a_new_one_does_not_go_there():
    table = balancer()
    (first,) = taken(table, chunk("a", start=True))
    first.end(answered=True)
    table.drain(first.replica)
    later, other = taken(table, chunk("a"), chunk("b", start=True))
    assert later.replica is first.replica
    assert other.replica is not first.replica
    later.end(answered=True)
    (again,) = taken(table, chunk("a", start=True))
    assert again.replica is other.replica, "begun anew, it goes where requests are taken"
    assert first.replica.num_sequences == 0


def test_chunks_of_a_sequence_go_one_after_the_other_in_their_order():
    async def scenario():
        table, order = balancer(), []
        first = await table.take(chunk("a", start=True), NOBODY)

        async def send(number):
            lease = await table.take(chunk("a", end=number == 2), NOBODY)
            order.append(number)
            await asyncio.sleep(0)
            lease.end(answered=True)

        tasks = [asyncio.create_task(send(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert order == []
        first.end(answered=True)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]
        assert table.num_sequences == 0

    asyncio.run(scenario())


def test_the_same_name_of_two_callers_is_two_sequences():
    table = balancer()
    (ann,) = taken(table, chunk(1, start=True), caller=Sender(holder="ann"))
    (bob,) = taken(table, chunk(1, start=True), caller=Sender(holder="bob"))
    assert ann.replica is not bob.replica


def test_a_lost_replica_ends_its_sequences_and_their_waiting_chunks():
    async def scenario():
        table = balancer()
        lease = await table.take(chunk("a", start=True), NOBODY)
        waiting = asyncio.create_task(table.take(chunk("a"), NOBODY))
        await asyncio.sleep(0)
        table.remove(lease.replica)
        lease.end(answered=False)
        with pytest.raises(ServiceError, match="Begin anew"):
            await waiting
        with pytest.raises(ServiceError, match="replica that held its state is gone"):
            await table.take(chunk("a"), NOBODY)
        again = await table.take(chunk("a", start=True), NOBODY)
        assert again.replica is not lease.replica

    asyncio.run(scenario())


def test_a_first_chunk_that_was_refused_opens_nothing():
    table = balancer(1)
    (lease,) = taken(table, chunk("a", start=True))
    lease.end(answered=False)
    assert table.num_sequences == 0


def test_idle_sequences_are_forgotten_after_their_replica_has_ended_them():
    clock = VirtualClock()
    table = balancer(1, clock=clock)
    for lease in taken(table, chunk("a", start=True)):
        lease.end(answered=True)
    clock.advance(60.0)
    table.forget_idle()
    assert table.num_sequences == 1
    clock.advance(6.0)
    table.forget_idle()
    assert table.num_sequences == 0
