"""gRPC clients, unmodified, against a server that runs as a process; what they are answered is what HTTP answers."""

from __future__ import annotations

import asyncio
import queue
import re
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from server_process import LIMIT_S
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

LONG = 90_000
SERVICE = "inference.GRPCInferenceService"
SMALL = [f"{name}:hidden=8,vocabulary_size=40,seed=1" for name in ("lstm", "seq2seq", "treelstm")]


@pytest.fixture(scope="module")
def server(serve, saved_models):
    return serve(*SMALL, saved_models, "--grpc-port", 0, "--max-body-mb", 1, "--max-in-flight", 80)


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


def tensor(name, values, datatype="INT64", *, module=triton):
    array = np.array(values, {"INT64": np.int64, "FP32": np.float32}[datatype])
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def count_to(n, module=triton):
    return [tensor("input_0", [n], module=module)]


def code(caught) -> str:
    return caught.value.status().removeprefix("StatusCode.")


@pytest.fixture
def stream(client):
    """Open a stream of a client; what comes is put into the queue that is returned, as (id, values, final, error)."""
    received: queue.Queue = queue.Queue()

    def note(result, error):
        if error is not None:
            received.put((None, None, None, str(error)))
            return
        response = result.get_response()
        values = result.as_numpy("output_0")
        final = response.parameters["triton_final_response"].bool_param
        received.put((response.id, None if values is None else values.tolist(), final, None))

    client.start_stream(note)
    yield received
    client.stop_stream(cancel_requests=True)


# --- tritonclient -----------------------------------------------------------------------------------------------------


def test_a_client_finds_the_server_and_its_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("lstm", "1")
    assert not client.is_model_ready("lstm", "2")
    assert not client.is_model_ready("nobody")
    assert set(client.get_server_metadata().extensions) == {
        "parameters", "schedule_policy", "sequence", "statistics", "model_repository", "model_configuration",
    }  # fmt: skip
    metadata = client.get_model_metadata("treelstm")
    assert {(i.name, i.datatype, tuple(i.shape)) for i in metadata.inputs} == {
        ("words", "INT64", (-1,)), ("children", "INT64", (-1, 2)),
    }  # fmt: skip
    config = client.get_model_config("seq2seq", as_json=True)["config"]
    assert config["name"] == "seq2seq"
    assert config["input"][1] == {"name": "words", "data_type": "TYPE_INT64", "dims": ["1"], "optional": True}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("lstm", {"input_0": [3, 1, 4, 1, 5]}),
        ("seq2seq", {"source": [3, 4]}),
        ("seq2seq", {"source": [3, 4], "words": [5]}),
        ("treelstm", {"words": [3, 1, 4], "children": [[0, 1], [3, 2]]}),
        ("counter", {"input_0": [6]}),
    ],
)
def test_an_answer_is_the_one_that_http_gives(server, client, name, inputs):
    with triton_http.InferenceServerClient(server.address) as other:
        expected = other.infer(name, [tensor(*item, module=triton_http) for item in inputs.items()])
    answer = client.infer(name, [tensor(*item) for item in inputs.items()], request_id="r-1")
    np.testing.assert_array_equal(answer.as_numpy("output_0"), expected.as_numpy("output_0"))
    response = answer.get_response()
    assert (response.model_name, response.model_version, response.id) == (name, "1", "r-1")


def test_only_the_outputs_that_are_asked_for_come(client):
    inputs = [tensor("rows", [[1, 2], [3, 4]], "FP32"), tensor("start", [10, 20], "FP32")]
    answer = client.infer("sums", inputs)
    assert answer.as_numpy("total").tolist() == [14, 26]
    assert answer.as_numpy("steps").tolist() == [[11, 22], [14, 26]]
    only = client.infer("sums", inputs, outputs=[triton.InferRequestedOutput("steps")])
    assert only.as_numpy("total") is None
    with pytest.raises(triton.InferenceServerException, match="named twice") as caught:
        client.infer("sums", inputs, outputs=[triton.InferRequestedOutput("steps")] * 2)
    assert code(caught) == "INVALID_ARGUMENT"


