"""One connection for all small calls to a replica: a real server at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fleets_in_process import LIMIT_S, Cable, fleet_config

from batchmaker.fleet.shared_upstream import SharedUpstream
from batchmaker.fleet.upstream import NoAnswerError, Upstream, UpstreamAnswer
from batchmaker.server.access.auth import FRONT
from batchmaker.server.http.shared_connection import PROTOCOL
from batchmaker.server.thread import ServerThread

KEY, ANNS = "the key of the fleet itself", "a key for calls of Ann"
LONG = 90_000
"""Steps of a request that is not done before it is given up."""

HEAD = b"GET / HTTP/1.1\r\nhost: replica\r\nx-api-key: %s\r\nconnection: upgrade\r\nupgrade: " + PROTOCOL + b"\r\n\r\n"


class Replica:
    """A running server, and the ways to it."""

    def __init__(self, thread: ServerThread, cable: Cable, at: tuple[str, int]) -> None:
        self.thread, self.cable, self.at = thread, cable, at
        self.shared = SharedUpstream(*at, lambda: KEY)
        self.http = Upstream(*at)

    def generate(self, model: str, given: object, key: str = ANNS) -> Awaitable[UpstreamAnswer]:
        body = json.dumps({"input_0": given}).encode()
        return self.shared.call(b"/v2/models/%s/generate" % model.encode(), [(b"x-api-key", key.encode())], body)

    async def has_pending(self, model: str, number: int) -> None:
        """Wait until so many requests for a model are in flight at the server."""
        ask = b"GET /metrics HTTP/1.1\r\nhost: replica\r\nx-api-key: %s\r\n\r\n" % KEY.encode()
        begin, found = f'nv_inference_pending_request_count{{model="{model}"', -1.0
        while found != number:
            lines = (await self.http.call(ask)).body.decode().splitlines()
            (found,) = (float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin))


@contextlib.asynccontextmanager
async def serving(*models: object) -> AsyncIterator[Replica]:
    thread = ServerThread(fleet_config(*models), {FRONT: KEY, "ann": ANNS})
    address = (await asyncio.to_thread(thread.start))[0]
    host, _, port = address.removeprefix("http://").rpartition(":")
    cable = Cable(host, int(port))
    replica = Replica(thread, cable, await cable.open())
    try:
        yield replica
    finally:
        replica.shared.close()
        replica.http.close()
        cable.cut()
        await cable.over()
        thread.stop()
        await asyncio.to_thread(thread.join)


def played(scenario: Callable[[Replica], Awaitable[Any]], *models: object) -> Any:
    async def play() -> Any:
        async with serving(*models) as replica, asyncio.timeout(LIMIT_S):
            return await scenario(replica)

    return asyncio.run(play())


@pytest.fixture
def gate(models):
    models[1].unlink(missing_ok=True)
    yield models[1]
    models[1].touch()


def test_many_calls_share_a_connection_and_each_gets_its_own_answer(models):
    async def scenario(replica):
        answers = await asyncio.gather(*(replica.generate("scales", [n % 9, 1]) for n in range(50)))
        assert [json.loads(answer.body)["output_0"] for answer in answers] == [(n % 9) ** 2 + 1 for n in range(50)]
        assert replica.cable.num_connections == 1

    played(scenario, models[0])


def test_an_answer_does_not_wait_for_those_of_earlier_calls(models, gate):
    async def scenario(replica):
        slow = asyncio.ensure_future(replica.generate("gated", 3))
        assert (await replica.generate("scales", [2])).status == 200
        assert not slow.done()
        gate.touch()
        assert json.loads((await slow).body)["output_0"]

    played(scenario, models[0])


def test_errors_are_those_of_a_call_over_http(models):
    async def scenario(replica):
        wrong = await replica.generate("scales", "text")
        assert (wrong.status, "input_0" in json.loads(wrong.body)["error"]) == (400, True)
        assert (await replica.generate("nothing", 1)).status == 404
        assert (await replica.generate("scales", [1], "nobody's key at all")).status == 401
        nowhere = await replica.shared.call(b"/v2/nowhere%20at?all", [(b"x-api-key", ANNS.encode())], b"")
        assert (nowhere.status, "/v2/nowhere at" in json.loads(nowhere.body)["error"]) == (404, True)
        assert dict(nowhere.headers)[b"content-type"] == b"application/json"

    played(scenario, models[0])


def test_who_no_longer_waits_gives_the_request_up(models):
    async def scenario(replica):
        waiting = [asyncio.ensure_future(replica.generate("counter", LONG)) for _ in range(3)]
        await replica.has_pending("counter", 3)
        waiting[1].cancel()
        await replica.has_pending("counter", 2)
        assert not waiting[0].done()
        assert not waiting[2].done()
        assert (await replica.generate("scales", [2])).status == 200

    played(scenario, models[0])


def test_the_end_of_the_connection_is_told_to_all_who_wait_and_ends_their_requests(models):
    async def scenario(replica):
        waiting = [asyncio.ensure_future(replica.generate("counter", LONG)) for _ in range(3)]
        await replica.has_pending("counter", 3)
        replica.shared.close()
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, NoAnswerError)
        await replica.has_pending("counter", 0)
        with pytest.raises(NoAnswerError):
            await replica.generate("scales", [1])

    played(scenario, models[0])


def test_a_connection_that_was_lost_is_made_anew(models):
    async def scenario(replica):
        assert (await replica.generate("scales", [1])).status == 200
        replica.cable.hang_up()
        with contextlib.suppress(NoAnswerError):
            await replica.generate("scales", [1])
        assert (await replica.generate("scales", [1])).status == 200
        assert replica.cable.num_connections == 2

    played(scenario, models[0])


def test_a_connection_that_ends_while_its_first_call_is_on_its_way_is_no_answer():
    """The replica says yes and is gone: a call that waited for the connection must not wait for its answer."""

    async def scenario():
        async def agree_and_go(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(agree_and_go, "127.0.0.1", 0) as server, asyncio.timeout(LIMIT_S):
            shared = SharedUpstream(*server.sockets[0].getsockname(), lambda: KEY)
            answers = await asyncio.gather(*(shared.call(b"/", [], b"") for _ in range(4)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [NoAnswerError] * 4

    asyncio.run(scenario())


def test_a_server_that_ends_answers_what_it_has_accepted(models, gate):
    async def scenario(replica):
        waiting = asyncio.ensure_future(replica.generate("gated", 3))
        await replica.has_pending("gated", 1)
        replica.thread.stop()
        while (answer := await replica.generate("scales", [1])).status == 200:
            pass
        assert (answer.status, "shutting down" in json.loads(answer.body)["error"]) == (503, True)
        assert not waiting.done()
        gate.touch()
        assert (await waiting).status == 200
        await asyncio.to_thread(replica.thread.join)
        with pytest.raises(NoAnswerError):
            await replica.generate("scales", [1])

    played(scenario, models[0])


def test_only_the_front_may_share_a_connection(models):
    async def scenario(replica):
        replica.shared = SharedUpstream(*replica.at, lambda: ANNS)
        with pytest.raises(NoAnswerError):
            await replica.generate("scales", [1])
        for key in (ANNS.encode(), b"wrong"):
            reader, writer = await asyncio.open_connection(*replica.at)
            writer.write(HEAD % key)
            assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
            writer.close()

    played(scenario, models[0])


def test_what_is_no_frame_ends_its_own_connection_only(models):
    async def scenario(replica):
        assert (await replica.generate("scales", [1])).status == 200
        for nonsense in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1"):
            reader, writer = await asyncio.open_connection(*replica.at)
            writer.write(HEAD % KEY.encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            writer.write(nonsense)
            assert await reader.read() == b""
            writer.close()
        assert (await replica.generate("scales", [2])).status == 200

    played(scenario, models[0])
