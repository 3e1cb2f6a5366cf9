"""Two replicas live and in the simulator: the same sentences, the same rates, the same routers.

    python benchmarks/fleet_simulated_and_real.py DATA [--seconds 8] [--page papers/docs/simulations.md]

DATA: a folder with europarl_deen/. Needs `pip install 'batchmaker[ray]'` and an otherwise idle machine. First cells and
overhead of one engine are measured, as `batchmaker profile --overhead` does, alone and while another process does the
same: two replicas share caches and memory. Nothing of the simulation is taken from the live runs.

Then `batchmaker serve lstm --replicas 2` gets Poisson arrivals at shares of what a closed loop reached,
REPEATS times in turns, and fleets of two are simulated at the same rates. Live latencies hold HTTP, the front and the
load generator, which share the cores with the replicas; simulated ones hold the engines alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "serving"))

import processes  # noqa: E402
import wire  # noqa: E402
from generator import Plan, offer  # noqa: E402
from report import figures  # noqa: E402

from batchmaker.cli import options  # noqa: E402
from batchmaker.cli.simulate import device, workload  # noqa: E402
from batchmaker.cli.simulate.fleet import FleetStudy, make_work, play  # noqa: E402
from batchmaker.cli.simulate.fleet_options import FleetAsk  # noqa: E402
from batchmaker.cli.workload import make_workload  # noqa: E402
from batchmaker.lab.simulator.costs import step_costs  # noqa: E402
from batchmaker.lab.simulator.fleet.report import summarise_fleet  # noqa: E402
from batchmaker.lab.simulator.simulate import SimulatedDevice  # noqa: E402
from batchmaker.lab.zoo.blueprint import blueprint  # noqa: E402
from pages import fill  # noqa: E402
from provenance import made_by  # noqa: E402

RESULTS: Final = HERE / "results" / "fleet-simulated-and-real.json"
MEASURES: Final = (
    "benchmarks/fleet_simulated_and_real.py", "src/batchmaker/fleet", "src/batchmaker/server",
    "src/batchmaker/lab/simulator/fleet",
)  # fmt: skip
NETWORK: Final = {"hidden": 1024, "dtype": "bfloat16"}
ROUTERS: Final = ("round-robin", "least-work")
LOADS: Final = (0.2, 0.4, 0.6)
REPEATS: Final = 3
SIMULATED: Final = 20_000
KEPT: Final = ("p50_ms", "p90_ms", "p99_ms")
COSTS: Final = {"alone": 1, "beside another": 2}
"""Costs of steps, and how many engines were measured at once."""


def profiled(folder: Path, count: int) -> Path:
    """Measure what an engine of one thread takes while so many are measured; return the file of the first."""
    code = "from batchmaker.cli.main import main; main()"
    asked = [f"--{name}={value}" for name, value in NETWORK.items()]
    command = [sys.executable, "-c", code, "profile", "lstm", *asked, "--threads", "1", "--overhead", "--out"]
    outs = [folder / f"profile-{n}-of-{count}.json" for n in range(count)]
    running = [subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL) for out in outs]
    statuses = [one.wait() for one in running]
    if any(statuses):
        raise RuntimeError("`batchmaker profile` failed")
    return outs[0]


def live(data: Path, seconds: float) -> tuple[float, dict[float, dict[str, dict[str, float]]]]:
    """Return the peak of a closed loop, and the medians of what was measured, by load and router."""
    words = make_workload("lstm", data=[data], count=5000).requests
    requests = [wire.infer_binary("lstm", {"input_0": [int(word) % 10_000 for word in one]}) for one in words]
    source = "lstm:" + ",".join(f"{name}={value}" for name, value in NETWORK.items())
    lines: dict[tuple[float, str], list[dict[str, Any]]] = {(at, by): [] for at in LOADS for by in ROUTERS}
    peak = 0.0
    for repeat in range(REPEATS):
        for router in ROUTERS:
            with tempfile.TemporaryDirectory() as folder:
                settings = Path(folder) / "server.toml"
                settings.write_text(f'[fleet]\nreplicas = 2\nrouter = "{router}"\n')
                with processes.batchmaker(source, "--config", settings) as server:
                    processes.warm_up(server, requests[0])
                    closed = figures(offer(Plan(server.host, server.port, requests, None, 4.0, 128)), 4.0)
                    peak = peak or float(closed["served_rps"])
                    for load in LOADS:
                        plan = Plan(server.host, server.port, requests, load * peak, seconds, 256)
                        lines[load, router].append(figures(offer(plan), seconds))
        print(f"repeat {repeat + 1} of {REPEATS}", file=sys.stderr, flush=True)
    found = {
        load: {
            by: {key: statistics.median(one[f"sent_{key}"] for one in lines[load, by]) for key in KEPT}
            for by in ROUTERS
        }
        for load in LOADS
    }
    return peak, found


def simulated(data: Path, table: Path, peak: float) -> dict[float, dict[str, dict[str, float]]]:
    """Return what fleets of two replicas do at the same rates."""
    plan = blueprint("lstm", lambda: options.make_model("lstm", **NETWORK))
    work = workload.make("lstm", plan, [data], SIMULATED)
    profile, _ = device.cost_profile(plan, work, npu=False, dataflow=device.DATAFLOW, table=table)
    assert profile.overhead is not None
    of = SimulatedDevice(step_costs(plan.model, profile.latency), 1, 0, True, profile.overhead)
    study = FleetStudy(plan.model, "cellular", of, profile, work, workload.SimulatedArrivals("poisson"), {})
    found: dict[float, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        found[load] = {}
        for router in ROUTERS:
            ask = FleetAsk((2,), (router,), "exact")
            records, _ = play(study, ask, make_work(study, ask, load * peak, 0, SIMULATED), router, 2, 0)
            told = summarise_fleet(records, 0.1)
            found[load][router] = {key: getattr(told, key) for key in KEPT}
    return found


def table_of(results: dict[str, Any]) -> str:
    """Return the page's table."""
    heads = ("requests/s", "router", "", "median, ms", "90th percentile", "99th percentile")
    lines = ["| " + " | ".join(heads) + " |", "|---|---|---|---:|---:|---:|"]
    for row in results["rows"]:
        at = f"{row['rate']:.0f} ({row['load']:g} of the peak)"
        for way in ("live", *(f"simulated, costs {name}" for name in COSTS)):
            cells = (at, f"`{row['router']}`", way, *(f"{row[way][key]:.1f}" for key in KEPT))
            lines += ["| " + " | ".join(cells) + " |"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    sentences = given.data / "europarl_deen" / "raw5k.en"
    with tempfile.TemporaryDirectory() as folder:
        tables = {name: profiled(Path(folder), count) for name, count in COSTS.items()}
        peak, real = live(sentences, given.seconds)
        guessed = {name: simulated(sentences, table, peak) for name, table in tables.items()}
        results = {
            **made_by(MEASURES, "python benchmarks/fleet_simulated_and_real.py DATA"),
            "seconds": given.seconds, "repeats": REPEATS, "peak_rps": peak,
            "costs": {name: json.loads(table.read_text("utf-8")) for name, table in tables.items()},
        }  # fmt: skip
    results["rows"] = [
        {
            "load": load, "rate": load * peak, "router": router, "live": real[load][router],
            **{f"simulated, costs {name}": found[load][router] for name, found in guessed.items()},
        }
        for load in LOADS
        for router in ROUTERS
    ]  # fmt: skip
    options.write_json(RESULTS, results)
    print(table_of(results))
    if given.page is not None:
        fill(given.page, {"two-replicas": table_of(results)})


if __name__ == "__main__":
    main()
