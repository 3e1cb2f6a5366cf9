"""The graphs of a model's requests in the order of their file: mini-batches to count, and others to learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from batchmaker.cells.model import Model
from batchmaker.cli import options
from batchmaker.cli.requests import Fitted, fit
from batchmaker.errors import DataError
from batchmaker.graph.mini_batch import MiniBatch, merged, unrolled
from batchmaker.graph.spec import CellType
from batchmaker.models.blueprint import Blueprint, blueprint

COUNTED: Final = 5
"""Mini-batches whose batches are counted: the first of the file."""
MOST: Final = 1024
"""Requests that are learnt from, at most: the first after those that are counted."""
WIDTH: Final = 8
"""Of the model's state while graphs are recorded; no graph depends on it."""


@final
@dataclass(frozen=True, slots=True)
class Graphs:
    """counted: the first mini-batches of the file. to_learn: requests that are in none of them. cells: the model's, by
    type id. counted_from, learnt_from: in words."""

    counted: tuple[MiniBatch, ...]
    to_learn: tuple[MiniBatch, ...]
    cells: tuple[CellType, ...]
    counted_from: str
    learnt_from: str


def read_graphs(
    name: str, data: Path, batch: int, *, train_data: Path | None = None, words: Path | None = None, seed: int = 0
) -> Graphs:
    """Unfold the requests of a file, nothing computed, and return their graphs.

    What is learnt from follows what is counted, or is in a file of its own. Raises DataError if the file has too few
    requests for either, and what `requests_from` raises.
    """
    given = fit(name, data, words=words, seed=seed)
    other = None if train_data is None else fit(name, train_data, words=words, seed=seed)
    num_counted, wanted = COUNTED * batch, COUNTED * batch + (0 if other else batch)
    if len(given.items) < wanted:
        raise DataError(
            f"{data}: got {len(given.items)} requests, expected at least {wanted}: {COUNTED} mini-batches of {batch} "
            f"are counted{'' if other else f' and at least {batch} other requests learnt from'}. Give a smaller "
            f"--batch{'' if other else ', or other requests with --train-data'}."
        )
    make = _maker(name, given, other, seed)
    with torch.device("meta"):
        model = make()
    plan = blueprint(name, make)
    first = _unfolded(plan, given, model, slice(0, num_counted))
    if other is None:
        rest = _unfolded(plan, given, model, slice(num_counted, num_counted + MOST))
        learnt_from = f"{given.source}, requests {num_counted + 1} to {num_counted + len(rest)}"
    else:
        rest = _unfolded(plan, other, model, slice(0, MOST))
        learnt_from = f"{other.source}, requests 1 to {len(rest)}"
    counted = tuple(merged(first[i : i + batch]) for i in range(0, num_counted, batch))
    return Graphs(counted, tuple(rest), plan.model.cells, f"{given.source}, requests 1 to {num_counted}", learnt_from)


def _maker(name: str, given: Fitted, other: Fitted | None, seed: int) -> Callable[[], Model]:
    """Return what makes a model that fits all requests: options that are fitted to data are sizes, so the larger."""
    fitted: dict[str, Any] = dict(given.options)
    for option, value in ({} if other is None else other.options).items():
        fitted[option] = max(value, fitted[option]) if isinstance(value, int) else value
    return lambda: options.make_model(name, **fitted, hidden=WIDTH, seed=seed)


def _unfolded(plan: Blueprint, fitted: Fitted, model: Model, part: slice) -> list[MiniBatch]:
    graphs = [plan.request(fitted.encode(model, item)).graph for item in fitted.items[part]]
    num_types = len(plan.model.cells)
    return [unrolled(graph, num_types) for graph in graphs]
