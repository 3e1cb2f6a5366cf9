"""Batches of ED-Batch's workloads beside the lower bound, for papers/docs/ed-batch.md.

    python papers/benchmarks/ed_batch.py DATA [--batch 8 64] [--workload NAME ...] [--seed 0] [--quick] [--json FILE]
    python papers/benchmarks/ed_batch.py --page papers/docs/ed-batch.md [--json FILE] [--png FILE]

DATA: the folder that holds sst, wikiner_en, iwslt15_envi and lattice_edbatch. For each workload and batch size, a table
for each encoding is learnt from requests other than the first five mini-batches, and all orders are counted on those.
--page puts the tables into the page, between its markers, and draws what stands in it; without DATA from the results
that are in the JSON file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from batchmaker.lab.plots.sweeps import Line, Panel, draw_panels
from batchmaker.policies.learned.encodings import ENCODINGS
from batchmaker_papers.commands.learn.graphs import read_graphs
from batchmaker_papers.learners.comparison import compare
from batchmaker_papers.learners.learning import Learnt, Samples, learn
from batchmaker_papers.learners.qlearning import Settings
from shared import IMAGES, RESULTS, Result, fill, made_by

FILES: Final = {
    "bilstm-tagger": "wikiner_en/dev.txt",
    "bilstm-tagger-char": "wikiner_en/dev.txt",
    "lstm-nmt": "iwslt15_envi/tst2012.en",
    "treelstm": "sst/train.txt",
    "treegru": "sst/train.txt",
    "mvrnn": "sst/train.txt",
    "treelstm-2type": "sst/train.txt",
    "latticelstm": "lattice_edbatch/train.txt",
    "latticegru": "lattice_edbatch/train.txt",
}
PAPER_S: Final = {
    "treelstm": 0.154, "treegru": 0.141, "mvrnn": 0.254, "treelstm-2type": 2.217, "bilstm-tagger": 1.629,
    "bilstm-tagger-char": 6.268, "latticelstm": 21.733, "latticegru": 4.911,
}  # fmt: skip
"""Seconds to learn, of the paper's table 4."""
STEPS_TO_OURS: Final = {
    "as the paper has it": Settings(rate=0.4, every=50, learners=1, roll_outs=0),
    "means instead of a rate": Settings(every=50, learners=1, roll_outs=0),
    "more roll-outs, two learners": Settings(roll_outs=0),
    "refined": Settings(),
}
"""E_sort with one improvement after the other."""
IN_STEPS: Final = ("treelstm-2type", "latticelstm")
"""Workloads that they are shown on."""
POLICIES: Final = (
    "depth", "agenda", "agenda-remaining", "heuristic-forward", "heuristic-backward", "e_base", "e_max", "e_sort",
)  # fmt: skip
MEASURES: Final = (
    "papers/benchmarks/ed_batch.py", "papers/src/batchmaker_papers/commands/learn/graphs.py", "src/batchmaker/graph",
    "papers/src/batchmaker_papers/learners", "src/batchmaker/policies/agenda.py", "src/batchmaker/policies/depth.py",
    "src/batchmaker/policies/sufficient.py", "src/batchmaker/policies/learned",
)  # fmt: skip


def measured(name: str, data: Path, batch: int, seed: int) -> Result:
    """Learn for one workload and batch size, and count."""
    graphs = read_graphs(name, data, batch, seed=seed)
    samples = Samples(graphs.to_learn, batch, seed)
    learnt = {encoding: learn(samples, Settings(encoding=encoding, seed=seed)) for encoding in ENCODINGS}
    standings = compare(graphs.counted, {encoding: found.table for encoding, found in learnt.items()})
    return {
        "workload": name,
        "batch": batch,
        "counted": graphs.counted_from,
        "learnt_from": graphs.learnt_from,
        "policies": [asdict(standing) for standing in standings],
        "learning": {f"e_{encoding}": of_learning(found) for encoding, found in learnt.items()},
    }


def in_steps(name: str, data: Path, batch: int, seed: int) -> Result:
    """Learn E_sort with one improvement after the other; mean batches on the mini-batches counted, and seconds."""
    graphs = read_graphs(name, data, batch, seed=seed)
    samples = Samples(graphs.to_learn, batch, seed)
    rows = []
    for label, settings in STEPS_TO_OURS.items():
        found = learn(samples, replace(settings, seed=seed))
        standing = compare(graphs.counted, {"sort": found.table})[-1]
        ratio = standing.mean_batches / standing.lower_bound
        rows.append({"label": label, "ratio": ratio, "states": len(found.table), "seconds": found.seconds})
        print(name, batch, rows[-1], flush=True)
    return {"workload": name, "batch": batch, "rows": rows}


def of_learning(found: Learnt) -> Result:
    """Return how a table was found: seconds, episodes played, states, and the curve of roll-outs."""
    settings = found.settings
    episodes = {out.learner: out.episode for out in found.curve if out.learner < settings.learners}
    return {
        "seconds": found.seconds,
        "episodes": sum(episodes.values()),
        "states": len(found.table),
        "held_out_ratio": found.ratio,
        "curve": [
            [settings.episodes * out.learner + out.episode, out.ratio]
            for out in found.curve
            if out.learner < settings.learners
        ],
    }


