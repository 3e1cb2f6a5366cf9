"""The collector of garbage does not look while modules are imported."""

from __future__ import annotations

import gc
import sys
import types

import pytest

from batchmaker.cli.imports import collector_paused


@pytest.fixture(autouse=True)
def collecting():
    yield
    gc.enable()


def test_the_collector_is_off_inside_and_on_again_afterwards():
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_an_import_that_fails():
    with pytest.raises(ImportError), collector_paused():
        raise ImportError("no such module")
    assert gc.isenabled()


def test_what_modules_made_is_never_looked_at_again(monkeypatch):
    with collector_paused():
        made = [[] for _ in range(1000)]
        monkeypatch.setitem(sys.modules, "a_new_one", types.ModuleType("a_new_one"))
    known = {id(item) for item in gc.get_objects()}
    assert not known & set(map(id, made))


def test_nothing_is_kept_where_no_module_was_new():
    with collector_paused():
        made = [[] for _ in range(1000)]
    known = {id(item) for item in gc.get_objects()}
    assert known >= set(map(id, made))
