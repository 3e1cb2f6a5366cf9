"""Tasks of single nodes in one compiled call give what the cell gives, row by row and step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.binding import OFTEN, BoundCell, bind
from batchmaker.compile.node_loop import NodeChoice, NodeLoop, NodeTask
from batchmaker.compile.node_steps import EACH
from batchmaker.compile.passes.interpreter import is_available
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.products import library
from batchmaker.lab import zoo
from covering import covering
from insides import node_loop

pytestmark = pytest.mark.skipif(
    not is_available() or not library().multiplies, reason="needs compiled loops and a library's product"
)

WIDTH = 32
TOKEN = ValueSpec((), "int64")
ROWS = ValueSpec((WIDTH,), "float32")


class Sum(nn.Module):
    """(x, y) -> (tanh(A x + B y + b), the same without tanh, and the place of the greatest)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = self.a(x) + self.b(y)
        return total.tanh(), total, total.argmax(-1)


class Named(nn.Module):
    """(word, x) -> relu(C tanh(word's row * x)) + x."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.c = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, word: Tensor, x: Tensor) -> Tensor:
        return self.c((self.embedding(word) * x).tanh()).relu() + x


class NoOutputs(nn.Module):
    """A linear layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Best(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2.0).argmax(1)


class HandedOn(nn.Module):
    """An input as it is, twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x.tanh() * 2.0, x


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values.tanh()


class FeedForward(nn.Module):
    """A block of a Transformer, and how sure the next class is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.root = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        most, label = self.root(x).softmax(-1).max(-1)
        return x, label, most > 0.5


class OverRows(nn.Module):
    """Operations over rows of two numbers of dimensions."""

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        most, place = s.max(-1, keepdim=True)
        return (
            x.softmax(-1), x.log_softmax(1), x.sum(-1), x.mean(1, keepdim=True), x.amax(-1), x.amin([1]), x.norm(dim=1),
            s.softmax(2), s.sum((1, 2)), s.mean(-1), most, place, s.min(-1).values, s.argmax(-1),
            nn.functional.normalize(x),
            nn.functional.layer_norm(x, (WIDTH,), eps=1e-3), nn.functional.layer_norm(s, (3, 4)),
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        )  # fmt: skip


class Broadcasting(nn.Module):
    """A state [n, inner, state] that is kept, written and read as in Mamba; rows are broadcast in each way."""

    def __init__(self, inner: int, state: int) -> None:
        super().__init__()
        self.parts = (inner, state, state)
        self.layer = nn.Linear(WIDTH, sum(self.parts))
        self.decay, self.scale = nn.Parameter(torch.empty(inner, state)), nn.Parameter(torch.empty(1, inner, 1))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        size, write, read = self.layer(x).tanh().split(self.parts, -1)
        kept = torch.exp(-size.abs()[..., None] * self.decay.square()) * state
        state = kept + (2 * size)[..., None] * write[:, None, :] * x.mean(-1)[:, None, None] + self.scale
        return (state * read[:, None, :]).sum(-1), state.sigmoid()


class OfColumns(nn.Module):
    """Sums of columns, which are left to torch."""

    def forward(self, s: Tensor) -> Tensor:
        return s.sum(1).tanh()


