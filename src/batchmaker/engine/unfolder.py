"""Runs the unfold functions of requests, or uses their templates, and makes the scheduler's events of them.

CellDriver uses this. Whatever a request's code raises, or its data makes another raise here, is that request's error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import final

from batchmaker.clock import Clock
from batchmaker.compile.run_form import AT_ITS_LENGTH
from batchmaker.core.events import CellTypeAdded, Event, GraphExtended, RequestArrived, RequestFailed
from batchmaker.engine.arrivals import Arrivals, Asked
from batchmaker.engine.bulks import Bulks
from batchmaker.engine.failures import blamed
from batchmaker.engine.request import InFlight, Settled, Ticket
from batchmaker.engine.stats import DriverStats
from batchmaker.engine.stop_tests import said_end
from batchmaker.errors import RAISED_BY_USERS
from batchmaker.graph.regions import segments_of
from batchmaker.graph.spec import CellType
from batchmaker.graph.whole_runs import level_of
from batchmaker.model.cell import Cell
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import CellTypes
from batchmaker.model.template_cache import Sight
from batchmaker.model.template_values import TemplateValues
from batchmaker.model.templates import Template
from batchmaker.model.unfolding import Unfolding
from batchmaker.model.weights import version_of

_LOG = logging.getLogger("batchmaker.engine")

Settle = Callable[[Sequence[Settled]], None]


@final
class Unfolder:
    """Unfolds requests.

    models: for each model, by number, what gives its cells their types: the registry, with the prefix of its names.
    arrivals: the templates. max_nodes: the most nodes of one request. stats: counts the time.
    """

    def __init__(
        self,
        registry: CellRegistry,
        models: Sequence[CellTypes[Cell]],
        arrivals: Arrivals,
        clock: Clock,
        max_nodes: int,
        stats: DriverStats,
    ) -> None:
        self._registry = registry
        self._models = models
        self._arrivals = arrivals
        self._clock = clock
        self._max_nodes = max_nodes
        self.stats = stats
        self._num_known = 0

    @property
    def known(self) -> Sequence[CellType]:
        """The cell types that the scheduler knows, or will know by the events so far."""
        return self._registry.types[: self._num_known]

    def begin(
        self,
        tickets: Sequence[Ticket],
        events: list[Event],
        settle: Settle,
        num_in_flight: int = 0,
        alone: Callable[[Ticket, TemplateValues], bool] | None = None,
        bulks: Bulks | None = None,
    ) -> list[InFlight]:
        """Let requests arrive: from their template if they have one, otherwise by running their unfold function.

        Returns those that have begun. settle: answers the others. num_in_flight: other requests. alone: may serve a
        request with a template at once, and tells whether it has. bulks: takes bulk tickets; their requests that need
        records of their own are among those that have begun.
        """
        if not tickets:
            return []
        begin = time.perf_counter()
        weights, total = self._registry.weights.found
        if sum(map(version_of, weights)) != total:
            error = self._registry.weights.changed()
            settle([(ticket, None, error) for ticket in tickets])
            return []
        entered = []
        now_s, has_run = self._clock.now_s(), False
        forms = self._registry.forms_depend_on_concurrency
        level = level_of(num_in_flight + sum([one.num_requests for one in tickets])) if forms else 0
        num_bulks = 0
        for ticket in tickets:
            num_bulks += ticket.bulk is not None
        if bulks is not None and num_bulks:
            tickets, templates, sights = self._begin_bulks(bulks, tickets, level, now_s, events, settle)
        else:
            templates, sights = self._from_templates(self._asked(tickets), level)
        self.learn_types(events)  # templates that other workers have proved may need more
        for ticket, from_template, sight in zip(tickets, templates, sights, strict=True):
            answer = ticket.answer
            if (ticket.error is not None or (answer is not None and answer.verdicts)) and (ended_by := ticket.ended_by):
                settle([(ticket, None, ended_by)])  # cancelled or late, perhaps while others were unfolded
                continue
            # An unfold function that has run for a request before it may have changed what was read for a template.
            if from_template is not None and has_run and not from_template[0].guard.holds():
                from_template = None
            if alone is not None and from_template is not None and alone(ticket, from_template):
                continue
            try:  # the model's own code, or what it returned
                if from_template is None:
                    has_run = True
                    unfolded: Unfolding | Template = self._unfolded(ticket, events, level)
                    now_s = self._clock.now_s()
                else:
                    unfolded = from_template[0]
                request = InFlight(ticket, unfolded, from_template)
            except RAISED_BY_USERS as error:
                settle([(ticket, None, blamed(error))])
                continue
            if isinstance(unfolded, Unfolding):
                self._note(ticket, sight, unfolded)
            ticket.num_cells += unfolded.graph.num_nodes
            entered.append(request)
            events.append(
                RequestArrived(
                    ticket.request_id,
                    unfolded.graph,
                    now_s,
                    ticket.deadline_s,
                    unfolded.open,
                    ticket.priority,
                    ticket.model_id,
                    None if ticket.chunk is None else ticket.chunk.sequence.sequence_id,
                )
            )
        self.stats.unfold_s += time.perf_counter() - begin
        return entered

    def _begin_bulks(
        self, bulks: Bulks, tickets: Sequence[Ticket], level: int, now_s: float, events: list[Event], settle: Settle
    ) -> tuple[list[Ticket], list[TemplateValues | None], list[Sight | None]]:
        """Let the requests of bulks begin that need no record. Return the tickets of all others, and what
        `_from_templates` says of them."""
        mine, others = list[Ticket](), list[Ticket]()
        for ticket in tickets:
            if ticket.bulk is None:
                others.append(ticket)
            elif ticket.error is None:
                mine.append(ticket)
            else:  # another thread has answered
                settle([(ticket, None, ticket.error)])
        asked: list[Asked] = [(ticket.model_id, request, None) for ticket in mine for request in ticket.request]
        templates, sights = self._from_templates(asked + self._asked(others), level)
        self.learn_types(events)
        apart = bulks.begin(mine, templates[: len(asked)], now_s, events)
        places = [place for _, place in apart] + list(range(len(asked), len(templates)))
        return (
            [ticket for ticket, _ in apart] + others,
            [templates[place] for place in places],
            [sights[place] for place in places],
        )

    def resume(self, requests: Iterable[InFlight], events: list[Event]) -> None:
        """Continue the unfold functions of these requests while they have the values that they wait for."""
        begin, now_s = time.perf_counter(), self._clock.now_s()
        for request in requests:
            unfolding = request.unfolding
            while unfolding.open and not request.waiting_for:
                assert isinstance(unfolding, Unfolding)  # a template never waits for values
                try:
                    sent = unfolding.resume(request.value)
                    self._note_loops(unfolding)
                except RAISED_BY_USERS as error:  # the model's own code, or what it yielded
                    request.error = blamed(error)
                    self.learn_types(events)
                    events.append(RequestFailed(request.ticket.request_id, now_s, str(request.error)))
                    break
                ticket, graph = request.ticket, unfolding.graph
                if ticket.on_value is not None:
                    ticket.stream(sent)
                self.learn_types(events)
                request.graphs.append(graph)
                request.waiting_for = {key for key in unfolding.awaited if key not in request.values}
                ticket.num_cells += graph.num_nodes
                events.append(GraphExtended(ticket.request_id, graph, now_s, unfolding.open, unfolding.take_dropped()))
        self.stats.unfold_s += time.perf_counter() - begin

    def _asked(self, tickets: Sequence[Ticket]) -> list[Asked]:
        before = self._arrivals.before
        return [
            (
                one.model_id,
                one.request,
                None if (c := one.chunk) is None else before(one) if c.last else c.sequence.state,
            )
            for one in tickets
        ]

    def _from_templates(
        self, asked: Sequence[Asked], level: int
    ) -> tuple[list[TemplateValues | None], list[Sight | None]]:
        """Return the template and values of each request, and its view; None and None if it must be unfolded.

        If a request makes this raise, it is tried alone, and unfolded then: that raises its error, if it has one.
        """
        try:
            return self._arrivals.draw(asked, level)
        except RAISED_BY_USERS:  # its own classes, settings of its model, or its size
            if len(asked) == 1:
                return [None], [None]
            alone = [self._from_templates([one], level) for one in asked]
            return [values for (values,), _ in alone], [sight for _, (sight,) in alone]

    def _unfolded(self, ticket: Ticket, events: list[Event], level: int) -> Unfolding:
        """Run a request's unfold function to its first `yield` or its end. Raises all that it raises."""
        before = None if ticket.chunk is None else ticket.chunk.before
        try:
            types = self._models[ticket.model_id]
            unfolding = Unfolding(ticket.model, types, ticket.request, self._max_nodes, before=before, level=level)
            unfolding.start()
            self._note_loops(unfolding)
        finally:
            self.learn_types(events)
        return unfolding

    def _note_loops(self, unfolding: Unfolding) -> None:
        """Note at what the chains of new nodes end, for `Engine.explain`."""
        graph, ends = unfolding.graph, self._registry.ends
        parts = [(graph, unfolding.loops)]
        if graph.region is not None:
            parts += [
                (of.graph, {loop.first: loop for loop in of.loops}) for of in segments_of(graph.region) if of.graph
            ]
        for of, loops in parts:
            for run in of.runs:
                said = said_end(loops[run.first].until) if run.open_ended else AT_ITS_LENGTH
                ends.setdefault(run.type_id, {})[said] = None

    def _note(self, ticket: Ticket, sight: Sight | None, unfolding: Unfolding) -> None:
        """Let the templates see a request that was unfolded. If that raises, it is served without a template."""
        try:
            self._arrivals.recorded(ticket, self._models[ticket.model_id], sight, unfolding)
        except RAISED_BY_USERS:
            _LOG.debug("a request of %s gets no template", type(ticket.model).__name__, exc_info=True)

    def learn_types(self, events: list[Event]) -> None:
        """Let the scheduler know the cell types that are new."""
        new = self._registry.types[self._num_known :]  # other workers add more meanwhile
        if new:
            now_s = self._clock.now_s()
            events.extend([CellTypeAdded(cell, now_s) for cell in new])
            self._num_known += len(new)
