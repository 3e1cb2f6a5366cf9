"""Options are refused where they are given, with what came and what is wanted, and nothing is enqueued."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from engine_models import Sums, assert_balanced
from hypothesis import given
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError, OptionError
from batchmaker.model.options import MAX_PRIORITY, check_number, check_whole, checked_priority

BAD: list[tuple[dict[str, Any], str]] = [
    ({"priority": 2**62}, r"priority must be a whole number from -2\*\*32 to 2\*\*32.*got int 4611686018427387904"),
    ({"priority": -(2**32) - 1}, "priority must be"),
    ({"priority": 10**400}, "priority must be"),
    ({"priority": "high"}, "got str 'high'"),
    ({"priority": True}, "got bool True"),
    ({"priority": 1.0}, "got float 1.0"),
    ({"priority": None}, "got NoneType"),
    ({"deadline_ms": "soon"}, "deadline_ms must be a number of milliseconds.*got str 'soon'"),
    ({"deadline_ms": math.nan}, "deadline_ms must be a number"),
    ({"deadline_ms": -math.inf}, "deadline_ms must be a number"),
    ({"deadline_ms": True}, "got bool True"),
    ({"deadline_ms": 10**400}, "deadline_ms must be a number"),
    ({"deadline_ms": [5]}, "got list"),
    ({"model": 3}, "model must be the name of a model, a text, got int 3"),
    ({"model": ["Sums"]}, "got list"),
    ({"model": "Sum"}, "Did you mean 'Sums'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_is_wrong_in_an_option_is_said_at_once_and_nothing_is_enqueued(
    options: dict[str, Any], message: str
) -> None:
    settled: list[Any] = []
    with bm.Engine(Sums(), threads=1) as engine:
        engine.on_settled = lambda ticket, error: settled.append(ticket)
        for stream in (False, True):
            with pytest.raises(OptionError, match=message):
                engine.submit([1], stream=stream, **options)
        with pytest.raises(OptionError, match=message):
            engine.map([[1]], progress=False, **options)
        with pytest.raises(OptionError, match=message):
            engine.open_sequence(**options)
        assert float(engine.submit([1, 2]).result(60)) == 3.0
    assert len(settled) == 1
    assert_balanced(engine)


@pytest.mark.parametrize("priority", [MAX_PRIORITY, -MAX_PRIORITY, np.int64(3), np.uint8(7)])
def test_every_kind_of_number_is_taken(priority: Any) -> None:
    settled: list[Any] = []
    never: list[Any] = [None, math.inf]
    in_a_minute: list[Any] = [60_000, 6e4, np.float32(6e4), Fraction(60_000)]
    with bm.Engine(Sums(), threads=1) as engine:
        engine.on_settled = lambda ticket, error: settled.append(ticket)
        for deadline_ms in never + in_a_minute:
            assert float(engine.submit([1], deadline_ms=deadline_ms, priority=priority).result(60)) == 1.0
    assert [ticket.priority for ticket in settled] == [priority] * 6
    assert {type(ticket.priority) for ticket in settled} == {int}
    assert [ticket.due_after_s for ticket in settled] == [math.inf] * 2 + [pytest.approx(60.0)] * 4


def test_requests_of_the_outermost_priorities_are_served_in_their_order() -> None:
    order: list[int] = []
    with bm.Engine(Sums(), threads=1) as engine:
        engine.on_settled = lambda ticket, error: order.append(ticket.priority)
        futures = [engine.submit([1, 2], priority=p) for p in (-MAX_PRIORITY, 0, MAX_PRIORITY)]
        assert [float(future.result(60)) for future in futures] == [3.0, 3.0, 3.0]
    assert sorted(order) == [-MAX_PRIORITY, 0, MAX_PRIORITY]


@given(st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans(), st.decimals(), st.fractions()))
def test_any_value_is_taken_or_refused_with_an_option_error(value: Any) -> None:
    for check in (
        checked_priority,
        lambda given: check_whole("n", given, least=0),
        lambda given: check_number("x", given, above=0.0),
        lambda given: check_number("x", given),
    ):
        try:
            check(value)
        except OptionError:
            continue
        assert not isinstance(value, bool | str | Decimal | None)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0}, {"workers": "2"}, {"workers": True}, {"threads": 0}, {"threads": 1.5}, {"run_ahead": -1},
        {"max_nodes": 0}, {"max_sequences": -1}, {"max_sequences": "many"}, {"deadline_ms": "soon"}, {"deadline_ms": 0},
        {"max_queue": 0}, {"max_queue": 2.5}, {"when_full": "block"}, {"when_full": None}, {"late": "never"},
    ],
)  # fmt: skip
def test_an_engines_own_options_are_checked_too(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} must be"):
        bm.Engine(Sums(), **options)


def test_options_of_calls_are_checked_too() -> None:
    class Chunked(Sums):
        def unfold_chunk(self, xs: Any, state: Any) -> Any:
            return self.unfold(xs), None

    with bm.Engine(Chunked(), threads=1) as engine:
        for wrong in (0, -1.0, math.nan, "long", True):
            with pytest.raises(OptionError, match="idle_timeout_s must be above 0"):
                engine.open_sequence(idle_timeout_s=wrong)  # type: ignore[arg-type]
        assert engine.num_sequences == 0
        with pytest.raises(OptionError, match="max_in_flight must be at least 1"):
            engine.map([[1]], max_in_flight=0)
        with engine.open_sequence() as sequence, pytest.raises(OptionError, match="deadline_ms"):
            sequence.submit([1], deadline_ms="soon")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="within_s must be at least 0"):
            engine.stop(within_s=-1.0)


# --- functions that an engine cannot call ----------------------------------------------------------------------------


class Awaits(Sums):
    async def unfold(self, xs: Any) -> Any:  # type: ignore[override]
        return xs


class Streams(Sums):
    async def unfold(self, xs: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield xs


class AwaitsChunks(Sums):
    async def unfold_chunk(self, xs: Any, state: Any) -> Any:  # type: ignore[override]
        return xs, state


@pytest.mark.parametrize(("model", "name"), [(Awaits, "unfold"), (Streams, "unfold"), (AwaitsChunks, "unfold_chunk")])
def test_async_unfold_functions_are_refused_with_advice(model: type[bm.Model], name: str) -> None:
    with pytest.raises(ModelError, match=rf"{model.__name__}\.{name} is `async def`.*Write `def`"):
        bm.Engine(model())


def test_an_unfold_function_that_returns_a_coroutine_fails_its_request() -> None:
    async def later() -> None: ...

    class Hidden(Sums):
        def unfold(self, xs: Any, form: str = "run") -> Any:
            return later() if xs == "later" else super().unfold(xs)

    with bm.Engine(Hidden(), threads=1) as engine:
        error = engine.submit("later").exception(60)
        assert isinstance(error, ModelError | InvalidRequestError)
        assert "returned coroutine" in str(error)
        assert float(engine.submit([1, 2]).result(60)) == 3.0
