"""Requests and arrivals of a simulation: from files, or seeded without files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cli.workload import NOISE, UNPADDED, make_workload
from batchmaker.errors import BatchmakerError, DataError, OptionError, unknown_name
from batchmaker.lab.datasets import (
    europarl_lengths,
    lazybatching_lengths,
    mmpp_arrivals,
    poisson_arrivals,
    read_aligned,
    read_lines,
    tokenize,
    trace_arrivals,
    translation_lengths,
    with_season,
)
from batchmaker.lab.simulator.workload import ShapedRequests, SimulatedRequest
from batchmaker.lab.zoo.blueprint import Blueprint

LENGTHS_STREAM: Final = 1
"""Number of the random stream that lengths are drawn from, beside the arrivals of the same seed."""
BURST_RATE: Final = 8 / (0.9 + 0.1 * 8)
"""Times the mean rate in a burst, with the ratio and share that `mmpp_arrivals` has by default."""
MOST_WORDS: Final = 80
"""Most words of a generated request, because some networks have a fixed number of positions."""

MOST_COMPUTED: Final = 128
"""Different requests of a model that decides by values: each is computed once, on the CPU."""

LENGTHS: Final = ("lazybatching", "europarl")
"""What lengths can be drawn like: 1 to 80 words, or 1 to 330 with a heavier tail."""

Draw = Callable[[int, int], ShapedRequests]
"""(seed, count) -> so many requests."""


@final
@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """The requests of a simulation.

    draw: requests of one seed. source: in words. lengths, samples: the knowledge of policies about lengths: pairs
    (source, words) [n] each if requests are drawn from them, otherwise samples.
    """

    draw: Draw
    source: str
    lengths: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    samples: Sequence[SimulatedRequest] = ()


def make(
    name: str, blueprint: Blueprint, files: Sequence[Path], count: int, lengths: str = LENGTHS[0]
) -> SimulatedWorkload:
    """Return the workload of a model. lengths: one of LENGTHS, of requests that are drawn.

    Raises DataError, naming file and line, for what cannot be read or unfolded.
    """
    if lengths not in LENGTHS:
        raise unknown_name("kind of lengths", lengths, LENGTHS)
    if files:
        from_files = _from_files(name, blueprint, files)

        def shuffled(seed: int, count: int) -> ShapedRequests:
            order = np.resize(np.random.default_rng((seed, LENGTHS_STREAM)).permutation(len(from_files)), count)
            return ShapedRequests(from_files, order.astype(np.int32))

        return SimulatedWorkload(shuffled, ", ".join(path.name for path in files), samples=from_files)
    if name in UNPADDED or name in NOISE or blueprint.decides:
        drawn_once = make_workload(name, count=min(count, MOST_COMPUTED if blueprint.decides else 2048))
        shapes = [blueprint.request(request) for request in drawn_once.requests]
        return SimulatedWorkload(
            lambda seed, count: ShapedRequests(
                shapes,
                np.random.default_rng((seed, LENGTHS_STREAM)).integers(0, len(shapes), size=count).astype(np.int32),
            ),
            drawn_once.source,
        )
    if blueprint.sized(2) is blueprint.sized(3):
        alone = blueprint.sized(1)
        return SimulatedWorkload(
            lambda seed, count: ShapedRequests([alone], np.zeros(count, np.int32)), "requests that are all alike"
        )
    # What a policy may learn of lengths beforehand comes from a stream of its own, never from the simulated requests.
    return SimulatedWorkload(
        partial(_draw, blueprint, lengths), _SOURCES[lengths], _pairs(lengths, 30_000, _training())
    )


_SOURCES: Final = {
    "lazybatching": "generated pairs (LazyBatching's lengths)",
    "europarl": "generated pairs (Europarl's lengths)",
}


def _pairs(lengths: str, count: int, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return words to read and to write: [count] each."""
    if lengths == "europarl":
        source = europarl_lengths(count, generator)
        return source, translation_lengths(source, generator)
    return lazybatching_lengths(count, generator)


