"""Sequences through the front: whose they are, what ends them, and how long they go on when the fleet stops."""

from __future__ import annotations

import asyncio
import json
import queue
from contextlib import suppress

import httpx
import msgspec
import pytest
import tritonclient.grpc as triton
from fleets_in_process import LIMIT_S, RunningFleet, fleet_config, played
from triton_calls import given
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from batchmaker.fleet import handover
from batchmaker.fleet.handover import hand_over
from batchmaker.fleet.sockets import Relay
from batchmaker.server.limits import Limits


async def ask(fleet: RunningFleet, client: httpx.AsyncClient, n: int, **parameters: object) -> httpx.Response:
    return await client.post(
        f"{fleet.http}/v2/models/counter/generate", json={"input_0": n, "parameters": {"sequence_id": 7, **parameters}}
    )


def test_two_clients_that_choose_the_same_name_do_not_mix(models):
    async def scenario(fleet):
        async with httpx.AsyncClient(timeout=LIMIT_S) as one, httpx.AsyncClient(timeout=LIMIT_S) as other:
            assert (await ask(fleet, one, 5, sequence_start=True)).json()["output_0"] == [1, 2, 3, 4, 5]
            refused = await ask(fleet, other, 100, sequence_start=True)
            assert (refused.status_code, "Take another sequence_id" in refused.json()["error"]) == (409, True)
            assert (await ask(fleet, other, 7)).status_code in (400, 409)
            assert (await ask(fleet, one, 2)).json()["output_0"] == [6, 7]
            assert (await ask(fleet, one, 1, sequence_end=True)).json()["output_0"] == [8]
            again = await ask(fleet, other, 2, sequence_start=True, sequence_end=True)
            assert again.json()["output_0"] == [1, 2]
        assert fleet.server.balancer.num_sequences == 0

    played(scenario, fleet_config(models[0] / "counter"))


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"deadline_ms": -1}, {"sequence_end": "yes"}])
def test_a_refused_chunk_ends_its_sequence_at_the_replica_that_has_it(models, wrong):
    async def scenario(fleet):
        assert (await ask(fleet, fleet.client, 2, sequence_start=True)).status_code == 200
        refused = await ask(fleet, fleet.client, 1, **wrong)
        assert (refused.status_code, "has ended with it" in refused.json()["error"]) == (400, True)
        assert (await ask(fleet, fleet.client, 1)).status_code == 400
        assert (await ask(fleet, fleet.client, 1, sequence_start=True)).json()["output_0"] == [1]
        assert (await ask(fleet, fleet.client, 1, sequence_end=True)).json()["output_0"] == [2]

    played(scenario, fleet_config(models[0] / "counter"))


def test_open_conversations_go_on_until_they_end_when_the_fleet_stops(models):
    async def scenario(fleet):
        path = fleet.http.replace("http", "ws") + "/v2/models/scales/sequence"
        received: queue.Queue = queue.Queue()
        client = triton.InferenceServerClient(fleet.grpc)

        async def streamed(n, **marks):
            client.async_stream_infer("scales", given(n), **marks)
            result, error = await asyncio.to_thread(received.get, timeout=LIMIT_S)
            return str(error) if error is not None else result.as_numpy("output_0").item()

        async with connect(path, proxy=None, compression=None) as socket:
            client.start_stream(lambda result, error: received.put((result, error)))
            assert await streamed(3, sequence_id=4, sequence_start=True) == 9
            assert (await ask(fleet, fleet.client, 2, sequence_start=True)).status_code == 200
            stopping = asyncio.create_task(fleet.server.stop())
            await fleet.wait_for(lambda: fleet.server.front.draining)
            assert (await fleet.generate("scales", [1])).status_code == 503
            assert (await fleet.generate("scales", [1], sequence_id=8, sequence_start=True)).status_code == 503
            with pytest.raises(InvalidStatus) as refused:
                await connect(path, proxy=None)
            assert refused.value.response.status_code == 503
            for total in (1, 2):
                await socket.send(json.dumps({"input_0": [1]}))
                assert json.loads(await socket.recv())["output_0"] == total
            assert await streamed(2, sequence_id=4) == 13
            assert await streamed(2) == 4
            assert (await ask(fleet, fleet.client, 1)).json()["output_0"] == [3]
            assert not stopping.done()
            assert (await ask(fleet, fleet.client, 1, sequence_end=True)).json()["output_0"] == [4]
            assert await streamed(1, sequence_id=4, sequence_end=True) == 14
            await asyncio.to_thread(client.stop_stream)
        assert await stopping
        client.close()

    played(scenario, fleet_config(models[0] / "counter", models[0] / "scales", grpc_port=0))


