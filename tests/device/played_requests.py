"""Random requests on a device core, on a device that does things late and in any order, beside plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from emulated import emulated
from torch import Tensor

from batchmaker.device.core import DeviceCore
from batchmaker.device.memory import Sizes
from batchmaker.device.plan import PlannedType, RequestPlan, Stops, plan_of
from batchmaker.device.proof import TriedCell, bytes_of, computed_plainly, num_steps, random_graph, results_of
from batchmaker.graph.cell_graph import ZERO, CellGraph, Fetch, HostInput, Run
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from insides import bytes_of_request

TINY = Sizes(arena_bytes=1 << 15, answer_bytes=1 << 13, mail_bytes=1 << 14, num_slots=8, ring=64)
GARBAGE = 0x7F
WORD, H, ODD, FLAG, SHORT = (
    ValueSpec((), "int64", 7), ValueSpec((4,), "float32"), ValueSpec((3,), "bfloat16"), ValueSpec((), "bool"),
    ValueSpec((), "int32"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Module:
    """A function of rows as a bound cell."""

    inputs: tuple[ValueSpec, ...]
    function: Callable[..., tuple[Tensor, ...]]

    def call(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for spec, rows in zip(self.inputs, inputs, strict=True):
            if spec.num_tokens is not None and len(rows):
                assert 0 <= int(rows.min()) <= int(rows.max()) < spec.num_tokens, "on a GPU this would end the process"
        return self.function(*inputs)

    def example(self, num_rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros((num_rows, *spec.shape), dtype=getattr(torch, spec.dtype)) for spec in self.inputs)


def tried(number: int, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec], num_sequences: int | None,
          function: Callable[..., tuple[Tensor, ...]], sizes: tuple[int, ...]) -> TriedCell:  # fmt: skip
    cell = CellType(TypeId(number), f"cell {number}", tuple(inputs), tuple(outputs), sizes)
    return TriedCell(cell, Module(tuple(inputs), function), num_sequences)


def cells(seed: int, sizes: tuple[int, ...] = (1, 3, 5)) -> list[TriedCell]:
    """A chain over words, one over rows, a node of two rows, a leaf with two outputs, one of odd sizes, a decoder."""
    made = torch.Generator().manual_seed(seed)
    table, w, v = (torch.randn(shape, generator=made) for shape in ((7, 4), (4, 4), (4, 3)))

    def chain(word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        c = torch.tanh(c * 0.5 + table[word])
        return torch.tanh(h @ w + c), c

    def odd(word: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (x * 0.5 + v[0]).to(torch.bfloat16), word % 2 == 0, (word + 1) % 7

    def decoder(word: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        following = (word * 3 + h.argmax(1)) % 7
        return following.to(torch.int32) - 1, following, torch.tanh(h @ w + table[word])

    return [
        tried(0, (WORD, H, H), (H, H), 1, chain, sizes),
        tried(1, (H, H), (H,), 1, lambda x, h: (torch.tanh(x @ w - h),), sizes),
        tried(2, (H, H), (H,), None, lambda a, b: (torch.tanh(a - b @ w),), sizes),
        tried(3, (WORD,), (H, ODD), None, lambda word: (table[word], (table[word] @ v).to(torch.bfloat16)), sizes),
        tried(4, (WORD, ODD), (ODD, FLAG, WORD), None, odd, sizes),
        tried(5, (WORD, H), (SHORT, WORD, H), 0, decoder, sizes),
    ]


def play(
    seed: int,
    num_requests: int,
    *,
    sizes: Sizes = TINY,
    share_cancelled: float | None = None,
    mutate: Callable[[str], str] = str,
    kinds: Sequence[TriedCell] | None = None,
    graphs: Sequence[tuple[CellGraph, Stops]] | None = None,
    core: DeviceCore | None = None,
) -> DeviceCore:
    """Let a core compute random requests; AssertionError for whatever is wrong. Returns the core."""
    if share_cancelled is None:
        share_cancelled = 0.02 * (seed % 2)
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    kinds = cells(seed) if kinds is None else kinds
    if core is None:
        core = DeviceCore(emulated(seed=seed, mutate=mutate), sizes)
    device = core.device
    planned = {one.cell.type_id: core.learn(one.cell, lambda *rows, one=one: one.bound.call(rows)) for one in kinds}
    by_id = {one.cell.type_id: one for one in kinds}
    if graphs is None:
        graphs = [random_graph(kinds, rng, int(rng.integers(1, 8))) for _ in range(num_requests)]
    plans = [plan_of(graph, planned, stops) for graph, stops in graphs]
    wanted = [computed_plainly(graph, by_id, device, stops) for graph, stops in graphs]
    device.stop()
    core.memory.arena.view(torch.uint8).fill_(GARBAGE)
    core.memory.answers[:] = GARBAGE
    waiting, slots = list(range(len(graphs))), dict[int, int]()
    cancelled, ended, idle = set[int](), list[int](), 0
    most = core.num_submitted + 100 * (len(graphs) + 10)
    while waiting or slots:
        for slot in core.poll().ended:
            number = slots.pop(slot)
            ended.append(number)
            if number not in cancelled:
                check(core.answer(slot), plans[number], graphs[number][0], *wanted[number])
            spoil(core, slot)
            core.release(slot)
        for slot, number in list(slots.items()):
            if number not in cancelled and chance.random() < share_cancelled and core.cancel(slot):
                cancelled.add(number)
        while waiting and chance.random() < 0.8:
            assert not core.too_large(plans[waiting[0]])
            slot = core.add(plans[waiting[0]], bytes_of(graphs[waiting[0]][0]))
            if slot is None:
                break
            slots[slot] = waiting.pop(0)
        core.submit()
        assert core.num_submitted < most, "a request does not end"
        before = core.num_finished
        device.advance()
        idle = 0 if core.num_finished > before or device.num_waiting else idle + 1
        assert idle < 1000, "nothing happens any more"
    device.stop()
    assert sorted(ended) == list(range(len(graphs))), "each request ends once"
    assert core.left_behind() == ""
    return core


def spoil(core: DeviceCore, slot: int) -> None:
    """Fill the memory of an ended request with what is no token."""
    core.memory.arena.view(torch.uint8)[bytes_of_request(core, slot)] = GARBAGE
    core.answer(slot)[:] = GARBAGE


def check(
    memory: np.ndarray,
    plan: RequestPlan,
    graph: CellGraph,
    wanted: dict[tuple[int, int], Tensor],
    lengths: dict[int, int],
) -> None:
    for node, output, at in results_of(graph, plan, lengths):
        want = wanted[node, output][0]
        assert at >= 0
        got = torch.from_numpy(memory[at : at + want.nbytes].copy()).view(want.dtype).view(want.shape)
        torch.testing.assert_close(got, want)
    for first, length in lengths.items():
        assert num_steps(memory, plan, first) == length


def planned_types(kinds: Sequence[TriedCell]) -> dict[TypeId, PlannedType]:
    return {one.cell.type_id: PlannedType.of(number, one.cell) for number, one in enumerate(kinds)}


def chain(kind: TriedCell, length: int) -> CellGraph:
    words = np.arange(length) % 7
    host = HostInput(kind.cell.type_id, 0, 0, length, torch.from_numpy(words))
    run = Run(kind.cell.type_id, 0, length, (None,), ((ZERO, 0), (ZERO, 0)))
    return CellGraph(0, length, [], [run], [host], [Fetch(np.array([length - 1]), 0)])


def crowded(seed: int, mutate: Callable[[str], str] = str) -> None:
    """Let so many short chains in that the rings are full."""
    kinds = cells(seed)
    graphs = [(chain(kinds[0], 1 + number % 6), {}) for number in range(30)]
    play(seed, 0, graphs=graphs, kinds=kinds, mutate=mutate, sizes=Sizes(1 << 16, 1 << 13, 1 << 14, 40, 10))
