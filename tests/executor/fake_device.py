"""A device that keeps what it is told to do in a line and does it when it likes: the executor's seam without a GPU.

It is as unkind as a GPU: pinned memory and addresses are read when the work runs, not when it was submitted, and memory
that was let go of too early is noticed.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import DeviceError
from batchmaker.executor.cuda.device import HEADER_WORDS, CannotRecordError, DeviceLostError, RecurrentKernel
from batchmaker.kernels.fallback import SteppedLayer
from batchmaker.kernels.layer import CallBuffers, LayerWeights

Compiler = Callable[[str, Sequence[str]], Sequence[Callable[..., None]]]


class Memory:
    """What is there, of all devices and pinned: told of each piece, and of its end by its owner's."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._starts: list[int] = []
        self._lock = threading.RLock()

    def watch(self, address: int, num_bytes: int, owner: Any) -> None:
        with self._lock:
            if num_bytes and address not in self._sizes:
                self._sizes[address] = num_bytes
                insort(self._starts, address)
                weakref.finalize(owner, self._forget, address)

    def check(self, address: int, num_bytes: int) -> None:
        with self._lock:
            place = bisect_right(self._starts, address) - 1
            start = self._starts[place] if place >= 0 else 0
            assert address + num_bytes <= start + self._sizes.get(start, 0), (
                f"{num_bytes} bytes at {address:#x} are nobody's: memory was let go of too early"
            )

    def _forget(self, address: int) -> None:
        with self._lock:
            if self._sizes.pop(address, None) is not None:
                del self._starts[bisect_left(self._starts, address)]


MEMORY = Memory()


