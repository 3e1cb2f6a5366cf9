"""Places of the values inside a cell in memory, so that batched operations read and write slices (ED-Batch 3.2).

A batch is one operation on several values at once, position by position. Its positions have no fixed order. The layout
may permute them, but must permute results and operands in the same way. If this is impossible for all operands, the
cheapest ones are given up. Such an operand is gathered: this needs a copy before the operation and never changes a
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from batchmaker_papers.planner.alignment import aligned_order
from batchmaker_papers.planner.batches import Batch, Operand, Variable, check_batches, placed_only
from batchmaker_papers.planner.demands import Demands, heaviest


class Access(Enum):
    """The way in which a batch reads an operand."""

    VIEW = "view"
    """A slice of the layout, in the batch's order."""
    BROADCAST = "broadcast"
    """One variable at every position: a slice of one variable, repeated without a copy."""
    GATHER = "gather"
    """Copied together before the operation, in the batch's order."""
    EXTERNAL = "external"
    """No position is placed: weights and inputs. The caller puts them into the batch's order."""


@dataclass(frozen=True, slots=True)
class PlacedOperand:
    """first: the start in `Layout.order` of the slice of a VIEW, or of the variable of a BROADCAST; else None."""

    access: Access
    first: int | None


@dataclass(frozen=True, slots=True)
class PlacedBatch:
    """Results are always a slice: `Layout.order[first : first + len(positions)]`.

    positions: the batch's positions in memory order; the i-th result there is `results[positions[i]]`. Gathered and
    external operands must be put into this order too.
    """

    first: int
    positions: tuple[int, ...]
    operands: tuple[PlacedOperand, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A place for every variable, and the access of each batch.

    order: variables in memory order. offsets: for each variable, the elements per example before it in its region.
    batches: in the given order. gather_cost: sum over the gathered operands.
    """

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    batches: tuple[PlacedBatch, ...]
    gather_cost: float


MOST_WORK = 20_000
"""A limit of the search for the best set of operands: number of tried sets times the number of variables."""


def plan_layout(variables: Sequence[Variable], batches: Sequence[Batch]) -> Layout:
    """Return a layout in which all results are slices, and so are the operands that are most expensive to gather.

    The gather cost is the least that any such layout has, unless too many operands contradict each other for a complete
    search. Even then it is never more than with the variables in the given order, if all results are slices there.
    Raises ModelError if a batch names an unknown variable, computes one twice or in several sizes or regions, or has
    operands of another length, and for costs below 0.
    """
    check_batches(variables, batches)
    if not variables:
        return Layout((), (), (), 0.0)
    wishes = sorted(
        (-_cost(variables, operand), number, which)
        for number, batch in enumerate(batches)
        for which, operand in enumerate(batch.operands)
        if len(batch.results) > 1 and _can_be_slice(variables, operand.variables)
    )
    regions: dict[int, list[int]] = {}
    for index, variable in enumerate(variables):
        regions.setdefault(variable.region, []).append(index)

    def order_with(demands: Demands) -> list[int] | None:
        columns = [[batch.results] for batch in batches]
        for _, number, which in (wishes[wish] for wish in demands):
            columns[number].append(placed_only(batches[number].operands[which].variables))
        return aligned_order(len(variables), [tuple(region) for region in regions.values()], columns)

    weights = [-negative_cost for negative_cost, _, _ in wishes]
    feasible = _slices_as_given(variables, batches, wishes)
    best = heaviest(weights, lambda demands: order_with(demands) is not None, feasible, MOST_WORK // len(variables))
    order = order_with(best)
    assert order is not None  # `best` can be met
    return _layout(variables, batches, order)


def _layout(variables: Sequence[Variable], batches: Sequence[Batch], order: Sequence[int]) -> Layout:
    """Return the layout for an order in which all results are slices.

    All conditions are checked again.
    """
    offsets, used = [0] * len(variables), dict.fromkeys((variable.region for variable in variables), 0)
    for index in order:
        variable = variables[index]
        offsets[index] = used[variable.region]
        used[variable.region] += variable.size
    place = _places(order)
    placed = tuple(_placed_batch(variables, place, batch) for batch in batches)
    gathered = (
        _cost(variables, operand)
        for batch, slices in zip(batches, placed, strict=True)
        for operand, at in zip(batch.operands, slices.operands, strict=True)
        if at.access is Access.GATHER
    )
    return Layout(tuple(order), tuple(offsets), placed, float(sum(gathered)))


def _placed_batch(variables: Sequence[Variable], place: Sequence[int], batch: Batch) -> PlacedBatch:
    positions = tuple(sorted(range(len(batch.results)), key=lambda position: place[batch.results[position]]))
    operands = []
    for operand in batch.operands:
        ordered = [operand.variables[position] for position in positions]
        first = ordered[0]
        if first is None and not placed_only(ordered):
            operands.append(PlacedOperand(Access.EXTERNAL, None))
        elif _can_be_slice(variables, ordered) and _is_slice(place, placed_only(ordered)):
            operands.append(PlacedOperand(Access.VIEW, place[placed_only(ordered)[0]]))
        elif first is not None and set(ordered) == {first}:
            operands.append(PlacedOperand(Access.BROADCAST, place[first]))
        else:
            operands.append(PlacedOperand(Access.GATHER, None))
    return PlacedBatch(place[batch.results[positions[0]]], positions, tuple(operands))


def _slices_as_given(
    variables: Sequence[Variable], batches: Sequence[Batch], wishes: Sequence[tuple[float, int, int]]
) -> Demands:
    """Return the wishes that hold if the variables are in the given order; none if it scatters some results."""
    place = range(len(variables))
    if not all(_is_slice(place, sorted(batch.results)) for batch in batches):
        return ()
    placed = [_placed_batch(variables, place, batch) for batch in batches]
    return tuple(
        wish for wish, (_, number, which) in enumerate(wishes) if placed[number].operands[which].access is Access.VIEW
    )


def _places(order: Sequence[int]) -> list[int]:
    """Return the place of each variable."""
    place = [0] * len(order)
    for number, variable in enumerate(order):
        place[variable] = number
    return place


def _is_slice(place: Sequence[int], ordered: Sequence[int]) -> bool:
    """Whether the variables are consecutive, in this order."""
    return all(place[after] == place[before] + 1 for before, after in pairwise(ordered))


def _can_be_slice(variables: Sequence[Variable], wanted: Sequence[int | None]) -> bool:
    """Whether some order of variables makes these a slice: all are placed, once, alike, in one region."""
    placed = placed_only(wanted)
    return len(set(placed)) == len(wanted) and len({variables[index] for index in placed}) == 1


def _cost(variables: Sequence[Variable], operand: Operand) -> float:
    if operand.gather_cost is not None:
        return operand.gather_cost
    return float(sum(variables[index].size for index in placed_only(operand.variables)))
