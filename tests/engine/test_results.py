"""What steps bring to the host reaches the requests that want it, whatever it is and however they ask."""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.engine.results import KEPT_BYTES, WIDE_BYTES, ResultTables
from batchmaker.graph.spec import ValueSpec

DTYPES = ["float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
SHAPES = [(), (1,), (3,), (2, 3), (300,), (9_000,)]


class Spread(nn.Module):
    """n -> n times as many numbers as there are in a value, all different, in another dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = getattr(torch, dtype)

    def forward(self, n: Tensor) -> Tensor:
        factors = torch.arange(1, 1 + int(np.prod(self.shape)), dtype=torch.int64) % 7
        return (n[:, None] * factors).remainder(11).view(-1, *self.shape).to(self.dtype)


class Asking(bm.Model):
    """Values of every dtype: as a sequence, out of order, one by one, all in one structure."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        for dtype in DTYPES:
            setattr(self, dtype, bm.Cell(Spread(shape, dtype), max_batch=8))

    def unfold(self, numbers: list[int]) -> Any:
        found = {}
        for dtype in DTYPES:
            values = getattr(self, dtype).map(np.array(numbers))
            found[dtype] = {"all": values, "back": values[::-1], "ends": [values[0], (values[-1],)], "one": values[:1]}
        return found


class Waiting(Asking):
    def __init__(self, cells: dict[str, bm.Cell]) -> None:
        for dtype, cell in cells.items():
            setattr(self, dtype, cell)

    def unfold(self, numbers: list[int]) -> Generator[Any, Any, Any]:
        found = super().unfold(numbers)
        yield found["bool"]["all"]
        return found


@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_every_kind_come_back_as_they_were_computed(shape: tuple[int, ...]) -> None:
    requests = [list(range(i, 2 * i + 1)) for i in range(1, 9)]
    asking = Asking(shape)
    with bm.Engine({"asks": asking, "waits": Waiting(dict(asking.cells))}, threads=1) as engine:
        answers = [engine.map(requests, progress=False, model=name) for name in ("asks", "waits")]
        engine.map([[5, 5, 5]] * 20, progress=False, model="asks")  # takes over the numbers of those before
    for numbers, answer in zip(requests * 2, chain(*answers), strict=True):
        for dtype, found in answer.items():
            wanted = Spread(shape, dtype)(torch.tensor(numbers))
            pairs = [(found["all"], wanted), (found["back"], wanted.flip(0)), (found["one"], wanted[:1])]
            singles = [(found["ends"][0], wanted[0]), (found["ends"][1][0], wanted[-1])]
            if shape == ():
                assert all(not isinstance(got, Tensor) and got == want.item() for got, want in singles)
            else:
                pairs += singles
            assert all(got.dtype == want.dtype and torch.equal(got, want) for got, want in pairs)


class Grow(nn.Module):
    """n, narrow, wide -> the next of each."""

    def forward(self, n: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return n + 1, narrow + 0.5, wide + n[:, None]


class Loops(bm.Model):
    """Loops that end at a number, at their last step, or at once, after a chain of a length of its own."""

    def __init__(self) -> None:
        self.grow = bm.Cell(Grow(), max_batch=4)

    def loop(self, until: int) -> Any:
        end = self.grow.loop((0, [0.0, 0.0], [0.0] * 100), until=until, max_steps=6)
        return {"end": end, "steps": [part.steps for part in end]}

    def unfold(self, request: Any) -> Any:
        return [self.loop(until) for until in request["untils"]]


class WaitingLoops(Loops):
    def unfold(self, request: Any) -> Generator[Any, Any, Any]:
        found = super().unfold(request)
        seen = yield found[0]["end"][0]
        assert seen == min(request["untils"][0], 6)
        return found


@pytest.mark.parametrize("model", [Loops, WaitingLoops])
def test_loops_give_their_ends_and_their_steps_up_to_there(model: type[Loops]) -> None:
    requests = [{"untils": untils} for untils in ([1], [3, 9], [6, 2, 4], [9, 1], [5])]
    with bm.Engine(model(), threads=1) as engine:
        answers = engine.map(requests, progress=False)
    for request, answer in zip(requests, answers, strict=True):
        for until, found in zip(request["untils"], answer, strict=True):
            count = min(until, 6)
            numbers, narrow, wide = found["steps"]
            assert numbers.tolist() == list(range(1, count + 1))
            assert narrow.tolist() == [[0.5 * step] * 2 for step in range(1, count + 1)]
            assert wide.tolist() == [[float(sum(range(step)))] * 100 for step in range(1, count + 1)]
            number, *tensors = found["end"]
            assert (type(number), number) == (int, count)
            assert all(torch.equal(end, steps[-1]) for end, steps in zip(tensors, found["steps"][1:], strict=True))


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [ValueSpec((), "int64"), ValueSpec((2, 2), "bfloat16")])
def test_a_table_that_grows_keeps_what_it_has(spec: ValueSpec) -> None:
    tables = ResultTables()
    table = tables.find(1, spec)
    assert table is not None
    values = torch.arange(3 * max(1, 4 * len(spec.shape) // 2)).view(3, *spec.shape).to(getattr(torch, spec.dtype))
    nodes = np.array([7, 0, 1023])
    table.write(nodes, values)
    tables.fit(100_000)
    assert torch.equal(table.read(nodes), values)
    table.write(np.array([99_999]), values[:1])
    assert torch.equal(table.read(np.array([99_999, 0])), values[:2])
    assert tables.find(1, spec) is table
    assert tables.find(0, spec) is not table


def test_very_wide_values_and_empty_ones_have_no_table() -> None:
    tables = ResultTables()
    assert tables.find(0, ValueSpec((WIDE_BYTES // 4,), "float32")) is not None
    assert tables.find(0, ValueSpec((WIDE_BYTES // 4 + 1,), "float32")) is None
    assert tables.find(0, ValueSpec((0,), "float32")) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_values_take_memory_only_until_they_are_answered(dtype: str) -> None:
    tables = ResultTables()
    table = tables.find(0, ValueSpec((300,), dtype))
    assert table is not None
    assert table.nbytes == 0
    kept: dict[int, Tensor] = {}
    draws, most = np.random.default_rng(0), 0
    for turn in range(50):
        tables.fit(1000 + 500 * turn)
        nodes = draws.choice(1000 + 500 * turn, 1 + draws.integers(20), replace=False)
        values = torch.randn(len(nodes), 300).to(getattr(torch, dtype))
        table.write(nodes, values)  # some of them again: what came for a request that has ended
        kept.update(zip(nodes.tolist(), values, strict=True))
        most = max(most, len(kept))
        read = np.array(list(kept))
        assert torch.equal(table.read(read), torch.stack(list(kept.values())))
        gone = draws.choice(read, draws.integers(1 + len(read)), replace=False)
        table.leave(np.concatenate((gone, np.setdiff1d(np.arange(100), read))))  # of some no value has come
        kept = {node: value for node, value in kept.items() if node not in gone}
    assert table.nbytes <= 2 * most * 300 * values.itemsize


def test_a_large_table_of_wide_values_is_given_back_when_it_is_empty() -> None:
    table = ResultTables().find(0, ValueSpec((WIDE_BYTES // 8,), "float64"))
    assert table is not None
    nodes = np.arange(KEPT_BYTES // WIDE_BYTES + 1)
    for _ in range(2):
        table.write(nodes, torch.ones(len(nodes), WIDE_BYTES // 8, dtype=torch.float64))
        table.leave(nodes[:-1])
        assert float(table.read(nodes[-1:]).sum()) == WIDE_BYTES // 8
        table.leave(nodes[-1:])
        assert table.nbytes == 0
