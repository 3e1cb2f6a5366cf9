"""The graphs of a saved model's requests, as recorded from its unfold function; no request is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import batchmaker
from batchmaker.cli.requests import Fitted
from batchmaker.errors import DataError, InvalidRequestError, ModelError
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding


@final
class SavedRecording:
    """A model that `batchmaker.save` wrote. The cells of its example request come first, as in an engine.

    Raises SavedModelError if it cannot be loaded, and the errors of its example request.
    """

    def __init__(self, directory: Path) -> None:
        self._model = batchmaker.load(directory)
        self._registry = CellRegistry()  # as in an engine: equal cells are one type
        for request in self._model.examples:
            Unfolding(self._model, self._registry, request).start()

    @property
    def cells(self) -> tuple[CellType, ...]:
        """The cells used so far, by type id."""
        return tuple(self._registry.types)

    def graph(self, fitted: Fitted, item: Any) -> CellGraph:
        """Return the graph of a JsonRequest.

        DataError, naming file and line, for a request that the model refuses; ModelError if the graph depends on
        values.
        """
        json_request = fitted.encode(self._model, item)
        try:
            return self._unfold(json_request.request)
        except InvalidRequestError as error:
            raise DataError(f"{json_request.where}: {error}") from error

    def _unfold(self, request: Any) -> CellGraph:
        unfolding = Unfolding(self._model, self._registry, request)
        unfolding.start()
        if unfolding.open or unfolding.loops or unfolding.decided is not None:
            unfolding.close()
            waits = "waits for values (`yield`)" if unfolding.open else "ends a loop by a value (`until=`)"
            if unfolding.decided is not None:
                waits = "decides by values (cond, switch, while_loop or at)"
            raise ModelError(
                f"{type(self._model).__name__}.unfold {waits}: its graphs depend on what the cells compute, and "
                "nothing is computed to learn a policy. Learn for models whose graphs follow from the request alone, "
                "or use a policy that needs no learning, such as `sufficient`."
            )
        return unfolding.graph
