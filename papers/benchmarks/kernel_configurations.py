"""What the cost model chooses for the sizes of GRNN's Table 1, and what the compiler says of it. Needs no GPU.

    python papers/benchmarks/kernel_configurations.py [--arch sm_90 sm_80] [--json FILE] [--page papers/docs/kernels.md]

Predictions are for 100 steps. The first of the best five that does not spill is taken, as `batchmaker tune` does where
there is no GPU. The page gets, between its marks: the five that the model ranks first and the configuration chosen, for
sm_90; one exchange or two for the GRU; and the tilings that GRNN's own model ranks first in its whole space. What was
compiled is kept in batchmaker's cache, so a second run takes a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.configuration import Problem
from batchmaker.kernels.devices import modelled
from batchmaker.kernels.nvrtc import CachedCompiler, KernelCompiler, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.tuner import Trial, tune
from batchmaker_papers.grnn_cost import grnn_cost, grnn_runnable, grnn_space, grnn_space_size
from shared import RESULTS, fill, made_by
from shared import table as markdown

SIZES = [(hidden, batch) for hidden in (64, 256, 1024) for batch in (1, 10, 20, 64)]
TABLE_3 = {
    (64, 1): (0.181, 0.28), (64, 10): (0.186, 0.285), (64, 20): (0.201, 0.307), (256, 1): (0.275, 0.372),
    (256, 10): (0.323, 0.411), (256, 20): (0.431, 0.498), (1024, 1): (6.46, 0.683), (1024, 10): (64.76, 3.162),
    (1024, 20): (129.52, 6.324),
}  # fmt: skip
"""GRNN's Table 3, ms on a TITAN V: (hidden, batch) to the GRU with one synchronisation, and with two."""
MEASURES: Final = (
    "papers/benchmarks/kernel_configurations.py", "src/batchmaker/kernels/device.cuh",
    "src/batchmaker/kernels/recurrent.cu", "src/batchmaker/kernels/sums.cuh",
    "papers/src/batchmaker_papers/grnn_cost.py",
    *(f"src/batchmaker/kernels/{name}.py" for name in (
        "configuration", "cost", "devices", "nvrtc", "source", "template", "tiling", "tuner"
    )),
)  # fmt: skip


def row(compiler: KernelCompiler, cell: Any, dtype: Any, hidden: int, batch: int, arch: str) -> dict[str, Any]:
    """Return the chosen configuration of one problem with what was predicted and what the compiler says."""
    problem = Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch)
    found = tune(problem, modelled(arch), kernel_source(), compiler, arch=arch)
    about = {"cell": cell, "dtype": dtype, "hidden": hidden, "batch": batch, "arch": arch}
    about["ranking"] = [placed(trial) for trial in found.trials]
    chosen = found.chosen
    if chosen is None:
        return {**about, "num_candidates": found.num_candidates}
    config = chosen.config
    return {
        **about, "num_candidates": found.num_candidates, "rank": chosen.rank, "regime": config.regime,
        "tile_width": config.tile_width, "tile_height": config.tile_height, "groups": config.groups,
        "group_size": config.group_size, "row_step": config.row_step, "shared_steps": config.shared_steps,
        "steps": config.steps, "blocks_per_tile": config.blocks_per_tile, "shared_bytes": config.shared_bytes,
        "registers": chosen.registers, "spill_bytes": chosen.spill_bytes, "predicted_ms": 1e3 * chosen.cost.seconds,
    }  # fmt: skip


def placed(trial: Trial) -> dict[str, Any]:
    """Return what the model says of a configuration, and the compiler."""
    config = trial.config
    groups = f"{config.groups} x {config.group_size}"
    return {
        "regime": config.regime, "tile": f"{config.tile_width} x {config.tile_height}", "groups": groups,
        "blocks": config.blocks_per_tile, "predicted_ms": 1e3 * trial.cost.seconds, "spill_bytes": trial.spill_bytes,
    }  # fmt: skip


