"""Graphs of saved cells read without torch.export, whose import and reader take longer than all the rest of a start.

What is not known here, such as calls that write into their arguments or sizes that are no multiple of the batch size,
is left to torch's own reader (see archive.py). `check_graph` has seen the JSON before.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from batchmaker.compile.dataflow import CannotRewriteError, TracedSize, TracedValue
from batchmaker.compile.programs import ReadProgram
from batchmaker.compile.rewrite import lift
from batchmaker.saved.graph_check import SCALAR, RefusedGraphError, check_calls


class UnknownGraphError(Exception):
    """The graph may be harmless, but is not read here; the message says why."""


SCHEMA: Final = 8
"""Major version of torch's schema that is read here; minor ones are compatible."""
DTYPES: Final = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
"""Dtypes by their numbers in the schema."""
MEMORY_FORMATS: Final = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format,
}  # fmt: skip
"""Orders of memory by their numbers in the schema."""
_STRIDED: Final = 7
_POSITIONAL, _KEYWORD = 1, 2
_SIZE: Final = re.compile(
    r"Symbol\('(s\d+)'(?:, (?:positive|integer)=True)*\)|"
    r"Mul\(Integer\((\d+)\), Symbol\('(s\d+)'(?:, (?:positive|integer)=True)*\)\)",
    re.ASCII,
)
_Noted: TypeAlias = TracedValue | TracedSize


def read_graph(
    raw: Any, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor], exported: Callable[[], Any]
) -> ReadProgram:
    """Return the program of checked JSON with these tensors by their names in the module.

    exported: reads it with torch.export. RefusedGraphError where a tensor is missing or another than the graph's.
    UnknownGraphError for all that torch's reader is to judge, malformed graphs included.
    """
    try:
        if raw["schema_version"]["major"] != SCHEMA:
            raise UnknownGraphError(f"schema {raw['schema_version']}")
        if raw["opset_version"] != {"aten": torch._C._get_max_operator_version()}:
            raise UnknownGraphError(f"operators {raw['opset_version']}")
        reader = _GraphReader(raw["graph_module"], weights, constants)
        reader.read()
        (call,) = raw["graph_module"]["module_call_graph"]
        program = ReadProgram(
            reader.graph, reader.weights, pytree.treespec_loads(call["signature"]["out_spec"]), exported
        )
        check_calls(program.graph)
        lift(program)
    except (UnknownGraphError, RefusedGraphError):
        raise
    except CannotRewriteError as error:
        raise UnknownGraphError(str(error)) from error
    except Exception as error:  # what is wrong with a malformed graph comes out as anything
        raise UnknownGraphError(f"{type(error).__name__}: {error}") from error
    return program


