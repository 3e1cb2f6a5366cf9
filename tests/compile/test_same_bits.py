"""For a deterministic engine a cell runs at sizes at which a row has the same bits in every place, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import BoundCell, bind, traced
from batchmaker.compile.rewrite import lift
from batchmaker.compile.row_trial import TrialRows
from batchmaker.compile.same_bits import ALIGNMENT, SameBits, decides, with_same_bits
from batchmaker.errors import RowsError
from batchmaker.graph.spec import ValueSpec

SIZES = tuple(range(1, 33))
ROW = ValueSpec((6,), "float32")


def chosen(program: Callable[..., Any], sizes: tuple[int, ...] = SIZES, *, is_seen: bool = True) -> SameBits:
    """Sizes for a program over rows of six numbers."""
    rows = (torch.randn(5, 6, generator=torch.Generator().manual_seed(1)),)
    return with_same_bits(program, rows, sizes, "cell 'x'", num_outputs=1, is_seen=is_seen, is_large=False)


def summed(x: Tensor) -> Tensor:
    """The sum of each row [n, 1], from the first number to the last."""
    return sum(x.split(1, -1), torch.zeros(len(x), 1))


def by_size(limit: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Sums in one order for batches below a size, and in another from it on."""
    return lambda x: (summed(x) if len(x) < limit else summed(x.flip(-1)),)


def at_the_end(x: Tensor) -> tuple[Tensor, ...]:
    """Sums whole groups of four rows in one order, and the rows that are left in another."""
    whole = len(x) - len(x) % 4
    return (torch.cat([summed(x[:whole]), summed(x[whole:].flip(-1))]),)


def test_the_sizes_that_agree_are_used_and_of_two_groups_the_larger():
    assert chosen(by_size(4)).sizes == (4, 6, 8, 12, 16, 24, 32)
    assert chosen(by_size(24)).sizes == (1, 2, 3, 4, 6, 8, 12, 16)
    assert chosen(by_size(100)).sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def test_a_size_at_which_the_last_rows_are_computed_in_another_way_is_not_used():
    assert chosen(at_the_end).sizes == (4, 8, 12, 16, 24, 32)


def test_only_sizes_are_used_that_the_cell_has():
    assert chosen(by_size(4), (2, 5, 17)).sizes == (5, 17)
    assert chosen(by_size(4), (3,)).sizes == (3,)


def test_a_difference_in_one_place_of_the_largest_size_is_found():
    def one_place(x: Tensor) -> tuple[Tensor, ...]:
        made = summed(x)
        if len(x) == 32:
            made[30] = summed(x[30:31].flip(-1))[0]
        return (made,)

    assert chosen(one_place).sizes[-1] == 24


def test_a_rare_difference_in_16_bits_is_found():
    def rare(x: Tensor) -> tuple[Tensor, ...]:
        made = (x.float() * 1.25).bfloat16()
        return (torch.where((x == x.abs().amax(-1, keepdim=True)) & (x > 3) & (len(x) > 8), made + 1, made),)

    rows = (torch.randn(5, 6).bfloat16(),)
    made = with_same_bits(rare, rows, SIZES, "cell 'x'", num_outputs=1, is_seen=True, is_large=False)
    assert made.sizes == (1, 2, 3, 4, 6, 8)


def test_batches_of_other_sizes_are_cut_and_padded():
    called: list[int] = []

    def program(x: Tensor) -> tuple[Tensor, ...]:
        called.append(len(x))
        return (2 * x, x)

    run, rows = SameBits(program, (4, 8), 1), torch.arange(19.0).view(19, 1)
    (made,) = run(rows)
    assert called == [8, 8, 4]
    assert torch.equal(made, 2 * rows)
    called.clear()
    assert torch.equal(run(rows[:1])[0], 2 * rows[:1])
    assert called == [4]


def test_batches_begin_at_addresses_that_do_not_change_the_kernel():
    at: list[int] = []

    def program(x: Tensor) -> tuple[Tensor, ...]:
        at.append(x.data_ptr() % ALIGNMENT)
        return (x + 1,)

    rows = torch.zeros(40, 3)
    for first in range(5):
        SameBits(program, (1, 2))(rows[first : first + 7])
    assert set(at) == {0}


def test_a_cell_without_any_such_size_is_refused():
    with pytest.raises(RowsError, match=r"cell 'x': deterministic=True needs a batch size .* none of 6, 7 is one"):
        chosen(at_the_end, (6, 7))


def test_what_decides_on_integers_and_cannot_be_seen_runs_row_by_row():
    assert chosen(by_size(100), is_seen=False).sizes == (1,)
    with pytest.raises(RowsError, match="Let batch_sizes have 1"):
        chosen(by_size(100), (2, 4), is_seen=False)