def _draw(blueprint: Blueprint, lengths: str, seed: int, count: int) -> ShapedRequests:
    """Return requests with drawn lengths; each pair of lengths is unfolded once, in the order in which they come."""
    source, words = _pairs(lengths, count, np.random.default_rng((seed, LENGTHS_STREAM)))
    if lengths == "lazybatching":
        words = np.minimum(words, MOST_WORDS)
    codes, first, kinds = np.unique(source << 32 | words, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    shapes = [blueprint.sized(code >> 32, code & 0xFFFFFFFF) for code in codes[order].tolist()]
    return ShapedRequests(shapes, place[kinds])


def _training() -> np.random.Generator:
    return np.random.default_rng((0, LENGTHS_STREAM, 1))


def _from_files(name: str, blueprint: Blueprint, files: Sequence[Path]) -> list[SimulatedRequest]:
    if len(files) > 2:
        raise OptionError(f"--workload takes one file, or two aligned ones; got {len(files)}")
    if len(files) == 2:
        pairs = read_aligned(files[0], files[1]).pairs
        return [blueprint.sized(len(pair.source_tokens), len(pair.target_tokens)) for pair in pairs]
    if name in UNPADDED and not _is_json(files[0]):
        return [blueprint.request(request) for request in make_workload(name, data=files).requests]
    numbered = [(number, line) for number, line in enumerate(read_lines(files[0]), 1) if line.strip()]
    if not numbered:
        raise DataError(f"{files[0]}: there is nothing in this file; expected one request a line.")
    as_json = _is_json(files[0])
    requests: list[SimulatedRequest] = []
    for number, line in numbered:
        try:
            size, request = _read_line(line, as_json)
            requests.append(blueprint.sized(*size) if size else blueprint.request(request))
        except BatchmakerError as error:
            raise DataError(f"{files[0]}, line {number}: {error}") from error
    return requests


def _is_json(path: Path) -> bool:
    first = next((line.strip() for line in read_lines(path) if line.strip()), "")
    return first[:1] in ("{", "[")


def _read_line(line: str, as_json: bool) -> tuple[tuple[int, int] | None, Any]:
    """Return the lengths (source, words) of a line, or None and the request in the line."""
    if not as_json:
        words = len(tokenize(line))
        return (words, words), None
    try:
        content = json.loads(line)
    except ValueError as error:
        raise DataError(f"no JSON ({error})") from None
    if isinstance(content, dict) and isinstance(content.get("source"), int):
        size = (content["source"], content.get("words", 1))
        if set(content) - {"source", "words"} or not all(type(n) is int and n >= 1 for n in size):
            raise DataError(f'got {line.strip()}, expected {{"source": n, "words": m}} with numbers of at least 1')
        return size, None
    return None, content


@final
class SimulatedArrivals:
    """Arrival times. kind: poisson, mmpp, or trace, which needs a path.

    burst_s: mean seconds of a burst of mmpp; None: as long as 50 requests take to come. season: how much the rate
    swings over a day of `day_s` seconds, see `with_season`.
    OptionError for anything else, DataError for bad files.
    """

    def __init__(
        self,
        kind: str,
        path: Path | None = None,
        *,
        burst_s: float | None = None,
        season: float = 0.0,
        day_s: float = 86_400.0,
    ) -> None:
        if kind not in ("poisson", "mmpp", "trace"):
            raise unknown_name("kind of arrivals", kind, ("poisson", "mmpp", "trace"))
        if (kind == "trace") != (path is not None):
            got = "no file" if path is None else f"the file {path}, which {kind} arrivals have no use for"
            raise OptionError(f"--arrivals {kind}: got {got}; a trace is given as --arrivals trace FILE")
        if burst_s is not None and kind != "mmpp":
            raise OptionError(f"--burst-s is for --arrivals mmpp; {kind} arrivals have no bursts of that kind")
        with_season(np.zeros(0), depth=season, day_s=day_s)  # refuses what makes no sense before the work is done
        self._kind = kind
        self._path = path
        self._burst_s, self._season, self._day_s = burst_s, season, day_s
        self._trace = trace_arrivals(path) if path is not None else None
        if self._trace is not None and (len(self._trace) < 2 or self._trace[-1] == 0):
            raise DataError(f"{path}: a trace to simulate needs arrivals at two times or more")

    def __str__(self) -> str:
        text = self._kind if self._path is None else f"{self._kind} {self._path.name}"
        text += "" if self._burst_s is None else f", bursts of {self._burst_s:g} s"
        return text + (f", season of {self._season:.0%} in {self._day_s:g} s" if self._season else "")

    @property
    def default_rates(self) -> tuple[float, ...]:
        """The default rates: a trace has its own."""
        return () if self._trace is None else ((len(self._trace) - 1) / float(self._trace[-1]),)

    def times_s(self, rate_rps: float, seed: int, count: int) -> NDArray[np.float64]:
        """Return arrival times: [count] seconds. Another rate with the same seed is the same process, stretched.

        A trace is stretched to the rate, begins at a place drawn from the seed, and repeats from its beginning.
        """
        times_s = self._without_season(rate_rps, seed, count)
        return with_season(times_s, depth=self._season, day_s=self._day_s) if self._season else times_s

    def _without_season(self, rate_rps: float, seed: int, count: int) -> NDArray[np.float64]:
        if self._kind == "poisson":
            return poisson_arrivals(rate_rps, seed, count=count)
        if self._kind == "mmpp" and self._burst_s is not None:
            in_one = max(1.0, self._burst_s * rate_rps * BURST_RATE)
            return mmpp_arrivals(rate_rps, seed, count=count, burst_arrivals=in_one)
        if self._kind == "mmpp":
            return mmpp_arrivals(rate_rps, seed, count=count)
        assert self._trace is not None
        gaps = np.diff(self._trace)
        first = int(np.random.default_rng(seed).integers(len(gaps)))
        order = (first + np.arange(count)) % len(gaps)
        times = np.cumsum(gaps[order])
        return np.asarray((times - times[0]) * (self.default_rates[0] / rate_rps), np.float64)
