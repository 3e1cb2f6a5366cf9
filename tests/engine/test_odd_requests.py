"""Odd requests are served where nothing is lost, or fail alone: odd tensors, deep nesting, code that raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import Accumulate, assert_balanced
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, RequestError, RequestShapeError

ROWS = torch.tensor([[1.0, -2.0, 0.0, 4.0], [0.0, 3.0, -1.0, 2.0], [5.0, 0.0, 0.5, 1.0]])


class Subclass(Tensor):
    pass


class Linear(bm.Model):
    """At `single`, each row is the argument of a call of its own."""

    def __init__(self, *, single: bool) -> None:
        self.cell = bm.Cell(nn.Linear(4, 2))
        self.single = single

    def unfold(self, rows: Any) -> Any:
        return [self.cell(row) for row in rows] if self.single else self.cell.map(rows)


def as_negative(rows: Tensor) -> Tensor:
    """The same values with torch's bit that says they are to be negated: no view of NumPy has that."""
    negative = torch.complex(torch.zeros_like(rows), -rows).conj().imag
    assert negative.is_neg()
    return negative


def read_only(rows: Tensor) -> np.ndarray:
    array = rows.numpy().copy()
    array.flags.writeable = False
    return array


SERVED: dict[str, Callable[[], Any]] = {
    "negative bit": lambda: as_negative(ROWS),
    "sparse": lambda: ROWS.to_sparse(),
    "sparse by rows": lambda: ROWS.to_sparse_csr(),
    "mkldnn": lambda: ROWS.to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(ROWS, 0.5, 0, torch.qint8),
    "requires grad": lambda: ROWS.clone().requires_grad_(),
    "parameter": lambda: nn.Parameter(ROWS.clone()),
    "subclass": lambda: ROWS.as_subclass(Subclass),
    "not contiguous": lambda: ROWS.t().contiguous().t(),
    "float64": lambda: ROWS.double(),
    "bfloat16": lambda: ROWS.bfloat16(),
    "sparse rows": lambda: [row.to_sparse() for row in ROWS],
    "read only": lambda: read_only(ROWS),
    "big endian": lambda: ROWS.numpy().astype(">f4"),
    "long double": lambda: ROWS.numpy().astype(np.longdouble),
    "reversed twice": lambda: np.ascontiguousarray(ROWS.numpy()[::-1])[::-1],
    "masked, nothing masked": lambda: np.ma.masked_array(ROWS.numpy()),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "meta": lambda: ROWS.to("meta"),
    "complex": lambda: torch.complex(ROWS, ROWS),
    "bits": lambda: torch.zeros(3, 4, dtype=torch.uint8).view(torch.bits8),
    "nested": lambda: torch.nested.nested_tensor([ROWS[0], ROWS[1, :2]]),
    "objects": lambda: np.array([[1.0] * 4] * 3, dtype=object),
    "words": lambda: np.array([["a"] * 4] * 3),
    "times": lambda: np.zeros((3, 4), "datetime64[s]"),
    "records": lambda: np.zeros(3, [("a", "f4")]),
    "masked": lambda: np.ma.masked_array(ROWS.numpy(), ROWS.numpy() > 0),
}


@pytest.fixture(scope="module", params=[False, True], ids=["rows", "calls"])
def engine(request: Any) -> Iterator[bm.Engine]:
    logging.getLogger("batchmaker.engine").setLevel(logging.CRITICAL + 1)
    with bm.Engine(Linear(single=request.param), threads=1) as engine:
        engine.map([ROWS, ROWS, ROWS], progress=False)  # the shape has a template now
        yield engine
        assert engine.stats.restarts == 0
    assert_balanced(engine)
    logging.getLogger("batchmaker.engine").setLevel(logging.NOTSET)


def rows_of(result: Any) -> Tensor:
    return torch.stack(list(result)) if isinstance(result, list) else result


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SERVED)
def test_a_tensor_of_any_kind_is_served_as_the_same_values_are(engine: bm.Engine, name: str) -> None:
    if name == "mkldnn" and engine.map([ROWS], progress=False)[0].__class__ is list:
        pytest.skip("torch cannot iterate over the rows of an mkldnn tensor")
    wanted = rows_of(engine.submit(ROWS).result(120))
    beside = [engine.submit(ROWS) for _ in range(3)]
    found = [engine.submit(SERVED[name]()) for _ in range(3)]
    for answer in (*beside, *found):
        torch.testing.assert_close(rows_of(answer.result(120)), wanted)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_values_is_refused_alone(engine: bm.Engine, name: str) -> None:
    wanted = rows_of(engine.submit(ROWS).result(120))
    beside, bad = [engine.submit(ROWS) for _ in range(3)], [engine.submit(REFUSED[name]()) for _ in range(3)]
    for answer in bad:
        assert isinstance(answer.exception(120), RequestShapeError)
    for answer in beside:
        torch.testing.assert_close(rows_of(answer.result(120)), wanted)


