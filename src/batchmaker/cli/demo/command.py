"""`batchmaker demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from batchmaker import policies
from batchmaker.cli import options
from batchmaker.cli.bench import load as offering
from batchmaker.cli.bench.contenders import MeasuredPolicy
from batchmaker.cli.bench.load import Measured
from batchmaker.cli.bench.report import Result, Setting, add_ratios, result
from batchmaker.cli.demo.panels import Side, side_by_side
from batchmaker.cli.workload import Workload, make_workload
from batchmaker.engine.engine import Engine
from batchmaker.engine.stats import StepSeen
from batchmaker.engine.timeline import Span, cell_spans, graph_spans
from batchmaker.executor.processors import default_threads
from batchmaker.lab.plots.pictures import DrawnLanes, draw_timeline
from batchmaker.model.model import Model

LOAD = 0.7
"""Offered load for both, as a share of the padded baseline's peak."""
PADDED_BATCH = 64
HELD = 0.95
"""A policy holds the load if it answers at least this share of the requests, but for chance."""
DRAWN_BATCHES = 10
"""Number of padded batches in the picture."""


def demo(
    seconds: Annotated[float, typer.Option(min=0.5, max=60, help="How long to serve by each policy.")] = 8.0,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the LSTM.")] = 512,
    threads: options.Threads = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second. Default: 0.7 of the padded peak.")] = None,
    png: Annotated[Path, typer.Option(help="Write the picture of rows over time here.")] = Path("timeline.png"),
    json: Annotated[Path | None, typer.Option(help="Write the results here.")] = None,
    seed: options.Seed = 0,
) -> None:
    """See cellular and padded batching serve the same requests, one after the other, side by side.

    An LSTM reads sentences with Europarl's lengths that arrive at random times. The picture shows the request in each
    row of the batch over time.

    [bold]Examples[/bold]

    batchmaker demo

    batchmaker demo --hidden 1024 --seconds 15 --png out.png
    """
    options.check_writable(png)
    options.check_writable(json)
    console = options.out()
    threads = threads or default_threads()
    workload = make_workload("lstm", seed=seed)
    model = options.make_model("lstm", hidden=hidden, vocabulary_size=workload.vocabulary_size, seed=seed)
    if rate is None:
        with options.err().status("measuring the peak of padded batching"):
            peak_rps = _padded_peak_rps(model, workload, threads, min(2.0, seconds))
        rate = LOAD * peak_rps
    console.print(f"[bold]{rate:.0f} requests a second[/bold], LSTM of width {hidden}, {workload.source}")
    sides = [Side("cellular"), Side("padded")]
    measured = _serve_all(console, sides, model, workload, rate, seconds, seed, threads)
    setting = Setting("lstm", hidden, 1, "float32", threads, 1, workload.source, LOAD)
    results = []
    for side, seen in zip(sides, measured, strict=True):
        standing = MeasuredPolicy(side.name, seen, {})
        line = result(setting, standing, side.max_batch, float("nan"))
        results.append({k: v for k, v in line.items() if k not in ("reference_cells_per_s", "useful_over_reference")})
    add_ratios(results)
    _show(console, results)
    if note := overloaded(results, rate, seconds):
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    subtitle = f"{rate:.0f} requests a second, LSTM of width {hidden}, sentences of Europarl's lengths"
    options.draw_if_possible(png, lambda: _draw(png, sides, results, subtitle))
    if json is not None:
        options.write_json(json, results)


def _engine(model: Model, policy: str, threads: int) -> Engine:
    made = policies.make(policy, max_batch=PADDED_BATCH) if policy == "padded" else policies.make(policy)
    return Engine(model, made, threads=threads)


def _padded_peak_rps(model: Model, workload: Workload, threads: int, seconds: float) -> float:
    with _engine(model, "padded", threads) as engine:
        measured = offering.backlog(engine, workload, 8 * PADDED_BATCH, seconds, lambda share, answered: None)
    return measured.cells / measured.seconds / float(workload.cells.mean())


