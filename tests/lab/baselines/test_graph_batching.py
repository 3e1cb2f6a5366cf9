"""Whole requests: each is answered once, under every policy, whatever happens to it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmaker import policies
from batchmaker.core.commands import Fail, FailureKind, Reply
from batchmaker.core.events import RequestCancelled, TimePassed
from batchmaker.errors import InvariantError
from batchmaker.lab.baselines import POLICIES, SerialPolicy, WindowPolicy
from batchmaker.lab.baselines.scheduler import (
    BatchFinished,
    GraphScheduler,
    RunBatch,
    WholeRequestArrived,
)
from batchmaker.policies import GraphPolicy
from insides import num_deadlines

GRAPH_POLICIES = sorted(name for name, policy in POLICIES.items() if issubclass(policy, GraphPolicy))


class Device:
    """Virtual workers around a GraphScheduler. A batch takes 1 plus a tenth of its longest request.

    Wakes the scheduler when it asks for it, and only then, if nothing happens.
    """

    def __init__(self, policy: Any, *, fails: Any = lambda request: False, **options: Any) -> None:
        self.scheduler = GraphScheduler(policy, **options)
        self.now_s = 0.0
        self._fails = fails
        self._order = itertools.count()
        self._todo: list[tuple[float, int, Any]] = []
        self._lengths: dict[int, int] = {}
        self.arrived: list[int] = []
        self.log: list[tuple[float, int, tuple[int, ...]]] = []
        self.answers: dict[int, tuple[float, str]] = {}
        self.models: dict[int, int] = {}

    def arrive(self, request: int, at_s: float, length: int = 1, **facts: Any) -> None:
        self._lengths[request] = length
        self.models[request] = facts.get("model", 0)
        self._at(at_s, WholeRequestArrived(request, length, at_s, **facts))

    def cancel(self, request: int, at_s: float) -> None:
        self._at(at_s, RequestCancelled(request, at_s))

    def run(self) -> Device:
        while True:
            wakeup_s = self.scheduler.next_wakeup_s
            times = [*(todo[0] for todo in self._todo[:1]), *([] if wakeup_s is None else [wakeup_s])]
            if not times:
                break
            assert min(times) > self.now_s or self._todo, "it asks to be woken without end"
            self.now_s = max(self.now_s, min(times))
            events = []
            while self._todo and self._todo[0][0] <= self.now_s:
                events.append(heapq.heappop(self._todo)[2])
            self._carry_out(events or [TimePassed(self.now_s)])
        assert sorted(self.answers) == sorted(self.arrived)
        assert (self.scheduler.num_requests, self.scheduler.num_batches) == (0, 0)
        return self

    def _at(self, at_s: float, event: Any) -> None:
        heapq.heappush(self._todo, (at_s, next(self._order), event))

    def _carry_out(self, events: list[Any]) -> None:
        self.arrived += [event.request for event in events if isinstance(event, WholeRequestArrived)]
        for command in self.scheduler.handle(*events):
            match command:
                case RunBatch():
                    self.log.append((self.now_s, command.worker, command.requests))
                    assert {self.models[request] for request in command.requests} == {command.model}
                    end_s = self.now_s + 1 + 0.1 * max(self._lengths[request] for request in command.requests)
                    failed = tuple((request, "it broke") for request in command.requests if self._fails(request))
                    self._at(end_s, BatchFinished(command.batch, end_s, failed))
                case Reply():
                    self._answer(command.request, "reply")
                case Fail():
                    self._answer(command.request, command.kind.value)
        self.scheduler.check_invariants()

    def _answer(self, request: int, how: str) -> None:
        assert request not in self.answers, f"request {request} is answered twice"
        self.answers[request] = (self.now_s, how)


def test_a_batch_starts_when_its_window_is_over_although_nothing_arrives():
    device = Device(WindowPolicy(window_ms=500, max_batch=8))
    device.arrive(0, 1.0)
    device.arrive(1, 1.25, length=10)
    device.run()
    assert device.log == [(1.5, 0, (0, 1))]
    assert device.answers == {0: (3.5, "reply"), 1: (3.5, "reply")}


def test_no_wakeup_is_asked_for_while_every_worker_is_busy():
    scheduler = GraphScheduler(WindowPolicy(window_ms=500, max_batch=1))
    scheduler.handle(WholeRequestArrived(0, 1, 0.0), WholeRequestArrived(1, 1, 0.0))
    assert scheduler.next_wakeup_s is None
    commands = scheduler.handle(BatchFinished(0, 0.1))
    assert [type(command) for command in commands] == [Reply, RunBatch]


def test_idle_workers_take_one_batch_each():
    device = Device(SerialPolicy(), num_workers=2)
    for request in range(3):
        device.arrive(request, 0.0)
    device.run()
    assert device.log == [(0.0, 0, (0,)), (0.0, 1, (1,)), (1.1, 0, (2,))]


def test_a_waiting_request_is_given_up_at_its_deadline_and_one_in_a_batch_is_not():
    device = Device(SerialPolicy())
    device.arrive(0, 0.0, length=50, deadline_s=2.0)
    device.arrive(1, 0.0, deadline_s=2.0)
    device.run()
    assert device.answers == {0: (6.0, "reply"), 1: (2.0, "deadline")}


def test_late_requests_are_computed_all_the_same_if_told_so():
    device = Device(SerialPolicy(), give_up_late=False)
    for request in range(2):
        device.arrive(request, 0.0, deadline_s=0.5)
    device.run()
    assert device.scheduler.next_deadline_s is None
    assert {how for _, how in device.answers.values()} == {"reply"}


def test_a_request_that_arrives_late_is_never_begun():
    device = Device(SerialPolicy())
    device.arrive(0, 1.0, deadline_s=0.5)
    assert device.run().answers == {0: (1.0, "deadline")}
    assert device.log == []


def test_a_cancelled_request_fails_at_once_even_in_a_batch():
    device = Device(policies.make("padded"))
    for request in range(3):
        device.arrive(request, 0.0)
    device.arrive(3, 0.1)
    device.cancel(1, 0.5)
    device.cancel(3, 0.5)
    device.run()
    assert device.answers == {0: (1.1, "reply"), 1: (0.5, "cancelled"), 2: (1.1, "reply"), 3: (0.5, "cancelled")}
    assert device.log == [(0.0, 0, (0, 1, 2))]


def test_requests_that_fail_in_a_batch_fail_alone():
    device = Device(policies.make("padded"), fails=lambda request: request == 1)
    for request in range(3):
        device.arrive(request, 0.0)
    assert [how for _, how in device.run().answers.values()] == ["reply", "cell", "reply"]


def test_what_cannot_be_met_is_refused_with_the_reason():
    scheduler = GraphScheduler(policies.make("orloj", batch_seconds=lambda lengths: 1.0))
    (fail,) = scheduler.handle(WholeRequestArrived(0, 1, 0.0, deadline_s=0.25))
    assert fail == Fail(0, FailureKind.REFUSED, "refused: its deadline in 0.250 s cannot be met")


def test_the_policy_hears_how_long_each_batch_took(monkeypatch):
    heard = []
    monkeypatch.setattr(WindowPolicy, "batch_finished", lambda self, *facts: heard.append(facts))
    device = Device(WindowPolicy(window_ms=0))
    for request in range(2):
        device.arrive(request, 1.0, length=5 + request, model=3)
    device.run()
    assert heard == [(3, (5, 6), pytest.approx(1.6))]


@pytest.mark.parametrize("wrong", [[0, 1, 2], [0, 3], [0, 0], [7]])
def test_a_policy_that_chooses_what_it_must_not_is_a_defect(wrong, monkeypatch):
    policy = WindowPolicy(window_ms=1000, max_batch=2)
    scheduler = GraphScheduler(policy)
    monkeypatch.setattr(WindowPolicy, "choose", lambda self, now_s: wrong if len(self) == 4 else ())
    arrivals = [WholeRequestArrived(request, 1, 0.0, model=request // 3) for request in range(4)]
    with pytest.raises(InvariantError, match="policy 'graph' chose"):
        scheduler.handle(*arrivals)


def test_finishing_a_batch_twice_and_arriving_twice_are_defects():
    scheduler = GraphScheduler(SerialPolicy())
    scheduler.handle(WholeRequestArrived(0, 1, 0.0))
    with pytest.raises(InvariantError, match="twice"):
        scheduler.handle(WholeRequestArrived(0, 1, 0.0))
    scheduler.handle(BatchFinished(0, 1.0))
    with pytest.raises(InvariantError, match="batch 0"):
        scheduler.handle(BatchFinished(0, 1.0))


def test_deadlines_of_requests_long_answered_are_forgotten():
    scheduler = GraphScheduler(SerialPolicy())
    for request in range(5000):
        at_s = float(request)
        scheduler.handle(WholeRequestArrived(request, 1, at_s, deadline_s=1e6))
        scheduler.handle(BatchFinished(request, at_s))
    assert num_deadlines(scheduler) < 2000


@settings(max_examples=200)
@given(
    name=st.sampled_from(GRAPH_POLICIES),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 40),
    num_workers=st.integers(1, 3),
    max_batch=st.integers(1, 6),
    spread=st.sampled_from([0, 5, 40]),
    give_up_late=st.booleans(),
)
def test_each_request_is_answered_once(name, seed, num_requests, num_workers, max_batch, spread, give_up_late):
    rng = random.Random(seed)
    options = {} if name == "serial" else {"max_batch": max_batch}
    if name == "orloj" and rng.random() < 0.5:
        options["batch_seconds"] = lambda lengths: 1 + 0.1 * max(lengths)
    policy = policies.make(name, **options)
    device = Device(
        policy, num_workers=num_workers, give_up_late=give_up_late, fails=lambda request: rng.random() < 0.1
    )
    for request in range(num_requests):
        at_s = rng.choice([float(rng.randint(0, spread)), spread * rng.random()])
        deadline_s = at_s + rng.choice([-1.0, 0.0, 0.5, 3.0, 10.0]) if rng.random() < 0.4 else None
        facts = {"deadline_s": deadline_s, "priority": rng.randrange(3), "model": rng.randrange(3)}
        device.arrive(request, at_s, rng.randint(0, 30), **facts)
        if rng.random() < 0.2:
            device.cancel(request, at_s + 4 * rng.random())
    device.run()
    began = Counter(request for _, _, requests in device.log for request in requests)
    assert set(began.values()) <= {1}
    assert all(len(requests) <= policy.max_batch for _, _, requests in device.log)
    for request, (_, how) in device.answers.items():
        assert began[request] == 1 if how in ("reply", "cell") else how in ("cancelled", "deadline", "refused")
