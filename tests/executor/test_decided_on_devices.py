"""What values decide, on devices that do things late: collected steps as input, and loops with `until` in branches."""

from __future__ import annotations

from typing import Any

import pytest
from test_cuda_executor import fakes, running
from torch import Tensor, nn

import batchmaker as bm
from insides import scheduler


class Counted(nn.Module):
    """n, top -> n + 1, whether it is below top, whether it is even."""

    def forward(self, n: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return n + 1, n + 1 < top, n % 2 == 1


class Sum(nn.Module):
    """n, total -> 2 n, total + n"""

    def forward(self, n: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * n, total + n


class Up(nn.Module):
    """n -> n + 1"""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


class Uses(bm.Model):
    """Counts to a number, then sums twice the even ones, and goes on to a multiple of ten if the last one was even."""

    def __init__(self) -> None:
        self.count, self.sum = bm.Cell(Counted(), max_batch=8), bm.Cell(Sum(), max_batch=8)
        self.up = bm.Cell(Up(), max_batch=8, host_outputs=(0,))

    def unfold(self, top: Any) -> Any:
        def body(state: Any) -> Any:
            return self.count(state[0], top)

        last = bm.while_loop(lambda s: s[1], body, (0, True, False), max_steps=1000, collect=lambda s: s[2])
        doubled, _ = self.sum.map(last[0].steps, last[0].steps)
        total = self.sum.run(doubled, 5)[1]
        end = bm.cond(last[2], lambda: self.up.loop(last[0], until=tens, max_steps=20), lambda: last[0])
        return total, self.up.map(doubled), end


def tens(n: Any) -> Any:
    return n % 10 == 0


def alone(top: int) -> tuple[int, list[int], int]:
    last = max(top, 1)
    even = list(range(2, last + 1, 2))
    return 5 + 2 * sum(even), [2 * n + 1 for n in even], last + 10 - last % 10 if last % 2 == 0 else last


@pytest.mark.parametrize("count", [1, 2])
def test_collected_steps_and_loops_in_branches_on_devices(count: int) -> None:
    tops = [3, 8, 1, 14, 25, 2, 8, 40, 11, 6]
    with running(Uses(), *fakes(count)) as engine:
        for _ in range(2):
            answers = engine.map(tops, progress=False)
            assert [(total, steps.tolist(), end) for total, steps, end in answers] == [alone(top) for top in tops]
        scheduler(engine).check_invariants()
