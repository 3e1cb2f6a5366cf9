"""From the options of an engine to its policy and its driver."""

from __future__ import annotations

import importlib
import inspect
from typing import Final

from batchmaker import policies
from batchmaker.clock import Clock
from batchmaker.engine.catalogue import Catalogue
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.driver import Driver
from batchmaker.engine.open_sequences import Sequences
from batchmaker.errors import ModelError, OptionError
from batchmaker.executor.base import Executor
from batchmaker.executor.cpu import CpuExecutor
from batchmaker.executor.inline import InlineExecutor
from batchmaker.model.model import Model
from batchmaker.model.registry import CellRegistry
from batchmaker.policies.base import CellPolicy, GraphPolicy
from batchmaker.scheduler.core import Scheduler

WITH_DEADLINES: Final = "lazy:max_steps=5"
"""The policy of engines with deadlines. A task of five steps takes long enough that deciding who joins it, a tenth or
two of a millisecond while newcomers wait, stays under 5 % of it; newcomers wait for four steps at most."""


ON_DEVICES: Final = "cellular:max_steps=5"
"""The policy where the CPU does not compute: a persistent kernel takes eight steps at most, and no budget was ever
measured there."""

WHOLE_REQUESTS: Final = "batchmaker.lab.baselines.driver"
"""Where the driver of policies is that batch whole requests, loaded for those alone."""


def choose_policy(
    policy: str | CellPolicy | GraphPolicy | None, *, has_deadlines: bool, refuse: bool, on_cpu: bool = True
) -> CellPolicy | GraphPolicy:
    """Return the policy of an engine. has_deadlines: some model has one by default. policy, refuse: see Engine."""
    if policy is None:
        policy = WITH_DEADLINES if has_deadlines or refuse else "cellular" if on_cpu else ON_DEVICES
    if not isinstance(policy, str):
        if refuse:
            raise OptionError(
                f"refuse=True is for policies given by name; make the {type(policy).__name__} so that it refuses itself"
            )
        return policy
    made = policies.make(policy)
    if not refuse:
        return made
    if "hopeless" not in inspect.signature(type(made)).parameters:
        raise OptionError(
            f"policy {made.name!r} has no option to refuse what cannot be met any more; use policy='lazy'"
        )
    return policies.make(policy, hopeless="drop")


def make_driver(
    catalogue: Catalogue,
    registry: CellRegistry,
    policy: CellPolicy | GraphPolicy,
    clock: Clock,
    *,
    workers: int,
    threads: int,
    run_ahead: int | None,
    max_nodes: int,
    device: str,
    tf32: bool,
    executor: Executor | None,
    give_up_late: bool,
    max_sequences: int,
) -> Driver:
    """Return the driver that carries out the policy. For the options see Engine."""
    if device != "cpu" and executor is not None:
        raise OptionError(f"give device={device!r} or an executor, not both")
    if tf32 and device == "cpu":
        raise OptionError("tf32=True is for GPUs, and the device is 'cpu'")
    if isinstance(policy, GraphPolicy):
        if device != "cpu":
            raise OptionError(f"policy {policy.name!r} batches whole requests, which run on the CPU; got {device!r}")
        for served in catalogue:
            _check_whole_requests(served.model, policy)
        baselines = importlib.import_module(WHOLE_REQUESTS)
        whole: Driver = baselines.GraphDriver(
            policy, clock, num_workers=workers, num_threads=threads, give_up_late=give_up_late
        )
        return whole
    if device != "cpu":
        from batchmaker.executor.cuda.executor import CudaExecutor  # a dozen modules, for those who have a GPU
        from batchmaker.executor.cuda.open import open_devices

        executor = CudaExecutor(registry.types, registry.bind_on, open_devices(device, tf32=tf32))
    elif executor is None and workers == 1:
        executor = InlineExecutor(registry.types, registry.bound, num_threads=threads)
    elif executor is None:
        executor = CpuExecutor(registry.types, registry.bound, num_workers=workers, num_threads=threads)
    inline = executor if isinstance(executor, InlineExecutor) else None
    if run_ahead is None:
        run_ahead = 0 if inline else 1
    scheduler = Scheduler(
        policy,
        num_workers=executor.num_workers,
        run_ahead=run_ahead,
        take_turns=inline is not None,
        loops_ahead=inline is not None,
        give_up_late=give_up_late,
    )
    cells = [served.cells for served in catalogue]
    sequences = Sequences(clock, limit=max_sequences, give_up_late=give_up_late)
    driver = CellDriver(registry, cells, scheduler, executor, clock, max_nodes, sequences)
    if inline is not None:
        inline.apply_stop_tests(driver.stop_tests)
    return driver


def _check_whole_requests(model: Model, policy: GraphPolicy) -> None:
    """Raise ModelError unless whole requests of the model can be computed as the policy wants."""
    if type(model).batched is Model.batched:
        model.batched([])  # raises the advice
    if policy.max_batch > 1 and not model.can_pad:
        raise ModelError(
            f"{type(model).__name__} cannot be padded: whole requests of it have no common form to be computed "
            "together in. Use policy 'cellular', or 'serial' for one request at a time."
        )