def test_conversations_that_outlast_the_drain_are_told(models):
    async def scenario(fleet):
        path = fleet.http.replace("http", "ws") + "/v2/models/scales/sequence"
        async with connect(path, proxy=None, compression=None) as socket:
            assert (await ask(fleet, fleet.client, 2, sequence_start=True)).status_code == 200
            stopping = asyncio.create_task(fleet.server.stop())
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "the server is being stopped")
            assert await stopping

    played(
        scenario,
        fleet_config(
            models[0] / "counter", models[0] / "scales", limits=Limits(drain_seconds=0.2, sequence_idle_seconds=3600)
        ),
    )


@pytest.mark.slow
def test_a_replica_that_leaves_hands_its_sequences_over_in_mid_stream(models):
    """All replicas are replaced while sequences go on; each counts on as if nothing had happened."""

    async def one(fleet, number, client, counts, done):
        at = 0
        while not done.is_set() or at < 3:
            steps = 1 + (at + number) % 3
            marks = {"sequence_id": f"s{number}", "sequence_start": at == 0}
            answer = await client.post(
                f"{fleet.http}/v2/models/counter/generate", json={"input_0": steps, "parameters": marks}
            )
            assert answer.status_code == 200, answer.text
            counts[number] += steps
            assert answer.json()["output_0"][-1] == counts[number]
            at += 1

    async def scenario(fleet):
        counts, done, balancer = dict.fromkeys(range(12), 0), asyncio.Event(), fleet.server.balancer
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            talking = [asyncio.create_task(one(fleet, number, client, counts, done)) for number in counts]
            for number in range(3):
                least = min(counts.values()) + 10
                await fleet.wait_for(lambda least=least: min(counts.values()) > least)
                await fleet.server.update(msgspec.structs.replace(fleet.server.fleet.config, trace_steps=number))
                assert balancer.num_moved_sequences == 12 * (number + 1)
            done.set()
            await asyncio.gather(*talking)
            for number, count in counts.items():  # idle ones have moved, too
                last = await fleet.generate("counter", 1, sequence_id=f"s{number}", sequence_end=True)
                assert last.json()["output_0"] == [count + 1]
        assert balancer.num_lost_sequences == 0
        await fleet.wait_for(lambda: balancer.num_sequences == 0)

    played(scenario, fleet_config(models[0] / "counter"))


@pytest.mark.slow
def test_a_websocket_goes_on_at_another_replica_when_its_own_leaves(models):
    """Its frames are sent ahead, and no answer is missing, twice or another's."""

    async def one(fleet, number, counts, done):
        path = fleet.http.replace("http", "ws") + "/v2/models/counter/sequence"
        async with connect(path, proxy=None, compression=None) as socket:
            at, waiting = 0, []
            while not done.is_set() or waiting:
                if not done.is_set() and len(waiting) < 4:
                    steps = 1 + (at + number) % 3
                    await socket.send(json.dumps({"input_0": steps}))
                    waiting.append(steps)
                    at += 1
                    continue
                counts[number] += waiting.pop(0)
                answer = json.loads(await socket.recv())
                assert answer.get("output_0", [answer])[-1] == counts[number]
            await socket.send(json.dumps({"end": True}))
            assert json.loads(await socket.recv()) == {"end": True}

    async def scenario(fleet):
        counts, done, balancer = dict.fromkeys(range(8), 0), asyncio.Event(), fleet.server.balancer
        talking = [asyncio.create_task(one(fleet, number, counts, done)) for number in counts]
        for number in range(3):
            least = min(counts.values()) + 20
            await fleet.wait_for(lambda least=least: min(counts.values()) > least or any(t.done() for t in talking))
            await fleet.server.update(msgspec.structs.replace(fleet.server.fleet.config, trace_steps=number))
            assert balancer.num_moved_sequences == 8 * (number + 1)
        done.set()
        await asyncio.gather(*talking)
        assert balancer.num_lost_sequences == 0
        await fleet.wait_for(lambda: balancer.num_sequences == 0)

    played(scenario, fleet_config(models[0] / "counter"))


