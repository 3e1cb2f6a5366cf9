"""Files and live sound as text, asked by OpenAI's own client of a server that runs as a process."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
import shlex
import signal
import struct
import wave
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import scribe
import tritonclient.grpc as triton
from numpy.typing import NDArray
from server_process import HERE, LIMIT_S
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from batchmaker.server.formats.resampling import Resampler
from waiting import until

SCRIBE = HERE / "scribe.py"
PATH = "/v1/audio/transcriptions"
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def server(serve):
    kinds = [f"{kind}={SCRIBE}:kind={kind}" for kind in ("taps", "mute", "late", "counts", "any")]
    return serve(SCRIBE, *kinds, "lstm:hidden=4,vocabulary_size=9", "--grpc-port", 0)


@pytest.fixture(scope="module")
def model():
    return scribe.build()


def sound(seconds: float, seed: int = 0) -> NDArray[np.int16]:
    """Tones and pauses by chance, as PCM of 16 bits."""
    draw = np.random.default_rng(seed)
    parts = []
    while sum(map(len, parts)) < seconds * scribe.RATE:
        time = np.arange(int(draw.integers(300, 1500))) / scribe.RATE
        parts.append(draw.choice([0.0, 0.3]) * np.sin(2 * np.pi * draw.uniform(150, 3000) * time))
    whole = np.concatenate(parts)[: int(seconds * scribe.RATE)]
    return (32767 * (whole + 0.01 * draw.standard_normal(len(whole)))).astype(np.int16)


def floats(pcm: NDArray[np.int16]) -> NDArray[np.float32]:
    return pcm.astype(np.float32) / 32768


def wav(pcm: NDArray[np.int16], rate: int = scribe.RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm.tobytes())
    return file.getvalue()


def other_wav(data: bytes, tag: int, bits: int) -> bytes:
    """A WAV file of another format than PCM of 16 bits."""
    head = struct.pack("<HHIIHH", tag, 1, scribe.RATE, scribe.RATE * bits // 8, bits // 8, bits)
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def with_client(server: Any, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]], key: str = "none") -> Any:
    """The result of work with OpenAI's client."""

    async def run() -> Any:
        base_url = f"http://{server.address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=LIMIT_S) as client:
            async with asyncio.timeout(LIMIT_S):
                return await work(client)

    return asyncio.run(run())


def transcribed(server: Any, file: bytes, **options: Any) -> Any:
    options = {"model": "scribe", **options}
    return with_client(server, lambda c: c.audio.transcriptions.create(file=("a.wav", file), **options))


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


# --- live sound ------------------------------------------------------------------------------------------------------


def base64_of(pcm: NDArray[Any]) -> str:
    return base64.b64encode(pcm.tobytes()).decode()


def pieces(pcm: NDArray[np.int16], size: int) -> list[NDArray[np.int16]]:
    return [pcm[at : at + size] for at in range(0, len(pcm), size)]


async def next_of(connection: Any, kind: str) -> tuple[list[Any], Any]:
    """The events before the next one of a type, and that one. Fails at an error that is not waited for."""
    before = []
    while True:
        event = await connection.recv()
        if event.type == kind:
            return before, event
        assert event.type != "error", event
        before.append(event)


def test_utterances_of_live_sound_are_written_while_they_are_heard(server, model):
    utterances = [sound(1.51, seed=3), sound(1.0, seed=4)]

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            _, created = await next_of(connection, "session.created")
            assert created.session.type == "transcription"
            assert created.session.audio.input.format.to_dict() == {"type": "audio/pcm", "rate": scribe.RATE}
            assert created.session.audio.input.transcription.model == "scribe"
            previous = None
            for pcm in utterances:
                text = model.plain(floats(pcm))
                for piece in pieces(pcm, 777):
                    await connection.input_audio_buffer.append(audio=base64_of(piece))
                early, first = await next_of(connection, "conversation.item.input_audio_transcription.delta")
                assert not early
                await connection.input_audio_buffer.commit()
                before, committed = await next_of(connection, "input_audio_buffer.committed")
                assert committed.previous_item_id == previous
                after, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
                deltas = [first, *before, *after]
                assert "".join(event.delta for event in deltas) == completed.transcript == text
                assert {event.item_id for event in [*deltas, completed]} == {committed.item_id}
                assert completed.usage.type == "duration"
                assert completed.usage.seconds == pytest.approx(len(pcm) / scribe.RATE)
                previous = committed.item_id

    with_client(server, work)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)


