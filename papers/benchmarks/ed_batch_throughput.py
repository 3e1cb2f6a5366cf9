"""Throughput of ED-Batch's workloads under learnt and published orders, for papers/docs/ed-batch-throughput.md.

    python papers/benchmarks/ed_batch_throughput.py [--rounds 5] [--quick] run DATA [--workload NAME ...] [--again]
    python papers/benchmarks/ed_batch_throughput.py inputs INPUTS.json    # then dynet_peer.py INPUTS.json DYNET.json
    python papers/benchmarks/ed_batch_throughput.py peer INPUTS.json DYNET.json
    python papers/benchmarks/ed_batch_throughput.py page papers/docs/ed-batch-throughput.md

Closed mini-batches through the engine, which computes in its own thread, with one compute thread: the next begins when
all requests of the last are answered. An order is learnt from requests other than those that are measured. Every order
is looked at with each size of mini-batch and then measured with the one that is best for it, all orders in turn. The
same with cells that are planned, and with cells whose gates are computed one by one (see `gate_by_gate`). Seconds are
CPU time of the thread, so that others on the machine matter less. Results are kept in the JSON file, workload by
workload: what is there of the same code and as many rounds is not measured anew, unless --again says so. `page` makes
the tables and the picture from it. --quick: one round of 64 requests, orders learnt from 128 others.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any, Final, Literal

import numpy as np

from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit
from batchmaker.cli.requests import TAGGERS, requests_from
from batchmaker.engine import incoming
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.engine.stats import DriverStats
from batchmaker.graph.mini_batch import unrolled
from batchmaker.lab.datasets import random_sentences, random_trees
from batchmaker.lab.zoo import make
from batchmaker.lab.zoo.blueprint import Blueprint
from batchmaker.model.model import Model
from batchmaker.policies.learned import CellRow, LearntFrom, PolicyFile
from batchmaker_papers.learners.learning import Samples, learn
from batchmaker_papers.learners.qlearning import Settings
from ed_batch import FILES
from gate_by_gate import gate_by_gate
from shared import CPU_EXECUTOR, IMAGES, RESULTS, Result, digest, made_by
from throughput_page import HEURISTICS, PLANNED, POLICIES, SIZES, TASKS, show

CHAINS: Final = (*TAGGERS, "lstm-nmt")
HIDDEN: Final = 256
LEAST: Final = 32
"""Requests with which a size up to this is only looked at."""
LARGE: Final = {"mvrnn": 32}
"""Requests and rows of a batch where nodes are large: a node of an MV-RNN has 256 kB."""
Cells = Literal["bound", "planned", "gates"]
Order = tuple[str, Cells]
LEARN_FROM: Final = 1024
LEARN_BATCH: Final = 64
QUICK: Final = 64
MEASURES: Final = (
    "papers/benchmarks/ed_batch_throughput.py", "papers/benchmarks/gate_by_gate.py", "src/batchmaker/compile",
    "src/batchmaker/engine", *CPU_EXECUTOR, "src/batchmaker/core", "src/batchmaker/policies/agenda.py",
    "src/batchmaker/policies/depth.py", "src/batchmaker/policies/sufficient.py", "src/batchmaker/policies/learned",
    "papers/src/batchmaker_papers/learners",
)  # fmt: skip
COMMAND: Final = "python papers/benchmarks/ed_batch_throughput.py run DATA"


@dataclass(frozen=True, slots=True)
class Round:
    """Requests answered in closed mini-batches, one after the other. cpu_s: of the engine's thread."""

    num_requests: int
    wall_s: float
    cpu_s: float
    stats: DriverStats


