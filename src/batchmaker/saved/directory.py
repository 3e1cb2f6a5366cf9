"""A saved model as a directory: written from a model whose cells are bound, and loaded again."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from batchmaker.cost.profile import PROFILE, CostProfile
from batchmaker.errors import DataError, SavedModelError
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model
from batchmaker.model.registry import CellRegistry
from batchmaker.saved import plain
from batchmaker.saved.cell_files import load_cells, write_cells
from batchmaker.saved.manifest import FORMAT, MANIFEST, Manifest, check_limits, read_manifest
from batchmaker.saved.weights_folder import (
    CONFIG,
    Make,
    config_of,
    is_weights_folder,
    load_weights_folder,
    main_files,
    write_weights,
)

_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def saved_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a saved model one of which changes when it does; none if there is no saved model."""
    if (folder / MANIFEST).is_file():
        return (folder / MANIFEST,)
    return main_files(folder) if is_weights_folder(folder) else ()


# --- writing --------------------------------------------------------------------------------------------------------


def class_path(model_class: type[Model]) -> str:
    """Return "package.module:Class", the path to import the class. SavedModelError if it cannot be imported."""
    module, name = model_class.__module__, model_class.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise SavedModelError(
            f"class {name} is defined in {'__main__' if module == '__main__' else 'a function'}, where a saved model "
            "cannot find it again. Move it to the top level of a module that can be imported."
        )
    if _import_class(f"{module}:{name}", f"class {name}") is not model_class:
        raise SavedModelError(f"{module}:{name} is another class than the model's own. Give them different names.")
    return f"{module}:{name}"


