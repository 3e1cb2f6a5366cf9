"""Sources of models: built-in networks, directories of saved models, folders of those, Python files."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, final

from batchmaker.errors import OptionError, unknown_name
from batchmaker.model.model import Model
from batchmaker.saved import load, python_file, saved_files


@final
@dataclass(frozen=True, slots=True)
class Version:
    """One version of a model. stamp: changes when the model changes."""

    make: Callable[[], Model]
    stamp: Hashable


Versions = Mapping[str, Version]
"""Versions by number, "1", "2", ..."""

_LOG: Final = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_ALIAS: Final = re.compile(r"([^=:/]+)=(.+)", re.DOTALL)
_RESERVED: Final = {"stats"}
"""Names that are parts of routes."""
_ZOO: Final = "batchmaker.lab.zoo"
"""The module of the built-in networks, loaded when one is asked for."""


class Source(Protocol):
    """A source of models. Clients' input never reaches it: it lists its models, and clients choose by name."""

    def scan(self) -> Mapping[str, Versions]:
        """Return the present models by name. OSError if that cannot be known: the file or folder is gone."""


@final
@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A network of the papers, with random weights, as version 1."""

    name: str
    network: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def scan(self) -> Mapping[str, Versions]:
        stamp = (self.network, tuple(sorted(self.options.items())))
        return {self.name: {"1": Version(lambda: _zoo().make(self.network, **self.options), stamp)}}


@final
@dataclass(frozen=True, slots=True)
class SavedDirectory:
    """A directory that `batchmaker.save` wrote, as version 1, or one with such directories named 1, 2, ..."""

    name: str
    path: Path

    def scan(self) -> Mapping[str, Versions]:
        return {self.name: _versions(self.path)}


@final
@dataclass(frozen=True, slots=True)
class RepositoryRoot:
    """A folder of saved models: NAME/ or NAME/VERSION/. Later models are found at the next scan."""

    path: Path

    def scan(self) -> Mapping[str, Versions]:
        folders = sorted(path for path in self.path.iterdir() if path.is_dir() and is_name(path.name))
        models = {folder.name: _versions(folder) for folder in folders}
        return {name: versions for name, versions in models.items() if versions}


@final
@dataclass(frozen=True, slots=True)
class ModelFile:
    """A Python file with a function `build` that returns the model, as version 1. It is run at each loading."""

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    def scan(self) -> Mapping[str, Versions]:
        stamp = (*_stamp(self.path), *sorted(self.options.items()))
        return {self.name: {"1": Version(lambda: python_file.build(self.path, self.options), stamp)}}


def _zoo() -> Any:
    return importlib.import_module(_ZOO)


def is_name(name: str) -> bool:
    """Whether this is a valid name for a model."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def _versions(folder: Path) -> Versions:
    """Return the saved models in a folder; none if it cannot be read, for example while it is being removed."""
    try:
        if files := saved_files(folder):
            return {"1": _saved(folder, files)}
        inner = [path for path in folder.iterdir() if _VERSION.fullmatch(path.name)]
        return {path.name: _saved(path, files) for path in inner if (files := saved_files(path))}
    except OSError as error:
        _LOG.warning("folder cannot be read", extra={"path": str(folder), "error": str(error)})
        return {}


def _saved(folder: Path, files: tuple[Path, ...]) -> Version:
    """Return a saved model. files: one of them changes when it does, such as the manifest, which has their hashes."""
    return Version(lambda: load(folder), tuple(map(_stamp, files)))


def _stamp(file: Path) -> tuple[Hashable, ...]:
    """Return a stamp that changes when the file is replaced or written."""
    status = file.stat()
    return str(file), status.st_mtime_ns, status.st_size, status.st_ino


def parse_source(text: str, options: Mapping[str, Any] | None = None, name: str | None = None) -> Source:
    """Return the source that a text names.

    It is `lstm`, `lstm:hidden=256,layers=2`, a directory, a file `NAME.py`, `NAME.py:option=value`, or `NAME=` one of
    these. options, name: given separately from the text. Raises OptionError if nothing of that name exists.
    """
    alias = _ALIAS.fullmatch(text)
    if alias is not None:
        name, text = alias[1], alias[2]
    network, _, listed = text.partition(":")
    zoo = _zoo()
    if network in zoo.MODELS:
        settings = {**_options(text, listed), **(options or {})}
        names = zoo.option_names(network)
        for option in settings:
            if option not in names:
                raise unknown_name(f"option of model {network!r}", option, names)
        return BuiltIn(_checked(name or network), network, settings)
    if network.endswith(".py"):
        if not Path(network).is_file():
            raise OptionError(f"{network}: there is no such file")
        settings = {**_options(text, listed), **(options or {})}
        return ModelFile(_checked(name or Path(network).stem), Path(network), settings)
    path = Path(text)
    if not path.is_dir():
        raise unknown_name("model (and no directory of saved ones, and no .py file)", text, zoo.MODELS)
    if options:
        raise OptionError(f"{text}: a saved model has its options in it; remove {', '.join(options)}")
    if name is not None or saved_files(path) or _versions(path):
        return SavedDirectory(_checked(name or path.resolve().name), path)
    root = RepositoryRoot(path)
    if not root.scan():
        raise OptionError(f"{text}: holds no saved model. Write one with batchmaker.save(model, directory).")
    return root


def one_model(source: Source) -> Model:
    """Return the model of a source, of several versions the newest. OptionError if it has several models or none."""
    models = source.scan()
    if len(models) != 1:
        raise OptionError(f"expected one model, got {', '.join(models) or 'none'}. Name the directory of one of them.")
    (versions,) = models.values()
    if not versions:
        raise OptionError(f"{', '.join(models)}: no saved model is there. Write one with batchmaker.save.")
    return versions[max(versions, key=int)].make()


def _checked(name: str) -> str:
    if not is_name(name):
        raise OptionError(
            f"model name {name!r}: letters, digits, '_', '.' and '-' are allowed, and not {', '.join(_RESERVED)}. "
            "Give another as NAME=MODEL."
        )
    return name


def _options(text: str, listed: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, listed.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"{text}: got {part!r}, expected OPTION=VALUE, as in lstm:hidden=256,layers=2")
        options[option.strip().replace("-", "_")] = _value(value.strip())
    return options


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
