"""Requests for the simulator: unfolded by the model itself, without computing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import nn

from batchmaker.compile.export import flat_module
from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType
from batchmaker.lab.simulator.decisions import RecordedDecisions
from batchmaker.lab.simulator.workload import SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.decided import DecidedRequest
from batchmaker.lab.zoo.shapes import ShapeRegistry
from batchmaker.model.model import Model
from batchmaker.model.unfolding import Unfolding

FRAMES: Final = 8
"""Frames of a spectrogram for each element of a source: LAS's pyramid joins so many into one."""


@final
class DecidesError(ModelError):
    """Values decide what a model computes, and none are computed."""


class _Flat(NamedTuple):
    """Cell types with their modules, in the form in which these take and return flat tensors."""

    types: Sequence[CellType]
    modules: Sequence[nn.Module]


@final
class Blueprint:
    """A model without weights. Cells are learnt from the example request and from later requests.

    name: for reports. shapes: the cells used so far, with their modules. computes: the model has weights, and a request
    in which values decide is computed once, to record what they decide. decides: whether the example is such a request.
    Raises ModelError if the model has no example request or its unfold function waits for values; DecidesError if
    values decide and it does not compute.
    """

    def __init__(self, name: str, model: Model, *, computes: bool = False) -> None:
        if model.example_request is None:
            raise ModelError(f"{type(model).__name__} has no example_request to tell what its cells are given")
        self._name = name
        self._model = model
        self._computes = computes
        self.shapes = ShapeRegistry()
        self._requests: dict[Hashable, SimulatedRequest] = {}
        self.decides = self.request(model.example_request).decided is not None

    @property
    def model(self) -> SimulatedModel:
        """The model in the scheduler's form, with the cells used so far."""
        return SimulatedModel(self._name, tuple(self.shapes.types))

    def request(self, request: Any) -> SimulatedRequest:
        """Return a request of the model. Raises the errors of `unfold`.

        Runs that feed themselves, such as decoders, are marked as open-ended, as in a real model; they have the number
        of words in the request. Requests of one shape are one object; where values may decide, of equal values.
        """
        key = _likeness(request, with_floats=self._computes)
        if key not in self._requests:
            unfolding = Unfolding(self._model, self.shapes, request)
            unfolding.start()
            if unfolding.open:
                raise ModelError(
                    f"{type(self._model).__name__}.unfold waits for values (`yield`), which a simulation does not "
                    "compute. Write the loop with cell.loop(...)."
                )
            decided: RecordedDecisions | None = None
            if unfolding.decided is not None:
                if not self._computes:
                    raise DecidesError(
                        f"{type(self._model).__name__}.unfold decides by values (cond, switch, while_loop or at), "
                        "which are not computed here."
                    )
                flat = _Flat(self.shapes.types, [flat_module(module) for module in self.shapes.modules])
                decided = DecidedRequest(flat, unfolding.graph, unfolding.loops).recorded
            graph, length = _open_ended(unfolding.graph), int(self._model.length(request))
            self._requests[key] = SimulatedRequest(graph, length, decided=decided)
        return self._requests[key]

    def sized(self, source: int, words: int = 1) -> SimulatedRequest:
        """Return a request like the example, with a source of `source` elements and `words` words.

        An element of a spectrogram is FRAMES frames. A model whose example has no length, such as one of images, always
        gives the example. ModelError for a model that decides by values: they would be those of a made-up request.
        """
        if self.decides:
            raise ModelError(f"{type(self._model).__name__}.unfold decides by values, so it takes whole requests.")
        return self.request(_resized(self._model.example_request, source, words))


def blueprint(name: str, make: Callable[[], Model], *, computes: bool = False) -> Blueprint:
    """Return the blueprint of the model from `make`, without memory for its weights if possible.

    computes: a model that decides by values is made with weights, and its requests are computed once.
    """
    try:
        with torch.device("meta"):
            return Blueprint(name, make())
    except DecidesError:
        if not computes:
            raise
        return Blueprint(name, make(), computes=True)
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


def _likeness(request: Any, *, with_floats: bool) -> Hashable:
    """Return a key that is equal for requests with one graph. Only the values of floats may be left out."""
    if isinstance(request, Mapping):
        return tuple((key, _likeness(value, with_floats=with_floats)) for key, value in sorted(request.items()))
    try:
        array = np.asarray(request)
    except ValueError:  # parts of different lengths
        return tuple([_likeness(part, with_floats=with_floats) for part in request])
    if array.dtype.kind not in "iubf":
        return repr(request)
    is_left_out = array.dtype.kind == "f" and not with_floats
    return (array.shape, array.dtype.str, b"" if is_left_out else array.tobytes())
