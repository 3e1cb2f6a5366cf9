"""Lines of one LSTM: alone, all waiting, at a moderate load; beside nn.LSTM, ONNX Runtime, by hand, and buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import batchmaker as bm
from batchmaker.cli.workload import make_workload
from batchmaker.lab import zoo
from engine_cost.hand_chains import Closed, Continuous, Lstm, Plain
from engine_cost.hand_server import Batches, batched_rate, in_batches
from engine_cost.measuring import (
    NotRunError,
    Row,
    Settings,
    all_waiting,
    at_rate,
    best_of,
    compared,
    interleaved,
    offered,
    per_second,
    say,
    times_ms,
)

WORDS: Final = 10_000
ALONE_WORDS: Final = 25
WIDTHS: Final = (1, 5, 10, 20, None)
MAXIMA: Final = (64, 128, 256)
TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 0.05}
"""Most that two programs' states may differ, which lie between -1 and 1."""
MODERATE_RPS: Final = 2000.0
MODERATE_SHARE: Final = 0.054
"""Of the peak by hand, where that is too low for MODERATE_RPS: 2,000 of the 37,000/s of the machine it was set on."""

Size = tuple[int, str]
ALONE: Final[dict[Size, float]] = {
    (64, "float32"): 2.5, (128, "float32"): 1.4, (256, "float32"): 0.9, (512, "float32"): 0.55,
    (1024, "bfloat16"): 0.4,
}  # fmt: skip
BY_HAND: Final[dict[Size, float]] = {
    (64, "float32"): 1.3, (128, "float32"): 1.1, (256, "float32"): 1.0, (512, "float32"): 0.95,
}  # fmt: skip
SORTED: Final[dict[Size, float]] = {
    (128, "float32"): 1.2, (256, "float32"): 2.0, (512, "float32"): 2.8, (1024, "bfloat16"): 1.7,
}  # fmt: skip
BUCKETS: Final[dict[Size, float]] = {(128, "float32"): 0.95, (512, "float32"): 0.95, (1024, "bfloat16"): 0.95}
SPEED: Final = {64: 8.0, 128: 4.0, 256: 2.0, 512: 1.0, 1024: 0.5}
"""How many requests a repeat has, relative to a width of 512: a larger network takes longer for each."""


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """One LSTM on an engine, and the same weights for the programs by hand."""

    name: str
    dtype: str
    engine: bm.Engine
    cell: nn.LSTMCell
    lstm: Lstm
    plain: Plain
    requests: list[NDArray[np.int64]]

    def map(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests that all wait."""
        return self.engine.map(requests, progress=False)

    def check(self, others: Sequence[Any], what: str, requests: Sequence[Any]) -> None:
        """Raise AssertionError unless the engine's answers are these."""
        for ours, theirs in zip(self.map(requests), others, strict=True):
            difference = float((ours.float() - torch.as_tensor(theirs).float()).abs().max())
            assert difference <= TOLERANCE[self.dtype], f"{what}: a state is {difference} from the engine's"


@contextlib.contextmanager
def chain(settings: Settings, size: Size) -> Iterator[Chain]:
    """Start an engine for an LSTM of this size, with requests of Europarl's lengths, and check its answers."""
    hidden, dtype = size
    count = settings.of(int(800 * SPEED[hidden]), 150)
    work = make_workload("lstm", data=[settings.data / "europarl_deen" / "raw5k.en"], count=count)
    requests = [np.asarray(request, np.int64) % WORDS for request in work.requests]
    max_batch = settings.of(256, 32)
    model = zoo.make("lstm", hidden=hidden, dtype=dtype, vocabulary_size=WORDS, max_batch=max_batch)
    step: Any = model.cells["step"].module
    with bm.Engine(model, threads=1) as engine:
        found = Chain(
            f"LSTM {hidden} {dtype}", dtype, engine, step.layers[0], Lstm.of(step.embedding, step.layers[0]),
            Plain(step.embedding, step.layers[0]), requests,
        )  # fmt: skip
        some = requests[:64]
        found.check([found.plain.alone(request) for request in some], "nn.LSTM alone", some)
        yield found


def _sizes(settings: Settings, wanted: dict[Size, float]) -> dict[Size, float]:
    return dict(list(wanted.items())[:1]) if settings.quick else wanted


def alone(settings: Settings) -> Iterator[Row]:
    """One request at a time, 25 words: the engine's answer over the better of nn.LSTM and ONNX Runtime."""
    generator = np.random.default_rng(0)
    for size, target in _sizes(settings, ALONE).items():
        with chain(settings, size) as it:
            count = settings.of(40 if size[0] < 512 else 10, 10)
            requests = [generator.integers(0, WORDS, ALONE_WORDS) for _ in range(count)]

            def ask(request: Any, it: Chain = it) -> Any:
                return it.engine.submit(request).result()

            onnx_lstm = _onnx_lstm(it)
            others = {"nn.LSTM": it.plain.alone, "ONNX Runtime": onnx_lstm.alone}
            it.check([onnx_lstm.alone(request) for request in requests], "ONNX Runtime", requests)
            sides = {"ours": partial(times_ms, ask, requests)}
            sides |= {name: partial(times_ms, alone, requests) for name, alone in others.items()}
            interleaved(sides, 1)
            found = interleaved(sides, settings.of(15, 3))
        seen = {name: float(np.median(found[name])) for name in others}
        best = min(seen, key=seen.__getitem__)
        yield compared(
            it.name, "25 words alone", "ms", found["ours"], found[best], better="lower", baseline=best, target=target,
            seen=seen, onnxruntime=version("onnxruntime"),
        )  # fmt: skip


def _onnx_lstm(it: Chain) -> Any:
    """Return the same LSTM in ONNX Runtime. NotRunError where it is not installed."""
    try:
        from engine_cost.hand_onnx import OnnxLstm
    except ImportError as error:
        raise NotRunError(f"needs ONNX Runtime, pip install 'batchmaker[onnx]' ({error})") from None
    return OnnxLstm(it.plain.embedding, it.cell)


def by_hand(settings: Settings) -> Iterator[Row]:
    """All waiting, Europarl's lengths: the engine over continuous batching by hand."""
    for size, target in _sizes(settings, BY_HAND).items():
        with chain(settings, size) as it, contextlib.closing(Continuous(it.lstm)) as hand:
            some = it.requests[:64]
            it.check([future.result() for future in [hand.submit(request) for request in some]], "by hand", some)
            sides = {
                "ours": lambda it=it: per_second(partial(it.map, it.requests), len(it.requests)),
                "theirs": partial(all_waiting, hand.submit, it.requests),
            }
            interleaved(sides, 1)
            found = interleaved(sides, settings.of(7, 2))
        yield compared(
            it.name, "all waiting", "requests/s", found["ours"], found["theirs"], better="higher",
            baseline="continuous batching by hand", target=target,
        )  # fmt: skip


def sorted_batches(settings: Settings) -> Iterator[Row]:
    """All waiting: the engine over the best of nn.LSTM in batches sorted by length, padded or packed."""
    for size, target in _sizes(settings, SORTED).items():
        with chain(settings, size) as it:
            requests = sorted(it.requests, key=len)
            forms = {"padded": it.plain.padded, "packed": it.plain.packed}
            for name, run in forms.items():
                it.check(run(requests[-64:]), f"nn.LSTM {name}", requests[-64:])
            ways = {
                f"{name}, {most}": partial(batched_rate, run, in_batches(requests, most, None))
                for name, run in forms.items() for most in (64, 256)
            }  # fmt: skip
            best, seen = best_of(ways, settings.of(2, 1))
            sides = {
                "ours": lambda it=it: per_second(partial(it.map, it.requests), len(it.requests)),
                "theirs": ways[best],
            }
            found = interleaved(sides, settings.of(5, 2))
        yield compared(
            it.name, "all waiting", "requests/s", found["ours"], found["theirs"], better="higher",
            baseline=f"nn.LSTM, sorted, {best}", target=target, seen=seen,
        )  # fmt: skip


def moderate(settings: Settings) -> Iterator[Row]:
    """A Poisson load that leaves the program by hand mostly idle: p50 and p90 of the engine over its."""
    with chain(settings, (128, "float32")) as it, contextlib.closing(Continuous(it.lstm)) as hand:
        peak = max(all_waiting(hand.submit, it.requests) for _ in range(3))
        rate = min(MODERATE_RPS, MODERATE_SHARE * peak) if peak < MODERATE_RPS / MODERATE_SHARE / 2 else MODERATE_RPS
        say(f"  {rate:.0f} requests/s; by hand at most {peak:.0f}")
        seconds = settings.of(2.5, 0.3)
        found = interleaved(
            {
                "ours": at_rate(it.engine.submit, it.requests, rate, seconds),
                "theirs": at_rate(hand.submit, it.requests, rate, seconds),
            },
            settings.of(6, 2),
        )
    for column, figure in enumerate(("p50", "p90")):
        yield compared(
            it.name, f"{figure} at a moderate load", "ms", found["ours"][:, column],
            found["theirs"][:, column], better="lower", baseline="continuous batching by hand", target=1.3,
            rate=rate, peak_by_hand=peak,
        )  # fmt: skip


def buckets(settings: Settings) -> Iterator[Row]:
    """All waiting, and p90 at half of the slower peak: the engine over the best equal-work buckets."""
    for size, target in _sizes(settings, BUCKETS).items():
        with chain(settings, size) as it:
            run = Closed(it.lstm)
            it.check(run(it.requests[:64]), "equal-work buckets", it.requests[:64])
            ways = {
                f"width {width or 'any'}, {most}": partial(batched_rate, run, in_batches(it.requests, most, width))
                for width in WIDTHS for most in settings.of(MAXIMA, (64,))
            }  # fmt: skip
            best, seen = best_of(ways, settings.of(2, 1))
            sides = {
                "ours": lambda it=it: per_second(partial(it.map, it.requests), len(it.requests)),
                "theirs": ways[best],
            }
            found = interleaved(sides, settings.of(5, 2))
            yield compared(
                it.name, "all waiting", "requests/s", found["ours"], found["theirs"], better="higher",
                baseline=f"equal-work buckets, {best}", target=target, seen=seen,
            )  # fmt: skip
            rate = 0.5 * min(float(np.median(values)) for values in found.values())
            yield _late(settings, it, run, rate)


def _late(settings: Settings, it: Chain, run: Closed, rate: float) -> Row:
    """Return p90 under a Poisson load beside the buckets that have the lowest; each width is looked at first."""
    seconds = settings.of(1.5, 0.3)
    with contextlib.ExitStack() as stack:
        servers = {
            f"width {width or 'any'}": stack.enter_context(contextlib.closing(Batches(run, max(MAXIMA), width)))
            for width in WIDTHS
        }
        seen = {
            name: 1e3 * float(np.percentile(offered(server.submit, it.requests, rate, seconds, 0), 90))
            for name, server in servers.items()
        }
        best = min(seen, key=seen.__getitem__)
        found = interleaved(
            {
                "ours": at_rate(it.engine.submit, it.requests, rate, 2 * seconds),
                "theirs": at_rate(servers[best].submit, it.requests, rate, 2 * seconds),
            },
            settings.of(3, 1),
        )
    return compared(
        it.name, "p90 at half load", "ms", found["ours"][:, 1], found["theirs"][:, 1], better="lower",
        baseline=f"equal-work buckets, {best}", target=0.5, rate=rate, seen=seen,
    )  # fmt: skip