@contextmanager
def _new(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a directory that gets its name, that of a new or empty one, when the block has ended without an error."""
    target = Path(directory)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise SavedModelError(f"{target}: exists and is not an empty directory. Remove it or choose another one.")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(model: Model, directory: str | os.PathLike[str], config: Mapping[str, Any] | None) -> None:
    """Write weights and config.json to a new or empty directory, all of it or nothing; see `batchmaker.save`.

    config: as for `config_of`. SavedModelError also if the model cannot be made again of its own options.
    """
    whole = config_of(model, class_path(type(model)), config)
    with _new(directory) as partial:
        write_weights(model, partial, whole)
        load_weights_folder(partial, None, _import_class)


def write(model: Model, directory: str | os.PathLike[str], registry: CellRegistry, examples: list[Any]) -> None:
    """Write the model to a new or empty directory, all of it or nothing.

    registry: has bound every cell of the model, by unfolding the example requests. Raises SavedModelError.
    """
    model_path = class_path(type(model))
    paths = {id(cell): path for path, cell in model.cells.items()}
    state = _state_to_json(model, type(model).__name__, paths)
    example, *others = (plain.to_json(request, "example_request") for request in examples)
    with _new(directory) as partial:
        cells = write_cells(model, partial, registry)
        manifest = Manifest(
            format=FORMAT,
            batchmaker=importlib.import_module("batchmaker").__version__,
            torch=str(torch.__version__),
            model=model_path,
            state=state,
            cells=cells,
            example_request=example,
            deadline_ms=model.deadline_ms,
            example_requests=tuple(others),
            example_chunks=tuple([plain.to_json(chunk, "example_chunks") for chunk in model.example_chunks]),
        )
        check_limits(manifest, str(directory))
        if model.profile is not None:
            model.profile.write(partial / PROFILE)
        (partial / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def _state_to_json(model: Model, where: str, paths: dict[int, str]) -> Any:
    """Return a model's state; cells in it as {"$cell": path}, models as {"$model": ...}. paths: of cells by id."""

    def other(value: Any, where: str) -> Any:
        """Return a cell or a model in the state as JSON; None for a value of any other kind."""
        if isinstance(value, Cell) and id(value) in paths:
            return {"$cell": paths[id(value)]}
        if isinstance(value, Model):
            own = {name: cell for name, cell in vars(value).items() if isinstance(cell, Cell)}
            cells = {name: {"$cell": paths[id(cell)]} for name, cell in own.items()}
            return {
                "$model": {
                    "class": class_path(type(value)),
                    "cells": cells,
                    "state": _state_to_json(value, where, paths),
                }
            }
        return None

    return plain.to_json(model.saved_state(), where, other)


# --- loading --------------------------------------------------------------------------------------------------------


def load(directory: str | os.PathLike[str], model_class: Make | None = None) -> Model:
    """Return a model from a directory that `batchmaker.save` wrote, or that has config.json and safetensors.

    model_class: the class whose `unfold` is used. By default it is the class that the directory names, whose installed
    module is imported: its code is trusted, as with any import. The files are not trusted: nothing is unpickled, no
    code is read from them, and graphs may hold ATen calls only.

    A directory with graphs: `__init__` is not called; cells and `saved_state()` are restored, and the example request
    is proved when the engine starts. A directory with config.json (Hugging Face's layout): the class, or a function
    that returns a model, is called with the options in it, and the weights are copied into `saved_weights()`; there
    must be one for each, and no others. Raises SavedModelError; then nothing is loaded.
    """
    path = Path(directory)
    if not (path / MANIFEST).exists() and (path / CONFIG).exists():
        model = load_weights_folder(path, model_class, _import_class)
        model.profile = _load_profile(path / PROFILE) or model.profile
        return model
    manifest = read_manifest(path)
    if model_class is not None and not isinstance(model_class, type):
        raise SavedModelError(f"{path}: has graphs, which need a class of batchmaker.Model, got {model_class!r}")
    where = str(path / MANIFEST)
    if model_class is None:
        model_class = _import_class(manifest.model, where)
    cells = load_cells(path, manifest)
    state = _state_from_json(manifest.state, f"{where}: state", cells, model_class)
    example = plain.from_json(manifest.example_request, f"{where}: example_request")
    others = [plain.from_json(request, f"{where}: example_requests") for request in manifest.example_requests]
    own = {name: cell for name, cell in cells.items() if "." not in name}
    model = _restored(model_class, own, state, where)
    model.example_request, model.example_requests = example, others
    model.example_chunks = [plain.from_json(chunk, f"{where}: example_chunks") for chunk in manifest.example_chunks]
    model.deadline_ms = manifest.deadline_ms
    model.profile = _load_profile(path / PROFILE)
    return model


def _state_from_json(state: Any, where: str, cells: dict[str, Cell], model_class: type[Model]) -> Any:
    """Return a model's state with its cells and models. model_class: the class of the whole model."""

    def other(tag: str, content: Any, where: str) -> Any:
        """Return the cell or model that JSON stands for. SavedModelError if it is malformed or forbidden."""
        try:
            if tag == "$cell":
                return cells[content]
            name, own, inner = str(content["class"]), dict(content["cells"]), content["state"]
            if name.partition(".")[0] not in ("batchmaker", model_class.__module__.partition(".")[0]):
                raise SavedModelError(
                    f"{where}: {name} is neither of batchmaker nor of the package of the model's class"
                )
            attributes = {attribute: plain.from_json(cell, where, other) for attribute, cell in own.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise SavedModelError(f"{where}: malformed {tag} ({error}). Save the model again.") from None
        return _restored(_import_class(name, where), attributes, plain.from_json(inner, where, other), where)

    return plain.from_json(state, where, other)


def _restored(model_class: type[Model], cells: dict[str, Cell], state: Any, where: str) -> Model:
    """Return a model of a class with its cells and its state, without calling `__init__`."""
    try:
        model: Model = model_class.__new__(model_class)
        for name, cell in cells.items():
            setattr(model, name, cell)
        model.restore(state)
    except Exception as error:  # the class's own code
        raise SavedModelError(
            f"{where}: {model_class.__name__} does not take the saved state back ({type(error).__name__}: {error}). "
            "Has the class changed since? Save the model again."
        ) from error
    return model


def _load_profile(path: Path) -> CostProfile | None:
    """Return the profile beside the model, None if there is none."""
    if not path.exists():
        return None
    try:
        return CostProfile.read(path)
    except DataError as error:
        raise SavedModelError(str(error)) from error


def _import_class(path: str, where: str) -> type[Model]:
    if not _CLASS.fullmatch(path):
        raise SavedModelError(f"{where}: {path!r} does not name a class as 'package.module:Class'")
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # the module's own code
        raise SavedModelError(
            f"{where}: cannot import {path} ({type(error).__name__}: {error}). Install the package that defines it, "
            "put its folder on PYTHONPATH, or give model_class=."
        ) from error
    if not (isinstance(target, type) and issubclass(target, Model)):
        raise SavedModelError(f"{where}: {path} is not a batchmaker.Model. Give model_class=, or save the model again.")
    return target
