"""Real clients, unmodified, against a server that runs as a process."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from server_process import read_head, request_bytes
from tritonclient.utils import InferenceServerException

from batchmaker.lab import zoo

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = {"hidden": 8, "vocabulary_size": 40, "seed": 1}
OPTIONS = ",".join(f"{name}={value}" for name, value in SMALL.items())


@pytest.fixture(scope="module")
def server(serve, saved_models):
    built_in = [f"{name}:{OPTIONS}" for name in ("lstm", "gru", "seq2seq", "treelstm")]
    return serve(*built_in, saved_models, "--max-body-mb", 1)


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(name, values, datatype="INT64", *, binary=True, module=triton):
    array = np.array(values, {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}[datatype])
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def alone(name, request):
    """The answer of the same network computed alone."""
    (result,) = zoo.make(name, **SMALL).batched([request])
    return np.asarray(result)


# --- tritonclient ---------------------------------------------------------------------------------------------------


def test_a_client_finds_the_server_and_its_models(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("lstm")
    assert client.is_model_ready("lstm", "1")
    assert not client.is_model_ready("lstm", "2")
    assert not client.is_model_ready("nobody")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("treelstm", "1")
    assert {(i["name"], i["datatype"], tuple(i["shape"])) for i in metadata["inputs"]} == {
        ("words", "INT64", (-1,)), ("children", "INT64", (-1, 2)),
    }  # fmt: skip
    config = client.get_model_config("lstm")
    assert (config["name"], config["max_batch_size"]) == ("lstm", 0)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_sentence_gets_the_state_that_it_gets_alone(client, name, binary):
    tokens = [3, 1, 4, 1, 5]
    outputs = [triton.InferRequestedOutput("output_0", binary_data=binary)]
    answer = client.infer(name, [tensor("input_0", tokens, binary=binary)], outputs=outputs, request_id="r-1")
    assert answer.as_numpy("output_0") == pytest.approx(alone(name, tokens), abs=1e-5)
    response = answer.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == (name, "1", "r-1")


def test_a_tree_gets_its_root(client):
    words, children = [3, 1, 4], [[0, 1], [3, 2]]
    answer = client.infer("treelstm", [tensor("words", words), tensor("children", children)])
    assert answer.as_numpy("output_0") == pytest.approx(
        alone("treelstm", {"words": words, "children": children}), abs=1e-5
    )


def test_an_optional_input_may_be_left_out(client):
    exact = client.infer("seq2seq", [tensor("source", [3, 4]), tensor("words", [5])])
    assert exact.as_numpy("output_0").tolist() == alone("seq2seq", {"source": [3, 4], "words": 5}).tolist()
    free = client.infer("seq2seq", [tensor("source", [3, 4])])
    assert free.as_numpy("output_0").tolist() == alone("seq2seq", [3, 4]).tolist()


def test_a_saved_model_answers_with_named_outputs(client):
    inputs = [tensor("rows", [[1, 2], [3, 4]], "FP32"), tensor("start", [10, 20], "FP32")]
    answer = client.infer("sums", inputs)
    assert answer.as_numpy("total").tolist() == [14, 26]
    assert answer.as_numpy("steps").tolist() == [[11, 22], [14, 26]]
    only = client.infer("sums", inputs, outputs=[triton.InferRequestedOutput("steps")])
    assert only.as_numpy("total") is None


def test_many_requests_at_once_each_get_their_own_answer(server):
    async def all_at_once():
        async with triton_aio.InferenceServerClient(server.address, conn_limit=16) as client:
            calls = [
                client.infer(
                    "sums",
                    [
                        tensor("rows", [[i, 1]] * (1 + i % 5), "FP32", module=triton_aio),
                        tensor("start", [0, 0], "FP32", module=triton_aio),
                    ],
                )
                for i in range(64)
            ]
            return [answer.as_numpy("total").tolist() for answer in await asyncio.gather(*calls)]

    assert asyncio.run(all_at_once()) == [[i * (1 + i % 5), 1 + i % 5] for i in range(64)]


def test_asynchronous_calls_of_the_synchronous_client_work(server):
    with triton.InferenceServerClient(server.address, concurrency=4) as client:
        calls = [client.async_infer("counter", [tensor("input_0", [n])]) for n in range(1, 9)]
        assert [call.get_result().as_numpy("output_0").tolist()[-1] for call in calls] == list(range(1, 9))


def test_statistics_grow_with_every_request(client):
    def counts():
        (entry,) = client.get_inference_statistics("gru")["model_stats"]
        return entry["inference_count"], entry["inference_stats"]["queue"]["count"]

    before = counts()
    client.infer("gru", [tensor("input_0", [1])])
    assert counts() == (before[0] + 1, before[1] + 1)
    everyone = client.get_inference_statistics()["model_stats"]
    assert {entry["name"] for entry in everyone} >= {"lstm", "gru", "seq2seq", "treelstm", "counter", "sums"}


def test_models_are_unloaded_and_loaded_while_others_serve(client):
    client.unload_model("sums")
    assert not client.is_model_ready("sums")
    states = {line["name"]: line["state"] for line in client.get_model_repository_index()}
    assert (states["sums"], states["lstm"]) == ("UNAVAILABLE", "READY")
    with pytest.raises(InferenceServerException, match="there is no model 'sums'"):
        client.infer("sums", [])
    assert client.infer("lstm", [tensor("input_0", [1])]).as_numpy("output_0").shape == (8,)
    client.load_model("sums")
    assert client.is_model_ready("sums")


@pytest.mark.parametrize(
    ("name", "inputs", "status", "said"),
    [
        ("nobody", [tensor("x", [1])], "404", "there is no model 'nobody'"),
        ("lstm", [tensor("x", [1])], "400", "unknown input 'x'; the inputs are 'input_0'"),
        ("lstm", [tensor("input_0", [[1]])], "400", r"got shape \[1, 1\], expected \[-1\]"),
        ("lstm", [tensor("input_0", [1.5], "FP32")], "400", "got FP32, expected INT64"),
        ("lstm", [tensor("input_0", [40])], "400", "token 40 at position 0 is outside the vocabulary"),
        ("lstm", [tensor("input_0", np.empty(0))], "400", "empty"),
        ("treelstm", [tensor("words", [1, 2]), tensor("children", [[0, 0]])], "400", "exactly once"),
        ("sums", [tensor("rows", [[1, 2]], "FP32")], "400", "input 'start' is missing"),
    ],
)
def test_a_wrong_request_is_told_what_to_mend(client, name, inputs, status, said):
    with pytest.raises(InferenceServerException, match=said) as caught:
        client.infer(name, inputs)
    assert caught.value.status() == status


def test_a_timeout_counts_waiting(client):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("counter", [tensor("input_0", [90_000])], timeout=20_000)  # microseconds
    assert caught.value.status() == "504"
    with pytest.raises(InferenceServerException) as caught:
        client.infer("counter", [tensor("input_0", [90_000])], parameters={"deadline_ms": 20})
    assert caught.value.status() == "504"


# --- plain HTTP -----------------------------------------------------------------------------------------------------


def test_generate_answers_plain_json(server):
    answer = server.post("/v2/models/counter/generate", {"input_0": 3, "id": "g"})
    assert answer.json == {"model_name": "counter", "model_version": "1", "id": "g", "output_0": [1, 2, 3]}
    bad = server.post("/v2/models/counter/generate", {"input": 3})
    said = "unknown key 'input'; known: 'input_0', 'parameters' and 'id'. Did you mean 'input_0'?"
    assert (bad.status, bad.json) == (400, {"error": said})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rb'{"input_0": 3, "id": "\ud800"}', "half of a character"),
        (b'{"input_0": 3, "parameters": {"deadline_ms": 0}}', "'deadline_ms' must be a number of milliseconds above 0"),
        (b'{"input_0": 3, "parameters": {"deadline_ms": false}}', "got false"),
        (b'{"input_0": 3, "parameters": {"timeout": 1%s}}' % (b"0" * 320), "'timeout' must be a number"),
    ],
)
def test_what_cannot_be_meant_is_the_clients_fault(server, body, said):
    for route in ("generate", "generate_stream"):
        answer = server.call("POST", f"/v2/models/counter/{route}", body)
        assert answer.status == 400
        assert said in answer.json["error"]


def test_generate_stream_sends_each_value_as_an_event(server):
    answer = server.post("/v2/models/counter/generate_stream", {"input_0": 4})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.content.decode().split("\n\n")
    assert events.pop() == ""
    assert [json.loads(event.removeprefix("data: "))["output_0"] for event in events] == [1, 2, 3, 4]


def test_the_first_event_comes_before_the_last_is_computed(server):
    with server.connect() as connection:
        connection.sendall(request_bytes("/v2/models/counter/generate_stream", {"input_0": 90_000}))
        received = read_head(connection)
        while b"data: " not in received:
            received += connection.recv(65536)
        assert server.metric("nv_inference_pending_request_count", model="counter") == 1
    server.wait_idle()


def test_an_error_before_the_first_event_has_its_own_status(server):
    answer = server.post("/v2/models/lstm/generate_stream", {"input_0": [99]})
    assert answer.status == 400
    assert "vocabulary" in answer.json["error"]


def test_an_error_in_the_middle_of_a_stream_is_an_event(server):
    answer = server.post("/v2/models/counter/generate_stream", {"input_0": 90_000, "parameters": {"deadline_ms": 200}})
    events = answer.content.decode().strip().split("\n\n")
    assert answer.status == 200
    assert "deadline" in json.loads(events[-1].removeprefix("data: "))["error"]


def test_an_answer_comes_in_one_piece(server):
    path, content = "/v2/models/lstm/infer", {
        "inputs": [{"name": "input_0", "shape": [2], "datatype": "INT64", "data": [1, 2]}]
    }  # fmt: skip
    with server.connect() as connection:
        for _ in range(5):
            connection.sendall(request_bytes(path, content))
            head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
            assert json.loads(body)["outputs"][0]["shape"] == [8]
            assert b"content-length: %d" % len(body) in head


def test_a_small_request_cannot_ask_for_the_same_again_and_again(server):
    tensor = {"name": "input_0", "shape": [1], "datatype": "INT64", "data": [3]}
    twice = {"inputs": [tensor], "outputs": [{"name": "output_0"}, {"name": "output_0"}]}
    answer = server.post("/v2/models/counter/infer", twice)
    assert (answer.status, answer.json["error"]) == (400, "output 'output_0' is named twice; name each once")
    for path in ("/v2/models/counter/generate", "/v2/models/counter/generate_stream"):
        answer = server.post(path, {"input_0": 3, "id": "x" * 2000})
        assert answer.status == 400
        assert "id has 2000 characters" in answer.json["error"]


def test_what_an_error_says_to_look_at_can_be_looked_at(server):
    said = server.get("/v2/models/nobody").json["error"]
    method, path = re.search(r"(GET|POST) (/[/\w]+)", said).groups()
    answer = server.call(method, path)
    assert answer.status == 200
    assert "counter" in [line["name"] for line in answer.json]


def test_bodies_for_the_repository_are_not_made_into_objects(server):
    assert server.call("POST", "/v2/repository/index", b'{"parameters": [%s]}' % (b"[1]," * 9999 + b"1")).status == 200
    answer = server.call("POST", "/v2/repository/models/counter/load", b'{"parameters": {"config": "{}"}}')
    assert answer.status == 501


def test_request_ids_come_back(server):
    assert server.get("/v2", X_Request_Id="my-id").headers["x-request-id"] == "my-id"
    made = [server.get("/v2").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    assert server.get("/v2", X_Request_Id="ü" * 3).headers["x-request-id"] != "ü" * 3


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/lstm/infer", 405),
        ("POST", "/v2", 405),
        ("GET", "/v1", 404),
        ("GET", "/v2/models/..%2f..%2fetc/config", 404),
        ("POST", "/v2/repository/models/..%2fsums/load", 404),
        ("GET", "/v2/models/lstm/versions/x", 404),
        ("GET", "/v2/trace?seconds=nan", 400),
    ],
)
def test_wrong_routes_answer_with_an_error_in_json(server, method, path, status):
    answer = server.call(method, path)
    assert answer.status == status
    assert set(answer.json) == {"error"}


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server):
    answer = server.call("POST", "/v2/models/lstm/infer", b" " * (2 << 20))
    assert answer.status == 413
    with server.connect() as connection:
        connection.sendall(
            b"POST /v2/models/lstm/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert read_head(connection).startswith(b"HTTP/1.1 413")
    with server.connect() as connection:
        connection.sendall(
            b"POST /v2/models/lstm/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(5):
            connection.sendall(b"40000\r\n" + b" " * 0x40000 + b"\r\n")
        assert read_head(connection).startswith(b"HTTP/1.1 413")


def test_compressed_bodies_are_refused_with_advice(server):
    answer = server.call("POST", "/v2/models/lstm/infer", b"x", Content_Encoding="gzip")
    assert answer.status == 415
    for none in ("identity", "Identity", ""):
        assert (
            server.call("POST", "/v2/models/counter/generate", b'{"input_0": 1}', Content_Encoding=none).status == 200
        )


@pytest.mark.parametrize("codings", [["gzip, chunked"], ["gzip", "chunked"]])
def test_a_body_in_a_transfer_coding_that_is_not_known_is_not_read_as_if_it_were_plain(server, codings):
    connection = server.connect()
    head = ["POST /v2/models/lstm/generate HTTP/1.1", "Host: localhost"]
    head += [f"Transfer-Encoding: {coding}" for coding in codings]
    body = b'{"input_0": [3]}'
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + chunks)
    answer = read_head(connection)
    assert answer.startswith(b"HTTP/1.1 501")
    assert b"Transfer-Encoding 'gzip" in answer


def test_a_trace_shows_the_last_requests(server):
    server.post("/v2/models/counter/generate", {"input_0": 5})
    trace = server.get("/v2/trace?seconds=30").json
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"count"} <= {event["name"] for event in spans}
    assert all(0 <= event["ts"] <= 31e6 and event["dur"] >= 0 for event in spans if event["cat"] == "step")
    assert any(event["cat"] == "request" for event in spans)


def test_metrics_are_those_of_the_requests(server):
    before = server.metric("nv_inference_request_success", model="gru")
    server.post("/v2/models/gru/generate", {"input_0": [1, 2]})
    assert server.metric("nv_inference_request_success", model="gru") == before + 1
    assert server.metric("batchmaker_cell_rows_total", model="gru") > 0


# --- the page of the docs -------------------------------------------------------------------------------------------


def examples(language: str) -> list[str]:
    """The commands of docs/serving.md that ask a server, but for completions."""
    text = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if language == "python":
        codes = [
            code for block in blocks for code in re.findall(r"<<'EOF'\n(.*?)^EOF", block, re.MULTILINE | re.DOTALL)
        ]
        return [code for code in codes if "tritonclient.grpc" not in code]
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith("curl") and "/v1/" not in line]


@pytest.mark.parametrize("code", examples("python"), ids=["sync", "client"])
def test_the_python_examples_of_the_docs_run(server, code, capsys):
    if "batchmaker.client" in code:
        pytest.importorskip("httpx", reason="needs httpx, of the extra `client`")
    exec(code.replace("localhost:8000", server.address), {})
    assert "[" in capsys.readouterr().out


def test_the_curl_examples_of_the_docs_are_answered_in_their_order(server):
    """Sent without curl, which not every machine has."""
    lines = examples("curl")
    assert len(lines) > 5
    for line in lines:
        _, url, _, content = shlex.split(line.replace("-N ", ""))
        answer = server.call("POST", url.removeprefix("localhost:8000"), content.encode())
        assert (line, answer.status) == (line, 200)
        assert b"output_0" in answer.content
