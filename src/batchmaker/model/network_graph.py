"""A static network as one graph: torch.fx gives calls of modules, torch.export gives ATen operators."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from batchmaker.compile.export import export_cell, is_check, without_writes
from batchmaker.compile.forward_signature import signature_of
from batchmaker.compile.opaque import Opaque
from batchmaker.errors import ModelError
from batchmaker.graph.spec import ValueSpec

_SIZE_METHODS: Final = frozenset(("size", "dim", "ndimension", "numel"))
_SIZE_ATTRIBUTES: Final = frozenset(("shape", "ndim", "device", "dtype"))


@final
@dataclass(frozen=True, slots=True)
class Traced:
    """A graph whose placeholders are the request's inputs, and the module that holds the attributes of its nodes."""

    graph: fx.Graph
    root: nn.Module


def input_names(module: nn.Module, example_request: Any) -> tuple[str, ...]:
    """Return the names of the inputs of forward() that a request gives.

    They are the inputs in the example: by name in a dict, by position in a tuple. Without an example they are the
    inputs without a default. Raises ModelError if forward() takes any number of inputs, or does not match the example.
    """
    signature = signature_of(module).parameters.values()
    name = type(module).__name__
    if any(p.kind is p.VAR_POSITIONAL for p in signature):
        raise ModelError(f"{name}: forward() takes any number of inputs; wrap it in a module that names them")
    parameters = {p.name: p for p in signature if p.kind is not p.VAR_KEYWORD}
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    if isinstance(example_request, Mapping):
        names = [parameter for parameter in parameters if parameter in example_request]
        wrong = sorted(map(str, set(example_request) - set(parameters)))
    elif isinstance(example_request, tuple):
        names, wrong = list(parameters)[: len(example_request)], []
    else:
        names, wrong = needed or list(parameters)[:1], []
    missing = [parameter for parameter in needed if parameter not in names]
    if wrong or missing or not names:
        raise ModelError(
            f"{name}: forward() takes {', '.join(parameters)}; the example request gives "
            f"{', '.join([*names, *wrong]) or 'nothing'}. Give a dict by name, a tuple in order, or one tensor."
        )
    return tuple(names)


def trace_modules(module: nn.Module, inputs: tuple[str, ...], leaf: Callable[[nn.Module], bool]) -> Traced:
    """Trace with torch.fx. leaf: submodules that stay one node, besides those of torch.nn.

    A submodule that cannot be traced stays one node too. Raises the error of torch.fx if the module itself cannot be
    traced.
    """
    parameters = signature_of(module).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in inputs and p.kind is not p.VAR_KEYWORD}
    graph = _Tracer(leaf).trace(module, concrete_args=defaults or None)
    for node in reversed(graph.nodes):
        fixed = node.op == "placeholder" and not any(str(node.target) == name for name in inputs)
        if is_check(node) or (fixed and not node.users):
            graph.erase_node(node)
    root = fx.GraphModule(module, graph)
    root.graph.eliminate_dead_code()
    return Traced(root.graph, root)


@final
class _Tracer(fx.Tracer):
    """The tracer of torch.fx, which continues if a submodule cannot be traced."""

    def __init__(self, leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._leaf = leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Opaque) or self._leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # its code may raise anything on stand-ins
            for node in list(self.graph.nodes)[: before - 1 : -1]:
                self.graph.erase_node(node)
            self.module_stack = stack
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def trace_operators(module: nn.Module, specs: tuple[ValueSpec, ...]) -> Traced:
    """Trace with torch.export, for rows of these specs. Raises any error of torch.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch copies its own deprecated classes
        program = without_writes(export_cell(module, specs))
        root = program.module(check_guards=False)
    assert isinstance(root, fx.GraphModule)
    graph = fx.Graph()
    returned: Any = graph.graph_copy(root.graph, {})
    graph.output(pytree.tree_unflatten(list(returned), program.call_spec.out_spec))
    for node in reversed(graph.nodes):
        if is_check(node):
            graph.erase_node(node)
    clean = fx.GraphModule(root, graph)
    clean.graph.eliminate_dead_code()
    return Traced(clean.graph, clean)


def is_size(node: fx.Node) -> bool:
    """Whether the node asks a value for its size, device or dtype, and reads no numbers in it."""
    if node.op == "call_method":
        return node.target in _SIZE_METHODS
    if node.op != "call_function":
        return False
    return node.target is torch.ops.aten.sym_size.int or (node.target is getattr and node.args[1] in _SIZE_ATTRIBUTES)


def is_weak(node: fx.Node) -> bool:
    """Whether the node is a weight, or is needed only for the size, device or dtype of another value."""
    return node.op == "get_attr" or is_size(node)


def normalised_sizes(graph: fx.Graph) -> None:
    """Write `x.shape[k]` and `x.size()[k]` as `x.size(k)`, in place."""
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not isinstance(node.args[1], int):
            continue
        shape = node.args[0]
        whole = isinstance(shape, fx.Node) and (
            (shape.target is getattr and shape.args[1] == "shape")
            or (shape.op == "call_method" and shape.target == "size" and len(shape.args) == 1 and not shape.kwargs)
        )
        if whole and node.args[1] >= 0:
            with graph.inserting_before(node):
                size = graph.call_method("size", (shape.args[0], node.args[1]))
            node.replace_all_uses_with(size)
    graph.eliminate_dead_code()
