"""benchmarks/live_sizes.py: its search finds what holds, its operations are right, its programs hear the same."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import batchmaker as bm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sizes():
    before, threads, paths = set(sys.modules), torch.get_num_threads(), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield importlib.import_module("live_sizes")
    sys.path[:] = paths
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if any(str(ROOT / folder) in str(getattr(sys.modules[name], "__file__", "")) for folder in NOT_KEPT):
            del sys.modules[name]


NOT_KEPT = ("benchmarks", "examples")


@pytest.mark.parametrize("most", [0, 1, 3, 20, 79, 80, 81, 700])
def test_the_search_finds_the_most_streams_that_hold_as_close_as_it_says(sizes, monkeypatch, most):
    looked = []

    def look(opened, case, seconds, count):
        looked.append(count)
        return sizes.Look(count, 32.0, 1.0, 5.0 if count <= most else 50.0, 100.0)

    monkeypatch.setattr(sizes, "look", look)
    found = sizes.most_held(None, None, 1.0, 80)
    good = 0 if found is None else found.streams
    assert good <= most
    assert most - good < max(1, sizes.CLOSE * most + 1)
    assert len(looked) < 14


def test_a_stall_of_the_host_does_not_count_unless_it_comes_twice(sizes, monkeypatch):
    late = iter([[40.0] * 100, [2.0] * 100, [3.0] * 100, [60.0] * 100, [50.0] * 100])
    monkeypatch.setattr(sizes, "played", lambda *_: (sizes.np.array(next(late)), 9.0))
    case = sizes.Case(None, None, (), 4, torch.zeros(1, 1))
    looks = [sizes.look(nullcontext, case, 1.0, 4) for _ in range(3)]
    assert [one.p99_ms for one in looks] == [2.0, 3.0, 50.0]
    assert [one.holds for one in looks] == [True, True, False]


@pytest.mark.parametrize(("kind", "gates", "layers"), [(nn.GRUCell, 3, 1), (nn.LSTMCell, 4, 1), (nn.LSTMCell, 4, 2)])
def test_operations_are_those_of_the_products(sizes, kind, gates, layers):
    case = sizes.recurrent(kind, 16, layers, 4)
    wanted = 2 * gates * 16 * (sizes.FEATURES + 16) + (layers - 1) * 2 * gates * 16 * 32 + 2 * 16
    assert sizes.operations(case) == wanted


@pytest.mark.parametrize(("kind", "layers"), [(nn.GRUCell, 1), (nn.LSTMCell, 2)])
def test_by_hand_a_stream_hears_what_the_engine_hears(sizes, kind, layers):
    case = sizes.recurrent(kind, 8, layers, 4)
    with bm.Engine(case.model, threads=1) as engine:
        sizes.check(case, engine)
        other = sizes.recurrent(kind, 8, layers, 4)
        wrong = sizes.Case(case.model, other.by_hand, case.widths, 4, case.frames)
        with pytest.raises(AssertionError, match="by hand it hears otherwise"):
            sizes.check(wrong, engine)


def test_all_threads_are_on_one_core_for_a_while(sizes):
    before, inside, ended = os.sched_getaffinity(0), threading.Event(), threading.Event()
    seen: list[set[int]] = []

    def look():
        inside.wait(60)
        seen.append(os.sched_getaffinity(0))
        ended.set()

    thread = threading.Thread(target=look)
    thread.start()
    with sizes.on_one_core():
        inside.set()
        assert ended.wait(60)
        assert len(os.sched_getaffinity(0)) == 1
    thread.join(60)
    assert [len(cores) for cores in seen] == [1]
    assert os.sched_getaffinity(0) == before


def test_the_table_says_nothing_where_nothing_was_held(sizes):
    held = {side: {"streams": count} for side, count in (("hand", 400), ("ours", 300))}
    found = {
        "command": "python live_sizes.py", "commit": "abc", "machine": {"cpu": "A processor"}, "load_average": 0.1,
        "load_average_after": 0.2, "operations_a_second": 5e10,
        "rows": [
            {"network": "small", "operations": 1e6, "each_s": 0.032, **held},
            {"network": "large", "operations": 1e8, "each_s": 0.16, "hand": None, "ours": None},
        ],
    }  # fmt: skip
    text = sizes.shown(found)
    assert "| small | 1 | 1,600 | 400 | 300 | 0.75 | 0.19 |" in text
    assert "| large | 100 | 80 | 0 | 0 | - | 0.00 |" in text
