"""The templates of requests: kept by shape, proved at the second request, used while all that was read is unchanged."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, final

from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.graph.spec import CellType
from batchmaker.model.cell import Cell
from batchmaker.model.guards import Guard, UnprovenError
from batchmaker.model.model import Model
from batchmaker.model.observed_code import read_source
from batchmaker.model.request_shapes import Leaf, shapes_of
from batchmaker.model.scope import CellTypes
from batchmaker.model.sequence_state import NOTHING_KEPT, KeptState, signature
from batchmaker.model.stand_ins import Looked
from batchmaker.model.template_values import gather
from batchmaker.model.templates import Template, differs, prove
from batchmaker.model.unfolding import Unfolding

MAX_TEMPLATES: Final = 2048
MAX_NODES: Final = 1 << 18
MAX_SHAPES: Final = 8192
"""Limits: kept templates, their nodes in total, and known shapes. The least recently used are dropped first."""
REFUSALS: Final = 16
"""After so many shapes without a template a function is not asked any more, if none of its shapes has had one."""
MISSES: Final = 256
"""After so many requests in a row without a template a function is asked rarely; a refusal counts as PER_REFUSAL."""
PER_REFUSAL: Final = 8
ASKED: Final = 64
"""Then one request in so many is tried, until one has a template."""
CHANGES: Final = 64
"""After so many templates for which something that was read has changed, a function is not asked any more."""

_SEEN: Final = "seen"
_REFUSED: Final = "refused"

_log: Final = logging.getLogger(__name__)


Key = tuple[int, int, Hashable, int]
"""What a template is kept under: a number for what unfolds it (a model's `unfold`, or its `unfold_chunk`), the id of
the state before it, its shape, and the level of concurrency (see Unfolding)."""

Sight = tuple[Key, list[Leaf], Template | None]
"""The view of a request for templates: its key, its values, its template or None. A tuple: each request has one."""


@final
class ProvenTemplates:
    """What the caches of an engine's workers tell each other: a template that is proved in one need not be in another.

    Race: caches in several threads use it without a lock. Each use is one operation on a dict. If two prove a template
    of the same shape at the same time, each keeps its own.

    templates: by shape. guards, forms, states: one object for all equal ones, so that they need not be compared.
    """

    def __init__(self) -> None:
        self.templates: dict[Key, Template] = {}
        self.guards: dict[Hashable, Guard] = {}
        self.forms: dict[Hashable, object] = {}
        self.states: OrderedDict[Hashable, KeptState] = OrderedDict()


@final
class TemplateCache:
    """The templates of an engine's models. cells: by type, growing. max_nodes: of one request.

    proven: shared with the caches of other workers.
    """

    def __init__(self, cells: Sequence[CellType], max_nodes: int, proven: ProvenTemplates | None = None) -> None:
        self._cells = cells
        self._max_nodes = max_nodes
        self._shared = ProvenTemplates() if proven is None else proven
        self._entries: OrderedDict[Key, Template | str] = OrderedDict()  # by shape, least recently used first
        self._num_templates = 0
        self._num_nodes = 0
        # A function is the `unfold` or the `unfold_chunk` of a model; one may have templates where the other has none.
        self._refusals: dict[int, int] = {}  # by function, until it has had a template
        self._changes: dict[int, int] = {}  # by function
        self._misses: dict[int, int] = {}  # by function, since the last request with a template
        self._without: set[int] = set()  # functions that are not asked any more
        self._proven: set[int] = set()

    @property
    def num_templates(self) -> int:
        return self._num_templates

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all kept templates."""
        return self._num_nodes

    def look(self, requests: Sequence[tuple[int, Any, KeptState | None]], level: int = 0) -> list[Sight | None]:
        """Return the known state of the shapes of requests of one turn; None where requests are always unfolded.

        requests: of each the number of its model, itself, and the state before it (see Unfolding; from `canonical`).
        level: see Unfolding.
        """
        sights: list[Sight | None] = [None] * len(requests)
        looked_up: list[tuple[int, int, KeptState | None]] = []
        values: list[Any] = []
        leaves: list[list[Leaf]] = []
        before_turn: dict[int, int] = {}  # misses by function
        for place, (model_id, request, before) in enumerate(requests):
            function = 2 * model_id + (before is not None)
            if function in self._without:
                continue
            misses = self._misses.get(function, 0)
            self._misses[function] = misses + 1
            if before_turn.setdefault(function, misses) < MISSES or misses % ASKED == 0:
                looked_up.append((place, function, before))
                values.append(request)
                leaves.append([])
        holding: dict[int, bool] = {}  # guards: attributes of models may have changed since the last turn
        for (place, function, before), shape, mine in zip(looked_up, shapes_of(values, leaves), leaves, strict=True):
            if shape is None:
                continue
            key = (function, id(before), shape, level)
            entry = self._entries.get(key)
            if type(entry) is not Template:
                entry = self._adopted(key, function, entry)
                if entry is None:
                    sights[place] = None if self._entries.get(key) is _REFUSED else (key, mine, None)
                    continue
            guard = entry.guard
            holds = holding.get(id(guard))
            if holds is None:
                holds = holding[id(guard)] = guard.holds()
            if holds:
                self._entries.move_to_end(key)
                self._misses[function] = 0
                sights[place] = (key, mine, entry)
            else:
                self._forget(key)
                self._changes[function] = self._changes.get(function, 0) + 1
                sights[place] = (key, mine, None)
        return sights

    def recorded(
        self,
        sight: Sight,
        model: Model,
        types: CellTypes[Cell],
        request: Any,
        before: KeptState | None,
        unfolding: Unfolding,
    ) -> None:
        """Note that a request which `look` has seen was unfolded.

        The second request of a shape proves its template, if there is one.
        """
        shape, leaves, template = sight
        function = shape[0]
        if function in self._without or self._entries.get(shape) is _REFUSED:  # decided since this turn began
            return
        if unfolding.waits:
            self._refuse(shape, model, function, "it is a generator function")
            return
        if self._changes.get(function, 0) >= CHANGES:
            self._give_up(model, function, "what it reads changes often")
            return
        if template is not None:  # some of its values could not be laid out, or what it reads has just changed
            return
        entry = self._entries.get(shape)
        if entry is None:
            self._note(shape, _SEEN)
            read_source(type(model).unfold if before is None else type(model).unfold_chunk)  # as the engine starts
            return
        try:
            if type(entry) is Template and entry.guard.holds():  # proved since this turn began
                template = entry
            else:
                template = prove(model, types, self._cells, request, self._max_nodes, before, shape[3])
            difference = self._difference(template, leaves, unfolding)
        except (UnprovenError, Looked) as error:
            self._refuse(shape, model, function, str(error) or "a value of the request is part of its graph")
        except (RecursionError, MemoryError) as error:  # this shape is too deep or too large; others may not be
            self._refuse(shape, model, function, said_by(error))
        except RAISED_BY_USERS as error:  # the user's objects may raise anything
            self._give_up(model, function, said_by(error))
        else:
            if difference is not None:
                self._give_up(model, function, f"{difference} was another for a request of the same shape")
            elif template is not entry:
                template.loops = dict(unfolding.loops)  # with the functions that end them, which do not ask
                self._keep(shape, function, template)

    def canonical(self, state: KeptState) -> KeptState:
        """Return one object for all equal states; the state itself if it could change."""
        if state.structure is None and state.num_nodes == 0 and not state.last:
            return NOTHING_KEPT
        key = signature(state.structure)
        if key is None:
            return state
        states = self._shared.states
        if len(states) >= MAX_TEMPLATES:
            states.popitem(last=False)
        return states.setdefault((state.num_nodes, key, state.last), state)

    # --- inside ------------------------------------------------------------------------------------------------

    def _difference(self, template: Template, leaves: list[Leaf], unfolding: Unfolding) -> str | None:
        gathered, wrong = gather([template], [leaves])
        if gathered is None or wrong:
            return "what the request gives"
        values = [gathered.rows(feed, (0,), (0,))[1] for feed in range(len(template.feeds))]
        return differs(template, unfolding, values)

    def _keep(self, shape: Key, function: int, template: Template) -> None:
        if template.num_nodes > MAX_NODES // 4:
            self._note(shape, _REFUSED)
            return
        shared = self._shared
        guard = shared.guards.get(template.guard.key)
        if guard is not None and guard.holds():
            template.guard = guard
        else:
            if len(shared.guards) >= MAX_TEMPLATES:
                shared.guards.clear()
            shared.guards[template.guard.key] = template.guard
        template.after = self.canonical(template.after)
        if len(shared.forms) > MAX_TEMPLATES:
            shared.forms.clear()
        template.form = shared.forms.setdefault(template.form, object())
        self._enter(shape, function, template)
        shared.templates[shape] = template

    def _adopted(self, shape: Key, function: int, entry: str | None) -> Template | None:
        """Return the template that another worker has proved for a shape, if there is one and this one refuses none."""
        template = self._shared.templates.get(shape)
        if template is None or entry is _REFUSED:
            return None
        self._enter(shape, function, template)
        return template

    def _enter(self, shape: Key, function: int, template: Template) -> None:
        """Keep a template, in place of those that were used least recently."""
        self._refusals.pop(function, None)
        self._misses[function] = 0
        self._proven.add(function)
        self._note(shape, template)
        self._num_templates += 1
        self._num_nodes += template.num_nodes
        while self._num_templates > MAX_TEMPLATES or self._num_nodes > MAX_NODES:
            oldest = next(key for key, one in self._entries.items() if type(one) is Template)
            self._forget(oldest)

    def _note(self, shape: Key, what: Template | str) -> None:
        self._forget(shape)
        self._entries[shape] = what
        if len(self._entries) > MAX_SHAPES:
            self._forget(next(iter(self._entries)))

    def _forget(self, shape: Key) -> None:
        entry = self._entries.pop(shape, None)
        if type(entry) is Template:
            self._shared.templates.pop(shape, None)
            self._num_templates -= 1
            self._num_nodes -= entry.num_nodes

    def _refuse(self, shape: Key, model: Model, function: int, why: str) -> None:
        _log.debug("%s: requests of a shape are unfolded each: %s", type(model).__name__, why)
        self._note(shape, _REFUSED)
        misses = self._misses.get(function, 0)
        if misses < MISSES:
            self._misses[function] = min(misses + PER_REFUSAL, MISSES)
        if function in self._proven:
            return
        self._refusals[function] = self._refusals.get(function, 0) + 1
        if self._refusals[function] >= REFUSALS:
            self._give_up(model, function, why)

    def _give_up(self, model: Model, function: int, why: str) -> None:
        _log.debug("%s: every request is unfolded from now on: %s", type(model).__name__, why)
        self._without.add(function)
        for shape in [shape for shape in self._entries if shape[0] == function]:
            self._forget(shape)
