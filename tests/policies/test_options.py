"""Policies by name, with options as text."""

from __future__ import annotations

from typing import Literal

import pytest

from batchmaker import policies
from batchmaker.errors import OptionError
from batchmaker.policies.options import read_options, text_options


class Thing:
    def __init__(
        self,
        count: int = 1,
        share: float = 0.5,
        on: bool = False,
        kind: Literal["red", "blue"] = "red",
        limit: int | None = None,
        word: str = "",
        table: dict[str, int] | None = None,
    ) -> None: ...


def test_options_are_read_as_the_constructor_annotates_them():
    text = "count=3, share=2e-1,on=yes,kind=blue,limit=none,word=a b"
    assert read_options("thing", Thing, text) == {
        "count": 3,
        "share": 0.2,
        "on": True,
        "kind": "blue",
        "limit": None,
        "word": "a b",
    }
    assert read_options("thing", Thing, "limit=4,on=no") == {"limit": 4, "on": False}
    assert read_options("thing", Thing, "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont=3", "Did you mean 'count'"),
        ("count=three", "got 'three', expected a whole number"),
        ("count=1.5", "whole number"),
        ("on=true", "yes or no"),
        ("kind=green", "red or blue"),
        ("limit=much", "a whole number"),
        ("count", "option=value"),
        ("count=1,count=2", "twice"),
        ("count=1,", "option=value"),
        ("table=1", "cannot be given as text"),
    ],
)
def test_wrong_text_is_refused_with_what_was_wanted(text, message):
    with pytest.raises(OptionError, match=message):
        read_options("thing", Thing, text)


def test_what_can_be_given_as_text_is_known_with_its_defaults():
    assert text_options(Thing) == {"count": 1, "share": 0.5, "on": False, "kind": "red", "limit": None, "word": ""}


def test_a_name_carries_options():
    assert policies.make("graph:window_ms=45,max_batch=32").max_batch == 32
    assert policies.make("cellular:max_steps=3").max_steps == 3
    assert policies.make("padded:bucket_width=4", max_batch=7).max_batch == 7


@pytest.mark.parametrize("name", sorted({*policies.names()} - {"learned"}))  # needs a file
def test_every_policy_is_made_by_its_name_and_refuses_options_it_does_not_have(name):
    assert policies.make(name).name == name
    with pytest.raises(OptionError, match="unknown option"):
        policies.make(f"{name}:colour=red")
    with pytest.raises(OptionError, match="unknown option"):
        policies.make(name, colour="red")


def test_an_option_given_as_text_and_as_a_value_is_refused():
    with pytest.raises(OptionError, match="twice"):
        policies.make("graph:max_batch=3", max_batch=3)


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(OptionError, match="Did you mean 'agenda-remaining'"):
        policies.make("agenda-remainig:max_steps=2")
