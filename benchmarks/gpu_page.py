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
STEP: Final[tuple[Column, ...]] = (
    ("mean batch", "mean_batch", ".0f"), ("us a step: scheduling", "scheduler_us", ".0f"),
    ("submitting", "submit_us", ".0f"), ("on the GPU", "busy_us", ".0f"), ("idle", "idle_share", ".0%"),
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
        *((f"{title}, ms", key, ".3f") for title, key in WAYS), ("predicted", "predicted_ms", ".3f"),
        ("target", "target_ms", "g"), ("GRNN, Titan V", "grnn_ms", "g"),
    ),
    "flashrnn": (
        ("dtype", "dtype", ""), *((f"{title}, ms", key, ".2f") for title, key in WAYS),
        ("predicted", "predicted_ms", ".2f"), ("FlashRNN, H100", "flashrnn_ms", "g"),
        ("its nn.LSTM, H100", "flashrnn_nn_ms", "g"),
    ),
    "launches": (
        ("rows", "batch", ""), ("bytes of a block", "block_bytes", ","), ("copy, us", "copy_us", ".1f"),
        ("launch, us", "launch_us", ".1f"), ("GPU, us a step", "gpu_us", ".1f"),
    ),
    "in_flight": (
        ("tasks in flight", "in_flight", ""), ("all waiting, requests/s", "peak_rps", ",.0f"), *STEP,
        ("p50, ms at 5,000/s", "p50_ms", ".1f"), ("p90", "p90_ms", ".1f"),
    ),
    "deadlines": (
        ("model", "model", ""), ("dtype", "dtype", ""), ("policy", "policy", ""), ("offered/s", "rate", ",.0f"),
        ("deadline, ms", "deadline_ms", "g"), ("late", "late_share", ".1%"), ("p50, ms", "p50_ms", ".1f"),
        ("p90, ms", "p90_ms", ".1f"),
    ),
    "tasks": (
        ("policy", "policy", ""), ("tasks in one launch", "at_once", ""),
        ("all waiting, requests/s", "peak_rps", ",.0f"), *STEP,
        ("a request alone, ms", "alone_ms", ".2f"), ("us a step of it", "alone_step_us", ".0f"),
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
    ("policy", "policy", ""), ("dtype", "dtype", ""), ("offered/s", "rate", ",.0f"),
    ("requests/s", "peak_rps", ",.0f"), ("by hand", "hand_rps", ",.0f"), ("over by hand", "over_hand", ".2f"),
    ("paper, V100", "v100_rps", ","), *STEP,
    ("p50, ms", "p50_ms", ".1f"), ("by hand", "hand_p50_ms", ".1f"), ("p90, ms", "p90_ms", ".1f"),
    ("by hand", "hand_p90_ms", ".1f"), ("over by hand", "p90_over_hand", ".2f"), ("paper, V100", "v100_p90_ms", "g"),
    ("best by hand", "hand", ""),
)  # fmt: skip
TITLES: Final = {
    "compile": "Kernels compiled",
    "executor": "The engine beside the CPU",
    "correctness": "Persistent kernels beside float64",
    "table1": "100 steps",
    "flashrnn": "1,024 steps of FlashRNN's size: LSTM 768, batch 16",
    "table3": "GRU: one exchange a step, and two",
    "networks": "Two networks",
    "tuner": "The model's choice beside a wide search",
    "launches": "Copies and launches",
    "lstm": "Engine: LSTM 1024, Europarl's lengths",
    "seq2seq": "Engine: Seq2Seq 1024",
    "treelstm": "Engine: TreeLSTM 1024",
    "deadlines": "Engine: deadlines",
    "in_flight": "Engine: LSTM 1024, two tasks in flight and one",
    "tasks": "Engine: LSTM 1024 in batches of 32, tasks in one launch and step by step",
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
        if section.get("commit", content["commit"]) != content["commit"]:
            parts.append(f"Commit {section['commit']}.")
        if section["state"] != "ran":
            parts.append(f"{section['state'][0].upper()}{section['state'][1:]}.")
        elif section["rows"]:
            parts.append(_table(COLUMNS.get(name, ENGINE), section["rows"]))
    return "\n\n".join(parts)


def _table(columns: tuple[Column, ...], rows: list[Row]) -> str:
    shown = [column for column in (*columns, ("not run", "not_run", "")) if any(column[1] in row for row in rows)]
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
    return "not run" if "not_run" in row and key != "not_run" else "-"


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
