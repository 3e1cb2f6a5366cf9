"""Policies on the engine itself: what each answers where all requests wait, and latencies at shares of that.

    python benchmarks/default_policy_live.py [--quick] [--json OUT.json] [--page papers/docs/default-policy.md]

For each network one engine with one worker and one compute thread per policy is started; all of them are measured in
turn, round by round, another one first in each round, so that a disturbance meets all alike; short rounds are repeated.
Rates are shares of what `cellular` answers per second where all requests wait at once. A number is the median over
rounds. A ratio is that of `auto` and the best other policy of the case (by its median) in the same round, with the same
arrivals: its median, the least and the most.
Needs an otherwise idle machine. All networks take about a quarter of an hour, with --quick two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from batchmaker.cli import options as cli_options
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.workload import UNPADDED, make_workload
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.lab.datasets import poisson_arrivals
from pages import fill, table
from provenance import made_by

OUT: Final = Path(__file__).parent / "results" / "default-policy-live.json"
NETWORKS: Final = ("lstm", "seq2seq", "bilstm-tagger", "treelstm-2type", "latticelstm")
BASELINE: Final = "cellular"
OURS: Final = "auto"
POLICIES: Final = (BASELINE, "sufficient", "lazy:max_steps=5", OURS)
LOADS: Final = (0.3, 0.7)
COMPARED: Final = ("served_rps", "mean_ms", "p90_ms")
HIDDEN: Final = 128
WAITING: Final = 512
"""Requests that wait at once."""
SHORT_S: Final = 0.5
REPEATS: Final = 5
"""A round where all wait and are answered within SHORT_S is repeated so often: a disturbance lasts longer than it."""
MEASURES: Final = (
    "benchmarks/default_policy_live.py", "src/batchmaker/engine", "src/batchmaker/policies", "src/batchmaker/core",
)  # fmt: skip


def offered(engine: Engine, requests: Sequence[Any], arrivals_s: NDArray[np.float64]) -> dict[str, float]:
    """Offer requests at these seconds from now, from a thread of their own; return what came of it."""
    tickets: list[Ticket] = []
    done = threading.Event()

    def settled(ticket: Ticket, error: BaseException | None) -> None:
        if error is not None:
            raise error
        tickets.append(ticket)
        if len(tickets) == len(arrivals_s):
            done.set()

    def offer() -> None:
        for due_s, request in zip((arrivals_s + begin_s).tolist(), itertools.cycle(requests), strict=False):
            if (wait_s := due_s - engine.clock.now_s()) > 0:
                time.sleep(wait_s)
            engine.submit(request)

    steps, rows, engine.on_settled = engine.stats.steps, engine.stats.cells, settled
    with quiet_interpreter():
        begin_s = engine.clock.now_s()
        thread = threading.Thread(target=offer, daemon=True)
        thread.start()
        done.wait()
        thread.join()
    engine.on_settled = None
    arrived_s = np.array([ticket.arrived_s for ticket in tickets])
    finished_s = np.array([ticket.finished_s for ticket in tickets])
    latency_ms = 1e3 * (finished_s - arrived_s)
    return {
        "served_rps": len(tickets) / float(finished_s.max() - arrived_s.min()), "mean_ms": float(latency_ms.mean()),
        "p50_ms": float(np.median(latency_ms)), "p90_ms": float(np.percentile(latency_ms, 90)),
        "rows": (engine.stats.cells - rows) / (engine.stats.steps - steps),
    }  # fmt: skip


def measured(name: str, rounds: int, seconds: float, tell: Any) -> list[dict[str, Any]]:
    """Return a row for each load and policy of one network."""
    work = make_workload(name, count=WAITING)
    fitted = dict(work.options) if name in UNPADDED else {}
    model = cli_options.make_model(name, max_batch=64, hidden=HIDDEN, **fitted)
    at_once = np.zeros(WAITING)
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(Engine(model, policy=policy)) for policy in POLICIES}
        for engine in engines.values():
            offered(engine, work.requests, at_once)
            offered(engine, work.requests, poisson_arrivals(300, 0, count=100))
            warm = offered(engine, work.requests, at_once)
        capacity = 0.0
        rows = []
        for load in (None, *LOADS):
            rate = None if load is None else load * capacity
            seen: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
            short = rate is None and WAITING / warm["served_rps"] < SHORT_S
            for number in range(rounds * (REPEATS if short else 1)):
                come_s = at_once
                if rate is not None:
                    come_s = poisson_arrivals(rate, number, count=int(min(max(seconds * rate, 100), 4000)))
                first = number % len(POLICIES)
                for policy in (*POLICIES[first:], *POLICIES[:first]):
                    seen[policy].append(offered(engines[policy], work.requests, come_s))
                    if number < rounds:
                        tell()
            for policy, found in seen.items():
                middle = {key: median(one[key] for one in found) for key in found[0]}
                rows.append({"network": name, "policy": policy, "load": load, "rate": rate, **middle})
            rows[-1]["over"] = {key: over_best(seen, key) for key in COMPARED}  # `auto` is the last of POLICIES
            if load is None:
                capacity = rows[0]["served_rps"]
    return rows


def over_best(seen: dict[str, list[dict[str, float]]], key: str) -> dict[str, Any]:
    """Compare a number of `auto` with the best other policy: its name, and the median, least and most ratio."""
    best = max if key == "served_rps" else min
    others = {policy: median(one[key] for one in found) for policy, found in seen.items() if policy != OURS}
    other = best(others, key=lambda policy: others[policy])
    ratios = [one[key] / beside[key] for one, beside in zip(seen[OURS], seen[other], strict=True)]
    return {"policy": other, "median": median(ratios), "least": min(ratios), "most": max(ratios)}


def ratios(found: dict[str, Any]) -> str:
    """Return a table of `auto` over the best other policy of each case in the same rounds."""
    lines = []
    for name in NETWORKS:
        over = {row["load"]: row["over"] for row in found["rows"] if (row["network"], row["policy"]) == (name, OURS)}
        if over:
            wanted = [over[None]["served_rps"], *(over[load][key] for load in LOADS for key in ("mean_ms", "p90_ms"))]
            lines.append([name, *(
                f"{one['median']:.2f} ({one['least']:.2f} to {one['most']:.2f}, `{one['policy']}`)" for one in wanted
            )])  # fmt: skip
    heads = (f"`{OURS}` over the best other policy", "requests/s, all waiting", *(
        f"{what} at {load}" for load in LOADS for what in ("mean", "p90")))  # fmt: skip
    return table(heads, lines)


def shown(found: dict[str, Any]) -> str:
    """Return a table: for each network and policy what it answers at most, and mean and p90 at each load; and one of
    ratios."""
    lines = []
    for name, policy in itertools.product(NETWORKS, POLICIES):
        rows = {row["load"]: row for row in found["rows"] if (row["network"], row["policy"]) == (name, policy)}
        if rows:
            at = [f"{rows[load][key]:.3g}" for load in LOADS for key in ("mean_ms", "p90_ms")]
            lines.append([name, f"`{policy}`", f"{rows[None]['served_rps']:,.0f}", f"{rows[None]['rows']:.0f}", *at])
    heads = ("network", "policy", "all waiting, /s", "rows a step", *(
        f"{what} at {load}, ms" for load in LOADS for what in ("mean", "p90")))  # fmt: skip
    about = (
        f"`{found['command']}`, commit {found['commit']}, {found['machine']['cpu']}, load average "
        f"{found['load_average']}; hidden {HIDDEN}, one thread, medians of {found['rounds']} rounds."
    )
    return f"{table(heads, lines)}\n\n{ratios(found)}\n\n{about}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of half a second")
    parser.add_argument("--network", action="append", choices=NETWORKS)
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    rounds, seconds = (1, 0.5) if options.quick else (7, 1.2)
    names = options.network or list(NETWORKS)
    found = {**made_by(MEASURES), "rounds": rounds, "rows": []}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("rounds", total=len(names) * (1 + len(LOADS)) * rounds * len(POLICIES))
        for name in names:
            found["rows"] += measured(name, rounds, seconds, lambda: progress.advance(bar))
    options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if options.page is not None:
        fill(options.page, {"auto-live": shown(found)})


if __name__ == "__main__":
    main()
