"""A convolution computes the same in each of its ways, and takes the place of torch's in compiled cells."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from batchmaker.compile.binding import bind, traced
from batchmaker.compile.convolution import Convolution, Window
from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.linear import can_pack
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.program import compile_program
from batchmaker.compile.rewrite import lift
from batchmaker.graph.spec import ValueSpec

PACKS = can_pack(torch.zeros(1))


@st.composite
def layers(draw):
    """A convolution over one or two dimensions, and the shape of its rows."""
    dimensions = draw(st.integers(1, 2))
    numbers = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dimensions))  # noqa: E731
    size, stride, padding, dilation = numbers(1, 3), numbers(1, 3), numbers(0, 2), numbers(1, 2)
    into, out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
    layer = kind(into, out, size, stride, padding, dilation, bias=draw(st.booleans()))
    return layer.requires_grad_(False), (into, *numbers(5, 8))


def of(layer: nn.Conv1d | nn.Conv2d, row: tuple[int, ...], activation="none") -> Convolution:
    window = Window(layer.stride, layer.padding, layer.dilation)
    return Convolution(layer.weight, layer.bias, window, row, activation)


@given(
    layers(), st.integers(1, 4), st.sampled_from([("none", nn.Identity()), ("relu", nn.ReLU()), ("tanh", nn.Tanh())])
)
def test_every_way_computes_what_torch_computes(drawn, num_rows, activation):
    layer, row = drawn
    name, function = activation
    x = torch.randn(num_rows, *row)
    made = of(layer, row, name)
    for way, run in {**made.ways, "the fastest": made}.items():
        result = run(x)
        torch.testing.assert_close(
            result, function(layer(x)), rtol=1e-5, atol=1e-5, msg=lambda why, way=way: f"{way}: {why}"
        )
        assert result.is_contiguous()
        assert result.data_ptr() != x.data_ptr()


@pytest.mark.skipif(not PACKS, reason="needs oneDNN")
def test_one_product_replaces_a_convolution_only_where_few_of_its_weights_are_zero():
    short, long = of(nn.Conv1d(8, 8, 3, padding=1), (8, 4)), of(nn.Conv1d(8, 8, 3, padding=1), (8, 64))
    assert "dense" in short.ways
    assert "dense" not in long.ways
    assert "dense" in of(nn.Conv1d(1024, 1024, 1), (1024, 1)).ways
    assert "dense" not in of(nn.Conv1d(1025, 1024, 1), (1025, 1)).ways, "too many weights"
    assert "dense" not in of(nn.Conv1d(1, 1, 100_000), (1, 100_000)).ways, "finding the weights would take 40 GB"


def test_the_way_is_measured_once_for_numbers_of_rows_with_as_many_digits(monkeypatch):
    layer = of(nn.Conv1d(2, 2, 3).requires_grad_(False), (2, 8))
    looks = []
    monkeypatch.setattr("batchmaker.compile.convolution._seconds", lambda way, x: looks.append(len(x)) or 0.0)
    for num_rows in (4, 5, 7, 8):
        layer(torch.zeros(num_rows, 2, 8))
    assert sorted(set(looks)) == [4, 8]


class Frames(nn.Module):
    """Two convolutions, one of them with an activation, over signals of 16 numbers."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 4, 3, 2, 1, **options), nn.Conv1d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).flatten(1)


def lowered(module: nn.Module, row: tuple[int, ...]) -> TracedCell:
    cell = lift(traced(module.eval(), (ValueSpec(row, "float32"),)))
    lower(cell, Packer())
    return cell


def test_convolutions_of_a_cell_are_replaced_together_with_their_activation():
    module = Frames().requires_grad_(False)
    cell = lowered(module, (2, 16))
    targets = [node.target for node in cell.graph.nodes if node.op == "call_function"]
    assert sum(isinstance(target, Convolution) for target in targets) == 2
    assert torch.ops.aten.relu.default not in targets
    x = torch.randn(5, 2, 16)
    torch.testing.assert_close(compile_program(cell)(x)[0], module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"groups": 2}, {"dtype": torch.float64}], ids=["groups", "float64"])
def test_other_convolutions_stay_as_they_are(options):
    module = nn.Conv1d(2, 4, 3, **options).requires_grad_(False)
    cell = lift(traced(module.eval(), (ValueSpec((2, 8), str(module.weight.dtype).removeprefix("torch.")),)))
    lower(cell, Packer())
    assert not any(isinstance(node.target, Convolution) for node in cell.graph.nodes)


def test_a_call_with_arguments_by_name_stays_as_it_is():
    module = nn.Conv1d(2, 4, 3).requires_grad_(False).eval()
    cell = lift(traced(module, (ValueSpec((2, 9), "float32"),)))
    (node,) = [node for node in cell.graph.nodes if node.target is torch.ops.aten.conv1d.default]
    node.kwargs = {"stride": [2]}
    lower(cell, Packer())
    x = torch.randn(5, 2, 9)
    torch.testing.assert_close(
        compile_program(cell)(x)[0], nn.functional.conv1d(x, module.weight, module.bias, stride=2)
    )


def test_a_bound_cell_with_convolutions_over_images_computes_what_its_module_does():
    module = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding="same"), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 4 * 6, 3),
    ).eval().requires_grad_(False)  # fmt: skip
    cell = bind(module, (ValueSpec((1, 8, 12), "float32"),), name="image")
    for num_rows in (1, 2, 7):
        x = torch.randn(num_rows, 1, 8, 12)
        torch.testing.assert_close(cell.call((x,))[0], module(x), rtol=1e-5, atol=1e-5)
