"""The start of an engine: the models' example requests prove their cells, and then every cell runs at every size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

from batchmaker.compiled import is_compiling
from batchmaker.engine.answer import Answer
from batchmaker.engine.catalogue import Catalogue
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.request import Ticket
from batchmaker.engine.sequence import Sequence as OpenSequence
from batchmaker.engine.setup import Drivers, cost_profile, wants_costs
from batchmaker.engine.worker import Worker
from batchmaker.errors import BatchmakerError, ModelError, SequenceLimitError, StoppedError
from batchmaker.model.registry import CellRegistry
from batchmaker.policies.base import CellPolicy


@final
class Start:
    """Starts an engine whose workers run. The first computes the examples; what is proved is proved for all.

    threads: with which the cells' steps are timed, for policies that want costs; None if they cannot be timed here.
    ticket: makes the ticket of an example request, given the name of its model. open_sequence: opens a sequence of a
    model.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        registry: CellRegistry,
        workers: Sequence[Worker],
        drivers: Sequence[Drivers],
        threads: int | None,
        ticket: Callable[[Any, str], Ticket],
        open_sequence: Callable[[str], OpenSequence],
    ) -> None:
        self._catalogue = catalogue
        self._registry = registry
        self._workers = workers
        self._drivers = drivers
        self._threads = threads
        self._ticket = ticket
        self._open_sequence = open_sequence
        self._doing = ""

    @property
    def said(self) -> tuple[str, str]:
        """What the start does now, and what is compiled now, in words; "" where nothing is. Any thread may ask."""
        doing, cell = self._doing, self._registry.binding
        compiled = f"compiles cell {cell!r}" if cell else "compiles the loops of cells" if is_compiling() else ""
        return f"{doing}: {compiled}" if doing and compiled else doing, compiled

    def run(self) -> None:
        """Prove and materialise the cells, and measure what they cost. Raises ModelError if an example fails."""
        try:
            self._run()
        finally:
            self._doing = ""

    def _run(self) -> None:
        examples = [(served.name, request) for served in self._catalogue for request in served.model.examples]
        has_examples = bool(examples) or any(served.model.example_chunks for served in self._catalogue)
        driver, policy = self._workers[0].driver if has_examples else None, self._drivers[0].policy
        if isinstance(driver, CellDriver):
            driver.await_materialise()
            self._prove_chunks()
        for name, request in examples:
            self._prove(self._ticket(request, name), "request", name)
        if isinstance(driver, CellDriver):
            if isinstance(policy, CellPolicy):
                policy.check_cells(self._registry.types)
            self._doing = "runs every cell at every batch size"
            driver.materialise()
        if wants_costs(policy):
            self._doing = "measures how long steps of the cells take"
            threads = self._threads if isinstance(driver, CellDriver) else None
            profile = cost_profile(self._catalogue, self._registry, threads)
            if profile is not None:
                for worker, drivers in zip(self._workers, self._drivers, strict=True):
                    own = profile if worker is self._workers[0] else copy.deepcopy(profile)  # policies add to theirs
                    worker.call_soon(partial(drivers.use_profile, own))

    def _prove_chunks(self) -> None:
        for served in self._catalogue:
            if served.model.example_chunks:
                with suppress(SequenceLimitError), self._open_sequence(served.name) as one:
                    *earlier, last = served.model.example_chunks
                    for chunk in earlier:
                        self._prove(one.ticket(chunk), "chunk", served.name)
                    self._prove(one.ticket(last, last=True), "chunk", served.name)

    def _prove(self, ticket: Ticket, what: str, name: str) -> None:
        self._doing = f"computes the example {what} of model {name!r}"
        ticket.counted = False
        ticket.answer = answer = Answer(ticket.request_id, self._workers[0])
        self._workers[0].send([ticket])
        try:
            answer.result()
        except StoppedError:
            raise
        except BatchmakerError as error:
            which = f" of model {name!r}" if len(self._catalogue) > 1 else ""
            raise ModelError(f"the model's example {what}{which} failed: {error}") from error
