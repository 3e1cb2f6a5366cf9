"""Output of simulations: a table, confidence of differences, and curves to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from batchmaker.cli.simulate.study import Result
from batchmaker.lab.plots.sweeps import Line, Panel
from batchmaker.lab.simulator.report import Spread, paired_difference, spread

_MS: Final = "{:.2f}"
_COLUMNS: Final = (  # title, key, form, whether quartiles are shown
    ("mean ms", "mean_ms", _MS, True),
    ("p99 ms", "p99_ms", _MS, False),
    ("answers/s", "throughput_rps", "{:.0f}", False),
    ("in time/s", "goodput_rps", "{:.0f}", False),
    ("violations", "violation_share", "{:.1%}", True),
    ("mean batch", "mean_batch", "{:.1f}", False),
)


def show(console: Console, results: Sequence[Result]) -> None:
    """Print one row per policy, rate and SLA: means over seeds, some with quartiles if there are several."""
    table = Table(title=f"{results[0]['model']}, simulated", title_style="bold")
    table.add_column("policy", overflow="fold")
    for name in ("rate/s", "SLA ms", *(title for title, *_ in _COLUMNS)):
        table.add_column(name, justify="right", no_wrap=True)
    for (policy, rate, sla_ms), rows in _grouped(results).items():
        cells = [_mean_and_quartiles([row[key] for row in rows], form, bars) for _, key, form, bars in _COLUMNS]
        table.add_row(policy, f"{rate:g}", f"{sla_ms:g}", *cells)
    console.print(table)


def show_differences(console: Console, results: Sequence[Result]) -> None:
    """Print the difference of each policy from the first, by the paired bootstrap; nothing without seeds to pair."""
    groups = _grouped(results)
    first = results[0]["policy"]
    table = Table(title=f"Difference to {first}: mean over seeds, 95 % of resamples", title_style="bold")
    table.add_column("policy")
    for name in ("rate/s", "SLA ms", "mean ms", "violations"):
        table.add_column(name, justify="right")
    for (policy, rate, sla_ms), rows in groups.items():
        base = groups[first, rate, sla_ms]
        if policy == first or len(rows) < 2:
            continue
        cells = []
        for key, form in (("mean_ms", "{:+.2f}"), ("violation_share", "{:+.1%}")):
            one, other = [row[key] for row in rows], [row[key] for row in base]
            if None in one or None in other:
                cells.append("-")
                continue
            gap = paired_difference(one, other)
            text = f"{form.format(gap.mean)} [{form.format(gap.low)}, {form.format(gap.high)}]".replace("[", "\\[")
            cells.append(f"[bold]{text}[/bold]" if gap.is_certain else text)
        table.add_row(policy, f"{rate:g}", f"{sla_ms:g}", *cells)
    if table.row_count:
        console.print(table)


def panels(results: Sequence[Result]) -> list[Panel]:
    """Return the panels to draw: latency, throughput and violations against rate, and violations against SLA."""
    slas = sorted({row["sla_ms"] for row in results})
    rates = sorted({row["rate"] for row in results})
    at_sla = [row for row in results if row["sla_ms"] == slas[-1]]
    at_rate = [row for row in results if row["rate"] == rates[-1]]
    return [
        Panel("Mean latency", "requests per second", "ms", _lines(at_sla, "rate", "mean_ms"), log=True),
        Panel("99th percentile of latency", "requests per second", "ms", _lines(at_sla, "rate", "p99_ms"), log=True),
        Panel("Throughput", "requests per second", "answers per second", _lines(at_sla, "rate", "throughput_rps")),
        Panel(
            f"SLA violations at {rates[-1]:g} requests per second",
            "SLA (ms)",
            "% of requests",
            _lines(at_rate, "sla_ms", "violation_share", 100.0),
        ),
    ]


def _lines(results: Sequence[Result], x: str, y: str, scale: float = 1.0) -> list[Line]:
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in results):
        mine = [row for row in results if row["policy"] == policy and row[y] is not None]
        points = sorted({row[x] for row in mine})
        spreads = [spread([scale * row[y] for row in mine if row[x] == point]) for point in points]
        lines.append(Line(policy, points, *_columns(spreads)))
    return lines


def _columns(spreads: Sequence[Spread]) -> tuple[list[float], list[float], list[float]]:
    return [s.mean for s in spreads], [s.p25 for s in spreads], [s.p75 for s in spreads]


def _grouped(results: Sequence[Result]) -> dict[tuple[str, float, float], list[Result]]:
    """Return the results of all seeds together, by policy, rate and SLA, each in order of the seeds."""
    groups: dict[tuple[str, float, float], list[Result]] = {}
    for row in results:
        groups.setdefault((row["policy"], row["rate"], row["sla_ms"]), []).append(row)
    return groups


def _mean_and_quartiles(values: Sequence[float | None], form: str, bars: bool) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    statistics = spread(numbers)
    small = form == _MS and statistics.mean < 1
    write: Callable[[float], str] = ("{:.3g}" if small else form).format
    quartiles = f" ({write(statistics.p25)}-{write(statistics.p75)})" if bars and len(numbers) > 1 else ""
    return write(statistics.mean) + quartiles
