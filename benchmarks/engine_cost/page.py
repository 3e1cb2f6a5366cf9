"""The tables of docs/benchmarks.md and of the README, from what benchmarks/overhead.py has written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from ed_batch import fill
from throughput_page import table

Result = dict[str, Any]
SECTION: Final = "overhead"
README_SECTION: Final = "results"
BY_HAND_SECTION: Final = "by-hand"
BY_HAND: Final = ("by hand", "nn.LSTM", "buckets")
"""What a baseline is called that people write themselves."""


def rows_of(found: Result) -> list[Result]:
    """Return the rows of all lines, in order."""
    return [row for line in found["lines"] for row in line["rows"]]


def whole_table(found: Result) -> str:
    """Return every figure beside its baseline's, the ratio and what was asked for."""
    rows = [
        [
            row["work"], _figure(row), row["baseline"], _with_unit(row["theirs"], row["unit"]),
            _with_unit(row["ours"], row["unit"]), _ratio(row), _asked(row), _verdict(row),
        ]
        for row in rows_of(found)
    ]  # fmt: skip
    return table(("work", "figure", "baseline", "its figure", "batchmaker", "ratio", "asked", "is"), rows)


def left_out(found: Result) -> str:
    """Return why lines have no figures, a line to an item; nothing if all have."""
    said = [(line["line"], line["not_run"] or line["error"]) for line in found["lines"]]
    return "\n".join(f"- `{name}` has not been measured: {why}" for name, why in said if why)


def strongest(rows: Iterable[Result]) -> list[Result]:
    """Return of each figure of each work the row whose baseline does best against the engine; none without baseline."""
    best: dict[tuple[str, str], Result] = {}
    for row in rows:
        if row["theirs"] is None:
            continue
        key = row["work"], row["figure"]
        if key not in best or _advantage(row) < _advantage(best[key]):
            best[key] = row
    return list(best.values())


def readme_table(found: Result) -> str:
    """Return a row for each figure of each kind of work and its strongest baseline, sizes side by side."""
    lines = []
    for (kind, figure, unit, baseline), group in groupby(strongest(rows_of(found)), key=_kind):
        rows = list(group)
        rest = [row["work"].removeprefix(kind).strip() for row in rows]
        theirs, ours = (_joined(_number(row[side]) for row in rows) for side in ("theirs", "ours"))
        better = "" if rows[0]["better"] == "higher" else " (lower is better)"
        work = f"{kind} {_joined(rest)}".strip() + _held(rows[0])
        lines.append([work, f"{figure}, {unit}{better}", baseline, theirs, ours, _joined(map(_times, rows))])
    return table(("work", "", "strongest baseline", "baseline", "batchmaker", "ratio"), lines)


def by_hand_table(found: Result) -> str:
    """Return the rows whose baseline people write themselves, those first in which the engine does best."""
    rows = [row for row in rows_of(found) if row["baseline"] and any(mark in row["baseline"] for mark in BY_HAND)]
    lines = [
        [
            row["work"], _figure(row), row["baseline"], _with_unit(row["theirs"], row["unit"]),
            _with_unit(row["ours"], row["unit"]), f"{_advantage(row):.2g}",
        ]
        for row in sorted(rows, key=_advantage, reverse=True)
    ]  # fmt: skip
    return table(("work", "figure", "by hand", "its figure", "batchmaker", "times as good"), lines)


def machine_line(found: Result) -> str:
    """Return where and how the figures were taken, in a sentence."""
    about = found["machine"]
    load = " to ".join("?" if value is None else f"{value:g}" for value in found["load_average"])
    stolen = max((line.get("stolen", 0.0) for line in found["lines"]), default=0.0)
    others = f", other machines of the host taking up to {stolen:.0%} of the processors" if stolen > 0.02 else ""
    quick = " Of a quick run: the figures mean nothing." if any(line["quick"] for line in found["lines"]) else ""
    return (
        f"{about['cpu']}, {about['cores']} cores, one compute thread, load average {load}{others}, "
        f"torch {about['torch']}, commit {commits(found)}: `{found['command']}`.{quick}"
    )


def commits(found: Result) -> str:
    """Return the commits that the lines were measured at; one, unless some were measured again later."""
    return ", ".join(dict.fromkeys(line["commit"] for line in found["lines"]))


def show(found: Result, page: Path, readme: Path, png: Path | None) -> None:
    """Put the tables into the page and into the README, between their markers; the picture, if any, into the page."""
    parts = [machine_line(found), whole_table(found), left_out(found)]
    if png is not None:
        parts.append(f"![Each ratio beside what was asked for]({os.path.relpath(png, page.parent)})")
    fill(page, {SECTION: "\n\n".join(filter(None, parts))})
    fill(readme, {README_SECTION: f"{readme_table(found)}\n\n{machine_line(found)}"})
    beside = page.with_name("from-batching-by-hand.md")
    if beside.is_file():
        fill(beside, {BY_HAND_SECTION: f"{by_hand_table(found)}\n\n{machine_line(found)}"})


def _held(row: Result) -> str:
    """Return what must be said of live streams that the engine does not hold; nothing of all else."""
    held = row["more"].get("held", {"ours": True})
    return "" if held["ours"] else " (not held; held by hand)" if held["theirs"] else " (held by neither)"


def _kind(row: Result) -> tuple[str, str, str, str]:
    """Return what rows have in common that stand in one line of the README: the network, the figure, the baseline."""
    first = row["work"].split()[0]
    return (
        (first if first == "LSTM" and "HTTP" not in row["work"] else row["work"]),
        row["figure"],
        row["unit"],
        row["baseline"],
    )


def _advantage(row: Result) -> float:
    """Return how much better the engine is than the baseline: above 1 where it is."""
    return float(row["ratio"] if row["better"] == "higher" else 1 / row["ratio"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _with_unit(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value)} {unit}"


def _times(row: Result) -> str:
    return f"{row['ratio']:.3g}"


def _ratio(row: Result) -> str:
    return "" if row["theirs"] is None else _times(row)


def _figure(row: Result) -> str:
    """Return the figure and, where requests came at a rate, which."""
    rate = row["more"].get("rate")
    return row["figure"] if rate is None else f"{row['figure']} ({_number(rate)}/s)"


def _asked(row: Result) -> str:
    if row["target"] is None:
        return ""
    return f"at {'least' if row['better'] == 'higher' else 'most'} {row['target']:g}"


def _verdict(row: Result) -> str:
    return {True: "met", False: "**missed**", None: ""}[row["met"]]


def _joined(values: Iterable[str]) -> str:
    listed: Sequence[str] = list(values)
    return " / ".join(listed)
