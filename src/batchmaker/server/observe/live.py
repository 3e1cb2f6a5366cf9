"""A snapshot of one model's activity, cheap to make, to send and to draw: see the page at `/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from batchmaker.engine import StepSeen
from batchmaker.server.observe.observed import ObservedModel
from batchmaker.server.observe.recent import KEPT_S, Stretch, together

SPANS_S: Final = {"10": 10.0, "1": 1.0, "0.1": 0.1}
"""Time spans that can be shown."""

TICKS: Final = 400
"""Moments in a time span. Only steps that were running at one of them are included."""

MAX_ROWS: Final = 128
"""Rows of a step whose requests are included."""

SUMMARY_S: Final = 10


@dataclass(frozen=True, slots=True)
class Named:
    """A model that is served."""

    name: str
    version: str
    ready: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class Told:
    """A Stretch in numbers. Percentiles and queueing are of the answered requests, None without any."""

    second: int
    answered: int
    failed: int
    missed: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    wait_ms: float | None
    deadline_ms: float | None
    in_flight: int
    steps: int
    rows: int
    computed: int


@dataclass(frozen=True, slots=True)
class CellTold:
    """Counts of a cell since the model was loaded."""

    name: str
    steps: int
    rows: int
    computed: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step that was running from one tick to another, both included. cell: its place in the list of cells.

    rows: useful ones; computed: padding included. requests: those in the first rows, None for one that has ended.
    """

    first: int
    last: int
    cell: int
    rows: int
    computed: int
    requests: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LiveView:
    """The snapshot.

    now_s: to be sent as `after` the next time. tick: number of the last moment; tick_s: time between moments.
    sequences: open now; each holds rows between its requests.
    """

    server_ready: bool
    models: list[Named]
    name: str
    version: str
    in_flight: int
    sequences: int
    traced: bool
    tick: int
    tick_s: float
    now_s: float
    cells: list[CellTold]
    steps: list[SampledStep]
    seconds: list[Told]
    summary: Told


def live_view(
    served: ObservedModel, models: Iterable[ObservedModel], span_s: float, after_s: float | None, *, server_ready: bool
) -> LiveView:
    """Return the activity of the last `span_s` seconds, or since `after_s` (engine seconds) if that is later."""
    now_s = served.port.clock.now_s()
    tick_s = span_s / TICKS
    second = int(now_s)
    recent = served.statistics.recent.since(max(0, second - KEPT_S))
    from_second = 0 if after_s is None else int(after_s) - 1  # an answer may have been noted a little late
    begin_s = now_s - span_s if after_s is None else max(after_s, now_s - span_s)
    steps = served.steps.since(begin_s)  # before the cells, so that the cells of these steps are included
    cells = served.statistics.cells
    return LiveView(
        server_ready=server_ready,
        models=[Named(m.name, m.version, m.ready, m.statistics.in_flight) for m in models],
        name=served.name,
        version=served.version,
        in_flight=served.statistics.in_flight,
        sequences=served.port.num_sequences,
        traced=served.steps.max_steps > 0,
        tick=int(now_s / tick_s),
        tick_s=tick_s,
        now_s=now_s,
        cells=[CellTold(name, c.steps, c.rows, c.padded, c.busy_s) for name, c in cells.items()],
        steps=_sampled(steps, tick_s, {name: place for place, name in enumerate(cells)}),
        seconds=[_in_numbers(stretch) for stretch in recent if stretch.second >= from_second],
        summary=_in_numbers(together((s for s in recent if s.second >= second - SUMMARY_S), second - SUMMARY_S)),
    )


def _sampled(steps: Sequence[StepSeen], tick_s: float, places: Mapping[str, int]) -> list[SampledStep]:
    """Return the steps that were running at a tick. The chance of a short step is proportional to its time."""
    samples: list[SampledStep] = []
    for step in steps:
        first, last = int(step.begin_s / tick_s) + 1, int(step.end_s / tick_s)
        if first <= last:
            requests = step.requests
            samples.append(SampledStep(first, last, places[step.cell], len(requests), step.padded, requests[:MAX_ROWS]))
    return samples


def _in_numbers(stretch: Stretch) -> Told:
    latency = stretch.latency
    answered = latency.num_samples
    p50_ms, p90_ms, p99_ms = (
        round(latency.percentile_ms(percent), 3) if answered else None for percent in (50, 90, 99)
    )
    return Told(
        stretch.second,
        answered,
        stretch.failed,
        stretch.missed,
        p50_ms,
        p90_ms,
        p99_ms,
        round(1e3 * stretch.queue_s / answered, 3) if answered else None,
        stretch.deadline_ms,
        stretch.in_flight,
        stretch.steps,
        stretch.rows,
        stretch.computed,
    )
