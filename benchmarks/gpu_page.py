"""Tables and picture of the results of benchmarks/gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels

Row = dict[str, Any]
Column = tuple[str, str, str]
"""Title, key, format."""

WAYS: Final = (
    ("kernel alone", "kernel_ms"), ("module", "persistent_ms"), ("nn, padded", "padded_ms"),
    ("nn, packed", "packed_ms"), ("captured loop", "loop_ms"),
)  # fmt: skip
COLUMNS: Final[dict[str, tuple[Column, ...]]] = {
    "compile": (
        ("jobs", "jobs", ","), ("done", "done", ","), ("kernels compiled", "kernels", ","),
        ("seconds", "seconds", ".1f"),
    ),
    "executor": (
        ("model", "model", ""), ("dtype", "dtype", ""), ("largest difference", "error", ".1e"),
        ("allowed", "tolerance", ".0e"), ("holds", "passed", ""), ("padded cells", "padded_cells", ","),
        ("tasks", "tasks", ","), ("in one launch", "whole_tasks", ","),
    ),
    "correctness": (
        ("cell", "cell", ""), ("dtype", "dtype", ""), ("hidden", "hidden", ""), ("batch", "batch", ""),
        ("largest error", "error", ".1e"), ("allowed", "tolerance", ".0e"), ("holds", "passed", ""),
    ),
    "table1": (
        ("cell", "cell", ""), ("dtype", "dtype", ""), ("hidden", "hidden", ""), ("batch", "batch", ""),
        *((f"{title}, ms", key, ".3f") for title, key in WAYS), ("target", "target_ms", "g"),
        ("GRNN, Titan V", "grnn_ms", "g"),
    ),
    "table3": (
        ("hidden", "hidden", ""), ("batch", "batch", ""), ("one exchange, ms", "one_ms", ".3f"),
        ("two, ms", "two_ms", ".3f"), ("GRNN's one", "grnn_one_ms", "g"), ("GRNN's two", "grnn_two_ms", "g"),
    ),
    "networks": (
        ("network", "network", ""), ("dtype", "dtype", ""), ("batch", "batch", ""),
        ("module, ms", "persistent_ms", ".3f"), ("nn.LSTM, ms", "padded_ms", ".3f"),
    ),
    "tuner": (
        ("cell", "cell", ""), ("dtype", "dtype", ""), ("hidden", "hidden", ""), ("batch", "batch", ""),
        ("fit", "fit", ","), ("measured", "measured", ""), ("first over best", "top1_over_best", ".3f"),
        ("best of five over best", "top5_over_best", ".3f"),
    ),
}  # fmt: skip
ENGINE: Final[tuple[Column, ...]] = (
    ("model", "model", ""), ("tasks in one launch", "at_once", ""), ("dtype", "dtype", ""),
    ("peak requests/s", "peak_rps", ",.0f"),
    ("V100, paper", "v100_rps", ","), ("p90 ms at 0.7 of it", "p90_ms", ".1f"), ("V100, paper", "v100_p90_ms", "g"),
    ("of reference", "of_reference", ".2f"), ("idle", "idle_share", ".1%"), ("mean batch", "mean_batch", ".0f"),
    ("padded nn.LSTM, requests/s", "padded_rps", ",.0f"), ("packed", "packed_rps", ",.0f"),
)  # fmt: skip
TITLES: Final = {
    "compile": "Kernels compiled",
    "executor": "The engine beside the CPU",
    "correctness": "Persistent kernels beside float64",
    "table1": "100 steps",
    "table3": "GRU: one exchange a step, and two",
    "networks": "Two networks",
    "tuner": "The model's choice beside a wide search",
    "tasks": "Engine: LSTM 1024 in batches of 32, tasks in one launch and step by step",
    "lstm": "Engine: LSTM 1024, Europarl's lengths",
    "seq2seq": "Engine: Seq2Seq 1024",
    "treelstm": "Engine: TreeLSTM 1024",
}


def tables(content: Row) -> str:
    """Return all sections as Markdown, those that were not run as well."""
    if not content["sections"]:
        why = content.get("why")
        return f"Not run on a GPU yet: the machine of commit {content['commit']} has none{f' ({why})' if why else ''}."
    made = f"{content['device']}, driver {content['driver']}, torch {content['torch']}, commit {content['commit']}"
    parts = [f"{made}: `{content['command']}`."]
    for name, section in content["sections"].items():
        parts.append(f"### {TITLES.get(name, name)}")
        if section["state"] != "ran":
            parts.append(f"{section['state'][0].upper()}{section['state'][1:]}.")
        elif section["rows"]:
            parts.append(_table(COLUMNS.get(name, ENGINE), section["rows"]))
    return "\n\n".join(parts)


def _table(columns: tuple[Column, ...], rows: list[Row]) -> str:
    shown = [column for column in columns if any(column[1] in row for row in rows)]
    lines = ["| " + " | ".join(title for title, _, _ in shown) + " |", "|" + "---|" * len(shown)]
    for row in rows:
        cells = [_cell(row, key, form) for _, key, form in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row, key: str, form: str) -> str:
    if key in row:
        value = row[key]
        return (
            "-" if value is None else f"{value:{form}}" if not isinstance(value, bool) else ("yes" if value else "NO")
        )
    return "not run" if "not_run" in row else "-"


def draw(path: Path, content: Row) -> None:
    """Draw time over batch for each hidden size and dtype of table 1; one empty panel where there is nothing."""
    section = content["sections"].get("table1", {"rows": []})
    panels = []
    for cell, dtype, hidden in dict.fromkeys((r["cell"], r["dtype"], r["hidden"]) for r in section["rows"]):
        mine = [r for r in section["rows"] if (r["cell"], r["dtype"], r["hidden"]) == (cell, dtype, hidden)]
        lines = [line for title, key in (*WAYS, ("target", "target_ms")) if (line := _line(title, mine, _getter(key)))]
        if lines:
            panels.append(Panel(f"{cell} {hidden}, {dtype}", "batch", "ms for 100 steps", lines, log=True))
    where = content["device"] or content.get("state", "")
    about = f"{where}, commit {content['commit']}"
    none = Panel("nothing was run", "batch", "ms", [Line(about, [], [], [], [])])
    draw_panels(path, panels or [none], "Persistent recurrent kernels", about)


def _getter(key: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(key)


def _line(title: str, rows: list[Row], value: Callable[[Row], float | None]) -> Line | None:
    points = [(row["batch"], found) for row in rows if (found := value(row)) is not None]
    if not points:
        return None
    x, y = zip(*points, strict=True)
    return Line(title, x, y, y, y)
