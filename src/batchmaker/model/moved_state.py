"""The state of a sequence as bytes, with which it goes on elsewhere: a safetensors file with a structure in its header.

The file holds the outputs of the nodes that the sequence keeps, and the tensors among the plain data of the state. The
header's `__metadata__` has, as JSON, the structure, in which numbers stand for both, and the identity of the model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.errors import ModelError, SequenceStateError
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.model import Model
from batchmaker.model.sequence_state import KeptHandle, KeptState

FORMAT: Final = "batchmaker sequence 1"
_PLAIN: Final = (type(None), bool, int, float, str)
_MOST_DEEP: Final = 64
"""Containers within containers. Python's own parser and stack allow more."""
_DAMAGED: Final = "the bytes are no state of a sequence, or they are damaged: give what `Sequence.state()` returned"


@final
@dataclass(frozen=True, slots=True)
class MovedState:
    """A state on its way.

    values: for each kept node, its outputs, each without a batch dimension. cells: for each, the name of its cell type.
    """

    kept: KeptState
    values: Sequence[Sequence[Tensor]]
    cells: Sequence[str]

    @property
    def specs(self) -> list[tuple[ValueSpec, ...]]:
        """The specs of the outputs of each node."""
        return [tuple([_spec(value) for value in of_node]) for of_node in self.values]


def identity_of(model: Model) -> str:
    """Return a name that two models share only if they have the same class and weights, in whatever process they are.

    Reads all weights.
    """
    digest = sha256(type(model).__qualname__.encode())
    seen = sorted({id(cell.module): (path, cell.module) for path, cell in model.cells.items()}.values())
    for path, module in seen:
        digest.update(path.encode())
        weights = [sha256(_bytes_of(weight)).digest() for weight in module.state_dict().values()]
        for weight in sorted(weights):  # a saved cell may have other names for them
            digest.update(weight)
    return digest.hexdigest()


def _bytes_of(weight: Any) -> bytes:
    if not isinstance(weight, Tensor):
        return repr(weight).encode()
    at_host = weight.detach().cpu().contiguous()
    about = f"{at_host.dtype} {list(at_host.shape)}".encode()
    return about + at_host.reshape(-1).view(torch.uint8).numpy().tobytes()


def written(moved: MovedState, identity: str) -> bytes:
    """Return a state as bytes. identity: of the model. SequenceStateError for a state with objects of other classes."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[tuple[str, tuple[ValueSpec, ...]], list[int]] = {}
    for place, kind_of_node in enumerate(zip(moved.cells, moved.specs, strict=True)):
        kinds.setdefault(kind_of_node, []).append(place)
    for number, ((_, specs), places) in enumerate(kinds.items()):
        for output in range(len(specs)):
            tensors[f"kept.{number}.{output}"] = torch.stack([moved.values[place][output] for place in places])

    def plain(part: Any, depth: int = 0) -> Any:
        """Return a part of the state as JSON has it; its tensors and arrays are added to `tensors`.

        SequenceStateError for an object of another class, and for containers more than _MOST_DEEP deep.
        """
        if depth > _MOST_DEEP:
            raise SequenceStateError(f"the state has containers in containers, more than {_MOST_DEEP} deep")
        kind = type(part)
        if kind in _PLAIN:
            return part
        if kind is KeptHandle:
            places = part.places if isinstance(part.places, int) else part.places.tolist()
            return {"kept": places, "output": part.output, "shape": part.spec.shape, "dtype": part.spec.dtype}
        if kind in (list, tuple):
            return {kind.__name__: [plain(item, depth + 1) for item in part]}
        if kind is dict:
            return {"dict": [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in part.items()]}
        if kind is bytes:
            return {"bytes": base64.b64encode(part).decode()}
        if kind in (Tensor, np.ndarray):
            name = f"data.{len(tensors)}"
            try:
                tensors[name] = torch.as_tensor(part).detach().cpu().clone().contiguous()
            except TypeError as error:
                raise SequenceStateError(f"the state has an array that cannot be moved: {error}") from None
            return {"tensor" if kind is Tensor else "array": name}
        raise SequenceStateError(
            f"the state that unfold_chunk returned has a {kind.__name__}, which cannot be moved; keep handles, "
            "numbers, text, bytes, arrays and tensors, in lists, tuples and dicts"
        )

    groups = [[cell, places] for (cell, _), places in kinds.items()]
    header = {"model": identity, "kept": groups, "structure": plain(moved.kept.structure)}
    return save(tensors, {FORMAT: json.dumps(header)})  # one entry: the order of several would be any


def read(data: bytes, identity: str, max_nodes: int) -> MovedState:
    """Return the state that `written` has made bytes of. Nothing in them is executed, whoever has made them.

    identity: of the model that is to go on. SequenceStateError for damaged bytes, for those of another model, and for
    more than `max_nodes` kept nodes.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise SequenceStateError(f"a state is bytes, got {type(data).__name__}: give what `Sequence.state()` returned")
    data = bytes(data)
    try:
        tensors, header = load(data), _header(data)
        model = header["model"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise SequenceStateError(_DAMAGED) from None
    if model != identity:
        raise SequenceStateError(
            "the state is of another model, or of one with other weights: it goes on only where the same model is "
            "served. Begin a new sequence"
        )
    try:
        values, cells = _nodes(header["kept"], tensors, max_nodes)
        structure = _structure(header["structure"], values, tensors)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, ModelError):
        raise SequenceStateError(_DAMAGED) from None
    return MovedState(KeptState(structure, len(values)), values, cells)