def test_a_session_that_names_its_model_and_mu_law_later_is_told_what_holds(server):
    codes = np.random.default_rng(1).integers(0, 256, 3000, np.uint8)
    audio = scribe.Audio(scribe.RATE)
    text = scribe.build().plain(audio.samples(codes.tobytes(), audio.encoding("pcmu")))

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            _, created = await next_of(connection, "session.created")
            assert created.session.audio.input.transcription is None
            await connection.input_audio_buffer.append(audio=base64_of(codes), event_id="early")
            error = await connection.recv()
            assert (error.type, error.error.event_id) == ("error", "early")
            assert "no model is named" in error.error.message
            sound = {"format": {"type": "audio/pcmu"}, "transcription": {"model": "scribe", "language": "en"},
                     "turn_detection": None, "noise_reduction": None}  # fmt: skip
            await connection.session.update(session={"type": "transcription", "audio": {"input": sound}})
            _, updated = await next_of(connection, "session.updated")
            assert updated.session.audio.input.format.type == "audio/pcmu"
            assert updated.session.audio.input.transcription.to_dict() == {"model": "scribe", "language": "en"}
            await connection.input_audio_buffer.append(audio=base64_of(codes))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == text

    with_client(server, work)


def test_the_older_form_of_an_update_is_taken_too(server):
    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            await next_of(connection, "session.created")
            session = {"input_audio_format": "g711_ulaw", "input_audio_transcription": {"model": "scribe"},
                       "turn_detection": None}  # fmt: skip
            await connection.send({"type": "transcription_session.update", "session": session})
            _, updated = await next_of(connection, "transcription_session.updated")
            assert updated.session["input_audio_format"] == "g711_ulaw"
            assert updated.session["input_audio_transcription"] == {"model": "scribe"}

    with_client(server, work)


def resampled(pcm: NDArray[np.int16], rate: int) -> NDArray[np.float32]:
    resampler = Resampler(rate, scribe.RATE)
    return np.concatenate([resampler.feed(floats(pcm)), resampler.rest()])


def test_sound_of_another_rate_is_resampled_where_the_model_says_so(server, model):
    pcm = sound(3.0, seed=40)  # played three times as fast at 24000 Hz
    text = model.plain(resampled(pcm, 24000))
    assert len(text) > 2
    answer = transcribed(server, wav(pcm, rate=24000), model="any")
    assert answer.text == text
    assert answer.usage.seconds == pytest.approx(1.0)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="any") as connection:
            _, created = await next_of(connection, "session.created")
            assert created.session.audio.input.format.to_dict() == {"type": "audio/pcm", "rate": 24000}
            for piece in pieces(pcm, 1001):
                await connection.input_audio_buffer.append(audio=base64_of(piece))
            await set_rate(connection, scribe.RATE)
            assert "cannot change within an utterance" in (await first_error(connection))[1].error.message
            await connection.input_audio_buffer.commit()
            await next_of(connection, "input_audio_buffer.committed")
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == text
            assert completed.usage.seconds == pytest.approx(1.0)
            await set_rate(connection, scribe.RATE)
            await next_of(connection, "session.updated")
            await connection.input_audio_buffer.append(audio=base64_of(pcm))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == model.plain(floats(pcm))

    async def set_rate(connection: Any, rate: int) -> None:
        sound_of = {"input": {"format": {"type": "audio/pcm", "rate": rate}}}
        await connection.session.update(session={"type": "transcription", "audio": sound_of})

    with_client(server, work)


