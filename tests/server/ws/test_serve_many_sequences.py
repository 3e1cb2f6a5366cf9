"""Many sequences over one WebSocket, and what a sequence is told besides chunks, against a server that runs."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequence_messages import BEGIN, END, GIVE_UP, HEAD, NOTHING, RESET, STATE, VALUES, Answer, frame, read
from server_process import LIMIT_S, RunningServer
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from batchmaker.client import Client, ServerError
from waiting import until

AHEAD = 4
LONG = 20_000


@pytest.fixture(scope="module")
def server(serve, saved_models, tmp_path_factory):
    config = tmp_path_factory.mktemp("settings") / "server.toml"
    config.write_text(
        f"""
        [limits]
        max_sequences = 40
        max_chunks_ahead = {AHEAD}
        max_body_bytes = 100_000
        sequence_idle_seconds = 3600
        """
    )
    return serve("lstm:hidden=8,vocabulary_size=40,seed=1", saved_models, "--config", config)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """After each test, no connection is open and no row is held."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        for name in ("batchmaker_open_websockets", "batchmaker_open_sequences"):
            server.wait_for(lambda name=name: server.metric(name) == 0)
        server.wait_idle()


def connected(server: RunningServer, model: str, path: str = "sequences?answers=binary") -> ClientConnection:
    return connect(
        f"ws://{server.address}/v2/models/{model}/{path}", proxy=None, compression=None, ping_interval=None,
        open_timeout=LIMIT_S, close_timeout=LIMIT_S,
    )  # fmt: skip


def told(connection: ClientConnection, count: int) -> list[Answer]:
    found: list[Answer] = []
    while len(found) < count:
        found += read(connection.recv(LIMIT_S))
    assert len(found) == count
    return found


def closed(connection: ClientConnection) -> tuple[int | None, str | None]:
    with suppress(ConnectionClosed):
        for _ in connection:
            pass
    return connection.close_code, connection.close_reason


# --- chunks and answers -----------------------------------------------------------------------------------------------


def test_sequences_that_share_a_connection_give_what_each_gives_whole(server):
    words = [np.random.default_rng(seed).integers(0, 40, size=3 + 2 * seed) for seed in range(12)]
    path = "/v2/models/lstm/generate"
    whole = [server.post(path, {"input_0": each.tolist()}).json["output_0"] for each in words]
    frames = {number: np.array_split(each, 1 + len(each) // 3) for number, each in enumerate(words)}
    order, waiting = random.Random(1), dict.fromkeys(frames, 0)
    begun: set[int] = set()
    last: dict[int, Any] = {}
    with connected(server, "lstm") as connection:
        while any(frames.values()) or any(waiting.values()):
            ready = [number for number, left in frames.items() if left and waiting[number] < AHEAD]
            if not ready or (any(waiting.values()) and order.random() < 0.2):
                for number, _, kind, values in read(connection.recv(LIMIT_S), "<f4"):
                    assert kind == VALUES
                    waiting[number] -= 1
                    last[number] = values
                continue
            number = order.choice(ready)
            chunk = frames[number].pop(0)
            flags = (0 if number in begun else BEGIN) | (0 if frames[number] else END)
            begun.add(number)
            connection.send(frame(number, chunk.astype("<i8").tobytes(), flags))
            waiting[number] += 1
    for number, expected in enumerate(whole):
        np.testing.assert_allclose(last[number], expected, atol=1e-5)


STEP = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["chunk"] * 6 + ["json", "begin", "end", "end with", "reset", "reset with", "wrong", "give up"]),
    st.integers(0, 3),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=30), together=st.booleans(), cut=st.integers(1, 50))
