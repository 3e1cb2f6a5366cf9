"""A device core is tried before it is used: random requests of its cells are computed by it and by plain torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.export import torch_dtype
from batchmaker.device.core import DeviceCore
from batchmaker.device.layout import NONE
from batchmaker.device.plan import NO_STOPS, PlannedType, RequestPlan, Stops, plan_of
from batchmaker.errors import DeviceError
from batchmaker.executor.cuda.device import Device
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, Fetch, HostInput, NodeBlock, Run
from batchmaker.graph.spec import CellType, TypeId, ValueSpec

NUM_REQUESTS: Final = 24
LONGEST: Final = 12
"""Steps of a run: more than one task has."""
_PATIENCE_S: Final = 30.0
_TOLERANCES: Final = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2}
_COARSEST: Final = 1e-1
_TF32: Final = 2e-2
"""The largest differences of values of about 1. Batches of other sizes may round otherwise; a wrong row is far off."""


class Computes(Protocol):
    """A bound cell, see `batchmaker.compile.binding.BoundCell`."""

    def call(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one step."""

    def example(self, num_rows: int) -> tuple[Tensor, ...]:
        """Return real rows of the inputs."""


@final
@dataclass(frozen=True, slots=True)
class TriedCell:
    """A type with its cell. num_sequences: inputs of each step of its runs; None if it has no runs."""

    cell: CellType
    bound: Computes
    num_sequences: int | None


def random_graph(
    tried: Sequence[TriedCell], rng: np.random.Generator, num_parts: int
) -> tuple[CellGraph, dict[int, tuple[int, int]]]:
    """Return a graph of single nodes, maps and runs that read each other's values, or data, or zeros; and its stops.

    Some runs may end where an output is one of its first whole numbers.
    """
    stops: dict[int, tuple[int, int]] = {}
    blocks: list[NodeBlock] = []
    runs: list[Run] = []
    hosts: list[HostInput] = []
    outputs: list[tuple[Ints, int, ValueSpec]] = []  # nodes of one part that others may read, output
    whole: list[tuple[Ints, int]] = []
    num_nodes = 0

    def add_host_input(kind: TriedCell, port: int, nodes: Ints) -> None:
        hosts.append(HostInput(kind.cell.type_id, port, int(nodes[0]), len(nodes), _data(kind, port, len(nodes), rng)))

    def picked(spec: ValueSpec) -> tuple[Ints, int] | None:
        fits = [(nodes, output) for nodes, output, of in outputs if of.row_signature == spec.row_signature]
        return fits[int(rng.integers(len(fits)))] if fits and rng.random() < 0.75 else None

    for _ in range(num_parts):
        kind = tried[int(rng.integers(len(tried)))]
        cell, first = kind.cell, num_nodes
        if kind.num_sequences is not None and rng.random() < 0.6:
            length = int(rng.integers(1, LONGEST))
            nodes = np.arange(first, first + length)
            sequences: list[tuple[Ints, int] | None] = []
            for port in range(kind.num_sequences):
                source = picked(cell.inputs[port])
                if source is None:
                    add_host_input(kind, port, nodes)
                    sequences.append(None)
                else:
                    sequences.append((_sequence(source[0], length, rng), source[1]))
            init = []
            for port in cell.state_inputs(kind.num_sequences):
                source = picked(cell.inputs[port])
                if source is not None:
                    init.append((int(rng.choice(source[0])), source[1]))
                elif rng.random() < 0.5:
                    init.append((ZERO, 0))
                else:
                    add_host_input(kind, port, nodes[:1])
                    init.append((HOST, 0))
            ends = [output for output, spec in enumerate(cell.outputs) if can_end(spec)]
            if ends and rng.random() < 0.6:
                stops[first] = (int(rng.choice(ends)), int(rng.integers(4)))
            open_ended = first in stops
            runs.append(Run(cell.type_id, first, length, tuple(sequences), tuple(init), open_ended))
            if open_ended:  # others read its end alone
                outputs += [(nodes[-1:], output, spec) for output, spec in enumerate(cell.outputs)]
                whole += [(nodes, output) for output in range(len(cell.outputs))]
                num_nodes += length
                continue
        else:
            count = int(rng.integers(1, 4))
            nodes = np.arange(first, first + count)
            sources = np.full((len(cell.inputs), count), HOST, np.int64)
            of = np.zeros((len(cell.inputs), count), np.int16)
            for port, spec in enumerate(cell.inputs):
                source = picked(spec)
                if source is None:
                    add_host_input(kind, port, nodes)
                else:
                    sources[port], of[port] = rng.choice(source[0], count), source[1]
            blocks.append(NodeBlock(first, np.full(count, cell.type_id, np.int16), sources, of))
        num_nodes += len(nodes)
        outputs += [(nodes, output, spec) for output, spec in enumerate(cell.outputs)]
        whole += [(nodes, output) for output in range(len(cell.outputs))]
    fetches = [Fetch(_fetched(nodes, rng), output) for nodes, output in whole if rng.random() < 0.7]
    return CellGraph(0, num_nodes, blocks, runs, hosts, fetches or [Fetch(*whole[-1])]), stops


