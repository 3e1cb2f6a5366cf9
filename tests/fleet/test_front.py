"""The front before real servers: what clients see while replicas come, go and die."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
from fleets_in_process import LIMIT_S, RunningFleet, fleet_config, played
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from batchmaker.fleet.balancer import Replica
from batchmaker.fleet.upstream import Upstream
from batchmaker.server.config import FleetConfig
from batchmaker.server.http.shared_connection import MOST_BODY_BYTES
from batchmaker.server.limits import Limits


@pytest.fixture
def gate(models):
    models[1].unlink(missing_ok=True)
    yield models[1]
    models[1].touch()


def routed(fleet: RunningFleet) -> list[int]:
    return [replica.routed for _, replica in sorted(fleet.server.balancer.replicas.items())]


async def connected(fleet: RunningFleet) -> None:
    """Four requests, so that there is a connection to each of two replicas, and later ones are sent at once."""
    answers = await asyncio.gather(*(fleet.generate("counter", 2) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert routed(fleet) == [2, 2]


def test_requests_are_spread_and_answered_as_by_one_server(models):
    async def scenario(fleet):
        answers = await asyncio.gather(*(fleet.generate("scales", [n % 9, 1]) for n in range(20)))
        assert [answer.json()["output_0"] for answer in answers] == [(n % 9) ** 2 + 1 for n in range(20)]
        assert min(routed(fleet)) >= 5
        wrong = await fleet.generate("scales", "text")
        assert wrong.status_code == 400
        missing = await fleet.generate("nothing", 1)
        assert (missing.status_code, "nothing" in missing.json()["error"]) == (404, True)
        assert (await fleet.client.get("/v2/models/scales")).json()["name"] == "scales"
        assert (await fleet.client.get("/v2/health/ready")).status_code == 200
        assert (await fleet.client.head("/v2")).status_code == 405
        told = (await fleet.client.get("/v2/replicas")).json()
        assert [one["state"] for one in told] == ["open", "open"]
        metrics = (await fleet.client.get(f"/v2/replicas/{told[0]['replica']}/metrics")).text
        assert "batchmaker_requests_total" in metrics
        assert 'batchmaker_fleet_replicas{state="open"} 2.0' in (await fleet.client.get("/metrics")).text
        of_one = await fleet.client.get("/v2/models/stats")
        assert (of_one.status_code, "/v2/replicas/NUMBER" in of_one.json()["error"]) == (501, True)
        assert (await fleet.client.post("/v2/repository/models/scales/load")).status_code == 501

    played(scenario, fleet_config(models[0] / "scales"))


def test_a_full_fleet_refuses_before_its_replicas_hear_of_a_request(models, gate):
    async def scenario(fleet):
        waiting = [asyncio.ensure_future(fleet.generate("gated", 3)) for _ in range(2)]
        await fleet.wait_for(lambda: sum(routed(fleet)) == 2)
        refused = await fleet.generate("gated", 3)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "1 requests in flight at each replica" in refused.json()["error"]
        assert sum(routed(fleet)) == 2
        assert "batchmaker_fleet_refused_requests_total 1.0" in (await fleet.client.get("/metrics")).text
        assert (await fleet.generate("scales", [2])).status_code == 200
        gate.touch()
        assert [(await one).status_code for one in waiting] == [200, 200]
        assert (await fleet.generate("gated", 3)).status_code == 200

    limits = Limits(max_in_flight=1, drain_seconds=LIMIT_S)
    played(
        scenario,
        fleet_config(
            models[0] / "scales",
            models[0] / "gated",
            fleet=FleetConfig(replicas=2, router="round-robin"),
            limits=limits,
        ),
    )


def test_large_bodies_have_a_connection_of_their_own(models):
    async def scenario(fleet):
        many = 500
        wide = json.dumps({"input_0": [1] * many}).replace(" ", " " * (1 + MOST_BODY_BYTES // many))
        assert len(wide) > MOST_BODY_BYTES
        large = fleet.client.post("/v2/models/scales/generate", content=wide)
        answers = await asyncio.gather(large, fleet.generate("scales", [2, 2]))
        assert [answer.json()["output_0"] for answer in answers] == [many, 8]

    played(scenario, fleet_config(models[0] / "scales"))


def test_connections_to_replicas_are_used_again(models):
    async def scenario(fleet):
        for n in range(40):
            assert (await fleet.generate("scales", [n % 9])).status_code == 200
        assert all(one.cables[0].num_connections <= 2 for one in fleet.replicas.values()), "calls, and looks at it"

    played(scenario, fleet_config(models[0] / "scales"))


def test_streams_pass_value_by_value(models):
    async def scenario(fleet):
        async with fleet.client.stream("POST", "/v2/models/counter/generate_stream", json={"input_0": 5}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        values = [json.loads(line.removeprefix("data: "))["output_0"] for line in lines]
        assert values == [1, 2, 3, 4, 5]

    played(scenario, fleet_config(models[0] / "counter"))


def test_tritonclient_works_unchanged_with_tensors_and_sequences(models):
    def ask(address):
        client = triton.InferenceServerClient(address.removeprefix("http://"))
        sums = []
        for number, chunk in enumerate([[1, 2], [3], [4]]):
            given = triton.InferInput("input_0", [len(chunk)], "INT64")
            given.set_data_from_numpy(np.array(chunk))
            answer = client.infer(
                "scales", [given], sequence_id="ann's", sequence_start=number == 0, sequence_end=number == 2
            )
            sums.append(answer.as_numpy("output_0").item())
        client.close()
        return sums

    async def scenario(fleet):
        assert await asyncio.to_thread(ask, fleet.http) == [5, 14, 30]
        assert fleet.server.balancer.num_sequences == 0

    played(scenario, fleet_config(models[0] / "scales"))


def test_sequences_stay_where_they_began_and_are_spread(models):
    async def scenario(fleet):
        for number in range(6):
            await fleet.generate("scales", [1], sequence_id=number + 1, sequence_start=True)
        assert [r.num_sequences for r in fleet.server.balancer.replicas.values()] == [3, 3]
        for _ in range(2):
            for number in range(6):
                await fleet.generate("scales", [number], sequence_id=number + 1)
        ends = [await fleet.generate("scales", [0], sequence_id=n + 1, sequence_end=True) for n in range(6)]
        assert [end.json()["output_0"] for end in ends] == [2 * n * n + 1 for n in range(6)]
        assert fleet.server.balancer.num_sequences == 0
        unknown = await fleet.generate("scales", [1], sequence_id=1)
        assert (unknown.status_code, "not open" in unknown.json()["error"]) == (400, True)

    played(scenario, fleet_config(models[0] / "scales"))


def test_a_request_whose_replica_ends_is_given_to_no_other_one(models, gate):
    """It may be what ended the replica."""

    async def scenario(fleet):
        fleet.launcher.hold.clear()
        await connected(fleet)
        waiting = [asyncio.ensure_future(fleet.generate("gated", 3)) for _ in range(4)]
        await fleet.wait_for(lambda: sum(routed(fleet)) == 8)
        number, victim = next(iter(fleet.replicas.items()))
        victim.die()
        await fleet.wait_for(lambda: number not in fleet.server.balancer.replicas)
        gate.touch()
        answers = [await one for one in waiting]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
        for answer in answers:
            if answer.status_code == 503:
                assert "which may be the cause" in answer.json()["error"]
                assert "retry-after" not in answer.headers
        assert fleet.server.front.num_retried == 0
        assert len(fleet.server.balancer.replicas) == 1
        assert (await fleet.generate("counter", 2)).status_code == 200, "the other replica goes on"
        fleet.launcher.hold.set()
        await fleet.wait_for(lambda: len(fleet.server.balancer.replicas) == 2)

    played(scenario, fleet_config(models[0] / "counter", models[0] / "gated"))


def test_a_request_that_has_not_reached_its_replica_is_given_to_another_one(models):
    async def scenario(fleet):
        fleet.launcher.hold.clear()
        for victim in list(fleet.replicas.values())[:1]:
            victim.die(silently=True)  # nobody is told, and there is no connection yet
        answers = await asyncio.gather(*(fleet.generate("counter", 3) for _ in range(6)))
        assert [answer.json()["output_0"] for answer in answers] == [[1, 2, 3]] * 6
        assert fleet.server.front.num_retried > 0
        fleet.launcher.hold.set()

    played(scenario, fleet_config(models[0] / "counter"))


def test_a_request_is_tried_again_where_a_connection_fails_and_its_replica_goes_on(models, gate):
    async def scenario(fleet):
        await connected(fleet)
        waiting = [asyncio.ensure_future(fleet.generate("gated", 3)) for _ in range(4)]
        await fleet.wait_for(lambda: sum(routed(fleet)) == 8)
        for replica in list(fleet.replicas.values())[:1]:
            for cable in replica.cables:
                cable.hang_up()
        await fleet.wait_for(lambda: sum(routed(fleet)) == 10)
        gate.touch()
        assert [(await one).json()["output_0"] for one in waiting] == [[1, 2, 3]] * 4
        assert fleet.server.front.num_retried == 2
        assert sorted(fleet.server.balancer.replicas) == [0, 1]

    played(scenario, fleet_config(models[0] / "counter", models[0] / "gated"))


def test_without_replicas_the_answer_is_503_until_there_are_some(models):
    async def scenario(fleet):
        fleet.launcher.hold.clear()
        for at in tuple(fleet.server.balancer.replicas):
            fleet.replicas[at].die()
            await fleet.wait_for(lambda at=at: at not in fleet.server.balancer.replicas)
        nobody = await fleet.generate("counter", 3)
        assert (nobody.status_code, "no replica" in nobody.json()["error"]) == (503, True)
        assert "retry-after" in nobody.headers
        assert (await fleet.client.get("/v2/health/ready")).status_code == 503
        assert (await fleet.client.get("/v2/health/live")).status_code == 200
        fleet.launcher.hold.set()
        await fleet.wait_for(lambda: len(fleet.server.balancer.replicas) == 2)
        assert (await fleet.generate("counter", 2)).status_code == 200

    played(scenario, fleet_config(models[0] / "counter"))


def test_sequences_of_a_dead_replica_end_with_an_error_that_says_so(models, gate):
    async def scenario(fleet):
        started = await fleet.generate("gated", 2, sequence_id=7, sequence_start=True)
        assert started.status_code == 200
        (at,) = [n for n, one in fleet.server.balancer.replicas.items() if one.num_sequences]
        chunk = asyncio.ensure_future(fleet.generate("gated", 3, sequence_id=7))
        behind = asyncio.ensure_future(fleet.generate("gated", 2, sequence_id=7))
        await fleet.wait_for(lambda: fleet.server.balancer.replicas[at].num_requests == 1)
        await asyncio.sleep(0)
        fleet.replicas[at].die()
        answers = await asyncio.gather(chunk, behind)
        assert sorted(answer.status_code for answer in answers) == [400, 503]
        assert all("begin anew" in answer.json()["error"].lower() for answer in answers)
        later = await fleet.generate("gated", 1, sequence_id=7)
        assert (later.status_code, "replica that held its state is gone" in later.json()["error"]) == (400, True)
        gate.touch()
        again = await fleet.generate("gated", 2, sequence_id=7, sequence_start=True, sequence_end=True)
        assert again.json()["output_0"] == [1, 2]

    played(scenario, fleet_config(models[0] / "gated"))


def test_a_stream_whose_replica_ends_gets_an_error_as_its_last_event(models, gate):
    async def scenario(fleet):
        events = []
        async with fleet.client.stream(
            "POST", "/v2/models/counter/generate_stream", json={"input_0": 90_000}
        ) as answer:
            async for line in answer.aiter_lines():
                if line:
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 1:
                    (at,) = [n for n, one in fleet.server.balancer.replicas.items() if one.num_requests]
                    fleet.replicas[at].die()
        assert events[0]["output_0"] == 1
        assert "has ended" in events[-1]["error"]

    played(scenario, fleet_config(models[0] / "counter"))


def test_a_websocket_is_carried_and_closed_with_the_reason_when_its_replica_ends(models):
    async def scenario(fleet):
        path = fleet.http.replace("http", "ws") + "/v2/models/scales/sequence"
        async with connect(path, proxy=None, compression=None) as socket:
            for chunk, total in (([1], 1), ([2, 3], 14)):
                await socket.send(json.dumps({"input_0": chunk}))
                assert json.loads(await socket.recv())["output_0"] == total
            (at,) = [n for n, one in fleet.server.balancer.replicas.items() if one.num_sequences]
            fleet.replicas[at].die()
            with pytest.raises(ConnectionClosedError) as closed:
                await socket.recv()
            assert (closed.value.rcvd.code, "replica" in closed.value.rcvd.reason) == (1011, True)
        await fleet.wait_for(lambda: fleet.server.balancer.num_sequences == 0)

    played(scenario, fleet_config(models[0] / "scales"))


def test_a_smaller_fleet_loses_no_request_and_no_sequence(models, gate):
    async def scenario(fleet):
        begun = [await fleet.generate("gated", 2, sequence_id=n, sequence_start=True) for n in (1, 2)]
        assert [one.status_code for one in begun] == [200, 200]
        waiting = [asyncio.ensure_future(fleet.generate("gated", 3)) for _ in range(6)]
        await fleet.wait_for(lambda: sum(routed(fleet)) == 8)
        fleet.server.fleet.resize(1)
        await fleet.wait_for(
            lambda: sorted(one.state for one in fleet.server.balancer.replicas.values()) == ["draining", "open"]
        )
        new = asyncio.ensure_future(fleet.generate("counter", 2))
        assert (await new).status_code == 200
        gate.touch()
        assert [(await one).status_code for one in waiting] == [200] * 6
        await fleet.wait_for(lambda: len(fleet.server.balancer.replicas) == 1)  # its sequence has been handed over
        ends = [await fleet.generate("gated", 1, sequence_id=n, sequence_end=True) for n in (1, 2)]
        assert [end.json()["output_0"] for end in ends] == [[3], [3]]

    played(scenario, fleet_config(models[0] / "counter", models[0] / "gated"))


def test_a_rolling_update_replaces_all_replicas_while_requests_are_answered(models):
    async def scenario(fleet):
        statuses, over = [], asyncio.Event()

        async def load():
            while not over.is_set():
                statuses.append((await fleet.generate("counter", 20)).status_code)

        loads = [asyncio.create_task(load()) for _ in range(4)]
        before = set(fleet.server.balancer.replicas)
        changed = msgspec.structs.replace(fleet.server.fleet.config, trace_steps=7)
        await fleet.server.update(msgspec.structs.replace(changed, fleet=FleetConfig(replicas=2)))
        over.set()
        await asyncio.gather(*loads)
        assert set(statuses) == {200}
        assert not before & set(fleet.server.balancer.replicas)
        assert [one.config.trace_steps for one in fleet.replicas.values()] == [7, 7]

    played(scenario, fleet_config(models[0] / "counter"))


def test_a_replica_that_leaves_answers_first_what_it_was_asked_about_itself(models, monkeypatch):
    async def scenario(fleet):
        call, may_go_on = Upstream.call, asyncio.Event()

        async def later(upstream, head, body=b""):
            if b"/config" in head:
                await may_go_on.wait()
            return await call(upstream, head, body)

        def is_idle(replica):
            looked_at.append(replica.number)
            return idle.fget(replica)

        idle, looked_at = Replica.idle, []
        monkeypatch.setattr(Replica, "idle", property(is_idle))
        monkeypatch.setattr(Upstream, "call", later)
        asked = asyncio.create_task(fleet.client.get("/v2/models/counter/config"))
        replicas = fleet.server.balancer.replicas
        await fleet.wait_for(lambda: any(one.num_requests for one in replicas.values()))
        (leaving,) = [one for one in replicas.values() if one.num_requests]
        updated = asyncio.create_task(fleet.server.update(fleet.server.fleet.config))
        await fleet.wait_for(lambda: looked_at.count(leaving.number) > 2)
        assert leaving.state == "draining"
        may_go_on.set()
        assert (await asked).status_code == 200
        await updated
        assert leaving.state == "lost"

    played(scenario, fleet_config(models[0] / "counter"))


def test_the_fleet_grows_and_shrinks_with_its_open_sequences(models):
    async def scenario(fleet):
        balancer = fleet.server.balancer
        for n in range(1, 7):
            await fleet.generate("scales", [1], sequence_id=n, sequence_start=True)
        await fleet.wait_for(lambda: sum(one.state == "open" for one in balancer.replicas.values()) == 3)
        for n in range(1, 7):
            await fleet.generate("scales", [1], sequence_id=n, sequence_end=True)
        await fleet.wait_for(lambda: len(balancer.replicas) == 1)

    rule = "sequences:target=2,least=1,most=3,every_s=0.02,cool_s=0"
    played(scenario, fleet_config(models[0] / "scales", fleet=FleetConfig(autoscale=rule)))


def test_sequences_of_two_keys_are_apart_and_replicas_know_no_client_key(models, tmp_path):
    keys = tmp_path / "keys"
    ann, bob = "a" * 20, "b" * 20
    keys.write_text(f"ann:{ann}\nbob:{bob}\n")

    async def scenario(fleet):
        assert (await fleet.generate("scales", [1])).status_code == 401
        totals = {}
        for number, key in ((1, ann), (2, bob)):
            fleet.client.headers["x-api-key"] = key
            await fleet.generate("scales", [number], sequence_id=1, sequence_start=True)
        for key in (ann, bob):
            fleet.client.headers["x-api-key"] = key
            answer = await fleet.generate("scales", [0], sequence_id=1, sequence_end=True)
            totals[key] = answer.json()["output_0"]
        assert totals == {ann: 1, bob: 4}
        assert not {ann, bob} & set(fleet.launcher.keys.values())
        assert set(fleet.launcher.keys) > {"ann", "bob"}

    config = fleet_config(models[0] / "scales")
    played(scenario, msgspec.structs.replace(config, auth=msgspec.structs.replace(config.auth, keys=str(keys))))


def test_what_a_client_gives_up_is_given_up_at_the_replica(models, gate):
    async def scenario(fleet):
        with pytest.raises(httpx.ReadTimeout):
            await fleet.client.post("/v2/models/gated/generate", json={"input_0": 3}, timeout=0.5)
        await fleet.wait_for(lambda: all(not one.num_requests for one in fleet.server.balancer.replicas.values()))
        assert fleet.server.balancer.waiting_s == 0
        gate.touch()

    played(scenario, fleet_config(models[0] / "gated", limits=Limits(drain_seconds=1)))


def test_keys_that_are_gone_count_no_more_at_once_and_new_ones_when_all_replicas_know_them(models, tmp_path):
    keys = tmp_path / "keys"
    ann, bob, cid = ("".join([letter] * 20) for letter in "abc")
    keys.write_text(f"ann:{ann}\n")
    base = fleet_config(models[0] / "scales", fleet=FleetConfig(replicas=1))
    config = msgspec.structs.replace(base, auth=msgspec.structs.replace(base.auth, keys=str(keys)))

    async def scenario(fleet):
        async def status(key):
            call = fleet.client.post(
                "/v2/models/scales/generate", json={"input_0": [1]}, headers={"Authorization": f"Bearer {key}"}
            )
            return (await call).status_code

        async def seen():
            return [await status(key) for key in (ann, bob, cid)]

        assert await seen() == [200, 401, 401]
        fleet.launcher.hold.clear()
        updates = []
        for text in (f"bob:{bob}\n", f"bob:{bob}\ncid:{cid}\n"):
            keys.write_text(text)
            updates.append(asyncio.ensure_future(fleet.server.update(config)))
            await asyncio.sleep(0)
            assert await seen() == [401, 401, 401], "no replica knows bob yet, though it is the second time"
        fleet.launcher.hold.set()
        await asyncio.gather(*updates)
        assert await seen() == [401, 200, 200]

    played(scenario, config)


def test_a_fleet_writes_texts_in_the_form_of_openais_api_at_once_and_as_events():
    parrot = Path(__file__).parents[1] / "server" / "parrot.py"

    async def scenario(fleet):
        asked = {"model": "parrot", "prompt": "ab.", "max_tokens": 9, "temperature": 0}
        answer = await fleet.client.post("/v1/completions", json=asked)
        assert answer.json()["choices"][0]["text"] == "ab."
        texts = []
        async with fleet.client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as events:
            async for line in events.aiter_lines():
                if line.startswith("data: {"):
                    texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
        assert "".join(texts) == "ab."
        refused = await fleet.client.post("/v1/completions", json={**asked, "model": "nobody"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "invalid_request_error")
        assert [model["id"] for model in (await fleet.client.get("/v1/models")).json()["data"]] == ["parrot"]

    played(scenario, fleet_config(parrot))
