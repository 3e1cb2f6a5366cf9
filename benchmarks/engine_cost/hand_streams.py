"""A frame network like silero-vad's (v5, 16 kHz), and live streams of it batched by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, final

import torch
from torch import Tensor, nn

import batchmaker as bm

FRAME: Final = 576
"""Samples a step sees: 512 new ones, 32 ms, after the last 64 of the frame before."""
HIDDEN: Final = 128
BINS: Final = 129
MOST: Final = 256


@final
class Frame(nn.Module):
    """(frame, h, c) -> (speech, h, c): a transform into magnitudes, four convolutions, an LSTM cell, an output.

    frame: [batch, 576]. speech: [batch], between 0 and 1. Shapes are silero-vad's, weights are random.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Conv1d(1, 2 * BINS, 256, stride=128, bias=False)
        shapes = ((BINS, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        self.encoder = nn.ModuleList(nn.Conv1d(a, b, 3, stride=stride, padding=1) for a, b, stride in shapes)
        self.lstm = nn.LSTMCell(128, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, frame: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = nn.functional.pad(frame, (0, 64))[:, None]
        real, imaginary = self.transform(x).split(BINS, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for layer in self.encoder:
            x = layer(x).relu()
        h, c = self.lstm(x[:, :, 0], (h, c))
        return self.out(h.relu())[:, 0].sigmoid(), h, c


@final
class Streams(bm.Model):
    """A chunk is one or more frames, [frames, 576]; its result is the last one's speech."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = Frame().eval().requires_grad_(False)
        self.frame = bm.Cell(module, max_batch=MOST)
        self.example_request = torch.zeros(1, FRAME)

    def unfold(self, frames: Any) -> Any:
        return self.unfold_chunk(frames, None)[0]

    def unfold_chunk(self, frames: Any, state: Any) -> tuple[Any, Any]:
        zeros = torch.zeros(HIDDEN)
        speech, h, c = self.frame.run(frames, (zeros, zeros) if state is None else state)
        return speech, (h, c)


@final
class StreamsByHand:
    """One thread: take the frames that have come, stack them and their streams' states, run the batch, scatter.

    module: (frames, *states) -> (result of each, *states). widths: of the states, which begin as zeros.
    """

    def __init__(self, module: nn.Module, streams: int, widths: Sequence[int] = (HIDDEN, HIDDEN)) -> None:
        self._module = module
        self._states = [torch.zeros(streams, width) for width in widths]
        self._inbox: queue.SimpleQueue[tuple[int, Tensor, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, stream: int, frame: Tensor) -> Future[float]:
        """Return the future of the frame's speech; a stream's frames are computed one after the other."""
        future: Future[Any] = Future()
        self._inbox.put((stream, frame, future))
        return future

    def close(self) -> None:
        """End the thread; what has not been answered is given up."""
        self._inbox.put(None)
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        kept: list[tuple[int, Tensor, Future[Any]]] = []  # a second frame of a stream waits for its first
        while True:
            taken, kept, seen = kept, [], {item[0] for item in kept}
            while len(taken) < MOST and (not taken or not self._inbox.empty()):
                item = self._inbox.get()
                if item is None:
                    return
                (kept if item[0] in seen else taken).append(item)
                seen.add(item[0])
            streams = torch.tensor([stream for stream, _, _ in taken])
            frames = torch.cat([frame for _, frame, _ in taken])
            speech, *states = self._module(frames, *[state[streams] for state in self._states])
            for held, state in zip(self._states, states, strict=True):
                held[streams] = state
            for (_, _, future), value in zip(taken, speech.tolist(), strict=True):
                future.set_result(value)
