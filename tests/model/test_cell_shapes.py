"""A cell called with other shapes of its inputs becomes another type, up to a number of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import OptionError, RequestShapeError, ShapeError


class Pictures(nn.Module):
    """A picture [batch, 1, 4, width] -> columns [batch, width - 2, 8], whatever the width."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)

    def forward(self, picture: Tensor) -> Tensor:
        return self.convolution(picture).flatten(1, 2).transpose(1, 2)


class Reader(bm.Model):
    """Convolutions over a picture of any width, then an LSTM over its columns."""

    def __init__(self, max_shapes: int = 8) -> None:
        torch.manual_seed(0)
        self.pictures = bm.Cell(Pictures(), max_shapes=max_shapes)
        self.network = nn.LSTM(8, 5, bidirectional=True)
        self.lstm = bm.recurrent(self.network)
        self.example_requests = [torch.zeros(1, 4, 5), torch.zeros(1, 4, 9)]

    def unfold(self, picture: Any) -> Any:
        return self.lstm(self.pictures(picture))[0]

    def alone(self, picture: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.network(self.pictures.module(picture[None])[0])[0]
        return result


def test_pictures_of_several_widths_run_through_one_cell():
    model = Reader()
    pictures = [torch.randn(1, 4, width) for width in (5, 9, 5, 7, 9, 9, 7)]
    with bm.Engine(model) as engine:
        for picture, result in zip(pictures, engine.map(pictures, progress=False), strict=True):
            torch.testing.assert_close(result, model.alone(picture), atol=1e-5, rtol=1e-5)
        names = [cell.name for cell in engine.registry.types if cell.name.startswith("pictures")]
    assert names == ["pictures", "pictures [1, 4, 9]", "pictures [1, 4, 7]"]


def test_one_shape_too_many_is_refused_with_what_to_do_and_the_others_go_on():
    with bm.Engine(Reader(max_shapes=2)) as engine:
        with pytest.raises(RequestShapeError, match=r"2 shapes of its inputs.*Pad inputs to a few sizes.*max_shapes="):
            engine.map([torch.zeros(1, 4, 7)], progress=False)
        engine.map([torch.zeros(1, 4, 9), torch.zeros(1, 4, 5)], progress=False)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (torch.zeros(2, 4, 5), r"got rows of shape \(2, 4, 5\), expected \(1, 4, 5\)"),  # the module does not take it
        (torch.zeros(1, 1, 4, 5), r"expected \(1, 4, 5\); a dimension too many: a request has no batch"),
    ],
)
def test_a_shape_that_the_module_does_not_take_is_the_requests_error(picture, message):
    with bm.Engine(Reader()) as engine:
        for _ in range(2):
            with pytest.raises(RequestShapeError, match=message):
                engine.map([picture], progress=False)


class Widths(bm.Model):
    """Maps, runs and calls over rows of any width, of data and of values."""

    def __init__(self) -> None:
        self.double, self.add, self.twice = bm.Cell(Double()), bm.Cell(Add()), bm.Cell(Double())

    def unfold(self, frames: Any) -> Any:
        doubled = self.double.map(frames)
        total = self.add.run(doubled, torch.zeros(frames.shape[1]))
        return doubled, total, self.twice(total), self.twice(frames[0])


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Add(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return x + total


def test_maps_runs_and_calls_take_other_widths_of_data_and_values():
    with bm.Engine(Widths()) as engine:
        for width in (3, 4, 3):
            frames = torch.randn(5, width)
            (result,) = engine.map([frames], progress=False)
            expected = (frames * 2, frames.sum(0) * 2, frames.sum(0) * 4, frames[0] * 2)
            torch.testing.assert_close(result, expected)


class Mixed(Widths):
    def unfold(self, frames: Any) -> Any:
        self.double.map(frames)
        return self.double.map([1, 2])


def test_another_dtype_or_number_of_dimensions_is_no_other_type():
    with bm.Engine(Mixed()) as engine, pytest.raises(ShapeError, match=r"got rows of shape \(\), expected \(3,\)"):
        engine.map([torch.zeros(2, 3)], progress=False)


def test_a_cell_has_one_shape_at_least():
    with pytest.raises(OptionError, match="max_shapes must be at least 1, a whole number, got int 0"):
        bm.Cell(Double(), max_shapes=0)


def test_a_cell_of_several_shapes_is_saved_with_a_model_inside(tmp_path):
    model = Reader()
    pictures = [torch.randn(1, 4, width) for width in (9, 5)]
    expected = [model.alone(picture) for picture in pictures]
    del model.network
    bm.save(model, tmp_path / "saved")
    with bm.Engine(bm.load(tmp_path / "saved")) as engine:
        for one, other in zip(engine.map(pictures, progress=False), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
