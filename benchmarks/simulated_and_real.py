"""The same workload on the engine and in the simulator, and what a policy's decisions cost.

    python benchmarks/simulated_and_real.py [--quick] [--data EUROPARL.en] [--page papers/docs/lazybatching.md]

For each network and policy an engine with one worker and one compute thread is started. Its cells and its overhead are
measured, as `batchmaker profile --overhead` does; then Poisson arrivals are offered at shares of its capacity: what it
answers per second where all requests wait at once, or what full batches would allow if that is less. This is repeated
with other arrivals. What came is simulated: the same cell graphs at the times at which the engine got them.
Nothing of the simulation is taken from the runs that it is compared with. Needs an otherwise idle machine.

All networks take about 11 minutes, more where other programs disturb them (--patience); with --quick 2. The
result is written whenever a network is done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from batchmaker import policies
from batchmaker.cli import options as cli_options
from batchmaker.cli.bench.load import quiet_interpreter
from batchmaker.cli.bench.report import commit, machine
from batchmaker.cli.cell_times import measured_cells
from batchmaker.cli.overhead import IN_FLIGHT, as_served, fitted_overhead, kept_in_flight
from batchmaker.cli.simulate.study import make_policy
from batchmaker.cli.workload import UNPADDED, Workload, make_workload
from batchmaker.core.commands import Command
from batchmaker.core.events import Event, StepsFinished
from batchmaker.cost import CostProfile, LatencyTable, LengthProfile, Overhead, PredictedLength, ProfileOptions
from batchmaker.engine.engine import Engine
from batchmaker.engine.request import Ticket
from batchmaker.engine.setup import DEFAULT, wants_costs
from batchmaker.graph.work import work_of
from batchmaker.lab.datasets import poisson_arrivals
from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest
from batchmaker.model.model import Model
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding
from batchmaker.policies.base import CellPolicy
from pages import fill, table
from provenance import ROOT, made_by


@dataclass(frozen=True, slots=True)
class Setting:
    """How one network is measured.

    seconds: of arrivals at each load. profile_seconds: for each number of requests in flight.
    """

    hidden: int
    seconds: float
    profile_seconds: float


NETWORKS: Final = {
    "lstm": Setting(1024, 3.0, 0.4), "seq2seq": Setting(512, 6.0, 0.6), "bilstm-tagger": Setting(256, 2.5, 0.25),
    "treelstm-2type": Setting(256, 2.5, 0.25),
}  # fmt: skip
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of the steps that are measured; the last is the largest batch of every cell."""
LOADS = (0.3, 0.5, 0.7)
POLICIES = ("cellular", DEFAULT)
JSON: Final = ROOT / "benchmarks" / "results" / "simulated-and-real.json"
PNG: Final = ROOT / "papers" / "docs" / "images" / "simulated-and-real.png"
MEASURES: Final = (
    "benchmarks/simulated_and_real.py", "src/batchmaker/cli/overhead.py", "src/batchmaker/engine",
    "src/batchmaker/policies", "src/batchmaker/core", "src/batchmaker/lab/simulator",
)  # fmt: skip
WAITING: Final = 512
"""Requests that wait at once where it is measured how many are answered."""
WATCHED_LOAD = 0.5
"""Where the cost of decisions is measured."""
WARM = 0.2
"""Share of the requests, from the first, that are offered and not counted."""
DISTURBED = 0.15
"""Workers that other programs may use while something is measured; else it is measured again."""
MOST_TRIES = 3
FIGURES = ("p50_ms", "p90_ms", "p99_ms", "mean_batch")
T = TypeVar("T")


