"""Q-learning of the order of batches: what it finds, and that chance has no part in it but by the seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from learned_graphs import INNER, OTHER, lattice, trees

from batchmaker.errors import DataError, OptionError
from batchmaker.graph.bound import lower_bound
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import merged, mini_batch
from batchmaker.policies.agenda import AgendaRemainingPolicy
from batchmaker.policies.learned.encodings import ENCODINGS
from batchmaker.policies.learned.policy import TablePolicy
from batchmaker.policies.sufficient import SufficientPolicy
from batchmaker_papers.learners.learning import Samples, learn
from batchmaker_papers.learners.mini_batch import num_batches
from batchmaker_papers.learners.qlearning import Learner, Settings
from batchmaker_papers.learners.refiner import Refiner

SHORT = Settings(episodes=100, learners=1, roll_outs=0)


@pytest.fixture(scope="module")
def lattices() -> Samples:
    return Samples([lattice(10 + i % 15, seed=i) for i in range(60)], 8, seed=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("batch", [1, 8])
def test_trees_never_seen_meet_the_lower_bound_with_every_encoding(encoding, batch):
    found = learn(Samples(trees(80, seed=1), batch, seed=0), replace(SHORT, encoding=encoding))
    assert found.ratio == 1.0
    policy = TablePolicy(encoding, found.table)
    for seed in range(2, 6):
        counted = merged(trees(batch, seed=seed))
        assert num_batches(Frontier(counted), policy) == lower_bound(counted)


def test_what_is_learnt_needs_far_fewer_batches_than_the_agenda():
    found = learn(Samples(trees(80, seed=1, kinds=(INNER, OTHER)), 8, seed=0), replace(SHORT, episodes=300))
    others = [Frontier(merged(trees(8, seed=seed, kinds=(INNER, OTHER)))) for seed in range(10, 15)]
    learnt, agenda, condition = (
        sum(num_batches(frontier, policy) for frontier in others)
        for policy in (TablePolicy("sort", found.table), AgendaRemainingPolicy(), SufficientPolicy())
    )
    assert learnt < 0.8 * agenda
    assert learnt <= 1.02 * condition
    assert learnt < 1.35 * sum(lower_bound(frontier.mini_batch) for frontier in others)


def test_the_same_seed_gives_the_same_table_and_another_seed_another_course(lattices):
    one, same, other = (learn(lattices, replace(SHORT, seed=seed)) for seed in (3, 3, 4))
    assert (one.table, one.curve) == (same.table, same.curve)
    assert one.curve != other.curve


def test_the_best_table_of_all_roll_outs_is_kept(lattices):
    found = learn(lattices, replace(SHORT, learners=2, episodes=60, every=20))
    assert [(out.learner, out.episode) for out in found.curve] == [(i, e) for i in (0, 1) for e in (20, 40, 60)]
    assert found.ratio == min(out.ratio for out in found.curve)
    assert lattices.ratio(TablePolicy("sort", found.table)) == found.ratio


def test_progress_counts_the_episodes_of_all_learners(lattices):
    told: list[tuple[int, float]] = []
    found = learn(lattices, replace(SHORT, learners=2, episodes=50), lambda done, ratio: told.append((done, ratio)))
    assert [done for done, _ in told] == [25, 50, 75, 100]
    assert told[-1][1] == found.ratio
    assert [ratio for _, ratio in told] == sorted((ratio for _, ratio in told), reverse=True)


def test_a_value_is_the_sum_of_the_next_n_rewards():
    """Two chains, aab and b: both of b are independent, but only one is ready before aa has run."""
    chains = Frontier(mini_batch([0, 0, 1, 1], [[], [0], [1], []], 2))
    settings = Settings(encoding="base", steps=2, rate=1.0, epsilon=0.0, least_epsilon=0.0)
    learner = Learner(settings, random.Random(0))
    learner.play(chains)  # all values are 0: a of (a, b), a again, then b, which has both nodes: no reward is lost
    assert learner.table() == {(0, 1): 0, (1,): 1}
    assert learner.values == {(0, 1): {0: 0.0, 1: 0.0}, (1,): {1: 0.0}}
    learner.values[0, 1][1] = 1.0  # and as if b looked better: -1 + 1/2, then a at no cost
    learner.play(chains)
    assert learner.values[0, 1] == {0: 0.0, 1: -0.5}


def test_refining_changes_choices_until_none_helps_and_never_makes_the_samples_worse(lattices):
    rough = learn(lattices, replace(SHORT, episodes=10))
    refiner = Refiner(lattices.to_learn, "sort", rough.table, random.Random(0))
    before = sum(num_batches(frontier, TablePolicy("sort", rough.table)) for frontier in lattices.to_learn)
    refiner.refine(2000)
    after = sum(num_batches(frontier, TablePolicy("sort", refiner.table)) for frontier in lattices.to_learn)
    assert refiner.table.keys() == rough.table.keys()
    assert after < before
    assert refiner.num_roll_outs <= 2000 + 2 * len(lattices.to_learn)


def test_what_was_refined_is_kept_only_if_it_is_no_worse_on_what_was_held_out(lattices):
    rough, refined = (learn(lattices, replace(SHORT, episodes=25, roll_outs=n)) for n in (0, 500))
    assert refined.ratio <= rough.ratio
    assert refined.curve[-1].learner == 1  # the roll-out after the learners'
    assert refined.ratio == lattices.ratio(TablePolicy("sort", refined.table))


def test_samples_are_of_several_sizes_and_comparisons_of_the_batch_size():
    requests = [mini_batch([0, 1], [[], [0]], 2)] * 40
    samples = Samples(requests, 4, seed=0)
    assert {len(frontier.mini_batch) for frontier in samples.to_learn} == {2 * 4, 2 * 2}
    assert {len(frontier.mini_batch) for frontier in samples.held_out} == {2 * 4}
    assert samples.bound == 2 * len(samples.held_out)


def test_fewer_requests_than_a_batch_are_refused():
    with pytest.raises(DataError, match="got 3 requests to learn from, expected at least one batch of 4"):
        Samples(trees(3, seed=0), 4, seed=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"encoding": "sorted"}, "unknown encoding 'sorted'; known: base, max, sort"),
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"rate": 1.5}, "rate must be from 0 to 1, got 1.5"),
        ({"epsilon": -0.1}, "epsilon must be from 0 to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        Settings(**options)


def test_the_papers_own_settings_learn_too(lattices):
    paper = Settings(episodes=150, rate=0.4, every=50, learners=1)
    with_bootstrap = replace(paper, bootstrap=True)
    depth_first = lattices.ratio(TablePolicy("sort", {}))
    for settings in (paper, with_bootstrap):
        assert 1.0 <= learn(lattices, settings).ratio < 1.5 * depth_first
