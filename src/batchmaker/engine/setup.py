"""Preparation of an engine before its first request: the policy and its costs, the driver, and compiled loops."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol, TypeGuard, final, runtime_checkable

import torch

from batchmaker import policies
from batchmaker.clock import Clock
from batchmaker.compile.binding import BoundCell
from batchmaker.compile.passes import interpreter
from batchmaker.compiled import config, kept_in, place
from batchmaker.compiling import compiled_ahead
from batchmaker.core.batching import TASK_S
from batchmaker.core.commands import Reserve
from batchmaker.core.scheduler import Scheduler
from batchmaker.core.warm_up import prepare
from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import CostProfile, PredictedLength, ProfileOptions
from batchmaker.engine.catalogue import Catalogue, CatalogueEntry
from batchmaker.engine.cell_driver import CellDriver
from batchmaker.engine.driver import Driver
from batchmaker.engine.lone_runs import LoneRuns
from batchmaker.engine.open_sequences import SequenceLimit, Sequences
from batchmaker.errors import RAISED_BY_USERS, ModelError, OptionError, lacks_memory, said_by
from batchmaker.executor import step_rows
from batchmaker.executor.base import Executor
from batchmaker.executor.inline import InlineExecutor
from batchmaker.executor.processors import found_processors
from batchmaker.graph.spec import CellType
from batchmaker.model.model import Model
from batchmaker.model.registry import CellRegistry
from batchmaker.model.template_cache import ProvenTemplates
from batchmaker.policies.base import CellPolicy, GraphPolicy

_LOG: Final = logging.getLogger("batchmaker.engine")

_WORTH_TELLING_S: Final = 2.0
"""Seconds of compiling after which a message is logged."""

CALLS_EACH: Final = 5
"""Number of calls that are timed for one batch size."""

STEPS_PER_TASK: Final = 5
"""Number of steps that share one call of the hoisted part, as in a full task."""

DEFAULT: Final = "auto"
"""The default policy (decision 21)."""

ON_DEVICES: Final = "cellular"
"""The default policy if the CPU does not compute, unless requests are to be refused. There requests wait for the host,
and it costs the host least; with deadlines it makes fewest late as well (docs/gpu.md)."""

WHOLE_REQUESTS: Final = "batchmaker.lab.baselines.driver"
"""The module of the driver for policies that batch whole requests. It is loaded only for such a policy."""


_ALWAYS: Final = (
    "batchmaker.core.warm_up",
    "batchmaker.compile.passes.interpreter",
    "batchmaker.executor.step_rows",
)
"""Modules whose `prepare` calls the loops that every engine needs."""

_STEPS: Final = "batchmaker.kernels.cpu.first_calls"

_RECURRENT: Final = (torch.nn.RNNBase, torch.nn.RNNCellBase)
_RECURRENT_CALLS: Final = ("aten.lstm", "aten.gru", "aten.rnn")


def prepare_scheduler(policy: CellPolicy, models: Iterable[Model] = (), *, on_cpu: bool = True) -> None:
    """Compile or load the loops of the scheduler, of its policy, and those for cells and rows.

    Logs this at INFO if it takes 2 s, and once a warning if nothing that is compiled can be kept. models: what is
    computed. If they have recurrent layers of torch, on the CPU, the loops for recurrent steps are compiled ahead, too;
    else when a cell is bound that can use them.
    """
    _say_where_nothing_is_kept()
    message = "compiling loops: some seconds, once per installation for each kind of model"
    notice = threading.Timer(_WORTH_TELLING_S, logging.getLogger(__name__).info, [message])
    notice.daemon = True
    notice.start()
    needs = [f"{module}:prepare" for module in _ALWAYS]
    own = type(policy).prepare
    if own.__module__.startswith("batchmaker.") and own.__qualname__ != CellPolicy.prepare.__qualname__:
        needs.append(f"{own.__module__}:{own.__qualname__}")
    if on_cpu:
        needs += [f"{_STEPS}:{dtype}" for dtype in sorted(_recurrent_dtypes(models))]
    try:
        with compiled_ahead(needs, found_processors().usable):
            prepare()
            interpreter.prepare()
            step_rows.prepare()
            policy.prepare()
    finally:
        notice.cancel()


@cache
def _say_where_nothing_is_kept() -> None:
    if kept_in() is None and not config.DISABLE_JIT:
        _LOG.warning(
            "compiled loops cannot be kept, so every process compiles them anew, most of a minute long: %s cannot be "
            "written; set NUMBA_CACHE_DIR to a folder that can be",
            place(),
        )


def _recurrent_dtypes(models: Iterable[Model]) -> set[str]:
    """Return the dtypes of the models' recurrent layers for which there are loops."""
    modules = [one for model in models for cell in model.cells.values() for one in cell.module.modules()]
    weights = [next(module.parameters(), None) for module in modules if _is_recurrent(module)]
    names = {str(weight.dtype).removeprefix("torch.") for weight in weights if weight is not None}
    return names & {"float32", "bfloat16"}


