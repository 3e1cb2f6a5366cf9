"""Live streams of a transducer: trained here in a minute, on sounds that are made here, it then hears many at once.

Somebody says symbols: each is a sound in 16 bands of frequency that turns into another, quickly or slowly, loudly or
softly, in noise and with pauses; and each symbol is followed by one of six. A transducer (RNN-T: Graves 2012) hears
frame after frame and writes the symbols while it hears. Each stream is a sequence: its chunks of frames come when they
come, and the states of encoder and predictor stay in the engine.

    python examples/transducer/transducer.py            # train, then serve streams that arrive in real time
    batchmaker serve examples/transducer/transducer.py  # train, then serve files and live sound
"""

from __future__ import annotations

import argparse
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import batchmaker as bm
from batchmaker.arrays import Float32s
from batchmaker.server import Audio, Signature, TensorSpec, Transcriptions

BANDS = 16
SYMBOLS = 20
BLANK = 0
"""No symbol: the network goes on to the next frame. Symbols are 1 to SYMBOLS."""

KNOWN_AFTER = 4
"""Frames of a symbol after which the network is taught to write it. The shortest symbols have six."""

FRAME_S = 0.01
RATE = 8000
"""Samples a second, and so FRAME of them in a frame."""

FRAME = 80
TONES = 2 * np.arange(1, BANDS + 1)
"""The waves in a frame of the tone of each band, which is 200 Hz wide."""

QUIET = 1 / 64
"""The amplitude of a tone whose band is 0."""

MOST = 3
"""Most symbols at one frame."""


# --- sounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Utterance:
    """frames: float32 [n, BANDS]. symbols: what is said. heard_at: the frame at which each symbol can be known."""

    frames: Float32s
    symbols: list[int]
    heard_at: list[int]


class Voice:
    """Says symbols. Each has a sound to begin with, another to end with, and six symbols that may follow."""

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.sounds = draw.normal(size=(SYMBOLS + 1, 2, BANDS))
        self.followers = [draw.choice(np.arange(1, SYMBOLS + 1), 6, replace=False).tolist() for _ in range(SYMBOLS + 1)]

    def say(self, draw: np.random.Generator, count: int, noise: float) -> Utterance:
        """Return an utterance of `count` symbols by chance. noise: its standard deviation, that of sounds is 1."""
        parts, symbols, heard_at, n = list[NDArray[np.float64]](), list[int](), list[int](), 0
        symbol = BLANK
        for _ in range(count):
            symbol = int(draw.choice(self.followers[symbol]))
            symbols.append(symbol)
            pause, length = int(draw.integers(2, 7)), int(draw.integers(6, 15))
            share = np.linspace(0, 1, length)[:, None]
            first, last = self.sounds[symbol]
            sound = ((1 - share) * first + share * last) * draw.uniform(0.7, 1.3)
            parts += [np.zeros((pause, BANDS)), sound]
            heard_at.append(n + pause + KNOWN_AFTER)
            n += pause + length
        clean = np.concatenate([*parts, np.zeros((3, BANDS))])
        return Utterance((clean + noise * draw.normal(size=clean.shape)).astype(np.float32), symbols, heard_at)


def sound_of(frames: Float32s) -> NDArray[np.int16]:
    """Return how frames [n, BANDS] sound, [FRAME * n], as PCM of 16 bits: a tone for each band."""
    waves = np.sin(2 * np.pi * TONES[:, None] * np.arange(FRAME) / FRAME)
    sound = (QUIET * np.exp(frames / 2) @ waves).reshape(-1)
    return np.clip(np.rint(32768 * sound), -32768, 32767).astype(np.int16)


def frames_of(sound: NDArray[np.float32]) -> Float32s:
    """Return the frames [n, BANDS] of sound from -1 to 1, [n, FRAME]: the logarithm of the energy in each band."""
    amplitudes = np.abs(np.fft.rfft(sound)[:, TONES]) * (2 / FRAME)
    return (2 * np.log(np.maximum(amplitudes, 1e-4) / QUIET)).astype(np.float32)


# --- the network -----------------------------------------------------------------------------------------------------