@final
class _GraphReader:
    """Makes the graph node by node. module: the schema's GraphModule."""

    def __init__(self, module: Any, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        self._signature = module["signature"]
        self._raw = module["graph"]
        self._held, self._constants = weights, constants
        self._nodes: dict[str, fx.Node] = {}
        self._batch: TracedSize | None = None
        self.graph = fx.Graph()
        self.weights: dict[fx.Node, Tensor] = {}

    def read(self) -> None:
        for raw, spec in zip(self._raw["inputs"], self._signature["input_specs"], strict=True):
            ((kind, said),) = spec.items()
            if raw.keys() != {"as_tensor"} or said["arg"] != (raw if kind == "user_input" else raw["as_tensor"]):
                raise UnknownGraphError(f"an input {raw}")
            self._placeholder(raw["as_tensor"]["name"], kind, said)
        for node in self._raw["nodes"]:
            self._node(node)
        outputs = [self._nodes[output["as_tensor"]["name"]] for output in self._raw["outputs"]]
        if self._signature["output_specs"] != [{"user_output": {"arg": output}} for output in self._raw["outputs"]]:
            raise UnknownGraphError("outputs that are not those of its signature")
        if not outputs or any(node in self.weights or not self._has_rows(node) for node in outputs):
            raise UnknownGraphError("outputs that are no rows")
        self.graph.output(tuple(outputs))

    def _placeholder(self, name: str, kind: str, said: Any) -> None:
        node = self._noted(self.graph.placeholder(name), name)
        if kind == "user_input":
            shape = node.meta["val"].shape
            self._batch = self._batch or (shape[0] if shape and isinstance(shape[0], TracedSize) else None)
            if not self._has_rows(node) or (self._batch is not None and self._batch.factor != 1):
                raise UnknownGraphError(f"an input {name} that is no rows")
            return
        held = self._constants if kind == "tensor_constant" or said.get("persistent") is False else self._held
        target = said["tensor_constant_name" if kind == "tensor_constant" else f"{kind}_name"]
        self.weights[node] = _fitting(held.get(target), target, node.meta["val"])
        if kind == "parameter":
            self.weights[node] = nn.Parameter(self.weights[node], requires_grad=False)

    def _has_rows(self, node: fx.Node) -> bool:
        value = node.meta["val"]
        return isinstance(value, TracedValue) and value.dim() > 0 and value.shape[0] == self._batch is not None

    def _node(self, raw: Any) -> None:
        target = _target(raw["target"])
        inputs = {one["name"]: (self._argument(one["arg"]), one["kind"]) for one in raw["inputs"]}
        if len(inputs) != len(raw["inputs"]) and isinstance(target, torch._ops.OpOverload):
            raise UnknownGraphError(f"arguments of {raw['target']}")
        if isinstance(target, torch._ops.OpOverload):
            arguments, named = _by_schema(target, inputs)
        else:
            arguments, named = tuple([self._argument(one["arg"]) for one in raw["inputs"]]), {}
        outputs = raw["outputs"]
        made = self.graph.create_node("call_function", target, arguments, named, raw["name"])
        if len(outputs) == 1 and "as_tensors" not in outputs[0]:
            self._noted(made, _name_of(outputs[0]))
            return
        if outputs:
            several = outputs[0]["as_tensors"] if len(outputs) == 1 else [output["as_tensor"] for output in outputs]
            parts = [
                self._noted(
                    self.graph.create_node("call_function", operator.getitem, (made, i), {}, part["name"]), part["name"]
                )
                for i, part in enumerate(several)
            ]
            made.meta["val"] = tuple([part.meta["val"] for part in parts])

    def _noted(self, node: fx.Node, name: str) -> fx.Node:
        """Note what a new node's value is said to be. Its name must be new."""
        if name in self._nodes:
            raise UnknownGraphError(f"two values {name}")
        if name in self._raw["tensor_values"]:
            noted = self._raw["tensor_values"][name]
            if noted["layout"] != _STRIDED:
                raise UnknownGraphError(f"{name} of layout {noted['layout']}")
            value: _Noted = TracedValue(tuple(map(self._size, noted["sizes"])), DTYPES[noted["dtype"]])
        else:
            number = self._size(self._raw["sym_int_values"][name])
            if isinstance(number, int):
                raise UnknownGraphError(f"a size {name} that is {number}")
            value = number
        node.meta["val"] = value
        self._nodes[name] = node
        return node

    def _size(self, raw: Any) -> int | TracedSize:
        if "as_int" in raw:
            return int(raw["as_int"])
        match = _SIZE.fullmatch(raw["as_expr"]["expr_str"])
        if match is None:
            raise UnknownGraphError(f"the size {raw['as_expr']['expr_str']}")
        symbol, times, its = match.groups()
        size = TracedSize(symbol or f"{int(times)}*{its}")
        if self._batch is not None and (symbol or its) != self._batch.text:
            raise UnknownGraphError(f"a second symbol {symbol or its}")
        return size

    def _argument(self, raw: Any) -> Any:
        ((kind, value),) = raw.items()
        if kind == "as_none":
            return None
        if kind in ("as_int", "as_bool", "as_string"):
            return value
        if kind == "as_float":
            return float(value)
        if kind in ("as_ints", "as_bools", "as_strings"):
            return list(value)
        if kind == "as_floats":
            return list(map(float, value))
        if kind in ("as_tensor", "as_sym_int"):
            return self._nodes[value["name"]] if kind == "as_tensor" else self._number(value)
        if kind == "as_tensors":
            return [self._nodes[one["name"]] for one in value]
        if kind == "as_sym_ints":
            return list(map(self._number, value))
        if kind == "as_optional_tensors":
            return [None if "as_none" in one else self._nodes[one["as_tensor"]["name"]] for one in value]
        if kind == "as_scalar_type":
            return DTYPES[value]
        if kind == "as_memory_format":
            return MEMORY_FORMATS[value]
        if kind == "as_layout" and value == _STRIDED:
            return torch.strided
        if kind == "as_device" and value == {"type": "cpu", "index": None}:
            return torch.device("cpu")
        raise UnknownGraphError(f"an argument of kind {kind}")

    def _number(self, raw: Any) -> Any:
        return raw["as_int"] if "as_int" in raw else self._nodes[raw["as_name"]]


def _target(text: str) -> Any:
    """Return what a node calls: `check_graph` lets through these two kinds alone."""
    if text in SCALAR:
        return SCALAR[text]
    name, overload = text.removeprefix("torch.ops.aten.").split(".")
    call = getattr(getattr(torch.ops.aten, name), overload)
    if not isinstance(call, torch._ops.OpOverload) or call._schema.is_mutable:
        raise UnknownGraphError(f"a call of {text}")
    return call


def _by_schema(target: torch._ops.OpOverload, inputs: dict[str, tuple[Any, int | None]]) -> tuple[Any, dict[str, Any]]:
    """Return positional and named arguments, as torch's reader puts them."""
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    rest = dict(inputs)
    for parameter in target._schema.arguments:
        if parameter.name not in rest:
            if not parameter.has_default_value() and not parameter.kwarg_only:
                raise UnknownGraphError(f"no {parameter.name} for {target}")
            continue
        value, kind = rest.pop(parameter.name)
        if kind == _POSITIONAL:
            arguments.append(value)
        elif kind == _KEYWORD and not keyword.iskeyword(parameter.name):
            named[parameter.name] = value
        else:
            raise UnknownGraphError(f"an argument {parameter.name} that is neither positional nor named")
    if rest:
        raise UnknownGraphError(f"arguments that {target} does not have")
    return tuple(arguments), named


def _name_of(output: Any) -> str:
    ((kind, value),) = output.items()
    if kind not in ("as_tensor", "as_sym_int"):
        raise UnknownGraphError(f"an output of kind {kind}")
    return str(value["name" if kind == "as_tensor" else "as_name"])


def _fitting(tensor: Tensor | None, name: str, noted: Any) -> Tensor:
    """Return a weight. RefusedGraphError unless it is there and is what the graph was made for."""
    if tensor is None:
        raise RefusedGraphError(f"no tensor for {name!r} among its weights")
    if tuple(tensor.shape) != noted.shape or tensor.dtype is not noted.dtype:
        wanted = [str(size) for size in noted.shape]
        raise RefusedGraphError(
            f"weight {name!r} of {tensor.dtype}{list(tensor.shape)}, made for {noted.dtype}[{', '.join(wanted)}]"
        )
    return tensor
