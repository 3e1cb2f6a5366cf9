"""A closed mini-batch computed from beginning to end, to see how many batches a policy needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.sufficient import SufficientPolicy
from batchmaker_papers.learners.view import ClosedView


@final
@dataclass(frozen=True, slots=True)
class ClosedBatch:
    """Nodes of one type that are computed together."""

    type_id: int
    nodes: tuple[int, ...]


def schedule(frontier: Frontier, policy: CellPolicy, max_batch: int | None = None) -> list[ClosedBatch]:
    """Run a mini-batch from its beginning as the policy chooses and return the batches, in order; see `play`."""
    return play(ClosedView(policy, frontier), max_batch)


def play(view: ClosedView, max_batch: int | None = None) -> list[ClosedBatch]:
    """Run a mini-batch of which nothing has run as the policy chooses and return the batches, in order.

    Every batch holds all ready nodes of its type, as in ED-Batch's Algorithm 1, or those of the lowest depth where the
    policy says so. max_batch: at most so many of them, what became ready first; None for no limit. Raises
    InvariantError if the policy chooses a type without ready nodes.
    """
    if max_batch is not None and max_batch < 1:
        raise OptionError(f"max_batch must be at least 1, got {max_batch}")
    depths = view.depths.of if view.policy.one_depth else None
    frontier = view.frontier
    batches: list[ClosedBatch] = []
    while frontier.num_left:
        kind = view.choose()
        ready, chosen = frontier.ready[kind], None
        if depths is not None:
            lowest = min(depths[node] for node in ready)
            chosen = [node for node in ready if depths[node] == lowest][:max_batch]
        elif max_batch is not None and len(ready) > max_batch:
            chosen = ready[:max_batch]
        batches.append(ClosedBatch(kind, tuple(view.run(kind, chosen))))
    return batches


def num_batches(frontier: Frontier, policy: CellPolicy) -> int:
    """Return how many batches `schedule` makes, without limit, of a policy that asks for no depth."""
    view, count = ClosedView(policy, frontier), 0
    while frontier.num_left:
        view.run(view.choose())
        count += 1
    return count


def schedule_from_sinks(
    mini_batch: MiniBatch, policy: CellPolicy | None = None, max_batch: int | None = None
) -> list[ClosedBatch]:
    """Return the batches of a policy that looks at the mini-batch from its sinks, in the order in which they can run.

    The policy, `sufficient` unless another is given, schedules the turned mini-batch.
    """
    turned = schedule(Frontier(mini_batch.turned), policy or SufficientPolicy(), max_batch)
    return turned_back(turned, len(mini_batch))


def turned_back(batches: list[ClosedBatch], num_nodes: int) -> list[ClosedBatch]:
    """Return a turned mini-batch's batches as ones of the mini-batch, from the last to the first.

    All that a node feeds was in batches before its own there, so here it is in later ones.
    """
    last = num_nodes - 1
    return [
        ClosedBatch(batch.type_id, tuple(sorted(last - node for node in batch.nodes))) for batch in reversed(batches)
    ]


def check_schedule(mini_batch: MiniBatch, batches: list[ClosedBatch]) -> None:
    """Raise InvariantError unless every node is computed once, after its sources, with others of its type."""
    done = [False] * len(mini_batch)
    starts, sources = mini_batch.starts.tolist(), mini_batch.sources.tolist()
    types = mini_batch.types.tolist()
    for number, batch in enumerate(batches):
        for node in batch.nodes:
            if done[node] or types[node] != batch.type_id:
                raise InvariantError(f"batch {number}, of type {batch.type_id}: node {node} has run or is of another")
            if not all(done[source] for source in sources[starts[node] : starts[node + 1]]):
                raise InvariantError(f"batch {number}: node {node} runs before something that feeds it")
        for node in batch.nodes:
            done[node] = True
    if not all(done):
        raise InvariantError(f"{done.count(False)} nodes are in no batch, the first of them {done.index(False)}")
