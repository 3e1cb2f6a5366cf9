"""A learned policy as a JSON file for people, checked in full when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, final, get_type_hints

from batchmaker.errors import PolicyFileError
from batchmaker.graph.spec import CellType
from batchmaker.policies.learned.encodings import ENCODINGS, Encoding, State

FORMAT: Final = "batchmaker learned policy"
VERSION: Final = 1
_KEYS: Final = ("format", "version", "model", "encoding", "cells", "learnt", "states")


@final
@dataclass(frozen=True, slots=True)
class CellRow:
    """The identity of a cell among models, for any width: its name, and its numbers of inputs and outputs."""

    name: str
    inputs: int
    outputs: int

    @classmethod
    def of(cls, cell: CellType) -> CellRow:
        return cls(cell.name, len(cell.inputs), len(cell.outputs))


@final
@dataclass(frozen=True, slots=True)
class LearntFrom:
    """The origin of a policy. data: in words. ratio: batches / lower bound on held-out mini-batches."""

    data: str
    requests: int
    batch: int
    learners: int
    episodes: int
    steps: int
    seed: int
    ratio: float
    seconds: float
    program: str


Row = TypeVar("Row", CellRow, LearntFrom)


@final
@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A learnt table with the data needed to use it.

    model: the model that it was learnt for. cells: the model's. A number in `table` is a position in `cells`, which is
    the type id in the policy. table: the cell to run by state, see `encodings`.
    """

    model: str
    encoding: Encoding
    cells: tuple[CellRow, ...]
    table: Mapping[State, int]
    learnt: LearntFrom

    def write(self, path: Path) -> None:
        """Write the file, one state per line. PolicyFileError if it cannot be written."""
        head = {"format": FORMAT, "version": VERSION, "model": self.model, "encoding": self.encoding}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        lines.append(f' "learnt": {json.dumps(asdict(self.learnt), ensure_ascii=False)}')
        lines.append(_listed("cells", [asdict(cell) for cell in self.cells]))
        names = [cell.name for cell in self.cells]
        rows = [{"state": [names[kind] for kind in state], "run": names[run]} for state, run in self.table.items()]
        lines.append(_listed("states", rows))
        try:
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        except OSError as error:
            raise PolicyFileError(f"{path}: cannot be written ({error.strerror or error})") from error

    @classmethod
    def read(cls, path: Path) -> PolicyFile:
        """Return the content of a file. PolicyFileError if it is missing, malformed or of another version."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PolicyFileError(f"{path}: cannot be read ({error.strerror or error}); {_MAKE_ONE}") from error
        except ValueError as error:
            raise PolicyFileError(f"{path}: got what is not JSON ({error}), expected a policy; {_MAKE_ONE}") from error
        return _Reader(path).read(content)

    def check_cells(self, cells: Sequence[CellType]) -> None:
        """PolicyFileError unless all these cells belong to the model that the policy was learnt for."""
        rows = {cell.name: cell for cell in self.cells}
        for cell in map(CellRow.of, cells):
            wanted = rows.get(cell.name)
            if wanted == cell:
                continue
            names = ", ".join(rows)
            what = f"cell {cell.name!r} with {cell.inputs} inputs and {cell.outputs} outputs"
            expected = f"one of {names}" if wanted is None else f"{wanted.inputs} inputs and {wanted.outputs} outputs"
            raise PolicyFileError(
                f"the policy was learnt for model {self.model!r}: got {what}, expected {expected}. Learn one for the "
                "model that runs: `batchmaker learn MODEL --data FILE --batch B --out policy.json`"
            )


_MAKE_ONE: Final = "make one with `batchmaker learn`"


@final
class _Reader:
    """Checks the content of one file, part by part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, content: Any) -> PolicyFile:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise self._wrong("content", content if not isinstance(content, dict) else content.get("format"), FORMAT)
        if content.get("version") != VERSION:
            raise PolicyFileError(
                f"{self._path}: got version {content.get('version')!r}, expected {VERSION}; learn the policy again "
                "with this batchmaker"
            )
        if missing := [key for key in _KEYS if key not in content]:
            raise PolicyFileError(f"{self._path}: {', '.join(missing)} missing; {_MAKE_ONE}")
        if content["encoding"] not in ENCODINGS:
            raise self._wrong("encoding", content["encoding"], f"one of {', '.join(ENCODINGS)}")
        if not isinstance(content["model"], str):
            raise self._wrong("model", content["model"], "a name")
        cells = tuple(self._record(CellRow, f"cell {i}", row) for i, row in enumerate(self._rows(content, "cells")))
        names = [cell.name for cell in cells]
        if len(set(names)) < len(names):
            raise self._wrong("cells", names, "names that differ")
        number = {name: i for i, name in enumerate(names)}
        table: dict[State, int] = {}
        for i, row in enumerate(self._rows(content, "states")):
            state, run = self._state(f"state {i}", row, number)
            if state in table:
                raise self._wrong(f"state {i}", row, "each state once")
            table[state] = run
        learnt = self._record(LearntFrom, "learnt", content["learnt"])
        return PolicyFile(content["model"], content["encoding"], cells, table, learnt)

    def _rows(self, content: dict[str, Any], key: str) -> list[Any]:
        rows = content[key]
        if not isinstance(rows, list) or not rows:
            raise self._wrong(key, rows, "a list with something in it")
        return rows

    def _record(self, kind: type[Row], where: str, row: Any) -> Row:
        hints = get_type_hints(kind)
        wanted = {field.name: hints[field.name] for field in fields(kind)}
        if not isinstance(row, dict) or set(row) != set(wanted):
            raise self._wrong(where, row, f"an object with {', '.join(wanted)}")
        for name, value in row.items():
            allowed = (int, float) if wanted[name] is float else wanted[name]
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise self._wrong(f"{where}, {name}", value, f"a value of type {wanted[name].__name__}")
        return kind(**row)

    def _state(self, where: str, row: Any, number: Mapping[str, int]) -> tuple[State, int]:
        if not isinstance(row, dict) or set(row) != {"state", "run"} or not isinstance(row["state"], list):
            raise self._wrong(where, row, "an object with state, a list of cells, and run, one of them")
        for name in (*row["state"], row["run"]):
            if not isinstance(name, str) or name not in number:
                raise self._wrong(where, name, f"one of the cells {', '.join(number)}")
        if row["run"] not in row["state"]:
            raise self._wrong(f"{where}, run", row["run"], f"one of its ready cells {', '.join(row['state'])}")
        return tuple(number[name] for name in row["state"]), number[row["run"]]

    def _wrong(self, where: str, got: Any, expected: str) -> PolicyFileError:
        text = repr(got)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        return PolicyFileError(f"{self._path}, {where}: got {shown}, expected {expected}; {_MAKE_ONE}")


def _listed(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return f' "{key}": [\n' + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n ]"