def _serve_all(
    console: Console,
    sides: list[Side],
    model: Model,
    workload: Workload,
    rate: float,
    seconds: float,
    seed: int,
    threads: int,
) -> list[Measured]:
    measured = []
    with Live(side_by_side(sides), console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        for side in sides:
            side.max_batch = PADDED_BATCH if side.name == "padded" else model.cells["step"].max_batch
            side.seconds = 1.2 * seconds
            with _engine(model, side.name, threads) as engine:
                side.engine = engine

                def tell(share: float, answered: int, side: Side = side) -> None:
                    side.share = share
                    if console.is_terminal:
                        live.update(side_by_side(sides), refresh=True)

                measured.append(offering.poisson(engine, workload, rate, seconds, seed, tell, side.watch))
            side.share = 1.0
            live.update(side_by_side(sides), refresh=console.is_terminal)
    return measured


def _show(console: Console, results: list[Result]) -> None:
    table = Table(title="Milliseconds from arrival to answer", title_style="bold")
    for name in ("policy", "p50", "p90", "p99", "requests/s", "mean batch", "padding"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for line in results:
        latency = [f"{line[f'p{p}_ms'] or float('nan'):,.0f}" for p in (50, 90, 99)]
        fill = f"{line['mean_batch'] or 0:.1f}"
        table.add_row(line["policy"], *latency, f"{line['served_rps']:.0f}", fill, f"{line['padding_share']:.0%}")
    console.print(table)


def overloaded(results: list[Result], rate: float, seconds: float) -> str:
    """Return a note if a policy has answered fewer requests a second than came, beyond chance; "" if none has."""
    least = HELD * rate - 3.0 * (rate / seconds) ** 0.5
    slow = [line["policy"] for line in results if line["served_rps"] < least]
    if not slow:
        return ""
    return (
        f"note: {' and '.join(slow)} could not hold {rate:.0f} requests a second on this machine. A queue grew to the "
        "end, so these milliseconds depend on --seconds and say little of the policy; give a lower --rate."
    )


def _draw(png: Path, sides: list[Side], results: list[Result], subtitle: str) -> None:
    graphs = sides[1].timeline.steps
    chosen = _busiest(graphs[len(graphs) // 5 :])
    offset_s = chosen[0].begin_s - sides[1].begin_s if chosen else 0.0
    seconds = chosen[-1].end_s - chosen[0].begin_s if chosen else 1.0
    notes = {
        "cellular": "a request starts at the next step and leaves after its own last; its row goes to the next",
        "padded": "all wait for the longest of their batch (grey), and newcomers wait for the batch",
    }
    lanes, begins = [], []
    for side, line in zip(sides, results, strict=True):
        steps = side.timeline.steps
        begin_s = side.begin_s + offset_s if steps else 0.0
        lanes.append(DrawnLanes(_title(line), notes[side.name], _spans(side, begin_s, begin_s + seconds)))
        begins.append(begin_s)
    draw_timeline(png, lanes, begins, seconds, subtitle)


def _busiest(steps: list[StepSeen]) -> list[StepSeen]:
    """Return the stretch of DRAWN_BATCHES with the most requests."""
    sizes = [len(step.requests) for step in steps]
    last = max(0, len(steps) - DRAWN_BATCHES)
    begin = max(range(last + 1), key=lambda first: sum(sizes[first : first + DRAWN_BATCHES]))
    return steps[begin : begin + DRAWN_BATCHES]


def _title(line: Result) -> str:
    latency = ", ".join(f"p{p} {line[f'p{p}_ms'] or 0:.0f} ms" for p in (50, 90, 99))
    return f"{line['policy']}: {latency}"


def _spans(side: Side, begin_s: float, end_s: float) -> list[Span]:
    if side.name == "cellular" or side.journal is None:
        return cell_spans(side.timeline.steps, begin_s, end_s)
    return graph_spans(side.timeline.steps, side.journal.length, begin_s, end_s)
