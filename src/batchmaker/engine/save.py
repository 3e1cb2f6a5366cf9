"""Saving a model: its example request is run once, so that every cell is bound to what it really gets."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

from batchmaker.cells.model import Model
from batchmaker.cells.saved.directory import class_path, write
from batchmaker.engine.engine import Engine
from batchmaker.errors import BatchmakerError, SavedModelError


def save(model: Model, directory: str | os.PathLike[str], *, example_request: Any = None) -> None:
    """Write the model to a new or empty directory: a manifest, each cell's graph, its weights as safetensors.

    example_request: one that uses every cell, of plain data; by default the model's own. `batchmaker.load` reads the
    directory. The model's class is kept by name, not by its code; other attributes must be plain data (see
    Model.saved_state). Raises SavedModelError, and then leaves no directory behind.
    """
    class_path(type(model))
    if example_request is None:
        example_request = model.example_request
    if example_request is None:
        raise SavedModelError(
            f"{type(model).__name__}: a saved model needs an example request. Set model.example_request, or give "
            "save(..., example_request=...)."
        )
    probe = copy.copy(model)
    probe.example_request = None  # nothing is materialised only to be saved
    engine = Engine(probe, "cellular", threads=1)
    try:
        with engine:
            engine.submit_future(example_request, deadline_ms=math.inf).result()
    except BatchmakerError as error:
        raise SavedModelError(f"{type(model).__name__}: its example request failed: {error}") from error
    write(model, directory, engine.registry, example_request)