def test_whatever_sequences_are_sent_each_answers_for_itself_and_in_order(server, steps, together, cut):
    """Against the same by hand: `count` goes up with each chunk, from 0 at the begin and at a reset."""
    counts: dict[int, int | None] = dict.fromkeys(range(4))  # None: not open
    expected: dict[int, list[Any]] = {number: [] for number in range(4)}
    silent: set[int] = set()  # they failed: what comes before a new begin has no answer
    waiting: dict[int, int] = dict.fromkeys(range(4), 0)
    got: dict[int, list[Any]] = {number: [] for number in range(4)}

    def receive(connection, count):
        for number, flags, kind, held in told(connection, count):
            got[number].append((flags, kind, held))
            waiting[number] -= 1

    with connected(server, "counter") as connection:
        pending: list[bytes] = []
        for number, what, n in steps:
            count = counts[number]
            if (
                waiting[number] >= AHEAD - 1
                or (count is None and waiting[number])
                or (what in ("end", "end with", "wrong", "give up") and count is not None)
            ):
                if pending:
                    connection.send(b"".join(pending))
                    pending = []
                receive(connection, sum(waiting.values()))
            flags = BEGIN if count is None and what not in ("give up", "wrong") else 0
            if count is None and number in silent and not flags:
                connection.send(frame(number, n, 0))
                continue
            start = 0 if count is None or "reset" in what else count
            values = list(range(start + 1, start + n + 1))
            match what:
                case "chunk" | "json":
                    expected[number].append((0, VALUES, values))
                    counts[number] = start + n
                    sent = frame(number, n, flags)
                case "end with":
                    expected[number].append((END, VALUES, values))
                    counts[number] = None
                    sent = frame(number, n, flags | END)
                case "reset with":
                    expected[number].append((0, VALUES, values))
                    counts[number] = n
                    sent = frame(number, n, flags | RESET)
                case "begin":
                    if count is not None:
                        continue
                    expected[number].append((0, NOTHING, b""))
                    counts[number] = 0
                    sent = frame(number, None, BEGIN)
                case "end":
                    expected[number].append((END, NOTHING, b""))
                    counts[number] = None
                    sent = frame(number, None, flags | END)
                case "reset":
                    expected[number].append((0, NOTHING, b""))
                    counts[number] = 0
                    sent = frame(number, None, flags | RESET)
                case "give up":
                    expected[number].append((END, NOTHING, b""))
                    counts[number] = None
                    sent = frame(number, None, GIVE_UP)
                case "wrong":
                    expected[number].append((0, -1, 400))
                    counts[number] = None
                    silent.add(number)
                    sent = frame(number, b"12345", flags)
            silent -= {number} if flags else set()
            waiting[number] += 1
            if what == "json":
                text = {"sequence": number, "begin": bool(flags), "chunk": {"input_0": n}}
                if pending:
                    connection.send(b"".join(pending))
                    pending = []
                connection.send(json.dumps(text))
            elif together:
                pending.append(sent)
            else:
                connection.send([sent[place : place + cut] for place in range(0, len(sent), cut)])  # fragments
        if pending:
            connection.send(b"".join(pending))
        receive(connection, sum(waiting.values()))
    assert got == expected


def test_a_thousand_frames_in_one_message_are_answered(server):
    """Of eight sequences, within their windows: a message of frames that only begin and give up."""
    with connected(server, "counter") as connection:
        frames = [frame(number, None, flags) for number in range(500) for flags in (BEGIN, GIVE_UP)]
        connection.send(b"".join(frames))
        answers = told(connection, 1000)
        assert [answer[0] for answer in answers] == [number for number in range(500) for _ in range(2)]
        connection.send(frame(1, 2, BEGIN))
        assert told(connection, 1) == [(1, 0, VALUES, [1, 2])]