def _is_recurrent(module: torch.nn.Module) -> bool:
    """Whether this is a recurrent layer of torch, or the graph of an exported module that has one."""
    if isinstance(module, torch.fx.GraphModule):
        return any(str(node.target).startswith(_RECURRENT_CALLS) for node in module.graph.nodes)
    return isinstance(module, _RECURRENT)


@runtime_checkable
class UsesCosts(Protocol):
    """A policy that can use predicted costs. wants_costs: whether it needs them."""

    wants_costs: ClassVar[bool]

    def use_profile(self, profile: CostProfile) -> None:
        """Take step times and length profiles from a profile."""


def wants_costs(policy: object) -> TypeGuard[UsesCosts]:
    """Whether a policy needs a cost profile."""
    return isinstance(policy, UsesCosts) and policy.wants_costs


def cost_profile(catalogue: Catalogue, registry: CellRegistry, threads: int | None) -> CostProfile | None:
    """Return the known costs of all models' cells, under the names of their types; None if nothing is known.

    Profiles that are stored beside the models come first. threads: number of compute threads with which the other bound
    cells are measured now; None: do not measure.
    """
    stored = [
        _under_its_names(served, served.model.profile) for served in catalogue if served.model.profile is not None
    ]
    cells = {cell.name: cell for profile in stored for cell in profile.latency.cells}
    lengths = {length.cell: length for profile in stored for length in profile.lengths}
    if threads is not None:
        for cell in _measured(registry, threads, names=set(cells)):
            cells[cell.name] = cell
    if not cells:
        return None
    name = "+".join(served.name for served in catalogue)
    options = stored[0].options if stored else _options(registry, threads or 1)
    return CostProfile(name, options, LatencyTable(tuple(cells.values())), tuple(lengths.values()))


def _under_its_names(served: CatalogueEntry, profile: CostProfile) -> CostProfile:
    """Return a stored profile with the names that the cells have in this engine."""
    if not served.prefix:
        return profile

    def named(name: str) -> str:
        return served.prefix + name

    lengths = tuple(
        PredictedLength(named(length.cell), None if length.given is None else named(length.given), length.profile)
        for length in profile.lengths
    )
    latency = LatencyTable(tuple(replace(cell, name=named(cell.name)) for cell in profile.latency.cells))
    return replace(profile, latency=latency, lengths=lengths)


def _options(registry: CellRegistry, threads: int) -> ProfileOptions:
    return ProfileOptions(dtype_of_cells(registry), threads, platform.machine(), "measured at start")


def dtype_of_cells(registry: CellRegistry) -> str:
    """Return the first floating dtype among the cells' outputs, float32 if there is none."""
    dtypes = [spec.dtype for cell in registry.types for spec in cell.outputs if "float" in spec.dtype]
    return dtypes[0] if dtypes else "float32"