def test_sound_that_is_cleared_is_forgotten(server, model):
    noise, pcm = sound(2.0, seed=5), sound(1.0, seed=6)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            await connection.input_audio_buffer.append(audio=base64_of(noise))
            await connection.input_audio_buffer.clear()
            await next_of(connection, "input_audio_buffer.cleared")
            await connection.input_audio_buffer.append(audio=base64_of(pcm))
            await connection.input_audio_buffer.commit()
            await next_of(connection, "input_audio_buffer.committed")
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == model.plain(floats(pcm))

    with_client(server, work)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"type": "response.create"}, "not implemented; a transcription session takes session.update"),
        ({"type": "input_audio_buffer.append", "audio": "AAA"}, "base64"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "3 bytes of sound are no whole number of samples"),
        ({"type": "input_audio_buffer.append"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAA=", "gain": 3}, "unknown field `gain`"),
        ({"type": "input_audio_buffer.commit"}, "no sound to commit"),
        ({"session": {}}, "not implemented"),
        ({"type": "session.update", "session": {"type": "realtime", "instructions": "sing"}}, "type 'realtime'"),
        *(
            ({"type": "session.update", "session": {"type": "transcription", **session}}, said)
            for session, said in (
                ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}}}}, "the model takes 8000 Hz"),
                ({"audio": {"input": {"format": {"type": "audio/pcma"}}}}, "unknown encoding of sound 'audio/pcma'"),
                ({"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, "commit when an utterance"),
                ({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}, "noise_reduction is not"),
                ({"audio": {"input": {"transcription": {"model": "taps"}}}}, "the model of this session is 'scribe'"),
                ({"audio": {"input": {"transcription": {"language": "de"}}}}, "writes 'en'"),
                ({"audio": {"input": {"transcription": {"prompt": "hm"}}}}, "transcription.prompt is not"),
                ({"audio": {"input": {"transcription": None}}}, "cannot be null"),
                ({"include": ["item.input_audio_transcription.logprobs"]}, "include is not"),
                ({"tools": []}, "unknown field `tools`"),
            )
        ),
        ({"type": "transcription_session.update", "session": {"input_audio_format": "g711_alaw"}}, "g711_alaw"),
        ({"type": "transcription_session.update", "session": {"modalities": ["text"]}}, "unknown field `modalities`"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_event_that_is_not_taken_is_an_error_and_the_session_goes_on(server, model, event, said):
    pcm = sound(0.5, seed=8)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            await next_of(connection, "session.created")
            await connection.send_raw(json.dumps({"event_id": "mine", **event}))
            error = await connection.recv()
            assert error.type == "error"
            assert said in error.error.message
            assert (error.error.type, error.error.event_id) == ("invalid_request_error", "mine")
            await connection.input_audio_buffer.append(audio=base64_of(pcm))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == model.plain(floats(pcm))

    with_client(server, work)


def test_an_utterance_that_fails_is_named_and_the_next_one_is_heard(server):
    bad, good = np.array([0, 32767], np.int16), np.array([20000, 0, 20000], np.int16)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="taps") as connection:
            await connection.input_audio_buffer.append(audio=base64_of(bad))
            _, failed = await next_of(connection, "conversation.item.input_audio_transcription.failed")
            assert "the model failed" in failed.error.message
            assert "secret" not in failed.error.message
            await connection.input_audio_buffer.append(audio=base64_of(good))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == "é"
            assert completed.item_id != failed.item_id

    with_client(server, work)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "mute"}, 400, "writes nothing"),
        ({"model": "scribe", "call_id": "7"}, 400, "call_id"),
        ({"model": "scribe", "intent": "conversation"}, 400, "intent"),
    ],
)
def test_a_session_that_cannot_be_is_refused_before_it_begins(server, query, status, said):
    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(extra_query=query):
            pass

    with pytest.raises(InvalidStatus) as caught:
        with_client(server, work)
    assert caught.value.response.status_code == status
    error = json.loads(caught.value.response.body)["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_plain_call_is_told_to_connect_with_a_websocket(server):
    answer = server.get("/v1/realtime?model=scribe")
    assert answer.status == 426


def test_live_sound_of_many_is_each_written_as_alone(server, model):
    utterances = [sound(1.0, seed=100 + number) for number in range(8)]

    async def hear(client: openai.AsyncOpenAI, pcm: NDArray[np.int16]) -> str:
        async with client.realtime.connect(model="scribe") as connection:
            for piece in pieces(pcm, 400):
                await connection.input_audio_buffer.append(audio=base64_of(piece))
                await asyncio.sleep(0)
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            return completed.transcript

    async def work(client: openai.AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(hear(client, pcm) for pcm in utterances))

    assert with_client(server, work) == [model.plain(floats(pcm)) for pcm in utterances]


@pytest.mark.slow
def test_a_client_that_sends_all_at_once_is_slowed_down_and_answered(server, model):
    pcm = sound(20.0, seed=9)

    async def work(client: openai.AsyncOpenAI) -> str:
        async with client.realtime.connect(model="scribe") as connection:
            await connection.input_audio_buffer.append(audio=base64_of(pcm[:8001]))
            for piece in pieces(pcm[8001:], 160):
                await connection.input_audio_buffer.append(audio=base64_of(piece))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            return completed.transcript

    assert with_client(server, work) == model.plain(floats(pcm))


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


# --- limits ----------------------------------------------------------------------------------------------------------


def configured(serve: Any, folder: Path, text: str, *arguments: object) -> Any:
    (folder / "server.toml").write_text(text)
    return serve(SCRIBE, "--config", folder / "server.toml", *arguments)


def test_keys_rates_and_sequences_of_a_key_are_counted_here_too(serve, tmp_path, model):
    (tmp_path / "keys").write_text(f"ann:{KEY}\n")
    config = "[auth]\nkeys = 'keys'\nrate = 0.001\nburst = 4\n[limits]\nmax_key_sequences = 1\nwrite_seconds = 1.0"
    server = configured(serve, tmp_path, config)
    server.key = KEY
    with pytest.raises(openai.AuthenticationError):
        transcribed(server, wav(sound(0.1)))

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:  # the first call
            with pytest.raises(openai.InternalServerError, match="1 sequences of this API key") as full:  # the second
                await client.audio.transcriptions.create(file=("a.wav", wav(sound(0.1))), model="scribe")
            assert full.value.status_code == 503
            await next_of(connection, "session.created")
            for _ in range(3):  # the first piece of sound, which counts with the connection; the third and fourth call
                await connection.input_audio_buffer.append(audio=base64_of(sound(0.1)))
            await connection.input_audio_buffer.append(audio=base64_of(sound(0.1)), event_id="late")
            _, error = await first_error(connection)
            assert (error.error.type, error.error.event_id) == ("rate_limit_error", "late")

    with_client(server, work, key=KEY)


async def first_error(connection: Any) -> tuple[list[Any], Any]:
    before = []
    while (event := await connection.recv()).type != "error":
        before.append(event)
    return before, event


@pytest.mark.slow
def test_no_session_begins_when_no_sequence_is_free_and_one_does_when_it_is(serve, tmp_path):
    server = configured(serve, tmp_path, "[limits]\nmax_sequences = 1")

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as first:
            await next_of(first, "session.created")
            with pytest.raises(InvalidStatus) as caught:
                await client.realtime.connect(model="scribe").enter()
            assert caught.value.response.status_code == 503
            async with client.realtime.connect() as second:  # it has not named a model, so it holds no rows
                await next_of(second, "session.created")
                sound_of = {"input": {"transcription": {"model": "scribe"}}}
                await second.session.update(session={"type": "transcription", "audio": sound_of})
                await next_of(second, "session.updated")
                await second.input_audio_buffer.append(audio=base64_of(sound(0.1)))
                assert "as many sequences are open" in (await first_error(second))[1].error.message
                await first.input_audio_buffer.clear()
                await next_of(first, "input_audio_buffer.cleared")
                await until(lambda: is_taken(second))  # rows are freed at the engine's next turn

    async def is_taken(connection: Any) -> bool:
        await connection.input_audio_buffer.append(audio=base64_of(sound(0.1)))
        await connection.input_audio_buffer.commit()
        event = await connection.recv()
        if event.type == "error":
            await first_error(connection)  # that of the commit
        return event.type != "error"

    with_client(server, work)


async def closed(connection: Any) -> int:
    """The code with which the server closes."""
    while True:
        try:
            await connection.recv()
        except ConnectionClosed as error:
            return error.rcvd.code


def test_a_session_in_which_nothing_comes_is_closed(serve, tmp_path):
    server = configured(serve, tmp_path, "[limits]\nsequence_idle_seconds = 0.3")

    async def work(client: openai.AsyncOpenAI) -> list[int]:
        codes = []
        for options in ({"model": "scribe"}, {}):
            async with client.realtime.connect(**options) as connection:
                codes.append(await closed(connection))
        return codes

    assert with_client(server, work) == [1008, 1008]
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)


