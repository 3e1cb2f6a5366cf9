"""Graph batching with a time window: GraphB(w), the baseline of LazyBatching (HPCA 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from batchmaker.errors import OptionError
from batchmaker.policies.base import GraphPolicy
from batchmaker.policies.line import WaitingLine


@final
class WindowPolicy(GraphPolicy):
    """Collect one batch per model, in order of arrival; it starts when it is full or its window is over.

    window_ms: milliseconds from the arrival of the batch's first request; 0 starts as soon as a worker is idle.
    max_batch: most requests of one batch, the paper's 64. If no worker is idle when the window is over, the batch
    continues to collect. If several may start, the one whose first request arrived first does. Lengths do not matter:
    the batch is padded to its longest, and all leave together.
    """

    __slots__ = ("_lines", "_max_batch", "_model", "_window_s")

    name = "graph"

    def __init__(self, window_ms: float = 5.0, max_batch: int = 64) -> None:
        if max_batch < 1 or not window_ms >= 0:
            raise OptionError(f"max_batch must be at least 1 and window_ms at least 0, got {max_batch} and {window_ms}")
        self._window_s = window_ms / 1e3
        self._max_batch = max_batch
        self._lines: dict[int, WaitingLine[float]] = {}  # model -> when each request arrived
        self._model: dict[int, int] = {}  # of each request

    @property
    def max_batch(self) -> int:
        return self._max_batch

    def __len__(self) -> int:
        return len(self._model)

    def add(
        self,
        request: int,
        length: int,
        at_s: float,
        deadline_s: float | None = None,
        model: int = 0,
        priority: int = 0,
    ) -> None:
        """Note that a request has arrived."""
        self._model[request] = model
        self._lines.setdefault(model, WaitingLine()).join(request, at_s, priority)

    def discard(self, request: int) -> None:
        """Note that a waiting request was given up. Unknown requests are ignored.

        The window is then that of the next request.
        """
        if request in self._model:
            model = self._model.pop(request)
            self._lines[model].leave(request)
            if not len(self._lines[model]):
                del self._lines[model]

    def choose(self, now_s: float) -> Sequence[int]:
        """Remove and return the batch that may start now, if any."""
        began = {
            model: first_s
            for model, line in self._lines.items()
            if (first_s := line.oldest()) + self._window_s <= now_s or len(line) >= self._max_batch
        }
        if not began:
            return ()
        model = min(began, key=lambda m: (began[m], m))
        line = self._lines[model]
        chosen: list[int] = line.first(self._max_batch).tolist()
        line.begin(chosen)
        for request in chosen:
            del self._model[request]
        if not len(line):
            del self._lines[model]
        return chosen

    def next_wakeup_s(self, now_s: float) -> float | None:
        """Return when the first window is over."""
        return min((line.oldest() + self._window_s for line in self._lines.values()), default=None)
