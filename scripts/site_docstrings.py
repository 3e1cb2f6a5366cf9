"""How docstrings are shown in the reference: as the plain text that they are, with a line for each argument."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import griffe

CODE: Final = re.compile(r"(`+[^`]+`+|^ {4}.*$)", re.MULTILINE)
SPECIAL: Final = re.compile(r"([*\\]|(?<!\w)_)")


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would take for emphasis, and gives each `name: ` of an argument or field a line in bold."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        _show(func, [parameter.name for parameter in func.parameters])

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        made = cls.members.get("__init__")
        arguments = [p.name for p in made.parameters] if isinstance(made, griffe.Function) else []
        _show(cls, [*arguments, *(name for name, member in cls.members.items() if member.is_attribute)])


def _show(thing: griffe.Object, names: Iterable[str]) -> None:
    if thing.docstring is None:
        return
    known = "|".join(sorted(map(re.escape, names)))
    named = re.compile(rf"(^|(?<=[.)] ))({known or '(?!)'}): ", re.MULTILINE)
    parts = CODE.split(thing.docstring.value)
    for place in range(0, len(parts), 2):
        parts[place] = named.sub(r"\n\n**\2:** ", SPECIAL.sub(r"\\\1", parts[place]))
    thing.docstring.value = "".join(parts)
