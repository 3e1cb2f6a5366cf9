"""What papers/benchmarks/curves.py simulates: networks, lengths, policies and costs, after the figures of two papers.

Costs of cells were measured on a CPU (`curves.py --measure`). Only steps take time, in all policies alike: the same
cells for padded batches too, so what differs is who runs together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.cli import options as cli_options
from batchmaker.cli.simulate.study import make_policy
from batchmaker.cost import CellLatency, CostProfile, LatencyTable, ProfileOptions
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import merged, unrolled
from batchmaker.graph.work import work_of
from batchmaker.lab.datasets import (
    complete_tree,
    europarl_lengths,
    fixed_lengths,
    poisson_arrivals,
    random_trees,
    read_trees,
    translation_lengths,
)
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.blueprint import Blueprint, blueprint
from batchmaker.policies.agenda import AgendaPolicy
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.depth import DepthPolicy
from batchmaker_papers.learners.mini_batch import play as play_closed
from batchmaker_papers.learners.view import ClosedView
from curve_costs import COSTS, NETWORKS, SIZES

STREAM: Final = 7
"""Number of the random stream of lengths, beside the arrivals of the same seed."""
MERGED: Final[dict[str, Callable[[], CellPolicy]]] = {"like DyNet": AgendaPolicy, "like Fold": DepthPolicy}
"""Orders in which the graphs of a closed batch are computed together, without a limit of rows."""
IDEAL: Final = "ideal"
TREEBANK: Final = "treebank"
"""Lengths of a case whose trees are in the data: only there with it."""
DYNET: Final = "DyNet"
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One line of a figure. policy: its command-line form, a key of MERGED, IDEAL or DYNET. max_batch: by cell."""

    label: str
    policy: str
    max_batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One figure, or one part of one. lengths: as in `drawn`; TREEBANK needs `with_data` first.

    watched: the load at which times are kept as CDFs.
    """

    name: str
    figure: str
    network: str
    lengths: str
    ways: tuple[Way, ...]
    workers: int = 1
    watched: float | None = None


def _padded(most: int, *widths: int) -> tuple[Way, ...]:
    policies = {width: f"padded:bucket_width={width},max_batch={most}" for width in widths}
    return tuple(Way(f"padded, width {width}", policy, (512, 512)) for width, policy in policies.items())


_CELLULAR: Final = Way("cellular", "cellular", (512,))
_CLOSED: Final = Way("closed, width 10", "closed:max_batch=512", (512,))
_TRANSLATORS: Final = (
    Way("cellular, 512 and 256", "cellular", (512, 256)), Way("cellular, 256 and 256", "cellular", (256, 256)),
    *_padded(256, 10),
)  # fmt: skip
_TREES: Final = (
    Way("cellular, 64", "cellular", (64, 64)), Way("cellular, 512", "cellular", (512, 512)),
    *(Way(f"{name}, 64 trees", name, (512, 512)) for name in MERGED),
)  # fmt: skip
_DYNET: Final = Way("DyNet, measured", DYNET, (512, 512))
CASES: Final = {
    case.name: case
    for case in (
        Case("lstm-512", "BatchMaker 7a, 9; Late Batching 3 to 5", "lstm", "europarl",
             (_CELLULAR, _CLOSED, *_padded(512, 10)), watched=0.2),
        Case("lstm-64", "BatchMaker 7b", "lstm", "europarl",
             (Way("cellular", "cellular", (64,)), *_padded(64, 10))),
        Case("widths", "BatchMaker 8", "lstm", "europarl", (_CELLULAR, *_padded(512, 1, 5, 10, 20, 40))),
        Case("fixed-24", "BatchMaker 11, fixed", "lstm", "fixed:24", (_CELLULAR, *_padded(512, 10))),
        Case("clip-50", "BatchMaker 11, up to 50", "lstm", "clip:50", (_CELLULAR, *_padded(512, 10))),
        Case("clip-100", "BatchMaker 11, up to 100", "lstm", "clip:100", (_CELLULAR, *_padded(512, 10))),
        Case("fixed-20", "Late Batching 6, 7", "lstm", "fixed:20", (_CELLULAR, *_padded(512, 10))),
        Case("seq2seq-1", "BatchMaker 13, one worker", "seq2seq", "pairs", _TRANSLATORS),
        Case("seq2seq-2", "BatchMaker 13, two workers", "seq2seq", "pairs", _TRANSLATORS, workers=2),
        Case("seq2seq-long", "BatchMaker 13, decoder twice as long", "seq2seq", "long pairs", _TRANSLATORS),
        Case("treebank", "BatchMaker 14", "treelstm", TREEBANK, (*_TREES, _DYNET)),
        Case("trees", "BatchMaker 14, random trees", "treelstm", "trees", (*_TREES, _DYNET)),
        Case("complete-trees", "BatchMaker 15", "treelstm", "complete trees",
             (*_TREES, Way("ideal, node by node, 64 trees", IDEAL, (512, 512)))),
    )
}  # fmt: skip


# --- costs -----------------------------------------------------------------------------------------------------------


@cache
def profile(name: str) -> CostProfile:
    """Return the measured costs of a network."""
    content = json.loads(COSTS.read_text("utf-8"))
    about = ProfileOptions(NETWORKS[name].get("dtype", "float32"), 1, content["machine"]["cpu"], content["commit"])
    sizes = tuple(content["sizes"])
    cells = [CellLatency(cell, sizes, tuple(s), tuple(s)) for cell, s in content["cells"][name].items()]
    return CostProfile(name, about, LatencyTable(tuple(cells)))


# --- requests --------------------------------------------------------------------------------------------------------


@cache
def plan(name: str) -> Blueprint:
    return blueprint(name, partial(cli_options.make_model, name, **NETWORKS[name]))


def drawn(case: Case, count: int, seed: int) -> list[SimulatedRequest]:
    """Return requests of a case: sentences, pairs of them, or trees."""
    generator, made = np.random.default_rng((seed, STREAM)), plan(case.network)
    if case.lengths == "complete trees":
        return [made.request(_tree(complete_tree()))] * count
    if case.lengths == "trees":
        shapes = _trees()
        return [shapes[i] for i in generator.integers(len(shapes), size=count).tolist()]
    kind, _, number = case.lengths.partition(":")
    if kind == TREEBANK:
        shapes = _treebank(number)
        return [shapes[i] for i in generator.integers(len(shapes), size=count).tolist()]
    if kind == "fixed":
        lengths = fixed_lengths(count, int(number))
    else:
        lengths = europarl_lengths(count, generator, int(number) if kind == "clip" else None)
    if not case.lengths.endswith("pairs"):
        return [made.sized(length) for length in lengths.tolist()]
    words = translation_lengths(lengths, generator) * (2 if case.lengths == "long pairs" else 1)
    return [made.sized(*pair) for pair in zip(lengths.tolist(), words.tolist(), strict=True)]


@cache
def _trees() -> list[SimulatedRequest]:
    """Return trees of as many leaves as sentences of the treebank have: 19 in the mean."""
    made = plan("treelstm")
    return [made.request(_tree(tree)) for tree in random_trees(1000, 0, 8, 30)]


def with_data(case: Case, data: str) -> Case:
    """Return the case with its trees from the folder of the data sets, if it needs them."""
    return replace(case, lengths=f"{TREEBANK}:{data}/sst/train.txt") if case.lengths == TREEBANK else case


@cache
def _treebank(path: str) -> list[SimulatedRequest]:
    """Return the trees of the Stanford Sentiment Treebank."""
    made = plan("treelstm")
    return [made.request(_tree(tree)) for tree in read_trees(path)]


def _tree(tree: Any) -> dict[str, Any]:
    return {"words": [3] * tree.num_leaves, "children": tree.children.tolist()}


# --- playing ---------------------------------------------------------------------------------------------------------


def limited(model: SimulatedModel, most: Sequence[int]) -> SimulatedModel:
    """Return the model with the largest batch of each cell; the last one is for all cells that are left."""
    cells = [
        replace(cell, batch_sizes=tuple(size for size in cell.batch_sizes if size <= most[min(i, len(most) - 1)]))
        for i, cell in enumerate(model.cells)
    ]
    return SimulatedModel(model.name, tuple(cells))


def capacity_rps(case: Case) -> float:
    """Return requests per second if every step of every cell has the batch that is best for it."""
    model, table = plan(case.network).model, profile(case.network).latency
    per_row_s = np.array([min(table.seconds(cell.name, size) / size for size in SIZES) for cell in model.cells])
    works = [work_of(request.graph) for request in drawn(case, 1000, 0)]
    return case.workers / float(np.mean([per_row_s[work.types] @ work.nodes for work in works]))


def played(case: Case, way: Way, rate: float, count: int, seed: int, dynet_s: Sequence[float] | None) -> Records:
    """Simulate one line of a case at one rate. dynet_s: DyNet's seconds for a batch of 0, 1, 2, ... trees."""
    requests = drawn(case, count, seed)
    arrived_s = poisson_arrivals(rate, seed, count=count)
    if way.policy in (*MERGED, IDEAL, DYNET):
        return closed(requests, arrived_s, partial(_batch_s, way.policy, case, dynet_s))
    model = limited(plan(case.network).model, way.max_batch)
    costs = step_costs(model, profile(case.network).latency)
    one = case.workers == 1
    device = SimulatedDevice(costs, case.workers, 0 if one else 1, take_turns=one)
    policy = make_policy(way.policy, profile(case.network))
    return simulate(model, policy, Offered(requests, arrived_s), device)


