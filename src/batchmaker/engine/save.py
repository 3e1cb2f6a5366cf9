"""Saving a model (`batchmaker.save`). Its example requests run once, to bind each cell to the inputs it really gets."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any

from batchmaker.engine.engine import Engine
from batchmaker.errors import BatchmakerError, SavedModelError
from batchmaker.model.model import Model
from batchmaker.saved.directory import class_path, write


def save(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    example_request: Any = None,
    example_requests: Sequence[Any] = (),
) -> None:
    """Write the model to a new or empty directory: a manifest, the graph of each cell, and its weights as safetensors.

    example_request, example_requests: plain data. One request that uses every cell, or several that do so together.
    Default: the model's own. The model's `example_chunks` run too. `batchmaker.load` reads the directory. The model's
    class is saved by name, not as code. Its other attributes must be plain data, which may contain cells (see
    Model.saved_state). Raises SavedModelError; then no directory is left behind.
    """
    class_path(type(model))
    examples = [*(() if example_request is None else (example_request,)), *example_requests] or model.examples
    if not examples:
        raise SavedModelError(
            f"{type(model).__name__}: a saved model needs an example request. Set model.example_request, or give "
            "save(..., example_request=...); several where one does not use every cell (example_requests)."
        )
    probe = copy.copy(model)
    probe.example_request, probe.example_requests, probe.example_chunks = (
        None,
        (),
        (),
    )  # so `start` materialises nothing
    engine = Engine(probe, "cellular", threads=1)
    try:
        with engine:
            for request in examples:
                engine.submit(request, deadline_ms=math.inf).result()
            if model.example_chunks:
                with engine.open_sequence(deadline_ms=math.inf) as sequence:
                    for chunk in model.example_chunks:
                        sequence.submit(chunk).result()
    except BatchmakerError as error:
        raise SavedModelError(f"{type(model).__name__}: its example request failed: {error}") from error
    write(model, directory, engine.registry, examples)
