"""Computing a closed mini-batch from beginning to end, to count the batches of a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from batchmaker.errors import InvariantError, OptionError
from batchmaker.graph.frontier import Frontier
from batchmaker.graph.mini_batch import MiniBatch
from batchmaker.lab.learners.rules import Rule, SufficientRule


@final
@dataclass(frozen=True, slots=True)
class ClosedBatch:
    """Nodes of one type that are computed together."""

    type_id: int
    nodes: tuple[int, ...]


def schedule(frontier: Frontier, rule: Rule, max_batch: int | None = None) -> list[ClosedBatch]:
    """Run a mini-batch from its beginning by the rule and return the batches, in order.

    Every batch holds all ready nodes of its type, as in ED-Batch's Algorithm 1, or only those of the lowest depth if
    the rule asks for it. max_batch: the most nodes of a batch, the earliest ready ones; None for no limit. Raises
    InvariantError if the rule chooses a type without ready nodes.
    """
    if max_batch is not None and max_batch < 1:
        raise OptionError(f"max_batch must be at least 1, got {max_batch}")
    depths = frontier.mini_batch.depths.tolist() if rule.one_depth else None
    frontier.reset()
    rule.begin(frontier.mini_batch)
    batches: list[ClosedBatch] = []
    while frontier.num_left:
        kind = rule.choose(frontier)
        ready = frontier.ready[kind]
        if not ready:
            raise InvariantError(f"{type(rule).__name__} chose type {kind}, which has no ready node")
        chosen = None
        if depths is not None:
            lowest = min(depths[node] for node in ready)
            chosen = [node for node in ready if depths[node] == lowest][:max_batch]
        elif max_batch is not None and len(ready) > max_batch:
            chosen = ready[:max_batch]
        nodes = frontier.run(kind, chosen)
        rule.ran(kind, nodes)
        batches.append(ClosedBatch(kind, tuple(nodes)))
    return batches


def num_batches(frontier: Frontier, rule: Rule) -> int:
    """Return the number of batches of `schedule`, without limit, for a rule that needs no depth."""
    frontier.reset()
    rule.begin(frontier.mini_batch)
    count = 0
    while frontier.num_left:
        kind = rule.choose(frontier)
        rule.ran(kind, frontier.run(kind))
        count += 1
    return count


def schedule_from_sinks(
    mini_batch: MiniBatch, rule: Rule | None = None, max_batch: int | None = None
) -> list[ClosedBatch]:
    """Return the batches of a rule that works from the sinks of the mini-batch, in the order in which they can run.

    The rule, by default SufficientRule, schedules the mini-batch with reversed edges; its batches are then reversed.
    The consumers of a node were in earlier batches there, so here they are in later ones.
    """
    turned = schedule(Frontier(mini_batch.turned), rule or SufficientRule(), max_batch)
    last = len(mini_batch) - 1
    return [
        ClosedBatch(batch.type_id, tuple(sorted(last - node for node in batch.nodes))) for batch in reversed(turned)
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