class FakeDevice:
    """Works off its line in bits of random size at every `advance`.

    seed: of these sizes. background: a thread advances it, as a GPU works on its own. records: whether it can record.
    at_once: from how many steps on recurrent layers run in one launch, which plain operations stand for; None: never.
    compiler: makes functions of kernels, called with the grid and the arguments.
    """

    torch_device = torch.device("cpu")

    def __init__(
        self, name: str = "fake", *, seed: int = 0, background: bool = False, records: bool = True,
        at_once: int | None = None, compiler: Compiler | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.lost: str | None = None
        self.records = records
        self.num_recorded = 0
        self.num_recurrent = 0
        self.at_once = at_once
        self.compiler = compiler
        self.num_launched = 0
        self.num_rows_copied = 0
        self.num_uploads = 0
        self._line: deque[Callable[[], Any]] = deque()
        self._recording: list[Callable[[], None]] | None = None
        self._random = random.Random(seed)
        self._lock = threading.Condition(threading.RLock())
        self._clock_ns = 0
        self.error: BaseException | None = None
        self._over = threading.Event()
        if background:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    # --- the test's side -------------------------------------------------------------------------------------------

    def advance(self, most: int | None = None) -> int:
        """Do some of what is in line, at most so much; returns how much is left."""
        with self._lock:
            for _ in range(self._random.randint(1, 12) if most is None else most):
                if not self._line or self.lost is not None:
                    break
                self._clock_ns += 1000
                try:
                    self._line.popleft()()
                except BaseException as error:
                    self.error = error
                    self.lost = f"it broke: {error}"
                    raise
            return len(self._line)

    def lose(self, reason: str = "it fell off the bus") -> None:
        """Fail, with whatever is in line."""
        with self._lock:
            self.lost = reason
            self._line.clear()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def close(self) -> None:
        with self._lock:
            self._over.set()
            self._lock.notify_all()

    def _work(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self._lock.wait_for(lambda: self._line or self._over.is_set())
            try:
                self.advance()
            except BaseException:  # kept in `error`, for the test
                return

    # --- the seam ----------------------------------------------------------------------------------------------------

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.check()
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(torch.uint8).fill_(0xAB) if tensor.numel() and tensor.ndim else tensor.fill_(1)
        MEMORY.watch(tensor.untyped_storage().data_ptr(), tensor.nbytes, tensor.untyped_storage())
        self._submit(tensor.zero_)
        return tensor

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        memory = np.full(num_bytes, 0xCD, np.uint8)
        MEMORY.watch(memory.ctypes.data, num_bytes, memory)
        return memory

    def upload(self, *copies: tuple[Tensor, NDArray[Any]]) -> None:
        self.num_uploads += 1
        for target, source in copies:
            self._upload(target, source)

    def submitting(self) -> Any:
        return nullcontext()

    def _upload(self, target: Tensor, source: NDArray[Any]) -> None:
        MEMORY.check(source.ctypes.data, source.nbytes)
        address, count, dtype = source.ctypes.data, len(source), source.dtype

        def work() -> None:
            MEMORY.check(address, count * dtype.itemsize)
            raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
            target[:count] = torch.from_numpy(np.frombuffer(raw, dtype).copy())

        self._submit(work)

    def compute(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        self.check()
        with torch.no_grad():
            made = work() if self._recording is not None else None
        if made is None:  # at once in its turn; the caller looks at the results through what is submitted next
            self._submit(work)
            return ()
        for value in made:
            MEMORY.watch(value.untyped_storage().data_ptr(), value.untyped_storage().nbytes(), value.untyped_storage())

        def again() -> None:
            with torch.no_grad():
                for kept, value in zip(made, work(), strict=True):
                    kept.copy_(value)

        self._submit(again)
        return made

    def compute_waiting(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        self.stop()
        with torch.no_grad():
            return work()

    def move_rows(self, where: Tensor, first: int, columns: Tensor, count: int, *, to_addresses: bool) -> None:
        def work() -> None:
            words = self._block(where, first + len(columns) * count)
            for column, (buffer, size) in enumerate(columns.tolist()):
                for row in range(count):
                    address = words[first + column * count + row]
                    here = buffer + row * size
                    if to_addresses and address:
                        self._copy(address, here, size)
                    elif address and size:
                        self._copy(here, address, size)
                    elif not to_addresses and size:
                        ctypes.memset(here, 0, size)
            if not to_addresses and words[1]:
                self._note(words[1], self._clock_ns)

        self._submit(work)

    def signal(self, where: Tensor) -> None:
        def work() -> None:
            number, _, end, counter, following = self._block(where, HEADER_WORDS)
            if following:
                where.fill_(following)
            if number:
                self._note(end, self._clock_ns)
                self._note(counter, number)

        self._submit(work)

    def kernels(self, source: str, names: Sequence[str]) -> Sequence[Callable[..., None]]:
        self.check()
        if self.compiler is None:
            raise DeviceError("this device compiles no kernels")

        def launch(kernel: Callable[..., None], grid: tuple[int, ...], *numbers: int) -> None:
            self._submit(partial(kernel, grid, *numbers))

        return [partial(launch, kernel) for kernel in self.compiler(source, names)]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.check()
        if not self.records:
            raise CannotRecordError("it waits for a value")
        self.stop()
        try:
            for _ in range(2):  # as on a GPU, where libraries set themselves up at first; the last run is the one kept
                self._recording = []
                work()
        except DeviceLostError:
            raise
        except Exception as error:
            raise CannotRecordError(str(error)) from error
        finally:
            recorded, self._recording = self._recording or [], None
        self.num_recorded += 1

        def launch() -> None:
            self.num_launched += 1
            for item in recorded:
                self._submit(item)

        return launch

    def recurrent(self, weights: LayerWeights, rows: int, steps: int) -> RecurrentKernel | None:
        layer = SteppedLayer(weights)

        def work(call: CallBuffers) -> tuple[Tensor, ...]:
            self.num_recurrent += 1
            return layer.run_buffers(call)

        def prepare(call: CallBuffers) -> Callable[[], None]:
            assert (call.rows, call.steps) == (rows, steps)
            return lambda: self.compute(lambda: work(call)) and None

        return None if self.at_once is None else RecurrentKernel(self.at_once, prepare)

    def copy_rows(self, other: Any, source: Tensor, rows: NDArray[np.int64], target: Tensor) -> None:
        other.stop()
        picked = source[torch.from_numpy(rows)].clone()
        self.num_rows_copied += len(rows)
        self._submit(lambda: target.index_copy_(0, torch.from_numpy(rows), picked))

    def read(self, row: Tensor) -> Tensor:
        self.check()
        with self._lock:
            return row.clone()

    def check(self) -> None:
        if self.lost is not None:
            raise DeviceLostError(self.lost, self)

    def stop(self) -> None:
        self.check()
        while self.advance():
            pass

    # --- inside ------------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], Any]) -> None:
        self.check()
        if self._recording is not None:
            self._recording.append(work)
            return
        with self._lock:
            self._line.append(work)
            self._lock.notify_all()

    def _block(self, where: Tensor, num_words: int) -> list[int]:
        address = int(where)
        MEMORY.check(address, 8 * num_words)
        return list((ctypes.c_int64 * num_words).from_address(address))

    def _copy(self, to: int, source: int, size: int) -> None:
        MEMORY.check(to, size)
        MEMORY.check(source, size)
        ctypes.memmove(to, source, size)

    def _note(self, address: int, value: int) -> None:
        MEMORY.check(address, 8)
        ctypes.c_int64.from_address(address).value = value
