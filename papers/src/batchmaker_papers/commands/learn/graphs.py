"""The graphs of a model's requests in the order of their file: mini-batches to count, and others to learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch

from batchmaker.cli import options
from batchmaker.cli.requests import Fitted
from batchmaker.errors import DataError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.mini_batch import MiniBatch, merged, unrolled
from batchmaker.graph.spec import CellType
from batchmaker.lab import zoo
from batchmaker.lab.zoo.blueprint import blueprint
from batchmaker.model.model import Model
from batchmaker_papers.commands.learn.requests import is_saved, read_requests
from batchmaker_papers.commands.learn.saved_graphs import SavedRecording

COUNTED: Final = 5
"""Mini-batches whose batches are counted: the first ones of the file."""
MOST: Final = 1024
"""Most requests to learn from: the first ones after those that are counted."""
WIDTH: Final = 8
"""Width of the model's state during recording, if heads do not share it. No graph depends on it."""


@final
@dataclass(frozen=True, slots=True)
class Graphs:
    """Recorded graphs.

    counted: the first mini-batches of the file. to_learn: requests in none of them. cells: the model's, by type id.
    counted_from, learnt_from: in words.
    """

    counted: tuple[MiniBatch, ...]
    to_learn: tuple[MiniBatch, ...]
    cells: tuple[CellType, ...]
    counted_from: str
    learnt_from: str


def read_graphs(
    name: str, data: Path, batch: int, *, train_data: Path | None = None, words: Path | None = None, seed: int = 0
) -> Graphs:
    """Unfold the requests of a file without computing them, and return their graphs.

    name: a built-in model, or the directory of a saved one. The requests to learn from follow the counted ones, or are
    in another file. Raises DataError if the file has too few requests for either, ModelError if a graph depends on
    values, and the errors of `read_requests`.
    """
    saved = is_saved(name)
    requests = read_requests(name, data, words=words, seed=seed)
    other = None if train_data is None else read_requests(name, train_data, words=words, seed=seed)
    num_counted, wanted = COUNTED * batch, COUNTED * batch + (0 if other else batch)
    if len(requests.items) < wanted:
        raise DataError(
            f"{data}: got {len(requests.items)} requests, expected at least {wanted}: {COUNTED} mini-batches of "
            f"{batch} are counted{'' if other else f' and at least {batch} other requests learnt from'}. "
            f"Give a smaller --batch{'' if other else ', or other requests with --train-data'}."
        )
    recording: RecordedGraphs = (
        SavedRecording(Path(name)) if saved else _BuiltIn(name, _maker(name, requests, other, seed))
    )
    first = _recorded(recording, requests, slice(0, num_counted))
    if other is None:
        rest = _recorded(recording, requests, slice(num_counted, num_counted + MOST))
        learnt_from = f"{requests.source}, requests {num_counted + 1} to {num_counted + len(rest)}"
    else:
        rest = _recorded(recording, other, slice(0, MOST))
        learnt_from = f"{other.source}, requests 1 to {len(rest)}"
    cells = recording.cells  # all of them, now that every request was unfolded
    counted = [unrolled(graph, len(cells)) for graph in first]
    return Graphs(
        tuple(merged(counted[i : i + batch]) for i in range(0, num_counted, batch)),
        tuple(unrolled(graph, len(cells)) for graph in rest),
        cells,
        f"{requests.source}, requests 1 to {num_counted}",
        learnt_from,
    )


class RecordedGraphs(Protocol):
    """A model that unfolds one request after another. cells: those used so far, by type id."""

    @property
    def cells(self) -> tuple[CellType, ...]: ...

    def graph(self, fitted: Fitted, item: Any) -> CellGraph:
        """Return the graph of an item's request."""
        ...


@final
class _BuiltIn:
    """A built-in model without its weights."""

    def __init__(self, name: str, make: Callable[[], Model]) -> None:
        with torch.device("meta"):
            self._model = make()
        self._plan = blueprint(name, make)

    @property
    def cells(self) -> tuple[CellType, ...]:
        return self._plan.model.cells

    def graph(self, fitted: Fitted, item: Any) -> CellGraph:
        return self._plan.request(fitted.encode(self._model, item)).graph


def _maker(name: str, requests: Fitted, other: Fitted | None, seed: int) -> Callable[[], Model]:
    """Return a function that makes a model for all requests.

    Options fitted to data are sizes, so the larger one is used.
    """
    fitted: dict[str, Any] = dict(requests.options)
    for option, value in ({} if other is None else other.options).items():
        fitted[option] = max(value, fitted[option]) if isinstance(value, int) else value
    width = None if "heads" in zoo.option_names(name) else WIDTH
    return lambda: options.make_model(name, **fitted, hidden=width, seed=seed)


def _recorded(recording: RecordedGraphs, fitted: Fitted, part: slice) -> list[CellGraph]:
    return [recording.graph(fitted, item) for item in fitted.items[part]]
