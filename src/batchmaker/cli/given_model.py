"""The argument MODEL of commands: a built-in model, a saved one or a Python file's, as `batchmaker serve` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchmaker.cli.options import DTYPE, parse_json
from batchmaker.errors import BatchmakerError, DataError, OptionError
from batchmaker.lab import zoo
from batchmaker.lab.datasets import read_lines
from batchmaker.saved.sources import BuiltIn, ModelFile, RepositoryRoot, SavedDirectory, parse_source

OwnModel = SavedDirectory | ModelFile
"""A model of the user's own."""


def given_model(text: str, **flags: Any) -> BuiltIn | OwnModel:
    """Return what the argument names; the options of a built-in model are those of the text and of the flags.

    flags: those of the command line that are options of built-in models, None if not given. Raises OptionError for an
    unknown model, an option that is given twice, and flags beside a model of the user's own.
    """
    source = parse_source(text)
    flags["dtype"] = None if flags.get("dtype") == DTYPE else flags.get("dtype")
    options = {name: value for name, value in flags.items() if value is not None}
    if isinstance(source, BuiltIn):
        for name in options.keys() & source.options.keys():
            raise OptionError(f"{name} is given twice: in {text!r} and as {_flag(name)}")
        return BuiltIn(source.name, source.network, {**options, **source.options})
    if isinstance(source, RepositoryRoot):
        models = ", ".join(str(source.path / name) for name in source.scan())
        raise OptionError(f"{text} has several models; name one of them: {models}")
    assert isinstance(source, SavedDirectory | ModelFile)
    for name, value in options.items():
        where = f"if build() takes it, give it after a colon: {source.path}:{name}={value}"
        said = "a saved model has its options in it" if isinstance(source, SavedDirectory) else where
        raise OptionError(f"{_flag(name)} is for built-in models; {said}")
    return source


def only_built_in(text: str, command: str, **flags: Any) -> BuiltIn:
    """Return the built-in model that the argument names; as `given_model`. OptionError for a model of one's own."""
    name = text.partition(":")[0]
    if name.endswith(".py") or (Path(text).is_dir() and name not in zoo.MODELS):
        raise OptionError(
            f"`{command}` has built-in models only, for which it knows requests and baselines. `batchmaker profile` "
            "measures the cells of a model of your own."
        )
    zoo.option_names(name)  # refuses an unknown one
    source = given_model(text, **flags)
    assert isinstance(source, BuiltIn)
    return source


def read_requests(path: Path) -> list[tuple[int, Any]]:
    """Return the requests of a file, JSON, one a line, each with its number from 1. DataError if a line is not JSON."""
    requests = []
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            try:
                requests.append((number, parse_json(line)))
            except BatchmakerError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise DataError(f"{path}: there is nothing in this file; expected one request a line, as JSON.")
    return requests


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
