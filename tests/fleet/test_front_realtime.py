"""Sessions of OpenAI's realtime API through the front, asked by OpenAI's own client."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import openai
import pytest
import scribe
from fleets_in_process import LIMIT_S, RunningFleet, fleet_config, played
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from batchmaker.fleet.handover import hand_over

WRITER = scribe.__file__
SOUND = (3000 * np.random.default_rng(0).standard_normal(8000)).astype(np.int16)


@pytest.fixture(scope="module")
def text() -> str:
    return scribe.build().plain(SOUND.astype(np.float32) / 32768)


def client_of(fleet: RunningFleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.http}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


async def written(connection: Any) -> str:
    """Say an utterance; return what was written of it."""
    for piece in np.array_split(SOUND, 9):
        await connection.input_audio_buffer.append(audio=base64.b64encode(piece.tobytes()).decode())
    await connection.input_audio_buffer.commit()
    while (event := await connection.recv()).type != "conversation.item.input_audio_transcription.completed":
        assert event.type != "error", event
    return event.transcript


def test_live_sound_is_written_through_the_front_and_goes_on_while_its_replica_leaves(text):
    async def scenario(fleet):
        balancer = fleet.server.balancer
        async with client_of(fleet) as client, client.realtime.connect(model="scribe") as connection:
            assert (await connection.recv()).type == "session.created"
            assert await written(connection) == text
            (leaving,) = [replica for replica in balancer.replicas.values() if replica.num_sequences]
            balancer.drain(leaving)
            assert await hand_over(balancer, leaving) == 0
            assert await written(connection) == text
            async with client.realtime.connect(model="scribe") as other:
                assert (await other.recv()).type == "session.created"
                assert [replica.num_sequences for replica in balancer.replicas.values()] == [1, 1]
        await fleet.wait_for(lambda: balancer.num_sequences == 0)

    assert text
    played(scenario, fleet_config(WRITER))


def test_a_session_whose_replica_has_ended_is_closed_with_the_reason(text):
    async def scenario(fleet):
        address = fleet.http.replace("http", "ws") + "/v1/realtime"
        async with connect(f"{address}?model=scribe", proxy=None, subprotocols=["realtime"]) as connection:
            assert connection.subprotocol == "realtime"
            await connection.recv()
            (ends,) = [one.number for one in fleet.server.balancer.replicas.values() if one.num_sequences]
            fleet.launcher.started[ends].die()
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
            reason = "the replica that had this connection has ended: connect anew"
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1011, reason)

    played(scenario, fleet_config(WRITER))


def test_a_session_that_a_replica_refuses_is_refused_in_its_words():
    async def scenario(fleet):
        address = fleet.http.replace("http", "ws") + "/v1/realtime"
        for query, status, why in (("model=nobody", 404, "nobody"), ("intent=speech", 400, "intent 'speech'")):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{address}?{query}", proxy=None)
            assert refused.value.response.status_code == status
            assert why in openai_message(refused.value.response.body)
        assert (await fleet.client.get("/v1/realtime?model=scribe")).status_code == 426
        assert fleet.server.balancer.num_sequences == 0

    played(scenario, fleet_config(WRITER))


def openai_message(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"]
