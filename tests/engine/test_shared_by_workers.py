"""What workers share stands as it is while one of them changes it: each test lets another one come between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import bind
from batchmaker.core.events import CellTypeAdded
from batchmaker.engine import workers
from batchmaker.engine.stats import DriverStats
from batchmaker.engine.unfolder import Unfolder
from batchmaker.engine.worker import Worker
from batchmaker.graph.spec import ValueSpec
from batchmaker.model import weights
from insides import adapting_workers, plain_form


class Growing(list[str]):
    """Cell types, of which another worker adds one as soon as somebody has looked at some of them."""

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        if len(self) < 8:
            self.append(f"type {len(self)}")
        return found


def test_a_cell_type_that_another_worker_adds_is_learnt_next() -> None:
    registry: Any = SimpleNamespace(types=Growing(["type 0"]))
    clock: Any = SimpleNamespace(now_s=lambda: 0.0)
    nothing: Any = None
    unfolder = Unfolder(registry, (), nothing, clock, 1, DriverStats())
    events: list[Any] = []
    for _ in range(10):
        unfolder.learn_types(events)
    assert events == [CellTypeAdded(f"type {number}", 0.0) for number in range(8)]  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [time.monotonic()]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Twice(bm.Model):
    def __init__(self) -> None:
        self.cell = bm.Cell(nn.Linear(2, 2))

    def unfold(self, row: Any) -> Any:
        return self.cell(row)


def test_callers_that_count_busy_processors_at_once_leave_workers_to_take_requests(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bm.Engine(Twice(), workers=3, threads=1) as engine:
        dealing = adapting_workers(engine)
        used, others = [10.0], [True]

        def used_s(_: Worker) -> float:
            if others:
                others.clear()
                clock[0] += 1.0
                dealing.send([])  # another caller looks, a second later
                used[0] += 50.0
            return used[0]

        monkeypatch.setattr(Worker, "used_s", property(used_s))
        for _ in range(5):
            others.append(True)
            clock[0] += 0.3
            assert len(engine.submit([1.0, 2.0]).result(60)) == 2


class AsItIs(nn.Module):
    """Looks at its numbers, so it cannot be traced. `between` is called while somebody lists its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.between: Any = None

    def modules(self) -> Iterator[nn.Module]:
        if self.between is not None:
            AsItIs.called(self)
        return super().modules()

    @staticmethod
    def called(one: AsItIs) -> None:
        between, one.between = one.between, None
        between()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.sum()) < 1e9 else x


def test_a_module_that_two_workers_use_for_the_first_time_is_in_its_mode_for_both() -> None:
    module = AsItIs().eval()
    cell = bind(module, (ValueSpec((2,), "float32"),), name="cell")
    form, x, made = plain_form(cell), torch.ones(1, 2), list[Any]()
    module.between = lambda: made.append(form(x))
    torch.testing.assert_close(form(x)[0], module(x))
    torch.testing.assert_close(made[0][0], module(x))


def test_changed_weights_are_named_while_another_worker_binds_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, module, more = weights.WatchedWeights(), nn.Linear(2, 2), [nn.Linear(2, 2)]
    watched.add("scores", module)
    with torch.no_grad():
        module.bias.add_(1)
    version_of = weights.version_of

    def bind_between(weight: Tensor) -> int:
        if more:
            watched.add("other", more.pop())
        return version_of(weight)

    monkeypatch.setattr(weights, "version_of", bind_between)
    assert "'scores'" in str(watched.changed())
