"""Policies as text, name:option=value,option=value, for the command line and configuration files."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection
from typing import Any, Literal, Union, get_args, get_origin

from batchmaker.errors import OptionError, unknown_name

_SCALARS: dict[type, tuple[str, Callable[[str], Any]]] = {
    bool: ("yes or no", lambda text: {"yes": True, "no": False}[text]),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("text", str),
}


def read_options(policy: str, constructor: type, text: str) -> dict[str, Any]:
    """Return the options in `text`, with types by the constructor's annotations.

    Raises OptionError if an option is unknown, given twice, of the wrong type, or cannot be given as text.
    """
    parameters = inspect.signature(constructor, eval_str=True).parameters
    options: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise OptionError(f"policy {policy!r}: got {part!r}, expected option=value")
        check_option(policy, constructor, option)
        if option in options:
            raise OptionError(f"policy {policy!r}: option {option} is given twice")
        options[option] = _read(policy, option, parameters[option].annotation, value)
    return options


def check_option(policy: str, constructor: type, option: str) -> None:
    """Raise OptionError with the nearest name unless the constructor has the option."""
    parameters = inspect.signature(constructor).parameters
    if option not in parameters:
        raise unknown_name(f"option of policy {policy!r}", option, parameters)


def check_complete(policy: str, constructor: type, names: Collection[str]) -> None:
    """Raise OptionError unless every option without a default is given."""
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.default is parameter.empty and name not in names:
            raise OptionError(f"policy {policy!r} needs the option {name}: {policy}:{name}=...")


def text_options(constructor: type) -> dict[str, Any]:
    """Return the options that can be given as text, with their defaults."""
    parameters = inspect.signature(constructor, eval_str=True).parameters.values()
    return {p.name: p.default for p in parameters if _choices(p.annotation) or _scalars(p.annotation)}


def _alternatives(annotation: Any) -> list[Any]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return list(get_args(annotation)) if is_union else [annotation]


def _choices(annotation: Any) -> list[str]:
    literals = [one for one in _alternatives(annotation) if get_origin(one) is Literal]
    return [choice for one in literals for choice in get_args(one)]


def _scalars(annotation: Any) -> list[type]:
    return [one for one in _alternatives(annotation) if one in _SCALARS]


def _read(policy: str, option: str, annotation: Any, text: str) -> Any:
    if text in _choices(annotation):
        return text
    if text == "none" and type(None) in _alternatives(annotation):
        return None
    for scalar in _scalars(annotation):
        try:
            return _SCALARS[scalar][1](text)
        except (ValueError, KeyError):
            continue
    wanted = [*_choices(annotation), *(_SCALARS[scalar][0] for scalar in _scalars(annotation))]
    if not wanted:
        raise OptionError(f"policy {policy!r}: option {option} is an object and cannot be given as text")
    raise OptionError(f"policy {policy!r}, option {option}: got {text!r}, expected {' or '.join(wanted)}")
