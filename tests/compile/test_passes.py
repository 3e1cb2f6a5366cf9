"""Pointwise operations in passes over the rows compute what PyTorch computes one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchmaker.compile.binding import bind, traced
from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.export import example_rows
from batchmaker.compile.passes import fusion
from batchmaker.compile.passes.fusion import can_fuse, fuse_pointwise
from batchmaker.compile.passes.interpreter import BLOCK, is_available
from batchmaker.compile.passes.pointwise import Pass
from batchmaker.compile.program import compile_program
from batchmaker.compile.rewrite import fold_constants, lift
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.pointwise import EXP_ERROR
from batchmaker_papers.planner.in_runs import planner
from covering import covering

pytestmark = pytest.mark.skipif(not is_available(), reason="without a compiler nothing is done in passes")

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda a, b: a + b,
    "a scaled sum": lambda a, b: torch.add(a, b, alpha=0.5),
    "a difference": lambda a, b: torch.sub(a, b, alpha=3),
    "one minus": lambda a, b: (1 - a) - torch.rsub(b, 2, alpha=0.5),
    "a product": lambda a, b: a * b * 0.5,
    "a quotient": lambda a, b: a / (b * b + 1),
    "a product added": lambda a, b: torch.addcmul(a, a, b, value=-2),
    "a product taken away": lambda a, b: a - a * b,
    "a mean": lambda a, b: torch.lerp(a, b, torch.sigmoid(a)) + torch.lerp(a, b, 0.25),
    "gates": lambda a, b: torch.sigmoid(a) * torch.tanh(b),
    "silu": lambda a, b: nn.functional.silu(a) + b,
    "bounds": lambda a, b: torch.maximum(a, b) - torch.minimum(-a, b.relu()) + a.abs(),
    "a number read twice": lambda a, b: (a + a) * (b * b),
    "the same dtype": lambda a, b: torch.sigmoid(a) * (a * b + 1).to(a.dtype),
    "gelu": lambda a, b: nn.functional.gelu(a) + nn.functional.gelu(b, approximate="tanh"),
    "exponentials": lambda a, b: torch.exp(-a.abs()) * torch.erf(b),
    "roots": lambda a, b: (a * a + 1).sqrt() * (b.square() + 1).rsqrt() + (a.abs() + 1) ** 0.5 - (b.abs() + 1) ** -0.5,
    "one over": lambda a, b: 1 / (a.abs() + 1) + (b.abs() + 1) ** -1 + a**2,
    "softplus": lambda a, b: nn.functional.softplus(a) - nn.functional.logsigmoid(b) + nn.functional.mish(a),
    "clamps": lambda a, b: a.clamp(-1, 1) + b.clamp(min=0.5) - a.clamp(max=0.25) + b.clamp_min(-2),
    "hard functions": lambda a, b: (
        nn.functional.hardtanh(a) + nn.functional.relu6(b) + nn.functional.hardtanh(b, -2, 3)
    ),
    "hard gates": lambda a, b: nn.functional.hardsigmoid(a) + nn.functional.hardswish(b),
    "leaky": lambda a, b: nn.functional.leaky_relu(a) + nn.functional.leaky_relu(b, 0.2),
}

NOT_IN_PASSES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    torch.ops.aten.pow.Tensor_Scalar: lambda a, b: a**3 + b,
    torch.ops.aten.softplus.default: lambda a, b: nn.functional.softplus(a, beta=2) + b,
    torch.ops.aten.clamp.Tensor: lambda a, b: torch.clamp(a, b, b + 1) + b,
}
"""Operations with options for which there is no program."""


class Pointwise(nn.Module):
    """One operation and one more, so that there is something to put together, with a row of its own."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.operation = operation
        self.row = nn.Parameter(torch.rand(width))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        made = self.operation(a, b)
        return made, made * self.row + 1


def fused(module: nn.Module, *shapes: tuple[int, ...], dtype: str = "float32") -> TracedCell:
    """The module's graph with passes in it, small ones too, if there are any."""
    graph = lift(traced(module.eval(), tuple(ValueSpec(shape, dtype) for shape in shapes)))
    fold_constants(graph)
    fuse_pointwise(graph, fewest_saved=1)
    return graph


def passes(graph: TracedCell) -> list[Pass]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, Pass)]


@pytest.mark.parametrize(("name", "width"), covering(OPERATIONS, [1, 7, BLOCK + 100]))
def test_a_pass_equals_its_operations(name, width):
    torch.manual_seed(0)
    module = Pointwise(OPERATIONS[name], width)
    graph = fused(module, (width,), (width,))
    assert len(passes(graph)) == 1
    program = compile_program(graph)
    for num_rows in (0, 1, 9):
        a, b = 4 * torch.randn(num_rows, width), 4 * torch.randn(num_rows, width)
        kept = a.clone(), b.clone()
        with torch.no_grad():
            torch.testing.assert_close(program(a, b), module(a, b), rtol=1e-5, atol=1e-5)
        assert torch.equal(a, kept[0])
        assert torch.equal(b, kept[1])


