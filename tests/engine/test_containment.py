"""Whatever fails while the engine works, each request is answered once, and the engine serves on.

An exception is injected at every call that the driver and its loop make of what they use: before the call, as if it had
failed, and after it, as if its result were lost.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
from engine_models import Accumulate, Count, Counter, Turns, assert_balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import batchmaker as bm
from batchmaker.core import live_streams
from batchmaker.core.scheduler import Scheduler
from batchmaker.engine import Answer
from batchmaker.engine.arrivals import Arrivals
from batchmaker.engine.bulks import Bulks
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.open_sequences import Sequences
from batchmaker.engine.request import InFlight
from batchmaker.engine.results import Results, ResultTables
from batchmaker.engine.stats import ServiceStats, StepCounts
from batchmaker.engine.stop_tests import StopTests
from batchmaker.engine.unanswered import Unanswered
from batchmaker.engine.unfolder import Unfolder
from batchmaker.errors import BatchmakerError, CancelledError, RequestError, SequenceError
from batchmaker.executor.compute import ComputingExecutor
from batchmaker.executor.inline import InlineExecutor
from batchmaker.model.unfolding import Unfolding
from covering import covering
from insides import num_unanswered

CALLS: dict[type, tuple[str, ...]] = {
    Scheduler: ("handle", "slots"),
    InlineExecutor: ("submit", "poll"),
    ComputingExecutor: ("write", "read", "reserve"),
    Arrivals: ("draw", "recorded", "fill", "write"),
    Bulks: ("begin", "admit", "reply"),
    Results: ("enter", "leave", "gather", "begin", "take", "loops_ended"),
    ResultTables: ("fit",),
    StopTests: ("enter", "leave", "apply"),
    Sequences: ("may_begin", "expire", "take_due", "take_closed", "settled", "next_wakeup_s", "close"),
    Unfolder: ("begin", "resume"),
    Unfolding: ("start", "resume", "results"),
    InFlight: ("store", "value"),
    StepCounts: ("add",),
    ServiceStats: ("settled",),
    Unanswered: ("claim", "deliver", "flush"),
    CellDriver: ("poll", "advance", "cancel", "next_wakeup_s"),
}
EVERY = [f"{owner.__name__}.{name}" for owner, names in CALLS.items() for name in names]
SAID = "injected here"
KINDS = [ValueError, MemoryError, SystemExit]
"""Each before the real call, but memory errors after it."""


class Fault:
    """What is injected: an exception at the call number `at` of those with this name; None: of all.

    seen: how often each call was made. fired: how often it was raised.
    """

    def __init__(self, name: str | None, at: int, kind: type[BaseException], *, after: bool) -> None:
        self.name, self.at, self.kind, self.after = name, at, kind, after
        self.seen: Counts[str] = Counts()
        self.fired = 0

    def is_now(self, name: str) -> bool:
        """Count a call; return whether this one fails."""
        self.seen[name] += 1
        number = self.seen.total() if self.name is None else self.seen[name]
        return self.name in (None, name) and number == self.at


class Faults:
    """Where faults are injected. present: the one of this moment, if any."""

    present: Fault | None = None

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function in place of a method, which fails in the engine's thread when the present fault says so."""

        @wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            fault = self.present
            if fault is None or threading.current_thread().name != "batchmaker-engine" or not fault.is_now(name):
                return real(*args, **options)
            result = real(*args, **options) if fault.after else None
            fault.fired += 1
            raise fault.kind(SAID, result is None)

        return call


class Loops(bm.Model):
    """Counts to 3, or to n if that is less; a loop that ends at a value."""

    def __init__(self) -> None:
        self.count = bm.Cell(Count(), max_batch=8, host_outputs=(0,))

    def unfold(self, n: int) -> Any:
        return self.count.loop((0,), until=lambda numbers: numbers == 3, max_steps=n)