def test_answers_may_be_json(server):
    with connected(server, "counter", "sequences") as connection:
        connection.send(json.dumps({"sequence": 7, "begin": True, "chunk": {"input_0": 2, "id": "a"}}))
        assert json.loads(connection.recv(LIMIT_S)) == {
            "sequence": 7,
            "answer": {"model_name": "counter", "model_version": "1", "id": "a", "output_0": [1, 2]},
        }
        connection.send(frame(7, 1))
        assert json.loads(connection.recv(LIMIT_S))["answer"]["output_0"] == [3]
        connection.send(json.dumps({"sequence": 7, "reset": True}))
        assert json.loads(connection.recv(LIMIT_S)) == {"sequence": 7}
        connection.send(json.dumps({"sequence": 7, "chunk": {"input_0": 1}, "end": True}))
        assert json.loads(connection.recv(LIMIT_S))["answer"]["output_0"] == [1]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_ends_its_sequence_alone(server):
    with connected(server, "counter") as connection:
        connection.send(frame(1, 2, BEGIN) + frame(2, 1, BEGIN) + frame(1, b"123") + frame(1, 1) + frame(2, 1))
        answers = told(connection, 4)
        assert [answer for answer in answers if answer[0] == 1] == [(1, 0, VALUES, [1, 2]), (1, 0, -1, 400)]
        assert [answer for answer in answers if answer[0] == 2] == [(2, 0, VALUES, [1]), (2, 0, VALUES, [2])]
        connection.send(frame(1, 1) + frame(1, 3, BEGIN))  # the first belongs to what has ended
        assert told(connection, 1) == [(1, 0, VALUES, [1, 2, 3])]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (frame(5, 1), 400),  # not open
        (frame(5, 1, BEGIN) + frame(5, 1, BEGIN), 409),
        (frame(5, 1, BEGIN | END) + frame(5, 1, BEGIN), 409),  # its last answer has not come
        (frame(5, 1, BEGIN | END) + frame(5, 1), 400),
        (frame(5, 1, BEGIN) + frame(5), 400),  # neither content nor flags
        (frame(5, 1, BEGIN) + frame(5, b"", RESET, STATE), 400),
        (frame(5, b"no state", BEGIN, STATE), 400),
        (frame(5, 1000, BEGIN) + frame(5, 1) * AHEAD, 429),  # beyond the window
        (b'{"sequence":5,"begin":true,"chunk":{"x":1}}', 400),
        (b'{"sequence":5,"begin":true,"chunk":{"input_0":1,"parameters":{"sequence_id":3}}}', 400),
    ],
)
def test_what_is_wrong_with_one_sequence_is_told_to_it(server, sent, status):
    with connected(server, "counter") as connection:
        connection.send(sent.decode() if sent.startswith(b"{") else sent)
        found: list[Answer] = []
        while not any(kind == -1 for _, _, kind, _ in found):
            found += read(connection.recv(LIMIT_S))
        assert [answer for answer in found if answer[2] == -1] == [(5, 0, -1, status)]
        connection.send(frame(6, 2, BEGIN))
        while found[-1][0] != 6:  # what was sent before the error is answered, too
            found += read(connection.recv(LIMIT_S))
        assert found[-1] == (6, 0, VALUES, [1, 2])


@pytest.mark.parametrize(
    "wrong",
    [
        b"123", HEAD.pack(1, 1, 0, 0, 9) + bytes(8), HEAD.pack(1, 1, 0, 0, 0xFFFFFFFF), HEAD.pack(1, 16, 0, 0, 0),
        HEAD.pack(1, 1, 3, 0, 0), HEAD.pack(1, 1, 0, 7, 0), HEAD.pack(1, 1, NOTHING, 0, 1) + b"1",
        "no json", '{"sequence": -1}', '{"sequence": 4294967296}', '{"begin": true}', '{"sequence": 1, "x": 2}',
        '{"sequence": 1, "state": "???"}', '{"id": "a"}', '{"state": true, "end": true}', '{"open": {}}',
    ],
)  # fmt: skip
def test_a_message_that_is_no_frames_ends_the_connection_and_says_where(server, wrong):
    with connected(server, "counter") as connection:
        connection.send(frame(2, 1, BEGIN))
        assert told(connection, 1) == [(2, 0, VALUES, [1])]
        connection.send(wrong)
        code, reason = closed(connection)
        assert (code, "no frame" in reason) == (1007, True)


