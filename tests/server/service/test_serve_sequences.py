"""Sequences over the wire: tritonclient by HTTP and gRPC against a server that runs as a process."""

from __future__ import annotations

import asyncio
import json
import queue
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as http_aio
from served_models import Ahead, Scales
from server_process import LIMIT_S, read_head, request_bytes
from tritonclient.utils import InferenceServerException

import batchmaker as bm

LONG = 90_000
WORDS = [list(np.random.default_rng(seed).integers(0, 40, size=3 + 2 * seed)) for seed in range(12)]
ANN, BOB = "a" * 24, "b" * 24


@pytest.fixture(scope="module")
def server(serve, saved_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences")
    bm.save(Scales(), folder / "scales")
    config = folder / "server.toml"
    config.write_text("grpc_port = 0\n[limits]\nmax_sequences = 12\nsequence_idle_seconds = 3600")
    bm.save(Ahead(), folder / "ahead")
    return serve(
        "lstm:hidden=8,vocabulary_size=40,seed=1", saved_models, f"scales={folder / 'scales'}",
        f"ahead={folder / 'ahead'}", "--config", config,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_sequence_is_left_open(request):
    """After each test, none holds rows."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)
        server.wait_idle()


@pytest.fixture(params=["http", "grpc"])
def client(request, server) -> Iterator:
    """A client of either protocol."""
    module, address = {
        "http": (triton_http, server.address), "grpc": (triton_grpc, server.grpc_address),
    }[request.param]  # fmt: skip
    with module.InferenceServerClient(address) as made:
        made.module = module
        yield made


def tensor(module, values):
    made = module.InferInput("input_0", [len(values)], "INT64")
    made.set_data_from_numpy(np.array(values, np.int64))
    return made


def ask(client, model, values, name, *, start=False, end=False):
    """Send one chunk and return its answer as a list."""
    answer = client.infer(
        model, [tensor(client.module, values)], sequence_id=name, sequence_start=start, sequence_end=end
    )
    return answer.as_numpy("output_0").tolist()


def refused(client, *arguments, **marks) -> tuple[str, str]:
    """Status and message of a chunk that is refused."""
    with pytest.raises(InferenceServerException) as caught:
        ask(client, *arguments, **marks)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def chunks_of(words, seed):
    """The same words in chunks of 1 to 4."""
    sizes, rest = random.Random(seed), list(words)
    while rest:
        size = sizes.randint(1, 4)
        yield rest[:size]
        rest = rest[size:]


def whole_answers(server):
    return [server.post("/v2/models/lstm/generate", {"input_0": list(map(int, w))}).json["output_0"] for w in WORDS]


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_sequence_goes_on_where_it_was(client):
    assert ask(client, "counter", [3], "walk", start=True) == [1, 2, 3]
    assert ask(client, "counter", [2], "walk") == [4, 5]
    assert ask(client, "counter", [2], 7, start=True) == [1, 2]
    assert ask(client, "counter", [1], "walk", end=True) == [6]
    assert ask(client, "counter", [1], 7, end=True) == [3]
    assert ask(client, "counter", [4], 7, start=True, end=True) == [1, 2, 3, 4]
    assert client.infer("counter", [tensor(client.module, [2])]).as_numpy("output_0").tolist() == [1, 2]


def told(client, model, values, name, **parameters):
    """Send a chunk with parameters of any kind; return its answer's values, None without any, and its parameters."""
    inputs = [] if values is None else [tensor(client.module, values)]
    marks = {mark: parameters.pop(mark) for mark in ("sequence_start", "sequence_end") if mark in parameters}
    answer = client.infer(model, inputs, sequence_id=name, **marks, parameters=parameters)
    response = answer.get_response()
    if client.module is triton_http:
        return answer.as_numpy("output_0"), response.get("parameters", {})
    return answer.as_numpy("output_0"), {k: v.string_param for k, v in response.parameters.items()}


def test_a_sequence_goes_on_from_its_state_under_another_name_as_often_as_wanted(client):
    words = WORDS[7]
    _, said = told(client, "lstm", words[:4], "one", sequence_start=True, sequence_state=True)
    whole, nothing = told(client, "lstm", words[4:], "one", sequence_end=True)
    assert nothing == {}
    for name in ("two", 3, "one"):
        again, _ = told(client, "lstm", words[4:], name, sequence_start=True, sequence_state=said["sequence_state"])
        np.testing.assert_allclose(again, whole, atol=1e-5)
        ask(client, "lstm", [1], name, end=True)


def test_a_reset_lets_a_sequence_begin_again_in_place(client):
    assert ask(client, "counter", [3], "walk", start=True) == [1, 2, 3]
    values, _ = told(client, "counter", [2], "walk", sequence_reset=True)
    assert values.tolist() == [1, 2]
    values, _ = told(client, "counter", None, "walk", sequence_reset=True)
    assert values is None
    assert ask(client, "counter", [1], "walk", end=True) == [1]


def test_an_end_needs_no_chunk(client, server):
    ask(client, "counter", [3], "walk", start=True)
    values, _ = told(client, "counter", None, "walk", sequence_end=True)
    assert values is None
    status, message = refused(client, "counter", [1], "walk")
    assert status in ("400", "INVALID_ARGUMENT")
    assert "is not open" in message
    server.wait_for(lambda: server.metric("batchmaker_sequences_ended_total", model="counter", why="finished") >= 1)


def test_a_model_that_looks_ahead_answers_for_the_rest_at_the_end(server):
    ahead = "/v2/models/ahead/generate"

    def said(xs, **parameters):
        given = {} if xs is None else {"input_0": xs}
        return server.post(ahead, {**given, "parameters": {"sequence_id": 1, **parameters}}).json["output_0"]

    for last in (None, [16.0, 32.0]):
        assert said([1.0, 2.0, 4.0], sequence_start=True) == [3.0, 6.0]
        assert said([8.0]) == [12.0]
        assert said(last, sequence_end=True) == ([8.0] if last is None else [24.0, 48.0, 32.0])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sequence_state": "AAAA"}, "send it with sequence_start"),
        ({"sequence_state": "no base64!", "sequence_start": True}, "base64"),
        ({"sequence_state": "AAAA", "sequence_start": True}, "no state of a sequence, or they are damaged"),
        ({"sequence_state": True, "sequence_end": True}, "sequence_end ends it"),
        ({"sequence_state": 7}, "must be true or false"),
        ({"sequence_reset": 1}, "must be true or false"),
        ({"sequence_id": 0, "sequence_reset": True}, "need a sequence_id"),
    ],
)
def test_what_is_wrong_about_a_state_or_a_reset_is_said(server, parameters, message):
    answer = server.post("/v2/models/lstm/generate", {"input_0": [1], "parameters": {"sequence_id": 9, **parameters}})
    assert answer.status == 400
    assert message in answer.json["error"]


