"""An uncut network: its inputs by name, and its result as a flat list of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from batchmaker.compile.export import said_first
from batchmaker.compile.forward_signature import signature_of
from batchmaker.compile.opaque import Opaque
from batchmaker.errors import ModelError
from batchmaker.model.cuts import REQUEST, Cut, Layer


@final
class ByName(nn.Module):
    """A module that gets its inputs by name, and returns a tuple for a list or dict.

    keys: names of the tensors of a dict to return; none if it returns no dict.
    """

    def __init__(self, module: nn.Module, inputs: tuple[str, ...], keys: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.module, self.inputs, self.keys = module, inputs, keys

    def forward(self, *rows: Tensor) -> Any:
        returned = self.module(**dict(zip(self.inputs, rows, strict=True)))
        if self.keys:
            return tuple([returned[key] for key in self.keys])
        return tuple(returned) if isinstance(returned, list) else returned


def by_position(module: nn.Module, inputs: tuple[str, ...]) -> nn.Module:
    """Return a module that takes these inputs of forward() in order: the module itself if they are its first inputs."""
    first = tuple(signature_of(module).parameters)[: len(inputs)]
    return module if first == inputs else ByName(module, inputs)


def whole(module: nn.Module, inputs: tuple[str, ...], rows: tuple[Tensor, ...] | None) -> Cut:
    """Return a network as one layer.

    rows: a batch [1, *shape] per input for a trial call, which shows the form of the result: a tensor, or a tuple, list
    or dict of tensors (None entries of a dict are left out). Without rows the network must return one tensor. Raises
    ModelError for any other form.
    """
    form, keys, count = "tensor", tuple[str, ...](), 1
    if rows is not None:
        form, keys, count = _returned(module, dict(zip(inputs, rows, strict=True)))
    layer = ByName(module, inputs, keys) if form in ("dict", "list") else by_position(module, inputs)
    return _one_layer(layer, inputs, form, keys, count)


def whole_opaque(module: Opaque) -> Cut:
    """Return an opaque module as one layer: several outputs are a dict by name."""
    inputs, outputs = (tuple([form.name for form in forms]) for forms in (module.inputs, module.outputs))
    return _one_layer(module, inputs, "tensor" if len(outputs) == 1 else "dict", outputs, len(outputs))


def _one_layer(module: nn.Module, inputs: tuple[str, ...], form: str, keys: tuple[str, ...], count: int) -> Cut:
    layer = Layer("whole", module, tuple([(REQUEST, k) for k in range(len(inputs))]), count)
    return Cut((layer,), inputs, form, tuple([(0, k) for k in range(count)]), keys)


def _returned(module: nn.Module, rows: dict[str, Tensor]) -> tuple[str, tuple[str, ...], int]:
    """Return the form of a network's result, the keys of a dict, and the number of tensors."""
    name = type(module).__name__
    try:
        with torch.no_grad():
            returned = module(**rows)
    except Exception as error:  # any exception of the module
        raise ModelError(f"{name}: does not take the example request: it raised {said_first(error)}") from error
    if isinstance(returned, Tensor):
        return "tensor", (), 1
    keys: tuple[str, ...] = ()
    if isinstance(returned, Mapping):
        keys = tuple([key for key, value in returned.items() if value is not None])
        form, parts = "dict", [returned[key] for key in keys]
    else:
        form, parts = ("list", returned) if isinstance(returned, list) else ("tuple", returned)
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, Tensor) for part in parts):
        raise ModelError(
            f"{name}: returns a {type(returned).__name__} of more than tensors; wrap it in a module that returns a "
            "tensor, or a tuple, list or dict of tensors"
        )
    return form, keys, len(parts)