class Totals(bm.Model):
    """The sum of numbers."""

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate(), max_batch=8)

    def unfold(self, xs: list[float]) -> Any:
        return self.add.run(xs, (0.0,))


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    found = Faults()
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in CALLS.items():
            for name in names:
                patch.setattr(owner, name, found.wrap(f"{owner.__name__}.{name}", getattr(owner, name)))
        logging.getLogger("batchmaker.engine").setLevel(logging.CRITICAL + 1)
        yield found
        logging.getLogger("batchmaker.engine").setLevel(logging.NOTSET)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one worker"),
        pytest.param(2, id="two workers", marks=pytest.mark.slow),
    ],
)
def engine(request: Any, faults: Faults) -> Iterator[bm.Engine]:
    """Of one worker no chunks are of live streams, beside which the requests of a bulk begin one by one."""
    frames = live_streams.FRAMES
    live_streams.FRAMES = -1 if request.param == 1 else frames  # type: ignore[misc]
    yield from _engine(request.param)
    live_streams.FRAMES = frames  # type: ignore[misc]


def _engine(num_workers: int) -> Iterator[bm.Engine]:
    models = {"totals": Totals(), "loops": Loops(), "counter": Counter(), "turns": Turns()}
    engine = bm.Engine(models, "cellular", workers=num_workers, threads=1)
    with engine:
        Mix(engine, seed=0).check(None)
        yield engine
        assert engine.heartbeat.alive
        assert engine.num_sequences == 0
    assert_balanced(engine)
    assert num_unanswered(engine) == 0


class Mix:
    """Requests of every kind, sent together, some cancelled. seed: of their sizes, and of who is cancelled."""

    def __init__(self, engine: bm.Engine, seed: int, *, cancels: bool = False) -> None:
        self.answered: Counts[int] = Counts()
        self._called = threading.Semaphore(0)
        self.asked: list[tuple[Answer, Any, bool]] = []
        self._engine = engine
        self._cancels = cancels
        self._mapped: list[Any] = []
        self._mapping = threading.Thread(target=self._map, daemon=True)
        self._mapping.start()
        with engine.open_sequence(model="turns") as one, engine.open_sequence(model="turns") as other:
            for k in range(4):
                n = 1 + (seed + 3 * k) % 5
                self._ask([float(x) for x in range(n)], "totals", sum(range(n)))
                self._ask(1 + n, "loops", min(1 + n, 3))
                self._ask(n, "counter", list(range(1, n + 1)), stream=k == 1)
                self._ask([1.0, 2.0, 3.0], "totals", 6.0)
            first = 1 + seed % 3
            chunks: list[tuple[int, Any]] = [
                (first, list(range(1, first + 1))), (2, [first + 1, first + 2]), (0, first + 2)
            ]  # fmt: skip
            for sequence in (one, other):
                for n, total in chunks:
                    self._note(self._sent(lambda n=n, s=sequence: s.submit(n)), total)  # type: ignore[misc]
            if cancels:
                for place in range(seed % 7, len(self.asked), 7):
                    answer, wanted, _ = self.asked[place]
                    self.asked[place] = (answer, wanted, answer.cancel())

    def _map(self) -> None:
        """Ask for requests of one call, which share a ticket."""
        try:
            self._mapped.append(self._engine.map([[1.0, 2.0]] * 10 + [[3.0]] * 10, progress=False, model="totals"))
        except BatchmakerError as error:
            self._mapped.append(error)

    def _ask(self, request: Any, model: str, wanted: Any, *, stream: bool = False) -> None:
        self._note(self._engine.submit(request, model=model, stream=stream), wanted)

    @staticmethod
    def _sent(submit: Callable[[], Answer]) -> Answer | None:
        try:
            return submit()
        except SequenceError:  # the sequence has ended already
            return None

    def _note(self, answer: Answer | None, wanted: Any) -> None:
        if answer is None:
            return
        number = len(self.asked)

        def note(_: Answer) -> None:
            self.answered.update([number])
            self._called.release()

        answer.add_done_callback(note)
        self.asked.append((answer, wanted, False))

    def check(self, fault: Fault | None) -> None:
        """Each request is answered once: as if it were alone, or with an error that says why."""
        self._mapping.join(120)
        (mapped,) = self._mapped
        if isinstance(mapped, BatchmakerError):
            assert fault is not None, mapped
            assert fault.fired, mapped
            assert SAID in str(mapped), mapped
        else:
            assert mapped == [3.0] * 20
        for answer, wanted, cancelled in self.asked:
            error = answer.exception(120)
            if cancelled:
                assert isinstance(error, CancelledError)
            elif error is None:
                result = answer.result()
                assert ([int(x) for x in result] if isinstance(wanted, list) else result) == wanted
            elif isinstance(error, SequenceError):  # a chunk before it was cancelled or has failed
                assert self._cancels or (fault is not None and fault.fired)
            else:
                assert fault is not None, error
                assert fault.fired, error
                assert isinstance(error, RequestError)
                assert SAID in str(error), error
        if fault is None or not fault.fired:
            assert len(self.asked) == 22
        assert all(self._called.acquire(timeout=120) for _ in self.asked)  # an answer is there before it is called
        assert all(self.answered[number] == 1 for number in range(len(self.asked)))