@dataclass
class Decisions:
    """How long a policy's decisions took, and the tasks that came of them, in seconds."""

    seconds: list[float] = field(default_factory=list)
    tasks: dict[int, float] = field(default_factory=dict)

    def watch(self, engine: Engine) -> None:
        """Time `admit` and `rank` of the engine's policy: a decision is one rank, and the admit before it if any."""
        policy, pending = engine.policy, [0.0]
        assert isinstance(policy, CellPolicy)
        admit, rank = type(policy).admit, type(policy).rank

        def timed_admit(view: Any) -> Any:
            begin_s = time.perf_counter()
            admission = admit(policy, view)
            pending[0] += time.perf_counter() - begin_s
            return admission

        def timed_rank(view: Any) -> Any:
            begin_s = time.perf_counter()
            ranked = rank(policy, view)
            if ranked:
                self.seconds.append(pending[0] + time.perf_counter() - begin_s)
                pending[0] = 0.0
            return ranked

        def record(events: Sequence[Event], commands: Sequence[Command]) -> None:
            for event in events:
                if isinstance(event, StepsFinished):
                    self.tasks[event.task] = self.tasks.get(event.task, 0.0) + event.busy_s

        policy.admit, policy.rank = timed_admit, timed_rank  # type: ignore[method-assign]
        engine.driver.record = record  # type: ignore[attr-defined]

    @staticmethod
    def leave(engine: Engine) -> None:
        """Undo `watch`."""
        del engine.policy.admit, engine.policy.rank  # type: ignore[union-attr]
        engine.driver.record = None  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests in order of arrival, live or simulated, and the steps that they took."""

    arrived_s: NDArray[np.float64]
    finished_s: NDArray[np.float64]
    steps: int
    rows: int

    def figures(self) -> dict[str, float]:
        """Return percentiles of the latency, and rows per step."""
        latency_ms = 1e3 * (self.finished_s - self.arrived_s)[int(WARM * len(self.arrived_s)) :]
        p50, p90, p99 = np.percentile(latency_ms, (50, 90, 99)).tolist()
        return dict(zip(FIGURES, (p50, p90, p99, self.rows / self.steps), strict=True))


def live(engine: Engine, requests: Sequence[Any], arrivals_s: NDArray[np.float64]) -> Seen:
    """Offer the requests from a thread of their own, at these seconds from now, and wait for all answers."""
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
            wait_s = due_s - engine.clock.now_s()
            if wait_s > 0:
                time.sleep(wait_s)
            engine.submit(request)

    steps, rows = engine.stats.steps, engine.stats.cells
    engine.on_settled = settled
    with quiet_interpreter():
        begin_s = engine.clock.now_s() + 0.01
        thread = threading.Thread(target=offer, daemon=True)
        thread.start()
        done.wait()
        thread.join()
    engine.on_settled = None
    tickets.sort(key=lambda ticket: ticket.request_id)
    arrived_s = np.array([ticket.arrived_s for ticket in tickets]) - begin_s
    finished_s = np.array([ticket.finished_s for ticket in tickets]) - begin_s
    return Seen(arrived_s, finished_s, engine.stats.steps - steps, engine.stats.cells - rows)


def simulated(
    network: SimulatedModel,
    requests: Sequence[SimulatedRequest],
    seen: Seen,
    policy: str,
    profile: CostProfile,
) -> Seen:
    """Play what was offered again, under a virtual clock."""
    overhead = profile.overhead or Overhead()
    device = SimulatedDevice(step_costs(network, profile.latency), take_turns=True, overhead=overhead)
    play = list(itertools.islice(itertools.cycle(requests), len(seen.arrived_s)))
    records = simulate(network, make_policy(policy, profile), Offered(play, seen.arrived_s), device)
    return Seen(records.arrived_s, records.finished_s, records.steps, records.rows)


def without_values(name: str, model: Model, registry: CellRegistry, workload: Workload) -> list[SimulatedRequest]:
    """Return the cell graphs that the engine unfolds. Of chains, requests of the same lengths are one object."""
    known: dict[tuple[int, ...], SimulatedRequest] = {}
    found = []
    for request, chains in zip(workload.requests, workload.chains.tolist(), strict=True):
        one = None if name in UNPADDED else known.get(tuple(chains))  # trees of one size differ
        if one is None:
            unfolding = Unfolding(model, registry, request)
            unfolding.start()
            unfolding.graph.host_inputs = []
            one = known[tuple(chains)] = SimulatedRequest(unfolding.graph, chains[0])
        found.append(one)
    return found


@dataclass
class Quiet:
    """Repeats what other programs disturbed, as long as there is time for it. left_s: seconds for repetitions."""

    left_s: float

    def __call__(self, measure: Callable[[], T]) -> tuple[T, float]:
        """Return what was measured in the quietest try, and how many cores other programs kept busy meanwhile."""
        tries: list[tuple[float, T]] = []
        while not tries or (tries[-1][0] > DISTURBED and len(tries) < MOST_TRIES and self.left_s > 0):
            begin_s, busy_s = time.perf_counter(), others_s()
            found = measure()
            took_s = time.perf_counter() - begin_s
            self.left_s -= took_s * bool(tries)
            tries.append(((others_s() - busy_s) / took_s, found))
        others, found = min(tries, key=lambda one: one[0])
        return found, max(others, 0.0)


def others_s() -> float:
    """Return the processor seconds that all other programs have used, 0 where Linux does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, soft, *_ = map(int, stat.read_text().splitlines()[0].split()[1:])
    mine = os.times()
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


