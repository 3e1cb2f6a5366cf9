"""Batches over the lower bound (ED-Batch's Figure 9), over ten draws of the mini-batches that are counted.

    python papers/benchmarks/ed_batch_seeds.py DATA [--seeds 10] [--quick] [--jobs 2] [--json FILE] [--page PAGE]
    python papers/benchmarks/ed_batch_seeds.py --page papers/docs/ed-batch.md          # the table from an earlier run

For each seed the requests of a file are shuffled: five mini-batches are counted, and E_sort is learnt from the others.
The kinds of the inner nodes of `treelstm-2type` are drawn anew too. `latticegru` has the graphs of `latticelstm`, and
`treegru` and `mvrnn` those of `treelstm`: they are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import track

from batchmaker.graph.mini_batch import merged
from batchmaker_papers.commands.learn.graphs import COUNTED, read_graphs
from batchmaker_papers.learners.comparison import compare
from batchmaker_papers.learners.learning import Samples, learn
from batchmaker_papers.learners.qlearning import Settings
from ed_batch import FILES
from shared import RESULTS, Result, command_now, fill, made_by, table

WORKLOADS: Final = (
    "bilstm-tagger", "bilstm-tagger-char", "lstm-nmt", "treelstm", "treelstm-2type", "latticelstm",
)  # fmt: skip
BATCHES: Final = (8, 64)
POLICIES: Final = ("depth", "agenda", "agenda-remaining", "heuristic-forward", "e_sort")
MEASURES: Final = (
    "papers/benchmarks/ed_batch_seeds.py", "papers/src/batchmaker_papers/commands/learn/graphs.py",
    "src/batchmaker/cli/requests.py",
    "src/batchmaker/graph", "papers/src/batchmaker_papers/learners", "src/batchmaker/policies/agenda.py",
    "src/batchmaker/policies/depth.py", "src/batchmaker/policies/sufficient.py", "src/batchmaker/policies/learned",
)  # fmt: skip
SECTION: Final = "seeds"


def counted(name: str, data: Path, batch: int, seed: int) -> Result:
    """Shuffle, learn and count once; mean batches of each order over five mini-batches, and their lower bound."""
    requests = read_graphs(name, data, 8, seed=seed).to_learn
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    first, rest = order[: COUNTED * batch], order[COUNTED * batch :]
    batches = [merged([requests[i] for i in first[at : at + batch]]) for at in range(0, len(first), batch)]
    found = learn(Samples(tuple(requests[i] for i in rest), batch, seed), Settings(encoding="sort", seed=seed))
    standings = {one.policy: one for one in compare(tuple(batches), {"sort": found.table})}
    means = {policy: standings[policy].mean_batches for policy in POLICIES}
    bound = standings["e_sort"].lower_bound
    return {"workload": name, "batch": batch, "seed": seed, "bound": bound, **means, "learning_s": found.seconds}


def all_counted(data: Path, seeds: Sequence[int], names: Sequence[str], processes: int) -> list[Result]:
    """Count for every workload, batch size and seed."""
    jobs = [(name, data / FILES[name], batch, seed) for name in names for batch in BATCHES for seed in seeds]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        futures = {pool.submit(counted, *job): number for number, job in enumerate(jobs)}
        rows: list[Result] = [{}] * len(jobs)
        for future in track(as_completed(futures), "counting", len(jobs), console=Console(stderr=True)):
            rows[futures[future]] = future.result()
    return rows


def seeds_table(rows: Sequence[Result]) -> str:
    """Return batches over the bound of each order: mean over seeds, least and most."""
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        for batch in BATCHES:
            mine = [row for row in rows if (row["workload"], row["batch"]) == (name, batch)]
            cells = []
            for policy in POLICIES:
                ratios = [row[policy] / row["bound"] for row in mine]
                cells.append(f"{fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            lines.append([name, str(batch), f"{fmean(row['bound'] for row in mine):.1f}", *cells])
    return table(("workload", "batch", "lower bound", *POLICIES), lines)


def page_text(found: Result) -> str:
    quick = " Of a quick run." if found["quick"] else ""
    num = len({row["seed"] for row in found["rows"]})
    return f"{seeds_table(found['rows'])}\n\n{num} seeds, commit {found['commit']}: `{command_now(found)}`.{quick}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two seeds, without lattices")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "ed-batch-seeds.json")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.data is not None:
        seeds, names = (2, WORKLOADS[:-1]) if options.quick else (options.seeds, WORKLOADS)
        quick = " --quick" if options.quick else f" --seeds {seeds}"
        about = made_by(MEASURES, f"python papers/benchmarks/ed_batch_seeds.py DATA{quick} --jobs {options.jobs}")
        rows = all_counted(options.data, range(seeds), names, options.jobs)
        options.json.write_text(json.dumps({**about, "quick": options.quick, "rows": rows}, indent=1) + "\n", "utf-8")
    if options.page is not None:
        fill(options.page, {SECTION: page_text(json.loads(options.json.read_text("utf-8")))})


if __name__ == "__main__":
    main()
