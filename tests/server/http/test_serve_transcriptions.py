"""Files as text, asked by OpenAI's own client of a server that is a process; and sound in the server's protocols."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import scribe
import tritonclient.grpc as triton
from scribe_calls import (
    PATH,
    SCRIBE,
    base64_of,
    floats,
    next_of,
    other_wav,
    pieces,
    sound,
    transcribed,
    wav,
    with_client,
)
from server_process import LIMIT_S
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from waiting import until


@pytest.fixture(scope="module")
def server(serve):
    kinds = [f"{kind}={SCRIBE}:kind={kind}" for kind in ("taps", "mute", "late", "counts")]
    return serve(SCRIBE, *kinds, "lstm:hidden=4,vocabulary_size=9", "--grpc-port", 0)


@pytest.fixture(scope="module")
def model():
    return scribe.build()


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_as_plain_computation_would(server, model):
    pcm = sound(3.03)
    text = model.plain(floats(pcm))
    assert len(text) > 10
    answer = transcribed(server, wav(pcm))
    assert answer.text == text
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == pytest.approx(3.03)
    assert transcribed(server, wav(pcm), response_format="text") == text
    verbose = transcribed(server, wav(pcm), response_format="verbose_json", language="en")
    assert (verbose.text, verbose.language) == (text, "en")
    assert verbose.duration == pytest.approx(3.03)


def test_a_stream_has_the_text_in_pieces_and_as_a_whole(server, model):
    pcm = sound(4.0, seed=1)

    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        file = ("a.wav", wav(pcm))
        stream = await client.audio.transcriptions.create(file=file, model="scribe", stream=True)
        return [event async for event in stream]

    *deltas, done = with_client(server, work)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert done.text == "".join(event.delta for event in deltas) == model.plain(floats(pcm))
    assert len(deltas) > 2


def test_floats_and_mu_law_in_a_wav_file_are_the_same_sound(server, model):
    pcm = sound(1.0, seed=2)
    assert transcribed(server, other_wav(floats(pcm).astype("<f4").tobytes(), 3, 32)).text == model.plain(floats(pcm))
    codes = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    steps = scribe.Audio(scribe.RATE).samples(codes.tobytes(), scribe.Audio(scribe.RATE).encoding("pcmu"))
    assert transcribed(server, other_wav(codes.tobytes(), 7, 8)).text == model.plain(steps)


def test_a_character_that_spans_chunks_comes_whole(server):
    pcm = np.zeros(8000, np.int16)
    pcm[[3999, 4001]] = 20000  # in two chunks of half a second

    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.audio.transcriptions.create(file=("a.wav", wav(pcm)), model="taps", stream=True)
        return [event async for event in stream]

    *deltas, done = with_client(server, work)
    assert ([event.delta for event in deltas], done.text) == (["é"], "é")
    pcm[4001] = 0
    assert transcribed(server, wav(pcm), model="taps").text == "\ufffd"


@pytest.mark.parametrize("model", ["scribe", "taps", "late"])
def test_sound_of_no_length_has_no_text(server, model):
    assert transcribed(server, wav(np.zeros(0, np.int16)), model=model).text == ""


def test_a_model_that_looks_ahead_answers_for_the_last_sound_at_the_end(server):
    pcm = np.zeros(4001, np.int16)
    pcm[[7, 3999, 4000]] = 20000
    pcm[3998] = -20000
    assert transcribed(server, wav(pcm), model="late").text == "éé"

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="late") as connection:
            for _ in range(2):
                for piece in pieces(pcm, 2000):
                    await connection.input_audio_buffer.append(audio=base64_of(piece))
                await connection.input_audio_buffer.commit()
                await next_of(connection, "input_audio_buffer.committed")
                after, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
                assert completed.transcript == "éé"
                assert after[-1].delta == "é", "the last one is heard at the end"

    with_client(server, work)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)
    server.wait_idle()


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "mute"}, 400, "writes nothing that it hears"),
        ({"model": "lstm"}, 400, "writes nothing that it hears"),
        ({"file": ("a.mp3", b"ID3" + bytes(99))}, 400, "the file is MP3: send a WAV file"),
        ({"file": ("a.wav", b"no sound")}, 400, "no WAV file"),
        ({"file": ("a.wav", wav(sound(1.0), rate=16000))}, 400, "16000 Hz, and the model takes 8000 Hz"),
        ({"file": ("a.wav", wav(sound(1.0), channels=2))}, 400, "has 2 channels"),
        ({"file": ("a.wav", wav(sound(1.0))[:-100])}, 400, "the file is cut"),
        ({"file": ("a.wav", other_wav(bytes(99), 1, 24))}, 400, "24 bits"),
        ({"language": "de"}, 400, "writes 'en'"),
        ({"response_format": "srt"}, 400, "needs times"),
        ({"response_format": "verbose_json", "model": "taps"}, 400, "says none"),
        ({"response_format": "verbose_json", "stream": True}, 400, "a stream is of response_format json"),
        ({"prompt": "Dear Sir"}, 400, "prompt is not supported"),
        ({"temperature": 0.7}, 400, "temperature is not supported"),
        ({"include": ["logprobs"]}, 400, "include is not supported"),
        ({"timestamp_granularities": ["word"]}, 400, "timestamp_granularities is not supported"),
        ({"chunking_strategy": "auto"}, 400, "chunking_strategy is not supported"),
        ({"extra_body": {"beams": 3}}, 400, "unknown field 'beams'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_and_named(server, options, status, said):
    options = {"file": ("a.wav", wav(sound(0.1))), "model": "scribe", **options}
    with pytest.raises(openai.APIStatusError, match=said) as caught:
        with_client(server, lambda c: c.audio.transcriptions.create(**options))
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"", "multipart/form-data with its boundary"),
        ("multipart/form-data; boundary=B", b"nothing", "no whole form"),
        ("multipart/form-data; boundary=B", b"--B\r\n\r\nx\r\n--B--\r\n", "has no name"),
        ("multipart/form-data; boundary=B", b"", "ends before its last boundary"),
        (
            "multipart/form-data; boundary=B",
            b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nscribe\r\n--B\r\n',
            "ends before its last boundary",
        ),
        ("multipart/form-data; boundary=B", b"--B--\r\n", "the file is missing|no whole form"),
    ],
)
def test_a_body_that_is_no_form_is_refused(server, content_type, body, said):
    answer = server.call("POST", PATH, body, Content_Type=content_type)
    assert answer.status == 400
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(said, error["message"])


def test_a_model_that_fails_tells_nothing_of_its_inside(server):
    pcm = np.zeros(9000, np.int16)
    pcm[8500] = 32767

    async def work(client: openai.AsyncOpenAI) -> None:
        stream = await client.audio.transcriptions.create(file=("a.wav", wav(pcm)), model="taps", stream=True)
        async for _ in stream:
            pass

    with pytest.raises(openai.InternalServerError, match="the model failed") as caught:
        transcribed(server, wav(pcm), model="taps")
    assert "secret" not in str(caught.value)
    assert "connect anew" not in str(caught.value)
    with pytest.raises(openai.APIError, match="the model failed"):
        with_client(server, work)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)


def form(file: bytes, **fields: str) -> tuple[bytes, str]:
    """A form's body and its Content-Type."""
    parts = [
        f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    head = '--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return "".join([*parts, head]).encode() + file + b"\r\n--B--\r\n", "multipart/form-data; boundary=B"


@pytest.mark.parametrize("stream", ["false", "true"])
def test_who_goes_away_frees_the_sequence_of_a_long_file(server, stream):
    body, kind = form(wav(sound(400.0)), model="scribe", stream=stream)
    connection = server.connect()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences", model="scribe") == 1)
    connection.close()
    server.wait_for(lambda: server.metric("batchmaker_open_sequences", model="scribe") == 0)
    server.wait_idle()
    assert server.metric("nv_inference_request_success", model="scribe") < 2000, "it went on to the end"


def test_live_sound_is_answered_while_long_files_are_heard(server, model):
    """Few chunks of a file are with the engine at once, so a live chunk waits for few of them."""
    pcm = sound(0.2, seed=7)

    async def work(client: openai.AsyncOpenAI) -> list[str]:
        file = ("a.wav", wav(sound(300.0)))
        long = [asyncio.create_task(client.audio.transcriptions.create(file=file, model="scribe")) for _ in range(3)]
        await until(lambda: server.metric("batchmaker_open_sequences", model="scribe") == 3)
        texts = []
        for _ in range(5):
            short = await client.audio.transcriptions.create(file=("a.wav", wav(pcm)), model="scribe")
            texts.append(short.text)
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return texts

    assert with_client(server, work) == [model.plain(floats(pcm))] * 5
    server.wait_for(lambda: server.metric("batchmaker_open_sequences", model="scribe") == 0)


def test_a_model_may_write_texts_itself_and_be_told_of_the_end(server):
    pcm = np.zeros(9000, np.int16)
    assert transcribed(server, wav(pcm), model="counts").text == "4000 4000 1000 over"

    async def work(client: openai.AsyncOpenAI) -> str:
        async with client.realtime.connect(model="counts") as connection:
            for size in (100, 4001):
                await connection.input_audio_buffer.append(audio=base64_of(pcm[:size]))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            return completed.transcript

    assert with_client(server, work) == "100 4000 1 over"


@pytest.mark.parametrize("page", ["docs/live-audio.md", "examples/transducer/README.md"])
def test_the_curl_examples_of_the_docs_are_answered(server, model, page):
    """Sent without curl, which not every machine has."""
    pcm = sound(0.3, seed=30)
    text = (Path(__file__).resolve().parents[3] / page).read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("curl") and PATH in line]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        fields = dict(word.split("=", 1) for before, word in itertools.pairwise(words) if before == "-F")
        assert (fields.pop("model"), fields.pop("file")) == ("transducer", "@said.wav")
        body, kind = form(wav(pcm), model="scribe", **fields)
        assert f"localhost:8000{PATH}" in words
        answer = server.call("POST", PATH, body, Content_Type=kind)
        assert (line, answer.status) == (line, 200)
        assert model.plain(floats(pcm)).encode() in answer.content