def batches_table(results: list[Result], batch: int) -> str:
    """Return mean batches of every order, a workload to a row."""
    head = ("workload", "lower bound", *POLICIES, "e_sort over it")
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for result in results:
        if result["batch"] == batch:
            count = {row["policy"]: row["mean_batches"] for row in result["policies"]}
            bound = result["policies"][0]["lower_bound"]
            numbers = [f"{count[name]:.1f}" for name in POLICIES]
            lines.append((result["workload"], f"{bound:.1f}", *numbers, f"{count['e_sort'] / bound - 1:.1%}"))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def steps_table(steps: list[Result]) -> str:
    """Return batches / lower bound and states after each improvement, a workload and batch size to a row."""
    lines = [["E_sort", "batch", *STEPS_TO_OURS], ["---", "---:", *["---:"] * len(STEPS_TO_OURS)]]
    for step in steps:
        found = [f"{row['ratio']:.3f} ({row['states']})" for row in step["rows"]]
        lines.append([step["workload"], str(step["batch"]), *found])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def learning_table(results: list[Result]) -> str:
    """Return seconds, episodes and states of E_sort by batch size, and the paper's seconds."""
    sizes = sorted({result["batch"] for result in results})
    head = ["workload", *(f"{what}, batch {size}" for size in sizes for what in ("s", "episodes", "states"))]
    lines = [[*head, "paper, s"], ["---", *["---:"] * len(head)]]
    for name in dict.fromkeys(result["workload"] for result in results):
        row = [name]
        for result in (r for r in results if r["workload"] == name):
            found = result["learning"]["e_sort"]
            row += [f"{found['seconds']:.2f}", str(found["episodes"]), str(found["states"])]
        lines.append([*row, f"{PAPER_S[name]:.2f}" if name in PAPER_S else "-"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def decision_table(results: list[Result]) -> str:
    """Return microseconds of one decision, a workload to a row, at the largest batch size."""
    largest = max(result["batch"] for result in results)
    lines = [("workload", *POLICIES), ["---", *["---:"] * len(POLICIES)]]
    for result in (r for r in results if r["batch"] == largest):
        each_us = {row["policy"]: row["decision_us"] for row in result["policies"]}
        lines.append((result["workload"], *(f"{each_us[name]:.1f}" for name in POLICIES)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(path: Path, results: list[Result]) -> None:
    """Draw what roll-outs came to while E_sort was learnt, for the workloads that needed more than one look."""
    panels = []
    for batch in sorted({result["batch"] for result in results}):
        lines = []
        for result in results:
            curve = result["learning"]["e_sort"]["curve"]
            if result["batch"] == batch and len(curve) > 1 and result["workload"] != "latticegru":
                at, ratio = [x for x, _ in curve], [y for _, y in curve]
                lowest = [min(ratio[: i + 1]) for i in range(len(ratio))]
                lines.append(Line(result["workload"], at, lowest, lowest, ratio))
        panels.append(Panel(f"Batch {batch}: the best table so far", "episodes", "batches / lower bound", lines))
    draw_panels(
        path,
        panels,
        "Learning E_sort",
        "the band reaches up to the roll-out itself; latticegru is as latticelstm, all others meet the bound",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--workload", nargs="+", default=list(FILES), choices=FILES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="trees and mini-batches of 8 alone")
    parser.add_argument("--json", type=Path, default=RESULTS / "ed-batch.json")
    parser.add_argument("--png", type=Path, default=IMAGES / "ed-batch-learning.png")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.workload = [8], ["treelstm", "treegru"]
    if options.data is not None:
        found = measured_all(options.data, options.workload, options.batch, options.seed)
        options.json.write_text(json.dumps({**found, "quick": options.quick}, indent=1) + "\n", "utf-8")
    if options.page is not None:
        show(json.loads(options.json.read_text("utf-8")), options.page, options.png)


def measured_all(data: Path, workloads: list[str], batches: list[int], seed: int) -> Result:
    """Learn and count for every workload and batch size; a line for each as it is done."""
    results = []
    for name in workloads:
        for batch in batches:
            results.append(measured(name, data / FILES[name], batch, seed))
            means = {row["policy"]: row["mean_batches"] for row in results[-1]["policies"]}
            print(name, batch, results[-1]["policies"][0]["lower_bound"], means, flush=True)
    shown = [name for name in IN_STEPS if name in workloads]
    steps = [in_steps(name, data / FILES[name], batch, seed) for name in shown for batch in batches]
    about = made_by(MEASURES, "python papers/benchmarks/ed_batch.py DATA")
    return {**about, "seed": seed, "results": results, "steps": steps}


def show(found: Result, page: Path, png: Path) -> None:
    """Put all tables into the page, and draw its picture."""
    results, about = found["results"], found["machine"]
    sections = {f"batches-{size}": batches_table(results, size) for size in {row["batch"] for row in results}}
    sections |= {"learning": learning_table(results), "decisions": decision_table(results)}
    sections["steps"] = steps_table(found["steps"])
    sections["machine"] = f"{about['cpu']}, {about['cores']} cores, commit {found['commit']}, seed {found['seed']}."
    fill(page, sections)
    draw(png, results)


if __name__ == "__main__":
    main()
