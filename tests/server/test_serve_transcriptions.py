"""Files and live sound as text, asked by OpenAI's own client of a server that runs as a process."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import struct
import wave
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import scribe
from numpy.typing import NDArray
from server_process import LIMIT_S

SCRIBE = Path(__file__).with_name("scribe.py")
PATH = "/v1/audio/transcriptions"
KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def server(serve):
    return serve(SCRIBE, f"taps={SCRIBE}:kind=taps", f"mute={SCRIBE}:kind=mute", "lstm:hidden=4,vocabulary_size=9")


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


def test_sound_of_no_length_has_no_text(server):
    assert transcribed(server, wav(np.zeros(0, np.int16))).text == ""
