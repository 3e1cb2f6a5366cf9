"""profile.json: measured times and lengths of a model, stored beside it."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final, TypeVar, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchmaker.cost.latency import LatencyTable
from batchmaker.cost.lengths import MAX_STEPS, LengthProfile
from batchmaker.errors import DataError

VERSION: Final = 1
PROFILE: Final = "profile.json"
"""The file's name in the directory of a saved model."""
_MAX_BUCKETS: Final = 256
_T = TypeVar("_T")


@final
@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The conditions of the measurement; the times hold only for them.

    machine: processor and cores. commit: of batchmaker. hidden, layers: of the model, if it has them.
    """

    dtype: str
    threads: int
    machine: str
    commit: str
    hidden: int | None = None
    layers: int | None = None


@final
@dataclass(frozen=True, slots=True)
class PredictedLength:
    """The number of steps of `cell`, predicted from the number of steps of `given` in the same request.

    given: None predicts without it. DataError if the profile is empty, because it would predict nothing.
    """

    cell: str
    given: str | None
    profile: LengthProfile

    def __post_init__(self) -> None:
        if not self.profile.num_samples:
            raise DataError(f"the length profile of cell {self.cell!r} is empty, expected at least one run.")


@final
@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that an engine with one worker needs besides its cells.

    step_s, row_s: within a step, for the step and for each of its rows: finding and copying them. Policies see them as
    part of the step's time. turn_s: after each step: its result, the next task. request_s: for each request:
    unfolding and admitting it, its answer. DataError unless all are finite and at least 0.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    turn_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("step_s", "row_s", "turn_s", "request_s"):
            seconds = getattr(self, field)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise DataError(f"overhead: {field} is {seconds}, expected seconds of at least 0.")


@final
@dataclass(frozen=True, slots=True)
class CostProfile:
    """Costs of a model's cells and numbers of their calls.

    model: its name or class. overhead: of the engine, None if it was not measured.
    """

    model: str
    options: ProfileOptions
    latency: LatencyTable
    lengths: tuple[PredictedLength, ...] = ()
    overhead: Overhead | None = None

    def length_of(self, cell: str) -> PredictedLength | None:
        """Return the prediction of the number of steps of this cell, None without one."""
        return next((length for length in self.lengths if length.cell == cell), None)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON. DataError if the file cannot be written."""
        lengths = tuple(_saved_length(length) for length in self.lengths)
        saved = _SavedProfile(VERSION, self.model, self.options, self.latency, lengths, self.overhead)
        try:
            Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror or error}).") from error

    @classmethod
    def read(cls, path: str | PathLike[str]) -> CostProfile:
        """Return the profile in a file. DataError names file and field if it is missing, malformed, empty or of
        another version."""
        try:
            if not Path(path).is_file():
                raise OSError(errno.EINVAL, "it is no regular file" if Path(path).exists() else "no such file")
            raw = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}). {_ADVICE}") from error
        version = _checked(path, lambda: msgspec.json.decode(raw, type=_ProfileVersion).version)
        if version != VERSION:
            raise DataError(f"{path}: field 'version' is {version}, this batchmaker reads {VERSION}. {_ADVICE}")
        return _checked(path, lambda: _loaded(msgspec.json.decode(raw, type=_SavedProfile)))


_ADVICE: Final = "Write it again with `batchmaker profile MODEL --out profile.json`."


class _ProfileVersion(msgspec.Struct):
    version: int


class _SavedBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs with a given length up to `given_up_to` (None: any) that are in no earlier bucket. runs[i] took steps[i]."""

    given_up_to: int | None
    steps: tuple[int, ...]
    runs: tuple[int, ...]


class _SavedLength(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cell: str
    given: str | None
    buckets: tuple[_SavedBucket, ...]


class _SavedProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    model: str
    options: ProfileOptions
    latency: LatencyTable
    lengths: tuple[_SavedLength, ...]
    overhead: Overhead | None = None


def _saved_length(length: PredictedLength) -> _SavedLength:
    buckets = []
    for edge, counts in zip((*length.profile.edges.tolist(), None), length.profile.counts, strict=True):
        steps = np.flatnonzero(counts)
        buckets.append(_SavedBucket(edge, tuple(steps.tolist()), tuple(counts[steps].tolist())))
    return _SavedLength(length.cell, length.given, tuple(buckets))


def _loaded(saved: _SavedProfile) -> CostProfile:
    names = [cell.name for cell in saved.latency.cells]
    for index, length in enumerate(saved.lengths):
        for field, cell in (("cell", length.cell), ("given", length.given)):
            if cell is not None and cell not in names:
                raise DataError(f"lengths[{index}].{field} is {cell!r}, which is none of the cells {', '.join(names)}.")
    lengths = tuple(_loaded_length(length, f"lengths[{index}]") for index, length in enumerate(saved.lengths))
    return CostProfile(saved.model, saved.options, saved.latency, lengths, saved.overhead)


def _loaded_length(saved: _SavedLength, where: str) -> PredictedLength:
    if not saved.buckets or saved.buckets[-1].given_up_to is not None:
        raise DataError(f"{where}.buckets: the last bucket must have 'given_up_to' null, for all longer lengths.")
    if len(saved.buckets) > _MAX_BUCKETS:
        raise DataError(f"{where}.buckets: {len(saved.buckets)} buckets are more than allowed, {_MAX_BUCKETS}.")
    edges = [bucket.given_up_to for bucket in saved.buckets[:-1] if bucket.given_up_to is not None]
    if len(edges) != len(saved.buckets) - 1:
        raise DataError(f"{where}.buckets: only the last bucket may have 'given_up_to' null.")
    longest = max((max(bucket.steps, default=1) for bucket in saved.buckets), default=1)
    if longest > MAX_STEPS:
        raise DataError(f"{where}.buckets: a run of {longest} steps is longer than the longest allowed, {MAX_STEPS}.")
    counts = np.zeros((len(saved.buckets), max(longest, 1) + 1), np.int64)
    for index, bucket in enumerate(saved.buckets):
        _fill(counts[index], bucket, f"{where}.buckets[{index}]")
    try:
        profile = LengthProfile(edges, counts)
        return PredictedLength(saved.cell, saved.given, profile)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _fill(counts: NDArray[np.int64], bucket: _SavedBucket, where: str) -> None:
    if len(bucket.steps) != len(bucket.runs):
        raise DataError(f"{where}: {len(bucket.steps)} 'steps' and {len(bucket.runs)} 'runs', expected equally many.")
    if any(steps < 1 for steps in bucket.steps) or any(not 1 <= runs < 1 << 48 for runs in bucket.runs):
        raise DataError(f"{where}: 'steps' and 'runs' must be whole numbers of at least 1.")
    counts[list(bucket.steps)] = bucket.runs


def _checked(path: str | PathLike[str], read: Callable[[], _T]) -> _T:
    """Return the result of `read`. Every error in the content becomes a DataError that names the file."""
    try:
        return read()
    except (msgspec.DecodeError, DataError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: malformed: {str(error).rstrip('.')}. {_ADVICE}") from None
