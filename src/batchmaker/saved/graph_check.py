"""Checks that the graph of a saved cell holds only tensors, numbers and ATen calls, before torch reads it.

torch's own reader trusts the file: it evaluates symbolic sizes as Python, writes node names into Python source, runs
`guards_code`, and takes any attribute of `torch` for an operator. Each of these is refused here unless it is harmless.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import fx

from batchmaker.saved.size_check import NoSizeError, count_terms


class RefusedGraphError(Exception):
    """The graph holds something that is not allowed; the message names it."""


MAX_NODES: Final = 20_000
MAX_TERMS: Final = 50_000
"""Of all sizes of one graph together: sympy takes about a tenth of a millisecond for each."""

MAX_ELEMENTS: Final = 1 << 30
"""Of one value, without its dimensions that are symbols."""

_MAX_DIMENSIONS: Final = 16
_MAX_DEPTH: Final = 64
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"[\w.]*", re.ASCII)
_TEXT = re.compile(r"[\w .,:/+=><-]*", re.ASCII)
_VERSION = re.compile(r"[\w.+-]*", re.ASCII)
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)", re.ASCII)
_FILES = frozenset({"from_file"})
_OPERATORS = (
    "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge", "getitem",
    "and_", "or_", "not_",
)  # fmt: skip
SCALAR = {f"_operator.{name}": getattr(operator, name) for name in _OPERATORS} | {
    f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not")
}
"""Arithmetic on sizes, by its names in a graph."""
_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})
_ARGUMENTS = frozenset({
    "as_none", "as_tensor", "as_tensors", "as_int", "as_ints", "as_float", "as_floats", "as_string", "as_strings",
    "as_sym_int", "as_sym_ints", "as_scalar_type", "as_memory_format", "as_layout", "as_device", "as_bool",
    "as_bools", "as_sym_bool", "as_sym_bools", "as_optional_tensors", "as_optional_tensor", "as_sym_float",
    "as_sym_floats", "as_int_lists", "as_float_lists", "as_nested_tensors", "as_name", "as_expr",
})  # fmt: skip
_TEXTS = frozenset({"as_string", "as_strings"})
_SIGNATURE = frozenset({"parameter", "buffer", "tensor_constant", "user_input", "user_output"})
_EMPTY = frozenset({"guards_code", "metadata", "custom_obj_values", "treespec_namedtuple_fields"})


def check_graph(program: Any) -> None:
    """RefusedGraphError unless the serialised program (parsed JSON) holds tensors, numbers and ATen calls alone.

    All of it is bounded: nodes, values, numbers, sizes, and how deep it is nested.
    """
    walker = _Walker()
    walker.walk(program, "program", 0)
    graph_module = program["graph_module"]
    if len(graph_module["graph"]["nodes"]) > MAX_NODES:
        raise RefusedGraphError(f"{len(graph_module['graph']['nodes'])} nodes; at most {MAX_NODES} are taken")
    for name, value in graph_module["graph"]["tensor_values"].items():
        sizes = [size["as_int"] for size in value["sizes"] if "as_int" in size]
        if len(value["sizes"]) > _MAX_DIMENSIONS or min(sizes, default=0) < 0 or math.prod(sizes) > MAX_ELEMENTS:
            raise RefusedGraphError(f"a value {name} whose sizes are {str(sizes)[:80]}")
    for side in ("input_specs", "output_specs"):
        for spec in graph_module["signature"][side]:
            if not spec.keys() <= _SIGNATURE:
                raise RefusedGraphError(f"{side} of kind {', '.join(spec)}; a cell may not change what it holds")
    for node in graph_module["graph"]["nodes"]:
        if node["target"] in SCALAR and any(one["arg"].keys() & _TEXTS for one in node["inputs"]):
            raise RefusedGraphError(f"arithmetic with text, {node['target']}")
    if not {"TRAINING", "ATEN", ""}.issuperset(program["verifiers"]):
        raise RefusedGraphError(f"dialect {program['verifiers']}")
    if [call["fqn"] for call in graph_module["module_call_graph"]] != [""]:
        raise RefusedGraphError("calls of inner modules")


def check_calls(graph: fx.Graph) -> None:
    """RefusedGraphError unless every node calls an ATen operator or does arithmetic on sizes."""
    for node in graph.nodes:
        target = node.target
        aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
        if node.op == "call_function" and not aten and target not in SCALAR.values():
            raise RefusedGraphError(f"node {node.name} calls {target}")
        if node.op not in ("placeholder", "call_function", "output"):
            raise RefusedGraphError(f"node {node.name} is a {node.op}")


@final
class _Walker:
    """Visits all of a program. terms: in its sizes so far."""

    def __init__(self) -> None:
        self._terms = 0

    def walk(self, value: Any, key: str, depth: int) -> None:
        """Check a value and all in it. key: under which it stands."""
        if depth > _MAX_DEPTH:
            raise RefusedGraphError(f"more than {_MAX_DEPTH} levels")
        if isinstance(value, dict):
            for name, item in value.items():
                if not _PATH.fullmatch(name):
                    raise RefusedGraphError(f"key {name[:80]!r} in {key}")
                if name.startswith("as_") and name not in _ARGUMENTS:
                    raise RefusedGraphError(f"an argument of kind {name[:80]}")
                if name in _EMPTY and item:
                    raise RefusedGraphError(f"{name} that is not empty")
                self.walk(item, name, depth + 1)
        elif isinstance(value, list):
            for item in value:
                self.walk(item, key, depth + 1)
        elif isinstance(value, str):
            if key == "expr_str":
                self._size(value)
            else:
                _CHECKS.get(key, _check_path)(value)
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise RefusedGraphError(f"a number of {value.bit_length()} bits in {key}")

    def _size(self, text: str) -> None:
        """RefusedGraphError unless the text is a small size: torch's reader has sympy evaluate it as Python."""
        try:
            self._terms += count_terms(text)
        except NoSizeError as error:
            raise RefusedGraphError(f"the size {text[:80]!r}: {error}") from None
        if self._terms > MAX_TERMS:
            raise RefusedGraphError(f"sizes of more than {MAX_TERMS} terms together")


