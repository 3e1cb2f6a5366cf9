"""A learnt table in the live scheduler. The state is the ready counts over all requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, final

from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import CellPolicy, ReadyView
from batchmaker.policies.learned.encodings import ENCODINGS
from batchmaker.policies.learned.policy_file import PolicyFile
from batchmaker.policies.sufficient import full_first, sufficient_order

_NOT_KNOWN: Final = -1


@final
class LearnedPolicy(CellPolicy):
    """Runs the cell that the table of `batchmaker learn` chooses; the sufficient condition decides in unknown states.

    Full batches go first: a table is learnt without a limit to batches, to let types wait so that fewer batches are
    needed.

    file: the policy. max_steps: steps per task; 1 looks at the state before every batch, as in learning. A state
    consists only of the numbers of ready nodes, which change as requests come and go. `policies.sufficient` decides in
    a state that was not met in learning, or with a cell that the file does not have: the order may be worse, a result
    never changes. Raises PolicyFileError for a file that cannot be used.
    """

    name = "learned"
    needs_frontiers: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    urgent_first: ClassVar[bool] = True

    def __init__(self, file: str, max_steps: int = 1) -> None:
        super().__init__(max_steps)
        self._file = PolicyFile.read(Path(file))
        self._encode = ENCODINGS[self._file.encoding]
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

    def rank(self, view: ReadyView) -> Sequence[TypeId]:
        ready = view.ready
        if len(ready) < 2:
            return ready
        return full_first(view, self._learnt_order(view, ready))

    def _learnt_order(self, view: ReadyView, ready: Sequence[TypeId]) -> Sequence[TypeId]:
        """Return the table's choice first, then the others.

        The order of the sufficient condition if there is no entry.
        """
        if len(self._of_type) < len(view.cells):
            self._meet(view.cells)
        counts = [0] * len(self._types)
        for type_id in ready:
            number = self._of_type[type_id]
            if number == _NOT_KNOWN:
                return sufficient_order(view)
            counts[number] = view.num_ready(type_id)
        run = self._file.table.get(self._encode(counts))
        if run is None:
            return sufficient_order(view)
        first = self._types[run]
        return [first, *(type_id for type_id in ready if type_id != first)]

    def _meet(self, cells: Sequence[CellType]) -> None:
        for cell in cells[len(self._of_type) :]:
            number = self._number.get(cell.name, _NOT_KNOWN)
            if number != _NOT_KNOWN:
                self._types[number] = cell.type_id
            self._of_type.append(number)
