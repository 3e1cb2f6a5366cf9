"""Deadlines and priorities through the engine: whose they are, what follows when they pass, what is counted."""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar

import pytest
from engine_models import Endless, Gate, Sums, Watching, assert_balanced
from hypothesis import given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.cost import CellLatency, CostProfile, LatencyTable, ProfileOptions
from batchmaker.errors import CancelledError, DeadlineError, OptionError, RefusedError
from batchmaker.policies.base import Admission, ReadyView
from batchmaker.policies.cellular import CellularPolicy
from batchmaker.policies.lazy import LazyPolicy
from insides import cancel, workers


class Turnstile(Watching):
    """Refuses every request with a deadline and lets the others begin."""

    def admit(self, view: ReadyView) -> Admission:
        slots = view.waiting(view.num_waiting)
        hopeless = view.requests.deadline_s[slots] < math.inf
        return Admission(slots[~hopeless].tolist(), slots[hopeless].tolist())


def profile(cell: str, seconds: float) -> CostProfile:
    """Return what says that every step of a cell takes so long."""
    latency = LatencyTable((CellLatency(cell, (1,), (seconds,), (seconds,)),))
    return CostProfile("model", ProfileOptions("float32", 1, "machine", "commit"), latency)


def due_ms(engine: bm.Engine, **options: Any) -> float | None:
    """Return what the engine makes of a request's deadline."""
    seen: list[Any] = []
    engine.on_settled = lambda ticket, error: seen.append(ticket)
    engine.submit([1], **options).exception(60)
    (ticket,) = seen
    return None if ticket.deadline_s is None else round(1e3 * (ticket.deadline_s - ticket.arrived_s), 6)


def test_a_deadline_is_the_requests_or_the_models_or_the_engines() -> None:
    with bm.Engine(Sums(), deadline_ms=70_000, threads=1) as engine:
        assert due_ms(engine) == 70_000
        assert due_ms(engine, deadline_ms=20_000) == 20_000
        assert due_ms(engine, deadline_ms=math.inf) is None
    hurried = Sums()
    hurried.deadline_ms = 30_000
    with bm.Engine(hurried, "cellular", deadline_ms=70_000, threads=1) as engine:
        assert due_ms(engine) == 30_000
    with bm.Engine(Sums(), threads=1) as engine:
        assert due_ms(engine) is None


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_a_default_deadline_must_lie_ahead(wrong: float) -> None:
    with pytest.raises(OptionError, match="must be above 0"):
        bm.Engine(Sums(), deadline_ms=wrong)


def test_a_deadline_that_is_no_number_is_refused() -> None:
    with bm.Engine(Sums(), threads=1) as engine, pytest.raises(OptionError, match="milliseconds"):
        engine.submit([1], deadline_ms=math.nan)


def test_what_comes_too_late_is_given_up_before_anything_is_computed() -> None:
    with bm.Engine(Sums(), threads=1) as engine, pytest.raises(DeadlineError):
        engine.submit([1, 2, 3], deadline_ms=-1).result(60)
    service = engine.service["Sums"]
    assert (engine.stats.cells, service.given_up, service.answered, service.violations) == (0, 1, 0, 1)
    assert service.failed == {"DeadlineError": 1}
    assert_balanced(engine)


@pytest.mark.parametrize("policy", ["cellular", "padded"])
def test_late_requests_are_finished_where_that_is_asked_for_and_counted(policy: str) -> None:
    class Both(Sums):
        def batched(self, requests: Any) -> list[Any]:
            return [sum(request) for request in requests]

    with bm.Engine(Both(), policy, late="finish", threads=1) as engine:
        assert float(engine.submit([1, 2], deadline_ms=-1).result(60)) == 3.0
        assert float(engine.submit([4], deadline_ms=60_000).result(60)) == 4.0
        assert float(engine.submit([5]).result(60)) == 5.0
    service = engine.service["Both"]
    assert (service.answered, service.late, service.with_deadline, service.num_failed) == (3, 1, 2, 0)
    assert service.violation_share == 0.5