class Closed:
    """Plays rounds on an engine, from inside its thread: all requests of a mini-batch begin together."""

    def __init__(self, engine: Engine) -> None:
        incoming.MOST_ARRIVALS = max(SIZES)  # type: ignore[misc]  # a mini-batch is one arrival, whatever its size
        self._engine = engine
        engine.on_settled = self._settled
        self._parts: list[Sequence[Any]] = []
        self._left = 0
        self._marks: list[tuple[float, float, DriverStats]] = []
        self._done = threading.Event()
        self._error: BaseException | None = None

    def play(self, requests: Sequence[Any], size: int) -> Round:
        """Play all requests in mini-batches of this size. Raises the first error of a request."""
        self._parts = [requests[at : at + size] for at in range(0, len(requests), size)]
        self._left, self._marks = 1, []
        self._done.clear()
        with quiet_interpreter():
            self._engine.submit(requests[0])  # its answer begins the round
            self._done.wait()
        if self._error is not None:
            raise self._error
        (wall_s, cpu_s, before), (ended_s, cpu_ended_s, after) = self._marks
        counts = (b - a for a, b in zip(astuple(before), astuple(after), strict=True))
        return Round(len(requests), ended_s - wall_s, cpu_ended_s - cpu_s, DriverStats(*counts))

    def _settled(self, ticket: Ticket, error: BaseException | None) -> None:
        self._error = self._error or error
        self._left -= 1
        if self._left:
            return
        if not self._marks or not self._parts:
            self._marks.append((time.perf_counter(), time.thread_time(), replace(self._engine.stats)))
        if not self._parts or self._error is not None:
            self._done.set()
            return
        part = self._parts.pop(0)
        self._left = len(part)
        for request in part:
            self._engine.submit(request)


def learnt(name: str, model: Model, requests: Sequence[Any], path: Path) -> Result:
    """Learn an order from requests and write it, unless it is there; return what there is to say about it."""
    if not path.exists():
        blueprint = Blueprint(name, model)
        graphs = [blueprint.request(request).graph for request in requests]
        cells = blueprint.model.cells
        found = learn(Samples([unrolled(graph, len(cells)) for graph in graphs], LEARN_BATCH, 0), Settings())
        settings = found.settings
        about = LearntFrom(
            data=name, requests=len(requests), batch=LEARN_BATCH, learners=settings.learners,
            episodes=settings.episodes, steps=settings.steps, seed=settings.seed, ratio=round(found.ratio, 4),
            seconds=round(found.seconds, 2), program="papers/benchmarks/ed_batch_throughput.py",
        )  # fmt: skip
        PolicyFile(name, settings.encoding, tuple(map(CellRow.of, cells)), found.table, about).write(path)
    policy = PolicyFile.read(path)
    return {"states": len(policy.table), **asdict(policy.learnt)}


def policy_of(order: str, file: Path) -> str:
    """Return what the engine calls this order."""
    if order == TASKS:
        return f"learned:file={file},max_steps=5"
    return f"learned:file={file}" if order == "learned" else order


def with_cells(model: Model, cells: Cells) -> Model:
    """Return the model with cells of this kind, as an engine is to bind them next."""
    for cell in model.cells.values():
        cell.optimize = cells == "planned"
    return gate_by_gate(model, HIDDEN) if cells == "gates" else model


def orders_of(name: str) -> list[Order]:
    """Return the orders that a workload is measured with, and with which cells."""
    more = (TASKS,) if name in CHAINS else ()
    bound: list[Order] = [(order, "bound") for order in (*POLICIES, *more)]
    planned: list[Order] = [(order, "planned") for order in (*PLANNED, *more)]
    return [*bound, *planned, *((order, "gates") for order in HEURISTICS)]


def measured(model: Model, requests: Sequence[Any], orders: Sequence[Order], file: Path, rounds: int) -> Result:
    """Return the best of each order: its size, medians over rounds of all requests, and how each size looked.

    The orders take turns, round by round. With other cells an order has the size that is best with bound ones.
    """
    with ExitStack() as stack:
        players = []
        for order, cells in orders:
            engine = Engine(with_cells(model, cells), policy_of(order, file), threads=1)
            players.append(Closed(stack.enter_context(engine)))
            players[-1].play(requests[:LEAST], LEAST)
        bound = [(order, player) for (order, cells), player in zip(orders, players, strict=True) if cells == "bound"]
        curves = {order: looked_at(player, requests) for order, player in bound}
        best = [max(curves[order], key=curves[order].__getitem__) for order, _ in orders]
        turn = list(zip(players, best, strict=True))
        played = [[player.play(requests, size) for player, size in turn] for _ in range(rounds)]
    return {
        "orders": [
            {"order": order, "cells": cells, "size": size, "seen": curves[order], **figures(column)}
            for (order, cells), size, column in zip(orders, best, zip(*played, strict=True), strict=True)
        ]
    }


