"""Any requests, together on any engine, are answered once each and as alone, and no compiled loop leaves its arrays.

The slow test here runs in a process whose compiled loops check bounds. BATCHMAKER_EXAMPLES says how many mixes of
requests it tries: 60 take one or two minutes, 1500 about half an hour.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import pytest
from checked_commands import CommandChecks
from engine_models import assert_balanced
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plain_cells import PlainCell, resolved, same
from planned_requests import (
    CLOSE,
    HIDDEN,
    MEMORIES,
    VOCABULARY,
    Above,
    Calls,
    Chooses,
    Counts,
    Cuts,
    Forgets,
    Grows,
    Hand,
    Listens,
    Looks,
    Maps,
    Plan,
    Planned,
    PlannedWaiting,
    Reads,
    Recalls,
    Returns,
    Speaks,
    Waits,
    cells_of,
    modules,
)
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.compile.loops import ChainLoop
from batchmaker.compiled import config
from batchmaker.engine import Answer, stop_tests
from batchmaker.errors import BatchmakerError, CancelledError, DeadlineError, SequenceError
from insides import schedulers

NUM_EXAMPLES: Final = int(os.environ.get("BATCHMAKER_EXAMPLES", "60"))
TOLERANCE: Final = 1e-4
MODULES: Final = modules()


# --- what is drawn --------------------------------------------------------------------------------------------------

REF = st.integers(0, 7)
TOKEN = st.integers(0, VOCABULARY - 1)
UNTIL = st.one_of(
    st.none(),
    TOKEN,
    st.builds(Above, st.integers(-2, VOCABULARY), st.one_of(st.none(), st.none(), TOKEN)),
)
STEPS = st.one_of(st.integers(1, 8), st.integers(1, 60), st.integers(1, 400))
KIND = st.sampled_from(["vectors", "tokens", "numbers", "rows", "words"])
WORDS = st.one_of(*[st.lists(TOKEN, max_size=20)] * 6, st.lists(st.integers(-2, VOCABULARY + 1), max_size=20)).map(
    tuple
)
CHILDREN = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6).map(tuple)
PLAIN_MOVE = st.one_of(
    st.builds(Reads, WORDS, REF, st.none() | REF, st.booleans()),
    st.builds(Speaks, REF, REF, UNTIL, STEPS, st.booleans()),
    st.builds(Counts, REF, st.none() | st.just(0) | UNTIL, STEPS, st.booleans()),
    st.builds(Calls, st.sampled_from(["mix", "say", "speak", "read", "widen", "guard", "shift"]), REF, REF),
    st.builds(Maps, REF),
    st.builds(Looks, REF, REF, st.booleans()),
    st.builds(Listens, st.lists(TOKEN, max_size=20).map(tuple), st.none() | REF, REF, st.booleans()),
    st.builds(Recalls, REF, REF, UNTIL, st.integers(1, 8) | st.integers(1, 60)),
    st.builds(Grows, REF, CHILDREN),
    st.builds(Cuts, REF, REF),
    st.builds(Returns, KIND, REF),
    st.builds(Forgets, KIND, REF),
)
MOVE = st.one_of(
    PLAIN_MOVE, PLAIN_MOVE, st.builds(Waits, REF, st.booleans()), st.builds(Chooses, PLAIN_MOVE, PLAIN_MOVE)
)
PLAN = st.builds(Plan, st.lists(MOVE, min_size=1, max_size=12).map(tuple))


@dataclass(frozen=True)
class Ask:
    """Some equal requests. deadline: when. give_up: when they are cancelled.

    sequence: of which they are chunks, if any. resumes: it goes on before, whatever has become of its earlier chunks.
    """

    plan: int
    times: int
    priority: int
    deadline: str
    give_up: str
    stream: bool
    sequence: int | None
    resumes: bool


ASK_ONE: Final = Ask(0, 3, 0, "none", "never", False, None, False)
ASK = st.builds(
    Ask,
    st.integers(0, 3),
    st.integers(1, 3) | st.integers(1, 60),
    st.integers(-1, 2),
    st.sampled_from(["none"] * 5 + ["far", "soon", "over"]),
    st.sampled_from(["never"] * 5 + ["at once", "later"]),
    st.booleans(),
    st.none() | st.none() | st.integers(0, 2),
    st.booleans(),
)


@dataclass(frozen=True)
class Mix:
    """Plans, who asks for them in which order, and an engine. loops: whether tasks run in compiled loops."""

    plans: tuple[Plan, ...]
    asks: tuple[Ask, ...]
    policy: str
    workers: int
    max_batch: int
    late: str
    loops: str


MIX = st.builds(
    Mix,
    st.lists(PLAN, min_size=1, max_size=4).map(tuple),
    st.lists(ASK, min_size=1, max_size=16).map(tuple),
    st.sampled_from([
        "auto", "auto", "auto:hopeless=drop", "cellular", "cellular:max_steps=1", "cellular:max_steps=5",
        "cellular:budget_ms=1000", "lazy:slack=replay", "lazy", "agenda", "depth", "sufficient",
    ]),
    st.integers(1, 3),
    st.sampled_from([1, 4, 32]),
    st.sampled_from(["give-up", "finish"]),
    st.sampled_from(["always", "never"]),
)  # fmt: skip


# --- what is expected -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a plan answers alone.

    computes: whether it calls any cell. gap: the smallest between the two best scores of any token that was chosen.
    """

    result: Any
    computes: bool
    kept: dict[str, list[Any]]
    streamed: list[Any]
    error: Exception | None
    gap: float