def test_refused_requests_fail_at_once_and_are_counted_apart() -> None:
    with bm.Engine(Sums(), Turnstile(), threads=1) as engine:
        refused = engine.submit([1, 2], deadline_ms=60_000)
        kept = engine.submit([3])
        with pytest.raises(RefusedError, match="cannot be met"):
            refused.result(60)
        assert float(kept.result(60)) == 3.0
    service = engine.service["Sums"]
    assert (service.refused, service.given_up, service.violations, service.answered) == (1, 0, 1, 1)
    assert_balanced(engine)


def test_the_default_policy_is_one_and_looks_at_deadlines() -> None:
    assert bm.Engine(Sums(), threads=1).policy.name == "auto"
    assert bm.Engine(Sums(), deadline_ms=math.inf, threads=1).policy.name == "auto"
    assert bm.Engine(Sums(), deadline_ms=50, threads=1).policy.name == "auto"
    assert bm.Engine(Sums(), refuse=True, threads=1).policy.name == "auto"
    assert bm.Engine(Sums(), "cellular", deadline_ms=50, threads=1).policy.name == "cellular"


def test_a_first_request_without_any_cell_is_answered_under_the_default_policy() -> None:
    with bm.Engine(Sums(), threads=1) as engine:
        assert [engine.submit({"xs": [], "form": "nodes"}).result() for _ in range(2)] == [[0.0], [0.0]]


def test_only_a_policy_that_forecasts_can_refuse() -> None:
    with pytest.raises(OptionError, match="'cellular' has no option to refuse"):
        bm.Engine(Sums(), "cellular", refuse=True)
    with pytest.raises(OptionError, match="given by name"):
        bm.Engine(Sums(), CellularPolicy(), refuse=True)
    with pytest.raises(OptionError, match="Did you mean 'cellular'"):
        bm.Engine(Sums(), "celular", refuse=True)


@pytest.mark.parametrize(("policy", "refuse"), [(None, True), ("lazy", True), ("lazy", False)])
def test_refusing_can_be_switched_on_and_off(policy: str | None, refuse: bool) -> None:
    model = Sums()
    model.profile = profile("add", 10.0)  # seconds a step
    with bm.Engine(model, policy, refuse=refuse, late="finish", threads=1) as engine:
        future = engine.submit([1, 2], deadline_ms=15_000)
        assert isinstance(future.exception(60), RefusedError if refuse else type(None))


def test_late_has_two_values() -> None:
    with pytest.raises(OptionError, match="'give-up' or 'finish', got str 'later'"):
        bm.Engine(Sums(), late="later")  # type: ignore[arg-type]


def test_an_engine_whose_requests_with_deadlines_are_answered_wakes_for_none() -> None:
    with bm.Engine(Sums(), threads=1) as engine:
        for answer in [engine.submit([1, 2, 3], deadline_ms=60_000) for _ in range(4)]:
            answer.result()
        woken: list[float | None] = []
        done = threading.Event()
        workers(engine)[0].call_soon(lambda: (woken.append(engine.driver.next_wakeup_s()), done.set()))
        assert done.wait(60)
    assert woken == [None]