def test_no_more_sequences_than_may_be_open(server):
    with connected(server, "counter") as connection:
        connection.send(b"".join(frame(number, 1, BEGIN) for number in range(41)))
        answers = told(connection, 41)
        assert [answer for answer in answers if answer[2] == -1] == [(40, 0, -1, 503)]


def test_a_slow_sequence_holds_up_no_other(server):
    with connected(server, "counter") as connection:
        connection.send(frame(1, LONG, BEGIN) + frame(2, 1, BEGIN))
        assert told(connection, 1) == [(2, 0, VALUES, [1])]
        for count in (2, 3, 4):
            connection.send(frame(2, 1))
            assert told(connection, 1) == [(2, 0, VALUES, [count])]


@pytest.mark.slow
def test_sequences_to_which_nothing_comes_end_and_say_so(serve, saved_models, tmp_path):
    (tmp_path / "server.toml").write_text("[limits]\nsequence_idle_seconds = 0.5")
    server = serve(saved_models, "--config", tmp_path / "server.toml")
    with connected(server, "counter") as connection:
        connection.send(frame(1, 1, BEGIN) + frame(2, None, BEGIN))
        assert {answer[0] for answer in told(connection, 2)} == {1, 2}
        assert sorted(told(connection, 2)) == [(1, 0, -1, 408), (2, 0, -1, 408)]
        assert closed(connection) == (1008, "no sequence was open for as long as one may be idle")
    assert server.metric("batchmaker_sequences_ended_total", model="counter", why="idle") == 2


def test_a_client_that_vanishes_within_a_message_frees_all_its_sequences(server):
    connection = connected(server, "counter")
    connection.send(b"".join(frame(number, LONG, BEGIN) for number in range(10)))
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 10)
    connection.socket.sendall(b"\x82\xfe\x01\x00")  # the head of a message of which no more comes
    connection.socket.shutdown(socket.SHUT_RDWR)  # to close it alone ends nothing while the client's thread reads it
    connection.socket.close()


def test_a_model_without_sequences_is_refused_before_the_handshake(server):
    answer = server.get("/v2/models/counter/sequences")
    assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
    with pytest.raises(Exception, match="400"):
        connected(server, "sums")


# --- the state of a connection ----------------------------------------------------------------------------------------


def state_of(connection: ClientConnection) -> tuple[list[Answer], dict[str, Any]]:
    """The answers that were due, and the state of all sequences after them."""
    connection.send(json.dumps({"state": True, "id": "a"}))
    found: list[Answer] = []
    while '"id"' not in (message := str(said := connection.recv(LIMIT_S))):
        found += read(said)
    return found, json.loads(message)


def test_all_sequences_go_on_over_another_connection_at_once(server):
    """Frames that wait are answered first; one that ends has ended, and one that failed stays silent."""
    with connected(server, "counter") as connection:
        connection.send(frame(1, 2, BEGIN) + frame(2, 1, BEGIN) + frame(3, 1, BEGIN) + frame(4, None, BEGIN))
        connection.send(frame(1, 3) + frame(2, b"123") + frame(3, 500, END))
        found, said = state_of(connection)
        assert sorted(answer[:3] for answer in found) == [
            (1, 0, VALUES), (1, 0, VALUES), (2, 0, -1), (2, 0, VALUES), (3, 0, VALUES), (3, END, VALUES),
            (4, 0, NOTHING),
        ]  # fmt: skip
        assert (said["id"], said["sequences"]) == ("a", 2)
        connection.send(frame(1, 1))  # here they go on, too
        assert told(connection, 1) == [(1, 0, VALUES, [6])]
    with connected(server, "counter") as connection:
        connection.send(json.dumps({"open": {"state": said["state"]}}))
        assert json.loads(connection.recv(LIMIT_S)) == {"open": True}
        connection.send(frame(2, 1) + frame(1, 2) + frame(3, 1, BEGIN) + frame(4, 1) + frame(2, 1, BEGIN | END))
        assert sorted(told(connection, 4)) == [
            (1, 0, VALUES, [6, 7]), (2, END, VALUES, [1]), (3, 0, VALUES, [1]), (4, 0, VALUES, [1])
        ]  # fmt: skip


