"""What else happens to a network while it is served: its mode, its weights, and the settings of torch, change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import CellError, ModelError


class Attention(nn.Module):
    """A cell that runs as it is, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 4), nn.Dropout(0.5)

    def forward(self, query: Tensor, rows: Tensor, number: Tensor) -> Tensor:
        among = (torch.arange(rows.shape[1]) < number[:, None]).float()
        made: Tensor = self.dropout(self.linear(query + (among[:, None] @ rows).squeeze(1)))
        return made


class WritesInPlace(nn.Module):
    """Another one that runs as it is, of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        made: Tensor = self.inner(x)
        return made


class One(bm.Model):
    """One node of a cell."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.cell = bm.Cell(module, **options)

    def unfold(self, x: Tensor) -> Any:
        return self.cell(x) if not self.cell.memories else self.cell(x[0], x)


class Run(One):
    """A chain of a cell."""

    def unfold(self, x: Tensor) -> Any:
        return self.cell.run(x)


@pytest.mark.parametrize(
    ("module", "options", "request_"),
    [(Attention(), {"memory": "rows"}, torch.randn(3, 3)), (WritesInPlace(), {}, torch.randn(3))],
)
def test_a_cell_that_runs_as_it_is_serves_nobody_in_another_mode(
    module: nn.Module, options: dict[str, Any], request_: Tensor
) -> None:
    with bm.Engine(One(module, **options), threads=1) as engine:
        before = engine.submit(request_).result()
        module.train()
        with pytest.raises(CellError, match=r"its module is in another mode than at its first use.*copy.deepcopy"):
            engine.submit(request_).result()
        module.eval()
        torch.testing.assert_close(engine.submit(request_).result(), before)


def test_the_mode_of_a_module_changes_no_program_that_was_made_of_it() -> None:
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).train(), torch.randn(3)
    with bm.Engine(One(module), threads=1) as engine:
        before = engine.submit(x).result()
        assert not module.training, "a cell puts its module in eval mode"
        module.train()
        for _ in range(5):
            torch.testing.assert_close(engine.submit(x).result(), before)


def test_a_module_that_is_reached_by_other_ways_than_as_a_part_is_served_as_it_is() -> None:
    """Hooks, lists and bound methods refer to the module itself, so it is no copy that runs."""

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(3, 4), nn.Dropout(0.5)
            self.also = [self.dropout]
            self.linear.register_forward_hook(self.note)
            self.seen = torch.zeros(4)

        def note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.seen = output

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(1.0)
            self.linear(x)
            made: Tensor = self.also[0](self.seen)
            return made

    module = Notes()
    with bm.Engine(One(module), threads=1) as engine, torch.no_grad():
        for x in torch.randn(5, 3):
            torch.testing.assert_close(engine.submit(x).result(), module.linear(x[None])[0])


def test_a_module_that_changes_its_own_weights_is_served() -> None:
    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(min=0.0)
            return super().forward(x)

    with bm.Engine(One(Clamps(3, 4)), threads=1) as engine:
        for _ in range(3):
            engine.submit(torch.randn(3)).result()


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_change_of_weights_requests_fail_and_say_so(workers: int) -> None:
    """Some of the weights are copied when a cell is bound, so an answer would be of neither network."""

    class Two(bm.Model):
        def __init__(self) -> None:
            self.step, self.head = bm.Cell(nn.GRUCell(4, 4)), bm.Cell(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))

        def unfold(self, x: Tensor) -> Any:
            return self.head(self.step.run(x))

    model, x = Two(), torch.randn(3, 4)
    with bm.Engine(model, threads=1, workers=workers) as engine:
        engine.submit(x).result()
        model.head.module.load_state_dict(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).state_dict())
        with pytest.raises(ModelError, match=r"cell 'head': its weights have changed .*copy.deepcopy"):
            engine.submit(x).result()
        with pytest.raises(ModelError, match="its weights have changed"):
            engine.map([x] * 40, progress=False)
    with bm.Engine(model, threads=1) as engine, torch.no_grad():
        h = torch.zeros(1, 4)
        for row in x:
            h = model.step.module(row[None], h)
        torch.testing.assert_close(engine.submit(x).result(), model.head.module(h)[0])


def test_an_embedding_that_shortens_its_own_rows_is_served() -> None:
    with bm.Engine(One(nn.Embedding(10, 4, max_norm=0.1)), threads=1) as engine:
        for word in range(10):
            assert float(engine.submit(word).result().norm()) <= 0.1 + 1e-6


class Sums(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return h + x


@pytest.mark.parametrize(
    ("model", "request_"),
    [
        (lambda: Run(nn.GRUCell(3, 4)), (5, 3)),
        (lambda: Run(nn.LSTMCell(3, 4)), (5, 3)),
        (lambda: Run(nn.RNNCell(3, 4, bias=False)), (5, 3)),
        (lambda: Run(Sums(), state=(3,)), (5, 3)),
        (lambda: One(nn.Linear(3, 4)), (3,)),
        (lambda: One(nn.Conv1d(2, 4, 3)), (2, 6)),
    ],
)
def test_the_default_dtype_of_torch_changes_no_answer(model: Any, request_: tuple[int, ...]) -> None:
    before, served, x = torch.get_default_dtype(), model(), torch.randn(request_)
    with bm.Engine(served, threads=1) as engine:
        wanted = engine.map([x] * 9, progress=False)
    try:
        torch.set_default_dtype(torch.float64)
        with bm.Engine(served, threads=1) as engine:
            for got, want in zip(engine.map([x] * 9, progress=False), wanted, strict=True):
                torch.testing.assert_close(got, want)
    finally:
        torch.set_default_dtype(before)


def test_a_module_with_a_sparse_buffer_is_a_cell() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = (self.matrix @ x.t()).t()
            return made

    with bm.Engine(One(Spread()), threads=1) as engine:
        x = torch.randn(4)
        torch.testing.assert_close(engine.submit(x).result(), x)
