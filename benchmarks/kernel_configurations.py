"""What the cost model chooses for the sizes of GRNN's Table 1, and what the compiler says of it. Needs no GPU.

    python benchmarks/kernel_configurations.py [--json benchmarks/results/kernel-configurations.json]

Predictions are for 100 steps. The first of the best five that does not spill is taken, as `batchmaker tune` does where
there is no GPU. docs/kernels.md has the table for sm_90, that of one exchange or two for the GRU, and the tilings that
GRNN's own model ranks first in its whole space, between its marks.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from batchmaker.cli.bench.report import commit
from batchmaker.kernels.cache import CacheDirectory, default_directory
from batchmaker.kernels.configuration import Problem
from batchmaker.kernels.devices import modelled
from batchmaker.kernels.grnn_cost import grnn_cost, grnn_runnable, grnn_space, grnn_space_size
from batchmaker.kernels.nvrtc import CachedCompiler, KernelCompiler, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.tuner import tune

SIZES = [(hidden, batch) for hidden in (64, 256, 1024) for batch in (1, 10, 20, 64)]
TABLE_3 = {
    (64, 1): (0.181, 0.28), (64, 10): (0.186, 0.285), (64, 20): (0.201, 0.307), (256, 1): (0.275, 0.372),
    (256, 10): (0.323, 0.411), (256, 20): (0.431, 0.498), (1024, 1): (6.46, 0.683), (1024, 10): (64.76, 3.162),
    (1024, 20): (129.52, 6.324),
}  # fmt: skip
"""GRNN's Table 3, ms on a TITAN V: (hidden, batch) to the GRU with one synchronisation, and with two."""
PAGE = Path(__file__).parent.parent / "docs" / "kernels.md"


def row(compiler: KernelCompiler, cell: Any, dtype: Any, hidden: int, batch: int, arch: str) -> dict[str, Any]:
    """Return the chosen configuration of one problem with what was predicted and what the compiler says."""
    problem = Problem(cell=cell, dtype=dtype, hidden=hidden, batch=batch)
    found = tune(problem, modelled(arch), kernel_source(), compiler, arch=arch)
    about = {"cell": cell, "dtype": dtype, "hidden": hidden, "batch": batch, "arch": arch}
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
            cells += [f"{found[0]:.3f}", f"{found[1]:.3f}", f"{found[0] / found[1]:.2f}"]
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    compiler = CachedCompiler(Nvrtc(), CacheDirectory(default_directory()))
    problems = [
        (arch, cell, dtype) for arch in options.arch for cell in ("lstm", "gru") for dtype in ("float32", "bfloat16")
    ]
    rows = [
        row(compiler, cell, dtype, hidden, batch, arch) for arch, cell, dtype in problems for hidden, batch in SIZES
    ]
    canonical = [
        row(compiler, cell, "float32", hidden, batch, arch)
        for arch in ("sm_80", "sm_90") for cell in ("gru-before", "gru-before-once") for hidden, batch in TABLE_3
    ]  # fmt: skip
    tables = {
        "configurations": table([r for r in rows if r["arch"] == "sm_90" and "regime" in r]),
        "exchanges": exchanges(canonical),
        "grnn": grnn_ranking(),
    }
    print(*tables.values(), sep="\n\n")
    if options.json:
        command = f"python benchmarks/kernel_configurations.py --arch {' '.join(options.arch)} --json {options.json}"
        content = {"commit": commit(), "command": command, "compiler": f"NVRTC {compiler.version}",
                   "rows": rows + canonical}  # fmt: skip
        options.json.write_text(json.dumps(content, indent=1) + "\n")
        marked = PAGE.read_text()
        for name, content_of in tables.items():
            marked = re.sub(
                rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)",
                lambda found, text=content_of: f"{found[1]}{text}\n{found[2]}", marked, flags=re.DOTALL,
            )  # fmt: skip
        PAGE.write_text(marked)


if __name__ == "__main__":
    main()
