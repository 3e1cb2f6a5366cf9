"""How many live streams a core holds in process, by the size of the network: papers/docs/live-streams-results.md.

    python benchmarks/live_sizes.py [--only NAME ...] [--page PAGE]   # to results/live-sizes.json
    python benchmarks/live_sizes.py --quick     # tries everything shortly; its figures mean nothing and are not kept

Streams send a frame each 32 ms, evenly spread; a transducer three frames of 10 ms, and in a second row 16 frames each
160 ms, as in its example. They are held where 99 % of the answers come before the next frame of their stream; of two
looks one has to hold, since the host may be busy with something else. The most streams are looked for by doubling and
halving, to 8 %: with the engine (one compute thread), and by a program by hand, which keeps all states in a table,
stacks what has come and computes it at once. All threads of the process are on one core, what sends the frames too.
`at most` is what that core could compute if it did nothing but multiply large matrices: its measured rate over the
operations of a frame. Takes seven minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import batchmaker as bm
from engine_cost.hand_streams import FRAME, HIDDEN, MOST, Streams, StreamsByHand
from engine_cost.measuring import say
from engine_cost.streams import EACH_S, Send, played
from pages import fill, table
from provenance import CPU_EXECUTOR, ROOT, Result, made_by

sys.path.insert(0, str(ROOT / "examples" / "transducer"))
import transducer

OUT: Final = ROOT / "benchmarks" / "results" / "live-sizes.json"
MEASURES: Final = (
    "benchmarks/live_sizes.py", "benchmarks/engine_cost/streams.py", "benchmarks/engine_cost/hand_streams.py",
    "examples/transducer/transducer.py", "src/batchmaker/engine", "src/batchmaker/core", "src/batchmaker/compile",
    "src/batchmaker/kernels/cpu", *CPU_EXECUTOR,
)  # fmt: skip
FEATURES: Final = 80
CLOSE: Final = 0.08
"""Of the most streams: how close it is looked for."""


class Recurrent(nn.Module):
    """(frame [batch, 80], states) -> (probability [batch], states): layers of an LSTM or a GRU, and an output."""

    def __init__(self, kind: type[nn.LSTMCell | nn.GRUCell], hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.of_two = kind is nn.LSTMCell
        self.layers = nn.ModuleList(kind(hidden if layer else FEATURES, hidden) for layer in range(layers))
        self.out = nn.Linear(hidden, 1)

    def forward(self, frame: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        x, after = frame, list[Tensor]()
        for number, layer in enumerate(self.layers):
            if self.of_two:
                after += layer(x, states[2 * number : 2 * number + 2])
                x = after[-2]
            else:
                x = layer(x, states[number])
                after.append(x)
        return self.out(x)[:, 0].sigmoid(), *after


class RecurrentStreams(bm.Model):
    """A chunk is one or more frames, float32 [n, 80]; its result is the last one's probability."""

    def __init__(self, module: Recurrent, widths: Sequence[int]) -> None:
        self.step = bm.Cell(module, state=widths, max_batch=MOST)
        self.example_request = torch.zeros(1, FEATURES)

    def unfold(self, frames: Any) -> Any:
        return self.unfold_chunk(frames, None)[0]

    def unfold_chunk(self, frames: Any, state: Any) -> tuple[Any, Any]:
        speech, *state = self.step.run(frames, state)
        return speech, tuple(state)


