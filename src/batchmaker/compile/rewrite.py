"""From an exported program to a clean cell graph: recurrent cells split into projection and step, constants folded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, OutputKind

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, dependencies, is_symbolic, traced_value
from batchmaker.compile.export import is_check, without_writes
from batchmaker.compile.programs import AnyProgram, ReadProgram
from batchmaker.compile.projected_steps import GRUStep, LSTMStep, RNNStep, gru_rows, lstm_bias, lstm_rows, rnn_bias

_aten = torch.ops.aten


def lift(program: AnyProgram) -> TracedCell:
    """Return the program's graph with parameters and buffers as constants, without its checks and dropouts.

    Raises CannotRewriteError for programs that change buffers or inputs, contain nested graphs (conditions, loops) or
    have control flow that waits for a value.
    """
    source = program if isinstance(program, ReadProgram) else _read(program)
    cell = TracedCell(fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.graph.nodes:
        if node in source.weights:
            copies[node] = cell.constant(source.weights[node])
        elif is_check(node):
            continue
        elif _passes_through(node):
            copies[node] = copies[node.args[0]]
        else:
            _refuse(node)
            copies[node] = cell.graph.node_copy(node, lambda read: copies[read])
    cell.graph.eliminate_dead_code()
    for node in cell.graph.nodes:
        if node.target is _aten.sym_size.int and node.meta["val"] != cell.inputs[0].meta["val"].shape[0]:
            raise CannotRewriteError(f"{node.name} is a size that is not the batch size")
    return cell


def _read(program: torch.export.ExportedProgram) -> ReadProgram:
    """Return an exported program as one whose calls change nothing, with its weights, and our own notes of values."""
    program = without_writes(program)
    signature = program.graph_signature
    changed = [spec for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    if changed:
        raise CannotRewriteError(f"it changes {changed[0].target or 'its inputs'} when it runs")
    sources = {spec.arg.name: spec for spec in signature.input_specs}
    tensors: dict[str, Any] = {**program.constants, **program.state_dict}
    graph, weights = fx.Graph(), dict[fx.Node, Tensor]()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        made = copies[node] = graph.node_copy(node, lambda read: copies[read])
        made.meta = {"val": traced_value(node.meta.get("val"))}
        if node.op == "placeholder" and sources[node.name].kind is not InputKind.USER_INPUT:
            target = str(sources[node.name].target)
            weights[made] = _tensor(tensors.get(target), target)
    return ReadProgram(graph, weights, program.call_spec.out_spec, lambda: program)


def _tensor(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise CannotRewriteError(f"it holds {name}, which is no tensor")
    return value.detach()


def _passes_through(node: fx.Node) -> bool:
    """Whether the node returns its first argument unchanged."""
    if node.target in (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default):
        return True
    if node.target is _aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return bool(node.args[0].meta["val"].dtype is node.args[1])  # type: ignore[union-attr]
    return node.target is _aten.dropout.default and node.args[2] is False


def _refuse(node: fx.Node) -> None:
    """Raise CannotRewriteError for nodes that the passes do not support."""
    if node.op not in ("placeholder", "call_function", "output"):
        raise CannotRewriteError(f"it holds a nested graph ({node.name})")
    if node.op != "call_function":
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise CannotRewriteError(f"it holds a nested graph ({node.name})")
    tags = getattr(node.target, "tags", ())
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        raise CannotRewriteError(f"{node.name} depends on the values of a batch")
    if torch.Tag.nondeterministic_seeded in tags and not _is_plain_attention(node):
        raise CannotRewriteError(f"{node.name} draws random numbers")


def _is_plain_attention(node: fx.Node) -> bool:
    """Whether the node is an attention without dropout: torch marks it as random, but it is not."""
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return bool(node.target is _aten.scaled_dot_product_attention.default and dropout == 0.0)


def cut_recurrent_cells(cell: TracedCell) -> list[str]:
    """Replace each torch recurrent cell with constant weights by a projection (a linear node) and a step.

    Returns the names of these cells, in order.
    """
    names = []
    for node in list(cell.graph.nodes):
        build = _BUILDERS.get(node.target)
        weights = None if build is None else _weights(cell, node)
        if build is not None and weights is not None:
            _cut(cell, node, *build(*weights))
            names.append(node.name)
    cell.graph.eliminate_dead_code()
    return names


def _weights(cell: TracedCell, node: fx.Node) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None:
    """Return w_ih, w_hh, b_ih, b_hh of a recurrent cell; None if any depends on the inputs."""
    arguments = [*node.args[2:], None, None][:4]
    w_ih, w_hh, b_ih, b_hh = (cell.value(argument) for argument in arguments)
    for bias, argument in ((b_ih, arguments[2]), (b_hh, arguments[3])):
        if bias is None and argument is not None:
            return None
    return None if w_ih is None or w_hh is None else (w_ih, w_hh, b_ih, b_hh)


_Cut: TypeAlias = tuple[Tensor, Tensor | None, Any]
"""Weight and bias of the input projection, and the step."""


def _lstm(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> _Cut:
    return lstm_rows(w_ih), lstm_bias(b_ih, b_hh), LSTMStep(w_hh)


def _gru(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> _Cut:
    return gru_rows(w_ih), None if b_ih is None else gru_rows(b_ih), GRUStep(w_hh, b_hh)


def _rnn(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, *, relu: bool = False) -> _Cut:
    step = RNNStep(w_hh, relu=relu)
    return step.scale * w_ih, rnn_bias(b_ih, b_hh, step.scale), step


_BUILDERS: dict[Any, Callable[..., _Cut]] = {
    _aten.lstm_cell.default: _lstm,
    _aten.gru_cell.default: _gru,
    _aten.rnn_tanh_cell.default: _rnn,
    _aten.rnn_relu_cell.default: partial(_rnn, relu=True),
}


def _cut(cell: TracedCell, node: fx.Node, weight: Tensor, bias: Tensor | None, step: Any) -> None:
    x, state = node.args[:2]
    assert isinstance(x, fx.Node)
    with cell.graph.inserting_before(node):
        arguments = (x, cell.constant(weight), None if bias is None else cell.constant(bias))
        projected = cell.graph.call_function(_aten.linear.default, arguments)
        value = x.meta["val"]
        projected.meta["val"] = value.like(value.shape[0], weight.shape[0])
        flat_state = state if isinstance(state, list | tuple) else (state,)
        replacement = cell.graph.call_function(step, (projected, *flat_state))
    replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)


def fold_constants(cell: TracedCell) -> None:
    """Compute everything that depends on constants alone, once."""
    depends = dependencies(cell.graph)
    values: dict[fx.Node, Any] = {}
    for node in list(cell.graph.nodes):
        if node.op == "get_attr":
            values[node] = cell.value(node)
        elif node.op == "call_function" and not depends[node] and not is_symbolic(node):
            arguments = fx.map_arg((node.args, node.kwargs), lambda source: values[source])
            with torch.no_grad():
                values[node] = node.target(*arguments[0], **arguments[1])
            if isinstance(values[node], Tensor):
                with cell.graph.inserting_before(node):
                    folded = cell.constant(values[node])
                folded.meta = dict(node.meta)
                values[folded] = values[node]
                node.replace_all_uses_with(folded)
    cell.graph.eliminate_dead_code()


def token_limits(cell: TracedCell) -> dict[str, int]:
    """Return the number of tokens of each integer input that an embedding looks up."""
    limits: dict[str, int] = {}
    for node in cell.graph.nodes:
        if node.target is not _aten.embedding.default:
            continue
        table, token = cell.value(node.args[0]), node.args[1]
        if table is not None and isinstance(token, fx.Node) and token.op == "placeholder":
            limits[token.name] = min(limits.get(token.name, table.shape[0]), table.shape[0])
    return limits
