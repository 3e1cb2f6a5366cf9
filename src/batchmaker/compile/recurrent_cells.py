"""Recognises cells that are one recurrent step, to compute many steps at once on a GPU and on the CPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import CannotRewriteError, TracedCell, extract
from batchmaker.compile.fold import is_lookup
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.program import Program, compile_program
from batchmaker.compile.projected_steps import GRUStep, LSTMStep, RecurrentStep, RNNStep, gru_gates, lstm_gates
from batchmaker.kernels.cpu.greedy import TOKEN, ScoreWeights
from batchmaker.kernels.cpu.loop import StepKind
from batchmaker.kernels.layer import LayerWeights

H, C = 0, 1
"""The part of the state that a value is. kernels.cpu.greedy adds TOKEN."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A cell whose outputs are the new state of one LSTM or GRU, and nothing else.

    project: the inputs of a step -> one value [n, gates * hidden], the inputs' share of the gates with all biases but
    `weights.bias_n`. state, outputs: for each state input and each output, H or C.
    """

    weights: LayerWeights
    project: Program
    state: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoopedStep:
    """A step as in Split, whose outputs are the new state of one LSTM, GRU or RNN, and nothing else.

    projected: the number of the hoisted value that is the inputs' share of the gates; with a table, the number of the
    token that selects its row of the table. state, outputs: for each state input and each output, H or C. scores: the
    linear layer of a greedy decoder, which chooses the next token by its scores; then TOKEN is a part of the state, and
    nothing is hoisted.
    """

    step: RecurrentStep
    projected: int
    table: Tensor | None
    state: tuple[int, ...]
    outputs: tuple[int, ...]
    scores: ScoreWeights | None = None

    @property
    def kind(self) -> StepKind:
        if isinstance(self.step, RNNStep):
            return "rnn-relu" if self.step.relu else "rnn-tanh"
        return "lstm" if isinstance(self.step, LSTMStep) else "gru"


@dataclass(frozen=True, slots=True)
class _FoundStep:
    """The one recurrent step of a graph. state, outputs: for each state input and each output, H or C."""

    node: fx.Node
    state: tuple[int, ...]
    outputs: tuple[int, ...]


def find_recurrence(cell: TracedCell, num_step_inputs: int) -> Recurrence | None:
    """Return the cell as a recurrence; None if it computes anything else from its state."""
    match = _find(cell, num_step_inputs)
    if match is None or isinstance(match.node.target, RNNStep):
        return None
    try:
        project = _projection(cell, num_step_inputs, match.node)
    except CannotRewriteError:  # the state is needed for something else
        return None
    return Recurrence(_weights(match.node.target), project, match.state, match.outputs)


def find_looped_step(step: TracedCell, num_hoisted: int) -> LoopedStep | None:
    """Return a step with `num_hoisted` hoisted values in the form for the CPU's loops; None for any other step."""
    match = _find(step, num_hoisted)
    if match is None:
        return _find_greedy(step) if num_hoisted == 0 else None
    hoisted, projected, table = step.inputs[:num_hoisted], match.node.args[0], None
    assert isinstance(projected, fx.Node)
    if is_lookup(projected):
        table, projected = step.value(projected.args[0]), projected.all_input_nodes[-1]
    if projected not in hoisted:
        return None
    target: Any = match.node.target
    return LoopedStep(target, hoisted.index(projected), table, match.state, match.outputs)


def _find(cell: TracedCell, num_given: int) -> _FoundStep | None:
    """Return the step whose results are all the outputs; None if there is anything else."""
    steps = [node for node in cell.graph.nodes if isinstance(node.target, LSTMStep | GRUStep | RNNStep)]
    state_inputs, fed = cell.inputs[num_given:], cell.outputs
    if len(steps) != 1 or set(steps[0].args[1:]) != set(state_inputs) or len(steps[0].args) != len(state_inputs) + 1:
        return None
    (node,) = steps
    state = tuple(node.args.index(value) - 1 for value in state_inputs)
    outputs = tuple(_part(value, node) for value in fed)
    if None in outputs or outputs[len(outputs) - len(state) :] != state:
        return None
    return _FoundStep(node, state, tuple(part for part in outputs if part is not None))