@dataclass(frozen=True, slots=True)
class Profiled:
    """What was measured of an engine. profile: cells as it runs them. alone: cells alone. levels: what it came from."""

    profile: CostProfile
    alone: LatencyTable
    levels: list[dict[str, Any]]


def profiled(name: str, engine: Engine, workload: Workload, seconds: float, quiet: Quiet) -> Profiled:
    """Measure an engine as `batchmaker profile --overhead` does, and give its policy the times."""
    cells, _ = quiet(lambda: measured_cells(engine.registry, SIZES, seconds / 5, 1))
    lengths: tuple[PredictedLength, ...] = ()
    if name == "seq2seq":
        lengths = (PredictedLength("decoder", "encoder", LengthProfile.from_pairs(*workload.chains.T.tolist())),)
    about = ProfileOptions("float32", 1, machine()["cpu"], commit())
    alone = LatencyTable(tuple(cells))
    with quiet_interpreter():
        seen = [
            quiet(partial(kept_in_flight, engine, workload.requests, alone, number, seconds)) for number in IN_FLIGHT
        ]
    levels = [
        {key: getattr(kept, key) for key in ("in_flight", "requests", "steps", "rows", "busy_s", "wall_s")}
        | {"cells_s": kept.cells_s(alone), "others": others}
        for kept, others in seen
    ]
    served = as_served(alone, [kept for kept, _ in seen])
    profile = CostProfile(name, about, served, lengths, fitted_overhead([kept for kept, _ in seen], served))
    if wants_costs(engine.policy):
        engine.policy.use_profile(profile)  # nothing is in flight
    return Profiled(profile, alone, levels)


def capacity_rps(profile: CostProfile, network: SimulatedModel, requests: Sequence[SimulatedRequest]) -> float:
    """Return requests per second if every step has the largest batch."""
    assert profile.overhead is not None
    of_cell = {cell.name: cell.median_s[-1] / cell.batch[-1] for cell in profile.latency.cells}
    per_row_s = np.array([of_cell[cell.name] for cell in network.cells])
    works = [work_of(request.graph) for request in requests]
    cells_s = statistics.fmean(float(per_row_s[work.types] @ work.nodes) for work in works)
    return 1.0 / (cells_s + profile.overhead.request_s)


def answered_rps(engine: Engine, requests: Sequence[Any]) -> float:
    """Return the requests per second that the engine answers if `WAITING` of them wait at once."""
    seen = live(engine, list(itertools.islice(itertools.cycle(requests), WAITING)), np.zeros(WAITING))
    return WAITING / float(seen.finished_s.max())


@dataclass(frozen=True, slots=True)
class Measured:
    """One model under one policy on the engine. profiled: by seed. runs: what was seen is under `seen`."""

    name: str
    policy: str
    network: SimulatedModel
    requests: Sequence[SimulatedRequest]
    profiled: Sequence[Profiled]
    runs: Sequence[dict[str, Any]]
    about: dict[str, Any]


