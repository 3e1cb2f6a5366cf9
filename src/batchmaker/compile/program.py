"""A cell graph as one straight-line Python function, with the least overhead per call for eager kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell

Program: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Takes the graph's inputs as separate arguments, returns its outputs."""

# torch.add parses its arguments in 1 us, torch.ops.aten.add.Tensor in 3; both reach the same kernel.
_DIRECT = frozenset(
    """abs add addmm argmax bmm cat chunk clamp clone cumsum div eq exp gather ge gt index_select layer_norm le log
    log_softmax logical_and logical_not logical_or lt matmul max maximum mean min minimum mm mul narrow ne neg pow relu
    reshape rsqrt rsub select sigmoid softmax split sqrt squeeze stack sub sum tanh tril unbind unsqueeze
    where""".split()  # noqa: SIM905
)
_LITERALS = (int, float, bool, str, type(None))


def compile_program(cell: TracedCell) -> Program:
    """Return a function equal to the graph. It keeps the constants alive, and other values until their last use."""
    space: dict[str, Any] = {}
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    last_use = {source: node for node in cell.graph.nodes for source in node.all_input_nodes}
    for index, node in enumerate(cell.graph.nodes):
        names[node] = f"v{index}"
        if node.op == "get_attr":
            names[node] = f"k{index}"
            space[names[node]] = cell.constants[str(node.target)]
        elif node.op == "call_function":
            lines.append(f"{names[node]} = {_call(node, index, names, space)}")
            dead = [names[s] for s in node.all_input_nodes if last_use[s] is node and s.op != "get_attr"]
            if dead:
                lines.append(f"del {', '.join(dead)}")
    results = "".join(f"{names[node]}, " for node in cell.outputs)
    lines.append(f"return ({results})")
    header = f"def program({', '.join(names[node] for node in cell.inputs)}):"
    source = "\n    ".join([header, *lines])
    exec(compile(source, "<batchmaker cell>", "exec"), space)
    program: Program = space["program"]
    program.__doc__ = source
    return program


def _call(node: fx.Node, index: int, names: dict[fx.Node, str], space: dict[str, Any]) -> str:
    """Return the node as a Python expression; callables and other objects are bound in `space`."""

    def render(value: Any) -> str:
        """Return a value as an expression: a name, a literal, or a name that is bound in `space`."""
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, tuple | list):
            inner = ", ".join(map(render, value))
            return f"({inner},)" if isinstance(value, tuple) and value else f"[{inner}]"
        if isinstance(value, slice):
            return f"slice({render(value.start)}, {render(value.stop)}, {render(value.step)})"
        if isinstance(value, _LITERALS) and str(value) not in ("inf", "-inf", "nan"):
            return repr(value)
        name = f"o{len(space)}"
        space[name] = value
        return name

    if node.target is operator.getitem:
        return f"{render(node.args[0])}[{render(node.args[1])}]"
    if node.target is torch.ops.aten.sym_size.int:
        return f"{render(node.args[0])}.shape[{render(node.args[1])}]"
    arguments = [render(value) for value in node.args]
    arguments += [f"{key}={render(value)}" for key, value in node.kwargs.items()]
    space[f"f{index}"] = _fastest(node.target)
    return f"f{index}({', '.join(arguments)})"


def _fastest(target: Any) -> Any:
    """Return a cheaper callable for the same kernel, if one is known."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    base = target._schema.name.removeprefix("aten::")
    return getattr(torch, base) if base in _DIRECT and hasattr(torch, base) else target
