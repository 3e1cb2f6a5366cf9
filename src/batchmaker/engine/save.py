"""Saving a model (`batchmaker.save`). Its example requests run once, to bind each cell to the inputs it really gets."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from batchmaker.engine.engine import Engine
from batchmaker.errors import BatchmakerError, OptionError, SavedModelError
from batchmaker.model.model import Model
from batchmaker.saved.directory import class_path, write, write_folder


def save(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    example_request: Any = None,
    example_requests: Sequence[Any] = (),
    form: Literal["graphs", "weights"] = "graphs",
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write the model to a new or empty directory, which `batchmaker.load` reads.

    form: "weights" writes Hugging Face's layout: config.json, with the class and the options of its constructor, and
    model.safetensors, with the weights by their names in the model (`saved_weights`). config: these options, plain
    data; default: `model.config`. The model is made of them once, to see that it can be. Of its other state only
    `deadline_ms` and `profile` are kept. What follows is for "graphs": a manifest, the graph of each cell, and its
    weights as safetensors.

    example_request, example_requests: plain data. One request that uses every cell, or several that do so together.
    Default: the model's own. The model's `example_chunks` run too. The model's class is saved by name, not as code. Its
    other attributes must be plain data, which may contain cells (see Model.saved_state). Raises SavedModelError; then
    no directory is left behind.
    """
    _check_options(form, config, example_request, example_requests)
    class_path(type(model))
    if form == "weights":
        write_folder(model, directory, config)
        return
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
    engine.registry.keep_steps("while a model is saved, runs are steps")
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


def _check_options(form: str, config: Any, example_request: Any, example_requests: Sequence[Any]) -> None:
    """OptionError for a form that is none, and for options of the other form."""
    if form not in ("graphs", "weights"):
        raise OptionError(f"form must be 'graphs' or 'weights', got {form!r}")
    if form == "graphs" and config is not None:
        raise OptionError("config is for form='weights'")
    if form == "weights" and (example_request is not None or len(example_requests)):
        raise OptionError("an example request is for form='graphs'; with form='weights' the class has its own")