def test_a_sequence_whose_state_cannot_go_elsewhere_goes_on_where_it_is(models):
    """Two clients claim one name: only the replica that has the sequence knows whom to refuse."""

    async def scenario(fleet):
        async with httpx.AsyncClient(timeout=LIMIT_S) as one, httpx.AsyncClient(timeout=LIMIT_S) as other:
            assert (await ask(fleet, one, 5, sequence_start=True)).status_code == 200
            assert (await ask(fleet, other, 9, sequence_start=True)).status_code == 409
            ((leaving),) = [r for r in fleet.server.balancer.replicas.values() if r.num_sequences]
            fleet.server.balancer.drain(leaving)
            assert await hand_over(fleet.server.balancer, leaving) == 0
            assert (await ask(fleet, one, 2)).json()["output_0"] == [6, 7]
            assert (await ask(fleet, other, 2)).status_code in (400, 409)
            assert (await ask(fleet, one, 1, sequence_end=True)).json()["output_0"] == [8]

    played(scenario, fleet_config(models[0] / "counter"))


@pytest.mark.parametrize("ends", ["never", "badly"])
def test_a_hand_over_that_does_not_end_leaves_its_sequence_where_it_is(models, monkeypatch, ends):
    async def asked(*_, **__):
        if ends == "badly":
            raise ValueError("no JSON")
        await asyncio.Event().wait()

    async def scenario(fleet):
        assert (await ask(fleet, fleet.client, 5, sequence_start=True)).status_code == 200
        path = fleet.http.replace("http", "ws") + "/v2/models/counter/sequence"
        async with connect(path, proxy=None, compression=None) as socket:
            balancer = fleet.server.balancer
            before = [replica.num_sequences for replica in balancer.replicas.values()]
            assert before == [1, 1]
            leaving = next(iter(balancer.replicas.values()))
            balancer.drain(leaving)
            with monkeypatch.context() as patch:
                patch.setattr(handover, "_ask", asked)
                patch.setattr(Relay, "_has_plain_names", asked)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        assert await hand_over(balancer, leaving) == 0
            assert [replica.num_sequences for replica in balancer.replicas.values()] == before
            assert (await ask(fleet, fleet.client, 1)).json()["output_0"] == [6]
            await socket.send(json.dumps({"input_0": 2}))
            assert json.loads(await socket.recv())["output_0"] == [1, 2]
        assert (await ask(fleet, fleet.client, 1, sequence_end=True)).json()["output_0"] == [7]

    played(scenario, fleet_config(models[0] / "counter"))


def test_a_client_that_asks_for_the_state_survives_the_death_of_its_replica(models):
    async def scenario(fleet):
        said = (await ask(fleet, fleet.client, 3, sequence_start=True, sequence_state=True)).json()
        ((lost),) = [r.number for r in fleet.server.balancer.replicas.values() if r.num_sequences]
        fleet.launcher.started[lost].die()
        await fleet.wait_for(lambda: lost not in fleet.server.balancer.replicas)
        state = said["parameters"]["sequence_state"]
        assert (await ask(fleet, fleet.client, 1)).status_code == 400
        again = await ask(fleet, fleet.client, 2, sequence_start=True, sequence_state=state, sequence_end=True)
        assert again.json()["output_0"] == [4, 5]
        await fleet.wait_for(lambda: len(fleet.server.balancer.replicas) == 2)

    # The sequence is open for ever at the replica that is cut off: it does not wait for that when it is stopped
    played(scenario, fleet_config(models[0] / "counter", limits=Limits(drain_seconds=0.5, sequence_idle_seconds=3600)))