class Alone:
    """Plays plans in plain PyTorch."""

    def __init__(self) -> None:
        made = copy.deepcopy(MODULES)
        self._gap, self._calls = float("inf"), 0
        for name in ("speak", "say", "recall"):
            made[name].out.register_forward_hook(self._note_gap)
        for module in made.values():
            module.register_forward_hook(self._count_call)
        states = {"read": (HIDDEN, HIDDEN), "listen": (HIDDEN,), "recall": (HIDDEN,)}
        self._cells = {
            name: PlainCell(
                module,
                states.get(name, ()),
                memory=1 if name in MEMORIES else None,
                own=1 if name == "recall" else None,
            )
            for name, module in made.items()
        }

    def _note_gap(self, _module: nn.Module, _given: Any, scores: Tensor) -> None:
        best, second = scores.topk(2).values[0].tolist()
        self._gap = min(self._gap, best - second)

    def _count_call(self, *_: Any) -> None:
        self._calls += 1

    def play(self, plan: Plan, kept: dict[str, list[Any]] | None = None) -> Outcome:
        hand, streamed, self._gap, self._calls = Hand(self._cells, kept), [], float("inf"), 0
        error = None
        try:
            playing = plan.play(hand)
            wanted = next(playing, None)
            while wanted is not None:
                streamed.append(resolved(wanted))
                try:
                    wanted = playing.send(streamed[-1])
                except StopIteration:
                    wanted = None
        except Exception as raised:  # of a cell or a stop test
            error = raised
        return Outcome(resolved(hand.results), self._calls > 0, hand.kept(), streamed, error, self._gap)


# --- the test -------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request that was submitted. cancelled: whether its cancellation came in time."""

    ask: Ask
    answer: Answer
    cancelled: bool = False
    resumed: bool = False

    def give_up(self, when: str) -> None:
        if self.ask.give_up == when:
            self.cancelled = self.answer.cancel()


DEADLINES: Final = {"none": None, "far": 1e9, "soon": 3.0, "over": -1.0}


def ask_all(mix: Mix, engine: bm.Engine) -> list[Asked]:
    """Submit everything, and return it in order once it is answered."""
    asked: list[Asked] = []
    sequences: dict[tuple[int, str], Any] = {}
    for ask in mix.asks:
        plan = mix.plans[ask.plan % len(mix.plans)]
        model = "waiting" if plan.waits else "plain"
        options = {"stream": ask.stream, "deadline_ms": DEADLINES[ask.deadline]}
        for number in range(ask.times):
            if ask.sequence is None:
                one = Asked(ask, engine.submit(plan, priority=ask.priority, model=model, **options))
            else:
                key = ask.sequence, model
                if key not in sequences:
                    sequences[key] = engine.open_sequence(priority=ask.priority, model=model)
                resumed = ask.resumes and number == 0
                if resumed:
                    for before in asked:
                        if before.ask.sequence == ask.sequence:
                            before.answer.exception(120)
                    sequences[key].resume()
                one = Asked(ask, sequences[key].submit(plan, **options), resumed=resumed)
            asked.append(one)
            one.give_up("at once")
    for one in asked:
        one.give_up("later")
    for one in asked:
        one.answer.exception(120)
    for sequence in sequences.values():
        sequence.close()
    return asked


