"""The values of many requests with templates, laid out together for their cells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from batchmaker.arrays import spans
from batchmaker.model.host_values import converted
from batchmaker.model.request_shapes import Leaf
from batchmaker.model.stand_ins import Kind
from batchmaker.model.templates import Template


@final
class GatheredValues:
    """Values of requests whose templates have one form, [all their nodes, *shape] for each feed.

    The places of a request's nodes are known after admission: see `rows`.
    """

    __slots__ = ("_counts", "_ends", "_firsts", "_templates", "_values")

    def __init__(self, templates: Sequence[Template], values: list[Any]) -> None:
        self._values = values
        self._templates = templates
        count, feeds = len(templates), len(values)
        if count == 1:  # the arrays below would cost more than the rest
            return
        nodes = np.fromiter(chain.from_iterable([one.spans for one in templates]), np.int64, 2 * count * feeds)
        self._firsts, self._counts = nodes.reshape(count, 2, feeds).transpose(1, 0, 2)
        self._ends = np.cumsum(self._counts, axis=0)

    def of(self, feed: int, place: int) -> Any:
        """Return the values of one of the requests for one feed."""
        values = self._values[feed]
        if len(self._templates) > 1:
            count, end = int(self._counts[place, feed]), int(self._ends[place, feed])
            values = values[end - count : end]
        return values

    def rows(self, feed: int, places: Sequence[int], shifts: Sequence[int]) -> tuple[slice | NDArray[np.int64], Any]:
        """Return rows and values of some of the requests for one feed.

        places: positions of the requests, each once. shifts: for each request, the offset from its own node numbers to
        rows.
        """
        values, templates = self._values[feed], self._templates
        if len(places) == 1:
            (place,), (shift,) = places, shifts
            return templates[place].feeds[feed].host.rows(shift), self.of(feed, place)
        where = np.array(places)
        counts = self._counts[where, feed]
        if len(places) < len(templates) or bool((where[1:] < where[:-1]).any()):
            values = values[spans(self._ends[where, feed] - counts, counts)]
        if templates[0].feeds[feed].host.nodes is None:  # alike in all templates of one form
            return spans(self._firsts[where, feed] + shifts, counts), values
        nodes = np.concatenate([templates[place].feeds[feed].host.nodes for place in places])
        return nodes + np.repeat(shifts, counts), values


TemplateValues = tuple[Template, GatheredValues, int]
"""The template of a request, and where its values are: which of those given, and its place among them."""


@final
class _Pool:
    """All values of one kind in some requests, one request after the other. sizes: how many each request has."""

    __slots__ = ("_sizes", "values")

    def __init__(self, values: Any, sizes: Sequence[int]) -> None:
        self.values = values
        self._sizes = sizes

    def at(self, codes: Sequence[Any], constants: Sequence[Any] | None = None) -> Any:
        """Return the values at some codes of each request, one request after the other. constants: of each request."""
        values = self.values
        if constants is None and len(codes) == 1:
            return values[codes[0]]
        places, counts = np.concatenate(codes), list(map(len, codes))
        starts = np.repeat(np.cumsum(self._sizes) - self._sizes, counts)
        if constants is None:
            return values[places + starts]
        numbers = list(map(len, constants))
        firsts = np.repeat(len(values) + np.cumsum(numbers) - numbers - self._sizes, counts)
        is_constant = places >= np.repeat(self._sizes, counts)
        return np.concatenate((values, *constants))[places + np.where(is_constant, firsts, starts)]


def gather(templates: Sequence[Template], leaves: Sequence[Sequence[Leaf]]) -> tuple[GatheredValues | None, list[int]]:
    """Lay out the values of requests whose templates have one form. leaves: of each request.

    Returns their values, and the positions of wrong requests. These must be unfolded, which raises their error. If
    there are any, there are no values: gather the others again. Returns None for no requests.
    """
    if not templates:
        return None, []
    first = templates[0]
    pools: dict[Kind, _Pool] = {}
    for number, kind in enumerate(first.kinds):
        try:
            values = _flat(kind, chain.from_iterable(leaves))
        except OverflowError:  # integers of more than 64 bits
            return None, _wrong(templates, leaves)
        pools[kind] = _Pool(values, [one.sizes[number] for one in templates])
    for number, check in enumerate(first.checks):
        pool = pools[check.kind]
        values = pool.values if check.codes is None else pool.at([one.checks[number].codes for one in templates])
        if not _are_below(values, check.limit):
            return None, _wrong(templates, leaves)
    return GatheredValues(templates, [_rows(number, templates, pools) for number in range(len(first.feeds))]), []


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


def _rows(number: int, templates: Sequence[Template], pools: dict[Kind, _Pool]) -> Any:
    """Return the values of one feed of all requests, in the order of the requests, [all nodes, *shape]."""
    feeds = [one.feeds[number] for one in templates]
    feed = feeds[0]
    if feed.kind is None:
        fixed = [one.fixed for one in feeds]
        if len(fixed) == 1:
            return fixed[0]
        return torch.cat(fixed) if isinstance(fixed[0], torch.Tensor) else np.concatenate(fixed)
    pool = pools[feed.kind]
    values = pool.values
    if feed.codes is not None:
        constants = None if feed.constants is None else [one.constants for one in feeds]
        values = pool.at([one.codes for one in feeds], constants)
    values = values.reshape(-1, *feed.spec.shape) if feed.spec.shape else values.reshape(-1)
    if feed.kind is int and feed.spec.dtype == "int64":
        return values
    return converted(values, feed.spec, "")
