"""OpenAI's completions from a server that runs as a process."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from parrot import END
from server_process import HERE, read_head, request_bytes

PARROT = HERE / "parrot.py"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "serving.md"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server(serve):
    return serve(PARROT, f"mute={PARROT}:silent=true")


def events(content: bytes) -> list[Any]:
    """The events of a stream, without the last, which says that it is whole."""
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ask(server: Any, **fields: Any) -> Any:
    answer = server.post(PATH, {"model": "parrot", "temperature": 0, **fields})
    assert answer.status == 200, answer.content
    return answer.json


def test_a_prompt_is_continued_and_counted(server):
    answer = ask(server, prompt="Grüß Gott.", max_tokens=50)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "parrot"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"text": "Grüß Gott.", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 13, "total_tokens": 25}
    cut = ask(server, prompt="abcd")
    assert cut["choices"][0] == {"text": "abcd" * 4, "index": 0, "logprobs": None, "finish_reason": "length"}
    tokens = ask(server, prompt=[97, 98, 46], echo=True)
    assert tokens["choices"][0]["text"] == "ab.ab."


def test_several_prompts_and_texts_come_in_order(server):
    answer = ask(server, prompt=["abc", "xyz"], n=2, seed=1, temperature=1, max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == ["bca", "cab", "yzx", "zxy"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}


def test_a_stop_string_ends_a_text_and_gives_the_request_up(server):
    answer = ask(server, prompt="abc ", max_tokens=90_000, stop=["c a", "?"])
    assert answer["choices"][0] == {"text": "ab", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 5
    server.wait_idle()


def test_a_stream_has_whole_characters_an_end_for_each_text_and_usage_if_asked(server):
    fields = {"model": "parrot", "prompt": ["zu € 5.", "né."], "temperature": 0, "max_tokens": 50}
    answer = server.post(PATH, {**fields, "stream": True, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *found, last = events(answer.content)
    texts, ends = ["", ""], {}
    for event in found:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        assert "\ufffd" not in choice["text"]
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == ["zu € 5.", "né."]
    assert ends == {0: "stop", 1: "stop"}
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 13, "completion_tokens": 15, "total_tokens": 28}
    assert len(found) > 8
    without = events(server.post(PATH, {**fields, "stream": True, "stop": "€"}).content)
    assert all("usage" not in event for event in without)
    assert "".join(e["choices"][0]["text"] for e in without if e["choices"][0]["index"] == 0) == "zu "


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_gives_up_all_texts_of_the_call(server, stream):
    server.wait_idle()
    cancelled = server.metric("nv_inference_request_failure", reason="CANCELED")
    connection = server.connect()
    body = {"model": "parrot", "prompt": "abc", "n": 3, "max_tokens": 90_000, "temperature": 0, "stream": stream}
    connection.sendall(request_bytes(PATH, body))
    if stream:
        assert b"200 OK" in read_head(connection)
    server.wait_for(lambda: server.metric("nv_inference_pending_request_count") == 3)
    connection.close()
    server.wait_idle()
    assert server.metric("nv_inference_request_failure", reason="CANCELED") == cancelled + 3


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "mute"}, 400, "writes no texts"),
        ({"prompt": ""}, 400, "model cannot use this request|prompt is empty"),
        ({"prompt": "\N{SNOWMAN}"}, 400, "cannot make tokens"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"tools": []}, 400, "tools"),
        ({"logprobs": 5}, 400, "logprobs is not supported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_call_gets_an_error_in_openais_form(server, fields, status, said, stream):
    answer = server.post(PATH, {"model": "parrot", "prompt": "ab", "stream": stream, **fields})
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert re.search(said, error["message"])
    assert "secret" not in error["message"]
    assert ask(server, prompt="a.")["choices"][0]["text"] == "a."


def test_other_calls_of_the_api_and_other_models_are_not_there(server):
    for method, path, status in (
        ("GET", PATH, 405),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/v1/models/mute", 404),
    ):
        answer = server.call(method, path)
        assert answer.status == status
        assert answer.json["error"]["type"] == "invalid_request_error"


def test_models_that_write_texts_are_listed(server):
    listed = server.get("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["parrot"]
    assert listed["data"][0] == server.get("/v1/models/parrot").json
    assert server.get("/v2/models/mute").status == 200


def test_the_end_token_is_one_of_the_tokens_of_the_models_own_protocol(server):
    answer = server.post("/v2/models/parrot/generate", {"prompt": [97, 46], "max_tokens": 9, "temperature": 0.0})
    assert answer.json["output_0"] == [97, 46, END]


@pytest.mark.slow
def test_a_call_without_a_key_is_told_so_in_openais_form(serve, monkeypatch):
    monkeypatch.setenv("BATCHMAKER_API_KEYS", "ann:0123456789abcdef")
    server = serve(PARROT)
    refused = server.post(PATH, {"model": "parrot", "prompt": "a."})
    assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
    answer = server.post(PATH, {"model": "parrot", "prompt": "a."}, Authorization="Bearer 0123456789abcdef")
    assert answer.status == 200


def test_the_curl_examples_of_the_docs_are_answered(server):
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("curl") and "/v1/" in line]
    assert len(lines) == 2
    for line in lines:
        *_, url, _, content = shlex.split(line)
        answer = server.call("POST", url.removeprefix("localhost:8000"), content.replace("writer", "parrot").encode())
        assert (line, answer.status) == (line, 200)
        assert b"text_completion" in answer.content
