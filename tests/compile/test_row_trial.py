"""A cell is tried when it is bound: rows that depend on each other are refused and named, right cells never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batchmaker.compile.binding import bind
from batchmaker.compile.row_trial import CHANCE, RANDOM, TrialRows
from batchmaker.errors import ModelError, RowsError
from batchmaker.graph.spec import ValueSpec
from covering import covering

ROW = (ValueSpec((4,), "float32"),)
TOKEN = (ValueSpec((), "int64"),)


class Function(nn.Module):
    """A function of a linear layer's output."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def ranked(y: Tensor) -> Tensor:
    return torch.unique(y[:, 0], return_inverse=True)[1]


MIXES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a mean": (lambda y: y - y.mean(0), "mean over dimension 0"),
    "a softmax": (lambda y: y.softmax(0), "softmax over dimension 0"),
    "a running sum": (lambda y: y.cumsum(0), "cumsum over dimension 0"),
    "the largest": (lambda y: y / y.abs().amax(), "amax"),
    "a sort": (lambda y: y.sort(0)[0], "sort"),
    "rolled": (lambda y: y.roll(1, 0), "roll over dimension 0"),
    "turned round": (lambda y: y.flip(0), "flip over dimension 0"),
    "the first row": (lambda y: y - y[0], "select over dimension 0"),
    "the last row": (lambda y: y + y[-1], "select over dimension 0"),
    "the number of rows": (lambda y: y / y.shape[0], "div"),
    "batch statistics": (lambda y: F.layer_norm(y.T, (len(y),)).T, "layer_norm"),
    "ranks": (ranked, "unique"),
    "one row's choice": (lambda y: y.argmax(0)[0].expand(len(y)), "argmax over dimension 0"),
    "attention over the batch": (lambda y: (y @ y.T).softmax(-1) @ y, "mm"),
    "a branch on a sum": (lambda y: y if float(y.sum()) > 0 else -y, "sum"),
    "a branch on any": (lambda y: -y if bool((y > 30).any()) else y, "any"),
    "a branch on the number of rows": (lambda y: y if len(y) < 40 else -y, ""),
    "a loop up to a value": (lambda y: y * int(y.abs().max() + 1), "max"),
    "rows in order of their size": (lambda y: y[y[:, 0].argsort()], "sort"),
    "the first row's length": (lambda y: torch.where(torch.arange(4) < y[0].abs().sum(), y, 0), ""),
    "no smaller than the mean": (lambda y: torch.where(y >= y.mean(0), y, -y), "mean over dimension 0"),
    "above the median": (lambda y: (y >= y.median(0).values).float(), "median over dimension 0"),
    "among the three largest": (lambda y: y * (y[:, :1] >= y[:, 0].topk(min(3, len(y))).values[-1]), "select"),
    "a difference to the next": (lambda y: y - torch.cat([y[1:], y[:1]]), "cat"),
}


@pytest.mark.parametrize("name", MIXES)
def test_rows_that_depend_on_each_other_are_refused_and_the_operation_is_named(name: str) -> None:
    function, operation = MIXES[name]
    with pytest.raises(RowsError, match="cell 'mix', output 0: a row gives other numbers among") as raised:
        bind(Function(function), ROW, name="mix", trial=TrialRows(batch_sizes=tuple(range(1, 65))))
    assert operation in str(raised.value)
    assert "independent_rows=False" in str(raised.value)


def test_the_line_that_mixes_them_is_named() -> None:
    with pytest.raises(RowsError, match=r"softmax over dimension 0 at test_row_trial\.py:\d+"):
        bind(Function(lambda y: y.softmax(0)), ROW, name="mix")


@pytest.mark.parametrize("name", ["a mean", "the first row", "a branch on a sum", "a softmax"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_they_are_refused_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    specs = (ValueSpec((4,), str(dtype).removeprefix("torch.")),)
    with pytest.raises(RowsError):
        bind(Function(MIXES[name][0], dtype), specs, name="mix")


class Tokens(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.embed = function, nn.Embedding(50, 4)

    def forward(self, word: Tensor) -> Any:
        return self.function(self.embed(word), word)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, _: y - y.mean(0),  # folded into a table over the vocabulary, it would be another mean
        lambda y, word: y if bool((word == 2).any()) else -y,
        lambda y, word: y if bool((word > 40).any()) else -y,
        lambda y, word: y if bool((word == 11).all()) else -y,
        lambda y, word: word - word.min(),
        lambda y, word: word.cumsum(0),
    ],
)
def test_tokens_that_depend_on_each_other_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RowsError):
        bind(Tokens(function), TOKEN, name="words")


