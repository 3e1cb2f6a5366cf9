"""Keys: who may call, how often, and what errors do not say."""

from __future__ import annotations

import pytest

from batchmaker.clock import VirtualClock
from batchmaker.errors import OptionError
from batchmaker.server.access.auth import WRONG_A_SECOND, KeyRing, TokenBucket, read_keys
from batchmaker.server.faults import FaultKind, ServiceError

KEYS = {"ann": "a" * 20, "bob": "b" * 20}


def test_without_keys_anybody_may_call():
    ring = KeyRing({})
    assert ring.open
    assert ring.caller(None) == ""


def test_a_key_names_its_holder():
    ring = KeyRing(KEYS)
    assert not ring.open
    assert [ring.caller(key) for key in KEYS.values()] == list(KEYS)


@pytest.mark.parametrize("key", [None, "", "c" * 20, "a" * 19, "a" * 21, "ä\udcff"])
def test_other_keys_are_refused_alike(key):
    with pytest.raises(ServiceError) as caught:
        KeyRing(KEYS).caller(key)
    assert caught.value.kind is FaultKind.UNAUTHENTICATED
    assert not key or key not in str(caught.value)


def test_each_key_has_its_own_rate():
    clock = VirtualClock()
    ring = KeyRing(KEYS, rate=2.0, burst=3.0, clock=clock)
    for _ in range(3):
        ring.caller(KEYS["ann"])
    with pytest.raises(ServiceError) as caught:
        ring.caller(KEYS["ann"])
    assert caught.value.kind is FaultKind.TOO_MANY
    assert caught.value.retry_after_s == pytest.approx(0.5)
    ring.caller(KEYS["bob"])
    clock.advance(0.5)
    ring.caller(KEYS["ann"])


def test_a_bucket_never_holds_more_than_its_burst():
    clock = VirtualClock()
    bucket = TokenBucket(10.0, 2.0, clock)
    clock.advance(100.0)
    assert [bucket.take() > 0 for _ in range(3)] == [False, False, True]


def test_only_some_keys_may_load_and_unload():
    ring = KeyRing(KEYS, control=frozenset({"ann"}))
    ring.check_control("ann")
    with pytest.raises(ServiceError) as caught:
        ring.check_control("bob")
    assert caught.value.kind is FaultKind.FORBIDDEN
    with pytest.raises(OptionError, match="no key of that name"):
        KeyRing(KEYS, control=frozenset({"eve"}))


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\nann: {KEYS['ann']}\n\n")
    found = read_keys(path, {"BATCHMAKER_API_KEYS": f"bob:{KEYS['bob']}"})
    assert found == KEYS
    assert read_keys(None, {}) == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("secret-without-a-name", "expected NAME:KEY"),
        ("ann:short-secre", "shorter than 16"),
        ("ann:" + "a" * 20 + "\nann:" + "b" * 20, "two keys named 'ann'"),
        ("", "holds no API key"),
    ],
)
def test_malformed_keys_are_refused_without_being_shown(tmp_path, content, said):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(OptionError, match=said) as caught:
        read_keys(path, {})
    assert "secre" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        read_keys(tmp_path / "none", {})


def test_calls_with_wrong_keys_are_slowed_down_and_right_ones_are_not():
    ring = KeyRing(KEYS, clock=VirtualClock())
    kinds = []
    for _ in range(int(WRONG_A_SECOND) + 1):
        with pytest.raises(ServiceError) as caught:
            ring.caller("c" * 20)
        kinds.append(caught.value.kind)
    assert set(kinds[:-1]) == {FaultKind.UNAUTHENTICATED}
    assert kinds[-1] is FaultKind.TOO_MANY
    assert ring.caller(KEYS["ann"]) == "ann"


def test_a_call_that_does_not_count_passes_when_the_rate_is_used_up():
    ring = KeyRing(KEYS, rate=1.0, burst=1.0, clock=VirtualClock())
    ring.caller(KEYS["ann"])
    with pytest.raises(ServiceError):
        ring.caller(KEYS["ann"])
    assert ring.caller(KEYS["ann"], counted=False) == "ann"


def test_keys_can_be_replaced():
    ring = KeyRing(KEYS)
    ring.replace({"eve": "e" * 20})
    assert ring.caller("e" * 20) == "eve"
    with pytest.raises(ServiceError):
        ring.caller(KEYS["ann"])
    with pytest.raises(OptionError):
        ring.replace(KEYS, control=frozenset(["nobody"]))
    assert ring.caller("e" * 20) == "eve"
