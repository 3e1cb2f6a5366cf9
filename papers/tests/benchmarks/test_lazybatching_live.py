"""papers/benchmarks/lazybatching_live.py without measuring: GraphB's batches, ratios, tables, picture."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from batchmaker import policies
from batchmaker.clock import VirtualClock
from benchmark_scripts import imported


@pytest.fixture
def live():
    with imported("lazybatching_live") as found:
        yield found["lazybatching_live"]


class TimedEngine:
    """Answers a batch in a second, under a virtual clock. began: when each batch began, and its requests."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.began = []

    def map(self, requests, progress):
        self.began.append((self.clock.now_s(), requests))
        self.clock.advance(1.0)


def handed_over(live, monkeypatch, due_s, window_ms):
    engine = TimedEngine()
    monkeypatch.setattr(live, "time", SimpleNamespace(sleep=engine.clock.advance))
    live.submit_batches(engine, list(range(len(due_s))), due_s, window_ms)
    return engine.began


def test_a_batch_begins_when_its_window_is_over_or_the_last_is_answered(live, monkeypatch):
    assert handed_over(live, monkeypatch, [0.0, 0.25, 1.0], 500) == [(0.5, [0, 1]), (1.5, [2])]
    assert handed_over(live, monkeypatch, [0.0, 1.25], 500) == [(0.5, [0]), (1.75, [1])]


def test_a_full_batch_does_not_wait(live, monkeypatch):
    began = handed_over(live, monkeypatch, [0.0] * (live.MOST + 1), 500)
    assert [(at_s, len(batch)) for at_s, batch in began] == [(0.0, live.MOST), (1.0, 1)]


def test_ways_are_played_in_turn_with_the_same_arrivals(live):
    ways, played = live.WAYS[:4], []
    scale = live.Scale(4, 1.0, 1, 1, (0.1,), 0.1)

    def play(way, come_s):
        played.append((way.name, come_s.tolist()))
        return {"mean_ms": 1.0}

    found = live.rounds_of(ways, scale, lambda number: np.array([float(number)]), play)
    assert found == {way.name: {"mean_ms": [1.0] * 4} for way in ways}
    assert [name for name, _ in played[::4]] == [way.name for way in ways]
    assert [come_s for _, come_s in played] == [[float(number)] for number in range(4) for _ in ways]


def made_up(live):
    """A result in which every other way takes 10 ms, and GraphB as long again as its window."""
    figures = {way.name: 10.0 + (way.window_ms or 0) for way in live.WAYS}
    seen = {
        name: {"mean_ms": [ms, 2 * ms], "p90_ms": [ms, ms], "served_rps": [9.0, 9.0], "late": [0.0, 0.5]}
        for name, ms in figures.items()
    }
    rows = live.rows_of(None, None, live.ALL_WAITING, seen)
    for load, rate in ((0.1, 5.0), (0.9, 45.0)):
        rows += live.rows_of(load, rate, live.WAYS, seen)
    about = {"command": "python papers/benchmarks/lazybatching_live.py", "commit": "abc", "machine": {"cpu": "a CPU"}}
    measured = {"workload": "sentences", "alone_ms": 10.0, "sla_ms": 60.0, "capacity_rps": 50.0, "load_average": 0.0}
    return {**about, **measured, "rounds": 2, "rows": rows, "ratios": live.ratios_of(rows)}


def test_ratios_are_of_the_best_window_and_of_all_in_the_same_round(live):
    found = made_up(live)
    one = next(one for one in found["ratios"] if (one["way"], one["computes"]) == (live.LAZY, live.CELLS))
    assert one["window_ms"] == 5
    assert one["best"] == pytest.approx([1.5, 1.5])
    assert one["all"] == pytest.approx([np.prod([1.5, 3.5, 5.5, 7.5, 10.5]) ** 0.2] * 2)


def test_the_page_has_each_way_at_each_load(live):
    lines = live.shown(made_up(live)).splitlines()
    assert "| 0.1 | the engine's cells | 5 |" + " 1.50 (1.50 to 1.50) |" * 4 + " 4.69 (4.69 to 4.69) |" in lines
    for way in live.WAYS:
        assert sum(line.startswith(f"| {way.name} |") for line in lines) == 2 + (way in live.ALL_WAITING)
    assert "0.1 is 5, 0.9 is 45" in lines[-1]


def test_the_evidence_page_reads_the_ratios(live, monkeypatch):
    entries = importlib.import_module("paper_figures.lazybatching")
    found = made_up(live)
    monkeypatch.setattr(entries, "result", lambda name: {"lazybatching-live.json": found}[name])
    said = next(figure for figure in entries.FIGURES if figure.item == "Figure 17").our_number()
    assert said.startswith("best window 1.5 (1.5 to 1.5) at 0.1, 1.5 (1.5 to 1.5) at 0.9 of the capacity")
    assert said.endswith("best window over Equation 2 1.5, 1.5")


@pytest.mark.slow
def test_a_picture_is_drawn(live, tmp_path):
    live.draw(tmp_path / "live.png", made_up(live))
    assert (tmp_path / "live.png").stat().st_size > 0


def test_every_way_names_a_policy_that_exists(live):
    assert {policies.make(way.policy).name for way in live.WAYS} == {"closed", "cellular", "graph", "lazy", "auto"}
    assert [way.window_ms for way in live.WAYS if way.hands_batches] == list(live.WINDOWS_MS)
