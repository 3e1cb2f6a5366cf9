"""Each router's rule, on replicas that are only numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from batchmaker.errors import OptionError, StoppedError
from batchmaker.fleet.routing import RULES, Router


def router_of(rule: str, replicas: int = 4, seed: int = 0) -> Router:
    router = Router(rule, seed)
    for replica in range(replicas):
        router.open(replica)
    return router


def test_round_robin_goes_one_after_the_other() -> None:
    router = router_of("round-robin", 3)
    assert [router.route(1) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_random_goes_everywhere_as_often() -> None:
    router = router_of("random")
    counts = Counter(router.route(1) for _ in range(4000))
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize("rule", ["least-requests", "least-work", "least-work-true", "sticky"])
def test_the_least_loaded_replica_is_chosen(rule: str) -> None:
    router = router_of(rule, 3)
    assert [router.route(weight) for weight in (5, 3, 4)] == [0, 1, 2]
    assert router.route(2) == 1  # now 5, 5, 4
    router.answered(0, 5)
    assert router.route(1) == 0


def test_replicas_that_have_equally_little_take_turns() -> None:
    router = router_of("least-requests", 3)
    chosen = []
    for _ in range(6):
        chosen.append(router.route(1))
        router.answered(chosen[-1], 1)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_of_two_choices_the_emptier_is_taken() -> None:
    router = router_of("two-choices", 2)
    router.load[0] = 100
    assert {router.route(1) for _ in range(50)} == {1}


def test_two_choices_are_two_different_replicas() -> None:
    router = router_of("two-choices", 3)
    router.load[:3] = (100, 0, 100)
    counts = Counter(router.route(0) for _ in range(3000))
    assert 1800 < counts[1] < 2200  # in two of three pairs


def test_two_choices_of_one_replica_are_that_one() -> None:
    assert router_of("two-choices", 1).route(1) == 0


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_closed_replica_is_never_chosen(rule: str) -> None:
    router = router_of(rule)
    router.close(2)
    assert 2 not in {router.route(1) for _ in range(100)}
    router.open(2)
    assert 2 in {router.route(1) for _ in range(100)}


def test_the_same_seed_chooses_the_same_replicas() -> None:
    one, same, other = ([router_of("random", seed=seed).route(1)] for seed in (1, 1, 2))
    routers = [router_of("random", seed=seed) for seed in (1, 1, 2)]
    one, same, other = ([router.route(1) for _ in range(50)] for router in routers)
    assert one == same
    assert one != other


def test_without_an_open_replica_there_is_nowhere_to_go() -> None:
    router = router_of("random", 1)
    router.close(0)
    with pytest.raises(StoppedError, match="no replica is open"):
        router.route(1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="least-work"):
        Router("least-wrok")
    with pytest.raises(OptionError, match="seed"):
        Router("random", -1)
    with pytest.raises(OptionError, match="open already"):
        router_of("random").open(1)
    with pytest.raises(OptionError, match="cannot be closed"):
        router_of("random").close(7)


def test_an_opened_replica_has_nothing_to_do() -> None:
    router = router_of("least-work", 2)
    router.route(10)
    router.close(0)
    router.open(0)
    assert router.load[:2].tolist() == [0, 0]