class TransducerByHand(nn.Module):
    """(frames [batch, n * 16], states) -> (symbols [batch, n * 3], 0 for none; states), all streams side by side.

    begun: 0 for a stream whose predictor has not heard the blank that comes before all symbols.
    """

    def __init__(self, network: transducer.Network) -> None:
        super().__init__()
        self.network = network
        self.encoder = nn.LSTMCell(transducer.BANDS, network.hidden)
        weights = network.encoder.state_dict()
        self.encoder.load_state_dict({name.removesuffix("_l0"): value for name, value in weights.items()})
        zeros = torch.zeros(1, network.hidden)
        with torch.no_grad():
            self.first = network.predict(torch.tensor([transducer.BLANK]), zeros, zeros)

    def forward(self, frames: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        eh, ec, ph, pc, begun = states
        ph, pc = (torch.where(begun > 0, state, first) for state, first in zip((ph, pc), self.first, strict=True))
        symbols = list[Tensor]()
        for frame in frames.view(len(frames), -1, transducer.BANDS).unbind(1):
            eh, ec = self.encoder(frame, (eh, ec))
            going = torch.arange(len(frames))
            for _ in range(transducer.MOST):
                found = self.network.decide.scores(eh[going], ph[going]).argmax(-1)
                emits = found != transducer.BLANK
                going, found = going[emits], found[emits]
                symbols.append(torch.zeros(len(frames), dtype=torch.int64).index_put_((going,), found))
                if len(going):
                    ph[going], pc[going] = self.network.predict(found, ph[going], pc[going])
        return torch.stack(symbols, 1), eh, ec, ph, pc, torch.ones_like(begun)


@dataclass(frozen=True)
class Case:
    """A network. widths: of its states by hand. begin: streams at which the search begins. frames: to be sent.

    same: whether answers are the same on both sides. each_s: time between two frames of a stream.
    """

    model: bm.Model
    by_hand: nn.Module
    widths: Sequence[int]
    begin: int
    frames: Tensor
    same: Callable[[Any, Any], bool] = lambda ours, theirs: abs(float(ours) - theirs) <= 1e-4
    each_s: float = EACH_S


def recurrent(kind: type[nn.LSTMCell | nn.GRUCell], hidden: int, layers: int, begin: int) -> Case:
    module = Recurrent(kind, hidden, layers).eval().requires_grad_(False)
    widths = (hidden,) * layers * (2 if module.of_two else 1)
    return Case(RecurrentStreams(module, widths), module, widths, begin, torch.randn(512, FEATURES))


def frame_network() -> Case:
    model = Streams()
    return Case(model, model.frame.module, (HIDDEN, HIDDEN), 200, torch.randn(512, FRAME))


@cache
def small_transducer(steps: int) -> transducer.Network:
    return transducer.trained(steps).requires_grad_(False)


def hearing(network: transducer.Network, count: int, each_s: float, begin: int) -> Case:
    """Return the transducer whose streams send `count` frames of 10 ms at a time."""
    said = transducer.Voice().say(np.random.default_rng(0), 40 * count, 0.5).frames
    rows = torch.from_numpy(said[: len(said) // count * count].reshape(-1, count * transducer.BANDS))
    hidden = network.hidden
    return Case(
        transducer.Transducer(network), TransducerByHand(network).eval(), (hidden, hidden, hidden, hidden, 1), begin,
        rows, lambda ours, theirs: ours.tolist() == [symbol for symbol in theirs if symbol != transducer.BLANK], each_s,
    )  # fmt: skip


CASES: Final[dict[str, Callable[[bool], Case]]] = {
    "GRU 64": lambda _: recurrent(nn.GRUCell, 64, 1, 600),
    "LSTM 256": lambda _: recurrent(nn.LSTMCell, 256, 1, 300),
    "LSTM 512, 2 layers": lambda _: recurrent(nn.LSTMCell, 512, 2, 100),
    "LSTM 1024": lambda _: recurrent(nn.LSTMCell, 1024, 1, 80),
    "silero-vad": lambda _: frame_network(),
    "transducer, LSTMs of 64": lambda quick: hearing(small_transducer(20 if quick else 400), 3, EACH_S, 20),
    "the same, each 160 ms": lambda quick: hearing(small_transducer(20 if quick else 400), 16, 0.16, 100),
}


# --- one core --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep all threads of this process, and those that begin meanwhile, on one of its cores."""
    before = os.sched_getaffinity(0)
    try:
        _keep_on({max(before)})
        yield
    finally:
        _keep_on(before)


def _keep_on(cores: set[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task), cores)


def multiply_rate(seconds: float, size: int = 1024) -> float:
    """Return the operations a second of one core in products of large matrices, the best of many."""
    a, b, best = torch.randn(size, size), torch.randn(size, size), float("inf")
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin_s)
    return 2 * size**3 / best


@torch.no_grad()
def operations(case: Case, count: int = 64) -> float:
    """Return the additions and multiplications of a frame, those of products and convolutions: the mean of so many."""
    states = [torch.zeros(1, width) for width in case.widths]
    with FlopCounterMode(display=False) as counter:
        for frame in case.frames[:count]:
            _, *states = case.by_hand(frame[None], *states)
    return counter.get_total_flops() / min(count, len(case.frames))


# --- streams that are held -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """What so many streams take: ms from due to answered, and processor us a frame, the sending included.

    each_ms: time between two frames of a stream.
    """

    streams: int
    each_ms: float
    p50_ms: float
    p99_ms: float
    cpu_us: float

    @property
    def holds(self) -> bool:
        return self.p99_ms < self.each_ms


Opened = Callable[[int], contextlib.AbstractContextManager[Send]]
"""Gives, for a number of streams, what sends a frame of one of them."""


@contextlib.contextmanager
def by_engine(engine: bm.Engine, case: Case, count: int) -> Iterator[Send]:
    """Streams as sequences of an engine."""
    opened = [engine.open_sequence() for _ in range(count)]
    shape = torch.as_tensor(case.model.example_request).shape[1:]
    try:
        yield lambda stream, frame: opened[stream].submit(frame.reshape(-1, *shape))
    finally:
        for sequence in opened:
            sequence.close(drain=False)


@contextlib.contextmanager
def by_program(case: Case, count: int) -> Iterator[Send]:
    """Streams of the program by hand."""
    with contextlib.closing(StreamsByHand(case.by_hand, count, case.widths)) as program:
        yield program.submit


def look(opened: Opened, case: Case, seconds: float, count: int) -> Look:
    """Return what so many streams take, where the first look does not hold the better of two."""
    frames, each_s = case.frames, case.each_s

    def once() -> Look:
        turns = [itertools.count(7 * stream) for stream in range(count)]  # a stream sends frames that belong together
        with opened(count) as send:
            late, cpu_us = played(
                lambda stream, _: send(stream, frames[next(turns[stream]) % len(frames)][None]),
                frames, count, max(seconds, 15 * each_s), each_s,
            )  # fmt: skip
        late = late[len(late) // 5 :]
        return Look(count, 1e3 * each_s, *np.percentile(late, (50, 99)).tolist(), cpu_us)

    first = once()
    return first if first.holds else min(first, once(), key=lambda one: one.p99_ms)


def most_held(opened: Opened, case: Case, seconds: float, begin: int) -> Look | None:
    """Double and halve until the most streams that are held are known; return what these take, None for none."""
    best, good, bad = None, 0, begin
    while (found := look(opened, case, seconds, bad)).holds:
        best, good, bad = found, bad, 2 * bad
    while bad - good > max(1, CLOSE * bad):
        middle = (good + bad) // 2
        found = look(opened, case, seconds, middle)
        if found.holds:
            best, good = found, middle
        else:
            bad = middle
    return best


def check(case: Case, engine: bm.Engine) -> None:
    """Raise AssertionError where a stream hears something else by hand than from the engine."""
    with by_engine(engine, case, 8) as ours, by_program(case, 8) as theirs:
        for frame in case.frames[:12]:  # the state has to be carried over on both sides
            answers = [(ours(stream, frame[None]), theirs(stream, frame[None])) for stream in range(8)]
            assert all(case.same(mine.result(), hand.result()) for mine, hand in answers), "by hand it hears otherwise"


def measured(name: str, *, quick: bool) -> Result:
    """Return the row of a network: its operations a frame, and what the most streams take that are held on each side.

    quick: one short look at few streams in place of the search.
    """
    torch.manual_seed(0)
    case = CASES[name](quick)
    seconds, begin = (0.3, 4) if quick else (1.5, case.begin)
    row: Result = {"network": name, "operations": operations(case), "each_s": case.each_s}
    with bm.Engine(case.model, threads=1, max_sequences=100_000) as engine:
        check(case, engine)
        with on_one_core():
            for side, opened in (("hand", partial(by_program, case)), ("ours", partial(by_engine, engine, case))):
                found = (look if quick else most_held)(opened, case, seconds, begin)
                row[side] = None if found is None else asdict(found)
                say(f"{name}: {side} {row[side]}, load average {os.getloadavg()[0]:.2f}")
    return row


# --- the table -------------------------------------------------------------------------------------------------------


def shown(found: Result) -> str:
    """Return the table of the page, and what it was measured with."""
    lines = []
    for row in found["rows"]:
        ours, hand = ((row[side] or {"streams": 0})["streams"] for side in ("ours", "hand"))
        most = found["operations_a_second"] * row["each_s"] / row["operations"]
        lines.append([
            row["network"], f"{row['operations'] / 1e6:.3g}", f"{most:,.0f}", f"{hand:,}", f"{ours:,}",
            f"{ours / hand:.2f}" if hand else "-", f"{ours / most:.2f}",
        ])  # fmt: skip
    head = ("network", "million operations a frame", "at most", "by hand", "batchmaker", "over by hand", "over at most")
    about = (
        f"`{found['command']}`, commit {found['commit']}, {found['machine']['cpu']}, one core with "
        f"{found['operations_a_second'] / 1e9:.0f} billion operations a second, load average "
        f"{found['load_average']} to {found['load_average_after']}."
    )
    return f"{table(head, lines)}\n\n{about}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short look at few streams, which is not kept")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these networks, not kept")
    parser.add_argument("--show", action="store_true", help="measure nothing, show the file")
    parser.add_argument("--page", type=Path, help="put the table there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.show:
        found = json.loads(OUT.read_text("utf-8"))
    else:
        found = {**made_by(MEASURES, "python benchmarks/live_sizes.py"), "quick": options.quick}
        with on_one_core():
            found["operations_a_second"] = multiply_rate(0.2 if options.quick else 3.0)
        found["rows"] = [measured(name, quick=options.quick) for name in options.only]
        found["load_average_after"] = round(os.getloadavg()[0], 2)
    print(shown(found))
    if options.quick or options.only != list(CASES):
        return
    if not options.show:
        OUT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if options.page is not None:
        fill(options.page, {"live-sizes": shown(found)})


if __name__ == "__main__":
    main()
