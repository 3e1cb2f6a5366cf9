"""What every cell becomes on the CPU: its layers, and passes over the rows for what lies between them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from operator import getitem

import pytest
import torch
from torch import Tensor, nn

from batchmaker.compile.binding import bind, traced
from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.export import example_rows
from batchmaker.compile.linear import Linear
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.passes import fusion, interpreter
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.compile.passes.pointwise import Pass
from batchmaker.compile.projected_steps import LSTMStep
from batchmaker.compile.rewrite import cut_recurrent_cells, fold_constants, lift
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo import lattice, treegru, treelstm
from covering import covering

compiled = pytest.mark.skipif(not is_available(), reason="without a compiler nothing is done in passes")


class Lstm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        after: tuple[Tensor, Tensor] = self.cell(x, (h, c))
        return after


W = 24
CELLS = {
    "a node of a TreeLSTM": (lambda: treelstm.LstmInner(W), 4, 1),
    "a node of a TreeGRU": (lambda: treegru.GruInner(W), 2, 2),
    "a step of an LSTM": (lambda: Lstm(W), 3, 1),
    "a step of a GRU": (lambda: nn.GRUCell(W, W), 2, 1),
    "a step of a GRU without bias": (lambda: nn.GRUCell(W, W, bias=False), 2, 1),
}


def specs(count: int, dtype: str) -> tuple[ValueSpec, ...]:
    return (ValueSpec((W,), dtype),) * count


def lowered(module: nn.Module, inputs: tuple[ValueSpec, ...]) -> TracedCell:
    graph = lift(traced(module.eval(), inputs))
    cut_recurrent_cells(graph)
    fold_constants(graph)
    lower(graph, Packer(fuse=True))
    return graph


def passes(graph: TracedCell) -> list[Pass]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, Pass)]


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_its_layers_and_one_pass_behind_each_row_of_them(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    make, num_inputs, num_passes = CELLS[name]
    module = make().to(getattr(torch, dtype))
    graph = lowered(module, specs(num_inputs, dtype))
    assert len(passes(graph)) == num_passes
    done = [node.target for node in graph.graph.nodes if node.op == "call_function" and node.target is not getitem]
    assert {type(getattr(target, "__self__", target)) for target in done} == {Linear, Pass}


@pytest.mark.parametrize(
    ("num_rows", "name", "dtype"),
    covering([1, 5, 70], [*CELLS, "a plain recurrent step", "one with relu"], ["float32", "bfloat16", "float64"]),
)
def test_a_bound_cell_computes_what_its_module_does(name: str, dtype: str, num_rows: int) -> None:
    torch.manual_seed(1)
    plain = {"a plain recurrent step": "tanh", "one with relu": "relu"}
    make, num_inputs, _ = CELLS.get(name) or (lambda: nn.RNNCell(W, W, nonlinearity=plain[name]), 2, 0)
    module = make().to(getattr(torch, dtype)).eval()
    inputs = specs(num_inputs, dtype)
    bound = bind(module, inputs, name="cell")
    given = example_rows(inputs, num_rows, random=True)
    kept = [value.clone() for value in given]
    with torch.no_grad():
        made, wanted = bound.call(given), module(*given)
    tolerance = 3e-2 if dtype == "bfloat16" else 1e-5
    for result, expected in zip(made, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, given, kept))


@compiled
def test_a_step_that_is_written_out_keeps_the_layer_that_was_packed_for_it() -> None:
    graph = lift(traced(Lstm(W).eval(), specs(3, "float32")))
    cut_recurrent_cells(graph)
    (step,) = [node.target for node in graph.graph.nodes if isinstance(node.target, LSTMStep)]
    lower(graph, Packer(fuse=True))
    layers = [getattr(node.target, "__self__", None) for node in graph.graph.nodes]
    assert step.linear in layers


@compiled
def test_the_recurrent_part_of_a_lattice_is_two_layers_and_two_passes_beside_the_lookup() -> None:
    graph = lowered(lattice.GruArc(10, W, W), (ValueSpec((), "int64"), *specs(1, "float32")))
    assert len(passes(graph)) == 2


@compiled
def test_workers_share_a_cell_without_sharing_what_it_computes() -> None:
    torch.manual_seed(2)
    inputs = specs(4, "float32")
    bound = bind(treelstm.LstmInner(W).eval(), inputs, name="cell")
    batches = [example_rows(inputs, 1 + number % 40, random=True) for number in range(200)]
    wanted = [bound.call(batch) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(bound.call, batches))
    for one, other in zip(made, wanted, strict=True):  # rows of another batch would be far off, rounding may differ
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@compiled
def test_the_machine_has_one_form_whatever_the_cell() -> None:
    interpreter.prepare()
    for make, num_inputs, _ in CELLS.values():
        for dtype in ("float32", "bfloat16"):
            inputs = specs(num_inputs, dtype)
            bind(make().to(getattr(torch, dtype)).eval(), inputs, name="cell").call(example_rows(inputs, 3))
    assert len(interpreter.interpret.signatures) == 1  # type: ignore[attr-defined]


def test_without_a_compiler_steps_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "is_available", lambda: False)
    graph = lowered(Lstm(W), specs(3, "float32"))
    assert passes(graph) == []
    assert any(isinstance(node.target, LSTMStep) for node in graph.graph.nodes)


def test_an_engine_does_without_the_planner_until_a_cell_asks_for_it() -> None:
    script = "import sys, batchmaker.engine.engine; print([m for m in sys.modules if 'cells.planning' in m])"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
