"""The host's side of a device that schedules itself. Graphs go in as plans, the numbers of ended requests come out.

The device decides which nodes run together, what is ready next and who has ended. The host copies newcomers to it,
chooses a type, a size and a number of steps from the counts after an earlier task, and launches what was recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.device.choose import MANY_STEPS, Choice, Ready, Task, fullest
from batchmaker.device.extents import Extents, aligned
from batchmaker.device.layout import BoardWord, LetterWord, PageWord, RequestWord, TypeWord, header
from batchmaker.device.memory import MAX_TYPES, NUM_PAGES, CoreMemory, Mail, Sizes
from batchmaker.device.plan import PlannedType, RequestPlan
from batchmaker.errors import DeviceError
from batchmaker.executor.cuda.device import CannotRecordError, Device, Launch, row_copies
from batchmaker.graph.spec import CellType
from batchmaker.kernels.source import joined

Work = Callable[..., tuple[Tensor, ...]]
"""Inputs [n, *shape] -> outputs [n, *shape], on the device."""

KERNELS: Final = ("enter", "begin_step", "gather", "finish", "report")
AHEAD: Final = 2
"""Tasks in flight: one runs, and one waits behind it."""


def source() -> str:
    """Return the kernels in CUDA C++, complete."""
    return header() + row_copies() + joined(("steps.cu",), "batchmaker.device")


@final
@dataclass(slots=True)
class _Type:
    """A type of cells. launches: by size and number of steps. entries: in flight. keeps: what they refer to."""

    planned: PlannedType
    cell: CellType
    launches: dict[tuple[int, int], Launch] = field(default_factory=dict)
    keeps: list[object] = field(default_factory=list)
    again: bool = False
    entries: int = 0


@final
@dataclass(frozen=True, slots=True)
class _InFlight:
    """A request that has its place. where: in the arena. answer: in the results."""

    plan: RequestPlan
    where: int
    answer: int


@final
@dataclass(frozen=True, slots=True)
class Reported:
    """What the device has reported since the last time.

    ended: slots of requests. tasks: that are done. steps: that had nodes. cells: rows of nodes. rows: all, with padding
    and steps that had none.
    """

    ended: tuple[int, ...]
    tasks: int
    steps: int
    cells: int
    rows: int


@final
class DeviceCore:
    """Runs requests on one device. All its calls come from one thread at a time.

    choose: the task that runs next. Raises what `Device` raises, and DeviceError if the device contradicts itself.
    """

    def __init__(self, device: Device, sizes: Sizes | None = None, choose: Choice = fullest) -> None:
        self.device = device
        self._sizes = sizes or Sizes()
        self._choose = choose
        kernels = device.kernels(source(), KERNELS)
        self._enter, self._begin, self._gather, self._finish, self._report = kernels
        self.memory = CoreMemory(device, self._sizes)
        self._types: list[_Type] = []
        self._arena = Extents(self._sizes.arena_bytes)
        self._answers = Extents(self._sizes.answer_bytes)
        self._free = list(reversed(range(self._sizes.num_slots)))
        self._requests: dict[int, _InFlight] = {}
        self._next_mail = 0
        self._mail: Mail | None = None  # that newcomers are written into
        self._top = 0
        self._letters: list[tuple[int, int, int]] = []
        self._unsent: set[int] = set()  # slots of newcomers in it
        self._news: list[int] = []  # of newcomers in it, by type
        self._posted: deque[tuple[int, list[int]]] = deque()  # ready nodes that came before the task of this number
        self._tasks: deque[tuple[int, Task]] = deque()
        self._page: Any = np.zeros(len(PageWord) + 2 * MAX_TYPES, np.int64)
        self.num_submitted = 0

    # --- types -------------------------------------------------------------------------------------------------------

    def learn(self, cell: CellType, work: Work) -> PlannedType:
        """Record the steps of a cell at all its sizes, and return what plans need. Waits for the device.

        Raises CannotRecordError with the reason if this is impossible; nothing of the type can enter then.
        """
        if len(self._types) == MAX_TYPES:
            raise CannotRecordError(f"the device core holds {MAX_TYPES} cell types")
        if 2 * cell.max_batch > self._sizes.ring:
            raise CannotRecordError(
                f"batches of {cell.max_batch} need rings of twice that, and there are {self._sizes.ring}"
            )
        number = self.memory.add_type()
        kind = _Type(PlannedType.of(number, cell), cell)
        self._types.append(kind)
        inputs = tuple(
            self.device.zeros((cell.max_batch, *spec.shape), torch_dtype(spec.dtype)) for spec in cell.inputs
        )
        columns = self.memory.columns(inputs)
        kind.keeps += [inputs, columns]
        self.memory.pause(True)  # a recording runs what it records
        try:
            for size in cell.batch_sizes:
                for steps in (1, MANY_STEPS):
                    kind.launches[size, steps] = self._recorded(kind, work, inputs, columns, size, steps)
        finally:
            self.memory.pause(False)
        return kind.planned

    def _recorded(
        self, kind: _Type, work: Work, inputs: Sequence[Tensor], columns: Tensor, size: int, steps: int
    ) -> Launch:
        device, number, core = self.device, kind.planned.number, self.memory.address
        num_inputs, num_outputs = len(inputs), len(kind.cell.outputs)
        made = self.device.zeros((max(1, steps * num_outputs), 2), columns.dtype)
        outputs: list[Tensor] = []

        def compute() -> tuple[Tensor, ...]:
            return tuple([value.contiguous() for value in work(*[one[:size] for one in inputs])])

        def run() -> None:
            outputs.clear()
            for step in range(steps):
                self._begin((1,), core, number, size)
                if num_inputs:
                    self._gather((size, num_inputs), core, number, columns.data_ptr())
                outputs.extend(device.compute(compute))
                at = made.data_ptr() + 2 * made.element_size() * num_outputs * step
                self._finish((size,), core, number, at, num_inputs, num_outputs)
            self._report((1,), core, NUM_PAGES)

        launch = device.record(run)
        self.memory.describe(made, outputs)
        kind.keeps.append(made)
        return launch

    # --- requests ----------------------------------------------------------------------------------------------------

    def too_large(self, plan: RequestPlan) -> str:
        """Return why a request can never enter, with what would do; "" if it can."""
        sizes = self._sizes
        for what, needs, has in (
            ("bytes of rows and data on the device", plan.num_bytes, sizes.arena_bytes),
            ("bytes of results", plan.answer_bytes, sizes.answer_bytes),
            ("bytes of a mail", 8 * (plan.num_words + len(LetterWord)), sizes.mail_bytes),
        ):
            if aligned(needs) > has:
                return f"a request needs {needs:,} {what}, and there are {has:,}"
        for number, count in plan.entries:
            if count > sizes.ring:
                name = self._types[number].cell.name
                return f"a request has {count:,} nodes and runs of cell {name!r}, and a ring holds {sizes.ring:,}"
        return ""

    def add(self, plan: RequestPlan, values: Sequence[NDArray[np.uint8]]) -> int | None:
        """Let a request enter with the next mail. Returns its slot; None if there is no room now.

        values: the bytes of each host input, as `plan.feeds` says.
        """
        mail = self._open_mail()
        if mail is None or not self._free or not self._has_entries(plan):
            return None
        if self._top + plan.num_words + len(LetterWord) * (len(self._letters) + 1) > len(mail.words):
            return None
        where = self._arena.take(plan.num_bytes)
        if where is None:
            return None
        answer = self._answers.take(plan.answer_bytes)
        if answer is None:
            self._arena.give_back(where, plan.num_bytes)
            return None
        slot, first = self._free.pop(), self._top
        words = mail.words[first : first + plan.num_words]
        words[: len(plan.image)] = plan.image
        words[RequestWord.SLOT] = slot
        words[RequestWord.ANSWER] = self.memory.answers.ctypes.data + answer
        data = words.view(np.uint8)
        for (at, num_bytes), value in zip(plan.feeds, values, strict=True):
            data[at : at + num_bytes] = value
        self._top += plan.num_words
        self._letters.append((where, first, plan.num_words))
        for number, count in plan.entries:
            self._types[number].entries += count
        for number, count in plan.ready:
            self._news[number] += count
        for number in plan.again:
            self._types[number].again = True
        self._requests[slot] = _InFlight(plan, where, answer)
        self._unsent.add(slot)
        return slot

    def cancel(self, slot: int) -> bool:
        """Let a request end as soon as its ready nodes are taken. It is reported as ended, later.

        False if it cannot be told now: try again later.
        """
        request = self._requests[slot]
        mail = self._open_mail()
        if mail is None or slot in self._unsent:
            return False
        if self._top + len(LetterWord) * (len(self._letters) + 1) > len(mail.words):
            return False
        self._letters.append((request.where, 0, 0))
        return True

    def answer(self, slot: int) -> NDArray[np.uint8]:
        """Return the results of an ended request, [plan.answer_bytes]. They change after `release`."""
        request = self._requests[slot]
        return self.memory.answers[request.answer : request.answer + request.plan.answer_bytes]

    def release(self, slot: int) -> None:
        """Give back what an ended request had."""
        request = self._requests.pop(slot)
        self._arena.give_back(request.where, request.plan.num_bytes)
        self._answers.give_back(request.answer, request.plan.answer_bytes)
        for number, count in request.plan.entries:
            self._types[number].entries -= count
        self._free.append(slot)

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have a slot."""
        return len(self._requests)

    def left_behind(self) -> str:
        """Return what ended requests have left behind; "" if nothing. Nothing is in flight. Waits for the device."""
        (board,) = self.device.compute_waiting(lambda: (self.memory.board.cpu(),))
        of = board[len(BoardWord) :].view(-1, len(TypeWord))[: len(self._types)]
        heads, tails = (
            of[:, [TypeWord.RUNS_HEAD, TypeWord.NODES_HEAD]],
            of[:, [TypeWord.RUNS_TAIL, TypeWord.NODES_TAIL]],
        )
        counts = {
            "requests": len(self._requests),
            "slots": self._sizes.num_slots - len(self._free),
            "bytes on the device": self._arena.size - self._arena.free,
            "bytes of results": self._answers.size - self._answers.free,
            "entries": sum([kind.entries for kind in self._types]),
            "ready entries": int((tails - heads).abs().sum()),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def _has_entries(self, plan: RequestPlan) -> bool:
        """Whether the rings have room for all entries of a request."""
        return all(self._types[number].entries + count <= self._sizes.ring for number, count in plan.entries)

    def _open_mail(self) -> Mail | None:
        """Return the mail that newcomers are written into; None while the device may still read all of them."""
        if self._mail is None:
            mail = self.memory.mails[self._next_mail]
            if mail.task > self.memory.num_done:
                return None
            self._next_mail = (self._next_mail + 1) % len(self.memory.mails)
            self._mail, self._top, self._news = mail, 0, [0] * len(self._types)
        return self._mail

    # --- tasks -------------------------------------------------------------------------------------------------------

    @property
    def num_finished(self) -> int:
        """The number of the last task that the device has done."""
        return self.memory.num_done

    def submit(self) -> None:
        """Send the mail, and launch tasks as far as something is known to be ready. Release what `poll` told before."""
        if self._letters:
            self._send()
        while len(self._tasks) < AHEAD:
            task = self._choose(self._ready())
            if task is None:
                break
            self.num_submitted += 1
            self._tasks.append((self.num_submitted, task))
            with self.device.submitting():
                self._types[task.type].launches[task.size, task.steps]()
        if self._requests and not self._tasks:
            raise DeviceError(
                f"the device core stands still: {len(self._requests)} requests are in flight and nothing is ready"
            )

    def abandon(self) -> None:
        """Wait for nothing more: the device has failed. Nothing is submitted afterwards."""
        self.num_submitted = self.num_finished

    def poll(self) -> Reported:
        """Return what the device has reported since the last call. It waits for nothing."""
        done, tasks = self.memory.num_done, list[Task]()
        while self._tasks and self._tasks[0][0] <= done:
            tasks.append(self._tasks.popleft()[1])
        while self._posted and self._posted[0][0] <= done:
            self._posted.popleft()
        before, self._page = self._page, self.memory.pages[done % NUM_PAGES].copy()
        first, end = int(before[PageWord.ENDED]), int(self._page[PageWord.ENDED])
        ended = self.memory.finished[np.arange(first, end) % self._sizes.num_slots].tolist()
        return Reported(
            tuple(ended),
            len(tasks),
            int(self._page[PageWord.STEPS] - before[PageWord.STEPS]),
            int(self._page[PageWord.CELLS] - before[PageWord.CELLS]),
            sum([task.size * task.steps for task in tasks]),
        )

    def _send(self) -> None:
        mail = self._mail
        assert mail is not None
        end = self._top + len(LetterWord) * len(self._letters)
        mail.words[self._top : end] = np.array(self._letters, np.int64).ravel()
        self.device.upload((self.memory.mail, mail.words[:end]))
        at = self.memory.mail.data_ptr()
        self._enter((len(self._letters),), self.memory.address, at, at + 8 * self._top)
        mail.task = self.num_submitted + 1
        self._posted.append((mail.task, self._news))
        self._mail, self._letters = None, []
        self._unsent.clear()

    def _ready(self) -> list[Ready]:
        """Return about what will be ready after the tasks in flight."""
        counts = self._page[len(PageWord) : len(PageWord) + 2 * len(self._types)].reshape(-1, 2).tolist()
        ready = []
        for number, (kind, (runs, nodes)) in enumerate(zip(self._types, counts, strict=True)):
            nodes += sum([news[number] for _, news in self._posted if number < len(news)])
            ready.append(Ready(runs, nodes, kind.again, kind.cell.batch_sizes, kind.cell.priority))
        for _, task in self._tasks:
            ready[task.type] = task.leaves(ready[task.type])
        return ready
