"""What one request does wrong is that request's error, whatever its neighbours are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import HIDDEN, POISON, VOCABULARY, Accumulate, Count, Encode, Poisoned, Sums, assert_balanced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import (
    BatchmakerError,
    CancelledError,
    CellError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
    NodeLimitError,
    ShapeError,
)
from insides import cancel


class Join(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - 2 * right


class Forms(bm.Model):
    """A model of many forms: each request brings its own unfold function, by name."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder = bm.Cell(Encode())
        self.add = bm.Cell(Accumulate(), max_shapes=1)
        self.join = bm.Cell(Join())
        self.grow = bm.Cell(Count(), host_outputs=(0,))

    def unfold(self, do: Callable[[Forms], Any]) -> Any:
        return do(self)


class WaitingForms(Forms):
    def unfold(self, do: Callable[[Forms], Any]) -> Any:
        yield from iter_all(do(self))


def iter_all(values: Any) -> Iterator[Any]:
    """As `iter`, but ready for `send`."""
    yield from (value for value in values)


def rows(*xs: float) -> list[list[float]]:
    return [[float(x)] for x in xs]


def good(model: Forms) -> Any:
    h, _ = model.encoder.run([3, 4])
    return [model.add.run(rows(1, 2, 3), ([0.0],)), model.join.tree([[0, 1]], model.add.map(rows(1, 2), rows(0, 0))), h]


def check_good(answer: Any) -> None:
    assert answer[0].tolist() == [6.0]
    assert answer[1].tolist() == [[-3.0]]
    assert answer[2].shape == (HIDDEN,)


def raising(model: Forms) -> Any:
    raise LookupError("no such thing")


def recursive(model: Forms) -> Any:
    answer: list[Any] = [model.add([1.0], [0.0])]
    answer.append(answer)
    return answer