def test_a_connection_without_sequences_has_a_state(server):
    with connected(server, "counter") as connection:
        assert state_of(connection) == ([], {"id": "a", "state": "", "sequences": 0})
        connection.send('{"open": {"state": ""}}')
        assert json.loads(connection.recv(LIMIT_S)) == {"open": True}


def test_a_state_that_cannot_be_moved_is_an_error_that_ends_nothing(server):
    with connected(server, "rooted") as connection:
        connection.send(frame(1, 2, BEGIN) + frame(2, 6, BEGIN))
        found, said = state_of(connection)
        assert sorted(found) == [(1, 0, VALUES, [1, 2]), (2, 0, VALUES, [1, 2, 3, 4, 5, 6])]
        assert (said["status"], "cannot be moved" in said["error"]) == (400, True)
        connection.send(frame(2, b"", 0, STATE))
        said = json.loads(connection.recv(LIMIT_S))
        assert (said["sequence"], said["end"], said["status"]) == (2, False, 400)
        connection.send(frame(1, 1) + frame(2, 1))
        assert sorted(told(connection, 2)) == [(1, 0, VALUES, [3]), (2, 0, VALUES, [7])]


def test_the_client_goes_on_with_a_sequence_whose_state_cannot_be_moved(server):
    async def use(client):
        async with client.open_sequences("rooted") as sequences, sequences.open() as one:
            await one.submit(np.array([6]))
            with pytest.raises(ServerError, match="cannot be moved"):
                await one.state()
            assert (await one.submit(np.array([1])))["output_0"] == [7]

    with_client(server, use)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (frame(1, 5, BEGIN), 1007),
        (frame(1, None, GIVE_UP), 1007),
        (b"123", 1007),
        (frame(2, None, END) + frame(1, b"no state", BEGIN, STATE), 1011),
    ],
)
def test_what_is_no_state_of_a_connection_ends_it(server, wrong, code):
    with connected(server, "counter") as connection:
        connection.send(json.dumps({"open": {"state": base64.b64encode(wrong).decode()}}))
        if code == 1011:
            assert json.loads(connection.recv(LIMIT_S))["status"] == 400
        assert closed(connection)[0] == code


def test_a_state_of_a_connection_comes_before_all_sequences(server):
    with connected(server, "counter") as connection:
        connection.send(frame(1, 1, BEGIN))
        assert told(connection, 1) == [(1, 0, VALUES, [1])]
        connection.send('{"open": {"state": ""}}')
        assert closed(connection) == (1007, "'open' must come before all sequences")


# --- end, reset and state over a connection of one sequence -----------------------------------------------------------


def asked(connection: ClientConnection, message: Any) -> Any:
    connection.send(message if isinstance(message, bytes) else json.dumps(message))
    return json.loads(connection.recv(LIMIT_S))


def test_one_sequence_is_reset_moved_and_finished(server):
    with connected(server, "counter", "sequence") as connection:
        assert asked(connection, np.int64(2).tobytes())["output_0"] == [1, 2]
        state = asked(connection, {"state": True})["state"]
        assert asked(connection, {"reset": True}) == {"reset": True}
        assert asked(connection, {"input_0": 1})["output_0"] == [1]
        assert asked(connection, {"input_0": 2, "parameters": {"sequence_end": True}})["output_0"] == [2, 3]
        assert closed(connection) == (1000, "the sequence was finished")
    with connected(server, "counter", "sequence") as connection:
        assert asked(connection, {"open": {"state": state}}) == {"open": True}
        assert asked(connection, np.int64(1).tobytes())["output_0"] == [3]
        assert asked(connection, {"end": True}) == {"end": True}
        assert closed(connection)[0] == 1000
    assert server.metric("batchmaker_sequences_ended_total", model="counter", why="finished") >= 2