def looked_at(player: Closed, requests: Sequence[Any]) -> dict[int, float]:
    """Return requests per second with each size of mini-batch, the better of two looks.

    Large mini-batches are compared on all requests, since the first few may be short ones.
    """
    curve = {}
    for size in SIZES:
        if size <= len(requests):
            part = requests if size > LEAST else requests[:LEAST]
            looks = [player.play(part, size) for _ in range(2)]
            curve[size] = max(look.num_requests / look.cpu_s for look in looks)
    return curve


def figures(rounds: Sequence[Round]) -> Result:
    """Return medians over rounds: requests per second, microseconds of a step, and where the time went."""
    stats = [each.stats for each in rounds]

    def share(part: str) -> float:
        return median(getattr(each.stats, part) / each.wall_s for each in rounds)

    return {
        "per_s": median(each.num_requests / each.cpu_s for each in rounds),
        "per_s_wall": median(each.num_requests / each.wall_s for each in rounds),
        "all_per_s": [each.num_requests / each.cpu_s for each in rounds],
        "steps": stats[0].steps,
        "cells_per_step": stats[0].cells / stats[0].steps,
        "shares": {part: share(part) for part in ("busy_s", "scheduler_s", "unfold_s")},
        "scheduler_us_per_step": median(1e6 * each.scheduler_s / each.steps for each in stats),
    }


def run(options: argparse.Namespace) -> None:
    """Measure the workloads on the data, those that are not in the file yet, and keep each as it comes."""
    known = read(options.json)
    names = options.workload if options.again else missing(known, options.workload, options.rounds, digest(MEASURES))
    print(f"{len(names)} of {len(options.workload)} workloads to measure", flush=True)
    began_s = time.monotonic()
    for number, name in enumerate(names, 1):
        result = workload(name, options)
        keep({"results": [result]}, options)
        took_s = time.monotonic() - began_s
        rates = ", ".join(f"{o['order']} ({o['cells']}) {o['per_s']:,.0f}" for o in result["orders"])
        left_min = took_s / number * (len(names) - number) / 60
        print(f"{number}/{len(names)} {name}: {rates}; {took_s:.0f} s so far, {left_min:.0f} min to go", flush=True)


def workload(name: str, options: argparse.Namespace) -> Result:
    """Learn for one workload and measure it."""
    most = min(LARGE.get(name, max(SIZES)), QUICK if options.quick else max(SIZES))
    others = 2 * QUICK if options.quick else LEARN_FROM
    sizes = {"max_batch": LARGE[name]} if name in LARGE else {}
    found = requests_from(name, options.data / FILES[name], count=most + others, hidden=HIDDEN, **sizes)
    file = options.policies / f"{name}{'-quick' * options.quick}.json"
    about = learnt(name, found.model, found.requests[most:], file)
    result = measured(found.model, found.requests[:most], orders_of(name), file, options.rounds)
    return {
        "workload": name, "commit": commit(), "digest": digest(MEASURES), "rounds": options.rounds,
        "source": found.source, "requests": most, "learnt": about, **result,
    }  # fmt: skip


def missing(found: Result, names: Sequence[str], rounds: int, code: str) -> list[str]:
    """Return the workloads of which the file has nothing of this code and as many rounds. code: its digest."""
    made = {
        result["workload"]
        for result in found["results"]
        if (result.get("digest"), result.get("rounds")) == (code, rounds)
    }
    return [name for name in names if name not in made]


# --- DyNet's inputs --------------------------------------------------------------------------------------------------

VOCABULARY: Final = 1000


