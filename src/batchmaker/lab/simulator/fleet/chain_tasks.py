"""Tasks of one replica whose requests are chains of one cell, by the scheduler's own rules, in compiled loops.

What `form` and `find_steps` do for such requests under the policy `cellular`, and
`CellSimulation` with the result, written as one loop over a line of requests. `tests/lab/simulator/fleet` compares the
two answer by answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import UNKNOWN_S
from batchmaker.scheduler.batching import SATURATED_BUDGETS
from batchmaker.scheduler.step_times import learn_steps

Ids = NDArray[np.int64]
Times = NDArray[np.float64]
NOBODY: Final = -1
"""In `RequestLine.following` and at both ends of a replica's line."""


class ChainCosts(NamedTuple):
    """What a step takes, and what bounds a task. seconds: [max_batch + 1] by rows.

    step_s, row_s, turn_s, request_s: see Overhead. max_batch, min_batch: rows of a step. max_steps, budget_s: of a
    task. num_ahead: most requests that a task is formed of.
    """

    seconds: Times
    step_s: float
    row_s: float
    turn_s: float
    request_s: float
    max_batch: int
    min_batch: int
    max_steps: int
    budget_s: float
    num_ahead: int


class RequestLine(NamedTuple):
    """Every request. Arrays [num_requests]. left: steps. following: next in the line of its replica. finished_s: when
    its last step ends, once that is planned."""

    left: NDArray[np.int32]
    following: NDArray[np.int32]
    finished_s: Times


class ReplicaTables(NamedTuple):
    """Every replica. Arrays [replicas], but for tables.

    first, last: of its line, without those whose last step is planned. num_line: how many. num_new: arrived since its
    last task. is_busy: 0 or 1. task_end_s: of the task that runs. known, seconds: [replicas, doublings] and [replicas,
    max_batch + 1], see `learn_steps`. done: [replicas, num_ahead] requests whose last step is in the task, in order;
    num_done: how many, next_done: the first that has not been told of. num_here: unanswered.
    """

    first: Ids
    last: Ids
    num_line: Ids
    num_new: Ids
    is_busy: Ids
    task_end_s: Times
    known: Times
    seconds: Times
    done: NDArray[np.int32]
    num_done: Ids
    next_done: Ids
    num_here: Ids


class Scratch(NamedTuple):
    """Arrays of `form_task` alone. batch: [max_batch]. sizes, counts: [max_steps] rows of so many steps in a row."""

    batch: Ids
    sizes: Ids
    counts: Ids


@compiled
def join(line: RequestLine, places: ReplicaTables, place: int, request: int) -> None:
    """A request is the last in the line of a replica."""
    line.following[request] = NOBODY
    if places.num_line[place]:
        line.following[places.last[place]] = request
    else:
        places.first[place] = request
    places.last[place] = request
    places.num_line[place] += 1
    places.num_new[place] += 1
    places.num_here[place] += 1


@compiled
def form_task(
    line: RequestLine,
    places: ReplicaTables,
    costs: ChainCosts,
    scratch: Scratch,
    place: int,
    now_s: float,
    busy_s: Times,
) -> tuple[int, int]:
    """Plan all steps of the next task of an idle replica; return how many steps and rows they are.

    As many of those first in line as fit are in each step. Those whose last step it is leave the line; the next in line
    take their places within the task, as far as they were among its first `num_ahead`.
    """
    batch, seconds = scratch.batch, places.seconds[place]
    candidates = min(places.num_line[place], costs.num_ahead)
    more = places.num_line[place] > candidates
    budget_s = costs.budget_s
    if candidates == 2 * costs.max_batch:
        budget_s *= SATURATED_BUDGETS
    begin_s = now_s + places.num_new[place] * costs.request_s
    places.num_new[place] = 0
    waiting, num_used, count = places.first[place], 0, 0
    num_steps = num_groups = num_rows = num_done = 0
    used_s = 0.0
    goes_on = False
    while num_steps < costs.max_steps:
        while count < costs.max_batch and num_used < candidates:
            batch[count] = waiting
            waiting = np.int64(line.following[waiting])
            count, num_used = count + 1, num_used + 1
        if count == 0:
            break
        if num_steps > 0 and (
            count < costs.min_batch
            or used_s + seconds[count] > budget_s
            or (more and count < costs.max_batch and num_used == candidates)
        ):
            break
        num_alike = 1
        if goes_on:  # nobody has left since the step before, so nobody came
            num_alike = _num_alike(line.left, batch, count, costs.max_steps - num_steps, used_s, budget_s, seconds)
        taken_s = costs.seconds[count] + costs.step_s + count * costs.row_s
        until_next_s = taken_s + costs.turn_s
        for _ in range(num_alike):
            begin_s += until_next_s
            busy_s[0] += until_next_s
        used_s += num_alike * seconds[count]
        scratch.sizes[num_groups], scratch.counts[num_groups] = count, num_alike
        num_groups, num_steps, num_rows = num_groups + 1, num_steps + num_alike, num_rows + num_alike * count
        staying = _leave(line, places.done[place], num_done, batch, count, num_alike, begin_s)
        num_done += count - staying
        goes_on = staying == count
        count = staying
    _put_back(line, places, place, batch, count, waiting, num_done)
    for group in range(num_groups):
        rows = scratch.sizes[group]
        taken_s = costs.seconds[rows] + costs.step_s + rows * costs.row_s
        for _ in range(scratch.counts[group]):
            learn_steps(places.seconds, places.known, place, costs.max_batch, 1, rows, taken_s)
    places.num_done[place], places.next_done[place] = num_done, 0
    places.is_busy[place], places.task_end_s[place] = 1, begin_s
    return num_steps, num_rows


@compiled
def _num_alike(
    left: NDArray[np.int32], batch: Ids, count: int, most: int, used_s: float, budget_s: float, seconds: Times
) -> int:
    """Return how many steps the same requests take together: until one ends, or the time is over; at least one."""
    if used_s + most * seconds[count] > budget_s:
        most = max(1, int((budget_s - used_s) / seconds[count]))
    for i in range(count):
        most = min(most, int(left[batch[i]]))
    return most


@compiled
def _leave(
    line: RequestLine, done: NDArray[np.int32], num_done: int, batch: Ids, count: int, steps: int, end_s: float
) -> int:
    """Requests have taken so many steps; note those that are done, and return how many stay in the batch."""
    staying = 0
    for i in range(count):
        request = batch[i]
        line.left[request] -= steps
        if line.left[request] == 0:
            line.finished_s[request] = end_s
            done[num_done] = request
            num_done += 1
        else:
            batch[staying] = request
            staying += 1
    return staying


@compiled
def _put_back(
    line: RequestLine, places: ReplicaTables, place: int, batch: Ids, count: int, waiting: int, num_done: int
) -> None:  # fmt: skip
    """Link the line anew: those in the batch who go on, then those that were not taken, of whom `waiting` is first."""
    places.num_line[place] -= num_done
    if places.num_line[place] == 0:
        return
    for i in range(count - 1):
        line.following[batch[i]] = batch[i + 1]
    if count:
        places.first[place] = batch[0]
        line.following[batch[count - 1]] = waiting
        if waiting == NOBODY:
            places.last[place] = batch[count - 1]
    else:
        places.first[place] = waiting


def clear(places: ReplicaTables, place: int) -> None:
    """An engine that has seen nothing is in this place."""
    for name in ("num_line", "num_new", "is_busy", "num_done", "next_done", "num_here"):
        getattr(places, name)[place] = 0
    places.first[place] = places.last[place] = NOBODY
    places.known[place] = np.nan
    places.seconds[place] = UNKNOWN_S
