"""Lines of a network that stops by a value, and of a tagger: all waiting and at half load, over batches by hand."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import batchmaker as bm
from batchmaker.cli.workload import make_workload
from batchmaker.lab import zoo
from engine_cost.hand_decoders import LETTERS, FoldedBatch, PlainBatch, Spoken
from engine_cost.hand_server import Batches, Run, batched_rate, in_batches
from engine_cost.hand_tagger import taggers
from engine_cost.measuring import (
    Better,
    Row,
    Settings,
    at_rate,
    best_of,
    compared,
    interleaved,
    offered,
    per_second,
    say,
)

MAXIMA: Final = (64, 256)
SAME: Final = 0.999
"""Share of requests whose words must be the same: where two scores are equal but for rounding either may win."""
TAGGER_WORDS: Final = 10_000
TAGGER_HIDDEN: Final = 128
SHORTEST, LONGEST = 5, 40


def decoder(settings: Settings) -> Iterator[Row]:
    """A GRU encoder-decoder of 256, 7 letters in, about 7 sounds out until the end: over sorted batches by hand."""
    requests = spelled(settings, settings.of(2000, 200))
    model = Spoken(requests[:200])
    reader, writer = model.read.module, model.write.module
    ways: dict[str, Run] = {"torch": PlainBatch(reader, writer), "folded": FoldedBatch(reader, writer)}
    yield from _both(settings, "GRU encoder-decoder 256", model, requests, ways, targets=(0.8, 1.3))


def tagger(settings: Settings) -> Iterator[Row]:
    """A BiLSTM tagger of 128 on sentences of 5 to 40 words: over padded, packed and equal-work batches by hand."""
    work = make_workload("lstm", data=[settings.data / "europarl_deen" / "raw5k.en"], count=4000)
    sentences = [np.asarray(words, np.int64) % TAGGER_WORDS for words in work.requests]
    sentences = [words for words in sentences if SHORTEST <= len(words) <= LONGEST][: settings.of(1330, 150)]
    model = zoo.make("bilstm-tagger", vocabulary_size=TAGGER_WORDS, hidden=TAGGER_HIDDEN, layers=1)
    yield from _both(settings, f"BiLSTM tagger {TAGGER_HIDDEN}", model, sentences, taggers(model), targets=(0.9, 1.3))


def spelled(settings: Settings, count: int) -> list[NDArray[np.int64]]:
    """Return different words of 4 to 10 letters, as letter ids, in the order in which the text has them."""
    text = (settings.data / "europarl_deen" / "raw5k.en").read_text("utf-8").lower()
    words = list(dict.fromkeys(word for word in re.findall(r"[a-z]+", text) if 4 <= len(word) <= 10))[:count]
    return [np.frombuffer(word.encode(), np.uint8).astype(np.int64) - ord("a") + (LETTERS - 26) for word in words]


def _both(
    settings: Settings,
    work: str,
    model: bm.Model,
    requests: Sequence[NDArray[np.int64]],
    ways: Mapping[str, Run],
    targets: tuple[float, float],
) -> Iterator[Row]:
    """Yield throughput with everything waiting, and p50 under half the slower peak."""
    with bm.Engine(model, threads=1) as engine:
        _check(engine.map(requests, progress=False), ways, requests)
        by_length = sorted(requests, key=len)
        sides = {
            f"{name}, {most}": partial(batched_rate, run, in_batches(by_length, most, None))
            for name, run in ways.items() for most in MAXIMA
        }  # fmt: skip
        best, seen = best_of(sides, settings.of(3, 1))
        found = interleaved(
            {
                "ours": lambda: per_second(partial(engine.map, requests, progress=False), len(requests)),
                "theirs": sides[best],
            },
            settings.of(7, 2),
        )
        yield _row(
            work, "all waiting", "requests/s", found["ours"], found["theirs"], "higher", best, targets[0], seen=seen
        )
        rate = 0.5 * min(float(np.median(values)) for values in found.values())
        yield _half(settings, work, engine, requests, ways, rate, targets[1])


def _half(
    settings: Settings, work: str, engine: bm.Engine, requests: Any, ways: Mapping[str, Run], rate: float, target: float
) -> Row:
    """Return p50 at this rate over that of the batches by hand that have the lowest."""
    seconds = settings.of(2.0, 0.5)
    say(f"  {rate:.0f} requests/s")
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(contextlib.closing(Batches(partial(_sorted_batch, run), max(MAXIMA))))
            for name, run in ways.items()
        }
        seen = {
            name: 1e3 * float(np.median(offered(server.submit, requests, rate, seconds, 0)))
            for name, server in servers.items()
        }
        best = min(seen, key=seen.__getitem__)
        found = interleaved(
            {
                "ours": at_rate(engine.submit, requests, rate, seconds),
                "theirs": at_rate(servers[best].submit, requests, rate, seconds),
            },
            settings.of(5, 1),
        )
    return _row(
        work, "p50 at half load", "ms", found["ours"][:, 0], found["theirs"][:, 0], "lower", best,
        target, rate=rate, seen=seen,
    )  # fmt: skip


def _row(
    work: str, figure: str, unit: str, ours: Any, theirs: Any, better: Better, best: str, target: float, **more: Any
) -> Row:
    baseline = f"batches by hand, {best}"
    return compared(work, figure, unit, ours, theirs, better=better, baseline=baseline, target=target, **more)


def _sorted_batch(run: Run, requests: Sequence[Any]) -> list[Any]:
    """Run a batch in the order of length, as packing wants it, and put the results back in order."""
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number]))
    results: list[Any] = [None] * len(requests)
    for number, result in zip(order, run([requests[number] for number in order]), strict=True):
        results[number] = result
    return results


def _check(ours: Sequence[Any], ways: Mapping[str, Run], requests: Sequence[Any]) -> None:
    """Raise AssertionError unless every way gives the engine's words, but for a request in a thousand."""
    for name, run in ways.items():
        theirs = [result for at in range(0, len(requests), 64) for result in run(requests[at : at + 64])]
        alike = [np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(ours, theirs, strict=True)]
        assert np.mean(alike) >= SAME, f"{name}: {len(alike) - sum(alike)} of {len(alike)} requests differ"
