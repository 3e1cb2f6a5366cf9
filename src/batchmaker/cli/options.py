"""Options that several commands share, and models made from them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from batchmaker.errors import DataError, MissingExtraError, OptionError
from batchmaker.lab import zoo
from batchmaker.model.model import Model

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Columns of tables that go to a file or a pipe."""

DTYPE = "float32"
"""The default of Dtype, and of every built-in model."""

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A built-in model, such as lstm, seq2seq or treelstm; the directory of a saved model; or a Python file "
        "with a function build() that returns one. Options of a built-in model or of build() follow a colon: "
        "lstm:hidden=64, model.py:hidden=64.",
    ),
]
Hidden = Annotated[int | None, typer.Option(min=1, help="Width of the state. Default: the model's own.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Layers of lstm, gru and seq2seq. Default: 1.")]
Dtype = Annotated[str, typer.Option(help="Type of weights and states: float32, bfloat16 or float16.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Compute threads of a worker. Default: $OMP_NUM_THREADS, or the cores less one."),
]
Device = Annotated[
    str, typer.Option(help="cpu; cuda for all GPUs, a worker for each; or some of them: cuda:0, cuda:0,1.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Worker threads. Default: as many as processors, but for one.")
]
MaxBatch = Annotated[
    int | None, typer.Option(min=1, help="Most rows in one call of a cell. Default: the model's own; see `profile`.")
]
DeadlineMs = Annotated[
    float | None, typer.Option(min=0.001, help="Milliseconds from its arrival within which a request is wanted.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of weights, requests and arrivals.")]


def make_model(name: str, **options: Any) -> Model:
    """Return a built-in model; options that are None keep their defaults. OptionError for an unknown option."""
    names = zoo.option_names(name)
    values = {option: value for option, value in options.items() if value is not None}
    for option in values:
        if option not in names:
            flag = option.replace("_", "-")
            raise OptionError(f"model {name!r} has no option --{flag}; it has {', '.join(names)}")
    return zoo.make(name, **values)


def parse_json(line: str) -> Any:
    """Return the value of a line. DataError if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from None


def write_json(path: Path, content: Any) -> None:
    """Write JSON with indentation. DataError if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}).") from error


def check_writable(path: Path | None) -> None:
    """Refuse an invalid output path before the work begins. DataError if its folder does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise DataError(f"{path}: there is no folder {path.absolute().parent}. Make it first, or give another path.")


def check_picture(path: Path | None) -> None:
    """Refuse a picture before the work begins: as `check_writable`, and MissingExtraError without what draws it."""
    check_writable(path)
    if path is not None:
        from batchmaker.lab.plots.pictures import check_drawing  # which a server never needs

        check_drawing()


def draw_if_possible(path: Path, draw: Callable[[], None]) -> None:
    """Draw a picture that nobody has asked for, and say where it is; or in one line what is missing."""
    try:
        draw()
    except MissingExtraError as error:
        out().print(str(error), markup=False, soft_wrap=True)
    else:
        out().print(f"picture: [bold]{path}[/bold]")


def out() -> Console:
    """The console for results. Made anew so that it follows whatever standard output is now."""
    from rich.console import Console  # which a server never needs

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def err() -> Console:
    """The console for progress and messages."""
    from rich.console import Console  # see out

    return Console(stderr=True)


def check_model(name: str, **options: Any) -> None:
    """Refuse bad options before any weight is drawn. OptionError as for `make_model`."""
    with torch.device("meta"):
        make_model(name, **options)


def width_of(model: str) -> int | None:
    """Return the default width of a built-in model's state, None if its layers differ."""
    return default_of(model, "hidden") if "hidden" in zoo.option_names(model) else None


def default_of(model: str, option: str) -> int:
    """Return the default of one of a built-in model's options."""
    return int(inspect.signature(zoo.MODELS[model]).parameters[option].default)