def test_a_high_priority_overtakes_all_that_waits() -> None:
    gate, order = Gate(), []
    gate.opened.set()
    with bm.Engine(Sums(gate, batch_sizes=[1]), threads=1) as engine:
        engine.submit([-1]).result(60)  # the cell is bound with the gate open
        engine.on_settled = lambda ticket, error: order.append(ticket.request[0])
        gate.opened.clear()
        gate.entered.clear()
        futures = [engine.submit([0])]
        assert gate.entered.wait(60)
        futures += [engine.submit([n]) for n in range(1, 100)]
        futures += [engine.submit([n], priority=n // 1000) for n in (1000, 2000)]
        gate.opened.set()
        for future in futures:
            future.result(60)
    assert order == [0, 2000, 1000, *range(1, 100)]
    assert_balanced(engine)


@pytest.mark.parametrize("priorities", ["aged", "strict"])
@pytest.mark.parametrize("policy", ["auto:max_steps=1", "cellular:max_steps=1"])
def test_behind_a_flood_of_a_higher_priority_a_request_has_every_eighth_turn_unless_they_are_strict(
    policy: str, priorities: Any
) -> None:
    gate, order = Gate(), []
    gate.opened.set()
    model = Sums(gate, batch_sizes=[1])
    with bm.Engine(model, policy, threads=1, priorities=priorities) as engine:
        engine.submit([-1]).result(60)
        gate.opened.clear()
        gate.entered.clear()
        engine.on_settled = lambda ticket, error: order.append(ticket.request[0])
        futures = [engine.submit([0])]
        assert gate.entered.wait(60)
        futures.append(engine.submit([1]))
        futures += [engine.submit([2], priority=1) for _ in range(200)]
        gate.opened.set()
        for future in futures:
            future.result(60)
    assert order[0] == 0
    queues = 3  # the engine's backlog, the policy's waiting line, the ready nodes: eight turns in each
    assert order.index(1) <= 8 * queues if priorities == "aged" else order[-1] == 1
    assert_balanced(engine)


def test_priorities_are_aged_or_strict_and_strict_ones_need_a_policy_of_cells() -> None:
    with pytest.raises(OptionError, match="priorities must be 'aged' or 'strict', got str 'fair'"):
        bm.Engine(Sums(), priorities="fair")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'serial' batches whole requests"):
        bm.Engine(Sums(), "serial", priorities="strict")


def test_requests_that_wait_in_the_backlog_can_be_cancelled() -> None:
    gate = Gate()
    gate.opened.set()
    with bm.Engine(Sums(gate), threads=1) as engine:
        engine.submit([-1]).result(60)
        gate.opened.clear()
        gate.entered.clear()
        first = engine.submit([1])
        assert gate.entered.wait(60)
        doomed = engine.submit([2], deadline_ms=60_000)
        kept = engine.submit([3])
        cancel(engine, 2)
        gate.opened.set()
        assert isinstance(doomed.exception(60), CancelledError)
        assert [float(future.result(60)) for future in (first, kept)] == [1.0, 3.0]
    assert engine.service["Sums"].failed == {"CancelledError": 1}
    assert_balanced(engine)


def test_the_engine_gives_up_endless_requests_by_their_models_deadline() -> None:
    class Hurried(Endless):
        deadline_ms: ClassVar[float | None] = 20.0  # type: ignore[misc]

    with bm.Engine(Hurried(), threads=1) as engine:
        assert isinstance(engine.submit(0).exception(60), DeadlineError)
    assert_balanced(engine)


KINDS = ("plain", "nodes", "late", "generous", "cancelled", "garbage")


@settings(max_examples=12)
@given(
    mix=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 9), st.integers(-1, 2), st.sampled_from("ab")), max_size=40
    ),
    workers=st.integers(1, 2),
    late=st.sampled_from(["give-up", "finish"]),
    policy=st.sampled_from([CellularPolicy, Turnstile, LazyPolicy]),
)
def test_each_request_of_any_mix_is_settled_once_and_counted_once(
    mix: Any, workers: int, late: Any, policy: Any
) -> None:
    settled: list[int] = []
    models = {"a": Sums(batch_sizes=[1, 3, 8]), "b": Sums(batch_sizes=[1, 2], priority=1)}
    engine = bm.Engine(models, policy(), threads=1, workers=workers, late=late)
    engine.on_settled = lambda ticket, error: settled.append(ticket.request_id)
    with engine:
        futures = []
        for number, (kind, length, priority, model) in enumerate(mix):
            xs: list[Any] = [float(i % 3) for i in range(length)]
            request = {"xs": ["?"] if kind == "garbage" else xs, "form": "nodes" if kind == "nodes" else "run"}
            deadline_ms = {"late": -1.0, "generous": 60_000.0}.get(kind)
            futures.append(engine.submit(request, deadline_ms=deadline_ms, priority=priority, model=model))
            if kind == "cancelled":
                cancel(engine, number)
        for (kind, length, *_), future in zip(mix, futures, strict=True):
            error = future.exception(60)
            if error is None:
                assert float(future.result()) == sum(float(i % 3) for i in range(length))
            assert kind not in ("plain", "nodes") or error is None
            assert kind != "late" or late == "finish" or isinstance(error, DeadlineError)
    assert sorted(settled) == list(range(len(mix)))
    services = engine.service.values()
    assert sum(service.answered + service.num_failed for service in services) == len(mix)
    assert sum(service.with_deadline for service in services) == sum(k in ("late", "generous") for k, *_ in mix)
    assert_balanced(engine)