class Predict(nn.Module):
    """One symbol: (symbol, h, c) -> (h, c). What was written is all that it knows."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(SYMBOLS + 1, hidden), nn.LSTMCell(hidden, hidden)

    def forward(self, symbol: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state: tuple[Tensor, Tensor] = self.lstm(self.embed(symbol), (h, c))
        return state


class Decide(nn.Module):
    """(heard [hidden], told [hidden], t, k, length) -> (symbol, emits, t, k, going): a symbol, or the next frame.

    t: the frame. k: symbols written at it. After MOST of them the next frame comes, as after a blank.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heard, self.told = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, SYMBOLS + 1)

    def scores(self, heard: Tensor, told: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.heard(heard) + self.told(told)))
        return scores

    def forward(self, heard: Tensor, told: Tensor, t: Tensor, k: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        symbol = self.scores(heard, told).argmax(-1)
        emits = symbol != BLANK
        k = torch.where(emits, k + 1, MOST)
        goes_on = k >= MOST
        t = torch.where(goes_on, t + 1, t)
        return symbol, emits, t, torch.where(goes_on, 0, k), t < length


class Network(nn.Module):
    """All of it: an encoder of frames, a predictor of symbols, and what decides from both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.encoder = nn.LSTM(BANDS, hidden)
        self.predict, self.decide = Predict(hidden), Decide(hidden)


class Decoding(NamedTuple):
    """What the loop knows: the last symbol, whether it is one, where it is, and the predictor's state."""

    symbol: Any
    emits: Any
    t: Any
    k: Any
    going: Any
    h: Any
    c: Any


class Transducer(bm.Model):
    """A request is an utterance, float32 [n, BANDS], a chunk is the next frames of one.

    The result is the symbols that are new: int64 [m], and m may be 0.
    """

    example_request = torch.zeros(4, BANDS)
    example_chunks = (torch.zeros(16, BANDS), torch.zeros(16, BANDS), torch.zeros(16, BANDS))

    def __init__(self, network: Network) -> None:
        self.encoder = bm.recurrent(network.encoder, max_batch=128)
        self.predict = bm.Cell(network.predict, max_batch=128, priority=1)
        self.decide = bm.Cell(network.decide, max_batch=128, priority=1)

    def unfold(self, frames: Any) -> Any:
        return self.unfold_chunk(frames, None)[0]

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        encoder, (h, c) = (None, self.predict.run([BLANK])) if state is None else state
        heard, encoder = self.encoder(frames, encoder)
        length = len(frames)

        def body(now: Decoding) -> Decoding:
            decided = self.decide(heard.at(now.t), now.h, now.t, now.k, length)
            symbol, emits = decided[:2]
            h, c = bm.cond(emits, lambda: self.predict(symbol, now.h, now.c), lambda: (now.h, now.c))
            return Decoding(*decided, h, c)

        begin = Decoding(BLANK, False, 0, 0, True, h, c)
        last = bm.while_loop(lambda s: s.going, body, begin, max_steps=MOST * length, collect=lambda s: s.emits)
        return last.symbol.steps, (encoder, (last.h, last.c))

    def serving_signature(self) -> Signature:
        """A client sends sound, in rows of a frame, and gets symbols."""
        sound, symbols = TensorSpec("sound", "FP32", (-1, FRAME)), TensorSpec("symbols", "INT64", (-1,))
        return Signature((sound,), (symbols,), request="value", stream="elements", encode=frames_of)

    def serving_audio(self) -> Audio:
        """The sound may come as PCM of 16 bits or mu-law."""
        return Audio(RATE)

    def serving_transcriptions(self) -> Transcriptions:
        """Clients of OpenAI's API get the symbols as letters."""
        return Transcriptions(decode=letters)


@torch.no_grad()
def one_by_one(network: Network, frames: Float32s) -> list[int]:
    """Return the symbols of an utterance in plain PyTorch, without batchmaker."""
    heard = network.encoder(torch.from_numpy(frames))[0]
    h, c = network.predict(torch.tensor([BLANK]), *(torch.zeros(1, network.hidden),) * 2)
    written = list[int]()
    for x in heard:
        for _ in range(MOST):
            found = network.decide.scores(x[None], h).argmax(-1)
            if found == BLANK:
                break
            written.append(int(found))
            h, c = network.predict(found, h, c)
    return written


# --- training --------------------------------------------------------------------------------------------------------


def train(network: Network, voice: Voice, *, steps: int, batch: int = 16, noise: float = 0.5, seed: int = 0) -> None:
    """Teach the network with known alignments: a symbol is written KNOWN_AFTER frames after it began.

    The loss of a transducer is a sum over all alignments, because usually nobody knows the right one. Here it is known,
    since the sounds are made here, and the cross-entropy of the decisions on its path will do: a blank at each frame,
    and each symbol. A second one, from each frame to the symbol in it, lets the encoder learn in half the steps.
    """
    draw = np.random.default_rng(seed)
    name = nn.Linear(network.hidden, SYMBOLS + 1)
    optimizer = torch.optim.Adam([*network.parameters(), *name.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for step in range(1, steps + 1):
        said = [voice.say(draw, int(draw.integers(3, 9)), noise) for _ in range(batch)]
        frames = nn.utils.rnn.pad_sequence([torch.from_numpy(one.frames) for one in said])
        heard = network.encoder(frames)[0]
        state, told = (torch.zeros(batch, network.hidden),) * 2, []
        for row in nn.utils.rnn.pad_sequence([torch.tensor([BLANK, *one.symbols]) for one in said]):
            state = network.predict(row, *state)
            told.append(state[0])
        t, u, row, wanted = torch.tensor([place for row, one in enumerate(said) for place in path(one, row)]).T
        loss = cross_entropy(network.decide.scores(heard[t, row], torch.stack(told)[u, row]), wanted)
        named = nn.utils.rnn.pad_sequence([torch.tensor(named_frames(one)) for one in said])
        total = loss + cross_entropy(name(heard).flatten(0, 1), named.flatten())
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"  step {step} of {steps}, loss of a decision {loss.item():.4f}", flush=True)


def path(one: Utterance, row: int) -> list[tuple[int, int, int, int]]:
    """Return (frame, symbols written before, row, what is right there) of each decision of an utterance."""
    found, u = list[tuple[int, int, int, int]](), 0
    for t in range(len(one.frames)):
        if u < len(one.symbols) and one.heard_at[u] == t:
            found.append((t, u, row, one.symbols[u]))
            u += 1
        found.append((t, u, row, BLANK))
    return found


def named_frames(one: Utterance) -> list[int]:
    """Return the symbol that can be heard in each frame up to the one at which it is written; BLANK elsewhere."""
    found = [BLANK] * len(one.frames)
    for symbol, at in zip(one.symbols, one.heard_at, strict=True):
        found[at - KNOWN_AFTER : at + 1] = [symbol] * (KNOWN_AFTER + 1)
    return found


def trained(steps: int = 1200, hidden: int = 64, seed: int = 0) -> Network:
    """Return a network that has heard `steps` batches of utterances."""
    torch.manual_seed(seed)
    network = Network(hidden)
    begin_s = time.perf_counter()
    train(network, Voice(), steps=steps, seed=seed)
    print(f"trained for {time.perf_counter() - begin_s:.0f} s")
    return network.eval()


def build(*, steps: int = 1200) -> Transducer:
    """Return the trained model, for `batchmaker serve`."""
    return Transducer(trained(steps))


# --- streams ---------------------------------------------------------------------------------------------------------


def errors(written: Sequence[int], said: Sequence[int]) -> int:
    """Return how many symbols must be inserted, removed or replaced to get from one to the other."""
    row = list(range(len(said) + 1))
    for i, one in enumerate(written, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(said, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def error_rate(written: Sequence[Sequence[int]], said: Sequence[Utterance]) -> float:
    """Return the errors for each symbol that was said."""
    wrong = sum(errors(one, other.symbols) for one, other in zip(written, said, strict=True))
    return wrong / sum(len(one.symbols) for one in said)


@dataclass
class Heard:
    """Of streams: the symbols of each, and for each chunk the milliseconds from its last frame to its answer."""

    symbols: list[list[int]]
    latency_ms: list[float]


def serve(engine: bm.Engine, said: Sequence[Utterance], *, chunk: int, speed: float, show: int) -> Heard:
    """Hear utterances at once, each a stream whose chunks come in real time, or `speed` times as fast.

    The streams do not begin together: their chunks come spread over the time of one. show: of so many streams each
    hypothesis is printed when it grows.
    """
    sequences = [engine.open_sequence() for _ in said]
    heard = Heard([[] for _ in said], [])
    chunk_s = chunk * FRAME_S / speed
    arrivals = sorted(
        (chunk_s * (number + 1 + stream / len(said)), stream, number * chunk)
        for stream, one in enumerate(said)
        for number in range(-(-len(one.frames) // chunk))
    )
    waiting = []
    begin_s = time.perf_counter()
    for due_s, stream, at in arrivals:
        time.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
        answer = sequences[stream].submit(said[stream].frames[at : at + chunk])
        done = list[float]()
        answer.add_done_callback(lambda _, done=done: done.append(time.perf_counter()))
        waiting.append((begin_s + due_s, stream, answer, done))
        while waiting and waiting[0][2].done():
            take(heard, *waiting.pop(0), show)
    for one in waiting:
        take(heard, *one, show)
    for sequence in sequences:
        sequence.close()
    return heard


def take(heard: Heard, due_s: float, stream: int, answer: Any, done: list[float], show: int) -> None:
    """Add the answer to a chunk to what was heard of its stream."""
    new = answer.result().tolist()
    while not done:  # the callback is called just after the result is there
        time.sleep(0)
    heard.latency_ms.append(1e3 * (done[0] - due_s))
    heard.symbols[stream] += new
    if new and stream < show:
        print(f"  stream {stream}: {letters(heard.symbols[stream])}")


def filled(one: Utterance, chunk: int) -> Utterance:
    """Return the utterance with silence at its end, up to a whole number of chunks."""
    silence = np.zeros((-len(one.frames) % chunk, BANDS), np.float32)
    return Utterance(np.concatenate([one.frames, silence]), one.symbols, one.heard_at)


def letters(symbols: Sequence[int]) -> str:
    return "".join(chr(ord("a") + symbol - 1) for symbol in symbols)


def write_wav(path: str, one: Utterance) -> None:
    """Write how an utterance sounds."""
    with wave.open(path, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(sound_of(one.frames).astype("<i2").tobytes())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, hear one by one, hear live, and print what counts."""
    parser = argparse.ArgumentParser(description="Trains a small transducer and serves live streams of it.")
    parser.add_argument("--steps", type=int, default=1200, help="batches of utterances to train with")
    parser.add_argument("--hidden", type=int, default=64, help="width of all layers")
    parser.add_argument("--streams", type=int, default=100, help="streams at once")
    parser.add_argument("--symbols", type=int, default=30, help="symbols in each stream")
    parser.add_argument("--chunk", type=int, default=16, help="frames in a chunk, of 10 ms each")
    parser.add_argument("--noise", type=float, default=0.5, help="standard deviation of the noise in the streams")
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than real time chunks come")
    parser.add_argument("--show", type=int, default=2, help="streams whose hypotheses are printed")
    parser.add_argument("--wav", help="write an utterance to this WAV file, say what is in it, and end")
    given = parser.parse_args(arguments)
    if given.wav is not None:
        one = Voice().say(np.random.default_rng(1), given.symbols, given.noise)
        write_wav(given.wav, one)
        print(letters(one.symbols))
        return
    torch.set_num_threads(1)
    network = trained(given.steps, given.hidden)
    draw = np.random.default_rng(1)  # other utterances than in training
    said = [filled(Voice().say(draw, given.symbols, given.noise), given.chunk) for _ in range(given.streams)]
    begin_s = time.process_time()
    alone = [one_by_one(network, one.frames) for one in said]
    alone_s = time.process_time() - begin_s
    sound_s = FRAME_S * sum(len(one.frames) for one in said)
    with bm.Engine(Transducer(network), threads=1) as engine:
        begin_s = time.process_time()
        heard = serve(engine, said, chunk=given.chunk, speed=given.speed, show=given.show)
        live_s = time.process_time() - begin_s

    p50, p99 = np.percentile(heard.latency_ms, (50, 99)).tolist()
    same = sum(one == other for one, other in zip(heard.symbols, alone, strict=True))
    print(f"{given.streams} streams at once, {len(heard.latency_ms)} chunks of {1e3 * FRAME_S * given.chunk:.0f} ms")
    print(f"from a chunk's last frame to its symbols: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"symbol error rate: live {error_rate(heard.symbols, said):.2%}, one by one {error_rate(alone, said):.2%}")
    print(f"{same} of {given.streams} streams have the symbols that one by one has")
    print(f"seconds of sound for a second of processor: live {sound_s / live_s:.0f},", end=" ")
    print(f"one by one in PyTorch, whole utterances, {sound_s / alone_s:.0f}")


if __name__ == "__main__":
    main()