def check_one(mix: Mix, one: Asked, outcome: Outcome) -> None:
    """The answer is what the plan answers alone; or the error is one that this request may have."""
    error = one.answer.exception(0)
    if one.cancelled:
        assert isinstance(error, CancelledError)
        return
    if error is not None:
        late = mix.late == "give-up" or mix.policy == "auto:hopeless=drop"
        if one.ask.deadline in ("soon", "over") and late and isinstance(error, DeadlineError):
            return
        assert outcome.error is not None, f"{type(error).__name__}: {error}"
        assert isinstance(error, BatchmakerError)
        return
    if outcome.gap < CLOSE:  # rounding may have chosen another token
        return
    assert outcome.error is None, f"answered, where {outcome.error!r} was raised alone"
    assert one.ask.deadline != "over" or mix.late == "finish" or not outcome.computes
    result = one.answer.result(0)
    assert same(result, outcome.result, TOLERANCE), f"got {result}, alone {outcome.result}"
    if one.ask.stream and outcome.streamed:
        streamed = list(one.answer)
        assert same(streamed, outcome.streamed, TOLERANCE), f"streamed {streamed}, alone {outcome.streamed}"


def check_all(mix: Mix, asked: list[Asked], alone: Alone) -> None:
    """Each request by itself, and each chunk by what its sequence had kept."""
    known: dict[int, Outcome] = {}
    kept: dict[tuple[int, bool], dict[str, list[Any]]] = {}
    broken: set[tuple[int, bool]] = set()
    vague: set[tuple[int, bool]] = set()  # what they keep is not known
    for one in asked:
        number = one.ask.plan % len(mix.plans)
        plan = mix.plans[number]
        if one.ask.sequence is None:
            if number not in known:
                known[number] = alone.play(plan)
            check_one(mix, one, known[number])
            continue
        key = one.ask.sequence, plan.waits
        if one.resumed:
            broken.discard(key)
        error = one.answer.exception(0)
        if key in broken:
            assert isinstance(error, SequenceError | CancelledError | DeadlineError)
            continue
        outcome = alone.play(plan, kept.get(key))
        if key not in vague:
            check_one(mix, one, outcome)
        if error is not None:
            broken.add(key)
        else:
            kept[key] = outcome.kept
            if outcome.gap < CLOSE:
                vague.add(key)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(mix=MIX)
@example(
    mix=Mix(  # loops with a stop test, and behind them nodes of no loop in the same tasks
        (Plan((Speaks(1, 0, 5, 400, True),)), Plan((Speaks(2, 1, None, 60, True), Returns("words", 0)))),
        (ASK_ONE, dataclasses.replace(ASK_ONE, plan=1, times=40)),
        "cellular",
        1,
        32,
        "give-up",
        "always",
    )
)
def play(mix: Mix) -> None:
    """Ask for everything on an engine of its own, whose arrays begin small, so that they grow."""
    settled: Counter[int] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainLoop, "fastest", lambda self, _: self.loop if mix.loops == "always" else None)
        patch.setattr(stop_tests, "_FEWEST", 8)
        cells = cells_of(MODULES, mix.max_batch)
        models = {"plain": Planned(cells), "waiting": PlannedWaiting(cells)}
        engine = bm.Engine(models, mix.policy, workers=mix.workers, threads=1, late=mix.late)  # type: ignore[arg-type]
        checks = [CommandChecks(core) for core in schedulers(engine)]
        for driver, each in zip(engine.drivers, checks, strict=True):
            driver.record = each  # type: ignore[attr-defined]
        engine.on_settled = lambda ticket, _: settled.update([ticket.request_id])
        with engine:
            asked = ask_all(mix, engine)
            assert engine.heartbeat.alive
            probe = engine.submit(Plan((Counts(5, 0, 9, False), Returns("numbers", 1))), model="plain")
            assert probe.result(120) == [15]
    assert not [wrong for each in checks for wrong in each.wrong]
    assert sorted(settled) == list(range(len(asked) + 1))
    assert set(settled.values()) == {1}
    assert_balanced(engine)
    check_all(mix, asked, Alone())


@pytest.mark.slow
def test_any_requests_are_answered_once_and_as_alone_and_every_index_is_within_its_array() -> None:
    if config.BOUNDSCHECK:
        play()
        return
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "slow", "-x", __file__]
    done = subprocess.run(command, env={**os.environ, "NUMBA_BOUNDSCHECK": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:]