def _measured(registry: CellRegistry, threads: int, names: set[str]) -> list[CellLatency]:
    """Measure the bound cells whose names are not in `names`. If several cells have one name, return the slowest."""
    latencies: dict[str, CellLatency] = {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            for cell, bound in zip(registry.types, registry.bound, strict=False):
                if cell.name in names:
                    continue
                seen = _cell_latency(cell, bound, registry.num_step_inputs.get(cell.type_id))
                if cell.name not in latencies or latencies[cell.name].median_s[-1] < seen.median_s[-1]:
                    latencies[cell.name] = seen
    finally:
        torch.set_num_threads(before)
    return list(latencies.values())


def _cell_latency(cell: CellType, bound: BoundCell, num_step_inputs: int | None) -> CellLatency:
    sizes = _few(cell.batch_sizes)
    times = [_step_s(bound, size, num_step_inputs) for size in sizes]
    return CellLatency(cell.name, sizes, tuple(middle for middle, _ in times), tuple(most for _, most in times))


def _few(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first and the last size, and about one for each doubling in between."""
    chosen = [sizes[0]]
    for size, following in pairwise((*sizes[1:], math.inf)):
        if following > 2 * chosen[-1]:
            chosen.append(int(size))
    return tuple(chosen)


def _step_s(bound: BoundCell, size: int, num_step_inputs: int | None) -> tuple[float, float]:
    """Return the median and the longest time of a step of `size` rows, in seconds."""
    if num_step_inputs is None:
        inputs = bound.example(size)
        return _times(lambda: bound.call(inputs))
    split = bound.split(num_step_inputs)
    state = bound.example(size)[num_step_inputs:]
    step_inputs = bound.example(size * STEPS_PER_TASK)[:num_step_inputs]
    hoisted = split.hoist(tuple(value[:size] for value in step_inputs))
    step = _times(lambda: split.step(hoisted, state))
    if not num_step_inputs:
        return step
    shared = _times(lambda: split.hoist(step_inputs))
    return step[0] + shared[0] / STEPS_PER_TASK, step[1] + shared[1] / STEPS_PER_TASK


def _times(call: Callable[[], Any]) -> tuple[float, float]:
    call()
    times = []
    for _ in range(CALLS_EACH):
        begin = time.perf_counter()
        call()
        times.append(max(time.perf_counter() - begin, 1e-9))
    times.sort()
    return times[len(times) // 2], times[-1]


def choose_policy(
    policy: str | CellPolicy | GraphPolicy | None, *, refuse: bool, on_cpu: bool = True
) -> CellPolicy | GraphPolicy:
    """Return the policy of an engine. policy, refuse: see Engine.

    OptionError if the policy cannot refuse requests and `refuse` is set, or its name or options are wrong.
    """
    if policy is None:
        policy = DEFAULT if on_cpu or refuse else ON_DEVICES
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
            f"policy {made.name!r} has no option to refuse what cannot be met any more; use policy='auto' or 'lazy'"
        )
    return policies.make(policy, hopeless="drop")


@final
class Drivers:
    """Makes the driver of an engine, and another one in place of each that has failed.

    policy: of the first driver. make, options: `make_driver` and its other options. Policies keep what they have learnt
    of requests, which may be wrong after a failure. So each further driver has a copy of the policy as it was given.
    """

    def __init__(self, policy: CellPolicy | GraphPolicy, make: Callable[..., Driver], **options: Any) -> None:
        self.policy = policy
        self._unused = _copied(policy)
        self._make = partial(make, **options)
        self._profile: CostProfile | None = None

    def first(self) -> Driver:
        """Return the first driver. Raises as `make_driver`."""
        return self._make(policy=self.policy)

    def another(self, before: Driver) -> Driver:
        """Return the driver that goes on in place of one that has failed."""
        self.policy = _copied(self._unused)
        if self._profile is not None:
            self.use_profile(self._profile)
        driver = self._make(policy=self.policy, before=before, proven=ProvenTemplates())
        driver.stats.restarts += 1
        return driver

    def use_profile(self, profile: CostProfile) -> None:
        """Give the policy predicted costs, this one and all that follow. Called in the engine's thread."""
        self._profile = profile
        if wants_costs(self.policy):
            self.policy.use_profile(profile)


def separated(policy: CellPolicy | GraphPolicy, count: int) -> list[CellPolicy | GraphPolicy]:
    """Return so many equal policies, the given one first. OptionError if it cannot be copied."""
    policies = [policy]
    while len(policies) < count:
        copied = _copied(policy)
        if copied is policy:
            raise OptionError(
                f"each worker has a policy of its own, and copy.deepcopy cannot copy the {type(policy).__name__}; use "
                "workers=1"
            )
        policies.append(copied)
    return policies


def _copied(policy: CellPolicy | GraphPolicy) -> CellPolicy | GraphPolicy:
    """Return a copy of a policy; the policy itself if it cannot be copied."""
    try:
        return copy.deepcopy(policy)
    except RAISED_BY_USERS:  # a policy of the user
        return policy


def make_driver(
    catalogue: Catalogue,
    registry: CellRegistry,
    policy: CellPolicy | GraphPolicy,
    *,
    clock: Clock,
    workers: int,
    threads: int,
    run_ahead: int | None,
    max_nodes: int,
    device: str,
    tf32: bool,
    executor: Executor | None,
    give_up_late: bool,
    limit: SequenceLimit,
    aged_every: int | None,
    proven: ProvenTemplates,
    before: Driver | None = None,
) -> Driver:
    """Return the driver that carries out the policy. For the options see Engine.

    workers: of a driver of whole requests. limit, proven: those of all workers of the engine; see TemplateCache.

    before: the driver that has failed, in whose place this one goes on: it counts on, and keeps devices and bound
    cells. Its sequences have ended, and nothing of its requests is known.

    Raises OptionError for options that exclude each other, DeviceError if a GPU cannot be used, ModelError if the
    policy batches whole requests and a model cannot do this.
    """
    if device != "cpu" and executor is not None:
        raise OptionError(f"give device={device!r} or an executor, not both")
    if tf32 and device == "cpu":
        raise OptionError("tf32=True is for GPUs, and the device is 'cpu'")
    if isinstance(policy, GraphPolicy):
        if device != "cpu":
            raise OptionError(f"policy {policy.name!r} batches whole requests, which run on the CPU; got {device!r}")
        if aged_every is None:
            raise OptionError(
                f"priorities='strict' is for policies that choose among cells; {policy.name!r} batches whole requests"
            )
        for served in catalogue:
            _check_whole_requests(served.model, policy)
        baselines = importlib.import_module(WHOLE_REQUESTS)
        whole: Driver = baselines.GraphDriver(
            policy, clock, num_workers=workers, num_threads=threads, give_up_late=give_up_late
        )
        if before is not None:
            whole.stats, whole.observer = before.stats, before.observer
        return whole
    if isinstance(before, CellDriver):
        executor = before.executor.anew()
    elif device != "cpu":
        _check_memories(catalogue, device)
        from batchmaker.executor.cuda.executor import CudaExecutor  # many modules, needed on GPUs only
        from batchmaker.executor.cuda.open import open_devices

        executor = CudaExecutor(registry.types, registry.bind_on, open_devices(device, tf32=tf32))
    elif executor is None:
        executor = InlineExecutor(registry.types, registry.bound, num_threads=threads)
    inline = executor if isinstance(executor, InlineExecutor) else None
    if run_ahead is None:
        run_ahead = 0 if inline else 1
    scheduler = Scheduler(
        policy,
        num_workers=executor.num_workers,
        run_ahead=run_ahead,
        take_turns=inline is not None,
        loops_ahead=inline is not None,
        task_s=TASK_S,
        give_up_late=give_up_late,
        grow=partial(_grown, executor),
        aged_every=aged_every,
        max_nodes=max_nodes,
    )
    cells = [served.cells for served in catalogue]
    if isinstance(before, CellDriver):
        sequences = before.sequences
        sequences.begin_anew("the engine has failed and begun anew")
    else:
        sequences = Sequences(clock, limit, give_up_late=give_up_late)
    lone_runs = None
    if inline is not None and policy.leaves_lone:
        apart = inline.beside()
        lone_runs = LoneRuns(apart, registry.types, scheduler.expected_s, max_nodes, partial(_grown, apart))
    driver = CellDriver(registry, cells, scheduler, executor, clock, max_nodes, sequences, proven, lone_runs)
    if isinstance(before, CellDriver):
        driver.count_on(before)
    if inline is not None:
        inline.apply_stop_tests(driver.stop_tests)
    else:
        from batchmaker.engine.device_driver import on_devices  # as above

        driver.on_device = on_devices(
            executor, policy, registry=registry, clock=clock, stats=driver.stats, give_up_late=give_up_late, tf32=tf32
        )
    return driver


def only_steps(policy: CellPolicy | GraphPolicy, *, deterministic: bool, computes_here: bool) -> str:
    """Return why runs never take the whole form of their cell; "" if they may."""
    if deterministic:
        return "deterministic=True, and the room of a batch, which depends on who shares it, changes bits"
    if isinstance(policy, CellPolicy) and policy.knows_steps_only:
        return f"policy {policy.name!r} knows cells step by step"
    return "" if computes_here else "memories are read by the CPU's executor only"


def _grown(executor: Executor, command: Reserve) -> bool:
    """Let tables grow now, if there is memory for it. Otherwise they are as before, or some of them are larger."""
    try:
        executor.reserve(command)
    except RAISED_BY_USERS as error:
        if not lacks_memory(error):
            raise
        _LOG.warning("tables cannot grow to %d rows: %s", command.num_rows, said_by(error))
        return False
    return True


def _check_memories(catalogue: Catalogue, device: str) -> None:
    """Raise OptionError if a cell of a model reads a memory, which only the CPU's executor gathers."""
    for served in catalogue:
        for name, cell in served.model.cells.items():
            if cell.memories:
                raise OptionError(f"cell {name!r} reads a memory, which runs on the CPU only; got device={device!r}")


def _check_whole_requests(model: Model, policy: GraphPolicy) -> None:
    """Raise ModelError unless whole requests of the model can be computed as the policy wants."""
    if type(model).batched is Model.batched:
        model.batched([])  # raises ModelError, with advice
    if policy.max_batch > 1 and not model.can_pad:
        raise ModelError(
            f"{type(model).__name__} cannot be padded: whole requests of it have no common form to be computed "
            "together in. Use policy 'cellular', or 'serial' for one request at a time."
        )
