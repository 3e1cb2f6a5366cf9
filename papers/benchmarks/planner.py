"""The seven cells of ED-Batch's table 2, written gate by gate, before and after planning.

    python papers/benchmarks/planner.py [--hidden 256] [--batch 64 1 8] [--seconds 4] [--png FILE] [--page PAGE]

Calls take turns, in an order drawn anew for each round: the module in eager PyTorch, the cell bound as usual, the cell
planned. Times are medians, ratios are medians of the ratios of each round. Memory is counted at the first batch size.
--page puts the tables into a page, between its markers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, Final

import matplotlib
import torch

from batchmaker.compile.rewrite import fold_constants, lift
from batchmaker.graph.spec import ValueSpec
from batchmaker_papers.gatewise import CELLS, GatewiseModel, inputs_of
from batchmaker_papers.plan_report import CellReport, report_on
from batchmaker_papers.planner.plan import plan_cell
from shared import RESULTS, fill, made_by

PAPER: Final = {  # kernels before, after; kB copied before, after; latency ratio; milliseconds to plan
    "gru": (6, 2, 666.0, 14.0, 1.54, 4.82),
    "lstm": (4, 1, 1054.0, 16.0, 1.52, 12.95),
    "mv": (2, 2, 260.0, 260.0, 0.96, 1.53),
    "treegru_internal": (8, 2, 552.0, 16.0, 1.60, 10.43),
    "treegru_leaf": (4, 2, 268.0, 8.0, 1.40, 2.91),
    "treelstm_internal": (7, 3, 1064.0, 22.0, 1.61, 29.89),
    "treelstm_leaf": (3, 1, 396.0, 6.0, 1.27, 3.64),
}
TIMES: Final = ("eager_us", "bound_us", "planned_us", "over_eager", "over_bound", "products_us")
MEASURES: Final = (
    "papers/benchmarks/planner.py", "papers/src/batchmaker_papers/plan_report.py",
    "papers/src/batchmaker_papers/gatewise.py", "papers/src/batchmaker_papers/planner",
    "src/batchmaker/compile/rewrite.py", "src/batchmaker/compile/linear.py",
    "src/batchmaker/compile/fold.py", "src/batchmaker/compile/binding.py",
)  # fmt: skip
Row = dict[str, Any]


def measured(name: str, hidden: int, dtype: str, batches: list[int], seconds: float) -> Row:
    """Return one cell's numbers at every batch size."""
    model = GatewiseModel(name, hidden, dtype)
    cell = model.cells[name]
    widths = [(hidden, hidden) if value.startswith("m") else (hidden,) for value in inputs_of(cell.module)]
    inputs = tuple(ValueSpec(shape, dtype) for shape in widths)
    reports = [report_on(cell, inputs, name, batch, seconds) for batch in batches]
    row: Row = {"cell": name, **memory(reports[0]), "plan_ms": plan_ms(cell.exported(inputs))}
    row["times"] = [
        {"batch": batch, "note": report.note, **{key: getattr(report, key) for key in TIMES}}
        for batch, report in zip(batches, reports, strict=True)
    ]  # fmt: skip
    return row


def memory(report: CellReport) -> Row:
    return {
        "operations": report.num_operations,
        "batches": len(report.batches),
        "kernels": (report.before.kernels, report.after.kernels),
        "copied_bytes": (report.before.copied_bytes, report.after.copied_bytes),
    }


def plan_ms(program: torch.export.ExportedProgram) -> float:
    """Return the time to choose batches and a layout and to write all candidates, without measuring them."""
    graph = lift(program)
    fold_constants(graph)
    begin_s = time.perf_counter()
    plan_cell(graph, choose=lambda ways: 1)
    return 1e3 * (time.perf_counter() - begin_s)