def can_end(spec: ValueSpec) -> bool:
    """Whether a device can end a loop at a value of this output."""
    return spec.shape == () and spec.dtype in ("int32", "int64")


def _sequence(nodes: Ints, length: int, rng: np.random.Generator) -> Ints:
    """Return nodes as a sequence: in order, in reverse, or in any order."""
    if len(nodes) >= length and rng.random() < 0.6:
        return nodes[:length] if rng.random() < 0.5 else nodes[:length][::-1].copy()
    return rng.choice(nodes, length)


def _fetched(nodes: Ints, rng: np.random.Generator) -> Ints:
    return nodes if rng.random() < 0.5 else nodes[-1:]


def _data(kind: TriedCell, port: int, count: int, rng: np.random.Generator) -> Any:
    """Return random values for an input, [count, *shape]: tokens, or the real row with noise."""
    spec = kind.cell.inputs[port]
    real = kind.bound.example(1)[port].cpu()
    rows = real.expand(count, *real.shape[1:]).clone()
    if spec.num_tokens is not None:
        return torch.from_numpy(rng.integers(0, spec.num_tokens, tuple(rows.shape))).to(rows.dtype)
    if rows.dtype.is_floating_point:
        rows += torch.from_numpy(rng.standard_normal(tuple(rows.shape))).to(rows.dtype)
    return rows


def computed_plainly(
    graph: CellGraph, tried: Mapping[TypeId, TriedCell], device: Device, stops: Stops = NO_STOPS
) -> tuple[dict[tuple[int, int], Tensor], dict[int, int]]:
    """Return every output of every node, computed one node after the other, and how many steps each loop has.

    The end of a loop has the number of its last possible node.
    """
    lengths: dict[int, int] = {}

    def work() -> tuple[Tensor, ...]:
        for part in graph.parts:
            for node, type_id in _types_of(part):
                kind, place = tried[type_id], node - part.first
                rows = [_row(part, place, port, kind) for port in range(len(kind.cell.inputs))]
                made = kind.bound.call(tuple(rows))
                values.update({(node, output): value for output, value in enumerate(made)})
                stop = stops.get(part.first)
                if isinstance(part, Run) and stop is not None:
                    lengths[part.first] = place + 1
                    if int(made[stop[0]]) == stop[1]:
                        values.update({(part.last, output): value for output, value in enumerate(made)})
                        break
        return tuple(value.cpu() for value in values.values())

    def _row(part: NodeBlock | Run, place: int, port: int, kind: TriedCell) -> Tensor:
        node = part.first + place
        if isinstance(part, NodeBlock):
            source, output = int(part.sources[port, place]), int(part.outputs[port, place])
        elif port < len(part.sequences):
            sequence = part.sequences[port]
            source, output = (HOST, 0) if sequence is None else (int(sequence[0][place]), sequence[1])
        elif place:
            source, output = node - 1, len(kind.cell.outputs) - len(kind.cell.inputs) + port
        else:
            source, output = part.init[port - len(part.sequences)]
        if source >= 0:
            return values[source, output]
        if source == ZERO:
            spec = kind.cell.inputs[port]
            return torch.zeros((1, *spec.shape), dtype=torch_dtype(spec.dtype), device=device.torch_device)
        row: Tensor = data[kind.cell.type_id, port, node].to(device.torch_device)
        return row

    values: dict[tuple[int, int], Tensor] = {}
    data = {
        (host.type_id, host.port, host.first + i): host.values[i : i + 1]
        for host in graph.host_inputs
        for i in range(host.count)
    }
    outputs = device.compute_waiting(work)
    return dict(zip(values, outputs, strict=True)), lengths


