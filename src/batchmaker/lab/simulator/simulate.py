"""Simulating one policy: the interface of this room."""

from __future__ import annotations

from batchmaker.lab.simulator.cell_simulation import CellSimulation
from batchmaker.lab.simulator.compiled_cells import CompiledCells, compiled_cells
from batchmaker.lab.simulator.costs import SimulatedDevice
from batchmaker.lab.simulator.graph_simulation import GraphSimulation
from batchmaker.lab.simulator.simulation import Observe
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedModel
from batchmaker.policies.base import CellPolicy, GraphPolicy

__all__ = ["SimulatedDevice", "simulate"]


def simulate(
    model: SimulatedModel,
    policy: CellPolicy | GraphPolicy,
    offered: Offered,
    device: SimulatedDevice,
    *,
    sla_s: float | None = None,
    give_up_late: bool = False,
    observe: Observe | None = None,
) -> Records:
    """Return the outcome of every request. A policy object is good for one simulation, because it may learn.

    sla_s: the deadline of each request, in seconds from its arrival. Late requests are still finished, as in
    LazyBatching's evaluation, unless `give_up_late`. The same arguments give the same records, bit by bit. observe:
    called with every batched call. Where the compiled loop can play a simulation, it does: see `compiled_cells`.
    """
    if isinstance(policy, GraphPolicy):
        return GraphSimulation(
            model,
            policy,
            offered,
            device.costs,
            sla_s=sla_s,
            num_workers=device.workers,
            give_up_late=give_up_late,
            observe=observe,
        ).run()
    if device.workers == 1 and not (device.run_ahead or device.take_turns or give_up_late or observe):
        compiled = compiled_cells(model, policy, offered, device.costs.seconds, sla_s=sla_s, overhead=device.overhead)
        if isinstance(compiled, CompiledCells):
            return compiled.run()
    return CellSimulation(model, policy, offered, device, sla_s=sla_s, give_up_late=give_up_late, observe=observe).run()
