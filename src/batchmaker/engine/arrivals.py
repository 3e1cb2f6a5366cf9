"""Requests whose shapes have templates. They are not unfolded; the values of one turn are laid out together.

CellDriver uses this for new requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.core.commands import Admit, TableId
from batchmaker.engine.request import InFlight, Ticket
from batchmaker.graph.spec import CellType
from batchmaker.model.cell import Cell
from batchmaker.model.request_shapes import Leaf
from batchmaker.model.scope import CellTypes
from batchmaker.model.sequence_state import KeptState
from batchmaker.model.template_cache import ProvenTemplates, Sight, TemplateCache
from batchmaker.model.template_values import GatheredValues, TemplateValues, gather
from batchmaker.model.templates import Template
from batchmaker.model.unfolding import Unfolding

Write = Callable[[TableId, slice | NDArray[np.int64], Any], None]
Asked = tuple[int, Any, KeptState | None]
"""Of a request: the number of its model, itself, and the state before it; see TemplateCache.look."""


@final
class Arrivals:
    """Finds the templates of requests, and writes the values of admitted requests into the host tables.

    cells: by type id; may grow. max_nodes: the most nodes of one request. write: Executor.write. proven: see
    TemplateCache.
    """

    def __init__(
        self, cells: Sequence[CellType], max_nodes: int, write: Write, proven: ProvenTemplates | None = None
    ) -> None:
        self._templates = TemplateCache(cells, max_nodes, proven)
        self._write = write

    @property
    def templates(self) -> TemplateCache:
        """The templates of all shapes seen."""
        return self._templates

    def draw(self, asked: Sequence[Asked], level: int = 0) -> tuple[list[TemplateValues | None], list[Sight | None]]:
        """Find the templates of these requests, and lay out their values.

        Returns two lists with one entry for each request: its template and values, or None if it must be unfolded; and
        what `recorded` needs of it. A wrong request must be unfolded, because that raises its error. level: see
        Unfolding.
        """
        sights = self._templates.look(asked, level)
        from_templates: list[TemplateValues | None] = [None] * len(asked)
        forms: dict[Hashable, tuple[list[int], list[Template], list[list[Leaf]]]] = {}
        for i, sight in enumerate(sights):
            if sight is None:
                continue
            _, values, template = sight
            if template is None:
                continue
            alike = forms.get(template.form)
            if alike is None:
                alike = forms[template.form] = ([], [], [])
            alike[0].append(i)
            alike[1].append(template)
            alike[2].append(values)
        for members, templates, leaves in forms.values():
            gathered, wrong = gather(templates, leaves)
            for place in wrong:
                sights[members[place]] = None
            right = list(range(len(members)))
            if gathered is None:
                right = [place for place in right if place not in wrong]
                gathered, _ = gather([templates[place] for place in right], [leaves[place] for place in right])
            if gathered is not None:
                for n, place in enumerate(right):
                    from_templates[members[place]] = (templates[place], gathered, n)
        return from_templates, sights

    def before(self, ticket: Ticket) -> KeptState | None:
        """Return the state that a chunk begins with, one object for all equal ones; None for other requests."""
        chunk = ticket.chunk
        return None if chunk is None else self._templates.canonical(chunk.before) if chunk.last else chunk.before

    def recorded(self, ticket: Ticket, types: CellTypes[Cell], sight: Sight | None, unfolding: Unfolding) -> None:
        """Note that a request was unfolded without an error: its shape may get a template."""
        before = self.before(ticket)
        if sight is not None and not unfolding.open:
            self._templates.recorded(sight, ticket.model, types, ticket.request, before, unfolding)
        if before is not None and not unfolding.open:
            unfolding.after = self._templates.canonical(unfolding.after)

    def fill(self, admitted: Sequence[tuple[InFlight, Admit]]) -> None:
        """Write the values of requests with templates that were admitted. Must run before a task reads them."""
        together: dict[int, tuple[GatheredValues, list[int], list[int], tuple[TableId, ...]]] = {}
        for request, command in admitted:
            if request.template_values is None:
                continue
            _, gathered, place = request.template_values
            alike = together.get(id(gathered))
            if alike is None:
                alike = together[id(gathered)] = (gathered, [], [], command.host_tables)
            alike[1].append(place)
            alike[2].append(command.base - command.first_local)
        for gathered, places, shifts, tables in together.values():
            self.write(gathered, places, shifts, tables)

    def write(
        self, gathered: GatheredValues, places: Sequence[int], shifts: Sequence[int], tables: Sequence[TableId]
    ) -> None:
        """Write the values of some of the requests that were laid out together. places, shifts: see GatheredValues."""
        for feed, table in enumerate(tables):
            rows, values = gathered.rows(feed, places, shifts)
            self._write(table, rows, values)