class Normed(nn.Module):
    """BatchNorm that uses the statistics of the batch in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


def test_batch_norm_over_the_batch_is_refused_and_named() -> None:
    with pytest.raises(RowsError, match="batch_norm"):
        bind(Normed(), (ValueSpec((3, 4, 4), "float32"),), name="norm")
    bind(nn.BatchNorm2d(3), (ValueSpec((3, 4, 4), "float32"),), name="norm")  # in eval mode it does not mix


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Remembers(nn.Module):
    """Keeps its last state outside the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None or self.last.shape != x.shape:
            self.last = torch.zeros_like(x)
        self.last = self.last * 0.5 + x
        return self.last


class Caches(nn.Module):
    """Gives what it gave before for as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.seen.setdefault(len(x), x * 2) * 1


@pytest.mark.parametrize("module", [Counts(), Remembers(), Caches()], ids=["counts", "remembers", "caches"])
def test_what_is_kept_between_calls_is_refused(module: nn.Module) -> None:
    with pytest.raises(RowsError, match=r"when it comes again|among \d+ rows than alone"):
        bind(module, ROW, name="keeps")


RIGHT: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda y: y,
    "a mean of each row": lambda y: y - y.mean(-1, keepdim=True),
    "a choice": lambda y: y.argmax(-1),
    "not a number": lambda y: y.log(),
    "infinite": lambda y: (y * 100).exp(),
    "a difference of large numbers": lambda y: (y + 1e6) - 1e6,
    "chaos": lambda y: (1e7 * y).sin(),
    "a step": lambda y: (y > 0).float(),
    "rounded": lambda y: (y * 1e3).round(),
    "a branch on the shape": lambda y: y if y.shape[1] == 4 else -y,
    "a branch for all rows that comes to the same": lambda y: y.relu() if bool((y < 0).any()) else y,
    "sorted within": lambda y: y.sort(-1)[0],
    "through time first": lambda y: y.T.contiguous().T,
    "flat and back": lambda y: y.reshape(-1).view(-1, 4),
    "no rows of its own": lambda y: torch.arange(4.0).expand(len(y), 4),
    "repeated and undone": lambda y: y.repeat_interleave(2, 0).view(-1, 2, 4).sum(1),
    "each against each of itself": lambda y: (y[:, :, None] * y[:, None, :]).softmax(-1),
}


@pytest.mark.parametrize(("dtype", "name"), covering(["float32", "bfloat16", "float16", "float64"], RIGHT))
def test_a_right_cell_is_never_refused(name: str, dtype: str) -> None:
    bound = bind(Function(RIGHT[name], getattr(torch, dtype)), (ValueSpec((4,), dtype),), name="right")
    assert not any("other numbers" in note for note in bound.notes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_choice_between_scores_that_are_nearly_equal_is_not_refused(dtype: str) -> None:
    """Many classes in a coarse dtype: the best two are often equal, and rounding decides."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5000)).to(getattr(torch, dtype))

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = module

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x).argmax(-1)

    bind(Choice(), (ValueSpec((64,), dtype),), name="choice")


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


@pytest.mark.parametrize(
    "module",
    [Dropped(), Function(lambda y: y + torch.rand(len(y), 1)), Function(lambda y: torch.multinomial(y.softmax(-1), 1))],
    ids=["dropout", "noise", "a sample"],
)
def test_torchs_random_numbers_are_allowed_and_a_note_says_that_rows_were_compared_without_them(
    module: nn.Module,
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert RANDOM in bind(module, ROW, name="random").notes
    assert torch.equal(torch.get_rng_state(), before)  # a trial draws nothing from the user's generator


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.dropout(y - y.mean(0), 0.1, training=True),
        lambda y: y - y[0] + torch.rand(1),
        lambda y: y.softmax(0) * torch.bernoulli(torch.full_like(y, 0.9)),
    ],
    ids=["dropout", "noise", "a mask"],
)
def test_rows_that_mix_are_found_beside_random_numbers(function: Callable[..., Any]) -> None:
    with pytest.raises(RowsError, match="a row gives other numbers among"):
        bind(Function(function), ROW, name="random")


def test_a_note_says_so_if_rows_could_not_be_compared_without_chance() -> None:
    noisy = Function(lambda y: y + torch.empty(1).exponential_() + _positive(torch.randint(1, 5, (1,))))
    assert CHANCE in bind(noisy, ROW, name="random").notes


def _positive(count: Tensor) -> Tensor:
    if int(count) < 1:
        raise ValueError("a count is at least 1")
    return count


