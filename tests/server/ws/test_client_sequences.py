"""The package's own client of sequences against a server that runs as a process."""

from __future__ import annotations

import array
import asyncio

import numpy as np
import pytest

from waiting import until

pytest.importorskip("httpx", reason="needs httpx, of the extra `client`")

from batchmaker.client import Client, ServerError
from batchmaker.errors import OptionError

KEY = "k" * 24
LONG = 90_000
WORDS = [np.random.default_rng(seed).integers(0, 40, size=3 + 2 * seed) for seed in range(12)]


@pytest.fixture(scope="module")
def server(serve, saved_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    (folder / "keys").write_text(f"ann:{KEY}\n")
    (folder / "server.toml").write_text("[limits]\nmax_chunks_ahead = 2\nsequence_idle_seconds = 3600")
    server = serve(
        "lstm:hidden=8,vocabulary_size=40,seed=1", saved_models, "--api-keys", folder / "keys",
        "--config", folder / "server.toml",
    )  # fmt: skip
    server.key = KEY
    return server


@pytest.fixture(autouse=True)
def no_connection_is_left_open(server):
    yield
    server.wait_for(lambda: server.metric("batchmaker_open_websockets") == 0)
    server.wait_idle()


def with_client(server, use, key=KEY):
    async def run():
        async with Client(f"http://{server.address}", key=key) as client:
            return await use(client)

    return asyncio.run(run())


def test_sequences_in_the_same_batches_give_what_each_gives_whole(server):
    """One connection each, all at once, and each submits its chunks before the first is answered."""

    async def one(client, words):
        async with client.open_sequence("lstm", version="1") as sequence:
            chunks = np.array_split(words, 1 + len(words) // 3)
            return (await asyncio.gather(*map(sequence.submit, chunks)))[-1]["output_0"]

    async def all_at_once(client):
        return await asyncio.gather(*(one(client, words) for words in WORDS))

    path = "/v2/models/lstm/generate"
    whole = [server.post(path, {"input_0": words.tolist()}, X_API_Key=KEY).json["output_0"] for words in WORDS]
    for got, expected in zip(with_client(server, all_at_once), whole, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    "chunk",
    [
        {"input_0": 3},
        np.array([3]),
        np.int64(3),
        array.array("q", [3]),
        (3).to_bytes(8, "little"),
        memoryview(np.array([3])),
    ],
    ids=lambda chunk: type(chunk).__name__,
)
def test_a_chunk_is_a_dict_an_array_or_bytes(server, chunk):
    async def use(client):
        async with client.open_sequence("counter", parameters={"deadline_ms": 60_000.0, "priority": 1}) as sequence:
            await sequence.submit({"input_0": 2}, parameters={"deadline_ms": 60_000})
            return await sequence.submit(chunk)

    assert with_client(server, use) == {"output_0": [3, 4, 5]}


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (np.array([3.0]), "the model takes INT64"), (np.array([3], np.int32), "of 4 bytes"),
        ([3], "got list"), (np.array([3], ">i8"), "convert it"),
    ],
)  # fmt: skip
def test_values_of_another_datatype_are_not_sent(server, chunk, said):
    async def use(client):
        async with client.open_sequence("lstm") as sequence:
            with pytest.raises(OptionError, match=said):
                await sequence.submit(chunk)
            return await sequence.submit(np.array([3]))

    assert len(with_client(server, use)["output_0"]) == 8


def test_parameters_of_bytes_are_refused(server):
    async def use(client):
        async with client.open_sequence("counter") as sequence:
            with pytest.raises(OptionError, match="give them to open_sequence"):
                await sequence.submit(np.array([3]), parameters={"deadline_ms": 5})

    with_client(server, use)


def test_an_error_is_that_of_its_chunk_and_the_last_answer(server):
    async def use(client):
        async with client.open_sequence("counter") as sequence:
            answers = await asyncio.gather(
                *(sequence.submit(chunk) for chunk in ({"input_0": 2}, {"x": 1}, np.array([1, 2]), {"input_0": 1})),
                return_exceptions=True,
            )
            return answers

    first, unknown, *behind = with_client(server, use)
    assert first == {"output_0": [1, 2]}
    assert unknown.status == 400
    assert "unknown key 'x'" in str(unknown)
    assert all("the connection is over" in str(error) for error in behind)


@pytest.mark.slow
def test_who_no_longer_waits_for_an_answer_takes_nobody_elses(server):
    async def use(client):
        async with client.open_sequence("counter") as sequence:
            slow = asyncio.create_task(sequence.submit(np.array([20_000])))
            await until(lambda: sequence.num_waiting)
            slow.cancel()
            return await sequence.submit(np.array([2]))

    assert with_client(server, use) == {"output_0": [20_001, 20_002]}


def test_refusals_of_the_server_are_told(server):
    async def one(client, model="counter", **options):
        async with client.open_sequence(model, **options):
            pass

    for key, arguments, options, status, said in (
        (KEY, ("nobody",), {}, 404, "there is no model 'nobody'"),
        (KEY, ("sums",), {}, 400, "keeps nothing between requests"),
        (KEY, (), {"parameters": {"deadline": 5}}, 400, "Did you mean 'deadline_ms'"),
        (None, (), {}, 401, "no API key was sent"),
    ):
        with pytest.raises(ServerError, match=said) as caught:
            with_client(server, lambda client, a=arguments, o=options: one(client, *a, **o), key)
        assert caught.value.status == status


def test_the_end_of_a_connection_is_told_to_all_who_wait(server):
    async def use(client):
        async with client.open_sequence("counter") as sequence:
            submitted = [
                sequence.submit({"input_0": LONG}, parameters={"deadline_ms": 5}),
                sequence.submit({"input_0": 1}),
            ]
            answers = await asyncio.gather(*submitted, return_exceptions=True)
            with pytest.raises(ServerError, match="the connection is over") as caught:
                await sequence.submit({"input_0": 1})
            return [*answers, caught.value]

    late, behind, after = with_client(server, use)
    assert (late.status, behind.status, after.status) == (504, None, None)
    assert "the sequence has ended: a chunk has no answer" in str(behind)
    assert "1011" in str(after)


def test_leaving_gives_up_what_is_not_answered(server):
    async def use(client):
        async with client.open_sequence("counter") as sequence:
            submitted = asyncio.create_task(sequence.submit({"input_0": LONG}))
            await until(lambda: sequence.num_waiting)
        with pytest.raises(ServerError, match="the connection is over"):
            await submitted

    with_client(server, use)


def test_a_server_that_is_not_there_is_an_error_of_the_same_kind():
    async def use():
        async with Client("http://127.0.0.1:1") as client, client.open_sequence("m"):
            pass

    with pytest.raises(ServerError, match="cannot be reached"):
        asyncio.run(use())
