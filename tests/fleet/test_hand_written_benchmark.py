"""benchmarks/hand_written.py: each installed side answers; what is not installed is skipped with a line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import uvloop

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("hand_written")
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow
def test_our_sides_are_measured_at_every_size(benchmark):
    async def ours():
        with benchmark.running() as server:
            ways = {"http": benchmark.upstream, "shared": benchmark.shared_upstream}
            return await benchmark.compared("ours", ways, benchmark.Sizes(64, 1), server)

    rows = uvloop.run(ours())
    assert [(row["body"], row["in_flight"]) for row in rows[::2]] == [
        ("1 kB", 1), ("1 kB", 64), ("64 kB", 1), ("64 kB", 64)
    ]  # fmt: skip
    assert all(row["us"][figure] > 0 for row in rows for figure in benchmark.FIGURES)


def test_what_is_not_installed_is_skipped_with_a_line(benchmark, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    server = benchmark.Server(None, 1, 1, ("/none",))
    ways = {"ours": benchmark.upstream, "aiohttp": benchmark.aiohttp_client}
    assert uvloop.run(benchmark.compared("HTTP", ways, benchmark.Sizes(1, 1), server)) == []
    assert uvloop.run(benchmark.spans(benchmark.Sizes(1, 1), server)) == []
    said = capsys.readouterr().err
    assert "HTTP: skipped, import of aiohttp" in said
    assert "spans: skipped, they need" in said
