"""The server's settings from environment variables: BATCHMAKER_PORT, BATCHMAKER_LIMITS__MAX_BODY_BYTES."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from batchmaker.errors import OptionError
from batchmaker.server.config import Config

PREFIX: Final = "BATCHMAKER_"
_NO_SETTINGS: Final = frozenset({"BATCHMAKER_API_KEYS", "BATCHMAKER_COMPILES", "BATCHMAKER_EXAMPLES"})
"""Variables of another meaning: API keys, what the package sets for processes that compile, and the size of a test."""

_OF_SERVICES: Final = re.compile(
    r"BATCHMAKER_(NAME|ENV_\w+|(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?))"
)
"""Variables that Kubernetes makes for a service of the name batchmaker, or batchmaker-..., and links of containers."""


def with_environment(config: Config, environment: Mapping[str, str]) -> Config:
    """Return the settings with those of the environment in place of their own.

    A variable is the name of a setting in capital letters, after BATCHMAKER_; two underscores lead into a table. Lists
    and tables are JSON, and an entry of a table goes before the table. An empty variable is as none. Paths are relative
    to the working folder. OptionError for a name that is no setting's, and for a value of another type.
    """
    kinds = {_name_of(path): (path, kind) for path, kind in _settings(Config)}
    variables = {
        name: text for name, text in environment.items() if name.startswith(PREFIX) and not _is_other(name, text)
    }
    for name in variables:
        if name not in kinds:
            raise _unknown(name, kinds)
    content: dict[str, Any] = {}
    for name, (path, kind) in kinds.items():  # a table before its entries
        if variables.get(name):
            _put(content, path, _value(name, variables[name], kind))
    settings: Config = _replaced(config, content, "")
    return settings


def _settings(struct: type[msgspec.Struct], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the place and the type of each setting, and of each table before its entries."""
    for field in msgspec.structs.fields(struct):
        yield (*path, field.name), field.type
        if _is_table(field.type):
            yield from _settings(field.type, (*path, field.name))


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _name_of(path: tuple[str, ...]) -> str:
    return PREFIX + "__".join(path).upper()


def _is_other(name: str, text: str) -> bool:
    """Whether a variable means something else than a setting."""
    is_link = name.endswith("PORT") and "://" in text  # of a service or a container: tcp://10.0.0.7:8000
    return name in _NO_SETTINGS or is_link or _OF_SERVICES.fullmatch(name) is not None


def _unknown(name: str, kinds: Mapping[str, Any]) -> OptionError:
    settings = [one.removeprefix(PREFIX) for one in kinds]
    near = [PREFIX + one for one in difflib.get_close_matches(name.removeprefix(PREFIX), settings, n=3)]
    said = (
        f"Did you mean {' or '.join(near)}?" if near else f"One that is known: {_name_of(('limits', 'max_streams'))}."
    )
    return OptionError(f"the environment variable {name} is no setting of the server. {said}")


def _value(name: str, text: str, kind: Any) -> Any:
    """Return a variable's value as a TOML file would have it."""
    is_json = _is_table(kind) or typing.get_origin(kind) in (list, dict)
    try:
        if not is_json:
            return msgspec.convert(text.strip(), kind, strict=False)
        value = msgspec.json.decode(text)
        msgspec.convert(value, kind)
    except msgspec.MsgspecError as error:
        form = " (lists and tables are JSON)" if is_json else ""
        raise OptionError(f"the environment variable {name} cannot be used: {error}{form}") from None
    return value


def _put(content: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for step in path[:-1]:
        content = content.setdefault(step, {})
    content[path[-1]] = value


def _replaced(struct: Any, content: Mapping[str, Any], where: str) -> Any:
    """Return a struct with the values of a table, or of a table in it, in place of its own."""
    values = msgspec.structs.asdict(struct)
    for name, value in content.items():
        inner = values.get(name)
        is_table = isinstance(inner, msgspec.Struct) and isinstance(value, dict)
        values[name] = _replaced(inner, value, f"{where}{name}.") if is_table else value
    try:
        return msgspec.convert(values, type(struct))
    except msgspec.ValidationError as error:
        raise OptionError(f"the environment variables of {where or 'the server'} cannot be used: {error}") from None