def test_a_server_that_stops_lets_a_session_end_its_utterance(serve, tmp_path, model):
    server = configured(serve, tmp_path, "", "--drain-seconds", 100 * LIMIT_S)
    pcm = sound(1.0, seed=11)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            await connection.input_audio_buffer.append(audio=base64_of(pcm[:4000]))
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: server.get("/v2/health/ready").status == 503)
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await client.audio.transcriptions.create(file=("a.wav", wav(pcm)), model="scribe")
            await connection.input_audio_buffer.append(audio=base64_of(pcm[4000:]))
            await connection.input_audio_buffer.commit()
            _, completed = await next_of(connection, "conversation.item.input_audio_transcription.completed")
            assert completed.transcript == model.plain(floats(pcm))

    with_client(server, work)
    assert server.process.wait(LIMIT_S) == 0


def test_a_model_that_is_unloaded_answers_files_as_a_whole_and_closes_sessions(serve, tmp_path, model):
    server = configured(serve, tmp_path, "[limits]\ndrain_seconds = 1000")
    pcm = sound(20.0, seed=12)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            file = ("a.wav", wav(pcm))
            hearing = asyncio.create_task(client.audio.transcriptions.create(file=file, model="scribe"))
            await until(lambda: server.metric("batchmaker_open_sequences") == 2)
            unloading = asyncio.create_task(
                asyncio.to_thread(server.post, "/v2/repository/models/scribe/unload", {"parameters": {}})
            )
            assert await closed(connection) == 1001
            assert (await hearing).text == model.plain(floats(pcm))
            assert (await unloading).status == 200

    with_client(server, work)
