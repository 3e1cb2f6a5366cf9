"""Requests whose shapes have templates. They are not unfolded; the values of one turn are laid out together.

CellDriver uses this for new requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.engine.request import Ticket
from batchmaker.graph.spec import CellType
from batchmaker.model.cell import Cell
from batchmaker.model.request_shapes import Leaf
from batchmaker.model.scope import CellTypes
from batchmaker.model.sequence_state import NOTHING_KEPT, KeptState
from batchmaker.model.template_cache import Sight, TemplateCache
from batchmaker.model.template_values import Drawn, Given, gather
from batchmaker.model.templates import Template
from batchmaker.model.unfolding import Unfolding
from batchmaker.scheduler.commands import Admit, TableId

Write = Callable[[TableId, slice | NDArray[np.int64], Any], None]


@final
class Arrivals:
    """Finds the templates of requests, and writes the values of admitted requests into the host tables.

    cells: by type id; may grow. max_nodes: the most nodes of one request. write: Executor.write.
    """

    def __init__(self, cells: Sequence[CellType], max_nodes: int, write: Write) -> None:
        self._templates = TemplateCache(cells, max_nodes)
        self._write = write
        self._admitted: list[tuple[Drawn, Admit]] = []

    @property
    def templates(self) -> TemplateCache:
        """The templates of all shapes seen."""
        return self._templates

    def draw(self, tickets: Sequence[Ticket]) -> tuple[list[Drawn | None], list[Sight | None]]:
        """Find the templates of these requests, and lay out their values.

        Returns two lists with one entry for each request: its template and values, or None if it must be unfolded; and
        what `recorded` needs of it. A wrong request must be unfolded, because that raises its error.
        """
        self._templates.new_turn()
        sights = [self._templates.look(ticket.model_id, ticket.request, _before(ticket)) for ticket in tickets]
        drawn: list[Drawn | None] = [None] * len(tickets)
        forms: dict[Hashable, tuple[list[int], list[Template], list[list[Leaf]]]] = {}
        for i, sight in enumerate(sights):
            if sight is None or (template := sight.template) is None:
                continue
            alike = forms.get(template.form)
            if alike is None:
                alike = forms[template.form] = ([], [], [])
            alike[0].append(i)
            alike[1].append(template)
            alike[2].append(sight.leaves)
        for members, templates, leaves in forms.values():
            given, wrong = gather(templates, leaves)
            for place in wrong:
                sights[members[place]] = None
            right = list(range(len(members)))
            if given is None:
                right = [place for place in right if place not in wrong]
                given, _ = gather([templates[place] for place in right], [leaves[place] for place in right])
            if given is not None:
                for n, place in enumerate(right):
                    drawn[members[place]] = (templates[place], given, n)
        return drawn, sights

    def current(self, drawn: Sequence[Drawn | None]) -> Iterator[Drawn | None]:
        """Give what was drawn for each request, when its turn comes: None if it must be unfolded after all.

        This is so if an unfold function that has run since, for a request before it, has changed what was read.
        """
        has_run = False
        for given in drawn:
            holds = given is not None and (not has_run or given[0].guard.holds())
            has_run = has_run or not holds
            yield given if holds else None

    def recorded(self, ticket: Ticket, types: CellTypes[Cell], sight: Sight | None, unfolding: Unfolding) -> None:
        """Note that a request was unfolded without an error: its shape may get a template."""
        before = _before(ticket)
        if sight is not None and not unfolding.open:
            self._templates.recorded(sight, ticket.model, ticket.model_id, types, ticket.request, before, unfolding)
        if before is not None and not unfolding.open:
            unfolding.after = self._templates.canonical(unfolding.after)

    def admitted(self, requests: Sequence[tuple[Drawn, Admit]]) -> None:
        """Note that requests have their node numbers. The next `fill` writes their values."""
        self._admitted += requests

    def fill(self) -> None:
        """Write the values of requests that were admitted since the last call. Must run before a task reads them."""
        if not self._admitted:
            return
        together: dict[int, tuple[Given, list[int], list[int], tuple[TableId, ...]]] = {}
        for (_, given, place), command in self._admitted:
            alike = together.get(id(given))
            if alike is None:
                alike = together[id(given)] = (given, [], [], command.host_tables)
            alike[1].append(place)
            alike[2].append(command.base - command.first_local)
        self._admitted.clear()
        for given, places, shifts, tables in together.values():
            for feed, table in enumerate(tables):
                rows, values = given.rows(feed, places, shifts)
                self._write(table, rows, values)


def _before(ticket: Ticket) -> KeptState | None:
    if ticket.chunk is None:
        return None
    state = ticket.chunk.sequence.state
    return NOTHING_KEPT if state.structure is None and state.num_nodes == 0 else state  # one for all
