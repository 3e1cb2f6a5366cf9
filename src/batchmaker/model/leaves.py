"""The states of loops and the results of branches: their leaves, and their forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from batchmaker.errors import ModelError
from batchmaker.graph.misuse import at_line
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import Value, ValueSequence
from batchmaker.model.stand_ins import StandIn

_DATA: Final = (bool, int, float, np.ndarray, np.generic, Tensor)
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_MOST_SHOWN: Final = 4
"""Parts of one form of which a message lists each."""


def flat(structure: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a structure, and its form: equal for structures of equal kinds."""
    if type(structure) in (Value, ValueSequence, StandIn):
        return [structure], None
    if isinstance(structure, Mapping):
        names, parts = tuple(structure), list(structure.values())
        kind: Any = (dict, names)
    elif isinstance(structure, list | tuple):
        kind, parts = (type(structure), len(structure)), list(structure)
    elif is_dataclass(structure) and not isinstance(structure, type):
        kind, parts = type(structure), [getattr(structure, field.name) for field in fields(structure)]
    else:
        return [structure], None
    flattened = [flat(part) for part in parts]
    return [leaf for leaves, _ in flattened for leaf in leaves], (kind, *[form for _, form in flattened])


def built(like: Any, leaves: Iterator[Any]) -> Any:
    """Return a structure of the form of another, with these leaves."""
    if type(like) in (Value, ValueSequence, StandIn):
        return next(leaves)
    if isinstance(like, Mapping):
        return {name: built(part, leaves) for name, part in like.items()}
    if isinstance(like, list | tuple):
        parts = [built(part, leaves) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    if is_dataclass(like) and not isinstance(like, type):
        changed = copy(like)
        for field in fields(like):
            object.__setattr__(changed, field.name, built(getattr(like, field.name), leaves))
        return changed
    return next(leaves)


def shown(form: Any) -> str:
    """Name a form for messages."""
    if form is None:
        return "one value"
    kind, *parts = form
    if isinstance(kind, tuple) and isinstance(kind[1], tuple):
        return "{" + ", ".join(f"{name}: {shown(part)}" for name, part in zip(kind[1], parts, strict=True)) + "}"
    name = (kind[0] if isinstance(kind, tuple) else kind).__name__
    if len(parts) > _MOST_SHOWN and all(part == parts[0] for part in parts):
        return f"{name}(of {len(parts)}, each {shown(parts[0])})"
    return f"{name}({', '.join(map(shown, parts))})"


def is_data(part: Any) -> bool:
    """Whether a leaf is data of which a value can be made."""
    return type(part) is StandIn or isinstance(part, _DATA)


def is_alike(one: Any, other: Any) -> bool:
    """Whether data is the same in two branches."""
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def is_equal(one: Any, other: Any) -> bool:
    """Whether two arrays or tensors are of one kind and have equal values."""
    if type(one) is not type(other):
        return False
    return bool(np.array_equal(one, other)) if type(one) is np.ndarray else torch.equal(one, other)


def changing_parts(init: Any, following: Any) -> list[ValueSpec | None]:
    """Return the specs of the parts of a loop's state, which is `init` at first and `following` after an iteration.

    None for data that stays as it is. ModelError unless the state keeps its form.
    """
    (parts, form), (next_parts, next_form) = flat(init), flat(following)
    where = f"{at_line()}while_loop: "
    if next_form != form:
        raise ModelError(
            f"{where}the state is {shown(form)} at first, and the body returns {shown(next_form)}; the state "
            "keeps its structure. A list or tuple has parts: give a row of numbers as an array or a tensor"
        )
    specs = list[ValueSpec | None]()
    for k, (before, after) in enumerate(zip(parts, next_parts, strict=True)):
        part = f"part {k} of the state"
        for value in (before, after):
            if type(value) is ValueSequence:
                raise ModelError(f"{where}{part} is a sequence; use `.at` on it, or its elements as a list")
        if type(before) is not Value and type(after) is not Value:
            if not is_alike(before, after):
                raise ModelError(
                    f"{where}{part} changes from {before!r} to {after!r} in Python, which happens once and not at "
                    "each iteration; let a cell compute it"
                )
            specs.append(None)
            continue
        spec = (after if type(after) is Value else before).spec
        if type(before) is Value and before.spec.row_signature != spec.row_signature:
            raise ModelError(f"{where}{part} is {before.spec} at first, and {spec} after an iteration")
        for value in (before, after):
            if type(value) is not Value and not is_data(value):
                raise ModelError(f"{where}{part} is {type(value).__name__}, and {spec} at other times")
        specs.append(spec)
    return specs