def measured(name: str, policy: str, options: argparse.Namespace, rates: dict[float, float]) -> Measured:
    """Measure all repetitions of one model under one policy, each after a profile of its own.

    rates: by load, filled in by the first policy.
    """
    setting = NETWORKS[name]
    hidden, seconds = options.hidden or setting.hidden, setting.seconds * options.scale
    workload = make_workload(name, data=options.data if name == "lstm" else (), count=options.count, seed=0)
    model = cli_options.make_model(
        name, hidden=hidden, max_batch=SIZES[-1], vocabulary_size=workload.vocabulary_size, **workload.options
    )
    runs: list[dict[str, Any]] = []
    measurements: list[Profiled] = []
    decisions, quiet = Decisions(), Quiet(options.patience * options.scale)
    with Engine(model, policies.make(policy), threads=1) as engine:
        requests = without_values(name, model, engine.registry, workload)
        network = SimulatedModel(name, tuple(engine.registry.types))
        for seed in range(options.repeat):
            if seed and time.monotonic() > options.until_s:
                break
            found = profiled(name, engine, workload, setting.profile_seconds * options.scale, quiet)
            measurements.append(found)
            if not rates:
                most, _ = quiet(lambda: answered_rps(engine, workload.requests))
                most = min(most, capacity_rps(found.profile, network, requests))
                rates |= {load: load * most for load in options.loads}
            for load, rate in rates.items():
                arrivals_s = poisson_arrivals(rate, seed, seconds=seconds)
                seen, others = quiet(partial(live, engine, workload.requests, arrivals_s))
                runs.append({"load": load, "rate": rate, "seed": seed, "others": others, "seen": seen})
            if WATCHED_LOAD in rates:  # in a run of its own: watching takes time too
                decisions.watch(engine)
                live(engine, workload.requests, poisson_arrivals(rates[WATCHED_LOAD], seed, seconds=seconds))
                decisions.leave(engine)
    about = {
        "model": name, "policy": policy, "hidden": hidden, "workload": workload.source, "seconds": seconds,
        "overhead_us": [{
            key: 1e6 * statistics.median(asdict(one.profile.overhead or Overhead())[key] for one in measurements)
            for key in asdict(Overhead())}],
        "alone_ms": [in_ms(one.alone) for one in measurements],
        "cells_ms": [in_ms(one.profile.latency) for one in measurements],
        "levels": [one.levels for one in measurements], "decisions": costs_of(decisions),
    }  # fmt: skip
    return Measured(name, policy, network, requests, measurements, runs, about)


def in_ms(latency: LatencyTable) -> dict[str, dict[int, float]]:
    """Return the milliseconds of each cell by number of rows."""
    return {c.name: dict(zip(c.batch, (1e3 * s for s in c.median_s), strict=True)) for c in latency.cells}


def compared(real: Measured) -> dict[str, Any]:
    """Simulate every run with its profile and the engine's overhead, and the first repetition without as well."""
    runs = []
    for run in real.runs:
        seen, known = run["seen"], real.profiled[run["seed"]]
        found = {k: v for k, v in run.items() if k != "seen"} | {"requests": len(seen.arrived_s)}
        found["real"] = seen.figures()
        ways = {"simulated": known.profile}
        if run["seed"] == 0:
            ways["cells_alone"] = replace(known.profile, latency=known.alone, overhead=None)
        for key, profile in ways.items():
            played = simulated(real.network, real.requests, seen, real.policy, profile)
            found[key] = played.figures()
        print(real.name, real.policy, {k: v for k, v in found.items() if not isinstance(v, dict)})
        for key in ("real", *ways):
            print(f"  {key:12}", "  ".join(f"{figure} {value:.2f}" for figure, value in found[key].items()), flush=True)
        runs.append(found)
    return real.about | {"runs": runs}


def costs_of(decisions: Decisions) -> dict[str, float]:
    """Return what decisions cost, in microseconds and as a share of the median task."""
    if not decisions.seconds:
        return {}
    task_s = statistics.median(decisions.tasks.values())
    middle, p90 = np.percentile(decisions.seconds, (50, 90)).tolist()
    mean = statistics.fmean(decisions.seconds)
    return {
        "decisions": len(decisions.seconds), "median_us": 1e6 * middle, "mean_us": 1e6 * mean, "p90_us": 1e6 * p90,
        "median_task_us": 1e6 * task_s, "median_share": middle / task_s, "mean_share": mean / task_s,
    }  # fmt: skip


def errors(result: dict[str, Any], load: float, figure: str, key: str = "simulated") -> float:
    """Return by what share the simulation is above the engine at one load: the median of the repetitions."""
    runs = [run for run in result["runs"] if run["load"] == load and key in run]
    return statistics.median(run[key][figure] / run["real"][figure] - 1 for run in runs)


def median(result: dict[str, Any], load: float, figure: str, key: str) -> float:
    """Return the median of a figure over the repetitions at one load."""
    return statistics.median(run[key][figure] for run in result["runs"] if run["load"] == load)


