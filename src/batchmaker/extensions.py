"""What other distributions add: commands, costs of steps, planners. Each names it in an entry point of its own.

Groups: `batchmaker.commands` (a mapping of a name to a Command); `batchmaker.costs` (a function of cell types with
their modules, the largest batch and a dataflow that returns a LatencyTable, by the name "npu"; `batchmaker simulate`);
`batchmaker.planners` (a Planner, by the name "cell"; see `bm.Cell(optimize=True)`).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple

from batchmaker.errors import OptionError

PAPERS: Final = "pip install ./papers, in a clone of the repository"
"""The distribution with the systems of the papers that serving does not need."""


class Command(NamedTuple):
    """The place of a command's function, and its line in `batchmaker --help`: the first line of its docstring."""

    module: str
    function: str
    short: str


def commands() -> dict[str, Command]:
    """Return the commands that other distributions add, by name."""
    return {
        name: command for entry in entry_points(group="batchmaker.commands") for name, command in entry.load().items()
    }


def extension(group: str, name: str, purpose: str) -> Any:
    """Return what some distribution adds by this name. OptionError, with the purpose that it is for, if none does."""
    for entry in entry_points(group=group, name=name):
        return entry.load()
    raise OptionError(f"{purpose} is in a distribution of its own: {PAPERS}")