def random_inputs(seed: int, count: int = 256) -> Result:
    """Return random trees of 10 to 30 leaves and sentences of 16 to 32 words."""
    generator = np.random.default_rng(seed)
    trees = []
    for tree in random_trees(count, seed=seed):
        words = generator.integers(0, VOCABULARY, tree.num_leaves).tolist()
        trees.append({"words": words, "children": tree.children.tolist()})
    lengths = generator.integers(16, 32, count, endpoint=True)
    sentences = [sentence.tolist() for sentence in random_sentences(lengths, VOCABULARY, seed=seed)]
    return {"vocabulary_size": VOCABULARY, "treelstm": trees, "bilstm-tagger": sentences}


def peer(options: argparse.Namespace) -> None:
    """Measure the engine on the inputs that DyNet had; DyNet's own results stand beside. Learns from other ones."""
    inputs = json.loads(options.inputs.read_text("utf-8"))
    others = random_inputs(seed=1)
    ours = []
    for name, more in (("treelstm", {"output": "state"}), ("bilstm-tagger", {"output": "scores"})):
        model = make(name, vocabulary_size=VOCABULARY, hidden=HIDDEN, **more)
        file = options.policies / f"{name}-peer.json"
        learnt(name, model, others[name], file)
        kinds: tuple[Cells, ...] = ("bound", "planned")
        orders = [(order, cells) for cells in kinds for order in ("agenda", "cellular", "learned")]
        ours.append({"workload": name, **measured(model, inputs[name], orders, file, options.rounds)})
        print(name, {(o["order"], o["cells"]): round(o["per_s"]) for o in ours[-1]["orders"]}, flush=True)
    dynet = json.loads(options.dynet.read_text("utf-8")) if options.dynet is not None else []
    keep({"peer": {"ours": ours, "dynet": dynet, "digest": digest(MEASURES)}}, options)


# --- what is kept ----------------------------------------------------------------------------------------------------


def read(path: Path) -> Result:
    """Return what is in the file; no results if there is none."""
    return json.loads(path.read_text("utf-8")) if path.exists() else {"results": []}


def keep(new: Result, options: argparse.Namespace) -> None:
    """Write results beside those of other workloads that are in the file: it is of this code if all of them are."""
    found = read(options.json)
    if "results" in new:
        names = {result["workload"] for result in new["results"]}
        rest = [result for result in found["results"] if result["workload"] not in names]
        new["results"] = sorted(rest + new["results"], key=lambda result: list(FILES).index(result["workload"]))
    found |= {**made_by(MEASURES, COMMAND), "rounds": options.rounds, "quick": options.quick, **new}
    parts = [*found["results"], *([found["peer"]] if "peer" in found else [])]
    if any(part.get("digest") != found["measures"]["digest"] for part in parts):
        del found["measures"]
    options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "ed-batch-throughput.json")
    parser.add_argument("--policies", type=Path, default=Path(gettempdir()) / "policies", help="Of learnt orders.")
    parser.add_argument("--rounds", type=int, help="[5]")
    parser.add_argument("--quick", action="store_true", help="one round of few requests: whether it works")
    what = parser.add_subparsers(dest="what", required=True)
    runs = what.add_parser("run")
    runs.add_argument("data", type=Path)
    runs.add_argument("--workload", nargs="+", default=list(FILES), choices=FILES)
    runs.add_argument("--again", action="store_true", help="measure what is in the file as well")
    what.add_parser("inputs").add_argument("inputs", type=Path)
    peers = what.add_parser("peer")
    peers.add_argument("inputs", type=Path)
    peers.add_argument("dynet", type=Path, nargs="?")
    pages = what.add_parser("page")
    pages.add_argument("page", type=Path)
    pages.add_argument("--png", type=Path, default=IMAGES / "ed-batch-throughput.png")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.policies.mkdir(exist_ok=True)
    if options.what == "inputs":
        options.inputs.write_text(json.dumps(random_inputs(seed=0)) + "\n", "utf-8")
    elif options.what == "page":
        show(read(options.json), options.page, options.png)
    elif options.what == "run":
        run(options)
    else:
        peer(options)


if __name__ == "__main__":
    main()
