"""Live sound as text, in sessions of OpenAI's own client with a server that runs as a process; and their limits."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import scribe
from numpy.typing import NDArray
from scribe_calls import SCRIBE, base64_of, floats, next_of, pieces, sound, transcribed, wav, with_client
from server_process import LIMIT_S
from websockets.exceptions import ConnectionClosed, InvalidStatus

from batchmaker.server.formats.resampling import Resampler
from waiting import until

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def server(serve):
    kinds = [f"{kind}={SCRIBE}:kind={kind}" for kind in ("taps", "mute", "any")]
    return serve(SCRIBE, *kinds)


@pytest.fixture(scope="module")
def model():
    return scribe.build()


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


def test_sound_of_a_client_that_has_gone_is_not_heard_to_its_end(server):
    seconds = 600  # in chunks of 0.2 s
    pcm = np.concatenate([sound(2.0, seed=3), np.zeros(seconds * scribe.RATE, np.int16)])
    before = server.metric("nv_inference_request_success", model="scribe")

    async def work(client: openai.AsyncOpenAI) -> None:
        async with client.realtime.connect(model="scribe") as connection:
            await connection.input_audio_buffer.append(audio=base64_of(pcm))
            await next_of(connection, "conversation.item.input_audio_transcription.delta")

    with_client(server, work)
    server.wait_for(lambda: server.metric("batchmaker_open_sequences") == 0)
    server.wait_idle()
    assert server.metric("nv_inference_request_success", model="scribe") - before < 5 * seconds


# --- limits ----------------------------------------------------------------------------------------------------------


def configured(serve: Any, folder: Path, text: str, *arguments: object) -> Any:
    (folder / "server.toml").write_text(text)
    return serve(SCRIBE, "--config", folder / "server.toml", *arguments)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
