"""What a request passes on its way through the engine, counted: the table of docs/architecture.md.

    python scripts/hot_path.py          # writes the table; measures no time

A warm engine serves an LSTM over 25 words, in one worker. Counted are the package's Python functions that run for it,
in the caller's thread and the engine's; what they call in compiled loops is one call of the machine.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
from torch import nn

import batchmaker as bm
from batchmaker.lab import zoo

PACKAGE: Final = Path(bm.__file__).parent
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
TRIES: Final = 30
SLOW: Final = "auto:budget_ms=10000"
"""A task takes all steps that it can, so that the count does not depend on the machine."""

Calls = Counter[CodeType]


class Watch:
    """Notes the package's functions that run, in all threads that begin after `begin`."""

    def __init__(self) -> None:
        self.calls: Calls = Counter()
        self.is_on = False
        threading.setprofile(self.note)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            self.calls[frame.f_code] += 1

    @contextmanager
    def on(self) -> Iterator[None]:
        self.calls = Counter()
        self.is_on = True
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.is_on = False

    def least(self, run: Callable[[], object]) -> Calls:
        """Return the calls of the run that makes fewest, of some: a busy machine needs more turns for the same work."""
        found = []
        for _ in range(TRIES):
            with self.on():
                run()
            found.append(self.calls)
        return min(found, key=Counter.total)


def row(name: str, calls: Calls, shared: Calls | None = None, among: int = 1) -> str:
    """Return a row of the table: of the calls, or of what each of `among` further requests adds to the shared ones."""
    count = calls.total() if shared is None else (calls.total() - shared.total()) / among
    lines = sum(len(inspect.getsourcelines(code)[0]) for code in calls)
    modules = len({code.co_filename for code in calls})
    return f"| {name} | {count:.0f} | {len(calls)} | {modules} | {lines:,} |"


class Frames(bm.Model):
    """Frames [n, 4] of a sequence -> the state after them, which goes on with the next frames."""

    def __init__(self) -> None:
        self.step = bm.Cell(nn.GRUCell(4, 4))

    def unfold(self, frames: Any) -> Any:
        return self.step.run(frames)

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        h = self.step.run(frames, state)
        return h, h


def table() -> str:
    watch = Watch()
    rows = [
        "| what | Python calls | functions | modules | lines of these functions |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    requests = [np.random.default_rng(i).integers(1, 99, 25) for i in range(256)]
    with bm.Engine(zoo.make("lstm", vocabulary_size=100, hidden=16, max_batch=256), SLOW, threads=1) as engine:
        for _ in range(4):  # its template is proved
            engine.map(requests, progress=False)
        rows.append(row("one request alone", watch.least(lambda: engine.submit(requests[0]).result(60))))
        first = watch.least(lambda: engine.map(requests[:1], progress=False))
        whole = watch.least(lambda: engine.map(requests, progress=False))
        rows.append(row("each further one in `map` of 256", whole, first, 255))
    frames = np.ones((2, 4), np.float32)
    with bm.Engine(Frames(), SLOW, threads=1) as engine:
        sequences = [engine.open_sequence() for _ in range(50)]

        def ask(count: int) -> None:
            for answer in engine.submit_chunks([(sequence, frames) for sequence in sequences[:count]]):
                answer.result(60)

        for _ in range(4):
            ask(50)
        one, all_of_them = watch.least(lambda: ask(1)), watch.least(lambda: ask(50))
        rows.append(row("each further chunk among those of 50 streams", all_of_them, one, 49))
        for sequence in sequences:
            sequence.close()
    return "\n".join(rows)


def main() -> None:
    text, found = PAGE.read_text("utf-8"), table()
    marked = re.compile(r"(<!-- hot-path -->\n).*?(\n<!-- /hot-path -->)", re.DOTALL)
    if not marked.search(text):
        sys.exit(f"{PAGE} has no marker <!-- hot-path -->")
    PAGE.write_text(marked.sub(lambda match: match[1] + found + match[2], text), "utf-8")
    print(found)


if __name__ == "__main__":
    main()
