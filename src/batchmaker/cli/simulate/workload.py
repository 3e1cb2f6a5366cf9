"""Requests and arrivals of a simulation: from files, or seeded without files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cli.workload import UNPADDED, make_workload
from batchmaker.errors import BatchmakerError, DataError, OptionError, unknown_name
from batchmaker.lab.datasets import (
    lazybatching_lengths,
    mmpp_arrivals,
    poisson_arrivals,
    read_aligned,
    read_lines,
    tokenize,
    trace_arrivals,
)
from batchmaker.lab.simulator.workload import SimulatedRequest
from batchmaker.lab.zoo.blueprint import Blueprint

LENGTHS_STREAM: Final = 1
"""Number of the random stream for lengths, beside the arrivals of the same seed."""
MOST_WORDS: Final = 80
"""Most words of a generated request, because some networks have a fixed number of positions."""

Draw = Callable[[int, int], Sequence[SimulatedRequest]]
"""(seed, count) -> `count` requests."""


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


def make(name: str, blueprint: Blueprint, files: Sequence[Path], count: int) -> SimulatedWorkload:
    """Return the workload of a model.

    Raises DataError, naming file and line, for input that cannot be read or unfolded.
    """
    if files:
        found = _from_files(name, blueprint, files)

        def shuffled(seed: int, count: int) -> list[SimulatedRequest]:
            order = np.resize(np.random.default_rng((seed, LENGTHS_STREAM)).permutation(len(found)), count)
            return [found[i] for i in order.tolist()]

        return SimulatedWorkload(shuffled, ", ".join(path.name for path in files), samples=found)
    if name in UNPADDED:
        drawn_once = make_workload(name, count=min(count, 2048))
        shapes = [blueprint.request(request) for request in drawn_once.requests]
        return SimulatedWorkload(
            lambda seed, count: [shapes[i] for i in np.random.default_rng((seed, LENGTHS_STREAM)).integers(
                0, len(shapes), size=count).tolist()],
            drawn_once.source,
        )  # fmt: skip
    if blueprint.sized(2) is blueprint.sized(3):
        alone = blueprint.sized(1)
        return SimulatedWorkload(lambda seed, count: [alone] * count, "requests that are all alike")

    def drawn(seed: int, count: int) -> list[SimulatedRequest]:
        source, words = lazybatching_lengths(count, np.random.default_rng((seed, LENGTHS_STREAM)))
        words = np.minimum(words, MOST_WORDS)
        return [blueprint.sized(n, m) for n, m in zip(source.tolist(), words.tolist(), strict=True)]

    # Lengths for policies come from a stream of their own, never from the simulated requests.
    return SimulatedWorkload(
        drawn, "generated pairs (LazyBatching's lengths)", lazybatching_lengths(30_000, _training())
    )


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

    OptionError for anything else, DataError for bad files.
    """

    def __init__(self, kind: str, path: Path | None = None) -> None:
        if kind not in ("poisson", "mmpp", "trace"):
            raise unknown_name("kind of arrivals", kind, ("poisson", "mmpp", "trace"))
        if (kind == "trace") != (path is not None):
            got = "no file" if path is None else f"the file {path}, which {kind} arrivals have no use for"
            raise OptionError(f"--arrivals {kind}: got {got}; a trace is given as --arrivals trace FILE")
        self._kind = kind
        self._path = path
        self._trace = trace_arrivals(path) if path is not None else None
        if self._trace is not None and (len(self._trace) < 2 or self._trace[-1] == 0):
            raise DataError(f"{path}: a trace to simulate needs arrivals at two times or more")

    def __str__(self) -> str:
        return self._kind if self._path is None else f"{self._kind} {self._path.name}"

    @property
    def default_rates(self) -> tuple[float, ...]:
        """The default rates: a trace has its own."""
        return () if self._trace is None else ((len(self._trace) - 1) / float(self._trace[-1]),)

    def times_s(self, rate_rps: float, seed: int, count: int) -> NDArray[np.float64]:
        """Return arrival times: [count] seconds. Another rate with the same seed is the same process, stretched.

        A trace is stretched to the rate, begins at a place drawn from the seed, and repeats from its beginning.
        """
        if self._kind == "poisson":
            return poisson_arrivals(rate_rps, seed, count=count)
        if self._kind == "mmpp":
            return mmpp_arrivals(rate_rps, seed, count=count)
        assert self._trace is not None
        gaps = np.diff(self._trace)
        first = int(np.random.default_rng(seed).integers(len(gaps)))
        order = (first + np.arange(count)) % len(gaps)
        times = np.cumsum(gaps[order])
        return np.asarray((times - times[0]) * (self.default_rates[0] / rate_rps), np.float64)
