"""Models from Python files: FILE.py with a function `build` that returns one."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from batchmaker.errors import BatchmakerError, ModelError, OptionError, said_by, unknown_name
from batchmaker.model.model import Model


def build(path: Path, options: Mapping[str, Any]) -> Model:
    """Run a Python file and return the result of its function `build` with the options.

    The file is run again each time, under its own name, so classes in it can be saved and loaded. Other files beside it
    can be imported; installed packages go first. Raises ModelError if the file or `build` raises, or if the result is
    not a model, and OptionError for an option that `build` does not take.
    """
    module = _run(path)
    function = getattr(module, "build", None)
    if not callable(function):
        raise ModelError(f"{path} has no function build(); define one that returns the model")
    _check(path, function, options)
    try:
        model = function(**options)
    except BatchmakerError:
        raise
    except Exception as error:
        raise ModelError(f"{path}: build() raised {said_by(error)}") from error
    if not isinstance(model, Model):
        raise ModelError(f"{path}: build() returned {type(model).__name__}, expected a batchmaker.Model")
    return model


def _run(path: Path) -> ModuleType:
    name = path.stem
    there = getattr(sys.modules.get(name), "__file__", None)
    if name in sys.modules and (there is None or Path(there).resolve() != path.resolve()):
        raise OptionError(
            f"{path}: a module named {name!r} has been imported from elsewhere; give the file another name"
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise ModelError(f"{path} raised {said_by(error)} while it was imported") from error
    return module


def _check(path: Path, function: Any, options: Mapping[str, Any]) -> None:
    """Raise OptionError unless the function takes these options."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            raise unknown_name(f"option of build() in {path}", option, parameters)
