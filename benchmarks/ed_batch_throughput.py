"""Throughput of ED-Batch's workloads under learnt and published orders, for docs/ed-batch-throughput.md.

    python benchmarks/ed_batch_throughput.py run DATA [--workload NAME ...] [--rounds 5]
    python benchmarks/ed_batch_throughput.py inputs INPUTS.json    # then dynet_peer.py INPUTS.json DYNET.json
    python benchmarks/ed_batch_throughput.py peer INPUTS.json DYNET.json
    python benchmarks/ed_batch_throughput.py page docs/ed-batch-throughput.md

Closed mini-batches through the engine, which computes in its own thread, with one compute thread: the next begins when
all requests of the last are answered. An order is learnt from requests other than those that are measured. Every order
is looked at with each size of mini-batch and then measured with the one that is best for it, all orders in turn. The
same with cells that are planned. Seconds are CPU time of the thread, so that others on the machine matter less.
Results are kept in the JSON file, from which `page` makes the tables.
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
from typing import Any, Final

import numpy as np

from batchmaker.cells.model import Model
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.requests import LATTICES, TAGGERS, TREES, requests_from
from batchmaker.datasets import random_sentences, random_trees
from batchmaker.engine import loop
from batchmaker.engine.driver import DriverStats
from batchmaker.engine.engine import Engine
from batchmaker.engine.ticket import Ticket
from batchmaker.graph.mini_batch import unrolled
from batchmaker.models import make
from batchmaker.models.blueprint import Blueprint
from batchmaker.policies.learned import CellRow, LearntFrom, PolicyFile
from batchmaker.policies.learned.learning import Samples, learn
from batchmaker.policies.learned.qlearning import Settings
from ed_batch import FILES, fill

SIZES: Final = (1, 8, 16, 32, 64, 128, 256)
HEURISTICS: Final = ("agenda", "depth")
"""What DyNet has; the best of them is what ratios are over."""
TASKS: Final = "learned, 5 steps"
POLICIES: Final = (*HEURISTICS, "agenda-remaining", "sufficient", "learned")
PLANNED: Final = (*HEURISTICS, "learned")
CHAINS: Final = (*TAGGERS, "lstm-nmt")
LEAST: Final = 32
"""Requests of a round, at least, where a size is only looked at."""
LARGE: Final = {"mvrnn": 32}
"""Requests and rows of a batch where nodes are large: a node of an MV-RNN has 256 kB."""
LEARN_FROM: Final = 1024
LEARN_BATCH: Final = 64
WANTED: Final = {**dict.fromkeys(TREES, 1.3), **dict.fromkeys(CHAINS, 1.1), **dict.fromkeys(LATTICES, 1.5)}
ROOT: Final = Path(__file__).parent.parent
Result = dict[str, Any]


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
        loop.MAX_ARRIVALS_PER_TURN = max(SIZES)  # a mini-batch is one arrival, whatever its size
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
            self._engine.submit_future(requests[0])  # its answer begins the round
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
            self._engine.submit_future(request)


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
            seconds=round(found.seconds, 2), program="benchmarks/ed_batch_throughput.py",
        )  # fmt: skip
        PolicyFile(name, settings.encoding, tuple(map(CellRow.of, cells)), found.table, about).write(path)
    policy = PolicyFile.read(path)
    return {"states": len(policy.table), **asdict(policy.learnt)}


def policy_of(order: str, file: Path) -> str:
    """Return what the engine calls this order."""
    if order == TASKS:
        return f"learned:file={file},max_steps=5"
    return f"learned:file={file}" if order == "learned" else order


def planned_too(model: Model, planned: bool) -> Model:
    """Let the model's cells be planned, or not, when an engine binds them."""
    for cell in model.cells.values():
        cell.optimize = planned
    return model


def orders_of(name: str) -> list[tuple[str, bool]]:
    """Return the orders that a workload is measured with, and whether its cells are planned."""
    more = (TASKS,) if name in CHAINS else ()
    return [(order, False) for order in (*POLICIES, *more)] + [(order, True) for order in (*PLANNED, *more)]


def measured(model: Model, requests: Sequence[Any], orders: list[tuple[str, bool]], file: Path, rounds: int) -> Result:
    """Return the best of each order: its size, medians over rounds of all requests, and what each size was seen to do.

    The orders take turns, round by round. With planned cells an order has the size that is best for it without.
    """
    with ExitStack() as stack:
        players = []
        for order, planned in orders:
            engine = Engine(planned_too(model, planned), policy_of(order, file), threads=1)
            players.append(Closed(stack.enter_context(engine)))
            players[-1].play(requests[:LEAST], LEAST)
        unplanned = [(order, player) for (order, planned), player in zip(orders, players, strict=True) if not planned]
        curves = {order: looked_at(player, requests) for order, player in unplanned}
        best = [max(curves[order], key=curves[order].__getitem__) for order, _ in orders]
        turn = list(zip(players, best, strict=True))
        played = [[player.play(requests, size) for player, size in turn] for _ in range(rounds)]
    return {
        "orders": [
            {"order": order, "planned": planned, "size": size, "seen": curves[order], **figures(column)}
            for (order, planned), size, column in zip(orders, best, zip(*played, strict=True), strict=True)
        ]
    }