def test_tensors_may_be_sent_as_values(channel):
    asked = service_pb2.ModelInferRequest(model_name="counter")
    asked.inputs.add(name="input_0", datatype="INT32", shape=[1], contents={"int_contents": [3]})
    answer = call(channel, "ModelInfer", asked, service_pb2.ModelInferResponse)
    assert np.frombuffer(answer.raw_output_contents[0], "<i8").tolist() == [1, 2, 3]


def test_bf16_is_taken_as_it_is(channel):
    asked = service_pb2.ModelInferRequest(model_name="sums", raw_input_contents=[b"\x80\x3f\x00\xc0", b"\0" * 4])
    asked.inputs.add(name="rows", datatype="BF16", shape=[1, 2])
    asked.inputs.add(name="start", datatype="BF16", shape=[2])
    asked.outputs.add(name="total")
    answer = call(channel, "ModelInfer", asked, service_pb2.ModelInferResponse)
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [1.0, -2.0]


def call(channel, method, asked, answers):
    made = channel.unary_unary(f"/{SERVICE}/{method}", type(asked).SerializeToString, answers.FromString)
    return made(asked, timeout=LIMIT_S)


def test_asynchronous_calls_of_the_synchronous_client_work(client):
    answers: queue.Queue = queue.Queue()
    for n in range(1, 9):
        client.async_infer("counter", count_to(n), lambda result, error: answers.put((result, error)))
    got = [answers.get(timeout=LIMIT_S) for _ in range(8)]
    assert [error for _, error in got] == [None] * 8
    assert sorted(result.as_numpy("output_0").tolist()[-1] for result, _ in got) == list(range(1, 9))


def test_many_requests_at_once_each_get_their_own_answer(server):
    async def all_at_once():
        async with triton_aio.InferenceServerClient(server.grpc_address) as client:
            calls = [client.infer("counter", count_to(1 + n % 7, triton_aio)) for n in range(64)]
            return [len(answer.as_numpy("output_0")) for answer in await asyncio.gather(*calls)]

    assert asyncio.run(all_at_once()) == [1 + n % 7 for n in range(64)]


def test_statistics_and_metrics_grow_with_every_request(server, client):
    def counts():
        (entry,) = client.get_inference_statistics("lstm").model_stats
        stats = entry.inference_stats
        return entry.inference_count, stats.success.count, server.metric("nv_inference_request_success", model="lstm")

    before = counts()
    client.infer("lstm", [tensor("input_0", [1])])
    assert counts() == tuple(count + 1 for count in before)
    everyone = client.get_inference_statistics().model_stats
    assert {entry.name for entry in everyone} == {"lstm", "seq2seq", "treelstm", "counter", "rooted", "sums"}


