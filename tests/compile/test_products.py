"""Layers over values side by side are parted, joined and merged without changing what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from batchmaker.compile.binding import traced
from batchmaker.compile.dataflow import TracedCell, dependencies
from batchmaker.compile.export import is_check
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.passes.products import join_products, merge_products, part_products
from batchmaker.compile.program import compile_program
from batchmaker.compile.rewrite import lift
from batchmaker.graph.spec import ValueSpec

LINEAR = torch.ops.aten.linear.default
CAT = torch.ops.aten.cat.default


class SideBySide(nn.Module):
    """Two layers over three values side by side, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 4), nn.Linear(9, 5, bias=False)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        together = torch.cat([a, b, c], -1)
        return self.first(together), self.second(together)


def graph_of(module: nn.Module, *shapes: tuple[int, ...]) -> TracedCell:
    return lift(traced(module.eval(), tuple(ValueSpec(shape, "float32") for shape in shapes)))


def calls(cell: TracedCell, target: object) -> list[fx.Node]:
    return [node for node in cell.graph.nodes if node.target is target]


def assert_computes(cell: TracedCell, module: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compile_program(cell)(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(), (6,)], ids=["one row", "several rows"])
def test_a_layer_over_values_side_by_side_becomes_one_over_each(rows):
    torch.manual_seed(0)
    module = SideBySide()
    cell = graph_of(module, (*rows, 2), (*rows, 3), (*rows, 4))
    part_products(cell)
    assert len(calls(cell, LINEAR)) == 6
    assert not calls(cell, CAT)
    assert_computes(cell, module, *(torch.randn(7, *rows, width) for width in (2, 3, 4)))


def test_what_is_known_early_gets_one_layer_with_the_bias_and_the_rest_another():
    torch.manual_seed(0)
    module = SideBySide()
    cell = graph_of(module, (2,), (3,), (4,))
    early = {node.name for node in cell.inputs[::2]}
    part_products(cell, lambda node: node.name in early)
    layers = calls(cell, LINEAR)
    assert len(layers) == 4
    depends = dependencies(cell.graph)
    biased = [node for node in layers if node.args[2] is not None]
    assert [depends[node] == early for node in biased] == [True]
    assert sorted(depends[node] == early for node in layers) == [False, False, True, True]
    assert_computes(cell, module, torch.randn(7, 2), torch.randn(7, 3), torch.randn(7, 4))


@pytest.mark.parametrize("everything", [True, False])
def test_a_layer_stays_whole_where_all_of_its_values_are_alike(everything):
    cell = graph_of(SideBySide(), (2,), (3,), (4,))
    part_products(cell, lambda node: everything)
    assert len(calls(cell, LINEAR)) == 2
    assert len(calls(cell, CAT)) == 1


def test_what_was_parted_is_joined_again():
    torch.manual_seed(0)
    module = SideBySide()
    cell = graph_of(module, (2,), (3,), (4,))
    part_products(cell)
    join_products(cell)
    assert len(calls(cell, LINEAR)) == 2
    assert_computes(cell, module, torch.randn(7, 2), torch.randn(7, 3), torch.randn(7, 4))


def test_layers_over_one_value_become_one_product_of_a_layer_or_of_what_the_caller_makes():
    torch.manual_seed(0)
    module, inputs = SideBySide(), (torch.randn(7, 2), torch.randn(7, 3), torch.randn(7, 4))
    merged, lowered = (graph_of(module, (2,), (3,), (4,)) for _ in range(2))
    merge_products(merged)
    (layer,) = calls(merged, LINEAR)
    assert layer.meta["val"].shape[1] == 9
    lower(lowered, Packer())
    assert not calls(lowered, LINEAR)
    assert sum("packed_linear" in node.name for node in lowered.graph.nodes) == 1
    for cell in (merged, lowered):
        assert_computes(cell, module, *inputs)


def test_every_check_that_torch_writes_into_a_program_is_known_as_one():
    names = [name for name in dir(torch.ops.aten) if "_assert" in name or "sym_constrain" in name]
    graph = fx.Graph()
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            assert is_check(graph.call_function(getattr(packet, overload), ()))
    assert is_check(graph.call_function(torch._assert, (True, "")))
    assert len(names) >= 4
    assert not is_check(graph.call_function(LINEAR, ()))
