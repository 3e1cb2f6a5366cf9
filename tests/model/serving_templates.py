"""Requests of one model with their templates, each compared with what unfolding the request gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import batchmaker as bm
from batchmaker.model.registry import CellRegistry
from batchmaker.model.sequence_state import KeptState
from batchmaker.model.template_cache import TemplateCache
from batchmaker.model.template_values import gather
from batchmaker.model.templates import Template, differs
from batchmaker.model.unfolding import Unfolding


class Look(nn.Module):
    """word, h -> h + its row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 2)

    def forward(self, word: Tensor, h: Tensor) -> Tensor:
        return h + self.embed(word)


@dataclass
class Serving:
    """Requests of one model, as an engine would unfold them."""

    model: bm.Model
    templates: TemplateCache
    types: CellRegistry
    num_recorded: int = 0

    def ask(self, request: Any, before: KeptState | None = None) -> Template | Unfolding:
        """Return what stands for the request. A template is compared with what unfolding it gives."""
        (sight,) = self.templates.look([(0, request, before)])
        fresh = Unfolding(self.model, self.types, request, before=before)
        if sight is not None and (template := sight[2]) is not None:
            given_, wrong = gather([template], [sight[1]])
            if given_ is not None:
                assert not wrong
                fresh.start()
                values = [given_.rows(feed, (0,), (0,))[1] for feed in range(len(template.feeds))]
                assert differs(template, fresh, values) is None
                return template
        self.num_recorded += 1
        fresh.start()
        if sight is not None:
            self.templates.recorded(sight, self.model, self.types, request, before, fresh)
        fresh.after = self.templates.canonical(fresh.after)
        return fresh

    def ask_together(self, requests: Sequence[Any]) -> None:
        """Unfold requests of one turn, for whose shapes there is no template when it begins."""
        sights = self.templates.look([(0, request, None) for request in requests])
        for request, sight in zip(requests, sights, strict=True):
            fresh = Unfolding(self.model, self.types, request)
            fresh.start()
            if sight is not None:
                self.templates.recorded(sight, self.model, self.types, request, None, fresh)

    def has_template(self, *requests: Any) -> bool:
        """Whether the last request was served from a template, once those before it had been."""
        return [type(self.ask(request)) is Template for request in requests][-1]
