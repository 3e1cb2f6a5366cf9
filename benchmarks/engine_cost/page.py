"""The tables of papers/docs/benchmarks-in-full.md and of the README, from what benchmarks/overhead.py has written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pages import fill, table

Result = dict[str, Any]
SECTION: Final = "overhead"
README_SECTION: Final = "results"
README_ROWS: Final = (
    ("LSTM 64 float32", "25 words alone"),
    ("LSTM 512 float32", "all waiting"),
    ("LSTM 512 float32", "p90 at half load"),
    ("LSTM 1024 bfloat16 over HTTP", "peak"),
    ("GRU encoder-decoder 256", "all waiting"),
    ("RWKV 5 x 256, greedy", "p50 at half load"),
    ("TreeLSTM 256", "all of SST waiting"),
    ("200 live streams", "streams a core"),
)
"""Work and figure of each row of the README's table: chosen for what they decide, where the engine loses as well."""


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
    """Return the README's rows, each beside its strongest baseline."""
    best = {(row["work"], row["figure"]): row for row in strongest(rows_of(found))}
    rows = [best[key] for key in README_ROWS if key in best]
    lines = [
        [
            row["work"], _figure(row), row["baseline"], _with_unit(row["theirs"], row["unit"]),
            _with_unit(row["ours"], row["unit"]), f"{_advantage(row):.2g}",
        ]
        for row in rows
    ]  # fmt: skip
    return table(("work", "figure", "instead", "its figure", "batchmaker", "times as good"), lines)


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