class Unbuildable(list):  # type: ignore[type-arg]
    """A list that cannot be made anew from its elements."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__([one, two])


BAD: dict[str, tuple[Callable[[Any], Any], type[BatchmakerError], str]] = {
    "wrong shape": (lambda m: m.add([1.0, 2.0], [0.0]), ShapeError, r"'add'.*shape \(2,\), expected \(1,\)"),
    "wrong shape of a sequence": (lambda m: m.add.run([[1.0, 2.0]], ([0.0],)), ShapeError, "'add'.*shape"),
    "rows of several shapes": (lambda m: m.add.run([[1.0], [1.0, 2.0]], ([0.0],)), ShapeError, "'add'.*one shape"),
    "wrong state": (lambda m: m.add.run(rows(1), ([0.0, 1.0],)), ShapeError, "'add', input 1"),
    "too many states": (lambda m: m.add.run(rows(1), ([0.0], [1.0])), InvalidRequestError, "'add'"),
    "wrong dtype": (lambda m: m.add([True], [0.0]), ShapeError, "bool, expected float32"),
    "words for numbers": (lambda m: m.encoder.run(["a", "b"]), ShapeError, "'encoder', input 0"),
    "numbers for words": (lambda m: m.encoder.run([1.5, 2.0]), ShapeError, "'encoder', input 0.*float64"),
    "a value of another shape": (lambda m: m.add(m.encoder.run([1])[0], [0.0]), ShapeError, "'add', input 0"),
    "token too large": (
        lambda m: m.encoder.run([1, VOCABULARY]),
        InvalidRequestError,
        f"token {VOCABULARY} at position 1 .*0..{VOCABULARY - 1}",
    ),
    "token below zero": (lambda m: m.encoder.run(np.array([-1, 1])), InvalidRequestError, "token -1 at position 0"),
    "empty sequence": (lambda m: m.encoder.run([]), InvalidRequestError, "'encoder', input 0.*empty"),
    "empty map": (lambda m: m.join.map(np.zeros((0, 1)), np.zeros((0, 1))), InvalidRequestError, "'join'.*empty"),
    "no sequence": (lambda m: m.encoder.run(5), InvalidRequestError, "'encoder', input 0.*single value"),
    "sequences of two lengths": (lambda m: m.join.map(rows(1), rows(1, 2)), InvalidRequestError, "different lengths"),
    "too few inputs": (lambda m: m.add([1.0]), InvalidRequestError, "takes 2 inputs, got 1"),
    "too many inputs": (lambda m: m.add([1.0], [1.0], [1.0]), InvalidRequestError, "takes 2 inputs, got 3"),
    "too few maps": (lambda m: m.add.map(rows(1)), InvalidRequestError, "takes 2 inputs, got 1"),
    "too many maps": (lambda m: m.add.map(rows(1), rows(1), rows(1)), InvalidRequestError, "takes 2 inputs, got 3"),
    "no steps": (lambda m: m.grow.loop(([1.0],), max_steps=0), InvalidRequestError, "max_steps >= 1"),
    "raises": (raising, InvalidRequestError, "unfold raised LookupError: no such thing"),
    "exhausts an iterator": (lambda m: next(iter([])), InvalidRequestError, "StopIteration"),
    "divides by zero": (lambda m: 1 / 0, InvalidRequestError, "ZeroDivisionError"),
    "recursive result": (recursive, BatchmakerError, "RecursionError"),
    "result of a strange type": (
        lambda m: Unbuildable(m.add([1.0], [0.0]), 1),
        InvalidRequestError,
        "TypeError.*Unbuildable",
    ),
    "not a function": (None, InvalidRequestError, "not callable"),  # type: ignore[dict-item]
    "branches on a value": (lambda m: 1 if m.add([1.0], [0.0]) else 2, ModelError, "yield"),
    "unpacks one output": (lambda m: [*m.add([1.0], [0.0])], ModelError, "one output"),
    "steps of a node": (lambda m: m.add([1.0], [0.0]).steps, ModelError, "steps"),
    "steps of an open loop used": (
        lambda m: m.add.run(m.grow.loop(([1.0],), until=3.0, max_steps=3).steps, ([0.0],)),
        ModelError,
        "yield",
    ),
    **{
        f"children {children}": (
            lambda m, c=children: m.join.tree(c, m.add.map(rows(1, 2), rows(0, 0))),
            InvalidRequestError,
            "'join'|children",
        )
        for children in (
            [[0, 2]], [[-1, 0]], [[0, 1], [2, 9]], [], [[0]], [0, 1], [[0, 1, 1]], "leaves", [[0, 1], [2]],
        )
    },
    "leaves that are no rows": (lambda m: m.join.tree([[0, 1]], [1, 2]), ShapeError, "'join', input 0"),
    "too many nodes": (lambda m: m.add.run(rows(*range(60)), ([0.0],)), NodeLimitError, "more than 50 nodes"),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[bm.Engine]:
    with bm.Engine(Forms(), threads=1, max_nodes=50) as engine:
        check_good(engine.submit(good).result())
        yield engine
    assert_balanced(engine)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone_and_says_why(engine: bm.Engine, name: str) -> None:
    bad, kind, message = BAD[name]
    futures = [engine.submit(request) for request in (good, bad, good)]
    with pytest.raises(kind, match=message):
        futures[1].result(60)
    check_good(futures[0].result(60))
    check_good(futures[2].result(60))


WAITING_BAD: dict[str, tuple[Callable[[Any], Any], type[BatchmakerError], str]] = {
    "yields nothing": (lambda m: [None], InvalidRequestError, "yielded NoneType; yield a value"),
    "yields a number": (lambda m: [3], InvalidRequestError, "yielded int"),
    "yields an empty list": (lambda m: [[]], InvalidRequestError, "yielded list"),
    "yields garbage later": (lambda m: [m.add([1.0], [0.0]), object()], InvalidRequestError, "yielded object"),
    "raises later": (lambda m: (m.add([1.0], [0.0]) if i == 0 else 1 / 0 for i in range(2)), BatchmakerError, "Zero"),
    "never ends": (
        lambda m: (m.add([1.0], [0.0]) for _ in iter(int, 1)),
        NodeLimitError,
        "more than 50 nodes",
    ),
    "waits for one value for ever": (
        lambda m: (lambda value: (value for _ in iter(int, 1)))(m.add([1.0], [0.0])),
        NodeLimitError,
        "more than 50 times",
    ),
    "wrong shape later": (
        lambda m: (m.add([1.0] * (1 + i), [0.0]) for i in range(2)),
        ShapeError,
        "'add', input 0",
    ),
}


@pytest.mark.parametrize("name", WAITING_BAD)
def test_a_bad_waiting_request_fails_alone(name: str) -> None:
    bad, kind, message = WAITING_BAD[name]
    with bm.Engine(WaitingForms(), threads=1, max_nodes=50) as engine:
        futures = [engine.submit(r) for r in (lambda m: [m.add([2.0], [1.0])], bad, lambda m: [m.add([3.0], [1.0])])]
        with pytest.raises(kind, match=message):
            futures[1].result(60)
        assert [futures[i].result(60)[0].tolist() for i in (0, 2)] == [[3.0], [4.0]]
    assert_balanced(engine)


def test_a_value_of_another_request_is_refused_even_where_its_number_would_do() -> None:
    """Handles belong to their request: one that is kept on the model must not bring the engine down."""
    kept: list[Any] = []

    def keep(model: Forms) -> Any:
        kept.append(model.add([1.0], [0.0]))
        return kept[0]

    def use(model: Forms) -> Any:
        own = [model.add([1.0], [0.0]) for _ in range(3)]
        return model.add([1.0], kept[0]), own

    with bm.Engine(Forms(), threads=1) as engine:
        engine.submit(keep).result(60)
        futures = [engine.submit(bad) for bad in (use, lambda m: (use, kept[0]))]
        for future in futures:
            with pytest.raises(InvalidRequestError, match="got a value of another request"):
                future.result(60)
        check_good(engine.submit(good).result(60))
    assert_balanced(engine)


# --- parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [{"xs": [1], "unknown": 2}, {"form": "run"}, {}, 5, None, "abc"])
def test_parameters_that_unfold_does_not_have_are_refused(request_: Any) -> None:
    with bm.Engine(Sums(), threads=1) as engine:
        good, bad = engine.submit([1, 2]), engine.submit(request_)
        with pytest.raises(InvalidRequestError, match=r"Sums\.unfold"):
            bad.result(60)
        assert float(good.result(60)) == 3.0


# --- cells that raise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("form", ["run", "nodes"])
@pytest.mark.parametrize("where", ["sequence", "state"])
def test_a_cell_that_raises_fails_the_requests_whose_rows_make_it(where: str, form: str, workers: int) -> None:
    requests: list[Any] = [[1, 2, 3], [5, POISON - 5, 1], [POISON, 1], [4] * 9, [POISON - 1, 1, 1, 1], [2]]
    poisoned = {
        "sequence": lambda xs: POISON in xs,
        "state": lambda xs: POISON in np.cumsum(xs)[:-1],
    }[where]
    with bm.Engine(Sums(Poisoned(where)), threads=1, workers=workers) as engine:
        engine.map([[0]])
        futures = [engine.submit({"xs": xs, "form": form}) for xs in requests * 3]
        for xs, future in zip(requests * 3, futures, strict=True):
            if poisoned(xs):
                with pytest.raises(CellError, match="cell 'add' raised ValueError: poison"):
                    future.result(60)
            else:
                assert float(future.result(60)) == sum(xs)
    assert_balanced(engine)


def test_a_cell_that_raises_in_its_hoisted_part_fails_only_the_row_at_fault() -> None:
    """An embedding whose vocabulary cannot be known: it is reached through arithmetic, before the state is."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 2)
            self.cell = nn.GRUCell(2, 2)

        def forward(self, word: Tensor, h: Tensor) -> Tensor:
            return self.cell(self.embed(word * 3), h)

    class Words(bm.Model):
        def __init__(self) -> None:
            self.cell = bm.Cell(Shifted())

        def unfold(self, request: list[int]) -> Any:
            return self.cell.run(request)

    with bm.Engine(Words(), threads=1) as engine:
        alone = engine.map([[1, 2], [3, 0, 1]])
        futures = [engine.submit(words) for words in ([1, 2], [1, 8, 2], [3, 0, 1])]
        with pytest.raises((CellError, InvalidRequestError), match="cell"):
            futures[1].result(60)
        torch.testing.assert_close([futures[0].result(60), futures[2].result(60)], alone)
    assert_balanced(engine)