def _check_path(text: str) -> None:
    if not _PATH.fullmatch(text):
        raise RefusedGraphError(f"the string {text[:80]!r}")


def _check_name(text: str) -> None:
    if text and (not _NAME.fullmatch(text) or keyword.iskeyword(text)):
        raise RefusedGraphError(f"the name {text[:80]!r}")


def _check_text(text: str) -> None:
    if not _TEXT.fullmatch(text):
        raise RefusedGraphError(f"the string argument {text[:80]!r}")


def _check_version(text: str) -> None:
    if not _VERSION.fullmatch(text):
        raise RefusedGraphError(f"the version {text[:80]!r}")


def _check_target(text: str) -> None:
    aten = _ATEN.fullmatch(text)
    if text in SCALAR:
        return
    if aten is None or aten[1] in _FILES or not _has_kernel(aten[1], aten[2]):
        raise RefusedGraphError(f"the operator {text[:80]!r}; cells may call ATen operators only")


def _has_kernel(name: str, overload: str) -> bool:
    """Whether an operator computes with tensors. Those of the JIT alone, such as `save`, have no kernel."""
    return bool(torch._C._dispatch_has_kernel(f"aten::{name}" + ("" if overload == "default" else f".{overload}")))


def _check_tree(text: str) -> None:
    try:
        protocol, tree = json.loads(text)
        trees = [tree]
        while trees:
            tree = trees.pop()
            if tree["type"] not in _TREES:
                raise RefusedGraphError(f"inputs or outputs in a {tree['type']}; use tensors, tuples, lists or dicts")
            trees.extend(tree["children_spec"])
            if isinstance(tree["context"], str):
                _check_context(json.loads(tree["context"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedGraphError(f"a malformed tree of inputs or outputs ({error})") from None
    if protocol != 1:
        raise RefusedGraphError(f"tree protocol {protocol}")


def _check_context(context: Any) -> None:
    if context is not None and not (isinstance(context, list) and all(isinstance(key, str | int) for key in context)):
        raise RefusedGraphError(f"the context {context!r:.80} of a tree")


_CHECKS: dict[str, Callable[[str], None]] = {
    "name": _check_name,
    "forward_arg_names": _check_name,
    "as_name": _check_name,
    "target": _check_target,
    "in_spec": _check_tree,
    "out_spec": _check_tree,
    "as_string": _check_text,
    "as_strings": _check_text,
    "as_float": _check_version,
    "as_floats": _check_version,
    "torch_version": _check_version,
}
