"""What the cost model chooses for the sizes of GRNN's Table 1, and what the compiler says of it. Needs no GPU.

    python benchmarks/kernel_configurations.py [--json benchmarks/results/kernel-configurations.json]

Predictions are for 100 steps. The first of the best five that does not spill is taken, as `batchmaker tune` does where
there is no GPU. docs/kernels.md has the table for sm_90, between its marks.
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
from batchmaker.kernels.nvrtc import CachedCompiler, KernelCompiler, Nvrtc
from batchmaker.kernels.source import kernel_source
from batchmaker.kernels.tuner import tune

SIZES = [(hidden, batch) for hidden in (64, 256, 1024) for batch in (1, 10, 20, 64)]
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
    hopper = table([r for r in rows if r["arch"] == "sm_90" and "regime" in r])
    print(hopper)
    if options.json:
        command = f"python benchmarks/kernel_configurations.py --arch {' '.join(options.arch)} --json {options.json}"
        content = {"commit": commit(), "command": command, "compiler": f"NVRTC {compiler.version}", "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
        marked = re.sub(
            r"(<!-- configurations -->\n).*?(<!-- end configurations -->)",
            lambda found: f"{found[1]}{hopper}\n{found[2]}", PAGE.read_text(), flags=re.DOTALL,
        )  # fmt: skip
        PAGE.write_text(marked)


if __name__ == "__main__":
    main()