def _header(data: bytes) -> Mapping[str, Any]:
    size = int.from_bytes(data[:8], "little")
    header: Mapping[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][FORMAT])
    return header


def _nodes(kinds: Any, tensors: Mapping[str, Tensor], max_nodes: int) -> tuple[list[list[Tensor]], list[str]]:
    """Return of each kept node its outputs, and the name of its cell type. Raises ValueError and others if wrong."""
    num_nodes = sum(len(places) for _, places in kinds)
    if num_nodes > max_nodes:
        raise SequenceStateError(f"the state keeps {num_nodes} nodes; this engine takes {max_nodes} (max_nodes)")
    outputs: list[list[Tensor]] = [[] for _ in range(num_nodes)]
    cells = [""] * num_nodes
    for number, (cell, places) in enumerate(kinds):
        columns: list[Tensor] = []
        while (column := tensors.get(f"kept.{number}.{len(columns)}")) is not None:
            columns.append(column)
        if not columns or any(len(column) != len(places) for column in columns):
            raise ValueError("a column lacks rows")
        for i, place in enumerate(places):
            if type(place) is not int or not 0 <= place < num_nodes or outputs[place]:
                raise ValueError("a place is wrong")
            outputs[place] = [column[i] for column in columns]
            cells[place] = str(cell)
    return outputs, cells


def _structure(part: Any, values: Sequence[Sequence[Tensor]], tensors: Mapping[str, Tensor]) -> Any:
    """Return what `plain` has written. Raises ValueError and others if it has not."""
    if type(part) in _PLAIN:
        return part
    if "kept" in part:
        spec = ValueSpec(tuple(part["shape"]), part["dtype"])
        return _handle(part["kept"], part["output"], spec, values)
    ((kind, inner),) = part.items()
    return _READ[kind](inner, lambda item: _structure(item, values, tensors), tensors)


def _handle(places: Any, output: Any, spec: ValueSpec, values: Sequence[Sequence[Tensor]]) -> KeptHandle:
    numbers = [places] if type(places) is int else places
    if any(type(number) is not int or number < 0 for number in (*numbers, output, *spec.shape)):
        raise ValueError("a number of a handle is wrong")
    torch_dtype(spec.dtype)
    if any(_spec(values[place][output]) != spec for place in numbers):
        raise ValueError("a handle stands for values of another shape")
    return KeptHandle(places if type(places) is int else np.array(places, np.int64), output, spec)


_Inside = Callable[[Any], Any]
_READ: Final[dict[str, Callable[[Any, _Inside, Mapping[str, Tensor]], Any]]] = {
    "list": lambda inner, inside, _: [inside(item) for item in inner],
    "tuple": lambda inner, inside, _: tuple([inside(item) for item in inner]),
    "dict": lambda inner, inside, _: {inside(key): inside(item) for key, item in inner},
    "bytes": lambda inner, _, __: base64.b64decode(inner, validate=True),
    "tensor": lambda inner, _, tensors: tensors[inner],
    "array": lambda inner, _, tensors: tensors[inner].numpy(),
}


def _spec(value: Tensor) -> ValueSpec:
    return ValueSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
