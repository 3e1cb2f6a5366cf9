"""Options that a command's function takes as one object: a dataclass with a field for each option.

Typer makes an option of every parameter, so a command with thirty options would be a function of thirty parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as typer wants it: each parameter that is a dataclass becomes an option for each of its fields.

    A field is written as the parameter would be: `Annotated[type, typer.Option(...)]`, with a default. Options come in
    the order of parameters and fields.
    """
    types = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in types.items() if isinstance(kind, type) and is_dataclass(kind)}

    def parameters() -> Iterator[inspect.Parameter]:
        for name, parameter in inspect.signature(command).parameters.items():
            if name not in groups:
                yield parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            of_fields = get_type_hints(groups[name], include_extras=True)
            for field in fields(groups[name]):
                yield inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=of_fields[field.name]
                )

    @wraps(command)
    def called(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    called.__signature__ = inspect.Signature([*parameters()])  # type: ignore[attr-defined]
    return called
