"""How fast the simulator is: simulated requests per second of one core, under a load above what the NPU can serve.

    python papers/benchmarks/simulator.py [--requests 20000] [--json FILE]

Two forms of GNMT: `four runs` (both directions of the first encoder layer, all layers above as one cell, the decoder),
and `layers`, the model of this project, with a cell for each encoder layer. Seconds are of processor time, which other
programs on the machine disturb less than wall time; medians of five rounds, in which the policies take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from batchmaker.cli.simulate.device import predicted_lengths
from batchmaker.cli.simulate.study import make_policy
from batchmaker.cli.simulate.workload import SimulatedWorkload, make
from batchmaker.cost import CellLatency, CostProfile, LatencyTable, ProfileOptions
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.lab import zoo
from batchmaker.lab.datasets import lazybatching_lengths, poisson_arrivals
from batchmaker.lab.simulator.costs import step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest
from batchmaker.lab.zoo.blueprint import blueprint
from batchmaker_papers.npu.costs import npu_costs
from shared import RESULTS, made_by

MAX_BATCH = 64
POLICIES = ("serial", "graph:window_ms=25", "cellular", "lazy")
ROUNDS: Final = 5
NUMBER = ValueSpec((), "int64")
MEASURES: Final = (
    "papers/benchmarks/simulator.py", "src/batchmaker/lab/simulator", "src/batchmaker/lab/baselines/window.py",
    "src/batchmaker/policies/cellular.py", "src/batchmaker/policies/lazy.py", "src/batchmaker/core",
)  # fmt: skip


def four_runs(count: int) -> tuple[SimulatedModel, list[SimulatedRequest], CostProfile]:
    """GNMT with one cell for all upper encoder layers; a step takes 100 us and 2 us for each row."""
    shapes = (("left", 3, 2), ("right", 3, 2), ("upper", 4, 2), ("decoder", 3, 3))
    sizes = tuple(range(1, MAX_BATCH + 1))
    cells = tuple(
        CellType(TypeId(i), name, (NUMBER,) * inputs, (NUMBER,) * outputs, sizes, priority=i)
        for i, (name, inputs, outputs) in enumerate(shapes)
    )
    known: dict[tuple[int, int], SimulatedRequest] = {}

    def request(source: int, words: int) -> SimulatedRequest:
        if (source, words) not in known:
            recorder, tokens = Recorder(), HostValues(None, source, NUMBER)
            left, right = (recorder.run(cell, [tokens], None)[0].steps for cell in cells[:2])
            state = recorder.run(cells[2], [left, right[::-1]], None)
            first = HostValues(None, 1, NUMBER)
            recorder.run(cells[3], [], [first, *state], max_steps=words, open_ended=True)
            known[source, words] = SimulatedRequest(recorder.take(), source)
        return known[source, words]

    lengths = lazybatching_lengths(count, 0)
    seconds = tuple(100e-6 + 2e-6 * size for size in sizes)
    table = LatencyTable(tuple(CellLatency(cell.name, sizes, seconds, seconds) for cell in cells))
    profile = CostProfile("gnmt", ProfileOptions("float32", 1, "made up", ""), table)
    requests = [request(n, m) for n, m in zip(*(column.tolist() for column in lengths), strict=True)]
    return SimulatedModel("gnmt, four runs", cells), requests, profile


def layers(count: int) -> tuple[SimulatedModel, list[SimulatedRequest], CostProfile]:
    """GNMT as this project serves it, on the NPU."""
    network = blueprint("gnmt", partial(zoo.make, "gnmt", max_batch=MAX_BATCH))
    workload: SimulatedWorkload = make("gnmt", network, (), count)
    table = npu_costs(network.shapes, MAX_BATCH, "tpu")
    lengths = predicted_lengths(network, workload)
    profile = CostProfile("gnmt", ProfileOptions("int8", 1, "NPU", ""), table, lengths)
    return network.model, list(workload.draw(0, count)), profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the requests")
    parser.add_argument("--json", type=Path, default=RESULTS / "simulator.json")
    options = parser.parse_args()
    options.requests //= 20 if options.quick else 1
    rows = []
    for form, rate in ((four_runs, 3500.0), (layers, 2000.0)):
        model, requests, profile = form(options.requests)
        device = SimulatedDevice(step_costs(model, profile.latency, padded=False))
        offered = Offered(requests, poisson_arrivals(rate, 0, count=options.requests))
        few = Offered(requests[:50], poisson_arrivals(rate, 0, count=50))
        taken_s: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for policy in POLICIES:
            simulate(model, make_policy(policy, profile), few, device, sla_s=0.1)  # loops are compiled, or loaded
        found = {}
        for _ in range(1 if options.quick else ROUNDS):
            for policy in POLICIES:
                begin_s = time.process_time()
                found[policy] = simulate(model, make_policy(policy, profile), offered, device, sla_s=0.1)
                taken_s[policy].append(time.process_time() - begin_s)
        for policy, records in found.items():
            took_s = median(taken_s[policy])
            rows.append({
                "form": form.__name__, "policy": policy, "rate": rate, "requests_per_s": options.requests / took_s,
                "us_per_step": 1e6 * took_s / records.steps, "steps_per_request": records.steps / options.requests,
                "mean_batch": records.rows / records.steps, "mean_ms": 1e3 * float(np.mean(
                    records.finished_s - records.arrived_s)),
            })  # fmt: skip
            print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{v}" for k, v in rows[-1].items()))
    about = made_by(MEASURES, f"python papers/benchmarks/simulator.py --requests {options.requests}")
    options.json.write_text(json.dumps({**about, "quick": options.quick, "seed": 0, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