def closed(
    requests: Sequence[SimulatedRequest],
    arrived_s: NDArray[np.float64],
    seconds: Callable[[Sequence[SimulatedRequest]], float],
    most: int = 64,
) -> Records:
    """Serve graphs merged into batches: whoever waits, up to `most`, begins when the last batch is done."""
    records, now_s, first = Records.of(arrived_s), 0.0, 0
    while first < len(requests):
        now_s = max(now_s, float(arrived_s[first]))
        last = min(int(np.searchsorted(arrived_s, now_s, side="right")), first + most)
        taken_s = seconds(requests[first:last])
        records.started_s[first:last], records.finished_s[first:last] = now_s, now_s + taken_s
        records.busy_s += taken_s
        records.steps += 1
        records.rows += last - first
        now_s, first = now_s + taken_s, last
    return records


def _batch_s(policy: str, case: Case, dynet_s: Sequence[float] | None, batch: Sequence[SimulatedRequest]) -> float:
    """Return seconds of a closed batch of trees."""
    if policy == DYNET:
        assert dynet_s is not None
        return dynet_s[len(batch)]
    table = profile(case.network).latency
    names = [cell.name for cell in plan(case.network).model.cells]
    if policy == IDEAL:  # all trees are alike: one call for each node, with a row for each tree
        work = work_of(batch[0].graph)
        each = [table.seconds(names[kind], len(batch)) for kind in work.types.tolist()]
        return float(np.dot(each, work.nodes))
    graph = merged([_unrolled(case.network, request) for request in batch])
    steps = play_closed(ClosedView(MERGED[policy](), Frontier(graph)))
    return sum(table.seconds(names[step.type_id], len(step.nodes)) for step in steps)


_GRAPHS: Final[dict[int, Any]] = {}


def _unrolled(network: str, request: SimulatedRequest) -> Any:
    """Return a request node by node; requests of one shape are one object, and unrolled once."""
    if id(request) not in _GRAPHS:
        _GRAPHS[id(request)] = unrolled(request.graph, len(plan(network).model.cells))
    return _GRAPHS[id(request)]
