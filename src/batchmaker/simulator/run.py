"""Simulating one policy: the entrance to this room."""

from __future__ import annotations

from dataclasses import dataclass

from batchmaker.policies.base import CellPolicy, GraphPolicy
from batchmaker.simulator.cells import CellSimulation
from batchmaker.simulator.costs import StepCosts
from batchmaker.simulator.driver import Observe
from batchmaker.simulator.graphs import GraphSimulation
from batchmaker.simulator.workload import Offered, Records, SimulatedModel


@dataclass(frozen=True, slots=True)
class Device:
    """What requests are played on. costs: of steps. workers: devices of one kind. run_ahead: see Scheduler; for cell
    policies alone."""

    costs: StepCosts
    workers: int = 1
    run_ahead: int = 0


def simulate(
    model: SimulatedModel,
    policy: CellPolicy | GraphPolicy,
    offered: Offered,
    device: Device,
    *,
    sla_s: float | None = None,
    give_up_late: bool = False,
    observe: Observe | None = None,
) -> Records:
    """Return what becomes of every request. A policy object is good for one simulation, since it may learn.

    sla_s: requests have deadlines so long after they arrive, for policies to look at. Late requests are finished all
    the same, as in LazyBatching's evaluation, unless `give_up_late`. The same arguments give the same records, bit by
    bit. observe: called with every batched call.
    """
    if isinstance(policy, GraphPolicy):
        return GraphSimulation(
            model, policy, offered, device.costs, sla_s=sla_s, num_workers=device.workers, give_up_late=give_up_late,
            observe=observe,
        ).run()  # fmt: skip
    return CellSimulation(
        model, policy, offered, device.costs.seconds, sla_s=sla_s, num_workers=device.workers,
        run_ahead=device.run_ahead, give_up_late=give_up_late, observe=observe,
    ).run()  # fmt: skip