def test_made_up_rows_that_the_program_refuses_are_left_out():
    def program(x: Tensor) -> tuple[Tensor, ...]:
        assert bool((x.sum(-1) == 6).all()), "not a row of ones"
        return by_size(4)(x)

    rows = (torch.ones(3, 6),)
    made = with_same_bits(program, rows, SIZES, "cell 'x'", num_outputs=1, is_seen=True, is_large=False)
    assert made.sizes[-1] == 32


# --- modules ----------------------------------------------------------------------------------------------------------


def bound(module: nn.Module, *inputs: ValueSpec, sizes: tuple[int, ...] = SIZES) -> BoundCell:
    return bind(module, inputs or (ROW,), name="cell", trial=TrialRows((), sizes), deterministic=True)


def bits(values: Tensor) -> bytes:
    return bytes(values.contiguous().view(torch.uint8).numpy())


class Scores(nn.Module):
    """A function of scores."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Untraced(Scores):
    """The same in Python that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) > 1e30:
            return super().forward(-x)
        return super().forward(x)


def test_the_scores_behind_an_argmax_decide_though_the_tokens_agree():
    def program(x: Tensor) -> tuple[Tensor, ...]:
        scores = by_size(4)(x)[0]
        return (x.argmax(-1), scores)

    assert chosen(program).sizes == (4, 6, 8, 12, 16, 24, 32)
    assert len(chosen(program)(torch.zeros(5, 6))) == 1


def test_scores_are_found_behind_all_that_makes_integers_of_them():
    def decided_by(function: Callable[[Tensor], Any]) -> list[str]:
        graph = lift(traced(Scores(function), (ROW,)))
        return [node.name for node in decides(graph)]

    assert decided_by(lambda x: (2 * x).argmax(-1)) == ["mul"]
    assert decided_by(lambda x: ((3 * x).sort(-1)[1], x.exp().long())) == ["mul", "exp"]
    assert decided_by(lambda x: (x + 1).sigmoid() > 0.5) == ["sigmoid"]
    assert decided_by(lambda x: (x + 1).sigmoid()) == []
    assert decided_by(lambda x: torch.where(x > 0, x.exp(), x)) == []


def test_integers_of_a_module_that_is_no_graph_are_computed_row_by_row():
    assert "in batches of 1 rows" in bound(Untraced(lambda x: x.argmax(-1))).notes[-1]
    assert (
        "in batches of 1 rows"
        in bound(bm.opaque(lambda x: x.argmax(-1), inputs=[6], outputs=[((), "int64")])).notes[-1]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [5, 16, 130])
def test_a_row_has_the_same_bits_in_every_place_of_every_batch(width, dtype):
    torch.manual_seed(0)
    row, number = ValueSpec((width,), dtype), getattr(torch, dtype)
    cell = bound(LstmRows(width, number), row, row, row)
    rows = [torch.randn(32, width).to(number) for _ in range(3)]
    alone = [
        [bits(made) for made in cell.call(tuple([values[i : i + 1].clone() for values in rows]))] for i in range(32)
    ]
    for count in (2, 3, 5, 7, 16, 31, 32):
        for first in sorted({0, min(1, 32 - count), 32 - count}):
            made = cell.call(tuple([values[first : first + count] for values in rows]))
            assert [[bits(part[i]) for part in made] for i in range(count)] == alone[first : first + count]


class LstmRows(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width, dtype=dtype)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.cell(x, (h, c))


def test_a_step_of_a_chain_has_the_bits_of_a_single_node():
    torch.manual_seed(0)
    cell = bound(LstmRows(6, torch.float32), ROW, ROW, ROW)
    split = cell.split(1)
    x, h, c = (torch.randn(9, 6) for _ in range(3))
    wanted = cell.call((x, h, c))
    made = split.step(split.hoist((x,)), (h, c))
    assert [bits(part) for part in made] == [bits(part) for part in wanted]
    assert split.loop is None
    assert split.loop_for(9) is None


def test_nothing_is_chosen_by_measured_times():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    cell = bound(network, ValueSpec((2, 6), "float32"), sizes=(1, 2, 4))
    cell.warm_up((1, 2, 4))
    assert cell.node_loop_for(1) is None
    rows = torch.randn(4, 2, 6)
    assert torch.allclose(cell.call((rows,))[0], network(rows), atol=1e-5)


def test_a_module_that_draws_from_torch_is_refused_and_told_what_to_use():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    with pytest.raises(RowsError, match=r"cell 'cell': draws random numbers from torch.*with bm\.sampling"):
        bound(Noisy())