class Words(bm.Model):
    def __init__(self) -> None:
        self.embed = bm.Cell(nn.Embedding(50, 2))

    def unfold(self, words: Any) -> Any:
        return self.embed.map(words)


@pytest.mark.parametrize("word", [np.uint64(1 << 63), np.uint64((1 << 64) - 1)])
def test_integers_that_do_not_fit_are_refused_and_not_wrapped(word: np.uint64) -> None:
    with bm.Engine(Words(), threads=1) as engine:
        engine.submit([1, 2]).result(120)
        for _ in range(3):
            error = engine.submit(np.array([1, word], np.uint64)).exception(120)
            assert isinstance(error, InvalidRequestError)
            assert str(int(word)) in str(error)


# --- deep requests and results ---------------------------------------------------------------------------------------


class Nested(bm.Model):
    """Adds the numbers of a nested tuple. deep_result: answers with the number inside so many lists."""

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate())

    def unfold(self, tree: Any) -> Any:
        def total(part: Any) -> Any:
            if isinstance(part, int):
                return [float(part)]
            left, right = part
            return self.add(total(left), total(right))

        if isinstance(tree, dict):
            result: Any = self.add([1.0], [1.0])
            for _ in range(tree["deep"]):
                result = [result]
            return result
        return total(tree)


def right_branching(depth: int) -> Any:
    tree: Any = 3
    for _ in range(depth):
        tree = (1, tree)
    return tree


def looped() -> Any:
    """A tuple with a list that contains itself."""
    part: list[Any] = [1]
    part.append(part)
    return (1, part)


def test_a_request_nested_too_deep_fails_alone_and_is_told_so() -> None:
    with bm.Engine(Nested(), threads=1) as engine:
        engine.submit((1, 2)).result(120)
        for depth in (10, 150, 199, 200, 201, 300, 480, 500):
            beside = [engine.submit((k, 2)) for k in range(5)]
            assert float(engine.submit(right_branching(depth)).result(120)) == depth + 3
            assert [float(answer.result(120)) for answer in beside] == [2.0, 3.0, 4.0, 5.0, 6.0]
        for deep in (right_branching(100_000), looped()):
            beside = [engine.submit((k, 2)) for k in range(5)]
            error = engine.submit(deep).exception(120)
            assert isinstance(error, InvalidRequestError)
            assert "nested deeper than a function can call itself" in str(error)
            assert [float(answer.result(120)) for answer in beside] == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert engine.stats.restarts == 0
    assert_balanced(engine)


def test_a_result_nested_too_deep_fails_alone() -> None:
    with bm.Engine(Nested(), threads=1) as engine:
        engine.submit((1, 2)).result(120)
        for deep in (1, 100, 300, 450, 480, 490, 495, 500, 950, 970, 980, 990, 2000):
            beside = [engine.submit((k, 2)) for k in range(5)]
            answer = engine.submit({"deep": deep})
            error = answer.exception(120)
            if error is not None:
                assert deep > 100
                assert isinstance(error, RequestError)
                assert "RecursionError" in str(error)
            assert [float(answer.result(120)) for answer in beside] == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert engine.stats.restarts == 0
    assert_balanced(engine)


# --- code of the model that runs while a template is proved ----------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError, RecursionError, MemoryError]
)
def test_whatever_is_raised_while_a_template_is_proved_the_request_is_unfolded(kind: type[BaseException]) -> None:
    class Checked(bm.Model):
        def __init__(self) -> None:
            self.add = bm.Cell(Accumulate())

        def unfold(self, xs: list[float]) -> Any:
            for x in xs:
                if type(x) is not float:  # as the proof's stand-ins are
                    raise kind("not a number")
            return self.add.run([[x] for x in xs], ([0.0],))

    with bm.Engine(Checked(), threads=1) as engine:
        for _ in range(5):
            assert float(engine.submit([1.0, 2.0]).result(120)) == 3.0
        assert engine.stats.restarts == 0
    assert_balanced(engine)


@pytest.mark.parametrize("kind", [SystemExit, ValueError, MemoryError])
def test_settings_of_a_model_that_cannot_be_compared_fail_nobody(kind: type[BaseException]) -> None:
    class Setting:
        def __eq__(self, other: object) -> bool:
            raise kind

        __hash__ = object.__hash__

        def __len__(self) -> int:
            raise kind

    class Configured(bm.Model):
        def __init__(self) -> None:
            self.add = bm.Cell(Accumulate())
            self.setting: Any = Setting()

        def unfold(self, xs: list[float]) -> Any:
            first = self.setting
            return self.add.run([[x] for x in xs] if first is not None else [[0.0]], ([0.0],))

    model = Configured()
    with bm.Engine(model, threads=1) as engine:
        for _ in range(5):
            assert float(engine.submit([1.0, 2.0]).result(120)) == 3.0
            model.setting = Setting()
        assert engine.stats.restarts == 0
    assert_balanced(engine)
