"""benchmarks/moved_sequences.py: sequences of every kind move under load, and each answer is that of the network."""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("moved_sequences")
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow
def test_sequences_of_every_kind_that_move_are_answered_as_if_they_had_not(benchmark, monkeypatch):
    sizes = {"NUM_NAMED": 6, "NUM_SOCKETS": 6, "NUM_CONNECTIONS": 2, "NUM_CARRIED": 6, "NUM_STREAMS": 24}
    for name, size in sizes.items():
        monkeypatch.setattr(benchmark, name, size)
    found = asyncio.run(benchmark.measure(48))
    assert found["moves"] >= 48
    assert (found["wrong"], found["errors"], found["lost"]) == (0, [], 0)
    assert found["answers"] > 200


def test_a_wrong_and_a_missing_answer_are_counted(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "PERIOD_S", 0.001)
    monkeypatch.setattr(benchmark, "NUM_CHUNKS", 3)
    tokens = np.random.default_rng(0).integers(0, benchmark.SIZES["vocabulary_size"], 3 * benchmark.CHUNK)
    state = benchmark.Seen().whole(tokens)[benchmark.CHUNK - 1 :: benchmark.CHUNK]

    async def seen_of(*answers):
        seen, left = benchmark.Seen(), list(answers)

        @asynccontextmanager
        async def begin():
            async def submit(chunk, last):
                if isinstance(answer := left.pop(0), Exception):
                    raise answer
                return answer.tolist()

            try:
                yield submit
            finally:
                seen.over.set()

        await benchmark.stream(seen, 0, begin)
        return seen

    seen = asyncio.run(seen_of(*state))
    assert (seen.num_answered, seen.num_wrong, seen.missing) == (3, 0, [])
    seen = asyncio.run(seen_of(state[0], state[1] + 0.001, state[2]))
    assert (seen.num_answered, seen.num_wrong, seen.missing) == (3, 1, [])
    assert len(asyncio.run(seen_of(state[0], RuntimeError("it has ended"), state[2])).missing) == 1