# --- the server's own protocols --------------------------------------------------------------------------------------


def test_a_websocket_takes_sound_and_an_odd_byte_is_that_chunks_error(server, model):
    pcm = sound(1.0, seed=20)[: 100 * scribe.ROW]
    address = f"ws://{server.address}/v2/models/scribe/sequence?audio=pcm16&rate={scribe.RATE}"
    with connect(address) as socket:
        heard = ""
        for piece in pieces(pcm, 10 * scribe.ROW):
            socket.send(piece.tobytes())
            heard += scribe.letters(json.loads(socket.recv(LIMIT_S))["symbols"])
        assert heard == model.plain(floats(pcm))
        socket.send(pcm[: scribe.ROW].tobytes()[:-1])
        error = json.loads(socket.recv(LIMIT_S))
        assert (error["status"], "159 bytes of sound are no whole number" in error["error"]) == (400, True)
    for query, said in (
        ("audio=mp3", "unknown encoding of sound 'mp3'"),
        ("audio=pcm16&rate=16000", "16000 Hz, and the model takes 8000 Hz"),
        ("rate=8000", "name its encoding too"),
    ):
        with pytest.raises(InvalidStatus) as caught:
            connect(f"ws://{server.address}/v2/models/scribe/sequence?{query}")
        assert said in json.loads(caught.value.response.body)["error"]


def test_tensors_of_int16_are_sound_too(server, model):
    pcm = sound(0.5, seed=21)
    rows = pcm.reshape(-1, scribe.ROW)
    tensor = {"name": "audio", "shape": rows.shape, "datatype": "INT16", "data": rows.tolist()}
    answer = server.post("/v2/models/scribe/infer", {"inputs": [tensor]}).json
    assert scribe.letters(answer["outputs"][0]["data"]) == model.plain(floats(pcm))


def test_a_sequence_of_int16_over_grpc_is_sound(server, model):
    pcm = sound(0.6, seed=22)
    heard = ""
    with triton.InferenceServerClient(server.grpc_address) as client:
        for at in range(0, len(pcm), 10 * scribe.ROW):
            rows = pcm[at : at + 10 * scribe.ROW].reshape(-1, scribe.ROW)
            tensor = triton.InferInput("audio", rows.shape, "INT16")
            tensor.set_data_from_numpy(rows)
            answer = client.infer(
                "scribe", [tensor], sequence_id=9, sequence_start=at == 0, sequence_end=at + rows.size == len(pcm)
            )
            heard += scribe.letters(answer.as_numpy("symbols"))
    assert heard == model.plain(floats(pcm))