def looked_at(player: Closed, requests: Sequence[Any]) -> dict[int, float]:
    """Return requests per second with each size of mini-batch, seen once."""
    curve = {}
    for size in SIZES:
        if size <= len(requests):
            played = player.play(requests[: max(size, min(LEAST, len(requests)))], size)
            curve[size] = played.num_requests / played.cpu_s
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


def run(options: argparse.Namespace) -> Result:
    """Measure the workloads on the data."""
    results = []
    for name in options.workload:
        most = LARGE.get(name, max(SIZES))
        sizes = {"max_batch": LARGE[name]} if name in LARGE else {}
        found = requests_from(name, options.data / FILES[name], count=most + LEARN_FROM, hidden=256, **sizes)
        file = options.policies / f"{name}.json"
        about = learnt(name, found.model, found.requests[most:], file)
        result = measured(found.model, found.requests[:most], orders_of(name), file, options.rounds)
        results.append({"workload": name, "source": found.source, "requests": most, "learnt": about, **result})
        print(name, {(o["order"], o["planned"]): round(o["per_s"]) for o in result["orders"]}, flush=True)
    return {"results": results}


# --- DyNet's inputs --------------------------------------------------------------------------------------------------

VOCABULARY: Final = 1000


def write_inputs(path: Path, count: int = 256) -> None:
    """Write random trees of 10 to 30 leaves and sentences of 16 to 32 words."""
    generator = np.random.default_rng(0)
    trees = []
    for tree in random_trees(count, seed=0):
        words = generator.integers(0, VOCABULARY, tree.num_leaves).tolist()
        trees.append({"words": words, "children": tree.children.tolist()})
    lengths = generator.integers(16, 32, count, endpoint=True)
    sentences = [sentence.tolist() for sentence in random_sentences(lengths, VOCABULARY, seed=0)]
    inputs = {"vocabulary_size": VOCABULARY, "treelstm": trees, "bilstm-tagger": sentences}
    path.write_text(json.dumps(inputs) + "\n", "utf-8")


def peer(options: argparse.Namespace) -> Result:
    """Measure the engine on the inputs that DyNet had; DyNet's own results stand beside."""
    inputs = json.loads(options.inputs.read_text("utf-8"))
    ours = []
    for name, more in (("treelstm", {"output": "state"}), ("bilstm-tagger", {"output": "scores"})):
        model = make(name, vocabulary_size=VOCABULARY, hidden=256, **more)
        file = options.policies / f"{name}-peer.json"
        learnt(name, model, inputs[name], file)
        orders = [(order, planned) for planned in (False, True) for order in ("agenda", "cellular", "learned")]
        ours.append({"workload": name, **measured(model, inputs[name], orders, file, options.rounds)})
        print(name, {(o["order"], o["planned"]): round(o["per_s"]) for o in ours[-1]["orders"]}, flush=True)
    dynet = json.loads(options.dynet.read_text("utf-8")) if options.dynet is not None else []
    return {"peer": {"ours": ours, "dynet": dynet}}


# --- the page --------------------------------------------------------------------------------------------------------


def find(result: Result, order: str, planned: bool) -> Result | None:
    """Return the row of an order, if it was measured."""
    return next((o for o in result["orders"] if o["order"] == order and o["planned"] == planned), None)


def best(result: Result, orders: Sequence[str], planned: bool) -> float:
    """Return the most requests per second of these orders; 0 if there is none."""
    return max((o["per_s"] for o in result["orders"] if o["order"] in orders and o["planned"] == planned), default=0.0)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates_table(results: list[Result], planned: bool) -> str:
    """Return requests per second (size of the mini-batch) of every order, a workload to a row."""
    columns = [*(PLANNED if planned else POLICIES), TASKS]
    rows = []
    for result in results:
        found = [find(result, order, planned) for order in columns]
        rows.append([result["workload"], *("-" if o is None else f"{o['per_s']:,.0f} ({o['size']})" for o in found)])
    return table(["workload", *columns], rows)


def ratios_table(results: list[Result]) -> str:
    """Return how much faster ours is than the best of DyNet's orders: by order, by planning, by both."""
    rows = []
    for result in results:
        bound, planned = (best(result, HEURISTICS, planned) for planned in (False, True))
        ours = ("learned", TASKS, "sufficient")
        ratios = (
            best(result, ("learned",), False) / bound,
            best(result, ours, False) / bound,
            best(result, ours, True) / planned,
            planned / bound,
            best(result, ours, True) / bound,
        )
        wanted = WANTED[result["workload"]]
        rows.append([result["workload"], *(f"{ratio:.2f}" for ratio in ratios), f"{wanted:.1f}"])
    columns = (
        "learned | best of ours | best of ours, both planned | planning alone | ours planned over theirs not | wanted"
    )
    return table(["workload", *columns.split(" | ")], rows)