def mean_ratio(rows: list[Row], which: int, key: str = "over_eager") -> float:
    """Return the geometric mean over the cells of how much faster the planned cell is."""
    ratios = [row["times"][which][key] for row in rows]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def memory_table(rows: list[Row]) -> str:
    lines = [
        "| cell | operations | batches | memory kernels | paper | kB copied | paper | to plan, ms | paper |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        paper = PAPER[row["cell"]]
        kilobytes = " → ".join(f"{value / 1e3:,.0f}" for value in row["copied_bytes"])
        kernels = " → ".join(map(str, row["kernels"]))
        lines.append(
            f"| {row['cell']} | {row['operations']} | {row['batches']} | {kernels} | {paper[0]} → {paper[1]} "
            f"| {kilobytes} | {paper[2]:g} → {paper[3]:g} | {row['plan_ms']:.0f} | {paper[5]:g} |"
        )
    return "\n".join(lines)


def time_table(rows: list[Row], which: int) -> str:
    lines = [
        "| cell | eager, µs | bound, µs | planned, µs | its products, µs | over eager | over bound | the paper's |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        eager, bound, planned, over_eager, over_bound, products = (row["times"][which][key] for key in TIMES)
        lines.append(
            f"| {row['cell']} | {eager:,.0f} | {bound:,.0f} | {planned:,.0f} | {products:,.0f} | {over_eager:.2f}x "
            f"| {over_bound:.2f}x | {PAPER[row['cell']][4]:.2f}x |"
        )
    paper = math.exp(sum(math.log(values[4]) for values in PAPER.values()) / len(PAPER))
    over_bound = mean_ratio(rows, which, "over_bound")
    lines.append(f"| geometric mean | | | | | **{mean_ratio(rows, which):.2f}x** | {over_bound:.2f}x | {paper:.2f}x |")
    return "\n".join(lines)


def draw(path: Path, rows: list[Row], title: str) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [times["batch"] for times in rows[0]["times"]]
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), sharey=True, squeeze=False)
    for which, (ax, size) in enumerate(zip(axes[0], sizes, strict=True)):
        for offset, key, label in ((-0.2, "over_eager", "over eager"), (0.2, "over_bound", "over bound")):
            ratios = [row["times"][which][key] for row in rows]
            ax.barh([i + offset for i in range(len(rows))], ratios, height=0.38, label=label)
        ax.axvline(1.0, color="#5b626e", linewidth=1)
        ax.set_yticks(range(len(rows)), [row["cell"] for row in rows])
        ax.set_title(f"batch {size}: {mean_ratio(rows, which):.2f}x over eager")
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="upper right", ncols=2)
    figure.suptitle(f"Planned cells: {title}", x=0.012, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def put(page: Path, content: dict[str, Any]) -> None:
    """Replace what stands between the page's markers."""
    rows = content["rows"]
    made = f"{content['machine']['cpu']}, commit {content['commit']}"
    about = f"hidden {content['hidden']}, {content['dtype']}, one thread, {made}"
    parts = [f"At batch {content['batch'][0]}, {about}:", memory_table(rows)]
    for which, size in enumerate(content["batch"]):
        parts += [f"Time of one call at batch {size}:", time_table(rows, which)]
    fill(page, {"tables": "\n\n".join(parts)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 1, 8])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each cell and batch size")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the seconds")
    parser.add_argument("--json", type=Path, default=RESULTS / "planner.json")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    options.seconds /= 20 if options.quick else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name in CELLS:
        rows.append(measured(name, options.hidden, options.dtype, options.batch, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    about = made_by(MEASURES, "python papers/benchmarks/planner.py")
    content = {
        **about, "quick": options.quick,
        "hidden": options.hidden, "dtype": options.dtype, "batch": options.batch, "seconds": options.seconds, "seed": 0,
        "mean_over_eager": [mean_ratio(rows, which) for which in range(len(options.batch))], "rows": rows,
    }  # fmt: skip
    print(memory_table(rows))
    for which, size in enumerate(options.batch):
        print(f"\nbatch {size}\n{time_table(rows, which)}")
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.png:
        where = f"{about['machine']['cpu']}, commit {about['commit']}"
        draw(options.png, rows, f"hidden {options.hidden}, {options.dtype}, {where}")
    if options.page:
        put(options.page, json.loads(json.dumps(content)))


if __name__ == "__main__":
    main()
