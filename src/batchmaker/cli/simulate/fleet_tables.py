"""Results of simulated fleets for people: a table, and pictures over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from batchmaker.cli.simulate.study import Result
from batchmaker.lab.plots.fleets import TimeLine, TimePanel, draw_over_time
from batchmaker.lab.simulator.fleet.records import FleetRecords
from batchmaker.lab.simulator.fleet.report import latency_over_time
from batchmaker.lab.simulator.report import spread

_COLUMNS: Final = (  # title, key, form
    ("mean ms", "mean_ms", "{:.2f}"),
    ("p99 ms", "p99_ms", "{:.1f}"),
    ("p99.9 ms", "p999_ms", "{:.1f}"),
    ("late", "violation_share", "{:.2%}"),
    ("batch", "mean_batch", "{:.1f}"),
    ("busy", "busy_share", "{:.0%}"),
    ("paid", "paid_replicas", "{:.1f}"),
)
_OF_DEATHS: Final = (("deaths", "deaths", "{:.0f}"), ("failed", "failed", "{:.0f}"))


def show(console: Console, results: Sequence[Result]) -> None:
    """Print one row per router, number of replicas, rate and SLA: means over seeds."""
    first = results[0]
    columns = (*_COLUMNS, *(_OF_DEATHS if any(row["deaths"] for row in results) else ()))
    table = Table(title=f"{first['model']}, a fleet simulated ({first['fidelity']})", title_style="bold")
    table.add_column("router", no_wrap=True)
    for name in ("N", "rate/s", "SLA ms", *(title for title, *_ in columns)):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[tuple[str, int, float, float], list[Result]] = {}
    for row in results:
        groups.setdefault((row["router"], row["replicas"], row["rate"], row["sla_ms"]), []).append(row)
    for (router, replicas, rate, sla_ms), rows in groups.items():
        cells = []
        for _, key, form in columns:
            values = [row[key] for row in rows if row[key] is not None]
            cells.append(form.format(spread(values).mean) if values else "-")
        table.add_row(router, f"{replicas}", f"{rate:g}", f"{sla_ms:g}", *cells)
    console.print(table)


def draw(path: Path, fleets: Sequence[tuple[str, FleetRecords]], title: str, under: str) -> None:
    """Write a PNG of what came, who served, what waited and how long answers took. DataError if it cannot be."""
    rate: list[TimeLine] = []
    replicas: list[TimeLine] = []
    waiting: list[TimeLine] = []
    latency: list[TimeLine] = []
    for name, records in fleets:
        times = latency_over_time(records)
        within = [sample for sample in records.samples if sample.at_s <= records.arrived_s[-1]]
        at_s = [sample.at_s for sample in within]
        paid = [float(sample.serving + sample.starting + sample.leaving) for sample in within]
        if not rate:
            rate.append(TimeLine("requests", times.at_s.tolist(), times.rate_rps.tolist()))
        replicas.append(TimeLine(name, at_s, [float(sample.serving) for sample in within]))
        replicas.append(TimeLine(name, at_s, paid, ":"))
        waiting.append(TimeLine(name, at_s, [sample.queued_s / max(sample.serving, 1) * 1e3 for sample in within]))
        latency.append(TimeLine(name, times.at_s.tolist(), times.p50_ms.tolist(), ":"))
        latency.append(TimeLine(name, times.at_s.tolist(), times.p99_ms.tolist()))
    panels = [
        TimePanel("Requests that come", "per second", rate),
        TimePanel("Replicas that serve; dotted: that are paid for", "replicas", replicas),
        TimePanel("Unanswered work of one replica, at full batches", "ms", waiting),
        TimePanel("99th percentile of latency; dotted: median", "ms", latency, log=True),
    ]
    draw_over_time(path, panels, title, under)