def ranking(rows: list[dict[str, Any]]) -> str:
    """Return the five that the model ranks first for the sizes of Table 1 in float32, as Markdown."""
    lines = []
    for r in rows:
        if (r["hidden"], r["batch"]) in TABLE_3 and r["dtype"] == "float32":
            five = [
                f"{one['regime']}, {one['tile']}, {one['groups']}: {one['predicted_ms']:.3f}"
                + (" (spills)" if one["spill_bytes"] else "")
                for one in r["ranking"]
            ]
            lines.append([f"{r['cell']} {r['hidden']}/{r['batch']}", *five])
    return markdown(("layer", "first", "second", "third", "fourth", "fifth"), lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as Markdown."""
    columns = ("cell", "dtype", "hidden", "batch", "fit", "regime", "tile", "groups", "at once", "in shared memory")
    columns += ("blocks", "registers", "spilled bytes", "predicted ms")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * 2 + "---:|" * 3 + "---|" + "---:|" * 8]
    for r in rows:
        cells = [r["cell"], r["dtype"], r["hidden"], r["batch"], f"{r['num_candidates']:,}"]
        cells += [r["regime"], f"{r['tile_width']} x {r['tile_height']}", f"{r['groups']} x {r['group_size']}"]
        cells += [r["row_step"], f"{r['shared_steps']}/{r['steps']}", r["blocks_per_tile"], r["registers"]]
        cells += [r["spill_bytes"], f"{r['predicted_ms']:.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def exchanges(rows: list[dict[str, Any]]) -> str:
    """Return the canonical GRU with two exchanges and with one, beside GRNN's measurements, as Markdown."""
    lines = ["| hidden | batch | GRNN: two / one | sm_80, two: ms | one: ms | two / one | sm_90, two: ms | one: ms |"
             " two / one |", "|" + "---:|" * 9]  # fmt: skip
    for (hidden, batch), (one, two) in TABLE_3.items():
        cells = [str(hidden), str(batch), f"{two / one:.2f}"]
        for arch in ("sm_80", "sm_90"):
            found = [
                r["predicted_ms"]
                for cell in ("gru-before", "gru-before-once")
                for r in rows
                if (r["arch"], r["cell"], r["hidden"], r["batch"]) == (arch, cell, hidden, batch)
            ]
            shown = (f"{found[0]:.3f}", f"{found[1]:.3f}", f"{found[0] / found[1]:.2f}") if found else ("-",) * 3
            cells += shown
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grnn_ranking() -> str:
    """Return the size of GRNN's space, what of it can run, and the tiling that its model ranks first, as Markdown."""
    lines = ["| cell | hidden | batch | space | can run | fit as in Table 2 | first: tile | groups | syncs | cost |",
             "|---" + "|---:" * 5 + "|---|---" + "|---:" * 2 + "|"]  # fmt: skip
    for cell in ("lstm", "gru"):
        for hidden, batch in TABLE_3:
            found = list(grnn_runnable(cell, hidden, batch))
            best = min(found, key=lambda tiling: grnn_cost(tiling).total)
            cells = [cell, hidden, batch, f"{grnn_space_size(cell, hidden, batch):,}", f"{len(found):,}"]
            cells += [f"{sum(1 for _ in grnn_space(cell, hidden, batch)):,}", f"{best.tile_width} x {best.tile_height}"]
            cells += [f"{best.groups} x {best.group_size}", best.syncs, f"{grnn_cost(best).total:.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90", "sm_80"])
    parser.add_argument("--quick", action="store_true", help="hidden 64 and batches of 1 and 10 alone")
    parser.add_argument("--json", type=Path, default=RESULTS / "kernel-configurations.json")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    compiler = CachedCompiler(Nvrtc(), CacheDirectory(default_directory()))
    problems = [
        (arch, cell, dtype) for arch in options.arch for cell in ("lstm", "gru") for dtype in ("float32", "bfloat16")
    ]

    def some(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(hidden, batch) for hidden, batch in sizes if not options.quick or (hidden == 64 and batch <= 10)]

    rows = [
        row(compiler, cell, dtype, hidden, batch, arch)
        for arch, cell, dtype in problems
        for hidden, batch in some(SIZES)
    ]
    canonical = [
        row(compiler, cell, "float32", hidden, batch, arch)
        for arch in ("sm_80", "sm_90") for cell in ("gru-before", "gru-before-once")
        for hidden, batch in some(TABLE_3)
    ]  # fmt: skip
    of_sm_90 = [r for r in rows if r["arch"] == "sm_90"]
    tables = {
        "ranking": ranking(of_sm_90),
        "configurations": table([r for r in of_sm_90 if "regime" in r]),
        "exchanges": exchanges(canonical),
        "grnn": grnn_ranking(),
    }
    print(*tables.values(), sep="\n\n")
    about = made_by(MEASURES, f"python papers/benchmarks/kernel_configurations.py --arch {' '.join(options.arch)}")
    content = {**about, "compiler": f"NVRTC {compiler.version}", "quick": options.quick, "rows": rows + canonical}
    options.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    if options.page:
        fill(options.page, tables)


if __name__ == "__main__":
    main()
