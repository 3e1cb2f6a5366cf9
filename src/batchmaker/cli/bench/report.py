"""Results of a measurement: one object per policy, and a table."""

from __future__ import annotations

import math
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import batchmaker
from batchmaker.cli.bench.contenders import MeasuredPolicy, computes_cells, has_equal_work, is_baseline
from batchmaker.cli.bench.statistics import percentiles
from batchmaker.executor.processors import found_processors

Result = dict[str, Any]
"""One line of results, as it is written to JSON."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The measured setting; equal for all policies of one run."""

    model: str
    hidden: int | None
    layers: int
    dtype: str
    threads: int
    workers: int
    data: str
    load: float | None
    deadline_ms: float | None = None
    device: str = "cpu"


def machine() -> dict[str, Any]:
    """Return the processor's name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return {"cpu": name, "cores": found_processors().usable}


def commit() -> str:
    """Return the commit of the running source tree, or the version of an installed package."""
    folder = Path(batchmaker.__file__).parent
    try:
        git = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return batchmaker.__version__
    return git.stdout.strip() if git.returncode == 0 else batchmaker.__version__


def result(setting: Setting, standing: MeasuredPolicy, max_batch: int, reference: float) -> Result:
    """Return the JSON object of one policy. sweep: what its other settings did in a short measurement."""
    policy, measured = standing.policy, standing.measured
    stats, latency = measured.stats, percentiles(measured.latencies_s)
    num_in_time = None if setting.deadline_ms is None else measured.num_in_time(setting.deadline_ms / 1e3)
    useful = measured.cells / measured.seconds
    return {
        "model": setting.model,
        "policy": policy,
        "sweep": standing.seen or None,
        "dtype": setting.dtype,
        "hidden": setting.hidden,
        "layers": setting.layers,
        "threads": setting.threads,
        "workers": setting.workers,
        "device": setting.device,
        "max_batch": max_batch,
        "data": setting.data,
        "load": setting.load,
        "offered_rps": measured.offered_rps,
        "served_rps": measured.num_answered / measured.seconds,
        "requests": measured.num_answered,
        "failed": measured.num_failed,
        "seconds": measured.seconds,
        "p50_ms": _number(latency.p50_ms),
        "p90_ms": _number(latency.p90_ms),
        "p99_ms": _number(latency.p99_ms),
        "deadline_ms": setting.deadline_ms,
        "violation_share": None if num_in_time is None else 1.0 - (_ratio(num_in_time, len(measured.answered)) or 0.0),
        "goodput_rps": None if num_in_time is None else num_in_time / measured.seconds,
        "queue_p99_ms": _number(percentiles(measured.queues_s).p99_ms),
        "useful_cells_per_s": useful,
        "reference_cells_per_s": reference,
        "useful_over_reference": _ratio(useful, reference),
        "padding_share": 1.0 - (_ratio(stats.cells, stats.padded_cells) or 1.0),
        "mean_batch": _ratio(stats.cells, stats.steps) if computes_cells(policy) else measured.mean_graph_batch,
        "scheduler_share": stats.scheduler_s / measured.seconds,
        "unfold_share": stats.unfold_s / measured.seconds,
        "busy_share": stats.busy_s / measured.seconds / setting.workers,
        "scheduler_us_per_node": _ratio(1e6 * stats.scheduler_s, stats.cells),
        "task_ms": _ratio(1e3 * stats.busy_s, stats.tasks),
        "generator_late_ms": measured.late_ms,
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
    }


def add_ratios(results: list[Result]) -> None:
    """Add to each line its comparison with the strongest baseline among policies that begin whole requests together.

    The strongest is the one with the most cells per second, or under an offered load the lowest p90; of those with
    equal work if any was measured, so that the ratio is that of batching alone. With both kinds, `cells_bring` says
    what the engine's cells bring to the strongest baseline: equal work over torch's own layers.
    """
    whole = [line for line in results if is_baseline(line["policy"])]
    same_work = _strongest([line for line in whole if has_equal_work(line["policy"])])
    plain = _strongest([line for line in whole if not has_equal_work(line["policy"])])
    base = same_work or plain
    if base is None:
        return
    for line in results:
        line["baseline"] = base["policy"]
        line["throughput_over_baseline"] = _ratio(line["useful_cells_per_s"], base["useful_cells_per_s"])
        line["p90_over_baseline"] = _ratio(line["p90_ms"], base["p90_ms"])
        if same_work is not None and plain is not None:
            line["cells_bring"] = {
                "throughput": _ratio(same_work["useful_cells_per_s"], plain["useful_cells_per_s"]),
                "p90": _ratio(same_work["p90_ms"], plain["p90_ms"]),
                "over": plain["policy"],
            }


def _strongest(lines: list[Result]) -> Result | None:
    if not lines:
        return None
    if lines[0]["offered_rps"] is not None:
        return min(lines, key=lambda line: math.inf if line["p90_ms"] is None else line["p90_ms"])
    return max(lines, key=lambda line: line["useful_cells_per_s"])


def show(console: Console, setting: Setting, results: list[Result]) -> None:
    """Print the results as a table, and the ratios in words."""
    offered = results[0]["offered_rps"]
    load = "saturated" if offered is None else f"{offered:.1f} requests/s offered"
    named = setting.model if setting.hidden is None else f"{setting.model}, hidden {setting.hidden}"
    title = f"{named}, {setting.dtype}, {setting.threads} thread{'s' * (setting.threads != 1)}: {load}"
    table = Table(title=title, caption=setting.data, title_style="bold", caption_style="dim")
    columns = (
        "policy",
        "requests/s",
        "cells/s",
        "of reference",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "mean batch",
        "padding",
        "scheduler",
        "task ms",
    )
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=" " not in name)
    for line in results:
        table.add_row(
            line["policy"],
            f"{line['served_rps']:.1f}",
            f"{line['useful_cells_per_s']:,.0f}",
            _shown(line["useful_over_reference"], "{:.2f}x"),
            *(_shown(line[f"p{p}_ms"], "{:,.1f}") for p in (50, 90, 99)),
            _shown(line["mean_batch"], "{:.1f}"),
            f"{line['padding_share']:.1%}",
            f"{line['scheduler_share']:.1%}",
            _shown(line["task_ms"], "{:.1f}"),
        )
    console.print(table)
    console.print(
        f"[dim]reference: {results[0]['reference_cells_per_s']:,.0f} cells/s, the best of plain torch over "
        "full batches of equal lengths[/dim]"
    )
    if (brought := results[0].get("cells_bring")) is not None:
        console.print(
            f"of the difference to {brought['over']}, the cells alone bring {_shown(brought['throughput'], '{:.2f}x')} "
            f"the throughput and {_shown(brought['p90'], '{:.2f}x')} the p90 latency"
        )
    for line in results:
        if line.get("baseline") not in (None, line["policy"]):
            throughput, p90 = line["throughput_over_baseline"], line["p90_over_baseline"]
            console.print(
                f"[bold]{line['policy']}[/bold] against {line['baseline']}: "
                f"{_shown(throughput, '{:.2f}x')} the throughput, {_shown(p90, '{:.2f}x')} the p90 latency"
            )
        if line["violation_share"] is not None:
            missed = f"{line['violation_share']:.1%} missed {line['deadline_ms']:g} ms"
            console.print(f"[bold]{line['policy']}[/bold]: {missed}, {line['goodput_rps']:.1f} requests/s met it")
        if line["failed"]:
            failed = f"{line['failed']} requests failed or were not answered in time"
            console.print(f"[yellow]{line['policy']}: {failed}[/yellow]")


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