def try_fault(engine: bm.Engine, faults: Faults, fault: Fault, *, seed: int = 1, cancels: bool = False) -> None:
    before = engine.stats.restarts
    faults.present = fault
    try:
        mix = Mix(engine, seed, cancels=cancels)
        mix.check(fault)
    finally:
        faults.present = None
    assert engine.stats.restarts - before <= fault.fired
    Mix(engine, seed).check(None)
    assert engine.heartbeat.alive


@pytest.mark.parametrize(
    ("name", "kind", "after"),
    covering(
        EVERY,
        [ValueError, MemoryError, SystemExit],
        [False, True],
        has=lambda _, kind, after: after is (kind is MemoryError),
    ),
)
def test_a_failure_at_any_call_is_contained(
    engine: bm.Engine, faults: Faults, name: str, kind: type[BaseException], after: bool
) -> None:
    for at in (1, 4):
        try_fault(engine, faults, Fault(name, at, kind, after=after), seed=at)


def test_a_chunk_on_its_way_when_the_chunk_before_it_fails_ends_with_its_sequence(
    engine: bm.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is computed and not answered when the engine begins anew; the second comes to a driver without it."""
    sent: list[Answer] = []
    claim = Unanswered.claim

    def claim_once(unanswered: Unanswered, *args: Any) -> Any:
        if not sent:
            sent.append(sequence.submit(1))
            raise ValueError(SAID)
        return claim(unanswered, *args)

    before = engine.stats.restarts
    with engine.open_sequence(model="turns") as sequence:
        with monkeypatch.context() as patch:
            patch.setattr(Unanswered, "claim", claim_once)
            first = sequence.submit(1).exception(120)
            second = sent[0].exception(120)
        assert isinstance(first, RequestError)
        assert SAID in str(first)
        assert isinstance(second, SequenceError)
    Mix(engine, seed=0).check(None)
    assert engine.stats.restarts == before + 1


def test_every_call_is_made(engine: bm.Engine, faults: Faults) -> None:
    """So that none of the tests above is empty."""
    fault = faults.present = Fault("Scheduler.handle", 1, ValueError, after=False)  # the tables must grow anew
    while not fault.fired:  # it may be the call for a sequence that was closed before
        error = engine.submit(1, model="counter").exception(120)
        assert error is None or SAID in str(error)
    fault = Fault("none", 1, ValueError, after=False)
    faults.present = fault
    try:
        for _ in range(3):  # templates are proved by the second request of a shape
            Mix(engine, 3, cancels=True).check(None)
    finally:
        faults.present = None
    fault.seen["CellDriver.cancel"] += 1  # made only if the cancellation comes after the request has begun
    if len(engine.drivers) > 1:
        fault.seen.update(["Bulks.admit", "Bulks.reply"])
    assert sorted(set(EVERY) - set(fault.seen)) == []


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(1, 700),
    kind=st.sampled_from([ValueError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit]),
    after=st.booleans(),
    seed=st.integers(0, 1000),
    cancels=st.booleans(),
)
def test_a_failure_at_any_moment_is_contained(
    engine: bm.Engine,
    faults: Faults,
    at: int,
    kind: type[BaseException],
    after: bool,
    seed: int,
    cancels: bool,
) -> None:
    try_fault(engine, faults, Fault(None, at, kind, after=after), seed=seed, cancels=cancels)