class Step(nn.Module):
    """(word, h, c) -> (h, c) of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(7, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.lstm(self.embedding(word), (h, c))
        return h, c


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)

    def forward(self, word: Tensor) -> Tensor:
        return (self.embedding(word) * 2.0).argmax(-1)


def bound(module: nn.Module, *inputs: ValueSpec) -> BoundCell:
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    return bind(module.eval().requires_grad_(False), inputs, name="cell")


def loop_of(cell: BoundCell) -> NodeLoop | None:
    return node_loop(cell)


def rows(cell: BoundCell, count: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(count)
    return tuple([
        torch.randn(count, *spec.shape, generator=made)
        if spec.dtype == "float32"
        else torch.randint(0, spec.num_tokens or 1, (count,), generator=made)
        for spec in cell.inputs
    ])  # fmt: skip


def of_zoo(name: str, cell: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: zoo.make(name, **options).cells[cell].module


CELLS: dict[str, tuple[Callable[[], nn.Module], Sequence[ValueSpec]]] = {
    "sum": (Sum, (ROWS, ROWS)),
    "named": (Named, (TOKEN, ROWS)),
    "best": (Best, (ROWS,)),
    "step": (Step, (TOKEN, ROWS, ROWS)),
    "feed forward": (FeedForward, (ROWS,)),
    "handed on": (HandedOn, (ROWS,)),
    "over rows": (OverRows, (ROWS, ValueSpec((3, 4), "float32"))),
    "early exit": (lambda: zoo.make("early-exit", width=WIDTH).blocks[0].module, (ROWS,)),
    "expert": (lambda: zoo.make("experts", width=WIDTH).experts[0][0].module, (ROWS, ValueSpec((), "float32"))),
    "gru": (lambda: nn.GRUCell(WIDTH, WIDTH), (ROWS, ROWS)),
    "tree leaf": (of_zoo("treelstm", "leaf", vocabulary_size=9, hidden=WIDTH), (TOKEN,)),
    "tree node": (of_zoo("treelstm", "inner", vocabulary_size=9, hidden=WIDTH), (ROWS,) * 4),
    "wide tree node": (of_zoo("treelstm", "inner", vocabulary_size=9, hidden=144), (ValueSpec((144,), "float32"),) * 4),
    "tag": (of_zoo("bilstm-tagger", "tag", vocabulary_size=9, hidden=WIDTH, layers=1), (ROWS, ROWS)),
}  # fmt: skip


@pytest.mark.parametrize(("count", "name"), covering([1, 2, 63, 255, 257, 600], CELLS))
def test_each_row_is_what_the_module_gives(name: str, count: int) -> None:
    make, inputs = CELLS[name]
    module = make()
    cell = bound(module, *inputs)
    loop = loop_of(cell)
    assert loop is not None
    given = rows(cell, count)
    wanted = module(*given)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for mine, right in zip(loop.call(given, cell.outputs), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=4e-6, atol=2e-6)


def test_the_greatest_is_the_first_of_equals_and_a_nan() -> None:
    cell = bound(Best(), ROWS)
    loop = loop_of(cell)
    assert loop is not None
    x = torch.zeros(4, WIDTH)
    x[1, 5] = x[1, 9] = 1.0
    x[2, 7], x[2, 3] = torch.nan, 9.0
    x[3] = -torch.inf
    (best,) = loop.call((x,), cell.outputs)
    assert best.tolist() == x.argmax(-1).tolist() == [0, 5, 7, 0]


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (OfColumns(), (ValueSpec((3, 4), "float32"),)),
        (Sorted(), (ROWS,)),
        (Best(), (ValueSpec((WIDTH,), "bfloat16"),)),
        (Best(), (ValueSpec((WIDTH,), "float64"),)),
        (nn.Linear(2048, 2049), (ValueSpec((2048,), "float32"),)),
        (NoOutputs(), (ROWS,)),
    ],
    ids=[
        "sums of columns",
        "sorts",
        "bfloat16",
        "float64",
        "more weights than are held twice",
        "no outputs",
    ],
)
def test_other_cells_have_no_loop(module: nn.Module, inputs: Sequence[ValueSpec]) -> None:
    assert loop_of(bound(module, *inputs)) is None


def test_rows_with_special_numbers_are_those_of_torch() -> None:
    cell = bound(OverRows(), ROWS, ValueSpec((3, 4), "float32"))
    loop = loop_of(cell)
    assert loop is not None
    x, s = torch.zeros(5, WIDTH), torch.zeros(5, 3, 4)
    x[1, 3], x[2, 4], x[3, 5], x[4, :] = torch.nan, torch.inf, -torch.inf, -torch.inf
    s[1, 1, 2], s[2, 0, 0], s[3, 2] = torch.nan, torch.inf, -torch.inf
    for output, (mine, right) in enumerate(zip(loop.call((x, s), cell.outputs), OverRows()(x, s), strict=True)):
        torch.testing.assert_close(mine, right, rtol=0, atol=2e-6, equal_nan=True, msg=str(output))


class Tables:
    """State tables for a cell of two inputs and three outputs: x, then one for each output."""

    def __init__(self, num_rows: int) -> None:
        made = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_rows, WIDTH, generator=made).numpy()
        self.outputs = [np.zeros((num_rows, WIDTH), np.float32) for _ in range(2)] + [np.zeros(num_rows, np.int64)]
        self.addresses = np.array([0, self.x.ctypes.data, *[table.ctypes.data for table in self.outputs]])


X, FIRST = 1, 2


def test_a_step_reads_what_the_step_before_has_kept_and_writes_after_it_has_read() -> None:
    cell = bound(Sum(), ROWS, ROWS)
    loop = loop_of(cell)
    assert loop is not None
    n = 150  # more rows than a block has
    tables = Tables(2 * n)
    places, none = np.arange(n), np.zeros(n, np.int64)
    back = places[::-1].copy()
    first = cell.call((torch.from_numpy(tables.x[:n]), torch.zeros(n, WIDTH)))
    # The second step reads the first one's rows turned round, and writes over the rows that its other half reads.
    second = cell.call((first[0][torch.from_numpy(back)], first[0]))
    done = loop.run(NodeTask(
        np.array([n, 2 * n]), n,
        np.array([[X] * n + [FIRST] * n, [0] * n + [FIRST] * n]),
        np.concatenate((places, back, none, places)).reshape(2, 2 * n), tables.addresses,
        np.arange(2 * n), np.concatenate((places, places)), np.array([FIRST, FIRST + 1, FIRST + 2]),
        (np.array([0, n + 3]),), (2,), (fetched := np.zeros(2, np.int64),),
    ))  # fmt: skip
    assert done
    for mine, right in zip(tables.outputs, second, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine[:n]), right, rtol=0, atol=2e-6)
    assert fetched.tolist() == [int(first[2][0]), int(second[2][3])]
    assert not any(table[n:].any() for table in tables.outputs)


def test_a_token_without_a_row_leaves_everything_as_it_was() -> None:
    cell = bound(Named(), TOKEN, ROWS)
    loop = loop_of(cell)
    assert loop is not None
    words, x = np.array([3, 7, 1]), np.ones((3, WIDTH), np.float32)
    out, places = np.zeros((3, WIDTH), np.float32), np.arange(3)
    task = NodeTask(
        np.array([3]), 3, np.repeat([1, 2], 3).reshape(2, 3), np.tile(places, (2, 1)),
        np.array([0, words.ctypes.data, x.ctypes.data, out.ctypes.data]), places, places, np.array([3]), (), (), (),
    )  # fmt: skip
    assert not loop.run(task)
    assert not out.any()
    words[1] = 6
    assert loop.run(task) == 1
    assert out.any(axis=1).all()


def test_the_steps_before_a_token_without_a_row_have_run() -> None:
    """Of a cell that reads the tokens that it has made: the second step's is too large."""
    cell = bound(NextToken(), TOKEN)
    loop = loop_of(cell)
    assert loop is not None
    words, said = np.array([3, 31, 0]), np.full(3, -1)
    (wanted,) = cell.call((torch.tensor([3]),))
    said[1] = 999
    task = NodeTask(
        np.array([1, 2, 3]), 1, np.array([[1, 2, 1]]), np.array([[0, 1, 2]]),
        np.array([0, words.ctypes.data, said.ctypes.data]), np.arange(3), np.array([0, 2, 2]), np.array([2]),
        (), (), (),
    )  # fmt: skip
    assert loop.run(task) == 1
    assert said.tolist() == [int(wanted), 999, -1]


