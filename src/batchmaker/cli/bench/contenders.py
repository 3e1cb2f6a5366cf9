"""What a measurement compares: policies, the settings that `padded` is swept over, and the backlogs that they need."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from batchmaker import policies
from batchmaker.cli.bench.load import Measured
from batchmaker.cli.workload import UNPADDED, Workload
from batchmaker.model.model import Model
from batchmaker.policies.base import CellPolicy, GraphPolicy
from batchmaker.policies.options import read_options

WIDTHS: Final = (1, 5, 10, 20, 40)
"""Bucket widths of a sweep; BatchMaker's Figure 8 has 1 to 40."""
MAXIMA: Final = (64, 128, 256)
"""Most requests of a batch in a sweep."""
CLOSED: Final = "closed"
SWEPT: Final = ("padded", CLOSED)
USUAL_WIDTH: Final = 10
USUAL_MAXIMUM: Final = 64
LARGEST_BACKLOG: Final = 1 << 15
"""Most requests that wait, whatever a policy would need for full batches."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """What one policy did with its best settings. policy: these. seen: the figure that chose them, by policy."""

    policy: str
    measured: Measured
    seen: dict[str, float]


def computes_cells(policy: str) -> bool:
    """Return whether a known policy, in its command-line form, has the engine's cells rather than whole networks."""
    return issubclass(policies.find(policy.partition(":")[0]), CellPolicy)


def is_baseline(policy: str) -> bool:
    """Return whether a known policy begins whole requests together, which nobody joins later."""
    return has_equal_work(policy) or not computes_cells(policy)


def has_equal_work(policy: str) -> bool:
    """Return whether a policy is the baseline with the engine's own cells."""
    return policy.partition(":")[0] == CLOSED


def with_equal_work(model: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the policies with `closed` after `padded` and `serial`: the same batches with the engine's cells.

    It takes the place of `padded` for a model without a padded form.
    """
    contenders = []
    for name in names:
        kind, _, text = name.partition(":")
        if kind != "padded" or model not in UNPADDED:
            contenders.append(name)
        if kind == "padded":
            contenders.append(f"{CLOSED}:{text}" if text else CLOSED)
        elif kind == "serial":
            contenders.append(f"{CLOSED}:max_batch=1,bucket_width={1 << 30}")
    return tuple(dict.fromkeys(contenders))


def settings_of(policy: str, *, most: int | None, full_first: bool, sweep: bool) -> tuple[str, ...]:
    """Return the policies among which the best is to be found.

    That is the policy itself, or for `padded` and `closed` one of each bucket width and maximum.
    An option that the policy's own text sets is not swept. most: the maximum of all, None to sweep it. full_first:
    whether full buckets go first. sweep: False for the usual width and maximum alone.
    """
    name, _, text = policy.partition(":")
    if name not in SWEPT:
        return (policy,)
    options = read_options(name, policies.find(name), text)
    widths = (options["bucket_width"],) if "bucket_width" in options else WIDTHS if sweep else (USUAL_WIDTH,)
    most = options.get("max_batch", most if sweep else most or USUAL_MAXIMUM)
    maxima = MAXIMA if most is None else (most,)
    others = "".join(f"{key}={value}," for key, value in options.items() if key in ("max_steps", "budget_ms"))
    order = "yes" if options.get("full_first", full_first) else "no"
    return tuple(
        f"{name}:{others}bucket_width={width},max_batch={maximum},full_first={order}"
        for width, maximum in itertools.product(widths, maxima)
    )


def made(policy: str, most: int | None) -> CellPolicy | GraphPolicy:
    """Return a new policy. One of whole requests takes up to `most` of them, unless its text says how many."""
    name, _, text = policy.partition(":")
    kind = policies.find(name)
    if most is None or "max_batch" not in inspect.signature(kind).parameters:
        return policies.make(policy)
    says = "max_batch" in read_options(name, kind, text)
    return policies.make(policy) if says else policies.make(policy, max_batch=most)


def backlog_of(policy: str, batch: int, model: Model, workload: Workload) -> int:
    """Return how many requests must wait so that every batch is full.

    batch: most cells or requests of one. Cells of all requests in flight are together: four batches are enough. Whole
    requests wait in buckets, of which one is full for certain if there are more requests than all could hold that are
    not; at most LARGEST_BACKLOG.
    """
    name, _, text = policy.partition(":")
    if not is_baseline(policy):
        return 4 * batch
    if name not in SWEPT:
        return (8 if batch == 1 else 16) * batch
    width = read_options(name, policies.find(name), text).get("bucket_width", USUAL_WIDTH)
    lengths: Any = np.array([model.length(request) for request in workload.requests])
    buckets = len(np.unique((np.maximum(lengths, 1) - 1) // width))
    return min(LARGEST_BACKLOG, max(16, buckets + 1) * batch)
