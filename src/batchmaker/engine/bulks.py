"""Requests of `map` that go through a driver together: what they have in common is done once for all of them.

A bulk ticket brings up to MOST_IN_BULK requests of one call, which have one answer (see `Bulk`). Those of them that
have templates, and whose result is one handle, have no records of their own: where their nodes are stands in arrays,
their values are written together and their results read together. The others begin as any request does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np

from batchmaker.core.commands import Admit, Fail, Reply
from batchmaker.core.events import Event, RequestArrived, RequestFailed, RequestId
from batchmaker.engine.arrivals import Arrivals
from batchmaker.engine.failures import at_fault, error_of
from batchmaker.engine.request import Bulk, Settled, Ticket
from batchmaker.engine.results import Results
from batchmaker.errors import BatchmakerError
from batchmaker.graph.values import ValueSequence
from batchmaker.model.template_values import GatheredValues, TemplateValues
from batchmaker.model.templates import Template

FEWEST_IN_BULK: Final = 8
MOST_IN_BULK: Final = 64
SHARED_IN_BULK: Final = 16
"""Fewer requests than the first get a ticket each. A bulk ticket has at most as many as the second, or the third where
several workers share the requests of a call: one of them runs all of a bulk."""

_RESULT: Final = "its result"
_DATA: Final = "its data"

Member = tuple[Bulk, int]
"""A request of a bulk, and its place there."""


@final
class Bulks:
    """The requests of bulks that a driver has in flight without records of their own.

    members: these requests, in the order in which they began. failed: those whose data could not be written, until
    the scheduler is told (see `take_failed`). settle: answers bulk tickets.
    """

    def __init__(self, arrivals: Arrivals, results: Results) -> None:
        self._arrivals = arrivals
        self._results = results
        self.members: dict[RequestId, Member] = {}
        self.failed: list[tuple[RequestId, BatchmakerError]] = []
        self.settle: Callable[[Sequence[Settled]], None] = lambda _: None

    def begin(
        self, tickets: Sequence[Ticket], values: Sequence[TemplateValues | None], now_s: float, events: list[Event]
    ) -> list[tuple[Ticket, int]]:
        """Let the requests of these bulk tickets arrive. values: of all requests, one after the other.

        Returns those that need a ticket and a record of their own: that ticket, and their place in `values`.
        """
        others, first = list[tuple[Ticket, int]](), 0
        for ticket in tickets:
            bulk = ticket.bulk
            assert bulk is not None
            places, templates, gathered_at = list[int](), list[Template](), list[int]()
            gathered: GatheredValues | None = None
            for place, (number, one) in enumerate(zip(bulk.ids, values[first : first + len(bulk.ids)], strict=True)):
                if one is None or not (one[1] is gathered or gathered is None) or not self._takes(one[0], templates):
                    others.append((bulk.ticket_of(place), first + place))
                    continue
                template, gathered, at = one
                places.append(place)
                templates.append(template)
                gathered_at.append(at)
                events.append(
                    RequestArrived(number, template.graph, now_s, None, False, ticket.priority, ticket.model_id)
                )
            if gathered is not None:
                bulk.begin(places, templates, gathered, gathered_at)
                self.members.update([(bulk.ids[place], (bulk, place)) for place in places])
            first += len(bulk.ids)
        return others

    def _takes(self, template: Template, before: Sequence[Template]) -> bool:
        """Whether a request needs no record of its own: it does not depend on values, and its result is one handle,
        as those of the requests before it."""
        form = template.result_form
        if form is None or template.loops or template.graph.region is not None:
            return False
        if before:
            return bool(form == before[0].result_form)
        (handle,) = template.handles
        return self._results.tables.find(handle.output, handle.spec) is not None

    def admit(self, commands: Iterable[Admit], now_s: float) -> list[Admit]:
        """Note where the nodes of requests are, and write their data there. Returns the commands of other requests."""
        others = list[Admit]()
        alike: dict[int, tuple[GatheredValues, list[Admit]]] = {}
        top = slots = 0
        for command in commands:
            member = self.members.get(command.request)
            if member is None:
                others.append(command)
                continue
            bulk, place = member
            bulk.shifts[place], bulk.started_s[place] = command.base, now_s
            top, slots = max(top, command.base + command.num_nodes), max(slots, command.slot)
            assert bulk.gathered is not None
            alike.setdefault(id(bulk.gathered), (bulk.gathered, []))[1].append(command)
        if alike:
            self._results.fit(top, slots + 1)
        for gathered, admitted in alike.values():
            for command, error in at_fault(partial(self._fill, gathered), admitted, _DATA):
                self.failed.append((command.request, error))
        return others

    def _fill(self, gathered: GatheredValues, admitted: Sequence[Admit]) -> None:
        """Write the values of admitted requests into the host tables."""
        members = [self.members[command.request] for command in admitted]
        places = [bulk.gathered_at[place] for bulk, place in members]
        self._arrivals.write(gathered, places, [command.base for command in admitted], admitted[0].host_tables)

    def take_failed(self, now_s: float) -> list[Event]:
        """Tell the scheduler of requests whose data could not be written."""
        failed, self.failed = [one for one in self.failed if one[0] in self.members], []
        for request, error in failed:
            bulk, place = self.members[request]
            bulk.errors[place] = error
        return [RequestFailed(request, now_s, str(error)) for request, error in failed]

    def reply(self, commands: Iterable[Reply], now_s: float) -> list[Reply]:
        """Read the results of requests, all of whose values are computed. Returns the commands of other requests."""
        others, finished = list[Reply](), list[Member]()
        for command in commands:
            member = self.members.pop(command.request, None)
            if member is None:
                others.append(command)
            else:
                finished.append(member)
        alike: dict[Any, list[Member]] = {}
        for member in finished:
            alike.setdefault(member[0].result_form, []).append(member)
        read = partial(self._read, now_s=now_s)
        for (bulk, place), error in [one for members in alike.values() for one in at_fault(read, members, _RESULT)]:
            bulk.put(place, None, error, now_s)
        self._leave(finished)
        return others

    def _read(self, members: Sequence[Member], now_s: float) -> None:
        """Read the results of requests that are alike, and give them to their bulks."""
        (handle,) = members[0][0].templates[members[0][1]].handles
        table = self._results.tables.find(handle.output, handle.spec)
        assert table is not None
        if isinstance(handle, ValueSequence):
            nodes = [bulk.templates[place].handles[0].nodes + bulk.shifts[place] for bulk, place in members]
            results = table.read_parts(nodes)
        else:
            results = table.read_each(
                np.array([bulk.templates[place].handles[0].node + bulk.shifts[place] for bulk, place in members])
            )
        for (bulk, place), result in zip(members, results, strict=True):
            bulk.put(place, result, None, now_s)

    def fail(self, command: Fail, now_s: float) -> bool:
        """End a request with an error. Returns whether it is one of these."""
        member = self.members.pop(command.request, None)
        if member is None:
            return False
        bulk, place = member
        bulk.put(place, None, bulk.errors.get(place) or error_of(command, bulk.ticket), now_s)
        self._leave([member])
        return True

    def _leave(self, members: Sequence[Member]) -> None:
        """Let go of the values of ended requests, and answer the bulks of which all requests have ended."""
        if self._results.tables.wide:
            admitted = [(bulk.shifts[place], bulk.templates[place].num_nodes) for bulk, place in members]
            self._results.let_go(np.array([one for one in admitted if one[0] >= 0], np.int64).reshape(-1, 2))
        done = [bulk.ticket for bulk in dict.fromkeys([bulk for bulk, _ in members]) if not bulk.num_left]
        if done:
            self.settle([(ticket, None, None) for ticket in done])