def _find_greedy(step: TracedCell) -> LoopedStep | None:
    """Return a step of a greedy decoder: it reads a token and chooses the next by the new h; else None."""
    steps = [node for node in step.graph.nodes if isinstance(node.target, LSTMStep | GRUStep | RNNStep)]
    if len(steps) != 1 or not isinstance(projected := steps[0].args[0], fx.Node) or not is_lookup(projected):
        return None
    (node,), table, token = steps, step.value(projected.args[0]), projected.all_input_nodes[-1]
    read = {token: TOKEN} | {value: part for part, value in enumerate(node.args[1:])}
    if table is None or len(read) != len(node.args) or set(read) != set(step.inputs):
        return None
    state = tuple(read[value] for value in step.inputs)
    choices = {value for value in step.outputs if value.target is torch.ops.aten.argmax.default}
    if len(choices) != 1 or (scores := _scores(step, choices, node)) is None or len(scores.weights) > len(table):
        return None
    outputs = tuple(TOKEN if value in choices else _part(value, node) for value in step.outputs)
    if None in outputs or outputs[len(outputs) - len(state) :] != state:
        return None
    target: Any = node.target
    return LoopedStep(target, 0, table, state, tuple(part for part in outputs if part is not None), scores)


def _scores(step: TracedCell, choices: set[fx.Node], recurrent: fx.Node) -> ScoreWeights | None:
    """Return the linear layer of the new h by which the only choice is made; None if it is anything else."""
    (choice,) = choices
    linear, *dim = choice.args
    if tuple(dim) not in ((-1,), (1,)) or choice.kwargs or not isinstance(linear, fx.Node):
        return None
    if linear.target is not torch.ops.aten.linear.default or linear.all_input_nodes[0] is not linear.args[0]:
        return None
    if _part(linear.all_input_nodes[0], recurrent) != H:
        return None
    weights, *biases = (step.value(value) for value in linear.args[1:] if value is not None)
    target: Any = recurrent.target
    if weights is None or weights.dtype != target.weight_hh.dtype or None in biases:
        return None
    return ScoreWeights(weights, biases[0] if biases else None)


def _part(value: fx.Node, step: fx.Node) -> int | None:
    """Return which part of the step's new state a value is; None if it is another value."""
    if not isinstance(step.target, LSTMStep):
        return H if value is step else None
    if value.target is operator.getitem and value.args[0] is step:
        return int(value.args[1])  # type: ignore[arg-type]
    return None


def _weights(step: Any) -> LayerWeights:
    if isinstance(step, LSTMStep):
        return LayerWeights("lstm", step.weight_hh, None)
    hidden = step.weight_hh.shape[1]
    return LayerWeights("gru", step.weight_hh, None if step.bias_hh is None else step.bias_hh[2 * hidden :].float())


def _projection(cell: TracedCell, num_step_inputs: int, step: fx.Node) -> Program:
    """Return the program for the inputs' share of the gates, in PyTorch's order of gates and unscaled."""
    projected = step.args[0]
    assert isinstance(projected, fx.Node)
    shared = extract(cell, cell.inputs[:num_step_inputs], [projected])
    part = TracedCell(shared.graph, dict(shared.constants))
    target: Any = step.target
    gates: Callable[..., Tensor] = lstm_gates if isinstance(target, LSTMStep) else gru_gates
    bias = _state_bias(target)
    made = part.outputs[0]
    weight = part.value(made.args[1]) if made.target is torch.ops.aten.linear.default else None
    own = made.args[2] if weight is not None and len(made.args) > 2 else None
    if weight is not None and (own is None or part.value(own) is not None):
        _let_weights_say_it(part, made, gates(weight), _sum(None if own is None else gates(part.value(own)), bias))
    else:
        with part.graph.inserting_before(part.graph.output_node()):
            made = part.graph.call_function(gates, (made, 1))
            if bias is not None:
                made = part.graph.call_function(torch.add, (made, part.constant(bias)))
        part.graph.output_node().args = ((made,),)
    part.drop_unused_constants()
    lower(part, Packer())
    return compile_program(part)


def _let_weights_say_it(part: TracedCell, linear: fx.Node, weight: Tensor, bias: Tensor | None) -> None:
    with part.graph.inserting_before(linear):
        constants = (part.constant(weight), None if bias is None else part.constant(bias))
    linear.args = (linear.args[0], *constants)
    part.graph.eliminate_dead_code()


def _state_bias(step: LSTMStep | GRUStep) -> Tensor | None:
    """Return the state's biases that may be added to the inputs: for a GRU, those of r and z."""
    if isinstance(step, LSTMStep) or step.bias_hh is None:
        return None  # an LSTM's are already in the projection
    bias = step.bias_hh.clone()
    bias[2 * step.weight_hh.shape[1] :] = 0
    return bias


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two biases, rounded once."""
    if a is None or b is None:
        return a if b is None else b
    return (a.double() + b.double()).to(a.dtype)
