"""Attention over an encoder's steps: the engine beside padded batches by hand, and beside one request at a time.

    python benchmarks/memories.py [--hidden 256] [--requests 64] [--rounds 7]

A GRU reads up to 40 words, and a greedy GRU with attention over all its steps says 20. Twice: all requests of 40 words,
and of 10 to 40. The three are measured in turn, in one thread; the medians are printed, in milliseconds, and how many
requests got the same words. By hand all requests are one batch, padded to the longest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import batchmaker as bm

WORDS: Final = 1000
LONGEST: Final = 40
SAID: Final = 20


class Encode(nn.Module):
    """word, h -> h."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(WORDS, hidden), nn.GRUCell(hidden, hidden)

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        made: Tensor = self.step(self.embed(word), h)
        return made


class Decode(nn.Module):
    """word, a memory, h -> the next word, h."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(WORDS, hidden), nn.GRUCell(2 * hidden, hidden)
        self.out = nn.Linear(2 * hidden, WORDS)

    def forward(self, word: Tensor, keys: Tensor, number: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        scores = (keys @ h[:, :, None]).squeeze(2)
        scores = scores.masked_fill(torch.arange(keys.shape[1]) >= number[:, None], -torch.inf)
        context = (scores.softmax(1)[:, None] @ keys).squeeze(1)
        h = self.step(torch.cat([self.embed(word), context], 1), h)
        return self.out(torch.cat([h, context], 1)).argmax(1), h


class Translates(bm.Model):
    def __init__(self, hidden: int, most: int) -> None:
        torch.manual_seed(0)
        self.encode = bm.Cell(Encode(hidden).eval(), max_batch=most)
        self.decode = bm.Cell(Decode(hidden).eval(), max_batch=most, memory="keys")

    def unfold(self, source: Any) -> Any:
        h = self.encode.run(source)
        return self.decode.loop((1, h), max_steps=SAID, memory=h.steps)[0].steps


@torch.no_grad()
def by_hand(model: Translates, requests: Sequence[NDArray[np.int64]], hidden: int) -> Tensor:
    """Return what is said for all requests, [requests, SAID], computed as one padded batch."""
    number = torch.tensor([len(request) for request in requests])
    source = torch.zeros(len(requests), int(number.max()), dtype=torch.int64)
    for place, request in enumerate(requests):
        source[place, : len(request)] = torch.from_numpy(request)
    encode, decode = model.encode.module, model.decode.module
    h, steps = torch.zeros(len(requests), hidden), []
    for step in range(source.shape[1]):
        h = torch.where((step < number)[:, None], encode(source[:, step], h), h)
        steps.append(h)
    keys, word, said = torch.stack(steps, 1), torch.ones(len(requests), dtype=torch.int64), []
    for _ in range(SAID):
        word, h = decode(word, keys, number, h)
        said.append(word)
    return torch.stack(said, 1)


def compare(name: str, lengths: Sequence[int], hidden: int, rounds: int) -> None:
    """Measure in turn, and print."""
    generator, model = np.random.default_rng(0), Translates(hidden, len(lengths))
    requests = [generator.integers(0, WORDS, length) for length in lengths]
    with bm.Engine(model, threads=1, workers=1) as engine:
        ways: dict[str, Callable[[], Any]] = {
            "engine": lambda: engine.map(requests, progress=False),
            "by hand": lambda: by_hand(model, requests, hidden),
            "one by one": lambda: [by_hand(model, [request], hidden)[0] for request in requests],
        }
        answers = {way: run() for way, run in ways.items()}
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                began = time.perf_counter()
                run()
                taken[way].append(time.perf_counter() - began)
    same = sum(
        bool((torch.as_tensor(one) == other).all())
        for one, other in zip(answers["engine"], answers["one by one"], strict=True)
    )
    median = {way: statistics.median(times) for way, times in taken.items()}
    shown = ", ".join(f"{way} {1e3 * seconds:.0f} ms" for way, seconds in median.items())
    over = ", ".join(f"{median[way] / median['engine']:.2f} times {way}" for way in ways if way != "engine")
    print(f"{name}: {shown}; the engine has {over}; {same} of {len(requests)} said the same words")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    mixed = np.random.default_rng(0).integers(10, LONGEST + 1, given.requests).tolist()
    compare(f"{LONGEST} words", [LONGEST] * given.requests, given.hidden, given.rounds)
    compare(f"10 to {LONGEST} words", mixed, given.hidden, given.rounds)


if __name__ == "__main__":
    main()