TREES = [
    {"words": [1, 2, 3, 4], "children": [[0, 1], [4, 2], [5, 3]]},
    {"words": [5], "children": []},
    {"words": [5, 6, 7, 8], "children": [[0, 1], [2, 3], [4, 5]]},
]


@pytest.mark.parametrize(
    ("name", "options", "requests"),
    [
        ("treelstm", {"output": "state"}, TREES),
        ("treelstm", {"output": "labels"}, TREES),
        ("treegru", {"output": "labels"}, TREES),
        ("bilstm-tagger", {"layers": 1, "output": "scores"}, [[1, 2, 3], [4], [5, 6, 7, 8, 9]]),
    ],
    ids=str,
)
def test_an_engine_that_uses_the_loops_gives_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], requests: list[Any]
) -> None:
    ran: list[int] = []
    run = NodeLoop.run
    monkeypatch.setattr(NodeChoice, "fastest", lambda self, batch: self.loop)
    monkeypatch.setattr(NodeLoop, "run", lambda self, task: ran.append(task.largest) or run(self, task))
    model = zoo.make(name, vocabulary_size=10, hidden=WIDTH, max_batch=8, **options)
    with bm.Engine(model, threads=1) as engine:
        ran.clear()
        found = engine.map(requests * 9, progress=False)
    assert ran
    for mine, right in zip(found, model.batched(requests) * 9, strict=True):
        torch.testing.assert_close(torch.as_tensor(mine), right, rtol=0, atol=2e-6)


def test_a_cell_of_runs_that_is_a_single_node_too_is_tried_in_a_loop_once_it_runs_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A predictor is called where a value decides so, besides its first run."""

    class Emits(bm.Model):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.step = bm.Cell(Step())

        def unfold(self, words: list[int]) -> Any:
            h, c = self.step.run([0], (torch.zeros(WIDTH), torch.zeros(WIDTH)))
            for word in words:
                h, c = self.step(word, h, c)
            return h

    tried: list[NodeChoice] = []
    measure = NodeChoice.measure
    monkeypatch.setattr(NodeChoice, "measure", lambda self, *sizes: tried.append(self) or measure(self, *sizes))
    model = Emits()
    with bm.Engine(model, threads=1) as engine:
        for _ in range(2 * OFTEN):
            (found,) = engine.map([[1, 2, 3]], progress=False)
    (choice,) = tried
    assert len(choice.faster)
    module, h, c = model.step.module, torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)
    for word in (0, 1, 2, 3):
        h, c = module(torch.tensor([word]), h, c)
    torch.testing.assert_close(found, h[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("inner", "state"), [(12, 3), (1, 5), (5, 1), (100, 16), (43, 37)])
def test_operations_on_rows_of_several_dimensions_are_passes_over_flat_rows(inner: int, state: int) -> None:
    cell = bound(Broadcasting(inner, state), ROWS, ValueSpec((inner, state), "float32"))
    loop = loop_of(cell)
    assert loop is not None
    assert EACH not in loop._operations.operations[:, 0]
    given = rows(cell, 33)
    for made, value in zip(loop.call(given, cell.outputs), cell.call(given), strict=True):
        torch.testing.assert_close(made, value, rtol=1e-5, atol=1e-5)
