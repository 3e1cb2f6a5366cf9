"""The values of many requests with templates, laid out together for their cells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.model.host_values import converted
from batchmaker.model.request_shapes import Leaf
from batchmaker.model.stand_ins import Kind
from batchmaker.model.templates import Feed, Template

Counts = NDArray[np.int64]


@final
class Given:
    """Values of requests whose templates have one form, [all their nodes, *shape] for each feed.

    The places of a request's nodes are known after admission: see `rows`.
    """

    __slots__ = ("_counts", "_ends", "_firsts", "_nodes", "_only", "_values", "num_requests")

    def __init__(self, templates: Sequence[Template], values: list[Any]) -> None:
        self.num_requests = len(templates)
        self._values = values
        self._nodes = [feed.host.nodes for feed in templates[0].feeds]  # the same in all templates, if there are any
        self._only = templates[0].feeds if len(templates) == 1 else ()
        if self._only:  # the arrays below would cost more than the rest
            return
        count, feeds = len(templates), len(values)
        nodes = np.fromiter(chain.from_iterable([one.spans for one in templates]), np.int64, 2 * count * feeds)
        self._firsts, self._counts = nodes.reshape(count, 2, feeds).transpose(1, 0, 2)
        self._ends = np.cumsum(self._counts, axis=0)

    def rows(self, feed: int, places: Sequence[int], shifts: Sequence[int]) -> tuple[slice | NDArray[np.int64], Any]:
        """Return rows and values of some of the requests for one feed.

        places: positions of the requests, each once. shifts: for each request, the offset from its own node numbers to
        rows.
        """
        values, nodes = self._values[feed], self._nodes[feed]
        if self._only:
            return self._only[feed].host.rows(shifts[0]), values
        if len(places) == 1:
            (place,), (shift,) = places, shifts
            count, end = int(self._counts[place, feed]), int(self._ends[place, feed])
            values = values[end - count : end]
            if nodes is not None:
                return nodes + shift, values
            first = int(self._firsts[place, feed]) + shift
            return slice(first, first + count), values
        where = np.array(places)
        counts = self._counts[where, feed]
        if len(places) < self.num_requests or bool((where[1:] < where[:-1]).any()):
            values = values[_spans(self._ends[where, feed] - counts, counts)]
        if nodes is not None:
            return (np.array(shifts)[:, None] + nodes).reshape(-1), values
        return _spans(self._firsts[where, feed] + shifts, counts), values


def _spans(firsts: Counts, counts: Counts) -> NDArray[np.int64]:
    """Return counts[i] numbers from firsts[i] on, for each i."""
    before = np.cumsum(counts) - counts
    spans: NDArray[np.int64] = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return spans


Drawn = tuple[Template, Given, int]
"""The template of a request, and where its values are: which of those given, and its place among them."""


def gather(templates: Sequence[Template], leaves: Sequence[Sequence[Leaf]]) -> tuple[Given | None, list[int]]:
    """Lay out the values of requests whose templates have one form. leaves: of each request.

    Returns their values, and the positions of wrong requests. These must be unfolded, which raises their error. If
    there are any, there are no values: gather the others again. Returns None for no requests.
    """
    if not templates:
        return None, []
    first = templates[0]
    pools: dict[Kind, Any] = {}
    for kind in first.kinds:
        try:
            pools[kind] = _flat(kind, chain.from_iterable(leaves))
        except OverflowError:  # integers of more than 64 bits
            return None, _wrong(templates, leaves)
    for check in first.checks:
        values = pools[check.kind]
        if check.codes is not None:
            values = values.reshape(len(templates), -1)[:, check.codes[check.codes < _width(values, templates)]]
        if not _are_below(values, check.limit):
            return None, _wrong(templates, leaves)
    return Given(templates, [_rows(feed, pools, len(templates)) for feed in first.feeds]), []


def _width(values: Any, templates: Sequence[Template]) -> int:
    return len(values) // len(templates)


def _wrong(templates: Sequence[Template], leaves: Sequence[Sequence[Leaf]]) -> list[int]:
    """Return the positions of the wrong requests: all that do not pass alone."""
    if len(templates) == 1:
        return [0]
    return [i for i in range(len(templates)) if gather(templates[i : i + 1], leaves[i : i + 1])[1]]


def _flat(kind: Kind, leaves: Any) -> Any:
    """Return all values of one kind in the leaves of requests, in order."""
    mine = [values for of, values in leaves if of is kind or of == kind]
    if isinstance(kind, torch.dtype):
        return joined(mine).detach().reshape(-1)
    if isinstance(kind, str):
        return (mine[0] if len(mine) == 1 else np.concatenate([values.reshape(-1) for values in mine])).reshape(-1)
    lists = [values if type(values) is list else (values,) for values in mine]
    count = sum(map(len, lists))
    return np.fromiter(chain.from_iterable(lists), np.int64 if kind is int else np.float64, count)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor with all values, in order."""
    if len(tensors) == 1:
        return tensors[0]
    try:
        return torch.cat(list(tensors))  # the same as below, in a sixth of the time
    except RuntimeError:  # rows of several shapes, or single numbers
        return torch.cat([one.reshape(-1) for one in tensors])


def _are_below(values: Any, limit: int) -> bool:
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        return int(values.view(np.uint64).max(initial=0)) < limit  # negative numbers are large without a sign
    return int(values.min()) >= 0 and int(values.max()) < limit


def _rows(feed: Feed, pools: dict[Kind, Any], num_requests: int) -> Any:
    """Return the values of one feed of all requests, in the order of the requests, [all nodes, *shape]."""
    if feed.kind is None:
        fixed = feed.fixed
        if num_requests == 1:
            return fixed
        return (
            torch.cat([fixed] * num_requests)
            if isinstance(fixed, torch.Tensor)
            else np.concatenate([fixed] * num_requests)
        )
    values = pools[feed.kind]
    if feed.codes is not None:
        values = values.reshape(num_requests, -1)
        if feed.constants is not None:
            values = np.concatenate(
                (values, np.broadcast_to(feed.constants, (num_requests, len(feed.constants)))), axis=1
            )
        values = values[:, feed.codes]
    values = values.reshape(-1, *feed.spec.shape) if feed.spec.shape else values.reshape(-1)
    if feed.kind is int and feed.spec.dtype == "int64":
        return values
    return converted(values, feed.spec, "")
