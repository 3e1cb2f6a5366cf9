"""LazyBatching's Figure 17 on the engine itself, on a CPU: the Transformer under GraphB's windows and LazyBatching.

    python papers/benchmarks/lazybatching_live.py [--quick] [--json OUT.json] [--png OUT.png] [--page PAGE]

One engine per policy with one worker and one compute thread. Requests are sentences of translation lengths that come
by Poisson arrivals, at shares of the most that any way answers with everything waiting. In each round all ways are
measured in turn with the same arrivals, another one first in each round; each round has arrivals of its own. A latency
is counted from the time at which a request was due. Late requests are computed and counted, for all ways alike.

GraphB(N) is made twice. With the engine's cells, the same work as all other ways: the batches that the policy
`graph:window_ms=N` collects are handed to the engine of `cellular` as a whole, the next one when the last is answered;
each request leaves with its own last word. And with the whole network, as `graph:window_ms=N` itself runs it: padded to
the longest of the batch, and all leave together. Serial has the engine's cells. `lazy`, its Equation 2 and `auto` know
the cells' times, measured before as `batchmaker profile --overhead` does, and lengths of other sentences.

Needs an otherwise idle machine, for about eleven minutes; with --quick less than two.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any, Final

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from batchmaker.cli import options as cli_options
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.cell_times import bound_registry, measured_cells
from batchmaker.cli.overhead import measured_overhead
from batchmaker.cli.workload import Workload, make_workload
from batchmaker.cost import CostProfile, LatencyTable, LengthProfile, PredictedLength, ProfileOptions
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.lab.baselines import WindowPolicy
from batchmaker.lab.datasets import poisson_arrivals
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.model.model import Model
from shared import IMAGES, RESULTS, Result, command_now, fill, interval, made_by, number, table

OUT: Final = RESULTS / "lazybatching-live.json"
PNG: Final = IMAGES / "lazybatching-live.png"
SIZE: Final = {"hidden": 64, "inner": 256, "heads": 2, "layers": 2}
"""Of the Transformer: small, so that a request alone takes tens of milliseconds on a CPU, and not seconds."""
MOST: Final = 64
"""Requests of a batch at most, the paper's default; rows of a cell, too."""
WINDOWS_MS: Final = (5, 25, 45, 65, 95)
WHOLE_WINDOWS_MS: Final = (5, 45, 95)
"""Of the second form of GraphB."""
LOADS: Final = (0.1, 0.3, 0.6, 0.9)
SLA_TIMES: Final = 6
"""The SLA, as a multiple of what a request takes alone in the mean: the longest translations have 4 times the mean's
words."""
WAITING: Final = 128
"""Requests that wait at once."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the steps whose times are measured."""
CELLS, WHOLE = "the engine's cells", "the whole network"
SERIAL, CELLULAR, LAZY, AUTO = f"closed:max_batch=1,bucket_width={1 << 30}", "cellular", "lazy", "auto"
EQUATION_2: Final = "lazy:slack=literal,benefit=no,lengths=fixed"
OURS: Final = ("Eq. 2", LAZY, CELLULAR, AUTO)
"""The ways that the best window is compared with."""
MEASURES: Final = (
    "papers/benchmarks/lazybatching_live.py", "src/batchmaker/engine", "src/batchmaker/policies",
    "src/batchmaker/core", "src/batchmaker/lab/baselines", "src/batchmaker/lab/zoo/transformer.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve. policy: of the engine. computes: CELLS or WHOLE. window_ms: of GraphB, None for the others."""

    name: str
    policy: str
    computes: str = CELLS
    window_ms: float | None = None

    @property
    def hands_batches(self) -> bool:
        """Whether batches are collected before the engine, which then gets them as a whole."""
        return self.window_ms is not None and self.computes == CELLS


WAYS: Final = (
    Way("serial", SERIAL),
    *(Way(f"GraphB({n})", CELLULAR, CELLS, n) for n in WINDOWS_MS),
    *(Way(f"GraphB({n}), whole network", f"graph:window_ms={n},max_batch={MOST}", WHOLE, n) for n in WHOLE_WINDOWS_MS),
    Way("Eq. 2", EQUATION_2), Way(LAZY, LAZY), Way(CELLULAR, CELLULAR), Way(AUTO, AUTO),
)  # fmt: skip
ALL_WAITING: Final = tuple(way for way in WAYS if way.window_ms in (None, WINDOWS_MS[0]))
"""With everything waiting all windows are alike."""
DRAWN: Final = ("serial", *(f"GraphB({n})" for n in (5, 25, 45, 95)), *OURS)


# --- what is offered -------------------------------------------------------------------------------------------------


def submit_each(engine: Engine, requests: Sequence[Any], due_s: Sequence[float], sla_ms: float) -> None:
    """Submit each request when it is due, with the SLA as its deadline."""
    for i, at_s in enumerate(due_s):
        if (wait_s := at_s - engine.clock.now_s()) > 0:
            time.sleep(wait_s)
        engine.submit(requests[i % len(requests)], deadline_ms=sla_ms)


def submit_batches(engine: Engine, requests: Sequence[Any], due_s: Sequence[float], window_ms: float) -> None:
    """Hand requests over in batches, as the policy `graph` collects them; the next one when the last is answered."""
    collected, come = WindowPolicy(window_ms, MOST), 0
    while come < len(due_s) or len(collected):
        now_s = engine.clock.now_s()
        while come < len(due_s) and due_s[come] <= now_s:
            collected.add(come, 1, due_s[come])
            come += 1
        batch = collected.choose(now_s)
        if batch:
            engine.map([requests[i % len(requests)] for i in batch], progress=False)
            continue
        next_s = [*due_s[come : come + 1], *filter(None, [collected.next_wakeup_s(now_s)])]
        time.sleep(max(0.0, min(next_s) - engine.clock.now_s()))


def offered(
    way: Way, engine: Engine, requests: Sequence[Any], arrivals_s: NDArray[np.float64], sla_ms: float
) -> dict[str, float]:
    """Offer requests at these seconds from now, from a thread of their own; return what came of it."""
    tickets: list[Ticket] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def settled(ticket: Ticket, error: BaseException | None) -> None:
        tickets.append(ticket)
        if error is not None:
            errors.append(error)
        if len(tickets) == len(arrivals_s):
            done.set()

    engine.on_settled = settled
    with quiet_interpreter(), ThreadPoolExecutor(1) as pool:
        due_s = arrivals_s + engine.clock.now_s()
        if way.hands_batches:
            assert way.window_ms is not None
            offering = pool.submit(submit_batches, engine, requests, due_s.tolist(), way.window_ms)
        else:
            offering = pool.submit(submit_each, engine, requests, due_s.tolist(), sla_ms)
        offering.result()
        done.wait()
    engine.on_settled = None
    if errors:
        raise errors[0]
    tickets.sort(key=lambda ticket: ticket.request_id)  # numbered as they were submitted, which is as they were due
    finished_s = np.array([ticket.finished_s for ticket in tickets])
    latency_ms = 1e3 * (finished_s - due_s)
    return {
        "mean_ms": float(latency_ms.mean()), "p90_ms": float(np.percentile(latency_ms, 90)),
        "served_rps": len(tickets) / float(finished_s.max() - due_s[0]), "late": float((latency_ms > sla_ms).mean()),
    }  # fmt: skip


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. seconds: of arrivals, of `least` requests at least. cell_s: for the times of one cell."""

    rounds: int
    seconds: float
    least: int
    waiting: int
    loads: Sequence[float]
    cell_s: float


FULL: Final = Scale(4, 1.6, 30, WAITING, LOADS, 0.3)
QUICK: Final = Scale(1, 0.5, 12, 64, (LOADS[0], LOADS[2]), 0.05)


def profiled(model: Model, work: Workload, seconds: float) -> CostProfile:
    """Return the times of the cells as the engine runs them, and the lengths of other sentences' translations."""
    alone = LatencyTable(tuple(measured_cells(bound_registry(model), SIZES, seconds / 5, 1)))
    with Engine(model, CELLULAR, threads=1) as engine, quiet_interpreter():
        served, overhead = measured_overhead(engine, work.requests, alone, seconds)
    words = make_workload("transformer", seed=1).chains[:, 1]
    lengths = (PredictedLength("decoder", None, LengthProfile.from_pairs(np.zeros_like(words), words)),)
    about = ProfileOptions("float32", 1, machine()["cpu"], commit())
    return CostProfile("transformer", about, served, lengths, overhead)


def alone_ms(engine: Engine, requests: Sequence[Any]) -> float:
    """Return what a request takes alone, in the mean."""
    taken_s = []
    for request in requests:
        begin_s = time.perf_counter()
        engine.map([request], progress=False)
        taken_s.append(time.perf_counter() - begin_s)
    return 1e3 * fmean(taken_s)


def rounds_of(
    ways: Sequence[Way], scale: Scale, arrivals: Callable[[int], NDArray[np.float64]],
    play: Callable[[Way, NDArray[np.float64]], dict[str, float]],
) -> dict[str, dict[str, list[float]]]:  # fmt: skip
    """Play all ways in turn in each round, another one first each time. Returns each figure of each way by round."""
    seen: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for i in range(scale.rounds):
        come_s, first = arrivals(i), i * len(ways) // scale.rounds
        for way in (*ways[first:], *ways[:first]):
            seen[way.name].append(play(way, come_s))
    return {name: {key: [one[key] for one in found] for key in found[0]} for name, found in seen.items()}


def measured(scale: Scale, tell: Callable[[], None]) -> Result:
    """Return a row for each way and load, with its figures by round, and what they were measured with."""
    work = make_workload("transformer", count=2000)
    model = cli_options.make_model(
        "transformer", max_batch=MOST, vocabulary_size=work.vocabulary_size, **SIZE, **work.options
    )
    model.profile = profiled(model, work, scale.cell_s)
    with ExitStack() as stack:
        engines = {
            policy: stack.enter_context(Engine(model, policy, threads=1, late="finish"))
            for policy in dict.fromkeys(way.policy for way in WAYS)
        }
        for engine in engines.values():
            engine.map(work.requests[: MOST // 2], progress=False)
        alone = alone_ms(engines[LAZY], work.requests[: scale.least])
        sla_ms = SLA_TIMES * alone

        def play(way: Way, come_s: NDArray[np.float64]) -> dict[str, float]:
            found = offered(way, engines[way.policy], work.requests, come_s, sla_ms)
            tell()
            return found

        waiting = rounds_of(ALL_WAITING, scale, lambda _: np.zeros(scale.waiting), play)
        capacity = max(median(found["served_rps"]) for found in waiting.values())
        rows = rows_of(None, None, ALL_WAITING, waiting)
        for load in scale.loads:
            rate = load * capacity
            count = max(scale.least, round(scale.seconds * rate))
            seen = rounds_of(WAYS, scale, partial(poisson_arrivals, rate, count=count), play)
            rows += rows_of(load, rate, WAYS, seen)
    about = {"workload": work.source, "alone_ms": alone, "sla_ms": sla_ms, "capacity_rps": capacity}
    return {**about, "rounds": scale.rounds, "rows": rows, "ratios": ratios_of(rows)}


def rows_of(
    load: float | None, rate: float | None, ways: Sequence[Way], seen: Mapping[str, dict[str, list[float]]]
) -> list[Result]:
    """Return a row for each way: what it is, and its figures by round."""
    return [
        {"way": way.name, "policy": way.policy, "computes": way.computes, "window_ms": way.window_ms, "load": load,
         "rate": rate, **seen[way.name]}
        for way in ways
    ]  # fmt: skip


def ratios_of(rows: Sequence[Result]) -> list[Result]:
    """Return by how much GraphB's mean latency is above each other way's at each load, by round.

    best: of the window whose median over rounds is least at that load. all: the geometric mean over all windows.
    """
    found = []
    for load in dict.fromkeys(row["load"] for row in rows if row["load"] is not None):
        here = [row for row in rows if row["load"] == load]
        for computes in (CELLS, WHOLE):
            windows = [row for row in here if row["computes"] == computes and row["window_ms"] is not None]
            best = min(windows, key=lambda row: median(row["mean_ms"]))
            for row in (row for row in here if row["way"] in OURS):
                by_round = list(zip(*(window["mean_ms"] for window in windows), strict=True))
                found.append({
                    "load": load, "computes": computes, "window_ms": best["window_ms"], "way": row["way"],
                    "best": [a / b for a, b in zip(best["mean_ms"], row["mean_ms"], strict=True)],
                    "all": [geometric_mean(a) / b for a, b in zip(by_round, row["mean_ms"], strict=True)],
                })  # fmt: skip
    return found


# --- what is shown ---------------------------------------------------------------------------------------------------


def middle(values: Sequence[float], scale: float = 1.0) -> str:
    """Return the median over rounds, ± half of the 95 % interval of the mean where there are several rounds."""
    half = scale * interval(values)[1]
    said = number(scale * median(values))
    return said if np.isnan(half) else f"{said} ± {number(half)}"


def spread(values: Sequence[float]) -> str:
    """Return the median over rounds, the least and the most."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def by_load(found: Result, heads: Sequence[str], shown_as: Callable[[Result], Sequence[str]]) -> str:
    """Return a table of some figures of each way at each load."""
    offered_rows = [row for row in found["rows"] if row["load"] is not None]
    loads = dict.fromkeys(row["load"] for row in offered_rows)
    lines = []
    for name in dict.fromkeys(row["way"] for row in offered_rows):
        rows = {row["load"]: row for row in offered_rows if row["way"] == name}
        lines.append([name, *(one for load in loads for one in shown_as(rows[load]))])
    return table(("way", *(f"{head} at {load}" for load in loads for head in heads)), lines)


def ratio_table(found: Result) -> str:
    """Return by how much GraphB's mean latency is above each other way's: the best window, and all."""
    lines = []
    for load, computes in dict.fromkeys((one["load"], one["computes"]) for one in found["ratios"]):
        here = {one["way"]: one for one in found["ratios"] if (one["load"], one["computes"]) == (load, computes)}
        best = [spread(here[way]["best"]) for way in OURS]
        lines.append([f"{load}", computes, f"{here[LAZY]['window_ms']}", *best, spread(here[LAZY]["all"])])
    heads = ("load", "GraphB computes", "best window, ms", *(f"best / {way}" for way in OURS), f"all / {LAZY}")
    return table(heads, lines)


def shown(found: Result) -> str:
    """Return the tables and the picture of the page, and what they were measured with."""
    waiting = {row["way"]: row for row in found["rows"] if row["load"] is None}
    parts = (
        "GraphB's mean latency over that of another way in the same round, with the window that is best at that load, "
        f"and over all windows for `{LAZY}`; medians over rounds (least to most):",
        ratio_table(found),
        f"![Latency, throughput and violations on a CPU](images/{PNG.name})",
        by_load(found, ("mean ms", "p90 ms"), lambda row: (middle(row["mean_ms"]), middle(row["p90_ms"]))),
        by_load(found, ("answered/s", "late, %"), lambda row: (middle(row["served_rps"]), middle(row["late"], 100))),
        table(("way", "requests/s, all waiting"), [[name, middle(row["served_rps"])] for name, row in waiting.items()]),
        measured_with(found),
    )
    return "\n\n".join(parts)


def measured_with(found: Result) -> str:
    """Return what a result was measured with."""
    offered_at = dict.fromkeys((row["load"], row["rate"]) for row in found["rows"] if row["load"] is not None)
    rates = ", ".join(f"{load} is {rate:.3g}" for load, rate in offered_at)
    size = ", ".join(f"{key} {value}" for key, value in SIZE.items())
    return (
        f"`{command_now(found)}`, commit {found['commit']}, {found['machine']['cpu']}, load average "
        f"{found['load_average']}. Transformer ({size}), {found['workload']}, one thread. A request alone takes "
        f"{found['alone_ms']:.3g} ms, the SLA is {SLA_TIMES} times that, {found['sla_ms']:.3g} ms. Loads are shares of "
        f"{found['capacity_rps']:.3g} requests/s: {rates}. Rounds: {found['rounds']}. Medians over rounds, ± half of "
        "the 95 % interval of the mean. Answered/s is until the last answer."
    )


def draw(path: Path, found: Result) -> None:
    """Draw latency, throughput and violations over load."""
    rows = [row for row in found["rows"] if row["load"] is not None]

    def panel(title: str, unit: str, key: str, scale: float = 1.0, *, log: bool = False) -> Panel:
        lines = []
        for name in DRAWN:
            mine = [row for row in rows if row["way"] == name]
            low, mid, high = (scale * np.percentile([row[key] for row in mine], (25, 50, 75), axis=1)).tolist()
            lines.append(Line(name, [row["load"] for row in mine], mid, low, high))
        return Panel(title, "share of the capacity offered", unit, lines, log=log)

    panels = [
        panel("mean latency", "ms", "mean_ms", log=True), panel("p90 latency", "ms", "p90_ms", log=True),
        panel("answered", "requests/s", "served_rps"), panel(f"later than {found['sla_ms']:.0f} ms", "%", "late", 100),
    ]  # fmt: skip
    under = f"{found['machine']['cpu']}, one thread, the engine's cells; median and quartiles over rounds"
    draw_panels(path, panels, "The Transformer on a CPU (Figure 17 has a GPU)", under)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of half a second at two loads")
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--png", type=Path, default=PNG)
    parser.add_argument("--page", type=Path, help="put the tables there")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    found: Result = {**made_by(MEASURES), "quick": options.quick}
    with Progress(console=Console(stderr=True)) as progress:
        total = scale.rounds * (len(ALL_WAITING) + len(scale.loads) * len(WAYS))
        bar = progress.add_task("measurements", total=total)
        found |= measured(scale, lambda: progress.advance(bar))
    options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    text = shown(found)
    print(text)
    draw(options.png, found)
    if options.page is not None:
        fill(options.page, {"lazybatching-live": text})


if __name__ == "__main__":
    main()
