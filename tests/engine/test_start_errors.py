"""A cell that raises at some batch sizes: the start says which cell and size, the cell's own error, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError


class Squeezes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x).squeeze(), x], dim=1)


class OneRow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            raise AssertionError("one row only")
        return super().forward(x)


class FewRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 8:
            raise ValueError("at most 8 rows")
        return super().forward(x)


class Calling(bm.Model):
    example_request = (1.0, 2.0)

    def __init__(self, module: nn.Module, **options: object) -> None:
        self.layer = bm.Cell(module.eval(), **options)  # type: ignore[arg-type]

    def unfold(self, request: object) -> object:
        return self.layer(request)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Squeezes, r"cell 'layer': .* a batch of 1 \(.*\) raised IndexError: .* With a batch of 3 it runs\. .*squeeze"),
        (OneRow, r"cell 'layer': .* a batch of 2 \(.*\) raised AssertionError: one row only\. .*batch_sizes=\["),
        (FewRows, r"cell 'layer': .* a batch of 9 raised ValueError: at most 8 rows\. .*batch_sizes=\["),
    ],
)
def test_a_cell_that_takes_some_batch_sizes_only_is_named_with_the_size_and_the_remedy(
    kind: type[nn.Linear], said: str
) -> None:
    with pytest.raises(ModelError, match=said), bm.Engine(Calling(kind(2, 2)), threads=1):
        pass


@pytest.mark.parametrize(("kind", "sizes"), [(OneRow, [1]), (FewRows, [1, 4, 8])])
def test_the_remedy_that_the_error_names_is_one(kind: type[nn.Linear], sizes: list[int]) -> None:
    with bm.Engine(Calling(kind(2, 2), batch_sizes=sizes), threads=1) as engine:
        assert len(engine.map([(1.0, 2.0)] * 20, progress=False)) == 20
