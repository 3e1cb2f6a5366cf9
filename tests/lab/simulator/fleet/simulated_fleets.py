"""Small fleets of chains, exact and fast, with the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from batchmaker.cost.profile import Overhead
from batchmaker.fleet.routing import Router
from batchmaker.fleet.scaling import ScalingRule
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.fleet.exact import ExactReplicas
from batchmaker.lab.simulator.fleet.fast import FastReplicas
from batchmaker.lab.simulator.fleet.records import FleetRecords, FleetWork
from batchmaker.lab.simulator.fleet.run import FleetPlan, simulate_fleet
from batchmaker.lab.simulator.simulate import SimulatedDevice
from batchmaker.lab.simulator.workload import ShapedRequests, SimulatedModel, SimulatedRequest
from batchmaker.policies.cellular import CellularPolicy

NUMBER = ValueSpec((), "int64")
MS = 1e-3


def model_of(max_batch: int) -> SimulatedModel:
    """Chains of one cell."""
    sizes = tuple(2**i for i in range(max_batch.bit_length()) if 2**i <= max_batch)
    return SimulatedModel("chain", (CellType(TypeId(0), "step", (NUMBER, NUMBER), (NUMBER,), batch_sizes=sizes),))


def device_of(max_batch: int, *, fixed_s: float = 2e-4, per_row_s: float = 2e-5, overhead: Overhead | None = None):
    """Steps take `fixed_s` and `per_row_s` for each row."""
    seconds = (fixed_s + per_row_s * np.arange(max_batch + 1))[None, :]
    seconds[:, 0] = 0
    return SimulatedDevice(StepCosts(seconds), overhead=overhead or Overhead())


def chain(model: SimulatedModel, steps: int) -> SimulatedRequest:
    recorder = Recorder()
    recorder.run(model.cells[0], [HostValues(None, steps, NUMBER)], None)
    return SimulatedRequest(recorder.take(), steps)


def work_of(
    model: SimulatedModel,
    steps: Sequence[int] | np.ndarray,
    arrived_s: ArrayLike,
    *,
    sequence: ArrayLike | None = None,
    step_ns: int = 20_000,
) -> FleetWork:
    """Chains with so many steps, which the router knows."""
    lengths, kinds = np.unique(np.asarray(steps), return_inverse=True)
    shapes = [chain(model, int(length)) for length in lengths]
    work = np.asarray(steps, np.int64) * step_ns
    numbers = None if sequence is None else np.asarray(sequence, np.int32)
    requests = ShapedRequests(shapes, kinds.astype(np.int32))
    return FleetWork(requests, np.asarray(arrived_s, np.float64), work, work.copy(), numbers)


def drawn(count: int, rate_rps: float, seed: int, *, sigma: float = 0.7, mean: float = 24.0):
    """Lengths with a heavy tail, and times of arrival."""
    rng = np.random.default_rng(seed)
    steps = np.clip(np.rint(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)), 1, 330).astype(np.int64)
    return steps, np.cumsum(rng.exponential(1 / rate_rps, count))


def play(
    fidelity: str,
    work: FleetWork,
    router: str,
    *,
    max_batch: int = 8,
    replicas: int = 4,
    seed: int = 0,
    start_s: float = 0.0,
    mean_life_s: float = math.inf,
    scaling: ScalingRule | None = None,
    device: SimulatedDevice | None = None,
    policy: type[CellularPolicy] = CellularPolicy,
    max_steps: int | None = None,
) -> FleetRecords:
    """What becomes of the requests."""
    model, device = model_of(max_batch), device or device_of(max_batch)
    if fidelity == "exact":
        made = ExactReplicas(model, lambda: policy(max_steps), work, Router(router, seed), device)
    else:
        made = FastReplicas(model, policy(max_steps), work, Router(router, seed), device)
    return simulate_fleet(made, FleetPlan(replicas, start_s, mean_life_s, scaling, seed))