def test_models_are_unloaded_and_loaded_while_others_serve(client):
    client.unload_model("sums")
    assert not client.is_model_ready("sums")
    states = {line.name: line.state for line in client.get_model_repository_index().models}
    assert (states["sums"], states["lstm"]) == ("UNAVAILABLE", "READY")
    assert client.infer("lstm", [tensor("input_0", [1])]).as_numpy("output_0").shape == (8,)
    client.load_model("sums")
    assert client.is_model_ready("sums")
    with pytest.raises(InferenceServerException, match="takes no parameters") as caught:
        client.load_model("sums", config="{}")
    assert code(caught) == "UNIMPLEMENTED"


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs", "status", "said"),
    [
        ("nobody", [tensor("x", [1])], "NOT_FOUND", "there is no model 'nobody'"),
        ("lstm", [tensor("x", [1])], "INVALID_ARGUMENT", "unknown input 'x'; the inputs are 'input_0'"),
        ("lstm", [tensor("input_0", [[1]])], "INVALID_ARGUMENT", r"got shape \[1, 1\], expected \[-1\]"),
        ("lstm", [tensor("input_0", [1.5], "FP32")], "INVALID_ARGUMENT", "got FP32, expected INT64"),
        ("lstm", [tensor("input_0", [40])], "INVALID_ARGUMENT", "token 40 at position 0 is outside the vocabulary"),
        ("sums", [tensor("rows", [[1, 2]], "FP32")], "INVALID_ARGUMENT", "input 'start' is missing"),
        ("lstm", [tensor("input_0", [1] * 200_000)], "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_a_wrong_request_is_told_what_to_mend(client, name, inputs, status, said):
    with pytest.raises(InferenceServerException, match=said) as caught:
        client.infer(name, inputs)
    assert code(caught) == status


def test_what_is_not_supported_says_so(client, channel):
    for refused in (
        lambda: client.infer("counter", count_to(1), compression_algorithm="gzip"),
        lambda: client.get_system_shared_memory_status(),
    ):
        with pytest.raises(InferenceServerException) as caught:
            refused()
        assert code(caught) == "UNIMPLEMENTED"
    raw = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    with pytest.raises(grpc.RpcError) as broken:
        raw(b"\xff\xff", timeout=LIMIT_S)
    assert broken.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_deadlines_count_waiting_and_free_the_rows(server, client):
    missed = server.metric("batchmaker_deadline_misses_total", model="counter")
    for options in ({"timeout": 20_000}, {"parameters": {"deadline_ms": 20}}):
        with pytest.raises(InferenceServerException) as caught:
            client.infer("counter", count_to(LONG), **options)
        assert code(caught) == "DEADLINE_EXCEEDED"
    assert server.metric("batchmaker_deadline_misses_total", model="counter") == missed + 2
    with pytest.raises(InferenceServerException) as caught:
        client.infer("counter", count_to(LONG), client_timeout=0.05)
    assert code(caught) == "DEADLINE_EXCEEDED"
    server.wait_idle()


def test_a_call_that_is_cancelled_frees_its_rows(server, client):
    failed: queue.Queue = queue.Queue()
    running = client.async_infer("counter", count_to(LONG), lambda result, error: failed.put(error))
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 1)
    running.cancel()
    assert "CANCELLED" in str(failed.get(timeout=LIMIT_S))
    server.wait_idle()


def test_a_client_that_vanishes_frees_its_rows(server):
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: None)
        for _ in range(5):
            client.async_stream_infer("counter", count_to(LONG), enable_empty_final_response=True)
            client.async_infer("counter", count_to(LONG), lambda result, error: None)
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 10)
        assert server.metric("batchmaker_open_streams") == 5
        client.stop_stream(cancel_requests=True)
    server.wait_idle()
    assert server.metric("batchmaker_open_streams") == 0


def test_too_many_at_once_are_told_to_try_again(server, client, channel):
    running = [client.async_infer("counter", count_to(LONG), lambda result, error: None) for _ in range(80)]
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 80)
    with pytest.raises(InferenceServerException, match="takes no more now") as caught:
        client.infer("counter", count_to(1))
    assert code(caught) == "UNAVAILABLE"
    asked = service_pb2.ModelInferRequest(model_name="counter")
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, "ModelInfer", asked, service_pb2.ModelInferResponse)
    assert dict(refused.value.trailing_metadata())["retry-after"] == "1"
    for one in running:
        one.cancel()
    server.wait_idle()


def test_request_ids_come_back(channel):
    live = channel.unary_unary(f"/{SERVICE}/ServerLive")
    _, done = live.with_call(b"", metadata=[("x-request-id", "my-id")])
    assert dict(done.trailing_metadata())["x-request-id"] == "my-id"


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_answers_whole_in_the_order_of_its_requests(client, stream):
    lengths = [200, 1, 50, 2]
    for n in lengths:
        client.async_stream_infer("counter", count_to(n), request_id=f"r{n}")
    answers = [stream.get(timeout=LIMIT_S) for _ in lengths]
    assert answers == [(f"r{n}", list(range(1, n + 1)), True, None) for n in lengths]


def test_a_stream_sends_each_word_as_it_comes(client, stream):
    whole = client.infer("seq2seq", [tensor("source", [3, 4]), tensor("words", [6])]).as_numpy("output_0").tolist()
    client.async_stream_infer(
        "seq2seq", [tensor("source", [3, 4]), tensor("words", [6])], request_id="s", enable_empty_final_response=True
    )
    parts = [stream.get(timeout=LIMIT_S) for _ in range(len(whole) + 1)]
    assert parts == [*(("s", [word], False, None) for word in whole), ("s", None, True, None)]


def test_parts_do_not_wait_for_whole_answers_nor_these_for_parts(client, stream):
    client.async_stream_infer("counter", count_to(1_000), request_id="long")
    client.async_stream_infer("counter", count_to(LONG), request_id="parts", enable_empty_final_response=True)
    first = stream.get(timeout=LIMIT_S)
    assert first == ("parts", [1], False, None)
    while (got := stream.get(timeout=LIMIT_S))[0] == "parts":
        assert not got[2]
    assert (got[0], len(got[1])) == ("long", 1_000)


