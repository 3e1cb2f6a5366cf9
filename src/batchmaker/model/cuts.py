"""Cutting a static network into layers: the nodes of its traced graph in groups, each group a module.

A group begins at an *anchor*, such as a convolution, and includes the nodes after it. A node that is no anchor joins
the last group among its inputs' groups, so values only flow to later groups. Nodes that need no value (weights,
positions) or sizes only are copied into every group that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import fx, nn

from batchmaker.errors import ModelError
from batchmaker.model.network_graph import Traced, is_size, is_weak

Place = tuple[int, int]
"""The origin of a value: (layer, output), or (REQUEST, input)."""

REQUEST: Final = -1

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm, nn.PReLU)
_LAYERS = frozenset(
    """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution linear bilinear embedding
    embedding_bag lstm gru rnn_tanh rnn_relu lstm_cell gru_cell""".split()  # noqa: SIM905
)
_PRODUCTS = frozenset(("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"))


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """One cell. sources: the origin of each of its inputs, in order. num_outputs: number of tensors that it returns."""

    name: str
    module: nn.Module
    sources: tuple[Place, ...]
    num_outputs: int


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """A network in layers, in an order in which they can run.

    inputs: names of the request's inputs. form: the form of the network's result: "tensor", "tuple", "list" or "dict".
    results: the origin of each result. keys: names of the results of a dict.
    """

    layers: tuple[Layer, ...]
    inputs: tuple[str, ...]
    form: str
    results: tuple[Place, ...]
    keys: tuple[str, ...] = ()


def has_weights(module: nn.Module) -> bool:
    """Whether a module, or a submodule, has weights and is not just a normalisation."""
    if isinstance(module, _NORMS):
        return False
    own = any(True for _ in module.parameters(recurse=False))
    return own or any(map(has_weights, module.children()))


def cut(traced: Traced, chosen: frozenset[int] | None) -> Cut:
    """Cut a traced network. chosen: ids of the submodules at which a layer begins; None for every layer with weights.

    Raises ModelError if a layer would write into the value of another one, or returns something other than tensors.
    """
    return _Cutter(traced, chosen).cut()


@final
class _Cutter:
    """One cut. groups: the group of each node. free: nodes that are copied into every group that reads them."""

    def __init__(self, traced: Traced, chosen: frozenset[int] | None) -> None:
        self._graph, self._root = traced.graph, traced.root
        self._chosen = chosen
        self._inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._groups: dict[fx.Node, int] = dict.fromkeys(self._inputs, 0)
        self._members: list[list[fx.Node]] = [[]]
        self._anchors: dict[int, fx.Node] = {}
        self._free: set[fx.Node] = set()

    def cut(self) -> Cut:
        for node in self._graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._place(node)
        form, keys, returned = self._returned()
        readers = self._read_elsewhere(returned)
        places: dict[fx.Node, Place] = {node: (REQUEST, i) for i, node in enumerate(self._inputs)}
        layers: list[Layer] = []
        names: set[str] = set()
        for number, members in enumerate(self._members):
            outputs = [node for node in members if node in readers]
            if not outputs:
                continue
            self._refuse_writes(members)
            module, sources = self._module(members, outputs)
            name = self._name(number, members, names)
            for k, node in enumerate(outputs):
                places[node] = (len(layers), k)
            layers.append(Layer(name, module, tuple(places[node] for node in sources), len(outputs)))
        if not layers:
            raise ModelError(f"{type(self._root).__name__} computes nothing from its inputs; there is nothing to cut")
        results = tuple(places[node] for node in returned)
        return Cut(tuple(layers), tuple(str(node.target) for node in self._inputs), form, results, keys)

    # --- groups ------------------------------------------------------------------------------------------------

    def _place(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        if is_weak(node) or all(source in self._free for source in sources):
            self._free.add(node)
            return
        if not self._is_anchor(node):
            group = max(self._groups[source] for source in sources if source not in self._free)
        elif not self._anchors:
            group = 0
        else:
            group = len(self._members)
            self._members.append([])
        if self._is_anchor(node):
            self._anchors[group] = node
        self._groups[node] = group
        self._members[group].append(node)

    def _is_anchor(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            return id(module) in self._chosen if self._chosen is not None else has_weights(module)
        if self._chosen is not None or node.op != "call_function":
            return False
        name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
        constant = any(source in self._free and not is_size(source) for source in node.all_input_nodes)
        return name in _LAYERS or (name in _PRODUCTS and constant)

    def _returned(self) -> tuple[str, tuple[str, ...], list[fx.Node]]:
        """Return the form of the network's result, its keys if it is a dict, and its nodes."""
        value: Any = self._graph.output_node().args[0]
        keys: tuple[str, ...] = ()
        parts: list[Any]
        if isinstance(value, fx.Node):
            form, parts = "tensor", [value]
        elif isinstance(value, Mapping):
            by_key = {str(key): part for key, part in value.items() if part is not None}
            form, parts, keys = "dict", list(by_key.values()), tuple(by_key)
        elif isinstance(value, list | tuple):
            form, parts = "list" if isinstance(value, list) else "tuple", list(value)
        else:
            form, parts = "tensor", [value]
        for part in parts:
            if not isinstance(part, fx.Node) or part in self._free:
                raise ModelError(
                    f"{type(self._root).__name__} returns {part}, which does not depend on the request or is nested; "
                    "return a tensor, or a flat tuple, list or dict of tensors"
                )
        return form, keys, parts

    def _read_elsewhere(self, returned: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes that another group reads, or that the network returns."""
        nodes = set(returned)
        for number, members in enumerate(self._members):
            nodes.update(node for node in self._needs(members) if self._groups[node] != number)
        return nodes

    def _needs(self, members: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes that a group reads (itself, other groups and inputs) in order of first use.

        The size of dimension 0, the batch, is the same for all of them, so reading it does not make a node necessary.
        """
        needed: dict[fx.Node, None] = {}
        waiting = [source for node in members for source in node.all_input_nodes][::-1]
        seen: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in self._free:
                needed[node] = None
            elif node not in seen and not _is_batch_size(node):
                seen.add(node)
                waiting.extend(node.all_input_nodes)
        return list(needed)

    def _refuse_writes(self, members: list[fx.Node]) -> None:
        for node in members:
            name = str(node.target)
            if node.op != "call_method" or not name.endswith("_") or name.endswith("__"):
                continue
            target = node.args[0]
            if isinstance(target, fx.Node) and self._groups.get(target) != self._groups[node]:
                raise ModelError(
                    f"{type(self._root).__name__} writes into the value of an earlier layer ({name} at {node.name}); "
                    f"use {name[:-1]} instead, which makes a new one"
                )

    # --- modules -----------------------------------------------------------------------------------------------

    def _module(self, members: list[fx.Node], outputs: list[fx.Node]) -> tuple[nn.Module, list[fx.Node]]:
        """Return a group as a module, and its input nodes in order."""
        own = set(members)
        outside = [node for node in self._needs(members) if node not in own]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in outside}
        first = next(iter(copies.values()))

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                if _is_batch_size(node) and node.args[0] not in copies:
                    copies[node] = graph.call_method("size", (first, 0))
                else:
                    copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in members:
            copies[node] = graph.node_copy(node, copy)
        made = [copies[node] for node in outputs]
        graph.output(made[0] if len(made) == 1 else tuple(made))
        return fx.GraphModule(self._root, graph), outside

    def _name(self, number: int, members: list[fx.Node], names: set[str]) -> str:
        anchor = self._anchors.get(number, members[0])
        name = str(anchor.target) if anchor.op == "call_module" else anchor.name
        while name in names:
            name += "_again"
        names.add(name)
        return name


def _is_batch_size(node: fx.Node) -> bool:
    """Whether the node asks a value for its dimension 0."""
    if len(node.args) != 2 or node.args[1] != 0:
        return False
    return node.target is torch.ops.aten.sym_size.int or (node.op == "call_method" and node.target == "size")


def run_layers(
    layers: Iterable[tuple[Callable[..., Any], tuple[Place, ...], int]], inputs: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Call layers in order on values or handles and return each one's outputs.

    layers: the callable, the origins of its inputs, the number of its outputs. ModelError if a layer returns another
    number of outputs.
    """
    made: list[tuple[Any, ...]] = []
    for call, sources, num_outputs in layers:
        outputs = call(*(inputs[k] if layer == REQUEST else made[layer][k] for layer, k in sources))
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(flat) != num_outputs:
            raise ModelError(
                f"{call}: gives {len(flat)} tensors where {num_outputs} are handed on: a value between layers must be "
                "one tensor. Take tuples apart inside the module, or keep it whole with cut= and an example_request"
            )
        made.append(flat)
    return made
