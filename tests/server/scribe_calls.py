"""Sound for the models of scribe.py, and what OpenAI's client asks a server of them."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import wave
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import openai
import scribe
from numpy.typing import NDArray
from server_process import HERE, LIMIT_S

SCRIBE = HERE / "scribe.py"
PATH = "/v1/audio/transcriptions"


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
