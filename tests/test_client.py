"""The client of streams: whatever pieces an answer comes in, and whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

httpx = pytest.importorskip("httpx", reason="needs httpx, of the extra `client`")

from batchmaker.client import Client, ServerError, generate  # noqa: E402
from batchmaker.errors import OptionError  # noqa: E402


def events_of(*contents) -> bytes:
    return b"".join(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n" for content in contents)


class Pieces(httpx.AsyncByteStream):
    """An answer's body in these pieces; then the connection breaks, if it is to."""

    def __init__(self, pieces, breaks=False):
        self.pieces, self.breaks, self.closed = pieces, breaks, False

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece
        if self.breaks:
            raise httpx.ReadError("gone")

    async def aclose(self):
        self.closed = True


def streamed(answer, inputs=None, *, seen=None, address="http://x", key=None, **options):
    """All values of a stream to which `answer` is the response."""

    def handle(request):
        if seen is not None:
            seen.append(request)
        return answer

    async def values():
        async with Client(address, key=key, transport=httpx.MockTransport(handle)) as client:
            return [value async for value in client.stream("a model", inputs or {}, **options)]

    return asyncio.run(values())


@given(st.lists(st.text() | st.integers(), max_size=6), st.data())
def test_values_arrive_whole_wherever_the_bytes_are_cut(words, data):
    body = events_of(*({"model_name": "m", "model_version": "1", "output_0": word} for word in words))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    pieces = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert streamed(httpx.Response(200, stream=Pieces(pieces))) == [{"output_0": word} for word in words]


def test_what_is_asked_is_what_the_server_reads():
    seen = []
    answer = httpx.Response(200, content=b"")
    streamed(answer, {"x": [1, 2]}, seen=seen, version="3", parameters={"deadline_ms": 5}, key="k" * 16)
    streamed(answer, {"x": [1, 2]}, seen=seen)
    assert [request.url.raw_path for request in seen] == [
        b"/v2/models/a%20model/versions/3/generate_stream", b"/v2/models/a%20model/generate_stream",
    ]  # fmt: skip
    assert [json.loads(request.content) for request in seen] == [
        {"x": [1, 2], "parameters": {"deadline_ms": 5}}, {"x": [1, 2]},
    ]  # fmt: skip
    assert [request.headers.get("x-api-key") for request in seen] == ["k" * 16, None]


def test_a_refusal_says_why_and_when_to_try_again():
    refusal = httpx.Response(503, json={"error": "takes no more now"}, headers={"Retry-After": "3"})
    with pytest.raises(ServerError, match="takes no more now") as caught:
        streamed(refusal)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 3.0)
    with pytest.raises(ServerError, match="502 Bad Gateway, and not from batchmaker") as caught:
        streamed(httpx.Response(502, content=b"<html>"))
    assert (caught.value.status, caught.value.retry_after_s) == (502, None)


@pytest.mark.parametrize(
    ("pieces", "breaks", "said"),
    [([events_of({"output_0": 1}, {"error": "the model failed"})], False, "the model failed"),
     ([events_of({"output_0": 1}), b"data: {"], True, "the server cannot be reached, or has gone")],
)  # fmt: skip
def test_what_goes_wrong_after_the_first_value_has_no_status(pieces, breaks, said):
    received = []

    async def read():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Pieces(pieces, breaks)))
        async with Client("http://x", transport=transport) as client:
            values = client.stream("m", {})
            while True:
                received.append(await anext(values))

    with pytest.raises(ServerError, match=said) as caught:
        asyncio.run(read())
    assert received == [{"output_0": 1}]
    assert caught.value.status is None


def test_leaving_early_closes_the_connection():
    body = Pieces([events_of({"output_0": n}) for n in range(100)])

    async def read():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=body))
        async with Client("http://x", transport=transport) as client, aclosing(client.stream("m", {})) as values:
            return await anext(values)

    assert asyncio.run(read()) == {"output_0": 0}
    assert body.closed


# --- one call --------------------------------------------------------------------------------------------------------


class PlainPieces(httpx.SyncByteStream):
    """As Pieces, without asyncio."""

    def __init__(self, pieces, breaks=False):
        self.pieces, self.breaks, self.closed = pieces, breaks, False

    def __iter__(self):
        yield from self.pieces
        if self.breaks:
            raise httpx.ReadError("gone")

    def close(self):
        self.closed = True


async def listed(parts):
    return [part async for part in parts]


@given(st.lists(st.text() | st.integers(), max_size=6), st.data())
def test_one_call_generates_values_for_both_kinds_of_loops(words, data):
    body = events_of(*({"model_name": "m", "model_version": "1", "output_0": word} for word in words))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    pieces = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    wanted = [{"output_0": word} for word in words]
    for kind, read in ((PlainPieces, list), (Pieces, lambda parts: asyncio.run(listed(parts)))):
        transport = httpx.MockTransport(lambda request, kind=kind: httpx.Response(200, stream=kind(pieces)))
        assert read(generate("http://x", "m", {}, transport=transport)) == wanted


def test_one_call_asks_what_the_client_asks():
    seen = []

    def handle(request):
        seen.append((request.url.raw_path, json.loads(request.content), request.headers.get("x-api-key")))
        return httpx.Response(200, content=b"")

    made = generate(
        "http://x", "a model", {"x": [1]}, version="3", parameters={"deadline_ms": 5}, key="k" * 16,
        transport=httpx.MockTransport(handle),
    )  # fmt: skip
    assert seen == [], "nothing is asked before the iteration"
    assert list(made) == asyncio.run(listed(made)) == []
    wanted = b"/v2/models/a%20model/versions/3/generate_stream", {"x": [1], "parameters": {"deadline_ms": 5}}, "k" * 16
    assert seen == [wanted, wanted]


@pytest.mark.parametrize(
    ("body", "breaks", "status", "said"),
    [([b'{"error": "takes no more now"}'], False, 503, "takes no more now"),
     ([events_of({"output_0": 1}, {"error": "the model failed"})], False, 200, "the model failed"),
     ([events_of({"output_0": 1})], True, 200, "the server cannot be reached, or has gone")],
)  # fmt: skip
def test_what_goes_wrong_in_one_call_is_the_servers_error(body, breaks, status, said):
    received = []
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=PlainPieces(body, breaks)))
    with pytest.raises(ServerError, match=said) as caught:
        received.extend(part for part in generate("http://x", "m", {}, transport=transport))
    assert caught.value.status == (None if status == 200 else status)
    with pytest.raises(OptionError, match="give http://"):
        generate("localhost:8000", "m", {})


def test_leaving_one_call_early_gives_the_request_up():
    body = PlainPieces([events_of({"output_0": n}) for n in range(100)])
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=body))
    parts = iter(generate("http://x", "m", {}, transport=transport))
    assert next(parts) == {"output_0": 0}
    assert not body.closed
    parts.close()
    assert body.closed


def test_it_needs_no_torch():
    code = "import sys, batchmaker.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("address", ["localhost:8000", "127.0.0.1:8000", "ftp://x"])
def test_an_address_without_http_is_refused_before_anything_is_sent(address):
    with pytest.raises(OptionError, match="give http://"):
        Client(address)