def test_a_row_whose_shape_depends_on_another_row_is_refused() -> None:
    with pytest.raises(RowsError, match=r"alone a row gives rows of \(\d,\), but rows of \(\d,\) behind another row"):
        bind(Function(lambda y: y[:, y[0] > 0]), ROW, name="chosen")


def test_outputs_without_numbers_are_taken() -> None:
    cell = bind(Function(lambda y: (y[:, :0], y)), ROW, name="empty")
    assert [spec.shape for spec in cell.outputs] == [(0,), (4,)]


def test_other_chance_is_refused() -> None:
    import random

    with pytest.raises(RowsError, match="nor on chance"):
        bind(Function(lambda y: y + random.random()), ROW, name="chance")


# --- real values ---------------------------------------------------------------------------------------------------


class Positive(nn.Module):
    """Takes a share in (0, 1) and refuses any other number."""

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        if bool(((share <= 0) | (share >= 1)).any()):
            raise ValueError("share must be between 0 and 1")
        return x * share[:, None]


SHARED = (*ROW, ValueSpec((), "float32"))


def test_a_cell_that_takes_only_some_values_is_tried_with_the_real_ones_and_near_them() -> None:
    real = (torch.ones(1, 4), torch.tensor([0.9]))
    bound = bind(Positive(), SHARED, name="share", trial=TrialRows(real))
    assert torch.allclose(bound.sample[0], torch.full((1, 4), 0.9))
    bound.warm_up((1, 2, 4))


def test_rows_that_mix_are_found_though_only_some_values_are_taken() -> None:
    class Mixed(Positive):
        def forward(self, x: Tensor, share: Tensor) -> Tensor:
            return super().forward(x, share) - share.mean()

    with pytest.raises(RowsError, match="mean"):
        bind(Mixed(), SHARED, name="share", trial=TrialRows((torch.ones(1, 4), torch.tensor([0.5]))))


def test_the_error_is_the_cells_own_and_blames_no_dtype() -> None:
    with pytest.raises(ModelError, match="share must be between 0 and 1") as raised:
        bind(Positive(), SHARED, name="share", trial=TrialRows((torch.ones(1, 4), torch.tensor([7.0]))))
    assert "expected int64" not in str(raised.value)


# --- forms and sizes -----------------------------------------------------------------------------------------------


class OnlyOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 1:
            raise ValueError("one row at a time")
        return x - x.mean(0) + 1


def test_a_cell_is_tried_only_at_sizes_at_which_it_runs() -> None:
    assert bind(OnlyOne(), ROW, name="one", trial=TrialRows(batch_sizes=(1,))).call((torch.ones(1, 4),))[
        0
    ].tolist() == [[1.0] * 4]
    with pytest.raises(ModelError, match="one row at a time"):
        bind(OnlyOne(), ROW, name="one")

    class Fours(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) % 4:
                raise ValueError("fours")
            return x * 2

    bind(Fours(), ROW, name="fours", trial=TrialRows(batch_sizes=(4, 8)))
    with pytest.raises(RowsError):
        bind(Function(lambda y: y - y.mean(0)), ROW, name="fours", trial=TrialRows(batch_sizes=(4, 8)))


class Hoisted(nn.Module):
    """The part that needs no state mixes rows: alone it is right, hoisted for all steps of a task it would not be."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return h + x.softmax(0)


def test_a_form_that_would_give_other_numbers_is_not_used() -> None:
    bound = bind(Hoisted(), ROW * 2, name="chain", num_step_inputs=1, trial=TrialRows(batch_sizes=(1,)))
    assert any("left as it is" in note for note in bound.notes)
    x, h = torch.randn(3, 4), torch.zeros(1, 4)
    hoisted = bound.hoist((x,))
    for k in range(3):
        (made,) = bound.step(tuple(rows[k : k + 1] for rows in hoisted), (h,))
        assert torch.equal(made, torch.ones(1, 4))


def test_row_by_row_a_cell_that_mixes_is_right_and_says_so() -> None:
    module = Function(lambda y: y - y.mean(0) + y.cumsum(0))
    bound = bind(module, ROW, name="mix", trial=TrialRows(batch_sizes=(1,), independent=False))
    assert bound.notes == ("runs row by row, as it is: independent_rows=False",)
    assert bound.identity != bind(nn.Identity(), ROW, name="other").identity


def test_a_large_cell_is_tried_too() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1600, 1600)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x).softmax(0)

    with pytest.raises(RowsError, match="softmax"):
        bind(Wide(), (ValueSpec((1600,), "float32"),), name="wide")
