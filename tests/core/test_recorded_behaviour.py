"""The scheduler does what it did: the same steps at the same times, in the same rows (see recorded_behaviour.py)."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from recorded_behaviour import SITUATIONS, recorded

USUAL = 20
"""One in so many situations is played by the tests that are not slow."""


def check(kind: str, every: int) -> int:
    """Play one in `every` situations and compare; return how many were played."""
    kept, played = recorded(kind), 0
    situations = dict(SITUATIONS[kind]())
    assert situations.keys() == kept.keys()
    for name in list(situations)[::every]:
        found: dict[str, Any] = json.loads(json.dumps(situations[name]()))
        for step, (ours, before) in enumerate(zip(found["timeline"], kept[name]["timeline"], strict=False)):
            assert ours == before, f"{name}: entry {step} of the timeline"
        assert found == kept[name], name
        played += 1
    return played


@pytest.mark.parametrize("kind", SITUATIONS)
def test_some_situations_go_as_they_were_recorded(kind):
    assert check(kind, USUAL) == math.ceil(len(recorded(kind)) / USUAL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SITUATIONS)
def test_all_situations_go_as_they_were_recorded(kind):
    assert check(kind, 1) == len(recorded(kind))


def test_what_is_recorded_has_failures_sequences_workers_and_programs_that_wait():
    found = recorded("programs").values()
    assert {how for played in found for _, _, how in played["ends"]} >= {"reply", "cell", "cancelled", "deadline"}
    assert {entry[1] for played in found for entry in played["timeline"]} == {0, 1, 2}
    assert any(request >= 1000 for played in found for request, _, _ in played["ends"])
