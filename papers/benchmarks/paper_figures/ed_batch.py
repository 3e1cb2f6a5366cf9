"""ED-Batch (ICML 2023)."""

from __future__ import annotations

from typing import Any, Final

from paper_figures.entry import Figure, first, result
from shared import number

TITLE: Final = "ED-Batch: automatic batching of dynamic networks via learned finite state machines (ICML 2023)"
TREES: Final = ("treelstm", "treegru", "mvrnn", "treelstm-2type")


def _count(workload: str, policy: str, batch: int = 64) -> float:
    found = first(result("ed-batch.json")["results"], workload=workload, batch=batch)
    return float(first(found["policies"], policy=policy)["mean_batches"])


def _over_bound() -> str:
    """Say how far E_sort is above the bound, over seeds where that was counted."""
    found = result("ed-batch-seeds.json")
    said = []
    for name in ("treelstm", "treelstm-2type", "latticelstm"):
        ratios = [
            row["e_sort"] / row["bound"] - 1 for row in found["rows"] if row["workload"] == name and row["batch"] == 64
        ]
        mean = sum(ratios) / len(ratios)
        said.append(f"{name} {mean:.0%} ({min(ratios):.0%} to {max(ratios):.0%})")
    return "over the bound, batches of 64, " + f"{len({r['seed'] for r in found['rows']})} seeds: " + ", ".join(said)


def _fewer() -> str:
    trees = 1 - _count("treelstm", "e_sort") / _count("treelstm", "agenda")
    least = min(_count("latticelstm", "agenda"), _count("latticelstm", "depth")) / _count("latticelstm", "e_sort")
    agenda = _count("latticelstm", "agenda") / _count("latticelstm", "e_sort")
    return f"trees {trees:.0%} fewer than agenda; lattices {agenda:.2f} times fewer than agenda, {least:.2f} than depth"


def _throughput() -> str:
    rows = [row for row in result("ed-batch-sizes.json")["sizes"] if row["hidden"] == 256]
    said = [f"{row['workload']} {row['learned'] / row['best']:.2f}" for row in rows]
    return "orders alone, planned cells on both sides: " + ", ".join(said)


def _shares() -> str:
    shares: dict[str, Any] = first(result("ed-batch-sizes.json")["sizes"], workload="treelstm", hidden=256)["shares"]
    return (
        f"TreeLSTM 256: cells {shares['busy_s']:.0%}, scheduling {shares['scheduler_s']:.0%}, "
        f"unfolding {shares['unfold_s']:.0%}"
    )


def _subgraphs() -> str:
    rows = result("planner.json")["rows"]
    return "; ".join(
        f"{row['cell']} {first(row['times'], batch=64)['over_eager']:.2f} times, kernels {row['kernels'][0]} to "
        f"{row['kernels'][1]}"
        for row in rows
    )


def _learning() -> str:
    found = [row for row in result("ed-batch.json")["results"] if row["batch"] == 64]
    return ", ".join(f"{row['workload']} {row['learning']['e_sort']['seconds']:.2f} s" for row in found)


def _planning() -> str:
    return ", ".join(f"{row['cell']} {number(row['plan_ms'])} ms" for row in result("planner.json")["rows"])


def _cortex() -> str:
    found = result("ed-batch-sizes.json")
    said = [f"{row['workload']} {row['hidden']}, batch {row['batch']}: {row['ms']:.3g} ms" for row in found["cortex"]]
    return "; ".join(said)


def _sizes() -> str:
    found = result("ed-batch-sizes.json")["sizes"]
    said = []
    for hidden in sorted({row["hidden"] for row in found}):
        ratios = sorted(row["learned"] / row["best"] for row in found if row["hidden"] == hidden)
        said.append(f"hidden {hidden}: {ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return "learnt over the better of agenda and depth, over workloads: " + ", ".join(said)


FIGURES: Final = (
    Figure(
        "Figures 1 to 5, 7, 10",
        "examples, the state machine, the PQ-tree, a lattice",
        "reproduced",
        "orders and layouts",
        "the same orders and layouts",
        where="`papers/tests/learners/test_closed_mini_batch.py`, [batches inside a cell](cell-planning.md)",
    ),
    Figure(
        "Table 1",
        "the workloads",
        "reproduced",
        "eight",
        "nine: the tagger with characters too",
        where="[batches](ed-batch.md)",
    ),
    Figure(
        "Figure 6",
        "throughput over DyNet and Cavs, hidden 32 to 512",
        "in part",
        "chains 1.11 to 1.20, trees 1.46 to 1.63, lattices 1.32 to 2.97 (CPU, over Cavs DyNet)",
        _throughput,
        "ed-batch-sizes",
        "Hidden 256, mini-batches of 64. The baseline is the better of DyNet's orders in this engine, with planned "
        "cells, as *Cavs DyNet* is in theirs. DyNet itself: [throughput](ed-batch-throughput.md).",
        picture="ed-batch-sizes.png",
    ),
    Figure(
        "Figure 6, by size",
        "hidden 64 to 1,024",
        "in part",
        "as above",
        _sizes,
        "ed-batch-sizes",
        "Mini-batches of 64; MV-RNN up to 128. DyNet itself is on the page: faster than the engine on seven of nine "
        "workloads at 64, where our Python counts most, and slower on all at 1,024.",
    ),
    Figure(
        "Figure 8",
        "where time goes",
        "in part",
        "construction and scheduling alike, execution cut",
        _shares,
        "ed-batch-sizes",
        "Shares of the engine's own time with the learnt order; the table of all workloads is on the page.",
    ),
    Figure(
        "Figure 9",
        "batches over the lower bound",
        "reproduced",
        "0 % chains and trees, 23 % 2Type, 44 % lattices",
        _over_bound,
        "ed-batch-seeds",
        "Mean over draws of the mini-batches and of the types of nodes; least to most in brackets.",
    ),
    Figure(
        "Figure 9, fewer batches",
        "against agenda and depth",
        "in part",
        "37 % fewer on trees; 3.27 times fewer on lattices",
        _fewer,
        "ed-batch",
        "The lattices are another part of the same files.",
    ),
    Figure(
        "Table 2",
        "latency, kernels and bytes of subgraphs",
        "in part",
        "LSTM 1.52, GRU 1.54, TreeLSTM-Internal 1.61 times",
        _subgraphs,
        "planner",
        "Over the cell called as it is, batch 64, on a CPU, where what runs between the products is as dear as they "
        "are; the ratio is 1.25 in the mean on a processor without AVX-512 whose host has other guests, and was 2.11 "
        "on a quiet one with it (commit b2bfb983dce0).",
        picture="planner.png",
    ),
    Figure(
        "Table 3",
        "milliseconds of planning a subgraph",
        "in part",
        "1.5 to 29.9 ms",
        _planning,
        "planner",
        "In Python, and with a search for what may be batched.",
    ),
    Figure(
        "Table 4",
        "seconds of learning",
        "reproduced",
        "TreeLSTM 0.154, 2Type 2.2, LatticeLSTM 21.7 s",
        _learning,
        "ed-batch",
        "Batches of 64, graphs already made.",
    ),
    Figure(
        "Table 5",
        "beside Cortex",
        "in part",
        "TreeLSTM 256: 2.78 ms (batch 10), 3.52 (20); 512: 4.70, 4.82",
        _cortex,
        "ed-batch-sizes",
        "Cortex is not there to be run; the paper's are of a GPU.",
    ),
)