@pytest.mark.parametrize("module", [http_aio, grpc_aio])
def test_sequences_in_the_same_batches_give_what_each_gives_whole(server, module):
    """One task for each sequence, all at once, so that their chunks meet in the batches as they come."""
    address = server.address if module is http_aio else server.grpc_address

    async def one(client, number, words):
        chunks = list(chunks_of(words, number))
        for at, chunk in enumerate(chunks):
            answer = await client.infer(
                "lstm", [tensor(module, chunk)], sequence_id=number + 1, sequence_start=at == 0,
                sequence_end=at == len(chunks) - 1,
            )  # fmt: skip
        return answer.as_numpy("output_0")

    async def all_at_once():
        async with module.InferenceServerClient(address) as client:
            return await asyncio.gather(*(one(client, number, words) for number, words in enumerate(WORDS)))

    for got, expected in zip(asyncio.run(all_at_once()), whole_answers(server), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_stream_carries_the_chunks_of_many_sequences_at_once(server):
    """All is sent before anything is read, and each chunk is answered after the one before it."""
    received: queue.Queue = queue.Queue()
    waiting = {number: list(chunks_of(words, number)) for number, words in enumerate(WORDS)}
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        first, count = set(waiting), 0
        while waiting:
            for number in list(waiting):
                chunk = waiting[number].pop(0)
                client.async_stream_infer(
                    "lstm", [tensor(triton_grpc, chunk)], request_id=str(number), sequence_id=f"s{number}",
                    sequence_start=number in first, sequence_end=not waiting[number],
                )  # fmt: skip
                first.discard(number)
                count += 1
                if not waiting[number]:
                    del waiting[number]
        last = {}
        for _ in range(count):
            result, error = received.get(timeout=LIMIT_S)
            assert error is None
            last[int(result.get_response().id)] = result.as_numpy("output_0")
        client.stop_stream()
    for number, expected in enumerate(whole_answers(server)):
        np.testing.assert_allclose(last[number], expected, atol=1e-5)


def test_a_chunk_streams_its_values(server):
    def parts(content):
        events = server.post("/v2/models/counter/generate_stream", content).content.decode().split("\n\n")
        return [json.loads(event.removeprefix("data: "))["output_0"] for event in events if event]

    assert parts({"input_0": 3, "parameters": {"sequence_id": "a", "sequence_start": True}}) == [1, 2, 3]
    assert parts({"input_0": 2, "parameters": {"sequence_id": "a", "sequence_end": True}}) == [4, 5]
    received: queue.Queue = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        for n, marks in ((2, {"sequence_start": True}), (3, {"sequence_end": True})):
            client.async_stream_infer(
                "counter", [tensor(triton_grpc, [n])], request_id=f"{n} numbers", sequence_id=9,
                enable_empty_final_response=True, **marks,
            )  # fmt: skip
        got = [received.get(timeout=LIMIT_S) for _ in range(2 + 3 + 2)]
        client.stop_stream()
    assert [error for _, error in got] == [None] * 7
    values: dict[str, list[int]] = {"2 numbers": [], "3 numbers": []}  # parts of two requests may leave in any order
    for result, _ in got:
        part = result.as_numpy("output_0")
        values[result.get_response().id] += [] if part is None else part.tolist()
    assert values == {"2 numbers": [1, 2], "3 numbers": [3, 4, 5]}


def test_it_is_told_which_models_take_sequences(server, client):
    assert "sequence" in server.get("/v2").json["extensions"]
    if client.module is triton_http:
        with_state, without = client.get_model_config("lstm"), client.get_model_config("sums")
    else:
        with_state, without = (client.get_model_config(name, as_json=True)["config"] for name in ("lstm", "sums"))
    assert with_state["parameters"] == {
        "max_sequence_idle_microseconds": {"string_value": "3600000000"}, "max_chunks_ahead": {"string_value": "16"},
    }  # fmt: skip
    assert "parameters" not in without
    assert "sequence_batching" not in with_state  # or perf_analyzer would send nothing but sequences


# --- what goes wrong --------------------------------------------------------------------------------------------------

INVALID, UNAVAILABLE = ("400", "INVALID_ARGUMENT"), ("503", "UNAVAILABLE")


def test_a_request_of_no_open_sequence_is_told_what_to_do(client):
    status, said = refused(client, "counter", [1], 5)
    assert status in INVALID
    assert "sequence 5 is not open" in said
    assert "Send sequence_start with its first request" in said


def test_a_model_without_state_says_so(server):
    parameters = {"sequence_id": 1, "sequence_start": True}
    answer = server.post("/v2/models/sums/generate", {"rows": [[1, 2]], "start": [0, 0], "parameters": parameters})
    assert answer.status == 400
    assert "keeps nothing between requests" in answer.json["error"]


def test_beginning_anew_ends_what_was_open_under_that_name(client):
    ask(client, "counter", [3], 5, start=True)
    assert ask(client, "counter", [1], 5, start=True) == [1]
    assert ask(client, "counter", [1], 5, end=True) == [2]


@pytest.mark.parametrize(("model", "bad", "statuses"), [("lstm", 40, INVALID), ("scales", 99, ("500", "INTERNAL"))])
def test_a_chunk_that_fails_ends_its_sequence_and_no_other(client, model, bad, statuses):
    ask(client, model, [1], 5, start=True)
    ask(client, model, [1], 6, start=True)
    status, said = refused(client, model, [bad], 5)
    assert status in statuses
    assert "sequence 5 has ended with it: begin anew with sequence_start" in said
    assert refused(client, model, [1], 5)[0] in INVALID
    ask(client, model, [1], 6, end=True)


def test_a_chunk_that_is_refused_before_it_is_computed_ends_its_sequence_too(client):
    ask(client, "counter", [3], 5, start=True)
    status, said = refused(client, "counter", [1, 2], 5)  # not the shape of an input
    assert status in INVALID
    assert "sequence 5 has ended with it: begin anew with sequence_start" in said
    assert "sequence 5 is not open" in refused(client, "counter", [1], 5)[1]


@pytest.mark.parametrize(
    ("route", "content"),
    [
        ("generate", {"input_1": 1}), ("generate", {"input_0": "x"}), ("generate_stream", {}),
        ("infer", {"inputs": [{"name": "input_0", "shape": [1], "datatype": "INT64", "data": ["x"]}]}),
        ("infer", {"inputs": "none"}),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_read_ends_the_sequence_that_it_names(server, route, content):
    named = {"parameters": {"sequence_id": "s"}}
    started = {"input_0": 3, "parameters": {"sequence_id": "s", "sequence_start": True}}
    assert server.post("/v2/models/counter/generate", started).json["output_0"] == [1, 2, 3]
    wrong = server.post(f"/v2/models/counter/{route}", {**content, **named})
    assert wrong.status == 400
    assert "sequence 's' has ended with it" in wrong.json["error"]
    assert server.post("/v2/models/counter/generate", {"input_0": 1, **named}).status == 400


def test_what_was_sent_behind_a_chunk_that_is_refused_in_a_stream_is_not_computed(server):
    """Another client begins one of the same name in between: the stream's chunks do not go on with that."""
    received: queue.Queue = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: received.put((result, error)))

        def answered(values, **marks):
            client.async_stream_infer("counter", [tensor(triton_grpc, values)], sequence_id=9, **marks)
            result, error = received.get(timeout=LIMIT_S)
            return str(error) if error is not None else result.as_numpy("output_0").tolist()

        assert answered([3], sequence_start=True) == [1, 2, 3]
        assert "sequence 9 has ended with it" in answered([1, 2])
        content = {"input_0": 1, "parameters": {"sequence_id": 9, "sequence_start": True}}
        assert server.post("/v2/models/counter/generate", content).json["output_0"] == [1]
        assert "sent before in this stream has no result" in answered([1])
        assert "sent before in this stream has no result" in answered([1], sequence_end=True)
        client.stop_stream()
    content = {"input_0": 1, "parameters": {"sequence_id": 9, "sequence_end": True}}
    assert server.post("/v2/models/counter/generate", content).json["output_0"] == [2]


CONFLICT = ("409", "ALREADY_EXISTS")


@pytest.mark.parametrize("name", [7, "seven"])
@pytest.mark.parametrize("others", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_two_clients_that_choose_the_same_name_do_not_mix(server, client, others, name):
    address = server.address if others is triton_http else server.grpc_address
    with others.InferenceServerClient(address) as other:
        if others is triton_grpc and client.module is triton_grpc:
            address = address.replace("127.0.0.1", "localhost")  # tritonclient shares connections of one address
            other = others.InferenceServerClient(address)
        other.module = others
        assert ask(client, "counter", [5], name, start=True)[-1] == 5
        status, said = refused(other, "counter", [100], name, start=True)
        assert status in CONFLICT
        assert "Take another sequence_id" in said
        assert refused(other, "counter", [7], name)[0] in (*CONFLICT, *INVALID)
        assert refused(other, "counter", [7], name, end=True)[0] in (*CONFLICT, *INVALID)
        assert ask(client, "counter", [7], name)[-1] == 12
        assert ask(other, "counter", [100], "another", start=True, end=True)[-1] == 100
        assert ask(client, "counter", [1], name, end=True) == [13]
        assert ask(other, "counter", [100], name, start=True)[-1] == 100
        assert ask(other, "counter", [1], name, end=True) == [101]


def test_chunks_of_open_sequences_are_taken_where_no_other_request_is(serve, gated, tmp_path):
    """The model has as many requests in flight as it takes: those outside sequences, and new sequences, are refused."""
    folder, gate = gated
    (tmp_path / "server.toml").write_text("[limits]\nmax_in_flight = 2\nhung_seconds = 1e6")
    server = serve(folder, "--config", tmp_path / "server.toml")
    path = "/v2/models/gated/generate"

    def content(n, name, **marks):
        return {"input_0": n, "parameters": {"sequence_id": name, **marks}}

    for name in range(1, 5):
        assert server.post(path, content(2, name, sequence_start=True)).status == 200
    waiting = [server.connect() for _ in range(2 + 4 * 3)]
    for number, connection in enumerate(waiting):
        body = {"input_0": 3} if number < 2 else content(3, 1 + number % 4)
        connection.sendall(request_bytes(path, body))
        server.wait_for(lambda number=number: server.metric("nv_inference_pending_request_count") == number + 1)
    assert server.post(path, {"input_0": 1}).status == 503
    assert server.post(path, content(1, 9, sequence_start=True)).status == 503
    gate.touch()
    assert all(read_head(connection).startswith(b"HTTP/1.1 200") for connection in waiting)
    for name in range(1, 5):
        assert server.post(path, content(1, name, sequence_end=True)).json["output_0"] == [12]


def test_what_was_sent_behind_a_chunk_that_fails_fails_with_it(server):
    received: queue.Queue = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        for n, marks in ((LONG, {"sequence_start": True, "timeout": 20_000}), (1, {}), (1, {"sequence_end": True})):
            client.async_stream_infer("counter", [tensor(triton_grpc, [n])], sequence_id=9, **marks)
        errors = [str(received.get(timeout=LIMIT_S)[1]) for _ in range(3)]
        client.stop_stream()
    assert "deadline passed" in errors[0]
    assert all("sequence_start" in error for error in errors)


def test_as_many_as_may_be_are_open_and_no_more(server, client):
    for name in range(1, 13):
        ask(client, "counter", [1], name, start=True)
    assert server.metric("batchmaker_open_sequences", model="counter") == 12
    assert server.get("/v2/live?model=counter").json["sequences"] == 12
    status, said = refused(client, "counter", [1], 13, start=True)
    assert status in UNAVAILABLE
    assert "as many sequences are open as may be" in said
    raw = server.post(
        "/v2/models/counter/generate", {"input_0": 1, "parameters": {"sequence_id": 13, "sequence_start": True}}
    )
    assert (raw.status, raw.headers["retry-after"]) == (503, "1")
    assert ask(client, "counter", [1], 12, end=True) == [2]
    assert ask(client, "counter", [1], 13, start=True) == [1]
    for name in (*range(1, 12), 13):
        ask(client, "counter", [1], name, end=True)


# --- clients that leave, models that leave ----------------------------------------------------------------------------


def test_a_client_that_leaves_within_a_chunk_ends_its_sequence(server):
    begun = server.metric("batchmaker_sequences_total", model="counter")
    with server.connect() as connection:
        parameters = {"sequence_id": "gone", "sequence_start": True}
        connection.sendall(
            request_bytes("/v2/models/counter/generate_stream", {"input_0": LONG, "parameters": parameters})
        )
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        assert server.metric("batchmaker_open_sequences", model="counter") == 1
    server.wait_for(lambda: server.metric("batchmaker_open_sequences", model="counter") == 0)
    assert server.metric("batchmaker_sequences_total", model="counter") == begun + 1


def test_who_waits_behind_a_client_that_leaves_is_told(server):
    def content(n, **marks):
        return {"input_0": n, "parameters": {"sequence_id": "shared", **marks}}

    path = "/v2/models/counter/generate"
    with server.connect() as leaving, server.connect() as waiting:
        leaving.sendall(request_bytes(path, content(LONG, sequence_start=True)))
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
        waiting.sendall(request_bytes(path, content(1)))
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 2)
        leaving.close()
        received = read_head(waiting)
    assert received.startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_a_client_that_never_comes_back_leaves_no_rows(serve, saved_models, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text("[limits]\nmax_sequences = 1\nsequence_idle_seconds = 1")
    server = serve(saved_models, "--config", config)
    for _ in range(2):  # the place is free again
        content = {"input_0": 2, "parameters": {"sequence_id": 1, "sequence_start": True}}
        assert server.post("/v2/models/counter/generate", content).json["output_0"] == [1, 2]
        server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)
    answer = server.post("/v2/models/counter/generate", {"input_0": 2, "parameters": {"sequence_id": 1}})
    assert answer.status == 400
    assert "nothing came for 1 seconds" in answer.json["error"]


def test_unloading_ends_the_sequences_of_a_model(client):
    ask(client, "counter", [3], 5, start=True)
    client.unload_model("counter")
    assert refused(client, "counter", [1], 5)[0] in ("404", "NOT_FOUND")
    client.load_model("counter")
    status, said = refused(client, "counter", [1], 5)
    assert status in INVALID
    assert "is not open" in said


@pytest.mark.slow
def test_after_sigterm_open_sequences_go_on_until_they_end_and_none_begins(serve, gated):
    folder, gate = gated
    server = serve(folder, "--drain-seconds", 100 * LIMIT_S)

    def content(n, name, **marks):
        return {"input_0": n, "parameters": {"sequence_id": name, **marks}}

    path = "/v2/models/gated/generate"
    for name in ("idle", "busy"):
        assert server.post(path, content(2, name, sequence_start=True)).status == 200
    accepted = [server.connect() for _ in range(2)]
    accepted[0].sendall(request_bytes(path, content(3, "busy")))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    accepted[1].sendall(request_bytes(path, content(1, "busy")))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 2)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
    assert server.post(path, content(1, "new", sequence_start=True)).status == 503
    assert server.post(path, {"input_0": 1}).status == 503
    gate.touch()
    answers = []
    for connection in accepted:
        received = read_head(connection)
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        answers.append(json.loads(received.partition(b"\r\n\r\n")[2])["output_0"])
    assert answers == [[3, 4, 5], [6]]
    assert server.post(path, content(1, "busy", sequence_end=True)).json["output_0"] == [7]
    assert server.process.poll() is None
    assert server.post(path, content(1, "idle")).json["output_0"] == [3]
    assert server.post(path, content(1, "idle", sequence_end=True)).json["output_0"] == [4]
    assert server.process.wait(LIMIT_S) == 0


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_has_sequences_of_its_own_and_so_many(serve, saved_models, tmp_path):
    (tmp_path / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\n")
    config = tmp_path / "server.toml"
    config.write_text('grpc_port = 0\n[auth]\nkeys = "keys"\n[limits]\nmax_key_sequences = 2')
    server = serve(saved_models, "--config", config, "--drain-seconds", 0)  # its sequences are left open

    def post(key, n, name, **marks):
        content = {"input_0": n, "parameters": {"sequence_id": name, **marks}}
        return server.post("/v2/models/counter/generate", content, X_API_Key=key)

    assert post(ANN, 3, "s", sequence_start=True).json["output_0"] == [1, 2, 3]
    assert post(BOB, 1, "s").status == 400
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        for key, expected in ((BOB, None), (ANN, [4])):
            marks = {"sequence_id": "s", "headers": {"x-api-key": key}}
            if expected is None:
                with pytest.raises(InferenceServerException, match="is not open"):
                    client.infer("counter", [tensor(triton_grpc, [1])], **marks)
            else:
                answer = client.infer("counter", [tensor(triton_grpc, [1])], **marks)
                assert answer.as_numpy("output_0").tolist() == expected
    assert post(BOB, 1, "s", sequence_start=True).json["output_0"] == [1]
    assert post(ANN, 1, "t", sequence_start=True).status == 200
    full = post(ANN, 1, "u", sequence_start=True)
    assert (full.status, full.headers["retry-after"]) == (503, "1")
    assert "of this API key" in full.json["error"]
    assert post(BOB, 1, "t", sequence_start=True).status == 200


def test_a_model_that_takes_sequences_alone_says_so_and_refuses_other_requests(serve, tmp_path):
    config = "[[models]]\nsource = 'lstm'\noptions = {hidden = 4, vocabulary_size = 9}\nsequences_only = true"
    (tmp_path / "server.toml").write_text(config)
    server = serve("--config", tmp_path / "server.toml", "--grpc-port", 0)
    described = server.get("/v2/models/lstm/config").json
    assert described["sequence_batching"] == {"max_sequence_idle_microseconds": 60_000_000}
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        batching = client.get_model_config("lstm").config.sequence_batching
    assert batching.max_sequence_idle_microseconds == 60_000_000
    refused = server.post("/v2/models/lstm/generate", {"input_0": [1]})
    assert refused.status == 400
    assert "takes chunks of sequences alone: send sequence_id" in refused.json["error"]
    for marks in ({"sequence_start": True}, {"sequence_end": True}):
        body = {"input_0": [1, 2], "parameters": {"sequence_id": 7, **marks}}
        assert server.post("/v2/models/lstm/generate", body).status == 200


@pytest.mark.slow
def test_a_model_that_takes_sequences_alone_has_no_policy_of_whole_requests(serve, tmp_path):
    config = "[[models]]\nsource = 'lstm'\noptions = {hidden = 4, vocabulary_size = 9}\nsequences_only = true"
    (tmp_path / "server.toml").write_text(config + "\npolicy = 'padded'")
    with pytest.raises(AssertionError, match="sequences_only: it has no unfold_chunk, or its policy batches"):
        serve("--config", tmp_path / "server.toml")
