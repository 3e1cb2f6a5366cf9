"""Requests for the simulator: unfolded by the model itself, without computing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
import torch

from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.lab.simulator.workload import SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.shapes import ShapeRegistry
from batchmaker.model.model import Model
from batchmaker.model.unfolding import Unfolding

FRAMES: Final = 8
"""Frames of a spectrogram for each element of a source: LAS's pyramid joins so many into one."""


@final
class Blueprint:
    """A model without weights. Cells are learnt from the example request and from later requests.

    name: for reports. shapes: the cells used so far, with their modules. Raises ModelError if the model has no example
    request or its unfold function waits for values, which are not computed here.
    """

    def __init__(self, name: str, model: Model) -> None:
        if model.example_request is None:
            raise ModelError(f"{type(model).__name__} has no example_request to tell what its cells are given")
        self._name = name
        self._model = model
        self.shapes = ShapeRegistry()
        self._known: dict[Hashable, SimulatedRequest] = {}
        self.request(model.example_request)

    @property
    def model(self) -> SimulatedModel:
        """The model in the scheduler's form, with the cells used so far."""
        return SimulatedModel(self._name, tuple(self.shapes.types))

    def request(self, request: Any) -> SimulatedRequest:
        """Return a request of the model. Raises the errors of `unfold`.

        Runs that feed themselves, such as decoders, are marked as open-ended, as in a real model; they have the number
        of words in the request. Requests of one shape are one object.
        """
        key = _likeness(request)
        if key not in self._known:
            unfolding = Unfolding(self._model, self.shapes, request)
            unfolding.start()
            if unfolding.open:
                raise ModelError(
                    f"{type(self._model).__name__}.unfold waits for values (`yield`), which a simulation does not "
                    "compute. Write the loop with cell.loop(...)."
                )
            if unfolding.decided is not None:
                raise ModelError(
                    f"{type(self._model).__name__}.unfold decides by values (cond, switch, while_loop or at), which a "
                    "simulation does not compute."
                )
            self._known[key] = SimulatedRequest(_open_ended(unfolding.graph), int(self._model.length(request)))
        return self._known[key]

    def sized(self, source: int, words: int = 1) -> SimulatedRequest:
        """Return a request like the example, with a source of `source` elements and `words` words.

        An element of a spectrogram is FRAMES frames. A model whose example has no length, such as one of images, always
        gives the example.
        """
        return self.request(_resized(self._model.example_request, source, words))


def blueprint(name: str, make: Callable[[], Model]) -> Blueprint:
    """Return the blueprint of the model from `make`, without memory for its weights if possible."""
    try:
        with torch.device("meta"):
            return Blueprint(name, make())
    except InvalidRequestError as error:
        if not isinstance(error.__cause__, NotImplementedError):  # a value of the model's own is part of its requests
            raise
    return Blueprint(name, make())


def _open_ended(graph: CellGraph) -> CellGraph:
    """Return the graph without its values. Runs without inputs per step may end at any step."""
    graph.runs = [replace(run, open_ended=not run.sequences) for run in graph.runs]
    graph.host_inputs = []
    return graph


def _resized(example: Any, source: int, words: int) -> Any:
    if isinstance(example, Mapping) and set(example) == {"source", "words"}:
        return {"source": _resized(example["source"], source, words), "words": words}
    rows = np.asarray(example) if isinstance(example, list | tuple | np.ndarray | torch.Tensor) else None
    if rows is None or rows.ndim not in (1, 2):  # an image, a tree
        return example
    return np.repeat(rows[:1], source * (FRAMES if rows.ndim == 2 else 1), axis=0)


def _likeness(request: Any) -> Hashable:
    """Return a key that is equal for requests with one graph. Only the values of floats are left out."""
    if isinstance(request, Mapping):
        return tuple((key, _likeness(value)) for key, value in sorted(request.items()))
    try:
        array = np.asarray(request)
    except ValueError:  # parts of different lengths
        return tuple(map(_likeness, request))
    if array.dtype.kind not in "iubf":
        return repr(request)
    return (array.shape, array.dtype.str, b"" if array.dtype.kind == "f" else array.tobytes())
