"""One figure or table of a paper beside what came out here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import numpy as np

from shared import number, result_path

State = Literal["reproduced", "in part", "other outcome", "not reproduced", "explanation"]
"""`other outcome`: made, and it comes out otherwise than in the paper. `explanation`: a drawing, nothing measured."""
ABSENT: Final = "not measured yet"
Ours = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure or table. item: its name in the paper. theirs, ours: the numbers; ours may read the results.

    run: name of the run that makes it. why: the reason for what differs, or what is missing. where: for an explanation,
    the page or test in which it lives. picture: file, seen from papers/docs/images.
    """

    item: str
    shows: str
    state: State
    theirs: str = ""
    ours: Ours = ""
    run: str = ""
    why: str = ""
    where: str = ""
    picture: str = ""

    def our_number(self) -> str:
        """Return our number with its interval; ABSENT where nobody has made it, or the result has another form."""
        if isinstance(self.ours, str):
            return self.ours
        try:
            return self.ours()
        except (FileNotFoundError, KeyError, IndexError, TypeError, ValueError):
            return ABSENT


@cache
def result(name: str) -> Any:
    """Return the content of a result file. FileNotFoundError if nobody has made it."""
    return json.loads(result_path(name).read_text("utf-8"))


def first(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """Return the first row with these values. KeyError without any."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    raise KeyError(f"no row has {wanted}")


def ranged(values: Sequence[float], unit: str = "") -> str:
    """Return the median, and the quartiles as its interval."""
    low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
    return f"{number(middle)}{unit} ({number(low)} to {number(high)})"
