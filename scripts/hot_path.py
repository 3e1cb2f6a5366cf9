"""What a request passes on its way through the engine, counted: the table of docs/architecture.md.

    python scripts/hot_path.py          # writes the table; measures no time

A warm engine serves an LSTM over 25 words, in one worker. Counted are the package's Python functions that run for it,
in the caller's thread and the engine's; what they call in compiled loops is one call of the machine.
"""

from __future__ import annotations

import http.client
import inspect
import json
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
from torch import nn

import batchmaker as bm
from batchmaker.core import live_streams, scheduler
from batchmaker.engine import incoming, lone_runs
from batchmaker.executor import task_steps
from batchmaker.lab import zoo
from batchmaker.server.config import Config, ModelEntry
from batchmaker.server.thread import ServerThread

PACKAGE: Final = Path(bm.__file__).parent
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
TRIES: Final = 100
SLOW: Final = "auto:budget_ms=10000"
"""See `whole_tasks`."""

Calls = Counter[CodeType]


class Watch:
    """Notes the package's functions that run, in all threads that begin after it is made."""

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
        """Return the fewest calls that three runs make. A busy machine needs more turns for the same work; and seldom
        one less, if a request comes before the last turn has ended.
        """
        found = list[Calls]()
        while len(found) < 7 or (len(found) < TRIES and least(found) is None):
            with self.on():
                run()
            found.append(self.calls)
        return least(found) or min(found, key=Counter.total)


def least(calls: Sequence[Calls]) -> Calls | None:
    """Return the fewest calls that three of these make; None if no three make as many."""
    seen = Counter(map(Counter.total, calls))
    return min((one for one in calls if seen[one.total()] >= 3), key=Counter.total, default=None)


@contextmanager
def whole_tasks() -> Iterator[Watch]:
    """With `SLOW`, a turn takes all requests that have come, a task takes all steps that it can, and a request alone is
    short, however slow the machine is."""
    with (
        patch.object(incoming, "SOON_S", math.inf),
        patch.object(task_steps, "REPORT_S", math.inf),
        patch.object(scheduler, "TASKS_WORTH", math.inf),
        patch.object(lone_runs, "SHORT_S", math.inf),
        patch.object(live_streams, "FRAMES", 0),  # no chunk is of a live stream, beside which tasks are short
    ):
        yield Watch()
        threading.setprofile(None)


class Figure(NamedTuple):
    """A kind of work, its calls, and how many Python calls one piece of it makes."""

    name: str
    calls: Calls
    each: float

    @classmethod
    def further(cls, name: str, one: Calls, several: Calls, more: int) -> Figure:
        """Return the figure of each of `more` further pieces beside the first."""
        return cls(name, several, (several.total() - one.total()) / more)

    def row(self) -> str:
        lines = sum(len(inspect.getsourcelines(code)[0]) for code in self.calls)
        modules = len({code.co_filename for code in self.calls})
        return f"| {self.name} | {self.each:.0f} | {len(self.calls)} | {modules} | {lines:,} |"


def requests() -> Iterator[Figure]:
    """Measure requests: alone, in `map`, and submitted together."""
    asked = [np.random.default_rng(i).integers(1, 99, 25) for i in range(256)]
    model = zoo.make("lstm", vocabulary_size=100, hidden=16, max_batch=256)
    with whole_tasks() as watch, bm.Engine(model, SLOW, threads=1) as engine:
        for _ in range(4):  # its template is proved, and all requests of a call begin in one turn
            engine.map(asked, progress=False)
        alone = watch.least(lambda: engine.submit(asked[0]).result(60))
        yield Figure("one request alone", alone, alone.total())
        one = watch.least(lambda: engine.map(asked[:1], progress=False))
        whole = watch.least(lambda: engine.map(asked, progress=False))
        yield Figure.further("each further one in `map` of 256", one, whole, 255)

        def submit(count: int) -> None:
            for answer in engine.submit_many(asked[:count]):
                answer.result(60)

        one, whole = watch.least(lambda: submit(1)), watch.least(lambda: submit(256))
        yield Figure.further("each further one in `submit_many` of 256", one, whole, 255)


class Frames(bm.Model):
    """Frames [n, 4] of a sequence -> the state after them, which goes on with the next frames."""

    def __init__(self) -> None:
        self.step = bm.Cell(nn.GRUCell(4, 4))

    def unfold(self, frames: Any) -> Any:
        return self.step.run(frames)

    def unfold_chunk(self, frames: Any, state: Any) -> Any:
        h = self.step.run(frames, state)
        return h, h


def chunks() -> Iterator[Figure]:
    """Measure chunks of sequences: one alone, and among those of 50 sequences."""
    frames = np.ones((2, 4), np.float32)
    with whole_tasks() as watch, bm.Engine(Frames(), SLOW, threads=1) as engine:
        sequences = [engine.open_sequence() for _ in range(50)]

        def ask(count: int) -> None:
            for answer in reversed(engine.submit_chunks([(sequence, frames) for sequence in sequences[:count]])):
                answer.result(60)  # the last is done last: nobody waits for the others

        for _ in range(4):
            ask(50)
        one, whole = watch.least(lambda: ask(1)), watch.least(lambda: ask(50))
        yield Figure("one chunk alone", one, one.total())
        yield Figure.further("each further chunk among those of 50 streams", one, whole, 49)
        for sequence in sequences:
            sequence.close()


def calls() -> Iterator[Figure]:
    """Measure a call of a server over HTTP, in all threads of the server together."""
    body = json.dumps({"inputs": [{"name": "input_0", "shape": [25], "datatype": "INT64", "data": [7] * 25}]})
    options = {"hidden": 16, "max_batch": 256}
    config = Config(port=0, models=[ModelEntry(source="lstm", options=options, policy=SLOW, workers=1, threads=1)])
    with whole_tasks() as watch:
        server = ServerThread(config, {})
        address = urlsplit(server.start()[0])
        connection = http.client.HTTPConnection(address.hostname or "", address.port)

        def ask() -> None:
            connection.request("POST", "/v2/models/lstm/infer", body)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()

        for _ in range(20):
            ask()
        yield Figure("one call over HTTP", one := watch.least(ask), one.total())
        connection.close()
        server.stop()


def table() -> str:
    rows = [
        "| what | Python calls | functions | modules | lines of these functions |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join(rows + [figure.row() for figure in (*requests(), *chunks(), *calls())])


def main() -> None:
    text, found = PAGE.read_text("utf-8"), table()
    marked = re.compile(r"(<!-- hot-path -->\n).*?(\n<!-- /hot-path -->)", re.DOTALL)
    if not marked.search(text):
        sys.exit(f"{PAGE} has no marker <!-- hot-path -->")
    PAGE.write_text(marked.sub(lambda match: match[1] + found + match[2], text), "utf-8")
    print(found)


if __name__ == "__main__":
    main()
