"""Cells whose tasks run in one compiled call on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from batchmaker.compile.binding import BoundCell, bind
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.choice import choose, example_task
from batchmaker.kernels.cpu.loop import RecurrentLoop
from batchmaker.kernels.cpu.steps import OWN

HIDDEN = 6
STATE_OF = {nn.LSTMCell: 2, nn.GRUCell: 1, nn.RNNCell: 1}


class Words(nn.Module):
    """A token's embedding through a recurrent cell."""

    def __init__(self, cell: nn.Module, *, twice: bool = False) -> None:
        super().__init__()
        self.embedding, self.cell, self.twice = nn.Embedding(9, 4), cell, twice

    def forward(self, token: Tensor, *state: Tensor) -> Any:
        made = self.cell(self.embedding(token), state if len(state) > 1 else state[0])
        return (made, made) if self.twice else made


class Frames(nn.Module):
    """A float row and a token, together the input of a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(9, 4), nn.GRUCell(7, HIDDEN)

    def forward(self, frame: Tensor, token: Tensor, h: Tensor) -> Tensor:
        return self.cell(torch.cat([frame.tanh(), self.embedding(token)], 1), h)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.score = nn.GRUCell(4, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.score(h), h


def bound(module: nn.Module, given: tuple[ValueSpec, ...], num_state: int, **options: Any) -> BoundCell:
    torch.manual_seed(0)
    dtype = options.pop("dtype", "float32")
    module = module.to(getattr(torch, dtype)).eval()
    return bind(
        module, (*given, *[ValueSpec((HIDDEN,), dtype)] * num_state), name="cell", num_step_inputs=len(given),
        **options,
    )  # fmt: skip


TOKEN, ROW = ValueSpec((), "int64", 9), ValueSpec((4,), "float32")


def check(cell: BoundCell, columns: tuple[Tensor, ...], num_steps: int, atol: float = 1e-6) -> None:
    """Compare a task of equal steps with the cell's own; columns: inputs of all steps, [positions, *shape]."""
    loop = cell.loop
    assert isinstance(loop, RecurrentLoop)
    n = len(columns[0]) // num_steps
    task = example_task(loop, n, num_steps)
    task.inputs = tuple((c.view(torch.int16) if c.dtype == torch.bfloat16 else c).numpy() for c in columns)
    task.fetch_at, task.fetch_of, task.fetched = (np.arange(len(columns[0])),), (0,), (loop.zeros(len(columns[0])),)
    assert loop.run(task)
    dtype = torch.bfloat16 if task.state[0].dtype == np.int16 else torch.float32
    state = tuple(torch.zeros(n, HIDDEN, dtype=dtype) for _ in task.state)
    outputs = []
    for step in range(num_steps):
        made = cell.call((*(column[step * n : (step + 1) * n] for column in columns), *state))
        outputs.append(made[0])
        state = made[len(made) - len(state) :]
    pairs = [(task.fetched[0], torch.cat(outputs)), *zip(task.state, state, strict=True)]
    for rows, value in pairs:
        mine = torch.from_numpy(rows)
        torch.testing.assert_close(mine.view(dtype) if dtype == torch.bfloat16 else mine, value, atol=atol, rtol=0)


@pytest.mark.parametrize("fold_bytes", [1 << 20, 0])
@pytest.mark.parametrize("kind", STATE_OF)
def test_words_come_from_the_folded_table_or_are_projected(kind: Any, fold_bytes: int) -> None:
    cell = bound(Words(kind(4, HIDDEN)), (TOKEN,), STATE_OF[kind], fold_bytes=fold_bytes)
    check(cell, (torch.arange(8),), num_steps=4)


@pytest.mark.parametrize("kind", STATE_OF)
def test_float_rows_are_projected_before_the_loop(kind: Any) -> None:
    cell = bound(kind(4, HIDDEN), (ROW,), STATE_OF[kind])
    check(cell, (torch.randn(6, 4),), num_steps=3)


def test_bfloat16_stays_within_its_rounding() -> None:
    row = ValueSpec((4,), "bfloat16")
    check(bound(nn.LSTMCell(4, HIDDEN), (row,), 2, dtype="bfloat16"), (torch.randn(6, 4).bfloat16(),), 3, atol=2e-2)


def test_several_inputs_make_one_projection() -> None:
    cell = bound(Frames(), (ValueSpec((3,), "float32"), TOKEN), 1)
    check(cell, (torch.randn(6, 3), torch.arange(6)), num_steps=2)


def test_an_output_may_come_twice() -> None:
    check(bound(Words(nn.GRUCell(4, HIDDEN), twice=True), (TOKEN,), 1), (torch.arange(6),), num_steps=3)


@pytest.mark.parametrize("rows", [3, 20])
def test_inputs_are_projected_at_the_sizes_that_were_warmed_up(rows: int) -> None:
    cell = bound(nn.LSTMCell(4, HIDDEN), (ROW,), 2)
    cell.warm_up([1, 2, 8], [4, 8])
    check(cell, (torch.randn(rows, 4),), num_steps=1)


def test_inputs_that_cannot_be_projected_are_left_to_the_steps() -> None:
    for fold_bytes in (0, 1 << 20):
        loop = bound(Words(nn.GRUCell(4, HIDDEN)), (TOKEN,), 1, fold_bytes=fold_bytes).loop
        assert isinstance(loop, RecurrentLoop)
        task = example_task(loop, 2, 2)
        task.inputs = (np.array([1, 2, 99, 3]),)
        assert not loop.run(task)


def test_only_what_is_a_recurrent_step_and_nothing_else_has_a_loop() -> None:
    assert bound(Scored(), (ROW,), 1).loop is None
    assert bound(nn.Bilinear(4, HIDDEN, HIDDEN), (ROW,), 1).loop is None
    double = bound(nn.GRUCell(4, HIDDEN), (ValueSpec((4,), "float64"),), 1, dtype="float64")
    assert double.loop is None
    assert double.loop_for(1) is None


def test_without_a_compiler_there_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmaker.kernels.cpu.loop.is_compiled", lambda _: False)
    assert bound(nn.GRUCell(4, HIDDEN), (ROW,), 1).loop is None


def test_the_loop_is_offered_where_it_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = bound(nn.GRUCell(4, HIDDEN), (ROW,), 1)
    monkeypatch.setattr("batchmaker.compile.loops.choose", lambda *_: np.array([False, True, False, True, True]))
    assert cell.loop_for(1) is cell.loop
    assert cell.loop_for(2) is None


def test_times_decide_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = bound(nn.GRUCell(4, HIDDEN), (ROW,), 1).loop
    assert isinstance(loop, RecurrentLoop)
    for otherwise_s, wanted in ((1e-9, False), (1e-3, True)):

        def times(calls: list[Any], otherwise_s: float = otherwise_s) -> list[float]:
            return [*((0.5 + i) * 1e-6 for i in range(len(calls) - 1)), otherwise_s]

        monkeypatch.setattr("batchmaker.kernels.cpu.choice.least_s", times)
        assert choose(loop, lambda _: lambda: None, range(1, 301))[1:].tolist() == [wanted] * 300
    assert set(loop.plan.ways[1:9].tolist()) == {OWN}