def test_a_cell_whose_output_has_the_wrong_rows_fails_and_does_not_stop_the_worker() -> None:
    class Ragged(nn.Module):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            if bool((x == POISON).any()):
                return torch.zeros(len(x), 3)
            return x + total

    with bm.Engine(Sums(Ragged()), threads=1) as engine:
        assert float(engine.submit([1, 2]).result(60)) == 3.0
        for form in ("nodes", "run"):
            with pytest.raises(CellError):
                engine.submit({"xs": [1, POISON, 2], "form": form}).result(60)
            assert float(engine.submit({"xs": [1, 2], "form": form}).result(60)) == 3.0
    assert_balanced(engine)


@pytest.mark.parametrize(
    "until",
    [lambda values: 1 / 0, lambda values: np.zeros((len(values), 7)), np.zeros(3)],
    ids=["raises", "wide", "array"],
)
def test_a_stop_test_that_raises_fails_its_own_request(until: Any) -> None:
    class Loops(bm.Model):
        def __init__(self) -> None:
            self.count = bm.Cell(Twice(), host_outputs=(0,))

        def unfold(self, request: Any) -> Any:
            return self.count.loop(1, until=request, max_steps=20).steps

    class Twice(nn.Module):
        def forward(self, n: Tensor) -> Tensor:
            return 2 * n

    with bm.Engine(Loops(), threads=1) as engine:
        futures = [engine.submit(request) for request in (16, until, lambda values: values > 30)]
        with pytest.raises(CellError, match="until of cell 'count' raised"):
            futures[1].result(60)
        assert futures[0].result(60).tolist() == [2, 4, 8, 16]
        assert futures[2].result(60).tolist() == [2, 4, 8, 16, 32]
    assert_balanced(engine)


