"""Live streams beside bulk work: the latency of frames alone, beside `map` of recordings, and beside a long file.

    python benchmarks/live_beside.py             # two minutes; writes benchmarks/results/live-beside.json
    python benchmarks/live_beside.py --quick     # a look, nothing is written

silero-vad (`examples/voice_activity`) in one engine with one compute thread. 100 streams get a frame each 32 ms, spread
evenly; a frame's latency counts from when it was due. Beside them run requests of 20 to 120 frames, of which 10,000 are
handed to `map` at once again and again, or one sequence with chunks of 20,000 frames. Nobody sets a priority. The three
take turns; the median round counts. The bulk work has begun seconds before the streams, so that tables have grown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

import batchmaker as bm
from provenance import ROOT, made_by

MEASURES: Final = (
    "src/batchmaker/engine", "src/batchmaker/executor", "src/batchmaker/policies", "src/batchmaker/core",
    "benchmarks/live_beside.py",
)  # fmt: skip
EXAMPLE: Final = ROOT / "examples" / "voice_activity"
PERIOD_S: Final = 0.032
STREAMS: Final = 100
TARGET: Final = 1.2
"""Most of a p99 beside bulk work, over that alone."""


@final
class Taker:
    """Notes when each frame was answered, by its number."""

    def __init__(self, count: int) -> None:
        self.done_s = np.full(count, np.nan)

    def put(self, block: Any) -> None:
        now_s = time.perf_counter()
        for ticket, _, error in block:
            if error is not None:
                raise error
            self.done_s[ticket.place] = now_s


def live(engine: bm.Engine, frames: torch.Tensor, count: int, seconds: float) -> NDArray[np.float64]:
    """Play so many streams; return the latency of each frame in ms, without those of the first fifth of the time."""
    with contextlib.ExitStack() as stack:
        sequences = [stack.enter_context(engine.open_sequence()) for _ in range(count)]
        total = int(seconds / PERIOD_S) * count
        due_s = np.arange(total) * (PERIOD_S / count)
        taker, begin_s, at = Taker(total), time.perf_counter(), 0
        while at < total:
            now_s = time.perf_counter() - begin_s
            end = int(np.searchsorted(due_s, now_s, side="right"))
            if end == at:
                time.sleep(max(2e-4, float(due_s[at]) - now_s))
                continue
            chunks = [(sequences[k % count], frames[k % len(frames), None], None, k) for k in range(at, end)]
            engine.send_chunks(chunks, taker)
            at = end
        time.sleep(0.5)
    late_s = np.where(np.isnan(taker.done_s), time.perf_counter(), taker.done_s) - begin_s - due_s
    return 1e3 * late_s[total // 5 :]


Bulk = Callable[[bm.Engine, torch.Tensor, Callable[[], bool]], None]


def mapped(engine: bm.Engine, frames: torch.Tensor, goes_on: Callable[[], bool]) -> None:
    """Map recordings, 10,000 at a time."""
    lengths = np.random.default_rng(0).integers(20, 121, 10_000).tolist()
    while goes_on():
        for _ in engine.map([frames[:length] for length in lengths], progress=False):
            if not goes_on():
                break


def file(engine: bm.Engine, frames: torch.Tensor, goes_on: Callable[[], bool]) -> None:
    """Send a file of ten minutes as one chunk of a sequence, again and again."""
    whole = frames.repeat(20_000 // len(frames) + 1, 1)[:20_000]
    with engine.open_sequence() as sequence:
        while goes_on():
            sequence.submit(whole).result()


@contextlib.contextmanager
def beside(engine: bm.Engine, frames: torch.Tensor, bulk: Bulk | None, ahead_s: float) -> Iterator[None]:
    """Keep bulk work in the engine meanwhile, from so many seconds before."""
    if bulk is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=bulk, args=(engine, frames, lambda: not stop.is_set()))
    thread.start()
    time.sleep(ahead_s)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, and no result file")
    quick = parser.parse_args().quick
    rounds, seconds, ahead_s, streams = (1, 1.0, 0.5, 10) if quick else (3, 6.0, 4.0, STREAMS)
    sys.path.insert(0, str(EXAMPLE))
    import voice_activity

    frames = 0.1 * torch.randn(256, voice_activity.FRAME, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[list[float]]] = {}
    with bm.Engine(voice_activity.build(), threads=1, max_sequences=2 * STREAMS) as engine:
        for turn in range(rounds + 1):
            for name, bulk in (("alone", None), ("map", mapped), ("file", file)):
                with beside(engine, frames, bulk, ahead_s):
                    late = live(engine, frames, streams, seconds)
                figures = np.percentile(late, (50, 90, 99)).tolist()
                print(f"{name}: p50 {figures[0]:.1f}, p90 {figures[1]:.1f}, p99 {figures[2]:.1f} ms", flush=True)
                if turn or quick:  # the first round warms up
                    found.setdefault(name, []).append(figures)
    medians = {name: np.median(values, axis=0).tolist() for name, values in found.items()}
    result = {
        **made_by(MEASURES),
        "streams": streams,
        "ms": {name: dict(zip(("p50", "p90", "p99"), values, strict=True)) for name, values in medians.items()},
        "p99_over_alone": {name: medians[name][2] / medians["alone"][2] for name in ("map", "file")},
        "target": TARGET,
    }
    print(json.dumps(result["p99_over_alone"]))
    if not quick:
        path = ROOT / "benchmarks" / "results" / "live-beside.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