def test_an_error_in_a_stream_is_one_requests_own(client, stream):
    client.async_stream_infer("counter", count_to(3), request_id="good")
    client.async_stream_infer("lstm", [tensor("input_0", [40])], request_id="bad")
    client.async_stream_infer("nobody", count_to(3), enable_empty_final_response=True)
    client.async_stream_infer("counter", count_to(LONG), timeout=20_000)
    client.async_stream_infer("counter", count_to(4), request_id="after")
    got = [stream.get(timeout=LIMIT_S) for _ in range(5)]
    whole = [entry for entry in got if "nobody" not in (entry[3] or "")]
    assert len(whole) == 4
    assert [entry[0] for entry in whole] == ["good", None, None, "after"]
    assert "outside the vocabulary" in whole[1][3]
    assert "deadline passed" in whole[2][3]


def test_a_stream_of_the_asynchronous_client_works(server):
    async def words():
        async def requests():
            for n in (3, 2):
                yield {
                    "model_name": "counter", "inputs": count_to(n, triton_aio), "request_id": str(n),
                    "enable_empty_final_response": True,
                }  # fmt: skip

        received: dict[str, list[int]] = {"3": [], "2": []}
        async with triton_aio.InferenceServerClient(server.grpc_address) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                part = result.as_numpy("output_0")
                received[result.get_response().id] += [] if part is None else part.tolist()
        return received

    assert asyncio.run(words()) == {"3": [1, 2, 3], "2": [1, 2]}


# --- health -----------------------------------------------------------------------------------------------------------


SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Messages of grpc.health.v1 as they go over the wire: field 1, and the number of a state."""


def health_of(service: str) -> bytes:
    """The request for a service's health: field 1, its length, its name."""
    return bytes([10, len(service)]) + service.encode()


def test_health_is_told_as_grpc_has_it(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    for name in ("", SERVICE):
        assert check(health_of(name), timeout=LIMIT_S) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        check(health_of("nobody"), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest(serve, gated):
    folder, gate = gated
    patient = gate.with_name("patient.toml")
    patient.write_text("[limits]\nhung_seconds = 1e6\n")  # behind its gate the model hangs, as far as one can see
    server = serve(folder, "--config", patient, "--grpc-port", 0, "--drain-seconds", LIMIT_S)
    with triton.InferenceServerClient(server.grpc_address) as client, grpc.insecure_channel(server.grpc_address) as raw:
        watched = raw.unary_stream("/grpc.health.v1.Health/Watch")(health_of(""))
        assert next(watched) == SERVING
        answers: queue.Queue = queue.Queue()
        streamed: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: streamed.put((result, error)))
        client.async_stream_infer("gated", count_to(300))
        for n in range(8):
            client.async_infer("gated", count_to(250 + n), lambda result, error: answers.put((result, error)))
        server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 9)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.get("/v2/health/ready").status == 503)
        with pytest.raises(InferenceServerException, match="shutting down") as caught:
            client.infer("gated", count_to(1))
        assert code(caught) == "UNAVAILABLE"
        assert next(watched) == NOT_SERVING
        gate.touch()
        got = [answers.get(timeout=LIMIT_S) for _ in range(8)]
        assert sorted(len(result.as_numpy("output_0")) for result, _ in got) == [250 + n for n in range(8)]
        assert len(streamed.get(timeout=LIMIT_S)[0].as_numpy("output_0")) == 300
        assert "shutting down" in str(streamed.get(timeout=LIMIT_S)[1])
        assert server.process.wait(LIMIT_S) == 0


# --- the page of the docs ---------------------------------------------------------------------------------------------


def examples() -> list[str]:
    """The Python of docs/serving.md that asks by gRPC."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    codes = re.findall(r"<<'EOF'\n(.*?)^EOF", text, re.MULTILINE | re.DOTALL)
    return [code for code in codes if "tritonclient.grpc" in code]


@pytest.mark.parametrize("code", examples(), ids=["whole", "stream"])
def test_the_examples_of_the_docs_run(server, code, capsys):
    exec(code.replace("localhost:8001", server.grpc_address), {})
    assert "[" in capsys.readouterr().out
