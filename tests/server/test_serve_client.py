"""The package's own client of streams against a server that runs as a process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

pytest.importorskip("httpx", reason="needs httpx, of the extra `client`")

from batchmaker.client import Client, ServerError

KEY = "k" * 24
LONG = 90_000


@pytest.fixture(scope="module")
def server(serve, saved_models, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ann:{KEY}\n")
    server = serve("seq2seq:hidden=8,vocabulary_size=40,seed=1", saved_models, "--api-keys", keys)
    server.key = KEY
    return server


def with_client(server, use, key=KEY):
    async def run():
        async with Client(f"http://{server.address}", key=key) as client:
            return await use(client)

    return asyncio.run(run())


def test_words_of_many_translations_come_as_they_are_decoded(server):
    sources = [[3 + n, 4, 5 + n] for n in range(8)]

    async def words(client, source):
        inputs = {"source": source, "words": 6}
        return [part["output_0"] async for part in client.stream("seq2seq", inputs, parameters={"deadline_ms": 6e4})]

    async def all_at_once(client):
        return await asyncio.gather(*(words(client, source) for source in sources))

    path = "/v2/models/seq2seq/generate"
    whole = [server.post(path, {"source": s, "words": 6}, X_API_Key=KEY).json["output_0"] for s in sources]
    assert with_client(server, all_at_once) == whole


def test_chunks_of_a_sequence_stream(server):
    async def use(client):
        got = []
        for n, mark in ((2, "sequence_start"), (3, "sequence_end")):
            parameters = {"sequence_id": "walk", mark: True}
            parts = client.stream("counter", {"input_0": n}, version="1", parameters=parameters)
            got.extend([part["output_0"] async for part in parts])
        return got

    assert with_client(server, use) == [1, 2, 3, 4, 5]


def test_leaving_early_gives_the_request_up(server):
    async def use(client):
        async with aclosing(client.stream("counter", {"input_0": LONG})) as values:
            return await anext(values)

    assert with_client(server, use) == {"output_0": 1}
    server.wait_for(lambda: server.metric("nv_inference_request_failure", reason="CANCELED") == 1)


def test_errors_of_the_server_are_told(server):
    async def one(client, model="counter", content=None):
        return [part async for part in client.stream(model, content or {"input_0": 2})]

    for key, arguments, status, said in (
        (KEY, ("nobody",), 404, "there is no model 'nobody'"),
        (KEY, ("counter", {"x": 1}), 400, "unknown key 'x'"),
        (None, (), 401, "no API key was sent"),
    ):
        with pytest.raises(ServerError, match=said) as caught:
            with_client(server, lambda client, a=arguments: one(client, *a), key)
        assert caught.value.status == status


def test_a_server_that_is_not_there_is_an_error_of_the_same_kind(server):
    async def use():
        async with Client("http://127.0.0.1:1") as client:
            return [part async for part in client.stream("m", {})]

    with pytest.raises(ServerError, match="cannot be reached"):
        asyncio.run(use())
