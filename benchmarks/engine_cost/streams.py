"""Live streams of a frame network, a frame each 32 ms: streams a core, and whether they are held."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import batchmaker as bm
from batchmaker.engine import Answer
from engine_cost.hand_streams import FRAME, Streams, StreamsByHand
from engine_cost.measuring import Pending, Row, Settings, absolute, compared, interleaved, say, wait_for_all

EACH_S: Final = 0.032
COUNTS: Final = (200, 500, 1000)
TARGET: Final = 0.9
TARGET_A_CORE: Final = 500
Send = Callable[[int, Tensor], Pending]


def played(
    send: Send, frames: Tensor, count: int, seconds: float, each_s: float = EACH_S
) -> tuple[NDArray[np.float64], float]:
    """Play `count` streams with a frame each 32 ms, evenly spread; return the ms from due to answered, and CPU us.

    CPU: a frame, of the whole process, the sending included, which is alike on both sides. A frame without an answer
    is as late as it is when waiting has ended.
    """
    rounds = max(3, int(seconds / each_s))
    due = (np.arange(rounds * count) * (each_s / count)).astype(np.float64)
    done = np.full(len(due), np.nan)

    def note(number: int, future: Pending) -> None:
        now_s = time.perf_counter()
        if future.exception() is None:  # otherwise it has no answer
            done[number] = now_s

    futures = []
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    for number, at_s in enumerate((due + begin_s).tolist()):
        ahead_s = at_s - time.perf_counter()
        if ahead_s > 1e-3:  # frames of one millisecond are sent together, as from a socket
            time.sleep(ahead_s)
        future = send(number % count, frames[number % len(frames)][None])
        future.add_done_callback(partial(note, number))
        futures.append(future)
    wait_for_all(futures, max(2.0, 2 * seconds))
    cpu_s, now_s = time.process_time() - cpu_s, time.perf_counter()
    answered = max(1, int(np.count_nonzero(~np.isnan(done))))
    return 1e3 * (np.where(np.isnan(done), now_s, done) - begin_s - due), 1e6 * cpu_s / answered


def live(send: Send, frames: Tensor, count: int, seconds: float) -> tuple[float, float, float]:
    """Play streams; return p90 of an answer in ms, CPU us a frame, and backlog. See `played`.

    Backlog: by how many ms the last tenth is later on average than the second; it grows where streams are not held.
    """
    late, cpu_us = played(send, frames, count, seconds)
    tenth = max(1, len(late) // 10)
    grown = float(late[-tenth:].mean() - late[tenth : 2 * tenth].mean())
    return float(np.percentile(late[tenth:], 90)), cpu_us, grown


def is_held(p90_ms: NDArray[np.float64], grown_ms: NDArray[np.float64]) -> bool:
    """Whether streams are held: nine of ten frames are answered before the next of their stream comes, for good."""
    return float(np.median(p90_ms)) < 1e3 * EACH_S and float(np.median(grown_ms)) < 1e3 * EACH_S


def streams(settings: Settings) -> Iterator[Row]:
    """Live streams, a frame each 32 ms: streams a core (32 ms over the CPU time of a frame), over batching by hand.

    What a frame costs is compared where one side at least holds the streams: while a backlog grows it says nothing.
    """
    model, generator = Streams(), torch.Generator().manual_seed(0)
    frames = torch.randn(512, FRAME, generator=generator)
    best = (0.0, 0)
    for count in settings.of(COUNTS, (20,)):
        with (
            bm.Engine(model, threads=1, max_sequences=2 * count) as engine,
            contextlib.closing(StreamsByHand(model.frame.module, count)) as hand,
            contextlib.ExitStack() as stack,
        ):
            opened = [stack.enter_context(engine.open_sequence()) for _ in range(count)]

            def ours(stream: int, frame: Tensor, opened: Any = opened) -> Answer:
                return opened[stream].submit(frame)

            for _ in range(3):  # the state has to be carried over on both sides
                for stream in range(8):
                    mine, theirs = ours(stream, frames[stream, None]), hand.submit(stream, frames[stream, None])
                    assert abs(float(mine.result()) - theirs.result()) <= 1e-4, "by hand a stream hears other speech"
            seconds = settings.of(2.0, 0.3)
            sides = {"ours": partial(live, ours, frames, count, seconds)}
            sides["theirs"] = partial(live, hand.submit, frames, count, seconds)
            interleaved(sides, 1)
            found = interleaved(sides, settings.of(3, 1))
        held = {name: is_held(values[:, 0], values[:, 2]) for name, values in found.items()}
        p90 = {name: float(np.median(values[:, 0])) for name, values in found.items()}
        say(f"  {count} streams: held {held}, p90 ms {p90}")
        by_hand = "held" if held["theirs"] else "not held"
        yield absolute(
            f"{count} live streams", f"held ({by_hand} by hand)", "streams", count if held["ours"] else 0,
            target=count, better="higher", p90_ms=p90, held=held,
        )  # fmt: skip
        if not any(held.values()):
            continue
        a_core = {name: 1e6 * EACH_S / values[:, 1] for name, values in found.items()}
        if held["ours"]:
            best = max(best, (float(np.median(a_core["ours"])), count))
        yield compared(
            f"{count} live streams", "streams a core", "streams", a_core["ours"], a_core["theirs"], better="higher",
            baseline="batching by hand", target=TARGET, held=held, p90_ms=p90,
            cpu_us={name: float(np.median(values[:, 1])) for name, values in found.items()},
            grown_ms={name: float(np.median(values[:, 2])) for name, values in found.items()},
        )  # fmt: skip
    yield absolute(
        "live streams", "streams a core, held", "streams", best[0], target=TARGET_A_CORE, better="higher",
        streams=best[1],
    )  # fmt: skip
