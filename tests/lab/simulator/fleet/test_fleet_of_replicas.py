"""A fleet in virtual time: every request is accounted for, and what routers, deaths and scaling do."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_fleets import device_of, drawn, model_of, play, work_of

from batchmaker.errors import OptionError
from batchmaker.fleet.routing import RULES
from batchmaker.fleet.scaling import ScalingRule
from batchmaker.lab.simulator.fleet.records import ANSWERED, FAILED, WAITING, FleetRecords
from covering import covering

ONE_STEP_S = 2.2e-4  # of one row


def p99(records: FleetRecords) -> float:
    return float(np.percentile(records.finished_s - records.arrived_s, 99))


@pytest.mark.parametrize(("router", "fidelity"), covering(sorted(set(RULES) - {"sticky"}), ["exact", "fast"]))
def test_every_request_is_answered_once(fidelity: str, router: str) -> None:
    steps, arrived_s = drawn(250, 3000, seed=1)
    records = play(fidelity, work_of(model_of(8), steps, arrived_s), router)
    assert (records.outcome == ANSWERED).all()
    assert (records.tries == 1).all()
    assert (records.finished_s - arrived_s >= steps * 2e-4).all()
    assert records.rows == steps.sum()


@pytest.mark.parametrize("fidelity", ["exact", "fast"])
def test_a_request_whose_replica_dies_is_tried_once_more_and_then_fails(fidelity: str) -> None:
    steps, arrived_s = drawn(1500, 3000, seed=2)
    records = play(fidelity, work_of(model_of(8), steps, arrived_s), "least-requests", mean_life_s=0.05, start_s=0.001)
    failed, again = records.outcome == FAILED, records.tries == 2
    assert records.deaths > 10
    assert not (records.outcome == WAITING).any()
    assert np.isfinite(records.finished_s).all()
    assert (records.tries[failed] == 2).all()
    assert failed.any()
    assert (again & ~failed).any()
    assert (records.finished_s >= arrived_s).all()


@pytest.mark.parametrize("fidelity", ["exact", "fast"])
def test_requests_wait_for_a_replica_while_none_serves(fidelity: str) -> None:
    work = work_of(model_of(8), [4] * 400, np.arange(400) * 1e-3)
    records = play(fidelity, work, "round-robin", replicas=1, mean_life_s=0.05, start_s=0.02)
    assert records.deaths > 2
    assert not (records.outcome == WAITING).any()
    latency_s = records.finished_s - records.arrived_s
    assert (latency_s[records.outcome == ANSWERED] > 0.01).sum() > 20


@pytest.mark.parametrize("fidelity", ["exact", "fast"])
def test_a_sequence_stays_with_its_replica_and_ends_with_it(fidelity: str) -> None:
    count, chunks = 60, 8
    begins = np.sort(np.random.default_rng(1).uniform(0, 0.4, count))
    times = (begins[:, None] + 0.03 * np.arange(chunks)).ravel()
    order = np.argsort(times, kind="stable")
    sequence = np.repeat(np.arange(count), chunks)[order]
    work = work_of(model_of(8), [5] * len(order), times[order], sequence=sequence)
    quiet = play(fidelity, work, "sticky")
    for number in range(count):
        assert len(set(quiet.replica[sequence == number].tolist())) == 1
    assert (quiet.outcome == ANSWERED).all()

    dying = play(fidelity, work, "sticky", mean_life_s=0.15, start_s=0.01)
    assert dying.deaths
    assert (dying.tries <= 1).all()  # its state is nowhere else
    for number in range(count):
        mine = dying.outcome[sequence == number].tolist()
        assert mine == sorted(mine)  # once one has failed, all after it have
        assert len(set(dying.replica[sequence == number].tolist()) - {-1}) <= 1


def test_new_sequences_go_where_the_fewest_are_open() -> None:
    sequence = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    work = work_of(model_of(4), [2] * 12, np.arange(12) * 0.01, sequence=sequence)
    records = play("fast", work, "sticky", replicas=3)
    assert np.bincount(records.replica).tolist() == [4, 4, 4]


def test_sticky_is_for_sequences_alone() -> None:
    for sequence, router in (([0, 0], "least-work"), (None, "sticky")):
        with pytest.raises(OptionError, match="state is where one began"):
            play("fast", work_of(model_of(4), [2, 2], [0.0, 0.0], sequence=sequence), router)


def test_least_work_is_better_than_round_robin_where_lengths_have_a_heavy_tail() -> None:
    work = work_of(model_of(8), *drawn(20_000, 2200, seed=9, sigma=1.0))
    by_turns, by_work = (play("fast", work, router, replicas=8, max_batch=2, device=device_of(2)) for router in (
        "round-robin", "least-work"))  # fmt: skip
    assert p99(by_work) < 0.8 * p99(by_turns)


def test_true_lengths_are_worth_having_where_the_router_guesses_badly() -> None:
    steps, arrived_s = drawn(20_000, 2200, seed=10, sigma=1.0)
    model = model_of(2)
    blind = work_of(model, steps, arrived_s)
    blind.known_ns[:] = np.random.default_rng(0).permutation(blind.known_ns)  # as spread, but of others
    guessed, known = (play("fast", blind, router, replicas=8, max_batch=2, device=device_of(2)) for router in (
        "least-work", "least-work-true"))  # fmt: skip
    assert p99(known) < p99(guessed)


@pytest.mark.parametrize("measure", ["work", "sequences"])
def test_the_fleet_follows_a_step_in_load_up_and_down(measure: str) -> None:
    rng = np.random.default_rng(11)
    arrived_s = np.concatenate((
        np.sort(rng.uniform(0, 2, 400)), np.sort(rng.uniform(2, 4, 12_000)), np.sort(rng.uniform(4, 8, 800)),
    ))  # fmt: skip
    sequence = np.arange(len(arrived_s)) if measure == "sequences" else None
    work = work_of(model_of(8), [20] * len(arrived_s), arrived_s, sequence=sequence)
    target = 0.004 if measure == "work" else 10
    rule = ScalingRule(measure, target, least=1, most=30, every_s=0.1, cool_s=0.5)
    records = play(
        "fast", work, "sticky" if sequence is not None else "least-work", replicas=1, start_s=0.2, scaling=rule
    )
    serving = {
        name: np.mean([sample.serving for sample in records.samples if begin <= sample.at_s < end])
        for name, begin, end in (("before", 1, 2), ("during", 3, 4), ("after", 6, 8))
    }
    assert serving["during"] > 3 * serving["before"]
    assert serving["after"] < 0.5 * serving["during"]
    assert (records.outcome == ANSWERED).all()
    early = [sample for sample in records.samples if 2.0 <= sample.at_s < 2.25]
    assert max(sample.starting for sample in early) > 0
    assert max(sample.serving for sample in early) <= serving["before"] + 1  # they start slowly
    assert records.paid_s < 0.7 * 8.1 * max(sample.serving for sample in records.samples)


def test_a_shrinking_fleet_finishes_what_it_has() -> None:
    work = work_of(model_of(8), [300] * 40, [0.0] * 39 + [2.0])
    rule = ScalingRule("work", target=100.0, every_s=0.01, cool_s=0.0)
    records = play("fast", work, "round-robin", replicas=5, scaling=rule)
    assert (records.outcome == ANSWERED).all()
    assert set(records.replica[:39].tolist()) == {0, 1, 2, 3, 4}
    assert records.samples[-1].serving == 1
    assert any(sample.leaving for sample in records.samples)


def test_the_same_seed_gives_the_same_fleet_and_another_one_another() -> None:
    work = work_of(model_of(8), *drawn(500, 3000, seed=12))
    one, same, other = (play("fast", work, "random", seed=seed, mean_life_s=0.5) for seed in (1, 1, 2))
    assert one.replica.tolist() == same.replica.tolist()
    assert one.replica.tolist() != other.replica.tolist()


def test_what_is_paid_for_is_every_replica_from_when_it_is_asked_for() -> None:
    work = work_of(model_of(8), [10] * 10, np.arange(10) * 0.1)
    records = play("fast", work, "round-robin", replicas=3)
    assert records.paid_s == pytest.approx(3 * records.finished_s.max())