def sizes_table(results: list[Result]) -> str:
    """Return the learnt order's rate over that of the better of DyNet's, at each size of mini-batch."""
    rows = []
    for result in results:
        seen = {row["order"]: {int(size): rate for size, rate in row["seen"].items()} for row in result["orders"]}
        theirs = {size: max(seen[order][size] for order in HEURISTICS) for size in seen["learned"]}
        ratios = [f"{seen['learned'][size] / theirs[size]:.2f}" if size in theirs else "-" for size in SIZES]
        rows.append([result["workload"], *ratios])
    return table(["workload", *map(str, SIZES)], rows)


def shares_table(results: list[Result]) -> str:
    """Return where the time goes, for the better of DyNet's orders and the learnt one."""
    rows = []
    for result in results:
        theirs = max((o for order in HEURISTICS if (o := find(result, order, False))), key=lambda o: o["per_s"])
        for found in (theirs, find(result, "learned", False)):
            if found is not None:
                shares = [f"{found['shares'][part]:.0%}" for part in ("busy_s", "scheduler_s", "unfold_s")]
                counts = (str(found["size"]), str(found["steps"]), f"{found['cells_per_step']:.0f}")
                us = f"{found['scheduler_us_per_step']:.0f}"
                rows.append([result["workload"], found["order"], *counts, *shares, us])
    columns = "order | mini-batch | steps | cells a step | cells | scheduler | unfolding | scheduler, us a step"
    return table(["workload", *columns.split(" | ")], rows)


def peer_table(found: Result) -> str:
    """Return DyNet's best and ours on the same inputs."""
    rows = []
    for ours in found["ours"]:
        for row in ours["orders"]:
            how = f"here, {row['order']}{', planned' if row['planned'] else ''}"
            rows.append([how, ours["workload"], str(row["size"]), f"{row['per_s']:,.0f}", ""])
        theirs = [row for row in found["dynet"] if row["workload"] == ours["workload"]]
        for build, strategy in dict.fromkeys((row["build"], row["strategy"]) for row in theirs):
            mine = [row for row in theirs if (row["build"], row["strategy"]) == (build, strategy)]
            row, alone = (max(mine, key=lambda row: row[key]) for key in ("per_s", "per_s_without_building"))
            rates = [f"{row['per_s']:,.0f}", f"{alone['per_s_without_building']:,.0f}"]
            rows.append([f"{build}, {strategy}", ours["workload"], str(row["size"]), *rates])
    return table(("what", "workload", "mini-batch", "requests/s", "without building graphs"), rows)


def show(found: Result, page: Path) -> None:
    """Put all tables into the page."""
    results, about = found["results"], found["machine"]
    sections = {
        "ratios": ratios_table(results), "rates": rates_table(results, False),
        "rates-planned": rates_table(results, True), "shares": shares_table(results), "sizes": sizes_table(results),
        "machine": f"{about['cpu']}, {about['cores']} cores, commit {found['commit']}, medians of {found['rounds']}.",
    }  # fmt: skip
    if "peer" in found:
        sections["peer"] = peer_table(found["peer"])
    fill(page, sections)


def keep(new: Result, options: argparse.Namespace) -> None:
    """Write results beside those of other workloads that are in the file."""
    found = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {"results": []}
    if "results" in new:
        names = {result["workload"] for result in new["results"]}
        rest = [result for result in found["results"] if result["workload"] not in names]
        new["results"] = sorted(rest + new["results"], key=lambda result: list(FILES).index(result["workload"]))
    found |= {"commit": commit(), "machine": machine(), "rounds": options.rounds, **new}
    options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "ed-batch-throughput.json")
    parser.add_argument("--policies", type=Path, default=Path(gettempdir()) / "policies", help="Of learnt orders.")
    parser.add_argument("--rounds", type=int, default=5)
    what = parser.add_subparsers(dest="what", required=True)
    runs = what.add_parser("run")
    runs.add_argument("data", type=Path)
    runs.add_argument("--workload", nargs="+", default=list(FILES), choices=FILES)
    what.add_parser("inputs").add_argument("inputs", type=Path)
    peers = what.add_parser("peer")
    peers.add_argument("inputs", type=Path)
    peers.add_argument("dynet", type=Path, nargs="?")
    what.add_parser("page").add_argument("page", type=Path)
    options = parser.parse_args()
    options.policies.mkdir(exist_ok=True)
    if options.what == "inputs":
        write_inputs(options.inputs)
    elif options.what == "page":
        show(json.loads(options.json.read_text("utf-8")), options.page)
    else:
        keep(run(options) if options.what == "run" else peer(options), options)


if __name__ == "__main__":
    main()
