"""Lines of trees and lattices: beside levels by hand, DyNet, and the orders of an earlier commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import batchmaker as bm
from batchmaker.lab import zoo
from batchmaker.lab.datasets import Vocabulary, read_trees
from engine_cost.hand_server import run_all
from engine_cost.hand_trees import TreesByHand
from engine_cost.measuring import (
    NotRunError,
    Row,
    Settings,
    absolute,
    best_of,
    compared,
    interleaved,
    per_second,
    say,
    spent,
)

ROOT: Final = Path(__file__).resolve().parents[2]
SIZES: Final = (64, 256, 1024)
DYNET_SIZES: Final = ("64", "128", "256")
DYNET_TREES: Final = 2000
LATTICES: Final = ("latticelstm", "latticegru")
ORDERS: Final = ("cellular", "agenda", "depth", "agenda-remaining", "sufficient")


def by_hand(settings: Settings) -> Iterator[Row]:
    """TreeLSTM 256, all of SST waiting: the engine over the same sums level by level, by hand."""
    model, requests, _ = sst(settings, settings.of(None, 200))
    run = TreesByHand(model)
    with bm.Engine(model, threads=1) as engine:
        some = requests[:100]
        for ours, theirs in zip(engine.map(some, progress=False), run(some), strict=True):
            assert np.abs(ours.numpy() - theirs).max() <= 1e-5, "by hand a root has another state"
        ways = {f"{size} trees": partial(_rate, run, requests, size) for size in SIZES}
        best, seen = best_of(ways, settings.of(2, 1))
        found = interleaved({"ours": partial(mapped_rate, engine, requests), "theirs": ways[best]}, settings.of(5, 2))
        many = [spent(engine, partial(engine.map, requests, progress=False))[1] for _ in range(settings.of(3, 1))]
    yield absolute(
        "TreeLSTM 256", "µs to unfold a call of a cell", "µs",
        float(np.median([1e6 * stats.unfold_s / stats.cells for stats in many])), target=1.0,
    )  # fmt: skip
    yield compared(
        "TreeLSTM 256", "all of SST waiting", "trees/s", found["ours"], found["theirs"], better="higher",
        baseline=f"level by level by hand, {best}", target=0.75, seen=seen,
    )  # fmt: skip


def dynet(settings: Settings) -> Iterator[Row]:
    """TreeLSTM 256, SST waiting: the engine over DyNet's better order at its best size, graphs built on both sides."""
    if settings.dynet is None:
        raise NotRunError("needs --dynet-python PYTHON, the interpreter of an environment with dyNET38")
    model, requests, vocabulary = sst(settings, settings.of(DYNET_TREES, 128))
    with tempfile.TemporaryDirectory() as folder, bm.Engine(model, threads=1) as engine:
        inputs, out = Path(folder) / "inputs.json", Path(folder) / "out.json"
        trees = [{name: np.asarray(part).tolist() for name, part in request.items()} for request in requests]
        inputs.write_text(json.dumps({"vocabulary_size": vocabulary, "treelstm": trees}), "utf-8")
        engine.map(requests, progress=False)
        ours, theirs, seen = [], [], {}
        for _ in range(settings.of(3, 1)):
            ours.append(mapped_rate(engine, requests))
            rows = dynet_rows(settings.dynet, inputs, out, settings.of(DYNET_SIZES, ("64",)))
            best = max(rows, key=lambda row: row["per_s"])
            ours.append(mapped_rate(engine, requests))
            theirs += [best["per_s"]] * 2
            seen = {f"{row['strategy']}, {row['size']}": row["per_s"] for row in rows}
            say(f"  DyNet {best['strategy']}, {best['size']}: {best['per_s']:.0f}/s")
    yield compared(
        "TreeLSTM 256", f"{len(requests):,} trees of SST waiting", "trees/s", np.array(ours), np.array(theirs),
        better="higher", baseline=f"DyNet, {best['strategy']}, {best['size']} trees", target=2.0, seen=seen,
    )  # fmt: skip


