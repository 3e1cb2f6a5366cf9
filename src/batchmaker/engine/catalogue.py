"""The models that one engine serves, by name. Engine looks up the model of each request here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from batchmaker.errors import ModelError, OptionError, unknown_name
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model, check_functions, name_cells
from batchmaker.model.options import check_number, said_of
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import CellTypes


def said_kind(value: object) -> str:
    """Return the class of a value, for a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


@final
@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model of an engine.

    model_id: its number, for the scheduler. cells: gives its cells their types. prefix: stands before the names of its
    cells; empty if the engine has one model. deadline_ms: of requests that bring none; None for no deadline.
    """

    model_id: int
    name: str
    model: Model
    cells: CellTypes[Cell]
    prefix: str
    deadline_ms: float | None

    def due_s(self, now_s: float, deadline_ms: float | None) -> float | None:
        """Return the deadline of a request that comes now, in engine seconds; None for no deadline.

        now_s: engine seconds. deadline_ms: of the request; None for the model's. OptionError if it is not a number.
        """
        if deadline_ms is None:
            deadline_ms = self.deadline_ms
        if deadline_ms is None:
            return None
        check_number("deadline_ms", deadline_ms, hint=" of milliseconds (math.inf for none)")
        return None if deadline_ms == math.inf else now_s + float(deadline_ms) / 1e3


@final
class Catalogue:
    """Models by name. A single model need not be named.

    models: one, or several by name. registry: gives the cells their types. deadline_ms: for models that have none of
    their own. Raises ModelError for something that is no model, OptionError for a wrong name or deadline or no model.
    """

    def __init__(
        self, models: Model | Mapping[str, Model], registry: CellRegistry, deadline_ms: float | None = None
    ) -> None:
        if not isinstance(models, Model | Mapping):
            raise ModelError(
                f"an engine serves a batchmaker.Model, or several by name, got {said_kind(models)}; a network without "
                "control flow becomes one by bm.layers(module), an nn.LSTM, nn.GRU or nn.RNN by bm.recurrent(module)"
            )
        named = {type(models).__name__: models} if isinstance(models, Model) else dict(models)
        if not named:
            raise OptionError("an engine needs a model, got an empty mapping")
        self._models: dict[str, CatalogueEntry] = {}
        for name, model in named.items():
            if not isinstance(model, Model):
                raise ModelError(f"model {name!r}: an engine serves a batchmaker.Model, got {type(model).__name__}")
            if not isinstance(name, str) or not name or "/" in name:
                raise OptionError(f"a model's name is a text without '/', got {name!r}")
            own_ms = deadline_ms if model.deadline_ms is None else model.deadline_ms
            check_number(f"model {name!r}: deadline_ms", own_ms, above=0.0, optional=True)
            check_functions(model)
            name_cells(vars(model))
            prefix = f"{name}/" if len(named) > 1 else ""
            cells = registry.prefixed(prefix) if prefix else registry
            self._models[name] = CatalogueEntry(len(self._models), name, model, cells, prefix, own_ms)

    def __iter__(self) -> Iterator[CatalogueEntry]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str | None) -> CatalogueEntry:
        """Return the model with this name; None stands for the only model.

        OptionError for an unknown name, and for None if there are several models.
        """
        if name is None:
            if len(self._models) > 1:
                raise OptionError(f"this engine has several models; give model=, one of {', '.join(self._models)}")
            (only,) = self._models.values()
            return only
        if not isinstance(name, str):
            raise OptionError(f"model must be the name of a model, a text, got {said_of(name)}")
        if name not in self._models:
            raise unknown_name("model", name, self._models)
        return self._models[name]