def shown(found: dict[str, Any]) -> str:
    """Return both tables, and what they were measured with."""
    lines = []
    for result in found["results"]:
        for load in sorted({run["load"] for run in result["runs"]}):
            both = [
                f"{median(result, load, figure, 'real'):.3g}, {median(result, load, figure, 'simulated'):.3g} "
                f"({errors(result, load, figure):+.0%})"
                for figure in FIGURES
            ]
            bare = f"{errors(result, load, 'p50_ms', 'cells_alone'):+.0%}"
            lines.append([result["model"], f"`{result['policy']}`", f"{load}", *both, bare])
    heads = ("network", "policy", "load", "p50 ms", "p90 ms", "p99 ms", "mean batch", "p50 of cells alone")
    costs = []
    for result in found["results"]:
        if cost := result["decisions"]:
            times = ", ".join(f"{cost[key]:.0f}" for key in ("median_us", "mean_us", "p90_us"))
            shares = [f"{cost[key]:.1%}" for key in ("median_share", "mean_share")]
            costs.append([result["model"], f"`{result['policy']}`", times, f"{cost['median_task_us']:.0f}", *shares])
    asked = ("network", "policy", "decision us: median, mean, p90", "median task us", "median share", "mean share")
    sizes = {result["model"]: result["hidden"] for result in found["results"]}
    hidden = ", ".join(f"{size} of {name}" for name, size in sizes.items())
    about = (
        f"`{found['command']}`, commit {found['commit']}, {found['machine']['cpu']}, load average "
        f"{found['load_average']}; each pair is real, simulated; hidden sizes {hidden}; one thread, medians of "
        f"{found['repeat']} repetitions."
    )
    return f"{table(heads, lines)}\n\n{table(asked, costs)}\n\n{about}"


def rounded(value: Any) -> Any:
    """Return the same with five digits of each fraction."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def draw(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Draw p50 and p90 of each network against load, real and simulated."""
    panels = []
    for name, figure in itertools.product(dict.fromkeys(r["model"] for r in results), ("p50_ms", "p90_ms")):
        lines = []
        for result, key in itertools.product((r for r in results if r["model"] == name), ("real", "simulated")):
            loads = sorted({run["load"] for run in result["runs"]})
            values = [[run[key][figure] for run in result["runs"] if run["load"] == load] for load in loads]
            low, middle, high = np.percentile(values, (25, 50, 75), axis=1).tolist()
            lines.append(Line(f"{result['policy']}, {key}", loads, middle, low, high))
        panels.append(Panel(f"{name}: {figure[:3]} latency", "share of the capacity offered", "ms", lines))
    repetitions = 1 + max(run["seed"] for run in results[0]["runs"])
    about = f"Simulated against real: {machine()['cpu']}, one thread; median and quartiles of {repetitions} repetitions"
    draw_panels(path, panels, "", about)


def command(options: argparse.Namespace, given: Sequence[str]) -> str:
    """Return the command without folders of this machine. given: its arguments, without those for what is written."""
    shorter = list(given)
    for path in options.data:
        shorter = [argument.replace(str(path), "/".join(("DATA", *path.parts[-2:]))) for argument in shorter]
    return shlex.join(["python", "benchmarks/simulated_and_real.py", *shorter])


def main() -> None:
    written = argparse.ArgumentParser(add_help=False)
    written.add_argument("--json", type=Path, default=JSON)
    written.add_argument("--png", type=Path, default=PNG)
    written.add_argument("--page", type=Path)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[written]
    )
    parser.add_argument("--quick", action="store_true", help="one repetition of a fifth of the time")
    parser.add_argument("--model", action="append", choices=tuple(NETWORKS))
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument("--load", dest="loads", action="append", type=float)
    parser.add_argument("--data", action="append", type=Path, default=[], help="sentences for lstm")
    parser.add_argument("--count", type=int, default=4096, help="requests drawn, and used in turn")
    parser.add_argument("--hidden", type=int, help="of all networks; default: each has its own")
    parser.add_argument("--repeat", type=int, help="default: 3, and 1 with --quick")
    parser.add_argument("--scale", type=float, help="of all measuring times; default: 1, and 0.2 with --quick")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds, of each policy, to measure again")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds after which no repetition begins")
    options = parser.parse_args()
    options.until_s = time.monotonic() + options.within
    options.loads = options.loads or LOADS
    options.scale = options.scale or (0.2 if options.quick else 1.0)
    options.repeat = options.repeat or (1 if options.quick else 3)
    results: list[dict[str, Any]] = []
    about = made_by(MEASURES, command(options, written.parse_known_args()[1]))
    found = {**about, "quick": options.quick, "repeat": options.repeat, "results": results}
    for name in options.model or NETWORKS:
        rates: dict[float, float] = {}
        real = [measured(name, policy, options, rates) for policy in options.policy or POLICIES]
        results += [rounded(compared(one)) for one in real]
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    text = shown(found)
    print(text)
    draw(options.png, results)
    if options.page is not None:
        fill(options.page, {"simulated-and-real": text})


if __name__ == "__main__":
    main()
