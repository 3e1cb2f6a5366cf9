"""Connections of many sequences through the front, and what becomes of them when their replica leaves."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from fleets_in_process import RunningFleet, fleet_config, played
from sequence_messages import BEGIN, END, GIVE_UP, NOTHING, STATE, VALUES, Answer, frame, read
from served_models import Rooted
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

import batchmaker as bm
from batchmaker.fleet.balancer import Replica
from batchmaker.fleet.handover import hand_over
from batchmaker.server.config import FleetConfig
from insides import around_each_move
from waiting import until


def connected(fleet: RunningFleet, model: str, query: str = "answers=binary", path: str = "sequences") -> Any:
    address = fleet.http.replace("http", "ws")
    return connect(f"{address}/v2/models/{model}/{path}?{query}", proxy=None, compression=None)


async def told(connection: ClientConnection, count: int) -> list[Answer]:
    """The next answers, by sequence: those of one are in order, and between two there is none."""
    found: list[Answer] = []
    while len(found) < count:
        found += read(await connection.recv())
    assert len(found) == count
    return sorted(found, key=lambda answer: answer[0])


def leaving(fleet: RunningFleet) -> Replica:
    """The only replica with a connection, which begins to leave."""
    (replica,) = [one for one in fleet.server.balancer.replicas.values() if one.num_sequences]
    fleet.server.balancer.drain(replica)
    return replica


def test_the_front_carries_many_sequences_and_what_their_query_says(models):
    async def scenario(fleet):
        async with connected(fleet, "counter") as connection:
            await connection.send(frame(1, 2, BEGIN) + frame(2, 1, BEGIN) + frame(1, b"123") + frame(1, 1))
            assert await told(connection, 3) == [(1, 0, VALUES, [1, 2]), (1, 0, -1, 400), (2, 0, VALUES, [1])]
            await connection.send(frame(2, 1, END) + frame(1, 1, BEGIN))
            assert await told(connection, 2) == [(1, 0, VALUES, [1]), (2, END, VALUES, [2])]
        async with connected(fleet, "counter", "deadline_ms=0.001") as connection:
            await connection.send(json.dumps({"sequence": 7, "begin": True, "chunk": {"input_0": 9}}))
            said = json.loads(await connection.recv())
            assert (said["sequence"], said["status"]) == (7, 504)
        with pytest.raises(InvalidStatus) as refused:
            await connected(fleet, "counter", "answers=none")
        assert refused.value.response.status_code == 400
        await fleet.wait_for(lambda: fleet.server.balancer.num_sequences == 0)

    played(scenario, fleet_config(models[0] / "counter"))


@pytest.mark.parametrize(
    "query",
    ["answers=json", *[pytest.param(f"answers=binary{more}", marks=pytest.mark.slow) for more in ("", "&priority=2")]],
)
def test_many_sequences_of_a_connection_go_on_at_another_replica_when_theirs_leaves(models, query):
    """All replicas are replaced while frames are sent ahead. Some sequences end, and their numbers are used anew."""

    async def one(fleet, place, counts, num_ended, done):
        is_binary = "binary" in query
        counted: dict[int, int] = {}
        waiting: list[tuple[int, int, bool]] = []

        async def receive(connection):
            message = await connection.recv()
            said = None if isinstance(message, bytes) else json.loads(message)
            got = read(message) if said is None else []
            if said is not None:
                got.append((said["sequence"], int("end" in said), VALUES, said["answer"]["output_0"]))
            for number, ended, _, values in got:
                expected, is_last = next((count, last) for at, count, last in waiting if at == number)
                assert (values[-1], bool(ended)) == (expected, is_last)
                waiting.remove((number, expected, is_last))
                counts[place] += 1
                num_ended[place] += is_last

        async with connected(fleet, "counter", query) as connection:
            at = 0
            while not done.is_set() or waiting:
                number, steps, last = at % 5, 1 + (at + place) % 3, at % 60 >= 57
                ends = [n for n, _, is_last in waiting if is_last]
                if done.is_set() or number in ends or len(waiting) >= 12:
                    await receive(connection)
                    continue
                flags = (0 if number in counted else BEGIN) | (END if last else 0)
                counted[number] = counted.get(number, 0) + steps
                waiting.append((number, counted[number], last))
                if last:
                    del counted[number]
                if is_binary or at % 2:
                    await connection.send(frame(number, steps, flags))
                else:
                    marks = {"begin": bool(flags & BEGIN), "end": last}
                    await connection.send(json.dumps({"sequence": number, "chunk": {"input_0": steps}, **marks}))
                at += 1

    async def scenario(fleet):
        counts, num_ended, done = [0] * 4, [0] * 4, asyncio.Event()
        talking = [asyncio.create_task(one(fleet, place, counts, num_ended, done)) for place in range(4)]
        balancer, moved = fleet.server.balancer, 0
        for number in range(3):
            least = min(counts) + 40
            await fleet.wait_for(lambda least=least: min(counts) > least or any(task.done() for task in talking))
            await fleet.server.update(msgspec.structs.replace(fleet.server.fleet.config, trace_steps=number))
            assert balancer.num_moved_sequences >= moved + 4
            moved = balancer.num_moved_sequences
        done.set()
        await asyncio.gather(*talking)
        assert min(num_ended) > 0
        assert balancer.num_lost_sequences == 0
        await fleet.wait_for(lambda: balancer.num_sequences == 0)

    played(scenario, fleet_config(models[0] / "counter"))


def test_what_ends_or_has_failed_beside_sequences_that_move(models):
    """The end of one is waited for, what is sent meanwhile waits, and one that failed stays silent until it begins."""

    async def scenario(fleet):
        async with connected(fleet, "gated") as connection:
            await connection.send(frame(1, 2, BEGIN) + frame(2, 1, BEGIN) + frame(3, None, BEGIN) + frame(4, 1, BEGIN))
            assert len(await told(connection, 4)) == 4
            await connection.send(frame(2, b"123") + frame(4, None, GIVE_UP))
            assert await told(connection, 2) == [(2, 0, -1, 400), (4, END, NOTHING, b"")]
            await connection.send(frame(1, 4, END) + frame(3, 1) + frame(5, b"123", BEGIN))
            assert await told(connection, 1) == [(5, 0, -1, 400)]  # it has all; the engine waits for the gate
            moving = asyncio.create_task(hand_over(fleet.server.balancer, leaving(fleet)))
            replicas = fleet.server.balancer.replicas.values()
            await until(lambda: all(one.num_sequences for one in replicas))  # the state is asked for, and not there yet
            await connection.send(frame(2, 1) + frame(3, 1) + frame(2, 2, BEGIN) + frame(4, 1, BEGIN) + frame(5, 1))
            models[1].touch()
            assert await told(connection, 5) == [
                (1, END, VALUES, [3, 4, 5, 6]), (2, 0, VALUES, [1, 2]), (3, 0, VALUES, [1]), (3, 0, VALUES, [2]),
                (4, 0, VALUES, [1]),
            ]  # fmt: skip
            assert (await moving, fleet.server.balancer.num_moved_sequences) == (1, 1)
            await connection.send(frame(1, 1, BEGIN))
            assert await told(connection, 1) == [(1, 0, VALUES, [1])]
            await connection.send(frame(3, b"", 0, STATE))
            ((number, flags, kind, state),) = await told(connection, 1)
            assert (number, flags, kind, bool(state)) == (3, 0, STATE, True)
            await connection.send(b"".join(frame(number, None, END) for number in (1, 2, 3, 4)))
            assert await told(connection, 4) == [(number, END, NOTHING, b"") for number in (1, 2, 3, 4)]

    models[1].unlink(missing_ok=True)
    played(scenario, fleet_config(models[0] / "gated"))


def test_a_connection_with_a_sequence_that_cannot_be_moved_stays_as_a_whole(models, tmp_path):
    bm.save(Rooted(), tmp_path / "rooted")

    async def scenario(fleet):
        async with connected(fleet, "rooted") as connection:
            await connection.send(frame(1, 2, BEGIN) + frame(2, 6, BEGIN))
            await told(connection, 2)
            assert await hand_over(fleet.server.balancer, leaving(fleet)) == 0
            await connection.send(frame(1, 1, END) + frame(2, 1, END))
            assert await told(connection, 2) == [(1, END, VALUES, [3]), (2, END, VALUES, [7])]
        await fleet.wait_for(lambda: fleet.server.balancer.num_sequences == 0)

    played(scenario, fleet_config(tmp_path / "rooted"))


def test_a_client_that_asks_for_the_state_of_its_connection_gets_it_through_the_front(models):
    async def scenario(fleet):
        async with connected(fleet, "counter") as connection:
            await connection.send(frame(1, 2, BEGIN))
            await told(connection, 1)
            await connection.send('{"state": true, "id": "mine"}')
            said = json.loads(await connection.recv())
            assert (said["id"], said["sequences"]) == ("mine", 1)
            assert await hand_over(fleet.server.balancer, leaving(fleet)) == 1
        async with connected(fleet, "counter", "answers=json") as connection:
            await connection.send(json.dumps({"open": {"state": said["state"]}}))
            assert json.loads(await connection.recv()) == {"open": True}
            await connection.send(json.dumps({"sequence": 1, "chunk": {"input_0": 1}}))
            assert json.loads(await connection.recv())["answer"]["output_0"] == [3]

    played(scenario, fleet_config(models[0] / "counter"))


@pytest.mark.parametrize("path", ["sequence", "sequences"])
def test_a_client_that_leaves_while_its_sequences_move_leaves_nothing_behind(models, monkeypatch, path):
    async def scenario(fleet):
        balancer, opened, may_go_on = fleet.server.balancer, asyncio.Event(), asyncio.Event()

        async def later(open_there):
            there = await open_there()
            opened.set()
            await may_go_on.wait()
            return there

        around_each_move(monkeypatch, later)
        async with connected(fleet, "counter", path=path) as connection:
            await connection.send(np.int64(2).tobytes() if path == "sequence" else frame(1, 2, BEGIN))
            await connection.recv()
            moving = asyncio.create_task(hand_over(balancer, leaving(fleet)))
            await opened.wait()
        await fleet.wait_for(lambda: fleet.server.front.num_open == 0)
        may_go_on.set()
        assert await moving == 0
        assert [(one.num_sequences, len(one.link.relays)) for one in balancer.replicas.values()] == [(0, 0), (0, 0)]
        for number in balancer.replicas:
            open_ones = ["1"]
            while set(open_ones) != {"0.0"}:
                metrics = (await fleet.client.get(f"/v2/replicas/{number}/metrics")).text
                open_ones = re.findall(r"^batchmaker_open_websockets\S* (\S+)$", metrics, re.MULTILINE)

    played(scenario, fleet_config(models[0] / "counter"))


@pytest.mark.parametrize("path", ["sequence", "sequences"])
def test_sequences_whose_new_replica_begins_to_leave_before_they_come_move_on(models, monkeypatch, path):
    async def scenario(fleet):
        balancer, told_to_go = fleet.server.balancer, asyncio.Event()

        async def later(open_there):
            await told_to_go.wait()
            return await open_there()

        def chunk(n, flags=0):
            return np.int64(n).tobytes() if path == "sequence" else frame(1, n, flags)

        around_each_move(monkeypatch, later)
        async with connected(fleet, "counter", path=path) as connection:
            await connection.send(chunk(3, BEGIN))
            assert np.frombuffer((await connection.recv())[-24:], "<i8").tolist() == [1, 2, 3]
            old = leaving(fleet)
            moving = asyncio.create_task(hand_over(balancer, old))
            await fleet.wait_for(lambda: balancer.num_sequences == 2)
            (new,) = [one for one in balancer.replicas.values() if one.num_sequences and one is not old]
            balancer.drain(new)
            assert await hand_over(balancer, new) == 0
            told_to_go.set()
            assert await moving == 2
            (at,) = [one for one in balancer.replicas.values() if one.num_sequences]
            assert at.state == "open"
            await connection.send(chunk(1))
            assert np.frombuffer((await connection.recv())[-8:], "<i8").tolist() == [4]

    played(scenario, fleet_config(models[0] / "counter", fleet=FleetConfig(replicas=3)))
