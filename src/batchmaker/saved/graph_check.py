"""Checks that the graph of a saved cell holds only tensors, numbers and ATen calls, before torch reads it.

torch's own reader trusts the file: it evaluates symbolic sizes as Python, writes node names into Python source, runs
`guards_code`, and takes any attribute of `torch` for an operator. Each of these is refused here unless it is harmless.
"""

from __future__ import annotations

import ast
import json
import keyword
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class RefusedGraphError(Exception):
    """The graph holds something that is not allowed; the message names it."""


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"[\w.]*", re.ASCII)
_TEXT = re.compile(r"[\w .,:/+=><-]*", re.ASCII)
_VERSION = re.compile(r"[\w.+-]*", re.ASCII)
_SYMBOL = re.compile(r"[su]\d+", re.ASCII)
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
_SYMPY = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "PythonMod", "FloorDiv",
    "CleanDiv", "CeilDiv", "ModularIndexing", "Equality", "Unequality", "Eq", "Ne", "GreaterThan", "LessThan",
    "StrictGreaterThan", "StrictLessThan", "And", "Or", "Not", "IntTrueDiv", "ToFloat",
})  # fmt: skip
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
    """RefusedGraphError unless the serialised program (parsed JSON) holds tensors, numbers and ATen calls alone."""
    _walk(program, "program")
    graph_module = program["graph_module"]
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


def _walk(value: Any, key: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not _PATH.fullmatch(name):
                raise RefusedGraphError(f"key {name!r} in {key}")
            if name.startswith("as_") and name not in _ARGUMENTS:
                raise RefusedGraphError(f"an argument of kind {name}")
            if name in _EMPTY and item:
                raise RefusedGraphError(f"{name} that is not empty")
            _walk(item, name)
    elif isinstance(value, list):
        for item in value:
            _walk(item, key)
    elif isinstance(value, str):
        _CHECKS.get(key, _check_path)(value)


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


def _check_size(text: str) -> None:
    """RefusedGraphError unless the text builds a size from symbols and numbers: sympy evaluates it as Python."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RefusedGraphError(f"the size {text[:80]!r}") from None
    if len(text) > 2000 or not _is_size(tree.body):
        raise RefusedGraphError(f"the size {text[:80]!r}")


def _is_size(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_size(node.operand)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _SYMPY:
        return False
    if any(not isinstance(word.value, ast.Constant) or not _is_flag(word.value.value) for word in node.keywords):
        return False
    if node.func.id in ("Symbol", "Float"):
        return all(isinstance(part, ast.Constant) and _is_leaf(part.value) for part in node.args)
    return all(map(_is_size, node.args))


def _is_flag(value: Any) -> bool:
    return isinstance(value, int)  # bool is an int; Float(..., precision=53) is another type


def _is_leaf(value: Any) -> bool:
    """Whether the text is a symbol's name or a number."""
    return isinstance(value, str) and bool(_SYMBOL.fullmatch(value) or re.fullmatch(r"[\d.e+-]+", value, re.ASCII))


_CHECKS: dict[str, Callable[[str], None]] = {
    "name": _check_name,
    "forward_arg_names": _check_name,
    "as_name": _check_name,
    "target": _check_target,
    "in_spec": _check_tree,
    "out_spec": _check_tree,
    "expr_str": _check_size,
    "as_string": _check_text,
    "as_strings": _check_text,
    "as_float": _check_version,
    "as_floats": _check_version,
    "torch_version": _check_version,
}