# --- everything at once -------------------------------------------------------------------------------

KINDS = ("good", "nodes", "poison", "garbage", "late", "cancelled")


@settings(max_examples=12)
@given(
    mix=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 12)), min_size=1, max_size=40),
    workers=st.integers(1, 2),
    run_ahead=st.integers(0, 2),
)
def test_each_request_of_any_mix_is_settled_exactly_once(mix: Any, workers: int, run_ahead: int) -> None:
    settled: list[int] = []
    engine = bm.Engine(Sums(Poisoned(), batch_sizes=[1, 3, 8]), threads=1, workers=workers, run_ahead=run_ahead)
    engine.on_settled = lambda ticket, error: settled.append(ticket.request_id)
    with engine:
        futures = []
        for kind, length in mix:
            xs: list[Any] = [float(i % 3) for i in range(length)]
            if kind == "poison":
                xs[length // 2] = float(POISON)
            if kind == "garbage":
                xs[-1] = "garbage"
            request = {"xs": xs, "form": "nodes" if kind == "nodes" else "run"}
            if kind == "cancelled":
                stream = iter(engine.submit(request, stream=True))
                if length > 6:
                    next(stream)
                stream.close()
                cancel(engine, len(futures))
                futures.append((kind, xs, None))
            else:
                deadline_ms = {"late": -1.0}.get(kind)
                futures.append((kind, xs, engine.submit(request, deadline_ms=deadline_ms)))
        for kind, xs, future in futures:
            if future is None:
                continue
            error = future.exception(60)
            expected = {"poison": CellError, "garbage": InvalidRequestError, "late": DeadlineError}.get(kind)
            if expected is None:
                assert error is None
                assert float(future.result()) == sum(xs)
            else:
                assert isinstance(error, expected), (kind, error)
    assert sorted(settled) == list(range(len(mix)))
    assert_balanced(engine)


def test_cancelled_errors_are_request_errors() -> None:
    assert issubclass(CancelledError, BatchmakerError)
