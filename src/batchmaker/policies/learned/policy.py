"""A learnt table in the live scheduler. The state is the ready counts over all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, final

from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import CellPolicy, ReadyView, in_order
from batchmaker.policies.learned.encodings import ENCODINGS, Encoding, State
from batchmaker.policies.learned.policy_file import PolicyFile
from batchmaker.policies.order import READY_SHARE

_NOT_KNOWN: Final = -1


def full_first(view: ReadyView, ranked: Sequence[TypeId]) -> Sequence[TypeId]:
    """Return the order with the types first whose ready nodes fill a batch.

    Orders that save batches wait until more nodes of a type gather. If they already fill a batch, waiting saves
    nothing, and running the full batch lets other types gather earlier.
    """
    cells = view.cells
    full = [type_id for type_id in ranked if view.num_ready(type_id) >= cells[type_id].max_batch]
    return [*full, *(type_id for type_id in ranked if type_id not in full)] if full else ranked


class TablePolicy(CellPolicy):
    """What a table says of the ready nodes' types runs first; in a state that it does not know, the type nearest to the
    sufficient condition.

    Full batches go first: a table is learnt without a limit to batches and says who should wait to be fewer.
    encoding: of states, whose numbers are type ids. max_steps: steps per task; 1 looks at the state before every batch,
    as in learning.
    """

    name = "table"
    order: ClassVar[int] = READY_SHARE
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    urgent_first: ClassVar[bool] = True

    def __init__(self, encoding: Encoding, table: Mapping[State, int], max_steps: int = 1) -> None:
        super().__init__(max_steps)
        self._encode = ENCODINGS[encoding]
        self._table = table

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        ready = view.ready
        if len(ready) < 2:
            return ready
        first = self._learnt(view, ready)
        if first is None:
            return in_order(self.order, view)
        return full_first(view, [first, *(type_id for type_id in ready if type_id != first)])

    def _learnt(self, view: ReadyView, ready: Sequence[TypeId]) -> TypeId | None:
        """Return what the table says, None if it does not know the state."""
        counts = [0] * len(view.cells)
        for type_id in ready:
            counts[type_id] = view.num_ready(type_id)
        run = self._table.get(self._encode(counts))
        return None if run is None else TypeId(run)


@final
class LearnedPolicy(TablePolicy):
    """What `batchmaker learn` wrote says which cell runs; where it knows nothing, the sufficient condition does.

    file: the policy. max_steps: steps per task; 1 looks at the state before every batch, as in learning. A state
    consists only of the numbers of ready nodes, which change as requests come and go. `policies.sufficient` decides in
    a state that was not met in learning, or with a cell that the file does not have: the order may be worse, a result
    never changes. Raises PolicyFileError for a file that cannot be used.
    """

    name = "learned"
    knows_steps_only: ClassVar[bool] = True

    def __init__(self, file: str, max_steps: int = 1) -> None:
        self._file = PolicyFile.read(Path(file))
        super().__init__(self._file.encoding, self._file.table, max_steps)
        self._number = {cell.name: number for number, cell in enumerate(self._file.cells)}
        self._of_type: list[int] = []  # position in the file of each live type
        self._types: list[TypeId] = [TypeId(_NOT_KNOWN)] * len(self._number)  # the inverse

    @property
    def learnt_for(self) -> str:
        """The name of the model that the policy was learnt for."""
        return self._file.model

    def check_cells(self, cells: Sequence[CellType]) -> None:
        """PolicyFileError if a cell does not belong to the model that the policy was learnt for."""
        self._file.check_cells(cells)

    def _learnt(self, view: ReadyView, ready: Sequence[TypeId]) -> TypeId | None:
        if len(self._of_type) < len(view.cells):
            self._meet(view.cells)
        counts = [0] * len(self._types)
        for type_id in ready:
            number = self._of_type[type_id]
            if number == _NOT_KNOWN:
                return None
            counts[number] = view.num_ready(type_id)
        run = self._table.get(self._encode(counts))
        return None if run is None else self._types[run]

    def _meet(self, cells: Sequence[CellType]) -> None:
        for cell in cells[len(self._of_type) :]:
            number = self._number.get(cell.name, _NOT_KNOWN)
            if number != _NOT_KNOWN:
                self._types[number] = cell.type_id
            self._of_type.append(number)