def results_of(graph: CellGraph, plan: RequestPlan, lengths: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield each value that a request fetches: the node, the output, and the byte of the results."""
    ends = {run.first: run.first + lengths[run.first] for run in graph.runs if run.open_ended}
    first_of = {node: run.first for run in graph.runs if run.open_ended for node in range(run.first, run.last + 1)}
    for fetch in graph.fetches:
        for node in fetch.nodes.tolist():
            first = first_of.get(node, node)
            is_step = plan.answers[first, fetch.output] != NONE
            if first not in ends or not is_step or node < ends[first]:
                yield node, fetch.output, int(plan.answers[node, fetch.output])


def bytes_of(graph: CellGraph) -> list[NDArray[np.uint8]]:
    """Return the data of a graph whose values are tensors."""
    return [host.values.contiguous().view(-1).view(torch.uint8).numpy() for host in graph.host_inputs]


def prove(
    core: DeviceCore,
    planned: Mapping[TypeId, PlannedType],
    tried: Sequence[TriedCell],
    *,
    tf32: bool = False,
    seed: int = 0,
    num_requests: int = NUM_REQUESTS,
) -> str:
    """Return the first difference between the core and plain torch on random requests of these types; "" without one.

    Nothing else is in flight on the core. Every seventh request is cancelled.
    """
    rng = np.random.default_rng(seed)
    kinds = {one.cell.type_id: one for one in tried}
    graphs = [random_graph(tried, rng, int(rng.integers(1, 7))) for _ in range(num_requests)]
    plans = [plan_of(graph, planned, stops) for graph, stops in graphs]
    wanted = [computed_plainly(graph, kinds, core.device, stops) for graph, stops in graphs]
    slots: dict[int, int] = {}
    cancelled: set[int] = set()
    said, num_given, until_s = "", 0, time.monotonic() + _PATIENCE_S
    while num_given < num_requests or slots:
        for slot in core.poll().ended:
            number = slots.pop(slot)
            if number not in cancelled:
                graph, plan = graphs[number][0], plans[number]
                said = said or _differs(core.answer(slot), plan, graph, kinds, *wanted[number], tf32=tf32)
            core.release(slot)
        for slot, number in slots.items():
            if number % 7 == 6 and number not in cancelled and core.cancel(slot):
                cancelled.add(number)
        while num_given < num_requests:
            entered = core.add(plans[num_given], bytes_of(graphs[num_given][0]))
            if entered is None:
                break
            slots[entered] = num_given
            num_given += 1
        core.submit()
        if time.monotonic() > until_s:
            raise DeviceError(f"the device core did not answer {num_requests} small requests in {_PATIENCE_S:.0f} s")
        time.sleep(0)
    rest = core.left_behind()
    return said or (f"the device core has left behind {rest}" if rest else "")


def _differs(
    memory: NDArray[np.uint8],
    plan: RequestPlan,
    graph: CellGraph,
    kinds: Mapping[TypeId, TriedCell],
    wanted: Mapping[tuple[int, int], Tensor],
    lengths: Mapping[int, int],
    *,
    tf32: bool,
) -> str:
    """Return what differs first in the results of a request; "" if nothing does."""
    cells = {node: kind for part in graph.parts for node, kind in _types_of(part)}
    for node, output, at in results_of(graph, plan, lengths):
        want = wanted[node, output][0]
        got = torch.from_numpy(memory[at : at + want.nbytes].copy()).view(want.dtype).view(want.shape)
        if not _alike(got, want, tf32):
            return f"output {output} of cell {kinds[cells[node]].cell.name!r} differs from plain torch"
    for first, length in lengths.items():
        if num_steps(memory, plan, first) != length:
            return f"the number of steps of a loop of cell {kinds[cells[first]].cell.name!r} differs"
    return ""


def num_steps(memory: NDArray[np.uint8], plan: RequestPlan, first: int) -> int:
    """Return how many steps a loop had that ends at a value. memory: the results. first: its first node."""
    at = int(plan.lengths[first])
    return int(memory[at : at + 8].view(np.int64)[0])


def _types_of(part: NodeBlock | Run) -> list[tuple[int, TypeId]]:
    types = part.types.tolist() if isinstance(part, NodeBlock) else [part.type_id] * part.length
    return [(part.first + i, TypeId(kind)) for i, kind in enumerate(types)]


def _alike(got: Tensor, want: Tensor, tf32: bool) -> bool:
    if not want.is_floating_point():
        return bool(torch.equal(got, want))
    tolerance = max(_TOLERANCES.get(want.dtype, _COARSEST), _TF32 if tf32 else 0.0)
    scale = max(1.0, float(want.abs().nan_to_num(posinf=0).max())) if want.numel() else 1.0
    return bool(torch.allclose(got.float(), want.float(), rtol=0, atol=tolerance * scale, equal_nan=True))
