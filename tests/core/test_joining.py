"""The compiled tests of who may join decide as the equations do, written down in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from situation import Situation, enter
from slack_equations import (
    EquationTwo,
    NoSlack,
    ReplaySlack,
    SlackTest,
    best_of_worthwhile,
    largest_prefix,
    slack_of_line_s,
    whole_of,
)  # fmt: skip

from batchmaker.cost.replay import Replay
from batchmaker.graph.cell_graph import Work
from batchmaker.policies.beginning import num_beginning
from batchmaker.policies.expectation import StepsLeft
from batchmaker.policies.joining import (
    ALIKE,
    LITERAL,
    NO_TEST,
    OLDEST,
    REPLAY,
    JoiningRules,
    num_joining,
)  # fmt: skip
from batchmaker.policies.requests import RequestTable
from batchmaker.policies.type_order import most_answered_rps

RULES = [JoiningRules(*chosen) for chosen in itertools.product(
    (NO_TEST, REPLAY, OLDEST, LITERAL), (False, True), (False, True), (False, True))]  # fmt: skip


def equation(rules: JoiningRules) -> SlackTest:
    if rules.slack == NO_TEST:
        return NoSlack()
    if rules.slack == REPLAY:
        return ReplaySlack(veto=rules.veto)
    return EquationTwo(oldest_only=rules.slack == OLDEST, from_table=rules.from_table, veto=rules.veto)


def drawn(seed: int, *, wide: bool) -> Situation:
    """Some requests in flight and some in line. Seconds are whole, so that no sum is rounded."""
    rng = np.random.default_rng(seed)
    num_types, num, most = int(rng.integers(1, 5)), int(rng.integers(2, 12)), int(rng.integers(1, 9))
    table = RequestTable()
    for _ in range(num_types):
        table.add_type()
    num_in_flight = int(rng.integers(1, num))
    for slot in range(num):
        deadline_s = float(rng.integers(1, 300))
        steps = rng.integers(0, 6, num_types) * (rng.random(num_types) < 0.7)
        used = np.flatnonzero(steps)
        rows = rng.integers(1, 4, len(used)) if wide else 1
        enter(table, slot, deadline_s, Work(used, steps[used] * rows, steps[used]))
        if slot < num_in_flight:
            table.begin([slot], float(rng.integers(0, 20)))
    seconds = rng.integers(1, 4, (num_types, most + 1)).cumsum(axis=1).astype(np.float64)
    seconds[:, 0] = 0
    slots = np.arange(num)
    return Situation(table, StepsLeft("true", 0.75, 90.0), Replay(seconds), 20.0, slots, num_in_flight)


def joining(situation: Situation, rules: JoiningRules) -> int:
    s = situation
    width = ALIKE if s.width is None else s.width
    return num_joining(
        s.left, width, whole_of(s), s.num_in_flight, s.replay.seconds, s.deadline_s, slack_of_line_s(s), rules,
    )  # fmt: skip


@pytest.mark.parametrize("wide", [False, True])
@given(seed=st.integers(0, 10_000))
def test_as_many_join_as_the_equations_allow(wide: bool, seed: int) -> None:
    situation = drawn(seed, wide=wide)
    for rules in RULES:
        assert joining(situation, rules) == largest_prefix(situation, equation(rules), benefit=rules.benefit), rules


@pytest.mark.parametrize("wide", [False, True])
@given(seed=st.integers(0, 10_000), behind=st.integers(0, 5))
def test_under_auto_those_begin_with_whom_the_fewest_are_late_and_all_are_done_soonest(
    wide: bool, seed: int, behind: int
) -> None:
    s = drawn(seed, wide=wide)
    num_waiting = s.num_candidates + behind
    found = num_beginning(
        s.left, ALIKE if s.width is None else s.width, s.num_in_flight, s.replay.seconds, s.deadline_s, num_waiting
    )
    assert found == best_of_worthwhile(s, num_waiting)


@pytest.mark.parametrize("wide", [False, True])
@given(seed=st.integers(0, 10_000))
def test_a_model_is_worth_the_most_that_it_answers_a_second_by_the_forecast(wide: bool, seed: int) -> None:
    s = drawn(seed, wide=wide)
    finish_s = np.sort(s.replay.forecasts(s.left, len(s.left), s.width).finish_s[0])
    rates = np.arange(1, len(finish_s) + 1) / np.maximum(finish_s, 1e-12)  # of those that are done already, no matter
    found = most_answered_rps(s.left, ALIKE if s.width is None else s.width, s.replay.seconds)
    assert found == pytest.approx(rates.max(initial=0.0))


def test_under_auto_a_burst_begins_in_groups_where_that_takes_no_longer_in_all() -> None:
    """A step takes a second for each two rows: nine are done at 20 s; four at 8 s and five at 20 s are better."""
    left, never = np.full((9, 1), 4), np.full(9, np.inf)
    seconds = np.array([[0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]])
    assert num_beginning(left, ALIKE, 1, seconds, never, 8) == 3


def test_under_auto_pairs_begin_out_of_a_long_line_where_larger_batches_gain_almost_nothing() -> None:
    """The second row takes 0.96 s, so whoever is first waits 0.96 s for it, and all behind save 0.04 s each."""
    num = 40
    left, never = np.ones((num, 1), np.int64), np.full(num, np.inf)
    seconds = np.concatenate(([0.0, 1.0], 1.96 + 0.97 * np.arange(num)))[None]
    assert num_beginning(left, ALIKE, 1, seconds, never, num - 1) == 1


def test_nobody_joins_when_each_newcomer_makes_the_first_late() -> None:
    """One request with four steps left and four in line; a step takes as long as its rows."""
    left = np.full((5, 1), 4)
    seconds = np.arange(9.0)[None]
    deadline_s = np.array([4.0, *[99.0] * 4])
    rules = JoiningRules(REPLAY, veto=False, from_table=False, benefit=False)
    assert num_joining(left, ALIKE, left, 1, seconds, deadline_s, deadline_s, rules) == 0
    deadline_s[0] = 8.0  # two rows: four steps of two seconds
    assert num_joining(left, ALIKE, left, 1, seconds, deadline_s, deadline_s, rules) == 1


def test_rows_that_rounding_leaves_behind_the_longest_request_are_no_step() -> None:
    left, width = np.array([[1], [2]]), np.array([[1e16], [1.5]])  # 1e16 + 1.5 - 1e16 - 1.5 is 0.5
    seconds = np.array([[0.0, 1.0]])
    assert most_answered_rps(left, width, seconds) == pytest.approx(2 / 1e16)
    assert num_beginning(left, width, 1, seconds, np.full(2, np.inf), 1) in (0, 1)