def lattices(settings: Settings) -> Iterator[Row]:
    """Lattices, all waiting: the best order of this engine over the best of the engine before it cost less."""
    source = settings.data / "lattice_edbatch" / "train.txt"
    with tempfile.TemporaryDirectory() as folder:
        before = earlier_source(settings.before, Path(folder))
        orders = settings.of(ORDERS, ORDERS[-1:])
        for name in settings.of(LATTICES, LATTICES[:1]):
            ours, theirs = [], []
            for _ in range(settings.of(2, 1)):
                count = settings.of(256, 32)
                for rates, tree in ((ours, ROOT / "src"), (theirs, before)):
                    rates.append(lattice_rates(tree, name, source, count, settings.of(2, 1), orders))
            names = [max(orders, key=lambda order, side=side: _best(side, order)) for side in (ours, theirs)]
            mine, others = (
                np.array([max(map(max, seen.values())) for seen in side], np.float64) for side in (ours, theirs)
            )
            yield compared(
                name, "lattices waiting", "requests/s", mine, others, better="higher",
                baseline=f"the engine of {settings.before}, {names[1]}", target=1.5, order=names[0],
            )  # fmt: skip


def _best(rounds: Sequence[dict[str, list[float]]], order: str) -> float:
    return max(max(seen[order]) for seen in rounds)


def _rate(run: Any, requests: Sequence[Any], size: int) -> float:
    batches = [requests[at : at + size] for at in range(0, len(requests), size)]
    return per_second(partial(run_all, run, batches), len(requests))


def mapped_rate(engine: bm.Engine, requests: Sequence[Any]) -> float:
    """Return requests per second with all of them waiting."""
    return per_second(partial(engine.map, requests, progress=False), len(requests))


def sst(settings: Settings, count: int | None) -> tuple[Any, list[Any], int]:
    """Return a TreeLSTM of 256, trees of SST for it, all or the first so many, and how many words it knows."""
    trees = read_trees(settings.data / "sst" / "train.txt")
    vocabulary = Vocabulary.from_sentences(tree.words for tree in trees)
    model: Any = zoo.make("treelstm", vocabulary_size=len(vocabulary), hidden=256)
    return model, [model.encode(tree, vocabulary) for tree in trees[:count]], len(vocabulary)


def dynet_rows(python: Path, inputs: Path, out: Path, sizes: Sequence[str]) -> list[dict[str, Any]]:
    """Return what benchmarks/dynet_peer.py measures of the inputs. NotRunError where DyNet is not installed."""
    command = [str(python), str(ROOT / "benchmarks" / "dynet_peer.py"), str(inputs), str(out), "--rounds", "2"]
    try:
        done = subprocess.run([*command, "--sizes", *sizes], capture_output=True, text=True)
    except OSError as error:
        raise NotRunError(f"{python} cannot be run ({error})") from None
    if done.returncode != 0:
        raise NotRunError(f"DyNet does not run: {done.stderr.strip().splitlines()[-1:]}")
    rows: list[dict[str, Any]] = json.loads(out.read_text("utf-8"))
    return rows


def earlier_source(commit: str, folder: Path) -> Path:
    """Return the source tree of a commit, laid into the folder. NotRunError without git or that commit."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True)
    if packed.returncode != 0:
        raise NotRunError(f"needs the commit {commit} of this repository: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def lattice_rates(
    source: Path, name: str, data: Path, count: int, rounds: int, orders: Sequence[str]
) -> dict[str, list[float]]:
    """Return requests per second of each order, by the engine of a source tree, in a process of its own."""
    script = Path(__file__).with_name("lattice_rate.py")
    command = [sys.executable, str(script), name, str(data), str(count), str(rounds), *orders]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rates: dict[str, list[float]] = json.loads(done.stdout)
    return rates
