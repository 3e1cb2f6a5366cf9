"""Lines of several processors: workers of one engine over one of them, and over as many processes of `nn.LSTM`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, final

import torch

import batchmaker as bm
from batchmaker.executor.processors import found_processors
from batchmaker.lab import zoo
from engine_cost.chains import WORDS, chain
from engine_cost.hand_chains import Plain
from engine_cost.hand_server import in_batches, run_all
from engine_cost.measuring import NotRunError, Row, Settings, best_of, compared, interleaved, per_second, say

WIDTHS: Final = (128, 512)
MOST_WORKERS: Final = 14
TARGETS: Final = {128: 1.0, 512: 1.5}


def workers(settings: Settings) -> Iterator[Row]:
    """All waiting, with two workers of an engine over one; where there are more processors, with more as well."""
    usable = found_processors().usable
    if usable < 2:
        raise NotRunError("needs two processors")
    for hidden in WIDTHS if not settings.quick else WIDTHS[:1]:
        with chain(settings, (hidden, "float32")) as it:
            counts: list[int | Literal["auto"]] = [count for count in (2, 4, 8, MOST_WORKERS) if count <= usable]
            for count in [*counts, "auto"] if usable > 2 else counts:
                requests = it.requests * (usable - 1 if count == "auto" else count)
                with _engine(hidden, count) as several:
                    sides = {
                        "ours": partial(_rate, several, requests),
                        "theirs": partial(_rate, it.engine, it.requests),
                    }
                    interleaved(sides, 1)
                    found = interleaved(sides, settings.of(5, 1))
                yield compared(
                    it.name, f"all waiting, {count} workers", "requests/s", found["ours"], found["theirs"],
                    better="higher", baseline="one worker", target=1.8 if count == 2 else None,
                )  # fmt: skip


def processes(settings: Settings) -> Iterator[Row]:
    """All waiting, workers of one engine over as many processes that each run sorted batches of `nn.LSTM`."""
    count = min(MOST_WORKERS, found_processors().usable - 2)
    if count < 4:
        raise NotRunError("needs six processors")
    for hidden in WIDTHS:
        with chain(settings, (hidden, "float32")) as it, _engine(hidden, "auto") as several:
            requests = it.requests * count
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(Peer(hidden, requests[n::count])) for n in range(count)]
                ways = {
                    f"{form}, {most}": partial(_all_peers, peers, form, most, len(requests))
                    for form in ("padded", "packed") for most in (64, 256)
                }  # fmt: skip
                best, seen = best_of(ways, settings.of(2, 1))
                say(f"  {seen}")
                sides = {"ours": partial(_rate, several, requests), "theirs": ways[best]}
                interleaved(sides, 1)
                found = interleaved(sides, settings.of(5, 1))
        yield compared(
            it.name, "all waiting, workers='auto'", "requests/s", found["ours"], found["theirs"], better="higher",
            baseline=f"{count} processes of nn.LSTM, sorted, {best}", target=TARGETS[hidden], seen=seen,
        )  # fmt: skip


def _engine(hidden: int, count: int | Literal["auto"]) -> bm.Engine:
    model = zoo.make("lstm", hidden=hidden, dtype="float32", vocabulary_size=WORDS, max_batch=256)
    one_thread = os.environ.pop("OMP_NUM_THREADS")  # it would be the number of all workers' threads together
    try:
        return bm.Engine(model, threads=1, workers=count)
    finally:
        os.environ["OMP_NUM_THREADS"] = one_thread


def _rate(engine: bm.Engine, requests: Sequence[Any]) -> float:
    return per_second(partial(engine.map, requests, progress=False, max_in_flight=1 << 14), len(requests))


@final
class Peer:
    """A process that computes its share of the requests in sorted batches when it is told to."""

    def __init__(self, hidden: int, requests: Sequence[Any]) -> None:
        self._line, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, hidden, requests), daemon=True)
        self._process.start()

    def __enter__(self) -> Peer:
        assert self._line.recv() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._line.send(None)
        self._process.join()

    def begin(self, form: str, most: int) -> None:
        self._line.send((form, most))

    def wait(self) -> None:
        assert self._line.recv() == "done"


def _all_peers(peers: Sequence[Peer], form: str, most: int, count: int) -> float:
    def run() -> None:
        for peer in peers:
            peer.begin(form, most)
        for peer in peers:
            peer.wait()

    return per_second(run, count)


def _serve(line: Connection, hidden: int, requests: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    step: Any = zoo.make("lstm", hidden=hidden, dtype="float32", vocabulary_size=WORDS).cells["step"].module  # type: ignore[attr-defined]
    plain = Plain(step.embedding, step.layers[0])
    ordered = sorted(requests, key=len)
    plain.padded(ordered[:64])
    line.send("ready")
    while (asked := line.recv()) is not None:
        form, most = asked
        run_all(getattr(plain, form), in_batches(ordered, most, None))
        line.send("done")
