"""A cell that raises at some batch sizes: the start says which cell and size, the cell's own error, and what to do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import ModelError, StoppedError
from waiting import wait_until


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


def test_an_engine_that_is_stopped_while_it_starts_says_so() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Waits(Calling):
        def unfold(self, request: object) -> object:
            begun.set()
            assert go_on.wait(60)
            return self.layer(request)

    engine = bm.Engine(Waits(nn.Linear(2, 2)), threads=1)
    with ThreadPoolExecutor(2) as pool:
        starting = pool.submit(engine.start)
        assert begun.wait(60)
        stopping = pool.submit(engine.stop, drain=False)
        wait_until(lambda: is_refusing(engine))
        go_on.set()
        assert isinstance(starting.exception(60), StoppedError), "not a fault of the model's example"
        stopping.result(60)


def is_refusing(engine: bm.Engine) -> bool:
    """Whether an engine takes no more requests."""
    try:
        engine.submit((1.0, 2.0)).cancel()
    except StoppedError:
        return True
    return False