def test_values_that_are_no_numbers_or_too_large_stay_so():
    program = compile_program(fused(Pointwise(lambda a, b: torch.sigmoid(a) + torch.tanh(b), 5), (5,), (5,)))
    a = torch.tensor([[float("nan"), float("inf"), -float("inf"), 500.0, -500.0]])
    total, _ = program(a, a)
    torch.testing.assert_close(total, torch.sigmoid(a) + torch.tanh(a), equal_nan=True)
    bounds = compile_program(fused(Pointwise(lambda a, b: torch.maximum(a, b).relu(), 2), (2,), (2,)))
    one, nan = torch.ones(1, 2), torch.full((1, 2), float("nan"))
    assert bounds(one, nan)[0].isnan().all()
    assert bounds(nan, one)[0].isnan().all()


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 88.7, 88.8, -87.5, -103.0, -120.0, 1e-30, -3e38]


@pytest.mark.parametrize(
    "name", ["silu", "gelu", "exponentials", "softplus", "clamps", "hard functions", "hard gates", "leaky", "one over"]
)
def test_special_numbers_are_those_of_torch(name: str) -> None:
    module = Pointwise(OPERATIONS[name], len(SPECIAL))
    a = torch.tensor([SPECIAL])
    with torch.no_grad():
        for b in (a, torch.ones_like(a), a.flip(1)):
            wanted = [values.float() for values in module(a.double(), b.double())]  # gelu(inf) of float32 may be NaN
            made = compile_program(fused(module, (len(SPECIAL),), (len(SPECIAL),)))(a, b)
            torch.testing.assert_close(list(made), wanted, equal_nan=True)