@pytest.mark.parametrize(
    "wrong",
    [{"end": 1}, {"end": True, "reset": True}, {"open": {"state": "AAAA"}}, {"open": {}}, {"state": "x"}, {"reset": 0}],
)
def test_a_control_that_is_wrong_ends_the_sequence(server, wrong):
    with connected(server, "counter", "sequence") as connection:
        assert asked(connection, wrong)["status"] == 400
        assert closed(connection)[0] == 1011


def test_a_state_comes_before_everything_else(server):
    with connected(server, "counter", "sequence") as connection:
        state = asked(connection, {"state": True})["state"]
        answer = asked(connection, {"open": {"state": state}})
        assert (answer["status"], "must be the first message" in answer["error"]) == (400, True)


# --- the package's own client -----------------------------------------------------------------------------------------


def with_client(server: RunningServer, use: Any) -> Any:
    async def run() -> Any:
        async with Client(f"http://{server.address}") as client:
            return await use(client)

    return asyncio.run(run())


def test_the_client_carries_many_sequences(server):
    words = [np.random.default_rng(seed).integers(0, 40, size=3 + 2 * seed) for seed in range(12)]

    async def one(sequences, each):
        async with sequences.open() as sequence:
            *chunks, last = np.array_split(each, 1 + len(each) // 3)
            *_, whole = await asyncio.gather(*map(sequence.submit, chunks), sequence.finish(last))
            return whole["output_0"]

    async def use(client):
        async with client.open_sequences("lstm", version="1") as sequences:
            return await asyncio.gather(*(one(sequences, each) for each in words))

    path = "/v2/models/lstm/generate"
    for got, each in zip(with_client(server, use), words, strict=True):
        np.testing.assert_allclose(got, server.post(path, {"input_0": each.tolist()}).json["output_0"], atol=1e-5)


@pytest.mark.parametrize("parameters", [{}, {"output": "output_0"}])
def test_the_client_moves_resets_and_finishes_sequences(server, parameters):
    async def use(client):
        async with client.open_sequences("counter", parameters=parameters) as sequences:
            async with sequences.open() as one, sequences.open() as other:
                assert (await one.submit({"input_0": 2}))["output_0"] == [1, 2]
                assert (await other.submit(np.array([1])))["output_0"] == [1]
                state = await one.state()
                await one.reset()
                assert (await one.submit(np.array([1])))["output_0"] == [1]
                assert await one.finish() is None
                with pytest.raises(ServerError, match="the sequence has ended"):
                    await one.submit(np.array([1]))
                with pytest.raises(ServerError, match="got 3 bytes") as caught:
                    await other.submit(b"123")
                assert caught.value.status == 400
                with pytest.raises(ServerError, match="got 3 bytes"):
                    await other.submit(np.array([1]))
            async with sequences.open(state=state) as moved:
                assert (await moved.submit(np.array([1])))["output_0"] == [3]
                slow = asyncio.create_task(moved.submit(np.array([LONG])))
                await until(lambda: server.metric("nv_inference_pending_request_count"))
            with pytest.raises(ServerError, match="it was closed"):
                await slow
        async with client.open_sequence("counter", state=state) as alone:
            assert (await alone.submit(np.array([1])))["output_0"] == [3]
            again = await alone.state()
            await alone.reset()
            assert (await alone.finish(np.array(2)))["output_0"] == [1, 2]
        async with client.open_sequence("counter", state=again) as alone:
            assert (await alone.submit(np.array([1])))["output_0"] == [4]
            assert await alone.finish() is None

    with_client(server, use)