@pytest.mark.parametrize("function", [torch.exp, nn.functional.softplus], ids=["exp", "softplus"])
def test_the_error_of_exponentials_stays_below_its_bound_over_their_whole_range(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = torch.linspace(-104, 88.7, 4000)[None]
    made, _ = compile_program(fused(Pointwise(lambda a, b: function(a) * b, 4000), (4000,), (4000,)))(
        x, torch.ones(1, 4000)
    )
    torch.testing.assert_close(made.double(), function(x.double()), rtol=EXP_ERROR, atol=1.7e-38)


@pytest.mark.parametrize(("width", "times"), [(1, 5), (5, 7), (43, 37), (BLOCK, 2), (7, BLOCK)])
def test_rows_that_are_repeated_are_read_by_a_pass(width: int, times: int) -> None:
    torch.manual_seed(0)
    module = Pointwise(
        lambda a, b: a.repeat_interleave(times, 1) * b.tanh().repeat(1, times) + b.repeat_interleave(times, 1),
        width * times,
    )
    a, b = torch.randn(3, width), torch.randn(3, width)
    graph = fused(module, (width,), (width,))
    assert not {torch.ops.aten.repeat.default, torch.ops.aten.repeat_interleave.self_int} & {
        node.target for node in graph.graph.nodes
    }
    with torch.no_grad():
        for made, wanted in zip(compile_program(graph)(a, b), module(a, b), strict=True):
            torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("operation", NOT_IN_PASSES, ids=str)
def test_operations_with_other_options_are_left_to_torch(operation: Any) -> None:
    torch.manual_seed(0)
    module, a, b = Pointwise(NOT_IN_PASSES[operation], 5), torch.rand(3, 5), torch.rand(3, 5)
    graph = fused(module, (5,), (5,))
    assert operation in {node.target for node in graph.graph.nodes}
    assert passes(graph)
    with torch.no_grad():
        torch.testing.assert_close(compile_program(graph)(a, b), module(a, b))


def test_rows_that_lie_apart_in_memory_are_read_as_they_are():
    module = Pointwise(OPERATIONS["gates"], 6)
    program = compile_program(fused(module, (6,), (6,)))
    wide, turned = torch.randn(4, 20), torch.randn(6, 4).t()
    with torch.no_grad():
        wanted = module(wide[:, 3:9], turned)
    torch.testing.assert_close(program(wide[:, 3:9], turned), wanted)


class Gates(nn.Module):
    """Two gates out of one layer, and a layer over what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.gates(x).narrow(1, 0, 8), self.gates(x).narrow(1, 8, 8)
        kept = torch.sigmoid(second)
        made = torch.tanh(self.out(torch.sigmoid(first) * x + 1))
        return made * kept + x, made


def test_what_lies_between_two_layers_is_one_pass_and_reads_slices_without_taking_them():
    module, x = Gates(), torch.randn(5, 8)
    graph = fused(module, (8,))
    before, after = passes(graph)
    assert before.num_instructions == 2  # the other gate is computed where it is read, in the second pass
    assert after.num_instructions == 3
    assert not any("narrow" in str(node.target) for node in graph.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(compile_program(graph)(x), module(x))


class Attending(nn.Module):
    """One column of a value weighs all of them."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        value = torch.tanh(a) * b + a
        weight = torch.sigmoid(value[:, :1] * 2)
        return value * weight.expand(-1, 8) + b


def test_a_pass_does_not_wait_for_one_that_waits_for_it():
    graph, a, b = fused(Attending(), (8,), (8,)), torch.randn(5, 8), torch.randn(5, 8)
    assert [each.width for each in passes(graph)] == [8, 1, 8]
    torch.testing.assert_close(compile_program(graph)(a, b), (Attending()(a, b),))


def test_float64_does_not_run_in_passes():
    assert passes(fused(Pointwise(OPERATIONS["gates"], 8).double(), (8,), (8,), dtype="float64")) == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_bfloat16_is_rounded_only_where_it_leaves_a_pass(name):
    torch.manual_seed(0)
    module = Pointwise(OPERATIONS[name], 37).bfloat16()
    graph = fused(module, (37,), (37,), dtype="bfloat16")
    assert len(passes(graph)) == 1
    a, b = (4 * torch.randn(9, 37)).bfloat16(), (4 * torch.randn(9, 37)).bfloat16()
    with torch.no_grad():
        wide = [each.bfloat16() for each in module.float()(a.float(), b.float())]
    for result, wanted in zip(compile_program(graph)(a, b), wide, strict=True):
        torch.testing.assert_close(result, wanted, rtol=2**-8, atol=1e-5)  # where one rounds up, the other may not


def test_bfloat16_keeps_what_is_no_number_or_too_large():
    program = compile_program(fused(Pointwise(lambda a, b: a * b, 4).bfloat16(), (4,), (4,), dtype="bfloat16"))
    a = torch.tensor([[float("nan"), float("inf"), 3e38, -3e38]], dtype=torch.bfloat16)
    product, _ = program(a, torch.full_like(a, 2))
    torch.testing.assert_close(product, a * 2, equal_nan=True)


def test_a_single_operation_and_rows_of_matrices_stay_as_they_are():
    class Alone(nn.Module):
        def forward(self, a: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
            return torch.sigmoid(a), torch.tanh(m) * m + 1

    assert passes(fused(Alone(), (8,), (4, 4))) == []


def test_a_pass_that_would_save_few_calls_is_left_as_it_is():
    graph = lift(traced(Pointwise(OPERATIONS["a sum"], 8), (ValueSpec((8,), "float32"),) * 2))
    fuse_pointwise(graph)
    assert passes(graph) == []


def test_without_a_compiler_nothing_is_put_together(monkeypatch):
    monkeypatch.setattr(fusion, "is_available", lambda: False)
    graph = lift(traced(Gates().eval(), (ValueSpec((8,), "float32"),)))
    assert not can_fuse(graph)
    fuse_pointwise(graph)
    assert passes(graph) == []


class Recurrent(nn.Module):
    """torch's own cells, one feeding the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(6, 8), nn.GRUCell(8, 8, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.lstm(x, (h, c))
        return h, c, self.gru(h, other)


def bound_recurrent(monkeypatch, module: nn.Module, in_runs: int):
    """The module planned in passes, and cut for runs as it is (0) or planned (1)."""
    monkeypatch.setattr("batchmaker_papers.planner.plan.fastest", lambda ways: len(ways) - 2)
    monkeypatch.setattr("batchmaker_papers.planner.in_runs.fastest_in_runs", lambda ways, num_step_inputs: in_runs)
    specs = tuple(ValueSpec((width,), "float32") for width in (6, 8, 8, 8))
    return bind(module.eval(), specs, name="recurrent", num_step_inputs=1, planner=planner)


@pytest.mark.parametrize("in_runs", [0, 1])
def test_torchs_recurrent_cells_are_planned_from_inside_and_still_cut_for_runs(monkeypatch, in_runs):
    torch.manual_seed(0)
    module = Recurrent()
    bound = bound_recurrent(monkeypatch, module, in_runs)
    x, *state = example_rows(bound.inputs, 5, random=True)
    with torch.no_grad():
        wanted = module(x, *state)
    torch.testing.assert_close(bound.call((x, *state)), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bound.step(bound.hoist((x,)), tuple(state)), wanted, rtol=1e-5, atol=1e-5)
    assert [spec.shape for spec in bound.hoisted] == [(32,)]
    assert ("not planned in runs: its steps were no faster" in bound.notes) is (in_runs == 0)


def test_a_pass_refuses_values_of_other_sizes_than_its_graph_notes() -> None:
    graph = fused(Pointwise(OPERATIONS["a sum"], 8), (8,), (8,))
    (found,) = [node.target for node in graph.graph.nodes if isinstance(node.target, Pass)]
    found(torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(RuntimeError, match=r"a pass over 4 rows got a value \[3, 8\], expected rows of 8"):
        found(torch.ones(4, 8), torch.ones(3, 8))
